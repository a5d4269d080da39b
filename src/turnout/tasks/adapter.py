"""Task adapters: encode a request to model inputs, run the graph, decode its outputs.

An adapter knows the package's tokenizer, processor, labels and recipe, never a backend. A backend
hands in ``infer``, so the same adapter serves ONNX Runtime, OpenVINO and Transformers alike.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Protocol

from turnout.errors import NotSupportedError
from turnout.package.facts import Artifact
from turnout.types import Request, Task

# Named arrays in, named arrays out; an input the graph does not have is left out by the backend,
# one it lacks is an ``InputError`` of the backend.
Infer = Callable[[dict[str, Any]], dict[str, Any]]


class Adapter(Protocol):
    """One task over one artifact."""

    recipe: str  # id of what turns outputs into results, '' when there is no choice to make

    def run(self, request: Request, infer: Infer) -> Any:
        """The contract's output value. Raises ``InputError`` for input that does not fit."""
        ...


# Constructor of each: (root: str, artifact: Artifact, options: dict[str, Any]) -> Adapter
ADAPTERS = {
    Task.EMBEDDINGS: "turnout.tasks.language:EmbeddingsAdapter",
    Task.TEXT_CLASSIFICATION: "turnout.tasks.language:TextClassificationAdapter",
    Task.RERANK: "turnout.tasks.language:RerankAdapter",
    Task.TOKEN_CLASSIFICATION: "turnout.tasks.language:TokenClassificationAdapter",
    Task.FILL_MASK: "turnout.tasks.language:FillMaskAdapter",
    Task.QUESTION_ANSWERING: "turnout.tasks.language:QuestionAnsweringAdapter",
    Task.IMAGE_CLASSIFICATION: "turnout.tasks.vision:ImageClassificationAdapter",
    Task.VAD: "turnout.tasks.audio:VoiceActivityAdapter",
    Task.TENSOR: "turnout.tasks.numeric:TensorAdapter",
    Task.TABULAR_CLASSIFICATION: "turnout.tasks.numeric:TabularClassificationAdapter",
    Task.TABULAR_REGRESSION: "turnout.tasks.numeric:TabularRegressionAdapter",
}


def adapter_for(root: str, artifact: Artifact, task: str, options: dict[str, Any]) -> Adapter:
    """Adapter of ``task`` for an artifact of the package at ``root``.

    Raises ``NotSupportedError`` when the task has none yet.
    """
    location = ADAPTERS.get(Task(task))
    if location is None:
        raise NotSupportedError(f"the task `{task}` has no adapter yet", code="task.not_offered")
    module, _, attribute = location.partition(":")
    adapter: Adapter = getattr(import_module(module), attribute)(root, artifact, options)
    return adapter
