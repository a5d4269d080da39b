"""sentence-transformers directories: modules.json with a transformer and what pools its output."""

from __future__ import annotations

from typing import Any

from turnout.package.facts import (
    Artifact,
    ArtifactKind,
    ArtifactRef,
    CodeNeed,
    Component,
    Fact,
    Finding,
    Recipe,
    Severity,
    Status,
    Strength,
    TaskEvidence,
)
from turnout.package.formats import transformers
from turnout.package.formats.context import pooling_recipe, read_context
from turnout.package.formats.safetensors import read_safetensors
from turnout.package.scan import ReadError, Scan, join, parent_of
from turnout.types import Task

LIBRARY = "sentence_transformers."
STATIC = "StaticEmbedding"  # a table of token vectors whose mean is the text's vector
MAIN = "config_sentence_transformers.json"


def detect(scan: Scan) -> list[Artifact]:
    """Directories with a modules.json, and cross-encoders that say so in their own config."""
    found = []
    for directory in scan.directories():
        manifests = (join(directory, "modules.json"), join(directory, MAIN))
        if (scan.focus is None or scan.focus in manifests) and (
            scan.has(manifests[0]) or _is_cross_encoder(scan, directory)
        ):
            found.append(_artifact(scan, directory))
    return found


def _kind(scan: Scan, directory: str) -> str:
    main = scan.json_object(join(directory, MAIN)) or {}
    return str(main.get("model_type") or "SentenceTransformer")


def _is_cross_encoder(scan: Scan, directory: str) -> bool:
    config = scan.json_object(join(directory, "config.json")) or {}
    if not isinstance(config.get("architectures"), list):
        return False
    return _kind(scan, directory) == "CrossEncoder" or isinstance(config.get("sentence_transformers"), dict)


def _artifact(scan: Scan, directory: str) -> Artifact:
    kind = _kind(scan, directory)
    if not scan.has(join(directory, "modules.json")):
        kind = "CrossEncoder"
    artifact = Artifact(f"sentence_transformers:{directory or '.'}", ArtifactKind.SENTENCE_TRANSFORMERS, directory)
    artifact.facts["model_type"] = Fact(kind, join(directory, MAIN), Strength.CONFIG)
    inner = _modules(scan, directory, artifact)
    findings: list[Finding] = []
    if artifact.components and artifact.components[0].role == STATIC:
        _take_static(scan, inner, artifact)
    else:
        _take_inner(scan, inner, artifact)
        artifact.recipe = pooling_recipe(scan, directory, findings)
    artifact.findings += [f for f in findings if f not in artifact.findings]
    _check_recipe(artifact, directory, kind)
    for name in ("modules.json", MAIN, "sentence_bert_config.json"):
        if scan.has(join(directory, name)):
            artifact.files.append(join(directory, name))
    task = {"CrossEncoder": Task.RERANK}.get(kind, Task.EMBEDDINGS)
    artifact.tasks = [TaskEvidence(task, join(directory, "modules.json"), Strength.CONFIG)]
    artifact.files = list(dict.fromkeys(artifact.files))
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact


def _modules(scan: Scan, directory: str, artifact: Artifact) -> str:
    """Reads the manifest into components; directory of the transformer module."""
    rel = join(directory, "modules.json")
    if not scan.has(rel):
        return directory
    try:
        modules = scan.json(rel)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return directory
    inner = directory
    if not isinstance(modules, list):
        artifact.findings.append(Finding("config.invalid", Severity.ERROR, f"`{rel}` is not a list of modules", rel))
        return directory
    for module in modules:
        if isinstance(module, dict):
            place = _module(scan, directory, module, artifact)
            if str(module.get("type", "")).endswith((".Transformer", f".{STATIC}")) and place is not None:
                inner = place
    return inner


def _module(scan: Scan, directory: str, module: dict[str, Any], artifact: Artifact) -> str | None:
    kind, path = str(module.get("type", "")), str(module.get("path", ""))
    rel = join(directory, "modules.json")
    component = Component(kind.rsplit(".", 1)[-1] or "module", Status.PRESENT, "sentence_transformers", kind)
    artifact.components.append(component)
    if not kind.startswith(LIBRARY):
        component.code = artifact.code = CodeNeed.REQUIRED
        artifact.findings.append(
            Finding(
                "code.required",
                Severity.WARNING,
                f"module `{kind}` is not part of sentence-transformers",
                rel,
                kind,
                f"{LIBRARY}*",
            )
        )
    try:
        place = scan.refer(directory, path)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return None
    component.path = place
    files = [f for f in scan.entries if parent_of(f) == place] if place != directory else []
    component.files = files
    artifact.files += files
    needs_folder = component.role in ("Pooling", "Dense", "Transformer")
    if needs_folder and not scan.has(join(place, "config.json")):
        component.status = Status.MISSING
        artifact.findings.append(
            Finding(
                "component.missing",
                Severity.ERROR,
                f"module `{component.role}` has no `{join(place, 'config.json')}`",
                join(place, "config.json"),
                "absent",
                "the module's configuration",
            )
        )
    elif component.role == "Dense":
        _activation(scan, join(place, "config.json"), component, artifact)
    return place


def _activation(scan: Scan, rel: str, component: Component, artifact: Artifact) -> None:
    """An activation from elsewhere than torch: without trust the library takes tanh in its place."""
    named = (scan.json_object(rel) or {}).get("activation_function", "torch.")
    if not str(named).startswith("torch."):
        component.code = artifact.code = CodeNeed.REQUIRED
        artifact.findings.append(
            Finding(
                "code.required",
                Severity.WARNING,
                f"the dense layer's activation `{named}` is not torch's",
                rel,
                str(named),
                "torch.*",
            )
        )


def _take_inner(scan: Scan, inner: str, artifact: Artifact) -> None:
    """Takes weights, tokenizer and architecture from the transformer module's directory."""
    found = next((a for a in transformers.detect_in(scan, inner)), None)
    if found is None:
        context = read_context(scan, inner)
        transformers.attach(artifact, context)
        if not any(f.code.startswith(("artifact", "component")) for f in artifact.findings):
            artifact.findings.append(
                Finding(
                    "artifact.missing",
                    Severity.ERROR,
                    "the transformer module has no weights",
                    inner or ".",
                    "no weights",
                    "model.safetensors",
                )
            )
        return
    artifact.tensors, artifact.architecture, artifact.tokenizer = found.tensors, found.architecture, found.tokenizer
    artifact.licence, artifact.quantization, artifact.labels = found.licence, found.quantization, found.labels
    artifact.files += found.files
    artifact.findings += [
        f
        for f in found.findings
        if not f.code.startswith("template.") and f.code != "recipe.assumed" and f not in artifact.findings
    ]
    if found.code is CodeNeed.FORBIDDEN:
        artifact.code = CodeNeed.FORBIDDEN
    artifact.depends_on.append(ArtifactRef("transformer", found.id, resolved=True))


def _take_static(scan: Scan, inner: str, artifact: Artifact) -> None:
    """Takes the table and the tokenizer of a model without transformer; its recipe is part of the module."""
    context = read_context(scan, inner)
    transformers.attach(artifact, context)
    rel = join(inner, "model.safetensors")
    if not scan.has(rel):
        message = "the table of token vectors is not here"
        artifact.findings.append(Finding("artifact.missing", Severity.ERROR, message, rel, "absent", rel))
        return
    artifact.tensors = read_safetensors(scan, rel)
    artifact.files.append(rel)
    table = artifact.tensors.tensors.get("embedding.weight") or artifact.tensors.tensors.get("embeddings")
    rows = table.shape[0] if table is not None and len(table.shape) == 2 else 0
    largest = artifact.tokenizer.max_id if artifact.tokenizer else None
    if rows and largest is not None and largest >= rows:
        message = "the tokenizer gives ids that the table has no row for"
        artifact.findings.append(
            Finding("tokenizer.id_out_of_range", Severity.ERROR, message, rel, f"id {largest}", f"{rows} rows")
        )
    roles = [c.role for c in artifact.components]
    settings = {"modules": roles, "normalize": roles[-1] == "Normalize"}
    if table is not None:
        settings["dimension"] = table.shape[-1]
    artifact.recipe = Recipe("static", settings, rel, Strength.CONFIG)


def _check_recipe(artifact: Artifact, directory: str, kind: str) -> None:
    if kind != "SentenceTransformer":
        return
    rel = join(directory, "modules.json")
    if artifact.recipe is None:
        if not any(f.severity is Severity.ERROR for f in artifact.findings) and not any(
            c.code is CodeNeed.REQUIRED for c in artifact.components
        ):
            artifact.findings.append(
                Finding("recipe.missing", Severity.ERROR, "modules.json has no pooling module", rel)
            )
        return
    dimension = artifact.recipe.settings.get("dimension") if artifact.recipe.kind == "pooling" else None
    width = artifact.architecture.dims.get("hidden_size") if artifact.architecture else None
    known = any(f.code == "recipe.conflict" for f in artifact.findings)
    if dimension is not None and width is not None and dimension != width and not known:
        artifact.findings.append(
            Finding(
                "recipe.conflict",
                Severity.ERROR,
                "pooling is configured for another width than the encoder has",
                rel,
                f"pooling dimension {dimension}",
                f"encoder width {width}",
            )
        )
