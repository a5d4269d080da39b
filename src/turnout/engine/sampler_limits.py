"""What sampling parameters may be. A value outside is refused by name, with its range and the way out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from turnout.errors import InputError
from turnout.types import Sampling

MAX_LOGPROBS = 1024
MAX_SEQUENCES = 1024
MAX_STOPS = 256
_OFF = "{default:g} switches it off"
# Field to (lowest, highest, whether the lowest itself is allowed, way out).
_REALS: dict[str, tuple[float, float, bool, str]] = {
    "temperature": (0.0, math.inf, True, "0 is greedy, 1 the model's own distribution"),
    "top_p": (0.0, 1.0, False, _OFF + "; `temperature` 0 or `top_k` 1 takes the most likely token"),
    "min_p": (0.0, 1.0, True, _OFF),
    "typical_p": (0.0, 1.0, False, _OFF),
    "xtc_probability": (0.0, 1.0, True, _OFF),
    "xtc_threshold": (0.0, 1.0, True, "above 0.5 it never matters"),
    "repetition_penalty": (0.0, math.inf, False, _OFF + "; above it discourages repetition"),
    "presence_penalty": (-2.0, 2.0, True, _OFF + "; above it discourages repetition"),
    "frequency_penalty": (-2.0, 2.0, True, _OFF + "; above it discourages repetition"),
    "dry_multiplier": (0.0, math.inf, True, _OFF),
    "dry_base": (1.0, math.inf, True, "{default:g} is usual"),
}
# Field to (lowest, highest or None for the vocabulary's size, whether it may be left out, way out).
_WHOLES: dict[str, tuple[int, int | None, bool, str]] = {
    "max_tokens": (0, 2**31 - 1, False, "{default} unless given"),
    "top_k": (0, 2**31 - 1, False, "0 switches it off"),
    "min_tokens": (0, 2**31 - 1, False, "0 switches it off"),
    "dry_allowed_length": (0, 2**31 - 1, False, "{default} is usual"),
    "n": (1, MAX_SEQUENCES, False, "send more requests for more sequences"),
    "best_of": (1, MAX_SEQUENCES, True, "leave it out to draw `n`"),
    "logprobs": (0, None, True, "leave it out for none; 0 gives the drawn token's own"),
    "prompt_logprobs": (0, None, True, "leave it out for none; 0 gives the prompt tokens' own"),
    "seed": (-(2**63), 2**64 - 1, True, "leave it out for a random one"),
}


def validate(sampling: Sampling, vocab_size: int) -> None:
    """Raises ``InputError`` (``option.unsupported``) with every value that cannot be honoured, its range and the
    way out. ``vocab_size`` bounds token ids."""
    problems = [
        *(p for name, rule in _REALS.items() for p in _real(sampling, name, *rule)),
        *(p for name, rule in _WHOLES.items() for p in _whole(sampling, vocab_size, name, *rule)),
    ]
    if not problems:  # what follows compares values that are numbers by now
        problems += [*_related(sampling), *_tokens(sampling, vocab_size), *_texts(sampling)]
    if problems:
        raise InputError("; ".join(message for message, _ in problems), hints=[hint for _, hint in problems])


Problem = tuple[str, str]


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _real(sampling: Sampling, name: str, low: float, high: float, closed: bool, way: str) -> Iterator[Problem]:
    value = getattr(sampling, name)
    fits = _is_number(value) and math.isfinite(value) and (value >= low if closed else value > low) and value <= high
    if not fits:
        lowest = f"{'at least' if closed else 'more than'} {low:g}"
        bounds = lowest if high == math.inf else f"{lowest} and at most {high:g}"
        yield f"`{name}` is `{value}`, expected a number of {bounds}", f"{name}: " + way.format(default=_default(name))


def _whole(
    sampling: Sampling, vocab_size: int, name: str, low: int, high: int | None, optional: bool, way: str
) -> Iterator[Problem]:
    value = getattr(sampling, name)
    if optional and value is None:
        return
    high = min(MAX_LOGPROBS, vocab_size) if high is None else high
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        bounds = f"at least {low}" if high >= 2**31 - 1 and low >= 0 else f"from {low} to {high}"
        message = f"`{name}` is `{value}`, expected a whole number {bounds}"
        yield message, f"{name}: " + way.format(default=_default(name))


def _default(name: str) -> object:
    return Sampling.__dataclass_fields__[name].default


def _related(sampling: Sampling) -> Iterator[Problem]:
    if sampling.best_of is not None and sampling.best_of < sampling.n:
        yield (
            f"`best_of` is `{sampling.best_of}`, expected at least `n`, which is {sampling.n}",
            "best_of: it draws that many sequences and keeps the best `n`; leave it out to draw `n`",
        )
    if sampling.min_tokens > sampling.max_tokens:
        yield (
            f"`min_tokens` is `{sampling.min_tokens}`, expected at most `max_tokens`, which is {sampling.max_tokens}",
            "min_tokens: raise `max_tokens` or lower it",
        )


def _tokens(sampling: Sampling, vocab_size: int) -> Iterator[Problem]:
    ids = f"a token id from 0 to {vocab_size - 1}"

    def known(token: object) -> bool:
        return isinstance(token, int) and not isinstance(token, bool) and 0 <= token < vocab_size

    for token, bias in sampling.logit_bias:
        if not known(token):
            yield f"`logit_bias` names token `{token}`, expected {ids}", "logit_bias: `turnout inspect` has the size"
        if not (_is_number(bias) and -100 <= bias <= 100):
            yield (
                f"`logit_bias` of token `{token}` is `{bias}`, expected a number from -100 to 100",
                "logit_bias: -100 forbids a token, 100 forces it",
            )
    for token in sampling.stop_token_ids:
        if not known(token):
            yield f"`stop_token_ids` names token `{token}`, expected {ids}", "stop_token_ids: leave it out"


def _texts(sampling: Sampling) -> Iterator[Problem]:
    rules: tuple[tuple[str, Callable[[object], bool]], ...] = (
        ("stop", lambda text: isinstance(text, str) and text != ""),
        ("dry_sequence_breakers", lambda text: isinstance(text, str) and text != ""),
    )
    for name, fits in rules:
        texts = getattr(sampling, name)
        if len(texts) > MAX_STOPS:
            yield f"`{name}` holds {len(texts)} texts, expected at most {MAX_STOPS}", f"{name}: name fewer"
        for text in texts:
            if not fits(text):
                yield f"`{name}` holds `{text!r}`, expected text that is not empty", f"{name}: leave it out"
