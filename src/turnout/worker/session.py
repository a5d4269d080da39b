"""``load``: choose a case, load it in its own worker as a transaction, run requests on it."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import msgspec

from turnout.backends import registry
from turnout.backends.base import Admission, BindingReport, Case, Verdict, VerdictStatus
from turnout.backends.resolve import prior, rank
from turnout.config import WORKER
from turnout.errors import MemoryAdmissionError, NotSupportedError, WorkerError
from turnout.package.facts import Package
from turnout.tasks.contract import contract_of, validate
from turnout.types import Executed, Request, Result, Sampling
from turnout.worker import wire
from turnout.worker.judge import (
    Judge,
    Progress,
    case_message,
    cases_of,
    default_task,
    free_memory,
    open_package,
    select_artifacts,
)
from turnout.worker.process import Worker


class Session:
    """A model loaded for one task, in a process of its own. A context manager.

    After a crash of the worker, the request that was under way raises ``WorkerError`` and the next
    ``run`` loads the same case again.
    """

    def __init__(self, package: Package, case: Case, verdict: Verdict, why: str, digest: str, worker: Worker) -> None:
        self.package = package
        self.verdict = verdict
        self.why = why
        self.task = case.task
        self.binding = BindingReport()
        self.dtype = ""
        self.recipe = ""
        self.load_s = 0.0
        self._case = case
        self._digest = digest
        self._worker = worker
        self._loaded = False
        self._closed = False

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id of the worker while it runs."""
        return self._worker.pid

    def load(self) -> None:
        """Loads the case unless it is loaded. Raises ``LoadError`` or ``WorkerError``; then nothing
        stays behind."""
        if self._loaded and self._worker.pid is not None:
            return
        answer = self._worker.call(
            "load",
            timeout=WORKER.load_s,
            memory_bytes=free_memory(),
            backend=self.verdict.backend,
            case=case_message(self.package, self._case),
        )
        self.binding = wire.rebuild(answer["binding"], BindingReport)
        self.dtype, self.recipe, self.load_s = answer["dtype"], answer["recipe"], answer["load_s"]
        self._loaded = True

    def run(
        self,
        inputs: dict[str, Any],
        sampling: Sampling | None = None,
        options: dict[str, Any] | None = None,
        emit: Callable[[str], None] | None = None,
        timeout: float = WORKER.run_s,
    ) -> Result:
        """Result of one request. ``inputs`` by port name of the task's contract; ``emit`` receives
        text as it is generated. Raises ``InputError`` for input that does not fit, ``WorkerError``
        when the worker dies or ``timeout`` seconds pass."""
        if self._closed:
            raise WorkerError("the session is closed")
        request = Request(self.task, dict(inputs), sampling or Sampling(), dict(options or {}))
        validate(request)
        started = time.perf_counter()
        self.load()
        loaded = time.perf_counter() - started
        try:
            answer = self._worker.call("run", timeout=timeout, on_event=emit, request=request, stream=emit is not None)
        finally:
            self._loaded = self._worker.pid is not None
        output = wire.rebuild(answer["output"], contract_of(self.task).output_type)
        timings = {**answer["timings"], "load_s": self.load_s, "reload_s": loaded if loaded > 0.01 else 0.0}
        return Result(self.task, output, self.executed(output), timings)

    def executed(self, output: Any = None) -> Executed:
        """Identity of what computes here."""
        build = registry.get(self.verdict.backend).describe()
        recipe = getattr(output, "recipe", "") or self.recipe
        return Executed(
            self._case.artifact.id,
            self._digest,
            self.verdict.backend,
            build.version,
            self._case.device,
            self.dtype,
            recipe,
        )

    def close(self) -> None:
        """Unloads and ends the worker; may be called twice."""
        self._closed = True
        self._worker.close()


def load(
    path: str,
    task: str | None = None,
    *,
    artifact: str | None = None,
    backend: str | None = None,
    device: str = "cpu",
    options: dict[str, Any] | None = None,
    on_progress: Progress | None = None,
) -> Session:
    """Session on the best supported case of the package at ``path`` (a path or store name).

    ``task`` None takes chat where offered, else the first task of the package. Cases are asked in
    the order of measured merit, then of the stated prior, and the first supported one that fits
    memory is loaded: nothing falls back to another task, device, precision or trust. Raises
    ``NotSupportedError`` with every backend's reason, ``MemoryAdmissionError``, ``LoadError``.
    """
    package = open_package(path)
    names = [backend] if backend else registry.names()
    for name in names:
        registry.get(name)
    wanted = task or default_task(package, artifact)
    worker = Worker()
    with Judge(worker=worker) as judge:
        if on_progress:
            judge.progress = on_progress
        try:
            case, verdict, why = first_supported(judge, package, wanted, artifact, names, device, options or {})
            session = Session(package, case, verdict, why, judge.ledger.digest(package, case.artifact), worker)
            judge.progress(f"loading {case.artifact.id} on {verdict.backend}")
            session.load()
        except BaseException:
            worker.close()
            raise
    return session


def first_supported(
    judge: Judge,
    package: Package,
    task: str,
    artifact: str | None,
    names: list[str],
    device: str,
    options: dict[str, Any],
) -> tuple[Case, Verdict, str]:
    """The case to run, its verdict, and why it was preferred. Raises ``NotSupportedError`` with every
    backend's reason, or ``MemoryAdmissionError``."""
    refused: list[Verdict] = []
    cases = list(cases_of(package, select_artifacts(package, artifact), task, device, options))
    pairs = [(case, name) for case in cases for name in names]
    measured = _measured(judge, package, pairs)
    order = sorted(range(len(pairs)), key=lambda i: (-(measured[i] or 0.0), prior(pairs[i][1]), i))
    for index in order:
        case, name = pairs[index]
        verdict = judge.verdict(package, case, name, believe=True)
        if verdict.status is VerdictStatus.SUPPORTED and verdict.admission is not Admission.INSUFFICIENT_MEMORY:
            rivals = sum(1 for m in measured if m is not None)
            why = (
                f"best of {rivals} measured cases"
                if measured[index] is not None
                else ("first supported in the stated prior; nothing measured (`turnout check --execute` measures)")
            )
            if len(names) == 1:
                why = "asked for"
            return case, verdict, why
        refused.append(verdict)
    raise _refusal(package, task, refused)


def _measured(judge: Judge, package: Package, pairs: list[tuple[Case, str]]) -> list[float | None]:
    """Recorded merit of each pair, without asking any backend."""
    if not judge.ledger.knows(package.root):
        return [None] * len(pairs)
    merits: list[float | None] = []
    for case, name in pairs:
        merits.append(judge.merit(package, case, name))
    return merits


def _refusal(package: Package, task: str, refused: list[Verdict]) -> NotSupportedError | MemoryAdmissionError:
    ranked = rank(refused)
    large = next((v for v in ranked if v.status is VerdictStatus.SUPPORTED), None)
    if large is not None:
        return MemoryAdmissionError(
            f"`{package.source}` is supported by {large.backend} but does not fit memory now: {large.admission_detail}",
            hints=["free memory or choose a smaller artifact"],
        )
    closest = [v for v in ranked if v.reasons or v.unknowns]
    lines = [f"  {v.backend} ({v.artifact}): {v.status}: {_first_reason(v)}" for v in _telling(closest)]
    hints = [f"{m.text}" for v in closest[:1] for m in v.remedies[:3]]
    code = _first_code(closest)
    return NotSupportedError(
        "\n".join([f"nothing here runs `{package.source}` for `{task}`", *lines]),
        code=code,
        hints=[*hints, f"`turnout check {package.source} --task {task}` shows every reason"],
    )


def _telling(verdicts: list[Verdict]) -> list[Verdict]:
    """Verdicts of backends that read the format, or all when none does."""
    reading = [
        v for v in verdicts if not any(r.code == "artifact.missing" and " reads " in r.message for r in v.reasons)
    ]
    return (reading or verdicts)[:6]


def _first_reason(verdict: Verdict) -> str:
    reasons = [*verdict.reasons, *verdict.unknowns]
    return f"{reasons[0].code}: {reasons[0].message}" if reasons else ""


def _first_code(verdicts: list[Verdict]) -> str:
    for verdict in _telling(verdicts):
        for reason in [*verdict.reasons, *verdict.unknowns]:
            return reason.code
    return "task.not_offered"


def result_json(result: Result) -> dict[str, Any]:
    """The stable JSON object of ``turnout run --json`` (docs/cli.md); arrays become lists."""
    value: dict[str, Any] = msgspec.to_builtins(result, enc_hook=_plain)
    return value


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} has no JSON form")
