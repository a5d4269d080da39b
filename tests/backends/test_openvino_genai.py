"""OpenVINO GenAI: tokens against a NumPy Llama over the file's own weights, and what it must refuse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tests.shapes import ggufs, graphs

from turnout.backends import openvino_gguf as ask
from turnout.backends.base import Action, Case, Outcome, Requirement, State
from turnout.backends.openvino_genai import GenAISession, OpenVINOGenAIBackend
from turnout.backends.openvino_gguf_files import SmallModel, expanded
from turnout.errors import InputError, LoadError
from turnout.package.inspect import inspect
from turnout.package.store import resolve
from turnout.types import Request, Sampling, Task

BACKEND = OpenVINOGenAIBackend()
PROMPT = "hello there"
QUESTION = [{"role": "user", "content": "What is the capital of France?"}]


def case_of(path: Path | str, task: str = Task.TEXT_GENERATION, **options: Any) -> Case:
    package = inspect(path)
    return Case(package.root, package.artifacts[0], task, options=options)


def against(case: Case) -> list[Requirement]:
    return [r for r in BACKEND.requirements(case) if r.state is not State.MET]


def codes(case: Case) -> set[str]:
    return {r.id for r in against(case)}


def generate(session: GenAISession, prompt: str = PROMPT, **sampling: Any) -> Any:
    return session.run(Request(Task.TEXT_GENERATION, {"prompt": prompt}, Sampling(**sampling)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("genai")


# ---- numbers ---------------------------------------------------------------------------


def weights_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Dequantized tensors and keys, read by the gguf distribution."""
    reader = gguf.GGUFReader(path)
    tensors = {t.name: gguf.quants.dequantize(t.data, t.tensor_type).astype(np.float64) for t in reader.tensors}
    return tensors, {
        name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer")
    }


def logits(path: Path, ids: list[int]) -> np.ndarray:
    """Logits [vocabulary] after ``ids`` of a Llama (Touvron et al. 2023), in float64; rotary pairs
    are neighbours in GGUF's llama and halves in qwen2."""
    tensors, keys = weights_of(path)
    arch = keys["general.architecture"]
    heads, kv = keys[f"{arch}.attention.head_count"], keys[f"{arch}.attention.head_count_kv"]
    hidden = tensors["token_embd.weight"][ids]
    count, width = hidden.shape
    size = width // heads
    angle = np.arange(count)[:, None] * 10000.0 ** (-np.arange(0, size, 2) / size)
    cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]

    def norm(x: Any, weight: Any) -> Any:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5) * weight

    def rotate(x: Any) -> Any:
        a, b = (x[..., 0::2], x[..., 1::2]) if arch == "llama" else np.split(x, 2, -1)
        pair = [a * cos - b * sin, a * sin + b * cos]
        return np.stack(pair, -1).reshape(x.shape) if arch == "llama" else np.concatenate(pair, -1)

    for layer in range(keys[f"{arch}.block_count"]):
        block = {name.split(".")[2]: t for name, t in tensors.items() if name.startswith(f"blk.{layer}.")}
        x = norm(hidden, block["attn_norm"])
        q = rotate((x @ block["attn_q"].T).reshape(count, heads, size))
        k = rotate((x @ block["attn_k"].T).reshape(count, kv, size)).repeat(heads // kv, 1)
        v = (x @ block["attn_v"].T).reshape(count, kv, size).repeat(heads // kv, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(size) + np.triu(np.full((count, count), -np.inf), 1)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        hidden = hidden + np.einsum("hqk,khd->qhd", shares, v).reshape(count, -1) @ block["attn_output"].T
        x = norm(hidden, block["ffn_norm"])
        gate = x @ block["ffn_gate"].T
        hidden = hidden + (gate / (1 + np.exp(-gate)) * (x @ block["ffn_up"].T)) @ block["ffn_down"].T
    head = tensors.get("output.weight", tensors["token_embd.weight"])
    result: np.ndarray = norm(hidden, tensors["output_norm.weight"])[-1] @ head.T
    return result


def greedy(path: Path, ids: list[int], count: int, end: int = 256) -> list[int]:
    found: list[int] = []
    for _ in range(count):
        found.append(int(logits(path, ids + found).argmax()))
        if found[-1] == end:
            break
    return found


def tokens_of(session: GenAISession, count: int) -> list[int]:
    """Generated ids, by way of a decoder that keeps them."""
    kept: list[int] = []
    decode = session.text.decode

    def keep(ids: list[int]) -> str:
        kept[:] = ids if len(ids) >= len(kept) else kept
        return ""

    session.text.decode = keep
    try:
        generate(session, max_tokens=count)
    finally:
        session.text.decode = decode
    return kept


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "F16"])
@pytest.mark.parametrize("arch", ["llama", "qwen2"])
def test_tokens_are_those_of_the_dequantized_weights(folder: Path, kind: str, arch: str) -> None:
    path = ggufs.write_gguf(folder / f"{arch}-{kind}.gguf", kind=kind, pre="smollm", arch=arch)
    case = case_of(path)
    assert not against(case)
    session = BACKEND.load(BACKEND.plan(case))
    ids = session.text.encode(PROMPT, True)
    assert tokens_of(session, 12) == greedy(path, ids, 12)
    assert BACKEND.probe(session).outcome is Outcome.PASS


@pytest.mark.parametrize("kind", ["Q4_1"])
def test_rounded_types_need_consent_and_are_then_exact(folder: Path, kind: str) -> None:
    path = ggufs.write_gguf(folder / f"{kind}.gguf", kind=kind, pre="smollm")
    (found,) = against(case_of(path))
    assert found.id == "quantization.unsupported" and "Q4_1 in 9 tensors" in found.observed
    assert found.remedies[0].argv == ["--option", "allow_dequantize=true"]
    case = case_of(path, allow_dequantize="true")
    assert not against(case)
    session = BACKEND.load(BACKEND.plan(case))
    assert tokens_of(session, 12) == greedy(path, session.text.encode(PROMPT, True), 12)


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K"])
def test_expanded_copies_hold_the_dequantized_values(folder: Path, kind: str) -> None:
    """Against the gguf distribution's own dequantization; every other byte is the same."""
    path = folder / f"blocks-{kind}.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_array("tokenizer.ggml.tokens", ["a", "bc", "d"])
    element = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[element]
    raw = np.random.default_rng(1).integers(0, 256, (3, 1024 // block * size), np.uint8)
    blocks = raw.reshape(-1, size)
    blocks[:, :4] = np.frombuffer(np.array([0.01, 0.02], np.float16).tobytes(), np.uint8)
    writer.add_tensor("w", raw, raw_dtype=element)
    writer.add_tensor("n", np.arange(5, dtype=np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file, writer.close):
        step()
    copy = gguf.GGUFReader(expanded(str(path), ask.ROUNDED_TYPES))
    found = {t.name: t for t in copy.tensors}
    assert found["w"].tensor_type.name == "F16" and found["n"].data.tolist() == [0, 1, 2, 3, 4]
    expected = gguf.quants.dequantize(raw, element)
    np.testing.assert_allclose(found["w"].data.astype(np.float32), expected, rtol=2e-3, atol=1e-4)
    assert copy.fields["tokenizer.ggml.tokens"].contents() == ["a", "bc", "d"]


# ---- what it would pass over -----------------------------------------------------------


def test_element_types_are_asked_by_role(folder: Path) -> None:
    for kind in ("F32", "Q5_0"):
        path = ggufs.write_gguf(folder / f"r-{kind}.gguf", kind=kind, pre="smollm")
        found = against(case_of(path))
        assert {r.id for r in found} == {"quantization.unsupported"}
        assert any(f"{kind} in 7 matrix tensors" in r.observed for r in found)
    assert not ask.refusal_of_type("output", "F32") and ask.refusal_of_type("matrix", "F32")
    assert "unknown element type" in ask.refusal_of_type("matrix", "Q9_9")


def test_architectures_are_asked(folder: Path) -> None:
    assert not ask.refusal_of_architecture("qwen3")
    path = ggufs.write_gguf(folder / "arch.gguf", arch="unheardof", pre="smollm")
    (found,) = against(case_of(path))
    assert found.id == "architecture.unsupported" and "unheardof" in found.observed


def test_absent_tensors_and_keys_are_named(folder: Path) -> None:
    case = case_of(ggufs.write_gguf(folder / "drop.gguf", drop="blk.0.ffn_up", pre="smollm"))
    case.artifact.findings.clear()
    case.artifact.tensors.problems.clear()
    (found,) = against(case)
    assert (found.id, found.expected) == ("tensor.missing", "blk.0.ffn_up.weight")
    with pytest.raises(LoadError) as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "tensor.missing"
    case = case_of(ggufs.write_gguf(folder / "key.gguf", pre="smollm"))
    del case.artifact.architecture.config["general.file_type"]  # type: ignore[union-attr]
    (found,) = against(case)
    assert (found.id, found.expected) == ("config.invalid", "general.file_type")


@pytest.mark.parametrize(
    ("key", "value", "code"),
    [
        ("llama__attention__sliding_window", 16, "config.unsupported_variant"),
        ("llama__rope__scaling__type", "yarn", "config.unsupported_variant"),
        ("llama__expert_count", 4, "config.unsupported_variant"),
        ("llama__wonder", 1, "config.unknown_semantic_key"),
        ("llama__rope__scaling__type", "none", ""),
        ("llama__expert_count", 0, ""),
    ],
)
def test_settings_it_does_not_act_on(folder: Path, key: str, value: Any, code: str) -> None:
    path = ggufs.write_gguf(folder / f"{key}{value}.gguf", pre="smollm", **{key: value})
    case = case_of(path)
    assert codes(case) == ({code} if code else set())
    if code:
        with pytest.raises(LoadError, match=key.replace("__", ".")):
            BACKEND.load(BACKEND.plan(case))


def test_tensors_it_would_ignore(folder: Path) -> None:
    case = case_of(ggufs.write_gguf(folder / "extra.gguf", pre="smollm"))
    tensors = case.artifact.tensors.tensors
    tensors["rope_freqs.weight"] = tensors["output_norm.weight"]
    tensors["blk.0.attn_q.bias"] = tensors["output_norm.weight"]
    (found,) = against(case)
    assert found.id == "tensor.unexpected" and found.observed == "blk.0.attn_q.bias, rope_freqs.weight"


def test_tokenizers_are_asked(folder: Path) -> None:
    assert ask.knows_pre_tokenizer("smollm") and ask.knows_pre_tokenizer("qwen2") and ask.knows_pre_tokenizer("default")
    assert not ask.knows_pre_tokenizer("wondertokens")
    (found,) = against(case_of(ggufs.write_gguf(folder / "pre.gguf", pre="wondertokens")))
    assert found.id == "tokenizer.pre_unknown" and found.remedies[0].action is Action.SET_OPTION
    assert ask.refusal_of_tokenizer("llama") and not ask.refusal_of_tokenizer("gpt2")


def test_small_models_are_whole_files(tmp_path: Path) -> None:
    SmallModel("qwen3", {"matrix": "Q6_K"}).write(tmp_path / "small.gguf")
    (artifact,) = inspect(tmp_path / "small.gguf").artifacts
    assert not artifact.findings and not artifact.tensors.problems
    assert ask.required_tensors("qwen3", 1) == [
        n for n in ask.required_tensors("qwen3", 1) if n in artifact.tensors.tensors
    ]


# ---- sessions --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Iterator[GenAISession]:
    session = BACKEND.load(BACKEND.plan(case_of(ggufs.write_gguf(folder / "tiny.gguf", pre="smollm"))))
    assert isinstance(session, GenAISession)
    yield session
    session.close()
    session.close()


def test_limits_and_finish_reasons(tiny: GenAISession) -> None:
    output = generate(tiny, max_tokens=5)
    assert (output.finish_reason, output.completion_tokens) == ("length", 5)
    assert output.prompt_tokens == len(tiny.text.encode(PROMPT, True))
    assert generate(tiny, "x" * 60, max_tokens=50).completion_tokens <= 64 - 60
    for prompt, text in (("", "no tokens"), ("x" * 65, "context holds 64")):
        with pytest.raises(InputError, match=text):
            generate(tiny, prompt, max_tokens=1)


def test_sampling_repeats_with_a_seed(tiny: GenAISession) -> None:
    hot = {"max_tokens": 12, "temperature": 3.0}
    assert generate(tiny, seed=1, **hot).text == generate(tiny, seed=1, **hot).text
    assert len({generate(tiny, seed=seed, **hot).text for seed in range(4)}) > 1
    greedy_text = generate(tiny, max_tokens=12).text
    assert generate(tiny, seed=5, top_k=1, **hot).text == greedy_text
    assert generate(tiny, seed=5, top_p=1e-6, **hot).text == greedy_text


def test_named_options_of_dtype(folder: Path) -> None:
    path = ggufs.write_gguf(folder / "dtype.gguf", pre="smollm")
    assert codes(case_of(path, dtype="int3")) == {"option.unsupported"}


# ---- directories -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_directories(tmp_path: Path) -> None:
    stateless = case_of(graphs.genai_ir(tmp_path / "a", stateful=False, tokenizer=True))
    stateless.artifact.findings.clear()
    assert codes(stateless) == {"graph.state_missing", "graph.io_mismatch"}
    assert any("no `beam_idx`" in r.reason.message for r in against(stateless) if r.reason)
    mute = case_of(graphs.genai_ir(tmp_path / "b", stateful=True, tokenizer=False))
    mute.artifact.findings.clear()
    assert "tokenizer.missing" in codes(mute)
    for case in (stateless, mute):
        with pytest.raises(LoadError):
            BACKEND.load(BACKEND.plan(case))


def test_a_saved_directory_runs_like_its_gguf(tmp_path: Path) -> None:
    """GenAI saves what it built from GGUF as a directory with tokenizer graphs."""
    import openvino_genai

    path = tmp_path / "m" / "m.gguf"
    path.parent.mkdir()
    ggufs.write_gguf(path, pre="smollm")
    openvino_genai.LLMPipeline(str(path), "CPU", enable_save_ov_model=True)
    path.rename(tmp_path / "m.gguf")
    case = case_of(tmp_path / "m")
    assert case.artifact.kind == "openvino_genai" and not case.artifact.findings
    assert not against(case), against(case)
    session = BACKEND.load(BACKEND.plan(case))
    assert isinstance(session, GenAISession)
    assert BACKEND.dry_load(BACKEND.plan(case)).outcome is Outcome.PASS
    session.text.eos.add(256)
    ids = session.text.encode(PROMPT, True)
    assert tokens_of(session, 8) == greedy(tmp_path / "m.gguf", ids, 8)


# ---- real weights ----------------------------------------------------------------------


def test_gemma_is_refused_with_the_true_reasons() -> None:
    case = case_of(resolve("gemma3-270m").path)
    found = {(r.id, r.observed) for r in against(case)}
    assert ("quantization.unsupported", "Q5_0 in 81 matrix tensors") in found
    assert ("tokenizer.unsupported_kind", "llama") in found
    assert any(code == "architecture.unsupported" and "gemma3" in observed for code, observed in found)
    with pytest.raises(LoadError, match="gemma3"):
        BACKEND.load(BACKEND.plan(case))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"allow_dequantize": "true"}], ids=["as stored", "expanded"])
def test_smollm2_answers_paris(options: dict[str, str]) -> None:
    case = case_of(resolve("smollm2").path, Task.CHAT, **options)
    assert codes(case) == (set() if options else {"quantization.unsupported"})
    session = BACKEND.load(BACKEND.plan(case))
    pieces: list[str] = []
    request = Request(Task.CHAT, {"messages": QUESTION}, Sampling(max_tokens=32))
    output = session.run(request, pieces.append)
    assert "Paris" in output.text and output.finish_reason == "stop" and "".join(pieces) == output.text
    stopped = session.run(Request(Task.CHAT, {"messages": QUESTION}, Sampling(max_tokens=32, stop=("Paris",))))
    assert "Paris" not in stopped.text and stopped.finish_reason == "stop"
    assert session.binding.tied == ["output.weight"] and not session.binding.unresolved
    measured = BACKEND.probe(session).measurements
    assert measured["tokens_per_s"] > 1
