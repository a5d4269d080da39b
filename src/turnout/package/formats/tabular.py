"""Classical models: xgboost, LightGBM, CatBoost, scikit-learn as skops or pickles, fastText."""

from __future__ import annotations

import re
from typing import Any

from turnout.config import READ
from turnout.package.facts import (
    Artifact,
    ArtifactKind,
    CodeNeed,
    Fact,
    Finding,
    Labels,
    Recipe,
    Severity,
    Strength,
    TaskEvidence,
)
from turnout.package.formats.archive import open_zip, read_member
from turnout.package.formats.pickle import pickle_globals, unsafe_finding
from turnout.package.formats.ubjson import UbjError, loads
from turnout.package.scan import ReadError, Scan, parse_json, read_error
from turnout.types import Task

LIMIT = 128 << 20
MAX_CLASSES = 100_000
PICKLES = (".pkl", ".pickle", ".joblib")
FASTTEXT = b"\xba\x16\x4f\x2f"


def detect(scan: Scan) -> list[Artifact]:
    """Classical models by content; names only say which files to look into."""
    readers = {
        ".json": _xgboost_json,
        ".ubj": _xgboost_ubj,
        ".model": _booster,
        ".xgb": _booster,
        ".txt": _lightgbm,
        ".lgb": _lightgbm,
        ".cbm": _catboost,
        ".skops": _skops,
        ".ftz": _fasttext,
        **dict.fromkeys(PICKLES, _pickle),
    }
    found = []
    claimed: set[str] = scan.once("claimed", set)
    for rel in sorted(scan.entries):
        suffix = "." + rel.rsplit(".", 1)[-1].lower() if "." in rel.rsplit("/", 1)[-1] else ""
        if suffix in readers and rel not in claimed and scan.wanted(rel):
            artifact = readers[suffix](scan, rel)
            if artifact is not None:
                artifact.size_bytes = scan.size_of([rel])
                found.append(artifact)
    return found


def _failed(kind: ArtifactKind, rel: str, finding: Finding) -> Artifact:
    return Artifact(f"{kind}:{rel}", kind, rel, [rel], findings=[finding])


# ---- xgboost -----------------------------------------------------------------------------------


def _xgboost_json(scan: Scan, rel: str) -> Artifact | None:
    """A JSON file that is an xgboost model: it begins with a learner or a version."""
    head = scan.head(rel, 4096)
    if b'"learner"' not in head and b'"version"' not in head[:64]:
        return None
    try:
        value = scan.json(rel, LIMIT)
    except ReadError as error:
        return _failed(ArtifactKind.XGBOOST, rel, error.finding) if b'"learner"' in head else None
    return _xgboost(rel, value) if isinstance(value, dict) and isinstance(value.get("learner"), dict) else None


def _xgboost_ubj(scan: Scan, rel: str) -> Artifact | None:
    before = scan.check_weights_file(rel)
    if before is not None:
        return _failed(ArtifactKind.XGBOOST, rel, before)
    try:
        value = loads(scan.read(rel, LIMIT))
    except ReadError as error:
        return _failed(ArtifactKind.XGBOOST, rel, error.finding)
    except (UbjError, IndexError, RecursionError) as error:
        return _failed(
            ArtifactKind.XGBOOST,
            rel,
            Finding("artifact.truncated", Severity.ERROR, f"`{rel}` is not a whole UBJSON document: {error}", rel),
        )
    if not isinstance(value, dict) or not isinstance(value.get("learner"), dict):
        return _failed(
            ArtifactKind.XGBOOST, rel, Finding("artifact.corrupt", Severity.ERROR, f"`{rel}` holds no learner", rel)
        )
    return _xgboost(rel, value)


def _booster(scan: Scan, rel: str) -> Artifact | None:
    """A file under an ending that both libraries use."""
    head = scan.head(rel, 32)
    if head.startswith(b"{L\0\0\0\0\0\0\0\x07learner"):
        return _xgboost_ubj(scan, rel)
    if head.lstrip()[:1] == b"{":
        return _xgboost_json(scan, rel)
    return _lightgbm(scan, rel)


def _xgboost(rel: str, value: dict[str, Any]) -> Artifact:
    learner = value["learner"]
    artifact = Artifact(f"xgboost:{rel}", ArtifactKind.XGBOOST, rel, [rel])
    parameters = _part(learner, "learner_model_param")
    objective = str(_part(learner, "objective").get("name") or "")
    booster = str(_part(learner, "gradient_booster").get("name") or "")
    features, classes = _int(parameters.get("num_feature")), _int(parameters.get("num_class")) or 0
    names, types = (learner.get(key) for key in ("feature_names", "feature_types"))
    settings: dict[str, Any] = {
        "features": [str(n) for n in names] if isinstance(names, list) else [],
        "feature_types": [str(t) for t in types] if isinstance(types, list) else [],
        "objective": objective,
        "booster": booster,
        "num_features": features,
        "num_class": classes,
    }
    classifies = objective.startswith(("binary:", "multi:"))
    artifact.facts["version"] = Fact(value.get("version"), f"{rel}#/version", Strength.HEADER)
    artifact.facts["objective"] = Fact(objective, f"{rel}#/learner/objective/name", Strength.HEADER)
    _booster_task(artifact, settings, classifies, f"{rel}#/learner", f"{rel}#/learner/objective/name")
    return artifact


def _booster_task(artifact: Artifact, settings: dict[str, Any], classifies: bool, source: str, objective: str) -> None:
    """Recipe and task of a booster; its classes have numbers for names."""
    classes = max(settings["num_class"], 2)
    if classifies and classes <= MAX_CLASSES:
        settings["classes"] = [str(i) for i in range(classes)]
    elif classifies:
        message = f"`{artifact.entry}` claims {classes} classes"
        artifact.findings.append(
            Finding("config.invalid", Severity.ERROR, message, source, str(classes), f"at most {MAX_CLASSES}")
        )
    artifact.recipe = Recipe("tabular", settings, source, Strength.HEADER)
    task = Task.TABULAR_CLASSIFICATION if classifies else Task.TABULAR_REGRESSION
    artifact.tasks = [TaskEvidence(task, objective, Strength.HEADER)]


def _part(learner: dict[str, Any], name: str) -> dict[str, Any]:
    value = learner.get(name)
    return value if isinstance(value, dict) else {}


def _int(value: Any) -> int | None:
    try:
        number = int(value)
    except (TypeError, ValueError, OverflowError):
        return None
    return number if abs(number) < 1 << 60 else None


# ---- LightGBM, CatBoost, fastText --------------------------------------------------------------


def _lightgbm(scan: Scan, rel: str) -> Artifact | None:
    head = scan.head(rel, 1 << 20).decode("utf-8", "replace")
    if not head.startswith("tree\n") or "version=" not in head[:200]:
        return None
    values = dict(re.findall(r"^(\w+)=(.*)$", head.split("\nTree=", 1)[0], re.MULTILINE))
    artifact = Artifact(f"lightgbm:{rel}", ArtifactKind.LIGHTGBM, rel, [rel])
    objective = values.get("objective", "")
    names = values.get("feature_names", "").split()
    classes = _int(values.get("num_class")) or 1
    classifies = objective.startswith(("binary", "multiclass", "cross_entropy"))
    settings: dict[str, Any] = {
        "features": [] if all(re.fullmatch(r"Column_\d+", n) for n in names) else names,
        "objective": objective,
        "num_features": (_int(values.get("max_feature_idx")) or 0) + 1,
        "num_class": classes,
    }
    artifact.facts["version"] = Fact(values.get("version"), f"{rel}#version", Strength.HEADER)
    _booster_task(artifact, settings, classifies, f"{rel}#header", f"{rel}#objective")
    return artifact


def _catboost(scan: Scan, rel: str) -> Artifact | None:
    if scan.head(rel, 4) != b"CBM1":
        return None
    artifact = Artifact(f"catboost:{rel}", ArtifactKind.CATBOOST, rel, [rel])
    artifact.tasks = [TaskEvidence(Task.TABULAR_REGRESSION, f"layout:{rel}", Strength.NAME)]
    return artifact


def _fasttext(scan: Scan, rel: str) -> Artifact | None:
    if scan.head(rel, 4) != FASTTEXT:
        return None
    artifact = Artifact(f"fasttext:{rel}", ArtifactKind.FASTTEXT, rel, [rel])
    artifact.tasks = [TaskEvidence(Task.TEXT_CLASSIFICATION, f"{rel}#header", Strength.HEADER)]
    return artifact


# ---- scikit-learn ------------------------------------------------------------------------------


def _skops(scan: Scan, rel: str) -> Artifact:
    artifact = Artifact(f"sklearn_skops:{rel}", ArtifactKind.SKLEARN_SKOPS, rel, [rel])
    try:
        schema = _schema(scan, rel)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return artifact
    types: dict[str, None] = {}
    _collect_types(schema, types)
    artifact.facts["types"] = Fact(list(types), f"{rel}#schema.json", Strength.HEADER)
    root = f"{schema.get('__module__')}.{schema.get('__class__')}"
    artifact.facts["class"] = Fact(root, f"{rel}#schema.json", Strength.HEADER)
    versions = {name: schema.get(key) for name, key in (("skops", "_skops_version"), ("protocol", "protocol"))}
    artifact.facts["version"] = Fact(versions, f"{rel}#schema.json", Strength.HEADER)
    text = " ".join(types)
    classifies = bool(re.search(r"Classif|LogisticRegression|SVC|GaussianNB|Perceptron|Discriminant", text))
    artifact.recipe = Recipe("tabular", {"class": root}, f"{rel}#schema.json", Strength.HEADER)
    task = Task.TABULAR_CLASSIFICATION if classifies else Task.TABULAR_REGRESSION
    artifact.tasks = [TaskEvidence(task, f"{rel}#schema.json", Strength.DERIVED)]
    if classifies:
        artifact.labels = Labels([], f"{rel}#schema.json")
    return artifact


def _schema(scan: Scan, rel: str) -> dict[str, Any]:
    before = scan.check_weights_file(rel)
    if before is not None:
        raise ReadError(before)
    with open_zip(scan, rel) as archive:
        if "schema.json" not in archive.namelist():
            raise read_error("artifact.corrupt", f"`{rel}` has no schema.json", rel)
        data = read_member(archive, archive.getinfo("schema.json"), rel, READ.pickle_bytes)
    schema = parse_json(data, f"{rel}#schema.json")
    if not isinstance(schema, dict):
        raise read_error("artifact.corrupt", f"schema.json in `{rel}` is not an object", rel)
    return schema


def _collect_types(value: Any, types: dict[str, None]) -> None:
    layer = [value]
    while layer:
        following: list[Any] = []
        for item in layer:
            if isinstance(item, dict):
                if isinstance(item.get("__class__"), str):
                    types[f"{item.get('__module__')}.{item['__class__']}"] = None
                following += item.values()
            elif isinstance(item, list):
                following += item
        layer = [v for v in following if isinstance(v, (dict, list))]


def _pickle(scan: Scan, rel: str) -> Artifact | None:
    """A pickle is listed by its opcodes and never opened."""
    before = scan.check_weights_file(rel)
    if before is not None:
        return _failed(ArtifactKind.PICKLE, rel, before)
    data = scan.head(rel, READ.pickle_bytes)
    names: list[str] = []
    if data[:1] == b"\x80":
        try:
            names = pickle_globals(data)
        except ReadError:
            names = _globals_of_prefix(data)
    elif data[:4] == b"PK\x03\x04":
        return None  # a torch file under another name
    kind = (
        ArtifactKind.SKLEARN_PICKLE
        if any(n.startswith("sklearn.") for n in names) or rel.endswith(".joblib")
        else ArtifactKind.PICKLE
    )
    artifact = Artifact(f"{kind}:{rel}", kind, rel, [rel], code=CodeNeed.FORBIDDEN)
    artifact.facts["globals"] = Fact(names, f"{rel}#opcodes", Strength.HEADER)
    version = re.search(rb"_sklearn_version\x94?\x8c(.)", data)
    if version and version[1]:
        at = version.end()
        artifact.facts["sklearn_version"] = Fact(
            data[at : at + version[1][0]].decode("ascii", "replace"), f"{rel}#opcodes", Strength.HEADER
        )
    artifact.findings.append(unsafe_finding(rel, names or ["a compressed pickle"]))
    artifact.tasks = [TaskEvidence(Task.TABULAR_CLASSIFICATION, f"layout:{rel}", Strength.NAME)]
    return artifact


def _globals_of_prefix(data: bytes) -> list[str]:
    """Names in a joblib stream, whose arrays stand between the opcodes: found by their spelling."""
    found = re.findall(rb"c([\w.]+)\n([\w.]+)\n", data)
    texts = [t.decode() for t in re.findall(rb"\x8c.([A-Za-z_][\w.]{2,120})\x94", data[: 1 << 20])]
    pairs = [
        f"{a}.{b}"
        for a, b in zip(texts, texts[1:], strict=False)
        if "." in a or a in ("sklearn", "numpy", "posix", "builtins", "xgboost")
    ]
    return list(dict.fromkeys([f"{a.decode()}.{b.decode()}" for a, b in found] + pairs))
