"""GGUF files taken apart and put together as bytes: quicker than a reader that makes an object of every word."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

ALIGNMENT = 32
STRING, ARRAY = 8, 9
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # bytes of GGUF's plain types
VOCABULARY = tuple(f"tokenizer.ggml.{part}" for part in ("tokens", "merges", "scores", "token_type"))


@dataclass
class Parts:
    """Keys with their whole entries, the tensors' table and the data section (specification: ggml, docs/gguf.md)."""

    version: int
    keys: dict[str, bytes]
    counts: dict[str, int]  # of arrays
    tensors: list[str]
    table: bytes
    data: bytes

    @property
    def architecture(self) -> str:
        key = "general.architecture"
        return self.keys[key][8 + len(key) + 4 + 8 :].decode()

    def write(self, path: Path) -> Path:
        head = struct.pack("<4sIQQ", b"GGUF", self.version, len(self.tensors), len(self.keys))
        head += b"".join(self.keys.values()) + self.table
        path.write_bytes(head + bytes(-len(head) % ALIGNMENT) + self.data)
        return path


def read(path: Path) -> Parts:
    """The file's parts. Big-endian files and other alignments are not read."""
    blob = path.read_bytes()
    magic, version, tensors, keys = struct.unpack_from("<4sIQQ", blob)
    assert magic == b"GGUF"
    place, found, counts = 24, {}, {}
    for _ in range(keys):
        begin = place
        place, name = _string(blob, place)
        (kind,) = struct.unpack_from("<I", blob, place)
        place, counts[name] = _skip(blob, place + 4, kind)
        found[name] = blob[begin:place]
    assert "general.alignment" not in found
    begin, names = place, []
    for _ in range(tensors):
        place, name = _string(blob, place)
        (dims,) = struct.unpack_from("<I", blob, place)
        place += 4 + 8 * dims + 4 + 8
        names.append(name)
    return Parts(version, found, counts, names, blob[begin:place], blob[place + -place % ALIGNMENT :])


def _string(blob: bytes, place: int) -> tuple[int, str]:
    (length,) = struct.unpack_from("<Q", blob, place)
    return place + 8 + length, blob[place + 8 : place + 8 + length].decode()


def _skip(blob: bytes, place: int, kind: int) -> tuple[int, int]:
    """Where a value ends, and how many elements it has."""
    if kind == STRING:
        return place + 8 + int(struct.unpack_from("<Q", blob, place)[0]), 1
    if kind != ARRAY:
        return place + SIZES[kind], 1
    inner, count = struct.unpack_from("<IQ", blob, place)
    place += 12
    if inner != STRING:
        return place + SIZES[inner] * count, count
    for _ in range(count):
        place += 8 + int(struct.unpack_from("<Q", blob, place)[0])
    return place, count


def without_vocabulary(source: Path, target: Path) -> Path:
    """The model alone: without the words, whose number becomes a key."""
    parts = read(source)
    size = f"{parts.architecture}.vocab_size".encode()
    for key in VOCABULARY:
        parts.keys.pop(key, None)
    entry = struct.pack("<Q", len(size)) + size + struct.pack("<II", 4, parts.counts["tokenizer.ggml.tokens"])
    parts.keys.setdefault(size.decode(), entry)
    return parts.write(target)


def with_floats(source: Path, target: Path, tensors: dict[str, np.ndarray]) -> Path:
    """The keys of ``source`` over other tensors, in float32."""
    parts = read(source)
    table, offset = b"", 0
    for name, data in tensors.items():
        table += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", data.ndim)
        table += struct.pack(f"<{data.ndim}Q", *reversed(data.shape)) + struct.pack("<IQ", 0, offset)
        offset += data.nbytes + -data.nbytes % ALIGNMENT
    parts.tensors, parts.table = list(tensors), table
    parts.data = b"".join(d.astype("<f4").tobytes() + bytes(-d.nbytes % ALIGNMENT) for d in tensors.values())
    return parts.write(target)
