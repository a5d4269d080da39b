"""Tensors and tables are held to what the model states, and decoded in every converter's shape."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from turnout.errors import InputError, NotSupportedError
from turnout.package.facts import Artifact, ArtifactKind, Graph, GraphPort, Recipe
from turnout.tasks.numeric import (
    TabularClassificationAdapter,
    TabularRegressionAdapter,
    TensorAdapter,
    numpy_dtype,
    parse_number,
)
from turnout.types import Request, Task

FOUR = ["sepal length", "sepal width", "petal length", "petal width"]


def graph_artifact(*ports: GraphPort, recipe: Recipe | None = None) -> Artifact:
    return Artifact("onnx:m.onnx", ArtifactKind.ONNX, "m.onnx", graph=Graph(inputs=list(ports)), recipe=recipe)


def tensor_request(**tensors: Any) -> Request:
    return Request(Task.TENSOR, {"tensors": tensors})


def table_request(columns: list[str], *rows: list[Any]) -> Request:
    return Request(Task.TABULAR_CLASSIFICATION, {"table": {"columns": columns, "rows": list(rows)}})


def booster(**settings: Any) -> Artifact:
    return Artifact("xgboost:m.json", ArtifactKind.XGBOOST, "m.json", recipe=Recipe("tabular", settings))


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("FLOAT", "float32"),
        ("tensor(float)", "float32"),
        ("f16", "float16"),
        ("INT64", "int64"),
        ("i32", "int32"),
        ("tensor(string)", "str"),
        ("boolean", "bool"),
        ("bfloat16", None),
        ("seq(tensor(float))", None),
    ],
)
def test_numpy_dtype(spelling: str, name: str | None) -> None:
    assert numpy_dtype(spelling) == name


def test_tensors_pass_through_by_name() -> None:
    adapter = TensorAdapter("", graph_artifact(GraphPort("x", "float32", ["batch", 2])), {})
    out = adapter.run(tensor_request(x=np.ones((3, 2), np.float32)), lambda t: {"y": t["x"] * 2})
    np.testing.assert_array_equal(out.tensors["y"], np.full((3, 2), 2, np.float32))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"z": np.ones((1, 2), np.float32)}, ["no input `z`", "input `x` is not given", "input `k` is not given"]),
        ({"x": np.ones((1, 2)), "k": np.ones(1, np.int64)}, ["`x` is float64, expected float32"]),
        ({"x": np.ones((1, 3), np.float32), "k": np.ones(1, np.int64)}, ["axis 1 of `x` is 3, expected 2"]),
        ({"x": np.ones(2, np.float32), "k": np.ones(1, np.int64)}, ["has 1 axes [2], expected 2"]),
        ({"x": np.ones((4, 2), np.float32), "k": np.ones(3, np.int64)}, ["(batch) of `k` is 3, but 4 in `x`"]),
    ],
)
def test_every_misfit_of_a_tensor_is_named(tensors: dict[str, Any], words: list[str]) -> None:
    ports = GraphPort("x", "float32", ["batch", 2]), GraphPort("k", "int64", ["batch"])
    with pytest.raises(InputError) as caught:
        TensorAdapter("", graph_artifact(*ports), {}).run(tensor_request(**tensors), lambda t: t)
    for word in words:
        assert word in caught.value.message
    assert caught.value.code == "graph.io_mismatch"
    assert "x float32[batch, 2], k int64[batch]" in caught.value.hints[0]


@pytest.mark.parametrize(
    ("columns", "word"),
    [
        (FOUR[:3], "missing columns: `petal width`"),
        ([*FOUR, "colour"], "columns the model does not know: `colour`"),
        ([FOUR[1], FOUR[0], *FOUR[2:]], "column 1 is `sepal width`, the model has `sepal length` there"),
        ([*FOUR[:3], FOUR[0]], "repeated columns: `sepal length`"),
    ],
)
def test_columns_are_refused_by_name(columns: list[str], word: str) -> None:
    adapter = TabularClassificationAdapter("", booster(features=FOUR), {})
    with pytest.raises(InputError, match="model") as caught:
        adapter.run(table_request(columns, [1.0] * len(columns)), lambda t: t)
    assert word in caught.value.message
    assert ", ".join(FOUR) in caught.value.hints[0]


def test_count_is_held_where_there_are_no_names() -> None:
    for artifact in (booster(features=[], num_features=4), graph_artifact(GraphPort("X", "float32", [None, 4]))):
        with pytest.raises(InputError, match="has 3 columns, the model takes 4"):
            TabularClassificationAdapter("", artifact, {}).run(table_request(FOUR[:3], [1, 2, 3]), lambda t: t)


@pytest.mark.parametrize(
    ("cell", "missing", "word"),
    [
        ("red", True, "`red` is not a number"),
        ("", False, "is empty"),
        ("nan", False, "is empty"),
        ("inf", True, "is not finite"),
        ([1], True, "is not a number"),
    ],
)
def test_a_bad_cell_is_named(cell: Any, missing: bool, word: str) -> None:
    with pytest.raises(InputError, match=word) as caught:
        parse_number(cell, "age", 7, missing)
    assert caught.value.message.startswith("row 7, column `age`")


def test_empty_cells_reach_a_booster_as_nan() -> None:
    seen: dict[str, Any] = {}

    def infer(tensors: dict[str, Any]) -> dict[str, Any]:
        seen.update(tensors)
        return {"value": np.zeros(1, np.float32)}

    TabularRegressionAdapter("", booster(features=["a", "b"]), {}).run(table_request(["a", "b"], ["1.5", " "]), infer)
    assert seen["X"][0, 0] == 1.5 and np.isnan(seen["X"][0, 1])


@pytest.mark.parametrize(
    "outputs",
    [
        {"output_label": np.array([1, 0]), "output_probability": [{0: 0.25, 1: 0.75}, {0: 1.0, 1: 0.0}]},
        {"label": np.array([1, 0]), "probabilities": np.array([[0.25, 0.75], [1.0, 0.0]], np.float32)},
        {"output_label": np.array([1, 0]), "i0": np.array([0.25, 1.0]), "i1": np.array([0.75, 0.0])},
        {"label": np.array([1, 0]), "probability": np.array([0.75, 0.0])},
        {"probabilities": np.array([[0.25, 0.75], [1.0, 0.0]])},
    ],
)
def test_every_shape_of_classifier_output(outputs: dict[str, Any]) -> None:
    adapter = TabularClassificationAdapter("", graph_artifact(GraphPort("X", "float32", [None, 2])), {})
    out = adapter.run(table_request(["a", "b"], [1, 2], [3, 4]), lambda tensors: outputs)
    assert out.columns == ["label", "p(0)", "p(1)"]
    assert out.rows == [[1, 0.25, 0.75], [0, 1.0, 0.0]]


def test_text_classes_and_scores_that_are_no_probabilities() -> None:
    artifact = graph_artifact(GraphPort("X", "float32", [None, 1]))
    adapter = TabularClassificationAdapter("", artifact, {})
    outputs = {"l": np.array(["b"], dtype=object), "sa": np.array([-2.0]), "sb": np.array([1.5])}
    out = adapter.run(table_request(["x"], [1]), lambda tensors: outputs)
    assert (out.columns, out.rows) == (["label", "score(a)", "score(b)"], [["b", -2.0, 1.5]])


def test_classes_of_the_recipe_name_the_scores() -> None:
    adapter = TabularClassificationAdapter("", booster(features=["x"], classes=["no", "yes"]), {})
    out = adapter.run(table_request(["x"], [1]), lambda t: {"probabilities": np.array([[0.1, 0.9]])})
    assert (out.columns, out.rows) == (["label", "p(no)", "p(yes)"], [["yes", 0.1, 0.9]])


def test_a_column_per_graph_input() -> None:
    ports = GraphPort("age", "float32", [None, 1]), GraphPort("city", "string", [None, 1])
    seen: dict[str, Any] = {}

    def infer(tensors: dict[str, Any]) -> dict[str, Any]:
        seen.update(tensors)
        return {"variable": np.array([[1.0, 2.0]], np.float32)}

    adapter = TabularRegressionAdapter("", graph_artifact(*ports), {})
    out = adapter.run(table_request(["age", "city"], ["30", "Oslo"]), infer)
    assert seen["age"].dtype == np.float32 and seen["age"].shape == (1, 1)
    assert seen["city"].tolist() == [["Oslo"]]
    assert (out.columns, out.rows) == (["value0", "value1"], [[1.0, 2.0]])


def test_outputs_that_mean_nothing_are_refused() -> None:
    adapter = TabularClassificationAdapter("", booster(features=["x"]), {})
    with pytest.raises(NotSupportedError) as caught:
        adapter.run(table_request(["x"], [1]), lambda t: {"margin": np.array([3.5])})
    assert caught.value.code == "graph.output_kind"
    with pytest.raises(InputError, match="no rows"):
        adapter.run(table_request(["x"]), lambda t: t)
