"""What a sequence's own past does to its next logits: bias, repetition, presence, frequency and DRY.

Counts grow with the sequence, so that a step costs as much as there are distinct tokens, never a pass over
the whole vocabulary. Tokens of a draft that is being verified come as ``extra`` and leave no trace.
Ids outside the vocabulary (placeholders of images) count for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnout.engine.executor import Vocabulary
from turnout.engine.sampler_rank import host, like
from turnout.types import Sampling

_LARGEST_LOG = 88.7  # natural logarithm of the largest float32: a longer repeat changes nothing more
_LONGEST_BREAKER = 20  # tokens


class Tally:
    """Distinct tokens with their counts, as arrays that grow by doubling."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._ids = np.empty(64, np.int64)
        self._counts = np.zeros(64, np.float32)
        self._slots: dict[int, int] = {}
        ids, counts = np.unique(np.asarray(tokens, np.int64), return_counts=True)
        lawful = (ids >= 0) & (ids < vocab_size)
        if lawful.any():
            self._ids, self._counts = ids[lawful], counts[lawful].astype(np.float32)
            self._slots = {int(token): slot for slot, token in enumerate(self._ids)}

    def add(self, token: int) -> None:
        """Counts a token once more."""
        if not 0 <= token < self._vocab_size:
            return
        slot = self._slots.setdefault(token, len(self._slots))
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._ids[slot] = token
        self._counts[slot] += 1

    def read(self, extra: Sequence[int] = ()) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(ids, counts) with those of ``extra`` added for this once."""
        size = len(self._slots)
        ids, counts = self._ids[:size], self._counts[:size]
        if not extra:
            return ids, counts
        more = Tally((), self._vocab_size)
        counts = counts.copy()
        for token in extra:
            slot = self._slots.get(token)
            if slot is None:
                more.add(token)
            else:
                counts[slot] += 1
        new_ids, new_counts = more.read()
        return np.concatenate([ids, new_ids]), np.concatenate([counts, new_counts])


class History:
    """Tokens of a sequence in one growing array."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._buffer = np.empty(max(64, 2 * len(tokens)), np.int64)
        self._buffer[: len(tokens)] = tokens
        self._size = len(tokens)

    def add(self, token: int) -> None:
        """Appends a token."""
        if self._size == len(self._buffer):
            self._buffer = np.concatenate([self._buffer, np.empty_like(self._buffer)])
        self._buffer[self._size] = token
        self._size += 1

    def read(self, extra: Sequence[int] = ()) -> NDArray[np.int64]:
        """All tokens [n], then those of ``extra``; without extra a view that is only to be read."""
        known = self._buffer[: self._size]
        return np.concatenate([known, np.asarray(extra, np.int64)]) if extra else known


class Penalties:
    """Bias and penalties of one sequence.

    ``apply`` edits a row in the order of the sampler: ``logit_bias`` is added; of every token of prompt and
    output a positive logit is divided and a negative one multiplied by ``repetition_penalty`` (Keskar et al.
    2019); ``frequency_penalty`` times its count and ``presence_penalty`` are taken from every token of the
    output (OpenAI); DRY takes from every token that would prolong a repeat of the last tokens
    ``dry_multiplier * dry_base ** (length of the repeat - dry_allowed_length)``.
    """

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], vocab_size: int, breakers: Sequence[Sequence[int]] = ()
    ) -> None:
        self._sampling = sampling
        bias: dict[int, float] = {}
        for token, value in sampling.logit_bias:
            bias[token] = bias.get(token, 0.0) + value
        self._bias_ids = np.fromiter(bias, np.int64, len(bias))
        self._bias = np.fromiter(bias.values(), np.float32, len(bias))
        self._seen = Tally(prompt, vocab_size) if sampling.repetition_penalty != 1.0 else None
        counted = sampling.presence_penalty != 0.0 or sampling.frequency_penalty != 0.0
        self._output = Tally((), vocab_size) if counted else None
        self._dry = Dry(sampling, prompt, vocab_size, breakers) if sampling.dry_multiplier > 0.0 else None
        self.active = bool(bias) or self._seen is not None or counted or self._dry is not None

    def append(self, token: int) -> None:
        """The sequence has grown by a token."""
        for part in (self._seen, self._output, self._dry):
            if part is not None:
                part.add(token)

    def apply(self, x: Any, extra: Sequence[int] = ()) -> None:
        """Edits ``x`` [vocab] in place, as if ``extra`` had been appended."""
        sampling = self._sampling
        if len(self._bias):
            _edit(x, self._bias_ids, lambda values: values + self._bias)
        if self._seen is not None:
            factor = np.float32(sampling.repetition_penalty)
            ids, _ = self._seen.read(extra)
            _edit(x, ids, lambda values: np.where(values < 0, values * factor, values / factor))
        if self._output is not None:
            ids, counts = self._output.read(extra)
            taken = counts * np.float32(sampling.frequency_penalty) + np.float32(sampling.presence_penalty)
            _edit(x, ids, lambda values: values - taken)
        if self._dry is not None:
            ids, taken = self._dry.penalties(extra)
            _edit(x, ids, lambda values: values - taken)


class Dry:
    """DRY ("don't repeat yourself", by p-e-w) over prompt and output, in the terms of llama.cpp and koboldcpp.

    A *breaker* is a sequence of tokens across which no repeat is counted: only what follows its nearest end
    may match. A token that is a breaker by itself is never penalised.
    """

    def __init__(
        self, sampling: Sampling, prompt: Sequence[int], vocab_size: int, breakers: Sequence[Sequence[int]]
    ) -> None:
        self._multiplier = sampling.dry_multiplier
        self._base = sampling.dry_base
        self._allowed = sampling.dry_allowed_length
        self._vocab_size = vocab_size
        growth = math.log(self._base)
        self._longest = self._allowed + (int(_LARGEST_LOG / growth) if growth > 1e-6 else 0)
        self._single = np.array(sorted({b[0] for b in breakers if len(b) == 1}), np.int64)
        self._ending: dict[int, list[tuple[int, ...]]] = {}  # last token to the breakers that end with it
        for breaker in {tuple(b) for b in breakers if b}:
            self._ending.setdefault(breaker[-1], []).append(breaker)
        self._history = History(prompt)
        self._since = self._since_break(self._history.read())  # tokens since the end of the last breaker

    def add(self, token: int) -> None:
        """The sequence has grown by a token."""
        self._history.add(token)
        self._since = 0 if self._breaks(self._history.read()) else self._since + 1

    def _since_break(self, tokens: NDArray[np.int64]) -> int:
        """Tokens after the end of the last breaker; all when there is none."""
        for last in np.flatnonzero(np.isin(tokens, list(self._ending)))[::-1].tolist():
            if self._breaks(tokens[: last + 1]):
                return len(tokens) - 1 - int(last)
        return len(tokens)

    def _breaks(self, tokens: NDArray[np.int64]) -> bool:
        """Whether a breaker ends with the last of the tokens."""
        for breaker in self._ending.get(int(tokens[-1]), ()):
            if len(breaker) == 1 or tuple(tokens[-len(breaker) :].tolist()) == breaker:
                return True
        return False

    def penalties(self, extra: Sequence[int] = ()) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        """(ids, what is taken from their logits)."""
        tokens = self._history.read(extra)
        since = self._since
        for end in range(len(tokens) - len(extra) + 1, len(tokens) + 1):
            since = 0 if self._breaks(tokens[:end]) else since + 1
        if since < self._allowed or len(tokens) < 2:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        ends, lengths = self._repeats(tokens, min(since, self._longest))
        following = tokens[ends + 1]
        lawful = (following >= 0) & (following < self._vocab_size) & ~np.isin(following, self._single)
        ids, slots = np.unique(following[lawful], return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, slots, lengths[lawful])
        taken = self._multiplier * self._base ** (longest - self._allowed).astype(np.float64)
        return ids, np.minimum(taken, np.finfo(np.float32).max).astype(np.float32)

    def _repeats(self, tokens: NDArray[np.int64], limit: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Earlier places where the last tokens end again: (index of the end, length of the repeat up to ``limit``)
        of all that are at least the allowed length."""
        last = len(tokens) - 1
        ends = np.arange(last)
        found = [(ends, 0)] if self._allowed == 0 else []
        for length in range(1, limit + 1):  # survivors shrink quickly unless the text is one long repeat
            ends = ends[ends >= length - 1]
            ends = ends[tokens[ends - (length - 1)] == tokens[last - (length - 1)]]
            if not len(ends):
                break
            if length >= self._allowed:
                found.append((ends, length))
        if not found:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        return np.concatenate([e for e, _ in found]), np.concatenate([np.full(len(e), n) for e, n in found])


def _edit(x: Any, ids: NDArray[np.int64], change: Callable[[NDArray[Any]], NDArray[Any]]) -> None:
    """Replaces the entries ``ids`` (distinct) of ``x`` by what ``change`` makes of them."""
    if not len(ids):
        return
    where = like(x, ids)
    x[where] = like(x, change(host(x[where])).astype(np.float32, copy=False))


def breakers_of(texts: Sequence[str], vocabulary: Vocabulary) -> tuple[tuple[int, ...], ...]:
    """Token sequences that spell DRY's breakers in a vocabulary.

    A token whose bytes contain a breaker is one; so is a token that ends with the breaker's beginning together
    with the tokens that the tokenizer makes of what is left. One pass over the vocabulary: about 0.1 s for
    150,000 tokens, so keep the answer with the model.
    """
    found: set[tuple[int, ...]] = set()
    wanted = [(text.encode(), text) for text in texts if text]
    tails: dict[str, tuple[int, ...]] = {}
    for token in range(vocabulary.size):
        spelled = vocabulary.token_bytes(token)
        for raw, text in wanted:
            if raw in spelled:
                found.add((token,))
                continue
            for cut in range(1, len(text)):  # at characters, so that the rest is text again
                if spelled.endswith(text[:cut].encode()):
                    rest = text[cut:]
                    if rest not in tails:
                        tails[rest] = tuple(vocabulary.encode(rest, special=False))[:_LONGEST_BREAKER]
                    found.add((token, *tails[rest]))
    return tuple(sorted(found))
