"""A third-party backend, installed as its own distribution, that misbehaves on demand."""

from __future__ import annotations

from pathlib import Path

import pytest

PLUGIN = """
import os, time
from turnout.backends.base import *
from turnout.errors import InputError, LoadError
from turnout.package.facts import ArtifactKind
from turnout.tasks.contract import TensorsOutput


class Mine:
    name = "mine"
    reads = frozenset({ArtifactKind.UNKNOWN})
    tasks = frozenset({"tensor"})

    def describe(self):
        return BackendBuild("mine", "1.0")

    def devices(self):
        return ["cpu"]

    def requirements(self, case):
        misbehave(case.options.get("variant"))
        return [met("mine", Kind.ARTIFACT)]

    def inquire(self, case):
        return []

    def plan(self, case):
        return LoadPlan(case, "mine", dtype="float32")

    def dry_load(self, plan):
        return passed(EvidenceLevel.DRY_LOADED)

    def load(self, plan):
        misbehave(plan.case.options.get("dtype"))
        session = Session()
        session.plan, session.binding = plan, BindingReport(loaded=1)
        if plan.case.options.get("dtype") == "unresolved":
            session.binding.unresolved.append("lm_head.weight")
        return session

    def probe(self, session):
        return passed(EvidenceLevel.EXECUTED, measurements={"latency_s": 0.5})


class Session:
    dtype = "float32"

    def run(self, request, emit=None):
        misbehave(request.options.get("variant"))
        if request.options.get("variant") == "talk":
            held = []
            while True:
                held.append(bytearray(1 << 20))
                emit("on and on")
        if emit:
            emit("a")
            emit("b")
        return TensorsOutput({"pid": [os.getpid()]})

    def close(self):
        pass


def misbehave(how):
    if how == "abort":
        print("native code gave up", flush=True)
        os.abort()
    if how == "exit":
        os._exit(7)
    if how == "hang":
        while True:
            time.sleep(60)
    if how == "eat":
        held = []
        while True:
            held.append(bytearray(16 << 20))
    if how == "raise":
        raise RuntimeError("unordered_map::at")
    if how == "input":
        raise InputError("no such thing", hints=["try another"])
    if how == "load":
        raise LoadError("tensor x is missing", code="tensor.missing")
"""


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Installs the backend ``mine`` for worker processes; returns the folder it lies in."""
    folder = tmp_path / "site"
    information = folder / "turnout_mine-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "turnout_mine.py").write_text(PLUGIN)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: turnout-mine\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[turnout.backends]\nmine = turnout_mine:Mine\n")
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("TURNOUT_DATA", str(tmp_path / "data"))
    return folder


@pytest.fixture
def package_dir(tmp_path: Path) -> Path:
    """A package of no known format, which only the misbehaving backend reads."""
    folder = tmp_path / "package"
    folder.mkdir()
    (folder / "weights.mine").write_bytes(b"mine")
    return folder
