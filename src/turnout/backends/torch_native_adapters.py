"""LoRA adapters per request over one model's modules, in ragged batches.

The model's modules stay where they are; one that an adapter changes gets a ``forward`` of ours around its
own. Without an adapter in a step that is one comparison. With some, every adapter changes its own rows of
the module's output: a step is cut into spans of neighbouring tokens with the same adapter.

Which tokens a module's rows are is not known from its class: at load a small pass (``trial``) shows whether
they are the step's tokens, the tokens whose logits are asked (the head), or something else (experts that
gather tokens). An adapter with such a module computes alone: a part of the step has no other rows. A module
that the model never calls (it reads the weight instead) would ignore an adapter, so that is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from turnout.backends.torch_native_adapters_fit import Fitted, Model, Place, fit
from turnout.backends.torch_native_adapters_parts import Part, build, check_carried, check_merge, merge
from turnout.backends.torch_native_adapters_read import Stored, read, refused, some
from turnout.engine.executor import Row
from turnout.errors import InputError, LoadError, MemoryAdmissionError, TurnoutError

TRIAL, ASKED = 7, 2  # tokens of the pass at load, and those whose logits are asked
MAX_ADAPTERS, MAX_BYTES = 64, 2 * 2**30
MERGED = "_turnout_merged_adapter"  # attribute of a model whose weights hold an adapter
Span = tuple[str, int, int]  # adapter, first row, row behind the last


@dataclass(frozen=True, slots=True)
class AdapterLimits:
    """How many adapters may be loaded at once, and their bytes in all."""

    adapters: int = MAX_ADAPTERS
    bytes: int = MAX_BYTES

    @staticmethod
    def of(adapters: int, size: int) -> AdapterLimits:
        """Limits of options, where 0 leaves one as it is here."""
        return AdapterLimits(adapters or MAX_ADAPTERS, size or MAX_BYTES)


@dataclass(slots=True)
class Selection:
    """Spans of one pass over its ``tokens`` flat tokens and over the ``asked`` ones. ``only`` is the adapter that
    has every row; then no module needs to know which rows are whose."""

    tokens: int
    asked: int
    spans: list[Span]
    asked_spans: list[Span]
    only: str | None = None
    learning: bool = False


class AdapterSet:
    """The adapters of one model; only the engine's thread calls it.

    ``trial(name)`` computes ``TRIAL`` tokens of one sequence with the adapter, ``ASKED`` logits of them (and, of
    an encoder-decoder, an encoder pass of ``TRIAL`` tokens). Without it rows are told by their number.
    """

    def __init__(
        self, model: Any, limits: AdapterLimits = AdapterLimits(), trial: Callable[[str], Any] | None = None
    ) -> None:
        self._model: Any = Model(model)
        self.limits, self._trial = limits, trial
        self._wrapped: dict[str, Wrapped] = {}
        self._bytes: dict[str, int] = {}
        self._alone: set[str] = set()
        self._learning = False
        self.active: Selection | None = None

    def __contains__(self, name: str) -> bool:
        return name in self._bytes

    def __len__(self) -> int:
        return len(self._bytes)

    @property
    def bytes(self) -> int:
        """Memory of all adapters."""
        return sum(self._bytes.values())

    # ---- loading ---------------------------------------------------------------------------

    def load(self, name: str, path: str) -> None:
        """Loads the PEFT directory ``path``. Raises ``LoadError`` (``adapter.base_mismatch``,
        ``adapter.type_unsupported`` ...), ``MemoryAdmissionError`` beyond the limits; nothing is left then."""
        if name in self._bytes:
            raise InputError(f"an adapter `{name}` is loaded already", hints=["unload it first"])
        merged = getattr(self._model.model, MERGED, "")
        if merged:
            message = f"the adapter `{merged}` is merged into the weights; others do not fit them any more"
            raise refused("adapter.base_mismatch", message)
        stored = read(path)
        self._admit(name, stored)
        self._model.refresh()
        fitted = fit(stored, self._model)
        check_carried(stored, fitted.carried, self._plain, self._model.places)
        device = self._model.model.device
        # Made as a whole before a module is touched.
        parts = {place: build(stored, one, *self._plain(place), device) for place, one in fitted.modules.items()}
        self._bytes[name] = sum(t.numel() * t.element_size() for part in parts.values() for t in part.tensors())
        try:
            for place, part in parts.items():
                self._wrap(place).parts[name] = part
            self._try(name, fitted.modules)
        except BaseException:
            self.unload(name)
            raise

    def unload(self, name: str) -> None:
        """Forgets an adapter; unknown names are ignored."""
        self._bytes.pop(name, None)
        self._alone.discard(name)
        for place in list(self._wrapped):
            wrapped = self._wrapped[place]
            wrapped.parts.pop(name, None)
            if not wrapped.parts:
                wrapped.restore()
                del self._wrapped[place]

    def close(self) -> None:
        """Forgets all, and the model, which is as it was."""
        for name in list(self._bytes):
            self.unload(name)
        self._model = None

    def merge(self, name: str) -> None:
        """Folds the only adapter into the float weights: every request then has it, by no name, at no cost. Raises
        ``LoadError`` for quantised weights, and changes nothing then."""
        if set(self._bytes) != {name}:
            raise InputError(f"only a single adapter is merged; loaded are {some(self._bytes) or 'none'}")
        held = [(one.parts[name], one.module, one.place) for one in self._wrapped.values()]
        for _, module, _ in held:
            check_merge(module)
        self.unload(name)
        for part, module, place in held:
            merge(part, module, place)
        setattr(self._model.model, MERGED, name)

    def _admit(self, name: str, stored: Stored) -> None:
        limits, size = self.limits, sum(4 * math.prod(shape) for shape in stored.shapes.values())
        hints = ["unload another adapter first"] if self._bytes else []
        if len(self._bytes) >= limits.adapters:
            message = f"the adapter `{name}`: {len(self._bytes)} are loaded, and {limits.adapters} is the limit"
            raise MemoryAdmissionError(message, hints=hints)
        if self.bytes + size > limits.bytes:
            message = f"the adapter `{name}` takes {size:,} bytes; {self.bytes:,} of {limits.bytes:,} are taken"
            raise MemoryAdmissionError(message, hints=hints)

    def _plain(self, place: str) -> tuple[Any, Any]:
        """A module and its own forward."""
        wrapped = self._wrapped.get(place)
        module = self._model.model.get_submodule(place)
        return module, wrapped.inner if wrapped is not None else module.forward

    def _wrap(self, place: str) -> Wrapped:
        module = self._model.model.get_submodule(place)
        wrapped = self._wrapped.get(place)
        if wrapped is not None and wrapped.module is not module:
            raise TurnoutError(f"`{place}` was replaced while adapters are loaded", code="runtime.failed")
        if wrapped is None:
            wrapped = self._wrapped[place] = Wrapped(self, place, module, self._model.places[place])
        return wrapped

    def _try(self, name: str, fitted: dict[str, Fitted]) -> None:
        """The pass at load: whether every module is called and which rows it is given."""
        if self._trial is None:
            return
        touched = [self._wrapped[place] for place in fitted]
        for wrapped in touched:
            wrapped.calls = 0
        self._learning = True
        try:
            self._trial(name)
        except LoadError:
            raise
        except Exception as error:
            line = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise refused("adapter.base_mismatch", f"the adapter `{name}` does not compute: {line}") from error
        finally:
            self._learning = False
        silent = [one.name for one in touched if not one.calls and not one.routed]
        if silent:
            message = f"the model never calls {some(silent)} (it may read the weight), so no adapter applies there"
            raise refused("adapter.type_unsupported", message, "merge it into its base with PEFT's merge_and_unload")
        if any(one.rows is None for one in touched):
            self._alone.add(name)

    # ---- a step ----------------------------------------------------------------------------

    def check(self, row: Row) -> None:
        """Raises ``InputError`` for a row that names an adapter which is not loaded."""
        if row.adapter is not None and row.adapter not in self._bytes:
            raise InputError(f"no adapter `{row.adapter}` is loaded", code="adapter.missing")

    def each(self, rows: list[Row], compute: Callable[[list[Row]], Any]) -> Any:
        """Logits of ``rows`` in their order, by ``compute`` of all at once, or of those apart whose adapter must
        compute alone."""
        import torch

        groups: dict[str, list[Row]] = {}
        for row in rows:
            groups.setdefault(row.adapter if row.adapter in self._alone and row.adapter else "", []).append(row)
        if len(groups) == 1:
            return compute(rows)
        made = {}
        for group in groups.values():
            parts = compute(group).split([row.logits for row in group])
            made.update({row.slot: part for row, part in zip(group, parts, strict=True)})
        return torch.cat([made[row.slot] for row in rows])

    def select(
        self, segments: Sequence[tuple[str | None, int]], asked: Sequence[tuple[str | None, int]] = ()
    ) -> AdapterSet:
        """For the pass inside ``with``: adapters and their numbers of flat tokens, in the order of the batch; and
        the same of the tokens whose logits are asked, in the order of the answer."""
        if any(adapter is not None for adapter, _ in segments):
            tokens, logits = sum(count for _, count in segments), sum(count for _, count in asked)
            names = {adapter for adapter, _ in segments}
            only = next(iter(names)) if len(names) == 1 else None
            self.active = Selection(tokens, logits, spans_of(segments), spans_of(asked), only, self._learning)
        return self

    def __enter__(self) -> AdapterSet:
        return self

    def __exit__(self, *_: object) -> None:
        self.active = None


def merging(path: str) -> Callable[[Any], Any]:
    """What merges one adapter into a model's float weights before it is used: the ``prepare`` of the backend's
    ``executor``, so that quantisation comes after it. Raises ``LoadError`` as ``AdapterSet.load`` does."""

    def prepare(model: Any) -> Any:
        adapters = AdapterSet(model)
        adapters.load(path, path)
        adapters.merge(path)
        return model

    return prepare


class Wrapped:
    """The ``forward`` of a module that adapters change, while any of them does."""

    def __init__(self, owner: AdapterSet, name: str, module: Any, place: Place) -> None:
        self.owner, self.name, self.module, self.place = owner, name, module, place
        self.parts: dict[str, Part] = {}
        self.rows: tuple[bool, int] | None = None  # whether the asked tokens', and along which axis
        self.calls = 0
        # An expert of a list is given the tokens that are sent to it, perhaps none.
        self.routed = re.search(r"experts\.\d+\.", name) is not None
        self.inner = module.forward
        self._own = vars(module).get("forward")
        module.forward = self

    def restore(self) -> None:
        """Gives the module its own forward back."""
        if self._own is not None:
            self.module.forward = self._own
        else:
            vars(self.module).pop("forward", None)

    def __call__(self, *args: Any, **named: Any) -> Any:
        out = self.inner(*args, **named)
        active = self.owner.active
        if active is not None:
            self._adapt(active, args[0] if args else next(iter(named.values())), out)
        return out

    def _adapt(self, active: Selection, x: Any, out: Any) -> None:
        if active.learning:
            self._learn(active, x, out)
        if active.only is not None:
            part = self.parts.get(active.only)
            if part is not None:
                part.apply(x, out)
            return
        asked, axis = self.rows or self._rows(active, x)
        for name, first, last in active.asked_spans if asked else active.spans:
            part = self.parts.get(name)
            if part is not None:
                part.apply(x.narrow(axis, first, last - first), out.narrow(axis, first, last - first))

    def _learn(self, active: Selection, x: Any, out: Any) -> None:
        if not hasattr(out, "narrow"):
            message = f"`{self.name}` gives a {type(out).__name__}, which no adapter applies to"
            raise refused("adapter.type_unsupported", message)
        try:
            found = None if self.routed else self._rows(active, x)
        except TurnoutError:
            found = None
        self.rows = found if not self.calls or self.rows == found else None
        self.calls += 1

    def _rows(self, active: Selection, x: Any) -> tuple[bool, int]:
        """Whose rows those of ``x`` [1, rows, ..] or [rows, ..] are."""
        shape = x.shape if self.place.kind == "embedding" else x.shape[:-1]
        for asked, count in ((False, active.tokens), (True, active.asked)):
            if len(shape) > 1 and shape[0] == 1 and shape[1] == count:
                return asked, 1
            if shape and shape[0] == count:
                return asked, 0
        raise TurnoutError(f"`{self.name}` is given {list(x.shape)}: not a row per token", code="runtime.failed")


def spans_of(segments: Sequence[tuple[str | None, int]]) -> list[Span]:
    """Spans of rows with an adapter; neighbours with the same one are joined, empty ones left out."""
    spans: list[Span] = []
    at = 0
    for adapter, count in segments:
        if adapter is not None and count:
            if spans and spans[-1][0] == adapter and spans[-1][2] == at:
                spans[-1] = (adapter, spans[-1][1], at + count)
            else:
                spans.append((adapter, at, at + count))
        at += count
    return spans
