"""``check``: every verdict of a package, asked of the backends in a worker, with recorded evidence."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from turnout.backends import registry
from turnout.backends.admission import admit, estimate
from turnout.backends.base import (
    Action,
    Admission,
    Backend,
    BackendBuild,
    Case,
    CaseKey,
    Evidence,
    EvidenceLevel,
    Outcome,
    Reason,
    Remedy,
    State,
    Verdict,
    VerdictStatus,
)
from turnout.backends.requirements import common, readable
from turnout.backends.resolve import Assessment, choose, judge, measured_merit, rank
from turnout.config import WORKER
from turnout.errors import TurnoutError, UsageError
from turnout.evidence.ledger import Ledger
from turnout.package.facts import Artifact, Package
from turnout.package.inspect import inspect
from turnout.package.store import resolve as resolve_name
from turnout.tasks.contract import contract_of
from turnout.types import Task
from turnout.worker import wire
from turnout.worker.process import Worker

Progress = Callable[[str], None]


def _silent(text: str) -> None:
    """Progress that nobody wants to see."""


@dataclass(slots=True)
class Report:
    """All verdicts of a package, best first, with the choice among the supported ones."""

    package: Package
    verdicts: list[Verdict] = field(default_factory=list)
    chosen: Verdict | None = None
    why: str = ""

    def to_json(self) -> dict[str, Any]:
        """The stable JSON object of ``turnout check --json`` (docs/cli.md)."""
        chosen = verdict_json(self.chosen) | {"why": self.why} if self.chosen else None
        return {
            "package": package_json(self.package),
            "verdicts": [verdict_json(v) for v in self.verdicts],
            "chosen": chosen,
        }


def package_json(package: Package) -> dict[str, Any]:
    """Summary of a package; tensors, files and parsed configs are left to ``turnout inspect --json``."""
    artifacts = [
        {
            "id": a.id,
            "kind": a.kind,
            "entry": a.entry,
            "tasks": a.task_ids(),
            "size_bytes": a.size_bytes,
            "tensors": len(a.tensors.tensors),
            "parameters": a.tensors.param_count,
            "architecture": a.architecture.model_type if a.architecture else None,
            "findings": msgspec.to_builtins(a.findings),
        }
        for a in package.artifacts
    ]
    return {
        "root": package.root,
        "source": package.source,
        "fingerprint": package.fingerprint,
        "artifacts": msgspec.to_builtins(artifacts),
        "findings": msgspec.to_builtins(package.findings),
        "scan_ms": package.scan_ms,
    }


def verdict_json(verdict: Verdict) -> dict[str, Any]:
    """Stable JSON of one verdict. Reasons of an unknown verdict are what would have to be known."""
    value: dict[str, Any] = msgspec.to_builtins(verdict)
    for name in ("plan", "key", "unknowns"):
        value.pop(name)
    value["level"] = verdict.level.name.lower()
    value["reasons"] = msgspec.to_builtins([*verdict.reasons, *verdict.unknowns])
    return value


def free_memory() -> int:
    """Bytes that new processes may use, within the limit of the control group if there is one."""
    import psutil  # type: ignore[import-untyped]

    free = int(psutil.virtual_memory().available)
    try:
        with open("/sys/fs/cgroup/memory.max") as limit, open("/sys/fs/cgroup/memory.current") as current:
            text = limit.read().strip()
            if text != "max":
                free = min(free, int(text) - int(current.read()))
    except (OSError, ValueError):
        pass
    return max(free, 0)


def device_profile(device: str) -> str:
    """What a measurement on ``device`` depends on: for a CPU its model and number of cores."""
    import os

    model = platform.processor() or platform.machine()
    try:
        with open("/proc/cpuinfo") as stream:
            model = next((line.split(":", 1)[1].strip() for line in stream if line.startswith("model name")), model)
    except OSError:
        pass
    return f"{device}:{model}:{os.cpu_count()}"


def case_key(case: Case, backend: str, build: BackendBuild, digest: str) -> CaseKey:
    """Key of a case; evidence stands only while every part of it stays the same."""
    recipe = case.artifact.recipe
    return CaseKey(
        artifact_digest=digest,
        artifact=case.artifact.id,
        task=contract_of(case.task).key,
        options=json.dumps(case.options, sort_keys=True, default=str),
        backend=backend,
        build=build.version,
        dependencies=json.dumps(build.dependencies, sort_keys=True),
        device=device_profile(case.device),
        recipe=recipe.id if recipe else "",
    )


class Judge:
    """Asks backends in a worker and keeps the ledger. A context manager; closes what it started."""

    def __init__(self, worker: Worker | None = None, ledger: Ledger | None = None) -> None:
        self._owns = (worker is None, ledger is None)
        self.worker = worker or Worker()
        self.ledger = ledger or Ledger()
        self.progress: Progress = _silent

    def __enter__(self) -> Judge:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the worker and closes the ledger, unless they were handed in."""
        if self._owns[0]:
            self.worker.close()
        if self._owns[1]:
            self.ledger.close()

    # ---- one case -------------------------------------------------------------------------

    def verdict(
        self, package: Package, case: Case, backend: str, execute: bool = False, believe: bool = False
    ) -> Verdict:
        """Verdict of one case, with recorded evidence and admission. ``execute`` first runs a case that
        is supported or unknown and fits memory; the backend is asked once either way. ``believe`` does not
        ask it where standing evidence says that this very case was executed (same bytes, options, versions)."""
        chosen = registry.get(backend)
        build = chosen.describe()
        if believe and self._executed(package, case, backend, build):
            assessment = Assessment(common(chosen, case, build))
        else:
            assessment = self._assess(package, case, chosen, build)
        self._offer_siblings(package, case, chosen, assessment)
        verdict = self._conclude(package, case, backend, build, assessment)
        if execute and _worth_running(verdict):
            self.execute(package, case, backend)
            verdict = self._conclude(package, case, backend, build, assessment)
        return verdict

    def _conclude(
        self, package: Package, case: Case, backend: str, build: BackendBuild, assessment: Assessment
    ) -> Verdict:
        estimates = estimate(case.artifact, case.task, backend, case.options)
        recorded, key = self._recorded(package, case, backend, build)
        verdict = judge(case, backend, assessment, estimates, recorded)
        verdict.key = key
        if verdict.status in (VerdictStatus.SUPPORTED, VerdictStatus.UNKNOWN):
            verdict.admission, verdict.admission_detail = admit(estimates, free_memory())
        return verdict

    def _assess(self, package: Package, case: Case, backend: Backend, build: BackendBuild) -> Assessment:
        if not readable(backend, case.artifact) or not build.available:
            return Assessment(common(backend, case, build))
        self.progress(f"asking {backend.name} about {case.artifact.id} for {case.task}")
        try:
            answer = self.worker.call(
                "assess",
                timeout=WORKER.assess_s,
                memory_bytes=WORKER.dry_load_bytes,
                backend=backend.name,
                case=case_message(package, case),
            )
        except TurnoutError as error:
            failure = Evidence(EvidenceLevel.INQUIRED, Outcome.FAIL, [_reason(error)])
            return Assessment(common(backend, case, build), [failure])
        typed: Assessment = wire.rebuild(answer, Assessment)
        return typed

    def _offer_siblings(self, package: Package, case: Case, backend: Backend, assessment: Assessment) -> None:
        for requirement in assessment.requirements:
            if (
                requirement.state is State.UNMET
                and requirement.id == "artifact.missing"
                and not readable(backend, case.artifact)
            ):
                siblings = [a for a in package.artifacts if readable(backend, a) and case.task in a.task_ids()][:3]
                requirement.remedies += [
                    Remedy(
                        Action.SELECT_ARTIFACT,
                        f"use the artifact `{a.id}` of this package",
                        ["turnout", "check", package.source, "--artifact", a.id],
                    )
                    for a in siblings
                ]

    def _recorded(
        self, package: Package, case: Case, backend: str, build: BackendBuild
    ) -> tuple[list[Evidence], CaseKey | None]:
        if case.task not in set(Task) or not self.ledger.knows(package.root):
            return [], None
        key = case_key(case, backend, build, self.ledger.digest(package, case.artifact))
        self.ledger.withdraw_stale(package.root, key)
        return self.ledger.standing(key), key

    def _executed(self, package: Package, case: Case, backend: str, build: BackendBuild) -> bool:
        recorded, _ = self._recorded(package, case, backend, build)
        passed = any(e.outcome is Outcome.PASS and e.level >= EvidenceLevel.EXECUTED for e in recorded)
        return passed and not any(e.outcome is Outcome.FAIL for e in recorded)

    def merit(self, package: Package, case: Case, backend: str) -> float | None:
        """Measured merit recorded for a case (higher is better), without asking the backend."""
        recorded, _ = self._recorded(package, case, backend, registry.get(backend).describe())
        if any(e.outcome is Outcome.FAIL for e in recorded):
            return None
        return measured_merit(case.task, recorded)

    # ---- the ladder -----------------------------------------------------------------------

    def execute(self, package: Package, case: Case, backend: str) -> list[Evidence]:
        """Loads the case in the worker, runs the probe, and records both rungs in the ledger."""
        self.progress(f"running {backend} on {case.artifact.id} for {case.task}")
        build = registry.get(backend).describe()
        key = case_key(case, backend, build, self.ledger.digest(package, case.artifact))
        evidence = self._climb(package, case, backend)
        for rung in evidence:
            self.ledger.record(package.root, key, rung)
        return evidence

    def _climb(self, package: Package, case: Case, backend: str) -> list[Evidence]:
        import time

        at = time.time()
        try:
            loaded = self.worker.call(
                "load",
                timeout=WORKER.load_s,
                memory_bytes=free_memory(),
                backend=backend,
                case=case_message(package, case),
            )
        except TurnoutError as error:
            return [Evidence(EvidenceLevel.LOADED, Outcome.FAIL, [_reason(error)], at=at)]
        measured = {"load_s": loaded["load_s"], "resident_bytes": float(self.worker.resident_bytes())}
        evidence = [Evidence(EvidenceLevel.LOADED, Outcome.PASS, measurements=measured, at=at)]
        try:
            probed: Evidence = wire.rebuild(self.worker.call("probe", timeout=WORKER.probe_s), Evidence)
            if probed.outcome is not Outcome.PASS:
                probed.level = EvidenceLevel.EXECUTED
        except TurnoutError as error:
            probed = Evidence(EvidenceLevel.EXECUTED, Outcome.FAIL, [_reason(error)], at=at)
        evidence.append(probed)
        if self.worker.pid is not None:
            self.worker.call("unload", timeout=WORKER.probe_s)
        return evidence


def _reason(error: TurnoutError) -> Reason:
    return Reason(error.code, error.message, observed="; ".join(error.hints))


def case_message(package: Package, case: Case) -> dict[str, Any]:
    """What a worker needs to know of a case: it inspects the package again by itself."""
    return {
        "source": package.source,
        "artifact": case.artifact.id,
        "task": case.task,
        "device": case.device,
        "options": case.options,
        "fingerprint": package.fingerprint,
    }


def open_package(path: str) -> Package:
    """Package at a path or under a store name; ``source`` is then the resolved path."""
    return inspect(resolve_name(str(path)).path)


def select_artifacts(package: Package, artifact: str | None) -> list[Artifact]:
    """All artifacts, or the one of that id. Raises ``UsageError`` naming the known ids."""
    if artifact is None:
        return package.artifacts
    found = package.artifact(artifact)
    if found is None:
        raise UsageError(
            f"no artifact `{artifact}` in `{package.source}`",
            hints=["artifacts here: " + ", ".join(a.id for a in package.artifacts)],
        )
    return [found]


def cases_of(
    package: Package, artifacts: list[Artifact], task: str | None, device: str, options: dict[str, Any]
) -> Iterator[Case]:
    """One case per artifact and task: the given task, or every task the artifact offers."""
    if task is not None:
        contract_of(task)
    for artifact in artifacts:
        for one in [task] if task else artifact.task_ids() or [Task.TENSOR]:
            yield Case(package.root, artifact, one, device, dict(options))


def check(
    path: str,
    task: str | None = None,
    *,
    artifact: str | None = None,
    backend: str | None = None,
    device: str = "cpu",
    execute: bool = False,
    options: dict[str, Any] | None = None,
    on_progress: Progress | None = None,
    judge: Judge | None = None,
) -> Report:
    """Verdicts of every artifact at ``path`` (a path or store name) for every task and backend.

    ``task``, ``artifact``, ``backend`` narrow the question. ``execute`` really loads and probes each
    case that is supported or unknown and fits memory, and records the evidence. Raises ``UsageError``
    for unknown names, ``NotFoundError`` when nothing is at ``path``.
    """
    names = [backend] if backend else registry.names()
    for name in names:
        registry.get(name)
    package = open_package(path)
    mine = judge or Judge()
    mine.progress = on_progress or _silent
    try:
        verdicts = []
        for case in cases_of(package, select_artifacts(package, artifact), task, device, options or {}):
            for name in names:
                verdicts.append(mine.verdict(package, case, name, execute))
    finally:
        if judge is None:
            mine.close()
    ranked = rank(verdicts)
    chosen, why = choose(_of_task(ranked, task or default_task(package, artifact)))
    return Report(package, ranked, chosen, why)


def _worth_running(verdict: Verdict) -> bool:
    return verdict.status in (VerdictStatus.SUPPORTED, VerdictStatus.UNKNOWN) and (
        verdict.admission is Admission.ADMITTED
    )


def _of_task(verdicts: list[Verdict], task: str) -> list[Verdict]:
    return [v for v in verdicts if v.task == task]


def default_task(package: Package, artifact: str | None = None) -> str:
    """Task to serve when none is named: chat where offered, else the first that an artifact offers."""
    offered = [t for a in select_artifacts(package, artifact) for t in a.task_ids()]
    if Task.CHAT in offered:
        return Task.CHAT
    return next((t for t in offered if t != Task.TENSOR), offered[0] if offered else Task.TENSOR)
