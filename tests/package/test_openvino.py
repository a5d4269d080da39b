"""OpenVINO graphs and GenAI directories: facts of the runtime, and what each defect is called."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from tests.shapes import graphs, hf

from turnout.package.facts import Artifact, ArtifactKind
from turnout.package.formats.openvino import read_net
from turnout.package.inspect import inspect
from turnout.package.scan import ReadError, Scan
from turnout.types import Task

EMPTY = '<net name="m" version="11"><layers>{}</layers></net>'
TOKENIZED = {"openvino_model.xml", "openvino_tokenizer.xml", "openvino_detokenizer.xml"}


def one(path: Path) -> Artifact:
    (artifact,) = inspect(path).artifacts
    return artifact


def codes(artifact: Artifact) -> list[str]:
    return [f.code for f in artifact.findings]


def refused(path: Path, text: str) -> str:
    """Message of the refusal of an XML text."""
    (path / "m.xml").write_text(text)
    with pytest.raises(ReadError) as caught:
        read_net(Scan.of(path), "m.xml")
    assert caught.value.finding.code == "artifact.corrupt"
    return caught.value.finding.message


def layer(kind: str, body: str = "", version: str = "opset1", name: str = "l") -> str:
    return f'<layer id="0" name="{name}" type="{kind}" version="{version}">{body}</layer>'


# ---- facts -------------------------------------------------------------------------------------


def test_ports_and_layers_are_those_of_the_runtime(tmp_path: Path) -> None:
    import openvino

    path = graphs.ir(tmp_path)
    artifact, model = one(path), openvino.Core().read_model(path)
    graph = artifact.graph
    assert graph is not None and artifact.kind is ArtifactKind.OPENVINO_IR and artifact.findings == []
    stored = {"Constant": "Const", "Relu": "ReLU"}  # two names of the API have another spelling in files
    names = [op.get_type_name() for op in model.get_ops()]
    assert graph.ops == Counter(f"::{stored.get(name, name)}" for name in names)
    for mine, theirs in ((graph.inputs, model.inputs), (graph.outputs, model.outputs)):
        assert [(p.name, p.dtype, p.shape) for p in mine] == [
            (t.any_name, {"f32": "f32"}[t.element_type.get_type_name()], [
                d.get_length() if d.is_static else None for d in t.partial_shape
            ]) for t in theirs
        ]  # fmt: skip
    assert graph.ir_version == 11 and artifact.files == ["mlp.xml", "mlp.bin"]
    assert artifact.task_ids() == [Task.TENSOR]


def test_states_of_a_language_model(tmp_path: Path) -> None:
    import openvino

    artifact = one(graphs.genai_ir(tmp_path, stateful=True, tokenizer=True))
    model = openvino.Core().read_model(tmp_path / "package" / "openvino_model.xml")
    states = {op.get_variable_id() for op in model.get_ops() if op.get_type_name() == "ReadValue"}
    assert artifact.graph is not None and set(artifact.graph.states) == states != set()
    assert artifact.kind is ArtifactKind.OPENVINO_GENAI and artifact.findings == []
    assert artifact.facts["pipeline"].value == "llm"
    assert artifact.task_ids() == [Task.CHAT, Task.TEXT_GENERATION]
    assert {f for f in artifact.files if f.endswith(".xml")} == TOKENIZED


@pytest.mark.parametrize(("kind", "bits"), [("u4", 4.0), ("i8", 8.0), ("nf4", 4.0)])
def test_low_bits_are_a_quantization(kind: str, bits: float, tmp_path: Path) -> None:
    const = layer("Const", f'<data element_type="{kind}" shape="4" offset="0" size="4"/>')
    (tmp_path / "m.xml").write_text(EMPTY.format(const))
    (tmp_path / "m.bin").write_bytes(bytes(4))
    quantization = one(tmp_path).quantization
    assert quantization is not None and (quantization.packing, quantization.bits) == (kind, bits)


def test_operators_beyond_the_sets_keep_their_domain(tmp_path: Path) -> None:
    body = layer("Relu", version="opset13") + layer("MyOp", version="extension")
    (tmp_path / "m.xml").write_text(EMPTY.format(body))
    graph = one(tmp_path).graph
    assert graph is not None and graph.ops == {"::Relu": 1, "extension::MyOp": 1} and graph.opsets == {"": 13}


def test_a_template_inside_the_tokenizers_graph(tmp_path: Path) -> None:
    package = graphs.genai_ir(tmp_path, stateful=True, tokenizer=True)
    (package / "chat_template.jinja").unlink()
    artifact = one(package)
    assert [(t.source, t.text) for t in artifact.templates] == [
        ("openvino_tokenizer.xml#rt_info/chat_template", hf.TEMPLATE)
    ]
    assert artifact.task_ids() == [Task.CHAT, Task.TEXT_GENERATION]


def test_an_ir_in_a_folder_beside_its_checkpoint(tmp_path: Path) -> None:
    hf.encoder(tmp_path)
    graphs.ir(tmp_path / "openvino")
    artifact = next(a for a in inspect(tmp_path).artifacts if a.kind is ArtifactKind.OPENVINO_IR)
    assert artifact.architecture is not None and artifact.architecture.model_type == "bert"


@pytest.mark.parametrize(
    ("names", "pipeline", "tasks"),
    [
        (("openvino_encoder_model", "openvino_decoder_model"), "whisper", [Task.ASR]),
        (
            ("openvino_language_model", "openvino_text_embeddings_model"),
            "vlm",
            [Task.IMAGE_TEXT_TO_TEXT, Task.TEXT_GENERATION],
        ),
    ],
)
def test_pipelines_by_their_files(names: tuple[str, ...], pipeline: str, tasks: list[str], tmp_path: Path) -> None:
    for name in (*names, "openvino_tokenizer", "openvino_detokenizer"):
        (tmp_path / f"{name}.xml").write_text(EMPTY.format(""))
    artifact = one(tmp_path)
    assert artifact.facts["pipeline"].value == pipeline and artifact.task_ids() == tasks


# ---- defects -----------------------------------------------------------------------------------


def test_weights_that_are_short_or_absent(tmp_path: Path) -> None:
    short = one(graphs.ir_cut(tmp_path))
    (finding,) = short.findings
    assert (finding.code, finding.path) == ("artifact.truncated", "mlp.bin")
    assert (finding.observed, finding.expected) == ("112 bytes", "224 bytes")
    (tmp_path / "mlp.bin").unlink()
    assert codes(one(tmp_path / "mlp.xml")) == ["artifact.missing"]


def test_a_pointer_in_place_of_weights(tmp_path: Path) -> None:
    path = graphs.ir(tmp_path)
    path.with_suffix(".bin").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    assert codes(one(path)) == ["artifact.lfs_pointer"]


def test_a_language_model_without_states(tmp_path: Path) -> None:
    artifact = one(graphs.genai_ir(tmp_path, stateful=False, tokenizer=True))
    assert codes(artifact) == ["graph.state_missing"]


def test_a_language_model_without_tokenizer_graphs(tmp_path: Path) -> None:
    artifact = one(graphs.genai_ir(tmp_path, stateful=True, tokenizer=False))
    assert [(f.code, f.path) for f in artifact.findings] == [("tokenizer.missing", "openvino_tokenizer.xml")]


def test_a_language_model_without_its_ports(tmp_path: Path) -> None:
    (tmp_path / "openvino_model.xml").write_text(EMPTY.format(""))
    for name in ("openvino_tokenizer", "openvino_detokenizer"):
        (tmp_path / f"{name}.xml").write_text(EMPTY.format(""))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    found = {f.code: f for f in one(tmp_path).findings}
    assert set(found) == {"graph.io_mismatch", "graph.state_missing"}
    assert "input_ids" in found["graph.io_mismatch"].message


def test_xml_that_is_none(tmp_path: Path) -> None:
    assert "well-formed" in refused(tmp_path, "<net><layers>")
    assert "not an OpenVINO graph" in refused(tmp_path, "<html/>")
    assert "nested too deeply" in refused(tmp_path, "<net>" + "<a>" * 70)


@pytest.mark.parametrize("subset", ['<!ENTITY a "b">', '<!ENTITY a SYSTEM "file:///etc/passwd">', ""])
def test_declarations_are_refused(subset: str, tmp_path: Path) -> None:
    assert "declares" in refused(tmp_path, f"<!DOCTYPE net [{subset}]><net/>")


@pytest.mark.parametrize(("offset", "size"), [("-1", "4"), ("0", "lots"), ("9" * 30, "9" * 30)])
def test_constants_without_a_place(offset: str, size: str, tmp_path: Path) -> None:
    const = layer("Const", f'<data element_type="f32" offset="{offset}" size="{size}"/>')
    assert "no usable place" in refused(tmp_path, EMPTY.format(const))


def test_other_xml_files_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.xml").write_text("<notes/>")
    assert inspect(tmp_path).artifacts[0].kind is ArtifactKind.UNKNOWN
