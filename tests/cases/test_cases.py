"""The listed package shapes, each judged as listed, then really loaded and run on every backend.

A row names what must be said of it; beyond that, one rule holds for all: what is called supported
runs, and what is not called supported is refused by a forced load too.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from tests.cases import references as ref
from tests.shapes import bundles, classical, ggufs, graphs, hf

from turnout.backends import registry
from turnout.backends.base import Action, Admission, Case, Outcome, Verdict, VerdictStatus
from turnout.backends.requirements import readable
from turnout.config import WORKER
from turnout.errors import TurnoutError
from turnout.package.facts import ArtifactKind
from turnout.tasks.contract import contract_of
from turnout.types import Request, Sampling
from turnout.worker import wire
from turnout.worker.judge import Judge, Report, case_message, cases_of, check

pytestmark = [
    pytest.mark.filterwarnings(
        "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
    ),  # builders' libraries
    pytest.mark.xdist_group("cases"),
]

Build = Callable[[Path], Path]
YES, IF, NO, MAYBE = (
    VerdictStatus.SUPPORTED,
    VerdictStatus.CONDITIONAL,
    VerdictStatus.UNSUPPORTED,
    VerdictStatus.UNKNOWN,
)
# Codes that refuse for policy or trust: the library might well go on, which is the point.
POLICY = (
    "code.",
    "artifact.path_escape",
    "recipe.",
    "index.",
    "option.",
    "task.",
    "template.",
    "device.",
    "dependency.",
    "quantization.unknown",
)


@dataclass
class Row:
    """One shape: what is asked, and (backend, status, code, text in a reason) that must be said."""

    number: str
    build: Build
    task: str
    expect: list[tuple[str, VerdictStatus, str | None, str | None]]
    options: dict[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    kind: ArtifactKind | None = None
    remedy: Action | None = None


def says(
    backend: str, status: VerdictStatus, code: str | None = None, text: str | None = None
) -> tuple[str, VerdictStatus, str | None, str | None]:
    return backend, status, code, text


def at(build: Callable[..., Path], name: str, *given: Any, **named: Any) -> Build:
    """A builder of one file ``name`` in the folder."""
    return lambda folder: build(folder / name, *given, **named)


def on(build: Callable[..., Path], *given: Any, **named: Any) -> Build:
    """A builder with further arguments."""
    return lambda folder: build(folder, *given, **named)


def pair_with(folder: Path, width: int) -> Path:
    ggufs.write_gguf(folder / "model.gguf")
    ggufs.projector(folder / "mmproj-model.gguf", width)
    return folder


def everything(folder: Path) -> Path:
    """Case 71: one model as safetensors, ONNX, OpenVINO IR and GGUF in one package."""
    import openvino

    hf.llama(folder)
    (folder / "onnx").mkdir()
    graphs.decoder(folder / "onnx" / "model.onnx", past=True)
    (folder / "openvino").mkdir()
    openvino.save_model(
        openvino.convert_model(folder / "onnx" / "model.onnx"), folder / "openvino" / "openvino_model.xml"
    )
    ggufs.write_gguf(folder / "model-q8_0.gguf")
    return folder


def without_index(folder: Path) -> Path:
    target = hf.sharded(folder)
    (target / "model.safetensors.index.json").unlink()
    return target


def enormous(folder: Path) -> Path:
    """Case 73: 2 TiB of weights, as a sparse file."""
    hf.llama(folder, hidden_size=32, vocab_size=100)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    config = json.loads((folder / "config.json").read_text())
    size = 1 << 34
    config["vocab_size"] = size
    offset = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            entry["shape"] = [size, 32]
        count = 4
        for dim in entry["shape"]:
            count *= dim
        entry["data_offsets"], offset = [offset, offset + count], offset + count
    text = json.dumps(header).encode()
    with open(path, "wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + offset)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


T, GEN, CHAT = "transformers", "text-generation", "chat"
ORT, OV, LLAMA, OVG = "onnxruntime", "openvino", "llamacpp", "openvino-genai"
ST, DIFF, CT2, TAB, OGA = "sentence-transformers", "diffusers", "ctranslate2", "tabular", "onnxruntime-genai"

ROWS = [
    Row(
        "1",
        hf.llama,
        CHAT,
        [
            says(T, YES),
            says(ORT, NO, "artifact.missing"),
            says(OV, NO, "artifact.missing"),
            says(LLAMA, NO, "artifact.missing"),
        ],
        remedy=Action.CONVERT,
    ),
    Row("2", on(hf.head_absent, False), GEN, [says(T, NO, "tensor.missing", "lm_head.weight")]),
    Row("3", on(hf.head_absent, True), GEN, [says(T, YES)]),
    Row("4", hf.layer_weight_absent, GEN, [says(T, NO, "tensor.missing", "model.layers.1.mlp.up_proj.weight")]),
    Row("5", hf.index_omits_shard, GEN, [says(T, NO, "tensor.missing")]),
    Row("6", hf.shard_absent, GEN, [says(T, NO, "artifact.shard_missing", "model-00002-of-00003.safetensors")]),
    Row("7", hf.index_escapes, GEN, [says(T, NO, "artifact.path_escape", "../outside.safetensors")]),
    Row("8", hf.index_wrong_owner, GEN, [says(T, YES)]),
    Row("9", hf.cut_in_half, GEN, [says(T, NO, "artifact.truncated")], remedy=Action.REDOWNLOAD),
    Row("10", hf.lfs_pointer, GEN, [says(T, NO, "artifact.lfs_pointer")], remedy=Action.REDOWNLOAD),
    Row("11", on(hf.auto_map, True), GEN, [says(T, YES)]),
    Row("12", on(hf.auto_map, False), GEN, [says(T, IF, "code.required")], remedy=Action.GRANT_TRUST),
    Row("13", on(hf.rope, "su"), GEN, [says(T, NO, "config.unsupported_variant", "su")]),
    Row("14", on(hf.quantized, quant_method="wonderquant"), GEN, [says(T, NO, "quantization.unknown", "plain")]),
    Row(
        "15",
        on(hf.quantized, quant_method="gptq", bits=4, group_size=32),
        GEN,
        [says(T, IF, "dependency.missing", "gptqmodel")],
        remedy=Action.INSTALL,
    ),
    Row("16", on(hf.quantized, quant_method="nvfp4"), GEN, [says(T, NO, "quantization.unsupported")]),
    Row("17", on(hf.llama, template=None), CHAT, [says(T, IF, "template.missing")]),
    Row("17b", on(hf.llama, template=None), GEN, [says(T, YES)]),
    Row("18a", on(hf.llama, template="{% for %}"), CHAT, [says(T, NO, "template.invalid")]),
    Row(
        "18b", on(hf.llama, template="{% for i in range(10**9) %}x{% endfor %}"), CHAT, [says(T, NO, "template.unsafe")]
    ),
    Row("18c", on(hf.llama, template="{{ messages.__class__ }}"), CHAT, [says(T, NO, "template.unsafe")]),
    Row("18d", on(hf.llama, template="{% for %}"), GEN, [says(T, YES)]),
    Row("19", hf.tokenizer_too_large, GEN, [says(T, NO, "tokenizer.id_out_of_range", "94")]),
    Row("20", on(hf.torch_checkpoint, False), GEN, [says(T, YES)]),
    Row("21", on(hf.torch_checkpoint, True), GEN, [says(T, NO, "code.pickle_unsafe", "posix.system")]),
    Row("22", at(ggufs.write_gguf, "tiny.gguf", pre="smollm"), GEN, [says(LLAMA, YES), says(OVG, YES), says(T, IF)]),
    Row("22b", at(ggufs.write_gguf, "tiny.gguf"), GEN, [says(T, YES)], options={"allow_dequantize": "true"}),
    Row(
        "23",
        at(ggufs.write_gguf, "tiny.gguf", pre="smollm", kind="Q5_0"),
        GEN,
        [says(LLAMA, YES), says(OVG, NO, "quantization.unsupported", "Q5_0")],
    ),
    Row(
        "24",
        ggufs.split_alone,
        GEN,
        [
            says(LLAMA, NO, "artifact.shard_missing"),
            says(T, NO, "artifact.shard_missing"),
            says(OVG, NO, "artifact.shard_missing"),
        ],
    ),
    Row(
        "25",
        at(ggufs.adapter, "adapter.gguf"),
        GEN,
        [says(LLAMA, IF, "adapter.base_missing", "Tiny Llama"), says(T, NO), says(OVG, NO)],
    ),
    Row(
        "26",
        on(pair_with, 48),
        "image-text-to-text",
        [says(LLAMA, NO, "adapter.base_mismatch", "48")],
        kind=ArtifactKind.GGUF_MMPROJ,
    ),
    Row(
        "27",
        at(ggufs.write_gguf, "tiny.gguf", arch="unheardof"),
        GEN,
        [says(LLAMA, NO, "architecture.unknown", "unheardof"), says(OVG, NO), says(T, NO)],
    ),
    Row(
        "28",
        at(ggufs.write_gguf, "tiny.gguf", drop="blk.0.ffn_up"),
        GEN,
        [
            says(LLAMA, NO, "tensor.missing", "blk.0.ffn_up.weight"),
            says(OVG, NO, "tensor.missing"),
            says(T, NO, "tensor.missing"),
        ],
    ),
    Row(
        "29",
        at(ggufs.write_gguf, "tiny.gguf", pre="wondertokens"),
        GEN,
        [says(LLAMA, NO, "tokenizer.pre_unknown", "wondertokens"), says(T, IF, "tokenizer.pre_unknown")],
    ),
    Row("30", at(graphs.mlp, "m.onnx"), "tensor", [says(ORT, YES), says(OV, YES)]),
    Row(
        "31",
        at(graphs.mlp, "m.onnx", opset=29),
        "tensor",
        [says(ORT, NO, "operator.opset_too_new", "29"), says(OV, MAYBE, "operator.opset_too_new")],
    ),
    Row(
        "32",
        at(graphs.mlp, "m.onnx", ir=15),
        "tensor",
        [says(ORT, NO, "operator.ir_too_new", "15"), says(OV, MAYBE, "operator.ir_too_new")],
    ),
    Row(
        "33",
        at(graphs.custom_domain, "m.onnx"),
        "tensor",
        [
            says(ORT, NO, "operator.unknown_domain", "com.acme.MyOp"),
            says(OV, NO, "operator.unknown_domain", "com.acme.MyOp"),
        ],
    ),
    Row(
        "34", at(graphs.matmul, "m.onnx", 16), "tensor", [says(ORT, NO, "operator.no_kernel", "MatMul"), says(OV, YES)]
    ),
    Row("35", at(graphs.matmul, "m.onnx", 10), "tensor", [says(ORT, YES), says(OV, YES)]),
    Row(
        "36",
        on(graphs.external, write=False),
        "tensor",
        [says(ORT, NO, "artifact.missing", "weights.bin"), says(OV, NO, "artifact.missing")],
    ),
    Row(
        "37a",
        on(graphs.external, "../weights.bin", write=False),
        "tensor",
        [says(ORT, NO, "artifact.path_escape"), says(OV, NO, "artifact.path_escape")],
    ),
    Row(
        "37b",
        on(graphs.external, "/etc/hostname", write=False),
        "tensor",
        [says(ORT, NO, "artifact.path_escape"), says(OV, NO, "artifact.path_escape")],
    ),
    Row(
        "37c",
        graphs.linked_data,
        "tensor",
        [says(ORT, NO, "artifact.path_escape"), says(OV, NO, "artifact.path_escape")],
    ),
    Row("38", graphs.hub_cache, "tensor", [says(ORT, YES), says(OV, IF, "artifact.path_escape")]),
    Row("38b", graphs.hub_cache, "tensor", [says(ORT, YES), says(OV, YES)], options={"materialise": "true"}),
    Row("39", on(graphs.decoder_package, False), GEN, [says(ORT, YES)]),
    Row("40", on(graphs.genai, wonder=1), GEN, [says(OGA, NO, "config.unknown_semantic_key", "wonder")]),
    Row("40b", graphs.genai, GEN, [says(OGA, YES)]),
    Row(
        "41",
        on(graphs.genai, decoder__session_options={"provider_options": [{"cuda": {}}]}),
        GEN,
        [says(OGA, NO, "device.unavailable", "cuda")],
    ),
    Row("42", on(graphs.genai, decoder__inputs__input_ids="ids"), GEN, [says(OGA, NO, "graph.io_mismatch", "ids")]),
    Row("43", graphs.ir_cut, "tensor", [says(OV, NO, "artifact.truncated")]),
    Row("44", on(graphs.genai_ir, False, True), GEN, [says(OVG, NO, "graph.state_missing")]),
    Row("45", on(graphs.genai_ir, True, False), GEN, [says(OVG, NO, "tokenizer.missing", "openvino_tokenizer.xml")]),
    Row("46", bundles.diffusion, "text-to-image", [says(DIFF, YES)]),
    Row("47", bundles.unet_lacks_tensor, "text-to-image", [says(DIFF, NO, "tensor.missing", "conv_in.weight")]),
    Row("48", bundles.component_is_code, "text-to-image", [says(DIFF, NO, "code.required", "my_unet")]),
    Row(
        "49", bundles.only_fp16, "text-to-image", [says(DIFF, IF, "artifact.missing", "fp16")], remedy=Action.SET_OPTION
    ),
    Row("49b", bundles.only_fp16, "text-to-image", [says(DIFF, YES)], options={"variant": "fp16"}),
    Row("50", bundles.dduf, "text-to-image", [says(DIFF, NO, "config.unsupported_variant", "DDUF")]),
    Row("51", bundles.sentences, "embeddings", [says(ST, YES), says(T, YES)]),
    Row("52", bundles.without_modules, "embeddings", [says(T, IF, "recipe.assumed")], remedy=Action.SET_OPTION),
    Row("52b", bundles.without_modules, "embeddings", [says(T, YES)], options={"pooling": "cls"}),
    Row(
        "53",
        bundles.pooling_width,
        "embeddings",
        [says(ST, NO, "recipe.conflict", "64"), says(T, NO, "recipe.conflict", "64")],
    ),
    Row("54", bundles.foreign_module, "embeddings", [says(ST, IF, "code.required")], remedy=Action.GRANT_TRUST),
    Row("55", hf.encoder, "rerank", [says(T, NO, "head.missing")]),
    Row("55b", bundles.sentences, "rerank", [says(ST, NO, "head.missing"), says(T, NO, "head.missing")]),
    Row("55c", bundles.cross_encoder, "rerank", [says(ST, YES), says(T, YES)]),
    Row("56", on(bundles.lora, base="nobody/none"), GEN, [says(T, IF, "adapter.base_missing", "nobody/none")]),
    Row("56b", bundles.lora, GEN, [says(T, YES)]),
    Row("57a", bundles.lora_rank, GEN, [says(T, NO, "adapter.base_mismatch", "rank")]),
    Row("57b", bundles.lora_width, GEN, [says(T, NO, "adapter.base_mismatch", "width")]),
    Row("58", on(bundles.lora, use_dora=True), GEN, [says(LLAMA, NO, "adapter.type_unsupported"), says(T, YES)]),
    Row("59", classical.ct2_newer, GEN, [says(CT2, NO, "dependency.version", "99")]),
    Row("59b", classical.ct2_decoder, GEN, [says(CT2, YES)]),
    Row("60", classical.ct2_decoder, "translation", [says(CT2, NO, "task.not_offered")]),
    Row("61a", at(classical.booster, "m.json"), "tabular-classification", [says(TAB, YES)]),
    Row("61b", at(classical.booster, "m.ubj"), "tabular-classification", [says(TAB, YES)]),
    Row(
        "63",
        at(classical.custom_objective, "m.json"),
        "tabular-regression",
        [says(TAB, NO, "config.unsupported_variant", "my:objective")],
    ),
    Row(
        "64",
        at(classical.pickled_booster, "m.pkl"),
        "tabular-classification",
        [says(TAB, NO, "code.pickle_unsafe", "xgboost")],
    ),
    Row(
        "65",
        at(classical.zipmap, "m.onnx"),
        "tabular-classification",
        [says(ORT, YES), says(OV, NO, "operator.unknown_domain", "ai.onnx.ml")],
    ),
    Row(
        "66",
        at(classical.skops, "m.skops", False),
        "tabular-classification",
        [says(TAB, NO, "code.untrusted_type", "strange")],
    ),
    Row("66b", at(classical.skops, "m.skops", True), "tabular-classification", [says(TAB, YES)]),
    Row(
        "67",
        at(classical.joblib_pickle, "m.joblib"),
        "tabular-classification",
        [says(TAB, NO, "code.pickle_unsafe", "sklearn")],
    ),
    Row("69", hf.forecaster, "time-series-forecasting", [says(T, NO, None, "15")], options={"history": 10}),
    Row("69b", hf.forecaster, "time-series-forecasting", [says(T, YES)]),
    Row("70", hf.decision, CHAT, [says(T, NO, "task.not_offered")]),
    Row("72a", hf.llama, GEN, [says(T, NO, "device.unavailable", "cuda")], device="cuda"),
    Row(
        "72b",
        at(graphs.mlp, "m.onnx"),
        "tensor",
        [says(ORT, NO, "device.unavailable", "cuda"), says(OV, NO, "device.unavailable")],
        device="cuda",
    ),
    # Further shapes of the same kinds.
    Row(
        "a",
        on(hf.changed, lambda c: c.update(num_hidden_layers=1)),
        GEN,
        [says(T, IF, "tensor.unexpected")],
        remedy=Action.SET_OPTION,
    ),
    Row(
        "b",
        on(hf.changed, lambda c: c.update(num_hidden_layers=3)),
        GEN,
        [says(T, NO, "tensor.missing", "model.layers.2")],
    ),
    Row(
        "c", on(hf.changed, lambda c: c.update(intermediate_size=64)), GEN, [says(T, NO, "tensor.shape_mismatch", "64")]
    ),
    Row("d", without_index, GEN, [says(T, NO, "artifact.missing", "index")]),
    Row(
        "e",
        on(hf.changed, lambda c: c.update(model_type="zonk")),
        GEN,
        [says(T, NO, "architecture.unknown", "zonk")],
        remedy=Action.UPGRADE,
    ),
    Row("f", on(hf.changed, lambda c: c.pop("model_type")), GEN, [says(T, NO, "config.invalid", "model_type")]),
    Row(
        "g",
        on(hf.quantized, quant_method="awq", bits=4),
        GEN,
        [says(T, IF, "dependency.missing", "gptqmodel")],
        remedy=Action.INSTALL,
    ),
    Row(
        "h",
        at(ggufs.write_gguf, "tiny.gguf", kind="F32", pre="smollm"),
        GEN,
        [says(LLAMA, YES), says(T, YES), says(OVG, NO, "quantization.unsupported", "F32")],
    ),
    Row("i", at(ggufs.write_gguf, "tiny.gguf", drop="output", pre="smollm"), GEN, [says(LLAMA, YES), says(OVG, YES)]),
    Row(
        "j",
        at(ggufs.cut_short, "tiny.gguf"),
        GEN,
        [says(LLAMA, NO, "artifact.truncated"), says(OVG, NO, "artifact.truncated"), says(T, NO, "artifact.truncated")],
    ),
]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Row], Path]]:
    """Path of each row's package, built once."""
    paths: dict[str, Path] = {}

    def get(row: Row) -> Path:
        if row.number not in paths:
            paths[row.number] = row.build(tmp_path_factory.mktemp(f"case-{row.number}"))
        return paths[row.number]

    yield get


def report_of(row: Row, path: Path, judge: Judge) -> Report:
    return check(str(path), row.task, device=row.device, options=row.options, judge=judge)


def relevant(row: Row, report: Report, backend: str) -> list[Verdict]:
    found = [v for v in report.verdicts if v.backend == backend and (row.kind is None or v.kind is row.kind)]
    reading = [v for v in found if v.kind in registry.get(backend).reads]
    return reading or found


def told(verdict: Verdict) -> str:
    return "\n".join(
        f"{r.code}: {r.message} [{r.observed} / {r.expected} / {r.where}]"
        for r in [*verdict.reasons, *verdict.unknowns]
    )


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_judged_as_listed(row: Row, built: Callable[[Row], Path], judge: Judge) -> None:
    report = report_of(row, built(row), judge)
    for backend, status, code, text in row.expect:
        verdicts = relevant(row, report, backend)
        assert verdicts, f"nothing said of {backend}"
        best = verdicts[0]
        assert best.status is status, f"{backend}: {best.status}\n{told(best)}"
        if code is not None:
            assert any(r.code == code for v in verdicts for r in [*v.reasons, *v.unknowns]), told(best)
        if text is not None:
            assert text in "\n".join(told(v) for v in verdicts), told(best)
        if status is not YES:
            assert best.reasons or best.unknowns
    if row.remedy is not None:
        actions = {m.action for backend, *_ in row.expect for v in relevant(row, report, backend) for m in v.remedies}
        assert row.remedy in actions
    assert not list(built(row).parent.rglob("*.ran")) and not list(built(row).parent.rglob("ran")), "package code ran"


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.number)
def test_execution_agrees(row: Row, built: Callable[[Row], Path], judge: Judge) -> None:
    """Supported cases load and pass their probe; refused ones do not load even when forced."""
    path = built(row)
    report = report_of(row, path, judge)
    for case in cases_of(report.package, report.package.artifacts, row.task, row.device, row.options):
        for verdict in (v for v in report.verdicts if v.artifact == case.artifact.id):
            backend = registry.get(verdict.backend)
            if not readable(backend, case.artifact):
                assert verdict.status is NO
            elif verdict.status is YES:
                evidence = judge.execute(report.package, case, verdict.backend)
                assert [e.outcome for e in evidence] == [Outcome.PASS] * 2, evidence
            elif verdict.status is NO and not any(r.code.startswith(POLICY) for r in verdict.reasons):
                with pytest.raises(TurnoutError):
                    forced(judge, report, case, verdict.backend)


def forced(judge: Judge, report: Report, case: Case, backend: str) -> None:
    """Loads and runs a case whatever its verdict says."""
    worker = judge.worker
    message = case_message(report.package, case)
    worker.call("load", timeout=WORKER.load_s, backend=backend, case=message)
    answer = worker.call("probe", timeout=WORKER.probe_s)
    if answer["outcome"] != "pass":
        raise TurnoutError(str(answer["reasons"]))


Compare = Callable[[Path, Any], None]
REFERENCES: dict[str, Compare] = {
    "1": ref.eager_chat,
    **dict.fromkeys(("8", "11", "17b", "18d", "20"), ref.eager),
    "56b": ref.adapted,
    "58": ref.adapted,
    "59b": ref.beside,
    "22": ref.dequantized,
    "22b": ref.dequantized,
    "39": ref.hand_decoder,
    "40b": ref.hand_decoder,
    "30": ref.mlp,
    "38": ref.mlp,
    "38b": ref.mlp,
    "34": ref.product(3e-2),
    "35": ref.product(5e-3),
    "51": ref.pooled("mean", True),
    "52b": ref.pooled("cls", False),
    "55c": ref.scored,
    "61a": ref.boosted,
    "61b": ref.boosted,
    "65": ref.classified,
    "66b": ref.piped,
    "46": ref.painted(None),
    "49b": ref.painted("fp16"),
}


@pytest.mark.parametrize("row", [row for row in ROWS if row.number in REFERENCES], ids=lambda row: row.number)
def test_supported_cases_give_the_reference(row: Row, built: Callable[[Row], Path], judge: Judge) -> None:
    """Every backend that says supported computes what an independent implementation does."""
    path = built(row)
    report = report_of(row, path, judge)
    inputs, options = ref.inputs_of(row.task)
    request = Request(row.task, inputs, Sampling(max_tokens=ref.TOKENS, seed=7), options)
    compared = 0
    for case in cases_of(report.package, report.package.artifacts, row.task, row.device, row.options):
        for verdict in (v for v in report.verdicts if v.artifact == case.artifact.id and v.status is YES):
            judge.worker.call(
                "load", timeout=WORKER.load_s, backend=verdict.backend, case=case_message(report.package, case)
            )
            answer = judge.worker.call("run", timeout=WORKER.run_s, request=request)
            REFERENCES[row.number](path, wire.rebuild(answer["output"], contract_of(row.task).output_type))
            compared += 1
    assert compared >= sum(1 for _, status, *_ in row.expect if status is YES)


# ---- shapes whose point is not one verdict -----------------------------------------------------


def test_62_columns_are_enforced_by_name(tmp_path: Path) -> None:
    import turnout

    path = classical.booster(tmp_path / "m.json")
    with turnout.load(str(path)) as session:
        good = {"columns": classical.FEATURES, "rows": [[0.1, 0.2, 0.3, 0.4]]}
        assert session.run({"table": good}).output.rows
        with pytest.raises(turnout.InputError, match="weight"):
            session.run({"table": {"columns": classical.FEATURES[:3], "rows": [[0.1, 0.2, 0.3]]}})
        with pytest.raises(turnout.InputError, match="order|position"):
            session.run({"table": {"columns": classical.FEATURES[::-1], "rows": [[0.1, 0.2, 0.3, 0.4]]}})


def test_68_each_speech_model_gets_its_own_recipe(tmp_path: Path) -> None:
    import turnout

    ctc = turnout.inspect(str(hf.ctc(tmp_path / "ctc"))).artifacts[0]
    whisper = turnout.inspect(str(hf.whisper(tmp_path / "whisper"))).artifacts[0]
    assert ctc.recipe is not None and ctc.recipe.kind == "ctc" and ctc.recipe.settings["blank"] == 0
    assert whisper.recipe is not None and whisper.recipe.kind == "whisper" and "blank" not in whisper.recipe.settings


def test_71_all_artifacts_of_a_mixed_package(tmp_path: Path, judge: Judge) -> None:
    report = check(str(everything(tmp_path / "all")), "text-generation", judge=judge)
    kinds = {a.kind for a in report.package.artifacts}
    assert {ArtifactKind.TRANSFORMERS, ArtifactKind.ONNX, ArtifactKind.OPENVINO_IR, ArtifactKind.GGUF} <= kinds
    supported = {(v.kind, v.backend) for v in report.verdicts if v.status is YES}
    assert {
        (ArtifactKind.TRANSFORMERS, "transformers"),
        (ArtifactKind.ONNX, "onnxruntime"),
        (ArtifactKind.GGUF, "llamacpp"),
    } <= supported
    assert report.chosen is not None and "prior" in report.why
    measured = check(str(tmp_path / "all"), "text-generation", execute=True, judge=judge)
    assert measured.chosen is not None and "measured" in measured.why
    best = max(v.measurements["tokens_per_s"] for v in measured.verdicts if v.status is YES)
    assert measured.chosen.measurements["tokens_per_s"] == best


def test_73_more_weights_than_memory(tmp_path: Path, judge: Judge) -> None:
    import turnout

    path = enormous(tmp_path / "huge")
    verdict = next(v for v in check(str(path), "text-generation", judge=judge).verdicts if v.backend == "transformers")
    assert verdict.status is YES, told(verdict)
    assert verdict.admission is Admission.INSUFFICIENT_MEMORY
    assert verdict.estimates.weights > 1 << 41 and "free" in verdict.admission_detail
    with pytest.raises(turnout.TurnoutError, match="memory") as caught:
        turnout.load(str(path), task="text-generation")
    assert caught.value.code == "memory.insufficient"


def test_evidence_is_withdrawn_when_the_package_changes(tmp_path: Path, judge: Judge) -> None:
    path = hf.llama(tmp_path / "model")
    first = check(str(path), "text-generation", backend="transformers", execute=True, judge=judge)
    assert first.verdicts[0].level.name == "EXECUTED"
    again = check(str(path), "text-generation", backend="transformers", judge=judge)
    assert again.verdicts[0].level.name == "EXECUTED"
    shutil.rmtree(path)
    hf.llama(path, rope_theta=5000.0)
    later = check(str(path), "text-generation", backend="transformers", judge=judge)
    assert later.verdicts[0].level.name == "DRY_LOADED"
    reasons = [reason for _, reason in judge.ledger.withdrawn(str(path))]
    assert any("artifact_digest" in reason for reason in reasons)
