"""Keys and values of slots: one contiguous row per slot and layer, on the CPU in memory that follows use.

A layer's keys are one tensor [slots, key-value heads, capacity, width], its values another (the widths
may differ). A row is contiguous per head, so attention reads it as one stream; rows of neighbouring
slots are one strided tensor, so decoding rows of similar length are one call of the kernel.

On Linux memory that was mapped but never written costs nothing: a tensor may have room for all slots
while only rows in use are resident. The capacity doubles when a row outgrows it.
"""

from __future__ import annotations

import mmap
from typing import Any

SMALLEST = 256  # tokens of the first capacity
PAGE = mmap.PAGESIZE


def zeros(shape: tuple[int, ...], dtype: Any, device: Any) -> tuple[Any, mmap.mmap | None]:
    """A tensor of zeros and, on the CPU, the mapping it lies in; its pages come when they are written.

    Zeros rather than what was there: masked positions are multiplied by 0, and 0 times NaN is NaN.
    """
    import torch

    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device), None
    count = 1
    for extent in shape:
        count *= extent
    # Private: pages of a shared mapping would not be given back.
    place = mmap.mmap(-1, max(PAGE, count * dtype.itemsize), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_NOHUGEPAGE"):
        # A huge page of 2 MiB per head and slot would make short rows as dear as long ones.
        try:
            place.madvise(mmap.MADV_NOHUGEPAGE)
        except OSError:
            pass  # a kernel without huge pages
    return torch.frombuffer(place, dtype=dtype, count=count).view(shape), place


class FloatRows:
    """Keys or values of one layer as the model computes them."""

    def __init__(self, slots: int, like: Any) -> None:
        """``like`` [1, heads, tokens, width] gives heads, width, type and device."""
        self.slots = slots
        self.heads, self.width = int(like.shape[1]), int(like.shape[3])
        self.dtype, self.device = like.dtype, like.device
        self.capacity = 0
        self.data: Any = None  # [slots, heads, capacity, width]
        self._place: mmap.mmap | None = None

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.heads * self.width * self.dtype.itemsize

    def reserve(self, capacity: int, lengths: list[int]) -> None:
        """Makes room for ``capacity`` tokens in every row; keeps the first ``lengths[slot]`` of each."""
        if capacity <= self.capacity:
            return
        old = self.data
        self.data, self._place = zeros((self.slots, self.heads, capacity, self.width), self.dtype, self.device)
        for slot, length in enumerate(lengths):
            if length and old is not None:
                self.data[slot, :, :length] = old[slot, :, :length]
        self.capacity = capacity

    def write_one(self, slots: Any, positions: Any, fresh: Any) -> None:
        """One token each for several rows: ``slots`` and ``positions`` [n], ``fresh`` [heads, n, width]."""
        self.data[slots, :, positions] = fresh.transpose(0, 1)

    def write_many(self, slot: int, start: int, fresh: Any) -> None:
        """Tokens [heads, n, width] of one row from position ``start`` on."""
        self.data[slot, :, start : start + fresh.shape[1]] = fresh

    def read(self, first: int, last: int, low: int, high: int) -> Any:
        """Positions ``low`` .. ``high`` of the slots ``first`` .. ``last`` (exclusive): [slots, heads, n, width]."""
        return self.data[first:last, :, low:high]

    def copy(self, source: int, target: int, length: int) -> None:
        """First ``length`` tokens of one row into another."""
        self.data[target, :, :length] = self.data[source, :, :length]

    def release(self, slot: int) -> None:
        """Gives the row's memory back to the system; it reads as zeros then."""
        if self._place is not None:
            _release(self._place, slot, self.token_bytes * self.capacity)


class Int8Rows:
    """Keys or values of one layer as int8 with one float32 scale per token and head (symmetric, 1/127 of
    the largest magnitude). Reading makes floats of them: it saves memory, not time."""

    def __init__(self, slots: int, like: Any) -> None:
        """``like`` [1, heads, tokens, width] gives heads, width, type and device."""
        import torch

        self.dtype = like.dtype
        self.codes = FloatRows(slots, like.new_empty((1, like.shape[1], 0, like.shape[3]), dtype=torch.int8))
        self.scales = FloatRows(slots, like.new_empty((1, like.shape[1], 0, 1), dtype=torch.float32))

    @property
    def token_bytes(self) -> int:
        """Bytes of one token with its scales."""
        return self.codes.token_bytes + self.scales.token_bytes

    def reserve(self, capacity: int, lengths: list[int]) -> None:
        """Makes room as ``FloatRows.reserve`` does."""
        self.codes.reserve(capacity, lengths)
        self.scales.reserve(capacity, lengths)

    def write_one(self, slots: Any, positions: Any, fresh: Any) -> None:
        """One token each for several rows: ``fresh`` [heads, n, width]."""
        codes, scales = _quantized(fresh)
        self.codes.write_one(slots, positions, codes)
        self.scales.write_one(slots, positions, scales)

    def write_many(self, slot: int, start: int, fresh: Any) -> None:
        """Tokens [heads, n, width] of one row from position ``start`` on."""
        codes, scales = _quantized(fresh)
        self.codes.write_many(slot, start, codes)
        self.scales.write_many(slot, start, scales)

    def read(self, first: int, last: int, low: int, high: int) -> Any:
        """Floats of the positions: [slots, heads, n, width], a fresh tensor."""
        codes = self.codes.read(first, last, low, high)
        return codes.to(self.dtype).mul_(self.scales.read(first, last, low, high))

    def copy(self, source: int, target: int, length: int) -> None:
        """First ``length`` tokens of one row into another."""
        self.codes.copy(source, target, length)
        self.scales.copy(source, target, length)

    def release(self, slot: int) -> None:
        """Gives the row's memory back to the system."""
        self.codes.release(slot)
        self.scales.release(slot)


def _quantized(fresh: Any) -> tuple[Any, Any]:
    """Codes int8 [..., width] and scales float32 [..., 1] of floats [..., width]."""
    import torch

    values = fresh.float()
    scales = values.abs().amax(-1, keepdim=True).div_(127).clamp_(min=1e-12)
    return values.div(scales).round_().to(torch.int8), scales


def _release(place: mmap.mmap, slot: int, stride: int) -> None:
    """Drops the whole pages of one row; pages shared with a neighbour stay."""
    begin = -(-slot * stride // PAGE) * PAGE
    end = (slot + 1) * stride // PAGE * PAGE
    if end > begin and hasattr(mmap, "MADV_DONTNEED"):
        place.madvise(mmap.MADV_DONTNEED, begin, end - begin)


class SlotCache:
    """Rows of all layers with the number of tokens that each slot holds.

    ``touched`` is the number of tokens per slot whose memory is resident: at least the length, and what
    a freed row leaves behind for its successor until the sum would pass ``budget`` tokens.
    """

    def __init__(self, slots: int, context: int, quantized: bool = False) -> None:
        self.slots = slots
        self.context = context
        self.compute: Any = None  # type that attention computes and keeps in; None: the model's own
        self.budget = slots * context
        self.lengths = [0] * slots
        self.touched = [0] * slots
        self._kind = Int8Rows if quantized else FloatRows
        self._layers: dict[int, tuple[Any, Any]] = {}
        self._capacity = 0

    @property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers seen so far."""
        return sum(keys.token_bytes + values.token_bytes for keys, values in self._layers.values())

    @property
    def quantized(self) -> bool:
        """Whether what is read differs from what was written."""
        return self._kind is Int8Rows

    def layer(self, index: int, key: Any, value: Any) -> tuple[Any, Any]:
        """Rows of keys and values of a layer, with the room that ``reserve`` asked for.

        ``key`` and ``value`` [1, heads, tokens, width] say what a row is made of when the layer is new.
        """
        rows = self._layers.get(index)
        if rows is None:
            rows = self._layers[index] = (self._kind(self.slots, key), self._kind(self.slots, value))
        for part in rows:
            part.reserve(self._capacity, self.lengths)
        return rows

    def reserve(self, wanted: dict[int, int]) -> None:
        """Announces the lengths that slots will have after a step. Layers grow when they are next used,
        one after the other, so that old and new tensors of only one layer exist at a time."""
        longest = max(wanted.values())
        if longest > self._capacity:
            self._capacity = min(self.context, max(SMALLEST, 1 << (longest - 1).bit_length()))
        for slot, length in wanted.items():
            if length > self.touched[slot]:
                self.touched[slot] = length
        if sum(self.touched) > self.budget:
            self._shrink(set(wanted))

    def _shrink(self, busy: set[int]) -> None:
        for slot in range(self.slots):
            if self.touched[slot] and not self.lengths[slot] and slot not in busy:
                for rows in self._layers.values():
                    for part in rows:
                        part.release(slot)
                self.touched[slot] = 0

    def copy(self, source: int, target: int, length: int) -> None:
        """``target`` then holds the first ``length`` tokens of ``source``."""
        self.reserve({target: length})
        for keys, values in self._layers.values():
            keys.reserve(self._capacity, self.lengths)
            values.reserve(self._capacity, self.lengths)
            keys.copy(source, target, length)
            values.copy(source, target, length)
        self.lengths[target] = length

    def clear(self) -> None:
        """Forgets everything and frees the memory."""
        self._layers.clear()
        self._capacity = 0
        self.lengths = [0] * self.slots
        self.touched = [0] * self.slots
