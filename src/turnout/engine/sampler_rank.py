"""One row of logits in descending order of probability, sorted only as far as somebody asks.

Every filter of the sampler but the typical one keeps a run of that order: top-k, top-p and min-p keep its
beginning, XTC leaves out its first tokens. So a row is a sorted *head* (the few hundred tokens that matter
in practice), the mass of the whole vocabulary, and two numbers: ``skip`` and ``limit``, the mass where the
run begins and ends. Only when a position lies beyond the head is the rest looked at, and then through a
histogram of the weights: one pass finds the bucket that holds the position, and only that bucket is sorted.

Ties are ordered by id, lowest first. The vocabulary-wide passes are written over the array API and run
where the logits are (numpy or torch, any device); the head is a small numpy array.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
from array_api_compat import array_namespace, device, to_device
from numpy.typing import NDArray

from turnout.errors import InputError, NotSupportedError

HEAD = 384  # tokens sorted at first; the nucleus of real text seldom has more
SMALL = 4096  # rows up to this long are sorted whole
Side = Literal["left", "right"]
_BUCKET_BITS = 13  # of a bucket's number: at most 8,192 buckets


def host(array: Any) -> NDArray[Any]:
    """The array as numpy, without a copy where it lies in main memory."""
    if isinstance(array, np.ndarray):
        return array
    return np.from_dlpack(to_device(array, "cpu"))


def like(array: Any, values: NDArray[Any]) -> Any:
    """``values`` as an array of the kind and on the device of ``array``."""
    if isinstance(array, np.ndarray):
        return values
    return array_namespace(array).asarray(values, device=device(array))


def descending(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Positions of ``values`` [n] from the largest to the smallest, equal ones by position.

    A float's bits, flipped so that they count downwards, with the position beneath them: one plain sort of
    integers, several times quicker than a stable sort of indices.
    """
    if len(values) > SMALL and values[0] == values.max() == values.min():
        return np.arange(len(values))
    bits = (values.astype(np.float32, copy=False) + np.float32(0)).view(np.uint32)  # + 0 makes -0.0 equal 0.0
    falling = bits ^ np.where(bits >> 31, np.uint32(0), np.uint32(0x7FFFFFFF))
    keys = (falling.astype(np.uint64) << np.uint64(32)) | np.arange(len(values), dtype=np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFFFFFF)).astype(np.int64)


class Scratch:
    """Buffers of one row's length, kept: fresh memory of that size costs more than what is computed in it."""

    def __init__(self) -> None:
        self._kept: dict[str, NDArray[Any]] = {}

    def take(self, name: str, size: int, dtype: Any) -> NDArray[Any]:
        """The buffer ``name`` [size], whatever it held."""
        kept = self._kept.get(name)
        if kept is None or len(kept) < size:
            kept = self._kept[name] = np.empty(size, dtype)
        return kept[:size]


class Ranked:
    """The tokens of one row that may be drawn, most probable first.

    ``x`` [n] are processed logits (float32, numpy or torch; -inf = not allowed) of the tokens ``ids`` [n], or
    of the whole vocabulary when ``ids`` is None; ``scale`` is 1 / temperature. A token's weight is
    exp((logit - largest) * scale); positions, ``skip`` and ``limit`` are sums of weights. ``scratch`` lends
    its buffers (all but "row") for as long as this object is used.

    Raises ``NotSupportedError`` (``runtime.numeric_mismatch``) for NaN or +inf, ``InputError`` when every
    token is forbidden.
    """

    def __init__(
        self,
        x: Any,
        scale: float = 1.0,
        *,
        ids: NDArray[np.int64] | None = None,
        least: int = HEAD,
        scratch: Scratch | None = None,
    ) -> None:
        self._x = x
        self._names = ids
        self._scale = scale
        self._scratch = scratch or Scratch()
        self._weights: Any = None  # of all tokens, computed when the mass of all is asked
        self._histogram: tuple[NDArray[Any], NDArray[Any], NDArray[Any]] | None = None
        self._total: float | None = None  # mass of all tokens
        self._limit: float | None = None  # None until a filter cuts
        self.skip = 0.0
        self.complete = False  # nothing that can be drawn lies beyond the head
        self._sort(least)

    # The head

    def _sort(self, least: int) -> None:
        """Sorts at least the ``least`` most probable tokens, all that equal the last of them included."""
        n = int(self._x.shape[0])
        rows = min(128, n // (2 * least))
        if n <= SMALL or rows < 2:
            self._set_head(None)
            return
        # The k-th largest of the columns' maxima is at most the k-th largest of all: nothing above it is missed.
        xp = array_namespace(self._x)
        columns = n // rows
        maxima = xp.sort(xp.max(xp.reshape(self._x[: rows * columns], (rows, columns)), axis=0), stable=False)
        top = float(maxima[-1])
        if rows * columns < n:
            rest = float(xp.max(self._x[rows * columns :]))
            top = rest if math.isnan(rest) else max(top, rest)
        check_top(top)
        self.top = top
        floor = float(maxima[columns - least])
        self._set_head(xp.nonzero(self._x >= floor if floor > -math.inf else self._x > floor)[0])
        self.complete = self.complete or floor == -math.inf

    def _set_head(self, chosen: Any) -> None:
        """Sorts the tokens at the positions ``chosen``, or all."""
        values = host(self._x if chosen is None else self._x[chosen])
        if chosen is None:
            self.top = float(values.max()) if len(values) else -math.inf
            check_top(self.top)
        order = descending(values)
        weights = np.exp((values[order].astype(np.float64) - self.top) * self._scale)
        alive = int(np.searchsorted(-weights, 0.0, side="left"))  # after a weight of 0 there are only zeros
        self.complete = chosen is None or alive < len(weights)
        positions = order if chosen is None else host(chosen)[order]
        self._adopt(positions[:alive], weights[:alive])

    def _adopt(self, positions: NDArray[np.int64], weights: NDArray[np.float64]) -> None:
        self.positions, self.weights = positions, weights  # [h] into x, and their weights
        self.cum = np.cumsum(weights)

    def _whole(self) -> None:
        """Sorts everything that is alive, so that the head is all there is."""
        if self.complete:
            return
        limit = self._limit
        self._set_head(None)
        if limit is not None:  # it was summed in another order: the last token must not fall to rounding
            self._cut(min(int(np.searchsorted(self.cum, limit * (1 - 1e-9), side="left")) + 1, len(self.cum)))

    def _cut(self, count: int) -> None:
        """Forgets all but the first ``count`` tokens of the head."""
        self._adopt(self.positions[:count], self.weights[:count])
        self.complete, self._limit = True, None

    @property
    def limit(self) -> float:
        """Mass at which the run ends: that of all tokens until a filter ends it earlier."""
        if self._limit is not None:
            return self._limit
        if self.complete:
            return float(self.cum[-1])
        if self._total is None:
            self._total = self._mass()
        return self._total

    def _mass(self) -> float:
        """Sum of the weights of all tokens: the exact normaliser."""
        x = self._x
        if not isinstance(x, np.ndarray):
            xp = array_namespace(x)
            self._weights = xp.exp((x - self.top) * self._scale)
            return float(xp.sum(self._weights))
        out = self._scratch.take("weights", len(x), np.float32)
        np.subtract(x, np.float32(self.top), out=out)
        if self._scale != 1.0:
            with np.errstate(over="ignore"):  # at a tiny temperature: -inf, a weight of 0
                np.multiply(out, np.float32(self._scale), out=out)
        self._weights = np.exp(out, out=out)
        columns = len(x) // 128  # rows added to each other: quicker than numpy's pairwise sum, as exact here
        body = out[: 128 * columns].reshape(128, columns).sum(axis=0)
        return float(body.sum(dtype=np.float64) + out[128 * columns :].sum(dtype=np.float64))

    # Positions

    def at(self, position: float, *, side: Side = "right") -> tuple[int, float, float]:
        """The token whose share of the mass holds ``position``: (its index in x, mass before, mass after). A
        position on the border between two is the second's, or with ``side`` left the first's."""
        if self.complete or position < self.cum[-1]:
            return _find(self.positions, self.cum, 0.0, position, side)
        bucket, mass, above = self._buckets()
        last = int(np.searchsorted(above, above[-1], side="left"))
        hit = min(int(np.searchsorted(above, position, side=side)), last)
        members = np.flatnonzero(bucket == len(mass) - 1 - hit)
        members = members[descending(host(self._x)[members])]
        cum = np.cumsum(self._all_weights()[members], dtype=np.float64)
        return _find(members, cum, float(above[hit] - mass[len(mass) - 1 - hit]), position, side)

    def _buckets(self) -> tuple[NDArray[Any], NDArray[Any], NDArray[Any]]:
        """(bucket of each token, mass of each bucket, mass of the highest buckets together)."""
        if self._histogram is None:
            weights = self._all_weights()
            bucket, mass = self._fill(weights, weights)
            self._histogram = bucket, mass, np.cumsum(mass[::-1])
        return self._histogram

    def _fill(self, keys: NDArray[np.float32], weights: NDArray[np.float32]) -> tuple[NDArray[Any], NDArray[Any]]:
        """(bucket of each key, sum of the weights of each bucket).

        ``keys`` are not negative, so the bits of their floats count upwards with them; the highest of those bits
        in which the keys differ are the bucket.
        """
        bits = self._scratch.take("bits", len(keys), np.uint32)
        bucket = self._scratch.take("bucket", len(keys), np.intp)
        wide = self._scratch.take("wide", len(keys), np.float64)
        low, high = int(keys.min().view(np.uint32)), int(keys.max().view(np.uint32))
        np.subtract(keys.view(np.uint32), np.uint32(low), out=bits)
        np.right_shift(bits, np.uint32(max(0, (high - low).bit_length() - _BUCKET_BITS)), out=bits)
        np.copyto(bucket, bits)
        np.copyto(wide, weights)
        return bits, np.bincount(bucket, weights=wide)

    def _all_weights(self) -> NDArray[np.float32]:
        """Weights of all tokens [n]."""
        if self._weights is None:
            self._mass()
        return np.ascontiguousarray(host(self._weights), np.float32)

    def _count(self) -> int | None:
        """Tokens of the head that are alive; None when the run ends beyond it."""
        if self._limit is None:
            return len(self.cum) if self.complete else None
        if self._limit > self.cum[-1] and not self.complete:
            return None
        return min(int(np.searchsorted(self.cum, self._limit, side="left")) + 1, len(self.cum))

    def _alive(self) -> NDArray[np.bool_]:
        """Which tokens [n] come before the end of the run."""
        values = host(self._x)
        if self._limit is None:
            return values > -np.inf
        border = self.at(self._limit, side="left")[0]
        alive = values > values[border]
        alive[: border + 1] |= values[: border + 1] == values[border]
        return alive

    # Filters

    def keep_top_k(self, k: int) -> None:
        """The ``k`` most probable tokens stay, exactly ``k``: of equal ones those with the lowest ids."""
        if k > len(self.cum) and not self.complete:
            self._sort(k)
        self._cut(min(k, len(self.cum)))

    def keep_top_p(self, p: float) -> None:
        """The shortest beginning that holds at least the share ``p`` of the mass stays (Holtzman et al. 2020)."""
        self._limit = self.at(p * self.limit, side="left")[2]

    def keep_min_p(self, min_p: float) -> None:
        """Tokens at least ``min_p`` times as probable as the most probable stay (Nguyen et al. 2024)."""
        count = int(np.searchsorted(-self.weights, -min_p, side="right"))
        if count < len(self.weights) or self.complete:
            mass = float(self.cum[count - 1])
            self._limit = mass if self._limit is None else min(mass, self._limit)
            return
        weights = self._all_weights()
        kept = float(weights[weights >= np.float32(min_p)].sum(dtype=np.float64))
        self._limit = kept if self._limit is None else min(kept, self._limit)

    def keep_typical(self, mass: float) -> None:
        """Tokens whose surprise is nearest the entropy stay until they hold ``mass`` (Meister et al. 2023); those
        as near as the last one too."""
        count = self._count()
        if count is None:
            self._keep_typical_of_all(mass)
            return
        self._cut(count)
        share = self.weights / self.cum[-1]
        surprise = -np.log(share)
        distance = np.abs(surprise - float((share * surprise).sum())).astype(np.float32)
        order = descending(-distance)
        reached = int(np.searchsorted(np.cumsum(share[order]), mass, side="left"))
        kept = distance <= distance[order[min(reached, len(order) - 1)]]
        self._adopt(self.positions[kept], self.weights[kept])
        self._limit = None

    def _keep_typical_of_all(self, mass: float) -> None:
        """The same when what is alive does not fit the head: the distances' histogram finds the last one kept."""
        weights, values = self._all_weights(), host(self._x)
        if self._limit is not None:
            weights = np.where(self._alive(), weights, np.float32(0))
        total = float(weights.sum(dtype=np.float64))
        surprise = (self.top - values) * np.float32(self._scale) + np.float32(math.log(total))
        surprise[weights == 0] = 0.0  # -inf logits: their share of the entropy is 0
        distance = np.abs(surprise - np.float32(np.dot(weights.astype(np.float64), surprise) / total))
        distance[weights == 0] = np.inf
        bucket, masses = self._fill(distance, weights)
        reached = np.cumsum(masses)
        hit = int(np.searchsorted(reached, min(mass * total, reached[-1]), side="left"))
        members = np.flatnonzero(bucket == hit)
        members = members[descending(-distance[members])]
        within = np.cumsum(weights[members], dtype=np.float64) + (reached[hit] - masses[hit])
        last = min(int(np.searchsorted(within, mass * total, side="left")), len(members) - 1)
        chosen = np.flatnonzero(distance <= distance[members[last]])
        order = chosen[descending(values[chosen])]
        self._adopt(order, np.exp((values[order].astype(np.float64) - self.top) * self._scale))
        self.complete, self._limit = True, None

    def leave_out_top(self, threshold: float) -> None:
        """XTC: of the tokens with at least ``threshold`` of what is left only the least probable stays."""
        least = threshold * self.limit
        if not self.complete and self.weights[-1] >= least:
            self._whole()
        alive = self._count()
        count = min(int(np.searchsorted(-self.weights, -least, side="right")), alive or len(self.cum))
        if count < 2:
            return
        if alive is None:
            self.skip = float(self.cum[count - 2])
            return
        self._adopt(self.positions[count - 1 : alive], self.weights[count - 1 : alive])
        self.complete, self._limit = True, None

    # Results

    def draw(self, u: float) -> tuple[int, float]:
        """The token at the share ``u`` in [0, 1) of the run, and the natural logarithm of its probability."""
        limit = self.limit
        position = min(self.skip + u * (limit - self.skip), math.nextafter(limit, 0.0))
        index, before, after = self.at(position)
        return self._name(index), math.log(max(after - before, 5e-324) / (limit - self.skip))

    def log_share(self, token_logit: float) -> float:
        """Natural logarithm of the probability of a token with this logit, if nothing is filtered."""
        return (token_logit - self.top) * self._scale - math.log(self.limit)

    def spread(self) -> NDArray[np.float32]:
        """The run as logits [n] of its own distribution: -inf for what is filtered away."""
        count = self._count()
        with np.errstate(over="ignore"):
            row = (host(self._x) - np.float32(self.top)) * np.float32(self._scale)
        if count is None:
            row[~self._alive()] = -np.inf
            row[self.positions[: int(np.searchsorted(self.cum, self.skip, side="right")) if self.skip else 0]] = -np.inf
            return row
        chosen = self.positions[:count]
        kept = np.full(len(row), -np.inf, np.float32)
        kept[chosen] = row[chosen]
        return kept

    def first(self, count: int) -> list[tuple[int, float]]:
        """The ``count`` most probable tokens of the run with the logarithms of their probabilities."""
        begin = int(np.searchsorted(self.cum, self.skip, side="right")) if self.skip else 0
        if begin + count > len(self.cum) and not self.complete:
            limit = self._limit
            self._sort(begin + count)
            self._limit = limit
        alive = self._count()
        end = min(begin + count, len(self.cum) if alive is None else alive)
        logs = np.log(self.weights[begin:end]) - math.log(self.limit - self.skip)
        return [(self._name(int(i)), float(v)) for i, v in zip(self.positions[begin:end], logs, strict=True)]

    def _name(self, index: int) -> int:
        return index if self._names is None else int(self._names[index])


def _find(
    positions: NDArray[np.int64], cum: NDArray[np.float64], before: float, position: float, side: Side
) -> tuple[int, float, float]:
    """The token of a sorted run, which begins at mass ``before``, that holds ``position``; the last with a
    weight when rounding has put the position behind the end."""
    last = int(np.searchsorted(cum, cum[-1], side="left"))
    hit = min(int(np.searchsorted(cum, position - before, side=side)), last)
    return int(positions[hit]), before + (float(cum[hit - 1]) if hit else 0.0), before + float(cum[hit])


def check_top(top: float) -> None:
    """Refuses a row by its largest logit: NaN and +inf are the model's fault, -inf leaves nothing to draw."""
    if math.isnan(top) or top == math.inf:
        raise NotSupportedError(
            f"the model computed `{top}` among the logits of this row",
            code="runtime.numeric_mismatch",
            hints=["another dtype (`--option dtype=float32`) or backend may compute it; `turnout check` compares them"],
        )
    if top == -math.inf:
        raise InputError(
            "no token may follow: grammar, bias, min_tokens and processors together forbid every one",
            hints=["loosen one of them; a grammar that is complete can only end, which min_tokens forbids"],
        )
