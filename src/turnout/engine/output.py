"""What one sequence has said so far: text without broken characters, stop strings, probabilities."""

from __future__ import annotations

import codecs
from collections.abc import Callable

from turnout.engine.executor import Vocabulary
from turnout.engine.request import Event, Finish, TokenLogprob
from turnout.tasks.decoding import UNFINISHED, Stopper
from turnout.types import Sampling

WINDOW = 16  # tokens that are decoded together; more cost time, fewer are moved on more often
PENDING = 8  # tokens: half a character is complete, or is none, by then
HALF = 3  # bytes of a character that is not complete, at most


class Detokenizer:
    """Token ids to text as they come, whole characters only.

    A piece is the difference between two decodings of the same window, because the text of an id may depend
    on those before it. ``decode`` turns ids into text, half a character into U+FFFD; ``token_bytes`` tells at
    the end whether U+FFFD is half a character or what the model wrote.
    """

    def __init__(self, decode: Callable[[list[int]], str], token_bytes: Callable[[int], bytes]) -> None:
        self._decode = decode
        self._token_bytes = token_bytes
        self._window: list[int] = []  # the last ids
        self._read = 0  # of them gave the text `_before`
        self._last = 0  # of them had been read one piece earlier
        self._before = ""

    def feed(self, token: int) -> str:
        """The text that became certain with a token."""
        window = self._window
        window.append(token)
        text = self._decode(window)
        if len(text) <= len(self._before):
            return ""
        if text.endswith(UNFINISHED):
            if len(window) - self._read < PENDING:
                return ""
            text = text[: len(text) - _trailing(text, HALF)]
        piece = text[len(self._before) :]
        self._before, self._last, self._read = text, self._read, len(window)
        if len(window) >= WINDOW:
            del window[: self._last]
            self._read -= self._last
            self._last, self._before = 0, self._decode(window)
        return piece

    def finish(self) -> str:
        """The rest, after the last id: without half a character at its end."""
        if self._read == len(self._window):
            return ""
        text = self._decode(self._window)
        if text.endswith(UNFINISHED):
            decoder = codecs.getincrementaldecoder("utf-8")("replace")
            decoder.decode(b"".join(map(self._token_bytes, self._window[self._read :])))
            half = len(decoder.getstate()[0])
            text = text[: len(text) - _trailing(text, half)]
        return text[len(self._before) :]


def _trailing(text: str, most: int) -> int:
    """How many U+FFFD, at most ``most``, a text ends with."""
    count = 0
    while count < min(most, len(text)) and text[-1 - count] == UNFINISHED:
        count += 1
    return count


class Output:
    """Tokens drawn for one sequence, turned into text as they come.

    ``finish`` is set once. End tokens count as drawn but give no text.
    """

    def __init__(self, sampling: Sampling, vocabulary: Vocabulary, ends: frozenset[int]) -> None:
        self.sampling = sampling
        self.finish: Finish | None = None
        self.stop: str | int | None = None
        self.tokens: list[int] = []
        self.cumulative = 0.0  # sum of the drawn tokens' log probabilities, where they were asked
        self._ends = ends
        skip = sampling.skip_special_tokens
        self._detokenizer = Detokenizer(lambda ids: vocabulary.decode(ids, skip), vocabulary.token_bytes)
        self._stopper = Stopper(sampling.stop) if sampling.stop else None
        self._sent: list[str] = []
        self._text: list[str] = []  # news: what came since the last event
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprob] = []

    def take(self, token: int, logprob: TokenLogprob | None, room: int) -> bool:
        """Takes a drawn token; ``room`` tokens may follow it. Returns whether the sequence goes on."""
        self.tokens.append(token)
        self._tokens.append(token)
        if logprob is not None:
            self._logprobs.append(logprob)
            self.cumulative += logprob.logprob
        if token in self._ends and len(self.tokens) > self.sampling.min_tokens:
            return self.end(Finish.STOP, token)
        piece = self._detokenizer.feed(token)
        if piece:
            self._say(piece)
            if self._stopper is not None and self._stopper.stopped:
                return self.end(Finish.STOP, self._stopper.matched)
        if len(self.tokens) >= self.sampling.max_tokens or room <= 0:
            return self.end(Finish.LENGTH)
        return True

    def end(self, finish: Finish, stop: str | int | None = None) -> bool:
        """Ends the sequence and releases held-back text, in which a stop string may come to light. Always
        False."""
        if self.finish is not None:
            return False
        self.finish, self.stop = finish, stop
        try:
            self._say(self._detokenizer.finish())
        except Exception:  # a vocabulary that cannot spell the last tokens: this may be why the sequence ends
            self._stopper = None
        if self._stopper is None:
            return False
        if self._stopper.stopped:
            if finish is Finish.LENGTH:
                self.finish, self.stop = Finish.STOP, self._stopper.matched
            if self.sampling.include_stop and self._stopper.matched:
                self._pass(self._stopper.matched)
        else:
            self._pass(self._stopper.finish())
        return False

    def _say(self, piece: str) -> None:
        if piece:
            self._pass(piece if self._stopper is None else self._stopper.feed(piece))

    def _pass(self, piece: str) -> None:
        if piece:
            self._sent.append(piece)
            self._text.append(piece)

    @property
    def so_far(self) -> str:
        """Text given out so far."""
        self._sent = ["".join(self._sent)]
        return self._sent[0]

    def event(self, id: str, index: int) -> Event | None:
        """The news as an event, or None when there is none."""
        if not self._tokens and not self._text and self.finish is None:
            return None
        event = Event(id, index, "".join(self._text), self._tokens, finish=self.finish, stop=self.stop)
        if self.sampling.logprobs is not None:
            event.logprobs = self._logprobs
        self._text, self._tokens, self._logprobs = [], [], []
        return event
