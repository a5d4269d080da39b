"""The ledger: evidence stands while every part of its key stays, and is withdrawn with a reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from turnout.backends.base import CaseKey, EvidenceLevel, Outcome, failed, passed
from turnout.evidence.ledger import Ledger
from turnout.package.facts import Artifact, ArtifactKind, Package
from turnout.package.scan import Scan

KEY = CaseKey("d1", "gguf:m.gguf", "chat@1", "{}", "llamacpp", "1.0", "{}", "cpu:X:2", "")


@pytest.fixture
def ledger(tmp_path: Path):  # type: ignore[no-untyped-def]
    with Ledger(tmp_path / "deep" / "ledger.sqlite") as opened:
        yield opened


def test_evidence_comes_back_as_it_was(ledger: Ledger) -> None:
    rung = passed(EvidenceLevel.EXECUTED, measurements={"tokens_per_s": 12.5}, at=1.0)
    ledger.record("/p", KEY, rung)
    assert ledger.standing(KEY) == [rung]
    assert ledger.knows("/p") and not ledger.knows("/q")


@pytest.mark.parametrize("part", ["artifact_digest", "build", "dependencies", "recipe", "adapter"])
def test_a_changed_part_withdraws_with_the_reason(ledger: Ledger, part: str) -> None:
    ledger.record("/p", KEY, passed(EvidenceLevel.EXECUTED))
    changed = replace(KEY, **{part: 2 if part == "adapter" else "new"})
    assert ledger.standing(changed) == []
    reasons = ledger.withdraw_stale("/p", changed)
    assert len(reasons) == 1 and part in reasons[0] and "new" in reasons[0].replace("2", "new")
    assert ledger.standing(KEY) == []
    assert [reason for _, reason in ledger.withdrawn("/p")] == reasons


@pytest.mark.parametrize("part", ["task", "backend", "device", "options", "artifact"])
def test_another_case_is_left_alone(ledger: Ledger, part: str) -> None:
    ledger.record("/p", KEY, passed(EvidenceLevel.EXECUTED))
    other = replace(KEY, **{part: "other"})
    assert ledger.withdraw_stale("/p", other) == []
    assert len(ledger.standing(KEY)) == 1


def test_a_newer_run_of_the_same_level_supersedes(ledger: Ledger) -> None:
    ledger.record("/p", KEY, passed(EvidenceLevel.EXECUTED))
    ledger.record("/p", KEY, failed(EvidenceLevel.EXECUTED, "runtime.failed", "crash"))
    assert [e.outcome for e in ledger.standing(KEY)] == [Outcome.FAIL]


def package(directory: Path) -> tuple[Package, Artifact]:
    scan = Scan.of(directory)
    artifact = Artifact("gguf:a.bin", ArtifactKind.GGUF, "a.bin", files=["a.bin"])
    return Package(str(scan.root), str(directory), scan.fingerprint(), list(scan.entries.values())), artifact


def test_digest_follows_content_not_time(ledger: Ledger, tmp_path: Path) -> None:
    root = tmp_path / "p"
    root.mkdir()
    (root / "a.bin").write_bytes(b"one")
    first = ledger.digest(*package(root))
    (root / "a.bin").touch()
    assert ledger.digest(*package(root)) == first
    (root / "a.bin").write_bytes(b"two")
    assert ledger.digest(*package(root)) != first


def test_two_processes_write_one_ledger(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as one, Ledger(tmp_path / "l.sqlite") as two:
        one.record("/p", KEY, passed(EvidenceLevel.LOADED))
        two.record("/p", KEY, passed(EvidenceLevel.EXECUTED))
        assert {e.level for e in one.standing(KEY)} == {EvidenceLevel.LOADED, EvidenceLevel.EXECUTED}
