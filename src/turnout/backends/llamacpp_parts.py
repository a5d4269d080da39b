"""A step in as many calls of llama.cpp as it needs: usually one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from turnout.engine.executor import Row


@dataclass(frozen=True, slots=True)
class Limits:
    """What one call may have: ``tokens``, ``outputs`` (rows of logits); ``equal``: only rows of one length."""

    tokens: int
    outputs: int
    equal: bool = False


@dataclass(slots=True)
class Piece:
    """Tokens ``first`` to ``last`` of a row, with the rows of logits they fill from ``output`` on."""

    row: Row
    first: int
    last: int
    logits: int
    output: int


Part = tuple[str | None, list[Piece]]  # an adapter and what is computed with it in one call


def fits(rows: Sequence[Row], outputs: int, limits: Limits) -> bool:
    """Whether one call computes the step of these rows with ``outputs`` rows of logits."""
    if outputs > limits.outputs or len({row.adapter for row in rows}) > 1:
        return False
    lengths = [len(row.tokens) for row in rows]
    return sum(lengths) <= limits.tokens and not (limits.equal and len(set(lengths)) > 1)


def parts(rows: Sequence[Row], limits: Limits, adapter: str | None) -> Iterator[Part]:
    """Calls that together compute the step: each of one adapter, ``adapter`` first, and within ``limits``.

    A row's pieces keep their order. ``output`` counts in the order of ``rows``.
    """
    groups: dict[tuple[str | None, int], list[Piece]] = {}
    output = 0
    for row in rows:
        length = len(row.tokens)
        whole = Piece(row, 0, length, row.logits, output)
        groups.setdefault((row.adapter, length if limits.equal else 0), []).append(whole)
        output += row.logits
    for key in sorted(groups, key=lambda key: (key[0] != adapter, key[0] or "", key[1])):
        for part in _packed(groups[key], limits):
            yield key[0], part


def _packed(pieces: Sequence[Piece], limits: Limits) -> Iterator[list[Piece]]:
    part: list[Piece] = []
    for whole in pieces:
        # Of rows that must stay of one length, one that does not fit is computed by itself.
        apart = limits.equal and not _room(part, limits, whole)
        if apart and part:
            yield part
            part = []
        rest: Piece | None = whole
        while rest is not None:
            head, rest = _cut(rest, part, limits)
            if head is not None:
                part.append(head)
            if rest is not None:
                yield part
                part = []
    if part:
        yield part


def _room(part: Sequence[Piece], limits: Limits, piece: Piece) -> bool:
    tokens = sum(other.last - other.first for other in part) + piece.last - piece.first
    return tokens <= limits.tokens and sum(other.logits for other in part) + piece.logits <= limits.outputs


def _cut(piece: Piece, part: Sequence[Piece], limits: Limits) -> tuple[Piece | None, Piece | None]:
    """What of the piece still goes into ``part``, and the rest."""
    tokens = limits.tokens - sum(other.last - other.first for other in part)
    outputs = limits.outputs - sum(other.logits for other in part)
    silent = piece.last - piece.logits  # the first token that has logits
    last = min(piece.last, piece.first + tokens, silent + outputs)
    if last <= piece.first:
        return None, piece
    if last == piece.last:
        return piece, None
    logits = max(0, last - max(silent, piece.first))
    head = Piece(piece.row, piece.first, last, logits, piece.output)
    return head, Piece(piece.row, last, piece.last, piece.logits - logits, piece.output + logits)
