"""Custom logits processors and stopping criteria: what they look like, and where they are found.

A request names them (``Sampling.processors``), with parameters as JSON after a colon:
``no-repeat-ngram:{"size": 3}``. A name leads to an object in one of two ways: ``register(name, object)`` in the
process that generates, or an entry point of the group ``turnout.processors`` whose value is
``module:attribute``, which is imported at first use. The built-in ones come in through the same door.

What is registered is either a class, of which every request gets an object of its own, made with the
parameters as keyword arguments (and the model's ``vocabulary`` when the constructor takes one), or any other
callable, used as it is and without parameters. A class checks its parameters in its constructor: a
``ValueError`` or ``TypeError`` there refuses the request with its text. An object whose ``kind`` is ``"stop"``
is a stopping criterion.

A call gets everything it may depend on and should depend on nothing else: the sequences of a request share
the object, drafts are verified and sequences resumed by calling again with other tokens.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from turnout.engine.executor import Vocabulary
from turnout.errors import InputError, TurnoutError

GROUP = "turnout.processors"
BUILT_IN = {
    "no-repeat-ngram": "turnout.engine.processors:NoRepeatNgram",
    "sequence-bias": "turnout.engine.processors:SequenceBias",
}
KINDS = ("logits", "stop")
_registered: dict[str, tuple[Any, str]] = {}


class LogitsProcessor(Protocol):
    """Changes the logits of one sequence before the grammar, temperature and filters.

    ``ids`` [n] int64 are the tokens of prompt and output (not to be written), the first ``prompt_length`` of
    them the prompt's; ``logits`` [vocab] float32 may be changed in place. Returns logits of the same shape:
    -inf forbids a token, NaN is an error. An object with ``after_filters = True`` is called after grammar,
    temperature and filters instead, with -inf for what they took away: what marks the final distribution (a
    watermark) belongs there. Greedy knows no filters: such an object is then called before the most likely
    token is taken.
    """

    def __call__(
        self, ids: NDArray[np.int64], prompt_length: int, logits: NDArray[np.float32]
    ) -> NDArray[np.float32]: ...


class StoppingCriterion(Protocol):
    """Decides after each token whether a sequence ends.

    ``ids`` as for a logits processor, ``text`` is the output so far. True ends the sequence, a text ends it
    and is reported as what stopped it; False goes on. ``kind = "stop"`` on the object or class tells it from a
    logits processor.
    """

    kind: str

    def __call__(self, ids: NDArray[np.int64], prompt_length: int, text: str) -> bool | str: ...


class ProcessorError(TurnoutError):
    """A custom processor failed; only the request that named it ends."""

    http_status = 422
    default_code = "runtime.failed"


def register(name: str, target: Callable[..., Any], *, kind: str | None = None) -> None:
    """Makes a processor known under ``name`` in this process; a later one of the same name replaces it.

    ``kind`` is ``"logits"`` or ``"stop"``; without it the object's own ``kind`` counts, else ``"logits"``.
    Raises ``InputError`` for a name that cannot be asked for and for what cannot be called.
    """
    if not name or ":" in name or name != name.strip():
        raise InputError(f"`{name}` cannot name a processor", hints=["use a name without colon and outer spaces"])
    _registered[name] = (_callable(name, target), _kind(name, target, kind))


def unregister(name: str) -> None:
    """Forgets a name that ``register`` made known; unknown names are no error."""
    _registered.pop(name, None)


@cache
def locations() -> dict[str, str]:
    """Name to ``module:attribute``: the built-in ones, then those of installed plug-ins."""
    found = dict(BUILT_IN)
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, point.value)
    return found


def names() -> list[str]:
    """Every name that a request may use."""
    return sorted({*locations(), *_registered})


def resolve(
    asked: Sequence[str], vocabulary: Vocabulary | None = None
) -> tuple[list[LogitsProcessor], list[StoppingCriterion]]:
    """The logits processors and the stopping criteria that a request names, in its order, made anew for it.

    Raises ``InputError`` for an unknown name, parameters that are no JSON object or that the class refuses;
    ``ProcessorError`` when a plug-in cannot be imported or its constructor fails. Calling a criterion raises
    ``ProcessorError`` when it fails, as `process` does for the others.
    """
    changing: list[LogitsProcessor] = []
    stopping: list[StoppingCriterion] = []
    for text in asked:
        name, parameters = parse(text)
        target, kind = _look_up(name)
        made = _make(name, target, parameters, vocabulary)
        if kind == "stop":
            stopping.append(Guarded(made))
        else:
            changing.append(made)
    return changing, stopping


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """Name and parameters of ``name`` or ``name:{json object}``. Raises ``InputError``."""
    name, colon, source = text.partition(":")
    if not colon:
        return name, {}
    try:
        parameters = json.loads(source)
    except (ValueError, RecursionError) as error:
        parameters = error
    if not isinstance(parameters, dict):
        raise InputError(
            f"processor `{name}`: `{source[:80]}` is no JSON object", hints=['write `name:{"parameter": value}`']
        )
    return name, parameters


def process(
    processor: LogitsProcessor, ids: NDArray[np.int64], prompt_length: int, logits: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Calls a processor and checks its answer. Raises ``ProcessorError`` (``runtime.failed``, for NaN
    ``runtime.numeric_mismatch``)."""
    ids = ids.view()
    ids.flags.writeable = False
    try:
        answer = processor(ids, prompt_length, logits)
    except Exception as error:
        raise _failed(processor, error) from error
    if not isinstance(answer, np.ndarray) or answer.shape != logits.shape:
        shape = f"an array {answer.shape}" if isinstance(answer, np.ndarray) else f"a {type(answer).__name__}"
        raise ProcessorError(f"processor `{title(processor)}` returned {shape}, expected an array {logits.shape}")
    if answer.dtype.kind not in "fiu":
        raise ProcessorError(f"processor `{title(processor)}` returned {answer.dtype} values, expected float32")
    if np.isnan(answer.max()) or answer.max() == np.inf:
        raise ProcessorError(
            f"processor `{title(processor)}` returned `{answer.max()}` among the logits",
            code="runtime.numeric_mismatch",
            hints=["forbid a token with -inf; force one by forbidding the others"],
        )
    return answer.astype(np.float32, copy=False)


def decide(criterion: StoppingCriterion, ids: NDArray[np.int64], prompt_length: int, text: str) -> bool | str:
    """Calls a stopping criterion and checks its answer. Raises ``ProcessorError``."""
    ids = ids.view()
    ids.flags.writeable = False
    try:
        answer = criterion(ids, prompt_length, text)
    except Exception as error:
        raise _failed(criterion, error) from error
    if isinstance(answer, (bool, np.bool_)):
        return bool(answer)
    if isinstance(answer, str):
        return answer
    raise ProcessorError(
        f"stopping criterion `{title(criterion)}` returned a {type(answer).__name__}, expected True, False or a text"
    )


class Guarded:
    """A stopping criterion whose failures are ``ProcessorError``; tokens may also come as a list."""

    kind = "stop"

    def __init__(self, criterion: StoppingCriterion) -> None:
        self.criterion = criterion

    def __call__(self, ids: Sequence[int] | NDArray[np.int64], prompt_length: int, text: str) -> bool | str:
        return decide(self.criterion, np.asarray(ids, np.int64), prompt_length, text)


def title(target: object) -> str:
    """What messages call an object: its function's or class's name."""
    return str(getattr(target, "__name__", None) or type(target).__name__)


def _failed(target: object, error: Exception) -> ProcessorError:
    reason = (str(error).splitlines() or [""])[0][:200]
    return ProcessorError(f"processor `{title(target)}` failed: {type(error).__name__}: {reason}".rstrip(": "))


def _callable(name: str, target: Any) -> Any:
    if not callable(target) or (inspect.isclass(target) and "__call__" not in dir(target)):
        raise InputError(
            f"`{name}` cannot be called",
            hints=["register a function, or a class with `__call__(ids, prompt_length, logits)`"],
        )
    return target


def _kind(name: str, target: Any, kind: str | None) -> str:
    kind = kind or getattr(target, "kind", "logits")
    if kind not in KINDS:
        raise InputError(f"processor `{name}` is of kind `{kind}`", hints=["kinds: " + ", ".join(KINDS)])
    return kind


def _look_up(name: str) -> tuple[Any, str]:
    if name in _registered:
        return _registered[name]
    location = locations().get(name)
    if location is None:
        raise InputError(f"unknown processor `{name}`", hints=["known processors: " + ", ".join(names())])
    module, _, attribute = location.partition(":")
    try:
        target = import_module(module)
        for part in attribute.split("."):
            target = getattr(target, part)
    except Exception as error:  # a plug-in's module may raise anything
        raise ProcessorError(
            f"processor `{name}` cannot be imported from `{location}`: {type(error).__name__}: {error}",
            code="dependency.missing",
            hints=["install or repair the package that brings it"],
        ) from error
    return _callable(name, target), _kind(name, target, None)


def _make(name: str, target: Any, parameters: dict[str, Any], vocabulary: Vocabulary | None) -> Any:
    if not inspect.isclass(target):
        if parameters:
            raise InputError(f"processor `{name}` takes no parameters", hints=[f"write `{name}` alone"])
        return target
    known = inspect.signature(target).parameters
    if "vocabulary" in known and "vocabulary" not in parameters and vocabulary is not None:
        parameters = {**parameters, "vocabulary": vocabulary}
    try:
        inspect.signature(target).bind(**parameters)
        return target(**parameters)
    except (TypeError, ValueError) as error:
        wanted = ", ".join(key for key in known if key != "vocabulary") or "none"
        raise InputError(f"processor `{name}`: {error}", hints=[f"parameters of `{name}`: {wanted}"]) from error
    except TurnoutError:
        raise
    except Exception as error:
        raise _failed(target, error) from error


class NoRepeatNgram:
    """Forbids every token that would complete a run of ``size`` tokens which prompt and output hold already."""

    def __init__(self, size: int) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"`size` is `{size}`, expected a whole number of at least 1")
        self.size = size

    def __call__(self, ids: NDArray[np.int64], prompt_length: int, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        if len(ids) < self.size:
            return logits
        runs = np.lib.stride_tricks.sliding_window_view(ids, self.size)  # [places, size]
        same = (runs[:, :-1] == ids[len(ids) - self.size + 1 :]).all(axis=1)
        banned = runs[same, -1]
        logits[banned[(banned >= 0) & (banned < len(logits))]] = -np.inf
        return logits


class SequenceBias:
    """Adds a bias to the last token of a sequence of tokens when the ones before it have just come.

    ``biases`` is a list of ``[[token, ...], bias]``; a bias of null forbids ("bad words"). Sequences of one
    token always count.
    """

    def __init__(self, biases: list[tuple[list[int], float | None]]) -> None:
        self._rules: list[tuple[NDArray[np.int64], float]] = []
        for rule in biases:
            sequence, bias = _rule(rule)
            self._rules.append((np.array(sequence, np.int64), bias))

    def __call__(self, ids: NDArray[np.int64], prompt_length: int, logits: NDArray[np.float32]) -> NDArray[np.float32]:
        for sequence, bias in self._rules:
            before = sequence[:-1]
            if len(before) > len(ids) or not np.array_equal(ids[len(ids) - len(before) :], before):
                continue
            if sequence[-1] < len(logits):
                logits[sequence[-1]] += np.float32(bias)
        return logits


def _rule(rule: object) -> tuple[list[int], float]:
    """One entry of ``SequenceBias``, checked."""
    if not isinstance(rule, (list, tuple)) or len(rule) != 2 or not isinstance(rule[0], (list, tuple)) or not rule[0]:
        raise ValueError(f"`biases` holds `{rule}`, expected [[token, ...], bias]")
    sequence, bias = rule
    if not all(isinstance(t, int) and not isinstance(t, bool) and t >= 0 for t in sequence):
        raise ValueError(f"`biases` holds the tokens `{sequence}`, expected ids of at least 0")
    if bias is None:
        return list(sequence), -np.inf
    if not isinstance(bias, (int, float)) or isinstance(bias, bool) or not np.isfinite(bias):
        raise ValueError(f"`biases` holds the bias `{bias}`, expected a number, or null to forbid")
    return list(sequence), float(bias)
