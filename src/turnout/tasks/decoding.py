"""From logits to text: drawing a token, cutting at stop strings, and a loop for encoder and decoder."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from turnout.errors import InputError, NotSupportedError
from turnout.package.facts import Artifact
from turnout.tasks.adapter import Infer
from turnout.tasks.contract import TextOutput
from turnout.tasks.tokenization import load_tokenizer
from turnout.types import Request, Sampling

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

UNFINISHED = "\N{REPLACEMENT CHARACTER}"  # what half a character decodes to


def generator(seed: int | None) -> np.random.Generator:
    """Source of randomness of one request; ``None`` draws a fresh seed."""
    import numpy as np

    return np.random.default_rng(seed)


def sample(logits: NDArray[Any], sampling: Sampling, rng: np.random.Generator) -> int:
    """Next token id from ``logits`` [vocab]: the largest at temperature 0, else drawn after
    temperature, ``top_k`` and ``top_p`` (Holtzman et al. 2019), in this order."""
    import numpy as np

    scores = np.asarray(logits, dtype=np.float64).reshape(-1)
    if not np.isfinite(scores.max()):
        raise NotSupportedError("the model gave logits that are not finite", code="runtime.numeric_mismatch")
    if sampling.temperature <= 0:
        return int(scores.argmax())
    order = np.argsort(-scores, kind="stable")
    if 0 < sampling.top_k < order.size:
        order = order[: sampling.top_k]
    scaled = scores[order] / sampling.temperature
    weights = np.exp(scaled - scaled[0])
    weights /= weights.sum()
    if sampling.top_p < 1:
        # The smallest set whose mass reaches top_p, never empty.
        kept = int(np.searchsorted(np.cumsum(weights), sampling.top_p)) + 1
        order, weights = order[:kept], weights[:kept] / weights[:kept].sum()
    return int(order[rng.choice(order.size, p=weights)])


def first_stop(text: str, stops: Sequence[str]) -> tuple[int, str] | None:
    """Place and stop string of the first one in ``text``; of several at one place, the longest."""
    found = [(place, -len(stop), stop) for stop in stops if (place := text.find(stop)) >= 0]
    return (min(found)[0], min(found)[2]) if found else None


class Stopper:
    """Cuts a stream of text before the first stop string; holds back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self.stops = tuple(stop for stop in stops if stop)
        self.stopped = False
        self.matched: str | None = None  # the stop string that was met
        self._held = ""

    def feed(self, piece: str) -> str:
        """Text that is sure to belong to the result after ``piece`` came."""
        if self.stopped:
            return ""
        text = self._held + piece
        found = first_stop(text, self.stops)
        if found is not None:
            self.stopped, self._held, self.matched = True, "", found[1]
            return text[: found[0]]
        keep = self._may_begin(text)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def finish(self) -> str:
        """What was held back, when no more text comes."""
        rest, self._held = ("" if self.stopped else self._held), ""
        return rest

    def _may_begin(self, text: str) -> int:
        longest = max((len(stop) for stop in self.stops), default=1) - 1
        for count in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-count:]) for stop in self.stops):
                return count
        return 0


class TextStream:
    """Token ids to text as they come: whole characters only, cut at stop strings.

    ``decode`` turns ids into text without special tokens. Each piece is the difference between two
    decodings of a short window, because the text of an id may depend on the one before it.
    """

    def __init__(
        self, decode: Callable[[list[int]], str], stops: Sequence[str], emit: Callable[[str], None] | None = None
    ) -> None:
        self.ids: list[int] = []
        self._decode = decode
        self._stopper = Stopper(stops)
        self._emit = emit
        self._sent = ""
        self._context = 0  # ids in [_context, _read) were sent and give the next piece its context
        self._read = 0

    def feed(self, token: int) -> bool:
        """Takes one id; returns whether generation should go on."""
        self.ids.append(token)
        before = self._decode(self.ids[self._context : self._read])
        text = self._decode(self.ids[self._context :])
        if len(text) > len(before) and not text.endswith(UNFINISHED):
            self._pass(self._stopper.feed(text[len(before) :]))
            self._context, self._read = self._read, len(self.ids)
        return not self._stopper.stopped

    def finish(self) -> str:
        """The whole text, after the last id: all ids decoded at once, cut at the first stop string."""
        text = self._decode(self.ids)
        found = first_stop(text, self._stopper.stops)
        text = text[: found[0]] if found else text
        if text.startswith(self._sent):
            self._pass(text[len(self._sent) :])
        return text

    @property
    def stopped(self) -> bool:
        """Whether a stop string was met."""
        return self._stopper.stopped

    @property
    def matched(self) -> str | None:
        """The stop string that was met."""
        return self._stopper.matched

    @property
    def sent(self) -> str:
        """Text passed on so far."""
        return self._sent

    def _pass(self, piece: str) -> None:
        if piece:
            self._sent += piece
            if self._emit is not None:
                self._emit(piece)


class Seq2SeqGenerator:
    """Greedy or sampled text of an encoder and a decoder graph that keep no cache.

    Encoder: ``input_ids``, ``attention_mask`` int64 [1, tokens] to ``last_hidden_state``; decoder:
    ``input_ids`` [1, generated], ``encoder_hidden_states``, ``encoder_attention_mask`` to ``logits``
    [1, generated, vocab]. The first decoder id and the end come from the package's generation
    settings, else T5's 0 and 1 (Raffel et al. 2019).
    """

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self.tokenizer = load_tokenizer(root, artifact, options)
        self.limit = int(options.get("max_length") or 0)
        self.start_id, self.eos_ids = _generation_ids(artifact)

    def generate(
        self, request: Request, encode: Infer, decode: Infer, emit: Callable[[str], None] | None = None
    ) -> TextOutput:
        """Text for the request's ``text``. Raises ``InputError`` for a text without tokens."""
        import numpy as np

        ids = self.tokenizer.encode(str(request.inputs["text"])).ids
        if not ids:
            raise InputError("the text gives no tokens")
        if self.limit and len(ids) > self.limit:
            ids = [*ids[: self.limit - 1], ids[-1]]  # the last id ends the text
        mask = np.ones((1, len(ids)), np.int64)
        encoded = encode({"input_ids": np.array([ids], np.int64), "attention_mask": mask})
        hidden = encoded.get("last_hidden_state", next(iter(encoded.values())))
        rng = generator(request.sampling.seed)
        stream = TextStream(self._text, request.sampling.stop, emit)
        generated = [self.start_id]
        reason = "length"
        for _ in range(request.sampling.max_tokens):
            inputs = {
                "input_ids": np.array([generated], np.int64),
                "encoder_hidden_states": hidden,
                "encoder_attention_mask": mask,
            }
            outputs = decode(inputs)
            logits = outputs.get("logits", next(iter(outputs.values())))
            token = sample(logits[0, -1], request.sampling, rng)
            if token in self.eos_ids:
                reason = "stop"
                break
            generated.append(token)
            if not stream.feed(token):
                reason = "stop"
                break
        return TextOutput(stream.finish(), reason, len(ids), len(generated) - 1)

    def _text(self, ids: list[int]) -> str:
        text: str = self.tokenizer.decode(ids, skip_special_tokens=True)
        return text


def _generation_ids(artifact: Artifact) -> tuple[int, frozenset[int]]:
    config = artifact.architecture.config if artifact.architecture else {}
    start = artifact.generation.decoder_start_id if artifact.generation else None
    if start is None:
        start = config.get("decoder_start_token_id")
    eos = list(artifact.generation.eos_ids) if artifact.generation else []
    if not eos:
        stored = config.get("eos_token_id")
        eos = stored if isinstance(stored, list) else [stored] if isinstance(stored, int) else []
    if not eos and artifact.tokenizer is not None:
        eos = list(artifact.tokenizer.eos_ids)
    return (start if isinstance(start, int) else 0), frozenset(eos or [1])
