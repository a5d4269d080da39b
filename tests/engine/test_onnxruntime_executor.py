"""The ONNX Runtime executor: logits and greedy tokens against Transformers' own, for every form of graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.backends.test_onnxruntime import attend, attention_package
from tests.engine import onnxruntime_executor_graphs as tiny
from tests.shapes import graphs

from turnout.backends import onnxruntime_kernels as kernels
from turnout.backends.base import Case
from turnout.backends.onnxruntime import OnnxRuntimeBackend
from turnout.backends.onnxruntime_executor import CONTEXT, OnnxExecutor, open_executor
from turnout.backends.onnxruntime_executor_graph import DecoderGraph
from turnout.engine.core import Engine, EngineConfig
from turnout.engine.executor import ExecutorOptions, Row, Step
from turnout.engine.request import Finish, GenerationRequest
from turnout.engine.speculative import NGramProposer
from turnout.errors import InputError, LoadError, NotSupportedError, TurnoutError, UsageError
from turnout.package.facts import ArtifactKind
from turnout.package.inspect import inspect
from turnout.types import Sampling, Task

INT32 = TensorProto.INT32
FORMS: dict[str, dict[str, Any]] = {
    "concat": {"form": "concat"},
    "gqa": {"form": "gqa"},
    "plain": {"form": "plain"},
    "int32": {"form": "concat", "ids": INT32},
    "half": {"form": "concat", "half": True},
    "last": {"form": "gqa", "last": True},
    "plain-last": {"form": "plain", "last": True},
    "old-names": {"form": "concat", "names": ("past_{layer}_{part}", "present_{layer}_{part}")},
    "stacked": {"form": "stacked", "names": ("past_{layer}", "present_{layer}")},
    "keep": {"form": "gqa", "keep": True},
    "one": {"form": "concat", "new": 1},
}
TOLERANCE = {"half": 7e-2}  # a cache in float16: a hundredth of the largest logit, else rounding of float32
PROMPTS = [[1, 5, 9, 33, 70, 12, 4], [1, 88], [1, *range(20, 60)], [1, 7, 7, 7, 30]]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny.llama()


@pytest.fixture(scope="module")
def opened(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., OnnxExecutor]]:
    folder = tmp_path_factory.mktemp("graphs")
    sessions: dict[str, Any] = {}

    def executor(name: str, **more: Any) -> OnnxExecutor:
        if name not in sessions:
            path = tiny.write(folder / f"{name}.onnx", model, **FORMS[name])
            sessions[name] = kernels.open_session(str(path), "cpu", optimise=True)
        return OnnxExecutor(sessions[name], **{"context": tiny.PLACES, **more})

    yield executor
    sessions.clear()


def feed(executor: OnnxExecutor, slot: int, tokens: list[int], start: int = 0, logits: int = 1) -> np.ndarray:
    return executor.execute(Step([Row(slot, tokens, start, logits)]))


def in_chunks(executor: OnnxExecutor, slot: int, ids: list[int], size: int) -> np.ndarray:
    """Logits of every token, [len(ids), vocab]."""
    parts = [
        feed(executor, slot, ids[i : i + size], i, len(ids[i : i + size])).copy() for i in range(0, len(ids), size)
    ]
    return np.concatenate(parts)


def generate(executor: OnnxExecutor, prompts: list[list[int]], count: int, chunk: int = 64) -> list[list[int]]:
    """Greedy tokens of all prompts at once: ragged steps in which prompts and decoding mix."""
    texts = [list(p) for p in prompts]
    done = [0] * len(texts)
    while any(len(t) < len(p) + count for t, p in zip(texts, prompts, strict=True)):
        step, owners = Step(), []
        for slot, (text, prompt) in enumerate(zip(texts, prompts, strict=True)):
            new = text[done[slot] : done[slot] + chunk]
            if new and len(text) < len(prompt) + count:
                step.rows.append(Row(slot, new, done[slot], int(done[slot] + len(new) == len(text))))
                owners.append(slot)
        logits = executor.execute(step)
        assert logits.dtype == np.float32 and logits.shape == (step.num_logits, tiny.VOCAB)
        place = 0
        for slot, row in zip(owners, step.rows, strict=True):
            done[slot] += len(row.tokens)
            if row.logits:
                texts[slot].append(int(logits[place].argmax()))
                place += 1
    return [t[len(p) :] for t, p in zip(texts, prompts, strict=True)]


# ---- against Transformers ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_logits_of_every_token_in_chunks(
    opened: Callable[..., OnnxExecutor], model: Any, name: str, chunk: int
) -> None:
    executor, ids = opened(name), PROMPTS[2]
    found, wanted = in_chunks(executor, 0, ids, chunk), tiny.reference(model, ids)
    assert np.abs(found - wanted).max() < TOLERANCE.get(name, 1e-4)


@pytest.mark.parametrize("name", [n for n in FORMS if n != "half"])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_greedy_tokens_of_ragged_steps_are_those_of_generate(
    opened: Callable[..., OnnxExecutor], model: Any, name: str, chunk: int
) -> None:
    wanted = [tiny.greedy(model, prompt, 12) for prompt in PROMPTS]
    assert generate(opened(name), PROMPTS, 12, chunk) == wanted


def test_what_each_form_proves(opened: Callable[..., OnnxExecutor]) -> None:
    found = {name: opened(name).graph for name in FORMS}
    facts = {n: (g.shared, g.batches, g.every, g.chunks) for n, g in found.items() if g is not None}
    assert facts == {
        "concat": (False, True, True, True),
        "gqa": (True, True, True, True),
        "plain": (False, False, True, False),
        "int32": (False, True, True, True),
        "half": (False, True, True, True),
        "last": (True, True, False, True),
        "plain-last": (False, False, False, False),
        "old-names": (False, True, True, True),
        "stacked": (False, True, True, True),
        "keep": (True, True, True, True),
        "one": (False, True, True, False),
    }
    notes = {name: " ".join(opened(name).capabilities.notes) for name in FORMS}
    assert "no cache" in notes["plain"] and "no cache" not in notes["concat"] + notes["gqa"]
    assert "last token only" in notes["last"] and "one after another" not in notes["gqa"]
    capabilities = opened("gqa", slots=3).capabilities
    assert (capabilities.vocab_size, capabilities.context, capabilities.slots) == (tiny.VOCAB, tiny.PLACES, 3)
    assert capabilities.cache_tokens == 3 * tiny.PLACES
    per_token = 2 * tiny.LAYERS * tiny.KV_HEADS * tiny.SIZE * 4
    assert opened("concat", cache_bytes=200 * per_token).capabilities.cache_tokens == 200
    assert opened("half", cache_bytes=200 * per_token).capabilities.cache_tokens == 400


@pytest.mark.parametrize("name", ["concat", "gqa"])
def test_rows_computed_together_are_the_rows_alone(
    opened: Callable[..., OnnxExecutor], model: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows come and go: 3 decode together, one leaves, another joins; calls of several rows are counted."""
    executor, calls = opened(name), []
    inner = DecoderGraph.run

    def counted(graph: DecoderGraph, ids: Any, lengths: Any, *rest: Any) -> Any:
        calls.append(len(lengths))
        return inner(graph, ids, lengths, *rest)

    monkeypatch.setattr(DecoderGraph, "run", counted)
    texts = {slot: list(PROMPTS[slot]) for slot in (0, 1, 3)}
    for slot, text in texts.items():
        feed(executor, slot, text)
    texts[2] = PROMPTS[0][:3]
    feed(executor, 2, texts[2])
    rng = np.random.default_rng(0)
    for members in [(0, 1, 3)] * 3 + [(0, 3)] * 3 + [(3, 0, 2)] * 70 + [(2,)] + [(0, 2)] * 2:
        step = Step()
        for slot in members:
            step.rows.append(Row(slot, [int(rng.integers(tiny.VOCAB))], len(texts[slot])))
            texts[slot].append(step.rows[-1].tokens[0])
        logits = executor.execute(step)
        for row, slot in enumerate(members):
            wanted = tiny.reference(model, texts[slot])[-1]
            assert np.abs(logits[row] - wanted).max() < 1e-4, (members, slot)
    assert calls.count(3) == 2 + 69 and calls.count(2) == 2 + 1


# ---- slots -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["concat", "gqa", "plain", "half", "stacked", "one"])
@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_copies_cuts_and_freed_slots(
    opened: Callable[..., OnnxExecutor], model: Any, name: str, together: bool
) -> None:
    executor, near = opened(name), TOLERANCE.get(name, 1e-4)
    base = PROMPTS[0]
    feed(executor, 0, base)
    feed(executor, 1, PROMPTS[3])
    if together:  # so that slot 0 is a row among others
        for _ in range(2):
            base = [*base, 50]
            executor.execute(Step([Row(1, [3], executor.retained(1, 99)), Row(0, [50], len(base) - 1)]))

    def check(slot: int, text: list[int], more: list[int]) -> None:
        assert executor.retained(slot, 10_000) == len(text)
        found = feed(executor, slot, more, len(text), len(more))
        assert np.abs(found - tiny.reference(model, [*text, *more])[len(text) :]).max() < near

    executor.copy_prefix(0, 2, len(base))
    executor.copy_prefix(0, 3, 3)
    check(0, base, [11, 12])
    check(2, base, [60])
    check(3, base[:3], [61, 62, 63, 64])
    executor.roll_back(0, 5)
    assert executor.retained(0, 4) == 4
    check(0, base[:5], [40, 41])
    check(2, [*base, 60], [7])
    executor.roll_back(2, 0)
    check(2, [], [1, 2, 3])
    executor.free(0)
    executor.free(0)
    check(0, [], PROMPTS[1])
    executor.copy_prefix(1, 4, 0)
    check(4, [], [9])


def test_a_shared_buffer_grows_to_the_context(opened: Callable[..., OnnxExecutor], model: Any) -> None:
    executor = opened("gqa")
    ids = [int(t) for t in np.random.default_rng(3).integers(0, tiny.VOCAB, tiny.PLACES)]
    found = in_chunks(executor, 0, ids, 9)
    assert np.abs(found - tiny.reference(model, ids)).max() < 1e-4
    with pytest.raises(InputError, match="128 of 128 tokens"):
        feed(executor, 0, [1], tiny.PLACES)


@pytest.mark.parametrize("name", ["concat", "gqa", "plain"])
def test_a_step_that_fails_changes_nothing(opened: Callable[..., OnnxExecutor], model: Any, name: str) -> None:
    executor = opened(name)
    feed(executor, 0, PROMPTS[0])
    feed(executor, 1, PROMPTS[3])
    last = {0: len(PROMPTS[0]), 1: len(PROMPTS[3])}
    for rows in ([Row(0, [5, 6], last[0]), Row(1, [tiny.VOCAB], last[1])], [Row(0, [5], 3)], [Row(0, [], last[0])]):
        with pytest.raises(InputError) as caught:
            executor.execute(Step(rows))
        assert caught.value.code == "runtime.failed"
    assert [executor.retained(slot, 99) for slot in (0, 1)] == [last[0], last[1]]
    logits = executor.execute(Step([Row(1, [5], last[1]), Row(0, [5], last[0])]))
    for row, text in enumerate((PROMPTS[3], PROMPTS[0])):
        assert np.abs(logits[row] - tiny.reference(model, [*text, 5])[-1]).max() < 1e-4


def test_what_it_cannot_do_is_refused_by_name(opened: Callable[..., OnnxExecutor]) -> None:
    executor = opened("concat")
    with pytest.raises(NotSupportedError, match="no encoder"):
        executor.encode(0, [1])
    with pytest.raises(NotSupportedError, match="adapter `mine`"):
        executor.load_adapter("mine", "path")
    with pytest.raises(InputError, match="adapter `mine`"):
        executor.execute(Step([Row(0, [1], 0, adapter="mine")]))
    executor.unload_adapter("mine")
    feed(executor, 0, [1, 2])
    for refused in (lambda: executor.copy_prefix(0, 1, 3), lambda: executor.roll_back(0, 3)):
        with pytest.raises(InputError, match="slot 0 holds 2 tokens, not 3"):
            refused()
    executor.close()
    executor.close()
    with pytest.raises(LoadError, match="closed"):
        feed(executor, 0, [1])


# ---- other graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("past", "merged"), [(False, False), (True, False), (True, True)], ids=["plain", "past", "merged"]
)
def test_a_graph_that_ignores_its_mask_is_never_padded(tmp_path: Path, past: bool, merged: bool) -> None:
    """The attention of the ONNX Runtime tests, against NumPy; the mask is not used, so rows stay apart."""
    package = attention_package(tmp_path / "graph", past, merged)
    executor = OnnxExecutor(kernels.open_session(str(package / "model.onnx"), "cpu", optimise=True), context=64)
    assert executor.graph is not None and not executor.graph.batches
    texts = [[1, 5, 9], [7, 8, 9, 10, 11]]
    done = [0, 0]
    for _ in range(8):
        logits = executor.execute(Step([Row(s, t[d:], d) for s, (t, d) in enumerate(zip(texts, done, strict=True))]))
        done = [len(t) for t in texts]
        for row, text in enumerate(texts):
            np.testing.assert_allclose(logits[row], attend(text), rtol=1e-4, atol=1e-4)
            text.append(int(logits[row].argmax()))


def one_state(path: Path, shape: list[Any], after: list[Any], **names: str) -> Path:
    """A graph of an embedding with one state that is handed through; ``names`` replace ports."""
    made = {"past": "past_key_values.0.key", "present": "present.0.key", "extra": "", **names}
    port, node = helper.make_tensor_value_info, helper.make_node
    inputs = [port("input_ids", tiny.INT64, ["batch", "new"]), port(made["past"], tiny.FLOAT, shape)]
    inputs += [port(made["extra"], tiny.FLOAT, [1])] if made["extra"] else []
    table = helper.make_tensor("table", tiny.FLOAT, [8, 8], np.eye(8, dtype=np.float32).ravel())
    nodes = [
        node("Gather", ["table", "input_ids"], ["logits"]),
        node("Identity", [made["past"]], [made["present"]]),
    ]
    outputs = [port("logits", tiny.FLOAT, ["batch", "new", 8]), port(made["present"], tiny.FLOAT, after)]
    return graphs.save(path, nodes, inputs, outputs, [table])


@pytest.mark.parametrize(
    ("shape", "names", "error", "word"),
    [
        (["batch", 4, 16], {"past": "past_ssm.0", "present": "present_ssm.0"}, NotSupportedError, "past_ssm.0"),
        ([1, 2, 64, 8], {}, NotSupportedError, "fixed size"),
        (["batch", "heads", "tokens", 8], {}, LoadError, "axes"),
        (["batch", "heads", "past_len", 8], {}, LoadError, "leaves more"),
        ([3, 2, "past", 8], {}, LoadError, "axes"),
        (["batch", 2, "past", 8], {"present": "cache.0"}, LoadError, "present.0.key"),
        (["batch", 2, "past", 8], {"extra": "pixel_values"}, LoadError, "pixel_values"),
    ],
    ids=["state", "static", "unnamed", "heads", "batch", "lost", "strange"],
)
def test_states_that_cannot_be_driven_are_named(
    tmp_path: Path, shape: list[Any], names: dict[str, str], error: type[TurnoutError], word: str
) -> None:
    session = kernels.open_session(str(one_state(tmp_path / "m.onnx", shape, shape, **names)), "cpu")
    with pytest.raises(error, match=word) as caught:
        OnnxExecutor(session)
    assert caught.value.code in ("architecture.unsupported", "graph.io_mismatch")


def test_a_past_that_is_not_used_shows_in_the_probe(tmp_path: Path, model: Any) -> None:
    """The graph takes a past but attends to nothing of it: the logits token by token are others."""
    import onnx

    path = tiny.write(tmp_path / "m.onnx", model, form="concat")
    graph = onnx.load(path)
    for node in list(graph.graph.node):
        if node.op_type == "Concat" and node.output[0].startswith("present"):
            # The states forget: zeros take the place of what came before.
            node.input[0] = f"none_{node.output[0]}"
            past = f"past_key_values{node.output[0].removeprefix('present')}"
            nodes = [helper.make_node("Sub", [past, past], [node.input[0]])]
            graph.graph.node.insert(0, nodes[0])
    onnx.save(graph, path)
    with pytest.raises(LoadError, match="not carried on") as caught:
        OnnxExecutor(kernels.open_session(str(path), "cpu"))
    assert caught.value.code == "graph.io_mismatch"


# ---- from a package ----------------------------------------------------------------------------------


def package(folder: Path, model: Any, form: str) -> Path:
    made = graphs.decoder_package(folder, past=form != "plain")
    tiny.write(made / "model.onnx", model, form=form)
    return made


def case_of(path: Path, kind: ArtifactKind = ArtifactKind.ONNX, device: str = "cpu", **options: Any) -> Case:
    found = inspect(path)
    artifact = next(a for a in found.artifacts if a.kind is kind)
    return Case(found.root, artifact, Task.TEXT_GENERATION, device, options)


def test_the_backend_opens_it_with_options(tmp_path: Path, model: Any) -> None:
    backend = OnnxRuntimeBackend()
    case = case_of(package(tmp_path, model, "gqa"))
    executor = backend.executor(backend.plan(case), ExecutorOptions(slots=2, context=40, cache_tokens=64))
    can = executor.capabilities
    assert (can.slots, can.context, can.cache_tokens) == (2, 40, 64) and can.weights_bytes > 0
    assert generate(executor, PROMPTS[:2], 5) == [tiny.greedy(model, p, 5) for p in PROMPTS[:2]]
    stated = case.artifact.architecture.dims["max_position_embeddings"] if case.artifact.architecture else 0
    assert backend.executor(backend.plan(case)).capabilities.context == stated != CONTEXT
    case.options["context"] = "17"
    assert backend.executor(backend.plan(case)).capabilities.context == 17
    assert backend.executor(backend.plan(case), ExecutorOptions(kv_dtype="float32")).capabilities.context == 17


@pytest.mark.parametrize("form", ["gqa", "concat", "plain"])
@pytest.mark.parametrize("drafts", [False, True], ids=["plainly", "drafts"])
def test_the_engine_generates_through_it(tmp_path: Path, model: Any, form: str, drafts: bool) -> None:
    """Requests at once, with a shared prefix and too little room for all, against ``generate`` alone."""
    backend = OnnxRuntimeBackend()
    plan = backend.plan(case_of(package(tmp_path, model, form)))
    executor = backend.executor(plan, ExecutorOptions(slots=3, cache_tokens=128))
    vocabulary = backend.vocabulary(plan)
    assert vocabulary.decode(vocabulary.encode("w1 w2", special=False)) == "w1 w2"
    engine = Engine(executor, vocabulary, EngineConfig(chunk_tokens=7), proposer=NGramProposer() if drafts else None)
    prompts = [*PROMPTS, PROMPTS[2] + [3], PROMPTS[2][:30]]
    found: dict[str, list[int]] = {str(i): [] for i in range(len(prompts))}
    for i, prompt in enumerate(prompts):
        sampling = Sampling(max_tokens=20, ignore_eos=True)
        engine.add(GenerationRequest(str(i), list(prompt), sampling))
    while engine.has_work:
        for event in engine.step():
            assert event.finish is not Finish.ERROR, event.error
            found[event.id] += event.tokens
    engine.check_idle()
    assert engine.stats.preemptions > 0 and (engine.stats.drafted > 0) is drafts
    assert list(found.values()) == [tiny.greedy(model, prompt, 20) for prompt in prompts]
    engine.close()


@pytest.mark.parametrize(
    ("options", "given", "word"),
    [
        ({}, {"quantize": "q8"}, "quantize=q8"),
        ({"kv_dtype": "int8"}, {}, "kv_dtype=int8"),
        ({}, {"context": "abc"}, "context=abc"),
        ({}, {"device": "cuda"}, "`cuda`"),
    ],
    ids=["quantize", "kv", "context", "device"],
)
def test_options_that_a_graph_cannot_honour(
    tmp_path: Path, model: Any, options: dict[str, Any], given: dict[str, Any], word: str
) -> None:
    case = case_of(package(tmp_path, model, "concat"), **given)
    with pytest.raises((UsageError, NotSupportedError), match=word):
        open_executor(OnnxRuntimeBackend().plan(case), ExecutorOptions(**options))


def test_a_genai_directory_names_its_graph_and_context(tmp_path: Path, model: Any) -> None:
    made = graphs.genai(tmp_path)
    tiny.write(made / "model.onnx", model, form="gqa")
    case = case_of(made, ArtifactKind.ONNX_GENAI)
    executor = open_executor(OnnxRuntimeBackend().plan(case))
    assert executor.capabilities.context == 64  # genai_config.json's
    assert generate(executor, PROMPTS[:1], 6) == [tiny.greedy(model, PROMPTS[0], 6)]
