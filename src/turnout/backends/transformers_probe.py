"""The smallest real request of each task, and what its answer must be like."""

from __future__ import annotations

import math
import time
from typing import Any

from turnout.backends import transformers_models as models
from turnout.backends.base import Evidence, EvidenceLevel, failed, passed
from turnout.backends.transformers_requirements import history_needed
from turnout.tasks.contract import (
    EmbeddingsOutput,
    ForecastOutput,
    LabelsOutput,
    RankingOutput,
    SpansOutput,
    TensorsOutput,
    TextOutput,
)
from turnout.types import Request, Sampling, Task

PROBE_TOKENS = 16
TEXT = "The capital of France is"


def probe(session: Any) -> Evidence:
    """Evidence of one run: finite numbers, and seconds or tokens per second."""
    request = sample_request(session)
    started = time.perf_counter()
    if session.plan.case.task in models.GENERATING:
        strange = _strange_logits(session, request)
        if strange:
            return failed(EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", strange)
        started = time.perf_counter()
    output = session.run(request)
    seconds = time.perf_counter() - started
    if not all(math.isfinite(number) for number in numbers_of(output)):
        message = "the answer holds numbers that are not finite"
        return failed(EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", message)
    measurements = {"latency_s": seconds}
    if isinstance(output, TextOutput):
        measurements["tokens_per_s"] = max(output.completion_tokens, 1) / max(seconds, 1e-9)
    return passed(EvidenceLevel.EXECUTED, measurements=measurements)


def sample_request(session: Any) -> Request:
    """A request that fits the session's task and model."""
    task = session.plan.case.task
    greedy = Sampling(max_tokens=PROBE_TOKENS)
    texts = {"texts": [TEXT]}
    known: dict[str, dict[str, Any]] = {
        Task.TEXT_GENERATION: {"prompt": TEXT},
        Task.CHAT: {"messages": [{"role": "user", "content": TEXT}]},
        Task.RERANK: {"query": TEXT, "documents": [TEXT, "Bread is made of flour."]},
        Task.QUESTION_ANSWERING: {"question": "What is it?", "context": TEXT},
    }
    inputs = known.get(task)
    if inputs is not None:
        return Request(task, inputs, greedy)
    if task in models.GENERATING:
        return Request(task, {"text": TEXT}, greedy)
    if task == Task.FILL_MASK:
        return Request(task, {"texts": [f"{TEXT} {session.adapter.mask}"]})
    return Request(task, _array_inputs(session, task) or texts, greedy)


def _array_inputs(session: Any, task: str) -> dict[str, Any]:
    import numpy as np

    config = session.model.config
    if task == Task.TIME_SERIES:
        return {"history": np.sin(np.arange(sum(history_needed(config)), dtype=np.float32) / 5)}
    if task == Task.DECISION:
        shapes = {"states": (2, config.state_dim), "actions": (2, config.act_dim), "returns_to_go": (2, 1)}
        return {**{name: np.zeros(shape, np.float32) for name, shape in shapes.items()}, "timesteps": np.arange(2)}
    if task == Task.IMAGE_CLASSIFICATION:
        return {"image": np.full((64, 64, 3), 127, np.uint8)}
    if task == Task.ASR:
        return {"audio": np.zeros(16000, np.float32), "sampling_rate": 16000}
    return {}


def _strange_logits(session: Any, request: Request) -> str:
    """What is wrong with the first logits, '' when they are finite."""
    import torch

    ids = torch.tensor([session.encode(request)], device=session.device)
    inputs: dict[str, Any] = {"input_ids": ids}
    if session.model.config.is_encoder_decoder:
        start = session.model.generation_config.decoder_start_token_id
        inputs["decoder_input_ids"] = torch.tensor([[start if start is not None else 0]], device=session.device)
    with torch.inference_mode(), models.hushed():
        logits = session.model(**inputs).logits
    return "" if bool(torch.isfinite(logits).all()) else "the logits of the first step are not finite"


def numbers_of(output: Any) -> list[float]:
    """Every number of an output value."""
    import numpy as np

    if isinstance(output, EmbeddingsOutput):
        return [float(value) for value in output.vectors.reshape(-1)]
    if isinstance(output, LabelsOutput):
        return [score.score for row in output.labels for score in row]
    if isinstance(output, SpansOutput):
        return [span.score for row in output.spans for span in row]
    if isinstance(output, RankingOutput):
        return [document.score for document in output.ranking]
    if isinstance(output, ForecastOutput):
        return [*output.mean, *(value for row in output.quantiles.values() for value in row)]
    if isinstance(output, TensorsOutput):
        return [float(v) for array in output.tensors.values() for v in np.asarray(array, np.float64).reshape(-1)]
    return []
