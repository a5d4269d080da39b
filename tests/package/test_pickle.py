"""Torch files by their opcodes: names, tensors and forms, and disguises that must not help."""

from __future__ import annotations

import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

from turnout.package.facts import ArtifactKind, CodeNeed
from turnout.package.formats import pickle as reader
from turnout.package.formats.pickle import ALLOWED, pickle_globals, read_pickle, unsafe_names
from turnout.package.inspect import inspect
from turnout.package.scan import ReadError, Scan

SYSTEM = f"{os.name}.system"


class Evil:
    """Unpickles into a shell command."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/turnout-pickle-ran",)


def facts_of(path: Path) -> reader.PickleFacts:
    facts = read_pickle(Scan.of(path.parent), path.name)
    assert facts is not None
    return facts


def zipped(path: Path, members: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


STATE = {
    "a": torch.zeros(3, 4),
    "b": torch.nn.Parameter(torch.ones(5, dtype=torch.bfloat16)),
    "c": torch.zeros(2, dtype=torch.float8_e4m3fn),
    "view": torch.arange(10)[3:7],
    "scalar": torch.tensor(1.0),
}
LISTED = {
    "a": ("F32", (3, 4), 48),
    "b": ("BF16", (5,), 10),
    "c": ("F8_E4M3", (2,), 2),
    "view": ("I64", (4,), 32),
    "scalar": ("F32", (), 4),
}


# ---- names -------------------------------------------------------------------------------------


def test_allowed_names_are_those_of_the_weights_only_unpickler() -> None:
    from torch._weights_only_unpickler import _get_allowed_globals

    known = _get_allowed_globals()
    assert unsafe_names(list(known)) == []
    assert sorted(ALLOWED - set(known)) == []
    invented = [
        "torch.storage._load_from_bytes",
        "torch.EvilStorage",
        "torch.load",
        "torch.hub.load",
        "torch.float32.x",
    ]
    assert unsafe_names(invented) == invented


@pytest.mark.parametrize("protocol", range(6))
def test_names_in_every_protocol(protocol: int) -> None:
    data = pickle.dumps({"w": Evil(), "o": OrderedDict(a=1)}, protocol=protocol)
    names = pickle_globals(data)
    assert SYSTEM in names and "collections.OrderedDict" in names


DISGUISES = {
    "decoy-popped": b"\x80\x04\x8c\x05posix\x8c\x06system\x8c\x0bcollections\x8c\x0bOrderedDict00\x93\x8c\x02id\x85R.",
    "memo": b"\x80\x04\x8c\x05posix\x94\x8c\x06system\x94\x8c\x01x\x8c\x01y0000h\x00h\x01\x93\x8c\x02id\x85R.",
    "memo-overwritten": b"\x80\x04\x8c\x0bcollectionsq\x00\x8c\x05posixq\x000\x8c\x06systemq\x0100h\x00h\x01\x93.",
    "duplicated": b"\x80\x04\x8c\x05posix\x8c\x06system\x8c\x01x200\x93.",
    "instance": b"(S'id'\niposix\nsystem\n.",
    "object": b"(cposix\nsystem\nS'id'\no.",
}


@pytest.mark.parametrize("name", DISGUISES)
def test_disguised_names_are_found(name: str) -> None:
    assert "posix.system" in pickle_globals(DISGUISES[name])


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04\x8c\x05posix\x94N\x93.",  # takes what is no text
        b"\x80\x04\x8c\x05posix\x8c\x06system\x86\x8c\x01x\x93.",  # text inside a tuple
        b"\x80\x02\x82\x01.",  # extension registry
    ],
)
def test_names_that_only_running_tells_are_unsafe(data: bytes) -> None:
    assert unsafe_names(pickle_globals(data))


@pytest.mark.parametrize(
    "data", [b"", b"\x80\x04", b"\x80\x04\x93.", b"hello", b"\x80\x04}\x94", b"\x80\x04\x8d" + b"\xff" * 8]
)
def test_bytes_that_are_no_pickle(data: bytes) -> None:
    with pytest.raises(ReadError) as caught:
        pickle_globals(data)
    assert caught.value.finding.code == "artifact.corrupt"


# ---- files -------------------------------------------------------------------------------------


def test_a_clean_state_dict_lists_its_tensors(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "m.pt")
    facts = facts_of(tmp_path / "m.pt")
    assert facts.form == "zip" and facts.unsafe == []
    assert {n: (t.dtype, t.shape, t.nbytes) for n, t in facts.inventory.tensors.items()} == LISTED


def test_a_lightning_checkpoint_lists_the_tensors_of_its_state_dict(tmp_path: Path) -> None:
    torch.save({"state_dict": STATE, "epoch": 3, "args": {"lr": 0.1}, "names": ["x"]}, tmp_path / "m.ckpt")
    assert set(facts_of(tmp_path / "m.ckpt").inventory.tensors) == set(STATE)


def test_forms_are_told_apart(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    torch.save(torch.nn.Linear(2, 2), tmp_path / "module.pt")
    (tmp_path / "plain.pt").write_bytes(pickle.dumps({"a": 1}))
    zipped(tmp_path / "script.pt", {"m/code/x.py": b"", "m/constants.pkl": b"\x80\x02).", "m/data.pkl": b"\x80\x02N."})
    zipped(tmp_path / "export.pt", {"m/archive_format": b"pt2", "m/models/model.json": b"{}"})
    package = inspect(tmp_path)
    kinds = {a.entry: a.kind for a in package.artifacts}
    assert kinds == {
        "old.pth": ArtifactKind.TORCH_PICKLE,
        "module.pt": ArtifactKind.TORCH_PICKLE,
        "plain.pt": ArtifactKind.TORCH_PICKLE,
        "script.pt": ArtifactKind.TORCHSCRIPT,
        "export.pt": ArtifactKind.TORCH_EXPORT,
    }
    codes = {a.entry: [f.code for f in a.findings] for a in package.artifacts}
    assert codes["old.pth"] == codes["script.pt"] == codes["export.pt"] == []
    assert codes["module.pt"] == ["code.pickle_unsafe"]
    assert codes["plain.pt"] == ["artifact.corrupt"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_real_torchscript(tmp_path: Path) -> None:
    torch.jit.save(torch.jit.script(torch.nn.Linear(2, 2)), tmp_path / "m.pt")
    facts = facts_of(tmp_path / "m.pt")
    assert facts.form == "torchscript" and facts.unsafe == []


@pytest.mark.parametrize("new", [True, False])
def test_a_hostile_file_is_named_and_not_opened(new: bool, tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(2), "x": Evil()}, tmp_path / "m.bin", _use_new_zipfile_serialization=new)
    artifact = inspect(tmp_path).artifacts[0]
    assert artifact.code is CodeNeed.FORBIDDEN
    assert [(f.code, SYSTEM in f.observed) for f in artifact.findings] == [("code.pickle_unsafe", True)]
    assert not Path("/tmp/turnout-pickle-ran").exists()


CLEAN, HOSTILE = pickle.dumps(OrderedDict(), protocol=2), pickle.dumps(Evil(), protocol=2)


@pytest.mark.parametrize(
    "members",
    [
        {"a/data.pkl": CLEAN, "archive/data.pkl": HOSTILE},
        {"archive/data.pkl": HOSTILE, "archive/archive_format": b"pt2"},
        {"archive/data.pkl": HOSTILE, "archive/code/x.py": b"", "archive/constants.pkl": CLEAN},
    ],
)
def test_a_second_pickle_or_another_form_hides_nothing(members: dict[str, bytes], tmp_path: Path) -> None:
    assert SYSTEM in facts_of(zipped(tmp_path / "m.pt", members)).unsafe


def test_an_old_file_must_be_whole(tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "m.pth", _use_new_zipfile_serialization=False)
    data = (tmp_path / "m.pth").read_bytes()
    (tmp_path / "m.pth").write_bytes(data[:200])
    with pytest.raises(ReadError):
        read_pickle(Scan.of(tmp_path), "m.pth")


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_a_cut_zip_is_truncated(share: float, tmp_path: Path) -> None:
    torch.save(STATE, tmp_path / "m.pt")
    data = (tmp_path / "m.pt").read_bytes()
    (tmp_path / "m.pt").write_bytes(data[: int(len(data) * share)])
    with pytest.raises(ReadError) as caught:
        read_pickle(Scan.of(tmp_path), "m.pt")
    assert caught.value.finding.code == "artifact.truncated"


def test_a_storage_that_is_absent_or_short_is_said(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(8)}, tmp_path / "whole.pt")
    with zipfile.ZipFile(tmp_path / "whole.pt") as archive:
        members = {m.filename: archive.read(m) for m in archive.infolist()}
    data = next(n for n in members if n.endswith("data/0"))
    for changed in ({n: d for n, d in members.items() if n != data}, members | {data: bytes(16)}):
        facts = facts_of(zipped(tmp_path / "m.pt", changed))
        assert [p.code for p in facts.inventory.problems] == ["artifact.truncated"]


def test_claims_beyond_reason_end_soon(tmp_path: Path) -> None:
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x01tQ"
    shape = b"(X\x01\x00\x00\x00aJ\xff\xff\xff\x7ft"  # text times a large number
    data = (
        b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n(" + storage + b"K\x00" + shape + b")\x89}tRs."
    )
    facts = facts_of(zipped(tmp_path / "m.pt", {"m/data.pkl": data, "m/data/0": b"0000"}))
    assert facts.unsafe == [] and facts.inventory.tensors == {}
    # One dictionary in a thousand places of another, four levels deep.
    level = b"}q\x00"
    for depth in range(4):
        items = b"".join(b"M" + n.to_bytes(2, "little") + b"h" + bytes([depth]) for n in range(1000))
        level += b"}q" + bytes([depth + 1]) + b"(" + items + b"u"
    facts = facts_of(zipped(tmp_path / "m.pt", {"m/data.pkl": b"\x80\x02" + level + b"."}))
    assert facts.inventory.tensors == {}


def test_a_pickle_that_unpacks_to_too_much_is_not_unpacked(tmp_path: Path) -> None:
    archive = zipfile.ZipFile(tmp_path / "m.pt", "w", zipfile.ZIP_DEFLATED)
    with archive, archive.open("m/data.pkl", "w") as stream:
        for _ in range(25):
            stream.write(bytes(1 << 20))
    with pytest.raises(ReadError) as caught:
        read_pickle(Scan.of(tmp_path), "m.pt")
    assert "unpacks to" in caught.value.finding.message


def test_other_files_are_left_alone(tmp_path: Path) -> None:
    zipped(tmp_path / "m.pt", {"hello.txt": b"hi"})
    (tmp_path / "n.bin").write_bytes(b"\0" * 64)
    scan = Scan.of(tmp_path)
    assert read_pickle(scan, "m.pt") is None and read_pickle(scan, "n.bin") is None
