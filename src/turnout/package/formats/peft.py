"""PEFT adapters: adapter_config.json with adapter weights; never usable without their base."""

from __future__ import annotations

import os
from typing import Any

from turnout.package.facts import (
    Artifact,
    ArtifactKind,
    ArtifactRef,
    CodeNeed,
    Fact,
    Finding,
    Severity,
    Strength,
    TaskEvidence,
    TensorInventory,
)
from turnout.package.formats import transformers
from turnout.package.formats.pickle import read_pickle, unsafe_finding
from turnout.package.formats.safetensors import read_safetensors
from turnout.package.scan import ReadError, Scan, join
from turnout.types import Task

# Tuner kinds of peft 0.21 whose tensors are lora_A and lora_B pairs.
LORA_LIKE = frozenset({"LORA", "ADALORA"})
KNOWN_TYPES = frozenset(
    {
        "ADALORA",
        "ADAPTION_PROMPT",
        "BOFT",
        "BONE",
        "C3A",
        "CARTRIDGE",
        "CPT",
        "DELORA",
        "FOURIERFT",
        "GRALORA",
        "HIRA",
        "HRA",
        "IA3",
        "LILY",
        "LN_TUNING",
        "LOHA",
        "LOKR",
        "LORA",
        "MISS",
        "MULTITASK_PROMPT_TUNING",
        "OFT",
        "OSF",
        "POLY",
        "PREFIX_TUNING",
        "PROMPT_TUNING",
        "PSOFT",
        "P_TUNING",
        "PVERA",
        "RANDLORA",
        "ROAD",
        "SHIRA",
        "TINYLORA",
        "TRAINABLE_TOKENS",
        "VBLORA",
        "VERA",
        "WAVEFT",
        "XLORA",
    }
)
TASKS = {
    "CAUSAL_LM": (Task.TEXT_GENERATION, Task.CHAT),
    "SEQ_CLS": (Task.TEXT_CLASSIFICATION,),
    "TOKEN_CLS": (Task.TOKEN_CLASSIFICATION,),
    "SEQ_2_SEQ_LM": (Task.TEXT2TEXT,),
    "FEATURE_EXTRACTION": (Task.EMBEDDINGS,),
    "QUESTION_ANS": (Task.QUESTION_ANSWERING,),
}


def detect(scan: Scan) -> list[Artifact]:
    """Every directory with an adapter_config.json."""
    found = []
    for rel in scan.glob("adapter_config.json"):
        directory = rel.removesuffix("adapter_config.json").rstrip("/")
        if scan.focus is None or scan.focus in (
            rel,
            join(directory, "adapter_model.safetensors"),
            join(directory, "adapter_model.bin"),
        ):
            found.append(_artifact(scan, directory, rel))
    return found


def _artifact(scan: Scan, directory: str, rel: str) -> Artifact:
    artifact = Artifact(f"peft_adapter:{directory or '.'}", ArtifactKind.PEFT_ADAPTER, directory, [rel])
    claimed: set[str] = scan.once("claimed", set)
    claimed |= {join(directory, "adapter_model.bin")}
    try:
        config = scan.json(rel)
    except ReadError as error:
        config = {}
        artifact.findings.append(error.finding)
    config = config if isinstance(config, dict) else {}
    kind = str(config.get("peft_type") or "")
    artifact.facts["peft_type"] = Fact(kind, f"{rel}#/peft_type", Strength.CONFIG)
    artifact.facts["config"] = Fact(config, rel, Strength.CONFIG)
    if kind.upper() not in KNOWN_TYPES:
        artifact.findings.append(
            Finding(
                "adapter.type_unsupported",
                Severity.ERROR,
                f"adapter of unknown type `{kind}`",
                f"{rel}#/peft_type",
                kind or "absent",
                "a type that peft knows",
            )
        )
    _weights(scan, directory, artifact)
    dora = bool(config.get("use_dora")) or any("lora_magnitude_vector" in n for n in artifact.tensors.tensors)
    artifact.facts["dora"] = Fact(dora, f"{rel}#/use_dora", Strength.CONFIG)
    for task in TASKS.get(str(config.get("task_type")), (Task.TEXT_GENERATION,)):
        artifact.tasks.append(TaskEvidence(task, f"{rel}#/task_type", Strength.CONFIG))
    if kind.upper() in LORA_LIKE:
        _check_rank(config, rel, artifact)
    base = _base(scan, directory, config, rel, artifact)
    if base is not None:
        compare_with_base(artifact, base)
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact


def _weights(scan: Scan, directory: str, artifact: Artifact) -> None:
    name = join(directory, "adapter_model.safetensors")
    if scan.has(name):
        artifact.files.append(name)
        artifact.tensors = read_safetensors(scan, name)
        return
    name = join(directory, "adapter_model.bin")
    if not scan.has(name):
        artifact.findings.append(
            Finding(
                "artifact.missing",
                Severity.ERROR,
                "the adapter has no weights",
                directory or ".",
                "absent",
                "adapter_model.safetensors",
            )
        )
        return
    artifact.files.append(name)
    try:
        facts = read_pickle(scan, name)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return
    if facts is not None and facts.unsafe:
        artifact.code = CodeNeed.FORBIDDEN
        artifact.findings.append(unsafe_finding(name, facts.unsafe))
    elif facts is not None:
        artifact.tensors = facts.inventory


def _check_rank(config: dict[str, Any], rel: str, artifact: Artifact) -> None:
    """Rank of each lora_A [rank, in] and lora_B [out, rank] against the configured one."""
    rank, pattern = config.get("r"), config.get("rank_pattern") or {}
    if not isinstance(rank, int):
        return
    for name, tensor in artifact.tensors.tensors.items():
        if len(tensor.shape) != 2 or (".lora_A." not in name and ".lora_B." not in name):
            continue
        expected = next((r for key, r in pattern.items() if isinstance(r, int) and key in name), rank)
        observed = tensor.shape[0] if ".lora_A." in name else tensor.shape[1]
        if observed != expected:
            artifact.findings.append(
                Finding(
                    "adapter.base_mismatch",
                    Severity.ERROR,
                    f"`{name}` has another rank than the configuration",
                    f"{rel}#/r",
                    f"rank {observed}",
                    f"rank {expected}",
                )
            )
            return


def _base(scan: Scan, directory: str, config: dict[str, Any], rel: str, artifact: Artifact) -> TensorInventory | None:
    """Tensors of the base model when it is a local directory; else the base is missing."""
    name = config.get("base_model_name_or_path")
    named = name if isinstance(name, str) else ""
    path = _local(scan, directory, named)
    reference = ArtifactRef("base_model", str(path or named), config.get("revision"), path is not None)
    artifact.depends_on.append(reference)
    if path is None:
        artifact.findings.append(
            Finding(
                "adapter.base_missing",
                Severity.ERROR,
                f"the base model `{named or 'unnamed'}` is not on this machine",
                f"{rel}#/base_model_name_or_path",
                named or "absent",
                "a directory with the base model",
            )
        )
        return None
    return base_tensors(path, artifact)


def _local(scan: Scan, directory: str, name: str) -> str | None:
    if not name:
        return None
    for candidate in (name if os.path.isabs(name) else os.path.join(scan.root, directory, name),):
        if os.path.isdir(candidate):
            return os.path.realpath(candidate)
    return None


def base_tensors(path: str, artifact: Artifact) -> TensorInventory | None:
    """Tensors of the Transformers directory at ``path``, from headers; gives the adapter its tokenizer,
    templates and architecture."""
    base = next(iter(transformers.detect_in(Scan.of(path), "")), None)
    if base is None:
        artifact.findings.append(
            Finding("adapter.base_missing", Severity.ERROR, f"`{path}` holds no Transformers model", path)
        )
        return None
    artifact.architecture, artifact.tokenizer = base.architecture, artifact.tokenizer or base.tokenizer
    artifact.templates, artifact.generation, artifact.labels = base.templates, base.generation, base.labels
    artifact.processors = base.processors
    return base.tensors


def compare_with_base(artifact: Artifact, base: TensorInventory) -> None:
    """lora_A's input and lora_B's output width against the base's weight [out, in] of the same name."""
    if not base.tensors:
        return
    for name, tensor in artifact.tensors.tensors.items():
        side = ".lora_A." if ".lora_A." in name else ".lora_B." if ".lora_B." in name else None
        if side is None or len(tensor.shape) != 2:
            continue
        module = name.split(side)[0].removeprefix("base_model.model.")
        weight = base.tensors.get(f"{module}.weight")
        if weight is None or len(weight.shape) != 2:
            if weight is None and not any(n.startswith(f"{module}.") for n in base.tensors):
                artifact.findings.append(
                    Finding(
                        "adapter.base_mismatch",
                        Severity.ERROR,
                        f"the base has no module `{module}`",
                        artifact.entry,
                        "absent",
                        module,
                    )
                )
                return
            continue
        observed = tensor.shape[1] if side == ".lora_A." else tensor.shape[0]
        expected = weight.shape[1] if side == ".lora_A." else weight.shape[0]
        if observed != expected:
            artifact.findings.append(
                Finding(
                    "adapter.base_mismatch",
                    Severity.ERROR,
                    f"`{name}` does not fit the base's `{module}.weight`",
                    artifact.entry,
                    f"width {observed}",
                    f"width {expected}",
                )
            )
            return
