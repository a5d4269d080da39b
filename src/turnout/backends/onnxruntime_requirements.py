"""What a case needs of ONNX Runtime: every requirement, asked of the runtime without reading weights."""

from __future__ import annotations

import re

from turnout.backends import onnxruntime_kernels as kernels
from turnout.backends.base import Action, Case, Kind, Remedy, Requirement, State, met, unknown, unmet
from turnout.backends.graph_text import DECODER_INPUTS, TEXT_INPUTS, lost_states, strange_inputs
from turnout.backends.onnxruntime_kernels import open_session, provider_of
from turnout.backends.requirements import REFUSING
from turnout.package.facts import Artifact, ArtifactKind, Graph
from turnout.tasks.numeric import numpy_dtype
from turnout.types import Task

SEQ2SEQ = frozenset({Task.TEXT2TEXT, Task.TRANSLATION, Task.SUMMARIZATION})
TEXT = frozenset({Task.TEXT_GENERATION, Task.CHAT})
GIVEN = (
    TEXT
    | SEQ2SEQ
    | {
        Task.EMBEDDINGS,
        Task.RERANK,
        Task.TEXT_CLASSIFICATION,
        Task.TOKEN_CLASSIFICATION,
        Task.FILL_MASK,
        Task.QUESTION_ANSWERING,
    }
)
# Up to this size a dry load builds the real session; above, the skeleton without weights must do.
DRY_BYTES = 512 << 20


def graph_files(artifact: Artifact) -> dict[str, str]:
    """Graphs by role (``model``, or ``encoder`` and ``decoder``), as paths below the root."""
    if artifact.kind is ArtifactKind.ONNX_SEQ2SEQ:
        return {c.role: c.path for c in artifact.components if c.role in ("encoder", "decoder")}
    return {"model": artifact.entry}


def main_dtype(artifact: Artifact) -> str:
    """Element type that holds most of the weights' bytes."""
    sizes: dict[str, int] = {}
    for tensor in artifact.tensors.tensors.values():
        sizes[tensor.dtype] = sizes.get(tensor.dtype, 0) + tensor.nbytes
    return max(sizes, key=lambda d: sizes[d]) if sizes else "float32"


def requirements_of(case: Case) -> list[Requirement]:
    """Versions, operators, kernels for every node, ports, and the option ``dtype``."""
    found: list[Requirement] = []
    for rel, graph in graphs_of(case.artifact):
        asked = [*_versions(graph, rel), *_operators(graph, rel)]
        if all(r.state is State.MET for r in asked) and not _broken(case.artifact):
            asked += _kernels(case, rel)
        found += [*asked, *_ports(graph, rel), *_inputs(case, graph, rel)]
    if case.options.get("dtype") not in (None, main_dtype(case.artifact)):
        found.append(
            unmet(
                Kind.OPTION,
                "option.unsupported",
                "a graph computes in the types it was stored with",
                observed=str(case.options["dtype"]),
                expected=main_dtype(case.artifact),
            )
        )
    if case.artifact.kind is ArtifactKind.ONNX_SEQ2SEQ and len(graph_files(case.artifact)) < 2:
        found.append(
            unmet(
                Kind.COMPONENT,
                "component.missing",
                "the pair lacks its encoder or decoder",
                where=case.artifact.entry,
            )
        )
    return found


def graphs_of(artifact: Artifact) -> list[tuple[str, Graph]]:
    """Path and facts of each graph of an artifact."""
    if artifact.graph is not None:
        return [(artifact.entry, artifact.graph)]
    files = graph_files(artifact)
    facts = {role: artifact.facts[f"{role}_graph"].value for role in files if f"{role}_graph" in artifact.facts}
    return [(files[role], graph) for role, graph in facts.items() if graph is not None]


def _broken(artifact: Artifact) -> bool:
    """Whether inspection refused the files: what is in doubt is not opened with a library."""
    return any(f.severity in REFUSING for f in (*artifact.findings, *artifact.tensors.problems))


def _versions(graph: Graph, rel: str) -> list[Requirement]:
    older = [
        Remedy(Action.SELECT_ARTIFACT, "export the model again with an older version"),
        Remedy(Action.SELECT_ARTIFACT, "look for a newer onnxruntime"),
    ]
    found: list[Requirement] = []
    if graph.ir_version is not None and not kernels.accepts(graph.ir_version, "", 13):
        newest = kernels.newest_ir()
        found.append(
            unmet(
                Kind.OPERATOR,
                "operator.ir_too_new",
                f"the file has IR version {graph.ir_version}, this runtime reads up to {newest}",
                observed=str(graph.ir_version),
                expected=f"at most {newest}",
                where=rel,
                remedies=older,
            )
        )
    for domain, opset in graph.opsets.items():
        if domain not in kernels.known_domains() or kernels.accepts(8, domain, opset):
            continue
        newest = kernels.newest_opset(domain)
        of = f" of `{domain}`" if domain else ""
        found.append(
            unmet(
                Kind.OPERATOR,
                "operator.opset_too_new",
                f"the graph uses opset {opset}{of}, this runtime knows up to {newest}",
                observed=str(opset),
                expected=f"at most {newest}",
                where=rel,
                remedies=older,
            )
        )
    return found or [met("operator.versions", Kind.OPERATOR, rel)]


def _operators(graph: Graph, rel: str) -> list[Requirement]:
    known = kernels.known_operators()
    own = set(graph.functions)
    found: list[Requirement] = []
    for op in graph.ops:
        if op in known or op in own:
            continue
        domain, _, name = op.partition("::")
        code = "operator.no_kernel" if domain in kernels.known_domains() else "operator.unknown_domain"
        shown = f"{domain}.{name}" if domain else name
        found.append(
            unmet(
                Kind.OPERATOR,
                code,
                f"the runtime knows no operator `{shown}`",
                observed=shown,
                expected="an operator of its registry",
                where=rel,
            )
        )
    return found or [met("operator.known", Kind.OPERATOR, rel)]


def _ports(graph: Graph, rel: str) -> list[Requirement]:
    """Inputs and outputs that have no array form (bfloat16, 4-bit integers, sequences as input)."""
    found = [
        unmet(
            Kind.DTYPE,
            "tensor.dtype_unsupported",
            f"the {side} `{port.name}` is {port.dtype}, which cannot be handed to or taken from the runtime here",
            observed=port.dtype,
            expected="a number type of NumPy, bool or string",
            where=rel,
        )
        for side, ports in (("input", graph.inputs), ("output", graph.outputs))
        for port in ports
        if not _has_array(port.dtype, side)
    ]
    return found or [met("tensor.ports", Kind.DTYPE, rel)]


def _inputs(case: Case, graph: Graph, rel: str) -> list[Requirement]:
    """Inputs of a text graph that no rule gives, and past states that the graph does not carry on."""
    if case.task not in GIVEN:
        return []
    known = DECODER_INPUTS | TEXT_INPUTS if case.artifact.kind is ArtifactKind.ONNX_SEQ2SEQ else TEXT_INPUTS
    strange = strange_inputs(graph.inputs, known)
    if case.task in TEXT:
        strange += lost_states(graph.inputs, graph.outputs)
    if not strange:
        return [met("graph.inputs", Kind.SHAPE, rel)]
    return [
        unmet(
            Kind.SHAPE,
            "graph.io_mismatch",
            f"nothing here gives the graph its input `{strange[0]}`",
            observed=", ".join(strange),
            expected=", ".join(sorted(known)) + " and past states with their present outputs",
            where=rel,
        )
    ]


def _has_array(dtype: str, side: str) -> bool:
    inner = re.fullmatch(r"optional\((.*)\)", dtype)
    name = inner[1] if inner else dtype
    if side == "output" and name.startswith("seq("):  # arrives as a list of arrays or of maps
        return True
    return numpy_dtype(name) is not None


def _kernels(case: Case, rel: str) -> list[Requirement]:
    """The runtime's answer to the graph's skeleton; where it is no, the whole graph has the last word."""
    try:
        reasons = kernels.missing_kernels(case.file(rel), rel, provider_of(case.device))
    except Exception as error:  # onnx's and protobuf's exceptions have no common base
        text = f"the graph could not be taken apart to ask for its kernels: {kernels.first_line(error)}"
        return [unknown(Kind.OPERATOR, "runtime.failed", text, where=rel)]
    if reasons and case.artifact.size_bytes <= DRY_BYTES and _builds(case, rel):
        reasons = []
    found = [
        unmet(Kind.OPERATOR, r.code, r.message, observed=r.observed, expected=r.expected, where=rel) for r in reasons
    ]
    return found or [met("operator.kernels", Kind.OPERATOR, rel)]


def _builds(case: Case, rel: str) -> bool:
    try:
        open_session(case.file(rel), case.device)
    except Exception:  # the runtime's exceptions have no common base
        return False
    return True


def notes_of(case: Case) -> list[str]:
    """What a user should know of a supported case."""
    notes = []
    cached = case.artifact.facts.get("kv_cache")
    if case.task in TEXT and cached is not None and not cached.value:
        notes.append("the graph keeps no cache: every token computes the whole sequence again")
    halves = any(t.dtype == "float16" for t in case.artifact.tensors.tensors.values())
    if halves and case.device == "cpu" and not _broken(case.artifact):
        cast = sorted({op for rel, _ in graphs_of(case.artifact) for op in kernels.cast_operators(case.file(rel))})
        if cast:
            notes.append(f"no float16 kernel for {', '.join(cast)}: computed in float32 between inserted casts")
    return notes
