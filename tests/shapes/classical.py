"""CTranslate2 and classical shapes of the list (cases 59 to 67), tiny and seeded."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np
from tests.shapes import hf

FEATURES = ["length", "width", "height", "weight"]


def table(rows: int = 60) -> tuple[np.ndarray, np.ndarray]:
    """Features [rows, 4] and a label of two classes that depends on them."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(rows, 4)).astype(np.float32)
    return x, (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(int)


# ---- CTranslate2 -------------------------------------------------------------------------------


def ct2_decoder(folder: Path) -> Path:
    """A tiny Llama converted by CTranslate2 itself, tokenizer files copied."""
    import ctranslate2

    hf.llama(folder / "whole")
    copied = [
        n for n in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja") if (folder / "whole" / n).exists()
    ]
    converter = ctranslate2.converters.TransformersConverter(str(folder / "whole"), copy_files=copied)
    converter.convert(str(folder / "model"))
    return folder / "model"


def ct2_newer(folder: Path) -> Path:
    """Case 59: a binary version from the future."""
    package = ct2_decoder(folder)
    data = bytearray((package / "model.bin").read_bytes())
    data[:4] = struct.pack("<I", 99)
    (package / "model.bin").write_bytes(bytes(data))
    return package


# ---- xgboost and scikit-learn ------------------------------------------------------------------


def booster(path: Path, **parameters: Any) -> Path:
    """Case 61: four named features; the ending says JSON or UBJ."""
    import xgboost

    x, y = table()
    data = xgboost.DMatrix(x, y, feature_names=FEATURES)
    xgboost.train({"objective": "binary:logistic", "max_depth": 2, "seed": 0, **parameters}, data, 4).save_model(path)
    return path


def custom_objective(path: Path) -> Path:
    """Case 63."""
    booster(path)
    model = json.loads(path.read_text())
    model["learner"]["objective"] = {"name": "my:objective"}
    path.write_text(json.dumps(model))
    return path


def pickled_booster(path: Path) -> Path:
    """Case 64."""
    import xgboost

    x, y = table()
    model = xgboost.train({"max_depth": 2}, xgboost.DMatrix(x, y), 2)
    path.write_bytes(pickle.dumps(model))
    return path


def classifier() -> Any:
    """A scikit-learn classifier trained on ``table``."""
    from sklearn.linear_model import LogisticRegression

    return LogisticRegression().fit(*table())


def zipmap(path: Path) -> Path:
    """Case 65: probabilities come as a list of maps."""
    from skl2onnx import to_onnx

    x, _ = table()
    path.write_bytes(to_onnx(classifier(), x[:1], target_opset=18).SerializeToString())
    return path


def skops(path: Path, trusted: bool) -> Path:
    """Case 66: a pipeline of scikit-learn's own types, or with a function of somebody's."""
    import skops.io
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import FunctionTransformer, StandardScaler

    x, y = table()
    first = StandardScaler() if trusted else FunctionTransformer(strange)
    from sklearn.linear_model import LogisticRegression

    skops.io.dump(make_pipeline(first, LogisticRegression()).fit(x, y), path)
    return path


def strange(values: Any) -> Any:
    """A function that no library of the field has."""
    return values * 2


def joblib_pickle(path: Path) -> Path:
    """Case 67."""
    import joblib

    joblib.dump(classifier(), path)
    return path
