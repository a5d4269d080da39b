"""onnxruntime-genai directories: genai_config.json, the graphs it names, whether their ports fit."""

from __future__ import annotations

from typing import Any

from turnout.package.facts import (
    Artifact,
    ArtifactKind,
    Component,
    Fact,
    Finding,
    Severity,
    Status,
    Strength,
    TaskEvidence,
)
from turnout.package.formats.context import read_context
from turnout.package.formats.onnx import quantization, read_graph
from turnout.package.formats.transformers import attach
from turnout.package.scan import ReadError, Scan, parent_of
from turnout.types import Task

CONFIG = "genai_config.json"


def detect(scan: Scan) -> list[Artifact]:
    """Every directory with a genai_config.json."""
    return [
        _artifact(scan, rel) for rel in scan.glob(CONFIG) if scan.wanted(rel) or (scan.focus or "").endswith(".onnx")
    ]


def _artifact(scan: Scan, rel: str) -> Artifact:
    directory = parent_of(rel)
    artifact = Artifact(f"onnx_genai:{directory or '.'}", ArtifactKind.ONNX_GENAI, directory, [rel])
    try:
        config = scan.json(rel)
        model = config["model"]
        model["type"]  # noqa: B018 (its absence is a finding)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return artifact
    except (KeyError, TypeError):
        artifact.findings.append(
            Finding("config.invalid", Severity.ERROR, f"`{rel}` names no model type", rel, "absent", "model.type")
        )
        return artifact
    artifact.facts["config"] = Fact(config, rel, Strength.CONFIG)
    artifact.facts["model_type"] = Fact(model["type"], f"{rel}#/model/type", Strength.CONFIG)
    artifact.facts["providers"] = Fact(_providers(model), f"{rel}#/model/decoder/session_options", Strength.CONFIG)
    attach(artifact, read_context(scan, directory))
    artifact.findings = [f for f in artifact.findings if f.code != "recipe.assumed"]
    _graphs(scan, directory, model, rel, artifact)
    tasks = [Task.TEXT_GENERATION]
    if any(t.valid for t in artifact.templates):
        tasks.insert(0, Task.CHAT)
    artifact.tasks = [TaskEvidence(task, f"{rel}#/model/type", Strength.CONFIG) for task in tasks]
    artifact.files = list(dict.fromkeys(artifact.files))
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact


def _providers(model: dict[str, Any]) -> list[str]:
    """Names of the execution providers that the configuration asks for, in order."""
    found: list[str] = []
    for part in model.values():
        options = part.get("session_options") if isinstance(part, dict) else None
        providers = options.get("provider_options") if isinstance(options, dict) else None
        for entry in providers if isinstance(providers, list) else []:
            found += [str(name) for name in entry] if isinstance(entry, dict) else []
    return list(dict.fromkeys(found))


def _graphs(scan: Scan, directory: str, model: dict[str, Any], rel: str, artifact: Artifact) -> None:
    claimed: set[str] = scan.once("genai-claimed", set)
    for role, part in model.items():
        name = part.get("filename") if isinstance(part, dict) else None
        if not isinstance(name, str):
            continue
        try:
            place = scan.refer(directory, name)
        except ReadError as error:
            artifact.findings.append(error.finding)
            continue
        artifact.files.append(place)
        if not scan.has(place):
            artifact.findings.append(
                Finding("artifact.missing", Severity.ERROR, f"`{rel}` names the graph `{name}`", place, "absent", name)
            )
            continue
        claimed.add(place)
        read = read_graph(scan, place, artifact)
        artifact.components.append(
            Component(role, Status.PRESENT if read else Status.INVALID, "onnxruntime_genai", path=place, files=[place])
        )
        if read is not None and role == "decoder":
            artifact.graph, artifact.quantization = read.graph, quantization(read.graph)
            _check_ports(part, rel, artifact)


def _check_ports(decoder: dict[str, Any], rel: str, artifact: Artifact) -> None:
    """Every name pattern of the configuration against the graph's ports; the library checks none of them."""
    graph = artifact.graph
    assert graph is not None
    layers = decoder.get("num_hidden_layers")
    layers = layers if isinstance(layers, int) and 0 <= layers < 10_000 else 0
    for side, ports in (("inputs", graph.inputs), ("outputs", graph.outputs)):
        present = {port.name for port in ports}
        patterns = decoder.get(side)
        for key, pattern in (patterns if isinstance(patterns, dict) else {}).items():
            if not isinstance(pattern, str):
                continue
            names = [pattern.replace("%d", str(layer)) for layer in range(layers)] if "%d" in pattern else [pattern]
            lacking = [n for n in names if n not in present]
            # Position ids and masks are given only to graphs that take them.
            if lacking and key not in (
                "position_ids",
                "attention_mask",
                "past_sequence_length",
                "current_sequence_length",
                "total_sequence_length",
            ):
                artifact.findings.append(
                    Finding(
                        "graph.io_mismatch",
                        Severity.ERROR,
                        f"the graph has no {side[:-1]} `{lacking[0]}` that the configuration names",
                        f"{rel}#/model/decoder/{side}/{key}",
                        ", ".join(sorted(present))[:200],
                        lacking[0],
                    )
                )
                return
