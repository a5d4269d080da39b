"""OpenVINO IR (XML with a .bin beside it) and GenAI directories, scanned without the runtime."""

from __future__ import annotations

import xml.parsers.expat as expat
from dataclasses import dataclass, field

from turnout.config import READ
from turnout.package.facts import (
    Artifact,
    ArtifactKind,
    Component,
    Fact,
    Finding,
    Graph,
    GraphPort,
    Quantization,
    Severity,
    Status,
    Strength,
    TaskEvidence,
    Tokenizer,
)
from turnout.package.formats.context import read_context
from turnout.package.formats.graph_tasks import tasks_of_graph
from turnout.package.formats.template import read_template
from turnout.package.formats.transformers import attach
from turnout.package.scan import ReadError, Scan, join, parent_of, read_error
from turnout.types import Task

MAX_DEPTH, MAX_LAYERS, BLOCK = 64, 1_000_000, 1 << 16
LOW_BITS = {
    "i4": 4.0,
    "u4": 4.0,
    "nf4": 4.0,
    "f4e2m1": 4.0,
    "i8": 8.0,
    "u8": 8.0,
    "f8e4m3": 8.0,
    "f8e5m2": 8.0,
    "u2": 2.0,
}
TOKENIZERS = ("openvino_tokenizer.xml", "openvino_detokenizer.xml")
# File sets by which GenAI's pipelines recognise their directories.
PIPELINES = {
    "vlm": ("openvino_language_model.xml", "openvino_text_embeddings_model.xml"),
    "whisper": ("openvino_encoder_model.xml", "openvino_decoder_model.xml"),
    "llm": ("openvino_model.xml", "openvino_tokenizer.xml"),
}


@dataclass(slots=True)
class Net:
    """Facts of one IR file."""

    version: int | None = None
    graph: Graph = field(default_factory=Graph)
    needed: int = 0
    low_bits: dict[str, int] = field(default_factory=dict)
    info: dict[str, str] = field(default_factory=dict)


class _Parser:
    """Streams the XML; no entity, document type or external reference is ever followed."""

    def __init__(self, rel: str) -> None:
        self.rel, self.net = rel, Net()
        self._path: list[str] = []
        self._layer: dict[str, str] = {}
        self._data: dict[str, str] = {}
        self._dims: list[int | str | None] = []
        self._precision = ""
        self._names = ""
        self._text = ""
        self._layers = 0
        self._info: list[str] = []
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._start
        self.parser.EndElementHandler = self._end
        self.parser.CharacterDataHandler = self._characters
        self.parser.StartDoctypeDeclHandler = self._refuse
        self.parser.EntityDeclHandler = self._refuse

    def _refuse(self, *_: object) -> None:
        raise read_error(
            "artifact.corrupt",
            f"`{self.rel}` declares a document type or entities",
            self.rel,
            "<!DOCTYPE",
            "a plain <net>",
        )

    def _start(self, name: str, attributes: dict[str, str]) -> None:
        self._path.append(name)
        self._text = ""
        if len(self._path) == 1 and name != "net":
            raise read_error(
                "artifact.corrupt", f"`{self.rel}` is not an OpenVINO graph", self.rel, f"<{name}>", "<net>"
            )
        if len(self._path) > MAX_DEPTH:
            raise read_error(
                "artifact.corrupt", f"`{self.rel}` is nested too deeply", self.rel, f"over {MAX_DEPTH} levels"
            )
        if name == "net" and len(self._path) == 1:
            version = attributes.get("version", "")
            self.net.version = int(version) if version.isdigit() and len(version) < 6 else None
        elif name == "layer":
            self._start_layer(attributes)
        elif name == "data" and self._layer:
            self._data = attributes
            self._constant(attributes)
        elif name == "port" and self._layer:
            self._dims, self._precision, self._names = [], attributes.get("precision", ""), attributes.get("names", "")
        if "rt_info" in self._path[:2]:
            self._info = self._path[2:]
            if "value" in attributes and len(self.net.info) < 1000:
                self.net.info["/".join(self._info)] = attributes["value"][: READ.template_bytes]

    def _start_layer(self, attributes: dict[str, str]) -> None:
        self._layers += 1
        if self._layers > MAX_LAYERS:
            raise read_error("artifact.corrupt", f"`{self.rel}` has too many layers", self.rel)
        self._layer, self._data, self._dims = attributes, {}, []
        opset = attributes.get("version", "")
        domain = "" if opset.startswith("opset") else opset
        key = f"{domain}::{attributes.get('type', '')}"
        self.net.graph.ops[key] = self.net.graph.ops.get(key, 0) + 1
        if opset.startswith("opset") and opset[5:].isdigit():
            self.net.graph.opsets[""] = max(self.net.graph.opsets.get("", 0), int(opset[5:7]))

    def _constant(self, data: dict[str, str]) -> None:
        if "offset" in data and "size" in data:
            if not (
                data["offset"].isdigit()
                and data["size"].isdigit()
                and max(map(len, (data["offset"], data["size"]))) < 18
            ):
                raise read_error("artifact.corrupt", f"a constant of `{self.rel}` has no usable place", self.rel)
            self.net.needed = max(self.net.needed, int(data["offset"]) + int(data["size"]))
            kind = data.get("element_type", "")
            if kind in LOW_BITS:
                self.net.low_bits[kind] = self.net.low_bits.get(kind, 0) + int(data["size"])
        if "variable_id" in data and data["variable_id"] not in self.net.graph.states:
            self.net.graph.states.append(data["variable_id"])

    def _characters(self, text: str) -> None:
        if len(self._text) < 4096:
            self._text += text

    def _end(self, name: str) -> None:
        if name == "dim" and self._layer:
            text = self._text.strip()
            self._dims.append(int(text) if text.isdigit() and len(text) < 19 else None)
        elif name == "port" and self._layer:
            self._port()
        elif name == "layer":
            self._layer = {}
        self._path.pop()
        self._text = ""

    def _port(self) -> None:
        kind = self._layer.get("type")
        if kind == "Parameter" and "output" in self._path:
            dtype = self._data.get("element_type") or _spelled(self._precision)
            name = (self._names or self._layer.get("name", "")).split(",")[0]
            self.net.graph.inputs.append(GraphPort(name, dtype, list(self._dims)))
        elif kind == "Result" and "input" in self._path:
            name = (
                (self._layer.get("output_names") or self._layer.get("name", ""))
                .split(",")[0]
                .removesuffix("/sink_port_0")
            )
            self.net.graph.outputs.append(GraphPort(name, _spelled(self._precision), list(self._dims)))


def _spelled(precision: str) -> str:
    """A port's precision (FP32, I64) as layers spell element types (f32, i64)."""
    return precision.lower().replace("fp", "f", 1)


def read_net(scan: Scan, rel: str) -> Net:
    """Facts of one IR file. Raises ``ReadError``; external and internal entities are refused."""
    if scan.entries[rel].size > READ.xml_bytes:
        raise read_error(
            "artifact.corrupt", f"`{rel}` is too large", rel, str(scan.entries[rel].size), f"at most {READ.xml_bytes}"
        )
    parser = _Parser(rel)
    try:
        with scan.open(rel) as stream:
            while block := stream.read(BLOCK):
                parser.parser.Parse(block, False)
            parser.parser.Parse(b"", True)
    except expat.ExpatError as error:
        raise read_error("artifact.corrupt", f"`{rel}` is not well-formed XML: {error}", rel) from None
    net = parser.net
    net.graph.ir_version = net.version
    net.graph.metadata = {k: v for k, v in net.info.items() if len(v) < 4096}
    return net


def is_net(scan: Scan, rel: str) -> bool:
    """Whether a file looks like an IR at its beginning."""
    head = scan.head(rel, 4096)
    return b"<net" in head


# ---- artifacts ---------------------------------------------------------------------------------


def detect(scan: Scan) -> list[Artifact]:
    """GenAI directories, then the IR files that none of them accounts for."""
    files = [rel for rel in sorted(scan.glob("*.xml")) if is_net(scan, rel) or rel.endswith("openvino_model.xml")]
    found: list[Artifact] = []
    taken: set[str] = set()
    for directory in dict.fromkeys(parent_of(rel) for rel in files):
        here = [rel for rel in files if parent_of(rel) == directory]
        pipeline = _pipeline(scan, directory)
        if pipeline is not None and (scan.focus is None or scan.focus in here):
            found.append(_genai(scan, directory, pipeline, here))
            taken |= set(here)
    found += [
        _artifact(scan, rel) for rel in files if rel not in taken and scan.wanted(rel) and not rel.endswith(TOKENIZERS)
    ]
    return found


def _pipeline(scan: Scan, directory: str) -> str | None:
    """GenAI pipeline that the directory's file names say, None for a plain graph."""
    if scan.has(join(directory, "model_index.json")):
        return None
    names = {rel.rsplit("/", 1)[-1] for rel in scan.entries if parent_of(rel) == directory}
    for pipeline, files in PIPELINES.items():
        if set(files) <= names:
            return pipeline
    # A language model without its tokenizer: the runtime would construct it all the same.
    generates = scan.has(join(directory, "generation_config.json"))
    config = scan.json_object(join(directory, "config.json")) or {}
    classes = config.get("architectures") if isinstance(config.get("architectures"), list) else []
    causal = any(isinstance(c, str) and c.endswith(("ForCausalLM", "LMHeadModel")) for c in classes or [])
    return "llm" if "openvino_model.xml" in names and (generates or causal) else None


def _graph_of(scan: Scan, rel: str, artifact: Artifact) -> Net | None:
    artifact.files.append(rel)
    try:
        net = read_net(scan, rel)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return None
    weights = rel.removesuffix(".xml") + ".bin"
    if net.needed:
        artifact.files.append(weights)
        problem = scan.check_weights_file(weights)
        if problem is not None:
            artifact.findings.append(problem)
        elif scan.entries[weights].size < net.needed:
            artifact.findings.append(
                Finding(
                    "artifact.truncated",
                    Severity.ERROR,
                    f"`{weights}` is shorter than `{rel}` says",
                    weights,
                    f"{scan.entries[weights].size} bytes",
                    f"{net.needed} bytes",
                )
            )
    elif scan.has(weights):
        artifact.files.append(weights)
    return net


def _quantization(net: Net) -> Quantization | None:
    if not net.low_bits:
        return None
    main = max(net.low_bits, key=lambda k: net.low_bits[k])
    return Quantization(
        "openvino", LOW_BITS[main], packing=main, tensor_types=net.low_bits, source="layer:Const", tensors_plain=False
    )


def _artifact(scan: Scan, rel: str) -> Artifact:
    artifact = Artifact(f"openvino_ir:{rel}", ArtifactKind.OPENVINO_IR, rel)
    net = _graph_of(scan, rel, artifact)
    context = read_context(scan, parent_of(rel))
    if context.architecture is None and context.tokenizer is None and parent_of(rel):
        context = read_context(scan, parent_of(parent_of(rel)))
    attach(artifact, context)
    if net is not None:
        artifact.graph = net.graph
        artifact.quantization = _quantization(net)
        tasks_of_graph(artifact)
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact


def _genai(scan: Scan, directory: str, pipeline: str, files: list[str]) -> Artifact:
    artifact = Artifact(f"openvino_genai:{directory or '.'}", ArtifactKind.OPENVINO_GENAI, directory)
    context = read_context(scan, directory)
    attach(artifact, context)
    artifact.findings = [f for f in artifact.findings if f.code != "recipe.assumed"]
    artifact.facts["pipeline"] = Fact(pipeline, f"layout:{directory or '.'}", Strength.LAYOUT)
    main = join(
        directory,
        {"vlm": "openvino_language_model.xml", "whisper": "openvino_encoder_model.xml"}.get(
            pipeline, "openvino_model.xml"
        ),
    )
    for rel in files:
        net = _graph_of(scan, rel, artifact)
        artifact.components.append(
            Component(
                rel.rsplit("/", 1)[-1].removesuffix(".xml"),
                Status.PRESENT if net else Status.INVALID,
                "openvino",
                path=rel,
                files=[rel],
            )
        )
        if net is None:
            continue
        if rel == main:
            artifact.graph, artifact.quantization = net.graph, _quantization(net)
        elif rel.endswith(TOKENIZERS[0]):
            _tokenizer(artifact, net, rel)
    _check_tokenizer(scan, directory, artifact)
    if pipeline == "llm" and artifact.graph is not None:
        _check_language_graph(artifact, main)
    _genai_tasks(artifact, pipeline, main)
    artifact.files = list(dict.fromkeys(artifact.files))
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact


def _tokenizer(artifact: Artifact, net: Net, rel: str) -> None:
    """A tokenizer as a graph; its rt_info may hold the chat template."""
    if artifact.tokenizer is None:
        artifact.tokenizer = Tokenizer("openvino-ir", rel, [rel])
    text = net.info.get("chat_template")
    if text and not artifact.templates:
        template, findings = read_template(text, f"{rel}#rt_info/chat_template")
        artifact.templates.append(template)
        artifact.findings += findings


def _check_tokenizer(scan: Scan, directory: str, artifact: Artifact) -> None:
    for name in TOKENIZERS:
        rel = join(directory, name)
        if not scan.has(rel):
            artifact.findings.append(
                Finding("tokenizer.missing", Severity.ERROR, f"`{name}` is not in the directory", rel, "absent", name)
            )
            return


def _check_language_graph(artifact: Artifact, main: str) -> None:
    graph = artifact.graph
    assert graph is not None
    inputs, outputs = {p.name for p in graph.inputs}, {p.name for p in graph.outputs}
    lacking = [n for n in ("input_ids", "attention_mask") if n not in inputs] + [
        n for n in ("logits",) if n not in outputs
    ]
    if not graph.states:
        artifact.findings.append(
            Finding(
                "graph.state_missing",
                Severity.ERROR,
                "the graph keeps no state between tokens",
                main,
                "no ReadValue layer",
                "a pair of states for every layer",
            )
        )
    if lacking:
        artifact.findings.append(
            Finding(
                "graph.io_mismatch",
                Severity.ERROR,
                f"the graph has no `{lacking[0]}`",
                main,
                ", ".join(sorted(inputs | outputs))[:200],
                "input_ids, attention_mask -> logits",
            )
        )


def _genai_tasks(artifact: Artifact, pipeline: str, main: str) -> None:
    tasks = {
        "llm": [Task.TEXT_GENERATION],
        "vlm": [Task.IMAGE_TEXT_TO_TEXT, Task.TEXT_GENERATION],
        "whisper": [Task.ASR],
    }[pipeline]
    if pipeline == "llm" and any(t.valid for t in artifact.templates):
        tasks.insert(0, Task.CHAT)
    artifact.tasks = [TaskEvidence(task, f"layout:{main}", Strength.LAYOUT) for task in tasks]
