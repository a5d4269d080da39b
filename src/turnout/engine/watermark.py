"""Watermarks of generated text and their detectors: green lists and tournament sampling.

`GreenList` is the scheme of Kirchenbauer et al. (2023, arXiv 2301.10226, and 2306.04634 for the hash of the
candidate itself); `SynthId` is the non-distortionary tournament of Dathathri et al. (2024, Nature 634). Both
give, for the same settings, the green tokens and g-values of Transformers' processors, bit for bit: those are
drawn from torch's generator on the CPU, which is MT19937 with Knuth's seeding, and NumPy's ``RandomState`` is
the same generator with a frozen output. So text marked here is found there and the other way round.

Both ask to be called after grammar, temperature and filters (``after_filters``): a bias that is divided by a
temperature, or a tournament over tokens that are cut away afterwards, marks less than it says.
A watermark says nothing about a text that is short, repeats itself or leaves the sampler no choice.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from turnout.errors import InputError, UsageError

_MULTIPLIER, _WORD = 6364136223846793005, (1 << 64) - 1  # the linear congruential hash of SynthID Text
_TABLE = 1_000_003  # places of the table that selfhash looks tokens up in
_CANDIDATES = 40  # most likely tokens that selfhash tries
_REMEMBERED = 16 << 20  # bytes of green lists kept, by seed


@dataclass(frozen=True, slots=True)
class Detection:
    """What a detector says: ``score`` is in standard deviations above chance, ``p_value`` the probability that
    text written without the key scores at least as high, ``tokens`` the places that counted (repetitions
    count once), ``flagged`` whether ``p_value`` is at most the rate of false alarms that was asked."""

    score: float
    p_value: float
    tokens: int
    flagged: bool


class Watermark(Protocol):
    """A logits processor (`turnout.engine.processors`) with a detector."""

    after_filters: ClassVar[bool]

    def __call__(self, ids: Sequence[int], prompt_length: int, logits: NDArray[Any]) -> NDArray[Any]:
        """Marked logits [vocab]; ``ids`` are prompt and output so far."""
        ...

    def detect(self, ids: Sequence[int], false_alarms: float = 1e-3) -> Detection:
        """Whether a text, without its prompt and special tokens, carries this mark."""
        ...


def watermark(settings: Mapping[str, Any], vocab_size: int) -> Watermark:
    """The watermark that Transformers' ``watermarking_config`` describes; tournament where ``keys`` are named.

    ``vocab_size`` is the width of the logits. Raises ``UsageError`` for a setting that is unknown or out of range.
    """
    kind: type[GreenList] | type[SynthId] = SynthId if "keys" in settings else GreenList
    known = {f.name for f in fields(kind) if f.init} - {"vocab_size"}
    given = {key: value for key, value in settings.items() if not (key == "debug_mode" and value is False)}
    for key in sorted(set(given) - known):
        raise UsageError(f"a watermark has no setting `{key}`", hints=[f"settings: {', '.join(sorted(known))}"])
    try:
        if kind is SynthId:
            return SynthId(**{**given, "keys": tuple(given["keys"])})
        return GreenList(vocab_size, **given)
    except TypeError as error:
        raise UsageError(f"the watermark's settings do not fit: {error}") from None


# ---- green lists ---------------------------------------------------------------------------------


@dataclass
class GreenList:
    """Adds ``bias`` to a pseudo-random ``greenlist_ratio`` of the vocabulary, chosen by the key and the last token.

    ``seeding_scheme`` ``lefthash`` takes the last token alone (``context_width`` says how many tokens must be
    there); ``selfhash`` takes the smallest hash over the window of ``context_width`` tokens that ends with the
    candidate, so each of the 40 most likely tokens has a list of its own.
    """

    after_filters: ClassVar[bool] = True
    vocab_size: int
    greenlist_ratio: float = 0.25
    bias: float = 2.0
    hashing_key: int = 15485863
    seeding_scheme: str = "lefthash"
    context_width: int = 1
    _lists: dict[int, NDArray[np.bool_]] = field(default_factory=dict, init=False, repr=False)
    _table: NDArray[np.int64] | None = field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        _check("greenlist_ratio", self.greenlist_ratio, 0.0 < self.greenlist_ratio < 1.0, "between 0 and 1")
        _check("context_width", self.context_width, self.context_width >= 1, "at least 1")
        _check("vocab_size", self.vocab_size, self.vocab_size >= 2, "at least 2")
        _check("bias", self.bias, math.isfinite(self.bias), "finite")
        known = self.seeding_scheme in ("lefthash", "selfhash")
        _check("seeding_scheme", self.seeding_scheme, known, "lefthash or selfhash")
        self.size = int(self.vocab_size * self.greenlist_ratio)
        _check("greenlist_ratio", self.greenlist_ratio, self.size >= 1, f"1 of {self.vocab_size} tokens or more")

    def __call__(self, ids: Sequence[int], prompt_length: int, logits: NDArray[Any]) -> NDArray[Any]:
        """Logits [vocab] with the bias; prompt and output both seed."""
        return self.apply(logits, ids)

    def apply(self, logits: NDArray[Any], context: Sequence[int]) -> NDArray[Any]:
        """A copy of ``logits`` [vocab] with the bias on what is green after ``context``; unmarked while the
        context is shorter than ``context_width``. Raises ``InputError`` for another vocabulary's logits."""
        if logits.shape != (self.vocab_size,):
            message = f"the watermark is for {self.vocab_size} tokens, the logits have the shape {logits.shape}"
            raise InputError(message, code="option.unsupported")
        marked = logits.copy()
        if len(context) < self.context_width:
            return marked
        if self.seeding_scheme == "lefthash":
            marked[self.greens(context)] += marked.dtype.type(self.bias)
            return marked
        tail = list(context[len(context) - self.context_width + 1 :])
        for candidate in np.argsort(-logits, kind="stable")[:_CANDIDATES].tolist():
            if self.greens([*tail, candidate])[candidate]:
                marked[candidate] += marked.dtype.type(self.bias)
        return marked

    def greens(self, window: Sequence[int]) -> NDArray[np.bool_]:
        """Mask [vocab] of the green tokens; ``window`` ends with the last token of the context (lefthash) or
        with the candidate (selfhash)."""
        seed = self._seed(window[-self.context_width :]) % _WORD
        found = self._lists.pop(seed, None)
        if found is None:
            found = _first_of_permutation(seed, self.vocab_size, self.size)
            if len(self._lists) > _REMEMBERED // self.vocab_size:
                del self._lists[next(iter(self._lists))]
        self._lists[seed] = found  # the last used is the last forgotten
        return found

    def detect(self, ids: Sequence[int], false_alarms: float = 1e-3) -> Detection:
        """Counts green tokens among the distinct windows of a text; the tail of the binomial is exact."""
        own = self.seeding_scheme == "selfhash"
        length = self.context_width + (0 if own else 1)
        windows = {tuple(map(int, ids[i : i + length])) for i in range(len(ids) - length + 1)}
        windows = {w for w in windows if 0 <= w[-1] < self.vocab_size}
        count = len(windows)
        if not count:
            return Detection(0.0, 1.0, 0, False)
        greens = sum(bool(self.greens(w if own else w[:-1])[w[-1]]) for w in windows)
        share = self.size / self.vocab_size
        score = (greens - share * count) / math.sqrt(count * share * (1 - share))
        chance = _binomial_tail(greens, count, share)
        return Detection(score, chance, count, chance <= false_alarms)

    def _seed(self, window: Sequence[int]) -> int:
        if self.seeding_scheme == "lefthash":
            return self.hashing_key * int(window[-1])  # ids may come as 64-bit numbers, which would wrap
        if self._table is None:
            self._table = _permutation(self.hashing_key & _WORD, _TABLE)
        places = [int(self._table[token % _TABLE]) + 1 for token in window]
        # Transformers multiplies 64-bit integers, which wrap; the least is taken of the wrapped ones.
        products = ((self.hashing_key * place * places[-1]) & _WORD for place in places)
        return min(p - (1 << 64) if p >> 63 else p for p in products)


def _draws(seed: int, count: int) -> NDArray[np.int64]:
    """``count`` outputs of MT19937; torch keeps the lower half of a seed, as its 32-bit seeding does."""
    draws = np.random.RandomState(seed & 0xFFFFFFFF).randint(0, 1 << 32, count, dtype=np.uint32)
    return draws.astype(np.int64)


def _origins(targets: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """A shuffle swaps place ``t`` with ``targets[t]`` >= t, in turn. Returns for each place the last earlier
    turn that put something there [size] (-1: none), and for each turn the value its place held before it."""
    turns = np.arange(len(targets))
    last = np.full(size, -1, np.int64)
    moved = targets != turns
    last[targets[moved]] = turns[moved]  # of equal places the last assignment stays
    origin = np.where(last[: len(targets)] >= 0, last[: len(targets)], turns)
    while True:  # follow the chain of turns, doubling the stride
        further = origin[origin]
        if np.array_equal(further, origin):
            return last, origin
        origin = further


def _first_of_permutation(seed: int, size: int, count: int) -> NDArray[np.bool_]:
    """Mask [size] of the first ``count`` numbers of torch's ``randperm(size)`` after ``manual_seed(seed)``."""
    turns = np.arange(count)
    targets = (turns + _draws(seed, count) % (size - turns)).astype(np.int64)
    last, origin = _origins(targets, size)
    rest, tail = np.arange(count, size), last[count:]
    mask = np.ones(size, np.bool_)
    mask[np.where(tail >= 0, origin[tail], rest)] = False
    return mask


def _permutation(seed: int, size: int) -> NDArray[np.int64]:
    """torch's ``randperm(size)`` on the CPU after ``manual_seed(seed)``."""
    turns = np.arange(size)
    targets = (turns + np.append(_draws(seed, size - 1), 0) % (size - turns)).astype(np.int64)
    _, origin = _origins(targets, size)
    order = np.argsort(targets, kind="stable")
    same = targets[order][1:] == targets[order][:-1]
    before = np.full(size, -1, np.int64)
    before[order[1:][same]] = order[:-1][same]
    return np.where(before >= 0, origin[before], targets)


def _binomial_tail(hits: int, count: int, share: float) -> float:
    """P(X >= hits) of a binomial of ``count`` trials."""
    if hits <= 0:
        return 1.0
    lead = math.lgamma(count + 1) - math.lgamma(hits + 1) - math.lgamma(count - hits + 1)
    lead += hits * math.log(share) + (count - hits) * math.log1p(-share)
    more = np.arange(hits, count)
    steps = np.log((count - more) / (more + 1.0)) + math.log(share) - math.log1p(-share)
    logs = lead + np.concatenate(([0.0], np.cumsum(steps)))
    top = float(logs.max())
    return min(1.0, math.exp(top) * float(np.exp(logs - top).sum()))


# ---- tournaments ---------------------------------------------------------------------------------


@dataclass
class SynthId:
    """A tournament of as many rounds as there are ``keys``: each round moves probability from the tokens whose
    g-value is 0 to those where it is 1. On average over keys no token becomes more likely.

    A g-value is a bit of a table of ``sampling_table_size`` places, looked up by the hash of the last
    ``ngram_len`` - 1 output tokens (zeros before the first), the candidate and the key. A context that
    occurred among the last ``context_history_size`` is left unmarked. Computed from the ids alone, so that
    a request that was put back and started again is marked alike.
    """

    after_filters: ClassVar[bool] = True
    ngram_len: int
    keys: tuple[int, ...]
    context_history_size: int = 1024
    sampling_table_seed: int = 0
    sampling_table_size: int = 1 << 16
    skip_first_ngram_calls: bool = False

    def __post_init__(self) -> None:
        _check("ngram_len", self.ngram_len, self.ngram_len >= 2, "at least 2")
        _check("keys", self.keys, len(self.keys) > 0, "at least one key")
        size = self.sampling_table_size
        _check("sampling_table_size", size, 2 <= size <= 1 << 24, "2 to 16777216")
        _check("context_history_size", self.context_history_size, self.context_history_size >= 1, "at least 1")
        self._bits = (_draws(self.sampling_table_seed & _WORD, size) & 1).astype(np.int8)

    def __call__(self, ids: Sequence[int], prompt_length: int, logits: NDArray[Any]) -> NDArray[Any]:
        """Marked log probabilities [vocab]; only the output is context."""
        return self.apply(logits, ids[prompt_length:])

    def apply(self, logits: NDArray[Any], context: Sequence[int]) -> NDArray[Any]:
        """Log probabilities [vocab] of the token after ``context``, the output so far; the logits themselves
        where the context repeats or, with ``skip_first_ngram_calls``, is not full yet. What has no
        probability (-inf) keeps none."""
        calls = len(context) + 1
        if self.skip_first_ngram_calls and calls < self.ngram_len:
            return logits
        hashes = self._contexts(context)
        if (hashes[:-1] == hashes[-1]).any():
            return logits
        likely = np.flatnonzero(logits > -np.inf)
        kept = logits[likely].astype(np.float64)
        probabilities = np.exp(kept - kept.max())
        probabilities /= probabilities.sum()
        grams = _hash(hashes[-1:], likely)
        for key in self.keys:
            bits = self._bits[self._place(grams, key)]
            probabilities *= 1.0 + bits - float(probabilities @ bits)
        marked = np.full_like(logits, -np.inf)
        with np.errstate(divide="ignore"):
            marked[likely] = np.log(probabilities)
        return marked

    def g_values(self, ids: Sequence[int]) -> NDArray[np.int8]:
        """Bits [len(ids) - ngram_len + 1, len(keys)] of a text."""
        return self._bits[self._places(ids)]

    def detect(self, ids: Sequence[int], false_alarms: float = 1e-3) -> Detection:
        """Weighted mean of the g-values against chance, earlier rounds heavier (10 to 1, linear, as in the
        paper), contexts that repeat left out.

        Chance: every place of the table is one draw, however many windows and keys meet there, so the
        variance takes the sum of the weights at a place squared.
        """
        places = self._places(ids)
        places = places[self._fresh(ids)]
        if not len(places):
            return Detection(0.0, 1.0, 0, False)
        weights = np.linspace(10.0, 1.0, len(self.keys))
        share = float(self._bits.mean())
        excess = float(((self._bits[places] - share) * weights).sum())
        loads = np.bincount(places.ravel(), np.broadcast_to(weights, places.shape).ravel())
        spread = math.sqrt(share * (1 - share) * float((loads**2).sum()))
        score = excess / spread if spread else 0.0
        chance = 0.5 * math.erfc(score / math.sqrt(2))
        return Detection(score, chance, len(places), chance <= false_alarms)

    def _contexts(self, output: Sequence[int]) -> NDArray[np.uint64]:
        """Hashes of the contexts of this call, last, and of the earlier ones that are remembered."""
        width = self.ngram_len - 1
        first = width if self.skip_first_ngram_calls else 0
        first = max(first, len(output) - self.context_history_size)
        padded = [0] * width + list(output)
        return self._hashes(padded[first:], width)

    def _hashes(self, ids: Sequence[int], width: int) -> NDArray[np.uint64]:
        windows = np.lib.stride_tricks.sliding_window_view(_words(ids), width)
        hashes = np.ones(len(windows), np.uint64)
        for column in windows.T:
            hashes = _hash(hashes, column)
        return hashes

    def _places(self, ids: Sequence[int]) -> NDArray[np.int64]:
        """Places in the table [len(ids) - ngram_len + 1, len(keys)]."""
        if len(ids) < self.ngram_len:
            return np.empty((0, len(self.keys)), np.int64)
        grams = self._hashes(ids, self.ngram_len)
        return np.stack([self._place(grams, key) for key in self.keys], axis=1)

    def _place(self, grams: NDArray[np.uint64], key: int) -> NDArray[np.int64]:
        hashes = _hash(grams, _words([key]))
        return hashes.view(np.int64) % self.sampling_table_size  # signed, as torch's remainder

    def _fresh(self, ids: Sequence[int]) -> NDArray[np.bool_]:
        """Which windows have a context that the ones remembered before lack."""
        width, seen = self.ngram_len - 1, dict[int, int]()
        fresh = []
        for place, value in enumerate(self._hashes(ids[:-1], width).tolist() if len(ids) > width else []):
            fresh.append(place - seen.get(value, -self.context_history_size - 1) > self.context_history_size)
            seen[value] = place
        return np.array(fresh, np.bool_)


def _words(ids: Sequence[int]) -> NDArray[np.uint64]:
    return np.array([int(i) & _WORD for i in ids], np.uint64)


def _hash(state: NDArray[np.uint64], data: NDArray[Any]) -> NDArray[np.uint64]:
    """One round of the congruential hash modulo 2**64; arrays broadcast."""
    return (state + data.astype(np.uint64)) * np.uint64(_MULTIPLIER) + np.uint64(1)


def _check(name: str, value: Any, holds: bool, wanted: str) -> None:
    if not holds:
        raise UsageError(f"the watermark's `{name}` is {value}, expected {wanted}")
