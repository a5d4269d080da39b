"""PEFT adapters: adapter_config.json with adapter weights; never usable without their base."""

from __future__ import annotations

import os
import re
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

# Kinds that peft 0.21 has; a test compares them with the library. Older names stay known.
# fmt: off
KNOWN_TYPES = frozenset({
    "ADALORA", "ADAMSS", "ADAPTION_PROMPT", "BEFT", "BOFT", "BONE", "C3A", "CARTRIDGE", "CPT", "DEFT", "DELORA",
    "FOURIERFT", "FROD", "GLORA", "GRALORA", "HIRA", "HRA", "IA3", "LILY", "LN_TUNING", "LOHA", "LOKR", "LORA",
    "MISS", "MULTITASK_PROMPT_TUNING", "OFT", "OSF", "PEANUT", "POLY", "PREFIX_TUNING", "PROMPT_TUNING",
    "PSOFT", "PVERA", "P_TUNING", "RANDLORA", "ROAD", "SHADOW", "SHIRA", "SUPERTUNING", "TINYLORA",
    "TRAINABLE_TOKENS", "UNILORA", "VBLORA", "VERA", "WAVEFT", "XLORA",
})
# fmt: on
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
    if kind.upper() == "LORA":
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
    if type(rank) is not int or not isinstance(pattern, dict):
        return
    if any(re.search(r"[^\w.\-]", key) for key in pattern):
        return  # patterns may be expressions, and those of a stranger are not evaluated
    for name, tensor in artifact.tensors.tensors.items():
        module, side = _side(name)
        if side is None or len(tensor.shape) != 2:
            continue
        own = (r for key, r in pattern.items() if type(r) is int and (module == key or module.endswith(f".{key}")))
        expected = next(own, rank)
        observed = tensor.shape[0] if side == "A" else tensor.shape[1]
        if observed != expected:
            message = f"`{name}` has another rank than the configuration"
            _mismatch(artifact, message, f"rank {observed}", f"rank {expected}", f"{rel}#/r")
            return


def _side(name: str) -> tuple[str, str | None]:
    """Module of a LoRA tensor and which of the two it is; of an added token's or a head's, no side."""
    found = re.fullmatch(r"(?:base_model\.model\.)?(.+)\.lora_([AB])(?:\.[^.]+)?\.weight", name)
    return (found[1], found[2]) if found else (name, None)


def _mismatch(artifact: Artifact, message: str, observed: str, expected: str, path: str) -> None:
    artifact.findings.append(Finding("adapter.base_mismatch", Severity.ERROR, message, path, observed, expected))


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
    # A name may be any directory of the machine; only one that holds a model is looked through.
    known = os.path.isfile(os.path.join(path, "config.json"))
    base = next(iter(transformers.detect_in(Scan.of(path), "")), None) if known else None
    if base is None:
        artifact.findings.append(
            Finding("adapter.base_missing", Severity.ERROR, f"`{path}` holds no Transformers model", path)
        )
        return None
    artifact.architecture, artifact.tokenizer = base.architecture, artifact.tokenizer or base.tokenizer
    artifact.templates, artifact.generation, artifact.labels = base.templates, base.generation, base.labels
    artifact.processors = base.processors
    return base.tensors


# Families whose linear layers are stored [in, out] (Conv1D of Transformers).
TRANSPOSED = frozenset({"gpt2", "openai-gpt", "imagegpt", "decision_transformer"})
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def compare_with_base(artifact: Artifact, base: TensorInventory) -> None:
    """Input width of lora_A [rank, in] and output width of lora_B [out, rank] against the base's weight."""
    config = artifact.facts["config"].value if "config" in artifact.facts else None
    kind = artifact.architecture.model_type if artifact.architecture else ""
    transposed = kind in TRANSPOSED or bool(isinstance(config, dict) and config.get("fan_in_fan_out"))
    modules = _Modules(base)
    absent: list[str] = []
    matched = False
    for name, tensor in artifact.tensors.tensors.items():
        module, side = _side(name)
        if side is None or len(tensor.shape) != 2 or not base.tensors:
            continue
        found = modules.find(module)
        if found is None:
            absent.append(module)
            continue
        matched = True
        weight = base.tensors.get(f"{found}.weight")
        if weight is None or len(weight.shape) != 2 or weight.dtype not in FLOATS:
            continue  # packed weights do not show their width
        given, taken = reversed(weight.shape) if not transposed else weight.shape
        observed, expected = (tensor.shape[1], given) if side == "A" else (tensor.shape[0], taken)
        if observed != expected:
            message = f"`{name}` does not fit the base's `{found}.weight`"
            _mismatch(artifact, message, f"width {observed}", f"width {expected}", artifact.entry)
            return
    # Where nothing is found by name, the base may only be spelt otherwise; a kind of module it lacks is not.
    lacking = next((m for m in absent if matched or not modules.has_kind(m)), None)
    if lacking is not None:
        _mismatch(artifact, f"the base has no module `{lacking}`", "absent", lacking, artifact.entry)


class _Modules:
    """Modules of a base by name, with or without the prefix by which a head's class holds its body."""

    def __init__(self, base: TensorInventory) -> None:
        self.names = {name.rpartition(".")[0] for name in base.tensors}
        self.prefixes = {name.partition(".")[0] for name in self.names}
        self.kinds = {".".join(name.split(".")[-2:]) for name in self.names}

    def find(self, module: str) -> str | None:
        """Name in the base of the adapter's ``module``, None when it has none."""
        inner = module.partition(".")[2]
        for name in (module, inner, *(f"{prefix}.{module}" for prefix in self.prefixes)):
            if name in self.names:
                return name
        return None

    def has_kind(self, module: str) -> bool:
        """Whether any module of the base ends like ``module``, as in ``self_attn.q_proj``."""
        return ".".join(module.split(".")[-2:]) in self.kinds
