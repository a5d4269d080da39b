"""Weights in 3, 4, 5 or 6 bits that unfold to 8-bit ones exactly: small in memory, multiplied as `int8` does.

A code ``c`` of b bits and a whole multiplier ``m`` of its group (32 inputs of an output channel) give the
whole number ``m * c``, which fits 8 bits: ``|m| <= 127 / 2^(b-1)``. With one float step per output channel
that is a number of steps between 2^(b-1) and 127 for each group, without a float per group: 4.25 bits a weight
for b = 4. A layer unfolds its weight for every product, so that every number of tokens takes the same exact
sums: what a token gives depends on no other token. The price is time: one stream decodes at about half the speed
of q8, long prompts at nearly all of it (docs/benchmarks/quantization.md). PyTorch's weight-only 4-bit product is
four times faster for one token, five times slower for 512, and rounds to bf16.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from turnout.errors import NotSupportedError
from turnout.quantize.int8 import Activations, turned

GROUP = 32  # inputs of an output channel that share a multiplier
PLANES = {3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2)}  # widths that a code is cut into; each divides a byte
BITS = {"q3": 3, "q4": 4, "q5": 5, "q6": 6}


@dataclass(slots=True)
class Folded:
    """A weight [out, in] in ``bits`` bits. ``planes``: bytes [in' * width / 8, out] per width of ``PLANES``,
    ``multipliers`` int8 [in' / 32, out], ``step`` float32 [out]; in' is ``in`` filled up to whole groups."""

    bits: int
    inputs: int
    planes: tuple[Any, ...]
    multipliers: Any
    step: Any

    @property
    def bytes(self) -> int:
        """What it takes in memory."""
        held = (*self.planes, self.multipliers, self.step)
        return sum(tensor.numel() * tensor.element_size() for tensor in held)

    def unfold(self) -> Any:
        """The whole numbers int8 [in', out]; times ``step`` they are the weight, transposed."""
        import torch

        at, codes = 0, torch.empty(0)
        for plane, width in zip(self.planes, PLANES[self.bits], strict=True):
            part = unpack(plane, width, at)
            codes, at = (codes.bitwise_or_(part) if at else part), at + width
        codes = codes.view(torch.int8).sub_(1 << (self.bits - 1))
        groups, out = self.multipliers.shape
        codes.view(groups, GROUP, out).mul_(self.multipliers.unsqueeze(1))
        return codes


def fold(weight: Any, bits: int, matrix: Any = None) -> Folded:
    """``weight`` float [out, in] in ``bits`` bits, turned by ``matrix`` as `int8` does; each number within its range
    is at most half of its group's step away. Of three multipliers for a group the one with the least squared error
    is taken."""
    import torch

    rows, inputs = weight.shape
    filled = -(-inputs // GROUP) * GROUP
    parts: list[tuple[Any, Any, Any]] = []
    for start in range(0, rows, max(1, (1 << 18) // filled)):
        part = weight[start : start + max(1, (1 << 18) // filled)].to(torch.float32)
        part = turned(part, matrix)
        parts.append(_whole(torch.nn.functional.pad(part, (0, filled - inputs)), bits))
    codes, multipliers, step = (torch.cat(each) for each in zip(*parts, strict=True))
    standing = (codes + (1 << (bits - 1))).to(torch.uint8).t().contiguous()  # [in', out], not negative
    planes, shift = [], 0
    for width in PLANES[bits]:
        planes.append(pack((standing >> shift) & ((1 << width) - 1), width))
        shift += width
    return Folded(bits, inputs, tuple(planes), multipliers.t().contiguous(), step)


def _whole(part: Any, bits: int) -> tuple[Any, Any, Any]:
    """Codes int8 [n, in'], multipliers int8 [n, in' / 32], steps [n] of float32 rows [n, in']."""
    import torch

    half = 1 << (bits - 1)
    most = 127 // half
    groups = part.view(part.shape[0], -1, GROUP)
    low, high = torch.aminmax(groups, dim=2)
    # There is one code more below zero than above: the multiplier's sign puts the larger end there.
    peak = torch.where(high > -low, high, low)
    step = peak.abs().amax(1) / (half * most)
    step = torch.where(step > 0, step, 1.0)
    wanted = -peak / (half * step.unsqueeze(1))
    sign = torch.where(wanted < 0, -1.0, 1.0)
    size, least = wanted.abs().floor(), torch.full_like(wanted, torch.inf)
    chosen = torch.ones_like(wanted)
    for more in (-1, 0, 1):
        m = (size + more).clamp_(1, most) * sign
        scaled = groups * (1 / (m * step.unsqueeze(1))).unsqueeze(2)
        error = torch.linalg.vector_norm(scaled - scaled.round().clamp_(-half, half - 1), dim=2).mul_(m.abs())
        better = error < least
        least, chosen = torch.where(better, error, least), torch.where(better, m, chosen)
    codes = (groups * (1 / (chosen * step.unsqueeze(1))).unsqueeze(2)).round_().clamp_(-half, half - 1)
    return codes.view(part.shape).to(torch.int8), chosen.to(torch.int8), step


def pack(codes: Any, width: int) -> Any:
    """``codes`` uint8 [n, out] below 2 ** width as bytes [n * width / 8, out].

    A byte holds codes that lie n * width / 8 rows apart: unpacking then writes long runs.
    """
    import torch

    parts = codes.reshape(8 // width, -1, codes.shape[1])
    packed = torch.zeros_like(parts[0])
    for place, part in enumerate(parts):
        packed |= part << (width * place)
    return packed


def unpack(packed: Any, width: int, at: int = 0) -> Any:
    """The inverse of ``pack``: codes [n, out] shifted left by ``at`` bits, eight to an int64
    where the rows allow it (a quarter of the time), else uint8."""
    import torch

    source, mask = packed, ((1 << width) - 1) << at
    if packed.shape[1] % 8 == 0:
        source, mask = packed.view(torch.int64), mask * 0x0101010101010101
    codes = torch.empty(8 // width, *source.shape, dtype=source.dtype)
    for place, target in enumerate(codes):
        by = width * place - at
        if by:
            shift = torch.bitwise_right_shift if by > 0 else torch.bitwise_left_shift
            shift(source, abs(by), out=target)
            target.bitwise_and_(mask)  # also clears what neighbours and the sign brought
        else:
            torch.bitwise_and(source, mask, out=target)
    return codes.view(-1, source.shape[1])


def linear_class() -> Any:
    """The module class (made on first use: PyTorch is imported only then)."""
    import torch

    class LowbitLinear(torch.nn.Module):
        """``x @ W^T + b`` with W in few bits; the same activations as ``Int8Linear`` beside it."""

        def __init__(self, folded: Folded, bias: Any, activations: Activations, dtype: Any) -> None:
            super().__init__()
            self.folded, self.bias = folded, bias
            self.activations, self.dtype = activations, dtype
            self.out_features = folded.step.shape[0]

        def forward(self, x: Any) -> Any:
            made, scale = self.activations.of(x)
            whole = (made ^ 128).view(torch.int8)
            # The filling's codes meet no input: rows of the unfolded weight beyond ``inputs`` are left out.
            y = torch._int_mm(whole, self.folded.unfold()[: self.folded.inputs]).to(torch.float32)
            y.mul_(self.folded.step).mul_(scale)
            if self.bias is not None:
                y.add_(self.bias)
            return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    return LowbitLinear


def available() -> bool:
    """Whether ``torch._int_mm`` is exact here, at numbers where adding pairs in 16 bits would saturate (a
    processor without VNNI)."""
    import torch

    left = torch.full((3, 64), -127, dtype=torch.int8)
    right = torch.full((64, 5), 127, dtype=torch.int8)
    right[:, 2] = -128
    try:
        found = torch._int_mm(left, right)
    except RuntimeError:
        return False
    return bool(torch.equal(found.long(), left.long() @ right.long()))


def require() -> None:
    """Raises ``NotSupportedError`` where ``available`` says no."""
    if not available():
        raise NotSupportedError(
            "weights below 8 bits: PyTorch's product of whole numbers is not exact on this processor",
            code="quantization.kernel_missing",
            hints=["convert to 8 bits: `--quantize q8`"],
        )
