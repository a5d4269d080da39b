"""Verdicts from requirements and evidence, and the choice among them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turnout.backends.base import (
    SAME_CASE,
    Action,
    Admission,
    Case,
    Estimates,
    Evidence,
    EvidenceLevel,
    Kind,
    Outcome,
    Reason,
    Remedy,
    Verdict,
    VerdictStatus,
    failed,
    met,
    passed,
    unknown,
    unmet,
)
from turnout.backends.resolve import Assessment, choose, judge, rank, status_of
from turnout.package.facts import Artifact, ArtifactKind

MET = met("x", Kind.ARTIFACT)
UNKNOWN = unknown(Kind.OPERATOR, "operator.opset_too_new", "newer than known")
CONDITIONAL = unmet(
    Kind.DEPENDENCY,
    "dependency.missing",
    "absent",
    remedies=[Remedy(Action.INSTALL, "install", ["pip", "install", "x"])],
)
UNMET = unmet(Kind.TENSOR, "tensor.missing", "absent")
STATUS = {
    "met": (MET, VerdictStatus.SUPPORTED),
    "conditional": (CONDITIONAL, VerdictStatus.CONDITIONAL),
    "unknown": (UNKNOWN, VerdictStatus.UNKNOWN),
    "unmet": (UNMET, VerdictStatus.UNSUPPORTED),
}
ORDER = ["met", "conditional", "unknown", "unmet"]


def case(task: str = "chat") -> Case:
    return Case("/nowhere", Artifact("gguf:m.gguf", ArtifactKind.GGUF, "m.gguf"), task)


@pytest.mark.parametrize(("one", "other"), list(itertools.product(ORDER, ORDER)))
def test_status_is_the_minimum_over_requirements(one: str, other: str) -> None:
    worse = max(one, other, key=ORDER.index)
    assert status_of([STATUS[one][0], STATUS[other][0]]) is STATUS[worse][1]


@given(st.lists(st.sampled_from(ORDER), max_size=6), st.randoms())
def test_status_does_not_depend_on_the_order_of_requirements(names: list[str], random) -> None:  # type: ignore[no-untyped-def]
    requirements = [STATUS[name][0] for name in names]
    shuffled = list(requirements)
    random.shuffle(shuffled)
    assert status_of(requirements) is status_of(shuffled)


@pytest.mark.parametrize("action", list(Action))
def test_only_remedies_that_keep_the_case_make_it_conditional(action: Action) -> None:
    requirement = unmet(Kind.ARTIFACT, "artifact.missing", "x", remedies=[Remedy(action, "do it")])
    expected = VerdictStatus.CONDITIONAL if action in SAME_CASE else VerdictStatus.UNSUPPORTED
    assert status_of([requirement]) is expected


def test_a_speculative_remedy_promises_nothing() -> None:
    remedy = Remedy(Action.UPGRADE, "a newer version may know it", speculative=True)
    requirement = unmet(Kind.ARCHITECTURE, "architecture.unknown", "x", remedies=[remedy])
    assert status_of([requirement]) is VerdictStatus.UNSUPPORTED


def test_a_failed_rung_refuses_and_its_reason_is_reported() -> None:
    rung = failed(EvidenceLevel.DRY_LOADED, "tensor.missing", "lm_head.weight is in no file")
    verdict = judge(case(), "b", Assessment([MET], [rung]), Estimates())
    assert verdict.status is VerdictStatus.UNSUPPORTED
    assert [r.code for r in verdict.reasons] == ["tensor.missing"]


def test_recorded_failure_refuses_a_case_that_looks_right() -> None:
    recorded = [Evidence(EvidenceLevel.LOADED, Outcome.FAIL, [Reason("runtime.failed", "it crashed")])]
    verdict = judge(case(), "b", Assessment([MET], [passed(EvidenceLevel.DRY_LOADED)]), Estimates(), recorded)
    assert verdict.status is VerdictStatus.UNSUPPORTED
    assert verdict.reasons[0].code == "runtime.failed"


def test_unknown_becomes_supported_only_by_execution() -> None:
    loaded = [passed(EvidenceLevel.LOADED)]
    executed = [passed(EvidenceLevel.LOADED), passed(EvidenceLevel.EXECUTED)]
    assert judge(case(), "b", Assessment([UNKNOWN]), Estimates(), loaded).status is VerdictStatus.UNKNOWN
    settled = judge(case(), "b", Assessment([UNKNOWN]), Estimates(), executed)
    assert settled.status is VerdictStatus.SUPPORTED
    assert settled.level is EvidenceLevel.EXECUTED


def test_execution_never_lifts_an_unmet_requirement() -> None:
    executed = [passed(EvidenceLevel.EXECUTED)]
    assert judge(case(), "b", Assessment([UNMET]), Estimates(), executed).status is VerdictStatus.UNSUPPORTED


def verdict(backend: str, status: VerdictStatus = VerdictStatus.SUPPORTED, **more) -> Verdict:  # type: ignore[no-untyped-def]
    return Verdict("gguf:m", ArtifactKind.GGUF, "chat", backend, "cpu", status, EvidenceLevel.DRY_LOADED, **more)


def test_choice_by_prior_says_so_and_measured_evidence_wins() -> None:
    unmeasured = [verdict("transformers"), verdict("llamacpp")]
    best, why = choose(unmeasured)
    assert best is unmeasured[1] and "prior" in why
    measured = [
        verdict("transformers", measurements={"tokens_per_s": 9.0}),
        verdict("llamacpp", measurements={"tokens_per_s": 5.0}),
    ]
    best, why = choose(measured)
    assert best is measured[0] and "9 tokens/s" in why


def test_a_case_that_does_not_fit_memory_is_supported_but_not_chosen() -> None:
    large = verdict("llamacpp", admission=Admission.INSUFFICIENT_MEMORY)
    small = verdict("transformers")
    assert choose([large, small])[0] is small
    assert choose([large])[0] is None
    assert rank([large, small])[0] is small


def test_unsupported_and_unknown_are_never_chosen() -> None:
    assert choose([verdict("a", VerdictStatus.UNKNOWN), verdict("b", VerdictStatus.CONDITIONAL)])[0] is None
