"""GGUF headers against the gguf distribution's own reader, and every way in which one can be wrong."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.shapes import ggufs

from turnout.package.facts import Artifact, ArtifactKind, Finding
from turnout.package.formats.gguf_header import ARRAY, BOOL, STRING, LongArray, read_header
from turnout.package.formats.gguf_tables import ARCHITECTURES, TYPES
from turnout.package.inspect import inspect
from turnout.package.scan import ReadError, Scan
from turnout.types import Task

U32, F32 = 4, 0


def text(value: str | bytes) -> bytes:
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name: str, kind: int, value: bytes) -> bytes:
    return text(name) + struct.pack("<I", kind) + value


def info(name: str, dims: list[int], kind: int = F32, offset: int = 0) -> bytes:
    return text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


LLAMA = key("general.architecture", STRING, text("llama"))


def file_of(infos: list[bytes], keys: list[bytes] | None = None, data: int = 0, align: int = 32) -> bytes:
    """A whole file: header, keys, tensor infos, padding and ``data`` bytes."""
    keys = [LLAMA] if keys is None else keys
    head = ggufs.header(len(infos), len(keys), b"".join([*keys, *infos]))
    return head + bytes(-len(head) % align) + bytes(data)


def one(path: Path, data: bytes, name: str = "m.gguf") -> Artifact:
    path.mkdir(exist_ok=True)
    (path / name).write_bytes(data)
    (artifact,) = inspect(path / name).artifacts
    return artifact


def problems(artifact: Artifact) -> list[Finding]:
    return [*artifact.findings, *artifact.tensors.problems]


# ---- facts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_names_shapes_types_and_places_are_the_librarys(kind: str, tmp_path: Path) -> None:
    path = ggufs.write_gguf(tmp_path / "m.gguf", kind=kind)
    ours, theirs = read_header(Scan.of(path), "m.gguf"), gguf.GGUFReader(path)
    assert ours.problems == []
    assert {
        n: (t.dtype, list(t.shape), t.offset, t.nbytes) for n, t in ours.tensors.items()
    } == {
        t.name: (t.tensor_type.name, [int(d) for d in reversed(t.shape)], t.data_offset, t.n_bytes)
        for t in theirs.tensors
    }  # fmt: skip
    for name, field in theirs.fields.items():
        if not name.startswith("GGUF."):
            mine = ours.values[name]
            assert mine.length == len(field.contents()) if isinstance(mine, LongArray) else mine == field.contents()


def test_element_sizes_and_architectures_are_the_librarys() -> None:
    theirs = {
        int(t): (t.name, *gguf.GGML_QUANT_SIZES[t]) for t in gguf.GGMLQuantizationType if t in gguf.GGML_QUANT_SIZES
    }
    assert {number: TYPES[number] for number in theirs if number in TYPES} == theirs
    assert set(gguf.MODEL_ARCH_NAMES.values()) >= ARCHITECTURES


def test_every_kind_of_value(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values: dict[str, Any] = {
        "add_uint8": 7, "add_int8": -7, "add_uint16": 700, "add_int16": -700, "add_uint32": 70_000,
        "add_int32": -70_000,
        "add_float32": 0.5, "add_uint64": 1 << 40, "add_int64": -(1 << 40), "add_float64": 0.25, "add_bool": True,
        "add_string": "ä", "add_array": [1, 2, 3],
    }  # fmt: skip
    for method, value in values.items():
        getattr(writer, method)(f"x.{method}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    found = read_header(Scan.of(tmp_path), "m.gguf").values
    assert {n.removeprefix("x."): v for n, v in found.items() if n.startswith("x.")} == values


def test_big_endian_files(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama", endianess=gguf.GGUFEndian.BIG)
    writer.add_uint32("llama.block_count", 3)
    writer.add_tensor("token_embd.weight", np.ones((4, 32), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    header = read_header(Scan.of(tmp_path), "m.gguf")
    assert header.values["llama.block_count"] == 3 and header.values["endianness"] == "big"
    assert header.tensors["token_embd.weight"].shape == (4, 32) and not header.problems


def test_architecture_tokenizer_quantization_and_tasks(tmp_path: Path) -> None:
    path = ggufs.write_gguf(
        tmp_path / "m.gguf", general__license="apache-2.0", tokenizer__chat_template="{{ messages }}"
    )
    (artifact,) = inspect(path).artifacts
    assert artifact.kind is ArtifactKind.GGUF and artifact.findings == []
    assert artifact.architecture is not None and artifact.architecture.model_type == "llama"
    expected = {
        "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2,
        "intermediate_size": 96, "max_position_embeddings": 64, "vocab_size": 258,
    }  # fmt: skip
    assert artifact.architecture.dims == expected and artifact.architecture.tied is False
    assert artifact.tokenizer is not None
    assert (artifact.tokenizer.kind, artifact.tokenizer.pre, artifact.tokenizer.vocab_size) == ("gguf", "gpt-2", 258)
    assert artifact.generation is not None and artifact.generation.eos_ids == [256]
    assert artifact.quantization is not None
    assert (artifact.quantization.packing, artifact.quantization.bits) == ("Q8_0", 8.5)
    assert artifact.task_ids() == [Task.CHAT, Task.TEXT_GENERATION]
    assert artifact.licence is not None and artifact.licence.value == "apache-2.0"


def test_a_model_without_a_head_is_tied_and_floats_are_no_quantization(tmp_path: Path) -> None:
    (artifact,) = inspect(ggufs.write_gguf(tmp_path / "m.gguf", kind="F32", drop="output")).artifacts
    assert artifact.architecture is not None and artifact.architecture.tied is True
    assert artifact.quantization is None and artifact.task_ids() == [Task.TEXT_GENERATION]


@pytest.mark.parametrize(("number", "pooling"), [(1, "mean"), (2, "cls"), (3, "lasttoken"), (4, "rank"), (0, None)])
def test_pooling_is_a_recipe(number: int, pooling: str | None, tmp_path: Path) -> None:
    keys = [key("general.architecture", STRING, text("bert")), key("bert.pooling_type", U32, struct.pack("<I", number))]
    artifact = one(tmp_path / "m", file_of([info("token_embd.weight", [4, 8])], keys, 128))
    assert (artifact.recipe.settings["pooling"] if artifact.recipe else None) == pooling
    assert artifact.task_ids() == [Task.RERANK if pooling == "rank" else Task.EMBEDDINGS]


def test_named_templates(tmp_path: Path) -> None:
    keys = [
        LLAMA,
        key("tokenizer.ggml.model", STRING, text("gpt2")),
        key("tokenizer.chat_template", STRING, text("{{ messages }}")),
        key("tokenizer.chat_template.tool_use", STRING, text("{{ tools }}")),
    ]
    artifact = one(tmp_path / "m", file_of([info("token_embd.weight", [4, 8])], keys, 128))
    assert [t.name for t in artifact.templates] == ["default", "tool_use"]


# ---- other kinds, parts and projectors ---------------------------------------------------------


def test_an_adapter_waits_for_its_base(tmp_path: Path) -> None:
    (artifact,) = inspect(ggufs.adapter(tmp_path / "a.gguf")).artifacts
    assert artifact.kind is ArtifactKind.GGUF_ADAPTER
    assert [(d.role, d.target) for d in artifact.depends_on] == [("base_model", "Tiny Llama")]
    assert [f.code for f in artifact.findings] == ["adapter.base_missing"]


def test_an_importance_matrix_is_no_model(tmp_path: Path) -> None:
    artifact = one(tmp_path / "m", file_of([], [key("general.type", STRING, text("imatrix"))]))
    assert artifact.kind is ArtifactKind.GGUF_OTHER and artifact.tasks == []


@pytest.mark.parametrize("width", [64, 48])
def test_a_projector_goes_with_the_model_of_its_width(width: int, tmp_path: Path) -> None:
    ggufs.write_gguf(tmp_path / "m.gguf")
    ggufs.projector(tmp_path / "mmproj.gguf", width)
    package = inspect(tmp_path)
    projector = next(a for a in package.artifacts if a.kind is ArtifactKind.GGUF_MMPROJ)
    model = next(a for a in package.artifacts if a.kind is ArtifactKind.GGUF)
    assert (Task.IMAGE_TEXT_TO_TEXT in model.task_ids()) is (width == 64)
    if width == 64:
        assert [(d.role, d.target) for d in projector.depends_on] == [("text_model", model.id)]
    else:
        (finding,) = projector.findings
        assert (finding.code, finding.observed, finding.expected) == (
            "adapter.base_mismatch", "projection_dim 48", "embedding_length 64"
        )  # fmt: skip


def parts(folder: Path, *numbers: int, claim: int = 2, tensors: int | None = None) -> Path:
    """Files 1 and 2 of a split model with one tensor each, with the numbers that they claim."""
    folder.mkdir(exist_ok=True)
    for index, number in enumerate(numbers):
        keys = [key("split.no", 2, struct.pack("<H", number)), key("split.count", 2, struct.pack("<H", claim))]
        if index == 0:
            keys.append(LLAMA)
        if tensors is not None:
            keys.append(key("split.tensors.count", 5, struct.pack("<i", tensors)))
        data = file_of([info(f"blk.{index}.ffn_up.weight", [32])], keys, 128)
        (folder / f"m-{index + 1:05d}-of-00002.gguf").write_bytes(data)
    return folder


def test_parts_are_one_model(tmp_path: Path) -> None:
    (artifact,) = inspect(parts(tmp_path / "m", 0, 1, tensors=2)).artifacts
    assert artifact.findings == [] and set(artifact.tensors.tensors) == {"blk.0.ffn_up.weight", "blk.1.ffn_up.weight"}
    assert artifact.tensors.shards == ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"] == artifact.files
    (named,) = inspect(tmp_path / "m" / "m-00002-of-00002.gguf").artifacts
    assert named.entry == "m-00001-of-00002.gguf"


def test_a_part_alone(tmp_path: Path) -> None:
    (artifact,) = inspect(ggufs.split_alone(tmp_path)).artifacts
    assert [(f.code, f.path) for f in artifact.findings] == [("artifact.shard_missing", "tiny-00002-of-00002.gguf")]


def test_parts_in_the_wrong_order(tmp_path: Path) -> None:
    (artifact,) = inspect(parts(tmp_path / "m", 0, 0)).artifacts
    assert [(f.code, f.observed, f.expected) for f in artifact.findings] == [("index.inconsistent", "0", "1")]


def test_parts_that_lack_tensors(tmp_path: Path) -> None:
    (artifact,) = inspect(parts(tmp_path / "m", 0, 1, tensors=3)).artifacts
    assert [(f.code, f.observed, f.expected) for f in artifact.findings] == [("index.inconsistent", "2", "3")]


def test_a_part_under_another_name(tmp_path: Path) -> None:
    data = (parts(tmp_path / "m", 0, 1) / "m-00001-of-00002.gguf").read_bytes()
    artifact = one(tmp_path / "x", data)
    assert [f.code for f in artifact.findings] == ["artifact.shard_missing"]


# ---- what can be wrong -------------------------------------------------------------------------

TWO = [info("a", [32]), info("b", [32], offset=128)]
BROKEN: dict[str, tuple[bytes, str, str]] = {
    "another-beginning": (b"GGML" + bytes(60), "artifact.corrupt", "does not start with GGUF"),
    "version-1": (b"GGUF" + struct.pack("<IQQ", 1, 0, 0) + bytes(8), "artifact.corrupt", "version 1"),
    "counts": (ggufs.header(1 << 40, 0), "artifact.corrupt", "claims 1099511627776 tensors"),
    "ends-in-its-counts": (b"GGUF" + struct.pack("<IQ", 3, 1), "artifact.truncated", "its counts"),
    "ends-in-a-key": (file_of([])[:40], "artifact.truncated", "a key"),
    "ends-in-a-value": (ggufs.header(0, 1, LLAMA[:-2]), "artifact.truncated", "value of `general.architecture`"),
    "ends-in-an-info": (file_of([info("a", [32])])[:90], "artifact.truncated", "`a`"),
    "repeated-key": (file_of([], [LLAMA, LLAMA]), "artifact.corrupt", "repeats the key"),
    "unknown-value": (file_of([], [key("x", 13, bytes(40))]), "artifact.corrupt", "unknown value type 13"),
    "half-true": (file_of([], [key("x", BOOL, b"\x02")]), "artifact.corrupt", "no boolean"),
    "long-array": (
        file_of([], [key("x", ARRAY, struct.pack("<IQ", U32, 1 << 50))]), "artifact.truncated", "longer than the file"
    ),
    "long-texts": (
        file_of([], [key("x", ARRAY, struct.pack("<IQ", STRING, 70) + text("a") * 69 + b"\xff" * 8)], 4000),
        "artifact.truncated", "`x`",
    ),
    "nested-arrays": (
        file_of([], [key("x", ARRAY, struct.pack("<IQ", ARRAY, 1) * 6 + bytes(12))]), "artifact.corrupt", "too deeply"
    ),
    "huge-text": (file_of([], [key("x", STRING, struct.pack("<Q", 1 << 60))], 64), "artifact.corrupt", "claims"),
    "name-over-64": (file_of([info("n" * 65, [1])], data=64), "artifact.corrupt", "longer than 64"),
    "five-axes": (file_of([info("a", [1] * 5)], data=64), "artifact.corrupt", "5 axes"),
    "endless-shape": (file_of([info("a", [1 << 31, 1 << 31])], data=64), "artifact.corrupt", "elements"),
    "alignment": (
        file_of([info("a", [1])], [LLAMA, key("general.alignment", U32, struct.pack("<I", 12))], 64),
        "artifact.corrupt", "alignment",
    ),
    "twice": (file_of([TWO[0], TWO[0]], data=128), "artifact.duplicate_tensor", "twice"),
    "not-aligned": (file_of([info("a", [32], offset=7)], data=256), "artifact.corrupt", "not aligned"),
    "ends-before-data": (file_of(TWO, data=200), "artifact.truncated", "before the data of `b`"),
    "removed-type": (file_of([info("a", [32], 4)], data=128), "tensor.dtype_unsupported", "type 4"),
    "broken-rows": (file_of([info("a", [31], 8)], data=128), "artifact.corrupt", "whole Q8_0 blocks"),
    "no-architecture": (file_of([info("a", [32])], [], 128), "config.invalid", "general.architecture"),
    "pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "artifact.lfs_pointer", "pointer"),
    "empty": (b"", "artifact.truncated", "empty"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_each_defect_has_its_finding(name: str, tmp_path: Path) -> None:
    data, code, said = BROKEN[name]
    found = problems(one(tmp_path / "m", data))
    assert [(f.code, said in f.message) for f in found] == [(code, True)], found


def test_odd_types_of_known_keys_are_left_aside(tmp_path: Path) -> None:
    array = struct.pack("<IQI", U32, 1, 5)
    keys = [
        LLAMA,
        key("llama.pooling_type", ARRAY, array),
        key("tokenizer.ggml.model", STRING, text("gpt2")),
        key("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 1) + text("a")),
        key("tokenizer.ggml.bos_token_id", ARRAY, array),
        key("general.file_type", ARRAY, array),
        key("llama.attention.head_count_kv", ARRAY, struct.pack("<IQII", U32, 2, 3, 5)),
    ]
    artifact = one(tmp_path / "m", file_of([info("token_embd.weight", [4, 8])], keys, 128))
    assert artifact.recipe is None and artifact.findings == []
    assert artifact.generation is not None and artifact.generation.bos_id is None
    assert artifact.architecture is not None and artifact.architecture.dims["num_key_value_heads"] == 5


def test_more_tokens_than_embeddings(tmp_path: Path) -> None:
    tokens = struct.pack("<IQ", STRING, 9) + b"".join(text(str(i)) for i in range(9))
    keys = [
        LLAMA,
        key("tokenizer.ggml.model", STRING, text("gpt2")),
        key("tokenizer.ggml.tokens", ARRAY, tokens),
    ]
    artifact = one(tmp_path / "m", file_of([info("token_embd.weight", [4, 8])], keys, 128))
    (finding,) = artifact.findings
    assert (finding.code, finding.observed, finding.expected) == ("tokenizer.id_out_of_range", "8", "at most 7")


def test_a_reader_for_a_file_that_is_absent(tmp_path: Path) -> None:
    with pytest.raises(ReadError) as caught:
        read_header(Scan.of(tmp_path), "m.gguf")
    assert caught.value.finding.code == "artifact.missing"
