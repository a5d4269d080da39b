"""TFLite models against OpenVINO's reader, and files that point outside themselves."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from turnout.package.facts import Artifact, ArtifactKind
from turnout.package.formats.tflite import read_tflite
from turnout.package.inspect import inspect
from turnout.package.scan import ReadError, Scan
from turnout.package.store import resolve
from turnout.types import Task


@pytest.fixture(scope="module")
def real() -> Path:
    """The smallest model that the mediapipe distribution carries."""
    return min(resolve("mediapipe").path.rglob("*.tflite"), key=lambda p: p.stat().st_size)


def one(path: Path) -> Artifact:
    (artifact,) = inspect(path).artifacts
    return artifact


def test_ports_are_those_that_openvino_reads(real: Path) -> None:
    import openvino

    artifact, model = one(real), openvino.Core().read_model(real)
    graph = artifact.graph
    assert artifact.kind is ArtifactKind.TFLITE and artifact.findings == [] and graph is not None
    spelled = {"float32": "f32", "float16": "f16", "int32": "i32", "int64": "i64", "uint8": "u8", "int8": "i8"}
    for mine, theirs in ((graph.inputs, model.inputs), (graph.outputs, model.outputs)):
        for port, other in zip(mine, theirs, strict=True):
            shape = [d.get_length() if d.is_static else None for d in other.partial_shape]
            assert (port.name, port.shape) == (other.any_name, shape)
            assert spelled[port.dtype] == other.element_type.get_type_name()
    assert graph.ir_version == 3 and sum(graph.ops.values()) > 1
    assert Task.TENSOR in artifact.task_ids()


@pytest.mark.parametrize("count", [8, 40, 400])
def test_a_file_cut_short(count: int, real: Path, tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(real.read_bytes()[:count])
    assert [f.code for f in one(tmp_path).findings] == ["artifact.truncated"]


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (b"", "artifact.truncated"),
        (bytes(4) + b"TFL2" + bytes(8), "artifact.corrupt"),
        (struct.pack("<I", 1 << 31) + b"TFL3" + bytes(64), "artifact.truncated"),
        (b"version https://git-lfs.github.com/spec/v1\n", "artifact.lfs_pointer"),
    ],
)
def test_other_bytes(data: bytes, code: str, tmp_path: Path) -> None:
    (tmp_path / "m.tflite").write_bytes(data)
    with pytest.raises(ReadError) as caught:
        read_tflite(Scan.of(tmp_path), "m.tflite")
    assert caught.value.finding.code == code


def test_vectors_longer_than_the_file(real: Path, tmp_path: Path) -> None:
    data = bytearray(real.read_bytes())
    (model,) = struct.unpack_from("<I", data)
    (back,) = struct.unpack_from("<i", data, model)
    (field,) = struct.unpack_from("<H", data, model - back + 4 + 2 * 2)  # subgraphs
    place = model + field
    vector = place + struct.unpack_from("<I", data, place)[0]
    struct.pack_into("<I", data, vector, 0x7FFFFFFF)
    (tmp_path / "m.tflite").write_bytes(bytes(data))
    (finding,) = one(tmp_path).findings
    assert finding.code == "artifact.corrupt" and "vector" in finding.message
