"""diffusers: image generation from bundles of components.

The library loads a component whose file lacks a tensor with random values; each component is
therefore bound on the meta device first, name by name and shape by shape.
"""

from __future__ import annotations

import inspect as signatures
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
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
    Remedy,
    Requirement,
    Session,
    failed,
    met,
    passed,
    unmet,
)
from turnout.errors import InputError, LoadError
from turnout.package.facts import Artifact, ArtifactKind, Component, Status
from turnout.tasks.contract import ImageOutput
from turnout.types import Request, Task

DISTRIBUTIONS = ("diffusers", "transformers", "torch")
LIBRARIES = ("diffusers", "transformers")
OPTIONS = frozenset({"dtype", "variant"})


def pipeline_class(name: str) -> Any:
    """Class of the library, or None."""
    import diffusers

    return getattr(diffusers, name, None) if name.isidentifier() else None


def component_class(component: Component) -> Any:
    """Class of a component in the library that it names, or None."""
    if component.library not in LIBRARIES or not component.class_name or not component.class_name.isidentifier():
        return None
    module = __import__(str(component.library))
    return getattr(module, component.class_name, None)


def _fact(artifact: Artifact, name: str) -> Any:
    fact = artifact.facts.get(name)
    return fact.value if fact else None


def required_components(cls: Any) -> list[str]:
    """Parameters of the pipeline's constructor without default, less the optional ones."""
    parameters = list(signatures.signature(cls.__init__).parameters.values())[1:]
    optional = set(getattr(cls, "_optional_components", []))
    return [p.name for p in parameters if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD and p.name not in optional]


def first_line(error: BaseException) -> str:
    """First line of the library's message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__


@dataclass(slots=True)
class DiffusionSession:
    """One pipeline."""

    plan: LoadPlan
    dtype: str
    pipeline: Any
    binding: BindingReport = field(default_factory=BindingReport)

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> ImageOutput:
        """Pictures for a prompt. ``request.options``: steps, guidance, width, height, seed of ``sampling``."""
        if self.pipeline is None:
            raise LoadError("the session is closed")
        import numpy as np
        import torch

        accepted = set(signatures.signature(self.pipeline.__call__).parameters)
        given = self._arguments(request, accepted)
        seed = request.sampling.seed
        given["generator"] = torch.Generator("cpu").manual_seed(seed if seed is not None else torch.seed() % (1 << 63))
        if emit is not None and "callback_on_step_end" in accepted:
            given["callback_on_step_end"] = lambda _, step, __, values: (emit(f"step {step + 1}\n"), values)[1]
        try:
            with torch.inference_mode():
                images = self.pipeline(output_type="np", **given).images
        except (ValueError, TypeError, RuntimeError) as error:
            raise InputError(f"the pipeline cannot run this request: {first_line(error)}", code="runtime.failed") from None
        return ImageOutput([np.clip(np.asarray(i) * 255 + 0.5, 0, 255).astype(np.uint8) for i in images])

    def _arguments(self, request: Request, accepted: set[str]) -> dict[str, Any]:
        names = {"steps": "num_inference_steps", "guidance": "guidance_scale", "width": "width", "height": "height",
                 "negative_prompt": "negative_prompt"}
        given: dict[str, Any] = {}
        for name, value in request.options.items():
            target = names.get(name)
            if target is None or target not in accepted:
                raise InputError(f"this pipeline takes no `{name}`", hints=["it takes: " + ", ".join(n for n, t in names.items() if t in accepted)])
            given[target] = value
        if "prompt" in accepted:
            given["prompt"] = str(request.inputs["prompt"])
        return given

    def close(self) -> None:
        """Drops the pipeline; may be called twice."""
        self.pipeline = None


class DiffusersBackend:
    """Diffusers bundles, by the library's own pipelines."""

    name = "diffusers"
    reads = frozenset({ArtifactKind.DIFFUSERS, ArtifactKind.DIFFUSERS_SINGLE_FILE, ArtifactKind.DDUF})
    tasks: frozenset[str] = frozenset({Task.TEXT_TO_IMAGE})

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
        import torch

        return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]

    def requirements(self, case: Case) -> list[Requirement]:
        """Pipeline class, required components, their classes, variants, options."""
        artifact = case.artifact
        if artifact.kind is ArtifactKind.DDUF:
            return [unmet(Kind.ARTIFACT, "config.unsupported_variant", "this version of diffusers no longer reads DDUF", observed="DDUF",
                          expected="a directory with model_index.json", where=artifact.entry,
                          remedies=[Remedy(Action.CONVERT, "unpack the archive into a directory", ["unzip", case.file(artifact.entry), "-d", "model"])])]
        if artifact.kind is ArtifactKind.DIFFUSERS_SINGLE_FILE:
            return [unmet(Kind.ARTIFACT, "config.unsupported_variant", "single-file checkpoints are not loaded here: their configuration lies on a hub",
                          observed=str(_fact(artifact, "family")), expected="a directory with model_index.json", where=artifact.entry,
                          remedies=[Remedy(Action.CONVERT, "save it as a directory with `from_single_file(...).save_pretrained`")])]
        return [*self._pipeline(artifact), *self._code(artifact), *self._components(artifact), *self._variant(case), *self._options(case)]

    def _pipeline(self, artifact: Artifact) -> list[Requirement]:
        name = str(_fact(artifact, "pipeline") or "")
        cls = pipeline_class(name)
        if cls is None:
            return [unmet(Kind.ARCHITECTURE, "architecture.unknown", f"diffusers has no pipeline `{name}`", observed=name, expected="a pipeline of the library",
                          where=artifact.entry, remedies=[Remedy(Action.UPGRADE, "a newer diffusers may have it", ["pip", "install", "--upgrade", "diffusers"], speculative=True)])]
        present = {c.role for c in artifact.components if c.status is not Status.MISSING}
        listed = {c.role for c in artifact.components}
        found = [unmet(Kind.COMPONENT, "component.missing", f"the pipeline needs the component `{role}`", observed="null" if role in listed else "absent",
                       expected=role, where=artifact.entry) for role in required_components(cls) if role not in present]
        return found or [met("pipeline", Kind.ARCHITECTURE, name)]

    def _code(self, artifact: Artifact) -> list[Requirement]:
        """Components that are Python files: their tensors could not be checked, so trust is no way out."""
        return [unmet(Kind.TRUST, "code.required", f"the component `{c.role}` is Python code of the package, which is not run here", observed=f"{c.library}.{c.class_name}",
                      expected="a class of diffusers or transformers", where=c.path) for c in artifact.components if c.library not in (*LIBRARIES, None)]

    def _components(self, artifact: Artifact) -> list[Requirement]:
        found = [
            unmet(Kind.COMPONENT, "component.wrong_class", f"the component `{c.role}` is a `{c.library}.{c.class_name}`, which is not here",
                  observed=f"{c.library}.{c.class_name}", expected="a class of diffusers or transformers", where=c.path)
            for c in artifact.components if c.library in LIBRARIES and component_class(c) is None
        ]
        return found or [met("components", Kind.COMPONENT, artifact.entry)]

    def _variant(self, case: Case) -> list[Requirement]:
        variants, chosen = _fact(case.artifact, "variants") or [], case.options.get("variant")
        if chosen is not None and chosen not in variants:
            return [unmet(Kind.OPTION, "option.unsupported", f"there are no files of the variant `{chosen}`", observed=str(chosen), expected=", ".join(variants) or "none")]
        if variants and chosen is None:
            remedies = [Remedy(Action.SET_OPTION, f"take the variant with `--option variant={v}`", ["--option", f"variant={v}"]) for v in variants]
            return [unmet(Kind.ARTIFACT, "artifact.missing", "a component has weights only as a variant", observed=", ".join(variants),
                          expected="files without a variant", where=case.artifact.entry, remedies=remedies)]
        return [met("variant", Kind.ARTIFACT, str(chosen or ""))]

    def _options(self, case: Case) -> list[Requirement]:
        return [unmet(Kind.OPTION, "option.unsupported", f"diffusers takes no option `{name}`", observed=name, expected=", ".join(sorted(OPTIONS)))
                for name in case.options if name not in OPTIONS]

    def inquire(self, case: Case) -> list[Evidence]:
        """``requirements`` has put every question that needs no weights."""
        return [passed(EvidenceLevel.INQUIRED)]

    def plan(self, case: Case) -> LoadPlan:
        """The pipeline class that the index names."""
        recipe = case.artifact.recipe.id if case.artifact.recipe else ""
        return LoadPlan(case, self.name, f"diffusers.{_fact(case.artifact, 'pipeline')}", str(case.options.get("dtype") or "float32"), case.artifact.files, recipe)

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Every component with weights on the meta device: missing and misshapen tensors."""
        binding = BindingReport()
        for component in plan.case.artifact.components:
            problem = self._bind(plan.case, component, binding)
            if problem is not None:
                return problem
        return passed(EvidenceLevel.DRY_LOADED, binding=binding)

    def _bind(self, case: Case, component: Component, binding: BindingReport) -> Evidence | None:
        prefix = f"{component.role}/"
        stored = {n.removeprefix(prefix): t for n, t in case.artifact.tensors.tensors.items() if n.startswith(prefix)}
        if not stored:
            return None
        try:
            wanted = _meta_shapes(component, case.file(component.path))
        except Exception as error:  # the libraries' exceptions have no common base
            return failed(EvidenceLevel.DRY_LOADED, "config.invalid", f"`{component.role}` cannot be built: {first_line(error)}", where=component.path)
        missing = [n for n in wanted if n not in stored and not n.endswith(("position_ids", "num_batches_tracked"))]
        if missing:
            return failed(EvidenceLevel.DRY_LOADED, "tensor.missing", f"`{component.role}` needs {len(missing)} tensors that no file holds, first `{missing[0]}`",
                          observed="absent", expected=missing[0], where=component.path)
        wrong = [n for n, shape in wanted.items() if n in stored and tuple(stored[n].shape) != shape]
        if wrong:
            return failed(EvidenceLevel.DRY_LOADED, "tensor.shape_mismatch", f"`{wrong[0]}` of `{component.role}` has another shape than the configuration says",
                          observed=str(list(stored[wrong[0]].shape)), expected=str(list(wanted[wrong[0]])), where=component.path)
        binding.loaded += len(wanted) - len(missing)
        binding.unexpected += [f"{prefix}{n}" for n in stored if n not in wanted]
        return None

    def load(self, plan: LoadPlan) -> Session:
        """Binds first, then loads. Raises ``LoadError``; custom code is never run."""
        bound = self.dry_load(plan)
        if bound.outcome is not Outcome.PASS:
            raise LoadError(bound.reasons[0].message, code=bound.reasons[0].code)
        import torch

        case = plan.case
        cls = pipeline_class(str(_fact(case.artifact, "pipeline")))
        if cls is None:
            raise LoadError(f"diffusers has no pipeline `{_fact(case.artifact, 'pipeline')}`", code="architecture.unknown")
        try:
            pipeline = cls.from_pretrained(case.file(case.artifact.entry), torch_dtype=getattr(torch, plan.dtype), local_files_only=True,
                                           variant=case.options.get("variant"), trust_remote_code=False)
            pipeline = pipeline.to(case.device)
        except Exception as error:  # the library's exceptions have no common base
            raise LoadError(f"diffusers cannot load it: {first_line(error)}") from None
        pipeline.set_progress_bar_config(disable=True)
        return DiffusionSession(plan, plan.dtype, pipeline, bound.binding or BindingReport())

    def probe(self, session: Session) -> Evidence:
        """One picture in two steps, twice with one seed: the same picture, and not of one colour."""
        assert isinstance(session, DiffusionSession)
        from turnout.types import Sampling

        request = Request(Task.TEXT_TO_IMAGE, {"prompt": "a dot"}, Sampling(seed=0), {"steps": 2})
        started = time.perf_counter()
        first = session.run(request).images[0]
        spent = time.perf_counter() - started
        second = session.run(request).images[0]
        if (first != second).any():
            return failed(EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", "one seed gave two pictures")
        if first.min() == first.max():
            return failed(EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", "the picture has one colour", observed=str(first.min()))
        return passed(EvidenceLevel.EXECUTED, measurements={"latency_s": spent})


def _meta_shapes(component: Component, path: str) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a component's tensors as its configuration builds it, without memory."""
    import torch

    cls = component_class(component)
    with torch.device("meta"):
        if component.library == "diffusers":
            model = cls.from_config(cls.load_config(path))
        else:
            import transformers

            model = cls(transformers.AutoConfig.from_pretrained(path, trust_remote_code=False))
    tied = getattr(model, "_tied_weights_keys", None) or {}
    return {n: tuple(t.shape) for n, t in model.state_dict().items() if n not in tied}


