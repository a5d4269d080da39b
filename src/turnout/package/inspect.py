"""``inspect(path) -> Package``: ordered detectors over a bounded scan; never raises on an odd package."""

from __future__ import annotations

import os
import time
from importlib import import_module

from turnout.errors import NotFoundError
from turnout.package.facts import Artifact, ArtifactKind, Finding, Package, Severity
from turnout.package.scan import ReadError, Scan

# Order matters only for reading: directories with their own manifest first, loose files last.
# Each module has ``detect(scan) -> list[Artifact]``.
DETECTORS = (
    "diffusers",
    "transformers",
    "sentence_transformers",
    "peft",
    "gguf",
    "onnx_genai",
    "onnx",
    "openvino",
    "ctranslate2",
    "tflite",
    "saved_model",
    "pickle",
    "tabular",
    "tokenizer",
)


def inspect(path: str | os.PathLike[str]) -> Package:
    """Reads every artifact at ``path`` without executing anything of it.

    ``path`` is a directory or a single file (siblings then serve it). Raises ``NotFoundError``
    when nothing is there; an odd, broken or hostile package is described by findings instead.
    """
    started = time.perf_counter()
    try:
        scan = Scan.of(path)
    except FileNotFoundError:
        raise NotFoundError(
            f"nothing at `{path}`", hints=["`turnout list` shows the models that are known here"]
        ) from None
    artifacts: list[Artifact] = []
    for name in DETECTORS:
        artifacts.extend(_detect(name, scan))
    if not artifacts:
        artifacts = _unknown(scan)
    artifacts = _unique(artifacts)
    used = {rel for artifact in artifacts for rel in artifact.files}
    # A single file has neighbours that are none of its business; only what serves it is listed. And only
    # what artifacts are made of counts for their identity: a log that grows beside them changes nothing.
    listed = (
        scan.entries.values()
        if scan.focus is None
        else [e for r, e in scan.entries.items() if r in used or r == scan.focus]
    )
    return Package(
        root=str(scan.root),
        source=os.fspath(path),
        fingerprint=scan.fingerprint(used or None),
        files=list(listed),
        artifacts=artifacts,
        findings=scan.findings,
        scan_ms=(time.perf_counter() - started) * 1000,
    )


def _detect(name: str, scan: Scan) -> list[Artifact]:
    module = import_module(f"turnout.package.formats.{name}")
    try:
        found: list[Artifact] = module.detect(scan)
        return found
    except ReadError as error:
        scan.findings.append(error.finding)
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        IndexError,
        AttributeError,
        OverflowError,
        MemoryError,
        RecursionError,
    ) as error:
        # A reader's own gap must not hide what the other readers found.
        scan.add("artifact.corrupt", Severity.ERROR, f"the {name} reader gave up: {type(error).__name__}: {error}")
    return []


def _unknown(scan: Scan) -> list[Artifact]:
    entry = scan.focus or ""
    finding = Finding(
        "artifact.missing",
        Severity.WARNING,  # not an error: a plug-in may read what the readers here do not know
        "no known model format here",
        entry,
        f"{len(scan.entries)} files",
        "weights, a graph or a manifest of a known format",
    )
    return [Artifact(id=f"unknown:{entry or '.'}", kind=ArtifactKind.UNKNOWN, entry=entry, findings=[finding])]


def _unique(artifacts: list[Artifact]) -> list[Artifact]:
    return list({artifact.id: artifact for artifact in artifacts}.values())
