"""Safetensors headers: total validation of layout without reading a tensor byte.

Format: https://github.com/huggingface/safetensors (u64 little-endian header length, JSON header,
data that the tensors tile without hole or overlap).
"""

from __future__ import annotations

import json
import struct
from typing import Any

from turnout.config import READ
from turnout.package.facts import Artifact, Finding, Severity, TensorInfo, TensorInventory
from turnout.package.scan import ReadError, Scan, check_characters, check_json_size, read_error

# Bits of one element; sub-byte types pack along the last axis.
DTYPE_BITS = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
}
MAX_ELEMENTS = 1 << 62
MAX_NODES = 1_000_000  # brackets and commas of a header: 125,000 tensors of two dimensions


def read_safetensors(scan: Scan, rel: str) -> TensorInventory:
    """Tensors of one file; what is wrong with it stands in ``problems`` and the inventory is then empty.

    Oddities that the library forgives (a tensor described twice in the same words, space before the
    header's brace) are warnings and leave the inventory filled.
    """
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
            raise read_error(
                "artifact.truncated", f"`{rel}` is shorter than a header length", rel, f"{size} bytes", "8 or more"
            )
        (length,) = struct.unpack("<Q", head)
        if length > READ.safetensors_header:
            raise _corrupt(
                f"the header of `{rel}` claims {length} bytes", rel, str(length), f"at most {READ.safetensors_header}"
            )
        if 8 + length > size:
            raise read_error(
                "artifact.truncated", f"`{rel}` ends inside its header", rel, f"{size} bytes", f"{8 + length} or more"
            )
        text = stream.read(length)
    tensors = _layout(_header(text, rel, warnings), rel, 8 + length, size)
    if not text.startswith(b"{"):
        message = f"the header of `{rel}` does not start with a brace"
        warnings.append(Finding("artifact.corrupt", Severity.WARNING, message, rel, repr(text[:1]), "{"))
    return tensors


def _corrupt(message: str, rel: str, observed: str = "", expected: str = "") -> ReadError:
    return read_error("artifact.corrupt", message, rel, observed, expected)


def _header(text: bytes, rel: str, warnings: list[Finding]) -> dict[str, Any]:
    """Parsed header without ``__metadata__``; repeated names are judged by whether they contradict."""
    repeated: dict[str, bool] = {}  # name to: the two say the same

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items):
            seen: dict[str, Any] = {}
            for key, value in items:
                if key in seen:
                    repeated[key] = repeated.get(key, True) and seen[key] == value
                seen[key] = value
        return result

    try:
        check_json_size(text, rel, MAX_NODES)
        header = json.loads(text.decode("utf-8"), object_pairs_hook=pairs)
        check_characters(text, header, rel)
    except ReadError as error:
        raise _corrupt(
            f"header: {error.finding.message}", rel, error.finding.observed, error.finding.expected
        ) from None
    except (ValueError, RecursionError) as error:
        raise _corrupt(f"the header of `{rel}` is not JSON: {type(error).__name__}", rel) from None
    for name, same in repeated.items():
        severity = Severity.WARNING if same else Severity.ERROR
        finding = Finding(
            "artifact.duplicate_tensor", severity, f"the header of `{rel}` describes `{name}` twice", rel, name, "once"
        )
        if not same:
            raise ReadError(finding)
        warnings.append(finding)
    if not isinstance(header, dict):
        raise _corrupt(f"the header of `{rel}` is not a JSON object", rel)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(f"`__metadata__` of `{rel}` is not text to text", rel, str(metadata)[:80], "text to text")
    return header


def _layout(header: dict[str, Any], rel: str, start: int, size: int) -> dict[str, TensorInfo]:
    tensors = {name: _tensor(name, entry, rel, start) for name, entry in header.items()}
    end = start
    for tensor in sorted(tensors.values(), key=lambda t: (t.offset, t.nbytes)):
        if tensor.offset != end:
            raise _corrupt(
                f"tensors of `{rel}` leave a hole or overlap at `{tensor.name}`",
                rel,
                f"offset {tensor.offset - start}",
                f"offset {end - start}",
            )
        end += tensor.nbytes
    if end > size:
        raise read_error(
            "artifact.truncated", f"`{rel}` is shorter than its tensors", rel, f"{size} bytes", f"{end} bytes"
        )
    if end < size:
        raise _corrupt(f"`{rel}` goes on after its tensors", rel, f"{size} bytes", f"{end} bytes")
    return tensors


def _tensor(name: str, entry: Any, rel: str, start: int) -> TensorInfo:
    try:
        dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
    except (TypeError, KeyError, ValueError):
        raise _corrupt(f"the entry of `{name}` in `{rel}` is incomplete", rel) from None
    bits = DTYPE_BITS.get(dtype) if isinstance(dtype, str) else None
    if bits is None:
        message = f"`{name}` in `{rel}` has an unknown element type"
        raise read_error("tensor.dtype_unsupported", message, rel, str(dtype)[:80], ", ".join(DTYPE_BITS))
    count = 1
    for dim in shape if isinstance(shape, list) else [-1]:
        if type(dim) is not int or dim < 0:
            raise _corrupt(f"`{name}` in `{rel}` has an impossible shape", rel, str(shape)[:80])
        count *= dim
        if count > MAX_ELEMENTS:
            raise _corrupt(f"`{name}` in `{rel}` claims too many elements", rel, str(shape)[:80])
    if count * bits % 8:
        raise _corrupt(f"`{name}` in `{rel}` does not end on a byte", rel, f"{count} elements of {bits} bits")
    if type(begin) is not int or type(end) is not int or begin < 0 or count * bits // 8 != end - begin:
        observed = f"{begin}..{end}"[:80]
        raise _corrupt(
            f"the offsets of `{name}` in `{rel}` do not fit its shape", rel, observed, f"{count * bits // 8} bytes"
        )
    return TensorInfo(name, dtype, tuple(shape), rel, start + begin, end - begin)


def detect(scan: Scan) -> list[Artifact]:
    """Loose safetensors files are claimed by the readers of their directories."""
    return []
