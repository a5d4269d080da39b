"""GGUF files: models (whole or in parts), adapters, projectors.

Keys and tensors come from ``gguf_header``; what they mean for a task is told here.
"""

from __future__ import annotations

import re
from typing import Any

from turnout.package.facts import (
    Architecture,
    Artifact,
    ArtifactKind,
    ArtifactRef,
    Fact,
    Finding,
    Generation,
    Quantization,
    Recipe,
    Severity,
    Strength,
    TaskEvidence,
    TensorInventory,
    Tokenizer,
)
from turnout.package.formats.gguf_header import Header, LongArray, read_header
from turnout.package.formats.gguf_tables import ARCHITECTURES, BITS, ENCODERS, FILE_TYPES, TYPES
from turnout.package.formats.template import read_template
from turnout.package.scan import ReadError, Scan, parent_of
from turnout.types import Task

POOLINGS = {0: "none", 1: "mean", 2: "cls", 3: "lasttoken", 4: "rank"}
SPLIT = re.compile(r"(?P<stem>.+)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf")


# ---- artifacts ---------------------------------------------------------------------------------


def detect(scan: Scan) -> list[Artifact]:
    """One artifact per model; the shards of a split model are one. Pairs projectors with models."""
    found = []
    for rel in sorted(scan.glob("*.gguf")):
        if _is_first(scan, rel) and (scan.focus is None or scan.focus == rel or _same_split(rel, scan.focus)):
            found.append(_artifact(scan, rel))
    for artifact in found:
        if artifact.kind is ArtifactKind.GGUF_MMPROJ:
            _pair(scan, artifact, found)
    return found


def _is_first(scan: Scan, rel: str) -> bool:
    """Whether ``rel`` stands for its model: not a later shard of one whose earlier shard is here."""
    match = SPLIT.fullmatch(rel)
    if match is None:
        return True
    earlier = [f"{match['stem']}-{n:05d}-of-{match['count']}.gguf" for n in range(1, int(match["no"]))]
    return not any(scan.has(name) for name in earlier[:1000])


def _same_split(rel: str, other: str) -> bool:
    one, two = SPLIT.fullmatch(rel), SPLIT.fullmatch(other)
    return one is not None and two is not None and one["stem"] == two["stem"]


def _artifact(scan: Scan, rel: str) -> Artifact:
    artifact = Artifact(f"gguf:{rel}", ArtifactKind.GGUF, rel, [rel], TensorInventory(shards=[rel]))
    try:
        header = read_header(scan, rel)
    except ReadError as error:
        artifact.findings.append(error.finding)
        artifact.size_bytes = scan.size_of([rel])
        return artifact
    artifact.tensors.tensors = header.tensors
    artifact.tensors.problems = header.problems
    _shards(scan, rel, header, artifact)
    _describe(artifact, header.values, rel)
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact


def _shards(scan: Scan, rel: str, header: Header, artifact: Artifact) -> None:
    count = header.values.get("split.count", 0)
    match = SPLIT.fullmatch(rel)
    if not isinstance(count, int) or (count <= 1 and match is None):
        return
    if match is None or int(match["count"]) != count or count > 9999:
        artifact.findings.append(
            Finding(
                "artifact.shard_missing",
                Severity.ERROR,
                f"`{rel}` is one of {count} parts, but its name does not say which",
                rel,
                rel,
                f"NAME-00001-of-{count:05d}.gguf",
            )
        )
        return
    for number in range(1, count + 1):
        name = f"{match['stem']}-{number:05d}-of-{count:05d}.gguf"
        if name == rel:
            part: Header | None = header
        elif not scan.has(name):
            artifact.findings.append(
                Finding(
                    "artifact.shard_missing",
                    Severity.ERROR,
                    f"part {number} of {count} is not in the package",
                    name,
                    "absent",
                    name,
                )
            )
            continue
        else:
            part = _shard(scan, name, artifact)
        if part is not None and part.values.get("split.no") != number - 1:
            artifact.findings.append(
                Finding(
                    "index.inconsistent",
                    Severity.ERROR,
                    f"`{name}` says it is part {part.values.get('split.no')}",
                    name,
                    str(part.values.get("split.no")),
                    str(number - 1),
                )
            )
    total, held = header.values.get("split.tensors.count"), len(artifact.tensors.tensors)
    if isinstance(total, int) and total != held and not artifact.findings:
        message = f"the parts of `{rel}` hold another number of tensors than they say"
        artifact.findings.append(Finding("index.inconsistent", Severity.ERROR, message, rel, str(held), str(total)))


def _shard(scan: Scan, name: str, artifact: Artifact) -> Header | None:
    artifact.files.append(name)
    artifact.tensors.shards.append(name)
    try:
        part = read_header(scan, name)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return None
    again = artifact.tensors.tensors.keys() & part.tensors.keys()
    if again:
        artifact.findings.append(
            Finding("artifact.duplicate_tensor", Severity.ERROR, f"`{min(again)}` is in two parts", name)
        )
    artifact.tensors.tensors.update(part.tensors)
    artifact.tensors.problems += part.problems
    return part


def _describe(artifact: Artifact, values: dict[str, Any], rel: str) -> None:
    """Architecture, tokenizer, templates, tasks of a header's keys."""
    kept = {
        k: v for k, v in values.items() if not isinstance(v, LongArray) and not (isinstance(v, str) and len(v) > 4096)
    }
    artifact.facts["kv"] = Fact(kept, f"{rel}#kv", Strength.HEADER)
    name, kind = values.get("general.architecture"), values.get("general.type", "model")
    if not isinstance(name, str) or not name:
        if kind != "imatrix" and "split.no" not in values:
            artifact.findings.append(
                Finding(
                    "config.invalid",
                    Severity.ERROR,
                    f"`{rel}` has no `general.architecture`",
                    f"{rel}#kv:general.architecture",
                )
            )
        name = ""
    artifact.facts["architecture_known"] = Fact(name in ARCHITECTURES, "kv:general.architecture", Strength.DERIVED)
    artifact.kind = {
        "adapter": ArtifactKind.GGUF_ADAPTER,
        "mmproj": ArtifactKind.GGUF_MMPROJ,
        "imatrix": ArtifactKind.GGUF_OTHER,
    }.get(str(kind), ArtifactKind.GGUF_MMPROJ if name == "clip" else ArtifactKind.GGUF)
    artifact.id = f"{artifact.kind}:{rel}"
    artifact.architecture = _architecture(name, values, artifact)
    artifact.architecture.config = kept
    artifact.quantization = _quantization(artifact, values)
    artifact.architecture.quantization = artifact.quantization
    licence = values.get("general.license")
    if isinstance(licence, str):
        artifact.licence = Fact(licence, "kv:general.license", Strength.HEADER)
    _base(artifact, values)
    if artifact.kind is ArtifactKind.GGUF:
        _language(artifact, name, values, rel)


def _architecture(name: str, values: dict[str, Any], artifact: Artifact) -> Architecture:
    keys = {
        "hidden_size": "embedding_length",
        "num_hidden_layers": "block_count",
        "num_attention_heads": "attention.head_count",
        "num_key_value_heads": "attention.head_count_kv",
        "head_dim": "attention.key_length",
        "intermediate_size": "feed_forward_length",
        "vocab_size": "vocab_size",
        "max_position_embeddings": "context_length",
        "num_experts": "expert_count",
    }
    dims: dict[str, int] = {}
    for ours, theirs in keys.items():
        value = values.get(f"{name}.{theirs}")
        if isinstance(value, list) and value and all(type(v) is int for v in value):
            value = max(value)  # given per layer
        if type(value) is int:
            dims[ours] = value
    tokens = values.get("tokenizer.ggml.tokens")
    if "vocab_size" not in dims and isinstance(tokens, (LongArray, list)):
        dims["vocab_size"] = tokens.length if isinstance(tokens, LongArray) else len(tokens)
    rope = {
        k.removeprefix(f"{name}."): v
        for k, v in values.items()
        if k.startswith(f"{name}.rope.") and not isinstance(v, LongArray)
    }
    attention = (
        {"sliding_window": values[f"{name}.attention.sliding_window"]}
        if f"{name}.attention.sliding_window" in values
        else {}
    )
    tied = "output.weight" not in artifact.tensors.tensors if "token_embd.weight" in artifact.tensors.tensors else None
    return Architecture(name, [], dims, rope, attention, tied=tied, source="kv:general.architecture")


def _quantization(artifact: Artifact, values: dict[str, Any]) -> Quantization | None:
    types = artifact.tensors.dtypes()
    matrices = {t.dtype: 0 for t in artifact.tensors.tensors.values() if len(t.shape) >= 2}
    for tensor in artifact.tensors.tensors.values():
        if len(tensor.shape) >= 2:
            matrices[tensor.dtype] += tensor.nbytes
    if not matrices or set(matrices) <= {"F32", "F16", "BF16", "F64"}:
        return None
    main = max(matrices, key=lambda t: matrices[t])
    file_type = values.get("general.file_type")
    label = FILE_TYPES.get(file_type, "") if isinstance(file_type, int) else ""
    return Quantization(
        "gguf",
        BITS.get(main),
        TYPES_BLOCK.get(main),
        packing=label or main,
        tensor_types=types,
        source="kv:general.file_type",
        tensors_plain=False,
    )


TYPES_BLOCK = {name: block for name, block, _ in TYPES.values()}


def _base(artifact: Artifact, values: dict[str, Any]) -> None:
    name = values.get("general.base_model.0.name") or values.get("general.base_model.0.repo_url")
    if artifact.kind is ArtifactKind.GGUF_ADAPTER:
        artifact.depends_on.append(ArtifactRef("base_model", str(name or "unnamed")))
        artifact.tasks.append(TaskEvidence(Task.TEXT_GENERATION, "kv:general.type", Strength.HEADER))
        artifact.findings.append(
            Finding(
                "adapter.base_missing",
                Severity.ERROR,
                f"an adapter is not a model; its base `{name or 'unnamed'}` must be given",
                artifact.entry,
                f"general.type = {values.get('general.type')}",
                "the base model as GGUF",
            )
        )
    elif name:
        artifact.depends_on.append(ArtifactRef("derived_from", str(name)))


def _language(artifact: Artifact, name: str, values: dict[str, Any], rel: str) -> None:
    artifact.tokenizer = _tokenizer(values, rel)
    for key in sorted(k for k in values if k == "tokenizer.chat_template" or k.startswith("tokenizer.chat_template.")):
        if isinstance(values[key], str):
            template, findings = read_template(
                values[key], f"kv:{key}", key.removeprefix("tokenizer.chat_template").strip(".") or "default"
            )
            artifact.templates.append(template)
            artifact.findings += findings
    if artifact.tokenizer is not None:
        pad, bos = (values.get(f"tokenizer.ggml.{n}_token_id") for n in ("padding", "bos"))
        artifact.generation = Generation(
            artifact.tokenizer.eos_ids,
            pad if type(pad) is int else None,
            bos if type(bos) is int else None,
            source="kv:tokenizer.ggml.eos_token_id",
        )
        _check_ids(artifact)
    stated = values.get(f"{name}.pooling_type")
    pooling = POOLINGS.get(stated) if type(stated) is int else None
    if pooling not in (None, "none"):
        artifact.recipe = Recipe(
            "pooling", {"pooling": pooling, "normalize": True}, f"kv:{name}.pooling_type", Strength.HEADER
        )
        task = Task.RERANK if pooling == "rank" else Task.EMBEDDINGS
        artifact.tasks.append(TaskEvidence(task, f"kv:{name}.pooling_type", Strength.HEADER))
    if name in ENCODERS or values.get(f"{name}.attention.causal") is False:
        if not artifact.tasks:
            artifact.tasks.append(TaskEvidence(Task.EMBEDDINGS, "kv:general.architecture", Strength.DERIVED))
    elif artifact.tensors.tensors:
        artifact.tasks.append(TaskEvidence(Task.TEXT_GENERATION, "kv:general.architecture", Strength.HEADER))
        if any(t.valid for t in artifact.templates):
            artifact.tasks.insert(0, TaskEvidence(Task.CHAT, "kv:tokenizer.chat_template", Strength.HEADER))


def _tokenizer(values: dict[str, Any], rel: str) -> Tokenizer | None:
    model, tokens = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.tokens")
    if not isinstance(model, str) or model == "none" or tokens is None:
        return None
    count = tokens.length if isinstance(tokens, LongArray) else len(tokens) if isinstance(tokens, list) else 0
    pre = values.get("tokenizer.ggml.pre")
    ids = [values.get(f"tokenizer.ggml.{n}_token_id") for n in ("eos", "eot", "eom")]
    return Tokenizer(
        "gguf",
        rel,
        [rel],
        model,
        count,
        count - 1,
        pre if isinstance(pre, str) else None,
        eos_ids=list(dict.fromkeys(i for i in ids if type(i) is int)),
    )


def _check_ids(artifact: Artifact) -> None:
    tensor, tokenizer = artifact.tensors.tensors.get("token_embd.weight"), artifact.tokenizer
    if tensor is None or len(tensor.shape) != 2 or tokenizer is None or tokenizer.max_id is None:
        return
    if tokenizer.max_id >= tensor.shape[0]:
        artifact.findings.append(
            Finding(
                "tokenizer.id_out_of_range",
                Severity.ERROR,
                f"the tokenizer has {tokenizer.vocab_size} tokens, the embedding {tensor.shape[0]} rows",
                artifact.entry,
                str(tokenizer.max_id),
                f"at most {tensor.shape[0] - 1}",
            )
        )


def _pair(scan: Scan, projector: Artifact, artifacts: list[Artifact]) -> None:
    """Text models beside a projector must have its projection width as their embedding length."""
    values = (projector.facts["kv"].value or {}) if "kv" in projector.facts else {}
    width = values.get("clip.vision.projection_dim", values.get("clip.audio.projection_dim"))
    models = [
        a
        for a in artifacts
        if a.kind is ArtifactKind.GGUF and parent_of(a.entry) == parent_of(projector.entry) and a.architecture
    ]
    if not isinstance(width, int) or not models:
        return
    fitting = [a for a in models if a.architecture and a.architecture.dims.get("hidden_size") == width]
    for model in fitting:
        projector.depends_on.append(ArtifactRef("text_model", model.id, resolved=True))
        model.tasks.append(
            TaskEvidence(
                Task.IMAGE_TEXT_TO_TEXT, f"kv:clip.vision.projection_dim of {projector.entry}", Strength.DERIVED
            )
        )
    if not fitting:
        lengths = ", ".join(str(a.architecture.dims.get("hidden_size")) for a in models if a.architecture)
        projector.findings.append(
            Finding(
                "adapter.base_mismatch",
                Severity.ERROR,
                f"the projector gives width {width}, no text model beside it has that width",
                projector.entry,
                f"projection_dim {width}",
                f"embedding_length {lengths}",
            )
        )
