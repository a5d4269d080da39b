"""ONNX Runtime: ONNX graphs on the CPU, or on another provider when it is asked for by name.

The runtime itself is asked: which IR versions and opsets it accepts (by tiny models), which operators
it has (schema registry), and whether it has a kernel for every node (a session without optimisation).
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
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
    Reason,
    Remedy,
    Requirement,
    Session,
    failed,
    met,
    passed,
    unmet,
)
from turnout.backends.graph_probe import probe_requests, sound
from turnout.backends.graph_text import GraphGenerator, default_input
from turnout.errors import InputError, LoadError, TurnoutError
from turnout.package.facts import Artifact, ArtifactKind, Graph
from turnout.tasks.adapter import adapter_for
from turnout.tasks.decoding import Seq2SeqGenerator
from turnout.types import Request, Sampling, Task

PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "dml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
}
SEQ2SEQ = frozenset({Task.TEXT2TEXT, Task.TRANSLATION, Task.SUMMARIZATION})
TEXT = frozenset({Task.TEXT_GENERATION, Task.CHAT})
# Up to this size a dry load builds a session; above, only what the file's header says is judged.
DRY_BYTES = 512 << 20
_NO_KERNEL = re.compile(r"Could not find an implementation for (\S+?)\((\d+)\) node with name '([^']*)'")
_NO_OP = re.compile(r"(\S+?)\(-?\d+\) is not a registered function/op")
_BAD_TYPE = re.compile(r"Type '([^']+)' of input parameter \([^)]*\) of operator \(([^)]+)\)")


# ---- asking the runtime ------------------------------------------------------------------------


def _runtime() -> Any:
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


def _accepts(ir: int, opset: int) -> bool:
    """Whether the runtime loads a model of one Identity node with these versions."""
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", ports[:1], ports[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=ir)
    try:
        _runtime().InferenceSession(model.SerializeToString(), _options(), providers=["CPUExecutionProvider"])
    except Exception:  # the runtime's exceptions have no common base
        return False
    return True


@cache
def newest_versions() -> tuple[int, int]:
    """Newest (IR version, opset) that the installed runtime loads, found by trying."""
    ir = 8
    while ir < 40 and _accepts(ir + 1, 13):
        ir += 1
    opset = 13
    while opset < 100 and _accepts(8, opset + 1):
        opset += 1
    return ir, opset


@cache
def known_operators() -> frozenset[str]:
    """``domain::Type`` of every operator that the runtime has a schema for."""
    _runtime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return frozenset(f"{'' if s.domain == 'ai.onnx' else s.domain}::{s.name}" for s in state.get_all_operator_schema())


def first_line(error: BaseException) -> str:
    """The runtime's message without its error class and source place."""
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return re.sub(r"^\[ONNXRuntimeError\] : \d+ : \w+ : ", "", text)[:300]


def refusal(error: BaseException, entry: str) -> Reason:
    """The runtime's refusal to build a session as a reason."""
    text = first_line(error)
    for pattern, code, tell in (
        (
            _NO_KERNEL,
            "operator.no_kernel",
            lambda m: (f"the runtime has no kernel for `{m[1]}` as this graph uses it", f"{m[1]}({m[2]})"),
        ),
        (_NO_OP, "operator.unknown_domain", lambda m: (f"the runtime knows no operator `{m[1]}`", m[1])),
        (_BAD_TYPE, "operator.type_unsupported", lambda m: (f"the operator `{m[2]}` takes no {m[1]}", m[1])),
    ):
        match = pattern.search(text)
        if match:
            message, observed = tell(match)
            return Reason(code, message, observed, "an operator with a kernel on this device", entry)
    if "opset" in text.lower() and "under development" in text:
        return Reason("operator.opset_too_new", text, where=entry)
    return Reason("runtime.failed", f"ONNX Runtime refuses the graph: {text}", where=entry)


# ---- sessions ----------------------------------------------------------------------------------


def _options(optimise: bool = False) -> Any:
    runtime = _runtime()
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    level = runtime.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    return options


def provider_of(device: str) -> str:
    """Execution provider that serves one of our devices."""
    return PROVIDERS.get(device.split(":")[0], device)


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
            if value is None:
                raise InputError(f"the graph's input `{port.name}` is not given", code="graph.io_mismatch")
            given[port.name] = to_port(value, port.type, port.name)
        names = [port.name for port in self.session.get_outputs()]
        try:
            values = self.session.run(None, given)
        except Exception as error:  # the runtime's exceptions have no common base
            raise InputError(
                f"ONNX Runtime cannot run this input: {first_line(error)}", code="runtime.failed"
            ) from None
        return dict(zip(names, values, strict=True))


NUMPY = {
    "float": "float32",
    "double": "float64",
    "bool": "bool",
    "string": "object",
    "float16": "float16",
    **{f"{u}int{b}": f"{u}int{b}" for u in ("", "u") for b in (8, 16, 32, 64)},
}


def to_port(value: Any, kind: str, name: str) -> Any:
    """``value`` in the element type of a port (``tensor(float)``); width may change, kind never."""
    import numpy as np

    array = np.asarray(value)
    wanted = NUMPY.get(kind.removeprefix("tensor(").removesuffix(")"))
    if wanted is None:
        raise InputError(f"input `{name}` has the type {kind}, which has no array form here", code="graph.io_mismatch")
    if array.dtype.kind == "f" and "int" in wanted:
        raise InputError(f"input `{name}` takes {wanted}, got {array.dtype}", code="graph.io_mismatch")
    return array if wanted == "object" else np.ascontiguousarray(array, dtype=wanted).reshape(array.shape)


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


def graph_files(artifact: Artifact) -> dict[str, str]:
    """Graphs by role (``model``, or ``encoder`` and ``decoder``), as paths below the root."""
    if artifact.kind is ArtifactKind.ONNX_SEQ2SEQ:
        return {c.role: c.path for c in artifact.components if c.role in ("encoder", "decoder")}
    return {"model": artifact.entry}


def main_dtype(artifact: Artifact) -> str:
    """Element type that holds most of the weights' bytes."""
    sizes: dict[str, int] = {}
    for tensor in artifact.tensors.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda d: sizes[d]) if sizes else "float32"


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
            Task.EMBEDDINGS,
            Task.RERANK,
            Task.TEXT_CLASSIFICATION,
            Task.TOKEN_CLASSIFICATION,
            Task.FILL_MASK,
            Task.IMAGE_CLASSIFICATION,
            Task.VAD,
            Task.TABULAR_CLASSIFICATION,
            Task.TABULAR_REGRESSION,
            *SEQ2SEQ,
            *TEXT,
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
        available = _runtime().get_available_providers()
        return [device for device, provider in PROVIDERS.items() if provider in available]

    def requirements(self, case: Case) -> list[Requirement]:
        """IR version, opsets, operators with a schema, and the option ``dtype``."""
        found: list[Requirement] = []
        for rel, graph in _graphs(case.artifact):
            found += _versions(graph, rel)
            found += _operators(graph, rel)
        if case.options.get("dtype") not in (None, main_dtype(case.artifact)):
            found.append(
                unmet(
                    Kind.OPTION,
                    "option.unsupported",
                    "a graph computes in the types it was stored with",
                    observed=str(case.options["dtype"]),
                    expected=main_dtype(case.artifact),
                )
            )
        if case.artifact.kind is ArtifactKind.ONNX_SEQ2SEQ and len(graph_files(case.artifact)) < 2:
            found.append(
                unmet(
                    Kind.COMPONENT,
                    "component.missing",
                    "the pair lacks its encoder or decoder",
                    where=case.artifact.entry,
                )
            )
        return found

    def inquire(self, case: Case) -> list[Evidence]:
        """``requirements`` has put every question that needs no weights."""
        return [passed(EvidenceLevel.INQUIRED)]

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
        """Builds the adapter and, for graphs that are not large, sessions without optimisation, which
        match every node to a kernel."""
        case = plan.case
        _adapter(case)
        if case.artifact.size_bytes > DRY_BYTES:
            return passed(EvidenceLevel.INQUIRED)
        for rel in graph_files(case.artifact).values():
            try:
                _runtime().InferenceSession(case.file(rel), _options(), providers=[provider_of(case.device)])
            except Exception as error:  # the runtime's exceptions have no common base
                reason = refusal(error, rel)
                return failed(
                    EvidenceLevel.DRY_LOADED,
                    reason.code,
                    reason.message,
                    observed=reason.observed,
                    expected=reason.expected,
                    where=rel,
                )
        return passed(EvidenceLevel.DRY_LOADED, log="; ".join(_notes(case)))

    def load(self, plan: LoadPlan) -> Session:
        """Builds the sessions. Raises ``LoadError``; a provider other than the asked one is refused."""
        case, provider = plan.case, provider_of(plan.case.device)
        adapter = _adapter(case)
        graphs: dict[str, OnnxGraph] = {}
        for role, rel in graph_files(case.artifact).items():
            try:
                session = _runtime().InferenceSession(case.file(rel), _options(optimise=True), providers=[provider])
            except Exception as error:  # the runtime's exceptions have no common base
                reason = refusal(error, rel)
                raise LoadError(reason.message, code=reason.code) from None
            if session.get_providers()[0] != provider:
                raise LoadError(
                    f"asked for {provider}, the runtime chose {session.get_providers()[0]}",
                    code="device.silent_fallback",
                )
            graphs[role] = OnnxGraph(session, strict=case.task == Task.TENSOR)
        plan.recipe = getattr(adapter, "recipe", "") or plan.recipe
        return OnnxSession(plan, plan.dtype, graphs, adapter, BindingReport(loaded=len(case.artifact.tensors.tensors)))

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


def _graphs(artifact: Artifact) -> list[tuple[str, Graph]]:
    if artifact.graph is not None:
        return [(artifact.entry, artifact.graph)]
    files = graph_files(artifact)
    facts = {role: artifact.facts[f"{role}_graph"].value for role in files if f"{role}_graph" in artifact.facts}
    return [(files[role], graph) for role, graph in facts.items() if graph is not None]


def _versions(graph: Graph, rel: str) -> list[Requirement]:
    ir, opset = newest_versions()
    upgrade = [
        Remedy(Action.SELECT_ARTIFACT, "export the model again with an older version"),
        Remedy(Action.SELECT_ARTIFACT, "look for a newer onnxruntime"),
    ]
    found: list[Requirement] = []
    if graph.ir_version is not None and graph.ir_version > ir:
        found.append(
            unmet(
                Kind.OPERATOR,
                "operator.ir_too_new",
                f"the file has IR version {graph.ir_version}, this runtime reads up to {ir}",
                observed=str(graph.ir_version),
                expected=f"at most {ir}",
                where=rel,
                remedies=upgrade,
            )
        )
    if graph.opsets.get("", 0) > opset:
        found.append(
            unmet(
                Kind.OPERATOR,
                "operator.opset_too_new",
                f"the graph uses opset {graph.opsets['']}, this runtime knows up to {opset}",
                observed=str(graph.opsets[""]),
                expected=f"at most {opset}",
                where=rel,
                remedies=upgrade,
            )
        )
    return found or [met("operator.versions", Kind.OPERATOR, rel)]


def _operators(graph: Graph, rel: str) -> list[Requirement]:
    known = known_operators()
    own = set(graph.functions)
    found: list[Requirement] = []
    for op in graph.ops:
        if op in known or op in own:
            continue
        domain, _, name = op.partition("::")
        code = "operator.unknown_domain" if domain else "operator.no_kernel"
        shown = f"{domain}.{name}" if domain else name
        found.append(
            unmet(
                Kind.OPERATOR,
                code,
                f"the runtime knows no operator `{shown}`",
                observed=shown,
                expected="an operator of its registry",
                where=rel,
            )
        )
    return found or [met("operator.known", Kind.OPERATOR, rel)]


def _notes(case: Case) -> list[str]:
    """What a user should know of a supported case."""
    notes = []
    cached = case.artifact.facts.get("kv_cache")
    if case.task in TEXT and cached is not None and not cached.value:
        notes.append("the graph keeps no cache: every token computes the whole sequence again")
    if any(t.dtype == "float16" for t in case.artifact.tensors.tensors.values()) and case.device == "cpu":
        notes.append("float16 operators without a CPU kernel run in float32 between inserted casts")
    return notes
