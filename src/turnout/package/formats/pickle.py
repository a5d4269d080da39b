"""Torch checkpoints: opcodes are listed, never run.

A checkpoint is a zip with ``*/data.pkl`` and ``data/N`` (torch >= 1.6), or a bare pickle stream
(older). TorchScript is a zip with ``code/`` and ``constants.pkl``; an exported program is a zip with
``models/*.json`` and ``archive_format``.
"""

from __future__ import annotations

import io
import pickletools
import re
import zipfile
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
from turnout.package.formats.archive import open_zip, read_member
from turnout.package.scan import ReadError, Scan, read_error

SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
# Names that torch's weights_only unpickler accepts (torch/_weights_only_unpickler.py).
ALLOWED = frozenset(
    {
        "collections.OrderedDict",
        "collections.Counter",
        "torch._utils._rebuild_tensor",
        "torch._utils._rebuild_tensor_v2",
        "torch._utils._rebuild_tensor_v3",
        "torch._utils._rebuild_parameter",
        "torch._utils._rebuild_parameter_with_state",
        "torch._utils._rebuild_qtensor",
        "torch._utils._rebuild_sparse_tensor",
        "torch._utils._rebuild_nested_tensor",
        "torch._utils._rebuild_meta_tensor_no_storage",
        "torch._utils._rebuild_wrapper_subclass",
        "torch._utils._rebuild_device_tensor_from_cpu_tensor",
        "torch._utils._rebuild_device_tensor_from_numpy",
        "torch._tensor._rebuild_from_type_v2",
        "torch.nn.parameter.Parameter",
        "torch.Size",
        "torch.Tensor",
        "torch.device",
        "torch.serialization._get_layout",
        "torch.storage.UntypedStorage",
        "torch.storage.TypedStorage",
        "_codecs.encode",
        "builtins.bytearray",
        "builtins.set",
        "builtins.complex",
    }
)
# torch.X for X an element type, layout or quantization scheme: plain values.
PLAIN = re.compile(
    r"torch\.(b?float\d+(_e\dm\d+(fn)?(uz|u|_x2)?)?|u?int\d+|bool|complex\d+|q[iu]+nt\d+(x\d)?|bits\d+(x\d)?"
    r"|per_(tensor|channel)_(affine(_float_qparams)?|symmetric))"
)
STORAGES = {
    "FloatStorage": ("F32", 4),
    "HalfStorage": ("F16", 2),
    "BFloat16Storage": ("BF16", 2),
    "DoubleStorage": ("F64", 8),
    "LongStorage": ("I64", 8),
    "IntStorage": ("I32", 4),
    "ShortStorage": ("I16", 2),
    "CharStorage": ("I8", 1),
    "ByteStorage": ("U8", 1),
    "BoolStorage": ("BOOL", 1),
    "float8_e4m3fn": ("F8_E4M3", 1),
    "float8_e5m2": ("F8_E5M2", 1),
    "uint16": ("U16", 2),
    "uint32": ("U32", 4),
    "uint64": ("U64", 8),
}
# torch.FloatStorage, torch.cuda.HalfTensor, torch.sparse.IntTensor and so on.
TYPED = re.compile(
    r"torch\.(cuda\.|sparse\.|cuda\.sparse\.)?(Float|Half|BFloat16|Double|Long|Int|Short|Char|Byte|Bool)(Storage|Tensor)"
    r"|torch\.(cuda\.)?(Complex(Float|Double)|QU?Int\d+(x\d)?|Untyped|Typed)Storage"
)
TEXT_OPCODES = frozenset(
    {"SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "UNICODE", "STRING", "BINSTRING", "SHORT_BINSTRING"}
)
MEMO_PUT = frozenset({"PUT", "BINPUT", "LONG_BINPUT"})
MEMO_GET = frozenset({"GET", "BINGET", "LONG_BINGET"})
MAX_OPCODES = 1_500_000
MAX_LISTED = 1_000_000  # opcodes of a file whose tensors are listed; a tensor takes about 30
MAX_BYTES = 24 << 20  # of a pickle with tensors beside it
MAX_MEMO = 500_000
# First pickle of a file in torch's old form: the number 0x1950a86a20f9469cfc6c.
LEGACY_MAGIC = b"\x80\x02\x8a\x0al\xfc\x9cF\xf9 j\xa8P\x19."


@dataclass(slots=True)
class PickleFacts:
    """``form``: zip, legacy, pickle, torchscript, torch_export. ``unsafe``: names beyond the allowed set."""

    form: str
    globals: list[str] = field(default_factory=list)
    unsafe: list[str] = field(default_factory=list)
    inventory: TensorInventory = field(default_factory=TensorInventory)


def pickle_globals(data: bytes, streams: int = 1) -> list[str]:
    """Names (``module.name``) that unpickling ``data`` would import, in order, by opcodes alone.

    ``streams`` pickles that follow one another are read, all of which must be whole. A name that only
    running the pickle could tell is given as ``?``. Raises ``ReadError`` for bytes that are no pickle.
    """
    found: dict[str, None] = {}
    stream = io.BytesIO(data)
    for _ in range(streams):
        try:
            _walk(stream, found)
        except ReadError:
            raise
        except Exception as error:  # pickletools raises many kinds on bytes that are no pickle
            raise read_error("artifact.corrupt", f"not a pickle stream: {error}"[:200], "") from None
    return list(found)


def _walk(stream: io.BytesIO, found: dict[str, None]) -> None:
    """Keeps the stack as the unpickler would, with every value but text unknown, so that what
    STACK_GLOBAL takes is what the unpickler would take."""
    stack: list[object] = []
    memo: dict[int, str] = {}
    put = 0
    for count, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        name = opcode.name
        if count > MAX_OPCODES or len(memo) > MAX_MEMO:
            raise read_error("artifact.corrupt", "the pickle has too many opcodes", "", str(count), str(MAX_OPCODES))
        if name in TEXT_OPCODES:
            stack.append(_plain(str(argument)))
        elif name == "MEMOIZE" or name in MEMO_PUT:
            index = put if name == "MEMOIZE" else int(str(argument))
            put += 1
            if isinstance(top := stack[-1], str):
                memo[index] = top
            else:
                memo.pop(index, None)
        elif name in MEMO_GET:
            stack.append(memo.get(int(str(argument))))
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            _name(name, argument, stack, found)
            _shift(opcode, stack)


def _plain(text: str) -> str:
    """Text without half characters, which pickles may hold and messages may not."""
    return text.encode("utf-8", "replace").decode("utf-8")


def _name(name: str, argument: Any, stack: list[object], found: dict[str, None]) -> None:
    if name in ("GLOBAL", "INST"):
        found[_sayable(str(argument).replace(" ", ".", 1))] = None
    elif name == "STACK_GLOBAL":
        module, attribute = (value if isinstance(value, str) else "?" for value in stack[-2:])
        found[_sayable(f"{module}.{attribute}")] = None
    elif name in ("EXT1", "EXT2", "EXT4"):
        found[f"copyreg.extension_{argument}"] = None


def _sayable(name: str) -> str:
    """The name with half characters, which pickles may hold, spelt out."""
    return name.encode("utf-8", "backslashreplace").decode()


def _shift(opcode: pickletools.OpcodeInfo, stack: list[object]) -> None:
    """Takes and puts as many values as the opcode's table says; a mark ends what it takes."""
    before, after = opcode.stack_before, opcode.stack_after
    if pickletools.markobject in before:
        while stack.pop() is not pickletools.markobject:
            pass
        before = before[: before.index(pickletools.markobject)]
    if len(before) > len(stack):
        raise ValueError("an opcode takes more than there is")
    if before:
        del stack[-len(before) :]
    stack.extend(pickletools.markobject if value is pickletools.markobject else None for value in after)


def unsafe_names(names: list[str]) -> list[str]:
    """Names outside what a weights-only unpickler accepts (it knows Python 2's name of ``builtins``)."""
    modern = {name: re.sub(r"^__builtin__\.", "builtins.", name) for name in names}
    return [n for n, m in modern.items() if not (m in ALLOWED or PLAIN.fullmatch(m) or TYPED.fullmatch(m))]


# ---- torch files -------------------------------------------------------------------------------


def read_pickle(scan: Scan, rel: str) -> PickleFacts | None:
    """Facts of a torch file, None when it is neither a torch zip nor a pickle.

    Raises ``ReadError`` for a file that is one but broken or beyond the limits.
    """
    before = scan.check_weights_file(rel)
    if before is not None:
        raise ReadError(before)
    head = scan.head(rel, len(LEGACY_MAGIC))
    if head[:4] == b"PK\x03\x04":
        return _read_zip(scan, rel)
    if head[:1] == b"\x80" and head[1:2] in b"\x01\x02\x03\x04\x05":
        data = scan.head(rel, min(scan.entries[rel].size, MAX_BYTES))
        # Old form: magic, protocol, system facts, the object, storage keys; then raw storages.
        legacy = head == LEGACY_MAGIC
        names = pickle_globals(data, streams=5 if legacy else 1)
        return PickleFacts("legacy" if legacy else "pickle", names, unsafe_names(names), TensorInventory(shards=[rel]))
    return None


def _read_zip(scan: Scan, rel: str) -> PickleFacts | None:
    with open_zip(scan, rel) as archive:
        return _zip_facts(archive, archive.infolist(), rel)


def _zip_facts(archive: zipfile.ZipFile, members: list[zipfile.ZipInfo], rel: str) -> PickleFacts | None:
    names = {m.filename for m in members}
    # Every pickle counts: which of several a loader would open is its own business.
    pickles = [m for m in members if m.filename.rsplit("/", 1)[-1] == "data.pkl"]
    if any(n.endswith("/archive_format") or n == "archive_format" for n in names):
        form = "torch_export"
    elif any("/code/" in n or n.startswith("code/") for n in names) and any(n.endswith("constants.pkl") for n in names):
        form = "torchscript"
        pickles += [m for m in members if m.filename.endswith("constants.pkl")]
    elif not pickles:
        return None
    else:
        form = "zip"
    left = MAX_BYTES
    texts = []
    for member in pickles:
        texts.append(read_member(archive, member, rel, left))
        left -= len(texts[-1])
    found = list(dict.fromkeys(name for text in texts for name in pickle_globals(text)))
    script = form == "torchscript"  # its own classes are compiled, not imported
    unsafe = [n for n in unsafe_names(found) if not (script and n.startswith(("__torch__.", "torch.jit._pickle.")))]
    facts = PickleFacts(form, found, unsafe, TensorInventory(shards=[rel]))
    if form == "zip" and len(texts) == 1 and not unsafe:
        prefix = pickles[0].filename.removesuffix("data.pkl")
        _list_tensors(texts[0], facts.inventory, rel, prefix, {m.filename: m for m in members})
    return facts


def _list_tensors(
    data: bytes, inventory: TensorInventory, rel: str, prefix: str, stored: dict[str, zipfile.ZipInfo]
) -> None:
    """Tensors of a plain state dict by a symbolic run of its opcodes; left empty for other layouts."""
    try:
        tensors = _flatten(_symbolic(data))
    except Exception:  # an unusual layout is no fault of the file
        return
    for name, (dtype, key, shape, offset, width) in tensors:
        count = width
        for dim in shape:
            count *= dim
        member = stored.get(f"{prefix}data/{key}")
        have = member.file_size - offset * width if member is not None else 0
        if member is None or (count > have and 0 not in shape):
            message = f"the data of `{name}` is not whole in `{rel}`"
            inventory.problems.append(
                Finding("artifact.truncated", Severity.ERROR, message, rel, f"{have} bytes", f"{count} bytes")
            )
            return
        inventory.tensors[name] = TensorInfo(name, dtype, tuple(shape), rel, member.header_offset, count)


Tensor = tuple[str, str, list[int], int, int]  # dtype, key of the storage, shape, offset in elements, bytes of one


def _flatten(value: Any) -> list[tuple[str, Tensor]]:
    found: list[tuple[str, Tensor]] = []
    seen = 0
    layer: list[tuple[str, Any]] = [("", value)]
    for _ in range(4):
        following: list[tuple[str, Any]] = []
        for prefix, item in layer:
            for key, part in item.items() if isinstance(item, dict) else ():
                seen += 1
                if seen > READ.tensors:
                    raise ValueError("too many entries")  # one dict may stand in many places
                if isinstance(part, _Stored):
                    found.append((_plain(f"{prefix}{key}"), part.tensor))
                elif isinstance(part, dict):
                    following.append((prefix if key == "state_dict" else f"{prefix}{key}.", part))
        layer = following
    return found


@dataclass(slots=True)
class _Stored:
    tensor: Tensor


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

    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        name = opcode.name
        if count > MAX_LISTED:
            raise ValueError("too many opcodes")
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
    if name in ("torch._utils._rebuild_tensor", "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
        storage, offset, shape = arguments[:3]
        _, (_, kind, key, *_) = storage
        typed = arguments[6][1] if name.endswith("v3") else kind[1]  # v3 names the type beside an untyped storage
        dtype, width = STORAGES[typed.rsplit(".", 1)[-1]]
        if not all(type(n) is int and 0 <= n < 1 << 48 for n in (offset, *shape)) or len(shape) > 64:
            raise ValueError("impossible shape")
        return _Stored((dtype, str(key), list(shape), offset, width))
    if name == "torch._utils._rebuild_parameter":
        return arguments[0]
    return None


# ---- detection ---------------------------------------------------------------------------------


def unsafe_finding(rel: str, names: list[str]) -> Finding:
    """The finding that refuses a pickle for what it would import."""
    return Finding(
        "code.pickle_unsafe",
        Severity.ERROR,
        f"loading `{rel}` would run `{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
        rel,
        ", ".join(names[:8]),
        "only tensors and plain containers",
    )


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
        return Artifact(
            f"torch_pickle:{rel}",
            ArtifactKind.TORCH_PICKLE,
            rel,
            [rel],
            findings=[error.finding],
            size_bytes=scan.size_of([rel]),
        )
    if facts is None:
        return None
    kind = kinds.get(facts.form, ArtifactKind.TORCH_PICKLE)
    artifact = Artifact(f"{kind}:{rel}", kind, rel, [rel], facts.inventory, size_bytes=scan.size_of([rel]))
    artifact.tasks.append(TaskEvidence("tensor", f"layout:{rel}", Strength.LAYOUT))
    if facts.form == "pickle" and not facts.unsafe:
        artifact.findings.append(
            Finding("artifact.corrupt", Severity.ERROR, f"`{rel}` is a pickle that torch did not write", rel)
        )
    if facts.unsafe:
        artifact.code = CodeNeed.FORBIDDEN
        artifact.findings.append(unsafe_finding(rel, facts.unsafe))
    return artifact
