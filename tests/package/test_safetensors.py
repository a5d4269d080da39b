"""Safetensors headers, good and bad: ours must say of each what the library does, or be stricter by a warning."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import safetensors

from turnout.package.facts import Severity, TensorInventory
from turnout.package.formats.safetensors import DTYPE_BITS, read_safetensors
from turnout.package.scan import Scan


def file_of(header: object, data: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(path: Path, data: bytes) -> TensorInventory:
    path.write_bytes(data)
    return read_safetensors(Scan.of(path.parent), path.name)


A = tensor([2, 2], 0, 16)
GOOD = {
    "one": file_of({"a": A}, 16),
    "two-in-any-order": file_of({"b": tensor([1], 16, 20), "a": A}, 20),
    "metadata": file_of({"__metadata__": {"format": "pt"}, "a": A}, 16),
    "scalar-and-empty": file_of({"s": tensor([], 0, 4), "e": tensor([0, 5], 4, 4)}, 4),
    "half-bytes": file_of({"a": tensor([4], 0, 2, "F4")}, 2),
    "nothing": file_of({}),
}
BAD = {
    "no-length": (b"\x01\x02", "artifact.truncated"),
    "length-beyond-file": (struct.pack("<Q", 1000) + b"{}", "artifact.truncated"),
    "length-of-2^60": (struct.pack("<Q", 1 << 60) + b"{}", "artifact.corrupt"),
    "not-json": (file_of(b"{'a'}"), "artifact.corrupt"),
    "not-utf8": (file_of(b'{"\xff\xfe": 1}'), "artifact.corrupt"),
    "not-an-object": (file_of([1, 2]), "artifact.corrupt"),
    "zero-bytes": (file_of(b"{" + bytes(100)), "artifact.corrupt"),
    "deep": (file_of(b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}"), "artifact.corrupt"),
    "metadata-of-numbers": (file_of({"__metadata__": {"n": 1}}), "artifact.corrupt"),
    "no-offsets": (file_of({"a": {"dtype": "F32", "shape": [1]}}, 4), "artifact.corrupt"),
    "unknown-type": (file_of({"a": tensor([1], 0, 4, "F33")}, 4), "tensor.dtype_unsupported"),
    "negative": (file_of({"a": tensor([-2], 0, 8)}, 8), "artifact.corrupt"),
    "fraction": (file_of({"a": {"dtype": "F32", "shape": [1.5], "data_offsets": [0, 6]}}, 6), "artifact.corrupt"),
    "overflow": (file_of({"a": tensor([1 << 40, 1 << 40], 0, 4)}, 4), "artifact.corrupt"),
    "shape-and-offsets": (file_of({"a": tensor([3], 0, 16)}, 16), "artifact.corrupt"),
    "hole": (file_of({"a": A, "b": tensor([1], 20, 24)}, 24), "artifact.corrupt"),
    "overlap": (file_of({"a": A, "b": tensor([1], 12, 16)}, 16), "artifact.corrupt"),
    "backwards": (file_of({"a": tensor([1], 8, 4)}, 8), "artifact.corrupt"),
    "cut": (file_of({"a": A}, 15), "artifact.truncated"),
    "goes-on": (file_of({"a": A}, 17), "artifact.corrupt"),
    "half-a-byte": (file_of({"a": tensor([3], 0, 2, "F4")}, 2), "artifact.corrupt"),
    "empty-file": (b"", "artifact.truncated"),
}


def accepted(path: Path) -> bool:
    """What the library itself says of the file."""
    try:
        with safetensors.safe_open(path, "np") as stream:
            list(stream.keys())
    except (safetensors.SafetensorError, OSError, ValueError):
        return False
    return True


@pytest.mark.parametrize("name", GOOD)
def test_good_files(name: str, tmp_path: Path) -> None:
    inventory = read(tmp_path / "m.safetensors", GOOD[name])
    assert inventory.problems == []
    assert accepted(tmp_path / "m.safetensors")


@pytest.mark.parametrize("name", BAD)
def test_bad_files_have_one_cause(name: str, tmp_path: Path) -> None:
    data, code = BAD[name]
    inventory = read(tmp_path / "m.safetensors", data)
    assert [p.code for p in inventory.problems] == [code]
    assert inventory.problems[0].severity is Severity.ERROR
    assert inventory.tensors == {}
    assert not accepted(tmp_path / "m.safetensors")


def test_what_the_library_forgives_is_a_warning(tmp_path: Path) -> None:
    entry = json.dumps(A).encode()
    for header, code in (
        (b'{"a":' + entry + b',"a":' + entry + b"}", "artifact.duplicate_tensor"),
        (b' {"a":' + entry + b"}", "artifact.corrupt"),
    ):
        inventory = read(tmp_path / "m.safetensors", file_of(header, 16))
        assert [(p.code, p.severity) for p in inventory.problems] == [(code, Severity.WARNING)]
        assert list(inventory.tensors) == ["a"]


def test_a_tensor_described_twice_differently_is_refused(tmp_path: Path) -> None:
    header = b'{"a":' + json.dumps(A).encode() + b',"a":' + json.dumps(tensor([4], 0, 16)).encode() + b"}"
    inventory = read(tmp_path / "m.safetensors", file_of(header, 16))
    assert [(p.code, p.severity) for p in inventory.problems] == [("artifact.duplicate_tensor", Severity.ERROR)]


def test_headers_of_too_many_values_are_not_parsed(tmp_path: Path) -> None:
    for header in (b'{"a":[' + b"[]," * 600_000 + b"[]]}", b'{"' + "é".encode() * (7 << 20) + b'":1}'):
        inventory = read(tmp_path / "m.safetensors", file_of(header))
        assert [p.code for p in inventory.problems] == ["artifact.corrupt"]


def test_facts_are_those_of_the_library(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    stored = {
        "w": torch.zeros(3, 4, dtype=torch.bfloat16),
        "b": torch.zeros(4),
        "n": torch.zeros((), dtype=torch.int64),
    }
    save_file(stored, tmp_path / "m.safetensors")
    inventory = read_safetensors(Scan.of(tmp_path), "m.safetensors")
    assert {n: (t.dtype, t.shape, t.nbytes) for n, t in inventory.tensors.items()} == {
        "w": ("BF16", (3, 4), 24),
        "b": ("F32", (4,), 16),
        "n": ("I64", (), 8),
    }
    assert inventory.param_count == 17 and inventory.total_bytes == 48
    raw = (tmp_path / "m.safetensors").read_bytes()
    assert all(t.offset + t.nbytes <= len(raw) for t in inventory.tensors.values())


def test_element_sizes_are_the_librarys() -> None:
    """Every type of the notes has a width; odd ones pack below a byte."""
    assert {d for d, bits in DTYPE_BITS.items() if bits < 8} == {"F4", "F6_E2M3", "F6_E3M2"}
    assert DTYPE_BITS["BF16"] == 16 and DTYPE_BITS["C64"] == 64 and DTYPE_BITS["BOOL"] == 8


def test_git_lfs_pointer_and_links_out(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 10\n"
    assert [p.code for p in read(tmp_path / "m.safetensors", pointer).problems] == ["artifact.lfs_pointer"]
    package = tmp_path / "package"
    package.mkdir()
    (package / "m.safetensors").symlink_to(tmp_path / "m.safetensors")
    assert [p.code for p in read_safetensors(Scan.of(package), "m.safetensors").problems] == ["artifact.path_escape"]
