"""TFLite models: a FlatBuffer walked with every offset checked.

Schema: https://github.com/tensorflow/tensorflow/blob/master/tensorflow/lite/schema/schema.fbs
"""

from __future__ import annotations

import struct
from typing import Any

from turnout.package.facts import Artifact, ArtifactKind, Finding, Graph, GraphPort, Severity
from turnout.package.formats.context import nearest_context
from turnout.package.formats.graph_tasks import tasks_of_graph
from turnout.package.formats.transformers import attach
from turnout.package.scan import ReadError, Scan, read_error

DTYPES = {
    0: "float32",
    1: "float16",
    2: "int32",
    3: "uint8",
    4: "int64",
    5: "string",
    6: "bool",
    7: "int16",
    8: "complex64",
    9: "int8",
    10: "float64",
    11: "complex128",
    12: "uint64",
    15: "uint32",
    16: "uint16",
    17: "int4",
}
CUSTOM = 32  # BuiltinOperator.CUSTOM
MAX_ITEMS = 1 << 20


class _Flat:
    """Tables and vectors of one buffer; every read is checked against its end."""

    def __init__(self, data: Any, rel: str) -> None:
        self.data, self.size, self.rel = data, len(data), rel

    def number(self, form: str, at: int) -> int:
        width = struct.calcsize(form)
        if at < 0 or at + width > self.size:
            raise read_error(
                "artifact.truncated",
                f"`{self.rel}` points outside itself",
                self.rel,
                f"offset {at}",
                f"below {self.size}",
            )
        return int(struct.unpack_from("<" + form, self.data, at)[0])

    def follow(self, at: int) -> int:
        return at + self.number("I", at)

    def field(self, table: int, index: int) -> int | None:
        """Place of a table's field, None when it has its default."""
        vtable = table - self.number("i", table)
        if 4 + 2 * index + 2 > self.number("H", vtable):
            return None
        offset = self.number("H", vtable + 4 + 2 * index)
        return table + offset if offset else None

    def vector(self, table: int, index: int, width: int = 4) -> tuple[int, int]:
        """Start and length of a vector field; length 0 when absent."""
        place = self.field(table, index)
        if place is None:
            return 0, 0
        start = self.follow(place)
        length = self.number("I", start)
        if length > MAX_ITEMS or start + 4 + length * width > self.size:
            raise read_error("artifact.corrupt", f"`{self.rel}` has a vector of {length} items", self.rel, str(length))
        return start + 4, length

    def tables(self, table: int, index: int) -> list[int]:
        start, length = self.vector(table, index)
        return [self.follow(start + 4 * i) for i in range(length)]

    def text(self, table: int, index: int) -> str:
        start, length = self.vector(table, index, 1)
        return bytes(self.data[start : start + length]).decode("utf-8", "replace")

    def ints(self, table: int, index: int) -> list[int]:
        start, length = self.vector(table, index)
        return [self.number("i", start + 4 * i) for i in range(length)]


def read_tflite(scan: Scan, rel: str) -> Graph:
    """Operators and ports of one file. Raises ``ReadError``."""
    import mmap

    before = scan.check_weights_file(rel)
    if before is not None:
        raise ReadError(before)
    with scan.open(rel) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        flat = _Flat(data, rel)
        if bytes(data[4:8]) != b"TFL3":
            raise read_error("artifact.corrupt", f"`{rel}` is not a TFLite model", rel, repr(bytes(data[4:8])), "TFL3")
        return _graph(flat)


def _graph(flat: _Flat) -> Graph:
    model = flat.follow(0)
    place = flat.field(model, 0)
    graph = Graph(ir_version=flat.number("I", place) if place is not None else None, producer=flat.text(model, 3)[:200])
    codes = [_operator(flat, code) for code in flat.tables(model, 1)]
    subgraphs = flat.tables(model, 2)
    if not subgraphs:
        raise read_error("artifact.corrupt", f"`{flat.rel}` has no graph", flat.rel)
    for subgraph in subgraphs:
        for operator in flat.tables(subgraph, 3):
            index = flat.field(operator, 0)
            number = flat.number("I", index) if index is not None else 0
            name = codes[number] if number < len(codes) else f"?::{number}"
            graph.ops[name] = graph.ops.get(name, 0) + 1
    tensors = flat.tables(subgraphs[0], 0)
    graph.inputs = [_port(flat, tensors, i) for i in flat.ints(subgraphs[0], 1)]
    graph.outputs = [_port(flat, tensors, i) for i in flat.ints(subgraphs[0], 2)]
    return graph


def _operator(flat: _Flat, code: int) -> str:
    """``::NUMBER`` of a built-in operator, ``custom::NAME`` of another."""
    old, new = flat.field(code, 0), flat.field(code, 3)
    builtin = max(flat.number("b", old) if old is not None else 0, flat.number("i", new) if new is not None else 0)
    return f"custom::{flat.text(code, 1)}" if builtin == CUSTOM else f"::{builtin}"


def _port(flat: _Flat, tensors: list[int], index: int) -> GraphPort:
    if not 0 <= index < len(tensors):
        raise read_error(
            "artifact.corrupt",
            f"`{flat.rel}` names a tensor that it has not",
            flat.rel,
            str(index),
            f"below {len(tensors)}",
        )
    tensor = tensors[index]
    kind = flat.field(tensor, 1)
    signature = flat.ints(tensor, 7) or flat.ints(tensor, 0)
    dtype = DTYPES.get(flat.number("b", kind) if kind is not None else 0, "")
    return GraphPort(flat.text(tensor, 3), dtype, [d if d >= 0 else None for d in signature])


def detect(scan: Scan) -> list[Artifact]:
    """One artifact a .tflite file."""
    return [_artifact(scan, rel) for rel in sorted(scan.glob("*.tflite")) if scan.wanted(rel)]


def _artifact(scan: Scan, rel: str) -> Artifact:
    artifact = Artifact(f"tflite:{rel}", ArtifactKind.TFLITE, rel, [rel], size_bytes=scan.size_of([rel]))
    try:
        artifact.graph = read_tflite(scan, rel)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return artifact
    custom = [op for op in artifact.graph.ops if op.startswith("custom::")]
    if custom:
        artifact.findings.append(
            Finding(
                "operator.unknown_domain", Severity.INFO, f"custom operators: {', '.join(o[8:] for o in custom)}", rel
            )
        )
    context = nearest_context(scan, rel)
    if context is not None:
        attach(artifact, context)
    tasks_of_graph(artifact)
    return artifact
