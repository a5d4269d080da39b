"""Drafts in a step of the engine: who proposes them, what of them is computed, which rows they are drawn from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from turnout.engine.grammar import Matcher
from turnout.engine.job import Live
from turnout.engine.sampler import SampleRow

if TYPE_CHECKING:
    from turnout.engine.speculative import Proposer


def propose(lives: Sequence[Live], proposer: Proposer | None, most: int, vocab_size: int) -> None:
    """Sets the drafts of sequences that decode, at most ``most`` each: what a grammar forces, else what the
    proposer says. A proposer that fails gives none: guesses cost time, never a request."""
    asked: list[tuple[Live, int]] = []
    for live in lives:
        sequence = live.sequence
        room = min(most, sequence.max_length - len(sequence.tokens) - 1)
        if room > 0 and live.matcher is not None and (forced := live.matcher.forced()):
            sequence.drafts = forced[:room]
        elif room > 0 and proposer is not None:
            asked.append((live, room))
    if proposer is None or not asked:
        return
    try:
        proposals = proposer.propose_many(
            [(live.sequence.id, live.sequence.tokens, room, live.state) for live, room in asked]
        )
        cut = [lawful(drafts, room, vocab_size) for drafts, (_, room) in zip(proposals, asked, strict=True)]
    except Exception:
        return
    for (live, _room), drafts in zip(asked, cut, strict=True):
        live.sequence.drafts = fitting(drafts, live.matcher)


def lawful(drafts: Sequence[int], room: int, vocab_size: int) -> list[int]:
    """The first ``room`` drafts, as far as they are tokens at all."""
    kept: list[int] = []
    for token in drafts[:room]:
        if not 0 <= token < vocab_size:
            break
        kept.append(int(token))
    return kept


def fitting(drafts: list[int], matcher: Matcher | None) -> list[int]:
    """Drafts as far as the grammar takes them; the matcher stays where it was."""
    if matcher is None:
        return drafts
    accepted = 0
    for token in drafts:
        if matcher.stopped or not matcher.accept(token):
            break
        accepted += 1
    if accepted:
        matcher.roll_back(accepted)
    return drafts[:accepted]


def rows_of(live: Live, known: int) -> list[SampleRow]:
    """Rows to draw from: none while tokens remain to be computed, else one and one per draft.

    Raises ``InputError`` where the grammar has no way on.
    """
    sequence, matcher = live.sequence, live.matcher
    if known < len(sequence.tokens):
        return []
    drafts = sequence.drafts
    if matcher is None:
        if not drafts:
            return [SampleRow(live.state)]
        return [SampleRow(live.state, tuple(drafts[:place])) for place in range(len(drafts) + 1)]
    rows: list[SampleRow] = []
    accepted = 0
    for place in range(len(drafts) + 1):
        rows.append(SampleRow(live.state, tuple(drafts[:place]), matcher.mask().copy()))
        if place < len(drafts):
            if not matcher.accept(drafts[place]):
                # Cannot be drawn under this mask either: the rows after it are never looked at.
                rows += [SampleRow(live.state, tuple(drafts[:p])) for p in range(place + 1, len(drafts) + 1)]
                break
            accepted += 1
    if accepted:
        matcher.roll_back(accepted)
    return rows
