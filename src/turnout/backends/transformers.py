"""Transformers on PyTorch: the library asked about a package, and its models run for a task."""

from __future__ import annotations

import gc
import importlib.metadata
import time
from importlib.util import find_spec
from typing import Any

from turnout.backends import transformers_models as models
from turnout.backends.base import (
    Action,
    BackendBuild,
    Case,
    Evidence,
    EvidenceLevel,
    LoadPlan,
    Outcome,
    Remedy,
    Requirement,
    passed,
)
from turnout.backends.requirements import truthy
from turnout.backends.transformers_requirements import adapter_base, adapter_requirements, directory_requirements
from turnout.errors import LoadError
from turnout.package.facts import ArtifactKind
from turnout.types import Task

DISTRIBUTIONS = ("torch", "transformers", "accelerate", "tokenizers", "safetensors")


class TransformersBackend:
    """Transformers directories, GGUF files expanded to floats, and PEFT adapters with their base."""

    name = "transformers"
    reads = frozenset({ArtifactKind.TRANSFORMERS, ArtifactKind.GGUF, ArtifactKind.PEFT_ADAPTER})
    tasks = frozenset({*models.AUTO_CLASSES, *models.NAMED_CLASSES})

    def describe(self) -> BackendBuild:
        """Versions from the installed distributions; nothing is imported."""
        found = {name: _version(name) for name in (*DISTRIBUTIONS, "peft", "gguf")}
        missing = [name for name in DISTRIBUTIONS if not found[name] or find_spec(name) is None]
        unavailable = f"{', '.join(missing)} not installed" if missing else ""
        return BackendBuild(
            self.name,
            found["transformers"],
            {name: version for name, version in found.items() if version},
            unavailable=unavailable,
            missing=missing,
            extra="torch",
        )

    def devices(self) -> list[str]:
        """The CPU and every accelerator that PyTorch sees."""
        models.environment()
        import torch

        found = ["cpu"]
        if torch.cuda.is_available():
            found += [f"cuda:{i}" for i in range(torch.cuda.device_count())]
        if torch.backends.mps.is_available():
            found.append("mps")
        return found

    def requirements(self, case: Case) -> list[Requirement]:
        """Everything the library says of the case without reading weights."""
        models.environment()
        if case.artifact.kind is ArtifactKind.GGUF:
            from turnout.backends.transformers_gguf import gguf_requirements

            return gguf_requirements(case)
        if case.artifact.kind is ArtifactKind.PEFT_ADAPTER:
            return adapter_requirements(case)
        return directory_requirements(case)

    def inquire(self, case: Case) -> list[Evidence]:
        """Nothing beyond ``requirements``: the library's registries were asked there."""
        return [passed(EvidenceLevel.INQUIRED)]

    def plan(self, case: Case) -> LoadPlan:
        """Class, type to compute in, files and recipe. Imports the library but reads no weights."""
        recipe = case.artifact.recipe
        plan = LoadPlan(
            case,
            self.name,
            dtype=models.compute_dtype(case),
            files=list(case.artifact.files),
            recipe=recipe.id if recipe else "",
        )
        if case.task == Task.EMBEDDINGS:
            from turnout.tasks.language import pooling_recipe

            plan.recipe = pooling_recipe(case.artifact, case.options).id
        if case.artifact.kind is ArtifactKind.TRANSFORMERS:
            cls = models.model_class(case, models.read_config(case))
            plan.implementation = cls.__name__ if cls is not None else ""
        return plan

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Binds every tensor by name and shape on the meta device; no weight is read."""
        case = plan.case
        try:
            binding = _dry_binding(case)
        except LoadError as error:
            return _refused(EvidenceLevel.DRY_LOADED, error)
        except Exception as error:  # the library raises OSError, ValueError, KeyError, RuntimeError ...
            return _refused(EvidenceLevel.DRY_LOADED, LoadError(models.first_line(error)))
        reasons = binding.reasons(case.artifact.entry, truthy(case.options.get("allow_unexpected")))
        report = binding.report()
        del binding
        gc.collect()
        if reasons:
            # Only surplus tensors can be waved through; missing ones cannot.
            only_surplus = all(reason.code == "tensor.unexpected" for reason in reasons)
            return Evidence(
                EvidenceLevel.DRY_LOADED,
                Outcome.FAIL,
                reasons,
                [_allow_unexpected()] if only_surplus else [],
                binding=report,
            )
        try:
            check_tokenizer(plan)
        except LoadError as error:
            return _refused(EvidenceLevel.DRY_LOADED, error)
        return passed(EvidenceLevel.DRY_LOADED, binding=report, log=_note(report))

    def load(self, plan: LoadPlan) -> Any:
        """Session of the plan's task. Raises ``LoadError`` and keeps nothing when a tensor has no file,
        another shape, or no place in the model."""
        models.environment()
        from turnout.backends.transformers_sessions import session_for, use_all_cores

        use_all_cores()
        binding = None
        try:
            binding = _binding(plan)
            reasons = binding.reasons(plan.case.artifact.entry, truthy(plan.case.options.get("allow_unexpected")))
            if reasons:
                raise LoadError(reasons[0].message, code=reasons[0].code)
            report = binding.report()
            return session_for(plan, binding.model, report)
        except LoadError:
            binding = None
            gc.collect()
            raise
        except MemoryError:
            raise
        except Exception as error:  # the library raises OSError, ValueError, KeyError, RuntimeError ...
            binding = None
            gc.collect()
            code = getattr(error, "code", None) or "runtime.failed"
            raise LoadError(models.first_line(error), code=code) from error

    def probe(self, session: Any) -> Evidence:
        """The smallest real request of the session's task; every number of the answer must be finite."""
        from turnout.backends.transformers_probe import probe

        started = time.perf_counter()
        evidence = probe(session)
        evidence.duration = time.perf_counter() - started
        return evidence


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _dry_binding(case: Case) -> models.Binding:
    if case.artifact.kind is ArtifactKind.GGUF:
        from turnout.backends.transformers_gguf import dry_bind

        return dry_bind(case)
    if case.artifact.kind is ArtifactKind.PEFT_ADAPTER:
        from turnout.backends.transformers_adapter import dry_bind as adapter_dry_bind

        return adapter_dry_bind(case, adapter_base(case) or "")
    models.quiet()
    config = models.read_config(case)
    return models.dry_bind(case, config, _class_of(case, config))


def _binding(plan: LoadPlan) -> models.Binding:
    case = plan.case
    models.quiet()
    dtype = models.torch_dtype(plan.dtype)
    if case.artifact.kind is ArtifactKind.GGUF:
        from turnout.backends.transformers_gguf import bind

        return bind(case, dtype)
    if case.artifact.kind is ArtifactKind.PEFT_ADAPTER:
        from turnout.backends.transformers_adapter import bind as adapter_bind

        return adapter_bind(case, adapter_base(case) or "", dtype)
    config = models.read_config(case)
    cls = _class_of(case, config)
    binding = models.from_pretrained(case, cls, config, models.folder(case), {"": case.device}, dtype)
    if binding.unexpected:
        binding.unexpected = models.dry_bind(case, config, cls).unexpected
    return binding


def _class_of(case: Case, config: Any) -> Any:
    cls = models.model_class(case, config)
    if cls is None:
        raise LoadError(
            f"Transformers has no class of `{config.model_type}` for `{case.task}`", code="architecture.unsupported"
        )
    return cls


def check_tokenizer(plan: LoadPlan) -> None:
    """Builds the library's tokenizer where the task generates text. Raises ``LoadError``."""
    if plan.case.task in models.GENERATING:
        from turnout.backends.transformers_sessions import auto_tokenizer

        auto_tokenizer(plan)


def _allow_unexpected() -> Remedy:
    return Remedy(
        Action.SET_OPTION,
        "load without the surplus tensors with `--option allow_unexpected=true`",
        ["--option", "allow_unexpected=true"],
        changes_numerics=True,
    )


def _refused(level: EvidenceLevel, error: LoadError) -> Evidence:
    from turnout.backends.base import Reason

    return Evidence(level, Outcome.FAIL, [Reason(error.code, error.message)])


def _note(report: Any) -> str:
    tied = f", tied: {'; '.join(report.tied)}" if report.tied else ""
    return f"{report.loaded} tensors bound{tied}"
