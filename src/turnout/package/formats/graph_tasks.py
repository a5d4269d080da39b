"""Tasks that a graph's ports and the config beside it give evidence of; shared by all graph formats."""

from __future__ import annotations

from turnout.package.facts import Artifact, GraphPort, Recipe, Strength, TaskEvidence
from turnout.package.formats.transformers_tasks import tasks_of
from turnout.types import Task

POOLED = ("sentence_embedding", "pooler_output", "embeddings", "text_embeds")


def tasks_of_graph(artifact: Artifact) -> None:
    """Adds tasks to a graph artifact that has its context attached; raw tensors always go."""
    graph = artifact.graph
    assert graph is not None
    outputs = {port.name: port for port in graph.outputs}
    inputs = {port.name: port for port in graph.inputs}
    declared = Artifact(
        artifact.id,
        artifact.kind,
        artifact.entry,
        architecture=artifact.architecture,
        labels=artifact.labels,
        tokenizer=artifact.tokenizer,
        templates=artifact.templates,
        processors=artifact.processors,
        recipe=artifact.recipe if artifact.recipe and artifact.recipe.kind == "pooling" else None,
    )
    tasks_of(declared)
    for evidence in declared.tasks:
        if fits(evidence.task, inputs, outputs):
            artifact.tasks.append(evidence)
    if artifact.recipe is None and declared.recipe is not None and artifact.tasks:
        artifact.recipe = declared.recipe
    _from_ports(artifact, inputs, outputs)
    artifact.tasks.append(TaskEvidence(Task.TENSOR, "graph:ports", Strength.HEADER))


def fits(task: str, inputs: dict[str, GraphPort], outputs: dict[str, GraphPort]) -> bool:
    """Whether a graph with these ports can compute what the config beside it declares."""
    if task == Task.EMBEDDINGS:
        return "input_ids" in inputs and any(n in outputs for n in ("last_hidden_state", *POOLED))
    if task in (Task.TEXT_GENERATION, Task.CHAT):
        return "input_ids" in inputs and "logits" in outputs
    if task in (Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.FILL_MASK, Task.RERANK):
        return "input_ids" in inputs and len(outputs) >= 1
    if task == Task.QUESTION_ANSWERING:
        return {"start_logits", "end_logits"} <= outputs.keys()
    if task == Task.IMAGE_CLASSIFICATION:
        return any(port.shape is not None and len(port.shape) == 4 for port in inputs.values())
    return False


def _from_ports(artifact: Artifact, inputs: dict[str, GraphPort], outputs: dict[str, GraphPort]) -> None:
    """Tasks that the ports alone tell."""
    offered = artifact.task_ids()
    if "input_ids" in inputs and Task.EMBEDDINGS not in offered and not offered:
        if any(n in outputs for n in ("last_hidden_state", *POOLED)):
            artifact.tasks.append(TaskEvidence(Task.EMBEDDINGS, "graph:outputs", Strength.DERIVED))
        elif artifact.facts.get("kv_cache") is not None and artifact.facts["kv_cache"].value:
            artifact.tasks.append(TaskEvidence(Task.TEXT_GENERATION, "graph:ports", Strength.DERIVED))
    if _is_voice_activity(inputs):
        artifact.tasks.append(TaskEvidence(Task.VAD, "graph:ports", Strength.DERIVED))
        artifact.recipe = Recipe("vad", {"family": "silero"}, f"{artifact.entry}#graph", Strength.DERIVED)
    if not offered and _is_picture_classifier(inputs, outputs):
        artifact.tasks.append(TaskEvidence(Task.IMAGE_CLASSIFICATION, "graph:ports", Strength.DERIVED))


def _is_voice_activity(inputs: dict[str, GraphPort]) -> bool:
    """Silero's recurrent detector: audio windows with a state of 128 units carried along."""
    states = [inputs[n] for n in ("state", "h", "c") if n in inputs]
    return "input" in inputs and bool(states) and all(p.shape is not None and p.shape[-1] == 128 for p in states)


def _is_picture_classifier(inputs: dict[str, GraphPort], outputs: dict[str, GraphPort]) -> bool:
    """One picture of three channels in, one row of at least two scores out."""
    if len(inputs) != 1 or len(outputs) != 1:
        return False
    picture, scores = next(iter(inputs.values())).shape, next(iter(outputs.values())).shape
    if picture is None or scores is None or len(picture) != 4 or len(scores) != 2:
        return False
    wide = isinstance(scores[1], int) and scores[1] >= 2
    return wide and (picture[1] == 3 or picture[3] == 3)
