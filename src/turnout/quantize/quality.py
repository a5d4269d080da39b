"""How far one set of logits is from another on the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PART = 64  # positions compared at a time: float64 copies of a large vocabulary stay small


@dataclass(slots=True)
class Quality:
    """Distance of logits from a reference over ``tokens`` positions.

    ``kl_mean`` and ``kl_p99`` are nats of KL(reference || other) per position, ``top1_agreement`` the share of
    positions with the same most likely token, ``perplexity_ratio`` the other's perplexity of the text over the
    reference's (1 when both know it equally well).
    """

    kl_mean: float
    kl_p99: float
    top1_agreement: float
    perplexity_ratio: float
    tokens: int


def compare(reference: NDArray[Any], other: NDArray[Any], ids: Sequence[int]) -> Quality:
    """Compares logits [tokens, vocab] of the positions of a text ``ids``; row i tells of token i + 1."""
    import numpy as np

    count = min(len(reference), len(other), len(ids))
    divergences, same, losses = [], 0, [0.0, 0.0]
    for start in range(0, count, PART):
        end = min(start + PART, count)
        p, q = (log_softmax(np.asarray(x[start:end], np.float64)) for x in (reference, other))
        divergences.append((np.exp(p) * (p - q)).sum(axis=1))
        same += int((p.argmax(axis=1) == q.argmax(axis=1)).sum())
        rows = np.arange(start, min(end, count - 1))
        following = np.asarray([ids[int(i) + 1] for i in rows], np.int64)
        for index, log in enumerate((p, q)):
            losses[index] -= float(log[rows - start, following].sum())
    every = np.concatenate(divergences)
    ratio = float(np.exp((losses[1] - losses[0]) / max(1, count - 1)))
    return Quality(float(every.mean()), float(np.quantile(every, 0.99)), same / count, ratio, count)


def log_softmax(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """Natural log of the softmax of each row of x [n, vocab]."""
    import numpy as np

    shifted: NDArray[np.float64] = x - x.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def sample_text() -> str:
    """English prose and a piece of code, written for this purpose."""
    return (Path(__file__).parent / "quality_text.txt").read_text(encoding="utf-8")
