"""Options that count tokens: a value that counts nothing is refused by name on every backend that reads."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.shapes import hf

from turnout.backends.admission import estimate
from turnout.backends.base import VerdictStatus
from turnout.package.inspect import inspect
from turnout.worker.judge import Judge, check

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.llama(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("value", ["abc", "-3", 0, "1.5", True])
def test_a_context_that_is_no_count_is_refused_by_name(value: object, llama: Path, judge: Judge) -> None:
    report = check(str(llama), "text-generation", backend="transformers", options={"context": value}, judge=judge)
    (verdict,) = report.verdicts
    assert verdict.status is VerdictStatus.UNSUPPORTED
    (reason,) = [r for r in verdict.reasons if r.code == "option.unsupported"]
    assert "context" in reason.message and reason.observed == str(value)


def test_a_count_as_text_or_number_is_one_count(llama: Path) -> None:
    (artifact,) = inspect(llama).artifacts
    of = {c: estimate(artifact, "text-generation", "transformers", {"context": c}).context for c in ("32", 32)}
    assert of == {"32": 32, 32: 32}
