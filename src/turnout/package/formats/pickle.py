"""Torch checkpoints: opcodes are listed, never run.

A checkpoint is a zip with ``*/data.pkl`` and ``data/N`` (torch >= 1.6), or a bare pickle stream
(older). TorchScript is a zip with ``code/`` and ``constants.pkl``; an exported program is a zip with
``models/*.json`` and ``archive_format``.
"""

from __future__ import annotations

import io
import pickletools
import struct
import zipfile
import zlib
from dataclasses import dataclass, field
from typing import Any

from turnout.config import READ
from turnout.package.facts import (
    Artifact,
    ArtifactKind,
    CodeNeed,
    Finding,
    Severity,
    Strength,
    TaskEvidence,
    TensorInfo,
    TensorInventory,
)
from turnout.package.scan import ReadError, Scan, read_error

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Names that torch's weights_only unpickler accepts (torch/_weights_only_unpickler.py).
ALLOWED = frozenset({
    "collections.OrderedDict", "torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2",
    "torch._utils._rebuild_tensor_v3", "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state",
    "torch._utils._rebuild_qtensor", "torch._utils._rebuild_sparse_tensor", "torch._tensor._rebuild_from_type_v2",
    "torch._utils._rebuild_meta_tensor_no_storage", "torch._utils._rebuild_wrapper_subclass", "torch.nn.parameter.Parameter",
    "torch.Size", "torch.Tensor", "torch.device", "_codecs.encode", "builtins.bytearray", "builtins.set", "builtins.complex",
    "torch.serialization._get_layout", "torch.storage._load_from_bytes", "__builtin__.set", "__builtin__.bytearray",
    "torch.storage.UntypedStorage", "torch.storage.TypedStorage", "collections.Counter",
})
STORAGES = {"FloatStorage": ("F32", 4), "HalfStorage": ("F16", 2), "BFloat16Storage": ("BF16", 2), "DoubleStorage": ("F64", 8),
            "LongStorage": ("I64", 8), "IntStorage": ("I32", 4), "ShortStorage": ("I16", 2), "CharStorage": ("I8", 1),
            "ByteStorage": ("U8", 1), "BoolStorage": ("BOOL", 1)}
TEXT_OPCODES = frozenset({"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING", "SHORT_BINSTRING"})
MEMO_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
MEMO_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
MAX_OPCODES = 5_000_000


@dataclass(slots=True)
class PickleFacts:
    """``form``: zip, legacy, torchscript, torch_export. ``unsafe``: names beyond the allowed set."""

    form: str
    globals: list[str] = field(default_factory=list)
    unsafe: list[str] = field(default_factory=list)
    inventory: TensorInventory = field(default_factory=TensorInventory)


def pickle_globals(data: bytes, streams: int = 1) -> list[str]:
    """Names (``module.name``) that unpickling ``data`` would import, in order, by opcodes alone.

    ``streams`` pickles that follow one another are read. Raises ``ReadError`` for bytes that are no
    pickle.
    """
    found: dict[str, None] = {}
    stream = io.BytesIO(data)
    for number in range(streams):
        try:
            _walk(stream, found)
        except ReadError:
            raise
        except Exception as error:  # pickletools raises many kinds on bytes that are no pickle
            if number:
                break
            raise read_error("artifact.corrupt", f"not a pickle stream: {error}", "") from None
    return list(found)


def _walk(stream: io.BytesIO, found: dict[str, None]) -> None:
    """Follows text on the stack just far enough to name what STACK_GLOBAL takes."""
    texts: list[str | None] = []
    memo: dict[int, str | None] = {}
    last: str | None = None
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        name = opcode.name
        if count > MAX_OPCODES:
            raise read_error("artifact.corrupt", "the pickle has too many opcodes", "", str(count), str(MAX_OPCODES))
        if name in TEXT_OPCODES:
            last = str(argument)
            texts.append(last)
        elif name == "MEMOIZE":
            memo[len(memo)] = last
        elif name in MEMO_PUT:
            memo[int(str(argument))] = last
        elif name in MEMO_GET:
            last = memo.get(int(str(argument)))
            texts.append(last)
        elif name in ("GLOBAL", "INST"):
            found[str(argument).replace(" ", ".", 1)] = None
            last = None
        elif name == "STACK_GLOBAL":
            module, attribute = (texts[-2:] if len(texts) >= 2 else (None, None))
            found[f"{module or '?'}.{attribute or '?'}"] = None
            last = None
        elif name in ("EXT1", "EXT2", "EXT4"):
            found[f"copyreg.extension_{argument}"] = None
        elif name not in ("PROTO", "FRAME"):
            last = None
        del texts[:-64]


def unsafe_names(names: list[str]) -> list[str]:
    """Names outside what a weights-only unpickler accepts."""
    return [n for n in names if n not in ALLOWED and not (n.startswith("torch.") and _plain_torch(n))]


def _plain_torch(name: str) -> bool:
    """Storages and element types of torch itself, e.g. torch.FloatStorage, torch.float32."""
    rest = name.removeprefix("torch.").removeprefix("storage.")
    known = {"float16", "float32", "float64", "bfloat16", "int8", "int16", "int32", "int64", "uint8", "bool", "half", "float",
             "double", "long", "int", "short", "quint8", "qint8", "qint32", "complex64", "complex128", "float8_e4m3fn",
             "float8_e5m2", "per_tensor_affine", "per_channel_affine", "strided"}
    return rest in known or rest in STORAGES or (rest.endswith("Storage") and "." not in rest)


# ---- torch files -------------------------------------------------------------------------------


def read_pickle(scan: Scan, rel: str) -> PickleFacts | None:
    """Facts of a torch file, None when it is neither a torch zip nor a pickle.

    Raises ``ReadError`` for a file that is one but broken or beyond the limits.
    """
    before = scan.check_weights_file(rel)
    if before is not None:
        raise ReadError(before)
    head = scan.head(rel, 4)
    if head[:4] == b"PK\x03\x04":
        return _read_zip(scan, rel)
    if head[:1] == b"\x80" and head[1:2] in b"\x01\x02\x03\x04\x05":
        size = scan.entries[rel].size
        data = scan.head(rel, min(size, READ.pickle_bytes))
        names = pickle_globals(data, streams=4)  # legacy: magic, protocol, system facts, then the object
        return PickleFacts("legacy", names, unsafe_names(names), TensorInventory(shards=[rel]))
    return None


def _read_zip(scan: Scan, rel: str) -> PickleFacts | None:
    try:
        with scan.open(rel) as stream, zipfile.ZipFile(stream) as archive:
            members = archive.infolist()
            if len(members) > READ.zip_entries:
                raise read_error("artifact.corrupt", f"`{rel}` has too many members", rel, str(len(members)))
            return _zip_facts(archive, members, rel, scan.entries[rel].size)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, struct.error) as error:
        raise read_error("artifact.truncated", f"`{rel}` is a broken zip: {error}", rel) from None





def _zip_facts(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], rel: str, size: int) -> PickleFacts | None:
    names = {m.filename for m in members}
    if any(n.endswith("/archive_format") or n == "archive_format" for n in names):
        return PickleFacts("torch_export")
    if any("/code/" in n or n.startswith("code/") for n in names) and any(n.endswith("constants.pkl") for n in names):
        return PickleFacts("torchscript")
    data = next((m for m in members if m.filename.endswith("data.pkl")), None)
    if data is None:
        return None
    text = read_member(archive, data, rel, READ.pickle_bytes)
    found = pickle_globals(text)
    facts = PickleFacts("zip", found, unsafe_names(found), TensorInventory(shards=[rel]))
    stored = {m.filename: m for m in members}
    prefix = data.filename.removesuffix("data.pkl")
    if not facts.unsafe:
        _list_tensors(text, facts.inventory, rel, prefix, stored)
    return facts


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, rel: str, limit: int) -> bytes:
    """Content of a zip member of at most ``limit`` bytes, whatever its header claims."""
    if member.file_size > limit:
        raise read_error("artifact.corrupt", f"`{member.filename}` in `{rel}` unpacks to {member.file_size} bytes", rel,
                         str(member.file_size), f"at most {limit}")
    with archive.open(member) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise read_error("artifact.corrupt", f"`{member.filename}` in `{rel}` unpacks to more than it claims", rel)
    return data


def _list_tensors(data: bytes, inventory: TensorInventory, rel: str, prefix: str, stored: dict[str, zipfile.ZipInfo]) -> None:
    """Tensors of a plain state dict by a symbolic run of its opcodes; left empty for other layouts."""
    try:
        value = _symbolic(data)
    except Exception:  # an unusual layout is no fault of the file
        return
    for name, tensor in _flatten(value):
        dtype, key, shape, width = tensor
        count = width
        for dim in shape:
            count *= dim
        member = stored.get(f"{prefix}data/{key}")
        if member is None:
            inventory.problems.append(Finding("artifact.truncated", Severity.ERROR, f"the data of `{name}` is not in `{rel}`", rel))
            continue
        inventory.tensors[name] = TensorInfo(name, dtype, tuple(shape), rel, member.header_offset, count)


Tensor = tuple[str, str, list[int], int]


def _flatten(value: Any, prefix: str = "", depth: int = 0) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    if isinstance(value, dict) and depth < 4:
        for key, item in value.items():
            if isinstance(item, tuple) and len(item) == 4 and item[0] in {d for d, _ in STORAGES.values()}:
                found.append((f"{prefix}{key}", item))
            elif isinstance(item, dict):
                found += _flatten(item, f"{prefix}{key}." if key != "state_dict" else prefix, depth + 1)
    return found


def _symbolic(data: bytes) -> Any:
    """Value of a pickle with every call replaced by a description; nothing is imported."""
    mark = object()
    stack: list[Any] = []
    memo: dict[int, Any] = {}

    def pop_mark() -> list[Any]:
        items: list[Any] = []
        while (item := stack.pop()) is not mark:
            items.append(item)
        return items[::-1]

    for opcode, argument, _ in pickletools.genops(data):
        name = opcode.name
        if name == "MARK":
            stack.append(mark)
        elif name in MEMO_PUT:
            memo[int(str(argument))] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in MEMO_GET:
            stack.append(memo[int(str(argument))])
        elif name == "GLOBAL":
            stack.append(("global", str(argument).replace(" ", ".", 1)))
        elif name == "STACK_GLOBAL":
            attribute, module = stack.pop(), stack.pop()
            stack.append(("global", f"{module}.{attribute}"))
        elif name in ("EMPTY_DICT", "EMPTY_LIST", "EMPTY_TUPLE", "EMPTY_SET"):
            stack.append({} if name == "EMPTY_DICT" else () if name == "EMPTY_TUPLE" else [])
        elif name == "TUPLE":
            stack.append(tuple(pop_mark()))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name in ("SETITEM", "SETITEMS"):
            items = pop_mark() if name == "SETITEMS" else [stack.pop(-2), stack.pop()]
            if isinstance(stack[-1], dict):
                stack[-1].update(zip(items[::2], items[1::2], strict=True))
        elif name in ("APPEND", "APPENDS"):
            items = pop_mark() if name == "APPENDS" else [stack.pop()]
            if isinstance(stack[-1], list):
                stack[-1].extend(items)
        elif name in ("REDUCE", "NEWOBJ"):
            arguments, function = stack.pop(), stack.pop()
            stack.append(_called(function, arguments))
        elif name == "BUILD":
            stack.pop()
        elif name == "BINPERSID":
            stack.append(("storage", stack.pop()))
        elif name in ("PROTO", "FRAME"):
            continue
        elif name == "STOP":
            return stack.pop()
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            stack.append({"NONE": None, "NEWTRUE": True, "NEWFALSE": False}[name])
        elif opcode.arg is not None:
            stack.append(argument)
        else:
            raise ValueError(name)
    raise ValueError("no end")


def _called(function: Any, arguments: Any) -> Any:
    name = function[1] if isinstance(function, tuple) and function[:1] == ("global",) else ""
    if name == "collections.OrderedDict":
        return {}
    if name.startswith("torch._utils._rebuild_tensor"):
        storage, _, shape = arguments[:3]
        _, (_, kind, key, *_) = storage
        dtype, width = STORAGES[kind[1].rsplit(".", 1)[-1]]
        return (dtype, str(key), list(shape), width)
    if name == "torch._utils._rebuild_parameter":
        return arguments[0]
    return None


# ---- detection ---------------------------------------------------------------------------------


def unsafe_finding(rel: str, names: list[str]) -> Finding:
    """The finding that refuses a pickle for what it would import."""
    return Finding("code.pickle_unsafe", Severity.ERROR,
                   f"loading `{rel}` would run `{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
                   rel, ", ".join(names[:8]), "only tensors and plain containers")


def detect(scan: Scan) -> list[Artifact]:
    """Torch files that no other artifact of the package accounts for."""
    found: list[Artifact] = []
    claimed: set[str] = scan.once("claimed", set)
    for rel in scan.entries:
        if not rel.endswith(SUFFIXES) or rel in claimed or not scan.wanted(rel):
            continue
        if rel.endswith(".bin") and scan.has(rel.removesuffix(".bin") + ".xml"):
            continue  # weights of an OpenVINO graph
        artifact = _artifact(scan, rel)
        if artifact is not None:
            found.append(artifact)
    return found


def _artifact(scan: Scan, rel: str) -> Artifact | None:
    kinds = {"torchscript": ArtifactKind.TORCHSCRIPT, "torch_export": ArtifactKind.TORCH_EXPORT}
    try:
        facts = read_pickle(scan, rel)
    except ReadError as error:
        return Artifact(f"torch_pickle:{rel}", ArtifactKind.TORCH_PICKLE, rel, [rel], findings=[error.finding],
                        size_bytes=scan.size_of([rel]))
    if facts is None:
        return None
    kind = kinds.get(facts.form, ArtifactKind.TORCH_PICKLE)
    artifact = Artifact(f"{kind}:{rel}", kind, rel, [rel], facts.inventory, size_bytes=scan.size_of([rel]))
    artifact.tasks.append(TaskEvidence("tensor", f"layout:{rel}", Strength.LAYOUT))
    if facts.unsafe:
        artifact.code = CodeNeed.FORBIDDEN
        artifact.findings.append(unsafe_finding(rel, facts.unsafe))
    return artifact
