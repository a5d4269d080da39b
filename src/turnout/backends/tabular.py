"""Boosters and estimators over tables: xgboost, LightGBM, scikit-learn stored by skops.

The libraries are asked rather than tabulated: an objective is known if the library constructs it, a
type of a ``.skops`` file is trusted if skops says so. Pickles are refused unopened.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from turnout.backends.base import (
    Action,
    BackendBuild,
    BindingReport,
    Case,
    Evidence,
    EvidenceLevel,
    Kind,
    LoadPlan,
    Remedy,
    Requirement,
    failed,
    met,
    passed,
    unmet,
)
from turnout.backends.tabular_models import LightGBMModel, Model, SkopsModel, XGBoostModel
from turnout.errors import LoadError, TurnoutError
from turnout.package.facts import Artifact, ArtifactKind, CodeNeed, Recipe, Severity
from turnout.tasks.contract import TableOutput
from turnout.tasks.numeric import TabularClassificationAdapter, TabularRegressionAdapter
from turnout.types import Request, Task

# Kind to (distribution, importable module).
LIBRARIES = {
    ArtifactKind.XGBOOST: ("xgboost", "xgboost"),
    ArtifactKind.LIGHTGBM: ("lightgbm", "lightgbm"),
    ArtifactKind.SKLEARN_SKOPS: ("skops", "skops"),
}
PICKLES = frozenset({ArtifactKind.SKLEARN_PICKLE, ArtifactKind.PICKLE})


class TabularBackend:
    """xgboost, LightGBM and skops behind one contract per task."""

    name = "tabular"
    reads = frozenset({*LIBRARIES, *PICKLES})
    tasks = frozenset({Task.TABULAR_CLASSIFICATION, Task.TABULAR_REGRESSION})

    def describe(self) -> BackendBuild:
        """Versions of the libraries that are installed; ``version`` lists those that read models."""
        found = {name: _version(name) for name in ("xgboost", "lightgbm", "skops", "scikit-learn")}
        installed = {name: text for name, text in found.items() if text}
        readers = [f"{name}-{installed[name]}" for name in ("xgboost", "lightgbm", "skops") if name in installed]
        missing = [name for name in ("xgboost", "lightgbm", "skops", "scikit-learn") if name not in installed]
        unavailable = "" if readers else "neither xgboost nor LightGBM nor skops is installed"
        return BackendBuild(
            self.name, "+".join(readers), installed, unavailable=unavailable, missing=missing, extra="tabular"
        )

    def devices(self) -> list[str]:
        """The CPU: tables are small."""
        return ["cpu"]

    def requirements(self, case: Case) -> list[Requirement]:
        """Library, objective or types, writer's version, kept apart by the artifact's kind."""
        if case.artifact.kind in PICKLES:
            return _pickle(case)
        distribution, module = LIBRARIES[case.artifact.kind]
        if find_spec(module) is None:
            return [_missing(distribution)]
        if _untouchable(case.artifact):
            return []  # the reader's findings already refuse it; nothing of it is opened
        ask = {ArtifactKind.XGBOOST: _xgboost, ArtifactKind.LIGHTGBM: _lightgbm, ArtifactKind.SKLEARN_SKOPS: _skops}
        return ask[case.artifact.kind](case)

    def inquire(self, case: Case) -> list[Evidence]:
        """Nothing beyond ``requirements``, where the libraries were asked; nothing for what is not opened."""
        closed = case.artifact.kind in PICKLES or _untouchable(case.artifact)
        return [] if closed else [passed(EvidenceLevel.INQUIRED)]

    def plan(self, case: Case) -> LoadPlan:
        """Loads the one file of the artifact with the library of its kind."""
        artifact = case.artifact
        library = LIBRARIES.get(artifact.kind, ("",))[0]
        return LoadPlan(
            case,
            self.name,
            library,
            "float32" if library == "xgboost" else "float64",
            [artifact.entry],
            artifact.recipe.id if artifact.recipe else "",
        )

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Loads the model and lets it go: for models of this size there is no cheaper true answer."""
        try:
            session = self.load(plan)
        except LoadError as error:
            return failed(
                EvidenceLevel.DRY_LOADED,
                error.code,
                error.message,
                where=plan.case.artifact.entry,
                remedies=_upgrade_remedies(error),
            )
        binding = session.binding
        session.close()
        return passed(EvidenceLevel.DRY_LOADED, binding=binding)

    def load(self, plan: LoadPlan) -> TabularSession:
        """Session over the loaded model. Raises ``LoadError``; then nothing is kept."""
        case = plan.case
        if case.artifact.kind in PICKLES or _untouchable(case.artifact):
            raise LoadError(
                f"`{case.artifact.entry}` is not opened: its own code would run or it is damaged",
                code="code.pickle_unsafe",
            )
        models: dict[ArtifactKind, Callable[[str], Model]] = {
            ArtifactKind.XGBOOST: XGBoostModel,
            ArtifactKind.LIGHTGBM: LightGBMModel,
            ArtifactKind.SKLEARN_SKOPS: SkopsModel,
        }
        with _library_errors(case.artifact.entry):
            model = models[case.artifact.kind](case.file(case.artifact.entry))
            _check_task(model, case.task, case.artifact.entry)
        return TabularSession(plan, model)

    def probe(self, session: TabularSession) -> Evidence:
        """One row of zeros; every number of the answer must be finite."""
        schema = session.adapter.schema
        columns = list(schema.features) or [f"x{i}" for i in range(schema.count or 1)]
        request = Request(session.plan.case.task, {"table": {"columns": columns, "rows": [[0.0] * len(columns)]}})
        output = session.run(request)
        numbers = [value for row in output.rows for value in row if isinstance(value, float)]
        if any(value != value or abs(value) == float("inf") for value in numbers):
            return failed(
                EvidenceLevel.EXECUTED,
                "runtime.numeric_mismatch",
                "the prediction is not finite",
                observed=str(output.rows[0]),
                expected="finite numbers",
            )
        return passed(EvidenceLevel.EXECUTED, binding=session.binding)


@dataclass(slots=True)
class TabularSession:
    """A loaded estimator bound to classification or regression."""

    plan: LoadPlan
    model: Model | None
    binding: BindingReport
    dtype: str
    adapter: TabularClassificationAdapter | TabularRegressionAdapter

    def __init__(self, plan: LoadPlan, model: Model) -> None:
        self.plan, self.model, self.dtype = plan, model, model.dtype
        self.binding = BindingReport(loaded=model.parts)
        self.adapter = _adapter(plan.case, model)

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> TableOutput:
        """Predictions for the request's table. Raises ``InputError`` for columns that do not fit."""
        model = self.model
        if model is None:
            raise LoadError("the session is closed")
        return self.adapter.run(request, lambda tensors: model.predict(tensors["X"], request.task))

    def close(self) -> None:
        """Lets the model go."""
        self.model = None


# ---- questions ---------------------------------------------------------------------------


def _pickle(case: Case) -> list[Requirement]:
    said = {finding.code for finding in case.artifact.findings}
    if "code.pickle_unsafe" in said or case.artifact.code is CodeNeed.FORBIDDEN:
        return []
    text = "save the model again in its library's own format (Booster.save_model, skops.io.dump) where it is trusted"
    return [
        unmet(
            Kind.TRUST,
            "code.pickle_unsafe",
            "unpickling runs whatever the file says; it is not opened",
            observed="pickle",
            expected="JSON, UBJSON, LightGBM text or skops",
            where=case.artifact.entry,
            remedies=[Remedy(Action.CONVERT, text, changes_trust=True)],
        )
    ]


def _untouchable(artifact: Artifact) -> bool:
    problems = [*artifact.findings, *artifact.tensors.problems]
    return any(
        f.severity in (Severity.ERROR, Severity.FATAL) and f.code.split(".")[0] in ("artifact", "code", "config")
        for f in problems
    )


def _missing(distribution: str) -> Requirement:
    remedy = Remedy(Action.INSTALL, f"install {distribution}", ["pip", "install", distribution])
    return unmet(
        Kind.DEPENDENCY,
        "dependency.missing",
        f"{distribution} is not installed",
        observed="not installed",
        expected=distribution,
        remedies=[remedy],
    )


def _settings(artifact: Artifact) -> dict[str, Any]:
    return artifact.recipe.settings if artifact.recipe and artifact.recipe.kind == "tabular" else {}


def _xgboost(case: Case) -> list[Requirement]:
    settings, entry = _settings(case.artifact), case.artifact.entry
    found: list[Requirement] = []
    objective = settings.get("objective")
    for key, value, label in (("objective", objective, "objective"), ("booster", settings.get("booster"), "booster")):
        if not value:
            continue
        refusal = xgboost_refusal(key, str(value))
        found.append(
            met(f"config.{key}", Kind.CONFIG, entry, str(value))
            if refusal is None
            else unmet(
                Kind.CONFIG,
                "config.unsupported_variant",
                f"xgboost has no {label} `{value}`: predictions need the code that defined it",
                observed=str(value),
                expected=refusal,
                where=entry,
            )
        )
    found.append(_writer_version(case, "xgboost", _fact(case.artifact, "version")))
    return found


@lru_cache(maxsize=64)
def xgboost_refusal(key: str, value: str) -> str | None:
    """What xgboost offers instead of an unknown ``objective`` or ``booster``; None when it knows the
    value. Asked by constructing it: its registry has no listing call, but its refusal is a list."""
    import xgboost

    try:
        xgboost.Booster({"num_feature": 1, key: value}).save_config()
    except (xgboost.core.XGBoostError, ValueError) as error:
        text = str(error)
        if "Unknown objective function" in text:
            return ", ".join(sorted(re.findall(r"Objective candidate: (\S+)", text)))
        if "Unknown gbm type" in text:
            return "gbtree, dart, gblinear"
        # Known, but short of a parameter that only the model file carries (num_class, quantiles).
    return None


def _writer_version(case: Case, distribution: str, written: Any) -> Requirement:
    """A newer writer may have stored what this reader passes over in silence (xgboost loads such files)."""
    entry, installed = case.artifact.entry, _version(distribution)
    text = ".".join(map(str, written)) if isinstance(written, (list, tuple)) else str(written or "")
    if _release(text) <= _release(installed):
        return met("dependency.version", Kind.DEPENDENCY, entry, text)
    remedy = Remedy(
        Action.UPGRADE, f"upgrade {distribution} to {text} or later", ["pip", "install", f"{distribution}>={text}"]
    )
    return unmet(
        Kind.DEPENDENCY,
        "dependency.version",
        f"saved by {distribution} {text}; {distribution} {installed} would load it and pass over what is new",
        observed=text,
        expected=f"at most {installed}",
        where=entry,
        remedies=[remedy],
    )


def _lightgbm(case: Case) -> list[Requirement]:
    entry = case.artifact.entry
    with open(case.file(entry), "rb") as stream:
        head = stream.read(16 << 20).partition(b"\nTree=")[0].decode("utf-8", "replace")
    objective = (re.search(r"^objective=(.*)$", head, re.M) or [None, ""])[1]
    name = (objective or "").split(" ")[0]
    if not name or name in ("custom", "none"):
        return [
            unmet(
                Kind.CONFIG,
                "config.unsupported_variant",
                "the model was trained with a custom objective: its raw scores have no known meaning",
                observed=name or "no objective stored",
                expected="an objective of LightGBM",
                where=entry,
            )
        ]
    refusal = lightgbm_refusal(head)
    if refusal is None:
        return [met("config.objective", Kind.CONFIG, entry, name)]
    return [
        unmet(
            Kind.CONFIG,
            "config.unsupported_variant",
            refusal,
            observed=name,
            expected="an objective of LightGBM",
            where=entry,
        )
    ]


def lightgbm_refusal(head: str) -> str | None:
    """LightGBM's own words against a model's header (the text before its first tree), None if none.

    The header alone is a model without trees, so the library is asked without reading one.
    """
    import lightgbm

    text = re.sub(r"^tree_sizes=.*$", "tree_sizes=", head, flags=re.M)
    try:
        lightgbm.Booster(model_str=f"{text}\n\nend of trees\n")
    except lightgbm.basic.LightGBMError as error:
        return str(error).splitlines()[0]
    return None


def _skops(case: Case) -> list[Requirement]:
    import skops.io

    entry = case.artifact.entry
    try:
        untrusted = skops.io.get_untrusted_types(file=case.file(entry))
    except Exception as error:  # zip, JSON and skops' own errors have no common base
        return [
            unmet(Kind.INTEGRITY, "artifact.corrupt", f"skops cannot read the file: {_first_line(error)}", where=entry)
        ]
    found = [met("code.trusted", Kind.TRUST, entry)]
    if untrusted:
        names = ", ".join(sorted(untrusted))
        found = [
            unmet(
                Kind.TRUST,
                "code.untrusted_type",
                f"the file holds types that skops does not trust: {names}",
                observed=names,
                expected="types of scikit-learn, numpy and the standard library that skops trusts",
                where=entry,
            )
        ]
    if find_spec("sklearn") is None:
        found.append(_missing("scikit-learn"))
    return found


def _fact(artifact: Artifact, name: str) -> Any:
    fact = artifact.facts.get(name)
    return fact.value if fact else _settings(artifact).get(name)


def _release(text: str) -> tuple[int, int]:
    """Major and minor of a version; patches keep a format."""
    numbers = [int(n) for n in re.findall(r"\d+", text)[:2]]
    return (numbers + [0, 0])[0], (numbers + [0, 0])[1]


def _version(distribution: str) -> str:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


# ---- binding a model to a task ------------------------------------------------------------


def _check_task(model: Model, task: str, entry: str) -> None:
    recipe = model.recipe()
    if recipe["task"] != task:
        raise LoadError(f"the model in `{entry}` serves {recipe['task']}, not {task}", code="task.not_offered")
    if task == Task.TABULAR_CLASSIFICATION and recipe["targets"] > 1:
        raise LoadError(
            f"the model in `{entry}` gives {recipe['targets']} labels per row at once; one is served here",
            code="config.unsupported_variant",
        )


def _adapter(case: Case, model: Model) -> TabularClassificationAdapter | TabularRegressionAdapter:
    """Adapter whose schema is what the loaded model says, over what the reader could read."""
    said = model.recipe()
    settings = {**_settings(case.artifact), "num_features": said["num_features"]}
    settings["features"] = said["features"] or settings.get("features") or []
    named = [str(name) for name in settings.get("classes") or []]
    if said["classes"] and (len(named) != len(said["classes"]) or named == [str(c) for c in said["classes"]]):
        settings["classes"] = said["classes"]
    stored = case.artifact.recipe
    recipe = replace(stored, settings=settings) if stored else Recipe("tabular", settings, case.artifact.entry)
    artifact = replace(case.artifact, recipe=recipe, graph=None)
    make = TabularClassificationAdapter if case.task == Task.TABULAR_CLASSIFICATION else TabularRegressionAdapter
    adapter = make(case.root, artifact, {**case.options, "missing_values": said["missing"]})
    if stored:
        adapter.recipe = stored.id
    return adapter


@contextmanager
def _library_errors(entry: str) -> Any:
    """Turns what a library raises into a ``LoadError`` with the library's own first line."""
    try:
        yield
    except TurnoutError:
        raise
    except Exception as error:  # three libraries, no common base
        line = _first_line(error)
        if type(error).__name__ == "UntrustedTypesFoundException":
            raise LoadError(line, code="code.untrusted_type") from None
        if "Unknown objective" in line:
            raise LoadError(line, code="config.unsupported_variant") from None
        raise LoadError(f"`{entry}`: {line}", code="runtime.failed") from None


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    # xgboost puts a time stamp and a source position before its words.
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", lines[0])[:300] if lines else type(error).__name__


def _upgrade_remedies(error: LoadError) -> list[Remedy]:
    return [Remedy(Action.INSTALL, hint, hint.split(" ")) for hint in error.hints if hint.startswith("pip install ")]
