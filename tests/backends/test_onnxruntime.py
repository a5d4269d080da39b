"""ONNX Runtime: numbers against NumPy, the ONNX reference and scikit-learn; refusals by name, from the runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from tests.shapes import classical, graphs

from turnout.backends import onnxruntime_kernels as kernels
from turnout.backends import onnxruntime_requirements
from turnout.backends.base import Case, EvidenceLevel, Outcome, Requirement, State
from turnout.backends.onnxruntime import OnnxRuntimeBackend, to_port
from turnout.errors import InputError, LoadError
from turnout.package.inspect import inspect
from turnout.tasks.tokenization import load_tokenizer
from turnout.types import Request, Sampling, Task

BACKEND = OnnxRuntimeBackend()
FLOAT, HALF, BRAIN = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.BFLOAT16
INT64 = TensorProto.INT64
port = helper.make_tensor_value_info
node = helper.make_node


def case_of(path: Path, task: str = Task.TENSOR, **options: Any) -> Case:
    package = inspect(path)
    return Case(package.root, package.artifacts[0], task, options=options)


def against(case: Case) -> list[Requirement]:
    return [r for r in BACKEND.requirements(case) if r.state is not State.MET]


def run(case: Case, **arrays: Any) -> dict[str, Any]:
    assert not against(case), against(case)
    session = BACKEND.load(BACKEND.plan(case))
    try:
        output: dict[str, Any] = session.run(Request(Task.TENSOR, {"tensors": arrays})).tensors
        return output
    finally:
        session.close()


def unary(path: Path, *nodes: Any, kind: int = FLOAT, out: int | None = None, **more: Any) -> Path:
    """Nodes from x [2, 2] to y [2, 2]."""
    return graphs.save(path, list(nodes), [port("x", kind, [2, 2])], [port("y", out or kind, None)], [], **more)


# ---- numbers -------------------------------------------------------------------------------------


def test_mlp_by_hand(tmp_path: Path) -> None:
    x = np.linspace(-2, 2, 12, dtype=np.float32).reshape(3, 4)
    found = run(case_of(graphs.mlp(tmp_path / "m.onnx")), x=x)
    np.testing.assert_allclose(found["y"], graphs.mlp_reference(x), rtol=1e-5)


def test_a_graph_of_many_operators_against_the_onnx_reference(tmp_path: Path) -> None:
    rng = np.random.default_rng(5)
    weights = [
        numpy_helper.from_array(rng.normal(size=(6, 3, 3, 3)).astype(np.float32), "k"),
        numpy_helper.from_array(np.array([0, -1], np.int64), "flat"),
        numpy_helper.from_array(rng.normal(size=(96, 5)).astype(np.float32) / 10, "w"),
    ]
    nodes = [
        node("Conv", ["x", "k"], ["c"], pads=[1, 1, 1, 1]),
        node("Mish", ["c"], ["m"]),  # no kernel: computed by its definition
        node("HardSwish", ["m"], ["s"]),
        node("MaxPool", ["s"], ["p"], kernel_shape=[2, 2], strides=[2, 2]),
        node("Reshape", ["p", "flat"], ["f"]),
        node("MatMul", ["f", "w"], ["l"]),
        node("LogSoftmax", ["l"], ["y"]),
    ]
    path = graphs.save(
        tmp_path / "m.onnx", nodes, [port("x", FLOAT, ["n", 3, 8, 8])], [port("y", FLOAT, ["n", 5])], weights
    )
    x = rng.normal(size=(2, 3, 8, 8)).astype(np.float32)
    wanted = ReferenceEvaluator(str(path)).run(None, {"x": x})[0]
    np.testing.assert_allclose(run(case_of(path), x=x)["y"], wanted, rtol=1e-5, atol=1e-6)


def test_a_local_function_of_an_unheard_domain(tmp_path: Path) -> None:
    inner = helper.make_function(
        "mine", "Twice", ["a"], ["b"], [node("Add", ["a", "a"], ["b"])], [helper.make_opsetid("", 18)]
    )
    graph = helper.make_graph(
        [node("Twice", ["x"], ["y"], domain="mine")], "g", [port("x", FLOAT, [2])], [port("y", FLOAT, [2])]
    )
    imports = [helper.make_opsetid("", 18), helper.make_opsetid("mine", 7)]
    path = tmp_path / "m.onnx"
    path.write_bytes(
        helper.make_model(graph, functions=[inner], opset_imports=imports, ir_version=9).SerializeToString()
    )
    assert run(case_of(path), x=np.float32([1, 2]))["y"].tolist() == [2, 4]


def test_the_cache_of_a_hub_is_read_by_path(tmp_path: Path) -> None:
    case = case_of(graphs.hub_cache(tmp_path))
    x = np.ones((1, 4), np.float32)
    np.testing.assert_allclose(run(case, x=x)["y"], graphs.mlp_reference(x), rtol=1e-5)


@pytest.mark.parametrize("zipmap", [True, False, "columns"])
def test_scikit_learn_tables_in_all_three_output_forms(tmp_path: Path, zipmap: Any) -> None:
    import warnings

    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from skl2onnx import convert_sklearn
        from skl2onnx.common.data_types import FloatTensorType

    x, y = load_iris(return_X_y=True)
    model = LogisticRegression(max_iter=500).fit(x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = convert_sklearn(
            model, initial_types=[("X", FloatTensorType([None, 4]))], options={"zipmap": zipmap}, target_opset=18
        )
    path = tmp_path / "m.onnx"
    path.write_bytes(made.SerializeToString())
    case = case_of(path, Task.TABULAR_CLASSIFICATION)
    assert not against(case)
    table = {"columns": ["a", "b", "c", "d"], "rows": x[::10].tolist()}
    output = BACKEND.load(BACKEND.plan(case)).run(Request(Task.TABULAR_CLASSIFICATION, {"table": table}))
    assert output.columns == ["label", "p(0)", "p(1)", "p(2)"]
    assert [row[0] for row in output.rows] == model.predict(x[::10]).tolist()
    np.testing.assert_allclose([row[1:] for row in output.rows], model.predict_proba(x[::10]), atol=1e-5)


def test_half_floats_are_cast_and_said_so(tmp_path: Path) -> None:
    case = case_of(graphs.mlp(tmp_path / "m.onnx", kind=HALF))
    x = np.linspace(-1, 1, 8).reshape(2, 4).astype(np.float16)
    found = run(case, x=x)["y"]
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, graphs.mlp_reference(x.astype(np.float32)), atol=2e-2)
    (evidence,) = BACKEND.inquire(case)
    assert "MatMul, Relu" in evidence.log and "float32" in evidence.log
    assert BACKEND.load(BACKEND.plan(case)).dtype == "float16"


# ---- versions, asked of the runtime ----------------------------------------------------------------


def test_newest_versions_are_the_last_that_load(tmp_path: Path) -> None:
    import onnxruntime

    def loads(ir: int, opset: int) -> bool:
        path = graphs.mlp(tmp_path / f"{ir}-{opset}.onnx", opset=opset, ir=ir)
        try:
            onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        except Exception:  # the runtime's exceptions have no common base
            return False
        return True

    ir, opset = kernels.newest_ir(), kernels.newest_opset()
    assert loads(ir, 18) and not loads(ir + 1, 18)
    assert loads(9, opset) and not loads(9, opset + 1)
    assert not against(case_of(tmp_path / f"{ir}-18.onnx")) and not against(case_of(tmp_path / f"9-{opset}.onnx"))
    (too_new,) = against(case_of(tmp_path / f"{ir + 1}-18.onnx"))
    assert (too_new.id, too_new.observed, too_new.expected) == ("operator.ir_too_new", str(ir + 1), f"at most {ir}")
    (too_new,) = against(case_of(tmp_path / f"9-{opset + 1}.onnx"))
    assert (too_new.id, too_new.observed) == ("operator.opset_too_new", str(opset + 1))


def test_every_domain_has_its_own_versions(tmp_path: Path) -> None:
    graph = helper.make_graph([node("Relu", ["x"], ["y"])], "g", [port("x", FLOAT, [2])], [port("y", FLOAT, [2])])
    newest = kernels.newest_opset("ai.onnx.ml")
    for version, wanted in ((newest, []), (newest + 1, ["operator.opset_too_new"])):
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("ai.onnx.ml", version)]
        path = tmp_path / f"{version}.onnx"
        path.write_bytes(helper.make_model(graph, opset_imports=imports, ir_version=9).SerializeToString())
        found = against(case_of(path))
        assert [r.id for r in found] == wanted
        assert all("`ai.onnx.ml`" in (r.reason.message if r.reason else "") for r in found)


# ---- operators and kernels -------------------------------------------------------------------------


def test_every_refused_operator_is_named(tmp_path: Path) -> None:
    path = unary(
        tmp_path / "m.onnx",
        node("Cast", ["x"], ["b"], to=BRAIN),
        node("MatMul", ["b", "b"], ["c"]),
        node("Mish", ["c"], ["d"]),
        node("Relu", ["d"], ["e"]),
        node("Cast", ["e"], ["y"], to=FLOAT),
    )
    found = against(case_of(path))
    assert [r.id for r in found] == ["operator.no_kernel", "operator.type_unsupported", "operator.no_kernel"]
    told = [r.reason.message for r in found if r.reason]
    assert "`MatMul` of bfloat16" in told[0] and "`Mish`" in told[1] and "`Relu` of bfloat16" in told[2]
    assert "computed by Max" in told[2], "the operator whose kernel is missing inside the definition"


def test_a_refused_operator_inside_a_branch(tmp_path: Path) -> None:
    inside = [
        node("Cast", ["x"], ["b"], to=BRAIN),
        node("MatMul", ["b", "b"], ["m"]),
        node("Cast", ["m"], ["t"], to=FLOAT),
    ]
    yes = helper.make_graph(inside, "yes", [], [port("t", FLOAT, None)])
    no = helper.make_graph([node("Identity", ["x"], ["f"])], "no", [], [port("f", FLOAT, None)])
    flag = port("flag", TensorProto.BOOL, [])
    nodes = [node("If", ["flag"], ["y"], then_branch=yes, else_branch=no)]
    path = graphs.save(tmp_path / "m.onnx", nodes, [port("x", FLOAT, [2, 2]), flag], [port("y", FLOAT, None)], [])
    (found,) = against(case_of(path))
    assert found.id == "operator.no_kernel" and found.reason and "MatMul" in found.reason.message


@pytest.mark.parametrize(
    ("operator", "more", "code", "words"),
    [
        (
            node("MyOp", ["x"], ["y"], domain="com.acme"),
            {"domains": ("com.acme",)},
            "operator.unknown_domain",
            "com.acme.MyOp",
        ),
        (
            node("Wish", ["x"], ["y"], domain="com.microsoft"),
            {"domains": ("com.microsoft",)},
            "operator.no_kernel",
            "com.microsoft.Wish",
        ),
        (node("Gelu", ["x"], ["y"]), {"opset": 18}, "operator.no_kernel", "`Gelu` is not in opset 18"),
        (node("Upsample", ["x", "x"], ["y"]), {"opset": 13}, "operator.no_kernel", "`Upsample` is gone from opset 13"),
        (node("NoSuch", ["x"], ["y"]), {}, "operator.no_kernel", "`NoSuch`"),
    ],
    ids=lambda v: getattr(v, "op_type", ""),
)
def test_operators_that_are_not_there(
    tmp_path: Path, operator: Any, more: dict[str, Any], code: str, words: str
) -> None:
    (found,) = against(case_of(unary(tmp_path / "m.onnx", operator, **more)))
    assert found.id == code and found.reason and words in found.reason.message


def test_the_runtimes_own_operators_need_no_schema_of_onnx(tmp_path: Path) -> None:
    path = unary(
        tmp_path / "m.onnx", node("QuickGelu", ["x"], ["y"], domain="com.microsoft"), domains=("com.microsoft",)
    )
    x = np.float32([[0, 1], [-1, 2]])
    np.testing.assert_allclose(run(case_of(path), x=x)["y"], x / (1 + np.exp(-1.702 * x)), atol=1e-6)


def test_kernels_are_asked_without_weights(tmp_path: Path) -> None:
    assert kernels.missing_kernels(str(graphs.external(tmp_path / "a", write=False)), "m") == []
    stored = graphs.mlp(tmp_path / "b" / "m.onnx")
    big = kernels.skeleton(str(stored))
    assert [t.name for t in big.graph.initializer] == ["w1", "w2"], "small weights may be constants and stay"


def test_large_graphs_are_judged_by_their_skeleton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnxruntime_requirements, "DRY_BYTES", 0)
    monkeypatch.setattr("turnout.backends.onnxruntime.DRY_BYTES", 0)
    monkeypatch.setattr(kernels, "SKELETON_BYTES", 16)
    assert [r.id for r in against(case_of(graphs.matmul(tmp_path / "b" / "m.onnx", BRAIN)))] == ["operator.no_kernel"]
    case = case_of(graphs.mlp(tmp_path / "a" / "m.onnx"))
    assert not kernels.skeleton(case.file("m.onnx")).graph.initializer
    assert not against(case)
    assert BACKEND.dry_load(BACKEND.plan(case)).level is EvidenceLevel.INQUIRED


# ---- ports -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["input", "output"])
def test_types_that_no_array_has(tmp_path: Path, side: str) -> None:
    kinds = (BRAIN, FLOAT) if side == "input" else (FLOAT, BRAIN)
    path = unary(tmp_path / "m.onnx", node("Cast", ["x"], ["y"], to=kinds[1]), kind=kinds[0], out=kinds[1])
    (found,) = against(case_of(path))
    assert found.id == "tensor.dtype_unsupported" and found.observed == "bfloat16"
    assert found.reason and side in found.reason.message


def test_sequences_out_and_optionals_in_are_served(tmp_path: Path) -> None:
    out = helper.make_tensor_sequence_value_info("y", FLOAT, None)
    split = node("SplitToSequence", ["x"], ["y"], axis=0)
    path = graphs.save(tmp_path / "a" / "m.onnx", [split], [port("x", FLOAT, [2, 2])], [out], [])
    x = np.float32([[1, 2], [3, 4]])
    assert [part.tolist() for part in run(case_of(path), x=x)["y"]] == [[[1, 2]], [[3, 4]]]
    kind = helper.make_optional_type_proto(helper.make_tensor_type_proto(FLOAT, [2, 2]))
    get = node("OptionalGetElement", ["x"], ["y"])
    path = graphs.save(
        tmp_path / "b" / "m.onnx", [get], [helper.make_value_info("x", kind)], [port("y", FLOAT, [2, 2])], []
    )
    assert run(case_of(path), x=x)["y"].tolist() == x.tolist()


def test_texts_go_in_and_out(tmp_path: Path) -> None:
    text = TensorProto.STRING
    path = graphs.save(
        tmp_path / "m.onnx", [node("Identity", ["x"], ["y"])], [port("x", text, [2])], [port("y", text, [2])], []
    )
    assert run(case_of(path), x=np.array(["ä", "b"]))["y"].tolist() == ["ä", "b"]


def test_kinds_are_not_crossed() -> None:
    assert to_port(np.int32([1]), "tensor(int64)", "x").dtype == np.int64
    assert to_port(np.float64([1]), "tensor(float16)", "x").dtype == np.float16
    assert to_port(np.int64([0, 1]), "tensor(bool)", "x").tolist() == [False, True]
    for value, kind in (
        (np.float32([1]), "tensor(int64)"),
        (np.array(["a"]), "tensor(float)"),
        (np.int64([1]), "tensor(string)"),
        (np.float32([1]), "tensor(bfloat16)"),
        (np.float32([0.5]), "tensor(bool)"),
        (np.complex64([1j]), "tensor(float)"),
        (np.array(["2020"], "datetime64[s]"), "tensor(int64)"),
        (np.int64([1 << 40]), "tensor(int32)"),
        (np.int64([-1]), "tensor(uint64)"),
    ):
        with pytest.raises(InputError, match="input `x`"):
            to_port(value, kind, "x")


def test_inputs_that_do_not_fit(tmp_path: Path) -> None:
    case = case_of(graphs.mlp(tmp_path / "m.onnx"))
    session = BACKEND.load(BACKEND.plan(case))
    good = np.zeros((1, 4), np.float32)
    for tensors, word in (
        ({}, "`x` is not given"),
        ({"x": good, "z": good}, "no input `z`"),
        ({"x": good[:, :3]}, "axis 1 of `x` is 3, expected 4"),
        ({"x": good.astype(np.float64)}, "float64, expected float32"),
    ):
        with pytest.raises(InputError, match=word):
            session.run(Request(Task.TENSOR, {"tensors": tensors}))


# ---- text ------------------------------------------------------------------------------------------

VOCAB, WIDTH = 100, 16
RNG = np.random.default_rng(11)
TABLE, PLACES = RNG.normal(size=(VOCAB, WIDTH)), RNG.normal(size=(64, WIDTH))
QUERY, KEY, VALUE = (RNG.normal(size=(WIDTH, WIDTH)) / 4 for _ in range(3))


def attend(ids: list[int]) -> np.ndarray:
    """Logits [vocab] after ``ids``: one causal attention over tokens and places, tied head; float64."""
    hidden = TABLE[ids] + PLACES[: len(ids)]
    scores = (hidden[-1] @ QUERY) @ (hidden @ KEY).T
    weights = np.exp(scores - scores.max())
    mixed = (weights / weights.sum()) @ (hidden @ VALUE)
    logits: np.ndarray = (hidden[-1] + mixed) @ TABLE.T
    return logits


def attention_package(folder: Path, past: bool, merged: bool = False, **changes: str) -> Path:
    """The same as a graph beside the tokenizer of a tiny Llama; ``changes`` rename ports."""
    package = graphs.decoder_package(folder, past=False)
    matrices = {"table": TABLE, "places": PLACES, "wq": QUERY, "wk": KEY, "wv": VALUE, "head": TABLE.T}
    weights = [numpy_helper.from_array(m.astype(np.float32), n) for n, m in matrices.items()]
    weights += [
        numpy_helper.from_array(np.array(v, np.int64), n) for n, v in (("one", [1]), ("pass", 1), ("last", [1, 2]))
    ]
    weights.append(numpy_helper.from_array(np.float32(-1e9), "never"))
    nodes = [
        node("Gather", ["table", "input_ids"], ["words"]),
        node("Gather", ["places", "position_ids"], ["at"]),
        node("Add", ["words", "at"], ["h"]),
        node("MatMul", ["h", "wq"], ["q"]),
    ]
    inputs = [
        port(n, INT64, ["batch", length])
        for n, length in (("input_ids", "new"), ("attention_mask", "total"), ("position_ids", "new"))
    ]
    outputs = [port("logits", FLOAT, ["batch", "new", VOCAB])]
    for part in ("key", "value"):
        nodes.append(node("MatMul", ["h", f"w{part[0]}"], [f"new_{part}"]))
        if not past:
            nodes.append(node("Identity", [f"new_{part}"], [part]))
            continue
        before, after = f"past_key_values.0.{part}", changes.get(part, f"present.0.{part}")
        inputs.append(port(before, FLOAT, ["batch", 1, "past", WIDTH]))
        outputs.append(port(after, FLOAT, ["batch", 1, "total", WIDTH]))
        nodes += [
            node("Unsqueeze", [f"new_{part}", "one"], [f"wide_{part}"]),
            node("Concat", [before, f"wide_{part}"], [after], axis=2),
            node("Squeeze", [after, "one"], [part]),
        ]
    if merged:
        inputs.append(port("use_cache_branch", TensorProto.BOOL, [1]))
    nodes += [
        node("Transpose", ["key"], ["kt"], perm=[0, 2, 1]),
        node("MatMul", ["q", "kt"], ["s"]),
        # Row i of the new tokens sees the past and itself: the upper triangle starts after it.
        node("Shape", ["s"], ["all"], start=1),
        node("ConstantOfShape", ["all"], ["full"], value=numpy_helper.from_array(np.float32([1.0]))),
        node("Gather", ["all", "zero"], ["n_new"]),
        node("Gather", ["all", "pass"], ["n_all"]),
        node("Sub", ["n_all", "n_new"], ["n_past"]),
        node("Add", ["n_past", "pass"], ["k"]),
        node("Trilu", ["full", "k"], ["later"], upper=1),
        node("Mul", ["later", "never"], ["mask"]),
        node("Add", ["s", "mask"], ["masked"]),
        node("Softmax", ["masked"], ["p"], axis=-1),
        node("MatMul", ["p", "value"], ["mixed"]),
        node("Add", ["h", "mixed"], ["o"]),
        node("MatMul", ["o", "head"], ["logits"]),
    ]
    weights.append(numpy_helper.from_array(np.array(0, np.int64), "zero"))
    graphs.save(package / "model.onnx", nodes, inputs, outputs, weights)
    return package


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("decoders")


@pytest.mark.parametrize(
    ("past", "merged"), [(False, False), (True, False), (True, True)], ids=["plain", "past", "merged"]
)
def test_tokens_with_and_without_a_cache_are_those_of_numpy(prompts: Path, past: bool, merged: bool) -> None:
    case = case_of(attention_package(prompts / f"{past}{merged}", past, merged), Task.TEXT_GENERATION)
    assert not against(case)
    session = BACKEND.load(BACKEND.plan(case))
    pieces: list[str] = []
    output = session.run(Request(Task.TEXT_GENERATION, {"prompt": "w1 w2 w3"}, Sampling(max_tokens=12)), pieces.append)
    prompter = session.adapter.prompter
    ids = list(prompter.tokenizer.encode("w1 w2 w3").ids)
    wanted: list[int] = []
    while len(wanted) < 12:
        token = int(attend(ids + wanted).argmax())
        if token in prompter.eos_ids:
            break
        wanted.append(token)
    assert output.text == prompter.text(wanted) and output.completion_tokens == len(wanted)
    assert "".join(pieces) == output.text != ""
    assert output.prompt_tokens == len(ids)
    (evidence,) = BACKEND.inquire(case)
    assert ("no cache" in evidence.log) is not past
    probed = BACKEND.probe(session)
    assert probed.outcome is Outcome.PASS and probed.measurements["tokens_per_s"] > 0


def test_both_ways_draw_the_same_tokens_and_stop_at_the_same_text(prompts: Path) -> None:
    """With a cache and without, a seed decides what is drawn; the whole text comes before a stop string."""
    found: list[list[str]] = []
    for past in (False, True):
        case = case_of(attention_package(prompts / f"drawn{past}", past), Task.TEXT_GENERATION)
        session = BACKEND.load(BACKEND.plan(case))

        def text(session: Any = session, **sampling: Any) -> str:
            request = Request(Task.TEXT_GENERATION, {"prompt": "w1 w2 w3"}, Sampling(max_tokens=16, **sampling))
            output: str = session.run(request).text
            return output

        whole = text()
        stop = next(w for w in whole.split() if w != whole.split()[0])
        draws = [text(temperature=20.0, seed=seed) for seed in (1, 1, 2)]
        assert draws[0] == draws[1] != draws[2]
        assert text(temperature=20.0, seed=2, top_k=1) == whole
        assert text(stop=(stop,)) == whole[: whole.index(stop)]
        found.append([whole, *draws])
    assert found[0] == found[1]


def test_the_context_bounds_prompt_and_text(prompts: Path) -> None:
    """64 places are in the graph's table: an option can lessen them, never add to them."""
    for asked, limit in ((None, 64), ("9", 9), ("100000", 64)):
        options = {} if asked is None else {"context": asked}
        case = case_of(attention_package(prompts / f"context{asked}", True), Task.TEXT_GENERATION, **options)
        session = BACKEND.load(BACKEND.plan(case))
        session.adapter.prompter.eos_ids = frozenset()  # only the context ends the text
        output = session.run(Request(case.task, {"prompt": "w1 w2 w3"}, Sampling(max_tokens=200)))
        assert (output.prompt_tokens + output.completion_tokens, output.finish_reason) == (limit, "length")
        with pytest.raises(InputError, match=f"the prompt has 70 tokens, the context {limit}"):
            session.run(Request(case.task, {"prompt": " ".join(["w1"] * 70)}))


@pytest.mark.parametrize("asked", ["abc", "-3", "0"])
def test_no_context_is_no_crash(prompts: Path, asked: str) -> None:
    case = case_of(attention_package(prompts / f"context{asked}", True), Task.TEXT_GENERATION, context=asked)
    with pytest.raises(InputError, match=f"context={asked}") as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "option.unsupported"


def test_a_template_that_is_no_text(prompts: Path) -> None:
    named = prompts / "bytes.jinja"
    named.write_bytes(b"\xff\xfe\0")
    case = case_of(attention_package(prompts / "chat", True), Task.CHAT, chat_template=str(named))
    with pytest.raises(InputError, match="bytes.jinja") as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "template.invalid"


def test_states_that_lead_nowhere_are_named(prompts: Path) -> None:
    case = case_of(attention_package(prompts / "lost", True, key="something.else"), Task.TEXT_GENERATION)
    found = [r for r in against(case) if r.id == "graph.io_mismatch"]
    assert found and "past_key_values.0.key" in found[0].observed


@pytest.mark.parametrize("extra", ["token_type_ids", "position_ids", "pixel_values"])
def test_text_graphs_get_what_follows_from_the_text(tmp_path: Path, extra: str) -> None:
    """Embeddings of ones: what is filled in shows in the numbers, and a picture cannot be filled in."""
    package = graphs.decoder_package(tmp_path, past=False)
    nodes = [
        node("Cast", [extra], ["e"], to=FLOAT),
        node("Unsqueeze", ["e", "two"], ["column"]),
        node("Gather", ["table", "input_ids"], ["words"]),
        node("Add", ["words", "column"], ["last_hidden_state"]),
    ]
    weights = [
        numpy_helper.from_array(np.ones((VOCAB, 4), np.float32), "table"),
        numpy_helper.from_array(np.array([2], np.int64), "two"),
    ]
    ports = [port(n, INT64, ["batch", "tokens"]) for n in ("input_ids", extra)]
    graphs.save(
        package / "model.onnx", nodes, ports, [port("last_hidden_state", FLOAT, ["batch", "tokens", 4])], weights
    )
    case = case_of(package, Task.EMBEDDINGS, pooling="mean", normalize=False)
    if extra == "pixel_values":
        assert [r.id for r in against(case)] == ["graph.io_mismatch"]
        return
    assert not against(case)
    session = BACKEND.load(BACKEND.plan(case))
    texts = ["w1 w2 w3 w4 w5", "w9"]
    tokenizer = load_tokenizer(case.root, case.artifact, {})
    counts = [len(tokenizer.encode(text).ids) for text in texts]
    wanted = [1 + (0 if extra == "token_type_ids" else (count - 1) / 2) for count in counts]
    vectors = session.run(Request(Task.EMBEDDINGS, {"texts": texts})).vectors
    np.testing.assert_allclose(vectors, np.repeat(np.array(wanted)[:, None], 4, axis=1), rtol=1e-6)


# ---- the transaction -------------------------------------------------------------------------------


def test_another_provider_than_the_asked_one_is_refused(tmp_path: Path) -> None:
    assert BACKEND.devices() == ["cpu"], "this build has more; ask for one that it lacks"
    case = case_of(graphs.mlp(tmp_path / "m.onnx"))
    case.device = "cuda"
    with pytest.warns(UserWarning, match="CUDAExecutionProvider"), pytest.raises(LoadError) as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "device.silent_fallback" and "CUDA" in caught.value.message


def test_a_refused_load_says_what_the_runtime_said(tmp_path: Path) -> None:
    case = case_of(graphs.matmul(tmp_path / "m.onnx", BRAIN))
    dry = BACKEND.dry_load(BACKEND.plan(case))
    assert dry.outcome is Outcome.FAIL and dry.reasons[0].code == "operator.no_kernel"
    with pytest.raises(LoadError, match="MatMul") as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "operator.no_kernel"


def test_a_closed_session_says_so(tmp_path: Path) -> None:
    session = BACKEND.load(BACKEND.plan(case_of(graphs.mlp(tmp_path / "m.onnx"))))
    assert session.binding.loaded == 2 and not session.binding.unresolved and session.dtype == "float32"
    session.close()
    session.close()
    with pytest.raises(LoadError, match="closed"):
        session.run(Request(Task.TENSOR, {"tensors": {"x": np.zeros((1, 4), np.float32)}}))


def test_a_probe_that_gives_no_number_fails(tmp_path: Path) -> None:
    nan = numpy_helper.from_array(np.float32(np.nan), "nan")
    nodes = [node("Mul", ["x", "nan"], ["y"])]
    path = graphs.save(tmp_path / "m.onnx", nodes, [port("x", FLOAT, [2])], [port("y", FLOAT, [2])], [nan])
    evidence = BACKEND.probe(BACKEND.load(BACKEND.plan(case_of(path))))
    assert evidence.outcome is Outcome.FAIL and evidence.reasons[0].code == "runtime.numeric_mismatch"


def test_other_types_than_the_stored_ones_are_no_option(tmp_path: Path) -> None:
    path = graphs.mlp(tmp_path / "m.onnx")
    assert [r.id for r in against(case_of(path, dtype="float16"))] == ["option.unsupported"]
    assert not against(case_of(path, dtype="float32"))


def test_classical_models_take_their_columns(tmp_path: Path) -> None:
    case = case_of(classical.zipmap(tmp_path / "m.onnx"), Task.TABULAR_CLASSIFICATION)
    session = BACKEND.load(BACKEND.plan(case))
    assert BACKEND.probe(session).outcome is Outcome.PASS
    with pytest.raises(InputError, match="3 columns"):
        session.run(Request(Task.TABULAR_CLASSIFICATION, {"table": {"columns": ["a", "b", "c"], "rows": [[1, 2, 3]]}}))
