"""What ONNX Runtime answers when it is asked about a graph: versions, operators, kernels, types.

No table of ours: versions are tried with models of one node, operators are looked up in the runtime's
schema registry, and kernels are asked for with the graph's *skeleton*, the graph with its large weights
turned into inputs. The runtime matches every node of a skeleton to a kernel and reads no weight, so a
graph of any size costs what its structure costs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from turnout.backends.base import Reason

CPU = "CPUExecutionProvider"
PROVIDERS = {
    "cpu": "CPUExecutionProvider",
    "cuda": "CUDAExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
    "dml": "DmlExecutionProvider",
    "coreml": "CoreMLExecutionProvider",
}
# Weights above this stay out of a skeleton; smaller ones may be shapes, axes or scales that must be constant.
SKELETON_BYTES = 1024


def runtime() -> Any:
    """The library, with its own log silenced: what it refuses is told as a reason."""
    import onnxruntime

    onnxruntime.set_default_logger_severity(4)
    return onnxruntime


def session_options(optimise: bool = False) -> Any:
    """Options of a session; without optimisation every node keeps its own kernel."""
    import os

    library = runtime()
    options = library.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = len(os.sched_getaffinity(0))
    level = library.GraphOptimizationLevel
    options.graph_optimization_level = level.ORT_ENABLE_ALL if optimise else level.ORT_DISABLE_ALL
    return options


def provider_of(device: str) -> str:
    """Execution provider that serves one of our devices."""
    return PROVIDERS.get(device.split(":")[0], device)


def open_session(path: str, device: str, optimise: bool = False) -> Any:
    """The runtime's session over one graph of the case. Raises what the runtime raises."""
    return runtime().InferenceSession(path, session_options(optimise), providers=[provider_of(device)])


# ---- versions ----------------------------------------------------------------------------------


@cache
def accepts(ir: int, domain: str, version: int) -> bool:
    """Whether the runtime loads a model of one Identity node with this IR version and import."""
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", ports[:1], ports[1:])
    imports = {"": 13, domain: version}
    opsets = [helper.make_opsetid(name, number) for name, number in imports.items()]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir)
    return _refused(model, CPU) is None


@cache
def newest_ir() -> int:
    """Newest IR version that the installed runtime loads, found by trying."""
    ir = 8
    while ir < 64 and accepts(ir + 1, "", 13):
        ir += 1
    return ir


@cache
def newest_opset(domain: str = "") -> int:
    """Newest version of a domain that the installed runtime loads, found by trying."""
    version = 1
    while version < 128 and accepts(8, domain, version + 1):
        version += 1
    return version


@cache
def known_operators() -> frozenset[str]:
    """``domain::Type`` of every operator that the runtime has a schema for."""
    runtime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return frozenset(f"{'' if s.domain == 'ai.onnx' else s.domain}::{s.name}" for s in state.get_all_operator_schema())


@cache
def known_domains() -> frozenset[str]:
    """Domains that the runtime has any operator of."""
    return frozenset(op.split("::", 1)[0] for op in known_operators())


# ---- refusals in words -------------------------------------------------------------------------

_ERROR = re.compile(r"^\[ONNXRuntimeError\] : \d+ : (\w+) : ")
_NO_KERNEL = re.compile(r"Could not find an implementation for (\S+?)\((\d+)\) node with name '([^']*)'")
_NO_OP = re.compile(r"(\S+?)\(-?\d+\) is not a registered function/op")
_NOT_IN_OPSET = re.compile(r"No Op registered for (\S+) with domain_version of (\d+)")
_DEPRECATED = re.compile(r"Op registered for (\S+) is deprecated in domain_version of (\d+)")
_NO_IMPORT = re.compile(r"No opset import for domain '([^']*)'")
_BAD_TYPE = re.compile(
    r"Type '([^']+)' of (?:input|output) (?:parameter|arg) \([^)]*\) of (?:operator|node) \(([^)]+)\)"
)
_INVALID = frozenset({"INVALID_GRAPH", "INVALID_PROTOBUF"})


def first_line(error: BaseException) -> str:
    """The runtime's message without its error class and source place."""
    lines = str(error).strip().splitlines()
    text = _ERROR.sub("", lines[0]) if lines else type(error).__name__
    return re.sub(r"^/\S+?:\d+ .*?\) (?=[A-Z])", "", text)[:300]


def refusal(error: BaseException, where: str) -> Reason:
    """The runtime's refusal to build a session as a reason with its code."""
    text = first_line(error)
    kernel, op = _NO_KERNEL.search(text), _NO_OP.search(text)
    if kernel:
        message = f"the runtime has no kernel for `{kernel[1]}` as this graph uses it"
        return Reason("operator.no_kernel", message, f"{kernel[1]}({kernel[2]})", "a kernel on this device", where)
    if op:
        message = f"the runtime knows no operator `{op[1]}`"
        return Reason("operator.unknown_domain", message, op[1], "an operator of its registry", where)
    for pattern, tell in ((_NOT_IN_OPSET, "is not in"), (_DEPRECATED, "is gone from")):
        match = pattern.search(text)
        if match:
            message = f"the operator `{match[1]}` {tell} opset {match[2]}, which the graph imports"
            return Reason("operator.no_kernel", message, f"opset {match[2]}", f"an opset with `{match[1]}`", where)
    match = _BAD_TYPE.search(text)
    if match:
        message = f"the operator `{match[2]}` takes no {match[1]}"
        return Reason("operator.type_unsupported", message, match[1], f"a type of `{match[2]}`", where)
    match = _NO_IMPORT.search(text)
    if match:
        message = f"the graph uses the domain `{match[1]}` without importing it"
        return Reason("artifact.corrupt", message, match[1], "an opset import", where)
    if "under development" in text and "opset" in text.lower():
        return Reason("operator.opset_too_new", text, where=where)
    kind = _ERROR.match(str(error).strip())
    if kind and kind[1] in _INVALID:
        return Reason("artifact.corrupt", f"ONNX Runtime calls the graph invalid: {text}", where=where)
    return Reason("runtime.failed", f"ONNX Runtime refuses the graph: {text}", where=where)


def _refused(model: Any, provider: str) -> Exception | None:
    """The error of a session over a ModelProto, None when it stands."""
    try:
        runtime().InferenceSession(model.SerializeToString(), session_options(), providers=[provider])
    except Exception as error:  # the runtime's exceptions have no common base
        return error
    return None


# ---- skeletons ---------------------------------------------------------------------------------


def skeleton(path: str) -> Any:
    """ModelProto of a graph without its large and external weights, which become inputs.

    Raises what ``onnx`` raises for a file that is no model.
    """
    import onnx

    model = onnx.load(path, load_external_data=False)
    _strip(model.graph, model.graph)
    return model


def _strip(graph: Any, top: Any) -> None:
    """Moves weights from ``graph`` and its subgraphs to the inputs of ``top``."""
    from onnx import TensorProto, helper

    inputs = {port.name for port in top.input}
    kept = []
    for tensor in graph.initializer:
        external = tensor.data_location == TensorProto.EXTERNAL
        if not external and tensor.ByteSize() <= SKELETON_BYTES:
            kept.append(tensor)
        elif tensor.name not in inputs:  # IR 3 lists weights as inputs too
            top.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, list(tensor.dims)))
            inputs.add(tensor.name)
    if len(kept) < len(graph.initializer):
        small = [type(t).FromString(t.SerializeToString()) for t in kept]
        del graph.initializer[:]
        graph.initializer.extend(small)
    for inner in _subgraphs(graph):
        _strip(inner, top)


def _subgraphs(graph: Any) -> Iterator[Any]:
    for node in graph.node:
        for attribute in node.attribute:
            if attribute.HasField("g"):
                yield attribute.g
            yield from attribute.graphs


@dataclass(frozen=True, slots=True)
class Use:
    """One way a graph uses an operator: element types of its inputs and outputs, '' where absent."""

    op: str  # domain::Type
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]

    def types(self) -> str:
        """Names of the input types, each once."""
        from onnx import TensorProto

        names = {TensorProto.DataType.Name(t).lower() for t in self.inputs if t}
        return ", ".join(sorted(names)) or "no known type"


def missing_kernels(path: str, where: str, provider: str = CPU) -> list[Reason]:
    """Why the runtime cannot build the graph's skeleton: every operator that it refuses, by name and
    types, else its one refusal of the whole. Empty when it can."""
    model = skeleton(path)
    error = _refused(model, provider)
    if error is None:
        return []
    found: dict[tuple[str, str], Reason] = {}
    for use, node in _uses(model).items():
        refused = _ask_alone(model, use, node, provider)
        if refused is not None:
            reason = _of_use(use, refused, where)
            found[reason.code, reason.message] = reason
    return list(found.values()) or [refusal(error, where)]


def _of_use(use: Use, error: Exception, where: str) -> Reason:
    reason = refusal(error, where)
    if reason.code != "operator.no_kernel" or not _NO_KERNEL.search(str(error)):
        return reason
    name = use.op.removeprefix("::").replace("::", ".")
    inner = "" if reason.observed.startswith(f"{name}(") else f": it is computed by {reason.observed}"
    message = f"the runtime has no kernel for `{name}` of {use.types()}{inner}"
    return Reason(reason.code, message, f"{reason.observed} of {use.types()}", reason.expected, where)


def _uses(model: Any) -> dict[Use, Any]:
    """Distinct uses of operators in the graph and its subgraphs, with one node of each.

    Types come from ONNX's inference; a node with an input of unknown type is left out.
    """
    from onnx import shape_inference

    try:
        model = shape_inference.infer_shapes(model, strict_mode=False)
    except Exception:  # the checker's exceptions have no common base; without types nothing is asked
        return {}
    found: dict[Use, Any] = {}
    _walk(model.graph, {}, found)
    return found


def _walk(graph: Any, outer: dict[str, int], found: dict[Use, Any]) -> None:
    types = dict(outer)
    for port in (*graph.input, *graph.value_info, *graph.output):
        types[port.name] = port.type.tensor_type.elem_type
    types |= {tensor.name: tensor.data_type for tensor in graph.initializer}
    for node in graph.node:
        inputs = tuple(types.get(name, 0) for name in node.input)
        outputs = tuple(types.get(name, 0) for name in node.output)
        known = all(kind for name, kind in zip(node.input, inputs, strict=True) if name)
        if known and not any(a.HasField("g") or a.graphs for a in node.attribute):
            domain = "" if node.domain == "ai.onnx" else node.domain
            found.setdefault(Use(f"{domain}::{node.op_type}", inputs, outputs), node)
    for inner in _subgraphs(graph):
        _walk(inner, types, found)


def _ask_alone(model: Any, use: Use, node: Any, provider: str) -> Exception | None:
    """The runtime's refusal of a model of this node alone, its inputs of the same types."""
    from onnx import helper

    if f"{node.domain}::{node.op_type}" in {f"{f.domain}::{f.name}" for f in model.functions}:
        return None
    types = {name: kind for name, kind in zip(node.input, use.inputs, strict=True) if name}
    constants = [t for t in model.graph.initializer if t.name in types]
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in types.items()]
    outputs = [
        helper.make_tensor_value_info(name, kind, None) if kind else helper.make_empty_tensor_value_info(name)
        for name, kind in zip(node.output, use.outputs, strict=True)
        if name
    ]
    graph = helper.make_graph([node], "g", inputs, outputs, constants)
    alone = helper.make_model(graph, opset_imports=list(model.opset_import), ir_version=model.ir_version)
    error = _refused(alone, provider)
    # An invalid graph may be the fault of the cutting out; only what names the operator counts.
    if error is None or refusal(error, "").code in ("artifact.corrupt", "runtime.failed"):
        return None
    return error


# ---- casts that the runtime inserts ------------------------------------------------------------


def cast_operators(path: str) -> list[str]:
    """Operators of the graph that have float16 inputs but no float16 kernel on the CPU: the runtime
    computes them in float32 between inserted casts."""
    from onnx import TensorProto

    table = _half_kernels()
    names = set()
    for use in _uses(skeleton(path)):
        if TensorProto.FLOAT16 in use.inputs and use.op in known_operators() and use.op not in table:
            names.add(use.op.removeprefix("::"))
    return sorted(names)


@cache
def _half_kernels() -> frozenset[str]:
    """Operators that have a CPU kernel which takes float16 somewhere."""
    runtime()
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    return frozenset(
        f"{'' if kernel.domain == 'ai.onnx' else kernel.domain}::{kernel.op_name}"
        for kernel in state.get_all_opkernel_def()
        if kernel.provider == CPU and any("tensor(float16)" in types for types in kernel.type_constraints.values())
    )
