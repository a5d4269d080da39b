"""From requirements and evidence to verdicts, and from verdicts to a choice. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from turnout.backends.base import (
    SAME_CASE,
    Admission,
    Case,
    Estimates,
    Evidence,
    EvidenceLevel,
    LoadPlan,
    Outcome,
    Reason,
    Remedy,
    Requirement,
    State,
    Verdict,
    VerdictStatus,
)
from turnout.types import Task

# Stated prior for the order among supported cases without measurements: what decodes fastest on
# CPU first for text, the runtime made for the format first elsewhere (docs/compatibility.md).
PRIOR = (
    "llamacpp",
    "openvino-genai",
    "onnxruntime-genai",
    "ctranslate2",
    "openvino",
    "onnxruntime",
    "tabular",
    "sentence-transformers",
    "torch-native",
    "openvino-native",
    "transformers",
    "diffusers",
)
# Score by which measured cases of a task are ordered; higher is better.
MEASURES: dict[str, str] = {Task.TEXT_GENERATION: "tokens_per_s", Task.CHAT: "tokens_per_s"}


@dataclass(slots=True)
class Assessment:
    """Everything a backend said of one case."""

    requirements: list[Requirement] = field(default_factory=list)
    evidence: list[Evidence] = field(default_factory=list)
    plan: LoadPlan | None = None
    notes: list[str] = field(default_factory=list)


def status_of(requirements: Iterable[Requirement], evidence: Iterable[Evidence] = ()) -> VerdictStatus:
    """Minimum over requirements: unmet without a remedy < unknown < unmet with a remedy < met.

    A failed rung of evidence counts like an unmet requirement, an errored one like an unknown.
    """
    worst = VerdictStatus.SUPPORTED
    for item in requirements:
        if item.state is State.UNMET:
            worst = _worse(worst, _status_of_unmet(item.remedies))
        elif item.state is State.UNKNOWN:
            worst = _worse(worst, VerdictStatus.UNKNOWN)
    for rung in evidence:
        if rung.outcome is Outcome.FAIL:
            worst = _worse(worst, _status_of_unmet(rung.remedies))
        elif rung.outcome is Outcome.ERROR:
            worst = _worse(worst, VerdictStatus.UNKNOWN)
    return worst


_ORDER = (VerdictStatus.UNSUPPORTED, VerdictStatus.UNKNOWN, VerdictStatus.CONDITIONAL, VerdictStatus.SUPPORTED)


def _worse(one: VerdictStatus, other: VerdictStatus) -> VerdictStatus:
    return min(one, other, key=_ORDER.index)


def _status_of_unmet(remedies: Iterable[Remedy]) -> VerdictStatus:
    same_case = any(remedy.action in SAME_CASE and not remedy.speculative for remedy in remedies)
    return VerdictStatus.CONDITIONAL if same_case else VerdictStatus.UNSUPPORTED


def judge(
    case: Case, backend: str, assessment: Assessment, estimates: Estimates, recorded: Iterable[Evidence] = ()
) -> Verdict:
    """Verdict of one case. ``recorded`` is standing evidence of this very case from the ledger.

    Recorded passes raise the level; a recorded failure makes the case unsupported until a
    dependency changes. Unknown never becomes supported by anything but execution.
    """
    recorded = list(recorded)
    evidence = [*assessment.evidence, *recorded]
    status = status_of(assessment.requirements, evidence)
    executed = max((e.level for e in recorded if e.outcome is Outcome.PASS), default=EvidenceLevel.DECLARED)
    if status is VerdictStatus.UNKNOWN and executed >= EvidenceLevel.EXECUTED:
        status = VerdictStatus.SUPPORTED  # what would settle it was done
    level = max((e.level for e in evidence if e.outcome is Outcome.PASS), default=EvidenceLevel.INSPECTED)
    unmet = [r for r in assessment.requirements if r.state is State.UNMET]
    failed = [e for e in evidence if e.outcome is Outcome.FAIL]
    errors = [e for e in evidence if e.outcome is Outcome.ERROR]
    reasons = [r.reason for r in unmet if r.reason] + [reason for e in failed for reason in e.reasons]
    remedies = [m for r in unmet for m in r.remedies] + [m for e in failed for m in e.remedies]
    unknowns = [r.reason for r in assessment.requirements if r.state is State.UNKNOWN and r.reason]
    unknowns += [reason for e in errors for reason in e.reasons]
    measurements = _measurements(recorded)
    if "load_s" in measurements:
        estimates.load_s = measurements["load_s"]
    return Verdict(
        artifact=case.artifact.id,
        kind=case.artifact.kind,
        task=case.task,
        backend=backend,
        device=case.device,
        status=status,
        level=level,
        reasons=_unique_reasons(reasons),
        remedies=_by_cost(remedies),
        unknowns=_unique_reasons(unknowns) if status is not VerdictStatus.SUPPORTED else [],
        notes=assessment.notes,
        estimates=estimates,
        plan=assessment.plan,
        measurements=measurements,
    )


def _unique_reasons(reasons: Iterable[Reason]) -> list[Reason]:
    return list({(r.code, r.message, r.where): r for r in reasons}.values())


def _by_cost(remedies: Iterable[Remedy]) -> list[Remedy]:
    unique = {(r.action, r.text): r for r in remedies}
    return sorted(unique.values(), key=lambda r: (r.changes_trust, r.cost.seconds, r.cost.bytes))


def _measurements(recorded: Iterable[Evidence]) -> dict[str, float]:
    merged: dict[str, float] = {}
    for evidence in recorded:
        if evidence.outcome is Outcome.PASS:
            merged.update(evidence.measurements)
    return merged


def measured_merit(task: str, recorded: Iterable[Evidence]) -> float | None:
    """Merit of recorded passes of a case, see ``score``."""
    return _merit(task, _measurements(recorded))


def score(verdict: Verdict) -> float | None:
    """Measured merit of a verdict (higher is better), or None without measurements."""
    return _merit(verdict.task, verdict.measurements)


def _merit(task: str, measurements: dict[str, float]) -> float | None:
    measure = MEASURES.get(task)
    if measure and measure in measurements:
        return measurements[measure]
    latency = measurements.get("latency_s")
    return 1.0 / latency if latency else None


def prior(backend: str) -> int:
    """Place of a backend in the stated prior; unknown ones come last."""
    return PRIOR.index(backend) if backend in PRIOR else len(PRIOR)


def rank(verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Best first: by status, then measured merit, then task order as given, then the prior."""
    best = {status: index for index, status in enumerate(reversed(_ORDER))}

    def key(verdict: Verdict) -> tuple[int, int, float, int]:
        merit = score(verdict)
        admitted = verdict.admission is not Admission.INSUFFICIENT_MEMORY
        return (best[verdict.status], 0 if admitted else 1, -(merit or 0.0), prior(verdict.backend))

    return sorted(verdicts, key=key)


def choose(verdicts: Iterable[Verdict]) -> tuple[Verdict | None, str]:
    """The supported and admitted verdict to run, and why it was preferred."""
    candidates = [
        v
        for v in rank(verdicts)
        if v.status is VerdictStatus.SUPPORTED and v.admission is not Admission.INSUFFICIENT_MEMORY
    ]
    if not candidates:
        return None, "no supported case"
    best = candidates[0]
    if len(candidates) == 1:
        return best, "the only supported case"
    merit = score(best)
    if merit is not None:
        rivals = sum(1 for v in candidates if score(v) is not None)
        return best, f"best of {rivals} measured cases ({_measure_text(best)})"
    return best, "first in the stated prior; nothing measured yet (`turnout check --execute` measures)"


def _measure_text(verdict: Verdict) -> str:
    for name, unit in (("tokens_per_s", "tokens/s"), ("latency_s", "s a request")):
        if name in verdict.measurements:
            return f"{verdict.measurements[name]:.3g} {unit}"
    return ""
