"""From logits to tokens, the same for every executor.

The order of one row: logit bias, penalties (repetition, presence, frequency, DRY), ``min_tokens``, custom
processors and watermark, grammar mask, temperature, top-k, top-p, min-p, typical, XTC, draw.

The draw uses one uniform number per position of the output, made by a counter from the seed and the position
and nothing else, and takes the token at that share of the distribution sorted by probability. So the text of
a seed depends on its own logits only: not on the batch around it, on preemption, on drafts.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device
from numpy.typing import NDArray

from turnout.engine.penalties import History, Penalties
from turnout.engine.processors import LogitsProcessor, process
from turnout.engine.request import TokenLogprob
from turnout.engine.sampler_limits import validate
from turnout.engine.sampler_rank import HEAD, Ranked, Scratch, check_top, host, like
from turnout.errors import NotSupportedError, TurnoutError
from turnout.types import Sampling

__all__ = ["Drawn", "SampleRow", "Sampler", "SamplerState", "validate"]

COLDEST = 1e-5  # a lower temperature is greedy: float32 cannot tell it from 0
_FEW = 4096  # a mask that allows no more tokens than this is a list of them


class SamplerState:
    """What one sequence brings to its next draw. Cheap to extend; ``output`` are the tokens so far.

    ``eos_ids`` end a text (``ignore_eos`` in the sampling parameters makes them plain tokens), ``breakers`` are
    DRY's as token ids (``penalties.breakers_of``), ``processors`` change its logits, those with ``after_filters``
    at the very end.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        prompt: Sequence[int],
        vocab_size: int,
        *,
        eos_ids: frozenset[int] = frozenset(),
        breakers: Sequence[Sequence[int]] = (),
        processors: Sequence[LogitsProcessor] = (),
    ) -> None:
        self.sampling = sampling
        self.seed = seed
        self.prompt_length = len(prompt)
        self.late = tuple(p for p in processors if getattr(p, "after_filters", False))
        self.processors = tuple(p for p in processors if not getattr(p, "after_filters", False))
        self.output: list[int] = []
        self.penalties = Penalties(sampling, prompt, vocab_size, breakers)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_ids)}
        self.ends = np.array(sorted(t for t in ends if 0 <= t < vocab_size), np.int64)
        self.greedy = sampling.temperature < COLDEST
        self._history = History(prompt) if processors else None
        self._generator = np.random.Philox(key=seed % 2**64)
        self._counter = self._generator.state

    def append(self, token: int) -> None:
        """A token has become part of the output."""
        self.output.append(token)
        if self.penalties.active:
            self.penalties.append(token)
        if self._history is not None:
            self._history.add(token)

    def ids(self, extra: Sequence[int] = ()) -> NDArray[np.int64]:
        """Prompt, output and ``extra`` as one array, for processors; only when there are processors."""
        return np.empty(0, np.int64) if self._history is None else self._history.read(extra)

    def too_short(self, extra: Sequence[int] = ()) -> bool:
        """Whether ``min_tokens`` still forbids the end."""
        return len(self.output) + len(extra) < self.sampling.min_tokens and len(self.ends) > 0

    def untouched(self, extra: Sequence[int] = ()) -> bool:
        """Whether nothing changes the model's logits before the grammar."""
        return not (self.penalties.active or self.processors or self.late or self.too_short(extra))

    def uniform(self, position: int, stream: int = 0) -> float:
        """The number in [0, 1) of an output position; ``stream`` 0 draws, 1 is XTC's coin.

        Philox 4x64 (Salmon et al. 2011) with the seed as key and (position, stream) as counter.
        """
        counter = self._counter["state"]["counter"]
        counter[:] = (position, stream, 0, 0)
        self._counter["buffer_pos"] = 4  # nothing of an earlier block is left to hand out
        self._generator.state = self._counter
        return float((int(self._generator.random_raw()) >> 11) * 2.0**-53)


@dataclass(slots=True)
class SampleRow:
    """One row of logits to draw from: the token after ``state``'s output and ``extra``.

    ``extra`` are draft tokens that precede this row and are not yet part of the output. ``mask`` is the
    grammar's, packed as llguidance does: bit ``t % 32`` of word ``t // 32`` is 1 when token ``t`` is allowed;
    tokens beyond its end are not.
    """

    state: SamplerState
    extra: tuple[int, ...] = ()
    mask: NDArray[np.uint32] | None = None


@dataclass(slots=True)
class Drawn:
    """A drawn token, or what is wrong with this row alone: then ``token`` is -1, ``error`` says what happened
    and ``code`` names it (``runtime.numeric_mismatch`` for logits that are no numbers)."""

    token: int
    logprob: TokenLogprob | None = None
    error: str = ""
    code: str = ""


class Sampler:
    """Draws tokens for rows of logits. One thread; keeps a buffer of one row.

    ``vocab_size`` tokens can be drawn; wider logits are padding. Logits in main memory are read as numpy,
    which is quicker there; ``on_host`` False keeps torch tensors in torch, as on a device.
    """

    def __init__(self, vocab_size: int, *, on_host: bool = True) -> None:
        self.vocab_size = vocab_size
        self._on_host = on_host
        self._scratch = Scratch()

    def sample(self, logits: Any, rows: Sequence[SampleRow]) -> list[Drawn]:
        """One token per row of ``logits`` [len(rows), >= vocab_size], which stay as they are.

        What is wrong with a row is said in its ``Drawn``; the others are drawn all the same.
        """
        logits = self._settled(logits, len(rows))
        plain = [r.mask is None and r.state.greedy and r.state.untouched(r.extra) for r in rows]
        best: NDArray[Any] | None = None
        if all(plain) and len(rows) > 1:
            xp = array_namespace(logits)
            best = host(xp.argmax(logits, axis=1))
        drawn = []
        for index, row in enumerate(rows):
            try:
                if plain[index]:
                    drawn.append(self._greedy(logits[index], row, None if best is None else int(best[index])))
                else:
                    drawn.append(self._one(logits[index], row))
            except TurnoutError as error:
                drawn.append(Drawn(-1, error=error.message, code=error.code))
        return drawn

    def logprobs_of(self, logits: Any, tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """Probabilities that the model itself gave to ``tokens`` [n], from ``logits`` [n, >= vocab_size], each with
        the ``top`` most likely tokens. Raises ``NotSupportedError`` for logits that are no numbers."""
        logits = self._settled(logits, len(tokens))
        return [self._model_logprob(logits[i], int(token), top) for i, token in enumerate(tokens)]

    # Rows

    def _greedy(self, x: Any, row: SampleRow, token: int | None) -> Drawn:
        """The most likely token of a row that nothing changes."""
        if token is None:
            token = int(x.argmax())
        check_top(float(x[token]))
        asked = row.state.sampling.logprobs
        return Drawn(token, None if asked is None else self._model_logprob(x, token, asked))

    def _one(self, x: Any, row: SampleRow) -> Drawn:
        """A row that is processed, drawn by chance, or both."""
        sampling = row.state.sampling
        processed = self._processed(x, row)
        processed, ids = self._allowed(processed, row.mask)
        if row.state.late and row.state.greedy:
            processed, ids = self._marked(self._dense(processed, ids), row), None
        asked = sampling.logprobs
        after = asked if sampling.logprobs_after else None
        if row.state.greedy:
            index = int(processed.argmax())
            check_top(float(processed[index]))
            token = index if ids is None else int(ids[index])
            if after is not None:
                run = Ranked(processed, ids=ids, least=max(after, 1), scratch=self._scratch)
                return Drawn(token, TokenLogprob(token, run.log_share(float(processed[index])), run.first(after)))
            return Drawn(token, None if asked is None else self._model_logprob(x, token, asked))
        run = self._filtered(processed, ids, row)
        if row.state.late:
            run = Ranked(self._marked(self._dense(run.spread(), ids), row), scratch=self._scratch)
        token, logprob = run.draw(row.state.uniform(len(row.state.output) + len(row.extra)))
        if after is not None:
            return Drawn(token, TokenLogprob(token, logprob, run.first(after)))
        return Drawn(token, None if asked is None else self._model_logprob(x, token, asked))

    def _processed(self, x: Any, row: SampleRow) -> Any:
        """Bias, penalties, min_tokens and custom processors, on a copy when there is anything to do."""
        state = row.state
        if state.untouched(row.extra):
            return x
        if isinstance(x, np.ndarray):
            row_of_ours = self._scratch.take("row", len(x), np.float32)
            np.copyto(row_of_ours, x)
            x = row_of_ours
        else:
            x = array_namespace(x).asarray(x, copy=True)
        if state.penalties.active:
            state.penalties.apply(x, row.extra)
        if state.too_short(row.extra):
            x[like(x, state.ends)] = -math.inf
        if state.processors:
            check_number(x)
            values = host(x)
            ids = state.ids(row.extra)
            for processor in state.processors:
                values = process(processor, ids, state.prompt_length, values)
            x = like(x, values)
        return x

    def _marked(self, values: NDArray[np.float32], row: SampleRow) -> NDArray[np.float32]:
        """Logits [vocab] after the processors that come last."""
        ids = row.state.ids(row.extra)
        for processor in row.state.late:
            values = process(processor, ids, row.state.prompt_length, values)
        return values

    def _dense(self, values: Any, ids: NDArray[np.int64] | None) -> NDArray[np.float32]:
        """A row over the whole vocabulary that may be written."""
        if ids is None:
            return np.array(host(values))
        row = np.full(self.vocab_size, -np.inf, np.float32)
        row[ids] = host(values)
        return row

    def _allowed(self, x: Any, mask: NDArray[np.uint32] | None) -> tuple[Any, NDArray[np.int64] | None]:
        """The row under a grammar's mask: with -inf where it forbids, or, when it allows few, their logits and ids."""
        if mask is None:
            return x, None
        check_number(x)
        packed = np.ascontiguousarray(mask, dtype="<u4").view(np.uint8)
        bits = np.unpackbits(packed, bitorder="little", count=self.vocab_size).view(np.bool_)
        if np.count_nonzero(bits) <= _FEW:
            ids = np.flatnonzero(bits)
            if not len(ids):
                check_top(-math.inf)
            return host(x[like(x, ids)]), ids
        return array_namespace(x).where(like(x, bits), x, like(x, np.array(-np.inf, np.float32))), None

    def _filtered(self, x: Any, ids: NDArray[np.int64] | None, row: SampleRow) -> Ranked:
        """Temperature and the filters behind it."""
        sampling = row.state.sampling
        least = min(sampling.top_k, self.vocab_size) if sampling.top_k else HEAD
        run = Ranked(x, 1.0 / sampling.temperature, ids=ids, least=least, scratch=self._scratch)
        if sampling.top_k:
            run.keep_top_k(sampling.top_k)
        if sampling.top_p < 1.0:
            run.keep_top_p(sampling.top_p)
        if sampling.min_p > 0.0:
            run.keep_min_p(sampling.min_p)
        if sampling.typical_p < 1.0:
            run.keep_typical(sampling.typical_p)
        if sampling.xtc_probability > 0.0:
            position = len(row.state.output) + len(row.extra)
            if row.state.uniform(position, stream=1) < sampling.xtc_probability:
                run.leave_out_top(sampling.xtc_threshold)
        return run

    def _model_logprob(self, x: Any, token: int, top: int) -> TokenLogprob:
        """Probability of a token before any processing, with the ``top`` most likely tokens."""
        run = Ranked(x, least=max(top, 1), scratch=self._scratch)
        return TokenLogprob(token, run.log_share(float(x[token])), run.first(top))

    def _settled(self, logits: Any, count: int) -> Any:
        """Logits as float32 [count, vocab_size]. Raises ``NotSupportedError`` when they are of another shape."""
        if logits.ndim != 2 or logits.shape[0] != count or logits.shape[1] < self.vocab_size:
            raise NotSupportedError(
                f"logits are {tuple(logits.shape)}, expected ({count}, at least {self.vocab_size})",
                code="graph.io_mismatch",
                hints=["the executor's vocab_size does not fit the model; `turnout inspect` names both"],
            )
        if self._on_host and not isinstance(logits, np.ndarray) and str(device(logits)) == "cpu":
            logits = logits.detach()
            logits = host(logits.float() if str(logits.dtype) != "torch.float32" else logits)
        xp = array_namespace(logits)
        if logits.dtype != xp.float32:
            logits = xp.astype(logits, xp.float32)
        return logits[:, : self.vocab_size]


def check_number(x: Any) -> None:
    """Refuses a row with NaN or +inf before a mask can hide it."""
    top = float(array_namespace(x).max(x))
    if top != -math.inf:
        check_top(top)
