"""Who owns the cache: slots, the blocks counted in them, and the prefixes that can be used again.

Every slot is in one of three states, and every block belongs to the slot that holds its tokens::

    free    no tokens                                            0 blocks
    in use  one running sequence appends to it                   ceil(tokens / block_size) blocks
    cached  tokens of an ended sequence, kept until room is      ceil(tokens / block_size) blocks
            needed; the least recently used goes first

    free blocks + cached blocks + blocks in use = total          (``check`` proves it)

Full blocks are known by a chained SHA-256 over their tokens, seeded with what else decides their
content (adapter, tenant, images), so that equal hashes mean equal keys and values. A prefix is taken
over with its slot when the slot is only cached, and copied when a running sequence holds it. Layout is
the executor's: this module counts.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol


class Store(Protocol):
    """The part of an executor that moves whole prefixes."""

    def retained(self, slot: int, length: int) -> int:
        """Longest prefix of the slot, at most ``length`` tokens, that can be cut or copied."""
        ...

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copies a prefix into an empty slot."""
        ...

    def roll_back(self, slot: int, length: int) -> None:
        """Cuts a slot."""
        ...

    def free(self, slot: int) -> None:
        """Empties a slot."""
        ...


@dataclass(slots=True)
class BlockHashes:
    """Hashes of a sequence's full blocks, extended as tokens become known."""

    seed: bytes
    block_size: int
    values: list[bytes] = field(default_factory=list)

    def extend(self, tokens: Sequence[int], length: int) -> list[bytes]:
        """Hashes of all full blocks of ``tokens[:length]``."""
        while (len(self.values) + 1) * self.block_size <= length:
            start = len(self.values) * self.block_size
            block = array("i", tokens[start : start + self.block_size])
            previous = self.values[-1] if self.values else self.seed
            self.values.append(hashlib.sha256(previous + block.tobytes()).digest())
        return self.values[: length // self.block_size]


def hash_seed(*keys: object) -> bytes:
    """Seed of a chain: everything besides the tokens that decides a cache's content."""
    return hashlib.sha256(repr(keys).encode()).digest()


@dataclass(slots=True)
class _Slot:
    owner: str | None = None  # the running sequence
    tokens: list[int] = field(default_factory=list)  # what it was computed from, where it may be reused
    length: int = 0  # tokens reserved
    hashes: list[bytes] = field(default_factory=list)  # registered in the index
    used_at: int = 0

    @property
    def cached(self) -> bool:
        return self.owner is None and self.length > 0


@dataclass(frozen=True, slots=True)
class Hit:
    """Longest reusable prefix: ``length`` tokens of ``slot``."""

    slot: int
    length: int


class KvCache:
    """Slots and blocks of one executor. Not thread-safe.

    ``cache_tokens`` is rounded down to whole blocks.
    """

    def __init__(self, store: Store, slots: int, cache_tokens: int, block_size: int, shares: bool = True) -> None:
        self.block_size = block_size
        self.total_blocks = cache_tokens // block_size
        self.queries = self.hits = 0  # prompt tokens looked up and found
        self._store = store
        self._shares = shares
        self._slots = [_Slot() for _ in range(slots)]
        self._index: dict[bytes, dict[int, None]] = {}
        self._used_blocks = 0
        self._clock = 0

    # ---- counts -----------------------------------------------------------------------

    def blocks_of(self, tokens: int) -> int:
        """Blocks that ``tokens`` tokens take."""
        return -(-tokens // self.block_size)

    @property
    def free_blocks(self) -> int:
        """Blocks that belong to no slot."""
        return self.total_blocks - self._used_blocks

    @property
    def cached_blocks(self) -> int:
        """Blocks of ended sequences, to be had for the asking."""
        return sum(self.blocks_of(slot.length) for slot in self._slots if slot.cached)

    @property
    def usage(self) -> float:
        """Share of the blocks that running sequences hold."""
        held = sum(self.blocks_of(slot.length) for slot in self._slots if slot.owner is not None)
        return held / self.total_blocks if self.total_blocks else 0.0

    def check(self) -> None:
        """Proves the ownership picture. Raises ``AssertionError`` with the numbers that do not add up."""
        held = sum(self.blocks_of(slot.length) for slot in self._slots if slot.owner is not None)
        total = self.free_blocks + self.cached_blocks + held
        if total != self.total_blocks or self.free_blocks < 0:
            raise AssertionError(
                f"{self.free_blocks} free + {self.cached_blocks} cached + {held} in use != {self.total_blocks} blocks"
            )
        for number, slot in enumerate(self._slots):
            if slot.owner is None and slot.length == 0 and (slot.hashes or slot.tokens):
                raise AssertionError(f"free slot {number} still has hashes")
            for value in slot.hashes:
                if number not in self._index.get(value, {}):
                    raise AssertionError(f"slot {number} holds a block that the index does not know")
        registered = sum(len(holders) for holders in self._index.values())
        if registered != sum(len(set(slot.hashes)) for slot in self._slots):
            raise AssertionError("the index knows blocks that no slot holds")

    # ---- prefixes ---------------------------------------------------------------------

    def match(self, tokens: Sequence[int], hashes: BlockHashes) -> Hit | None:
        """Longest prefix of ``tokens`` that some slot holds, at most all but the last token (whose
        logits are wanted). Whole blocks are found by hash, then single tokens by comparison."""
        if not self._shares:
            return None
        best: Hit | None = None
        known = hashes.extend(tokens, len(tokens))
        for count in range(len(known), 0, -1):
            if best is not None and best.length >= count * self.block_size + self.block_size:
                break
            for number in self._index.get(known[count - 1], ()):
                length = self._common(number, tokens, count * self.block_size)
                length = self._store.retained(number, min(length, len(tokens) - 1))
                if length > 0 and (best is None or length > best.length):
                    best = Hit(number, length)
            if best is not None and best.length >= count * self.block_size - 1:
                break
        return best

    def _common(self, number: int, tokens: Sequence[int], length: int) -> int:
        held = self._slots[number].tokens
        end = min(len(held), len(tokens), length + self.block_size)
        while length < end and held[length] == tokens[length]:
            length += 1
        return length

    # ---- life of a slot ---------------------------------------------------------------

    def acquire(self, owner: str, tokens: int, hit: Hit | None) -> int | None:
        """A slot for ``owner`` with room for ``tokens`` tokens that starts with the hit's prefix, or None
        when there is no slot or no room; then nothing changed but cached prefixes that were dropped."""
        if hit is not None and self._slots[hit.slot].cached:
            return self._take_over(owner, tokens, hit)
        need = self.blocks_of(tokens)
        spared = hit.slot if hit is not None else -1
        number = self._free_slot(spared)
        if number is None or not self._make_room(need, spared):
            return None
        self._occupy(number, owner, tokens)
        if hit is not None:
            self._store.copy_prefix(hit.slot, number, hit.length)
        return number

    def _take_over(self, owner: str, tokens: int, hit: Hit) -> int | None:
        slot = self._slots[hit.slot]
        if not self._make_room(self.blocks_of(tokens) - self.blocks_of(slot.length), hit.slot):
            return None
        self._unregister(hit.slot, hit.length // self.block_size)
        self._store.roll_back(hit.slot, hit.length)
        self._occupy(hit.slot, owner, tokens)
        return hit.slot

    def _occupy(self, number: int, owner: str, tokens: int) -> None:
        slot = self._slots[number]
        slot.owner, slot.tokens = owner, []
        self._resize(slot, tokens)

    def _resize(self, slot: _Slot, tokens: int) -> None:
        self._used_blocks += self.blocks_of(tokens) - self.blocks_of(slot.length)
        slot.length = tokens

    def grow(self, number: int, tokens: int) -> bool:
        """Room for ``tokens`` tokens in a slot in use, dropping cached prefixes; False when there is none."""
        slot = self._slots[number]
        if tokens <= slot.length:
            return True
        if not self._make_room(self.blocks_of(tokens) - self.blocks_of(slot.length), number):
            return False
        self._resize(slot, tokens)
        return True

    def commit(self, number: int, tokens: list[int], computed: int, hashes: BlockHashes) -> None:
        """Makes the slot's full blocks known: ``computed`` tokens of ``tokens`` are in it for good."""
        slot = self._slots[number]
        slot.tokens = tokens
        if self._shares:
            known = hashes.extend(tokens, computed)
            for value in known[len(slot.hashes) :]:
                slot.hashes.append(value)
                self._index.setdefault(value, {})[number] = None

    def release(self, number: int, computed: int, keep: bool) -> None:
        """The owner ends; its ``computed`` tokens stay as a cached prefix when ``keep`` and worth it."""
        slot = self._slots[number]
        kept = computed if keep and slot.hashes else 0
        if kept:
            self._clock += 1
            slot.owner, slot.used_at = None, self._clock
            slot.tokens = slot.tokens[:kept]
            self._resize(slot, kept)
        else:
            self._drop(number)

    def clear(self) -> None:
        """Drops every cached prefix."""
        for number, slot in enumerate(self._slots):
            if slot.cached:
                self._drop(number)

    def _drop(self, number: int) -> None:
        self._unregister(number, 0)
        slot = self._slots[number]
        self._resize(slot, 0)
        slot.owner, slot.tokens = None, []
        self._store.free(number)

    def _unregister(self, number: int, keep: int) -> None:
        slot = self._slots[number]
        for value in slot.hashes[keep:]:
            holders = self._index[value]
            holders.pop(number, None)
            if not holders:
                del self._index[value]
        del slot.hashes[keep:]

    def _oldest(self, spared: int) -> int | None:
        cached = [number for number, slot in enumerate(self._slots) if slot.cached and number != spared]
        return min(cached, key=lambda number: self._slots[number].used_at, default=None)

    def _free_slot(self, spared: int) -> int | None:
        for number, slot in enumerate(self._slots):
            if slot.owner is None and slot.length == 0:
                return number
        oldest = self._oldest(spared)
        if oldest is not None:
            self._drop(oldest)
        return oldest

    def _make_room(self, blocks: int, spared: int) -> bool:
        """Drops cached prefixes until ``blocks`` more are free; drops none when that would not do."""
        reachable = self.free_blocks + self.cached_blocks
        if 0 <= spared < len(self._slots) and self._slots[spared].cached:
            reachable -= self.blocks_of(self._slots[spared].length)
        if blocks > reachable:
            return False
        while self.free_blocks < blocks:
            oldest = self._oldest(spared)
            if oldest is None:
                return False
            self._drop(oldest)
        return True
