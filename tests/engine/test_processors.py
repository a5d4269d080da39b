"""Custom logits processors and stopping criteria: found by name, checked, and harmless to others."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from turnout.engine import processors
from turnout.engine.processors import ProcessorError, decide, process, register, resolve, unregister
from turnout.engine.sampler import Drawn, Sampler, SampleRow, SamplerState
from turnout.errors import InputError
from turnout.types import Sampling

Ids = NDArray[np.int64]
Row = NDArray[np.float32]
X = np.linspace(-1, 1, 20).astype(np.float32)  # the last token is the most likely


@pytest.fixture
def names() -> Iterator[list[str]]:
    """Names registered by a test; forgotten after it."""
    used: list[str] = []
    yield used
    for name in used:
        unregister(name)


class Only:
    """Allows the tokens it is given; keeps what it was called with."""

    def __init__(self, tokens: list[int], vocabulary: object = None) -> None:
        if not tokens:
            raise ValueError("`tokens` is empty")
        self.tokens, self.vocabulary = tokens, vocabulary
        self.calls: list[tuple[list[int], int]] = []

    def __call__(self, ids: Ids, prompt_length: int, logits: Row) -> Row:
        self.calls.append((ids.tolist(), prompt_length))
        kept = np.full_like(logits, -np.inf)
        kept[self.tokens] = logits[self.tokens]
        return kept


class EndsWith:
    """Stops when the output ends with a text."""

    kind = "stop"

    def __init__(self, text: str) -> None:
        self.text = text

    def __call__(self, ids: Ids, prompt_length: int, text: str) -> bool | str:
        return self.text if text.endswith(self.text) else False


def draw(*chosen: Any, temperature: float = 0.0, output: tuple[int, ...] = (), extra: tuple[int, ...] = ()) -> Drawn:
    state = SamplerState(Sampling(temperature=temperature), 1, [7, 8], len(X), processors=chosen)
    for token in output:
        state.append(token)
    return Sampler(len(X)).sample(X[None], [SampleRow(state, extra)])[0]


def test_a_registered_class_is_made_with_the_parameters_of_its_request(names: list[str]) -> None:
    names.append("only")
    register("only", Only)
    logits, stopping = resolve(['only:{"tokens": [3, 4]}', 'only:{"tokens": [5]}'], vocabulary="words")  # type: ignore[arg-type]
    assert stopping == []
    first, second = logits
    assert isinstance(first, Only) and isinstance(second, Only)
    assert (first.tokens, second.tokens, first.vocabulary) == ([3, 4], [5], "words")
    assert resolve(['only:{"tokens": [3]}'])[0][0] is not first
    assert draw(first, output=(9, 10), extra=(11,)).token == 4
    assert first.calls == [([7, 8, 9, 10, 11], 2)]


def test_a_function_is_used_as_it_is(names: list[str]) -> None:
    names.append("reverse")

    def reverse(ids: Ids, prompt_length: int, logits: Row) -> Row:
        logits *= -1  # in place is allowed: the row is a copy
        return logits

    register("reverse", reverse)
    before = X.copy()
    assert draw(*resolve(["reverse"])[0]).token == 0
    np.testing.assert_array_equal(X, before)
    with pytest.raises(InputError, match="takes no parameters"):
        resolve(['reverse:{"by": 2}'])


def test_a_stopping_criterion_is_told_by_its_kind(names: list[str]) -> None:
    names += ["ends-with", "short", "wrong"]
    register("ends-with", EndsWith)
    register("short", lambda ids, prompt_length, text: len(ids) > 3, kind="stop")
    register("wrong", lambda ids, prompt_length, text: None, kind="stop")
    logits, (ends, short, wrong) = resolve(['ends-with:{"text": "."}', "short", "wrong"])
    assert logits == []
    assert ends([1, 2], 1, "Yes.") == "." and ends([1, 2], 1, "Yes") is False  # type: ignore[arg-type]
    assert short([1, 2, 3], 1, "") is False and short([1, 2, 3, 4], 1, "") is True  # type: ignore[arg-type]
    with pytest.raises(ProcessorError, match="returned a NoneType, expected True, False or a text"):
        wrong([1], 1, "")  # type: ignore[arg-type]


def test_a_criterion_that_raises_says_so() -> None:
    def broken(ids: Ids, prompt_length: int, text: str) -> bool:
        raise KeyError("end")

    with pytest.raises(ProcessorError, match="`broken` failed: KeyError: 'end'"):
        decide(broken, np.array([1]), 0, "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ("nobody", "unknown processor `nobody`"),
        ("", "unknown processor ``"),
        ("no-repeat-ngram:", "is no JSON object"),
        ("no-repeat-ngram:[3]", "is no JSON object"),
        ("no-repeat-ngram:" + "[" * 100_000, "is no JSON object"),
        ("no-repeat-ngram", "missing a required argument: 'size'"),
        ('no-repeat-ngram:{"size": 0}', "`size` is `0`"),
        ('no-repeat-ngram:{"size": true}', "`size` is `True`"),
        ('no-repeat-ngram:{"size": 2, "width": 3}', "width"),
        ('sequence-bias:{"biases": [[[], 1]]}', "expected"),
        ('sequence-bias:{"biases": [[[-1], 1]]}', "ids of at least 0"),
        ('sequence-bias:{"biases": [[[1], "x"]]}', "a number, or null"),
    ],
)
def test_a_request_for_what_cannot_be_is_refused(asked: str, message: str) -> None:
    with pytest.raises(InputError) as caught:
        resolve([asked])
    assert message in caught.value.message
    assert caught.value.hints


@pytest.mark.parametrize("name", ["", "a:b", " a"])
def test_names_that_no_request_can_ask_for(name: str) -> None:
    with pytest.raises(InputError, match="cannot name a processor"):
        register(name, Only)


def test_what_cannot_be_called_is_not_registered() -> None:
    class Plain:
        pass

    for target in (Plain, 3):
        with pytest.raises(InputError, match="cannot be called"):
            register("x", target)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="of kind `other`"):
        register("x", Only, kind="other")


def raises(ids: Ids, prompt_length: int, logits: Row) -> Row:
    raise RuntimeError("out of\nluck")


def shorter(ids: Ids, prompt_length: int, logits: Row) -> Row:
    return logits[:-1]


def nothing(ids: Ids, prompt_length: int, logits: Row) -> Row:
    return None  # type: ignore[return-value]


def words(ids: Ids, prompt_length: int, logits: Row) -> Row:
    return np.array(["x"] * len(logits))  # type: ignore[return-value]


def not_a_number(ids: Ids, prompt_length: int, logits: Row) -> Row:
    logits[3] = np.nan
    return logits


def writes_ids(ids: Ids, prompt_length: int, logits: Row) -> Row:
    ids[0] = 1
    return logits


def everything(ids: Ids, prompt_length: int, logits: Row) -> Row:
    return np.full_like(logits, -np.inf)


BROKEN = [
    (raises, "processor `raises` failed: RuntimeError: out of", "runtime.failed"),
    (shorter, "returned an array (19,), expected an array (20,)", "runtime.failed"),
    (nothing, "returned a NoneType, expected an array (20,)", "runtime.failed"),
    (words, "values, expected float32", "runtime.failed"),
    (not_a_number, "returned `nan` among the logits", "runtime.numeric_mismatch"),
    (writes_ids, "read-only", "runtime.failed"),
    (everything, "no token may follow", "option.unsupported"),
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("processor", "message", "code"), BROKEN, ids=lambda v: getattr(v, "__name__", ""))
def test_a_processor_that_fails_ends_its_own_request_only(
    processor: Any, message: str, code: str, temperature: float
) -> None:
    good, bad = (
        SamplerState(Sampling(temperature=temperature), 1, [7, 8], len(X), processors=chosen)
        for chosen in ((), (processor,))
    )
    logits = np.stack([X, X, X])
    drawn = Sampler(len(X)).sample(logits, [SampleRow(good), SampleRow(bad), SampleRow(good)])
    assert not drawn[0].error and drawn[0] == drawn[2]
    assert message in drawn[1].error
    assert (drawn[1].token, drawn[1].code) == (-1, code)
    np.testing.assert_array_equal(logits, np.stack([X, X, X]))


def test_processors_come_after_penalties_and_before_the_mask() -> None:
    seen: list[Row] = []

    def look(ids: Ids, prompt_length: int, logits: Row) -> Row:
        seen.append(logits.copy())
        logits[5] = 100.0
        return logits

    state = SamplerState(
        Sampling(logit_bias=((2, 3.0),), min_tokens=1, temperature=1.0), 1, [7], len(X),
        eos_ids=frozenset({4}), processors=[look],
    )  # fmt: skip
    mask = np.array([0b11], np.uint32)
    drawn = Sampler(len(X)).sample(X[None], [SampleRow(state, mask=mask)])[0]
    assert seen[0][2] == X[2] + np.float32(3.0) and seen[0][4] == -np.inf
    assert drawn.token in (0, 1)


@pytest.mark.parametrize("temperature", [0.0, 0.5])
@pytest.mark.parametrize("masked", [False, True])
def test_a_processor_may_ask_to_come_after_the_filters(temperature: float, masked: bool) -> None:
    class Late:
        after_filters = True

        def __call__(self, ids: Ids, prompt_length: int, logits: Row) -> Row:
            assert ids.tolist() == [7, 8]
            self.seen = logits.copy()
            logits[:] = -np.inf
            logits[11] = 0.0
            return logits

    late = Late()
    state = SamplerState(Sampling(temperature=temperature, top_k=3), 1, [7, 8], len(X), processors=[late])
    mask = np.array([0b1111_1111], np.uint32) if masked else None
    assert Sampler(len(X)).sample(X[None], [SampleRow(state, mask=mask)])[0].token == 11
    end = 8 if masked else 20
    kept = np.flatnonzero(np.isfinite(late.seen)).tolist()
    assert kept == list(range(0 if temperature == 0 else end - 3, end))
    scale = 1 / temperature if temperature else 1.0
    gaps = np.diff(late.seen[kept])
    np.testing.assert_allclose(gaps, np.diff(X)[0] * scale, rtol=1e-4)


def test_a_processor_of_a_tensor_s_row_gets_numpy() -> None:
    chosen = Only([3])
    state = SamplerState(Sampling(), 1, [7], len(X), processors=[chosen])
    drawn = Sampler(len(X), on_host=False).sample(torch.from_numpy(X.copy())[None], [SampleRow(state)])[0]
    assert drawn.token == 3


def test_other_number_types_become_float32() -> None:
    assert process(lambda i, p, x: x.astype(np.float64), np.array([1]), 1, X.copy()).dtype == np.float32


# Found through entry points


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A distribution that brings processors, as an installer would leave it."""
    (tmp_path / "shouting_plugin.py").write_text(
        "class Loud:\n"
        "    def __init__(self, by=1.0):\n"
        "        self.by = by\n"
        "    def __call__(self, ids, prompt_length, logits):\n"
        "        logits[0] += self.by\n"
        "        return logits\n"
        "class Space:\n"
        "    Quiet = Loud\n"
    )
    (tmp_path / "broken_plugin.py").write_text("raise OSError('no library')\n")
    info = tmp_path / "shouting-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[turnout.processors]\nloud = shouting_plugin:Loud\nquiet = shouting_plugin:Space.Quiet\n"
        "broken = broken_plugin:Loud\nabsent = shouting_plugin:Nobody\n"
        "no-repeat-ngram = shouting_plugin:Loud\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    processors.locations.cache_clear()
    yield
    processors.locations.cache_clear()
    sys.modules.pop("shouting_plugin", None)


@pytest.mark.usefixtures("plugin")
def test_a_plug_in_s_processors_are_found_by_name_and_imported_at_use() -> None:
    assert {"loud", "quiet", "no-repeat-ngram", "sequence-bias"} <= set(processors.names())
    assert "shouting_plugin" not in sys.modules
    ((loud, quiet), _) = resolve(['loud:{"by": 5}', "quiet"])
    assert draw(loud, quiet).token == 0
    (own,), _ = resolve(['no-repeat-ngram:{"size": 2}'])
    assert isinstance(own, processors.NoRepeatNgram)  # a built-in's name is not taken over


@pytest.mark.usefixtures("plugin")
@pytest.mark.parametrize(("name", "message"), [("broken", "OSError: no library"), ("absent", "no attribute 'Nobody'")])
def test_a_plug_in_that_cannot_be_imported_is_an_error_of_the_request(name: str, message: str) -> None:
    with pytest.raises(ProcessorError) as caught:
        resolve([name])
    assert message in caught.value.message and caught.value.code == "dependency.missing"


# The built-in ones against Transformers


@settings(deadline=None, max_examples=60)
@given(ids=st.lists(st.integers(0, 3), min_size=1, max_size=14), size=st.integers(1, 4))
def test_no_repeat_ngram_is_that_of_transformers(ids: list[int], size: int) -> None:
    ours = process(processors.NoRepeatNgram(size), np.array(ids), 1, X.copy())
    theirs = transformers.NoRepeatNGramLogitsProcessor(size)(torch.tensor([ids]), torch.from_numpy(X.copy())[None])
    np.testing.assert_array_equal(ours, theirs[0].numpy())


@settings(deadline=None, max_examples=60)
@given(
    ids=st.lists(st.integers(0, 3), min_size=3, max_size=10),
    biases=st.dictionaries(
        st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple), st.floats(-5, 5), min_size=1, max_size=4
    ),
)
def test_sequence_bias_is_that_of_transformers(ids: list[int], biases: dict[tuple[int, ...], float]) -> None:
    ours = process(processors.SequenceBias([(list(k), v) for k, v in biases.items()]), np.array(ids), 1, X.copy())
    reference = transformers.SequenceBiasLogitsProcessor([[list(k), v] for k, v in biases.items()])
    theirs = reference(torch.tensor([ids]), torch.from_numpy(X.copy())[None])
    np.testing.assert_allclose(ours, theirs[0].numpy(), atol=1e-5)


def test_a_null_bias_forbids() -> None:
    banned, _ = resolve(['sequence-bias:{"biases": [[[8, 19], null], [[18], null]]}'])
    assert draw(*banned).token == 17
