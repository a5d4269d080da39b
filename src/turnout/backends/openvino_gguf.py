"""What OpenVINO GenAI makes of GGUF files, asked with small copies of them.

GenAI has no table of what it reads: it says so while it loads. So the question is put with a
model of one layer and a vocabulary of some 280 tokens that has the file's architecture, element
types or pre-tokenizer; each answer takes a tenth to a quarter of a second and is kept.
"""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any

from turnout.backends.base import SAME_CASE, Action, BindingReport, Case, Kind, Remedy, Requirement, State, met, unmet
from turnout.backends.openvino_gguf_files import ELEMENT_TYPES, HEAD_NORMS, LAYER_TENSORS, TELLING, SmallModel, expanded
from turnout.backends.openvino_reading import first_line
from turnout.backends.requirements import truthy
from turnout.errors import LoadError
from turnout.package.facts import Artifact, ArtifactKind

# Measured against dequantized weights with openvino-genai 2026.4: these types have a minimum per
# block, which GenAI rounds to a whole number of steps between 0 and 15. SmolLM2's logits then
# differ by 5 to 15 on a scale of 20 to 30. Types without a minimum agree to 1e-3 of the scale.
ROUNDED_TYPES = frozenset({"Q4_1", "Q4_K"})
BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral"})  # llama.cpp, llama-vocab.cpp
# Keys of ``{arch}.`` that GenAI 2026.4 reads (the names its library holds), and keys that describe.
READ_KEYS = frozenset(
    {
        "block_count", "attention.head_count", "attention.head_count_kv", "attention.key_length", "embedding_length",
        "context_length", "rope.freq_base", "attention.layer_norm_rms_epsilon",
    }
)  # fmt: skip
DESCRIPTIVE_KEYS = frozenset({"feed_forward_length", "vocab_size", "tensor_data_layout"})
REQUIRED_KEYS = ("block_count", "attention.head_count", "embedding_length", "attention.layer_norm_rms_epsilon")


def role_of(name: str) -> str:
    """What a tensor is for, as far as its element type matters to GenAI."""
    if name == "token_embd.weight":
        return "embedding"
    if name == "output.weight":
        return "output"
    if name.endswith(".bias"):
        return "bias"
    return "norm" if name.endswith("norm.weight") else "matrix"


def consumed(name: str) -> bool:
    """Whether GenAI uses a tensor of this name at all."""
    if name in ("token_embd.weight", "output_norm.weight", "output.weight"):
        return True
    parts = name.split(".")
    if len(parts) != 4 or parts[0] != "blk" or parts[3] not in ("weight", "bias"):
        return False
    if parts[3] == "bias":
        return parts[2] in ("attn_q", "attn_k", "attn_v")
    return parts[2] in LAYER_TENSORS or parts[2] in HEAD_NORMS


def required_tensors(architecture: str, layers: int) -> list[str]:
    """Names that GenAI looks up without asking whether they are there."""
    stems = LAYER_TENSORS + (HEAD_NORMS if architecture == "qwen3" else ())
    per_layer = [f"blk.{i}.{stem}.weight" for i in range(layers) for stem in stems]
    return ["token_embd.weight", "output_norm.weight", *per_layer]


def model_path(case: Case) -> str:
    """What the pipeline is given: a directory, the GGUF file, or its expanded copy in the cache."""
    artifact = case.artifact
    if artifact.kind is not ArtifactKind.GGUF:
        entry = case.file(artifact.entry)
        return entry if os.path.isdir(entry) else os.path.dirname(entry)
    stored = {t.dtype for t in artifact.tensors.tensors.values()}
    if truthy(case.options.get("allow_dequantize")) and stored & ROUNDED_TYPES:
        return expanded(case.file(artifact.entry), ROUNDED_TYPES)
    return case.file(artifact.entry)


def adds_bos(case: Case) -> bool:
    """Whether a start token belongs before plain prompts that the tokenizer does not put there."""
    if case.artifact.kind is not ArtifactKind.GGUF or case.options.get("tokenizer"):
        return False  # the tokenizer does it where it must be done
    values = metadata(case.artifact)
    stated = values.get("tokenizer.ggml.add_bos_token")
    return bool(stated) if stated is not None else values.get("tokenizer.ggml.pre") in BOS_BY_DEFAULT


def refuse_for_good(requirements: Iterable[Requirement]) -> None:
    """Raises ``LoadError`` for a requirement that no option of this case can meet: GenAI would load
    much of it all the same and compute something else."""
    for requirement in requirements:
        actions = {remedy.action for remedy in requirement.remedies}
        if requirement.state is State.UNMET and requirement.reason and not actions & SAME_CASE:
            raise LoadError(requirement.reason.message, code=requirement.reason.code)


# ---- asking ----------------------------------------------------------------------------


def _ask(small: SmallModel, question: Callable[[str], Any]) -> Any:
    with tempfile.TemporaryDirectory(prefix="turnout-ask-") as folder:
        path = Path(folder) / "small.gguf"
        small.write(path)
        return question(os.fspath(path))


@cache
def refusal_of_architecture(architecture: str) -> str:
    """What GenAI says to a small model of this architecture; '' when it loads."""
    return _refusal(SmallModel(architecture))


@cache
def refusal_of_type(role: str, element_type: str) -> str:
    """What GenAI says to tensors of this element type in this role; '' when it loads."""
    if element_type not in ELEMENT_TYPES:
        return f"unknown element type {element_type}"
    return _refusal(SmallModel(types={role: element_type}))


@cache
def refusal_of_tokenizer(model: str) -> str:
    """What GenAI says to a GGUF tokenizer model (gpt2, llama, bert ...); '' when it reads it."""
    try:
        _tokens(SmallModel(tokenizer=model))
    except Exception as error:  # the library raises RuntimeError and others
        return first_line(error)
    return ""


@cache
def knows_pre_tokenizer(pre: str) -> bool:
    """Whether GenAI splits text differently for ``pre`` than for a name that nobody knows."""
    if pre == "default":
        return True
    return bool(_tokens(SmallModel(pre=pre)) != _tokens(SmallModel(pre="no-such-pre-tokenizer")))


def _refusal(small: SmallModel) -> str:
    import openvino_genai

    try:
        _ask(small, lambda path: openvino_genai.LLMPipeline(path, "CPU"))
    except Exception as error:  # the library raises RuntimeError and others
        return first_line(error)
    return ""


def _tokens(small: SmallModel) -> list[int]:
    import openvino_genai

    tokenizer = _ask(small, openvino_genai.Tokenizer)
    ids: list[int] = tokenizer.encode(TELLING, add_special_tokens=False).input_ids.data[0].tolist()
    return ids


# ---- requirements ----------------------------------------------------------------------


def metadata(artifact: Artifact) -> dict[str, Any]:
    """Key-value pairs of a GGUF file as inspection read them."""
    return artifact.architecture.config if artifact.architecture else {}


def gguf_requirements(case: Case) -> list[Requirement]:
    """Everything GenAI needs of a GGUF file."""
    artifact = case.artifact
    found: list[Requirement] = []
    built = _architecture(case)
    found += built
    # What a builder passes over can be said only of an architecture that has one.
    asks = (_settings, _tensors) if all(r.state is State.MET for r in built) else ()
    for ask in (*asks, _element_types, _tokenizer):
        found += ask(case)
    return found or [met("gguf", Kind.ARTIFACT, artifact.entry)]


def _architecture(case: Case) -> list[Requirement]:
    name = str(metadata(case.artifact).get("general.architecture") or "")
    refusal = refusal_of_architecture(name) if name else "no architecture is named"
    if not refusal:
        return [met("architecture", Kind.ARCHITECTURE, name)]
    return [
        unmet(
            Kind.ARCHITECTURE,
            "architecture.unsupported",
            f"OpenVINO GenAI builds no `{name}` from GGUF",
            observed=refusal,
            expected="an architecture it builds (llama, qwen2 and qwen3 do)",
            where=case.artifact.entry,
        )
    ]


def _settings(case: Case) -> list[Requirement]:
    """Keys that must be there, and settings that GenAI would pass over in silence."""
    values, entry = metadata(case.artifact), case.artifact.entry
    arch = str(values.get("general.architecture") or "")
    needed = ["general.file_type", *(f"{arch}.{key}" for key in REQUIRED_KEYS)]
    found = [
        unmet(
            Kind.CONFIG,
            "config.invalid",
            f"OpenVINO GenAI needs the key `{key}`",
            observed="absent",
            expected=key,
            where=f"{entry}#{key}",
        )
        for key in needed
        if key not in values
    ]
    if int(values.get("split.count") or 1) > 1:
        found.append(_ignored("split.count", str(values["split.count"]), "one file", entry))
    found += [_ignored(key, observed, expected, entry) for key, observed, expected in ignored_settings(values, arch)]
    return found


def _ignored(key: str, observed: str, expected: str, entry: str) -> Requirement:
    known = expected != "absent"
    return unmet(
        Kind.CONFIG,
        "config.unsupported_variant" if known else "config.unknown_semantic_key",
        f"OpenVINO GenAI does not act on `{key}`, which changes what the model computes",
        observed=observed,
        expected=expected,
        where=f"{entry}#{key}",
    )


def ignored_settings(values: dict[str, Any], arch: str) -> Iterable[tuple[str, str, str]]:
    """Settings of ``arch`` that matter and that GenAI does not read: key, value, and the only value
    under which it computes the same (``absent`` for keys that nobody here knows)."""
    prefix = f"{arch}."
    width = _number(values, f"{prefix}attention.key_length")
    if not width:
        width = _number(values, f"{prefix}embedding_length") // max(1, _number(values, f"{prefix}attention.head_count"))
    neutral: dict[str, tuple[Any, ...]] = {
        "rope.dimension_count": (width,),
        "attention.value_length": (width,),
        "attention.sliding_window": (0,),
        "attention.causal": (True,),
        "expert_count": (0,),
        "expert_used_count": (0,),
        "leading_dense_block_count": (0,),
        "pooling_type": (0,),
    }
    if values.get(f"{prefix}rope.scaling.type") != "none":  # llama.cpp takes an absent type for linear
        neutral |= {"rope.scaling.type": ("none",), "rope.scaling.factor": (0.0, 1.0)}
    for key, value in values.items():
        name = key.removeprefix(prefix)
        if not arch or name == key or name in DESCRIPTIVE_KEYS:
            continue
        if name in READ_KEYS:
            if isinstance(value, list):
                yield key, str(value), "one number for all layers"
        elif name in neutral:
            if value not in neutral[name]:
                yield key, str(value), " or ".join(str(v) for v in neutral[name])
        elif not name.startswith("rope.scaling."):
            yield key, str(value), "absent"


def _number(values: dict[str, Any], key: str) -> int:
    """An integer key; 0 when it is absent or given per layer."""
    value = values.get(key)
    return value if isinstance(value, int) else 0


def _tensors(case: Case) -> list[Requirement]:
    artifact = case.artifact
    binding = binding_of(case)
    found = []
    told = any(f.code == "tensor.missing" for f in [*artifact.findings, *artifact.tensors.problems])
    if binding.unresolved and not told:
        found.append(
            unmet(
                Kind.TENSOR,
                "tensor.missing",
                f"{len(binding.unresolved)} tensors that OpenVINO GenAI needs are in no file",
                observed="absent: " + ", ".join(binding.unresolved[:4]),
                expected=binding.unresolved[0],
                where=artifact.entry,
            )
        )
    if binding.unexpected:
        found.append(
            unmet(
                Kind.TENSOR,
                "tensor.unexpected",
                f"OpenVINO GenAI ignores {len(binding.unexpected)} tensors, first `{binding.unexpected[0]}`",
                observed=", ".join(binding.unexpected[:4]),
                expected="only tensors that it computes with",
                where=artifact.entry,
            )
        )
    return found


def binding_of(case: Case) -> BindingReport:
    """Which tensors a load binds. Biases of queries and keys count as unexpected for llama: GenAI
    reorders the weights' rows for its rotary embedding but not the biases (measured: logits off by a
    seventh of their scale)."""
    artifact = case.artifact
    names = artifact.tensors.tensors
    if artifact.kind is not ArtifactKind.GGUF:
        return BindingReport(loaded=len(names))
    values = metadata(artifact)
    arch = str(values.get("general.architecture") or "")
    layers = _number(values, f"{arch}.block_count")
    misread = ("attn_q.bias", "attn_k.bias") if arch == "llama" else ()
    extra = [name for name in names if not consumed(name) or name.endswith(misread or ("\0",))]
    missing = [name for name in required_tensors(arch, layers) if name not in names]
    tied = [] if "output.weight" in names else ["output.weight"]
    return BindingReport(len(names) - len(extra), tied, unexpected=sorted(extra), unresolved=missing)


def _element_types(case: Case) -> list[Requirement]:
    """Element types by asking for each of them in its role."""
    artifact = case.artifact
    counts = Counter((role_of(t.name), t.dtype) for t in artifact.tensors.tensors.values() if consumed(t.name))
    found = []
    for (role, element_type), count in sorted(counts.items()):
        refusal = refusal_of_type(role, element_type)
        if refusal:
            found.append(
                unmet(
                    Kind.QUANTIZATION,
                    "quantization.unsupported",
                    f"OpenVINO GenAI does not take {element_type} for {count} {role} tensors: {refusal}",
                    observed=f"{element_type} in {count} {role} tensors",
                    expected="an element type that it loads (F16, Q4_0, Q6_K, Q8_0 for matrices)",
                    where=artifact.entry,
                )
            )
    rounded = {kind: sum(n for (_, k), n in counts.items() if k == kind) for kind in ROUNDED_TYPES}
    for kind, count in sorted(rounded.items()):
        if count and not truthy(case.options.get("allow_dequantize")):
            found.append(_rounded(kind, count, artifact))
    return found or [met("element_types", Kind.QUANTIZATION, artifact.entry)]


def _rounded(kind: str, count: int, artifact: Artifact) -> Requirement:
    remedy = Remedy(
        Action.SET_OPTION,
        "expand these tensors to F16 in turnout's cache with `--option allow_dequantize=true`",
        ["--option", "allow_dequantize=true"],
    )
    remedy.cost.bytes = expanded_bytes(artifact)
    return unmet(
        Kind.QUANTIZATION,
        "quantization.unsupported",
        f"OpenVINO GenAI rounds the block minimums of {kind} to whole steps, so its numbers are not the file's",
        observed=f"{kind} in {count} tensors",
        expected="an element type without block minimums (F16, Q4_0, Q6_K, Q8_0)",
        where=artifact.entry,
        remedies=[remedy],
    )


def expanded_bytes(artifact: Artifact) -> int:
    """Bytes of the file once its rounded tensors are F16."""
    total = 0
    for tensor in artifact.tensors.tensors.values():
        elements = 1
        for dim in tensor.shape:
            elements *= dim
        total += elements * 2 if tensor.dtype in ROUNDED_TYPES else tensor.nbytes
    return total


def _tokenizer(case: Case) -> list[Requirement]:
    """Kind and pre-tokenizer, unless the option ``tokenizer`` brings another tokenizer."""
    if case.options.get("tokenizer"):
        return []
    values, entry = metadata(case.artifact), case.artifact.entry
    model = str(values.get("tokenizer.ggml.model") or "")
    remedy = Remedy(
        Action.SET_OPTION, "name a `tokenizer.json` with `--option tokenizer=PATH`", ["--option", "tokenizer=PATH"]
    )
    if refusal_of_tokenizer(model):
        # The pipeline reads the file's own tokenizer in any case, so another one is no way out.
        return [
            unmet(
                Kind.COMPONENT,
                "tokenizer.unsupported_kind",
                f"OpenVINO GenAI reads no `{model}` tokenizer from GGUF",
                observed=model or "none",
                expected="gpt2 (byte-level BPE)",
                where=f"{entry}#tokenizer.ggml.model",
            )
        ]
    pre = str(values.get("tokenizer.ggml.pre") or "default")
    if knows_pre_tokenizer(pre):
        return [met("tokenizer", Kind.COMPONENT, pre)]
    return [
        unmet(
            Kind.COMPONENT,
            "tokenizer.pre_unknown",
            f"OpenVINO GenAI does not know the pre-tokenizer `{pre}` and would split text by another rule",
            observed=pre,
            expected="a pre-tokenizer it knows (smollm, qwen2, default)",
            where=f"{entry}#tokenizer.ggml.pre",
            remedies=[remedy],
        )
    ]
