"""Driving an engine in tests: requests at chosen steps, everything collected, the cache proven at the end."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from tests.engine.tiny import TinyExecutor, TinyVocabulary

from turnout.engine.core import Engine, EngineConfig
from turnout.engine.request import Event, Finish, GenerationRequest, Usage
from turnout.types import Sampling

MAX_STEPS = 20_000


@dataclass
class Heard:
    """All that was heard of one sequence."""

    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[object] = field(default_factory=list)
    finish: Finish | None = None
    stop: str | int | None = None


@dataclass
class Answer:
    """All that was heard of one request."""

    sequences: dict[int, Heard] = field(default_factory=dict)
    usage: Usage | None = None
    error: str = ""
    code: str = ""
    prompt_logprobs: list[object] | None = None
    done: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.sequences[0].tokens

    @property
    def text(self) -> str:
        return self.sequences[0].text

    @property
    def finish(self) -> Finish | None:
        return self.sequences[0].finish

    def take(self, event: Event) -> None:
        assert not self.done, f"an event after the last one of {event.id}"
        heard = self.sequences.setdefault(event.index, Heard())
        assert heard.finish is None, f"an event after the end of {event.id}/{event.index}"
        heard.text += event.text
        heard.tokens += event.tokens
        heard.logprobs += event.logprobs or []
        if event.finish is not None:
            heard.finish, heard.stop = event.finish, event.stop
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.error, self.code = event.error or self.error, event.code or self.code
        self.usage = event.usage or self.usage
        self.done = event.done


def engine(executor: TinyExecutor | None = None, **settings: object) -> Engine:
    """An engine over the tiny model; ``settings`` are the configuration's and the engine's own."""
    own = {name: settings.pop(name) for name in ("proposer", "watermarks", "adapters") if name in settings}
    return Engine(executor or TinyExecutor(), TinyVocabulary(), EngineConfig(**settings), **own)  # type: ignore[arg-type]


def request(id: str, prompt: Iterable[int], max_tokens: int = 8, **more: object) -> GenerationRequest:
    """A request; sampling fields and request fields alike in ``more``."""
    fields = {name: more.pop(name) for name in list(more) if name in Sampling.__dataclass_fields__}
    return GenerationRequest(id, list(prompt), Sampling(max_tokens=max_tokens, **fields), **more)  # type: ignore[arg-type]


def drive(
    engine: Engine,
    requests: Iterable[GenerationRequest],
    arrivals: Iterable[int] | None = None,
    cancels: dict[str, int] | None = None,
    idle: bool = True,
) -> dict[str, Answer]:
    """Adds each request at its step, steps until nothing is left, proves that nothing leaked."""
    asked = list(requests)
    steps = list(arrivals) if arrivals is not None else [0] * len(asked)
    answers = {r.id: Answer() for r in asked}
    number = 0
    while True:
        for r, at in zip(asked, steps, strict=True):
            if at == number:
                engine.add(r)
        for id, at in (cancels or {}).items():
            if at == number:
                engine.cancel(id)
        for event in engine.step(float(number)):
            answers[event.id].take(event)
        number += 1
        if number > max(steps, default=0) and not engine.has_work:
            break
        assert number < MAX_STEPS, "the engine does not come to an end"
    assert all(answer.done for answer in answers.values())
    if idle:
        engine.check_idle()
    if isinstance(engine.executor, TinyExecutor):
        assert not engine.executor.broken, engine.executor.broken
        engine.cache.clear()
        assert engine.executor.idle(), "slots were left full"
    return answers
