"""The generation engine's forward pass over ONNX decoder graphs.

A row is one call of the graph with its own states. Rows that add one token, in a step after one with the
same rows, are computed together where the graph proved at load that this gives the same numbers; their
states then stay together until the rows of a step change. A graph without a cache computes the whole
sequence again for every token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnout.backends import onnxruntime_kernels as kernels
from turnout.backends.base import LoadPlan
from turnout.backends.onnxruntime_executor_graph import Cache, DecoderGraph
from turnout.engine.executor import Capabilities, ExecutorOptions, Row, Step
from turnout.errors import InputError, LoadError, NotSupportedError, UsageError
from turnout.package.facts import ArtifactKind
from turnout.types import count_of

LOGITS_BYTES = 64 << 20  # of one call: a graph computes the head for every token it is given
BUFFER = 64  # tokens that a shared buffer has at least
CONTEXT = 2048  # tokens where neither package nor caller says
CACHE_SHARE = 0.25  # of the memory that is free, where nobody says how many tokens to hold


@dataclass(slots=True)
class _Slot:
    """``length`` tokens held in row ``row`` of ``cache``; a graph without a cache keeps the tokens."""

    length: int = 0
    cache: Cache | None = None
    row: int = 0
    tokens: list[int] = field(default_factory=list)


class OnnxExecutor:
    """Slots over one decoder graph (`turnout.engine.executor.Executor`).

    ``session`` is an ONNX Runtime session on the CPU. ``context`` is the tokens of a slot, ``cache_tokens``
    those of all slots (default: every slot full, or what ``cache_bytes`` hold), ``batch`` False keeps rows
    apart. Raises ``LoadError`` or ``NotSupportedError`` for a graph whose states cannot be driven, naming the port.
    """

    def __init__(
        self,
        session: Any,
        *,
        context: int = 0,
        slots: int = 8,
        cache_tokens: int = 0,
        cache_bytes: int = 0,
        step_tokens: int = 2048,
        batch: bool = True,
        where: str = "model.onnx",
        weights_bytes: int = 0,
    ) -> None:
        self.graph: DecoderGraph | None = DecoderGraph(session, where)
        graph = self.graph
        self._slots = [_Slot() for _ in range(slots)]
        self._batches = batch and graph.batches
        self._piece = max(16, LOGITS_BYTES // (4 * max(graph.vocab_size, 1)))
        self._before: tuple[int, ...] = ()  # slots of the last step
        length = context or CONTEXT
        full = slots * length
        if cache_bytes and graph.token_bytes:
            full = max(min(full, cache_bytes // graph.token_bytes), min(full, BUFFER))
        self.capabilities = Capabilities(
            vocab_size=graph.vocab_size,
            context=length,
            slots=slots,
            cache_tokens=cache_tokens or full,
            step_tokens=step_tokens,
            weights_bytes=weights_bytes,
            notes=tuple(_notes(graph, self._batches, context)),
        )

    # ---- the protocol -----------------------------------------------------------------

    def execute(self, step: Step) -> NDArray[np.float32]:
        """Logits [step.num_logits, vocab]. When it raises, the slots hold what they held."""
        graph = self._open()
        before = [self._check(row) for row in step.rows]
        kept = [_Slot(s.length, s.cache, s.row, s.tokens) for s in before]
        out = np.empty((step.num_logits, graph.vocab_size), np.float32)
        try:
            together = self._together(step)
            place = 0
            for row in step.rows:
                if row.slot not in together:
                    self._single(graph, row, out[place : place + row.logits])
                place += row.logits
            if together:
                self._joint(graph, step, together, out)
        except BaseException:
            for row, slot in zip(step.rows, kept, strict=True):
                self._slots[row.slot] = slot
            raise
        self._before = tuple(sorted(row.slot for row in step.rows if len(row.tokens) == 1))
        return out

    def encode(self, slot: int, tokens: Sequence[int]) -> None:
        """Refused: the graphs here are decoders."""
        raise NotSupportedError("this graph has no encoder", code="option.unsupported")

    def retained(self, slot: int, length: int) -> int:
        """``length``, at most what the slot holds."""
        return min(length, self._slots[slot].length)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """A copy of the first ``length`` tokens' states; whole grown states are shared, nobody writes them."""
        graph = self._open()
        held = self._slots[source]
        if length > held.length:
            raise InputError(f"slot {source} holds {held.length} tokens, not {length}", code="runtime.failed")
        self._slots[target] = self._first(graph, held, length)

    def roll_back(self, slot: int, length: int) -> None:
        """Cuts the slot to ``length`` tokens; a shared buffer keeps its bytes."""
        graph, held = self._open(), self._slots[slot]
        if length > held.length:
            raise InputError(f"slot {slot} holds {held.length} tokens, not {length}", code="runtime.failed")
        if length == held.length:
            return
        if graph.shared and length:
            held.length = length
        else:
            self._slots[slot] = self._first(graph, held, length)

    def free(self, slot: int) -> None:
        """Empties the slot."""
        self._slots[slot] = _Slot()

    def load_adapter(self, name: str, path: str) -> None:
        """Refused: a graph's weights are fixed."""
        raise NotSupportedError(
            f"ONNX Runtime cannot add the adapter `{name}` to a graph's fixed weights",
            code="option.unsupported",
            hints=["use a backend that takes adapters: --backend transformers"],
        )

    def unload_adapter(self, name: str) -> None:
        """Nothing is ever loaded."""

    def close(self) -> None:
        """Drops session and states; may be called twice."""
        self.graph, self._slots = None, [_Slot() for _ in self._slots]

    # ---- one row ----------------------------------------------------------------------

    def _single(self, graph: DecoderGraph, row: Row, out: NDArray[np.float32]) -> None:
        """Appends a row's tokens alone; ``out`` [row.logits, vocab] is filled."""
        slot = self._slots[row.slot]
        if not graph.past:
            self._again(graph, slot, row, out)
            return
        if slot.cache is None or slot.cache.rows > 1 or self._short(graph, slot, len(row.tokens)):
            self._slots[row.slot] = slot = self._own(graph, slot, len(row.tokens))
        assert slot.cache is not None
        done, filled = 0, 0
        for count in self._pieces(graph, len(row.tokens), slot.length, row.logits):
            ids = np.array([row.tokens[done : done + count]], np.int64)
            keep = min(count, max(0, done + count - (len(row.tokens) - row.logits)))
            logits, slot.cache = graph.run(ids, [slot.length], slot.cache, keep)
            slot.length += count
            done += count
            if logits is not None:
                out[filled : filled + keep] = logits[0]
                filled += keep

    def _pieces(self, graph: DecoderGraph, count: int, held: int, logits: int) -> list[int]:
        """Tokens of each call for one row."""
        if graph.single:
            return [1] * count
        alone = 0 if graph.every else max(0, logits - 1)  # tokens whose logits come only as a call's last
        head = count - alone
        if not graph.chunks:
            return [1] * count if held or alone else [count]
        return [min(self._piece, head - i) for i in range(0, head, self._piece)] + [1] * alone

    def _again(self, graph: DecoderGraph, slot: _Slot, row: Row, out: NDArray[np.float32]) -> None:
        """A graph without a cache: everything from the start, once, or once per logits where it gives one."""
        tokens = [*slot.tokens, *row.tokens]
        calls = [(len(tokens), row.logits)] if graph.every else [(len(tokens) - i, 1) for i in range(row.logits)][::-1]
        filled = 0
        for end, keep in calls:
            if keep:
                logits, _ = graph.run(np.array([tokens[:end]], np.int64), [0], graph.empty(), keep)
                assert logits is not None
                out[filled : filled + keep] = logits[0]
                filled += keep
        slot.tokens, slot.length = tokens, len(tokens)

    # ---- rows together ----------------------------------------------------------------

    def _together(self, step: Step) -> tuple[int, ...]:
        """Slots to compute in one call: those that add one token now and did in the step before, unless
        padding would cost more than the tokens themselves."""
        slots = tuple(sorted(row.slot for row in step.rows if len(row.tokens) == 1 and row.start))
        if not self._batches or len(slots) < 2 or slots != self._before:
            return ()
        lengths = [self._slots[s].length for s in slots]
        return slots if max(lengths) * len(slots) <= 2 * sum(lengths) + BUFFER * len(slots) else ()

    def _joint(self, graph: DecoderGraph, step: Step, together: tuple[int, ...], out: NDArray[np.float32]) -> None:
        slots = [self._slots[s] for s in together]
        lengths = [slot.length for slot in slots]
        cache = slots[0].cache
        same = all(slot.cache is cache and slot.row == i for i, slot in enumerate(slots))
        if cache is None or not same or cache.rows != len(slots) or (graph.shared and max(lengths) >= cache.width):
            parts = [(slot.cache, slot.row, slot.length, slot.length) for slot in slots if slot.cache is not None]
            cache = graph.join(parts, self._room(max(lengths) + 1) if graph.shared else max(lengths))
        rows = {row.slot: row for row in step.rows}
        ids = np.array([rows[s].tokens for s in together], np.int64)
        logits, cache = graph.run(ids, lengths, cache)
        assert logits is not None
        for i, number in enumerate(together):
            self._slots[number] = _Slot(lengths[i] + 1, cache, i)
        place = 0
        for row in step.rows:
            if row.logits and row.slot in together:
                out[place] = logits[together.index(row.slot), -1]
            place += row.logits

    # ---- states -----------------------------------------------------------------------

    def _first(self, graph: DecoderGraph, held: _Slot, length: int) -> _Slot:
        """A slot with the first ``length`` tokens of another."""
        if not graph.past:
            return _Slot(length, tokens=held.tokens[:length])
        if not length or held.cache is None:
            return _Slot()
        if length == held.length and held.cache.rows == 1 and not graph.shared:
            return _Slot(length, held.cache)
        width = self._room(length) if graph.shared else length
        return _Slot(length, graph.join([(held.cache, held.row, held.length, length)], width))

    def _own(self, graph: DecoderGraph, slot: _Slot, new: int) -> _Slot:
        """The slot with states of its own and, in a shared buffer, room for ``new`` more tokens."""
        width = self._room(slot.length + new) if graph.shared else slot.length
        if slot.cache is None:
            return _Slot(0, graph.empty(1, width))
        return _Slot(slot.length, graph.join([(slot.cache, slot.row, slot.length, slot.length)], width))

    def _short(self, graph: DecoderGraph, slot: _Slot, new: int) -> bool:
        return graph.shared and slot.cache is not None and slot.length + new > slot.cache.width

    def _room(self, tokens: int) -> int:
        """Capacity of a shared buffer: half as much again, at most the context, never less than asked."""
        return max(tokens, min(self.capabilities.context, max(BUFFER, tokens + tokens // 2)))

    def _open(self) -> DecoderGraph:
        if self.graph is None:
            raise LoadError("the executor is closed")
        return self.graph

    def _check(self, row: Row) -> _Slot:
        slot = self._slots[row.slot]
        if row.adapter is not None:
            raise InputError(f"ONNX Runtime has no adapter `{row.adapter}`", code="option.unsupported")
        if row.start != slot.length or not row.tokens or row.start + len(row.tokens) > self.capabilities.context:
            raise InputError(
                f"slot {row.slot} holds {slot.length} of {self.capabilities.context} tokens, the step adds "
                f"{len(row.tokens)} at {row.start}",
                code="runtime.failed",
            )
        return slot


def _notes(graph: DecoderGraph, batches: bool, context: int) -> list[str]:
    notes = list(graph.notes)
    if not graph.past:
        notes.append("the graph keeps no cache: every token computes the whole sequence again")
    elif not graph.shared:
        notes.append("the graph copies its cache at every token")
    if not batches:
        notes.append("rows are computed one after another")
    if not graph.every:
        notes.append("the graph gives the logits of a call's last token only: drafts are verified one by one")
    if not context:
        notes.append(f"the package states no context: {CONTEXT} tokens are assumed")
    return notes


# ---- from a plan ---------------------------------------------------------------------------------


def open_executor(plan: LoadPlan, options: ExecutorOptions | Mapping[str, Any] | None = None) -> OnnxExecutor:
    """The executor over a case's decoder graph (also that of an onnxruntime-genai directory). ``options`` may be
    a mapping of ``ExecutorOptions``, which is what a worker hands on.

    Raises ``LoadError`` for a graph that the runtime refuses, ``NotSupportedError`` for another device than the
    CPU, ``UsageError`` (``option.unsupported``) for what a stored graph cannot do.
    """
    case = plan.case
    asked = options if isinstance(options, ExecutorOptions) else ExecutorOptions(**(options or {}))
    if case.device != "cpu":
        raise NotSupportedError(
            f"the ONNX Runtime executor keeps its states on the CPU, the case asks for `{case.device}`",
            code="device.unavailable",
        )
    if case.options.get("quantize"):
        raise UsageError(
            f"`quantize={case.options['quantize']}`: a graph's weights stay as they are stored",
            hints=["quantize the directory that the graph was exported from"],
        )
    rel = _graph_file(plan)
    try:
        settings = kernels.session_options(optimise=True)
        settings.intra_op_num_threads = asked.threads or settings.intra_op_num_threads
        session = kernels.runtime().InferenceSession(case.file(rel), settings, providers=[kernels.CPU])
    except Exception as error:  # the runtime's exceptions have no common base
        reason = kernels.refusal(error, rel)
        raise LoadError(reason.message, code=reason.code) from None
    executor = OnnxExecutor(
        session,
        context=_context(plan, asked),
        slots=asked.slots,
        cache_tokens=asked.cache_tokens or 0,
        cache_bytes=_free_bytes(),
        step_tokens=asked.step_tokens or 2048,
        where=rel,
        weights_bytes=case.artifact.tensors.total_bytes or case.artifact.size_bytes,
    )
    _check_cache_type(executor, asked)
    return executor


def _graph_file(plan: LoadPlan) -> str:
    artifact = plan.case.artifact
    if artifact.kind is ArtifactKind.ONNX_GENAI:
        found = [c.path for c in artifact.components if c.role == "decoder" and c.path]
        if not found:
            raise LoadError("genai_config.json names no decoder graph", code="component.missing")
        return found[0]
    if artifact.kind is not ArtifactKind.ONNX:
        raise NotSupportedError(
            f"the engine drives decoder graphs, this is {artifact.kind.value}", code="architecture.unsupported"
        )
    return artifact.entry


def _context(plan: LoadPlan, asked: ExecutorOptions) -> int:
    """Tokens of one sequence: the least of what the package states and what is asked; 0 when nobody says."""
    artifact = plan.case.artifact
    dims = artifact.architecture.dims if artifact.architecture else {}
    config = artifact.facts["config"].value if "config" in artifact.facts else None
    model = config.get("model") if isinstance(config, dict) else None
    stated = model.get("context_length") if isinstance(model, dict) else None
    option = plan.case.options.get("context")
    if option is not None and count_of(option) is None:
        raise UsageError(f"`context={option}` is no number of tokens")
    counts = [count_of(v) for v in (dims.get("max_position_embeddings"), stated, option, asked.context)]
    return min((c for c in counts if c), default=0)


def _check_cache_type(executor: OnnxExecutor, asked: ExecutorOptions) -> None:
    assert executor.graph is not None
    types = {str(p.dtype) for p in executor.graph.past}
    if asked.kv_dtype and types and types != {asked.kv_dtype}:
        raise UsageError(
            f"`kv_dtype={asked.kv_dtype}`: the graph keeps its cache in {', '.join(sorted(types))}",
            hints=["leave it out, or export the graph with another cache type"],
        )


def _free_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().available * CACHE_SHARE)
