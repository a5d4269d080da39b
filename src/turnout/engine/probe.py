"""The smallest real request of a generating session, and what its answer must be like."""

from __future__ import annotations

import math
import time
from typing import Any

from turnout.backends.base import Evidence, EvidenceLevel, failed, passed
from turnout.engine.request import GenerationRequest
from turnout.engine.session import EngineSession
from turnout.types import Request, Sampling, Task

TEXT = "The capital of France is"
NEW = 16


def probe(session: EngineSession) -> Evidence:
    """Sixteen greedy tokens with their probabilities, every one a finite number; measures their speed."""
    task = session.plan.case.task
    inputs: dict[str, Any] = {"text": TEXT}
    if task == Task.CHAT:
        inputs = {"messages": [{"role": "user", "content": TEXT}]}
    elif task == Task.TEXT_GENERATION:
        inputs = {"prompt": TEXT}
    prompt, encoder = session.encoder.ids(Request(task, inputs))
    sampling = Sampling(max_tokens=NEW, logprobs=0, ignore_eos=True)
    started = time.perf_counter()
    drawn, strange = 0, ""
    session.engine.add(GenerationRequest("probe", prompt, sampling, encoder=encoder, cache=False))
    while session.engine.has_work:
        for event in session.engine.step():
            strange = strange or event.error
            drawn += len(event.tokens)
            bad = [value for value in event.logprobs or [] if not math.isfinite(value.logprob)]
            if bad:
                strange = f"token {bad[0].token} has the log probability {bad[0].logprob}"
    if strange:
        return failed(EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", strange)
    seconds = time.perf_counter() - started
    measurements = {"latency_s": seconds, "tokens_per_s": drawn / max(seconds, 1e-9)}
    return passed(EvidenceLevel.EXECUTED, measurements=measurements, duration=seconds)
