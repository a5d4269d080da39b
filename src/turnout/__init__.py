"""Turnout: point it at a model package; it says what will run it and why, proves it, and runs it.

import turnout

package = turnout.inspect("smollm2")
report = turnout.check("smollm2", task="chat")
with turnout.load("smollm2", task="chat") as session:
    result = session.run({"messages": [{"role": "user", "content": "Hello"}]})
    print(result.output.text, result.executed.backend)
with turnout.LLM("smollm2") as llm:  # many requests in one batch
    for answer in llm.generate(["One", "Two"]):
        print(answer.text)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

__all__ = [
    "Completion",
    "Generation",
    "Grammar",
    "InputError",
    "LLM",
    "LoadError",
    "NotFoundError",
    "NotSupportedError",
    "OverloadedError",
    "Package",
    "Report",
    "Request",
    "Result",
    "Sampling",
    "Session",
    "TurnoutError",
    "UsageError",
    "Verdict",
    "WorkerError",
    "__version__",
    "backends_status",
    "check",
    "inspect",
    "load",
    "result_json",
]

if TYPE_CHECKING:
    from turnout.api import backends_status, inspect
    from turnout.backends.base import Verdict
    from turnout.errors import (
        InputError,
        LoadError,
        NotFoundError,
        NotSupportedError,
        OverloadedError,
        TurnoutError,
        UsageError,
        WorkerError,
    )
    from turnout.package.facts import Package
    from turnout.types import Grammar, Request, Result, Sampling
    from turnout.worker.judge import Report, check
    from turnout.worker.llm import LLM, Completion, Generation
    from turnout.worker.session import Session, load, result_json

# Names are imported on first use: `import turnout` and `turnout --help` must cost next to nothing.
_HOMES = {
    "backends_status": "turnout.api",
    "inspect": "turnout.api",
    "Verdict": "turnout.backends.base",
    "InputError": "turnout.errors",
    "LoadError": "turnout.errors",
    "NotFoundError": "turnout.errors",
    "NotSupportedError": "turnout.errors",
    "OverloadedError": "turnout.errors",
    "TurnoutError": "turnout.errors",
    "UsageError": "turnout.errors",
    "WorkerError": "turnout.errors",
    "Package": "turnout.package.facts",
    "Grammar": "turnout.types",
    "Request": "turnout.types",
    "Result": "turnout.types",
    "Sampling": "turnout.types",
    "Report": "turnout.worker.judge",
    "check": "turnout.worker.judge",
    "Completion": "turnout.worker.llm",
    "Generation": "turnout.worker.llm",
    "LLM": "turnout.worker.llm",
    "Session": "turnout.worker.session",
    "load": "turnout.worker.session",
    "result_json": "turnout.worker.session",
}


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module `turnout` has no attribute `{name}`")
    return getattr(importlib.import_module(home), name)
