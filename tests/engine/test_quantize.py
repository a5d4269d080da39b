"""8-bit weights and activations: against the same sums in floats, alone and in company, small in memory."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.shapes import families, hf

import turnout
from turnout.backends.torch_native import executor_for
from turnout.backends.torch_native_executor import TorchOptions
from turnout.engine.executor import Row, Step
from turnout.errors import NotSupportedError
from turnout.quantize import int8
from turnout.quantize.quality import compare, sample_text

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")


def layer(weight: torch.Tensor, bias: torch.Tensor | None) -> Any:
    """The 8-bit layer of a float one."""
    model = torch.nn.Sequential(torch.nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None))
    model[0].weight.data = weight.clone()
    if bias is not None:
        model[0].bias.data = bias.clone()
    model.get_output_embeddings = lambda: None  # type: ignore[assignment]
    model.get_input_embeddings = lambda: None  # type: ignore[assignment]
    int8.quantize_linears(model, torch.float32, threads=1)
    return model[0]


def by_hand(x: np.ndarray[Any, Any], weight: np.ndarray[Any, Any], block: int) -> np.ndarray[Any, Any]:
    """The same computation in numpy: turn, round to 127 steps, multiply whole numbers, scale."""
    h = np.ones((1, 1))
    while h.shape[0] < block:
        h = np.block([[h, h], [h, -h]])
    h /= math.sqrt(block)

    def turned(a: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        return (a.reshape(-1, block) @ h).reshape(a.shape) if block > 1 else a

    def whole(a: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        steps = np.abs(a).max(axis=1, keepdims=True) / 127
        steps[steps == 0] = 1
        return np.rint(a / steps), steps

    (a, s), (b, c) = whole(turned(x)), whole(turned(weight))
    return (a @ b.T) * s * c.T


@pytest.mark.parametrize(("out", "width", "block"), [(48, 64, 64), (7, 96, 32), (33, 24, 8), (5, 7, 1), (130, 192, 64)])
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_by_hand(out: int, width: int, block: int, bias: bool) -> None:
    draw = torch.Generator().manual_seed(out)
    weight = torch.randn(out, width, generator=draw)
    weight[0] = 0
    shift = torch.randn(out, generator=draw) if bias else None
    x = torch.randn(2, 5, width, generator=draw) * 3
    found = layer(weight, shift)(x)
    assert found.shape == (2, 5, out)
    wanted = by_hand(x.reshape(10, width).double().numpy(), weight.double().numpy(), block).reshape(2, 5, out)
    wanted = wanted + (shift.numpy() if shift is not None else 0)
    # A number on the edge of two steps may be rounded the other way in float32: one step of one input.
    step = float(x.abs().max()) / 127 * float(weight.abs().max())
    assert np.abs(found.numpy() - wanted).max() <= 2 * step
    assert np.abs(found.numpy() - wanted).mean() <= 1e-4
    exact = (x @ weight.T + (shift if shift is not None else 0)).numpy()
    assert np.abs(found.numpy() - exact).mean() <= 0.02 * np.abs(exact).mean()


def test_outliers_cost_little_when_turned() -> None:
    draw = torch.Generator().manual_seed(1)
    weight, x = torch.randn(64, 128, generator=draw), torch.randn(16, 128, generator=draw)
    x[:, 5] *= 100
    exact = x @ weight.T
    turned = (layer(weight, None)(x) - exact).abs().mean()
    steps = x.abs().amax(1, keepdim=True) / 127
    plain = (((x / steps).round() * steps) @ weight.T - exact).abs().mean()
    assert turned < plain / 3


def test_a_token_says_the_same_in_any_company() -> None:
    draw = torch.Generator().manual_seed(2)
    made = layer(torch.randn(40, 64, generator=draw), None)
    x = torch.randn(33, 64, generator=draw)
    together = made(x)
    for count in (1, 2, 7, 16):
        made.activations.forget()
        assert torch.equal(made(x[:count].clone()), together[:count])


def test_rotation_is_orthonormal() -> None:
    for width in (64, 576, 1536, 96, 40):
        matrix = int8.rotation(width)
        assert torch.allclose(matrix @ matrix.T, torch.eye(matrix.shape[0]), atol=1e-6)
        assert width % matrix.shape[0] == 0
    assert int8.rotation(7) is None


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-neox", "qwen3-moe"])
def test_models_stay_close_and_ragged_equals_alone(name: str) -> None:
    ids = list(range(3, 40))
    with torch.inference_mode():
        exact = families.model(name)(torch.tensor([ids])).logits[0].numpy()
    executor = executor_for(families.model(name), TorchOptions(slots=4, cache_tokens=512))
    held = int8.quantize_linears(executor.model, torch.float32)
    assert held < sum(p.numel() for p in families.model(name).parameters()) * 4
    logits = np.array(executor.execute(Step([Row(0, ids, 0, len(ids))])))
    quality = compare(exact, logits, ids)
    assert quality.kl_mean < 0.05 and quality.top1_agreement > 0.8
    rows = [Row(1, ids[:9], 0, 9), Row(2, ids, 0, len(ids))]
    both = np.array(executor.execute(Step(rows)))
    assert np.abs(both[9:] - logits).max() < 0.05 * np.abs(logits).max()
    executor.close()


def test_quality_of_a_case_by_hand() -> None:
    p, q = np.array([[0.5, 0.5], [0.9, 0.1]]), np.array([[0.25, 0.75], [0.9, 0.1]])
    found = compare(np.log(p), np.log(q), [0, 1])
    first = 0.5 * math.log(2) + 0.5 * math.log(0.5 / 0.75)
    assert found.kl_mean == pytest.approx(first / 2)
    assert found.top1_agreement == 0.5
    assert found.perplexity_ratio == pytest.approx(0.5 / 0.75)
    assert len(sample_text()) > 3000


STREAMING = """
import resource, sys, torch
from turnout.backends import registry
from turnout.backends.base import Case
from turnout.package.inspect import inspect
import transformers.models.llama.modeling_llama
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
package = inspect(sys.argv[1])
backend = registry.get("torch-native")
case = Case(package.root, package.artifacts[0], "text-generation", "cpu", {"quantize": "q8"})
executor = backend.executor(backend.plan(case), {"slots": 1, "context": 64})
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, executor.capabilities.weights_bytes)
"""


@pytest.mark.slow
def test_converting_needs_less_memory_than_the_stored_weights_and_their_copy(tmp_path: Path) -> None:
    """200 MB of bf16: the peak over what the libraries take stays below one and a half times that."""
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=7,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=1000,
        max_position_embeddings=256,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    stored = sum(p.numel() for p in model.parameters()) * 2
    model.save_pretrained(tmp_path)
    assert stored > 180e6
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", STREAMING, str(tmp_path)], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    grown, held = (int(part) for part in done.stdout.split()[-2:])
    assert held < 0.56 * stored
    assert grown * 1024 < 1.5 * stored


def test_schemes_are_refused_by_name(tmp_path: Path) -> None:
    path = str(hf.llama(tmp_path / "llama"))
    report = turnout.check(path, task="text-generation", options={"quantize": "q7"})
    able = {v.backend: v for v in report.verdicts if v.backend in ("torch-native", "openvino-native", "transformers")}
    for verdict in able.values():
        assert [r.code for r in verdict.reasons] == ["option.unsupported"]
        assert "q7" in verdict.reasons[0].message
    with pytest.raises(NotSupportedError, match="q7"):
        turnout.LLM(path, task="text-generation", quantize="q7")


@pytest.mark.slow
def test_quantized_through_the_public_classes(tmp_path: Path) -> None:
    path = str(hf.llama(tmp_path / "llama"))
    sampling = turnout.Sampling(max_tokens=6, ignore_eos=True)
    for backend in ("torch-native", "openvino-native"):
        with turnout.LLM(path, task="text-generation", backend=backend, quantize="q8", slots=4) as llm:
            assert "int8" in llm.dtype
            answers = llm.generate([[3, 4, 5], [6, 7, 8, 9]], sampling)
            assert [len(a.completions[0].tokens) for a in answers] == [6, 6]
    with turnout.load(path, task="text-generation", backend="torch-native", options={"quantize": "q8"}) as session:
        assert session.run({"prompt": "abc"}, turnout.Sampling(max_tokens=4)).executed.dtype.startswith("int8")
