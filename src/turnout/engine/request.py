"""What the engine is asked and what it answers: plain data, ready to cross a process boundary."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from turnout.types import Sampling


class Finish(StrEnum):
    """Why a sequence ended."""

    STOP = "stop"  # an end token, a stop string, a stopping criterion, or a grammar that is complete
    LENGTH = "length"  # max_tokens, or the context is full
    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    ERROR = "error"


@dataclass(slots=True)
class GenerationRequest:
    """One request: token ids in, text and ids out.

    ``prompt`` are the decoder's tokens (for encoder-decoder models the encoder's tokens are in ``encoder``
    and ``prompt`` holds the decoder's start). ``priority``: lower runs first. ``deadline`` is on the
    engine's clock, in seconds. ``salt`` keeps tenants apart in the prefix cache; ``digests`` name images
    or audio that the prompt's placeholder tokens stand for.
    """

    id: str
    prompt: list[int]
    sampling: Sampling = Sampling()
    encoder: list[int] | None = None
    adapter: str | None = None
    priority: int = 0
    deadline: float | None = None
    salt: str = ""
    digests: tuple[str, ...] = ()
    speculate: bool = True
    cache: bool = True  # may read and leave cached prefixes


@dataclass(slots=True)
class TokenLogprob:
    """Natural-log probability of a token with its ``top`` alternatives, most likely first."""

    token: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Usage:
    """Tokens of one request: ``cached`` of the prompt's came from the prefix cache; ``drafted`` were proposed
    and ``accepted`` of them kept."""

    prompt: int = 0
    completion: int = 0
    cached: int = 0
    drafted: int = 0
    accepted: int = 0
    preempted: int = 0  # times the request was put back


@dataclass(slots=True)
class Event:
    """News of one sequence of a request. ``text`` is what became certain since the last event.

    ``index`` counts a request's sequences (``n``). The last event of a sequence carries ``finish``, the
    last of a request also ``usage``; after it nothing follows. An error ends the whole request.
    """

    id: str
    index: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob | None] | None = None
    finish: Finish | None = None
    stop: str | int | None = None  # the stop string or token that ended it
    error: str = ""
    code: str = ""
    usage: Usage | None = None
    done: bool = False  # nothing more comes for this request
