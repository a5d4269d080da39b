"""ONNX ModelProto as facts: versions, operators, ports, initializers; tensor bytes are never copied.

Field numbers: https://github.com/onnx/onnx/blob/main/onnx/onnx.proto
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from turnout.config import READ
from turnout.package.facts import Graph, GraphPort
from turnout.package.formats.protobuf import BYTES, VARINT, WireError, fields, packed, signed, text

DTYPES = {
    1: "float32",
    2: "uint8",
    3: "int8",
    4: "uint16",
    5: "int16",
    6: "int32",
    7: "int64",
    8: "string",
    9: "bool",
    10: "float16",
    11: "float64",
    12: "uint32",
    13: "uint64",
    14: "complex64",
    15: "complex128",
    16: "bfloat16",
    17: "float8_e4m3fn",
    18: "float8_e4m3fnuz",
    19: "float8_e5m2",
    20: "float8_e5m2fnuz",
    21: "uint4",
    22: "int4",
    23: "float4_e2m1",
    24: "float8_e8m0",
    25: "uint2",
    26: "int2",
}
BITS = {
    "float32": 32,
    "uint8": 8,
    "int8": 8,
    "uint16": 16,
    "int16": 16,
    "int32": 32,
    "int64": 64,
    "bool": 8,
    "float16": 16,
    "float64": 64,
    "uint32": 32,
    "uint64": 64,
    "complex64": 64,
    "complex128": 128,
    "bfloat16": 16,
    "float8_e4m3fn": 8,
    "float8_e4m3fnuz": 8,
    "float8_e5m2": 8,
    "float8_e5m2fnuz": 8,
    "uint4": 4,
    "int4": 4,
    "float4_e2m1": 4,
    "float8_e8m0": 8,
    "uint2": 2,
    "int2": 2,
}
MAX_DEPTH, MAX_NODES = 32, 2_000_000


@dataclass(slots=True)
class Initializer:
    """One stored weight. ``external`` holds location, offset, length where the data lies in another file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    at: int = 0
    external: dict[str, str] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes that type and shape say."""
        count = BITS.get(self.dtype, 0)
        for dim in self.shape:
            count *= dim
        return (count + 7) // 8


@dataclass(slots=True)
class Model:
    """Facts of one ModelProto."""

    graph: Graph = field(default_factory=Graph)
    initializers: list[Initializer] = field(default_factory=list)
    class_labels: list[str] = field(default_factory=list)
    op_attributes: dict[str, str] = field(default_factory=dict)
    nodes: int = 0


def read_model(data: Any) -> Model:
    """Facts of a serialised ModelProto. Raises ``WireError`` for bytes that are none."""
    model = Model()
    graphs = []
    for number, wire, one, two in fields(data):
        if number == 1 and wire == VARINT:
            model.graph.ir_version = signed(one)
        elif number == 2 and wire == BYTES:
            model.graph.producer = text(data, one, two)[:200]
        elif number == 7 and wire == BYTES:
            graphs.append((one, two))
        elif number == 8 and wire == BYTES:
            domain, version = _opset(data, one, two)
            model.graph.opsets[domain] = max(version, model.graph.opsets.get(domain, 0))
        elif number == 14 and wire == BYTES:
            key, value = _entry(data, one, two)
            model.graph.metadata[key] = value
        elif number == 25 and wire == BYTES:
            _function(data, one, two, model)
    if len(graphs) != 1 or model.graph.ir_version is None:
        raise WireError("no ModelProto: it has no graph or no IR version")
    _graph(data, *graphs[0], model, 0)
    names = {w.name for w in model.initializers}
    model.graph.inputs = [p for p in model.graph.inputs if p.name not in names]  # IR 3 lists weights as inputs too
    model.graph.kv_inputs = [
        p.name for p in model.graph.inputs if p.name.startswith(("past_key_values", "past_", "cache_"))
    ]
    return model


def _opset(data: Any, start: int, end: int) -> tuple[str, int]:
    domain, version = "", 0
    for number, wire, one, two in fields(data, start, end):
        if number == 1 and wire == BYTES:
            domain = text(data, one, two)
        elif number == 2 and wire == VARINT:
            version = signed(one)
    return ("" if domain == "ai.onnx" else domain), version


def _entry(data: Any, start: int, end: int) -> tuple[str, str]:
    key = value = ""
    for number, wire, one, two in fields(data, start, end):
        if wire == BYTES and number == 1:
            key = text(data, one, min(two, one + 1024))
        elif wire == BYTES and number == 2:
            value = text(data, one, min(two, one + READ.template_bytes))
    return key, value


def _function(data: Any, start: int, end: int, model: Model) -> None:
    name = domain = ""
    for number, wire, one, two in fields(data, start, end):
        if number == 1 and wire == BYTES:
            name = text(data, one, two)
        elif number == 7 and wire == BYTES:
            _node(data, one, two, model, 1)
        elif number == 10 and wire == BYTES:
            domain = text(data, one, two)
    model.graph.functions.append(f"{domain}::{name}")


def _graph(data: Any, start: int, end: int, model: Model, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise WireError("graphs are nested too deeply")
    for number, wire, one, two in fields(data, start, end):
        if wire != BYTES:
            continue
        if number == 1:
            _node(data, one, two, model, depth)
        elif number == 5:
            if len(model.initializers) >= READ.tensors:
                raise WireError("too many initializers")
            model.initializers.append(_tensor(data, one, two))
        elif number == 15:
            _sparse(data, one, two, model)
        elif number in (11, 12) and depth == 0:
            (model.graph.inputs if number == 11 else model.graph.outputs).append(_port(data, one, two))


def _sparse(data: Any, start: int, end: int, model: Model) -> None:
    for number, wire, one, two in fields(data, start, end):
        if number in (1, 2) and wire == BYTES:
            model.initializers.append(_tensor(data, one, two))


def _node(data: Any, start: int, end: int, model: Model, depth: int) -> None:
    model.nodes += 1
    if model.nodes > MAX_NODES:
        raise WireError("too many nodes")
    op = domain = ""
    for number, wire, one, two in fields(data, start, end):
        if wire != BYTES:
            continue
        if number == 4:
            op = text(data, one, two)
        elif number == 7:
            domain = text(data, one, two)
        elif number == 5:
            _attribute(data, one, two, model, depth)
    key = f"{'' if domain == 'ai.onnx' else domain}::{op}"
    model.graph.ops[key] = model.graph.ops.get(key, 0) + 1


def _attribute(data: Any, start: int, end: int, model: Model, depth: int) -> None:
    name, texts, numbers = "", [], []
    for number, wire, one, two in fields(data, start, end):
        if number == 1 and wire == BYTES:
            name = text(data, one, two)
        elif number in (6, 11) and wire == BYTES:
            _graph(data, one, two, model, depth + 1)
        elif number in (5, 10) and wire == BYTES:
            model.initializers.append(_tensor(data, one, two))
        elif number in (4, 9) and wire == BYTES and two - one < 4096:
            texts.append(text(data, one, two))
        elif number in (3, 8):
            numbers += packed(data, wire, one, two)[:100_000]
    if name in ("classlabels_strings", "classlabels_int64s", "classlabels_ints", "keys_int64s", "cats_int64s"):
        labels = texts or [str(n) for n in numbers]
        if name.startswith("classlabels") and labels:
            model.class_labels = labels
    elif name == "post_transform" and texts:
        model.op_attributes[name] = texts[0]


def _tensor(data: Any, start: int, end: int) -> Initializer:
    dims: list[int] = []
    name, kind, at = "", 0, start
    external: dict[str, str] = {}
    for number, wire, one, two in fields(data, start, end):
        if number == 1 and wire in (VARINT, BYTES):
            dims += packed(data, wire, one, two)
        elif number == 2 and wire == VARINT:
            kind = one
        elif number == 8 and wire == BYTES:
            name = text(data, one, two)
        elif number == 9 and wire == BYTES:
            at = one
        elif number == 13 and wire == BYTES:
            key, value = _entry(data, one, two)
            external[key] = value
    if any(d < 0 for d in dims) or len(dims) > 64:
        raise WireError(f"`{name}` has an impossible shape")
    count = 1
    for dim in dims:
        count *= dim
    if count >= 1 << 60:
        raise WireError(f"`{name}` claims {count} elements")
    return Initializer(name, DTYPES.get(kind, f"type {kind}"), tuple(dims), at, external)


def _port(data: Any, start: int, end: int) -> GraphPort:
    port = GraphPort("", "")
    for number, wire, one, two in fields(data, start, end):
        if number == 1 and wire == BYTES:
            port.name = text(data, one, two)
        elif number == 2 and wire == BYTES:
            port.dtype, port.shape = _type(data, one, two, 0)
    return port


Shape = list[int | str | None] | None


def _type(data: Any, start: int, end: int, depth: int) -> tuple[str, Shape]:
    """Spelling of a TypeProto (``float32``, ``seq(map(int64,float32))``) and its shape if a tensor's."""
    if depth > 8:
        raise WireError("types are nested too deeply")
    for number, wire, one, two in fields(data, start, end):
        if wire != BYTES:
            continue
        if number in (1, 8):
            return _tensor_type(data, one, two)
        if number in (4, 9):
            inner = next(
                (_type(data, a, b, depth + 1)[0] for n, w, a, b in fields(data, one, two) if n == 1 and w == BYTES), ""
            )
            return f"{'seq' if number == 4 else 'optional'}({inner})", None
        if number == 5:
            return _map_type(data, one, two, depth), None
    return "", None


def _map_type(data: Any, start: int, end: int, depth: int) -> str:
    key = value = ""
    for number, wire, one, two in fields(data, start, end):
        if number == 1 and wire == VARINT:
            key = DTYPES.get(one, str(one))
        elif number == 2 and wire == BYTES:
            value = _type(data, one, two, depth + 1)[0]
    return f"map({key},{value})"


def _tensor_type(data: Any, start: int, end: int) -> tuple[str, Shape]:
    dtype, shape = "", None
    for number, wire, one, two in fields(data, start, end):
        if number == 1 and wire == VARINT:
            dtype = DTYPES.get(one, f"type {one}")
        elif number == 2 and wire == BYTES:
            shape = [_dim(data, a, b) for n, w, a, b in fields(data, one, two) if n == 1 and w == BYTES]
    return dtype, shape


def _dim(data: Any, start: int, end: int) -> int | str | None:
    for number, wire, one, two in fields(data, start, end):
        if number == 1 and wire == VARINT:
            return signed(one)
        if number == 2 and wire == BYTES:
            return text(data, one, two) or None
    return None
