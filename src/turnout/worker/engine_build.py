"""From a case to an engine that serves it: executor, vocabulary, proposer, thread and socket."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from turnout.backends import registry
from turnout.backends.base import Case
from turnout.engine.core import Engine, EngineConfig
from turnout.engine.executor import Executor, ExecutorOptions, Row, Step, Vocabulary
from turnout.engine.service import EngineService
from turnout.engine.speculative import DraftProposer, NGramProposer, Proposer
from turnout.engine.watermark import watermark
from turnout.errors import InputError, NotSupportedError
from turnout.tasks.prompting import PromptEncoder
from turnout.worker import wire
from turnout.worker.engine_host import EngineHost

SCORED_TOKENS = 128  # of one step, so that logits of a large vocabulary stay small
SPECULATION = ("", "ngram", "draft")


def has_engine(backend: str) -> bool:
    """Whether the backend offers an executor for the engine. Imports the backend's module only."""
    return hasattr(registry.get(backend), "executor")


def open_engine(
    backend: str,
    case: Case,
    options: dict[str, Any],
    engine: dict[str, Any],
    adapters: dict[str, str],
    draft: tuple[str, Case] | None = None,
) -> tuple[EngineHost, dict[str, Any]]:
    """An engine in service and what a client must know of it. Raises ``LoadError`` and keeps nothing."""
    settings = dict(engine)
    speculation = settings.pop("speculation", "")
    if speculation not in SPECULATION:
        raise InputError(f"`speculation={speculation}` is not one of ngram, draft")
    asked = wire.rebuild(options, ExecutorOptions)
    executor, vocabulary, dtype, recipe = _opened(backend, case, asked)
    proposer: Proposer | None = None
    service: EngineService | None = None
    try:
        if draft is not None:
            proposer = _draft(draft, asked, vocabulary)
        elif speculation == "ngram":
            proposer = NGramProposer()
        width = executor.capabilities.vocab_size
        asked_marks = settings.pop("watermarks", {})
        marks: dict[str, Any] = {name: watermark(given, width) for name, given in asked_marks.items()}
        core = Engine(executor, vocabulary, wire.rebuild(settings, EngineConfig), proposer=proposer, watermarks=marks)
        for name, path in adapters.items():
            core.load_adapter(name, path)
        encoder = PromptEncoder(case.artifact, case.options, vocabulary)
        service = EngineService(core)
        host = EngineHost(service, encoder)
    except BaseException:
        if service is not None:
            service.close()
        executor.close()
        if proposer is not None:
            proposer.close()
        raise
    return host, {
        "endpoint": host.endpoint,
        "capabilities": asdict(executor.capabilities),
        "dtype": dtype,
        "recipe": recipe,
        "eos_ids": sorted(vocabulary.eos_ids),
        "limit": core.limit,
    }


def score(backend: str, case: Case, options: dict[str, Any], text: str, ids: list[int], path: str) -> list[int]:
    """Writes the logits of every token of a text to ``path``, float32 [tokens, vocab] in numpy's format.

    ``ids`` are the tokens; when empty, ``text`` is encoded with the case's vocabulary. Returns the ids.
    """
    import numpy as np

    asked = wire.rebuild(options, ExecutorOptions)
    executor, vocabulary, _dtype, _recipe = _opened(backend, case, asked)
    try:
        can = executor.capabilities
        ids = (ids or vocabulary.encode(text))[: min(can.context, can.cache_tokens)]
        shape = (len(ids), can.vocab_size)
        logits = np.lib.format.open_memmap(path, mode="w+", dtype=np.float32, shape=shape)
        for start in range(0, len(ids), SCORED_TOKENS):
            chunk = ids[start : start + SCORED_TOKENS]
            row = Row(0, chunk, start, logits=len(chunk))
            logits[start : start + len(chunk)] = np.asarray(executor.execute(Step([row])))[:, : can.vocab_size]
        logits.flush()
    finally:
        executor.close()
    return ids


def _opened(backend: str, case: Case, options: ExecutorOptions) -> tuple[Executor, Vocabulary, str, str]:
    chosen: Any = registry.get(backend)
    if not has_engine(backend):
        raise NotSupportedError(f"`{backend}` has no executor for the generation engine", code="task.not_offered")
    plan = chosen.plan(case)
    given = {name: value for name, value in asdict(options).items() if value is not None}
    executor: Executor = chosen.executor(plan, given)
    return executor, chosen.vocabulary(plan), plan.dtype, plan.recipe


def _draft(draft: tuple[str, Case], options: ExecutorOptions, target: Vocabulary) -> Proposer:
    executor, vocabulary, _dtype, _recipe = _opened(*draft, options)
    return DraftProposer(executor, vocabulary=vocabulary, target=target)
