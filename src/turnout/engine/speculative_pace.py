"""How many drafts a request proposes, from what became of its earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

DECAY = 0.9  # weight of an older draft's outcome against the next one's
PRIOR = (1.2, 0.8)  # accepted and refused drafts assumed before any was seen
FIRST_REST, LONGEST_REST = 8, 256  # calls without drafts


@dataclass(slots=True)
class _History:
    accepted: float = PRIOR[0]
    refused: float = PRIOR[1]
    rest: int = FIRST_REST  # length of the next rest
    resting: int = 0  # calls left of this one
    probing: bool = False  # the rest is over, one draft tells whether another follows
    start: int = 0  # length of the text at the last proposal
    drafts: list[int] = field(default_factory=list)


class Pace:
    """How many drafts are worth their cost, per request, from what became of earlier ones.

    Let a be the share of drafts accepted when the ones before them were (recent ones weigh more). A step with
    k drafts yields (1 - a^(k+1)) / (1 - a) tokens on average (Leviathan et al. 2023, eq. 1) and costs
    1 + k * (v + d) plain steps: d is the cost of one draft (0 for a look-up), v that of one more token in the
    target's step. With ``verify`` the cost of one more token in a step of one, v = B * verify /
    (1 + (B - 1) * verify) in a batch of B, because every request adds its drafts to the same step: drafts pay
    most when few requests run. The k of the best ratio is taken, 0 included.

    At 0 the request rests: no drafts for 8 calls, then one draft as a probe. A probe that is refused doubles
    the next rest (to 256 at most), one that is accepted starts the request anew.
    """

    def __init__(self, *, verify: float = 0.08, draft: float = 0.0) -> None:
        self.verify = verify
        self.draft = draft
        self._of: dict[str, _History] = {}

    def length(self, id: str, ids: Sequence[int], most: int, batch: int = 1) -> int:
        """Drafts to propose now, at most ``most``. Learns from ``ids`` what became of the last proposal."""
        history = self._of.setdefault(id, _History())
        outcome = self._learn(history, ids)
        if history.resting:
            history.resting -= 1
            history.probing = not history.resting
            return min(1, most) if history.probing else 0
        if history.probing:
            if outcome is None:  # nothing was proposed, or nothing has come since
                return min(1, most)
            history.probing = False
            if not outcome:
                return self._start_rest(history)
            history.accepted, history.refused, history.rest = *PRIOR, FIRST_REST
        best = self._best(history.accepted / (history.accepted + history.refused), most, batch)
        return best if best or not most else self._start_rest(history)

    def proposed(self, id: str, ids: Sequence[int], drafts: Sequence[int]) -> None:
        """What was proposed to follow ``ids``."""
        history = self._of[id]
        history.start, history.drafts = len(ids), list(drafts)

    def forget(self, id: str) -> None:
        """The request is over."""
        self._of.pop(id, None)

    def _start_rest(self, history: _History) -> int:
        history.resting = history.rest
        history.rest = min(history.rest * 2, LONGEST_REST)
        return 0

    def _best(self, rate: float, most: int, batch: int) -> int:
        cost = batch * self.verify / (1 + (batch - 1) * self.verify) + self.draft
        best, best_ratio, tokens, chance = 0, 1.0, 1.0, 1.0
        for k in range(1, most + 1):
            chance *= rate
            tokens += chance
            if tokens / (1 + k * cost) > best_ratio:
                best, best_ratio = k, tokens / (1 + k * cost)
        return best

    @staticmethod
    def _learn(history: _History, ids: Sequence[int]) -> bool | None:
        """Counts the last proposal's drafts; None when nothing is known of it, else whether the first fit.

        The text may have grown by fewer tokens than were proposed (the engine cuts drafts that do not fit its
        budget or a grammar), so only a token that differs counts as a refusal.
        """
        drafts, history.drafts = history.drafts, []
        came = [ids[i] for i in range(history.start, min(len(ids), history.start + len(drafts)))]
        if not came:
            return None
        accepted = 0
        while accepted < len(came) and came[accepted] == drafts[accepted]:
            accepted += 1
        for fits in [True] * accepted + [False] * (accepted < len(came)):
            history.accepted = history.accepted * DECAY + fits
            history.refused = history.refused * DECAY + (not fits)
        return accepted > 0
