"""Weights stored in few bits by others: packed here bit by bit in Python, read back exactly; whole directories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from turnout.errors import LoadError, NotSupportedError
from turnout.quantize import prequantized
from turnout.quantize.prequantized import weights

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
Numbers = NDArray[Any]


def pack_bits(codes: Numbers, bits: int) -> Numbers:
    """Rows of codes as int32 words, one bit at a time, lowest first."""
    n, m = codes.shape
    words = np.zeros((n, -(-m * bits // 32)), np.uint32)
    for row in range(n):
        for place, code in enumerate(codes[row]):
            for bit in range(bits):
                at = place * bits + bit
                words[row, at // 32] |= np.uint32((int(code) >> bit & 1) << at % 32)
    return words.view(np.int32)


def tensor(array: Any, dtype: torch.dtype | None = None) -> torch.Tensor:
    made = torch.from_numpy(np.ascontiguousarray(array))
    return made if dtype is None else made.to(dtype)


class Gptq:
    """A layer of GPTQ: codes [in, out], zero points and scales of each group."""

    def __init__(self, inputs: int, out: int, bits: int, group: int, seed: int = 0, shuffled: bool = False) -> None:
        draw = np.random.default_rng(seed)
        groups = -(-inputs // group)
        self.bits, self.group = bits, group
        self.codes = draw.integers(0, 1 << bits, (inputs, out))
        self.zeros = draw.integers(1, 1 << bits, (groups, out))
        self.scales = draw.uniform(0.01, 0.1, (groups, out)).astype(np.float16)
        self.order = np.arange(inputs) // group
        if shuffled:
            draw.shuffle(self.order)

    def weight(self) -> Numbers:
        """float32 [out, in], number by number."""
        made = np.zeros(self.codes.T.shape, np.float32)
        for o, i in np.ndindex(*made.shape):
            g = self.order[i]
            made[o, i] = np.float32(int(self.codes[i, o]) - int(self.zeros[g, o])) * np.float32(self.scales[g, o])
        return made

    def parts(self, less: int = 1, order: bool = True) -> dict[str, torch.Tensor]:
        found = {
            "qweight": tensor(pack_bits(self.codes.T, self.bits).T),
            "qzeros": tensor(pack_bits(self.zeros - less, self.bits)),
            "scales": tensor(self.scales),
        }
        return found | ({"g_idx": tensor(self.order.astype(np.int32))} if order else {})


def layer(settings: dict[str, Any], parts: dict[str, torch.Tensor], joint: str = ".") -> torch.Tensor:
    found = weights(settings, {f"a.proj{joint}{name}": value for name, value in parts.items()})
    assert list(found) == ["a.proj" if joint == "_" else "a.proj.weight"]
    return next(iter(found.values()))[...]


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
def test_gptq(bits: int, shuffled: bool, version: str) -> None:
    made = Gptq(64, 32, bits, 32, bits, shuffled)
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": version}
    parts = made.parts(1 if version == "gptq" else 0, order=True)
    assert np.array_equal(layer(settings, parts).numpy(), made.weight())
    if not shuffled:
        del parts["g_idx"]
        assert np.array_equal(layer(settings, parts).numpy(), made.weight())


def test_gptq_v1_keeps_a_zero_point_of_nought() -> None:
    made = Gptq(32, 8, 4, 32)
    made.zeros[:] = 0  # stored as -1, whose four bits are 15
    settings = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    assert np.array_equal(layer(settings, made.parts()).numpy(), made.weight())


def test_awq() -> None:
    made = Gptq(64, 24, 4, 32, 5)

    def columns(codes: Numbers) -> Numbers:
        words = np.zeros((codes.shape[0], codes.shape[1] // 8), np.uint32)
        for row, column in np.ndindex(*codes.shape):
            nibble = [0, 4, 1, 5, 2, 6, 3, 7][column % 8]  # even columns first, then odd ones
            words[row, column // 8] |= np.uint32(int(codes[row, column]) << 4 * nibble)
        return words.view(np.int32)

    parts = {"qweight": columns(made.codes), "qzeros": columns(made.zeros), "scales": made.scales}
    found = layer({"quant_method": "awq", "bits": 4, "version": "gemm"}, {k: tensor(v) for k, v in parts.items()})
    assert np.array_equal(found.numpy(), made.weight())


def compressed(written: str, bits: int, kind: str = "int", **more: Any) -> dict[str, Any]:
    group = {"weights": {"num_bits": bits, "type": kind, **more}, "targets": ["Linear"]}
    return {"quant_method": "compressed-tensors", "format": written, "config_groups": {"group_0": group}}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("groups", "zero", "order"), [(1, False, False), (3, True, False), (3, False, True)])
def test_compressed_tensors_packed(bits: int, groups: int, zero: bool, order: bool) -> None:
    draw = np.random.default_rng(bits + groups)
    half, out, inputs = 1 << (bits - 1), 10, 48
    codes = draw.integers(-half, half, (out, inputs))
    zeros = draw.integers(-half, half, (out, groups)) if zero else np.zeros((out, groups), int)
    scales = draw.uniform(0.01, 0.1, (out, groups)).astype(np.float32)
    which = np.arange(inputs) // (inputs // groups)
    if order:
        draw.shuffle(which)
    parts = {
        "weight_packed": pack_bits(codes + half, bits),
        "weight_shape": np.array([out, inputs]),
        "weight_scale": scales,
        **({"weight_zero_point": pack_bits((zeros + half).T, bits).T} if zero else {}),
        **({"weight_g_idx": which.astype(np.int32)} if order else {}),
    }
    wanted = (codes - zeros[:, which]).astype(np.float32) * scales[:, which]
    found = layer(compressed("pack-quantized", bits), {k: tensor(v) for k, v in parts.items()})
    assert np.array_equal(found.numpy(), wanted)


@pytest.mark.parametrize("scales", [(), (1,), (6, 1), (6, 4)])
def test_compressed_tensors_int8(scales: tuple[int, ...]) -> None:
    draw = np.random.default_rng(1)
    codes, steps = draw.integers(-128, 128, (6, 32)), draw.uniform(0.1, 1, scales).astype(np.float32)
    parts = {"weight": tensor(codes, torch.int8), "weight_scale": torch.tensor(steps)}
    wide = np.broadcast_to(
        steps.reshape(-1, 1) if steps.ndim < 2 else np.repeat(steps, 32 // steps.shape[1], 1), (6, 32)
    )
    found = layer(compressed("int-quantized", 8), parts | {"input_scale": torch.ones(1)})
    assert np.array_equal(found.numpy(), codes.astype(np.float32) * wide)


def e4m3(code: int) -> float:
    """The number of eight bits: sign, four of exponent, three of mantissa."""
    sign, exponent, mantissa = code >> 7, code >> 3 & 15, code & 7
    size = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -size if sign else size


@pytest.mark.parametrize("kind", ["deepseek", "compressed blocks", "row", "tensor"])
def test_fp8(kind: str) -> None:
    draw = np.random.default_rng(2)
    codes = draw.integers(0, 127, (10, 13)) + 128 * draw.integers(0, 2, (10, 13))  # 127 is not a number
    numbers = np.vectorize(e4m3)(codes).astype(np.float32)
    weight = tensor(codes.astype(np.uint8)).view(torch.float8_e4m3fn)
    shape = {"row": (10, 1), "tensor": ()}.get(kind, (3, 4))
    steps = draw.uniform(0.1, 1, shape).astype(np.float32)
    wide = np.array(
        [
            [
                steps.reshape(shape)[i // 4, j // 4]
                if len(shape) and shape[1] == 4
                else steps[i, 0]
                if len(shape)
                else steps
                for j in range(13)
            ]
            for i in range(10)
        ]
    )
    settings: dict[str, Any] = {"quant_method": "fp8"}
    part = "weight_scale"
    if kind == "deepseek":
        settings, part = settings | {"weight_block_size": [4, 4]}, "weight_scale_inv"
    elif kind == "compressed blocks":
        settings = compressed("float-quantized", 8, "float", strategy="block", block_structure=[4, 4])
    found = layer(settings, {"weight": weight, part: torch.tensor(steps)})
    assert np.array_equal(found.numpy(), numbers * wide.astype(np.float32))


def test_mxfp4() -> None:
    draw = np.random.default_rng(3)
    blocks, scales = draw.integers(0, 256, (2, 5, 3, 16)), draw.integers(120, 130, (2, 5, 3))
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]
    wanted = np.zeros((2, 96, 5), np.float32)
    for e, o, g, byte in np.ndindex(*blocks.shape):
        for half in (0, 1):
            code = int(blocks[e, o, g, byte]) >> 4 * half & 15
            wanted[e, g * 32 + 2 * byte + half, o] = table[code] * 2.0 ** (int(scales[e, o, g]) - 127)
    parts = {"blocks": tensor(blocks.astype(np.uint8)), "scales": tensor(scales.astype(np.uint8))}
    assert np.array_equal(layer({"quant_method": "mxfp4"}, parts, "_").numpy(), wanted)


def test_plain_layers_stay_as_they_are() -> None:
    made = Gptq(32, 8, 4, 32)
    plain = {"norm.weight": torch.ones(4), "a.bias": torch.ones(8), "lm_head.weight": torch.ones(3, 4)}
    found = weights({"quant_method": "gptq", "bits": 4}, plain | {f"a.{k}": v for k, v in made.parts().items()})
    assert set(found) == {"norm.weight", "a.bias", "lm_head.weight", "a.weight"}
    fp8 = {
        "a.weight": torch.ones(4, 4).to(torch.float8_e4m3fn),
        "a.weight_scale": torch.tensor(2.0),
        "a.k_scale": torch.ones(1),
    }
    found = weights({"quant_method": "fp8"}, plain | fp8)
    assert set(found) == {"norm.weight", "a.bias", "lm_head.weight", "a.weight"}
    assert torch.equal(found["a.weight"][...], torch.full((4, 4), 2.0)) and found["norm.weight"] is plain["norm.weight"]


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({}, "no quant_method"),
        ({"quant_method": "bitsandbytes"}, "bitsandbytes"),
        ({"quant_method": "gptq", "bits": 5}, "5 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "marlin"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:x": {}}}, "dynamic"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv_fast"}, "gemv_fast"),
        ({"quant_method": "fp8", "weight_block_size": [0, 4]}, r"\[0, 4\]"),
        ({"quant_method": "compressed-tensors"}, "0 ways"),
        (compressed("nvfp4-pack-quantized", 4, "float"), "nvfp4"),
        (compressed("pack-quantized", 3), "3 bits"),
        (compressed("int-quantized", 8) | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparse-24"),
        (compressed("int-quantized", 8) | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ],
)
def test_other_formats_are_refused_with_a_way_out(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(NotSupportedError, match=says) as caught:
        prequantized.format_of(settings)
    assert caught.value.code == "quantization.unsupported" and caught.value.hints


def test_faults_are_named() -> None:
    settings = {"quant_method": "gptq", "bits": 4}
    parts = {f"a.{k}": v for k, v in Gptq(32, 8, 4, 32).parts().items()}
    with pytest.raises(LoadError, match=r"`a`.*without `scales`"):
        weights(settings, {k: v for k, v in parts.items() if k != "a.scales"})
    with pytest.raises(LoadError, match=r"`b.qzeros`"):
        weights(settings, parts | {"b.qzeros": parts["a.qzeros"]})
    for name, wrong in {
        "a.scales": torch.ones(1, 7),
        "a.g_idx": torch.full((32,), 3),
        "a.qweight": parts["a.qweight"].long(),
    }.items():
        with pytest.raises(LoadError, match="`a`"):
            weights(settings, parts | {name: wrong})["a.weight"][...]


def test_a_directory_loads_through_transformers_own_loader() -> None:
    """Packed layers as a state dict give the logits of the same numbers as floats."""
    import transformers
    from tests.shapes import families

    model = families.model("qwen3")
    floats = {name: value.clone() for name, value in model.state_dict().items()}
    packed: dict[str, Any] = {}
    for index, (name, value) in enumerate(floats.items()):
        if value.dim() == 2 and "_proj" in name:
            made = Gptq(value.shape[1], value.shape[0], 4, 16, index)
            floats[name] = tensor(made.weight())
            packed |= {f"{name.removesuffix('.weight')}.{part}": held for part, held in made.parts().items()}
        else:
            packed[name] = value
    assert len(packed) > len(floats)
    found = weights({"quant_method": "gptq", "bits": 4, "group_size": 16}, packed)
    kind = getattr(transformers, type(model).__name__)
    loaded = kind.from_pretrained(None, config=model.config, state_dict=found, dtype=torch.float32).eval()
    model.load_state_dict(floats)
    ids = torch.arange(3, 20).unsqueeze(0)
    with torch.inference_mode():
        assert torch.equal(loaded(ids).logits, model(ids).logits)
