"""Who owns the cache: slots, the blocks counted in them, and the prefixes that can be used again.

Every slot is in one of three states, and every block belongs to the slot that holds its tokens::

    free    no tokens                                            0 blocks
    in use  one running sequence appends to it                   ceil(tokens / block_size) blocks
    cached  tokens of an ended sequence, kept until room is      ceil(tokens / block_size) blocks
            needed; the least recently used goes first
    stuck   the executor could not free it; tried again          ceil(tokens / block_size) blocks
            when a slot is needed

    free blocks + cached blocks + blocks in use or stuck = total (``check`` proves it)

Full blocks are known by a chained SHA-256 over their tokens, seeded with what else decides their
content (adapter, tenant, images), so that equal hashes mean equal keys and values. A prefix is taken
over with its slot when the slot is only cached, and copied when a running sequence holds it or when the
slot holds much more that is worth keeping. Layout is the executor's: this module counts. An executor that
fails to copy, cut or free costs a hit or a slot, never a request.
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

    def extend(self, tokens: Sequence[int], length: int) -> int:
        """Number of full blocks of ``tokens[:length]``; ``values`` then holds their hashes, or more."""
        while (len(self.values) + 1) * self.block_size <= length:
            start = len(self.values) * self.block_size
            block = array("i", tokens[start : start + self.block_size])
            previous = self.values[-1] if self.values else self.seed
            self.values.append(hashlib.sha256(previous + block.tobytes()).digest())
        return length // self.block_size


def hash_seed(*keys: object) -> bytes:
    """Seed of a chain: everything besides the tokens that decides a cache's content."""
    return hashlib.sha256(repr(keys).encode()).digest()


@dataclass(slots=True)
class _Slot:
    owner: str | None = None  # the running sequence
    tokens: list[int] = field(default_factory=list)  # what it was computed from, where it may be reused
    length: int = 0  # tokens reserved
    computed: int = 0  # tokens of ``tokens`` that are in it for good
    stuck: bool = False  # the executor could not free it
    hashes: list[bytes] = field(default_factory=list)  # registered in the index
    used_at: int = 0

    @property
    def cached(self) -> bool:
        return self.owner is None and self.length > 0 and not self.stuck


@dataclass(frozen=True, slots=True)
class Hit:
    """Longest reusable prefix: ``length`` tokens of ``slot``."""

    slot: int
    length: int


class PrefixLostError(Exception):
    """A prefix that was found cannot be used; the sequence starts without it."""


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
        self.trouble = ""  # the last fault of the executor that was lived with
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
        return self._held_blocks() / self.total_blocks if self.total_blocks else 0.0

    def _held_blocks(self) -> int:
        return sum(self.blocks_of(slot.length) for slot in self._slots if slot.owner is not None or slot.stuck)

    def check(self) -> None:
        """Proves the ownership picture. Raises ``AssertionError`` with the numbers that do not add up."""
        held = self._held_blocks()
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
        size = self.block_size
        for count in range(hashes.extend(tokens, len(tokens)), 0, -1):
            if best is not None and best.length >= (count + 1) * size - 1:  # nothing longer is to be found
                break
            for number in self._index.get(hashes.values[count - 1], ()):
                length = self._usable(number, min(self._common(number, tokens, count * size), len(tokens) - 1))
                if length > 0 and (best is None or length > best.length):
                    best = Hit(number, length)
        return best

    def _common(self, number: int, tokens: Sequence[int], length: int) -> int:
        slot = self._slots[number]
        end = min(len(slot.tokens), len(tokens), length + self.block_size)
        while length < end and slot.tokens[length] == tokens[length]:
            length += 1
        return min(length, slot.computed)

    def _usable(self, number: int, length: int) -> int:
        try:
            return min(length, self._store.retained(number, length))
        except Exception as error:
            self._note(error)
            return 0

    def _note(self, error: Exception) -> None:
        self.trouble = f"{type(error).__name__}: {error}"

    # ---- life of a slot ---------------------------------------------------------------

    def acquire(self, owner: str, tokens: int, hit: Hit | None) -> int | None:
        """A slot for ``owner`` with room for ``tokens`` tokens that starts with the hit's prefix, or None
        when there is no slot or no room; then nothing changed. Raises ``PrefixLostError`` when the executor
        could not give the prefix; then the owner has no slot."""
        for stuck, slot in enumerate(self._slots):
            if slot.stuck:
                self._drop(stuck)
        need = self.blocks_of(tokens)
        if hit is not None and self._slots[hit.slot].cached and not self._copies(hit, need):
            return self._take_over(owner, tokens, hit)
        spared = hit.slot if hit is not None else -1
        if not self._reachable(need, spared):
            return None
        number = self._free_slot(spared)
        if number is None or not self._make_room(need, spared):
            return None
        self._occupy(number, owner, tokens, hit)
        if hit is not None:
            self._touch(self._slots[hit.slot])
            try:
                self._store.copy_prefix(hit.slot, number, hit.length)
            except Exception as error:
                self._note(error)
                self._drop(number)
                raise PrefixLostError from error
        return number

    def _copies(self, hit: Hit, need: int) -> bool:
        """Whether a cached slot's prefix is copied rather than taken over with its slot: when taking over
        would lose blocks of it, and what was used before it makes enough room."""
        slot = self._slots[hit.slot]
        if self.blocks_of(slot.length) <= self.blocks_of(hit.length):
            return False
        older = [other for other in self._slots if other.cached and other.used_at < slot.used_at]
        room = self.free_blocks + sum(self.blocks_of(other.length) for other in older)
        return room >= need and (bool(older) or any(o.owner is None and o.length == 0 for o in self._slots))

    def _take_over(self, owner: str, tokens: int, hit: Hit) -> int | None:
        slot = self._slots[hit.slot]
        if not self._make_room(self.blocks_of(tokens) - self.blocks_of(slot.length), hit.slot):
            return None
        self._unregister(hit.slot, hit.length // self.block_size)
        try:
            self._store.roll_back(hit.slot, hit.length)
        except Exception as error:
            self._note(error)
            self._drop(hit.slot)
            raise PrefixLostError from error
        self._occupy(hit.slot, owner, tokens, hit)
        return hit.slot

    def _occupy(self, number: int, owner: str, tokens: int, hit: Hit | None) -> None:
        slot = self._slots[number]
        slot.owner, slot.tokens, slot.computed = owner, [], hit.length if hit is not None else 0
        self._resize(slot, tokens)

    def _touch(self, slot: _Slot) -> None:
        self._clock += 1
        slot.used_at = self._clock

    def _resize(self, slot: _Slot, tokens: int) -> None:
        self._used_blocks += self.blocks_of(tokens) - self.blocks_of(slot.length)
        slot.length = tokens

    def fits(self, tokens: int, more: int) -> bool:
        """Whether a sequence of ``tokens`` tokens and ``more`` blocks could be held besides what runs."""
        return self._reachable(self.blocks_of(tokens) + more, -1)

    def outstanding(self, number: int, tokens: int) -> int:
        """Blocks that a slot in use still lacks for ``tokens`` tokens."""
        return max(0, self.blocks_of(tokens) - self.blocks_of(self._slots[number].length))

    def grow(self, number: int, tokens: int) -> bool:
        """Room for ``tokens`` tokens in a slot in use, dropping cached prefixes; False when there is none."""
        slot = self._slots[number]
        if tokens <= slot.length:
            return True
        more = self.blocks_of(tokens) - self.blocks_of(slot.length)
        if more and not self._make_room(more, number):
            return False
        self._used_blocks += more
        slot.length = tokens
        return True

    def commit(self, number: int, tokens: list[int], computed: int, hashes: BlockHashes) -> None:
        """Makes the slot's full blocks known: ``computed`` tokens of ``tokens`` are in it for good."""
        slot = self._slots[number]
        slot.tokens, slot.computed = tokens, computed
        known = len(slot.hashes)
        if not self._shares or computed // self.block_size == known:
            return
        count = hashes.extend(tokens, computed)
        if count < known:  # a cut went further back than a block: the rest is not in the slot any more
            self._unregister(number, count)
        for value in hashes.values[known:count]:
            slot.hashes.append(value)
            self._index.setdefault(value, {})[number] = None

    def release(self, number: int, computed: int, keep: bool) -> None:
        """The owner ends; its ``computed`` tokens stay as a cached prefix when ``keep`` and worth it."""
        slot = self._slots[number]
        kept = computed if keep and slot.hashes else 0
        if kept:
            self._touch(slot)
            slot.owner, slot.tokens = None, slot.tokens[:kept]
            slot.computed = min(slot.computed, kept)
            self._resize(slot, kept)
        else:
            self._drop(number)

    def clear(self) -> None:
        """Drops every cached prefix."""
        for number, slot in enumerate(self._slots):
            if slot.cached or slot.stuck:
                self._drop(number)

    def _drop(self, number: int) -> bool:
        """Empties a slot; False when the executor could not: it is stuck then, with its blocks."""
        self._unregister(number, 0)
        slot = self._slots[number]
        slot.owner, slot.tokens, slot.computed = None, [], 0
        try:
            self._store.free(number)
        except Exception as error:
            self._note(error)
            slot.stuck = True
            return False
        slot.stuck = False
        self._resize(slot, 0)
        return True

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
        while (oldest := self._oldest(spared)) is not None:
            if self._drop(oldest):
                return oldest
        return None

    def _reachable(self, blocks: int, spared: int) -> bool:
        """Whether ``blocks`` more can be had, a cached ``spared`` slot kept."""
        kept = self._slots[spared] if 0 <= spared < len(self._slots) else None
        return blocks <= self.free_blocks + self.cached_blocks - (
            self.blocks_of(kept.length) if kept is not None and kept.cached else 0
        )

    def _make_room(self, blocks: int, spared: int) -> bool:
        """Drops cached prefixes until ``blocks`` more are free; drops none when that would not do."""
        if blocks <= self.free_blocks:
            return True
        if not self._reachable(blocks, spared):
            return False
        while self.free_blocks < blocks:
            oldest = self._oldest(spared)
            if oldest is None:
                return False
            self._drop(oldest)
        return True
