"""CTranslate2 directories: variables of model.bin against Transformers' weights, and each defect."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path

import pytest
from tests.shapes import classical

from turnout.package.facts import Artifact, ArtifactKind
from turnout.package.formats.ctranslate2 import read_spec
from turnout.package.inspect import inspect
from turnout.types import Task


def text(value: str) -> bytes:
    return struct.pack("<H", len(value) + 1) + value.encode() + b"\0"


def variable(name: str, shape: tuple[int, ...], kind: int = 0, nbytes: int | None = None) -> bytes:
    size = 4 if nbytes is None else nbytes
    for dim in shape if nbytes is None else ():
        size *= dim
    head = text(name) + struct.pack(f"<B{len(shape)}IBI", len(shape), *shape, kind, size)
    return head + bytes(min(size, 1 << 16))


def file_of(*variables: bytes, aliases: tuple[tuple[str, str], ...] = (), version: int = 6, count: int = -1) -> bytes:
    head = struct.pack("<I", version) + text("TransformerDecoderSpec") + struct.pack("<I", 8)
    body = b"".join(variables) + struct.pack("<I", len(aliases))
    body += b"".join(text(one) + text(other) for one, other in aliases)
    return head + struct.pack("<I", len(variables) if count < 0 else count) + body


def one(path: Path, data: bytes | None = None, words: int = 4) -> Artifact:
    if data is not None:
        (path / "model.bin").write_bytes(data)
        (path / "vocabulary.json").write_text(json.dumps([str(i) for i in range(words)]))
    (artifact,) = inspect(path).artifacts
    return artifact


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return classical.ct2_decoder(tmp_path_factory.mktemp("ct2"))


def test_a_converted_decoder(decoder: Path) -> None:
    from safetensors import safe_open

    artifact = one(decoder)
    assert artifact.kind is ArtifactKind.CTRANSLATE2 and artifact.findings == []
    assert (artifact.facts["spec"].value, artifact.facts["binary_version"].value) == ("TransformerDecoderSpec", 6)
    assert artifact.task_ids() == [Task.CHAT, Task.TEXT_GENERATION] and artifact.tokenizer is not None
    found = artifact.tensors.tensors["decoder/embeddings/weight"]
    with safe_open(decoder.parent / "whole" / "model.safetensors", framework="np") as stored:
        weight = stored.get_tensor("model.embed_tokens.weight")
    assert (found.shape, found.dtype) == (weight.shape, "F32")
    data = (decoder / "model.bin").read_bytes()[found.offset : found.offset + found.nbytes]
    assert data == weight.tobytes()


EMBEDDING = variable("decoder/embeddings/weight", (4, 2))
BROKEN: dict[str, tuple[bytes, str]] = {
    "cut-in-data": (file_of(EMBEDDING)[:-20], "artifact.truncated"),
    "cut-in-a-header": (file_of(EMBEDDING, count=2)[:90], "artifact.truncated"),
    "goes-on": (file_of(EMBEDDING) + b"xx", "artifact.corrupt"),
    "many": (file_of(count=1 << 30), "artifact.corrupt"),
    "unknown-type": (file_of(variable("a", (2,), kind=9)), "artifact.corrupt"),
    "other-length": (file_of(variable("a", (2,), nbytes=12)), "artifact.corrupt"),
    "twice": (file_of(EMBEDDING, EMBEDDING), "artifact.duplicate_tensor"),
    "alias-of-nothing": (file_of(EMBEDDING, aliases=(("x", "y"),)), "artifact.corrupt"),
    "words": (file_of(variable("decoder/embeddings/weight", (5, 2))), "component.invalid"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_each_defect_has_its_finding(name: str, tmp_path: Path) -> None:
    data, code = BROKEN[name]
    assert [f.code for f in one(tmp_path, data).findings] == [code]


def test_whole_files_of_this_layout_have_none(tmp_path: Path) -> None:
    artifact = one(tmp_path, file_of(EMBEDDING, variable("s", ()), aliases=(("x", "s"),)))
    assert artifact.findings == [] and artifact.tensors.tensors["s"].shape == ()


def test_versions_of_another_layout_are_left_to_the_library(tmp_path: Path) -> None:
    for version in (2, 7):
        artifact = one(tmp_path, file_of(EMBEDDING, version=version))
        assert artifact.findings == [] and artifact.tensors.tensors == {}


def test_a_directory_without_a_vocabulary(decoder: Path, tmp_path: Path) -> None:
    shutil.copytree(decoder, tmp_path / "m")
    (tmp_path / "m" / "vocabulary.json").unlink()
    assert [f.code for f in one(tmp_path / "m").findings] == ["component.missing"]


def test_words_as_text(decoder: Path, tmp_path: Path) -> None:
    shutil.copytree(decoder, tmp_path / "m")
    words = json.loads((tmp_path / "m" / "vocabulary.json").read_text())
    (tmp_path / "m" / "vocabulary.json").unlink()
    (tmp_path / "m" / "vocabulary.txt").write_text("\n".join(words) + "\n")
    assert one(tmp_path / "m").findings == []


@pytest.mark.parametrize("data", [b"", b"\x06\0\0\0", b"\x06\0\0\0\x09\0Something" + bytes(9), bytes(64)])
def test_other_files_of_that_name(data: bytes) -> None:
    assert read_spec(data) is None
