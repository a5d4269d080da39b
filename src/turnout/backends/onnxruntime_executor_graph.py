"""A decoder graph with or without past and present states, as one call: tokens in, logits and states out.

What a graph can do is found out with a probe of five tokens, not read from names: whether it gives the logits
of every token, takes several tokens after a past, works in place on a buffer longer than its tokens, and
computes rows of unequal length together. What the probe does not prove is not used.

States are ONNX Runtime's own values, handed from one call to the next without a copy, in one of two layouts:
*grown* (the graph joins past and new, so a value is as long as its longest row, and rows are aligned at the
end) or *shared* (GroupQueryAttention writes into the buffer it reads, rows start at place 0).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnout.backends.graph_text import present_of
from turnout.backends.onnxruntime_kernels import first_line, runtime
from turnout.errors import InputError, LoadError, NotSupportedError, TurnoutError
from turnout.tasks.numeric import numpy_dtype

# Inputs given here, besides past states; `num_logits_to_keep` bounds the tokens that the head computes.
GIVEN = frozenset({"input_ids", "attention_mask", "position_ids", "use_cache_branch", "num_logits_to_keep"})
_WORDS = ("past", "seq", "len", "total", "time")  # what exporters call the axis that grows
_PROBE = 5  # tokens of the probe


@dataclass(frozen=True, slots=True)
class PastPort:
    """One past input with the output that carries it on. ``shape`` has 1 at the batch axis and 0 at ``axis``."""

    name: str
    present: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    batch: int
    axis: int
    rows: bool  # the batch axis is open


@dataclass(frozen=True, slots=True)
class Cache:
    """States of one or several rows: a value per past port, ``width`` tokens long (the longest row, or the
    buffer's capacity). Values are never changed but in place by a shared graph, behind each row's tokens."""

    values: tuple[Any, ...]
    width: int
    rows: int


class DecoderGraph:
    """A session over a decoder graph. Raises ``LoadError`` for one that cannot be driven token by token, by name."""

    def __init__(self, session: Any, where: str) -> None:
        self.session, self.where = session, where
        ports = {port.name: port for port in session.get_inputs()}
        outputs = [port.name for port in session.get_outputs()]
        self.types = {name: np.dtype(numpy_dtype(p.type) or "int64") for name, p in ports.items()}
        self.past = tuple(self._past(p, outputs) for name, p in ports.items() if name.startswith("past"))
        self._expect(ports, outputs)
        self.keep_rank = len(ports["num_logits_to_keep"].shape or []) if "num_logits_to_keep" in ports else 0
        shape = list(ports["input_ids"].shape)
        self.single = shape[1] == 1  # takes one token a call
        self.rows = not isinstance(shape[0], int) and all(p.rows for p in self.past)
        self.every = True  # gives the logits of every token
        self.chunks = bool(self.past) and not self.single  # several tokens after a past
        self.shared = False
        self.batches = False
        self.vocab_size = 0
        self.notes: list[str] = []
        _probe(self)

    # ---- ports ------------------------------------------------------------------------

    def _past(self, port: Any, outputs: list[str]) -> PastPort:
        shape = list(port.shape or [])
        # Older exports keep key and value in one state: [2, batch, heads, tokens, size].
        batch = 1 if len(shape) == 5 and shape[0] == 2 else 0
        open_axes = [i for i, dim in enumerate(shape) if not isinstance(dim, int) and i != batch]
        named = [i for i in open_axes if any(word in str(shape[i]).lower() for word in _WORDS)]
        if not open_axes:
            raise NotSupportedError(
                f"the state `{port.name}` {shape} does not grow with the tokens: a recurrent state or a cache of "
                "fixed size, which cannot be cut or shared here",
                code="architecture.unsupported",
            )
        chosen = open_axes if len(open_axes) == 1 else named
        fixed = isinstance(shape[batch], int) and shape[batch] != 1
        if len(chosen) != 1 or fixed or present_of(port.name) not in outputs:
            what = f"its output `{present_of(port.name)}`" if len(chosen) == 1 and not fixed else f"its axes {shape}"
            raise self._mismatch(f"the past state `{port.name}` cannot be carried on: look at {what}")
        dims = [
            1 if i == batch else 0 if i == chosen[0] else int(dim)
            for i, dim in enumerate(shape)
            if _sized(dim, i, batch, chosen)
        ]
        if len(dims) != len(shape):
            raise self._mismatch(f"the past state `{port.name}` leaves more than its length open: {shape}")
        dtype = numpy_dtype(port.type)
        if dtype is None:
            raise self._mismatch(f"the past state `{port.name}` is {port.type}, which has no array form here")
        rows = not isinstance(shape[batch], int)
        return PastPort(port.name, present_of(port.name), np.dtype(dtype), tuple(dims), batch, chosen[0], rows)

    def _expect(self, ports: dict[str, Any], outputs: list[str]) -> None:
        strange = [n for n in ports if n not in GIVEN and not n.startswith("past")]
        if strange:
            raise self._mismatch(f"nothing here gives the graph its input `{strange[0]}`")
        if "input_ids" not in ports or "logits" not in outputs:
            lacking = "input `input_ids`" if "input_ids" not in ports else "output `logits`"
            raise self._mismatch(f"the graph has no {lacking}")
        for name in ("input_ids", "attention_mask", "position_ids"):
            if name in ports and len(ports[name].shape or []) != 2:
                raise self._mismatch(f"the input `{name}` {ports[name].shape} is not [batch, tokens]")
        length = ports["input_ids"].shape[1]
        if isinstance(length, int) and (length != 1 or not self.past):
            raise self._mismatch(f"the graph takes exactly {length} tokens a call")

    def _mismatch(self, message: str) -> LoadError:
        return LoadError(f"{message} (in `{self.where}`)", code="graph.io_mismatch")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token's states."""
        return sum(int(np.prod([d for d in p.shape if d])) * p.dtype.itemsize for p in self.past)

    # ---- states -----------------------------------------------------------------------

    def empty(self, rows: int = 1, width: int = 0) -> Cache:
        """States without a token; ``width`` is the capacity of shared buffers."""
        return self._cache([np.zeros(self._shape(p, rows, width), p.dtype) for p in self.past], rows, width)

    def join(self, parts: Sequence[tuple[Cache, int, int, int]], width: int) -> Cache:
        """The rows ``(cache, row, length, kept)`` as rows of one cache of ``width`` tokens: of a row that holds
        ``length`` tokens the first ``kept``, at the start of a shared buffer, at the end of a grown one."""
        arrays = []
        for place, port in enumerate(self.past):
            target = np.zeros(self._shape(port, len(parts), width), port.dtype)
            for i, (cache, row, length, kept) in enumerate(parts):
                source = cache.values[place].numpy()
                start = 0 if self.shared else cache.width - length
                to = 0 if self.shared else width - kept
                target[_cut(port, i, to, to + kept)] = source[_cut(port, row, start, start + kept)]
            arrays.append(target)
        return self._cache(arrays, len(parts), width)

    def _cache(self, arrays: list[NDArray[Any]], rows: int, width: int) -> Cache:
        make = runtime().OrtValue.ortvalue_from_numpy
        return Cache(tuple(make(array) for array in arrays), width, rows)

    def _shape(self, port: PastPort, rows: int, width: int) -> tuple[int, ...]:
        return tuple(rows if i == port.batch else width if i == port.axis else dim for i, dim in enumerate(port.shape))

    # ---- computing --------------------------------------------------------------------

    def run(
        self, ids: NDArray[np.int64], lengths: Sequence[int], cache: Cache, keep: int = 1
    ) -> tuple[NDArray[Any] | None, Cache]:
        """Appends ``ids`` [rows, new] to rows that hold ``lengths`` tokens. Returns the logits of the last ``keep``
        tokens, [rows, keep or fewer, vocab] in the graph's own type (None for 0), and the states after."""
        binding = self.session.io_binding()
        for name, array in self._feeds(ids, lengths, cache, keep).items():
            binding.bind_ortvalue_input(name, runtime().OrtValue.ortvalue_from_numpy(array))
        binding.bind_output("logits", "cpu")
        for port, value in zip(self.past, cache.values, strict=True):
            binding.bind_ortvalue_input(port.name, value)
            if self.shared:
                binding.bind_ortvalue_output(port.present, value)
            else:
                binding.bind_output(port.present, "cpu")
        try:
            self.session.run_with_iobinding(binding)
        except Exception as error:  # the runtime's exceptions have no common base
            raise InputError(f"ONNX Runtime cannot run this step: {first_line(error)}", code="runtime.failed") from None
        logits, *presents = binding.get_outputs()
        if not self.shared:
            cache = Cache(tuple(presents), cache.width + ids.shape[1] if presents else 0, len(lengths))
        if not keep:
            return None, cache
        found: NDArray[Any] = logits.numpy()
        return found.reshape(len(lengths), -1, found.shape[-1])[:, -keep:], cache

    def _feeds(self, ids: NDArray[np.int64], lengths: Sequence[int], cache: Cache, keep: int) -> dict[str, Any]:
        new = ids.shape[1]
        held = np.asarray(lengths, np.int64)[:, None]  # [rows, 1]
        total = (int(held.max()) if self.shared else cache.width) + new
        places = np.arange(total)[None]
        given: dict[str, NDArray[Any]] = {
            "input_ids": ids,
            "attention_mask": places < held + new if self.shared else places >= total - new - held,
            "position_ids": held + np.arange(new),
            "use_cache_branch": np.array([bool(held.any())]),
            "num_logits_to_keep": np.full([1] * self.keep_rank, max(keep, 1)),  # a number or a list of one
        }
        return {name: np.array(given[name], self.types[name], order="C") for name in given if name in self.types}


def _sized(dim: Any, place: int, batch: int, chosen: list[int]) -> bool:
    return place == batch or place in chosen or isinstance(dim, int)


def _cut(port: PastPort, row: int, start: int, stop: int) -> tuple[Any, ...]:
    """Index of the tokens ``start`` to ``stop`` of one row."""
    return tuple(
        row if i == port.batch else slice(start, stop) if i == port.axis else slice(None)
        for i in range(len(port.shape))
    )


# ---- the probe -----------------------------------------------------------------------------------


def _probe(graph: DecoderGraph) -> None:
    """Sets what the graph proves to do. Raises ``LoadError`` where its cache does not give what it gives without."""
    tokens = list(range(1, _PROBE + 1))
    whole = _last(graph, tokens, [1] * _PROBE if graph.single else [_PROBE])
    graph.vocab_size = whole.shape[-1]
    if not graph.past:
        graph.every = _logits(graph, tokens, [_PROBE], _PROBE).shape[0] == _PROBE
        return
    if not graph.single:
        graph.every = _logits(graph, tokens, [_PROBE], _PROBE).shape[0] == _PROBE
        apart = _apart(_last(graph, tokens, [1] * _PROBE), whole)
        if not apart < 0.25:  # nan too; dynamic quantization alone stays far below
            raise LoadError(
                f"token by token the logits are off by {apart:.0%} of the largest: the past of `{graph.where}` is not "
                "carried on",
                code="graph.io_mismatch",
            )
        near = max(_exact(graph), 2 * apart)
        graph.chunks = _holds(lambda: _apart(_last(graph, tokens, [2, 3]), whole), near)
        if not graph.chunks:
            graph.notes.append("takes one token at a time after the first call: long prompts are slow")
    near = _exact(graph)
    steps = [1] * _PROBE if not graph.chunks else [2, 1, 2]
    wanted = _last(graph, tokens, steps)
    graph.shared = True
    graph.shared = _holds(lambda: _apart(_last(graph, tokens, steps, 2 * _PROBE), wanted), near)
    if graph.rows:
        graph.batches = _holds(lambda: _ragged(graph, tokens), near)


def _exact(graph: DecoderGraph) -> float:
    """Largest difference, in parts of the largest logit, that rounding explains."""
    return 1e-2 if any(p.dtype == np.float16 for p in graph.past) else 1e-4


def _holds(difference: Any, near: float) -> bool:
    try:
        return bool(difference() <= near)
    except TurnoutError:  # the graph refuses the form that was tried
        return False


def _apart(found: NDArray[Any], wanted: NDArray[Any]) -> float:
    return float(np.abs(found - wanted).max() / max(float(np.abs(wanted).max()), 1e-6))


def _logits(graph: DecoderGraph, tokens: list[int], steps: list[int], keep: int, width: int = 0) -> NDArray[Any]:
    """Logits [tokens given, vocab] of the last call, float32."""
    cache, held, found = graph.empty(1, width), 0, None
    for count in steps:
        ids = np.array([tokens[held : held + count]], np.int64)
        found, cache = graph.run(ids, [held], cache, keep)
        held += count
    assert found is not None
    return found[0].astype(np.float32)


def _last(graph: DecoderGraph, tokens: list[int], steps: list[int], width: int = 0) -> NDArray[Any]:
    return _logits(graph, tokens, steps, 1, width)[-1]


def _ragged(graph: DecoderGraph, tokens: list[int]) -> float:
    """Difference of two rows of unequal length, computed together twice, from each alone."""
    texts = [[*tokens[:1]], tokens[::-1][:3]]
    width = 2 * _PROBE if graph.shared else 0
    parts, alone = [], []
    for text in texts:
        cache = graph.empty(1, width)
        for place, token in enumerate(text):
            _, cache = graph.run(np.array([[token]], np.int64), [place], cache)
        parts.append((cache, 0, len(text), len(text)))
        more = [*text, tokens[1], tokens[2]]
        alone.append(_last(graph, more, [1] * len(more), width))
    lengths = [len(text) for text in texts]
    cache = graph.join(parts, width or max(lengths))
    found = None
    for turn in (1, 2):
        found, cache = graph.run(np.full((2, 1), tokens[turn], np.int64), lengths, cache)
        lengths = [length + 1 for length in lengths]
    assert found is not None
    return _apart(found[:, -1].astype(np.float32), np.stack(alone))
