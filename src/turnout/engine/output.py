"""What one sequence has said so far: text without broken characters, stop strings, probabilities."""

from __future__ import annotations

from dataclasses import dataclass, field

from turnout.engine.executor import Vocabulary
from turnout.engine.request import Event, Finish, TokenLogprob
from turnout.tasks.decoding import TextStream
from turnout.types import Sampling


@dataclass(slots=True)
class News:
    """What came since the last event of a sequence."""

    text: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)


class Output:
    """Tokens drawn for one sequence, turned into text as they come.

    ``finish`` is set once; ``text`` is then the whole text. End tokens count as drawn but give no text.
    """

    def __init__(self, sampling: Sampling, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        self.sampling = sampling
        self.finish: Finish | None = None
        self.stop: str | int | None = None
        self.text = ""
        self.tokens: list[int] = []
        self.cumulative = 0.0  # sum of the drawn tokens' log probabilities, where they were asked
        self.news = News()
        self._ends = ends
        self._stream = TextStream(
            lambda ids: vocabulary.decode(ids, sampling.skip_special_tokens), sampling.stop, self.news.text.append
        )

    def take(self, token: int, logprob: TokenLogprob | None, room: int) -> bool:
        """Takes a drawn token; ``room`` tokens may follow it. Returns whether the sequence goes on."""
        self.tokens.append(token)
        self.news.tokens.append(token)
        if logprob is not None:
            self.news.logprobs.append(logprob)
            self.cumulative += logprob.logprob
        if token in self._ends and len(self.tokens) > self.sampling.min_tokens:
            return self.end(Finish.STOP, token)
        goes_on = self._stream.feed(token)
        if not goes_on:
            matched = self._stream.matched or ""
            return self.end(Finish.STOP, matched, matched if self.sampling.include_stop else "")
        if len(self.tokens) >= self.sampling.max_tokens or room <= 0:
            return self.end(Finish.LENGTH)
        return True

    def end(self, finish: Finish, stop: str | int | None = None, tail: str = "") -> bool:
        """Ends the sequence and releases held-back text. Always False."""
        if self.finish is None:
            self.finish, self.stop = finish, stop
            self.text = self._stream.finish() + tail
            if tail:
                self.news.text.append(tail)
        return False

    @property
    def so_far(self) -> str:
        """Text given out so far."""
        return self._stream.sent

    def event(self, id: str, index: int) -> Event | None:
        """The news as an event, or None when there is none."""
        news = self.news
        if not news.tokens and not news.text and self.finish is None:
            return None
        event = Event(id, index, "".join(news.text), list(news.tokens), finish=self.finish, stop=self.stop)
        if self.sampling.logprobs is not None:
            event.logprobs = list(news.logprobs)
        news.text.clear()
        news.tokens.clear()
        news.logprobs.clear()
        return event
