"""CTranslate2 directories: model.bin says binary version, specification and the variables it holds.

Layout: https://github.com/OpenNMT/CTranslate2 (src/models/model.cc): u32 binary version, u16 length and
bytes of the specification's name, u32 revision, u32 number of variables; of each its name, u8 rank,
u32 dimensions, u8 element type, u32 bytes, and the bytes; then u32 number of aliases, each two names.
"""

from __future__ import annotations

import struct
from math import prod
from typing import BinaryIO

from turnout.config import READ
from turnout.package.facts import (
    Artifact,
    ArtifactKind,
    Fact,
    Finding,
    Severity,
    Strength,
    TaskEvidence,
    TensorInfo,
    TensorInventory,
)
from turnout.package.formats.context import read_context
from turnout.package.formats.transformers import attach
from turnout.package.scan import ReadError, Scan, join, parent_of, read_error
from turnout.types import Task

SPEC_TASKS = {
    "TransformerDecoderSpec": (Task.TEXT_GENERATION,),
    "TransformerSpec": (Task.TRANSLATION, Task.TEXT2TEXT),
    "TransformerEncoderSpec": (Task.EMBEDDINGS,),
    "WhisperSpec": (Task.ASR,),
    "Wav2Vec2Spec": (Task.ASR,),
    "Wav2Vec2BertSpec": (Task.ASR,),
}
VOCABULARIES = tuple(
    f"{kind}vocabulary.{form}" for kind in ("", "shared_", "source_", "target_") for form in ("json", "txt")
)
# Element types by number (ctranslate2/types.h), with their bytes.
TYPES = {0: ("F32", 4), 1: ("I8", 1), 2: ("I16", 2), 3: ("I32", 4), 4: ("F16", 2), 5: ("BF16", 2)}
OLDEST, NEWEST = 4, 6  # binary versions that lay variables out as above


def detect(scan: Scan) -> list[Artifact]:
    """Every model.bin whose header is CTranslate2's."""
    found = []
    claimed: set[str] = scan.once("claimed", set)
    for rel in scan.glob("model.bin"):
        header = read_spec(scan.head(rel, 512))
        if header is not None and (scan.focus is None or scan.focus == rel):
            claimed.add(rel)
            found.append(_artifact(scan, rel, *header))
    return found


def read_spec(head: bytes) -> tuple[int, str, int] | None:
    """(binary version, specification, revision) of a header, None for other files."""
    if len(head) < 12:
        return None
    version, length = struct.unpack_from("<IH", head)
    if not 2 <= version < 1000 or not 4 <= length <= 128 or len(head) < 6 + length + 4:
        return None
    name = head[6 : 6 + length].rstrip(b"\0")
    if not name.endswith(b"Spec") or not name.isascii():
        return None
    (revision,) = struct.unpack_from("<I", head, 6 + length)
    return version, name.decode(), revision


def _artifact(scan: Scan, rel: str, version: int, spec: str, revision: int) -> Artifact:
    directory = parent_of(rel)
    artifact = Artifact(f"ctranslate2:{directory or '.'}", ArtifactKind.CTRANSLATE2, directory, [rel])
    for name, value in (("binary_version", version), ("spec", spec), ("revision", revision)):
        artifact.facts[name] = Fact(value, f"{rel}#header", Strength.HEADER)
    attach(artifact, read_context(scan, directory))
    vocabularies = [join(directory, n) for n in VOCABULARIES if scan.has(join(directory, n))]
    artifact.files = list(dict.fromkeys([*artifact.files, *vocabularies]))
    if not vocabularies and spec != "Wav2Vec2Spec":
        message = "the directory has no vocabulary"
        artifact.findings.append(
            Finding("component.missing", Severity.ERROR, message, directory or ".", "absent", "vocabulary.json")
        )
    if OLDEST <= version <= NEWEST:
        try:
            artifact.tensors = read_variables(scan, rel)
            _check_vocabularies(scan, vocabularies, artifact)
        except ReadError as error:
            artifact.findings.append(error.finding)
    tasks = list(SPEC_TASKS.get(spec, ()))
    if Task.TEXT_GENERATION in tasks and any(t.valid for t in artifact.templates):
        tasks.insert(0, Task.CHAT)
    artifact.tasks = [TaskEvidence(task, f"{rel}#header", Strength.HEADER) for task in tasks]
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact


# ---- variables ---------------------------------------------------------------------------------


def read_variables(scan: Scan, rel: str) -> TensorInventory:
    """Variables of a model.bin of binary version 4 to 6 by their headers; the values are passed over.

    Raises ``ReadError`` for a file that ends early, holds more, or contradicts itself.
    """
    size = scan.entries[rel].size
    inventory = TensorInventory(shards=[rel])
    with scan.open(rel) as stream:
        (_,), name = _take(stream, rel, "I"), _name(stream, rel)
        _, count = _take(stream, rel, "II")
        if count > READ.tensors:
            raise read_error(
                "artifact.corrupt", f"`{rel}` claims {count} variables", rel, str(count), str(READ.tensors)
            )
        for _ in range(count):
            tensor = _variable(stream, rel)
            if tensor.offset + tensor.nbytes > size:
                raise read_error(
                    "artifact.truncated",
                    f"`{rel}` ends inside `{tensor.name}`",
                    rel,
                    f"{size} bytes",
                    f"at least {tensor.offset + tensor.nbytes} bytes",
                )
            if tensor.name in inventory.tensors:
                raise read_error("artifact.duplicate_tensor", f"`{rel}` holds `{tensor.name}` twice", rel, tensor.name)
            inventory.tensors[tensor.name] = tensor
            stream.seek(tensor.offset + tensor.nbytes)
        (aliases,) = _take(stream, rel, "I")
        for _ in range(min(aliases, READ.tensors)):
            alias, name = _name(stream, rel), _name(stream, rel)
            if name not in inventory.tensors:
                raise read_error("artifact.corrupt", f"`{alias}` in `{rel}` stands for what is not there", rel, name)
        if stream.tell() != size:
            raise read_error(
                "artifact.corrupt",
                f"`{rel}` holds more than its variables",
                rel,
                f"{size} bytes",
                f"{stream.tell()} bytes",
            )
    return inventory


def _variable(stream: BinaryIO, rel: str) -> TensorInfo:
    name = _name(stream, rel)
    (rank,) = _take(stream, rel, "B")
    shape = _take(stream, rel, f"{rank}I")
    number, nbytes = _take(stream, rel, "<BI")
    dtype, width = TYPES.get(number, ("", 0))
    if not dtype:
        raise read_error(
            "artifact.corrupt", f"`{name}` in `{rel}` has an unknown element type", rel, str(number), "0 to 5"
        )
    if prod(shape) * width != nbytes:
        message = f"`{name}` in `{rel}` has another length than its shape says"
        raise read_error("artifact.corrupt", message, rel, f"{nbytes} bytes", f"{prod(shape) * width} bytes")
    return TensorInfo(name, dtype, shape, rel, stream.tell(), nbytes)


def _take(stream: BinaryIO, rel: str, form: str) -> tuple[int, ...]:
    form = form if form[:1] == "<" else "<" + form
    data = stream.read(struct.calcsize(form))
    if len(data) < struct.calcsize(form):
        raise read_error("artifact.truncated", f"`{rel}` ends inside a header", rel)
    return struct.unpack(form, data)


def _name(stream: BinaryIO, rel: str) -> str:
    (length,) = _take(stream, rel, "H")
    return bytes(_take(stream, rel, f"{length}B")).rstrip(b"\0").decode("utf-8", "replace")


def _check_vocabularies(scan: Scan, files: list[str], artifact: Artifact) -> None:
    """Each vocabulary has one word for each row of the embedding it serves; the library does not look.
    Further embeddings of an encoder are of segments and features, not of words."""
    for rel in files:
        side = {"source": "encoder", "target": "decoder"}.get(rel.rsplit("/", 1)[-1].split("_")[0], "")
        words = _words(scan, rel)
        for tensor in artifact.tensors.tensors.values():
            place = tensor.name.split("/")
            embeds = len(place) > 1 and place[-1] == "weight" and place[-2] in ("embeddings", "embeddings_0")
            if not embeds or not tensor.shape or not tensor.name.startswith(side):
                continue
            if words != tensor.shape[0]:
                message = f"`{rel}` has another number of words than `{tensor.name}` has rows"
                artifact.findings.append(
                    Finding(
                        "component.invalid", Severity.ERROR, message, rel, f"{words} words", f"{tensor.shape[0]} words"
                    )
                )
                break


def _words(scan: Scan, rel: str) -> int:
    if rel.endswith(".json"):
        value = scan.json(rel, READ.json_bytes)
        return len(value) if isinstance(value, (list, dict)) else 0
    data = scan.read(rel, READ.json_bytes)
    return data.count(b"\n") + (not data.endswith(b"\n") and bool(data))
