"""Listing a package: links, names, references, JSON rules, and one file in focus."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from tests.shapes import graphs, hf

from turnout.package.facts import FileRole
from turnout.package.inspect import inspect
from turnout.package.scan import ReadError, Scan, parse_json, role_of
from turnout.worker.wire import encode


def code(call: Any) -> str:
    with pytest.raises(ReadError) as caught:
        call()
    return caught.value.finding.code


# ---- files and links ---------------------------------------------------------------------------


def test_links_are_told_apart(tmp_path: Path) -> None:
    root = tmp_path / "package"
    (root / "sub").mkdir(parents=True)
    (root / "sub" / "real").write_text("x")
    (tmp_path / "outside").write_text("y")
    (root / "inside").symlink_to("sub/real")
    (root / "escape").symlink_to(tmp_path / "outside")
    (root / "nowhere").symlink_to("absent")
    (root / "folder").symlink_to("sub")
    scan = Scan.of(root)
    assert {rel: entry.link for rel, entry in scan.entries.items()} == {
        "inside": "inside", "escape": "escape", "sub/real": None
    }  # fmt: skip
    assert scan.read("inside", 9) == b"x" and scan.head("escape", 9) == b""
    assert code(lambda: scan.path("escape")) == "artifact.path_escape"
    assert code(lambda: scan.path("absent")) == "artifact.missing"
    assert [(f.code, f.path) for f in scan.findings] == [("artifact.missing", "nowhere")]


def test_links_of_a_hub_cache_stay_in_their_own_folder(tmp_path: Path) -> None:
    snapshot = graphs.hub_cache(tmp_path)
    other = tmp_path / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    (other / "x").write_text("x")
    (snapshot / "foreign").symlink_to(other / "x")
    assert {rel: e.link for rel, e in Scan.of(snapshot).entries.items()} == {
        "foreign": "escape", "model.onnx": "cache", "weights.bin": "cache"
    }  # fmt: skip


def test_names_that_are_not_utf8_are_left_aside_and_said(tmp_path: Path) -> None:
    with open(os.fsencode(tmp_path) + b"/\xff.gguf", "wb") as stream:
        stream.write(b"GGUF")
    package = inspect(tmp_path)
    assert any("not UTF-8" in f.message for f in package.findings)
    encode(package)


def test_partial_downloads_and_pointers(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(b"")
    (tmp_path / "b.safetensors.incomplete").write_bytes(b"xx")
    (tmp_path / "c.bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    scan = Scan.of(tmp_path)
    found = {rel: scan.check_weights_file(rel) for rel in scan.entries}
    assert {rel: f.code for rel, f in found.items() if f} == {
        "a.safetensors": "artifact.truncated",
        "b.safetensors.incomplete": "artifact.truncated",
        "c.bin": "artifact.lfs_pointer",
    }
    assert scan.entries["c.bin"].lfs_pointer


def test_working_folders_are_not_walked(tmp_path: Path) -> None:
    for name in (".git", "__pycache__", ".cache", "kept"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_text("x")
    assert list(Scan.of(tmp_path).entries) == ["kept/f"]


@pytest.mark.parametrize(
    ("name", "role"),
    [
        ("model.safetensors.index.json", FileRole.INDEX),
        ("a/tokenizer.json", FileRole.TOKENIZER),
        ("chat_template.jinja", FileRole.TEMPLATE),
        ("preprocessor_config.json", FileRole.PROCESSOR),
        ("LICENSE", FileRole.LICENCE),
        ("README.md", FileRole.README),
        ("modeling_x.py", FileRole.CODE),
        ("config.json", FileRole.CONFIG),
        ("model.onnx", FileRole.GRAPH),
        ("model.safetensors", FileRole.WEIGHTS),
        ("notes", FileRole.OTHER),
    ],
)
def test_roles_by_name(name: str, role: FileRole) -> None:
    assert role_of(name) is role


# ---- references --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("directory", "name", "expected"),
    [("", "a/b", "a/b"), ("x", "./a", "x/a"), ("x/y", "../a", "x/a"), ("x", "..", ""), ("", "a//b", "a/b")],
)
def test_references_inside(directory: str, name: str, expected: str, tmp_path: Path) -> None:
    assert Scan.of(tmp_path).refer(directory, name) == expected


@pytest.mark.parametrize("name", ["../a", "x/../../a", "/etc/passwd", "C:\\x", "C:x", "a\\..\\b", "a\0b"])
def test_references_that_lead_out(name: str, tmp_path: Path) -> None:
    assert code(lambda: Scan.of(tmp_path).refer("", name)) == "artifact.path_escape"


# ---- focus -------------------------------------------------------------------------------------


def test_one_file_is_served_by_its_siblings(tmp_path: Path) -> None:
    graphs.decoder_package(tmp_path, past=True)
    graphs.mlp(tmp_path / "package" / "other.onnx")
    (artifact,) = inspect(tmp_path / "package" / "model.onnx").artifacts
    assert artifact.entry == "model.onnx" and artifact.tokenizer is not None


def test_a_shard_stands_for_its_model(tmp_path: Path) -> None:
    (artifact,) = inspect(hf.sharded(tmp_path) / "model-00002-of-00003.safetensors").artifacts
    assert artifact.id == "transformers:." and len(artifact.tensors.shards) == 3


def test_a_file_that_is_a_link_stays_where_it_is_named(tmp_path: Path) -> None:
    snapshot = graphs.hub_cache(tmp_path)
    package = inspect(snapshot / "model.onnx")
    assert package.root == str(snapshot.resolve()) and package.artifacts[0].findings == []


def test_fingerprints_follow_names_sizes_and_times(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("x")
    before = Scan.of(tmp_path).fingerprint()
    assert Scan.of(tmp_path).fingerprint() == before
    os.utime(tmp_path / "a", ns=(1, 1))
    changed = Scan.of(tmp_path).fingerprint()
    (tmp_path / "a").rename(tmp_path / "b")
    assert len({before, changed, Scan.of(tmp_path).fingerprint()}) == 3


# ---- JSON --------------------------------------------------------------------------------------


def test_json_values_are_pythons_own() -> None:
    text = b'\xef\xbb\xbf{"a": [1, 2.5, "\\u00e4", null, true], "pair": "\\ud83d\\ude00"}'
    assert parse_json(text, "x") == {"a": [1, 2.5, "ä", None, True], "pair": "😀"}


@pytest.mark.parametrize(
    ("number", "value"),
    [
        ("9223372036854775807", (1 << 63) - 1),
        ("1000000000000000019884624838656", 1e30),
        ("-9999999999999999999", -1e19),
    ],
)
def test_numbers_beyond_64_bits_become_floats(number: str, value: float) -> None:
    found = parse_json(b'{"a": ' + number.encode() + b"}", "x")["a"]
    assert found == pytest.approx(value) and type(found) is type(value)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"{", "not valid JSON"),
        (b"\xff", "not valid JSON"),
        (b'{"a":1}\0', "zero bytes"),
        (b'{"a": {"b": 1, "b": 2}}', "repeats the key `b`"),
        (b"[" * 150 + b"]" * 150, "nested too deeply"),
        (b"[" * 5000, "nested too deeply"),
        (b'{"a": "\\ud800"}', "half of a character"),
        (b'{"\\udfff": 1}', "half of a character"),
    ],
)
def test_json_that_is_refused(data: bytes, said: str) -> None:
    with pytest.raises(ReadError, match=said) as caught:
        parse_json(data, "x")
    assert caught.value.finding.code == "config.invalid"


def test_a_document_of_too_many_values() -> None:
    assert code(lambda: parse_json(b"[" + b"1," * 100 + b"1]", "x", 50)) == "config.invalid"
