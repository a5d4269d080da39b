"""ONNX graphs and onnxruntime-genai directories: facts of the onnx library, and what each defect is called."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from tests.shapes import classical, graphs, hf

from turnout.package.facts import Artifact, ArtifactKind
from turnout.package.formats.onnx_proto import BITS, DTYPES, read_model
from turnout.package.formats.protobuf import WireError
from turnout.package.inspect import inspect
from turnout.types import Task

FLOAT = TensorProto.FLOAT


def one(path: Path) -> Artifact:
    (artifact,) = inspect(path).artifacts
    return artifact


def codes(path: Path) -> list[tuple[str, str]]:
    return [(f.code, f.path) for f in one(path).findings]


def port(name: str, kind: int = FLOAT, shape: list[Any] | None = None) -> Any:
    return helper.make_tensor_value_info(name, kind, shape or [1, 4])


# ---- facts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [graphs.mlp, graphs.custom_domain, lambda p: graphs.decoder(p, past=True)])
def test_ports_operators_and_weights_are_those_of_the_library(build: Callable[[Path], Path], tmp_path: Path) -> None:
    path = build(tmp_path / "m.onnx")
    ours, theirs = read_model(path.read_bytes()), onnx.load(path)
    graph = ours.graph
    assert graph.ir_version == theirs.ir_version
    assert graph.opsets == {o.domain: o.version for o in theirs.opset_import}
    assert graph.ops == Counter(f"{n.domain}::{n.op_type}" for n in theirs.graph.node)
    for mine, library in ((graph.inputs, theirs.graph.input), (graph.outputs, theirs.graph.output)):
        assert [(p.name, p.shape) for p in mine] == [
            (p.name, [d.dim_param or d.dim_value for d in p.type.tensor_type.shape.dim]) for p in library
        ]
    assert [(w.name, w.shape, w.nbytes) for w in ours.initializers] == [
        (w.name, tuple(w.dims), numpy_helper.to_array(w).nbytes) for w in theirs.graph.initializer
    ]


def test_element_types_are_the_librarys() -> None:
    named = {v: k.lower() for k, v in TensorProto.DataType.items()}
    same = {"float32": "float", "float64": "double"}
    for number, name in DTYPES.items():
        if number in named:
            assert named[number].replace("_", "") == same.get(name, name).replace("_", "")
    plain = {n for n in DTYPES.values() if n in ("float32", "int8", "int64", "float16", "complex64", "bool")}
    assert {n: BITS[n] for n in plain} == {n: np.dtype(n).itemsize * 8 for n in plain}


def test_subgraphs_functions_and_attribute_tensors_are_counted(tmp_path: Path) -> None:
    inner = helper.make_graph([helper.make_node("Sin", ["x"], ["s"])], "then", [], [port("s")])
    other = helper.make_graph([helper.make_node("Cos", ["x"], ["c"])], "else", [], [port("c")])
    nodes = [
        helper.make_node("Constant", [], ["yes"], value=numpy_helper.from_array(np.array(True), "")),
        helper.make_node("If", ["yes"], ["y"], then_branch=inner, else_branch=other),
    ]
    graph = helper.make_graph(nodes, "g", [port("x")], [port("y")])
    body = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [helper.make_node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    model = helper.make_model(graph, functions=[body], opset_imports=[helper.make_opsetid("", 18)])
    helper.set_model_props(model, {"author": "me"})
    facts = read_model(model.SerializeToString()).graph
    assert facts.ops == {"::Constant": 1, "::If": 1, "::Sin": 1, "::Cos": 1, "::Add": 1}
    assert facts.functions == ["mine::Twice"] and facts.metadata == {"author": "me"}


def test_the_newest_of_repeated_opsets_counts_and_weights_are_no_inputs(tmp_path: Path) -> None:
    weight = numpy_helper.from_array(np.zeros((4, 4), np.float32), "w")
    path = graphs.save(
        tmp_path / "m.onnx",
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        [port("x"), port("w", shape=[4, 4])],  # as IR version 3 does
        [port("y")],
        [weight],
        opset=12,
        domains=("ai.onnx",),
    )
    graph = read_model(path.read_bytes()).graph
    assert graph.opsets == {"": 12} and [p.name for p in graph.inputs] == ["x"]


def test_types_beyond_tensors(tmp_path: Path) -> None:
    artifact = one(classical.zipmap(tmp_path / "m.onnx"))
    assert artifact.graph is not None
    assert [p.dtype for p in artifact.graph.outputs] == ["int64", "seq(map(int64,float32))"]
    assert artifact.task_ids() == [Task.TABULAR_CLASSIFICATION, Task.TENSOR]
    assert artifact.labels is not None and artifact.labels.names == ["0", "1"]
    assert artifact.recipe is not None and artifact.recipe.settings["num_features"] == 4


def test_a_regression_of_the_classical_kind(tmp_path: Path) -> None:
    from skl2onnx import to_onnx
    from sklearn.linear_model import LinearRegression

    x, _ = classical.table()
    data = to_onnx(LinearRegression().fit(x, x[:, 0]), x[:1], target_opset=18).SerializeToString()
    (tmp_path / "m.onnx").write_bytes(data)
    assert one(tmp_path / "m.onnx").task_ids() == [Task.TABULAR_REGRESSION, Task.TENSOR]


QUANTIZED = {
    "MatMulNBits": ("com.microsoft", "MatMulNBits", 4.0),
    "DequantizeLinear": ("", "QDQ", 8.0),
    "MatMulInteger": ("", "dynamic", 8.0),
    "QLinearConv": ("", "QOperator", 8.0),
}


@pytest.mark.parametrize("op", QUANTIZED)
def test_quantization_shows_in_the_operators(op: str, tmp_path: Path) -> None:
    domain, method, bits = QUANTIZED[op]
    node = helper.make_node(op, ["x"], ["y"], domain=domain)
    artifact = one(graphs.save(tmp_path / "m.onnx", [node], [port("x")], [port("y")], [], domains=("com.microsoft",)))
    assert artifact.quantization is not None
    assert (artifact.quantization.method, artifact.quantization.bits) == (method, bits)


def test_float_graphs_are_not_quantized(tmp_path: Path) -> None:
    assert one(graphs.mlp(tmp_path / "m.onnx")).quantization is None


@pytest.mark.parametrize("past", [True, False])
def test_a_decoder_with_or_without_its_cache(past: bool, tmp_path: Path) -> None:
    artifact = one(graphs.decoder_package(tmp_path, past))
    assert artifact.facts["kv_cache"].value is past
    assert artifact.graph is not None and len(artifact.graph.kv_inputs) == (2 if past else 0)
    assert artifact.task_ids() == [Task.CHAT, Task.TEXT_GENERATION, Task.TENSOR]
    assert artifact.tokenizer is not None and artifact.architecture is not None


def test_an_encoder_beside_its_checkpoint_takes_the_pooling_from_there(tmp_path: Path) -> None:
    hf.encoder(tmp_path)
    (tmp_path / "onnx").mkdir()
    ids = [port(n, TensorProto.INT64, ["b", "s"]) for n in ("input_ids", "attention_mask")]
    hidden = [port("last_hidden_state", FLOAT, ["b", "s", 32])]
    graphs.save(tmp_path / "onnx" / "model_q8.onnx", [], ids, hidden, [])
    artifact = next(a for a in inspect(tmp_path).artifacts if a.kind is ArtifactKind.ONNX)
    assert artifact.task_ids() == [Task.EMBEDDINGS, Task.TENSOR]
    assert artifact.architecture is not None and artifact.architecture.model_type == "bert"
    assert artifact.facts["variant"].value == "q8"


@pytest.mark.parametrize(
    ("shape", "outputs", "expected"),
    [
        ([1, 3, 8, 8], [1, 10], [Task.IMAGE_CLASSIFICATION, Task.TENSOR]),
        ([1, 8, 8, 3], [1, 10], [Task.IMAGE_CLASSIFICATION, Task.TENSOR]),
        ([1, 5, 8, 8], [1, 10], [Task.TENSOR]),
        ([1, 3, 8, 8], [1, 1], [Task.TENSOR]),
    ],
)
def test_a_picture_classifier_by_its_ports(
    shape: list[int], outputs: list[int], expected: list[str], tmp_path: Path
) -> None:
    path = graphs.save(tmp_path / "m.onnx", [], [port("pixels", FLOAT, shape)], [port("scores", FLOAT, outputs)], [])
    assert one(path).task_ids() == expected


@pytest.mark.parametrize("variant", ["", "_quantized"])
def test_encoder_and_decoder_are_one_artifact(variant: str, tmp_path: Path) -> None:
    for part in ("encoder_model", "decoder_model", "decoder_with_past_model", "decoder_model_merged"):
        graphs.mlp(tmp_path / f"{part}{variant}.onnx")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "whisper", "architectures": []}))
    artifact = one(tmp_path)
    assert artifact.kind is ArtifactKind.ONNX_SEQ2SEQ and artifact.task_ids() == [Task.ASR]
    assert [c.role for c in artifact.components] == ["encoder", "decoder"]
    (tmp_path / "config.json").unlink()
    assert one(tmp_path).task_ids() == [Task.TEXT2TEXT, Task.TRANSLATION, Task.SUMMARIZATION]


# ---- external data -----------------------------------------------------------------------------


def test_external_data_belongs_to_the_artifact(tmp_path: Path) -> None:
    artifact = one(graphs.external(tmp_path))
    assert artifact.findings == [] and artifact.files == ["model.onnx", "weights.bin"]
    assert artifact.graph is not None and artifact.graph.external == ["weights.bin"]
    assert artifact.tensors.tensors["w1"].file == "weights.bin"


def test_external_data_that_is_absent(tmp_path: Path) -> None:
    assert codes(graphs.external(tmp_path, write=False)) == [("artifact.missing", "weights.bin")]


@pytest.mark.parametrize("location", ["../weights.bin", "/etc/passwd", "a\\b"])
def test_external_data_outside(location: str, tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    assert [c for c, _ in codes(graphs.external(tmp_path / "m", location, write=False))] == ["artifact.path_escape"]


def test_external_data_behind_links(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    outside = graphs.linked_data(tmp_path / "a")
    assert codes(outside) == [("artifact.path_escape", "weights.bin")]
    assert one(graphs.hub_cache(tmp_path / "b") / "model.onnx").findings == []


def edited(tmp_path: Path, key: str, value: str) -> Path:
    """``graphs.external`` with one entry of the weight's external data changed."""
    path = graphs.external(tmp_path)
    model = onnx.load(path, load_external_data=False)
    entry = next(e for e in model.graph.initializer[0].external_data if e.key == key)
    entry.value = value
    path.write_bytes(model.SerializeToString())
    return path


def test_external_data_that_ends_too_early(tmp_path: Path) -> None:
    assert codes(edited(tmp_path, "offset", "4096")) == [("artifact.truncated", "weights.bin")]


def test_external_data_of_another_length(tmp_path: Path) -> None:
    assert codes(edited(tmp_path, "length", "64")) == [("artifact.corrupt", "model.onnx")]


def test_external_data_without_a_place(tmp_path: Path) -> None:
    assert codes(edited(tmp_path, "offset", "here")) == [("artifact.corrupt", "model.onnx")]


# ---- broken files ------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_model_cut_short(share: float, tmp_path: Path) -> None:
    path = graphs.mlp(tmp_path / "m.onnx")
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * share)])
    assert codes(path) == [("artifact.corrupt", "m.onnx")]


def test_bytes_that_are_no_model() -> None:
    for data in (b"hello world", b"\x08\x09", b"\x00" * 40, b"\x3a\xff\xff\xff\xff\x0f"):
        with pytest.raises(WireError):
            read_model(data)


def test_graphs_without_end_are_refused() -> None:
    with pytest.raises(WireError, match="nested"):
        read_model(graphs_within(40))
    assert read_model(graphs_within(10)).graph.ops == {"::If": 10}


def graphs_within(depth: int) -> bytes:
    """A serialised model whose branches hold branches, deeper than the onnx library would write."""

    def field(number: int, data: bytes) -> bytes:
        size, length = len(data), b""
        while size > 127:
            length, size = length + bytes([size & 127 | 128]), size >> 7
        return bytes([number << 3 | 2]) + length + bytes([size]) + data

    graph = b""
    for _ in range(depth):
        graph = field(1, field(4, b"If") + field(5, field(1, b"then_branch") + field(6, graph)))
    return b"\x08\x09" + field(7, graph)


def test_shapes_beyond_reason() -> None:
    def model(dims: list[int]) -> bytes:
        tensor = TensorProto(name="w", data_type=FLOAT, dims=dims)
        data: bytes = helper.make_model(helper.make_graph([], "g", [], [], [tensor])).SerializeToString()
        return data

    for dims in ([-1, 4], [1 << 40, 1 << 40], [1] * 65):
        with pytest.raises(WireError):
            read_model(model(dims))
    assert read_model(model([1 << 20, 0])).initializers[0].nbytes == 0


# ---- onnxruntime-genai -------------------------------------------------------------------------


def test_a_whole_genai_directory(tmp_path: Path) -> None:
    artifact = one(graphs.genai(tmp_path))
    assert artifact.kind is ArtifactKind.ONNX_GENAI and artifact.findings == []
    assert artifact.facts["model_type"].value == "llama" and artifact.facts["providers"].value == []
    assert artifact.task_ids() == [Task.CHAT, Task.TEXT_GENERATION]
    assert [c.role for c in artifact.components] == ["decoder"] and "model.onnx" in artifact.files


def test_providers_are_listed_in_order(tmp_path: Path) -> None:
    options = {"provider_options": [{"cuda": {}}, {"cpu": {}}]}
    assert one(graphs.genai(tmp_path, decoder__session_options=options)).facts["providers"].value == ["cuda", "cpu"]


@pytest.mark.parametrize(("name", "code"), [("absent.onnx", "artifact.missing"), ("../m.onnx", "artifact.path_escape")])
def test_a_graph_that_the_configuration_names(name: str, code: str, tmp_path: Path) -> None:
    found = [
        a
        for a in inspect(graphs.genai(tmp_path, decoder__filename=name)).artifacts
        if a.kind is ArtifactKind.ONNX_GENAI
    ]
    assert [f.code for f in found[0].findings] == [code]


@pytest.mark.parametrize(
    ("key", "value", "lacking"),
    [
        ("decoder__outputs__logits", "scores", "scores"),
        ("decoder__num_hidden_layers", 3, "past_key_values.1.key"),
        ("decoder__inputs__past_key_names", "cache.%d.key", "cache.0.key"),
    ],
)
def test_ports_that_the_graph_does_not_have(key: str, value: Any, lacking: str, tmp_path: Path) -> None:
    finding = one(graphs.genai(tmp_path, **{key: value})).findings[0]
    assert (finding.code, finding.expected) == ("graph.io_mismatch", lacking)


@pytest.mark.parametrize("text", ["[]", '{"model": {}}', '{"model": []}', "{", '{"model": 3}'])
def test_configurations_without_a_model(text: str, tmp_path: Path) -> None:
    (tmp_path / "genai_config.json").write_text(text)
    artifact = one(tmp_path)
    assert artifact.kind is ArtifactKind.ONNX_GENAI and [f.code for f in artifact.findings] == ["config.invalid"]
