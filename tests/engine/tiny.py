"""A small language model in numpy behind the executor protocol, and its vocabulary.

The logits of a position depend on its token (a bigram table), on the position and, through a hash, on
every token before it and the adapter it was computed with. So a cache that is wrong anywhere (a stale
slot, a prefix cut one token late, another request's tokens) changes the logits. They are elementwise
sums of table rows: the same bits whatever else is in the step.

The executor is as strict as the protocol's text: a step that breaks it raises `Broken` and is kept in
``broken``, so a test sees it even if the engine turned the exception into a request's error. The array
that `execute` returned is filled with NaN at the next call, because it is the caller's only until then.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnout.engine.executor import Capabilities, Step
from turnout.errors import LoadError

BOS, EOS, PAD = 0, 1, 2
_TEXT = [bytes([b]) for b in b'abcdefghijklmnopqrstuvwxyz0123456789 \n{}[]",:.-?']
_WORDS = [b"true", b"false", b"null", b"the ", b"ing", b"\xc3", b"\xa9", b"\xe2\x82", b"\xac", b"\xf0\x9f"]
TOKENS: list[bytes] = [b"", b"", b"", *_TEXT, *_WORDS][:64]
TOKENS += [b"!" * (i + 1) for i in range(64 - len(TOKENS))]

_MULTIPLIER, _WORD = 6364136223846793005, (1 << 64) - 1
_ROWS = 1021  # rows of each of the two tables that the context's hash selects from


class Broken(AssertionError):
    """The engine broke the executor's contract."""


class TinyVocabulary:
    """64 tokens: three special ones, characters, a few words and halves of UTF-8 characters."""

    eos_ids = frozenset({EOS})
    bos_id: int | None = BOS
    size = len(TOKENS)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Longest match first; a byte without a token raises ValueError."""
        data, ids = text.encode(), [BOS] if special else []
        while data:
            token = max((t for t in range(3, self.size) if data.startswith(TOKENS[t])), key=lambda t: len(TOKENS[t]))
            ids.append(token)
            data = data[len(TOKENS[token]) :]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        names = {BOS: b"<s>", EOS: b"</s>", PAD: b"<pad>"}
        parts = (b"" if skip_special and i in names else names.get(i, TOKENS[i]) for i in ids)
        return b"".join(parts).decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        return TOKENS[token]

    def is_special(self, token: int) -> bool:
        return token < 3


class TinyExecutor:
    """``memory`` weighs the part of the logits that the whole context decides, ``ends`` is added to the
    end token's logit, ``snapshot`` > 1 makes the cache retain multiples of it only, as recurrent states
    do, ``fails`` are numbers of `execute` calls (from 0) that raise after having changed nothing.
    Two executors of one ``seed`` that differ in ``memory`` agree often, as a draft and its target do.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        slots: int = 4,
        context: int = 256,
        cache_tokens: int | None = None,
        vocab_size: int = 64,
        block_size: int = 16,
        step_tokens: int = 2048,
        memory: float = 0.5,
        ends: float = -1.0,
        sharpness: float = 2.0,
        snapshot: int = 1,
        shares_prefix: bool = True,
        rolls_back: bool = True,
        encoder_decoder: bool = False,
        fails: Sequence[int] = (),
    ) -> None:
        self.capabilities = Capabilities(
            vocab_size=vocab_size,
            context=context,
            slots=slots,
            cache_tokens=slots * context if cache_tokens is None else cache_tokens,
            block_size=block_size,
            step_tokens=step_tokens,
            shares_prefix=shares_prefix,
            rolls_back=rolls_back,
            encoder_decoder=encoder_decoder,
            adapters=True,
        )
        draw = np.random.default_rng(seed)
        self._bigram = (sharpness * draw.standard_normal((vocab_size, vocab_size))).astype(np.float32)
        self._position = (0.5 * draw.standard_normal((31, vocab_size))).astype(np.float32)
        self._context = (memory * draw.standard_normal((2, _ROWS, vocab_size))).astype(np.float32)
        self._bigram[:, [BOS, PAD]] -= np.float32(30)
        self._bigram[:, EOS] += np.float32(ends)
        self._snapshot = snapshot
        self._fails = frozenset(fails)
        self._cache: list[list[tuple[int, int]]] = [[] for _ in range(slots)]  # (token, hash up to it)
        self._encoded: list[int | None] = [None] * slots
        self._adapters: dict[str, int] = {}
        self._given: NDArray[np.float32] | None = None
        self.steps = 0  # calls of execute
        self.computed = 0  # tokens computed in all of them
        self.rows: list[int] = []  # rows of each step
        self.broken: list[str] = []
        self.closed = False

    def held(self, slot: int) -> list[int]:
        """Tokens whose states the slot holds."""
        return [token for token, _ in self._cache[slot]]

    def idle(self) -> bool:
        """Whether every slot is empty."""
        return not any(self._cache) and self._encoded == [None] * len(self._cache)

    def execute(self, step: Step) -> NDArray[np.float32]:
        if self._given is not None:
            self._given.fill(np.nan)
        number, self.steps = self.steps, self.steps + 1
        self._check(step)
        if number in self._fails:
            raise LoadError(f"step {number} fails on purpose", code="runtime.failed")
        asked: list[tuple[int, int, int]] = []  # (token, position, hash)
        for row in step.rows:
            cache = self._cache[row.slot]
            for token in row.tokens:
                cache.append((token, self._next(row.slot, token, row.adapter)))
            start = len(cache) - row.logits
            asked += [(token, start + i, mixed) for i, (token, mixed) in enumerate(cache[start:])]
        self.computed += step.num_tokens
        self.rows.append(len(step.rows))
        self._given = self._logits(asked)
        return self._given

    def _next(self, slot: int, token: int, adapter: str | None) -> int:
        """Hash of a slot's content with one more token."""
        cache = self._cache[slot]
        before = cache[-1][1] if cache else (self._encoded[slot] or 0)
        mixed = (before * _MULTIPLIER + token + 1 + (self._adapters[adapter] if adapter else 0)) & _WORD
        return mixed ^ (mixed >> 29)

    def _logits(self, asked: list[tuple[int, int, int]]) -> NDArray[np.float32]:
        """[len(asked), vocab_size]"""
        token = np.array([a[0] for a in asked], dtype=np.int64)
        position = np.array([a[1] for a in asked], dtype=np.int64)
        low = np.array([(a[2] & 0xFFFFFFFF) % _ROWS for a in asked], dtype=np.int64)
        high = np.array([(a[2] >> 32) % _ROWS for a in asked], dtype=np.int64)
        logits = self._bigram[token] + self._position[position % len(self._position)]
        logits += self._context[0][low]
        logits += self._context[1][high]
        return np.asarray(logits, dtype=np.float32)

    def _check(self, step: Step) -> None:
        can = self.capabilities
        slots = [row.slot for row in step.rows]
        self._demand(not self.closed, "execute after close")
        self._demand(bool(slots), "a step without rows")
        self._demand(len(set(slots)) == len(slots), f"a slot occurs twice: {slots}")
        self._demand(step.num_tokens <= can.step_tokens, f"{step.num_tokens} tokens in one step of {can.step_tokens}")
        for row in step.rows:
            self._demand(0 <= row.slot < can.slots, f"slot {row.slot} of {can.slots}")
            held = len(self._cache[row.slot])
            self._demand(row.start == held, f"row starts at {row.start}, slot {row.slot} holds {held}")
            self._demand(len(row.tokens) > 0, "a row without tokens")
            self._demand(0 <= row.logits <= len(row.tokens), f"{row.logits} logits of {len(row.tokens)} tokens")
            self._demand(held + len(row.tokens) <= can.context, f"slot {row.slot} outgrows {can.context} tokens")
            self._demand(all(0 <= t < can.vocab_size for t in row.tokens), f"tokens outside: {list(row.tokens)}")
            self._demand(row.adapter is None or row.adapter in self._adapters, f"adapter {row.adapter} not loaded")
            if can.encoder_decoder:
                self._demand(self._encoded[row.slot] is not None, f"slot {row.slot} was not encoded")
        total = sum(map(len, self._cache)) + step.num_tokens
        self._demand(total <= can.cache_tokens, f"{total} tokens in a cache of {can.cache_tokens}")

    def _demand(self, holds: bool, message: str) -> None:
        if not holds:
            self.broken.append(message)
            raise Broken(message)

    def encode(self, slot: int, tokens: Sequence[int]) -> None:
        self._demand(self.capabilities.encoder_decoder, "encode on a decoder")
        self._demand(not self._cache[slot], "encode on a slot in use")
        mixed = 1
        for token in tokens:
            mixed = (mixed * _MULTIPLIER + token + 1) & _WORD
        self._encoded[slot] = mixed

    def retained(self, slot: int, length: int) -> int:
        held = len(self._cache[slot])
        if length >= held:
            return held
        return length - length % self._snapshot if self.capabilities.rolls_back else 0

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._demand(self.capabilities.shares_prefix, "copy_prefix is not offered")
        self._demand(source != target and not self._cache[target], f"copy_prefix to slot {target} in use")
        self._demand(length == self.retained(source, length), f"{length} tokens are not retained")
        total = sum(map(len, self._cache)) + length
        self._demand(total <= self.capabilities.cache_tokens, f"copying makes {total} tokens in the cache")
        self._cache[target] = self._cache[source][:length]
        self._encoded[target] = self._encoded[source]

    def roll_back(self, slot: int, length: int) -> None:
        self._demand(0 <= length <= len(self._cache[slot]), f"roll_back to {length} of {len(self._cache[slot])}")
        self._demand(length == self.retained(slot, length), f"{length} tokens are not retained")
        del self._cache[slot][length:]

    def free(self, slot: int) -> None:
        self._cache[slot] = []
        self._encoded[slot] = None

    def load_adapter(self, name: str, path: str) -> None:
        """The path is the adapter: each letter of it changes the logits; ``bad`` does not fit the base."""
        if path == "bad":
            raise LoadError(f"adapter `{name}` is for another base", code="adapter.base_mismatch")
        self._adapters[name] = sum((i + 1) * 7919 * byte for i, byte in enumerate(path.encode()))

    def unload_adapter(self, name: str) -> None:
        self._demand(name in self._adapters, f"adapter {name} not loaded")
        del self._adapters[name]

    def close(self) -> None:
        self.closed = True

    def alone(self, tokens: Sequence[int], adapter: str | None = None) -> NDArray[np.float32]:
        """Logits of every position of a sequence, without the cache: the reference.

        Returns float32 [len(tokens), vocab_size]; decoders only.
        """
        asked, mixed = [], 0
        shift = self._adapters[adapter] if adapter else 0
        for position, token in enumerate(tokens):
            mixed = (mixed * _MULTIPLIER + token + 1 + shift) & _WORD
            mixed ^= mixed >> 29
            asked.append((token, position, mixed))
        return self._logits(asked)

    def greedy(self, prompt: Sequence[int], count: int, adapter: str | None = None) -> list[int]:
        """The ``count`` tokens that greedy decoding adds to a prompt, ended after EOS: the reference."""
        ids = list(prompt)
        for _ in range(count):
            ids.append(int(self.alone(ids, adapter)[-1].argmax()))
            if ids[-1] == EOS:
                break
        return ids[len(prompt) :]
