"""Classical models against their libraries: features, classes, objectives, versions; and broken files."""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.shapes import classical

from turnout.package.facts import Artifact, ArtifactKind, CodeNeed
from turnout.package.formats.ubjson import UbjError, loads
from turnout.package.inspect import inspect
from turnout.types import Task


def one(path: Path) -> Artifact:
    (artifact,) = inspect(path).artifacts
    return artifact


def settings(artifact: Artifact) -> dict[str, Any]:
    assert artifact.recipe is not None and artifact.recipe.kind == "tabular"
    return artifact.recipe.settings


def codes(artifact: Artifact) -> list[str]:
    return [f.code for f in artifact.findings]


# ---- xgboost -----------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["json", "ubj", "model", "xgb"])
def test_a_booster_tells_features_objective_and_version(suffix: str, tmp_path: Path) -> None:
    import xgboost

    written = classical.booster(tmp_path / ("m.json" if suffix == "json" else "m.ubj"))
    artifact = one(written.rename(tmp_path / f"m.{suffix}"))
    assert artifact.kind is ArtifactKind.XGBOOST and artifact.findings == []
    found = settings(artifact)
    assert found["features"] == classical.FEATURES and found["num_features"] == 4
    assert (found["objective"], found["booster"]) == ("binary:logistic", "gbtree")
    assert found["classes"] == ["0", "1"] and artifact.task_ids() == [Task.TABULAR_CLASSIFICATION]
    assert artifact.facts["version"].value == [int(n) for n in xgboost.__version__.split(".")]


def test_objectives_say_the_task(tmp_path: Path) -> None:
    x, y = classical.table()
    artifact = one(classical.booster(tmp_path / "m.json", objective="reg:squarederror"))
    assert artifact.task_ids() == [Task.TABULAR_REGRESSION] and "classes" not in settings(artifact)
    several = one(classical.booster(tmp_path / "n.ubj", objective="multi:softprob", num_class=3))
    assert settings(several)["classes"] == ["0", "1", "2"]
    assert one(classical.custom_objective(tmp_path / "o.json")).facts["objective"].value == "my:objective"


def test_json_files_that_are_no_booster(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"version": [1, 2, 3]}')
    (tmp_path / "b.json").write_text('{"hello": 1}')
    assert inspect(tmp_path).artifacts[0].kind is ArtifactKind.UNKNOWN


@pytest.mark.parametrize("share", [0.1, 0.5, 0.95])
def test_a_booster_cut_short(share: float, tmp_path: Path) -> None:
    for name, code in (("m.ubj", "artifact.truncated"), ("m.json", "config.invalid")):
        path = classical.booster(tmp_path / name)
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])
        assert codes(one(path)) == [code]


@pytest.mark.parametrize("part", ["learner_model_param", "objective", "gradient_booster", "feature_names"])
@pytest.mark.parametrize("value", [None, 1.5, [], "x"])
def test_boosters_with_odd_parts(part: str, value: Any, tmp_path: Path) -> None:
    path = classical.booster(tmp_path / "m.json")
    model = json.loads(path.read_text())
    model["learner"][part] = value
    path.write_text(json.dumps(model))
    artifact = one(path)
    assert artifact.kind is ArtifactKind.XGBOOST and artifact.findings == []


def test_more_classes_than_there_can_be(tmp_path: Path) -> None:
    path = classical.booster(tmp_path / "m.json")
    model = json.loads(path.read_text())
    model["learner"]["learner_model_param"]["num_class"] = "1000000000000"
    path.write_text(json.dumps(model))
    assert codes(one(path)) == ["config.invalid"] and "classes" not in settings(one(path))


def test_a_booster_without_a_learner(tmp_path: Path) -> None:
    (tmp_path / "m.ubj").write_bytes(b"{U\x01ai\x05}")
    assert codes(one(tmp_path)) == ["artifact.corrupt"]


def test_a_pointer_in_place_of_a_booster(tmp_path: Path) -> None:
    (tmp_path / "m.ubj").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert codes(one(tmp_path)) == ["artifact.lfs_pointer"]


# ---- UBJSON ------------------------------------------------------------------------------------


@pytest.mark.parametrize("parameters", [{}, {"booster": "gblinear", "verbosity": 0}, {"booster": "dart"}])
def test_ubjson_is_the_same_as_json(parameters: dict[str, Any], tmp_path: Path) -> None:
    ubj = loads(classical.booster(tmp_path / "m.ubj", **parameters).read_bytes())
    text = json.loads(classical.booster(tmp_path / "m.json", **parameters).read_text())
    assert ubj["learner"]["learner_model_param"].keys() == text["learner"]["learner_model_param"].keys()
    assert ubj["learner"]["feature_names"] == text["learner"]["feature_names"]

    def shape(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: shape(v) for k, v in value.items()}
        return len(value) if isinstance(value, list) else None

    assert shape(ubj["learner"]["gradient_booster"]) == shape(text["learner"]["gradient_booster"])


def test_ubjson_values() -> None:
    document = b"{U\x01aZU\x01bTU\x01cFU\x01dd\x3f\x00\x00\x00U\x01eI\xff\xfeU\x01fSU\x02hiU\x01gCx"
    document += b"U\x01h[$U#U\x02\x01\x02U\x01i[NTF]}"
    assert loads(document) == {
        "a": None, "b": True, "c": False, "d": 0.5, "e": -2, "f": "hi", "g": "x", "h": [1, 2], "i": [True, False]
    }  # fmt: skip
    assert loads(b"[$d#l\x00\x00\x20\x00" + bytes(4 * 8192)) is None  # long arrays are walked, not kept


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cut short"),
        (b"{U\x05a", "beyond the end"),
        (b"?", "unknown mark"),
        (b"[" * 60, "nested"),
        (b"[$U", "without a count"),
        (b"[$U#U\xff", "beyond the end"),
        (b"{d\x00\x00\x00\x00", "no number"),
        (b"[#L\xff\xff\xff\xff\xff\xff\xff\xff", "beyond the end"),
    ],
)
def test_ubjson_that_is_none(data: bytes, said: str) -> None:
    with pytest.raises(UbjError, match=said):
        loads(data)


# ---- LightGBM, CatBoost, fastText --------------------------------------------------------------


@pytest.mark.parametrize("suffix", ["txt", "lgb", "model"])
@pytest.mark.parametrize(
    ("objective", "task", "classes"),
    [
        ("regression", Task.TABULAR_REGRESSION, None),
        ("binary", Task.TABULAR_CLASSIFICATION, ["0", "1"]),
        ("multiclass", Task.TABULAR_CLASSIFICATION, ["0", "1", "2"]),
    ],
)
def test_lightgbm(objective: str, task: str, classes: list[str] | None, suffix: str, tmp_path: Path) -> None:
    import lightgbm

    x, y = classical.table()
    more = {"num_class": 3} if objective == "multiclass" else {}
    data = lightgbm.Dataset(x, y, feature_name=classical.FEATURES, params={"verbose": -1})
    parameters = {"objective": objective, "verbose": -1, "num_leaves": 3, "num_threads": 1, **more}
    booster = lightgbm.train(parameters, data, 2)
    booster.save_model(tmp_path / f"m.{suffix}")
    artifact = one(tmp_path / f"m.{suffix}")
    assert artifact.kind is ArtifactKind.LIGHTGBM and artifact.task_ids() == [task]
    assert settings(artifact)["features"] == booster.feature_name()
    assert settings(artifact)["num_features"] == booster.num_feature()
    assert settings(artifact).get("classes") == classes


def test_columns_that_lightgbm_named_itself_are_no_names(tmp_path: Path) -> None:
    import lightgbm

    x, y = classical.table()
    data = lightgbm.Dataset(x, y, params={"verbose": -1})
    lightgbm.train({"objective": "binary", "verbose": -1, "num_threads": 1}, data, 1).save_model(tmp_path / "m.txt")
    assert settings(one(tmp_path))["features"] == [] and settings(one(tmp_path))["num_features"] == 4


def test_text_files_that_are_no_booster(tmp_path: Path) -> None:
    (tmp_path / "m.txt").write_text("tree of life\nversion=4\n")
    assert inspect(tmp_path).artifacts[0].kind is ArtifactKind.UNKNOWN


@pytest.mark.parametrize(
    ("name", "head", "kind"),
    [("m.cbm", b"CBM1", ArtifactKind.CATBOOST), ("m.ftz", b"\xba\x16\x4f\x2f", ArtifactKind.FASTTEXT)],
)
def test_kinds_by_their_first_bytes(name: str, head: bytes, kind: ArtifactKind, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(head + bytes(64))
    assert one(tmp_path).kind is kind
    (tmp_path / name).write_bytes(b"else" + bytes(64))
    assert one(tmp_path).kind is ArtifactKind.UNKNOWN


# ---- scikit-learn ------------------------------------------------------------------------------


@pytest.mark.parametrize("trusted", [True, False])
def test_types_of_a_skops_file(trusted: bool, tmp_path: Path) -> None:
    import skops.io

    path = classical.skops(tmp_path / "m.skops", trusted)
    artifact = one(path)
    assert artifact.kind is ArtifactKind.SKLEARN_SKOPS and artifact.findings == []
    assert artifact.facts["class"].value == "sklearn.pipeline.Pipeline"
    assert set(skops.io.get_untrusted_types(file=path)) <= set(artifact.facts["types"].value)
    assert artifact.facts["version"].value["skops"] == skops.__version__
    assert artifact.task_ids() == [Task.TABULAR_CLASSIFICATION]


def test_a_regression_in_skops(tmp_path: Path) -> None:
    import skops.io
    from sklearn.linear_model import Ridge

    x, _ = classical.table()
    skops.io.dump(Ridge().fit(x, x[:, 0]), tmp_path / "m.skops")
    artifact = one(tmp_path)
    assert artifact.task_ids() == [Task.TABULAR_REGRESSION] and artifact.labels is None


@pytest.mark.parametrize(
    ("members", "code"),
    [
        ({}, "artifact.corrupt"),
        ({"schema.json": "[]"}, "artifact.corrupt"),
        ({"schema.json": "{"}, "config.invalid"),
    ],
)
def test_skops_files_without_a_schema(members: dict[str, str], code: str, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "m.skops", "w") as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    assert codes(one(tmp_path)) == [code]


@pytest.mark.parametrize("data", [b"PK\x03\x04" + bytes(30), b"no zip", b""])
def test_skops_files_that_are_no_zip(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "m.skops").write_bytes(data)
    assert codes(one(tmp_path)) == ["artifact.truncated"]


def test_a_pickle_is_listed_and_never_opened(tmp_path: Path) -> None:
    import sklearn

    artifact = one(classical.joblib_pickle(tmp_path / "m.joblib"))
    assert (artifact.kind, artifact.code) == (ArtifactKind.SKLEARN_PICKLE, CodeNeed.FORBIDDEN)
    assert artifact.facts["sklearn_version"].value == sklearn.__version__
    assert any(n.startswith("sklearn.linear_model") for n in artifact.facts["globals"].value)
    assert codes(artifact) == ["code.pickle_unsafe"]


def test_pickles_of_other_things(tmp_path: Path) -> None:
    booster = one(classical.pickled_booster(tmp_path / "m.pkl"))
    assert booster.kind is ArtifactKind.PICKLE and "xgboost.core.Booster" in booster.facts["globals"].value
    (tmp_path / "n.pkl").write_bytes(pickle.dumps(np.zeros(3)))
    assert codes(one(tmp_path / "n.pkl")) == ["code.pickle_unsafe"]


def test_a_compressed_pickle_is_refused_unseen(tmp_path: Path) -> None:
    import joblib

    joblib.dump(classical.classifier(), tmp_path / "m.joblib", compress=3)
    (finding,) = one(tmp_path).findings
    assert (finding.code, finding.observed) == ("code.pickle_unsafe", "a compressed pickle")
