"""One question to llama.cpp: would it take this file? Answered in milliseconds, without weights.

llama.cpp is given a stand-in: the file's metadata and tensor list over a sparse file without data, with
one tensor too many at its end. It refuses that always, before it maps any data, and its refusal tells
how far it came: an unknown architecture or pre-tokenizer, a key or tensor it misses, a wrong shape, or
only the one tensor too many, which means that everything else was found.
"""

from __future__ import annotations

import struct
import tempfile
from collections.abc import Sequence
from typing import BinaryIO

from turnout.backends.base import Reason
from turnout.backends.llamacpp_native import CONTEXT_STEP, Native, NativeLoadError, Settings
from turnout.errors import LoadError
from turnout.package.facts import TensorInfo
from turnout.package.formats.gguf_tables import TYPES

METADATA_LIMIT = 256 << 20  # bytes of metadata that are copied for a question
_ONE_TOO_MANY = "turnout.one_too_many"
_TYPE_IDS = {name: number for number, (name, _, _) in TYPES.items()}
_SCALARS = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_STRING, _ARRAY = 8, 9


def ask(path: str, tensors: Sequence[TensorInfo], alignment: int = 32) -> Reason | None:
    """Why llama.cpp refuses a model of the metadata in ``path`` and of ``tensors``; None when it takes it.

    Without ``tensors`` the question is about the metadata alone. Raises ``LoadError`` for metadata
    that cannot be copied, ``OSError`` where the stand-in cannot be written.
    """
    with tempfile.TemporaryDirectory(prefix="turnout-") as folder:
        stand_in = f"{folder}/question.gguf"
        with open(path, "rb") as source, open(stand_in, "w+b") as target:
            write_stand_in(source, target, tensors, alignment)
        try:
            Native(stand_in, Settings(context=CONTEXT_STEP, repack=False)).close()
        except NativeLoadError as error:
            return _meaning(error.reason, len(tensors))
    return None


def _meaning(reason: Reason, count: int) -> Reason | None:
    if not count:
        return None if reason.code in ("tensor.missing", "tensor.unexpected") else reason
    if reason.code != "tensor.unexpected":
        return reason
    used = int(reason.expected)
    if used == count:
        return None
    message = f"llama.cpp uses {used} of the file's {count} tensors"
    return Reason("tensor.unexpected", message, f"{count} tensors", f"{used} tensors")


def write_stand_in(source: BinaryIO, target: BinaryIO, tensors: Sequence[TensorInfo], alignment: int) -> None:
    """A GGUF of ``source``'s metadata and ``tensors``, of one tensor too many, and of no data.

    The keys that count splits are left out: the parts are one here. Raises ``LoadError`` for what is
    not a little-endian GGUF of version 2 or 3. https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
    """
    head = source.read(24)
    if len(head) < 24 or head[:4] != b"GGUF" or struct.unpack_from("<I", head, 4)[0] not in (2, 3):
        raise LoadError("llama.cpp on this machine reads little-endian GGUF of version 2 or 3", code="artifact.corrupt")
    keys, kept = struct.unpack_from("<Q", head, 16)[0], 0
    target.write(head)
    reader = _Reader(source)
    for _ in range(keys):
        reader.taken.clear()
        key = reader.string()
        reader.value(reader.number("<I"))
        if not key.startswith(b"split."):
            target.write(b"".join(reader.taken))
            kept += 1
    extra = TensorInfo(_ONE_TOO_MANY, "F32", (1,), "", 0, 4)
    offset = 0
    for tensor in (*tensors, extra):
        target.write(_info(tensor, offset))
        offset += -(-tensor.nbytes // alignment) * alignment
    end = -(-target.tell() // alignment) * alignment + offset
    target.seek(8)
    target.write(struct.pack("<QQ", len(tensors) + 1, kept))
    target.truncate(end)  # sparse: no data is written or read


def _info(tensor: TensorInfo, offset: int) -> bytes:
    name, dims = tensor.name.encode(), tuple(reversed(tensor.shape))
    form = f"<Q{len(name)}sI{len(dims)}QIQ"
    return struct.pack(form, len(name), name, len(dims), *dims, _TYPE_IDS[tensor.dtype], offset)


class _Reader:
    """Walks metadata values; ``taken`` holds the bytes since it was cleared."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self._left = METADATA_LIMIT
        self.taken: list[bytes] = []

    def take(self, count: int) -> bytes:
        self._left -= count
        data = self._source.read(count) if self._left >= 0 else b""
        if len(data) != count:
            raise LoadError("the metadata ends early or is too large", code="artifact.truncated")
        self.taken.append(data)
        return data

    def number(self, form: str) -> int:
        return int(struct.unpack(form, self.take(struct.calcsize(form)))[0])

    def string(self) -> bytes:
        return self.take(self.number("<Q"))

    def value(self, kind: int, depth: int = 0) -> None:
        if kind in _SCALARS:
            self.take(_SCALARS[kind])
        elif kind == _STRING:
            self.string()
        elif kind == _ARRAY and depth < 4:
            inner, count = self.number("<I"), self.number("<Q")
            if inner in _SCALARS:
                self.take(_SCALARS[inner] * count)
            else:
                for _ in range(count):
                    self.value(inner, depth + 1)
        else:
            raise LoadError(f"metadata of the unknown type {kind}", code="artifact.corrupt")
