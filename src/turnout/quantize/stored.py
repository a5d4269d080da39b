"""Weights that others stored in few bits, one function per packing: tensors of a layer in, float32 [out, in] out.

Sources of the rules: GPTQ as AutoGPTQ and GPTQModel write it (`v1` stores a zero point less one, `v2` as it is),
AWQ as AutoAWQ's GEMM kernels read it, compressed-tensors' `pack_quantized` and `naive_quantized`, DeepSeek's FP8
blocks, and the OCP Microscaling specification for MXFP4. Every function is exact in float32: whole numbers
times a scale, or a float of 8 bits times a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from turnout.errors import LoadError

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # column that nibble i of a word holds, of each eight
FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # E2M1 without its sign
Parts = Mapping[str, Any]


def gptq(parts: Parts, bits: int, zeros_less_one: bool, group: int = -1) -> Any:
    """``qweight`` int32 [in * bits / 32, out] and ``qzeros`` int32 [groups, out * bits / 32] are streams of codes,
    lowest bit first; ``scales`` [groups, out]; ``g_idx`` [in] names each input's group (without it groups are runs
    of ``group`` inputs, -1: all)."""
    import torch

    codes = stream(parts["qweight"].t(), bits)  # [out, in]
    scales = parts["scales"].float()
    zeros = stream(parts["qzeros"], bits)[:, : scales.shape[1]]
    if zeros_less_one:
        zeros = (zeros + 1) & ((1 << bits) - 1)
    inputs, groups = codes.shape[1], scales.shape[0]
    order = parts.get("g_idx")
    if order is None:
        order = torch.arange(inputs) // (group if group > 0 else inputs)
    order = order.long()
    check(codes.shape[0] == scales.shape[1] and zeros.shape == scales.shape, "scales, zeros and codes differ in shape")
    check(order.shape == (inputs,) and int(order.min()) >= 0 and int(order.max()) < groups, "g_idx names no group")
    return (codes - zeros.t()[:, order]).float() * scales.t()[:, order]


def awq(parts: Parts, bits: int) -> Any:
    """``qweight`` int32 [in, out / 8] and ``qzeros`` int32 [groups, out / 8] with the columns of each eight in
    ``AWQ_ORDER``; ``scales`` [groups, out]."""
    import torch

    check(bits == 4, f"AWQ in {bits} bits")
    scales = parts["scales"].float()
    place = torch.tensor(AWQ_ORDER).argsort()

    def columns(words: Any) -> Any:
        return stream(words, 4).view(words.shape[0], -1, 8)[:, :, place].reshape(words.shape[0], -1)

    codes, zeros = columns(parts["qweight"]), columns(parts["qzeros"])
    check(zeros.shape == scales.shape and codes.shape[1] == scales.shape[1], "scales, zeros and codes differ in shape")
    check(codes.shape[0] % scales.shape[0] == 0, "inputs do not fill whole groups")
    size = codes.shape[0] // scales.shape[0]
    grouped = (codes.view(-1, size, codes.shape[1]) - zeros.unsqueeze(1)).float() * scales.unsqueeze(1)
    return grouped.view(codes.shape).t().contiguous()


def packed_ints(parts: Parts, bits: int) -> Any:
    """compressed-tensors' ``weight_packed`` int32 [out, in * bits / 32] with codes raised by half their range,
    ``weight_shape``, ``weight_scale`` [out, groups], perhaps ``weight_zero_point`` int32 [out * bits / 32, groups]
    and ``weight_g_idx`` [in]."""
    half = 1 << (bits - 1)
    out, inputs = (int(n) for n in parts["weight_shape"])
    check(parts["weight_packed"].shape[0] == out, "weight_shape and the packed rows differ")
    codes = stream(parts["weight_packed"], bits)[:, :inputs] - half
    check(codes.shape == (out, inputs), "weight_shape and the packed columns differ")
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros = stream(zeros.t(), bits)[:, :out].t() - half
    return scaled(codes, parts["weight_scale"], zeros, parts.get("weight_g_idx"))


def plain_numbers(parts: Parts, block: tuple[int, int] | None = None) -> Any:
    """``weight`` of int8 or FP8 [out, in], ``weight_scale`` of a tensor, of rows, of groups or of ``block``, perhaps
    ``weight_zero_point``."""
    return scaled(parts["weight"].float(), parts["weight_scale"], parts.get("weight_zero_point"), block=block)


def fp8_blocks(parts: Parts, block: tuple[int, int]) -> Any:
    """``weight`` of FP8 [out, in] times ``weight_scale_inv`` [out / block, in / block], blocks filled at the ends."""
    return scaled(parts["weight"].float(), parts["weight_scale_inv"], block=block)


def mxfp4(parts: Parts) -> Any:
    """``blocks`` uint8 [..., out, groups, 16], low half first, and ``scales`` uint8 [..., out, groups], powers of two
    raised by 127: float32 [..., in, out], as GPT-OSS keeps its experts."""
    import torch

    blocks, scales = parts["blocks"], parts["scales"]
    check(blocks.shape[:-1] == scales.shape and blocks.shape[-1] == 16, "scales and blocks differ in shape")
    table = torch.tensor([*FP4, *(-value for value in FP4)])
    codes = torch.stack([blocks & 15, blocks >> 4], -1).flatten(-2)
    numbers = torch.ldexp(table[codes.long()], scales.int().unsqueeze(-1) - 127)
    return numbers.flatten(-2).transpose(-1, -2).contiguous()


def stream(words: Any, bits: int) -> Any:
    """Codes int32 [n, m * 32 / bits] of rows of int32 words [n, m], lowest bits first; a code of 3 bits may lie in
    two words."""
    import torch

    check(words.dtype == torch.int32, f"packed as {str(words.dtype).removeprefix('torch.')}, not as int32")
    if 32 % bits == 0:  # the sign that an arithmetic shift brings is cut off
        shifts = torch.arange(0, 32, bits, dtype=torch.int32)
        return ((words.unsqueeze(2) >> shifts) & ((1 << bits) - 1)).flatten(1)
    first = torch.arange(words.shape[1] * 32 // bits) * bits
    wide = words.long() & 0xFFFFFFFF
    after = (first // 32 + 1).clamp(max=words.shape[1] - 1)
    codes = (wide[:, first // 32] >> (first % 32)) | (wide[:, after] << (32 - first % 32))
    return (codes & ((1 << bits) - 1)).int()


def scaled(codes: Any, scale: Any, zeros: Any = None, order: Any = None, block: tuple[int, int] | None = None) -> Any:
    """``(codes - zeros) * scale`` of codes [out, in]; ``scale`` has one number, one a row [out, 1], one a group of a
    row [out, groups] (runs of equal length, or as ``order`` [in] names them), or one a ``block``."""
    out, inputs = codes.shape
    scale = scale.float()
    scale = scale.reshape(-1, 1) if scale.dim() < 2 else scale
    rows, columns = scale.shape
    if block is None:
        check(rows in (1, out), f"{rows} scales for {out} rows")
        check(order is not None or inputs % columns == 0, f"{columns} groups of {inputs} inputs")
        block = (out // rows, inputs // columns)
    else:
        wanted = (-(-out // block[0]), -(-inputs // block[1]))
        check((rows, columns) == wanted, f"{rows} x {columns} scales for {wanted[0]} x {wanted[1]} blocks")
    numbers = [scale] if zeros is None else [scale, zeros.float().reshape(scale.shape)]
    if order is not None and columns > 1:
        order = order.long()
        check(int(order.min()) >= 0 and int(order.max()) < columns, "g_idx names no group")
        numbers = [each[:, order] for each in numbers]
    else:
        numbers = [over_blocks(each, block)[:out, :inputs] for each in numbers]
    return (codes.float() if zeros is None else codes.float() - numbers[1]) * numbers[0]


def over_blocks(numbers: Any, block: tuple[int, int]) -> Any:
    """Each number of [rows, columns] over a block of its own."""
    return numbers.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)


def check(holds: bool, otherwise: str) -> None:
    """Raises ``LoadError`` when a layer's tensors do not fit each other."""
    if not holds:
        raise LoadError(otherwise, code="tensor.shape_mismatch")
