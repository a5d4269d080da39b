"""What a case asks of llama.cpp: the model behind it, and every requirement beyond the common ones."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

from turnout.backends.admission import DEFAULT_CONTEXT
from turnout.backends.base import Action, Case, Kind, Reason, Remedy, Requirement, State, met, unmet
from turnout.backends.llamacpp_ask import ask
from turnout.backends.llamacpp_native import library
from turnout.backends.requirements import truthy
from turnout.errors import InputError, LoadError, TurnoutError
from turnout.package.facts import Artifact, ArtifactKind
from turnout.package.formats.gguf_tables import expected_tensors
from turnout.package.inspect import inspect
from turnout.tasks.language import pooling_recipe
from turnout.types import Task

POOLINGS = ("mean", "cls", "lasttoken")
# Tensors of llama.cpp's ranking heads (LLM_TENSOR_CLS, LLM_TENSOR_CLS_OUT).
RANK_HEADS = ("cls.weight", "cls.output.weight")
# Findings after which the tensor list is not the model's whole and true one.
_INCOMPLETE = frozenset(
    {
        "artifact.corrupt",
        "artifact.duplicate_tensor",
        "artifact.lfs_pointer",
        "artifact.missing",
        "artifact.shard_missing",
        "index.inconsistent",
        "tensor.dtype_unsupported",
    }
)
_ANSWERS: dict[tuple[str, int, int, int], Reason | None] = {}


# ---- the model behind a case ---------------------------------------------------------------


class Model:
    """A GGUF model: its artifact and the absolute path of its first file."""

    def __init__(self, root: str, artifact: Artifact) -> None:
        self.artifact = artifact
        self.path = f"{root}/{artifact.entry}"


def model_of(case: Case) -> Model | None:
    """The case's model; for an adapter the base that option ``base`` names, None without it.

    Raises ``TurnoutError`` where the option leads to no GGUF model.
    """
    if case.artifact.kind is ArtifactKind.GGUF:
        return Model(case.root, case.artifact)
    base = case.options.get("base")
    if not base:
        return None
    package = inspect(str(base))
    for artifact in package.artifacts:
        if artifact.kind is ArtifactKind.GGUF:
            return Model(package.root, artifact)
    raise LoadError(f"no GGUF model at `{base}`", code="adapter.base_missing")


def required_model(case: Case) -> Model:
    """``model_of``, or ``LoadError`` (``adapter.base_missing``) where there is none."""
    model = model_of(case) if case.artifact.kind is not ArtifactKind.PEFT_ADAPTER else None
    if model is None:
        raise LoadError(
            "the adapter's base model is not named",
            code="adapter.base_missing",
            hints=["name it with `--option base=PATH`"],
        )
    return model


def context_of(case: Case, model: Artifact) -> int:
    """Tokens of context to reserve: option ``context``, else what the model was trained for, at most
    ``DEFAULT_CONTEXT``."""
    option = case.options.get("context")
    return int(option) if option else min(trained_context(model) or DEFAULT_CONTEXT, DEFAULT_CONTEXT)


def trained_context(artifact: Artifact) -> int:
    """Tokens of context the model was trained for, 0 when not stated."""
    return artifact.architecture.dims.get("max_position_embeddings", 0) if artifact.architecture else 0


def has_rank_head(artifact: Artifact) -> bool:
    """Whether the file holds a ranking head; llama.cpp would return meaningless scores without one."""
    return any(name in artifact.tensors.tensors for name in RANK_HEADS)


def main_type(artifact: Artifact) -> str:
    """Tensor type that holds most bytes."""
    counts: dict[str, int] = {}
    for tensor in artifact.tensors.tensors.values():
        counts[tensor.dtype] = counts.get(tensor.dtype, 0) + tensor.nbytes
    return max(counts, key=lambda name: counts[name]) if counts else ""


def readable_header(artifact: Artifact) -> bool:
    """Whether the reader got through the file's header; nothing native opens the file otherwise."""
    return "kv" in artifact.facts


def asked(model: Model) -> Reason | None:
    """Why llama.cpp refuses the model's metadata or tensor list, None if it does not; asked once per file.

    Where a part of the model is missing, or a type is none of ggml's, the metadata alone is asked about.
    """
    artifact, stat = model.artifact, os.stat(model.path)
    tensors = tuple(artifact.tensors.tensors.values())
    problems = {f.code for f in (*artifact.findings, *artifact.tensors.problems)}
    if problems & _INCOMPLETE:
        tensors = ()
    alignment = (artifact.facts["kv"].value or {}).get("general.alignment", 32)
    key = (model.path, stat.st_size, stat.st_mtime_ns, len(tensors))
    if key not in _ANSWERS:
        try:
            _ANSWERS[key] = ask(model.path, tensors, alignment)
        except LoadError as error:
            _ANSWERS[key] = Reason(error.code, error.message)
    reason = _ANSWERS[key]
    if reason is None:
        return None
    return _all_missing(replace(reason, where=artifact.entry), artifact)


def _all_missing(reason: Reason, artifact: Artifact) -> Reason:
    """llama.cpp names the first tensor it misses; the family's table, where there is one, names the rest."""
    architecture = artifact.architecture
    if reason.code != "tensor.missing" or architecture is None:
        return reason
    dims = architecture.dims
    blocks, experts = dims.get("num_hidden_layers", 0), dims.get("num_experts", 0)
    table = expected_tensors(architecture.model_type, blocks, experts) or []
    missing = [name for name in table if name not in artifact.tensors.tensors]
    if reason.expected not in missing:
        return reason
    first = ", ".join(f"`{name}`" for name in missing[:8])
    more = f" and {len(missing) - 8} more" if len(missing) > 8 else ""
    return replace(reason, message=f"required tensors are in no file: {first}{more}", expected=missing[0])


def template_of(case: Case, model: Artifact) -> str:
    """Text of the chat template to use, '' where no chat is asked for."""
    if case.task != Task.CHAT:
        return ""
    option = case.options.get("chat_template")
    if option:
        try:
            return Path(str(option)).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise LoadError(f"chat template `{option}` cannot be read: {error}", code="template.missing") from None
    # llama.cpp would fall back to ChatML for a file without a template; the package must have one.
    templates = case.artifact.templates or model.templates
    if not templates:
        raise LoadError("the package has no chat template", code="template.missing")
    return templates[0].text


def pooling_of(case: Case, artifact: Artifact) -> str:
    """Pooling to open the model with: '' generates. Raises ``LoadError`` for one llama.cpp has not."""
    if case.task == Task.RERANK:
        return "rank"
    if case.task != Task.EMBEDDINGS:
        return ""
    mode = str(pooling_recipe(artifact, case.options).settings.get("pooling") or "")
    if mode not in POOLINGS:
        raise LoadError(f"llama.cpp has no pooling `{mode}`", code="config.unsupported_variant")
    return mode


# ---- requirements --------------------------------------------------------------------------


def requirements_of(case: Case) -> list[Requirement]:
    """Options, tensor types, llama.cpp's answer to metadata and tensor list, and the task's own parts."""
    if case.artifact.kind is ArtifactKind.PEFT_ADAPTER:
        return [_peft(case)]
    found = _options(case)
    try:
        model = model_of(case)
    except TurnoutError as error:
        return [*found, _base_missing(case, error)]
    if model is None:
        said = any(f.code == "adapter.base_missing" for f in case.artifact.findings)
        return found if said else [*found, _base_missing(case, None)]
    found += _types(model.artifact)
    if readable_header(model.artifact):
        found.append(_accepted(model))
    found += _task_parts(case, model.artifact)
    if case.artifact.kind is ArtifactKind.GGUF_ADAPTER:
        found += _adapter_fit(case.artifact, model.artifact)
    return found


def _options(case: Case) -> list[Requirement]:
    why = {
        "tokenizer": "llama.cpp uses the tokenizer inside the GGUF file",
        "dtype": "the types of a GGUF file are fixed when it is written",
        "max_length": "llama.cpp refuses a text beyond the context instead of cutting it",
    }
    found = [
        unmet(
            Kind.OPTION,
            "option.unsupported",
            f"option `{name}`: {text}",
            observed=str(case.options[name]),
            expected="not given",
        )
        for name, text in why.items()
        if case.options.get(name)
    ]
    limit, context = trained_context(case.artifact), case.options.get("context")
    if context is not None and (not str(context).isdigit() or int(context) < 1 or (limit and int(context) > limit)):
        argv = ["--option", f"context={limit or DEFAULT_CONTEXT}"]
        remedy = Remedy(Action.SET_OPTION, f"reserve what the model was trained for with `{' '.join(argv)}`", argv)
        found.append(
            unmet(
                Kind.OPTION,
                "option.unsupported",
                "the context is not one the model was trained for",
                observed=str(context),
                expected=f"1 to {limit or 'the trained length'}",
                remedies=[remedy],
            )
        )
    return found


def _accepted(model: Model) -> Requirement:
    reason = asked(model)
    if reason is None:
        architecture = model.artifact.architecture
        return met(
            "architecture.accepted",
            Kind.ARCHITECTURE,
            model.artifact.entry,
            architecture.model_type if architecture else "",
        )
    kind = {
        "architecture": Kind.ARCHITECTURE,
        "tokenizer": Kind.COMPONENT,
        "config": Kind.CONFIG,
        "tensor": Kind.TENSOR,
    }.get(reason.boundary, Kind.INTEGRITY)
    remedies = []
    if reason.code in ("architecture.unknown", "tokenizer.pre_unknown"):
        # Whether a newer build knows it cannot be told from here, so this is no promise about the case.
        remedies = [Remedy(Action.SELECT_ARTIFACT, "choose a file of a known kind, or try a newer llama.cpp")]
    return Requirement(reason.code, kind, State.UNMET, reason.where, reason.expected, reason.observed, reason, remedies)


def _types(artifact: Artifact) -> list[Requirement]:
    known = {kind.name.removeprefix("GGML_TYPE_") for kind in library().ggml_type}
    unknown = sorted(set(artifact.tensors.dtypes()) - known)
    if not unknown:
        return [met("quantization.known", Kind.QUANTIZATION, artifact.entry, main_type(artifact))]
    first = next(name for name, tensor in artifact.tensors.tensors.items() if tensor.dtype in unknown)
    return [
        unmet(
            Kind.QUANTIZATION,
            "quantization.unsupported",
            f"llama.cpp has no tensor type {', '.join(unknown)}",
            observed=", ".join(unknown),
            expected="a type of ggml's list",
            where=f"tensor:{first}",
        )
    ]


def _task_parts(case: Case, model: Artifact) -> list[Requirement]:
    if case.task == Task.RERANK and not has_rank_head(model):
        return [
            unmet(
                Kind.TASK_HEAD,
                "head.missing",
                "the file has no ranking head: scores would mean nothing",
                observed="no ranking tensor",
                expected=" or ".join(RANK_HEADS),
                where=model.entry,
            )
        ]
    if case.task != Task.EMBEDDINGS:
        return []
    try:
        mode = str(pooling_recipe(model, case.options).settings.get("pooling") or "")
    except InputError:
        return []  # common() says that the choice is missing or unknown
    if not mode or mode in POOLINGS:
        return []
    remedies = [
        Remedy(Action.SET_OPTION, f"choose {name} pooling", ["--option", f"pooling={name}"], changes_numerics=True)
        for name in POOLINGS
    ]
    return [
        unmet(
            Kind.RECIPE,
            "config.unsupported_variant",
            f"llama.cpp has no pooling `{mode}`",
            observed=mode,
            expected=", ".join(POOLINGS),
            remedies=remedies,
        )
    ]


def _peft(case: Case) -> Requirement:
    config = case.artifact.architecture.config if case.artifact.architecture else {}
    dora = truthy(config.get("use_dora")) or any("lora_magnitude_vector" in n for n in case.artifact.tensors.tensors)
    if dora:
        return unmet(
            Kind.ARTIFACT,
            "adapter.type_unsupported",
            "llama.cpp has no DoRA: its magnitudes would be lost",
            observed="DoRA",
            expected="LoRA as GGUF",
            where=case.artifact.entry,
        )
    convert = Remedy(
        Action.CONVERT,
        "convert the adapter with llama.cpp's `convert_lora_to_gguf.py`",
        ["python", "convert_lora_to_gguf.py", case.root],
    )
    return unmet(
        Kind.ARTIFACT,
        "adapter.type_unsupported",
        "llama.cpp takes adapters as GGUF, not as PEFT folders",
        observed="PEFT safetensors",
        expected="LoRA as GGUF",
        where=case.artifact.entry,
        remedies=[convert],
    )


def _base_missing(case: Case, error: TurnoutError | None) -> Requirement:
    named = next((ref.target for ref in case.artifact.depends_on if ref.role == "base_model"), "")
    message = error.message if error else "the adapter needs its base model, which is not in this file"
    remedy = Remedy(
        Action.SET_OPTION, "name the base model's GGUF file with `--option base=PATH`", ["--option", "base=PATH"]
    )
    return unmet(
        Kind.ARTIFACT,
        "adapter.base_missing",
        message,
        observed=str(case.options.get("base") or "none"),
        expected=named or "the base model as GGUF",
        where=case.artifact.entry,
        remedies=[remedy],
    )


def _adapter_fit(adapter: Artifact, base: Artifact) -> list[Requirement]:
    """Holds an adapter's widths to its base: ``NAME.lora_a`` [rank, in], ``NAME.lora_b`` [out, rank]."""
    tensors = base.tensors.tensors
    for name, tensor in adapter.tensors.tensors.items():
        target, _, half = name.rpartition(".lora_")
        if half not in ("a", "b") or len(tensor.shape) != 2:
            continue
        found = tensors.get(target)
        width = tensor.shape[1] if half == "a" else tensor.shape[0]
        wanted = found.shape[-1 if half == "a" else 0] if found else None
        if wanted != width:
            return [
                unmet(
                    Kind.TENSOR,
                    "adapter.base_mismatch",
                    f"adapter tensor `{name}` does not fit the base",
                    observed=f"{width}",
                    expected=f"{wanted}" if found else f"a base with `{target}`",
                    where=f"tensor:{name}",
                )
            ]
    return [met("adapter.fits", Kind.TENSOR, adapter.entry)]
