"""Components of a diffusers bundle: their classes in the libraries, their files, how their tensors bind.

Binding asks the libraries for names and shapes and reads only headers: what ``from_pretrained`` would
leave unset, or fill with random values, shows here as missing.
"""

from __future__ import annotations

import inspect as signatures
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

from turnout.package.facts import Artifact, Component
from turnout.types import Task

LIBRARIES = ("diffusers", "transformers")
WEIGHTS = re.compile(
    r"(?P<stem>diffusion_pytorch_model|model|pytorch_model)(?:\.(?P<variant>[a-z]\w*))?"
    r"(?:-\d+-of-\d+)?\.(?P<format>safetensors|bin)"
)
INDEX = re.compile(r".+\.(?:safetensors|bin)\.index(?:\.\w+)?\.json|.+\.\w+\.index\.json")
# Buffers that a class computes anew and older versions stored or left out.
COMPUTED = ("position_ids", "num_batches_tracked")


def first_line(error: BaseException) -> str:
    """First line of the library's message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


# ---- classes -----------------------------------------------------------------------------------


def pipeline_class(name: str) -> Any:
    """Pipeline class of the library, or None."""
    import diffusers

    found = getattr(diffusers, name, None) if name.isidentifier() else None
    return found if isinstance(found, type) else None


@cache
def room(library: str) -> Any:
    """The module that a component's ``library`` names: one of the two libraries, or the folder of a
    pipeline inside diffusers (where its safety checkers live). None for everything else."""
    if not library.isidentifier():
        return None
    if library in LIBRARIES:
        return import_module(library)
    try:
        return import_module(f"diffusers.pipelines.{library}")
    except (ImportError, RuntimeError):
        return None


def component_class(component: Component) -> Any:
    """Class of a component in the library that it names, or None."""
    name = component.class_name
    module = room(str(component.library)) if component.library else None
    if module is None or not name or not name.isidentifier():
        return None
    if component.library == "transformers":
        # Names that Transformers has dropped and diffusers still translates, like CLIPFeatureExtractor.
        from diffusers.utils import _maybe_remap_transformers_class

        name = _maybe_remap_transformers_class(name) or name
    found = getattr(module, name, None)
    return found if isinstance(found, type) else None


def lacks(cls: Any) -> list[str]:
    """Distributions that are not installed and without which the class is only a stand-in."""
    if ".dummy_" not in getattr(cls, "__module__", ""):
        return []
    return [str(name) for name in getattr(cls, "_backends", [])] or ["unknown"]


def expected_types(pipeline: Any, role: str) -> tuple[type, ...]:
    """Classes that the pipeline's constructor names for a component; () where it names none.

    The library itself does not hold schedulers and tokenizers to it: several serve.
    """
    from diffusers import SchedulerMixin

    if "scheduler" in role:
        return (SchedulerMixin,)
    if "tokenizer" in role:
        return ()
    named = pipeline._get_signature_types().get(role, ())
    usable = tuple(t for t in named if isinstance(t, type) and t is not type(None) and t.__name__ != "_empty")
    return usable if len(usable) == len([t for t in named if t is not type(None)]) else ()


def akin(cls: Any, wanted: tuple[type, ...]) -> bool:
    """Whether a class is of the same library's kind of model as one that is wanted, or no model at all."""
    import diffusers
    import transformers

    kinds = (diffusers.ModelMixin, transformers.PreTrainedModel, diffusers.SchedulerMixin)
    mine = [issubclass(cls, kind) for kind in kinds]
    return any(mine == [issubclass(other, kind) for kind in kinds] for other in wanted)


# ---- what a pipeline takes and gives -----------------------------------------------------------

# Parameters that hand a picture to the pipeline besides the one that is to be changed.
CONDITIONS = frozenset({"mask_image", "control_image", "hint", "source_image", "pose_video"})


def parameters(pipeline: Any) -> dict[str, Any]:
    """Parameters of a call by name, with their defaults."""
    found = list(signatures.signature(pipeline.__call__).parameters.values())
    return {p.name: p for p in found if p.name != "self" and p.kind is not p.VAR_KEYWORD}


def output_fields(pipeline: Any) -> set[str]:
    """Fields of the output classes that the pipeline's module uses: images, frames, audios ..."""
    from diffusers.utils import BaseOutput

    module = import_module(pipeline.__module__)
    classes = [v for v in vars(module).values() if isinstance(v, type) and issubclass(v, BaseOutput)]
    named = [c for c in classes if c.__name__.endswith("PipelineOutput") and is_dataclass(c)]
    return {f.name for c in named for f in fields(c)}


def misfit(pipeline: Any, task: str) -> str:
    """Why the pipeline cannot serve the task, '' when it can."""
    from diffusers.pipelines.auto_pipeline import AUTO_IMAGE2IMAGE_PIPELINES_MAPPING as CHANGES
    from diffusers.pipelines.auto_pipeline import AUTO_TEXT2IMAGE_PIPELINES_MAPPING as PAINTS

    given = output_fields(pipeline)
    if "images" not in given:
        return f"it gives {', '.join(sorted(given)) or 'nothing that is known here'}, not images"
    takes = parameters(pipeline)
    needed = {name for name, p in takes.items() if p.default is p.empty}
    extra = needed - {"prompt", "class_labels", *(["image"] if task == Task.IMAGE_TO_IMAGE else [])}
    extra |= takes.keys() & CONDITIONS
    if "controlnet" in signatures.signature(pipeline.__init__).parameters:
        extra.add("control image")
    if extra:
        return f"it also needs {', '.join(sorted(extra))}"
    if task == Task.IMAGE_TO_IMAGE and not ("image" in takes and pipeline in CHANGES.values()):
        return "it does not change a given picture"
    if task == Task.TEXT_TO_IMAGE and "image" in takes and pipeline not in PAINTS.values():
        return "it starts from a picture"
    return ""


# ---- files -------------------------------------------------------------------------------------


def weight_files(folder: Path, variant: str | None) -> list[Path]:
    """Weight files that the libraries take from a component's folder: of the variant if it has any,
    safetensors before pickles. Empty when there are none (or only of another variant)."""
    found: dict[tuple[str, str], list[Path]] = {}
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        match = WEIGHTS.fullmatch(path.name)
        if match:
            found.setdefault((match["variant"] or "", match["format"]), []).append(path)
    for wanted in [variant, ""] if variant else [""]:
        for form in ("safetensors", "bin"):
            if (wanted or "", form) in found:
                return found[wanted or "", form]
    return []


def variants(artifact: Artifact) -> tuple[list[str], list[str]]:
    """(all variants of the bundle's weights, those of components that have nothing else)."""
    every: set[str] = set()
    only: set[str] = set()
    for component in artifact.components:
        matches = [WEIGHTS.fullmatch(f.rsplit("/", 1)[-1]) for f in component.files]
        names = {m["variant"] or "" for m in matches if m}
        every |= names - {""}
        only |= names if names and "" not in names else set()
    return sorted(every), sorted(only)


def bad_references(folder: Path) -> Iterator[tuple[str, str, str]]:
    """(code, index file, name) of shards that an index names and the folder does not hold."""
    for path in sorted(folder.iterdir()) if folder.is_dir() else []:
        if not INDEX.fullmatch(path.name):
            continue
        try:
            named = set(json.loads(path.read_text(encoding="utf-8"))["weight_map"].values())
        except (OSError, ValueError, KeyError, AttributeError, TypeError):
            yield "index.inconsistent", path.name, "weight_map"
            continue
        for name in sorted(map(str, named)):
            if "/" in name or "\\" in name or name.startswith("."):
                yield "artifact.path_escape", path.name, name
            elif not (folder / name).is_file():
                yield "artifact.shard_missing", path.name, name


def stored_config(folder: Path) -> dict[str, Any]:
    """A component's ``config.json``, {} when there is none to read."""
    try:
        data = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _headers(files: list[Path]) -> dict[str, Any]:
    """Stored tensors on the meta device; of a pickle too only the structure is read."""
    import torch
    from safetensors import safe_open

    found: dict[str, Any] = {}
    for path in files:
        if path.suffix == ".bin":
            found |= torch.load(path, map_location="meta", weights_only=True)
            continue
        with safe_open(path, framework="pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (the file is no mapping)
                found[name] = torch.empty(stored.get_slice(name).get_shape(), device="meta")
    return found


# ---- binding -----------------------------------------------------------------------------------


@dataclass(slots=True)
class Bound:
    """How a component's tensors bind; ``mismatched`` holds name, stored and wanted shape."""

    loaded: int = 0
    missing: list[str] = field(default_factory=list)
    mismatched: list[tuple[str, list[int], list[int]]] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    tied: list[str] = field(default_factory=list)


def bind(component: Component, folder: Path, variant: str | None) -> Bound:
    """Builds a component without values; what has no weights (scheduler, tokenizer) is really loaded.

    Raises whatever the libraries raise.
    """
    import diffusers
    import transformers

    cls = component_class(component)
    if issubclass(cls, diffusers.ModelMixin):
        return _bind_model(cls, folder, variant)
    if issubclass(cls, transformers.PreTrainedModel):
        return _bind_transformer(cls, folder, variant)
    cls.from_pretrained(str(folder), local_files_only=True)
    return Bound()


def _bind_model(cls: Any, folder: Path, variant: str | None) -> Bound:
    from accelerate import init_empty_weights
    from diffusers.models.modeling_utils import LegacyModelMixin

    config = cls.load_config(str(folder), local_files_only=True)
    if issubclass(cls, LegacyModelMixin):
        from diffusers.models.model_loading_utils import _fetch_remapped_cls_from_config

        cls = _fetch_remapped_cls_from_config(config, cls)
    with init_empty_weights():
        model = cls.from_config(config)
    files = weight_files(folder, variant)
    stored = _headers(files)
    if len(files) == 1:
        model._fix_state_dict_keys_on_load(stored)  # names of attention weights before diffusers 0.17
    wanted = model.state_dict()
    ignored = [re.compile(p) for p in cls._keys_to_ignore_on_load_unexpected or []]
    return Bound(
        len(wanted.keys() & stored.keys()),
        sorted(n for n in wanted.keys() - stored.keys() if not n.endswith(COMPUTED)),
        [
            (n, list(stored[n].shape), list(t.shape))
            for n, t in wanted.items()
            if n in stored and stored[n].shape != t.shape
        ],
        sorted(n for n in stored.keys() - wanted.keys() if not any(p.search(n) for p in ignored)),
    )


def _bind_transformer(cls: Any, folder: Path, variant: str | None) -> Bound:
    named = weight_files(folder, variant)
    of_variant = {"variant": variant} if variant and any(f".{variant}" in path.name for path in named) else {}
    model, info = cls.from_pretrained(
        str(folder), device_map={"": "meta"}, output_loading_info=True, ignore_mismatched_sizes=True,
        local_files_only=True, trust_remote_code=False, weights_only=True, **of_variant,
    )  # fmt: skip
    missing = sorted(n for n in info["missing_keys"] if not n.endswith(COMPUTED))
    tied = sorted(dict(getattr(model, "all_tied_weights_keys", None) or {}))
    return Bound(
        len(model.state_dict()) - len(missing) - len(tied),
        missing,
        [(name, list(stored), list(wanted)) for name, stored, wanted in info["mismatched_keys"]],
        sorted(n for n in info["unexpected_keys"] if not n.endswith(COMPUTED)),
        tied,
    )
