"""Which Transformers class computes a case, and how its tensors bind to the stored ones.

Everything here asks the library: its registries for classes, a load on the meta device for tensor
names and shapes. That load applies the library's own key conversions and reads only headers.
"""

from __future__ import annotations

import contextlib
import inspect
import os
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from turnout.backends.base import BindingReport, Case, Reason
from turnout.backends.requirements import truthy
from turnout.errors import LoadError
from turnout.package.facts import ArtifactKind, CodeNeed
from turnout.types import Task

# Auto classes that may serve a task; the first whose mapping fits the stored class wins.
AUTO_CLASSES: dict[str, tuple[str, ...]] = {
    Task.TEXT_GENERATION: ("AutoModelForCausalLM",),
    Task.CHAT: ("AutoModelForCausalLM",),
    Task.TEXT2TEXT: ("AutoModelForSeq2SeqLM",),
    Task.TRANSLATION: ("AutoModelForSeq2SeqLM",),
    Task.SUMMARIZATION: ("AutoModelForSeq2SeqLM",),
    Task.EMBEDDINGS: ("AutoModelForTextEncoding", "AutoModel"),
    Task.RERANK: ("AutoModelForSequenceClassification",),
    Task.TEXT_CLASSIFICATION: ("AutoModelForSequenceClassification",),
    Task.TOKEN_CLASSIFICATION: ("AutoModelForTokenClassification",),
    Task.FILL_MASK: ("AutoModelForMaskedLM",),
    Task.QUESTION_ANSWERING: ("AutoModelForQuestionAnswering",),
    Task.IMAGE_CLASSIFICATION: ("AutoModelForImageClassification",),
    Task.ASR: ("AutoModelForSpeechSeq2Seq", "AutoModelForCTC"),
}
# Classes without an Auto mapping of their task in the library, by what they are for.
NAMED_CLASSES: dict[str, frozenset[str]] = {
    Task.TIME_SERIES: frozenset(
        {
            "TimeSeriesTransformerForPrediction",
            "InformerForPrediction",
            "AutoformerForPrediction",
            "PatchTSTForPrediction",
        }
    ),
    Task.DECISION: frozenset({"DecisionTransformerModel"}),
}
GENERATING = frozenset({Task.TEXT_GENERATION, Task.CHAT, Task.TEXT2TEXT, Task.TRANSLATION, Task.SUMMARIZATION})
DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16", "F64": "float64"}
# Buffers that older versions stored and that a model computes anew.
COMPUTED = (
    ".inv_freq",
    ".position_ids",
    ".masked_bias",
    ".attn.bias",
    ".relative_position_index",
    ".num_batches_tracked",
)


@cache
def environment() -> None:
    """Sets what the libraries read when they are first imported. Never goes to the network."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    os.environ.setdefault("TQDM_DISABLE", "1")
    # A thread that waits by spinning holds the core that the thread it waits for needs. Measured on two
    # shared cores with SmolLM2: 1.9 s a step, 0.09 s with threads that sleep; no loss on quiet ones.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@cache
def quiet() -> None:
    """Silences the library's progress bars and advice; what matters is read from its results."""
    environment()
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


@contextlib.contextmanager
def hushed() -> Iterator[None]:
    """Keeps third-party warnings off the caller while the library works."""
    quiet()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def first_line(error: BaseException) -> str:
    """The library's own first line of an error, with its type where the text alone says little."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0][:300] if lines else ""
    return text if len(text) > 24 else f"{type(error).__name__}: {text}"


def folder(case: Case) -> str:
    """Directory of the artifact's ``config.json``."""
    place = Path(case.file(case.artifact.entry))
    return str(place if place.is_dir() else place.parent)


def trusted(case: Case) -> bool:
    """Whether package code is needed and allowed. Never true for a type that the library computes itself."""
    if case.artifact.code not in (CodeNeed.OPTIONAL, CodeNeed.REQUIRED):
        return False
    if not truthy(case.options.get("trust_remote_code")):
        return False
    from transformers import CONFIG_MAPPING

    architecture = case.artifact.architecture
    return architecture is None or architecture.model_type not in CONFIG_MAPPING


def read_config(case: Case) -> Any:
    """The configuration as the library builds it. Raises whatever the library raises."""
    from transformers import AutoConfig

    with hushed():
        return AutoConfig.from_pretrained(folder(case), local_files_only=True, trust_remote_code=trusted(case))


def model_class(case: Case, config: Any) -> Any | None:
    """The class that computes the case's task for this configuration, or None.

    Prefers the class the package names in ``architectures``, as several heads may serve one task.
    """
    import transformers
    from transformers.models.auto.auto_factory import _get_model_class

    stored = [str(name) for name in getattr(config, "architectures", None) or []]
    if case.task in NAMED_CLASSES:
        name = next((name for name in stored if name in NAMED_CLASSES[case.task]), None)
        return getattr(transformers, name, None) if name else None
    found = []
    for auto_name in AUTO_CLASSES.get(case.task, ()):
        auto = getattr(transformers, auto_name)
        if trusted(case) and auto_name in (getattr(config, "auto_map", None) or {}):
            return auto
        if auto_name == "AutoModelForTextEncoding" and not getattr(config, "is_encoder_decoder", False):
            continue
        if type(config) in auto._model_mapping:
            found.append(_get_model_class(config, auto._model_mapping))
    return next((cls for cls in found if cls.__name__ in stored), found[0] if found else None)


def stored_class(config: Any) -> Any | None:
    """The library's class that the package names in ``architectures``, or None."""
    import transformers

    for name in getattr(config, "architectures", None) or []:
        cls = getattr(transformers, str(name), None)
        if cls is not None:
            return cls
    return None


def compute_dtype(case: Case) -> str:
    """Element type to compute in: the option, else that of most stored elements.

    Dequantized weights become float32.
    """
    named = case.options.get("dtype")
    if named:
        return str(named).removeprefix("torch.")
    if case.artifact.kind is ArtifactKind.GGUF:
        return "float32"
    sizes: dict[str, int] = {}
    for tensor in case.artifact.tensors.tensors.values():
        dtype = DTYPES.get(tensor.dtype.upper())
        if dtype:
            sizes[dtype] = sizes.get(dtype, 0) + tensor.nbytes
    if sizes:
        return max(sizes, key=lambda name: sizes[name])
    declared = case.artifact.architecture.dtype if case.artifact.architecture else None
    return declared.removeprefix("torch.") if declared else "float32"


def load_arguments(case: Case, cls: Any, config: Any) -> dict[str, Any]:
    """Arguments of ``from_pretrained`` that dry load and load share."""
    arguments: dict[str, Any] = {
        "config": config,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # reported as keys, and refused by us
        "trust_remote_code": trusted(case),
        "local_files_only": True,
        "weights_only": True,
    }
    if case.task == Task.EMBEDDINGS and _takes(cls, "add_pooling_layer"):
        # The recipe pools hidden states itself; many packages store no pooler, and none is invented.
        arguments["add_pooling_layer"] = False
    return arguments


def _takes(cls: Any, name: str) -> bool:
    return name in inspect.signature(cls.__init__).parameters


@dataclass(slots=True)
class Binding:
    """A model with what the library said of its keys; ``mismatched`` holds name, stored and wanted shape."""

    model: Any
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def report(self) -> BindingReport:
        """Where every tensor of the model came from."""
        persistent = self.model.state_dict().keys()
        tied = dict(getattr(self.model, "all_tied_weights_keys", None) or {})
        buffers = [name for name, _ in self.model.named_buffers() if name not in persistent]
        unresolved = sorted({*self.missing, *(name for name, *_ in self.mismatched)})
        loaded = len(set(persistent) - set(tied) - set(unresolved))
        return BindingReport(
            loaded=loaded,
            tied=[f"{target} = {source}" for target, source in sorted(tied.items())],
            initialised_by_design=buffers,
            unexpected=self.unexpected,
            unresolved=unresolved,
        )

    def reasons(self, where: str, allow_unexpected: bool) -> list[Reason]:
        """Everything that keeps the binding from being whole."""
        found = []
        if self.missing:
            message = f"{_count(self.missing, 'required tensor')} in no file: {_some(self.missing)}"
            observed = f"{len(self.missing)} absent"
            found.append(Reason("tensor.missing", message, observed, "every tensor of the model", where))
        if self.mismatched:
            name, stored, wanted = self.mismatched[0]
            rest = f" and {len(self.mismatched) - 1} more" if len(self.mismatched) > 1 else ""
            message = f"`{name}`{rest} has another shape than the configuration says"
            found.append(Reason("tensor.shape_mismatch", message, str(list(stored)), str(list(wanted)), where))
        if self.unexpected and not allow_unexpected:
            message = f"{_count(self.unexpected, 'stored tensor')} not used by the model: {_some(self.unexpected)}"
            observed = f"{len(self.unexpected)} more than the model has"
            found.append(Reason("tensor.unexpected", message, observed, "only tensors of the model", where))
        found += [Reason("tensor.missing", error, where=where) for error in self.errors]
        return found


def _count(names: list[str], noun: str) -> str:
    return f"1 {noun} is" if len(names) == 1 else f"{len(names)} {noun}s are"


def _some(names: list[str], limit: int = 3) -> str:
    shown = ", ".join(f"`{name}`" for name in names[:limit])
    return shown + (", ..." if len(names) > limit else "")


def from_pretrained(case: Case, cls: Any, config: Any, place: str, device_map: dict[str, str], dtype: Any) -> Binding:
    """Loads ``cls`` from ``place``; on ``{"": "meta"}`` only headers are read.

    Raises whatever the library raises.
    """
    arguments = load_arguments(case, cls, config)
    with hushed():
        try:
            model, info = cls.from_pretrained(place, device_map=device_map, dtype=dtype, **arguments)
        except RuntimeError as error:
            # PyTorch maps files privately, which the system refuses for more than it could ever back.
            if set(device_map.values()) != {"meta"} or "unable to mmap" not in str(error):
                raise
            stored = meta_tensors(case)
            model, info = cls.from_pretrained(None, state_dict=stored, device_map=device_map, dtype=dtype, **arguments)
    buffers = {name for name, _ in model.named_buffers()}
    unexpected = [
        key for key in info.get("unexpected_keys", ()) if key not in buffers and not f".{key}".endswith(COMPUTED)
    ]
    return Binding(
        model,
        sorted(info.get("missing_keys", ())),
        sorted(unexpected),
        sorted((name, tuple(stored), tuple(wanted)) for name, stored, wanted in info.get("mismatched_keys", ())),
        [str(message) for message in info.get("error_msgs", ()) or ()],
    )


def meta_tensors(case: Case) -> dict[str, Any]:
    """The package's tensors by name and shape, as inspection read them from the headers; no values."""
    import torch

    types = {
        "F64": "float64",
        "F32": "float32",
        "F16": "float16",
        "BF16": "bfloat16",
        "BOOL": "bool",
        "I64": "int64",
        "I32": "int32",
        "I16": "int16",
        "I8": "int8",
        "U8": "uint8",
        "F8_E4M3": "float8_e4m3fn",
        "F8_E5M2": "float8_e5m2",
    }
    return {
        name: torch.empty(tensor.shape, dtype=getattr(torch, types[tensor.dtype]), device="meta")
        for name, tensor in case.artifact.tensors.tensors.items()
    }


def dry_bind(case: Case, config: Any, cls: Any) -> Binding:
    """Binds names and shapes on the meta device.

    A stored tensor counts as unexpected only if neither the task's class nor the class the package
    was saved from uses it: a language head is no surprise when hidden states are asked for.
    """
    import torch

    place, meta = folder(case), {"": "meta"}
    binding = from_pretrained(case, cls, config, place, meta, torch.float32)
    own = stored_class(config)
    if binding.unexpected and own is not None:
        arguments = {**load_arguments(case, own, config)}
        arguments.pop("add_pooling_layer", None)
        with hushed():
            _, info = own.from_pretrained(place, device_map=meta, dtype=torch.float32, **arguments)
        strange = set(info.get("unexpected_keys", ()))
        binding.unexpected = [key for key in binding.unexpected if key in strange]
    return binding


def torch_dtype(name: str) -> Any:
    """The library's element type of that name. Raises ``LoadError`` for another word."""
    import torch

    if name not in ("float32", "bfloat16", "float16", "float64"):
        raise LoadError(
            f"`{name}` is not a type to compute in", code="option.unsupported", hints=["float32, bfloat16 or float16"]
        )
    return getattr(torch, name)
