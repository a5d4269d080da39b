"""Modules of a sentence-transformers package beside its transformer: really built, and fitted to each other.

They are small (a dense layer, a table of token vectors), and the library's own loading of them is the
one honest question: it is strict about names and shapes.
"""

from __future__ import annotations

import inspect as signatures
import warnings
from importlib import import_module
from pathlib import PurePosixPath
from typing import Any

from turnout.backends.base import Case, Reason
from turnout.backends.transformers_models import hushed
from turnout.package.facts import Artifact, CodeNeed, Component, Recipe
from turnout.tasks.language import pooling_recipe, truthy
from turnout.types import Task

TRANSFORMER = "Transformer"


def said(error: Exception) -> str:
    """First line of the library's message, with the next where it only announces one."""
    text = str(error).replace("\\n", "\n").replace("\\t", " ")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " ".join(lines[: 2 if lines[0].endswith(":") else 1])[:300] if lines else repr(error)


def module_class(path: str) -> Any:
    """Class of ``package.module.Class`` in the library, or None. Nothing outside it is imported."""
    module, _, name = path.rpartition(".")
    if module.split(".")[0] != "sentence_transformers":
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the place that most packages name
            return getattr(import_module(module), name, None)
    except (ImportError, ValueError):
        return None


def inner_task(case: Case) -> str:
    """What the transformer inside is loaded for: vectors, a classifier's scores, or next-token logits."""
    roles = {c.role for c in case.artifact.components}
    if case.task != Task.RERANK:
        return Task.EMBEDDINGS
    if "LogitScore" in roles:
        return Task.TEXT_GENERATION
    return Task.EMBEDDINGS if "Dense" in roles else Task.RERANK


def has_transformer(artifact: Artifact) -> bool:
    """Whether the package holds a transformer. One without a manifest is nothing else."""
    return not artifact.components or any(c.role == TRANSFORMER for c in artifact.components)


def recipe_of(case: Case) -> Recipe | None:
    """What makes vectors out of texts here, with the options laid over it; None for a reranker."""
    if case.task != Task.EMBEDDINGS:
        return None
    stored = case.artifact.recipe
    if stored is not None and stored.kind == "pooling":
        return pooling_recipe(case.artifact, case.options)
    if stored is None:  # modules of the package's own code: their names are all that is known
        stored = Recipe("modules", {"modules": [c.class_name for c in case.artifact.components], "normalize": False})
    settings = dict(stored.settings)
    if case.options.get("normalize") is not None:
        settings["normalize"] = truthy(case.options["normalize"])
    if case.options.get("max_length") is not None:
        settings["max_length"] = int(case.options["max_length"])
    return Recipe(stored.kind, settings, stored.source)


def bind_modules(case: Case) -> tuple[int, list[Reason]]:
    """Builds every module but the transformer and checks that widths follow on each other.

    Returns the number of tensors bound and what is wrong. Code of the package runs only where that was
    allowed.
    """
    loaded, reasons = 0, []
    width = case.artifact.architecture.dims.get("hidden_size") if case.artifact.architecture else None
    for component in case.artifact.components:
        if component.role == TRANSFORMER:
            continue
        if component.code is not CodeNeed.NONE and not truthy(case.options.get("trust_remote_code")):
            reasons.append(Reason("code.required", f"module `{component.class_name}` is code of the package"))
            return loaded, reasons
        try:
            with hushed():
                module = _build(case, component)
        except Exception as error:  # the library raises OSError, ValueError, TypeError, RuntimeError ...
            reasons.append(Reason(_code(str(error)), f"module `{component.role}`: {said(error)}", where=component.path))
            return loaded, reasons
        loaded += len(module.state_dict())
        wanted = getattr(module, "in_features", None)
        if width is not None and wanted is not None and wanted != width and component.role == "Dense":
            message = "the dense layer takes another width than the module before it gives"
            reasons.append(Reason("recipe.conflict", message, f"{width}", f"{wanted}", component.path))
        width = _width(module, width)
    return loaded, reasons


def _build(case: Case, component: Component) -> Any:
    entry, trusted = case.file(case.artifact.entry), component.code is not CodeNeed.NONE
    cls = module_class(str(component.class_name))
    if cls is None and trusted:
        from sentence_transformers.util import import_module_class

        cls = import_module_class(str(component.class_name), entry, trust_remote_code=True, local_files_only=True)
    if len(signatures.signature(cls.load).parameters) == 1:
        return cls.load(case.file(component.path))
    place = PurePosixPath(component.path or ".")
    inside = case.artifact.entry or "."
    subfolder = str(place.relative_to(inside)) if place != PurePosixPath(inside) else ""
    return cls.load(
        entry,
        subfolder="" if subfolder == "." else subfolder,
        token=None,
        cache_folder=None,
        revision=None,
        local_files_only=True,
        trust_remote_code=trusted,
        model_kwargs={},
        processor_kwargs={},
        config_kwargs={},
        backend="torch",
    )


def _width(module: Any, before: int | None) -> int | None:
    """Numbers that the module gives per text, as far as it tells."""
    if hasattr(module, "pooling_output_dimension"):
        return int(module.pooling_output_dimension)
    if hasattr(module, "out_features"):
        return int(module.out_features)
    return before


def _code(message: str) -> str:
    if "Missing key" in message or "Could not find" in message:
        return "tensor.missing"
    if "size mismatch" in message:
        return "tensor.shape_mismatch"
    if "Unexpected key" in message:
        return "tensor.unexpected"
    return "config.invalid"
