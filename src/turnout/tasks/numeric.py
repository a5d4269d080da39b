"""Adapters of numeric tasks: raw tensors, and tables classified or regressed.

A table's columns are held to the model's features by name, order and count: the libraries below
would often predict with a column missing or misplaced and never say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turnout.errors import InputError, NotSupportedError
from turnout.package.facts import Artifact, ArtifactKind, GraphPort
from turnout.tasks.adapter import Infer
from turnout.tasks.contract import TableOutput, TensorsOutput
from turnout.types import Request

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Boosters take an absent value as "missing" by design; other models would compute with NaN.
MISSING_BY_DESIGN = frozenset({ArtifactKind.XGBOOST, ArtifactKind.LIGHTGBM, ArtifactKind.CATBOOST})

_NUMPY_NAMES = {
    "float": "float32",
    "float32": "float32",
    "f32": "float32",
    "double": "float64",
    "float64": "float64",
    "f64": "float64",
    "float16": "float16",
    "half": "float16",
    "f16": "float16",
    "bool": "bool",
    "boolean": "bool",
    "string": "str",
    **{f"{kind}int{bits}": f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 16, 32, 64)},
    **{f"{short}{bits}": f"{kind}int{bits}" for short, kind in (("i", ""), ("u", "u")) for bits in (8, 16, 32, 64)},
}


def numpy_dtype(port_dtype: str) -> str | None:
    """NumPy name of a graph port's element type as any reader spells it (``FLOAT``,
    ``tensor(float)``, ``f32``); ``str`` for strings; None for what NumPy has no type for."""
    name = port_dtype.strip().lower()
    if name.startswith("tensor(") and name.endswith(")"):
        name = name[len("tensor(") : -1]
    return _NUMPY_NAMES.get(name)


# ---- raw tensors -----------------------------------------------------------------------


class TensorAdapter:
    """Named arrays in, named arrays out, checked against the graph's inputs when it states them."""

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self.recipe = ""
        self._ports = artifact.graph.inputs if artifact.graph else []

    def run(self, request: Request, infer: Infer) -> TensorsOutput:
        """Outputs by the graph's names. Raises ``InputError`` for arrays that do not fit it."""
        import numpy as np

        tensors = {name: np.asarray(value) for name, value in request.inputs["tensors"].items()}
        if self._ports:
            check_tensors(tensors, self._ports)
        return TensorsOutput(dict(infer(tensors)))


def check_tensors(tensors: dict[str, NDArray[Any]], ports: Sequence[GraphPort]) -> None:
    """Holds arrays to graph inputs: names, element types, number and size of axes.

    Every disagreement is named in one ``InputError``; nothing is cast. A symbol shared by several
    inputs must stand for one size.
    """
    by_name = {port.name: port for port in ports}
    problems = [f"there is no input `{name}`" for name in tensors if name not in by_name]
    problems += [f"input `{name}` is not given" for name in by_name if name not in tensors]
    symbols: dict[str, tuple[int, str]] = {}
    for name, array in tensors.items():
        if name in by_name:
            problems += _tensor_problems(by_name[name], array, symbols)
    if problems:
        raise InputError(
            "the tensors do not fit the graph: " + "; ".join(problems),
            code="graph.io_mismatch",
            hints=["it takes: " + ", ".join(describe_port(port) for port in ports)],
        )


def describe_port(port: GraphPort) -> str:
    """``name dtype[axis, axis]`` of a port, ``?`` for an unknown axis."""
    dtype = numpy_dtype(port.dtype) or port.dtype
    if port.shape is None:
        return f"{port.name} {dtype}"
    return f"{port.name} {dtype}[{', '.join('?' if dim is None else str(dim) for dim in port.shape)}]"


def _tensor_problems(port: GraphPort, array: NDArray[Any], symbols: dict[str, tuple[int, str]]) -> list[str]:
    problems = []
    wanted = numpy_dtype(port.dtype)
    given = "str" if array.dtype.kind in "USO" else str(array.dtype)
    if wanted is not None and given != wanted:
        problems.append(f"`{port.name}` is {given}, expected {wanted}")
    if port.shape is None:
        return problems
    if len(port.shape) != array.ndim:
        return [*problems, f"`{port.name}` has {array.ndim} axes {list(array.shape)}, expected {len(port.shape)}"]
    for axis, (dim, size) in enumerate(zip(port.shape, array.shape, strict=True)):
        if isinstance(dim, int) and dim >= 0 and dim != size:
            problems.append(f"axis {axis} of `{port.name}` is {size}, expected {dim}")
        elif isinstance(dim, str) and dim:
            first, where = symbols.setdefault(dim, (size, port.name))
            if first != size:
                problems.append(f"axis {axis} ({dim}) of `{port.name}` is {size}, but {first} in `{where}`")
    return problems


# ---- tables ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TableSchema:
    """What a table must look like: ``features`` in order (empty when the model stores no names),
    their ``count`` (None when unknown), whether a value may be ``missing`` (empty)."""

    features: tuple[str, ...] = ()
    count: int | None = None
    missing: bool = False

    @classmethod
    def of(cls, artifact: Artifact, options: dict[str, Any]) -> TableSchema:
        """Schema of a tabular artifact from its recipe, else from its graph's inputs.

        ``options["missing_values"]`` lets a backend that asked its model say that it takes NaN.
        """
        settings = artifact.recipe.settings if artifact.recipe and artifact.recipe.kind == "tabular" else {}
        features = tuple(str(name) for name in settings.get("features") or ())
        count = settings.get("num_features") or settings.get("feature_count") or len(features) or None
        ports = artifact.graph.inputs if artifact.graph else []
        if not features and len(ports) > 1:
            features = tuple(port.name for port in ports)
            count = len(features)
        elif count is None and len(ports) == 1:
            count = _fixed_width(ports[0])
        missing = bool(options.get("missing_values", artifact.kind in MISSING_BY_DESIGN))
        return cls(features, int(count) if count else None, missing)

    def check(self, columns: Sequence[str]) -> None:
        """Raises ``InputError`` unless the columns are the features, by name, in order."""
        if not self.features:
            if self.count is not None and len(columns) != self.count:
                raise _column_error(
                    f"the table has {len(columns)} columns, the model takes {self.count} features",
                    columns,
                    self.features,
                )
            return
        lacking = [name for name in self.features if name not in columns]
        extra = [name for name in columns if name not in self.features]
        repeated = sorted({name for name in columns if list(columns).count(name) > 1})
        problems = [
            f"{text}: " + ", ".join(f"`{name}`" for name in names)
            for text, names in (
                ("missing columns", lacking),
                ("columns the model does not know", extra),
                ("repeated columns", repeated),
            )
            if names
        ]
        if problems:
            raise _column_error(
                "the table does not fit the model's features: " + "; ".join(problems), columns, self.features
            )
        if tuple(columns) != self.features:
            place = next(i for i, (a, b) in enumerate(zip(columns, self.features, strict=True)) if a != b)
            raise _column_error(
                f"the table's columns are in another order than the model's features: column {place + 1} is "
                f"`{columns[place]}`, the model has `{self.features[place]}` there",
                columns,
                self.features,
            )


def _column_error(message: str, columns: Sequence[str], features: Sequence[str]) -> InputError:
    hints = ["the table has: " + ", ".join(columns)]
    if features:
        hints.insert(0, "the model takes, in this order: " + ", ".join(features))
    return InputError(message, code="graph.io_mismatch", hints=hints)


def _fixed_width(port: GraphPort) -> int | None:
    if port.shape is not None and len(port.shape) == 2 and isinstance(port.shape[1], int) and port.shape[1] > 0:
        return port.shape[1]
    return None


def parse_number(text: Any, column: str, row: int, missing: bool) -> float:
    """A finite float of a table cell (text or number); NaN for an empty one if ``missing`` allows it.

    ``row`` counts from 1. Raises ``InputError`` naming the place.
    """
    value: float | None
    if text is None or (isinstance(text, str) and not text.strip()):
        value = float("nan")
    else:
        try:
            value = float(text)
        except (TypeError, ValueError):
            value = None
    if value is None:
        raise InputError(f"row {row}, column `{column}`: `{text}` is not a number", code="tensor.dtype_unsupported")
    if math.isnan(value) and not missing:
        raise InputError(
            f"row {row}, column `{column}` is empty, and this model takes no missing values",
            code="tensor.dtype_unsupported",
        )
    if math.isinf(value):
        raise InputError(f"row {row}, column `{column}`: `{text}` is not finite", code="tensor.dtype_unsupported")
    return value


class _TableAdapter:
    """Common half of the tabular adapters: the table becomes the model's inputs."""

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self.recipe = artifact.recipe.id if artifact.recipe else ""
        self.schema = TableSchema.of(artifact, options)
        self.classes = _classes(artifact)
        self._ports = artifact.graph.inputs if artifact.graph else []

    def _infer(self, request: Request, infer: Infer) -> tuple[dict[str, Any], int]:
        table = request.inputs["table"]
        columns, rows = [str(name) for name in table["columns"]], table["rows"]
        if not rows:
            raise InputError("the table has no rows")
        self.schema.check(columns)
        for number, row in enumerate(rows, 1):
            if len(row) != len(columns):
                raise InputError(f"row {number} has {len(row)} values, the header has {len(columns)}")
        inputs = self._by_column(columns, rows) if len(self._ports) > 1 else self._matrix(columns, rows)
        return infer(inputs), len(rows)

    def _matrix(self, columns: list[str], rows: list[Any]) -> dict[str, Any]:
        import numpy as np

        # float64 until the model says otherwise: estimators that compute in it keep their exact answer.
        port = self._ports[0] if self._ports else GraphPort("X", "float64")
        dtype = numpy_dtype(port.dtype) or "float32"
        if dtype == "str":
            return {port.name: np.array([[str(value) for value in row] for row in rows], dtype=object)}
        values = [
            [
                parse_number(value, column, number, self.schema.missing)
                for column, value in zip(columns, row, strict=True)
            ]
            for number, row in enumerate(rows, 1)
        ]
        return {port.name: np.array(values, dtype=dtype)}  # [num_rows, num_features]

    def _by_column(self, columns: list[str], rows: list[Any]) -> dict[str, Any]:
        import numpy as np

        ports = {port.name: port for port in self._ports}
        inputs = {}
        for index, name in enumerate(columns):
            dtype = numpy_dtype(ports[name].dtype) or "float32"
            if dtype == "str":
                column = np.array([str(row[index]) for row in rows], dtype=object)
            else:
                column = np.array(
                    [parse_number(row[index], name, number, self.schema.missing) for number, row in enumerate(rows, 1)],
                    dtype=dtype,
                )
            shape = ports[name].shape
            inputs[name] = column if shape is not None and len(shape) == 1 else column[:, None]  # [num_rows, 1]
        return inputs


class TabularClassificationAdapter(_TableAdapter):
    """A table to one label per row and, where the model gives them, a score per class."""

    def run(self, request: Request, infer: Infer) -> TableOutput:
        """Columns ``label``, then ``p(CLASS)`` for probabilities or ``score(CLASS)`` for other scores."""
        outputs, count = self._infer(request, infer)
        labels, classes, scores = _split_outputs(outputs, count, self.classes)
        if labels is None:
            if scores is None:
                raise NotSupportedError("the model gives neither labels nor class scores", code="graph.output_kind")
            labels = [classes[int(row.argmax())] for row in scores]
        if scores is None:
            return TableOutput(["label"], [[label] for label in labels])
        word = "p" if _are_probabilities(scores) else "score"
        columns = ["label", *(f"{word}({name})" for name in classes)]
        return TableOutput(columns, [[label, *row] for label, row in zip(labels, scores.tolist(), strict=True)])


class TabularRegressionAdapter(_TableAdapter):
    """A table to one value per row, or one per target."""

    def run(self, request: Request, infer: Infer) -> TableOutput:
        """Column ``value``, or ``value0``, ``value1`` ... for several targets."""
        import numpy as np

        outputs, count = self._infer(request, infer)
        values = [np.asarray(value) for value in outputs.values() if not isinstance(value, list)]
        value = next((v for v in values if v.dtype.kind in "fiu" and v.shape[:1] == (count,)), None)
        if value is None:
            raise NotSupportedError("the model gives no numbers for the rows", code="graph.output_kind")
        matrix = value.reshape(count, -1)  # [num_rows, num_targets]
        columns = ["value"] if matrix.shape[1] == 1 else [f"value{i}" for i in range(matrix.shape[1])]
        return TableOutput(columns, matrix.tolist())


def _classes(artifact: Artifact) -> list[Any]:
    settings = artifact.recipe.settings if artifact.recipe and artifact.recipe.kind == "tabular" else {}
    classes = settings.get("classes")
    if classes:
        return list(classes)
    return list(artifact.labels.names) if artifact.labels else []


def _are_probabilities(scores: NDArray[np.floating[Any]]) -> bool:
    return bool(((scores >= 0) & (scores <= 1 + 1e-6)).all() and (abs(scores.sum(axis=1) - 1) < 1e-3).all())


def _split_outputs(
    outputs: dict[str, Any], count: int, classes: list[Any]
) -> tuple[list[Any] | None, list[Any], NDArray[np.floating[Any]] | None]:
    """Labels, classes and scores [num_rows, num_classes] from a classifier's outputs.

    Three shapes of scores are told apart, as converters write them: one map per row (ZipMap), one
    matrix, one output per class.
    """
    import numpy as np

    labels: list[Any] | None = None
    columns: dict[str, Any] = {}
    for name, value in outputs.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            keys = list(value[0])
            scores = np.array([[row[key] for key in keys] for row in value])
            return labels or _labels_of(outputs, count), [_plain(key) for key in keys], scores
        array = np.asarray(value)
        if array.dtype.kind in "iuUSOb" and array.size == count and labels is None:
            labels = [_plain(item) for item in array.reshape(-1)]
        elif array.dtype.kind == "f" and array.shape[:1] == (count,):
            columns[name] = array.reshape(count, -1)
    if not columns:
        return labels, classes, None
    if len(columns) == 1 and next(iter(columns.values())).shape[1] > 1:
        matrix = next(iter(columns.values()))
        return labels, _matching(classes, matrix.shape[1]), matrix
    if len(columns) > 1 and all(column.shape[1] == 1 for column in columns.values()):
        matrix = np.concatenate(list(columns.values()), axis=1)
        named = classes if len(classes) == len(columns) else _unprefixed(list(columns), labels)
        return labels, named, matrix
    return labels, *_positive_only(next(iter(columns.values())), classes)


def _labels_of(outputs: dict[str, Any], count: int) -> list[Any] | None:
    import numpy as np

    for value in outputs.values():
        if not isinstance(value, list):
            array = np.asarray(value)
            if array.dtype.kind in "iuUSOb" and array.size == count:
                return [_plain(item) for item in array.reshape(-1)]
    return None


def _positive_only(column: Any, classes: list[Any]) -> tuple[list[Any], Any]:
    """Two class columns from the probability of the second class alone [num_rows, 1]."""
    import numpy as np

    if column.shape[1] != 1 or len(classes) not in (0, 2) or not ((column >= 0) & (column <= 1)).all():
        raise NotSupportedError("the model's scores cannot be told apart by class", code="graph.output_kind")
    return _matching(classes, 2), np.concatenate([1 - column, column], axis=1)


def _matching(classes: list[Any], count: int) -> list[Any]:
    return classes if len(classes) == count else list(range(count))


def _unprefixed(names: list[str], labels: list[Any] | None) -> list[Any]:
    """Classes from output names: skl2onnx puts ``i`` before an integer class and ``s`` before a text."""
    if labels and isinstance(labels[0], int) and all(n[:1] == "i" and n[1:].lstrip("-").isdigit() for n in names):
        return [int(name[1:]) for name in names]
    if labels and isinstance(labels[0], str) and all(name[:1] == "s" for name in names):
        return [name[1:] for name in names]
    return list(names)


def _plain(value: Any) -> Any:
    """A Python value of a NumPy scalar."""
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return value.item() if hasattr(value, "item") else value
