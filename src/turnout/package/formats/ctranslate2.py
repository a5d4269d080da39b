"""CTranslate2 directories: the header of model.bin says binary version and specification.

Layout: https://github.com/OpenNMT/CTranslate2 (src/models/model.cc): u32 binary version, u16 length and
bytes of the specification's name, u32 revision, u32 number of variables.
"""

from __future__ import annotations

import struct

from turnout.package.facts import Artifact, ArtifactKind, Fact, Finding, Severity, Strength, TaskEvidence
from turnout.package.formats.context import read_context
from turnout.package.formats.transformers import attach
from turnout.package.scan import Scan, join, parent_of
from turnout.types import Task

SPEC_TASKS = {
    "TransformerDecoderSpec": (Task.TEXT_GENERATION,),
    "TransformerSpec": (Task.TRANSLATION, Task.TEXT2TEXT),
    "TransformerEncoderSpec": (Task.EMBEDDINGS,),
    "WhisperSpec": (Task.ASR,),
    "Wav2Vec2Spec": (Task.ASR,),
    "Wav2Vec2BertSpec": (Task.ASR,),
}
VOCABULARIES = ("vocabulary.json", "vocabulary.txt", "shared_vocabulary.json", "shared_vocabulary.txt", "source_vocabulary.json",
                "source_vocabulary.txt", "target_vocabulary.json", "target_vocabulary.txt")


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
        artifact.findings.append(Finding("component.missing", Severity.ERROR, "the directory has no vocabulary", directory or ".", "absent", "vocabulary.json"))
    tasks = list(SPEC_TASKS.get(spec, ()))
    if Task.TEXT_GENERATION in tasks and any(t.valid for t in artifact.templates):
        tasks.insert(0, Task.CHAT)
    artifact.tasks = [TaskEvidence(task, f"{rel}#header", Strength.HEADER) for task in tasks]
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact
