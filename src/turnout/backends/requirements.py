"""Requirements that mean the same on every backend, read off the facts alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from turnout.backends.base import (
    Action,
    Backend,
    BackendBuild,
    Case,
    Kind,
    Remedy,
    Requirement,
    State,
    met,
    unmet,
)
from turnout.config import OPTIONS
from turnout.package.facts import Artifact, ArtifactKind, CodeNeed, Finding, Severity
from turnout.tasks.contract import CONTRACTS
from turnout.types import Task, count_of

REFUSING = (Severity.ERROR, Severity.FATAL)
TEMPLATE_TASKS = frozenset({Task.CHAT, Task.IMAGE_TEXT_TO_TEXT})
GENERATING = frozenset(
    {Task.TEXT_GENERATION, Task.CHAT, Task.TEXT2TEXT, Task.TRANSLATION, Task.SUMMARIZATION, Task.IMAGE_TEXT_TO_TEXT}
)
HEAD_TASKS = frozenset({Task.RERANK, Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION, Task.QUESTION_ANSWERING})
# First or last-but-one name parts of head tensors in Transformers' classification classes.
HEAD_NAMES = ("classifier", "score", "qa_outputs", "classification_head", "logits_proj", "cls_head", "pre_classifier")
ADAPTERS = frozenset({ArtifactKind.GGUF_ADAPTER, ArtifactKind.PEFT_ADAPTER})
# Boundaries that raw tensors depend on; the rest concerns the meaning of a task.
TENSOR_BOUNDARIES = frozenset({"artifact", "operator", "code", "tensor", "quantization", "index", "dependency"})

_FINDING_KINDS = {
    "artifact": Kind.INTEGRITY,
    "index": Kind.INTEGRITY,
    "config": Kind.CONFIG,
    "architecture": Kind.ARCHITECTURE,
    "tensor": Kind.TENSOR,
    "quantization": Kind.QUANTIZATION,
    "operator": Kind.OPERATOR,
    "graph": Kind.SHAPE,
    "component": Kind.COMPONENT,
    "tokenizer": Kind.COMPONENT,
    "template": Kind.COMPONENT,
    "recipe": Kind.RECIPE,
    "head": Kind.TASK_HEAD,
    "task": Kind.TASK_HEAD,
    "adapter": Kind.ARTIFACT,
    "code": Kind.TRUST,
    "dependency": Kind.DEPENDENCY,
    "device": Kind.DEVICE,
    "memory": Kind.MEMORY,
    "option": Kind.OPTION,
    "licence": Kind.LICENCE,
    "runtime": Kind.ARCHITECTURE,
}


def common(
    backend: Backend, case: Case, build: BackendBuild, devices: Iterable[str] | None = None
) -> list[Requirement]:
    """All backend-independent requirements of a case. ``devices`` None: not asked, so not judged."""
    found: list[Requirement] = []
    found += _kind(backend, case)
    found += _dependency(build)
    if devices is not None:
        found += _device(case, build, list(devices))
    found += _findings(case)
    found += _task(backend, case)
    found += _parts(case)
    found += _trust(case)
    found += _options(backend, case)
    return found


def readable(backend: Backend, artifact: Artifact) -> bool:
    """Whether the backend reads artifacts of this kind at all."""
    return artifact.kind in backend.reads


def _kind(backend: Backend, case: Case) -> list[Requirement]:
    if readable(backend, case.artifact):
        return [met("artifact.kind", Kind.ARTIFACT, case.artifact.id, case.artifact.kind)]
    formats = ", ".join(sorted(backend.reads))
    return [
        unmet(
            Kind.ARTIFACT,
            "artifact.missing",
            f"{backend.name} reads {formats}; this artifact is {case.artifact.kind}",
            observed=case.artifact.kind,
            expected=formats,
            where=case.artifact.entry,
            remedies=conversions(case, backend.name),
        )
    ]


def conversions(case: Case, backend: str) -> list[Remedy]:
    """Known ways to turn the artifact into a form that ``backend`` reads; each makes a new artifact."""
    if case.artifact.kind is not ArtifactKind.TRANSFORMERS:
        return []
    # https://huggingface.co/docs/transformers (exporters), llama.cpp's convert_hf_to_gguf.py
    ways = {
        "llamacpp": (
            "convert to GGUF with llama.cpp's `convert_hf_to_gguf.py`",
            ["python", "convert_hf_to_gguf.py", case.root, "--outfile", "model.gguf"],
        ),
        "onnxruntime": ("export to ONNX with `transformers.exporters`", None),
        "openvino": ("convert to OpenVINO IR with `openvino.convert_model`", None),
        "openvino-genai": ("convert to OpenVINO IR with a tokenizer IR beside it", None),
        "onnxruntime-genai": (
            "build with `onnxruntime_genai.models.builder`",
            [
                "python",
                "-m",
                "onnxruntime_genai.models.builder",
                "-i",
                case.root,
                "-o",
                "out",
                "-p",
                "fp32",
                "-e",
                "cpu",
            ],
        ),
        "ctranslate2": (
            "convert with `ct2-transformers-converter`",
            ["ct2-transformers-converter", "--model", case.root, "--output_dir", "out"],
        ),
    }
    if backend not in ways:
        return []
    text, argv = ways[backend]
    remedy = Remedy(Action.CONVERT, text, argv, changes_numerics=backend == "ctranslate2")
    remedy.cost.bytes = case.artifact.size_bytes
    return [remedy]


def _dependency(build: BackendBuild) -> list[Requirement]:
    if build.available:
        return [met("dependency.installed", Kind.DEPENDENCY, build.name, build.version)]
    target = f"turnout[{build.extra}]" if build.extra else " ".join(build.missing)
    return [
        unmet(
            Kind.DEPENDENCY,
            "dependency.missing",
            f"{build.name} is not installed: {build.unavailable}",
            observed="not installed",
            expected=", ".join(build.missing) or build.name,
            remedies=[Remedy(Action.INSTALL, f"install {target}", ["pip", "install", target])],
        )
    ]


def _device(case: Case, build: BackendBuild, devices: list[str]) -> list[Requirement]:
    wanted = case.device.split(":")[0]
    if case.device in devices or (":" not in case.device and wanted in {d.split(":")[0] for d in devices}):
        return [met("device.available", Kind.DEVICE, case.device)]
    remedies = [Remedy(Action.CHOOSE_DEVICE, f"run on `{d}`", changes_numerics=True) for d in devices]
    return [
        unmet(
            Kind.DEVICE,
            "device.unavailable",
            f"{build.name} sees no device `{case.device}` here",
            observed=", ".join(devices),
            expected=case.device,
            remedies=remedies,
        )
    ]


def _findings(case: Case) -> list[Requirement]:
    refusing = [f for f in case.artifact.findings if f.severity in REFUSING]
    relevant = [_of_finding(f) for f in refusing if matters(f, case.task, case.options)]
    problems = [f for f in case.artifact.tensors.problems if f.severity in REFUSING and f not in refusing]
    relevant += [_of_finding(f) for f in problems]
    return relevant or [met("integrity", Kind.INTEGRITY, case.artifact.id)]


def matters(finding: Finding, task: str, options: dict[str, Any]) -> bool:
    """Whether a finding on an artifact refuses this task (a broken template does not stop embeddings)."""
    boundary = finding.code.split(".", 1)[0]
    if task == Task.TENSOR:
        return boundary in TENSOR_BOUNDARIES
    if boundary == "template":
        return task in TEMPLATE_TASKS and "chat_template" not in options
    if boundary == "tokenizer":
        contract = CONTRACTS.get(task)
        return contract is not None and "tokenizer" in contract.roles and "tokenizer" not in options
    if finding.code in ("graph.state_missing", "graph.io_mismatch"):
        return task in GENERATING
    if finding.code == "adapter.base_missing":
        return "base" not in options
    if boundary == "recipe":
        return "pooling" not in options
    return True


def _of_finding(finding: Finding) -> Requirement:
    boundary = finding.code.split(".", 1)[0]
    return unmet(
        _FINDING_KINDS.get(boundary, Kind.ARTIFACT),
        finding.code,
        finding.message,
        observed=finding.observed,
        expected=finding.expected,
        where=finding.path,
        remedies=_finding_remedies(finding),
    )


def _finding_remedies(finding: Finding) -> list[Remedy]:
    if finding.code in ("artifact.truncated", "artifact.lfs_pointer", "artifact.corrupt"):
        return [Remedy(Action.REDOWNLOAD, f"download `{finding.path or 'the package'}` again")]
    if finding.code in (
        "artifact.shard_missing",
        "artifact.missing",
        "component.missing",
        "tokenizer.missing",
        "tensor.missing",
    ):
        return [Remedy(Action.ADD_FILE, f"add `{finding.path or finding.expected}`")]
    if finding.code == "adapter.base_missing":
        return [Remedy(Action.SET_OPTION, "name the base model with `--option base=PATH`")]
    if finding.code == "code.pickle_unsafe":
        return [
            Remedy(Action.CONVERT, "convert to safetensors in a sandbox, from a source you trust", changes_trust=True)
        ]
    if finding.code == "artifact.path_escape":
        return [Remedy(Action.ADD_FILE, "copy the file into the package and refer to it there")]
    return []


def _task(backend: Backend, case: Case) -> list[Requirement]:
    artifact, task = case.artifact, case.task
    if task not in CONTRACTS:
        return [
            unmet(
                Kind.TASK_HEAD,
                "task.not_offered",
                f"`{task}` is not a known task",
                observed=task,
                expected=", ".join(sorted(CONTRACTS)),
            )
        ]
    found: list[Requirement] = []
    offered = artifact.task_ids()
    if _head_missing(case):
        found.append(
            unmet(
                Kind.TASK_HEAD,
                "head.missing",
                f"no trained head for `{task}` is stored in this artifact",
                observed="no classifier or score tensors",
                expected="classifier.* or score.* tensors",
                where=artifact.entry,
                remedies=_other_tasks(offered),
            )
        )
    elif task not in offered and not _implied(artifact, task) and not (not offered and _broken(artifact)):
        found.append(
            unmet(
                Kind.TASK_HEAD,
                "task.not_offered",
                f"this artifact does not offer `{task}`",
                observed=", ".join(offered) or "no task known",
                expected=task,
                where=artifact.entry,
                remedies=_other_tasks(offered),
            )
        )
    if task not in backend.tasks and readable(backend, artifact):
        found.append(
            unmet(
                Kind.TASK_HEAD,
                "task.not_offered",
                f"{backend.name} does not serve `{task}` here",
                observed=", ".join(sorted(backend.tasks)),
                expected=task,
                remedies=_other_tasks([t for t in offered if t in backend.tasks]),
            )
        )
    return found or [met("task.offered", Kind.TASK_HEAD, task)]


def _broken(artifact: Artifact) -> bool:
    """Whether the artifact could not be read far enough to tell its tasks; its findings say why."""
    return any(f.severity in REFUSING for f in artifact.findings)


def _implied(artifact: Artifact, task: str) -> bool:
    """Tasks that follow from others: raw tensors of any graph, chat wherever text is generated (the
    missing template is then its own reason), embeddings wherever hidden states can be had."""
    if artifact.kind is ArtifactKind.UNKNOWN:
        return True  # only a plug-in reads it, and only that knows
    if task == Task.TENSOR:
        return artifact.graph is not None
    offered = artifact.task_ids()
    if task == Task.CHAT:
        return Task.TEXT_GENERATION in offered
    return False


def _other_tasks(offered: list[str]) -> list[Remedy]:
    return [Remedy(Action.CHOOSE_TASK, f"ask for `{task}`") for task in offered[:4]]


def _head_missing(case: Case) -> bool:
    artifact = case.artifact
    if case.task not in HEAD_TASKS or not artifact.tensors.tensors:
        return False
    if artifact.kind not in (ArtifactKind.TRANSFORMERS, ArtifactKind.SENTENCE_TRANSFORMERS):
        return False
    if any(c.role in ("LogitScore", "Dense") for c in artifact.components):
        return False  # a cross-encoder may score by the language model's head, or by a layer of its own
    parts = {part for name in artifact.tensors.tensors for part in name.split(".")[:3]}
    return parts.isdisjoint(HEAD_NAMES)


def _parts(case: Case) -> list[Requirement]:
    artifact, task, options = case.artifact, case.task, case.options
    contract = CONTRACTS.get(task)
    roles = contract.roles if contract else ()
    if artifact.kind in ADAPTERS:
        return []  # tokenizer and template are the base model's, which only the backend looks into
    found: list[Requirement] = []
    if task in TEMPLATE_TASKS and "chat_template" not in options and not artifact.templates:
        found.append(
            unmet(
                Kind.COMPONENT,
                "template.missing",
                "the package has no chat template",
                observed="none",
                expected="a chat template",
                remedies=[
                    _set("chat_template", "FILE.jinja", "supply a chat template", numerics=True),
                    Remedy(Action.CHOOSE_TASK, "ask for `text-generation`"),
                ],
            )
        )
    if "tokenizer" in roles and artifact.tokenizer is None and "tokenizer" not in options:
        found.append(
            unmet(
                Kind.COMPONENT,
                "tokenizer.missing",
                "the package has no tokenizer",
                observed="none",
                expected="tokenizer.json or another known tokenizer",
                remedies=[_set("tokenizer", "PATH", "name a tokenizer", numerics=True)],
            )
        )
    of_its_own = artifact.kind is ArtifactKind.SENTENCE_TRANSFORMERS and artifact.code is CodeNeed.REQUIRED
    if task == Task.EMBEDDINGS and artifact.recipe is None and "pooling" not in options and not of_its_own:
        found.append(
            unmet(
                Kind.RECIPE,
                "recipe.assumed",
                "nothing in the package says how to pool hidden states",
                observed="no pooling recipe",
                expected="modules.json with a pooling module, or your choice",
                remedies=[
                    _set("pooling", mode, f"choose {mode} pooling", numerics=True)
                    for mode in ("mean", "cls", "lasttoken")
                ],
            )
        )
    if task == Task.IMAGE_CLASSIFICATION and not _pictures_known(artifact, options):
        imagenet = ("0.485,0.456,0.406", "0.229,0.224,0.225")
        found.append(
            unmet(
                Kind.RECIPE,
                "recipe.assumed",
                "nothing in the package says how pixels become the model's numbers",
                observed="no image processor",
                expected="preprocessor_config.json, or your choice of mean and deviation",
                remedies=[
                    _normalise(mean, std, text)
                    for mean, std, text in (
                        (*imagenet, "take ImageNet's mean and deviation"),
                        ("0.5", "0.5", "scale pixels to -1 .. 1"),
                        ("0", "1", "scale pixels to 0 .. 1"),
                    )
                ],
            )
        )
    return found


def _pictures_known(artifact: Artifact, options: dict[str, Any]) -> bool:
    """Whether a processor, the options or a graph of raw bytes say how pixels are scaled."""
    if any(p.kind in ("image", "multimodal") for p in artifact.processors):
        return True
    ports = artifact.graph.inputs if artifact.graph else []
    return {"image_mean", "image_std"} <= options.keys() or any(
        p.dtype == "uint8" and len(p.shape or ()) == 4 for p in ports
    )


def _normalise(mean: str, std: str, text: str) -> Remedy:
    argv = ["--option", f"image_mean={mean}", "--option", f"image_std={std}"]
    return Remedy(Action.SET_OPTION, f"{text} with `{' '.join(argv)}`", argv, changes_numerics=True)


def _set(option: str, value: str, text: str, *, numerics: bool = False, trust: bool = False) -> Remedy:
    return Remedy(
        Action.SET_OPTION,
        f"{text} with `--option {option}={value}`",
        ["--option", f"{option}={value}"],
        changes_numerics=numerics,
        changes_trust=trust,
    )


def _trust(case: Case) -> list[Requirement]:
    codes = {f.code for f in case.artifact.findings if f.severity in REFUSING}
    if case.artifact.code is CodeNeed.REQUIRED and "code.required" not in codes:
        if truthy(case.options.get("trust_remote_code")):
            return [Requirement("code.required", Kind.TRUST, State.WAIVED, case.artifact.entry)]
        remedy = Remedy(
            Action.GRANT_TRUST,
            "read the package's code, then allow it",
            ["--option", "trust_remote_code=true"],
            changes_trust=True,
        )
        return [
            unmet(
                Kind.TRUST,
                "code.required",
                "the package needs its own Python code to be run",
                observed="custom code",
                expected="built-in code",
                where=case.artifact.entry,
                remedies=[remedy],
            )
        ]
    if case.artifact.code is CodeNeed.FORBIDDEN and "code.pickle_unsafe" not in codes:
        return [
            unmet(
                Kind.TRUST,
                "code.pickle_unsafe",
                "loading this artifact would run code of a pickle",
                where=case.artifact.entry,
            )
        ]
    return [met("trust", Kind.TRUST)]


def truthy(value: Any) -> bool:
    """Whether an option's value (bool or text) means yes."""
    return value is True or str(value).strip().lower() in ("1", "true", "yes", "on")


COUNTS = ("context", "history", "max_length")


def _options(backend: Backend, case: Case) -> list[Requirement]:
    strange = [name for name in case.options if name not in OPTIONS]
    found = [
        unmet(
            Kind.OPTION,
            "option.unsupported",
            f"there is no option `{name}`",
            observed=name,
            expected=", ".join(OPTIONS),
        )
        for name in strange
    ]
    for name in COUNTS:
        if name in case.options and count_of(case.options[name]) is None:
            observed = str(case.options[name])
            message = f"`{name}={observed}` counts nothing"
            expected = "a whole number of at least 1"
            found.append(unmet(Kind.OPTION, "option.unsupported", message, observed=observed, expected=expected))
    scheme = case.options.get("quantize")
    able = sorted(getattr(backend, "quantizes", ()))  # schemes it can convert weights to while loading
    if scheme is not None and scheme not in able:
        known = f"{backend.name} converts to {', '.join(able)}" if able else f"{backend.name} loads weights as stored"
        found.append(
            unmet(
                Kind.OPTION,
                "option.unsupported",
                f"no weights are converted to `{scheme}`: {known}",
                observed=f"quantize={scheme}",
                expected=", ".join(able),
            )
        )
    return found or [met("options", Kind.OPTION)]
