"""What belongs to a package and what merely lies beside it."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.shapes import ggufs

from turnout.errors import NotFoundError
from turnout.package.facts import ArtifactKind
from turnout.package.inspect import inspect


def test_a_single_file_is_judged_without_its_neighbours(tmp_path: Path) -> None:
    path = ggufs.write_gguf(tmp_path / "one.gguf")
    ggufs.write_gguf(tmp_path / "two.gguf")
    (tmp_path / "holiday.jpg").write_bytes(b"x")
    package = inspect(path)
    assert [a.entry for a in package.artifacts] == ["one.gguf"]
    assert [f.path for f in package.files] == ["one.gguf"]


def test_a_neighbour_that_changes_leaves_the_fingerprint(tmp_path: Path) -> None:
    path = ggufs.write_gguf(tmp_path / "one.gguf")
    before = inspect(tmp_path).fingerprint
    (tmp_path / "server.log").write_text("a line")
    assert inspect(tmp_path).fingerprint == before
    ggufs.write_gguf(path, kind="Q4_0")
    assert inspect(tmp_path).fingerprint != before


def test_nothing_there_and_nothing_known(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="nothing at"):
        inspect(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("hello")
    package = inspect(tmp_path)
    assert [a.kind for a in package.artifacts] == [ArtifactKind.UNKNOWN]
    assert package.artifacts[0].findings[0].code == "artifact.missing"
