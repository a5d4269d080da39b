"""How a model class remembers and continues, found out by running it at load.

What a class does with several new tokens after a kept state differs: Mamba-2 goes on rightly, Mamba-1
and Jamba start anew, RecurrentGemma and MiniMax take one token only. Reading class names would go out
of date; comparing a few tokens in pieces with the same tokens in one pass does not.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

from turnout.backends.torch_native_rows_state import CACHE_NAMES, Memory, is_known, library_cache
from turnout.errors import NotSupportedError

TOKENS = 26  # of the comparison
PIECES = (9, 6, 1, 1, 7, 2)
SINGLES = (9,) + (1,) * (TOKENS - 9)
# Median over tokens of the largest error of a logit against one pass, in standard deviations of logits.
# Quantised weights and half precision round differently in pieces; a lost state gives errors above 1.
TOLERANCE = {"torch.float32": 0.1, "torch.float64": 0.1}
HALF_TOLERANCE = 0.5
FREED = "time steps have no lower bound, as in training; the class sets one for several tokens at once, not for one"


class Method(Enum):
    """How tokens are added to a slot that holds some."""

    CHUNKS = "chunks"  # any number in one pass
    SINGLE = "single"  # one at a time; only an empty slot takes several in one pass
    AGAIN = "again"  # everything anew, from the first token


@dataclass(slots=True)
class Learnt:
    """What the runs showed."""

    memory: Memory
    method: Method
    vocabulary: int  # width of the logits
    notes: list[str]


def learn(model: Any, forward: Callable[..., Any], vocabulary: int, encoder: Any = None) -> Learnt:
    """Runs a model on a few tokens.

    ``forward(memory, held, tokens, keep)`` returns logits [keep, vocabulary] and updates ``held``;
    ``encoder`` is the output of the encoder for encoder-decoder models. Raises ``NotSupportedError``
    (``architecture.unsupported``) when the class does not run at all.
    """
    # Some classes give a padding token no position, so none is among them.
    padding = getattr(model.config.get_text_config(decoder=True), "pad_token_id", None)
    tokens = [token for i in range(TOKENS + 1) if (token := (7 + 101 * i) % vocabulary) != padding][:TOKENS]
    notes = [FREED] if _free_time_steps(model) else []
    nothing = Memory("", False, lambda: None, [])
    whole = _pieces(nothing, forward, tokens, (TOKENS,), encoder)
    memory = _memory(model, encoder, tokens)
    tolerance = TOLERANCE.get(str(model.dtype), HALF_TOLERANCE)
    if memory is not None:
        in_pieces, one_by_one = _errors(memory, forward, tokens, encoder, whole)
        if max(in_pieces, one_by_one) <= tolerance:
            return Learnt(memory, Method.CHUNKS, whole.shape[-1], notes)
        if one_by_one <= tolerance:
            notes.append("prompts are computed token by token after their first chunk: the class cannot continue one")
            return Learnt(memory, Method.SINGLE, whole.shape[-1], notes)
    notes.append("every step computes the whole sequence anew: the class cannot continue from what it keeps")
    return Learnt(nothing, Method.AGAIN, whole.shape[-1], notes)


def _errors(memory: Memory, forward: Any, tokens: Sequence[int], encoder: Any, whole: Any) -> tuple[float, float]:
    """Errors of pieces and of single tokens against one pass; infinite where the class raises."""
    found = []
    for cuts in (PIECES, SINGLES):
        try:
            found.append(_apart(_pieces(memory, forward, tokens, cuts, encoder), whole, cuts[0]))
        except Exception:  # whatever a class does on input it was not written for: it cannot do it
            found.append(float("inf"))
    return found[0], found[1]


def _pieces(memory: Memory, forward: Any, tokens: Sequence[int], cuts: Sequence[int], encoder: Any) -> Any:
    """Logits of all tokens, fed in pieces."""
    import torch

    held = memory.empty()
    held.encoder = encoder
    logits = []
    for count in cuts:
        start = held.length
        logits.append(forward(memory, held, tokens[start : start + count], count))
    return torch.cat(logits).float()


def _apart(got: Any, wanted: Any, first: int) -> float:
    """Median over the tokens after the first piece of the largest error, in standard deviations."""
    import torch

    apart = (got[first:] - wanted[first:]).abs().amax(-1) / wanted[first:].std(-1).clamp(min=1e-12)
    return float(apart.median()) if bool(torch.isfinite(apart).all()) else float("inf")


def _free_time_steps(model: Any) -> bool:
    """Undoes a lower bound of time steps that the configuration does not ask for; whether there was one.

    Zamba2 and Nemotron-H bound them by ``time_step_min`` (meant for the initial weights) when they
    compute several tokens and not when they compute one, so that a text's logits would depend on how it
    was cut into steps. The kernels these models are trained with have no bound.
    """
    asked = getattr(model.config, "time_step_limit", None) or (0.0,)
    changed = False
    for module in model.modules():
        limit = vars(module).get("time_step_limit")
        if isinstance(limit, list | tuple) and limit[0] > asked[0]:
            module.time_step_limit = (asked[0], *limit[1:])
            changed = True
    return changed


def _memory(model: Any, encoder: Any, tokens: Sequence[int]) -> Memory | None:
    """Runs a few tokens and looks what remains; None where nothing that can be kept does."""
    import torch

    taken = inspect.signature(model.forward).parameters
    name = next((name for name in CACHE_NAMES if name in taken), "")
    if not name:
        return None
    before = _attributes(model)
    ids = torch.tensor([list(tokens[:5])], device=model.device)
    arguments: dict[str, Any] = {"input_ids": ids}
    if encoder is not None:
        arguments = {"encoder_outputs": encoder, "decoder_input_ids": ids}
    output = model(**arguments, use_cache=True)
    places = []
    for (module, attribute), value in _attributes(model).items():
        if value is not before.get((module, attribute)):
            places.append((module, attribute, before.get((module, attribute))))
    for module, attribute, value in places:
        setattr(module, attribute, value)
    returned = getattr(output, name, None)
    if returned is None and not places:
        return None
    if returned is None or is_known(returned):
        pair = encoder is not None
        return Memory(name, True, lambda: library_cache(model.config, pair), places)
    return Memory(name, False, lambda: None, places)


def _attributes(model: Any) -> dict[tuple[Any, str], Any]:
    """Tensors that modules hold as plain attributes."""
    import torch

    return {
        (module, name): value
        for module in model.modules()
        for name, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }


def unsupported(model: Any, line: str) -> NotSupportedError:
    """The class does not run one row of tokens."""
    return NotSupportedError(
        f"`{type(model).__name__}` does not compute logits of plain tokens: {line}", code="architecture.unsupported"
    )
