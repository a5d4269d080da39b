"""``--schema`` given something that is neither a schema nor a readable file."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnout.cli.options import grammar_of
from turnout.errors import UsageError


@pytest.mark.parametrize("schema", ["[" * 5000, "nowhere.json", "a\0b", "", ".", "binary"])
def test_it_is_refused_in_a_line(schema: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe{")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match="--schema") as caught:
        grammar_of(schema, None)
    assert len(caught.value.message) < 250
    assert "the schema itself" in caught.value.hints[0]
