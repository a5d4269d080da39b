"""How far a backend's or a quantization's logits are from full precision on real text.

For every position of a text the two next-token distributions are compared: KL divergence of the
reference from the other (nats), whether both have the same most likely token, and the perplexity of the
text itself. The reference is the same package computed in float32 by the torch executor, or whatever case
is named.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from turnout.backends.base import Case
from turnout.config import WORKER
from turnout.package.facts import Package
from turnout.quantize.quality import Quality, compare, sample_text
from turnout.worker.judge import case_message, free_memory
from turnout.worker.process import Worker


@dataclass(slots=True)
class Candidate:
    """One case to compare: a backend on a package with options."""

    name: str
    backend: str
    package: Package
    case: Case


@dataclass(slots=True)
class Compared:
    """A candidate's distance from the reference over ``tokens`` positions."""

    name: str
    quality: Quality


def compare_all(
    reference: Candidate, others: list[Candidate], *, tokens: int = 512, text: str | None = None
) -> list[Compared]:
    """Every candidate against the reference, on the same token ids. Each runs in a worker of its own.

    Raises what loading raises.
    """
    import numpy as np

    results = []
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "reference.npy"
        ids = _score(reference, text or sample_text(), [], str(base), tokens)
        for number, other in enumerate(others):
            path = Path(folder) / f"{number}.npy"
            _score(other, "", ids, str(path), tokens)
            expected, found = (np.load(file, mmap_mode="r") for file in (base, path))
            width = min(expected.shape[1], found.shape[1])
            count = min(len(expected), len(found))
            results.append(Compared(other.name, compare(expected[:count, :width], found[:count, :width], ids)))
            path.unlink()
    return results


def _score(candidate: Candidate, text: str, ids: list[int], path: str, tokens: int) -> list[int]:
    options: dict[str, Any] = {"slots": 1, "context": tokens, "cache_tokens": tokens}
    with Worker() as worker:
        answer = worker.call(
            "score",
            timeout=WORKER.load_s,
            memory_bytes=free_memory(),
            backend=candidate.backend,
            case=case_message(candidate.package, candidate.case),
            options=options,
            text=text,
            ids=ids,
            path=path,
        )
    return [int(token) for token in answer]
