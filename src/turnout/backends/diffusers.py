"""diffusers: image generation from bundles of components.

The library loads a component whose file lacks a tensor with random values; each component is
therefore bound on the meta device first, name by name and shape by shape.
"""

from __future__ import annotations

import inspect as signatures
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turnout.backends.base import (
    Action,
    BackendBuild,
    BindingReport,
    Case,
    Evidence,
    EvidenceLevel,
    Kind,
    LoadPlan,
    Outcome,
    Reason,
    Remedy,
    Requirement,
    Session,
    State,
    failed,
    met,
    passed,
    unknown,
    unmet,
)
from turnout.backends.diffusers_components import (
    Bound,
    akin,
    bad_references,
    bind,
    component_class,
    expected_types,
    first_line,
    lacks,
    misfit,
    pipeline_class,
    room,
    stored_config,
    variants,
)
from turnout.backends.diffusers_session import DiffusionSession, probe_request
from turnout.backends.transformers_models import environment, hushed
from turnout.backends.transformers_requirements import dtype_option
from turnout.errors import LoadError
from turnout.package.facts import Artifact, ArtifactKind, CodeNeed, Component, Status
from turnout.types import Task

DISTRIBUTIONS = ("diffusers", "transformers", "torch")
OPTIONS = frozenset({"dtype", "variant"})


def _fact(artifact: Artifact, name: str) -> Any:
    fact = artifact.facts.get(name)
    return fact.value if fact else None


def required_components(cls: Any) -> list[str]:
    """Parameters of the pipeline's constructor without default, less the optional ones."""
    parameters = list(signatures.signature(cls.__init__).parameters.values())[1:]
    optional = set(getattr(cls, "_optional_components", []))
    return [
        p.name
        for p in parameters
        if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in optional
    ]


class DiffusersBackend:
    """Diffusers bundles, by the library's own pipelines."""

    name = "diffusers"
    reads = frozenset({ArtifactKind.DIFFUSERS, ArtifactKind.DIFFUSERS_SINGLE_FILE, ArtifactKind.DDUF})
    tasks: frozenset[str] = frozenset({Task.TEXT_TO_IMAGE, Task.IMAGE_TO_IMAGE})

    def describe(self) -> BackendBuild:
        """Versions from the installed distributions; nothing is imported."""
        build = BackendBuild(self.name, extra="diffusion")
        for name in DISTRIBUTIONS:
            try:
                build.dependencies[name] = version(name)
            except PackageNotFoundError:
                build.missing.append(name)
        if build.missing or find_spec("diffusers") is None:
            build.unavailable = f"not here: {', '.join(build.missing or ['diffusers'])}"
        else:
            build.version = build.dependencies["diffusers"]
        return build

    def devices(self) -> list[str]:
        """Devices as PyTorch reports them."""
        environment()
        import torch

        return ["cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]

    def requirements(self, case: Case) -> list[Requirement]:
        """Pipeline class and its fit to the task, components and their classes, files, options."""
        artifact = case.artifact
        if artifact.kind is not ArtifactKind.DIFFUSERS:
            return [_other_kind(case)]
        found = [*_pipeline(case), *_code(artifact), *_variant(case), *_options(case)]
        for component in artifact.components:
            found += _component(case, component)
        return found

    def inquire(self, case: Case) -> list[Evidence]:
        """``requirements`` has put every question that needs no weights."""
        return [passed(EvidenceLevel.INQUIRED)]

    def plan(self, case: Case) -> LoadPlan:
        """The pipeline class that the index names."""
        recipe = case.artifact.recipe.id if case.artifact.recipe else ""
        return LoadPlan(
            case,
            self.name,
            f"diffusers.{_fact(case.artifact, 'pipeline')}",
            str(case.options.get("dtype") or "float32"),
            case.artifact.files,
            recipe,
        )

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Every component: weights by name and shape on the meta device, the rest really loaded."""
        binding, reasons = BindingReport(), []
        variant = plan.case.options.get("variant")
        for component in plan.case.artifact.components:
            if component.status is Status.MISSING or component_class(component) is None:
                continue
            try:
                with hushed():
                    bound = bind(component, Path(plan.case.file(component.path)), str(variant) if variant else None)
            except Exception as error:  # the libraries' exceptions have no common base
                message = f"`{component.role}` cannot be built: {first_line(error)}"
                reasons.append(Reason("config.invalid", message, where=component.path))
                continue
            reasons += _unbound(component, bound)
            _add(binding, component.role, bound)
        if reasons:
            return Evidence(EvidenceLevel.DRY_LOADED, Outcome.FAIL, reasons, binding=binding)
        return passed(EvidenceLevel.DRY_LOADED, binding=binding)

    def load(self, plan: LoadPlan) -> Session:
        """Binds first, then loads. Raises ``LoadError``; custom code is never run."""
        case = plan.case
        unmet_now = next((r for r in self.requirements(case) if r.state is State.UNMET), None)
        if unmet_now is not None and unmet_now.reason is not None:
            raise LoadError(unmet_now.reason.message, code=unmet_now.reason.code)
        bound = self.dry_load(plan)
        if bound.outcome is not Outcome.PASS:
            raise LoadError(bound.reasons[0].message, code=bound.reasons[0].code)
        import torch

        cls = pipeline_class(str(_fact(case.artifact, "pipeline")))
        try:
            with hushed():
                pipeline = cls.from_pretrained(
                    case.file(case.artifact.entry),
                    dtype=getattr(torch, plan.dtype),
                    local_files_only=True,
                    variant=case.options.get("variant"),
                    trust_remote_code=False,
                )
        except Exception as error:  # the library's exceptions have no common base
            raise LoadError(f"diffusers cannot load it: {first_line(error)}") from None
        empty = next(_without_values(pipeline), None)
        if empty is not None:
            raise LoadError(f"the library left `{empty}` without values", code="tensor.missing")
        pipeline = pipeline.to(case.device)
        pipeline.set_progress_bar_config(disable=True)
        return DiffusionSession(plan, plan.dtype, pipeline, bound.binding or BindingReport())

    def probe(self, session: Session) -> Evidence:
        """One small picture in two steps, twice with one seed: the same picture, and not of one colour."""
        assert isinstance(session, DiffusionSession)
        request = probe_request(session)
        started = time.perf_counter()
        first = session.run(request).images[0]
        spent = time.perf_counter() - started
        second = session.run(request).images[0]
        if (first != second).any():
            return failed(EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", "one seed gave two pictures")
        if first.min() == first.max():
            return failed(
                EvidenceLevel.EXECUTED,
                "runtime.numeric_mismatch",
                "the picture has one colour",
                observed=str(first.min()),
            )
        return passed(EvidenceLevel.EXECUTED, measurements={"latency_s": spent})


# ---- requirements ------------------------------------------------------------------------------


def _other_kind(case: Case) -> Requirement:
    artifact = case.artifact
    if artifact.kind is ArtifactKind.DDUF:
        way = Remedy(
            Action.CONVERT, "unpack the archive into a directory", ["unzip", case.file(artifact.entry), "-d", "model"]
        )
        return unmet(
            Kind.ARTIFACT,
            "config.unsupported_variant",
            "this version of diffusers no longer reads DDUF",
            observed="DDUF",
            expected="a directory with model_index.json",
            where=artifact.entry,
            remedies=[way],
        )
    way = Remedy(Action.CONVERT, "save it as a directory with `from_single_file(...).save_pretrained`")
    return unmet(
        Kind.ARTIFACT,
        "config.unsupported_variant",
        "single-file checkpoints are not loaded here: their configuration lies on a hub",
        observed=str(_fact(artifact, "family")),
        expected="a directory with model_index.json",
        where=artifact.entry,
        remedies=[way],
    )


def _upgrade(what: str) -> list[Remedy]:
    argv = ["pip", "install", "--upgrade", what]
    return [Remedy(Action.UPGRADE, f"a newer {what} may have it", argv, speculative=True)]


def _install(names: list[str]) -> list[Remedy]:
    return [Remedy(Action.INSTALL, f"install {', '.join(names)}", ["pip", "install", *names])]


def _pipeline(case: Case) -> list[Requirement]:
    artifact = case.artifact
    name = str(_fact(artifact, "pipeline") or "")
    cls = pipeline_class(name)
    if cls is None:
        return [
            unmet(
                Kind.ARCHITECTURE,
                "architecture.unknown",
                f"diffusers has no pipeline `{name}`",
                observed=name,
                expected="a pipeline of the library",
                where=artifact.entry,
                remedies=_upgrade("diffusers"),
            )
        ]
    if lacks(cls):
        return [
            unmet(
                Kind.DEPENDENCY,
                "dependency.missing",
                f"`{name}` needs {', '.join(lacks(cls))}",
                observed="not installed",
                expected=", ".join(lacks(cls)),
                where=artifact.entry,
                remedies=_install(lacks(cls)),
            )
        ]
    present = {c.role for c in artifact.components if c.status is not Status.MISSING}
    listed = {c.role for c in artifact.components}
    found = [
        unmet(
            Kind.COMPONENT,
            "component.missing",
            f"the pipeline needs the component `{role}`",
            observed="null" if role in listed else "absent",
            expected=role,
            where=artifact.entry,
        )
        for role in required_components(cls)
        if role not in present
    ]
    why = misfit(cls, case.task) if case.task in DiffusersBackend.tasks else ""
    if why:
        found.append(
            unmet(
                Kind.TASK_HEAD,
                "task.not_offered",
                f"`{name}` cannot serve `{case.task}`: {why}",
                observed=name,
                expected=case.task,
                where=artifact.entry,
            )
        )
    return found or [met("pipeline", Kind.ARCHITECTURE, name)]


def _code(artifact: Artifact) -> list[Requirement]:
    """Components that are Python files: their tensors could not be checked, so trust is no way out."""
    return [
        unmet(
            Kind.TRUST,
            "code.required",
            f"the component `{c.role}` is Python code of the package, which is not run here",
            observed=f"{c.library}.{c.class_name}",
            expected="a class of diffusers or transformers",
            where=c.path,
        )
        for c in artifact.components
        if c.library is not None and (c.code is not CodeNeed.NONE or room(str(c.library)) is None)
    ]


def _component(case: Case, component: Component) -> list[Requirement]:
    """Class, type and files of one component."""
    if (
        component.status is Status.MISSING
        or component.code is not CodeNeed.NONE
        or room(str(component.library)) is None
    ):
        return []
    role, place = component.role, component.path
    named = f"{component.library}.{component.class_name}"
    cls = component_class(component)
    if cls is None:
        return [
            unmet(
                Kind.COMPONENT,
                "component.wrong_class",
                f"the component `{role}` is a `{named}`, which is not here",
                observed=named,
                expected="a class of diffusers or transformers",
                where=place,
                remedies=_upgrade(str(component.library).split(".")[0]),
            )
        ]
    if lacks(cls):
        return [
            unmet(
                Kind.DEPENDENCY,
                "dependency.missing",
                f"`{named}` needs {', '.join(lacks(cls))}",
                observed="not installed",
                expected=", ".join(lacks(cls)),
                where=place,
                remedies=_install(lacks(cls)),
            )
        ]
    pipeline = pipeline_class(str(_fact(case.artifact, "pipeline") or ""))
    wanted = expected_types(pipeline, role) if pipeline is not None and not lacks(pipeline) else ()
    found = []
    if wanted and not issubclass(cls, wanted):
        expected = " or ".join(t.__name__ for t in wanted)
        if akin(cls, wanted):
            # The library only warns: a small autoencoder in place of the usual one works, others do not.
            message = (
                f"the pipeline was written for a {expected} as `{role}`; only a run can tell whether `{named}` will do"
            )
            found.append(
                unknown(
                    Kind.COMPONENT, "component.wrong_class", message, observed=named, expected=expected, where=place
                )
            )
        else:
            message = f"the component `{role}` is a `{named}`, the pipeline takes another class"
            found.append(
                unmet(Kind.COMPONENT, "component.wrong_class", message, observed=named, expected=expected, where=place)
            )
    for code, file, name in bad_references(Path(case.file(place))):
        found.append(
            unmet(
                Kind.INTEGRITY,
                code,
                f"`{file}` names `{name}`, which the component's folder does not hold",
                observed=name,
                expected=f"a file in `{place}`",
                where=f"{place}/{file}",
            )
        )
    method = stored_config(Path(case.file(place))).get("quantization_config") or {}
    if method:
        named = str(method.get("quant_method") or "unnamed") if isinstance(method, dict) else "unnamed"
        found.append(
            unmet(
                Kind.QUANTIZATION,
                "quantization.unsupported",
                f"the component `{role}` is quantized ({named}), which this backend cannot prove yet",
                observed=named,
                expected="plain tensors",
                where=place,
            )
        )
    return found or [met(f"component.{role}", Kind.COMPONENT, role, named)]


def _variant(case: Case) -> list[Requirement]:
    every, only = variants(case.artifact)
    chosen = case.options.get("variant")
    if chosen is not None and chosen not in every:
        return [
            unmet(
                Kind.OPTION,
                "option.unsupported",
                f"there are no files of the variant `{chosen}`",
                observed=str(chosen),
                expected=", ".join(every) or "none",
            )
        ]
    if only and chosen not in only:
        remedies = [
            Remedy(Action.SET_OPTION, f"take the variant with `--option variant={v}`", ["--option", f"variant={v}"])
            for v in only
        ]
        return [
            unmet(
                Kind.ARTIFACT,
                "artifact.missing",
                "a component has weights only as a variant",
                observed=", ".join(only),
                expected="files without a variant",
                where=case.artifact.entry,
                remedies=remedies,
            )
        ]
    return [met("variant", Kind.ARTIFACT, str(chosen or ""))]


def _options(case: Case) -> list[Requirement]:
    unknown = [
        unmet(
            Kind.OPTION,
            "option.unsupported",
            f"diffusers takes no option `{name}`",
            observed=name,
            expected=", ".join(sorted(OPTIONS)),
        )
        for name in case.options
        if name not in OPTIONS
    ]
    return unknown + dtype_option(case)


# ---- binding and probe -------------------------------------------------------------------------


def _unbound(component: Component, bound: Bound) -> list[Reason]:
    reasons = []
    if bound.missing:
        count = "a tensor" if len(bound.missing) == 1 else f"{len(bound.missing)} tensors"
        message = f"`{component.role}` needs {count} that no file holds, first `{bound.missing[0]}`"
        reasons.append(Reason("tensor.missing", message, "absent", bound.missing[0], component.path))
    if bound.mismatched:
        name, stored, wanted = bound.mismatched[0]
        message = f"`{name}` of `{component.role}` has another shape than the configuration says"
        reasons.append(Reason("tensor.shape_mismatch", message, str(stored), str(wanted), component.path))
    return reasons


def _add(binding: BindingReport, role: str, bound: Bound) -> None:
    binding.loaded += bound.loaded
    binding.tied += [f"{role}/{name}" for name in bound.tied]
    binding.unexpected += [f"{role}/{name}" for name in bound.unexpected]
    binding.unresolved += [f"{role}/{name}" for name in bound.missing]


def _without_values(pipeline: Any) -> Iterator[str]:
    """Tensors that a load left on the meta device."""
    for role, part in pipeline.components.items():
        for name, tensor in part.state_dict().items() if hasattr(part, "parameters") else ():
            if tensor.is_meta:
                yield f"{role}/{name}"
