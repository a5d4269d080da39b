"""From a case to an engine that serves it: executor, vocabulary, proposer, thread and socket."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from turnout.backends import registry
from turnout.backends.base import Case
from turnout.engine.core import Engine, EngineConfig
from turnout.engine.executor import Executor, ExecutorOptions, Vocabulary
from turnout.engine.service import EngineService
from turnout.engine.speculative import DraftProposer, NGramProposer, Proposer
from turnout.errors import InputError, NotSupportedError
from turnout.tasks.prompting import PromptEncoder
from turnout.worker import wire
from turnout.worker.engine_host import EngineHost

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
    try:
        if draft is not None:
            proposer = _draft(draft, asked, vocabulary)
        elif speculation == "ngram":
            proposer = NGramProposer()
        core = Engine(executor, vocabulary, wire.rebuild(settings, EngineConfig), proposer=proposer)
        for name, path in adapters.items():
            core.load_adapter(name, path)
        encoder = PromptEncoder(case.artifact, case.options, vocabulary)
        host = EngineHost(EngineService(core), encoder)
    except BaseException:
        executor.close()
        raise
    return host, {
        "endpoint": host.endpoint,
        "capabilities": asdict(executor.capabilities),
        "dtype": dtype,
        "recipe": recipe,
        "eos_ids": sorted(vocabulary.eos_ids),
        "limit": min(executor.capabilities.context, executor.capabilities.cache_tokens),
    }


def _opened(backend: str, case: Case, options: ExecutorOptions) -> tuple[Executor, Vocabulary, str, str]:
    chosen: Any = registry.get(backend)
    if not has_engine(backend):
        raise NotSupportedError(f"`{backend}` has no executor for the generation engine", code="task.not_offered")
    plan = chosen.plan(case)
    given = {name: value for name, value in asdict(options).items() if value is not None}
    executor: Executor = chosen.executor(plan, given)
    return executor, chosen.vocabulary(plan), str(getattr(executor, "dtype", plan.dtype)), plan.recipe


def _draft(draft: tuple[str, Case], options: ExecutorOptions, target: Vocabulary) -> Proposer:
    executor, vocabulary, _dtype, _recipe = _opened(*draft, options)
    return DraftProposer(executor, vocabulary=vocabulary, target=target)
