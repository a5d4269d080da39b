"""Latency and throughput of generating cases, measured side by side.

The cases of one run stay loaded together and are asked in turns (A B C A B C), so that a slow moment of
the machine falls on all of them. Prompts are random token ids, different in every round, so that no prefix
is found again. Reported are medians with the smallest and largest value; a single number proves nothing.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from turnout.engine.request import Event, GenerationRequest
from turnout.errors import TurnoutError
from turnout.types import Sampling
from turnout.worker.llm import LLM


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked at once: ``streams`` requests of ``prompt`` tokens that draw ``new`` tokens each."""

    streams: int = 1
    prompt: int = 128
    new: int = 64


@dataclass(slots=True)
class Spread:
    """Smallest, middle and largest of the measured values."""

    low: float
    median: float
    high: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        """Spread of at least one value."""
        ordered = sorted(values)
        return Spread(ordered[0], statistics.median(ordered), ordered[-1])


@dataclass(slots=True)
class Speed:
    """One case under one load: seconds to the first token (of the last stream that got one), tokens per
    second while decoding and over all, and seconds per token and stream."""

    name: str
    load: Load
    first_s: Spread
    decode: Spread
    total: Spread
    between_s: Spread


@dataclass(slots=True)
class _Run:
    """Times of one load: ``stamps`` are (second, tokens) of each stream's events, in order."""

    total_s: float
    stamps: list[list[tuple[float, int]]]

    @property
    def first_s(self) -> float:
        """Second of the last stream's first token."""
        return max((stream[0][0] for stream in self.stamps), default=self.total_s)

    @property
    def decode(self) -> float:
        """Tokens per second while all streams decode: what came after the last one's first token. (Streams
        decode while others still read their prompts; those tokens belong to another span.)"""
        first, last = self.first_s, max((stream[-1][0] for stream in self.stamps), default=0.0)
        tokens = sum(count for stream in self.stamps for at, count in stream if at > first)
        return tokens / (last - first) if last > first else 0.0

    @property
    def between_s(self) -> float:
        """Seconds between two tokens of a stream, their mean."""
        gaps = [
            (stream[-1][0] - stream[0][0]) / later
            for stream in self.stamps
            if (later := sum(count for _, count in stream[1:]))
        ]
        return statistics.fmean(gaps) if gaps else 0.0


class _Watch:
    """Hears the tokens of one load."""

    def __init__(self, streams: int) -> None:
        self.started = time.perf_counter()
        self.stamps: dict[str, list[tuple[float, int]]] = {}
        self.error: Event | None = None
        self._open = threading.Semaphore(0)
        self._streams = streams

    def take(self, event: Event) -> None:
        """One event, on the client's thread."""
        if event.tokens:
            stamp = (time.perf_counter() - self.started, len(event.tokens))
            self.stamps.setdefault(event.id, []).append(stamp)
        if event.done:
            self.error = event if event.error else self.error
            self._open.release()

    def wait(self) -> _Run:
        """Waits for all streams. Raises ``TurnoutError`` when one failed."""
        for _ in range(self._streams):
            self._open.acquire()
        if self.error is not None:
            raise TurnoutError(self.error.error, code=self.error.code)
        return _Run(time.perf_counter() - self.started, list(self.stamps.values()))


def run_once(llm: LLM, load: Load, seed: int) -> _Run:
    """One load on one model."""
    rng = random.Random(seed)
    size = llm.capabilities.vocab_size
    prompts = [[rng.randrange(size) for _ in range(load.prompt)] for _ in range(load.streams)]
    watch = _Watch(load.streams)
    sampling = Sampling(max_tokens=load.new, ignore_eos=True)
    asked = [GenerationRequest(uuid.uuid4().hex, prompt, sampling, cache=False) for prompt in prompts]
    try:
        for accepted in [llm.client.start(one, watch.take) for one in asked]:
            accepted.result()
        return watch.wait()
    except BaseException:
        for one in asked:
            llm.client.abandon(one.id)
        raise


@dataclass(slots=True)
class _Series:
    runs: list[_Run] = field(default_factory=list)


def measure(
    models: dict[str, LLM],
    loads: Iterable[Load],
    rounds: int = 5,
    on_progress: Callable[[str], None] | None = None,
) -> list[Speed]:
    """Every model under every load, ``rounds`` times in turns after one round that does not count."""
    results = []
    for load in loads:
        series = {name: _Series() for name in models}
        for number in range(rounds + 1):
            for name, llm in models.items():
                if on_progress is not None:
                    on_progress(f"{name}: {load.streams} streams, round {number} of {rounds}")
                run = run_once(llm, load, seed=1000 * number + load.streams)
                if number:
                    series[name].runs.append(run)
        results += [_speed(name, load, one.runs) for name, one in series.items()]
    return results


def _speed(name: str, load: Load, runs: list[_Run]) -> Speed:
    drawn = load.streams * load.new
    return Speed(
        name,
        load,
        Spread.of(run.first_s for run in runs),
        Spread.of(run.decode for run in runs),
        Spread.of(drawn / run.total_s for run in runs),
        Spread.of(run.between_s for run in runs),
    )
