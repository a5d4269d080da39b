"""ONNX Runtime: ONNX graphs on the CPU, or on another provider when it is asked for by name.

The runtime itself is asked (``onnxruntime_kernels``): which versions it accepts, which operators it has,
and whether it has a kernel for every node of the graph.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from turnout.backends import onnxruntime_kernels as kernels
from turnout.backends.base import (
    BackendBuild,
    BindingReport,
    Case,
    Evidence,
    EvidenceLevel,
    LoadPlan,
    Outcome,
    Reason,
    Requirement,
    Session,
    failed,
    passed,
)
from turnout.backends.graph_probe import probe_requests, sound
from turnout.backends.graph_text import (
    GraphGenerator,
    default_input,
    no_past,
)
from turnout.backends.onnxruntime_kernels import PROVIDERS, open_session, provider_of
from turnout.backends.onnxruntime_requirements import (
    DRY_BYTES,
    GIVEN,
    TEXT,
    graph_files,
    main_dtype,
    notes_of,
    requirements_of,
)
from turnout.engine.executor import ExecutorOptions
from turnout.errors import InputError, LoadError, TurnoutError
from turnout.package.facts import ArtifactKind
from turnout.tasks.adapter import adapter_for
from turnout.tasks.decoding import Seq2SeqGenerator
from turnout.tasks.numeric import numpy_dtype
from turnout.tasks.vocabulary import TokenizerVocabulary, vocabulary_of
from turnout.types import Request, Sampling, Task

if TYPE_CHECKING:
    from turnout.backends.onnxruntime_executor import OnnxExecutor

# ---- sessions ----------------------------------------------------------------------------------


@dataclass(slots=True)
class OnnxGraph:
    """One session: named arrays in, named arrays out."""

    session: Any
    strict: bool = False  # raw tensors: nothing is filled in

    def infer(self, feeds: dict[str, Any]) -> dict[str, Any]:
        """Outputs by name. Inputs that the graph lacks are left out; raises ``InputError`` for missing ones."""
        given = {}
        for port in self.session.get_inputs():
            value = feeds.get(port.name)
            if value is None and not self.strict:
                value = default_input(port.name, feeds)
                if value is None and "input_ids" in feeds:
                    value = no_past(port.name, port.shape, port.type)
            if value is None:
                raise InputError(f"the graph's input `{port.name}` is not given", code="graph.io_mismatch")
            given[port.name] = to_port(value, port.type, port.name)
        names = [port.name for port in self.session.get_outputs()]
        try:
            values = self.session.run(None, given)
        except Exception as error:  # the runtime's exceptions have no common base
            raise InputError(
                f"ONNX Runtime cannot run this input: {kernels.first_line(error)}", code="runtime.failed"
            ) from None
        return dict(zip(names, values, strict=True))


def to_port(value: Any, kind: str, name: str) -> Any:
    """``value`` in the element type of a port (``tensor(float)``); width may change, kind and number never."""
    import numpy as np

    array = np.asarray(value)
    inner = kind[len("optional(") : -1] if kind.startswith("optional(") else kind
    wanted = numpy_dtype(inner)
    if wanted is None:
        raise InputError(f"input `{name}` has the type {kind}, which has no array form here", code="graph.io_mismatch")
    if wanted == "str" or array.dtype.kind in "USO":
        if wanted != "str" or array.dtype.kind not in "USO":
            raise InputError(f"input `{name}` takes {wanted}, got {array.dtype}", code="graph.io_mismatch")
        return array.astype(object)
    if not np.can_cast(array.dtype, np.dtype(wanted), "same_kind") and not (
        array.dtype.kind in "iu" and np.dtype(wanted).kind in "iub"  # the range is looked at below; masks may be bool
    ):
        raise InputError(f"input `{name}` takes {wanted}, got {array.dtype}", code="graph.io_mismatch")
    if np.dtype(wanted).kind in "iu" and array.size:
        least, most = int(array.min()), int(array.max())
        if least < np.iinfo(wanted).min or most > np.iinfo(wanted).max:
            raise InputError(f"input `{name}` takes {wanted}, got {least} to {most}", code="graph.io_mismatch")
    return np.ascontiguousarray(array, dtype=wanted).reshape(array.shape)


@dataclass(slots=True)
class OnnxSession:
    """Graphs behind the adapter of one task."""

    plan: LoadPlan
    dtype: str
    graphs: dict[str, OnnxGraph]
    adapter: Any
    binding: BindingReport = field(default_factory=BindingReport)

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> Any:
        """Output of one request. Raises ``InputError`` for input that does not fit the graph."""
        if not self.graphs:
            raise LoadError("the session is closed")
        if "encoder" in self.graphs:
            return self.adapter.generate(request, self.graphs["encoder"].infer, self.graphs["decoder"].infer, emit)
        if request.task in TEXT:
            return self.adapter.generate(request, self.graphs["model"].infer, emit)
        return self.adapter.run(request, self.graphs["model"].infer)

    def close(self) -> None:
        """Drops the sessions; may be called twice."""
        self.graphs = {}


def _adapter(case: Case) -> Any:
    if case.artifact.kind is ArtifactKind.ONNX_SEQ2SEQ:
        return Seq2SeqGenerator(case.root, case.artifact, case.options)
    if case.task in TEXT:
        return GraphGenerator(case.root, case.artifact, case.options)
    return adapter_for(case.root, case.artifact, case.task, case.options)


class OnnxRuntimeBackend:
    """Graphs on ONNX Runtime."""

    name = "onnxruntime"
    reads = frozenset({ArtifactKind.ONNX, ArtifactKind.ONNX_SEQ2SEQ})
    tasks: frozenset[str] = frozenset(
        {
            Task.TENSOR,
            Task.IMAGE_CLASSIFICATION,
            Task.VAD,
            Task.TABULAR_CLASSIFICATION,
            Task.TABULAR_REGRESSION,
            *GIVEN,
        }
    )

    def describe(self) -> BackendBuild:
        """Version from the installed distribution; nothing is imported."""
        build = BackendBuild("onnxruntime", extra="onnx")
        for name in ("onnxruntime", "onnxruntime-gpu"):
            try:
                build.version = version(name)
                build.dependencies = {name: build.version}
                break
            except PackageNotFoundError:
                continue
        if not build.version or find_spec("onnxruntime") is None or find_spec("onnx") is None:
            build.unavailable, build.missing = (
                "the packages `onnxruntime` and `onnx` are not both here",
                ["onnxruntime", "onnx"],
            )
        return build

    def devices(self) -> list[str]:
        """Devices that have a provider in this build."""
        available = kernels.runtime().get_available_providers()
        return [device for device, provider in PROVIDERS.items() if provider in available]

    def requirements(self, case: Case) -> list[Requirement]:
        """Versions, operators, kernels for every node, port types, and the option ``dtype``."""
        return requirements_of(case)

    def inquire(self, case: Case) -> list[Evidence]:
        """What a user should know of the case; ``requirements`` has put the questions."""
        return [passed(EvidenceLevel.INQUIRED, log="; ".join(notes_of(case)))]

    def plan(self, case: Case) -> LoadPlan:
        """One session, or two for an encoder and a decoder."""
        recipe = case.artifact.recipe.id if case.artifact.recipe else ""
        return LoadPlan(
            case,
            self.name,
            "onnxruntime.InferenceSession",
            main_dtype(case.artifact),
            list(graph_files(case.artifact).values()),
            recipe,
        )

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Builds the adapter and, for graphs that are not large, sessions without optimisation."""
        case = plan.case
        _adapter(case)
        if case.artifact.size_bytes > DRY_BYTES:
            return passed(EvidenceLevel.INQUIRED)
        for rel in graph_files(case.artifact).values():
            try:
                open_session(case.file(rel), case.device)
            except Exception as error:  # the runtime's exceptions have no common base
                reason = kernels.refusal(error, rel)
                return failed(
                    EvidenceLevel.DRY_LOADED,
                    reason.code,
                    reason.message,
                    observed=reason.observed,
                    expected=reason.expected,
                    where=rel,
                )
        return passed(EvidenceLevel.DRY_LOADED)

    def load(self, plan: LoadPlan) -> Session:
        """Builds the sessions. Raises ``LoadError``; a provider other than the asked one is refused."""
        case, provider = plan.case, provider_of(plan.case.device)
        adapter = _adapter(case)
        graphs: dict[str, OnnxGraph] = {}
        for role, rel in graph_files(case.artifact).items():
            try:
                session = open_session(case.file(rel), case.device, optimise=True)
            except Exception as error:  # the runtime's exceptions have no common base
                reason = kernels.refusal(error, rel)
                raise LoadError(reason.message, code=reason.code) from None
            if session.get_providers()[0] != provider:
                raise LoadError(
                    f"asked for {provider}, the runtime chose {session.get_providers()[0]}",
                    code="device.silent_fallback",
                )
            graphs[role] = OnnxGraph(session, strict=case.task == Task.TENSOR)
        plan.recipe = getattr(adapter, "recipe", "") or plan.recipe
        return OnnxSession(plan, plan.dtype, graphs, adapter, BindingReport(loaded=len(case.artifact.tensors.tensors)))

    def executor(self, plan: LoadPlan, options: ExecutorOptions | Mapping[str, Any] | None = None) -> OnnxExecutor:
        """A decoder graph for the generation engine. Raises as ``open_executor`` does."""
        from turnout.backends.onnxruntime_executor import open_executor  # brings numpy; listing backends needs none

        return open_executor(plan, options)

    def vocabulary(self, plan: LoadPlan) -> TokenizerVocabulary:
        """The package's tokenizer. Raises ``InputError`` (``tokenizer.missing``, ``tokenizer.unsupported_kind``)."""
        return vocabulary_of(plan.case.root, plan.case.artifact, plan.case.options)

    def probe(self, session: Session) -> Evidence:
        """Smallest request of the task; a second run gives the latency."""
        assert isinstance(session, OnnxSession)
        case = session.plan.case
        if case.task in TEXT:
            return _probe_text(session)
        last = "none made"
        ports = case.artifact.graph.inputs if case.artifact.graph else []
        for request in probe_requests(case.task, case.artifact, ports, case.options):
            try:
                output = session.run(request)
            except InputError as error:
                last = error.message
                continue
            if not sound(output):
                return failed(EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", "the output holds NaN")
            started = time.perf_counter()
            session.run(request)
            return passed(EvidenceLevel.EXECUTED, measurements={"latency_s": time.perf_counter() - started})
        reason = Reason("graph.io_mismatch", f"no probe input fits the graph: {last}")
        return Evidence(EvidenceLevel.EXECUTED, Outcome.ERROR, [reason])


def _probe_text(session: OnnxSession) -> Evidence:
    task = session.plan.case.task
    inputs = {"messages": [{"role": "user", "content": "Hello"}]} if task == Task.CHAT else {"prompt": "Hello"}
    started = time.perf_counter()
    try:
        output = session.run(Request(task, inputs, Sampling(max_tokens=8)))
    except TurnoutError as error:
        return failed(EvidenceLevel.EXECUTED, error.code, error.message)
    spent = time.perf_counter() - started
    return passed(
        EvidenceLevel.EXECUTED,
        measurements={"latency_s": spent, "tokens_per_s": max(output.completion_tokens, 1) / spent},
    )
