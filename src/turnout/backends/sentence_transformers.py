"""sentence-transformers: dense embeddings and cross-encoder scores by the library's own modules.

The library fills what a file lacks with random values and invents pooling where none is given; both
are refused here before it is asked to load.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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
    State,
    failed,
    met,
    passed,
    unmet,
)
from turnout.backends.requirements import truthy
from turnout.backends.sentence_transformers_modules import (
    bind_modules,
    has_transformer,
    inner_task,
    module_class,
    recipe_of,
    said,
)
from turnout.backends.transformers import TransformersBackend
from turnout.backends.transformers_requirements import dtype_option
from turnout.errors import InputError, LoadError
from turnout.package.facts import Artifact, ArtifactKind, CodeNeed
from turnout.tasks.contract import EmbeddingsOutput, RankedDocument, RankingOutput
from turnout.tasks.language import sigmoid
from turnout.types import Request, Task

DISTRIBUTIONS = ("sentence-transformers", "transformers", "torch")
OPTIONS = frozenset({"normalize", "max_length", "trust_remote_code", "dtype", "allow_unexpected"})
REQUEST_OPTIONS = {Task.EMBEDDINGS: ("prompt_name",), Task.RERANK: ("normalize",)}


def module_known(path: str) -> bool:
    """Whether ``package.module.Class`` is a class of the library."""
    return module_class(path) is not None


def _kind(artifact: Artifact) -> str:
    fact = artifact.facts.get("model_type")
    return str(fact.value) if fact else "SentenceTransformer"


def _labels(artifact: Artifact) -> int:
    """Labels of a classifier, as its configuration tells them; two where it does not (the library's default)."""
    config = artifact.architecture.config if artifact.architecture else {}
    names = config.get("id2label")
    return len(names) if isinstance(names, dict) else int(config.get("num_labels") or 2)


def _inner(case: Case) -> Case:
    """The transformer inside, as a Transformers directory of its own; a dense layer comes after it."""
    entry = next((c.path for c in case.artifact.components if c.role == "Transformer"), case.artifact.entry)
    recipe = case.artifact.recipe
    if recipe is not None:
        recipe = replace(recipe, settings={k: v for k, v in recipe.settings.items() if k != "dense"})
    artifact = replace(case.artifact, kind=ArtifactKind.TRANSFORMERS, entry=entry, recipe=recipe)
    return replace(case, artifact=artifact, task=inner_task(case))


def _options(case: Case) -> list[Requirement]:
    found = dtype_option(case)
    for name in case.options:
        if name not in OPTIONS:
            found.append(
                unmet(
                    Kind.OPTION,
                    "option.unsupported",
                    f"sentence-transformers takes no option `{name}` here; the package's modules decide",
                    observed=name,
                    expected=", ".join(sorted(OPTIONS)),
                )
            )
    recipe = case.artifact.recipe
    if recipe is not None and recipe.settings.get("normalize") and not truthy(case.options.get("normalize", True)):
        found.append(
            unmet(
                Kind.OPTION,
                "option.unsupported",
                "the package's own last module scales vectors to length 1",
                observed="normalize=false",
                expected="normalize=true",
                where=case.artifact.entry,
            )
        )
    length = str(case.options.get("max_length", 1))
    dims = case.artifact.architecture.dims if case.artifact.architecture else {}
    room = dims.get("max_position_embeddings")
    if not length.isdecimal() or not 0 < int(length) <= (room or int(length)):
        found.append(
            unmet(
                Kind.OPTION,
                "option.unsupported",
                "texts cannot be cut to that length",
                observed=length,
                expected=f"1 to {room}" if room else "a number of tokens",
                where="max_length",
            )
        )
    return found


@dataclass(slots=True)
class SentenceSession:
    """One loaded SentenceTransformer or CrossEncoder."""

    plan: LoadPlan
    dtype: str
    model: Any
    recipe: Any
    binding: BindingReport = field(default_factory=BindingReport)

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> Any:
        """Vectors or a ranking. Raises ``InputError`` for texts that do not fit."""
        if self.model is None:
            raise LoadError("the session is closed")
        taken = REQUEST_OPTIONS[Task(request.task)]
        for name in request.options:
            if name not in taken:
                raise InputError(f"`{request.task}` takes no `{name}` here", hints=[f"it takes: {taken[0]}"])
        if request.task == Task.RERANK:
            scores = self._scores(str(request.inputs["query"]), list(request.inputs["documents"]))
            return self._ranking(scores, truthy(request.options.get("normalize")))
        return self._embed(list(request.inputs["texts"]), request.options.get("prompt_name"))

    def _embed(self, texts: list[str], prompt_name: str | None) -> EmbeddingsOutput:
        import numpy as np

        if prompt_name is not None and prompt_name not in self.model.prompts:
            raise InputError(
                f"the model has no prompt `{prompt_name}`", hints=["known: " + ", ".join(self.model.prompts)]
            )
        wanted = bool(self.recipe.settings.get("normalize"))
        try:
            vectors = self.model.encode(
                texts, prompt_name=prompt_name, normalize_embeddings=wanted, show_progress_bar=False
            )
        except (RuntimeError, IndexError, ValueError) as error:
            raise _failed_run(error) from None
        vectors = np.asarray(vectors, np.float32)
        return EmbeddingsOutput(vectors, int(vectors.shape[1]), wanted, self.recipe.id)

    def _scores(self, query: str, documents: list[str]) -> Any:
        """Logits [documents]; of two labels the log-odds of the second."""
        import numpy as np
        import torch

        # Raw logits: the contract's score kind; the order is the same under any monotone activation.
        pairs = [(query, document) for document in documents]
        try:
            scores = self.model.predict(pairs, activation_fn=torch.nn.Identity(), show_progress_bar=False)
        except (RuntimeError, IndexError, ValueError) as error:
            raise _failed_run(error) from None
        scores = np.asarray(scores, np.float32)
        return scores[:, 1] - scores[:, 0] if scores.ndim == 2 else scores

    def _ranking(self, scores: Any, scaled: bool) -> RankingOutput:
        if scaled:
            scores = sigmoid(scores)
        ranked = sorted(enumerate(float(score) for score in scores), key=lambda pair: (-pair[1], pair[0]))
        return RankingOutput([RankedDocument(index, score) for index, score in ranked])

    def close(self) -> None:
        """Drops the model; may be called twice."""
        self.model = None


def _failed_run(error: Exception) -> InputError:
    return InputError(f"the model cannot run these texts: {said(error)}", code="runtime.failed")


class SentenceTransformersBackend:
    """sentence-transformers directories, by the library itself."""

    name = "sentence-transformers"
    reads = frozenset({ArtifactKind.SENTENCE_TRANSFORMERS})
    tasks: frozenset[str] = frozenset({Task.EMBEDDINGS, Task.RERANK})

    def describe(self) -> BackendBuild:
        """Versions from the installed distributions; nothing is imported."""
        build = BackendBuild(self.name, extra="torch")
        for name in DISTRIBUTIONS:
            try:
                build.dependencies[name] = version(name)
            except PackageNotFoundError:
                build.missing.append(name)
        if build.missing or find_spec("sentence_transformers") is None:
            build.unavailable = f"not here: {', '.join(build.missing or ['sentence-transformers'])}"
        else:
            build.version = build.dependencies["sentence-transformers"]
        return build

    def devices(self) -> list[str]:
        """Devices as PyTorch reports them."""
        return TransformersBackend().devices()

    def requirements(self, case: Case) -> list[Requirement]:
        """Module classes, kind of model, head or recipe, and what the inner transformer needs."""
        artifact, entry = case.artifact, case.artifact.entry
        found: list[Requirement] = []
        for component in artifact.components:
            if component.code is CodeNeed.NONE and component.class_name and not module_known(component.class_name):
                found.append(
                    unmet(
                        Kind.ARCHITECTURE,
                        "architecture.unsupported",
                        f"this version has no module `{component.class_name}`",
                        observed=component.class_name,
                        expected="a module of the installed version",
                        where=entry,
                        remedies=[
                            Remedy(
                                Action.UPGRADE,
                                "a newer sentence-transformers may have it",
                                ["pip", "install", "--upgrade", "sentence-transformers"],
                                speculative=True,
                            )
                        ],
                    )
                )
        found += self._kind_fits(case)
        found += _options(case)
        if has_transformer(artifact):
            found += [r for r in TransformersBackend().requirements(_inner(case)) if r.kind is not Kind.OPTION]
        return found or [met("modules", Kind.COMPONENT, entry)]

    def _kind_fits(self, case: Case) -> list[Requirement]:
        kind = _kind(case.artifact)
        if kind not in ("SentenceTransformer", "CrossEncoder"):
            return [
                unmet(
                    Kind.TASK_HEAD,
                    "task.not_offered",
                    f"a {kind} gives vectors that this backend does not serve yet",
                    observed=kind,
                    expected="SentenceTransformer or CrossEncoder",
                    where=case.artifact.entry,
                )
            ]
        artifact = case.artifact
        broken = any(f.code == "component.missing" for f in artifact.findings)
        if kind == "SentenceTransformer" and artifact.recipe is None and artifact.code is CodeNeed.NONE and not broken:
            where = f"{artifact.entry}/modules.json".lstrip("/")
            return [unmet(Kind.RECIPE, "recipe.missing", "modules.json has no pooling module", where=where)]
        labels = _labels(artifact)
        if case.task == Task.RERANK and inner_task(case) == Task.RERANK and labels > 2:
            return [
                unmet(
                    Kind.TASK_HEAD,
                    "task.conflict",
                    f"a head with {labels} labels does not say which one is relevance",
                    observed=f"{labels} labels",
                    expected="1 or 2 labels",
                    where=case.artifact.entry,
                )
            ]
        return [met("kind", Kind.TASK_HEAD, kind)]

    def inquire(self, case: Case) -> list[Evidence]:
        """``requirements`` has put every question that needs no weights."""
        return [passed(EvidenceLevel.INQUIRED)]

    def plan(self, case: Case) -> LoadPlan:
        """The class that the package's own configuration names."""
        dtype = str(case.options.get("dtype") or "float32")
        recipe = recipe_of(case)
        implementation = f"sentence_transformers.{_kind(case.artifact)}"
        return LoadPlan(case, self.name, implementation, dtype, case.artifact.files, recipe.id if recipe else "")

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Binds the transformer on the meta device by name and shape, and really builds the other modules."""
        case = plan.case
        evidence = passed(EvidenceLevel.DRY_LOADED, binding=BindingReport())
        if has_transformer(case.artifact):
            inner = TransformersBackend()
            evidence = inner.dry_load(inner.plan(_inner(case)))
        loaded, reasons = bind_modules(case)
        if reasons:
            evidence.outcome = Outcome.FAIL
            evidence.reasons += reasons
        if evidence.binding is not None:
            evidence.binding.loaded += loaded
        return evidence

    def load(self, plan: LoadPlan) -> Session:
        """Binds first, then loads. Raises ``LoadError`` for a tensor that no file holds."""
        refused = next((r for r in self.requirements(plan.case) if r.state is State.UNMET), None)
        if refused is not None and refused.reason is not None:
            raise LoadError(refused.reason.message, code=refused.reason.code)
        bound = self.dry_load(plan)
        if bound.outcome is not Outcome.PASS:
            reason = bound.reasons[0]
            raise LoadError(reason.message, code=reason.code)
        import sentence_transformers
        import torch

        case = plan.case
        cls = getattr(sentence_transformers, _kind(case.artifact))
        try:
            model = cls(
                case.file(case.artifact.entry),
                device=case.device,
                local_files_only=True,
                trust_remote_code=truthy(case.options.get("trust_remote_code")),
                model_kwargs={"dtype": getattr(torch, plan.dtype)},
            )
        except (OSError, ValueError, TypeError, KeyError, RuntimeError, ImportError, AttributeError) as error:
            raise LoadError(f"sentence-transformers cannot load it: {said(error)}") from None
        if case.options.get("max_length"):
            model.max_seq_length = int(case.options["max_length"])
        return SentenceSession(plan, plan.dtype, model, recipe_of(case), bound.binding or BindingReport())

    def probe(self, session: Session) -> Evidence:
        """Two texts of different length: finite numbers of the promised width, the same alone as together."""
        assert isinstance(session, SentenceSession)
        import numpy as np

        if session.plan.case.task == Task.RERANK:
            request = Request(Task.RERANK, {"query": "What is a probe?", "documents": ["A small test.", "Bread."]})
        else:
            request = Request(Task.EMBEDDINGS, {"texts": ["A probe.", "A second and rather longer probe."]})
        output = session.run(request)
        started = time.perf_counter()
        session.run(request)
        spent = time.perf_counter() - started
        values = [r.score for r in output.ranking] if isinstance(output, RankingOutput) else output.vectors
        if not np.isfinite(np.asarray(values)).all():
            return failed(
                EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", "the output holds values that are not finite"
            )
        if isinstance(output, EmbeddingsOutput):
            alone = session.run(Request(Task.EMBEDDINGS, {"texts": request.inputs["texts"][:1]}))
            off = float(np.abs(alone.vectors[0] - output.vectors[0]).max())
            if session.dtype == "float32" and off > 1e-4:
                return failed(
                    EvidenceLevel.EXECUTED,
                    "runtime.numeric_mismatch",
                    "a text alone gives another vector than in a batch",
                    observed=f"{off:.2g}",
                    expected="at most 1e-4",
                )
        return passed(EvidenceLevel.EXECUTED, measurements={"latency_s": spent})
