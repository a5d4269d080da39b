"""ONNX graphs: external data, optimum layouts, variants; one artifact a graph, one for a pair."""

from __future__ import annotations

import re
from typing import Any

from turnout.package.facts import (
    Artifact,
    ArtifactKind,
    Component,
    Fact,
    Finding,
    Graph,
    Labels,
    Quantization,
    Recipe,
    Severity,
    Status,
    Strength,
    TaskEvidence,
    TensorInfo,
)
from turnout.package.formats.context import nearest_context
from turnout.package.formats.graph_tasks import tasks_of_graph
from turnout.package.formats.onnx_proto import Initializer, Model, read_model
from turnout.package.formats.protobuf import WireError
from turnout.package.formats.transformers import attach
from turnout.package.scan import ReadError, Scan, parent_of, read_error
from turnout.types import Task

# encoder / decoder graphs by name, with the variant that may follow (optimum, transformers.js).
PAIR = re.compile(
    r"(?P<role>encoder|decoder)(?P<past>_with_past)?(?:_model)?(?P<merged>_merged)?(?P<variant>[_.-].+)?\.onnx"
)
VARIANT = re.compile(r"[_.-](quantized|int8|uint8|q4|q4f16|q8|fp16|float16|bnb4|int4|fp32)\.onnx$")
QUANTIZED_OPS = {
    "::MatMulInteger": ("dynamic", 8.0),
    "com.microsoft::MatMulNBits": ("MatMulNBits", 4.0),
    "com.microsoft::DynamicQuantizeMatMul": ("dynamic", 8.0),
    "::QLinearMatMul": ("QOperator", 8.0),
    "::QLinearConv": ("QOperator", 8.0),
    "::DequantizeLinear": ("QDQ", 8.0),
}


def detect(scan: Scan) -> list[Artifact]:
    """Graphs of the package that no onnxruntime-genai directory has claimed."""
    claimed: set[str] = scan.once("genai-claimed", set)
    files = [rel for rel in sorted(scan.glob("*.onnx")) if rel not in claimed]
    pairs, paired = _pairs(scan, files)
    found = [_pair_artifact(scan, encoder, decoder) for encoder, decoder in pairs]
    found += [_artifact(scan, rel) for rel in files if rel not in paired and scan.wanted(rel)]
    return found


def _pairs(scan: Scan, files: list[str]) -> tuple[list[tuple[str, str]], set[str]]:
    """Encoder and decoder of the same directory and variant; further decoder forms belong to the pair."""
    by_key: dict[tuple[str, str], dict[str, str]] = {}
    for rel in files:
        match = PAIR.fullmatch(rel.rsplit("/", 1)[-1])
        if match:
            form = match["role"] + (match["past"] or "") + (match["merged"] or "")
            by_key.setdefault((parent_of(rel), match["variant"] or ""), {})[form] = rel
    pairs, paired = [], set()
    for forms in by_key.values():
        if "encoder" in forms and ("decoder" in forms or "decoder_merged" in forms):
            pair = (forms["encoder"], forms.get("decoder") or forms["decoder_merged"])
            if scan.focus is None or scan.focus in forms.values():
                pairs.append(pair)
            paired |= set(forms.values())
    return pairs, paired


def read_graph(scan: Scan, rel: str, artifact: Artifact) -> Model | None:
    """Reads one graph into the artifact's tensors and findings; None when it cannot be read."""
    try:
        model = _model(scan, rel)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return None
    _initializers(scan, rel, model, artifact)
    return model


def _model(scan: Scan, rel: str) -> Model:
    import mmap

    before = scan.check_weights_file(rel)
    if before is not None:
        raise ReadError(before)
    with scan.open(rel) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        try:
            return read_model(data)
        except (WireError, IndexError) as error:
            raise read_error("artifact.corrupt", f"`{rel}` is not a whole ONNX model: {error}", rel) from None


def _initializers(scan: Scan, rel: str, model: Model, artifact: Artifact) -> None:
    for weight in model.initializers:
        if weight.external:
            _external(scan, rel, weight, model.graph, artifact)
        if weight.name:
            where = weight.external.get("location") or rel
            artifact.tensors.tensors[weight.name] = TensorInfo(
                weight.name, weight.dtype, weight.shape, where, weight.at, weight.nbytes
            )
    artifact.tensors.shards = [rel, *model.graph.external]


def _external(scan: Scan, rel: str, weight: Initializer, graph: Graph, artifact: Artifact) -> None:
    """One weight in another file: its place, then whether the bytes are there."""
    location = weight.external.get("location", "")
    try:
        place = scan.refer(parent_of(rel), location)
        if not scan.has(place):
            raise read_error(
                "artifact.missing",
                f"external data `{location}` of `{rel}` is not in the package",
                place,
                "absent",
                location,
            )
        scan.path(place)
        offset, length = (int(weight.external.get(k) or 0) for k in ("offset", "length"))
    except ReadError as error:
        _once(artifact, error.finding)
        return
    except ValueError:
        _once(
            artifact,
            Finding("artifact.corrupt", Severity.ERROR, f"`{weight.name}` in `{rel}` has no usable offset", rel),
        )
        return
    if place not in graph.external:
        graph.external.append(place)
        artifact.files.append(place)
    size = scan.entries[place].size
    needed = length or weight.nbytes
    if offset < 0 or needed < 0 or offset + needed > size:
        _once(
            artifact,
            Finding(
                "artifact.truncated",
                Severity.ERROR,
                f"`{place}` ends before the data of `{weight.name}`",
                place,
                f"{size} bytes",
                f"{offset + needed} bytes",
            ),
        )
    elif length and length != weight.nbytes:
        _once(
            artifact,
            Finding(
                "artifact.corrupt",
                Severity.ERROR,
                f"`{weight.name}` in `{rel}` has another length than its shape says",
                rel,
                f"{length} bytes",
                f"{weight.nbytes} bytes",
            ),
        )


def _once(artifact: Artifact, finding: Finding) -> None:
    if not any(f.code == finding.code and f.path == finding.path for f in artifact.findings):
        artifact.findings.append(finding)


# ---- artifacts ---------------------------------------------------------------------------------


def _artifact(scan: Scan, rel: str) -> Artifact:
    artifact = Artifact(f"onnx:{rel}", ArtifactKind.ONNX, rel, [rel])
    model = read_graph(scan, rel, artifact)
    context = nearest_context(scan, rel)
    if context is not None:
        attach(artifact, context)
    if model is not None:
        artifact.graph = model.graph
        artifact.quantization = quantization(model.graph)
        _decoder_cache(artifact, model.graph)
        _classical(artifact, model)
        tasks_of_graph(artifact)
    variant = VARIANT.search(rel)
    if variant:
        artifact.facts["variant"] = Fact(variant[1], f"layout:{rel}", Strength.NAME)
    artifact.size_bytes = scan.size_of([rel, *(model.graph.external if model else [])])
    return artifact


def _pair_artifact(scan: Scan, encoder: str, decoder: str) -> Artifact:
    artifact = Artifact(f"onnx_seq2seq:{encoder}", ArtifactKind.ONNX_SEQ2SEQ, encoder, [encoder, decoder])
    for role, rel in (("encoder", encoder), ("decoder", decoder)):
        model = read_graph(scan, rel, artifact)
        if model is None:
            continue
        artifact.components.append(
            Component(role, Status.PRESENT, "onnx", path=rel, files=[rel, *model.graph.external])
        )
        artifact.facts[f"{role}_graph"] = Fact(model.graph, rel, Strength.HEADER)
        artifact.quantization = artifact.quantization or quantization(model.graph)
    context = nearest_context(scan, encoder)
    if context is not None:
        attach(artifact, context)
    speech = artifact.architecture is not None and artifact.architecture.model_type in ("whisper", "speech_to_text")
    for task in [Task.ASR] if speech else [Task.TEXT2TEXT, Task.TRANSLATION, Task.SUMMARIZATION]:
        artifact.tasks.append(TaskEvidence(task, f"layout:{parent_of(encoder) or '.'}", Strength.LAYOUT))
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact


def quantization(graph: Graph) -> Quantization | None:
    """Quantization that the operators show."""
    for op, (method, bits) in QUANTIZED_OPS.items():
        if op in graph.ops:
            return Quantization(method, bits, packing=op.strip(":"), source=f"op:{op.strip(':')}", tensors_plain=False)
    return None


def _decoder_cache(artifact: Artifact, graph: Graph) -> None:
    """Marks language-model graphs with or without past and present states."""
    names = {p.name for p in graph.inputs}
    outputs = {p.name for p in graph.outputs}
    if "input_ids" in names and "logits" in outputs:
        cached = bool(graph.kv_inputs) and any(n.startswith("present") for n in outputs)
        artifact.facts["kv_cache"] = Fact(cached, "graph:inputs", Strength.HEADER)


def _classical(artifact: Artifact, model: Model) -> None:
    """Classical models exported by skl2onnx and its kin: a table in, labels or values out."""
    graph = model.graph
    classical = [op for op in graph.ops if op.startswith("ai.onnx.ml::")]
    if not classical:
        return
    outputs = {p.name: p for p in graph.outputs}
    classifies = bool(model.class_labels) or any("Classifier" in op or op.endswith("ZipMap") for op in classical)
    features: list[str] = [] if len(graph.inputs) == 1 else [p.name for p in graph.inputs]
    width: Any = graph.inputs[0].shape[-1] if len(graph.inputs) == 1 and graph.inputs[0].shape else len(features)
    settings: dict[str, Any] = {"features": features, "outputs": list(outputs)}
    if isinstance(width, int):
        settings["num_features"] = width
    if classifies:
        settings["classes"] = model.class_labels
        artifact.labels = Labels(model.class_labels, "graph:classlabels")
    artifact.recipe = Recipe("tabular", settings, f"{artifact.entry}#graph", Strength.HEADER)
    task = Task.TABULAR_CLASSIFICATION if classifies else Task.TABULAR_REGRESSION
    artifact.tasks.append(TaskEvidence(task, "graph:ai.onnx.ml", Strength.HEADER))
