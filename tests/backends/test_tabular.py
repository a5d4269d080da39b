"""The tabular backend against the libraries' own predictions, and its refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnout.backends.base import Case, EvidenceLevel, Outcome, Requirement, State
from turnout.backends.tabular import TabularBackend, lightgbm_refusal, xgboost_refusal
from turnout.errors import InputError, LoadError
from turnout.package.facts import Artifact, ArtifactKind, Fact, Recipe, Strength
from turnout.types import Request, Task

BACKEND = TabularBackend()
NAMES = ["mass", "girth", "age", "height"]
RNG = np.random.default_rng(7)
X = RNG.normal(size=(120, 4)).astype(np.float32)
CLASS = (X[:, 0] + X[:, 1] ** 2 > 0.5).astype(int) + (X[:, 2] > 1)
VALUE = X[:, 0] * 3 - X[:, 3]
ROWS = X[:9].tolist()


def case_of(path: Path, kind: ArtifactKind, task: str, version: Any = None, **settings: Any) -> Case:
    artifact = Artifact(f"{kind}:{path.name}", kind, path.name, [path.name], recipe=Recipe("tabular", settings))
    if version:
        artifact.facts["version"] = Fact(version, f"{path.name}#/version", Strength.CONFIG)
    return Case(str(path.parent), artifact, task)


def predict(case: Case, columns: list[str] = NAMES, rows: list[Any] = ROWS) -> Any:
    session = BACKEND.load(BACKEND.plan(case))
    assert not session.binding.unresolved and session.binding.loaded >= 1
    assert BACKEND.probe(session).outcome is Outcome.PASS
    output = session.run(Request(case.task, {"table": {"columns": columns, "rows": rows}}))
    session.close()
    session.close()
    return output


def unmet(case: Case) -> list[Requirement]:
    return [r for r in BACKEND.requirements(case) if r.state is State.UNMET]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tabular")


def booster(objective: str, label: Any, **more: Any) -> Any:
    import xgboost

    data = xgboost.DMatrix(X, label, feature_names=NAMES)
    return xgboost.train({"objective": objective, "nthread": 1, "max_depth": 3, "seed": 0, **more}, data, 4)


@pytest.mark.parametrize("suffix", ["json", "ubj"])
def test_xgboost_probabilities_are_the_boosters_own(folder: Path, suffix: str) -> None:
    import xgboost

    model = booster("multi:softprob", CLASS, num_class=3)
    path = folder / f"multi.{suffix}"
    model.save_model(path)
    case = case_of(path, ArtifactKind.XGBOOST, Task.TABULAR_CLASSIFICATION, objective="multi:softprob", features=NAMES)
    assert not unmet(case)
    assert BACKEND.dry_load(BACKEND.plan(case)).outcome is Outcome.PASS
    output = predict(case)
    expected = model.predict(xgboost.DMatrix(X[:9], feature_names=NAMES))
    assert output.columns == ["label", "p(0)", "p(1)", "p(2)"]
    np.testing.assert_array_equal(np.array([row[1:] for row in output.rows], np.float32), expected)
    assert [row[0] for row in output.rows] == expected.argmax(1).tolist()


@pytest.mark.parametrize("objective", ["binary:logistic", "binary:logitraw", "binary:hinge", "multi:softmax"])
def test_every_classifying_objective_gives_the_right_label(folder: Path, objective: str) -> None:
    import xgboost

    binary = objective.startswith("binary")
    model = booster(objective, CLASS > 0 if binary else CLASS, **({} if binary else {"num_class": 3}))
    path = folder / f"{objective.replace(':', '-')}.json"
    model.save_model(path)
    output = predict(case_of(path, ArtifactKind.XGBOOST, Task.TABULAR_CLASSIFICATION, objective=objective))
    raw = model.predict(xgboost.DMatrix(X[:9], feature_names=NAMES))
    threshold = 0.0 if objective == "binary:logitraw" else 0.5
    assert [row[0] for row in output.rows] == (raw > threshold if binary else raw).astype(int).tolist()
    if objective == "binary:logistic":
        np.testing.assert_allclose([row[2] for row in output.rows], raw, atol=1e-7)


def test_xgboost_regression_and_missing_values(folder: Path) -> None:
    import xgboost

    model = booster("reg:squarederror", VALUE)
    model.save_model(folder / "value.json")
    rows = [[1.0, "", 0.5, None], ["2", "3", "4", "5"]]
    case = case_of(folder / "value.json", ArtifactKind.XGBOOST, Task.TABULAR_REGRESSION, objective="reg:squarederror")
    output = predict(case, rows=rows)
    matrix = np.array([[1, np.nan, 0.5, np.nan], [2, 3, 4, 5]], np.float32)
    assert output.columns == ["value"]
    expected = model.predict(xgboost.DMatrix(matrix, feature_names=NAMES))
    np.testing.assert_array_equal(np.array(output.rows, np.float32)[:, 0], expected)


@pytest.mark.parametrize("columns", [NAMES[:3], NAMES[::-1], [*NAMES, "extra"]])
def test_columns_the_booster_does_not_have_are_refused(folder: Path, columns: list[str]) -> None:
    booster("reg:squarederror", VALUE).save_model(folder / "names.json")
    # The reader's recipe is left empty: the loaded model itself must hold the table to its names.
    case = case_of(folder / "names.json", ArtifactKind.XGBOOST, Task.TABULAR_REGRESSION)
    with pytest.raises(InputError) as caught:
        predict(case, columns, [[1.0] * len(columns)])
    assert caught.value.code == "graph.io_mismatch"
    assert any(name in caught.value.message for name in NAMES + ["extra"])


def test_a_custom_objective_is_named(folder: Path) -> None:
    booster("reg:squarederror", VALUE).save_model(folder / "plain.json")
    text = (folder / "plain.json").read_text().replace("reg:squarederror", "custom:huber")
    (folder / "custom.json").write_text(text)
    case = case_of(folder / "custom.json", ArtifactKind.XGBOOST, Task.TABULAR_REGRESSION, objective="custom:huber")
    (requirement,) = unmet(case)
    assert requirement.reason is not None and requirement.reason.code == "config.unsupported_variant"
    assert requirement.observed == "custom:huber" and "reg:squarederror" in requirement.expected
    evidence = BACKEND.dry_load(BACKEND.plan(case))
    assert evidence.outcome is Outcome.FAIL and evidence.reasons[0].code == "config.unsupported_variant"
    assert xgboost_refusal("booster", "gbfoo") == "gbtree, dart, gblinear"
    assert xgboost_refusal("objective", "reg:quantileerror") is None


def test_a_newer_writer_is_conditional_with_both_versions(folder: Path) -> None:
    booster("reg:squarederror", VALUE).save_model(folder / "now.json")
    model = json.loads((folder / "now.json").read_text())
    model["version"] = [99, 0, 0]
    (folder / "future.json").write_text(json.dumps(model))
    case = case_of(folder / "future.json", ArtifactKind.XGBOOST, Task.TABULAR_REGRESSION, version=[99, 0, 0])
    (requirement,) = unmet(case)
    assert requirement.id == "dependency.version" and requirement.observed == "99.0.0"
    assert requirement.remedies[0].argv == ["pip", "install", "xgboost>=99.0.0"]


def test_a_booster_does_not_serve_the_other_task(folder: Path) -> None:
    booster("reg:squarederror", VALUE).save_model(folder / "reg.json")
    case = case_of(folder / "reg.json", ArtifactKind.XGBOOST, Task.TABULAR_CLASSIFICATION)
    with pytest.raises(LoadError, match="serves tabular-regression") as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "task.not_offered"


def test_a_cut_booster_fails_with_the_librarys_words(folder: Path) -> None:
    booster("reg:squarederror", VALUE).save_model(folder / "whole.ubj")
    data = (folder / "whole.ubj").read_bytes()
    (folder / "cut.ubj").write_bytes(data[: len(data) // 2])
    case = case_of(folder / "cut.ubj", ArtifactKind.XGBOOST, Task.TABULAR_REGRESSION)
    evidence = BACKEND.dry_load(BACKEND.plan(case))
    assert evidence.outcome is Outcome.FAIL and evidence.level is EvidenceLevel.DRY_LOADED
    assert "Traceback" not in evidence.reasons[0].message


@pytest.mark.parametrize(
    ("objective", "task"),
    [
        ("binary", Task.TABULAR_CLASSIFICATION),
        ("multiclass", Task.TABULAR_CLASSIFICATION),
        ("regression", Task.TABULAR_REGRESSION),
    ],
)
def test_lightgbm_equals_its_own_predict(folder: Path, objective: str, task: str) -> None:
    import lightgbm

    label = {"binary": CLASS > 0, "multiclass": CLASS, "regression": VALUE}[objective]
    params = {"objective": objective, "verbose": -1, "num_threads": 1, "min_data_in_leaf": 3}
    if objective == "multiclass":
        params["num_class"] = 3
    data = lightgbm.Dataset(X, label, feature_name=NAMES if objective == "binary" else "auto")
    model = lightgbm.train(params, data, 4)
    path = folder / f"{objective}.txt"
    model.save_model(str(path))
    case = case_of(path, ArtifactKind.LIGHTGBM, task)
    assert not unmet(case)
    columns = NAMES if objective == "binary" else ["a", "b", "c", "d"]  # no names stored: only the count is held
    output = predict(case, columns)
    expected = model.predict(np.array(ROWS))
    if objective == "binary":
        expected = np.stack([1 - expected, expected], 1)
    got = np.array([row[1 if task == Task.TABULAR_CLASSIFICATION else 0 :] for row in output.rows])
    np.testing.assert_array_equal(got, expected.reshape(9, -1))


def test_lightgbm_objectives_are_asked_for(folder: Path) -> None:
    import lightgbm

    params = {"objective": "binary", "verbose": -1, "num_threads": 1}
    text = lightgbm.train(params, lightgbm.Dataset(X, CLASS > 0), 2).model_to_string()
    assert lightgbm_refusal(text.partition("\nTree=")[0]) is None
    for name, word in (("quux", "Unknown objective type name: quux"), ("custom", "custom objective")):
        path = folder / f"lightgbm-{name}.txt"
        path.write_text(text.replace("objective=binary sigmoid:1", f"objective={name}"))
        (requirement,) = unmet(case_of(path, ArtifactKind.LIGHTGBM, Task.TABULAR_CLASSIFICATION))
        assert requirement.id == "config.unsupported_variant" and requirement.reason is not None
        assert word in requirement.reason.message and requirement.observed == name


def double(values: Any) -> Any:
    """A function of this file: a type that skops has no reason to trust."""
    return values * 2


def test_skops_classifier_and_regressor_equal_their_estimators(folder: Path) -> None:
    import skops.io
    from sklearn.linear_model import LinearRegression, LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    words = np.array(["low", "mid", "high"])[CLASS]
    classifier = make_pipeline(StandardScaler(), LogisticRegression()).fit(X, words)
    skops.io.dump(classifier, folder / "classifier.skops")
    case = case_of(folder / "classifier.skops", ArtifactKind.SKLEARN_SKOPS, Task.TABULAR_CLASSIFICATION)
    assert not unmet(case)
    output = predict(case)
    assert output.columns == ["label", "p(high)", "p(low)", "p(mid)"]
    assert [row[0] for row in output.rows] == classifier.predict(X[:9]).tolist()
    wide = np.array(ROWS)
    np.testing.assert_array_equal(np.array([row[1:] for row in output.rows]), classifier.predict_proba(wide))

    regressor = LinearRegression().fit(X, VALUE)
    skops.io.dump(regressor, folder / "regressor.skops")
    case = case_of(folder / "regressor.skops", ArtifactKind.SKLEARN_SKOPS, Task.TABULAR_REGRESSION)
    np.testing.assert_array_equal(np.array(predict(case).rows)[:, 0], regressor.predict(wide))
    with pytest.raises(InputError, match="takes no missing values"):
        predict(case, rows=[["", 1, 2, 3]])


def test_an_untrusted_type_is_named(folder: Path) -> None:
    import skops.io
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer

    model = make_pipeline(FunctionTransformer(double), LogisticRegression()).fit(X, CLASS)
    skops.io.dump(model, folder / "untrusted.skops")
    case = case_of(folder / "untrusted.skops", ArtifactKind.SKLEARN_SKOPS, Task.TABULAR_CLASSIFICATION)
    (requirement,) = unmet(case)
    assert requirement.id == "code.untrusted_type" and requirement.observed.endswith(".double")
    with pytest.raises(LoadError) as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "code.untrusted_type"


@pytest.mark.parametrize("kind", [ArtifactKind.SKLEARN_PICKLE, ArtifactKind.PICKLE])
def test_pickles_are_refused_unopened(folder: Path, kind: ArtifactKind) -> None:
    case = case_of(folder / "absent.pkl", kind, Task.TABULAR_CLASSIFICATION)  # there is no file to open
    (requirement,) = unmet(case)
    assert requirement.id == "code.pickle_unsafe"
    with pytest.raises(LoadError):
        BACKEND.load(BACKEND.plan(case))


def test_describe_imports_no_library() -> None:
    import subprocess
    import sys

    code = (
        "import sys; from turnout.backends.tabular import TabularBackend as T; b = T().describe(); "
        "assert b.available and b.dependencies['xgboost'] in b.version; "
        "assert not {'xgboost', 'sklearn', 'lightgbm', 'skops', 'numpy'} & set(sys.modules)"
    )
    source = Path(__file__).parents[2] / "src"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(source)})
