"""Messages survive the way to a worker and back."""

from __future__ import annotations

import socket

import numpy as np
import pytest

from turnout.backends.base import Action, Evidence, EvidenceLevel, Kind, Remedy, failed, unmet
from turnout.backends.resolve import Assessment
from turnout.tasks.contract import CONTRACTS, EmbeddingsOutput, TensorsOutput
from turnout.types import Request, Sampling
from turnout.worker import wire


def there_and_back(value):  # type: ignore[no-untyped-def]
    return wire.decode(wire.encode(value))


@pytest.mark.parametrize("dtype", ["float32", "float16", "int64", "uint8", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 4), (2, 3, 4)])
def test_arrays_keep_dtype_shape_and_values(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(int(np.prod(shape)), dtype="int64").astype(dtype).reshape(shape)
    back = there_and_back({"a": array})["a"]
    assert back.dtype == array.dtype and back.shape == array.shape
    np.testing.assert_array_equal(back, array)
    assert back.flags.writeable


def test_a_transposed_array_arrives_in_its_own_order() -> None:
    array = np.arange(6, dtype="float32").reshape(2, 3).T
    np.testing.assert_array_equal(there_and_back(array), array)


def test_text_arrays_become_lists() -> None:
    assert there_and_back(np.array(["a", "b"])) == ["a", "b"]
    assert there_and_back(np.float32(1.5)) == 1.5


def test_dataclasses_are_rebuilt_by_type() -> None:
    remedy = Remedy(Action.INSTALL, "install", ["pip", "install", "x"])
    rung = failed(EvidenceLevel.DRY_LOADED, "tensor.missing", "gone", remedies=[remedy], measurements={"s": 1.0})
    assessment = Assessment([unmet(Kind.TENSOR, "tensor.missing", "gone", remedies=[remedy])], [rung])
    assert wire.rebuild(there_and_back(assessment), Assessment) == assessment
    assert wire.rebuild(there_and_back(rung), Evidence) == rung


def test_requests_and_outputs_with_arrays() -> None:
    request = Request("tensor", {"tensors": {"x": np.ones((2, 2), "float32")}}, Sampling(stop=("a",), seed=3))
    back = wire.rebuild(there_and_back(request), Request)
    assert back.sampling == request.sampling
    np.testing.assert_array_equal(back.inputs["tensors"]["x"], np.ones((2, 2)))
    vectors = EmbeddingsOutput(np.eye(2, dtype="float32"), 2, True, "r")
    back = wire.rebuild(there_and_back(vectors), EmbeddingsOutput)
    assert back.recipe == "r" and back.vectors.dtype == np.float32
    tensors = wire.rebuild(there_and_back(TensorsOutput({"y": np.zeros(3)})), TensorsOutput)
    assert tensors.tensors["y"].shape == (3,)


def test_every_contract_names_an_output_type_that_travels() -> None:
    for contract in CONTRACTS.values():
        assert contract.output_type.__doc__, contract.id
        assert contract.inputs and contract.outputs, contract.id


def test_object_arrays_and_foreign_objects_do_not_travel() -> None:
    assert there_and_back(np.array([1, "a"], dtype=object)) == [1, "a"]
    with pytest.raises(TypeError, match="cannot travel"):
        wire.encode({"x": object()})


def test_a_closed_socket_is_an_end_of_file() -> None:
    one, other = socket.socketpair()
    with one, other:
        wire.send(one, {"a": np.zeros(1000)})
        assert wire.receive(other)["a"].shape == (1000,)
        one.close()
        with pytest.raises(EOFError):
            wire.receive(other)
