"""The torch-native backend: packages become executors or are refused, and real weights speak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.shapes import families
from tests.shapes.hf import build, layer_weight_absent, llama, llama_config, sharded

from turnout.backends.base import Case, EvidenceLevel, Outcome
from turnout.backends.torch_native import TorchNativeBackend, executor_for, options_of
from turnout.backends.torch_native_executor import TorchExecutor, TorchOptions
from turnout.backends.torch_native_rows import RowExecutor
from turnout.engine.executor import Row, Step
from turnout.errors import LoadError, NotSupportedError, UsageError
from turnout.package.inspect import inspect
from turnout.package.store import resolve
from turnout.types import Task

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

BACKEND = TorchNativeBackend()


def case_of(path: Path, task: str = Task.TEXT_GENERATION, **options: Any) -> Case:
    package = inspect(str(path))
    artifact = next(a for a in package.artifacts if a.kind in BACKEND.reads)
    return Case(str(package.root), artifact, task, options=options)


def continued(executor: Any, prompt: list[int], count: int) -> list[int]:
    """Greedy tokens after a prompt, in slot 0."""
    tokens, start = list(prompt), 0
    while len(tokens) < len(prompt) + count:
        logits = executor.execute(Step([Row(0, tokens[start:], start)]))
        start = len(tokens)
        tokens.append(int(logits[0].argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("shape", [llama, sharded])
def test_a_directory_becomes_an_executor(shape: Any, tmp_path: Path) -> None:
    import transformers

    folder = shape(tmp_path / "model")
    prompt = [5, 9, 3, 4]
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    wanted = reference.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, eos_token_id=None)
    plan = BACKEND.plan(case_of(folder, slots=3, context=32, dtype="float32"))
    assert plan.backend == "torch-native" and plan.implementation == "LlamaForCausalLM"
    assert BACKEND.dry_load(plan).outcome is Outcome.PASS
    executor = BACKEND.executor(plan)
    assert isinstance(executor, TorchExecutor) and executor.binding is not None and not executor.binding.unresolved
    assert (executor.capabilities.slots, executor.capabilities.context) == (3, 32)
    assert continued(executor, prompt, 8) == wanted[0, 4:].tolist()
    vocabulary = BACKEND.vocabulary(plan)
    assert vocabulary.decode(vocabulary.encode("w1 w2")) == "w1 w2"
    executor.close()


def test_what_is_missing_or_too_much_keeps_a_model_from_loading(tmp_path: Path) -> None:
    case = case_of(layer_weight_absent(tmp_path / "a"))
    assert BACKEND.dry_load(BACKEND.plan(case)).level is EvidenceLevel.DRY_LOADED
    assert BACKEND.dry_load(BACKEND.plan(case)).outcome is Outcome.FAIL
    with pytest.raises(LoadError) as caught:
        BACKEND.executor(BACKEND.plan(case))
    assert caught.value.code == "tensor.missing"
    folder = build(tmp_path / "b", "LlamaForCausalLM", llama_config())
    case = case_of(folder, context=10**6)
    assert any(r.id == "option.unsupported" for r in BACKEND.requirements(case) if r.state == "unmet")
    with pytest.raises(UsageError, match="a context of 1000000 tokens"):
        BACKEND.executor(BACKEND.plan(case))
    with pytest.raises(UsageError, match="`slots=x` is no number"):
        options_of(case_of(folder, slots="x"))


@pytest.mark.parametrize("name", ["mamba2", "t5", "falcon"])
def test_other_families_go_row_by_row_and_say_why(name: str) -> None:
    executor = executor_for(families.model(name), TorchOptions(slots=2, context=64))
    assert isinstance(executor, RowExecutor)
    assert executor.capabilities.notes[0].startswith("one row at a time, as `")
    with pytest.raises(NotSupportedError, match="a cache of int8"):
        executor_for(families.model(name), TorchOptions(slots=2, kv_dtype="int8"))


def test_the_backend_is_described_by_its_libraries() -> None:
    found = BACKEND.describe()
    assert found.name == "torch-native" and found.available and found.extra == "torch"
    assert "cpu" in BACKEND.devices() and "mps" not in BACKEND.devices()


# ---- real weights --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def smollm2() -> Any:
    """SmolLM2-135M-Instruct from its GGUF file, expanded to float32, with a vocabulary and prompts."""
    gguf = Path(resolve("smollm2").path)
    plan = BACKEND.plan(case_of(gguf, allow_dequantize="true", slots=4, context=512))
    return BACKEND.executor(plan), BACKEND.vocabulary(plan)


PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Once upon a time, in a village by the sea,"]


@pytest.mark.slow
def test_smollm2_says_what_transformers_says(smollm2: Any) -> None:
    executor, vocabulary = smollm2
    prompts = [vocabulary.encode(text) for text in PROMPTS]
    model = executor.model
    model.config._attn_implementation = "sdpa"
    wanted = [
        model.generate(torch.tensor([p]), max_new_tokens=12, do_sample=False, pad_token_id=0)[0, len(p) :].tolist()
        for p in prompts
    ]
    model.config._attn_implementation = "turnout_rows"
    known, starts = [list(p) for p in prompts], [0, 0, 0]
    while len(known[0]) < len(prompts[0]) + 12:
        rows = [Row(i, tokens[starts[i] :], starts[i]) for i, tokens in enumerate(known)]
        starts = [len(tokens) for tokens in known]
        for tokens, best in zip(known, executor.execute(Step(rows)).argmax(-1), strict=True):
            tokens.append(int(best))
    assert [k[len(p) :] for k, p in zip(known, prompts, strict=True)] == wanted
    assert "Paris" in vocabulary.decode(known[0])
    for slot in range(3):
        executor.free(slot)


@pytest.mark.slow
def test_an_int8_cache_barely_moves_smollm2(smollm2: Any) -> None:
    """Kullback-Leibler divergence of the next token's distribution over the tokens of real prompts."""
    executor, vocabulary = smollm2
    text = vocabulary.encode(" ".join(PROMPTS * 3))
    plain = executor.execute(Step([Row(3, text, 0, len(text))])).astype(np.float64)
    executor.free(3)
    model = executor.model
    small = TorchExecutor(model, TorchOptions(slots=2, context=512, kv_dtype="int8"))
    got = small.execute(Step([Row(0, text, 0, len(text))])).astype(np.float64)
    logp, logq = (x - np.logaddexp.reduce(x, -1, keepdims=True) for x in (plain, got))
    divergence = (np.exp(logp) * (logp - logq)).sum(-1)
    agreement = float((plain.argmax(-1) == got.argmax(-1)).mean())
    print(f"int8 cache: mean KL {divergence.mean():.2e}, largest {divergence.max():.2e}, top-1 {agreement:.3f}")
    assert divergence.mean() < 2e-3 and agreement > 0.95
