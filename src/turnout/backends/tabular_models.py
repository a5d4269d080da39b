"""Loaded models of xgboost, LightGBM and skops, seen alike: what they take and what they predict."""

from __future__ import annotations

import json
import os
import re
import warnings
from typing import Any, Protocol

from turnout.errors import LoadError
from turnout.types import Task

# LightGBM writes these when the caller gave no names: they name nothing.
_AUTOMATIC_NAMES = re.compile(r"Column_\d+\Z")


class Model(Protocol):
    """One loaded estimator of any of the libraries."""

    dtype: str
    parts: int  # trees, or fitted estimators

    def recipe(self) -> dict[str, Any]:
        """``features``, ``num_features``, ``classes``, ``missing`` as the loaded model says."""
        ...

    def predict(self, matrix: Any, task: str) -> dict[str, Any]:
        """Named outputs for a float matrix [num_rows, num_features]."""
        ...


class XGBoostModel:
    """A Booster from JSON or UBJSON; raw ``Booster.predict`` decides the numbers."""

    dtype = "float32"

    def __init__(self, path: str) -> None:
        import xgboost

        self._lib = xgboost
        self.booster = xgboost.Booster({"nthread": os.cpu_count() or 1})
        self.booster.load_model(path)
        learner = json.loads(self.booster.save_config())["learner"]
        self.objective: str = learner["objective"]["name"]
        self.classes = int(learner["learner_model_param"]["num_class"])
        self.targets = int(learner["learner_model_param"].get("num_target", 1))
        self.parts = self.booster.num_boosted_rounds()
        categories = getattr(self.booster, "get_categories", lambda: None)()
        if categories is not None and not categories.empty():
            raise LoadError(
                "the model holds its own table of category names; a table of numbers cannot be put to it",
                code="config.unsupported_variant",
            )

    def recipe(self) -> dict[str, Any]:
        """Features and classes as the booster has them; NaN is "missing" by design."""
        classes = {"binary": 2, "multi": self.classes}.get(self.objective.split(":")[0], 0)
        return {
            "features": self.booster.feature_names or [],
            "num_features": self.booster.num_features(),
            "classes": list(range(classes)),
            "missing": True,
            "task": Task.TABULAR_CLASSIFICATION if classes else Task.TABULAR_REGRESSION,
            "targets": self.targets,
        }

    def predict(self, matrix: Any, task: str) -> dict[str, Any]:
        """Outputs by objective: probabilities, or a class, or a value."""
        import numpy as np

        data = self._lib.DMatrix(
            matrix,
            feature_names=self.booster.feature_names,
            feature_types=self.booster.feature_types,
            enable_categorical=True,
        )
        raw = self.booster.predict(data)
        if task == Task.TABULAR_REGRESSION:
            return {"value": raw}
        if self.objective in ("multi:softmax", "binary:hinge"):
            return {"label": raw.astype(np.int64)}
        if self.objective == "multi:softprob":
            return {"probabilities": raw}
        positive = 1 / (1 + np.exp(-raw.astype(np.float64))) if self.objective == "binary:logitraw" else raw
        return {"probability": positive.reshape(-1, 1)}  # of the second class


class LightGBMModel:
    """A Booster from LightGBM's text format."""

    dtype = "float64"

    def __init__(self, path: str) -> None:
        import lightgbm

        self.booster = lightgbm.Booster(model_file=path)
        self.parts = self.booster.num_trees()
        words = (re.search(r"^objective=(.*)$", self.booster.model_to_string(num_iteration=1), re.M) or [None, ""])[1]
        self.objective = (words or "").split(" ")[0]
        self.classes = int((re.search(r"num_class:(\d+)", words or "") or [0, 1])[1])

    def recipe(self) -> dict[str, Any]:
        """Features unless LightGBM made the names up; classes by objective."""
        names = self.booster.feature_name()
        if all(_AUTOMATIC_NAMES.match(name) for name in names):
            names = []
        classes = {"binary": 2, "multiclass": self.classes, "multiclassova": self.classes}.get(self.objective, 0)
        return {
            "features": names,
            "num_features": self.booster.num_feature(),
            "classes": list(range(classes)),
            "missing": True,
            "targets": 1,
            "task": Task.TABULAR_CLASSIFICATION if classes else Task.TABULAR_REGRESSION,
        }

    def predict(self, matrix: Any, task: str) -> dict[str, Any]:
        """Probabilities or values as ``Booster.predict`` gives them."""
        raw = self.booster.predict(matrix, num_threads=os.cpu_count() or 1)
        if task == Task.TABULAR_REGRESSION:
            return {"value": raw}
        if raw.ndim == 1:
            return {"probability": raw.reshape(-1, 1)}  # of the second class
        return {"probabilities": raw}


class SkopsModel:
    """A scikit-learn estimator from a ``.skops`` file, with no type trusted beyond skops' own list."""

    dtype = "float64"

    def __init__(self, path: str) -> None:
        import skops.io
        from sklearn.exceptions import InconsistentVersionWarning

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.simplefilter("error", InconsistentVersionWarning)
            try:
                self.estimator = skops.io.load(path, trusted=[])
            except InconsistentVersionWarning as warning:
                raise LoadError(
                    f"saved by scikit-learn {warning.original_sklearn_version}, "
                    f"{warning.current_sklearn_version} is installed: its results may differ",
                    code="dependency.version",
                    hints=[f"pip install scikit-learn=={warning.original_sklearn_version}"],
                ) from None
        if not hasattr(self.estimator, "predict"):
            raise LoadError(
                f"`{type(self.estimator).__name__}` in the file is no estimator with `predict`", code="task.not_offered"
            )
        self.parts = 1

    def recipe(self) -> dict[str, Any]:
        """Features, classes and whether NaN is taken, as the fitted estimator says."""
        from sklearn.base import is_classifier
        from sklearn.utils import get_tags

        estimator = self.estimator
        classes = getattr(estimator, "classes_", None)
        names = getattr(estimator, "feature_names_in_", None)
        return {
            "features": [] if names is None else [str(name) for name in names],
            "num_features": getattr(estimator, "n_features_in_", None),
            "classes": [] if classes is None or isinstance(classes, list) else classes.tolist(),
            "missing": bool(get_tags(estimator).input_tags.allow_nan),
            "targets": 1,
            "task": Task.TABULAR_CLASSIFICATION if is_classifier(estimator) else Task.TABULAR_REGRESSION,
        }

    def predict(self, matrix: Any, task: str) -> dict[str, Any]:
        """``predict``, and ``predict_proba`` or ``decision_function`` where the classifier has them."""
        import numpy as np

        with warnings.catch_warnings():
            # Names and order of the columns were checked; scikit-learn only sees a plain matrix.
            warnings.filterwarnings("ignore", message="X does not have valid feature names")
            value = self.estimator.predict(matrix)
            if task == Task.TABULAR_REGRESSION:
                return {"value": value}
            if hasattr(self.estimator, "predict_proba"):
                return {"label": value, "probabilities": self.estimator.predict_proba(matrix)}
            if hasattr(self.estimator, "decision_function"):
                scores = np.asarray(self.estimator.decision_function(matrix))
                return {"label": value, "scores": np.stack([-scores, scores], 1) if scores.ndim == 1 else scores}
        return {"label": value}
