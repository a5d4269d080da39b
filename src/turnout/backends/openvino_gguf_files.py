"""GGUF files that turnout writes for OpenVINO GenAI: small ones to ask with, and copies of a
package's file with some element types expanded to F16.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.config import cache_dir
from turnout.package.formats.gguf_tables import TYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

# Name to (id, elements of a block, bytes of a block).
ELEMENT_TYPES = {name: (number, block, size) for number, (name, block, size) in TYPES.items()}

LAYER_TENSORS = (
    "attn_norm", "ffn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip
HEAD_NORMS = ("attn_q_norm", "attn_k_norm")
WIDTH, HEADS, WIDE = 256, 4, 256  # a multiple of every block size


@dataclass(slots=True)
class SmallModel:
    """A GGUF file of one layer; ``types`` by role, the rest Q8_0 with F32 norms and biases."""

    architecture: str = "llama"
    types: dict[str, str] = field(default_factory=dict)
    pre: str = "smollm"
    tokenizer: str = "gpt2"

    def write(self, path: Path) -> None:
        """Writes the file (GGUF version 3, alignment 32)."""
        tensors = list(self._tensors())
        head = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(self._values())) + b"".join(
            _key(name, value) for name, value in self._values()
        )
        offset = 0
        infos, data = b"", b""
        for name, shape, kind in tensors:
            number, block, size = ELEMENT_TYPES[kind]
            count = 1
            for dim in shape:
                count *= dim
            dims = b"".join(struct.pack("<Q", dim) for dim in reversed(shape))
            infos += _string(name) + struct.pack("<I", len(shape)) + dims + struct.pack("<IQ", number, offset)
            content = bytes(count // block * size)
            content += bytes(-len(content) % 32)
            data += content
            offset += len(content)
        head += infos
        path.write_bytes(head + bytes(-len(head) % 32) + data)

    def _tensors(self) -> Iterator[tuple[str, tuple[int, ...], str]]:
        vocabulary = len(_VOCABULARY)
        yield "token_embd.weight", (vocabulary, WIDTH), self.types.get("embedding", "Q8_0")
        yield "output.weight", (vocabulary, WIDTH), self.types.get("output", "Q8_0")
        yield "output_norm.weight", (WIDTH,), self.types.get("norm", "F32")
        for stem in LAYER_TENSORS:
            if stem.endswith("norm"):
                yield f"blk.0.{stem}.weight", (WIDTH,), self.types.get("norm", "F32")
            else:
                yield f"blk.0.{stem}.weight", (WIDTH, WIDTH), self.types.get("matrix", "Q8_0")
        for stem in HEAD_NORMS if self.architecture == "qwen3" else ():
            yield f"blk.0.{stem}.weight", (WIDTH // HEADS,), self.types.get("norm", "F32")
        if "bias" in self.types:
            yield "blk.0.attn_q.bias", (WIDTH,), self.types["bias"]

    def _values(self) -> list[tuple[str, Any]]:
        arch = self.architecture
        return [
            ("general.architecture", arch),
            ("general.file_type", 7),
            (f"{arch}.block_count", 1),
            (f"{arch}.context_length", 64),
            (f"{arch}.embedding_length", WIDTH),
            (f"{arch}.feed_forward_length", WIDE),
            (f"{arch}.attention.head_count", HEADS),
            (f"{arch}.attention.head_count_kv", HEADS),
            (f"{arch}.attention.layer_norm_rms_epsilon", 1e-5),
            (f"{arch}.rope.freq_base", 10000.0),
            ("tokenizer.ggml.model", self.tokenizer),
            ("tokenizer.ggml.pre", self.pre),
            ("tokenizer.ggml.tokens", list(_VOCABULARY)),
            ("tokenizer.ggml.token_type", [3 if token.startswith("<|") else 1 for token in _VOCABULARY]),
            ("tokenizer.ggml.merges", list(_MERGES)),
            ("tokenizer.ggml.bos_token_id", 256),
            ("tokenizer.ggml.eos_token_id", 257),
        ]


def _byte_characters() -> list[str]:
    """The characters that stand for the bytes 0 to 255 in byte-level BPE (Radford et al. 2019)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable}
    characters |= {byte: chr(256 + index) for index, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


# Merges across the borders where pre-tokenizers differ: digits, letters and marks, blanks, lines.
_PAIRS = ("11", "a1", "1a", "a.", ".a", "..", "Ġ1", "Ġ.", "ĊĊ", "ĠĊ", "Ċa", "ĠĠ", "'S", "aa", "Ġa", "éa", "1.")
_MERGES = [f"{pair[0]} {pair[1]}" for pair in _PAIRS] + ["11 1", "aa a"]
_VOCABULARY = [*_byte_characters(), "<|start|>", "<|end|>", *_PAIRS, "111", "aaa"]
# Text whose splits differ between the pre-tokenizers.
TELLING = "b.a b'S a1 11 1111 12a a.. .a 's  a\n\na \n 1.5 ...aaa \n\n é.a\t.a"


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def _key(name: str, value: Any) -> bytes:
    if isinstance(value, str):
        return _string(name) + struct.pack("<I", 8) + _string(value)
    if isinstance(value, float):
        return _string(name) + struct.pack("<If", 6, value)
    if isinstance(value, int):
        return _string(name) + struct.pack("<II", 4, value)
    kind = 8 if isinstance(value[0], str) else 5
    items = b"".join(_string(v) if kind == 8 else struct.pack("<i", v) for v in value)
    return _string(name) + struct.pack("<IIQ", 9, kind, len(value)) + items


# ---- expansion -------------------------------------------------------------------------

_SCALAR_BYTES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
_NAMES = {number: name for name, (number, _, _) in ELEMENT_TYPES.items()}
_ROWS = 1 << 16  # blocks expanded at a time


def expanded(source: str, kinds: frozenset[str]) -> str:
    """Path of a copy of the GGUF file ``source``, in turnout's cache, whose tensors of the element
    types ``kinds`` (Q4_1, Q4_K) are F16. Inspection has validated the file's header."""
    stat = os.stat(source)
    mark = f"{os.path.realpath(source)}\0{stat.st_size}\0{stat.st_mtime_ns}\0{sorted(kinds)}"
    target = cache_dir() / "expanded" / hashlib.sha256(mark.encode()).hexdigest()[:24] / "model.gguf"
    if not target.exists():
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f"{target.name}.{os.getpid()}.part")
        try:
            with open(source, "rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
                _expand(memoryview(data), partial, kinds)
            os.replace(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    return os.fspath(target)


@dataclass(slots=True)
class _Stored:
    name: bytes
    dims: tuple[int, ...]
    kind: int
    offset: int

    @property
    def elements(self) -> int:
        count = 1
        for dim in self.dims:
            count *= dim
        return count

    @property
    def nbytes(self) -> int:
        _, block, size = ELEMENT_TYPES[_NAMES[self.kind]]
        return self.elements // block * size


def _expand(data: memoryview, target: Path, kinds: frozenset[str]) -> None:
    tensors, keys_end, infos_end, alignment = _header(data)
    start = infos_end + -infos_end % alignment
    infos, offset = b"", 0
    for tensor in tensors:
        change = _NAMES[tensor.kind] in kinds
        kind = ELEMENT_TYPES["F16"][0] if change else tensor.kind
        dims = struct.pack(f"<{len(tensor.dims)}Q", *tensor.dims)
        name = struct.pack("<Q", len(tensor.name)) + tensor.name
        infos += name + struct.pack("<I", len(tensor.dims)) + dims + struct.pack("<IQ", kind, offset)
        size = tensor.elements * 2 if change else tensor.nbytes
        offset += size + -size % alignment
    with open(target, "wb") as out:
        head = bytes(data[:keys_end]) + infos
        out.write(head + bytes(-len(head) % alignment))
        for tensor in tensors:
            stored = data[start + tensor.offset : start + tensor.offset + tensor.nbytes]
            size = 0
            for piece in _pieces(stored, _NAMES[tensor.kind], kinds):
                size += out.write(piece)
            out.write(bytes(-size % alignment))


def _pieces(stored: memoryview, kind: str, kinds: frozenset[str]) -> Iterator[bytes | memoryview]:
    import numpy as np

    if kind not in kinds:
        yield stored
        return
    blocks = np.frombuffer(stored, np.uint8).reshape(-1, ELEMENT_TYPES[kind][2])
    for first in range(0, len(blocks), _ROWS):
        yield _EXPANDERS[kind](blocks[first : first + _ROWS]).astype(np.float16).tobytes()
    del blocks


def _q4_1(blocks: NDArray[Any]) -> NDArray[Any]:
    """[blocks, 32] from a scale, a minimum and 4-bit steps; low nibbles first (ggml-quants.c)."""
    import numpy as np

    scale, minimum = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    steps = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    return scale * steps + minimum


def _q4_k(blocks: NDArray[Any]) -> NDArray[Any]:
    """[blocks, 256]: eight groups of 32 whose 6-bit scales and minimums are packed in 12 bytes
    (ggml-quants.c, get_scale_min_k4)."""
    import numpy as np

    d, dmin = (blocks[:, i : i + 2].copy().view(np.float16).astype(np.float32) for i in (0, 2))
    low, mid, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = np.concatenate([low & 63, (high & 15) | (low >> 6 << 4)], axis=1)
    minimums = np.concatenate([mid & 63, (high >> 4) | (mid >> 6 << 4)], axis=1)
    packed = blocks[:, 16:].reshape(-1, 4, 32)
    steps = np.stack([packed & 15, packed >> 4], axis=2).reshape(-1, 8, 32)
    values = (d * scales)[:, :, None] * steps - (dmin * minimums)[:, :, None]
    return values.reshape(len(blocks), 256)


_EXPANDERS = {"Q4_1": _q4_1, "Q4_K": _q4_k}


def _header(data: memoryview) -> tuple[list[_Stored], int, int, int]:
    """Tensors, where the keys end, where the tensor list ends, alignment."""
    count, keys = struct.unpack_from("<QQ", data, 8)
    at, alignment = 24, 32
    for _ in range(keys):
        (length,) = struct.unpack_from("<Q", data, at)
        name = bytes(data[at + 8 : at + 8 + length])
        at += 8 + length
        if name == b"general.alignment":
            (alignment,) = struct.unpack_from("<I", data, at + 4)
        (kind,) = struct.unpack_from("<I", data, at)
        at = _skip(data, at + 4, kind)
    keys_end = at
    tensors = []
    for _ in range(count):
        (length,) = struct.unpack_from("<Q", data, at)
        name = bytes(data[at + 8 : at + 8 + length])
        at += 8 + length
        (rank,) = struct.unpack_from("<I", data, at)
        dims = struct.unpack_from(f"<{rank}Q", data, at + 4)
        at += 4 + 8 * rank
        kind, offset = struct.unpack_from("<IQ", data, at)
        at += 12
        tensors.append(_Stored(name, dims, kind, offset))
    return tensors, keys_end, at, alignment


def _skip(data: memoryview, at: int, kind: int) -> int:
    """Position behind a value of a kind."""
    if kind in _SCALAR_BYTES:
        return at + _SCALAR_BYTES[kind]
    if kind == 8:
        return at + 8 + int(struct.unpack_from("<Q", data, at)[0])
    item, length = struct.unpack_from("<IQ", data, at)
    at += 12
    if item in _SCALAR_BYTES:
        return at + length * _SCALAR_BYTES[item]
    for _ in range(length):
        at = _skip(data, at, item)
    return at
