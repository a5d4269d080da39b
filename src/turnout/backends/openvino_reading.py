"""Around OpenVINO's reading of a graph: which files, versions, and what a refusal says.

Pure text and files; the library itself is not imported here.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from turnout.backends.base import Action, Case, Kind, Remedy, Requirement, met, unknown, unmet
from turnout.backends.requirements import truthy
from turnout.config import cache_dir
from turnout.errors import LoadError
from turnout.package.facts import Artifact, ArtifactKind, Graph
from turnout.package.scan import Scan

# Newest versions whose meaning is published with ONNX 1.23. OpenVINO reads newer ones without a
# word (measured: opset 29, IR 15), so what it makes of them is not known.
KNOWN_OPSET, KNOWN_IR = 28, 14
KNOWN_OPENVINO_IR = 11


def first_line(error: BaseException) -> str:
    """The line of the library's message that says what happened, without its source places."""
    noise = ("Exception from ", "Check '", "FrontEnd API failed", "Loading input model", "While validating")
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    telling = [line for line in lines if not line.startswith(noise)]
    return (telling or lines or [type(error).__name__])[0][:300]


# ---- what the library said -------------------------------------------------------------

_NO_RULE = re.compile(r"No conversion rule found for operations: (.+)")
_NO_CONVERSION = re.compile(r"Conversion is failed for: (.+)")
_NO_TRANSLATOR = re.compile(r"No translator found for (\S+) node")
_NO_OPERATION = re.compile(r"Opset (\S+) doesn't contain the operation with type: (\S+)")
_NEW_OPSET = re.compile(r"from unsupported opset: (\S+)")
_OUTSIDE = re.compile(r"Path '(.+?)' resolves to .* outside the base directory")
_EXTERNAL = re.compile(r"externally stored data in file \((.+?), offset: (\d+), data_length: (\d+)\)")


def read_failures(error: BaseException, graph: Graph | None, entry: str) -> list[Requirement]:
    """The library's refusal to read a graph, one requirement per cause it names."""
    text = str(error)
    for pattern, tell in (
        (_NO_RULE, lambda m: [_unconverted(op, entry) for op in _list(m[1])]),
        (_NO_CONVERSION, lambda m: [_failed_conversion(op, text, entry) for op in _list(m[1])]),
        (_NO_TRANSLATOR, lambda m: [no_kernel(m[1], "has no translator for it", entry)]),
        (_NO_OPERATION, lambda m: [no_kernel(m[2], f"has no such operation in {m[1]}", entry)]),
        (_NEW_OPSET, lambda m: [_new_opset(m[1], entry)]),
        (_OUTSIDE, lambda m: [_outside(m[1], entry)]),
        (_EXTERNAL, lambda m: [_external(m[1], entry)]),
    ):
        match = pattern.search(text)
        if match:
            return list(tell(match))
    if "Empty weights data in bin file" in text:
        missing = str(Path(entry).with_suffix(".bin"))
        return [
            unmet(Kind.INTEGRITY, "artifact.missing", "the weights file is not there", expected=missing, where=entry)
        ]
    if "Incorrect weights in bin file" in text:
        short = str(Path(entry).with_suffix(".bin"))
        return [
            unmet(Kind.INTEGRITY, "artifact.truncated", "the weights file is shorter than the graph says", where=short)
        ]
    foreign = _foreign(graph)
    if foreign:  # a first failure of another kind hides the operators behind it
        return [_unconverted(op, entry) for op in foreign]
    code = "artifact.corrupt" if "Unable to read the model" in text else "runtime.failed"
    return [unmet(Kind.INTEGRITY, code, f"OpenVINO cannot read it: {first_line(error)}", where=entry)]


def _list(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


def _foreign(graph: Graph | None) -> list[str]:
    """Operators of ONNX-ML, which has no counterpart in OpenVINO, as ``domain.Type``."""
    ops = graph.ops if graph else {}
    return [op.replace("::", ".") for op in ops if op.startswith("ai.onnx.ml::")]


def _unconverted(op: str, entry: str) -> Requirement:
    domain, _, name = op.rpartition(".")
    if domain and domain not in ("com.microsoft", "org.openvinotoolkit"):
        return unmet(
            Kind.OPERATOR,
            "operator.unknown_domain",
            f"OpenVINO knows no operator `{name}` of the domain `{domain}`",
            observed=op,
            expected="an operator with a conversion rule",
            where=entry,
        )
    return no_kernel(op, "has no conversion rule for it", entry)


def no_kernel(op: str, why: str, entry: str) -> Requirement:
    """The reason that OpenVINO ``why`` (a predicate) the operator ``op``."""
    return unmet(
        Kind.OPERATOR,
        "operator.no_kernel",
        f"operator `{op}`: OpenVINO {why}",
        observed=op,
        expected="an operator that OpenVINO converts",
        where=entry,
    )


def _failed_conversion(op: str, text: str, entry: str) -> Requirement:
    """An operator the library knows and still cannot convert here, with the detail it gives."""
    _, _, block = text.partition(f"-- {op} with a message:")
    block = block.split("\n-- ")[0].split("\nSummary")[0]
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    detail = next((line for line in reversed(lines) if not line.startswith(("Check ", "While ", "FrontEnd "))), "")
    why = f"cannot convert it here: {detail}" if detail else "cannot convert it here"
    return no_kernel(op, why, entry)


def _new_opset(opset: str, entry: str) -> Requirement:
    return unmet(
        Kind.OPERATOR,
        "operator.opset_too_new",
        f"the graph uses `{opset}`, which this OpenVINO does not have",
        observed=opset,
        expected="an opset of this OpenVINO",
        where=entry,
        remedies=[Remedy(Action.UPGRADE, "upgrade OpenVINO", ["pip", "install", "--upgrade", "openvino"])],
    )


def _outside(name: str, entry: str) -> Requirement:
    remedy = Remedy(
        Action.SET_OPTION,
        "let turnout link or copy the files into its cache with `--option materialise=true`",
        ["--option", "materialise=true"],
    )
    return unmet(
        Kind.INTEGRITY,
        "artifact.path_escape",
        "OpenVINO follows no link out of the graph's own folder for external data",
        observed=f"`{name}` is a link out of the folder",
        expected="data beside the graph",
        where=entry,
        remedies=[remedy],
    )


def _external(name: str, entry: str) -> Requirement:
    return unmet(
        Kind.INTEGRITY,
        "artifact.missing",
        f"the external data `{name}` is not there, or shorter than the graph says",
        observed=name,
        expected="the whole file beside the graph",
        where=entry,
    )


# ---- files -----------------------------------------------------------------------------


def graph_files(artifact: Artifact) -> dict[str, str]:
    """Graphs to compile by role: ``model``, or ``encoder`` and ``decoder``; paths below the root."""
    if artifact.kind is ArtifactKind.ONNX_SEQ2SEQ:
        return {c.role: c.path for c in artifact.components if c.role in ("encoder", "decoder")}
    entry = artifact.entry
    if artifact.kind is ArtifactKind.TF_SAVED_MODEL and entry.endswith("saved_model.pb"):
        entry = entry.rpartition("/")[0]
    return {"model": entry}


def materialise(case: Case) -> Path:
    """Folder in turnout's cache that holds the artifact's files themselves where they are links.

    Only links inside the package or into the same Hugging Face cache are followed; raises
    ``LoadError`` ``artifact.path_escape`` for others.
    """
    entries = Scan.of(case.root).entries
    wanted = {*case.artifact.files, *(graph_files(case.artifact).values())}
    files = [rel for rel in sorted(wanted) if os.path.isfile(case.file(rel))]
    mark = hashlib.sha256()
    for rel in files:
        entry = entries.get(rel)
        if entry is None or entry.link == "escape":
            raise LoadError(f"`{rel}` leads out of the package", code="artifact.path_escape")
        real = os.path.realpath(case.file(rel))
        stat = os.stat(real)
        mark.update(f"{rel}\0{real}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
    folder = cache_dir() / "materialised" / mark.hexdigest()[:24]
    for rel in files:
        target = folder / rel
        if not target.exists():
            _place(os.path.realpath(case.file(rel)), target)
    return folder


def _place(source: str, target: Path) -> None:
    """A hard link where the file system allows one, else a copy that appears whole or not at all."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f"{target.name}.{os.getpid()}.part")
    try:
        os.link(source, partial)
    except OSError:
        shutil.copyfile(source, partial)
    os.replace(partial, target)


def paths_of(case: Case) -> dict[str, str]:
    """Graphs by role as absolute paths, in the cache when the option ``materialise`` is on."""
    files = graph_files(case.artifact)
    if truthy(case.options.get("materialise")) and any(os.path.islink(case.file(f)) for f in case.artifact.files):
        folder = materialise(case)
        return {role: str(folder / rel) for role, rel in files.items()}
    return {role: case.file(rel) for role, rel in files.items()}


# ---- versions ----


def version_requirements(artifact: Artifact) -> list[Requirement]:
    """Whether the graphs' operator sets and file versions are ones whose meaning is known."""
    facts = [
        artifact.facts[f"{role}_graph"].value for role in ("encoder", "decoder") if f"{role}_graph" in artifact.facts
    ]
    graphs = [graph for graph in (artifact.graph, *facts) if isinstance(graph, Graph)]
    if artifact.kind is ArtifactKind.OPENVINO_IR:
        newer = [g.ir_version for g in graphs if g.ir_version is not None and g.ir_version > KNOWN_OPENVINO_IR]
        return [_too_new("operator.ir_too_new", "IR version", v, KNOWN_OPENVINO_IR, unmet) for v in newer]
    if artifact.kind not in (ArtifactKind.ONNX, ArtifactKind.ONNX_SEQ2SEQ):
        return []
    opset = max((g.opsets.get(domain, 0) for g in graphs for domain in ("", "ai.onnx")), default=0)
    version = max((g.ir_version or 0 for g in graphs), default=0)
    found = []
    if opset > KNOWN_OPSET:
        found.append(_too_new("operator.opset_too_new", "opset", opset, KNOWN_OPSET, unknown))
    if version > KNOWN_IR:
        found.append(_too_new("operator.ir_too_new", "IR version", version, KNOWN_IR, unknown))
    return found or [met("operator.versions", Kind.OPERATOR, f"opset {opset}")]


def _too_new(code: str, what: str, observed: int, newest: int, make: Callable[..., Requirement]) -> Requirement:
    tail = "OpenVINO reads it without a word; running it against a reference would settle it"
    message = f"{what} {observed} is newer than any that is known ({newest})"
    return make(
        Kind.OPERATOR,
        code,
        f"{message}; {tail}" if make is unknown else message,
        observed=str(observed),
        expected=f"at most {newest}",
    )
