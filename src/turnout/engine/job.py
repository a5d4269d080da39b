"""A request in work: its sequences, what they share, and what it cost so far."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnout.engine.grammar import Matcher
from turnout.engine.output import Output
from turnout.engine.processors import LogitsProcessor, StoppingCriterion
from turnout.engine.request import Event, Finish, GenerationRequest, TokenLogprob, Usage
from turnout.engine.sampler import SamplerState
from turnout.engine.scheduler import Sequence
from turnout.errors import TurnoutError


@dataclass(slots=True)
class Prepared:
    """A request that was found good: what its sequences share."""

    request: GenerationRequest
    seeds: list[int]
    limit: int  # tokens of a sequence at most
    ends: frozenset[int]
    matcher: Matcher | None
    processors: list[LogitsProcessor]
    criteria: list[StoppingCriterion]
    breakers: tuple[tuple[int, ...], ...]  # DRY's, as token ids


@dataclass(slots=True)
class Live:
    """One running or waiting sequence with all that hangs on it."""

    sequence: Sequence
    output: Output
    state: SamplerState
    matcher: Matcher | None
    job: Job
    index: int
    closed: bool = False  # told its end


@dataclass(slots=True)
class Job:
    """One request with its sequences."""

    prepared: Prepared
    lives: list[Live] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    open: int = 0
    prompt_logprobs: list[TokenLogprob | None] | None = None
    held: list[Event] = field(default_factory=list)  # of best_of, until the best are known

    @property
    def request(self) -> GenerationRequest:
        """What was asked."""
        return self.prepared.request


@dataclass(slots=True)
class Stats:
    """The engine's counters: gauges of now, and totals since the start."""

    running: int = 0
    waiting: int = 0
    cache_usage: float = 0.0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0
    steps: int = 0
    step_tokens: int = 0


def told(error: Exception) -> tuple[str, str]:
    """Message and code of an exception, a library's own included."""
    if isinstance(error, TurnoutError):
        return error.message, error.code
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}", "runtime.failed"


def best_events(job: Job) -> list[Event]:
    """Events of the ``n`` most likely sequences (mean log probability per token), renumbered from 0. Those that
    came to their own end go before those that were cut short, those with no token go last."""

    def merit(live: Live) -> tuple[bool, bool, float]:
        output = live.output
        whole = output.finish in (Finish.STOP, Finish.LENGTH)
        return (not whole, not output.tokens, -output.cumulative / max(1, len(output.tokens)))

    ranked = sorted(job.lives, key=merit)
    events = []
    for rank, live in enumerate(ranked[: job.request.sampling.n]):
        mine = [event for event in job.held if event.index == live.index]
        merged = Event(job.request.id, rank, "".join(e.text for e in mine), [t for e in mine for t in e.tokens])
        merged.finish, merged.stop = live.output.finish, live.output.stop
        if job.request.sampling.logprobs is not None:
            merged.logprobs = [value for e in mine for value in e.logprobs or []]
        merged.prompt_logprobs = next((e.prompt_logprobs for e in job.held if e.prompt_logprobs is not None), None)
        events.append(merged)
    return events
