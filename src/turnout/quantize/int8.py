"""8-bit weights computed in 8 bits: per output channel for weights, per token for activations.

``y = (x H / s) @ (W H)8^T * s * c`` with ``s`` = max |x H| / 127 of a token, ``c`` = max |W H| / 127 of an output
channel, and H a Hadamard matrix over blocks of inputs (``rotation``). The product is an exact sum of whole
numbers, so a token's result does not depend on the tokens beside it, nor on their number. oneDNN computes
it with VNNI or AMX instructions; activations are shifted by 128, as its kernels take unsigned ones.
"""

from __future__ import annotations

import ctypes
import math
import mmap
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

BLOCK = 64  # inputs that are turned together
PART = 1 << 18  # numbers converted at a time
MADV_DONTNEED = 4


def available() -> bool:
    """Whether this build of PyTorch has oneDNN's packed 8-bit product."""
    import torch

    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.onednn, "qlinear_prepack")


def rotation(width: int) -> Any:
    """Orthonormal Hadamard matrix float32 [b, b] for blocks of ``width`` inputs: the largest power of two up to 64
    that divides it, at least 8; None where none does.

    Turning both sides of a product by it changes nothing, and spreads an outlier over its block, so that a
    token's largest number no longer decides the step of all others (QuaRot, Ashkboos et al. 2024). Measured on
    SmolLM2 against float32: KL divergence 0.053 without, 0.0045 with it.
    """
    import torch

    block = math.gcd(width, BLOCK)
    if block < 8:
        return None
    made = torch.ones(1, 1)
    while made.shape[0] < block:
        made = torch.cat([torch.cat([made, made], 1), torch.cat([made, -made], 1)])
    return made / math.sqrt(block)


def turned(x: Any, matrix: Any) -> Any:
    """float32 [n, width] with every block of inputs turned by ``matrix`` [b, b].

    One product per token: one for all tokens would round differently with their number.
    """
    import torch

    if matrix is None:
        return x
    block = matrix.shape[0]
    blocks = x.reshape(x.shape[0], x.shape[1] // block, block)
    return torch.bmm(blocks, matrix.expand(x.shape[0], block, block)).view(x.shape)


class Activations:
    """The last quantised input: layers that read the same tensor (queries, keys, values) share it."""

    def __init__(self) -> None:
        self._of: Any = None
        self._made: Any = None
        self._matrices: dict[int, Any] = {}

    def of(self, x: Any) -> tuple[Any, Any]:
        """uint8 [n, in] around 128 and float32 [n, 1] scales of x [..., in], turned."""
        import torch

        if self._of is x:
            return self._made  # type: ignore[no-any-return]
        width = x.shape[-1]
        if width not in self._matrices:
            self._matrices[width] = rotation(width)
        flat = turned(x.reshape(-1, width).to(torch.float32), self._matrices[width])
        # (a norm of infinite order and a cast to uint8 say the same, eight and four times slower)
        scale = flat.abs().amax(1, keepdim=True).mul_(1 / 127).clamp_(min=1e-12)
        made = (flat * scale.reciprocal()).round_().to(torch.int8).view(torch.uint8).bitwise_xor_(128)
        self._of, self._made = x, (made, scale)
        return self._made

    def forget(self) -> None:
        """Lets go of the last input."""
        self._of = self._made = None


def quantized(weight: Any, matrix: Any = None) -> tuple[Any, Any]:
    """int8 [out, in] and float32 [out] scales nearest to ``weight`` [out, in], turned by ``matrix``; a row of zeros
    gets scale 1."""
    import torch

    made = torch.empty(weight.shape, dtype=torch.int8)
    scales = torch.empty(weight.shape[0])
    rows = max(1, PART // weight.shape[1])  # parts that stay in a core's cache
    for start in range(0, weight.shape[0], rows):
        part = weight[start : start + rows].to(torch.float32, copy=True)
        part = turned(part, matrix)
        largest = part.abs().amax(1).mul_(1 / 127)
        step = torch.where(largest > 0, largest, 1.0)
        scales[start : start + rows] = step
        made[start : start + rows] = part.mul_((1 / step).unsqueeze(1)).round_()
    return made, scales


def linear_class() -> Any:
    """The module class (made on first use: PyTorch is imported only then)."""
    import torch

    class Int8Linear(torch.nn.Module):
        """``x @ W^T + b`` with W in 8 bits. ``weight`` float [out, in]."""

        def __init__(self, packed: Any, scales: Any, bias: Any, activations: Activations, dtype: Any) -> None:
            super().__init__()
            self.out_features = scales.shape[0]
            self.packed, self.scales, self.bias = packed, scales, bias
            self.zeros = torch.zeros(scales.shape[0], dtype=torch.int32)
            self.activations, self.dtype = activations, dtype

        def forward(self, x: Any) -> Any:
            made, scale = self.activations.of(x)
            y = torch.ops.onednn.qlinear_pointwise(
                made, 1.0, 128, self.packed, self.scales, self.zeros, None, 1.0, 0, torch.float32, "none", [], ""
            )
            y.mul_(scale)
            if self.bias is not None:
                y.add_(self.bias)
            return y.view(*x.shape[:-1], self.out_features).to(x.dtype)

    return Int8Linear


def embedding_class() -> Any:
    """The module class of a token table in 8 bits."""
    import torch

    class Int8Embedding(torch.nn.Module):
        """Rows of a table [tokens, width] kept in 8 bits with a scale each."""

        def __init__(self, rows: Any, scales: Any, dtype: Any) -> None:
            super().__init__()
            self.rows, self.scales, self.dtype = rows, scales, dtype

        @property
        def weight(self) -> Any:
            """The stored rows; what asks for the device or the shape finds them here."""
            return self.rows

        def forward(self, ids: Any) -> Any:
            return (self.rows[ids].float() * self.scales[ids].unsqueeze(-1)).to(self.dtype)

    return Int8Embedding


def quantize_linears(model: Any, dtype: Any, threads: int | None = None, bits: int = 8) -> int:
    """Replaces every linear layer of ``model`` and a tied token table by 8-bit ones, as they come, and makes what is
    left ``dtype``. Returns the bytes of the weights then. The float weights are let go as it goes; ``threads``
    layers are converted at a time (None: one per core). With fewer ``bits`` (3 to 6, see `lowbit`) the head and the
    table keep 8: they are read once a token, and their errors reach the logits unmixed.

    Raises ``NotSupportedError`` for fewer bits on a processor whose whole-number product is not exact.
    """
    import torch

    maker = _Maker(model, dtype, bits)
    release(model.parameters())  # a check at load read them all
    found = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is torch.nn.Linear
    ]
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with ThreadPoolExecutor(threads or before) as pool:
            total = sum(pool.map(lambda place: maker.replace(*place), found))
    finally:
        torch.set_num_threads(before)
    for tensor in [*model.parameters(), *model.buffers()]:
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)
            total += tensor.numel() * tensor.element_size()
    return total


class _Maker:
    """Makes the layers of one model in few bits."""

    def __init__(self, model: Any, dtype: Any, bits: int) -> None:
        self.model, self.dtype, self.bits = model, dtype, bits
        if bits < 8:
            from turnout.quantize import lowbit

            lowbit.require()
            self.fold, self.folded = lowbit.fold, lowbit.linear_class()
        self.linear, self.embedding, self.activations = linear_class(), embedding_class(), Activations()
        self.head, self.table = model.get_output_embeddings(), model.get_input_embeddings()
        self.tied = self.head is not None and self.head.weight.data_ptr() == self.table.weight.data_ptr()

    def replace(self, parent: Any, name: str, child: Any) -> int:
        """Puts the small form of a linear layer in its place; bytes of its weights."""
        import torch

        weight = child.weight.data
        total = 0
        if child is self.head and self.tied:
            rows, steps = quantized(weight)
            total += rows.numel() + 4 * steps.numel()
            factor = float(getattr(self.table, "embed_scale", 1.0))
            setattr(*_place(self.model, self.table), self.embedding(rows, steps * factor, self.dtype))
        matrix = rotation(weight.shape[1])
        bias = child.bias.data.float() if child.bias is not None else None
        if self.bits < 8 and child is not self.head:
            folded = self.fold(weight, self.bits, matrix)
            made, held = self.folded(folded, bias, self.activations, self.dtype), folded.bytes
        else:
            small, scales = quantized(weight, matrix)
            packed = torch.ops.onednn.qlinear_prepack(small, None)
            made = self.linear(packed, scales, bias, self.activations, self.dtype)
            held = small.numel() + 4 * scales.numel()
        setattr(parent, name, made)
        release([weight])
        child.weight = None
        return total + held


def _place(model: Any, wanted: Any) -> tuple[Any, str]:
    """Module that holds ``wanted``, and its name there."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is wanted:
                return parent, name
    raise ValueError("the module is not in the model")


def release(tensors: Iterable[Any]) -> None:
    """Gives the pages of mapped files under ``tensors`` back to the system; they are read again when needed.

    Weights of a safetensors file are mapped: without this every page that was once read would count as this
    process's memory until the file is closed. Other memory is left alone.
    """
    maps = _file_mappings()
    if not maps or not hasattr(mmap, "MADV_DONTNEED"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    for tensor in tensors:
        start = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
        end = (tensor.data_ptr() + tensor.numel() * tensor.element_size()) // mmap.PAGESIZE * mmap.PAGESIZE
        if end > start and any(low <= start and end <= high for low, high in maps):
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), MADV_DONTNEED)


def _file_mappings() -> list[tuple[int, int]]:
    """Address ranges of this process that map a file (Linux; elsewhere none)."""
    found = []
    try:
        with open("/proc/self/maps", encoding="ascii", errors="replace") as stream:
            for line in stream:
                fields = line.split()
                if len(fields) > 5 and fields[4] != "0" and fields[5].endswith(".safetensors"):
                    low, _, high = fields[0].partition("-")
                    found.append((int(low, 16), int(high, 16)))
    except OSError:
        return []
    return found
