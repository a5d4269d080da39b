"""Real trained weights: judged by every backend, executed on each that says supported, compared."""

from __future__ import annotations

import csv
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.models.conftest import SENTENCES

import turnout
from turnout.backends import registry
from turnout.backends.base import EvidenceLevel, VerdictStatus
from turnout.worker.judge import Judge, Report, check

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("models"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]
QUESTION = {
    "messages": [
        {"role": "system", "content": "Answer in one short sentence."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
}


@dataclass
class Model:
    """What must be said of a model for one task: backends that run it (with how many artifacts), and
    for the others the code and a word of the reason."""

    name: str
    task: str
    runs: dict[str, int]
    refuses: dict[str, tuple[VerdictStatus, str, str]] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)


NO, IF = VerdictStatus.UNSUPPORTED, VerdictStatus.CONDITIONAL
DEQUANTIZE = {"allow_dequantize": True}
MODELS = [
    Model(
        "smollm2",
        "chat",
        {"llamacpp": 1},
        {
            "transformers": (IF, "quantization.kernel_missing", "Q4_1"),
            "openvino-genai": (IF, "quantization.unsupported", "Q4_1"),
        },
    ),
    Model(
        "smollm2",
        "chat",
        {"llamacpp": 1, "torch-native": 1, "transformers": 1, "openvino-genai": 1},
        options=DEQUANTIZE,
    ),
    Model(
        "gemma3-270m",
        "text-generation",
        {"llamacpp": 1},
        {
            "openvino-genai": (NO, "quantization.unsupported", "Q5_0"),
            "transformers": (IF, "quantization.kernel_missing", "Q5_0"),
        },
    ),
    Model("minilm", "embeddings", {"sentence-transformers": 1, "transformers": 1}),
    Model("ner", "token-classification", {"onnxruntime": 1, "openvino": 1}),
    Model("title", "translation", {"onnxruntime": 1, "openvino": 1}),
    Model(
        "silero-vad",
        "voice-activity-detection",
        {"onnxruntime": 6, "openvino": 3},
        {"openvino": (NO, "operator.no_kernel", "Conv")},
    ),
    Model("basic-pitch", "tensor", {"onnxruntime": 1, "openvino": 3}),
    Model(
        "mediapipe", "tensor", {"openvino": 11}, {"openvino": (NO, "operator.no_kernel", "Convolution2DTransposeBias")}
    ),
    Model("efficientnet-lite0", "tensor", {}),
    Model(
        "whisper-tiny",
        "automatic-speech-recognition",
        {},
        {"ctranslate2": (NO, "task.not_offered", "automatic-speech-recognition")},
    ),
]


def running(report: Report) -> dict[str, int]:
    """Supported verdicts by backend."""
    counts: dict[str, int] = {}
    for verdict in report.verdicts:
        if verdict.status is VerdictStatus.SUPPORTED:
            counts[verdict.backend] = counts.get(verdict.backend, 0) + 1
    return counts


@pytest.mark.parametrize("model", MODELS, ids=lambda m: f"{m.name}-{m.task}{'-dequantized' if m.options else ''}")
def test_judged_and_executed(model: Model, judge: Judge) -> None:
    said = check(model.name, model.task, options=model.options, judge=judge)
    assert running(said) == model.runs
    done = check(model.name, model.task, options=model.options, execute=True, judge=judge)
    assert running(done) == model.runs, "what was called supported did not run"
    for verdict in done.verdicts:
        if verdict.status is VerdictStatus.SUPPORTED:
            assert verdict.level is EvidenceLevel.EXECUTED
        else:
            assert verdict.reasons, verdict
    for backend, (status, code, word) in model.refuses.items():
        refused = [
            v
            for v in done.verdicts
            if v.backend == backend and v.status is status and v.kind in registry.get(backend).reads
        ]
        assert any(r.code == code and word in f"{r.message} {r.observed}" for v in refused for r in v.reasons), refused


# ---- what they answer --------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["llamacpp", "torch-native", "transformers", "openvino-genai"])
def test_smollm2_knows_the_capital(backend: str) -> None:
    options = {} if backend == "llamacpp" else DEQUANTIZE
    with turnout.load("smollm2", task="chat", backend=backend, options=options) as session:
        result = session.run(QUESTION, turnout.Sampling(max_tokens=24))
    assert "Paris" in result.output.text
    assert result.executed.backend == backend and len(result.executed.digest) == 64


def test_smollm2_as_a_directory(smollm2_hf: Path, judge: Judge) -> None:
    report = check(str(smollm2_hf), "chat", execute=True, judge=judge)
    assert running(report) == {"torch-native": 1, "openvino-native": 1, "transformers": 1}
    for backend in running(report):
        with turnout.load(str(smollm2_hf), task="chat", backend=backend) as session:
            assert not session.binding.unresolved
            assert session.binding.tied or backend == "openvino-native"
            assert "Paris" in session.run(QUESTION, turnout.Sampling(max_tokens=24)).output.text


def cosines(path: str, backend: str, reference: np.ndarray, **options: Any) -> np.ndarray:
    """Cosine of each sentence's vector to the reference, all sentences in one batch."""
    with turnout.load(path, task="embeddings", backend=backend, options=options) as session:
        output = session.run({"texts": SENTENCES}).output
    assert output.dimension == 384 and output.normalized and output.recipe
    result: np.ndarray = (output.vectors * reference).sum(1) / np.linalg.norm(output.vectors, axis=1)
    return result


@pytest.mark.parametrize("backend", ["sentence-transformers", "transformers"])
def test_minilm_in_safetensors(backend: str, minilm: Path, minilm_reference: np.ndarray) -> None:
    assert cosines(str(minilm), backend, minilm_reference).min() >= 0.9999


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_minilm_in_onnx(backend: str, minilm_onnx: Path, minilm_reference: np.ndarray) -> None:
    assert cosines(str(minilm_onnx), backend, minilm_reference).min() >= 0.9999


def test_minilm_in_openvino(minilm_onnx: Path, minilm_reference: np.ndarray, tmp_path: Path) -> None:
    import shutil

    import openvino

    shutil.copytree(minilm_onnx, tmp_path, dirs_exist_ok=True)
    openvino.save_model(
        openvino.convert_model(tmp_path / "model.onnx"), tmp_path / "openvino_model.xml", compress_to_fp16=False
    )
    (tmp_path / "model.onnx").unlink()
    assert cosines(str(tmp_path), "openvino", minilm_reference).min() >= 0.9999


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_minilm_in_int8(backend: str, minilm: Path, minilm_reference: np.ndarray) -> None:
    """Sentences only: a lone letter comes out at 0.9985 on both runtimes, which is the model's own loss."""
    found = cosines("minilm-int8", backend, minilm_reference, tokenizer=str(minilm), pooling="mean", normalize=True)
    assert found[:3].min() >= 0.999


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_names_and_places(backend: str) -> None:
    text = "My name is John Smith, I live in Baker Street, London."
    with turnout.load("ner", backend=backend) as session:
        spans = session.run({"texts": [text]}).output.spans[0]
    found = {span.label: text[span.start : span.end] for span in spans}
    assert found == {"GIVEN_NAME": "John", "SURNAME": "Smith", "STREET_NAME": "Baker Street", "CITY": "London"}


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_a_house_in_german(backend: str) -> None:
    with turnout.load("title", task="translation", backend=backend) as session:
        output = session.run({"text": "translate English to German: The house is wonderful."}).output
    assert output.text == "Das Haus ist wunderbar."


def test_the_concert_pitch() -> None:
    """440 hertz is note 69 of MIDI; the model's first note is 21, its frame output has 88."""
    wave = np.sin(2 * np.pi * 440 * np.arange(43844) / 22050).astype(np.float32).reshape(1, -1, 1)
    heard: dict[str, int] = {}
    for artifact, backend in (
        ("onnx:nmp.onnx", "onnxruntime"),
        ("onnx:nmp.onnx", "openvino"),
        ("tflite:nmp.tflite", "openvino"),
    ):
        with turnout.load("basic-pitch", task="tensor", artifact=artifact, backend=backend) as session:
            name = session.package.artifact(artifact).graph.inputs[0].name  # type: ignore[union-attr]
            tensors = session.run({"tensors": {name: wave}}).output.tensors
        notes = [t for t in tensors.values() if t.shape[-1] == 88]
        heard[f"{artifact} on {backend}"] = 21 + int(
            max(notes, key=lambda t: float(t.max())).mean(axis=(0, 1)).argmax()
        )
    assert set(heard.values()) == {69}, heard


# ---- models trained here -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def cancer() -> tuple[Any, Any, list[str]]:
    from sklearn.datasets import load_breast_cancer

    data = load_breast_cancer()
    return data.data.astype(np.float32), data.target, [str(n) for n in data.feature_names]


def predicted(path: Path, columns: list[str], rows: Any, tmp_path: Path) -> list[str]:
    """Labels by way of the command line's CSV reader, as a user gives them."""
    from turnout.cli.inputs import table

    file = tmp_path / "rows.csv"
    with open(file, "w", newline="") as stream:
        csv.writer(stream).writerows([columns, *rows.tolist()])
    with turnout.load(str(path)) as session:
        output = session.run({"table": table(str(file))}).output
    return [str(row[output.columns.index("label")]) for row in output.rows]


def test_xgboost_on_breast_cancer(cancer: tuple[Any, Any, list[str]], tmp_path: Path) -> None:
    import xgboost

    x, y, names = cancer
    model = xgboost.train(
        {"objective": "binary:logistic", "max_depth": 3, "seed": 0},
        xgboost.DMatrix(x[:400], y[:400], feature_names=names),
        20,
    )
    model.save_model(tmp_path / "model.ubj")
    own = (model.predict(xgboost.DMatrix(x[400:], feature_names=names)) > 0.5).astype(int)
    found = predicted(tmp_path / "model.ubj", names, x[400:], tmp_path)
    assert found == [str(v) for v in own]
    assert np.mean(own == y[400:]) > 0.93


@pytest.mark.parametrize("form", ["skops", "onnx"])
def test_scikit_learn_on_breast_cancer(form: str, cancer: tuple[Any, Any, list[str]], tmp_path: Path) -> None:
    import skops.io
    from skl2onnx import to_onnx
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y, names = cancer
    model = make_pipeline(StandardScaler(), LogisticRegression()).fit(x[:400], y[:400])
    path = tmp_path / f"model.{form}"
    if form == "skops":
        skops.io.dump(model, path)
    else:
        path.write_bytes(to_onnx(model, x[:1], target_opset=18).SerializeToString())
    assert predicted(path, names, x[400:], tmp_path) == [str(v) for v in model.predict(x[400:])]
