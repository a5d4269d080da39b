"""onnxruntime-genai: tokens against NumPy and against ONNX Runtime's own sessions; refusals from the runtime."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper
from tests.backends.test_onnxruntime import WIDTH, attend, attention_package
from tests.shapes import graphs

from turnout.backends.base import Case, Outcome, Requirement, State
from turnout.backends.onnxruntime_genai import OnnxRuntimeGenAIBackend
from turnout.errors import InputError, LoadError
from turnout.package.facts import ArtifactKind
from turnout.package.inspect import inspect
from turnout.types import Request, Sampling, Task

BACKEND = OnnxRuntimeGenAIBackend()
PROMPT = "w1 w2 w3"
Change = Callable[[dict[str, Any]], None]


def package(folder: Path, change: Change | None = None) -> Path:
    """The attention decoder of the ONNX Runtime tests as a genai directory; ``change`` edits its config."""
    folder.mkdir(parents=True, exist_ok=True)
    made = graphs.genai(folder, decoder__head_size=WIDTH, decoder__hidden_size=WIDTH)
    graph = attention_package(folder / "graph", past=True) / "model.onnx"
    (made / "model.onnx").write_bytes(graph.read_bytes())
    config = json.loads((made / "genai_config.json").read_text())
    config["model"]["decoder"]["inputs"]["position_ids"] = "position_ids"
    if change is not None:
        change(config)
    (made / "genai_config.json").write_text(json.dumps(config))
    return made


def case_of(path: Path, task: str = Task.TEXT_GENERATION, device: str = "cpu", **options: Any) -> Case:
    found = inspect(path)
    artifact = next(a for a in found.artifacts if a.kind is ArtifactKind.ONNX_GENAI)
    return Case(found.root, artifact, task, device, options)


def against(case: Case) -> list[Requirement]:
    return [r for r in BACKEND.requirements(case) if r.state is not State.MET]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return package(tmp_path_factory.mktemp("genai"))


def greedy(ids: list[int], count: int, eos: set[int]) -> list[int]:
    """Tokens by NumPy alone."""
    found: list[int] = []
    while len(found) < count:
        token = int(attend(ids + found).argmax())
        if token in eos:
            break
        found.append(token)
    return found


# ---- text ----------------------------------------------------------------------------------------


def test_tokens_are_those_of_numpy_and_come_in_pieces(whole: Path) -> None:
    case = case_of(whole)
    assert not against(case)
    assert BACKEND.dry_load(BACKEND.plan(case)).outcome is Outcome.PASS
    session = BACKEND.load(BACKEND.plan(case))
    pieces: list[str] = []
    output = session.run(Request(case.task, {"prompt": PROMPT}, Sampling(max_tokens=12)), pieces.append)
    ids = session.prompter.ids(Request(case.task, {"prompt": PROMPT}))
    wanted = greedy(ids, 12, {3})
    assert output.text == session.prompter.text(wanted) != ""
    assert "".join(pieces) == output.text and len(pieces) > 1
    assert (output.prompt_tokens, output.completion_tokens, output.finish_reason) == (len(ids), 12, "length")
    assert session.dtype == "float32"
    probe = BACKEND.probe(session)
    assert probe.outcome is Outcome.PASS and probe.measurements["tokens_per_s"] > 0


def test_chat_renders_the_template(whole: Path) -> None:
    case = case_of(whole, Task.CHAT)
    session = BACKEND.load(BACKEND.plan(case))
    request = Request(Task.CHAT, {"messages": [{"role": "user", "content": PROMPT}]}, Sampling(max_tokens=6))
    ids = session.prompter.ids(request)
    assert ids != session.prompter.ids(Request(Task.TEXT_GENERATION, {"prompt": PROMPT}))
    assert session.run(request).text == session.prompter.text(greedy(ids, 6, {3}))


def test_the_configurations_own_end_and_context_count(tmp_path: Path) -> None:
    first = case_of(package(tmp_path / "a"))
    session = BACKEND.load(BACKEND.plan(first))
    ids = session.prompter.ids(Request(first.task, {"prompt": PROMPT}))
    tokens = greedy(ids, 8, {3})
    end = next(t for t in tokens if t != tokens[0])
    assert end not in session.prompter.eos_ids

    def change(config: dict[str, Any]) -> None:
        config["model"]["eos_token_id"] = [3, end]
        config["model"]["context_length"] = config["search"]["max_length"] = len(ids) + 6

    case = case_of(package(tmp_path / "b", change))
    session = BACKEND.load(BACKEND.plan(case))
    output = session.run(Request(case.task, {"prompt": PROMPT}, Sampling(max_tokens=8)))
    assert (output.finish_reason, output.completion_tokens) == ("stop", tokens.index(end))
    with pytest.raises(InputError, match=f"the context {len(ids) + 6}"):
        session.run(Request(case.task, {"prompt": " ".join(["w1"] * (len(ids) + 6))}))


def test_a_seed_decides_and_stop_texts_cut(whole: Path) -> None:
    case = case_of(whole)
    session = BACKEND.load(BACKEND.plan(case))

    def text(**sampling: Any) -> str:
        request = Request(case.task, {"prompt": PROMPT}, Sampling(max_tokens=16, **sampling))
        found: str = session.run(request).text
        return found

    wild = {"temperature": 20.0}
    assert text(seed=1, **wild) == text(seed=1, **wild) != text(seed=2, **wild)
    assert text(seed=1, top_k=1, **wild) == text() == text(seed=3, top_k=1, **wild)
    # 16 draws at a temperature that levels 100 tokens: with the library's own limit of 50 none is rare.
    allowed = set(np.argsort(attend(session.prompter.ids(Request(case.task, {"prompt": PROMPT}))))[:50].tolist())
    firsts = set()
    for seed in range(12):
        request = Request(case.task, {"prompt": PROMPT}, Sampling(max_tokens=1, temperature=1e4, seed=seed))
        firsts |= set(session.prompter.tokenizer.encode(session.run(request).text, add_special_tokens=False).ids)
    assert firsts & allowed, "no token of the less likely half in 12 draws"
    words = text().split()
    assert words[2] not in text(stop=(words[2],)).split()


def test_a_closed_session_says_so(whole: Path) -> None:
    session = BACKEND.load(BACKEND.plan(case_of(whole)))
    session.close()
    session.close()
    with pytest.raises(LoadError, match="closed"):
        session.run(Request(Task.TEXT_GENERATION, {"prompt": PROMPT}))


# ---- refusals --------------------------------------------------------------------------------------


def put(value: Any, *path: str) -> Change:
    def change(config: dict[str, Any]) -> None:
        target = config
        for name in path[:-1]:
            target = target[name]
        target[path[-1]] = value

    return change


@pytest.mark.parametrize("value", [1, "x", [1], {"a": 1}], ids=["number", "text", "list", "object"])
@pytest.mark.parametrize(
    "path", [("model",), ("search",), ("model", "decoder"), ("model", "decoder", "inputs")], ids=".".join
)
def test_unknown_keys_are_named_with_their_place(tmp_path: Path, path: tuple[str, ...], value: Any) -> None:
    (found,) = against(case_of(package(tmp_path, put(value, *path, "wonder"))))
    assert (found.id, found.observed) == ("config.unknown_semantic_key", ".".join([*path, "wonder"]))


def test_values_of_another_kind_are_told_in_the_runtimes_words(tmp_path: Path) -> None:
    (found,) = against(case_of(package(tmp_path, put("many", "model", "context_length"))))
    assert found.id == "config.invalid" and found.reason
    assert "context_length" in found.reason.message and str(tmp_path) not in found.reason.message


def test_an_unknown_model_type_is_the_runtimes_refusal(tmp_path: Path) -> None:
    case = case_of(package(tmp_path, put("martian", "model", "type")))
    dry = BACKEND.dry_load(BACKEND.plan(case))
    assert dry.outcome is Outcome.FAIL
    assert dry.reasons[0].code == "architecture.unsupported" and "martian" in dry.reasons[0].message


@pytest.mark.parametrize("name", ["cuda", "CUDAExecutionProvider", "NvTensorRtRtx"])
def test_providers_that_are_not_here(tmp_path: Path, name: str) -> None:
    assert BACKEND.devices() == ["cpu"], "this build has more; ask for one that it lacks"
    case = case_of(package(tmp_path, put([{name: {}}], "model", "decoder", "session_options", "provider_options")))
    found = [r for r in against(case) if r.id == "device.unavailable"]
    assert len(found) == 1 and found[0].expected == name


def test_providers_of_other_names_are_the_runtimes_refusal(tmp_path: Path) -> None:
    path = ("model", "decoder", "session_options", "provider_options")
    case = case_of(package(tmp_path, put([{"martian": {}}], *path)))
    with pytest.raises(LoadError, match="martian") as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "device.unavailable"


def test_models_that_hear_or_see_are_not_taken_for_text(tmp_path: Path) -> None:
    made = package(tmp_path, lambda config: config["model"].__setitem__("vision", {"filename": "model.onnx"}))
    found = [r for r in against(case_of(made)) if r.id == "architecture.unsupported"]
    assert found and "vision" in found[0].observed


def test_an_input_that_the_runtime_never_feeds_shows_before_the_load(tmp_path: Path) -> None:
    """The library constructs such a model; its first token does not come."""
    import onnx

    made = package(tmp_path)
    model = onnx.load(made / "model.onnx")
    model.graph.input.append(helper.make_tensor_value_info("strange", TensorProto.FLOAT, [1]))
    model.graph.node.append(helper.make_node("Identity", ["strange"], ["unused"]))
    model.graph.output.append(helper.make_tensor_value_info("unused", TensorProto.FLOAT, [1]))
    onnx.save(model, made / "model.onnx")
    case = case_of(made)
    assert not against(case)
    dry = BACKEND.dry_load(BACKEND.plan(case))
    assert dry.outcome is Outcome.FAIL
    assert dry.reasons[0].code == "graph.io_mismatch" and "strange" in dry.reasons[0].message
