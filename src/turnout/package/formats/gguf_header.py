"""GGUF headers: keys and tensor infos, totally validated, without reading a tensor.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Any

from turnout.config import READ
from turnout.package.facts import Finding, Severity, TensorInfo
from turnout.package.formats.gguf_tables import TYPES
from turnout.package.scan import ReadError, Scan, read_error

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY, BOOL = 8, 9, 7
MAX_NAME, MAX_KEY, MAX_NESTING, MAX_DIMS = 64, 65535, 4, 4
KEPT_ARRAY = 64  # longer arrays are walked, not kept


@dataclass(slots=True)
class LongArray:
    """Stands for an array that was walked but not kept."""

    element: int
    length: int


@dataclass(slots=True)
class Header:
    """Keys and tensors of one file. ``values`` keeps scalars, texts and short arrays."""

    version: int
    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    problems: list[Finding] = field(default_factory=list)


class _Reader:
    """Cursor over a file's metadata, buffered so that texts are skipped without a call each."""

    def __init__(self, data: Any, rel: str) -> None:
        self.data, self.rel, self.size, self.at, self.order = data, rel, len(data), 0, "<"

    def cut(self, what: str) -> ReadError:
        return read_error(
            "artifact.truncated",
            f"`{self.rel}` ends inside {what}",
            self.rel,
            f"{self.size} bytes",
            "a complete header",
        )

    def take(self, form: str, what: str) -> Any:
        width = struct.calcsize(form)
        if self.at + width > self.size:
            raise self.cut(what)
        (value,) = struct.unpack_from(self.order + form, self.data, self.at)
        self.at += width
        return value

    def text(self, limit: int, what: str) -> str:
        length = self.take("Q", what)
        if length > limit or self.at + length > self.size:
            if length > self.size:
                raise read_error(
                    "artifact.corrupt",
                    f"{what} in `{self.rel}` claims {length} bytes",
                    self.rel,
                    str(length),
                    f"at most {limit}",
                )
            raise (
                self.cut(what)
                if self.at + length > self.size
                else read_error(
                    "artifact.corrupt", f"{what} in `{self.rel}` is too long", self.rel, str(length), f"at most {limit}"
                )
            )
        value = bytes(self.data[self.at : self.at + length]).decode("utf-8", "replace")
        self.at += length
        return value

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        if kind == STRING:
            return self.text(READ.gguf_string, f"the value of `{key}`")
        if kind == ARRAY:
            return self.array(key, depth)
        form = SCALARS.get(kind)
        if form is None:
            raise read_error(
                "artifact.corrupt",
                f"`{key}` in `{self.rel}` has the unknown value type {kind}",
                self.rel,
                str(kind),
                "0 to 12",
            )
        if kind == BOOL:
            byte = self.take("B", f"the value of `{key}`")
            if byte > 1:
                raise read_error(
                    "artifact.corrupt", f"`{key}` in `{self.rel}` is no boolean", self.rel, str(byte), "0 or 1"
                )
            return bool(byte)
        return self.take(form, f"the value of `{key}`")

    def array(self, key: str, depth: int) -> Any:
        if depth >= MAX_NESTING:
            raise read_error("artifact.corrupt", f"`{key}` in `{self.rel}` nests arrays too deeply", self.rel)
        kind, length = self.take("I", f"the array `{key}`"), self.take("Q", f"the array `{key}`")
        smallest = 8 if kind == STRING else 12 if kind == ARRAY else struct.calcsize(SCALARS.get(kind, "B"))
        if length * smallest > self.size - self.at:
            raise read_error(
                "artifact.truncated",
                f"the array `{key}` in `{self.rel}` is longer than the file",
                self.rel,
                f"{length} elements",
                f"{self.size - self.at} bytes left",
            )
        if length > KEPT_ARRAY:
            if kind == STRING:
                self.skip_texts(length, key)
                return LongArray(kind, length)
            if kind in SCALARS:
                self.at += length * smallest
                return LongArray(kind, length)
        return [self.value(kind, key, depth + 1) for _ in range(length)]

    def skip_texts(self, count: int, key: str) -> None:
        """Walks ``count`` texts; the hot loop of a file with a large vocabulary."""
        unpack, data, at, size = struct.Struct(self.order + "Q").unpack_from, self.data, self.at, self.size
        try:
            for _ in range(count):
                at += 8 + unpack(data, at)[0]
                if at > size:
                    raise self.cut(f"the array `{key}`")
        except struct.error:
            raise self.cut(f"the array `{key}`") from None
        self.at = at


def read_header(scan: Scan, rel: str) -> Header:
    """Header of one file. Raises ``ReadError`` naming what is wrong with it."""
    import mmap

    before = scan.check_weights_file(rel)
    if before is not None:
        raise ReadError(before)
    with scan.open(rel) as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
        return _header(_Reader(data, rel))


def _header(reader: _Reader) -> Header:
    rel = reader.rel
    if bytes(reader.data[:4]) != b"GGUF":
        raise read_error(
            "artifact.corrupt", f"`{rel}` does not start with GGUF", rel, repr(bytes(reader.data[:4])), "GGUF"
        )
    reader.at = 4
    version = reader.take("I", "its version")
    if version > 0xFFFF:  # a big-endian file read as little-endian
        reader.order, reader.at = ">", 4
        version = reader.take("I", "its version")
    if version not in (2, 3):
        raise read_error("artifact.corrupt", f"`{rel}` is GGUF version {version}", rel, str(version), "2 or 3")
    tensors, keys = reader.take("Q", "its counts"), reader.take("Q", "its counts")
    # The smallest key takes 13 bytes, the smallest tensor info 25.
    if keys > READ.gguf_keys or tensors > READ.tensors or keys * 13 + tensors * 25 > reader.size:
        raise read_error(
            "artifact.corrupt",
            f"`{rel}` claims {tensors} tensors and {keys} keys",
            rel,
            f"{reader.size} bytes",
            "counts that fit the file",
        )
    header = Header(version)
    if reader.order == ">":
        header.values["endianness"] = "big"
    for _ in range(keys):
        key = reader.text(MAX_KEY, "a key")
        if key in header.values:
            raise read_error("artifact.corrupt", f"`{rel}` repeats the key `{key}`", rel, key, "each key once")
        header.values[key] = reader.value(reader.take("I", f"the type of `{key}`"), key)
    _tensor_infos(reader, header, tensors)
    return header


def _tensor_infos(reader: _Reader, header: Header, count: int) -> None:
    rel, infos = reader.rel, []
    for _ in range(count):
        infos.append(_tensor_info(reader))
    alignment = header.values.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment <= 0 or alignment % 8 or alignment > 1 << 20:
        raise read_error(
            "artifact.corrupt", f"`{rel}` has an impossible alignment", rel, str(alignment), "a multiple of 8"
        )
    start = -(-reader.at // alignment) * alignment if infos else reader.at
    for name, dims, kind, offset in infos:
        if name in header.tensors:
            header.problems.append(
                Finding(
                    "artifact.duplicate_tensor",
                    Severity.ERROR,
                    f"`{name}` stands twice in `{rel}`",
                    rel,
                    name,
                    "each name once",
                )
            )
        if offset % alignment:
            header.problems.append(
                Finding(
                    "artifact.corrupt",
                    Severity.ERROR,
                    f"`{name}` in `{rel}` is not aligned",
                    rel,
                    str(offset),
                    f"a multiple of {alignment}",
                )
            )
        dtype, nbytes = _size(name, dims, kind, rel, header.problems)
        if start + offset + nbytes > reader.size and not any(p.code == "artifact.truncated" for p in header.problems):
            header.problems.append(
                Finding(
                    "artifact.truncated",
                    Severity.ERROR,
                    f"`{rel}` ends before the data of `{name}`",
                    rel,
                    f"{reader.size} bytes",
                    f"{start + offset + nbytes} bytes",
                )
            )
        header.tensors[name] = TensorInfo(name, dtype, tuple(reversed(dims)), rel, start + offset, nbytes)


def _tensor_info(reader: _Reader) -> tuple[str, list[int], int, int]:
    name = reader.text(1024, "a tensor name")
    if len(name.encode("utf-8", "replace")) > MAX_NAME:
        raise read_error(
            "artifact.corrupt",
            f"a tensor name in `{reader.rel}` is longer than {MAX_NAME} bytes",
            reader.rel,
            name[:80],
        )
    count = reader.take("I", f"the shape of `{name}`")
    if count > MAX_DIMS:
        raise read_error(
            "artifact.corrupt",
            f"`{name}` in `{reader.rel}` has {count} axes",
            reader.rel,
            str(count),
            f"at most {MAX_DIMS}",
        )
    dims = [reader.take("Q", f"the shape of `{name}`") for _ in range(count)]
    return name, dims, reader.take("I", f"the type of `{name}`"), reader.take("Q", f"the offset of `{name}`")


def _size(name: str, dims: list[int], kind: int, rel: str, problems: list[Finding]) -> tuple[str, int]:
    """Element type and bytes of a tensor; an unknown type counts no bytes."""
    if kind not in TYPES:
        problems.append(
            Finding(
                "tensor.dtype_unsupported",
                Severity.ERROR,
                f"`{name}` in `{rel}` has the removed or unknown type {kind}",
                rel,
                str(kind),
                "a type of ggml's present list",
            )
        )
        return f"type {kind}", 0
    dtype, block, width = TYPES[kind]
    count = 1
    for dim in dims:
        count *= dim
    if count >= 1 << 60:
        raise read_error("artifact.corrupt", f"`{name}` in `{rel}` claims {count} elements", rel, str(dims))
    if dims and dims[0] % block:
        problems.append(
            Finding(
                "artifact.corrupt",
                Severity.ERROR,
                f"rows of `{name}` in `{rel}` are no whole {dtype} blocks",
                rel,
                str(dims[0]),
                f"a multiple of {block}",
            )
        )
    return dtype, -(-count // block) * width
