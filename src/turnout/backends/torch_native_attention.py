"""Attention over ragged rows behind Transformers' attention interface.

The model computes one flat batch [1, total tokens] without a cache of its own and calls the function
registered here once per attention layer; the function appends keys and values to the slots' rows and
lets every query see the keys of its own row. Which keys a layer sees (all, a sliding window, a chunk)
is a ``Span`` learned at load from the mask that the library would have built
(``torch_native_probe``), so no mask is built for the flat batch.

The n-th call of a forward pass belongs to the n-th pair of rows: a module that is used twice, or that
numbers its layers oddly, still gets rows of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from turnout.backends.torch_native_cache import SlotCache
from turnout.errors import TurnoutError

NAME = "turnout_rows"
# Arguments that say nothing about which keys count or how much.
NEUTRAL = frozenset(
    {
        *("position_ids", "cache", "past_key_values", "use_cache", "cache_position", "position_embeddings"),
        *("output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "training"),
        *("layer_idx", "token_type_ids", "input_ids", "shared_kv_states", "num_items_in_batch"),
    }
)
HONOURED = frozenset({"sliding_window", "softcap", "s_aux", "is_causal"})
# Elements of one block of scores per head: bounds masks and, where scores are spelled out, memory.
BLOCK = 1 << 21
# Bytes of keys and values that may be read in vain to save one kernel call (about 15 microseconds at
# 11 GB/s, one thread, measured).
CALL_BYTES = 160_000

_active = threading.local()


@dataclass(frozen=True, slots=True)
class Span:
    """Which keys a query at a position sees: all before it, the last ``size``, or those of its chunk."""

    kind: str = "full"  # full, window or chunk
    size: int = 0

    def low(self, position: int) -> int:
        """First position that a query at ``position`` sees; the last is its own."""
        if self.kind == "window":
            return max(0, position - self.size + 1)
        if self.kind == "chunk":
            return position // self.size * self.size
        return 0

    def whole(self, count: int) -> bool:
        """Whether the first ``count`` tokens all see each other, later ones excepted."""
        return self.kind == "full" or count <= self.size


@dataclass(slots=True)
class LayerPlan:
    """What is known of the n-th attention call: the keys it sees, and an earlier call whose keys and
    values it is handed again (``source``), which then are not stored twice."""

    span: Span
    source: int | None = None


@dataclass(slots=True)
class Piece:
    """One kernel call: flat queries ``begin`` .. ``end`` against the positions ``low`` .. ``high`` of the
    slots ``first`` .. ``last`` (exclusive). Several slots have one query each; one slot has any number.
    ``positions`` are the queries' own."""

    begin: int
    end: int
    first: int
    last: int
    low: int
    high: int
    positions: list[int]
    lows: list[int]  # first position that each query sees
    causal: bool = False  # the queries are exactly the keys
    masks: dict[Any, Any] = field(default_factory=dict)  # by element type

    @property
    def decodes(self) -> bool:
        """Whether every slot has one query."""
        return self.end - self.begin == self.last - self.first


@dataclass(slots=True)
class Prefill:
    """Rows of more than one token: flat ``begin`` .. ``end`` of ``slot`` from position ``start`` on."""

    slot: int
    begin: int
    end: int
    start: int


class Layout:
    """Where the tokens of one step are: first rows of one token by slot, then the others.

    ``singles`` are pairs (slot, position). ``cell`` is the number of bytes of one token in one layer.
    """

    def __init__(self, singles: Sequence[tuple[int, int]], prefills: Sequence[Prefill], cell: int, device: Any) -> None:
        import torch

        self.singles, self.prefills = singles, prefills
        self.slack = max(1, CALL_BYTES // max(1, cell))
        self.slots = torch.tensor([slot for slot, _ in singles], dtype=torch.long, device=device)
        self.positions = torch.tensor([position for _, position in singles], dtype=torch.long, device=device)
        self._pieces: dict[Span, list[Piece]] = {}

    def pieces(self, span: Span) -> list[Piece]:
        """Kernel calls of a layer that sees ``span``; planned once a step."""
        found = self._pieces.get(span)
        if found is None:
            found = self._pieces[span] = [*self._decoding(span), *self._filling(span)]
        return found

    def _decoding(self, span: Span) -> list[Piece]:
        """Neighbouring slots are joined while the keys read in vain cost less than the calls saved."""
        pieces: list[Piece] = []
        useful = 0
        for index, (slot, position) in enumerate(self.singles):
            low, high = span.low(position), position + 1
            last = pieces[-1] if pieces else None
            if last is not None and last.last == slot:
                joined = (max(last.high, high) - min(last.low, low)) * (slot + 1 - last.first)
                if joined - useful - (high - low) <= self.slack * (slot - last.first):
                    last.end, last.last = index + 1, slot + 1
                    last.low, last.high = min(last.low, low), max(last.high, high)
                    last.positions.append(position)
                    last.lows.append(low)
                    useful += high - low
                    continue
            pieces.append(Piece(index, index + 1, slot, slot + 1, low, high, [position], [low]))
            useful = high - low
        return pieces

    def _filling(self, span: Span) -> list[Piece]:
        pieces = []
        for row in self.prefills:
            count, stop = row.end - row.begin, row.start + row.end - row.begin
            if row.start == 0 and span.whole(count):
                pieces.append(_block(row, span, 0, count, causal=True))
                continue
            size = max(16, min(512, BLOCK // stop))
            for first in range(0, count, size):
                pieces.append(_block(row, span, first, min(first + size, count)))
        return pieces


def _block(row: Prefill, span: Span, first: int, last: int, causal: bool = False) -> Piece:
    """Queries ``first`` .. ``last`` (exclusive) of a row's tokens with the keys that one of them sees."""
    positions = list(range(row.start + first, row.start + last))
    lows = [span.low(position) for position in positions]
    where = (row.begin + first, row.begin + last, row.slot, row.slot + 1)
    return Piece(*where, lows[0], positions[-1] + 1, positions, lows, causal)


class Run:
    """One forward pass over a layout: what the attention function needs and Transformers cannot carry."""

    def __init__(self, cache: SlotCache, layers: list[LayerPlan], layout: Layout) -> None:
        self.cache, self.layers, self.layout = cache, layers, layout
        self.calls = 0

    def __enter__(self) -> Run:
        _active.run = self
        return self

    def __exit__(self, *_: object) -> None:
        _active.run = None

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None, extra: dict[str, Any]
    ) -> Any:
        """Output [1, tokens, heads, value width] of ``query`` [1, heads, tokens, width] over the rows to
        which ``key`` and ``value`` [1, key-value heads, tokens, width] are appended first."""
        if mask is not None:
            raise TurnoutError(f"`{type(module).__name__}` builds a mask of its own", code="architecture.unsupported")
        index = self.calls
        self.calls += 1
        given = query.dtype
        if self.cache.compute is not None:
            query, key, value = (part.to(self.cache.compute) for part in (query, key, value))
        plan = self.layers[index]
        rows = self.cache.layer(index if plan.source is None else plan.source, key, value)
        if plan.source is None:
            self._append(rows[0], key[0])
            self._append(rows[1], value[0])
        output = attend(
            self.layout.pieces(plan.span),
            (query, key, value),
            rows,
            scaling if scaling is not None else query.shape[-1] ** -0.5,
            extra.get("softcap"),
            extra.get("s_aux"),
            exact=not self.cache.quantized,
        )
        return output.to(given)

    def _append(self, rows: Any, fresh: Any) -> None:
        layout = self.layout
        if layout.singles:
            rows.write_one(layout.slots, layout.positions, fresh[:, : len(layout.singles)])
        for row in layout.prefills:
            rows.write_many(row.slot, row.start, fresh[:, row.begin : row.end])


def attend(
    pieces: list[Piece],
    tensors: tuple[Any, Any, Any],
    rows: tuple[Any, Any],
    scaling: float,
    softcap: float | None,
    sinks: Any,
    *,
    exact: bool,
) -> Any:
    """All kernel calls of one layer. ``exact``: rows read as they were written, so that a prompt that is
    computed at once may use the keys at hand."""
    query, key, value = tensors
    tokens, heads, groups = query.shape[2], query.shape[1], query.shape[1] // key.shape[1]
    output = None
    for piece in pieces:
        part = query[:, :, piece.begin : piece.end]
        if piece.causal and exact:
            keys, values = key[:, :, piece.begin : piece.end], value[:, :, piece.begin : piece.end]
        else:
            keys = rows[0].read(piece.first, piece.last, piece.low, piece.high)
            values = rows[1].read(piece.first, piece.last, piece.low, piece.high)
        if piece.decodes:
            # [slots, key-value heads, heads of a group, width]: the heads of a group are the queries.
            part = part[0].transpose(0, 1).unflatten(1, (-1, groups))
        if softcap is not None or sinks is not None:
            result = _spelled_out(part, keys, values, piece, scaling, softcap, sinks)
        else:
            result = _fused(part, keys, values, piece, scaling)
        if piece.decodes:
            result = result.flatten(1, 2)  # [slots, heads, width]
        else:
            result = result[0].transpose(0, 1)  # [queries, heads, width]
        if len(pieces) == 1:
            return result.unsqueeze(0)
        if output is None:
            output = query.new_empty((1, tokens, heads, value.shape[-1]))
        output[0, piece.begin : piece.end] = result
    return output


def _fused(query: Any, keys: Any, values: Any, piece: Piece, scaling: float) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    causal = piece.causal and not piece.decodes
    mask = None if causal else _mask(piece, query)
    grouped = query.shape[1] != keys.shape[1]
    return scaled_dot_product_attention(
        query, keys, values, attn_mask=mask, is_causal=causal, scale=scaling, enable_gqa=grouped
    )


def _spelled_out(
    query: Any, keys: Any, values: Any, piece: Piece, scaling: float, softcap: float | None, sinks: Any
) -> Any:
    """Scores in full, for what fused kernels leave out: soft caps (Gemma 2: cap * tanh(score / cap)) and
    sinks (GPT-OSS: one more score per head that takes probability and gives no value)."""
    import torch

    batch, heads, count, width = query.shape
    groups = heads // keys.shape[1]
    packed = query.reshape(batch, keys.shape[1], groups * count, width)
    scores = torch.matmul(packed, keys.transpose(2, 3)).float().mul_(scaling).view(batch, heads, count, -1)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    mask = _mask(piece, scores)
    if mask is not None:
        scores += mask
    if sinks is not None:
        # While decoding, the heads of a group stand where queries do.
        shape = (1, heads, count, 1) if piece.decodes else (1, heads, 1, 1)
        sink = sinks.float().view(shape).expand(batch, heads, count, 1)
        scores = torch.cat([scores, sink], -1).softmax(-1)[..., :-1]
    else:
        scores = scores.softmax(-1)
    weights = scores.to(values.dtype).view(batch, keys.shape[1], groups * count, -1)
    return torch.matmul(weights, values).view(batch, heads, count, -1)


def _mask(piece: Piece, like: Any) -> Any:
    """Additive mask, [slots, 1, 1, keys] while decoding, else [queries, keys]; None when all is seen."""
    if like.dtype not in piece.masks:
        piece.masks[like.dtype] = _made(piece, like)
    return piece.masks[like.dtype]


def _made(piece: Piece, like: Any) -> Any:
    import torch

    lows, keys = piece.lows, torch.arange(piece.low, piece.high, device=like.device)
    if all(
        low == piece.low and position + 1 == piece.high for low, position in zip(lows, piece.positions, strict=True)
    ):
        return None
    first = torch.tensor(lows, device=like.device).unsqueeze(1)
    own = torch.tensor(piece.positions, device=like.device).unsqueeze(1)
    hidden = (keys < first) | (keys > own)  # [queries, keys]
    mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device).masked_fill_(hidden, float("-inf"))
    return mask[:, None, None] if piece.decodes else mask


def rows_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    **extra: Any,
) -> tuple[Any, None]:
    """The function that Transformers calls (``ALL_ATTENTION_FUNCTIONS``); dropout is off in evaluation."""
    run = current()
    if run is None:
        raise TurnoutError("attention over rows outside an executor's step", code="runtime.failed")
    return run.attend(module, query, key, value, attention_mask, scaling, extra), None


def current() -> Run | None:
    """The run of this thread, if one is going on."""
    return getattr(_active, "run", None)


def register() -> None:
    """Makes the function known to Transformers. No mask is registered under its name, so the library
    builds none."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, rows_attention)
