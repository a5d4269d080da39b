"""OpenVINO: IR, ONNX, TFLite and TensorFlow SavedModel graphs on CPU, GPU or NPU.

Every question is put to the library: ``read_model`` names the operators it cannot convert,
``query_model`` those that the device cannot run. Computation is float32 unless the option ``dtype``
says otherwise, because the library's own default on CPUs with AMX is bfloat16.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator
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
from turnout.backends.graph_text import default_input
from turnout.backends.openvino_reading import (
    first_line,
    graph_files,
    no_kernel,
    paths_of,
    read_failures,
    version_requirements,
)
from turnout.errors import InputError, LoadError, TurnoutError
from turnout.package.facts import ArtifactKind, Graph, GraphPort
from turnout.tasks.adapter import adapter_for
from turnout.tasks.decoding import Seq2SeqGenerator
from turnout.types import Request, Task

DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
CAPABILITIES = {"float32": "FP32", "bfloat16": "BF16", "float16": "FP16"}
# Up to this size a dry load also compiles: some graphs are read and still cannot be compiled.
COMPILE_BYTES = 64 << 20
SEQ2SEQ = frozenset({Task.TEXT2TEXT, Task.TRANSLATION, Task.SUMMARIZATION})
TASKS = frozenset(
    {
        Task.TENSOR,
        Task.EMBEDDINGS,
        Task.RERANK,
        Task.TEXT_CLASSIFICATION,
        Task.TOKEN_CLASSIFICATION,
        Task.FILL_MASK,
        Task.TEXT2TEXT,
        Task.TRANSLATION,
        Task.SUMMARIZATION,
        Task.IMAGE_CLASSIFICATION,
        Task.VAD,
        Task.TABULAR_CLASSIFICATION,
        Task.TABULAR_REGRESSION,
    }
)


# ---- the library -----------------------------------------------------------------------


@cache
def core() -> Any:
    """The process's ``openvino.Core``."""
    import openvino

    return openvino.Core()


def device_names(reported: Iterable[str]) -> list[str]:
    """Our names (``cpu``, ``gpu:1``) of devices as OpenVINO reports them (``CPU``, ``GPU.1``)."""
    return [name.lower().replace(".", ":") for name in reported]


def library_device(device: str) -> str:
    """OpenVINO's name of one of our devices."""
    return device.upper().replace(":", ".")


def compute_properties(dtype: str, device: str = "cpu") -> dict[str, Any]:
    """Properties that make the library compute in ``dtype`` and nothing narrower.

    The group size 0 switches off the 8-bit activations that the CPU otherwise uses for matrices
    with compressed weights (measured: logits off by 1 % of their scale).
    """
    properties: dict[str, Any] = {"INFERENCE_PRECISION_HINT": DTYPES[dtype]}
    if device.startswith("cpu"):
        properties["INFERENCE_NUM_THREADS"] = len(os.sched_getaffinity(0))
        if dtype == "float32":
            properties["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
    return properties


def dtype_of(case: Case) -> str:
    """Element type to compute in: the option's, else float32."""
    return str(case.options.get("dtype") or "float32")


def dtype_requirement(case: Case, capabilities: Callable[[], Iterable[str]]) -> Requirement:
    """Whether the device computes in the asked element type."""
    dtype = dtype_of(case)
    if dtype not in DTYPES:
        return unmet(
            Kind.OPTION,
            "option.unsupported",
            f"`dtype={dtype}` is not an element type to compute in",
            observed=dtype,
            expected=", ".join(DTYPES),
        )
    able = list(capabilities())
    if able and CAPABILITIES[dtype] not in able:
        return unmet(
            Kind.DTYPE,
            "tensor.dtype_unsupported",
            f"the device `{case.device}` does not compute in {dtype}",
            observed=", ".join(able),
            expected=CAPABILITIES[dtype],
        )
    return met("dtype", Kind.DTYPE, dtype)


def capabilities_of(device: str) -> list[str]:
    """What the device says it computes in; empty when the device is not there."""
    if device not in device_names(core().available_devices):
        return []
    return list(core().get_property(library_device(device), "OPTIMIZATION_CAPABILITIES"))


def installed(distribution: str, module: str) -> str:
    """Version of an installed distribution, '' when it or its module is absent."""
    try:
        return version(distribution) if find_spec(module) is not None else ""
    except PackageNotFoundError:
        return ""


# ---- arrays ----------------------------------------------------------------------------


def to_port(value: Any, element: Any, shape: Any, name: str) -> Any:
    """``value`` as an OpenVINO tensor of the port's element type, width changed but never kind.

    NumPy has no bfloat16: it is made from float32 by rounding to the nearest even. Raises
    ``InputError`` when floats would become integers or the shape does not fit.
    """
    import numpy as np
    import openvino

    array = np.asarray(value)
    if not _fits(array.shape, shape):
        raise InputError(
            f"input `{name}` has the shape {list(array.shape)}, the graph takes {shape}", code="graph.io_mismatch"
        )
    if element == openvino.Type.string:
        return openvino.Tensor(np.asarray(array, dtype=np.str_))
    if element == openvino.Type.bf16:
        tensor = openvino.Tensor(openvino.Type.bf16, openvino.Shape(list(array.shape)))
        bits = np.ascontiguousarray(array, dtype=np.float32).view(np.uint32)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tensor.data.view(np.uint16)[...] = rounded.astype(np.uint16)
        return tensor
    wanted = np.dtype(element.to_dtype())
    if array.dtype.kind == "f" and wanted.kind in "iu":
        raise InputError(f"input `{name}` takes {wanted}, got {array.dtype}", code="graph.io_mismatch")
    if wanted.itemsize == 8 and wanted.kind in "iu" and array.size and not _narrow(array):
        # Measured: 2**40 + 3 went in and 3 came out.
        raise InputError(
            f"input `{name}` holds integers beyond 32 bits, in which OpenVINO computes", code="tensor.dtype_unsupported"
        )
    return openvino.Tensor(np.ascontiguousarray(array, dtype=wanted).reshape(array.shape))


def _narrow(array: Any) -> bool:
    return bool(array.max() < 1 << 31 and array.min() >= -(1 << 31))


def _fits(given: tuple[int, ...], shape: Any) -> bool:
    if shape.rank.is_dynamic:
        return True
    return len(given) == len(shape) and all(
        dim.is_dynamic or dim.get_length() == size for dim, size in zip(shape, given, strict=True)
    )


def from_port(tensor: Any) -> Any:
    """A NumPy copy of an output; bfloat16 widened to float32, strings as an object array."""
    import numpy as np

    element = tensor.element_type.get_type_name()
    if element == "string":
        return np.array(tensor.str_data, dtype=object)
    if element == "bf16":
        return (tensor.data.view(np.uint16).astype(np.uint32) << 16).view(np.float32).reshape(tuple(tensor.shape))
    return np.array(tensor.data, copy=True)


def graph_ports(ports: Iterable[Any], graph: Graph | None = None) -> list[GraphPort]:
    """Inputs of a compiled graph as facts; a dimension is a number or None. Of several names of a
    port (a fused cast leaves two), the one that the stored graph states counts."""
    stated = {port.name for port in graph.inputs} if graph else set()
    found = []
    for port in ports:
        shape = port.get_partial_shape()
        dims = None if shape.rank.is_dynamic else [d.get_length() if d.is_static else None for d in shape]
        names = sorted(port.get_names(), key=lambda n: (n not in stated, n))
        name = next(iter(names), port.get_node().get_friendly_name())
        found.append(GraphPort(name, port.get_element_type().get_type_name(), dims))
    return found


@dataclass(slots=True)
class CompiledGraph:
    """One compiled graph: named arrays in, named arrays out. State is reset before every call."""

    request: Any
    inputs: list[Any]
    outputs: list[tuple[str, Any]]
    strict: bool = False  # raw tensors: nothing is filled in

    def infer(self, feeds: dict[str, Any]) -> dict[str, Any]:
        """Outputs by name. Inputs the graph lacks are left out; raises ``InputError`` for missing ones."""
        for port in self.inputs:
            names = port.get_names()
            name = next((n for n in names if n in feeds), None)
            value = feeds[name] if name is not None else self._absent(names, feeds)
            shown = name or next(iter(sorted(names)), port.get_node().get_friendly_name())
            if value is None:
                raise InputError(f"the graph's input `{shown}` is not given", code="graph.io_mismatch")
            self.request.set_tensor(port, to_port(value, port.get_element_type(), port.get_partial_shape(), shown))
        self.request.reset_state()
        try:
            self.request.infer()
        except RuntimeError as error:
            raise InputError(f"OpenVINO cannot run this input: {first_line(error)}", code="runtime.failed") from error
        return {name: from_port(self.request.get_tensor(port)) for name, port in self.outputs}

    def _absent(self, names: Iterable[str], feeds: dict[str, Any]) -> Any | None:
        if self.strict:
            return None
        return next((value for value in (default_input(n, feeds) for n in names) if value is not None), None)


def compile_graph(
    path: str, device: str, dtype: str, graph: Graph | None = None, strict: bool = False
) -> CompiledGraph:
    """Reads and compiles one graph. Raises what the library raises."""
    compiled = core().compile_model(core().read_model(path), library_device(device), compute_properties(dtype, device))
    stated = [port.name for port in graph.outputs] if graph else []
    outputs = []
    for index, port in enumerate(compiled.outputs):
        names = port.get_names()
        known = next((name for name in stated if name in names), None)
        outputs.append((known or next(iter(sorted(names)), f"output_{index}"), port))
    return CompiledGraph(compiled.create_infer_request(), list(compiled.inputs), outputs, strict)


# ---- session ---------------------------------------------------------------------------


@dataclass(slots=True)
class OpenVINOSession:
    """Compiled graphs behind the adapter of one task."""

    plan: LoadPlan
    dtype: str
    graphs: dict[str, CompiledGraph]
    adapter: Any
    binding: BindingReport = field(default_factory=BindingReport)

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> Any:
        """Output of one request. Raises ``InputError`` for input that does not fit the graph."""
        if not self.graphs:
            raise LoadError("the session is closed")
        if "encoder" in self.graphs:
            return self.adapter.generate(request, self.graphs["encoder"].infer, self.graphs["decoder"].infer, emit)
        return self.adapter.run(request, self.graphs["model"].infer)

    def close(self) -> None:
        """Drops the compiled graphs; may be called twice."""
        self.graphs = {}


def _wide_floats(case: Case, model: Any, entry: str) -> list[Requirement]:
    """Graphs in float64 are computed in float32 (measured: 1e300 comes out as 3.4e38), so it is asked first."""
    ports = [p for p in (*model.inputs, *model.outputs) if p.get_element_type().get_type_name() == "f64"]
    if not ports or case.options.get("dtype"):
        return []
    remedy = Remedy(
        Action.SET_OPTION,
        "accept float32 with `--option dtype=float32`",
        ["--option", "dtype=float32"],
        changes_numerics=True,
    )
    return [
        unmet(
            Kind.DTYPE,
            "tensor.dtype_unsupported",
            "the graph is in float64, which OpenVINO computes in float32",
            observed="float64",
            expected="float32 or narrower",
            where=entry,
            remedies=[remedy],
        )
    ]


def _adapter(case: Case) -> Any:
    if case.artifact.kind is ArtifactKind.ONNX_SEQ2SEQ and case.task in SEQ2SEQ:
        return Seq2SeqGenerator(case.root, case.artifact, case.options)
    return adapter_for(case.root, case.artifact, case.task, case.options)


class OpenVINOBackend:
    """Graphs on OpenVINO's own runtime."""

    name = "openvino"
    reads = frozenset(
        {
            ArtifactKind.OPENVINO_IR,
            ArtifactKind.ONNX,
            ArtifactKind.ONNX_SEQ2SEQ,
            ArtifactKind.TFLITE,
            ArtifactKind.TF_SAVED_MODEL,
        }
    )
    tasks: frozenset[str] = TASKS

    def describe(self) -> BackendBuild:
        """Version from the installed distribution; nothing is imported."""
        found = installed("openvino", "openvino")
        build = BackendBuild("openvino", found, {"openvino": found} if found else {}, extra="openvino")
        if not found:
            build.unavailable, build.missing = "the package `openvino` is not here", ["openvino"]
        return build

    def devices(self) -> list[str]:
        """Devices with a plugin that can be used here."""
        return device_names(core().available_devices)

    def requirements(self, case: Case) -> list[Requirement]:
        """Versions, operators by reading the graph, operators by asking the device, element type."""
        found = version_requirements(case.artifact)
        found.append(dtype_requirement(case, lambda: capabilities_of(case.device)))
        files = graph_files(case.artifact)
        if case.artifact.kind is ArtifactKind.ONNX_SEQ2SEQ and set(files) != {"encoder", "decoder"}:
            lacking = ", ".join(sorted({"encoder", "decoder"} - set(files)))
            found.append(unmet(Kind.COMPONENT, "component.missing", f"the pair lacks its {lacking}", expected=lacking))
        try:
            paths = paths_of(case)
        except TurnoutError as error:
            return [*found, unmet(Kind.INTEGRITY, error.code, error.message, where=case.artifact.entry)]
        for role, path in paths.items():
            found += self._asked(case, path, files[role])
        return found

    def _asked(self, case: Case, path: str, entry: str) -> list[Requirement]:
        try:
            model = core().read_model(path)
        except Exception as error:  # the library raises RuntimeError and others
            return read_failures(error, case.artifact.graph, entry)
        found = [met("operators.converted", Kind.OPERATOR, entry), *_wide_floats(case, model, entry)]
        if case.device not in self.devices():
            return found  # common requirements name the missing device
        placed = core().query_model(model, library_device(case.device))
        lacking = sorted({op.get_type_name() for op in model.get_ops() if op.get_friendly_name() not in placed})
        return found + [no_kernel(op, f"cannot run it on `{case.device}`", entry) for op in lacking]

    def inquire(self, case: Case) -> list[Evidence]:
        """``requirements`` has put every question there is."""
        return [passed(EvidenceLevel.INQUIRED)]

    def plan(self, case: Case) -> LoadPlan:
        """One compiled graph, or two for an encoder and a decoder."""
        files = list(graph_files(case.artifact).values())
        recipe = case.artifact.recipe.id if case.artifact.recipe else ""
        return LoadPlan(case, self.name, "openvino.CompiledModel", dtype_of(case), files, recipe)

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Builds the task's adapter, and compiles graphs that are small."""
        case = plan.case
        _adapter(case)
        if case.artifact.size_bytes > COMPILE_BYTES:
            return passed(EvidenceLevel.DRY_LOADED)
        try:
            for path in paths_of(case).values():
                compile_graph(path, case.device, plan.dtype)
        except RuntimeError as error:
            return failed(
                EvidenceLevel.DRY_LOADED, "runtime.failed", f"OpenVINO cannot compile it: {first_line(error)}"
            )
        return passed(EvidenceLevel.DRY_LOADED)

    def load(self, plan: LoadPlan) -> Session:
        """Compiles the graphs. Raises ``LoadError`` and keeps nothing when one of them fails."""
        case = plan.case
        adapter = _adapter(case)
        strict = case.task == Task.TENSOR
        graphs: dict[str, CompiledGraph] = {}
        for role, path in paths_of(case).items():
            graph = case.artifact.graph if role == "model" else None
            try:
                graphs[role] = compile_graph(path, case.device, plan.dtype, graph, strict)
            except Exception as error:  # the library raises RuntimeError and others
                reason = read_failures(error, graph, graph_files(case.artifact)[role])[0].reason
                code, message = (reason.code, reason.message) if reason else ("runtime.failed", first_line(error))
                raise LoadError(message, code=code) from error
        plan.recipe = getattr(adapter, "recipe", plan.recipe)
        loaded = len(case.artifact.tensors.tensors)
        return OpenVINOSession(plan, plan.dtype, graphs, adapter, BindingReport(loaded=loaded))

    def _probes(self, session: OpenVINOSession) -> Iterator[Request]:
        case, graph = session.plan.case, session.graphs.get("model")
        ports = graph_ports(graph.inputs, case.artifact.graph) if graph else []
        return probe_requests(case.task, case.artifact, ports, case.options)

    def probe(self, session: Session) -> Evidence:
        """Smallest request of the task; a second run gives the latency."""
        assert isinstance(session, OpenVINOSession)
        last: TurnoutError | None = None
        for request in self._probes(session):
            try:
                output = session.run(request)
            except InputError as error:
                last = error
                continue
            if not sound(output):
                return failed(EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", "the output holds NaN")
            started = time.perf_counter()
            session.run(request)
            return passed(EvidenceLevel.EXECUTED, measurements={"latency_s": time.perf_counter() - started})
        reason = Reason("graph.io_mismatch", f"no probe input fits the graph: {last.message if last else 'none made'}")
        return Evidence(EvidenceLevel.EXECUTED, Outcome.ERROR, [reason])
