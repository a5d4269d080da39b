"""Safetensors headers: total validation of layout without reading a tensor byte.

Format: https://github.com/huggingface/safetensors (u64 little-endian header length, JSON header,
data that the tensors tile without hole or overlap).
"""

from __future__ import annotations

import struct
from typing import Any

from turnout.config import READ
from turnout.package.facts import Artifact, Finding, Severity, TensorInfo, TensorInventory
from turnout.package.scan import ReadError, Scan, parse_json, read_error

# Bits of one element; sub-byte types pack along the last axis.
DTYPE_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32,
    "F32": 32, "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}
MAX_ELEMENTS = 1 << 62


def read_safetensors(scan: Scan, rel: str) -> TensorInventory:
    """Tensors of one file; what is wrong with it stands in ``problems`` and the inventory is then empty."""
    inventory = TensorInventory(shards=[rel])
    before = scan.check_weights_file(rel)
    if before is not None:
        inventory.problems.append(before)
        return inventory
    try:
        inventory.tensors = _tensors(scan, rel, inventory.problems)
    except ReadError as error:
        inventory.problems.append(error.finding)
    return inventory


def _tensors(scan: Scan, rel: str, warnings: list[Finding]) -> dict[str, TensorInfo]:
    size = scan.entries[rel].size
    with scan.open(rel) as stream:
        head = stream.read(8)
        if len(head) < 8:
            raise read_error("artifact.truncated", f"`{rel}` is shorter than a header length", rel, f"{size} bytes", "8 or more")
        (length,) = struct.unpack("<Q", head)
        if length > READ.safetensors_header:
            raise read_error("artifact.corrupt", f"the header of `{rel}` claims {length} bytes", rel, str(length),
                             f"at most {READ.safetensors_header}")
        if 8 + length > size:
            raise read_error("artifact.truncated", f"`{rel}` ends inside its header", rel, f"{size} bytes", f"{8 + length} or more")
        text = stream.read(length)
    if not text.startswith(b"{"):
        warnings.append(Finding("artifact.corrupt", Severity.WARNING, f"the header of `{rel}` does not start with a brace", rel))
    header = _header(text, rel, warnings)
    return _layout(header, rel, 8 + length, size)


def _header(text: bytes, rel: str, warnings: list[Finding]) -> dict[str, Any]:
    try:
        header = parse_json(text, rel)
    except ReadError as error:
        if "repeats" in error.finding.message:
            raise read_error("artifact.duplicate_tensor", error.finding.message, rel, error.finding.observed, "each name once") from None
        raise read_error("artifact.corrupt", f"the header of `{rel}` is not JSON", rel) from None
    if not isinstance(header, dict):
        raise read_error("artifact.corrupt", f"the header of `{rel}` is not a JSON object", rel)
    header.pop("__metadata__", None)
    return header


def _layout(header: dict[str, Any], rel: str, start: int, size: int) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for name, entry in header.items():
        tensors[name] = _tensor(name, entry, rel, start)
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            raise read_error("artifact.corrupt", f"tensors of `{rel}` leave a hole or overlap at `{tensor.name}`", rel,
                             f"offset {tensor.offset - start}", f"offset {end - start}")
        end += tensor.nbytes
    if end > size:
        raise read_error("artifact.truncated", f"`{rel}` is shorter than its tensors", rel, f"{size} bytes", f"{end} bytes")
    if end < size:
        raise read_error("artifact.corrupt", f"`{rel}` goes on after its tensors", rel, f"{size} bytes", f"{end} bytes")
    return tensors


def _tensor(name: str, entry: Any, rel: str, start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise read_error("artifact.corrupt", f"the entry of `{name}` in `{rel}` is incomplete", rel) from None
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        raise read_error("tensor.dtype_unsupported", f"`{name}` in `{rel}` has an unknown element type", rel, str(dtype),
                         ", ".join(DTYPE_BITS))
    count = 1
    for dim in shape if isinstance(shape, list) else [-1]:
        if type(dim) is not int or dim < 0:
            raise read_error("artifact.corrupt", f"`{name}` in `{rel}` has an impossible shape", rel, str(shape)[:80])
        count *= dim
        if count > MAX_ELEMENTS:
            raise read_error("artifact.corrupt", f"`{name}` in `{rel}` claims too many elements", rel, str(shape)[:80])
    if type(begin) is not int or type(end) is not int or begin < 0 or (count * bits + 7) // 8 != end - begin:
        raise read_error("artifact.corrupt", f"the offsets of `{name}` in `{rel}` do not fit its shape", rel,
                         f"{begin}..{end}", f"{(count * bits + 7) // 8} bytes")
    return TensorInfo(name, dtype, tuple(shape), rel, start + begin, end - begin)


def detect(scan: Scan) -> list[Artifact]:
    """Loose safetensors files are claimed by the readers of their directories."""
    return []
