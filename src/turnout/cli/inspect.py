"""``turnout inspect``: what a package holds, read without running it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from turnout.cli import printer
from turnout.cli.options import ArtifactOption, AsJson, Model
from turnout.errors import UsageError

if TYPE_CHECKING:
    from turnout.package.facts import Architecture, Artifact, Finding, GraphPort, Package, TensorInventory

SHOWN = 8  # names shown of a long list
_SIZES = (
    ("num_hidden_layers", "layers"),
    ("hidden_size", "wide"),
    ("num_attention_heads", "heads"),
    ("num_key_value_heads", "key-value heads"),
    ("vocab_size", "vocabulary"),
    ("max_position_embeddings", "context"),
)


def inspect(model: Model, artifact: ArtifactOption = None, json: AsJson = False) -> int:
    """Show what a package holds; runs nothing of it."""
    import turnout

    package = turnout.inspect(model)
    if artifact is not None:
        _select(package, artifact)
    if json:
        printer.say_json(printer.builtins(package))
    else:
        for line in describe(package):
            printer.say(line)
    return 0 if any(a.kind != "unknown" for a in package.artifacts) else 1


def _select(package: Package, artifact: str) -> None:
    found = package.artifact(artifact)
    if found is None:
        raise UsageError(
            f"no artifact `{artifact}` in `{package.source}`",
            hints=["artifacts here: " + ", ".join(a.id for a in package.artifacts)],
        )
    package.artifacts = [found]


def describe(package: Package) -> list[str]:
    """Lines that tell a package: its place, its own findings, then each artifact."""
    total = sum(f.size for f in package.files)
    count = len(package.artifacts)
    lines = [
        f"{package.source}: {count} artifact{'s' if count != 1 else ''} in {len(package.files)} files, "
        f"{printer.size(total)}, read in {package.scan_ms:.1f} ms"
    ]
    lines += printer.columns([("", *row) for row in _findings(package.findings)])
    for artifact in package.artifacts:
        lines += ["", artifact.id, *printer.columns([("", name, text) for name, text in _facts(artifact) if text])]
    return lines


def _facts(artifact: Artifact) -> Iterator[tuple[str, str]]:
    yield "architecture", _architecture(artifact.architecture)
    yield "weights", _weights(artifact.tensors, artifact.size_bytes)
    if artifact.quantization is not None:
        yield "quantization", _quantization(artifact)
    if artifact.graph is not None:
        graph = artifact.graph
        opsets = f", opsets {_pairs(graph.opsets)}" if graph.opsets else ""
        yield "graph", f"{sum(graph.ops.values())} nodes{opsets}" if graph.ops else ""
        yield "inputs", _ports(graph.inputs)
        yield "outputs", _ports(graph.outputs)
    yield "tasks", ", ".join(artifact.task_ids())
    if artifact.tokenizer is not None:
        tokenizer = artifact.tokenizer
        yield (
            "tokenizer",
            ", ".join(
                filter(
                    None,
                    [tokenizer.kind, f"{tokenizer.vocab_size} tokens" if tokenizer.vocab_size else "", tokenizer.path],
                )
            ),
        )
    for template in artifact.templates:
        yield "template", f"{template.name}, {'valid' if template.valid else 'not valid'}, {template.source}"
    for processor in artifact.processors:
        yield "processor", f"{processor.kind}, {processor.class_name or 'no class'}, {processor.path}"
    if artifact.recipe is not None:
        yield "recipe", f"{artifact.recipe.kind}: {_settings(artifact.recipe.settings)}"
    if artifact.labels is not None:
        yield "labels", f"{len(artifact.labels.names)}: {_some(artifact.labels.names)}"
    for component in artifact.components:
        yield "component", f"{component.role}: {component.class_name or component.path or '?'}, {component.status}"
    for reference in artifact.depends_on:
        yield "needs", f"{reference.role} {reference.target}{'' if reference.resolved else ' (not found here)'}"
    if artifact.code != "none":
        yield "code", str(artifact.code)
    if artifact.licence is not None:
        yield "licence", str(artifact.licence.value)
    yield from _findings(artifact.findings)


def _architecture(architecture: Architecture | None) -> str:
    if architecture is None:
        return ""
    parts = [architecture.model_type, *architecture.class_names[:1]]
    parts += [f"{architecture.dims[key]} {word}" for key, word in _SIZES if key in architecture.dims]
    return ", ".join(parts)


def _weights(tensors: TensorInventory, size_bytes: int) -> str:
    if not tensors.tensors:
        return printer.size(size_bytes) if size_bytes else ""
    types = ", ".join(f"{count} {dtype}" for dtype, count in sorted(tensors.dtypes().items(), key=lambda p: -p[1]))
    return (
        f"{len(tensors.tensors)} tensors ({types}), {tensors.param_count / 1e6:.1f} M elements, "
        f"{printer.size(tensors.total_bytes)}"
    )


def _quantization(artifact: Artifact) -> str:
    found = artifact.quantization
    assert found is not None
    parts = [
        found.method,
        f"{found.bits:g} bits" if found.bits else "",
        f"groups of {found.group_size}" if found.group_size else "",
        found.packing or "",
    ]
    return ", ".join(filter(None, parts))


def _ports(ports: list[GraphPort]) -> str:
    def text(port: GraphPort) -> str:
        shape = "" if port.shape is None else f"[{', '.join('?' if d is None else str(d) for d in port.shape)}]"
        return f"{port.name} {port.dtype}{shape}"

    more = f", and {len(ports) - SHOWN} more" if len(ports) > SHOWN else ""
    return ", ".join(text(p) for p in ports[:SHOWN]) + more


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(map(str, names[:SHOWN])) + more


def _pairs(values: dict[str, Any]) -> str:
    return ", ".join(f"{key or 'default'} {value}" for key, value in values.items())


def _settings(settings: dict[str, Any]) -> str:
    def short(value: Any) -> str:
        text = printer.one_line(value)
        return text if len(text) <= 60 else text[:57] + "..."

    return ", ".join(f"{key}={short(value)}" for key, value in settings.items() if value not in (None, {}, []))


def _findings(findings: list[Finding]) -> Iterator[tuple[str, str]]:
    for finding in findings:
        seen = "; ".join(
            filter(
                None,
                [
                    f"in {finding.path}" if finding.path else "",
                    f"found {finding.observed}" if finding.observed else "",
                    f"expected {finding.expected}" if finding.expected else "",
                ],
            )
        )
        yield str(finding.severity), f"{finding.code}: {finding.message}{f' ({seen})' if seen else ''}"
