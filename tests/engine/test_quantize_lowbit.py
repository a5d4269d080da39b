"""Weights in 3 to 6 bits: what a code says by hand, half a step, exact sums whatever the company, whole models."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tests.shapes import families

from turnout.backends.torch_native import executor_for
from turnout.backends.torch_native_executor import TorchOptions
from turnout.engine.executor import Row, Step
from turnout.quantize import int8, lowbit
from turnout.quantize.quality import compare

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
BITS = (3, 4, 5, 6)
SHAPES = [(64, 64), (48, 96), (7, 40), (33, 7), (130, 193), (8, 1)]


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_hand(folded: lowbit.Folded) -> np.ndarray[Any, Any]:
    """The weight [out, in'] read bit by bit in Python: code * multiplier * step."""
    out, groups = folded.step.shape[0], folded.multipliers.shape[0]
    rows = groups * lowbit.GROUP
    codes = np.zeros((out, rows), np.int64)
    shift = 0
    for plane, width in zip(folded.planes, lowbit.PLANES[folded.bits], strict=True):
        stored = plane.numpy()
        for i in range(rows):
            place, row = divmod(i, rows * width // 8)
            codes[:, i] |= ((stored[row].astype(np.int64) >> (place * width)) & ((1 << width) - 1)) << shift
        shift += width
    codes -= 1 << (folded.bits - 1)
    whole = codes * np.repeat(folded.multipliers.numpy().astype(np.int64), lowbit.GROUP, 0).T
    assert np.abs(whole).max() <= 127
    return whole * folded.step.numpy().astype(np.float64)[:, None]


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_unfolding_says_what_the_bits_say(bits: int, out: int, width: int) -> None:
    folded = lowbit.fold(drawn(out, width, seed=out), bits)
    found = folded.unfold().double().numpy().T * folded.step.double().numpy()[:, None]
    assert np.allclose(found, by_hand(folded), rtol=1e-6, atol=0)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
def test_a_weight_is_within_half_a_step_of_its_group(bits: int, out: int, width: int) -> None:
    weight = drawn(out, width, seed=width).double()
    folded = lowbit.fold(weight.float(), bits)
    near = by_hand(folded)[:, :width]
    steps = np.repeat(folded.multipliers.double().numpy(), lowbit.GROUP, 0).T[:, :width] * folded.step.numpy()[:, None]
    half = 1 << (bits - 1)
    ends = np.sort(np.stack([-half * steps, (half - 1) * steps]), axis=0)  # a multiplier may be negative
    held = weight.numpy().clip(*ends)
    assert (np.abs(near - held) <= np.abs(steps) / 2 * (1 + 1e-5)).all()
    assert (np.sign(held) * np.sign(weight.numpy()) >= 0).all()


@pytest.mark.parametrize("bits", BITS)
def test_rows_of_zeros_and_single_numbers(bits: int) -> None:
    weight = torch.zeros(9, 64)
    weight[1, 40], weight[2, 3] = 5.0, -1e-6
    weight[3] = 2.5
    near = by_hand(lowbit.fold(weight, bits))
    assert (near[[0, 4, 5, 6, 7, 8]] == 0).all()
    assert near[1, 40] == pytest.approx(5) and near[2, 3] == pytest.approx(-1e-6)
    assert np.allclose(near[3], 2.5)


def test_more_bits_cost_more_and_err_less() -> None:
    weight = drawn(256, 256)
    folded = {bits: lowbit.fold(weight, bits) for bits in BITS}
    size = {bits: 8 * f.bytes / weight.numel() for bits, f in folded.items()}
    assert all(size[bits] == pytest.approx(bits + 8 / 32 + 32 / 256) for bits in BITS)
    far = [float(np.linalg.norm(by_hand(folded[bits]) - weight.numpy()) / weight.norm()) for bits in BITS]
    # A normal distribution in groups of 32; the best uniform quantizer's theory is step / sqrt(12).
    assert far[0] < 0.19 and far[1] < 0.095 and far[2] < 0.052 and far[3] < 0.03
    assert far == sorted(far, reverse=True)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize(("out", "width"), SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_are_those_of_the_unfolded_weight(bits: int, out: int, width: int, bias: bool) -> None:
    matrix = int8.rotation(width)
    folded = lowbit.fold(drawn(out, width, seed=1), bits, matrix)
    shift = drawn(out, seed=2) if bias else None
    x = drawn(2, 3, width, seed=3) * 4
    found = lowbit.linear_class()(folded, shift, int8.Activations(), torch.float32)(x)
    assert found.shape == (2, 3, out)
    codes, scales = int8.Activations().of(x)
    near = (codes.double() - 128).numpy() @ by_hand(folded)[:, :width].T * scales.double().numpy()
    wanted = near.reshape(2, 3, out) + (shift.double().numpy() if shift is not None else 0)
    assert np.allclose(found.numpy(), wanted, rtol=1e-5, atol=1e-5 * np.abs(wanted).max())


def test_a_token_says_the_same_in_any_company() -> None:
    folded = lowbit.fold(drawn(40, 64), 4, int8.rotation(64))
    x = drawn(33, 64, seed=4)
    together = lowbit.linear_class()(folded, None, int8.Activations(), torch.float32)(x)
    for count in (1, 2, 7, 16):
        made = lowbit.linear_class()(folded, None, int8.Activations(), torch.float32)
        assert torch.equal(made(x[:count].clone()), together[:count])
    assert lowbit.linear_class()(folded, None, int8.Activations(), torch.float32)(x[:0]).shape == (0, 40)


@pytest.mark.parametrize(("name", "bits", "far"), [("qwen3", 6, 0.05), ("qwen3", 4, 0.3), ("gemma3", 5, 0.1)])
def test_models_shrink_and_stay_close(name: str, bits: int, far: float) -> None:
    ids = list(range(3, 40))
    with torch.inference_mode():
        exact = families.model(name)(torch.tensor([ids])).logits[0].numpy()
    sizes = []
    for width in (8, bits):
        executor = executor_for(families.model(name), TorchOptions(slots=2, cache_tokens=256))
        sizes.append(int8.quantize_linears(executor.model, torch.float32, bits=width))
        logits = np.array(executor.execute(Step([Row(0, ids, 0, len(ids))])))
        executor.close()
    assert sizes[1] < sizes[0]
    assert compare(exact, logits, ids).kl_mean < far
