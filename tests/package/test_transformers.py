"""Transformers directories: configuration in old and new spelling, tasks, weights and what is wrong with them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import save_file
from tests.shapes import hf

from turnout.package.facts import Artifact, ArtifactKind, CodeNeed, Severity
from turnout.package.formats.context import nearest_context, read_architecture, read_context
from turnout.package.inspect import inspect
from turnout.package.scan import Scan

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

CONFIG: dict[str, Any] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 4}


def package(directory: Path, config: dict[str, Any] | str = CONFIG, rows: int = 8, **files: str) -> Path:
    """A directory with a config.json and one embedding of ``rows`` by 4."""
    import numpy

    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    save_file({"model.embed_tokens.weight": numpy.zeros((rows, 4), "float32")}, directory / "model.safetensors")
    for name, text in files.items():
        (directory / name.replace("__", ".")).write_text(text)
    return directory


def artifact_of(path: Path) -> Artifact:
    found = [a for a in inspect(path).artifacts if a.kind is ArtifactKind.TRANSFORMERS]
    assert len(found) == 1, [a.id for a in inspect(path).artifacts]
    return found[0]


def codes(artifact: Artifact) -> dict[str, Severity]:
    return {f.code: f.severity for f in [*artifact.findings, *artifact.tensors.problems]}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return hf.llama(tmp_path_factory.mktemp("llama"))


# ---- whole packages ----------------------------------------------------------------------------


def test_a_complete_decoder(llama: Path) -> None:
    artifact = artifact_of(llama)
    assert artifact.id == "transformers:." and codes(artifact) == {}
    assert artifact.task_ids() == ["chat", "text-generation"]
    architecture = artifact.architecture
    assert architecture is not None and architecture.model_type == "llama" and architecture.tied is False
    assert architecture.dims["num_key_value_heads"] == 2 and architecture.dims["max_position_embeddings"] == 64
    assert artifact.tokenizer is not None and artifact.tokenizer.eos == "</s>"
    assert artifact.generation is not None and artifact.generation.eos_ids == [3]
    assert "chat_template.jinja" in artifact.files and artifact.size_bytes > 0


def test_the_inventory_is_that_of_the_library(llama: Path) -> None:
    from safetensors import safe_open

    with safe_open(llama / "model.safetensors", "np") as stream:
        shapes = {name: tuple(stream.get_slice(name).get_shape()) for name in stream.keys()}  # noqa: SIM118
    assert {n: t.shape for n, t in artifact_of(llama).tensors.tensors.items()} == shapes


WEIGHTS = {
    "6": (hf.shard_absent, "artifact.shard_missing", Severity.ERROR),
    "7": (hf.index_escapes, "artifact.path_escape", Severity.ERROR),
    "8": (hf.index_wrong_owner, "index.inconsistent", Severity.WARNING),
    "9": (hf.cut_in_half, "artifact.truncated", Severity.ERROR),
    "10": (hf.lfs_pointer, "artifact.lfs_pointer", Severity.ERROR),
    "19": (hf.tokenizer_too_large, "tokenizer.id_out_of_range", Severity.ERROR),
    "21": (lambda p: hf.torch_checkpoint(p, True), "code.pickle_unsafe", Severity.ERROR),
}


@pytest.mark.parametrize("number", WEIGHTS)
def test_what_is_wrong_with_weights_is_named(number: str, tmp_path: Path) -> None:
    build, code, severity = WEIGHTS[number]
    assert codes(artifact_of(build(tmp_path))) == {code: severity}


def test_weights_of_a_torch_file(tmp_path: Path) -> None:
    artifact = artifact_of(hf.torch_checkpoint(tmp_path, False))
    assert codes(artifact) == {} and artifact.code is CodeNeed.NONE
    assert artifact.tensors.tensors["lm_head.weight"].shape == (100, 32)
    hostile = artifact_of(hf.torch_checkpoint(tmp_path / "hostile", True))
    assert hostile.code is CodeNeed.FORBIDDEN


def test_shards_without_an_index_are_not_found(tmp_path: Path) -> None:
    target = hf.sharded(tmp_path)
    (target / "model.safetensors.index.json").unlink()
    assert codes(artifact_of(target)) == {"artifact.missing": Severity.ERROR}


def test_an_index_that_omits_a_shard_lists_what_its_shards_hold(tmp_path: Path) -> None:
    artifact = artifact_of(hf.index_omits_shard(tmp_path))
    assert len(artifact.tensors.shards) == 2 and "artifact.shard_missing" not in codes(artifact)
    whole = artifact_of(tmp_path / "whole")
    assert set(artifact.tensors.tensors) < set(whole.tensors.tensors)


def test_one_tensor_in_two_shards(tmp_path: Path) -> None:
    target = hf.sharded(tmp_path)
    shutil.copy(target / "model-00001-of-00003.safetensors", target / "model-00002-of-00003.safetensors")
    assert "artifact.duplicate_tensor" in codes(artifact_of(target))


@pytest.mark.parametrize(
    "index",
    [
        "{",
        "[]",
        '{"weight_map": [1]}',
        '{"weight_map": {"a": 1}}',
        json.dumps({"weight_map": {str(n): str(n) for n in range(9000)}}),
    ],
)
def test_an_index_that_is_none(index: str, tmp_path: Path) -> None:
    target = hf.sharded(tmp_path)
    (target / "model.safetensors.index.json").write_text(index)
    assert set(codes(artifact_of(target))) <= {"config.invalid", "index.inconsistent"}


def test_a_configuration_without_weights(tmp_path: Path) -> None:
    package(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    assert codes(artifact_of(tmp_path)) == {"artifact.missing": Severity.ERROR}


def test_weights_that_the_configuration_names(tmp_path: Path) -> None:
    package(tmp_path, CONFIG | {"transformers_weights": "special.safetensors"})
    assert codes(artifact_of(tmp_path)) == {"artifact.missing": Severity.ERROR}
    (tmp_path / "model.safetensors").rename(tmp_path / "special.safetensors")
    assert codes(artifact_of(tmp_path)) == {}
    package(tmp_path, CONFIG | {"transformers_weights": "../outside.safetensors"})
    assert codes(artifact_of(tmp_path)) == {"artifact.path_escape": Severity.ERROR}


def test_a_torch_file_that_is_no_state_dict(tmp_path: Path) -> None:
    import pickle

    package(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(pickle.dumps({"a": 1}))
    assert codes(artifact_of(tmp_path)) == {"artifact.corrupt": Severity.ERROR}


# ---- configuration -----------------------------------------------------------------------------


def architecture_of(**config: Any) -> tuple[Any, list[str]]:
    findings: list[Any] = []
    return read_architecture(config, "config.json", findings), [f.code for f in findings]


def test_old_and_new_spellings_say_the_same() -> None:
    old, _ = architecture_of(n_embd=8, n_layer=2, n_head=4, n_positions=16, torch_dtype="torch.bfloat16")
    new, _ = architecture_of(
        hidden_size=8, num_hidden_layers=2, num_attention_heads=4, max_position_embeddings=16, dtype="bfloat16"
    )
    assert old.dims == new.dims and old.dtype == new.dtype == "bfloat16"
    scaled, found = architecture_of(rope_scaling={"type": "linear", "factor": 2.0}, rope_theta=1e4)
    assert found == [] and scaled.rope["rope_theta"] == 1e4 and scaled.rope["factor"] == 2.0
    both, found = architecture_of(
        rope_parameters={"full_attention": {"rope_type": "yarn"}, "sliding_attention": {"rope_type": "default"}}
    )
    assert found == [] and set(both.rope) == {"full_attention", "sliding_attention"}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "su"}},
        {"rope_parameters": {"rope_type": "su"}},
        {"rope_parameters": {"full_attention": {"rope_type": "su"}}},
        {"text_config": {"rope_scaling": {"rope_type": "su"}}},
    ],
)
def test_an_unknown_rotary_embedding_is_named(config: dict[str, Any]) -> None:
    findings: list[Any] = []
    read_architecture(config, "config.json", findings)
    assert [(f.code, f.observed) for f in findings] == [("config.unsupported_variant", "su")]


def test_known_rotary_embeddings_are_those_of_the_library() -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from turnout.package.formats.context import ROPE_TYPES

    assert set(ROPE_INIT_FUNCTIONS) <= ROPE_TYPES


def test_quantization_has_an_identity(tmp_path: Path) -> None:
    gptq = {"quant_method": "GPTQ", "bits": 4, "group_size": 128, "sym": True, "checkpoint_format": "gptq"}
    quantization = artifact_of(package(tmp_path, CONFIG | {"quantization_config": gptq})).quantization
    assert quantization is not None and quantization.tensors_plain is True  # the file holds floats after all
    assert (quantization.method, quantization.bits, quantization.group_size) == ("gptq", 4, 128)
    assert quantization.symmetric is True and quantization.packing == "gptq"
    small, _ = architecture_of(quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True})
    assert small.quantization is not None and small.quantization.bits == 4


def test_code_beside_a_model_is_optional_here(tmp_path: Path) -> None:
    for known in (True, False):
        artifact = artifact_of(hf.auto_map(tmp_path / str(known), known))
        assert artifact.code is CodeNeed.OPTIONAL
        assert artifact.architecture is not None and "AutoModelForCausalLM" in artifact.architecture.auto_map
        assert "text-generation" in artifact.task_ids()
    assert not list(tmp_path.rglob("*.ran"))


ODD = [
    "",
    "[]",
    "{",
    "null",
    '{"a":1,"a":2}',
    '{"model_type": 3}',
    '{"model_type": "x", "architectures": "Y"}',
    '{"model_type": "x", "architectures": [1, null], "id2label": {"a": 1}, "eos_token_id": {"x": 1}}',
    '{"model_type": "x", "quantization_config": [1]}',
    '{"model_type": "x", "hidden_size": "big", "rope_scaling": "linear", "rope_parameters": {"a": 1}, "auto_map": [1]}',
    '{"model_type": "x", "text_config": {"text_config": {"text_config": {"text_config": {"text_config": {}}}}}}',
    '{"model_type": "x", "quantization_config": {"quant_method": {"a": 1}, "bits": "four", "ignore": 3}}',
    '{"model_type": "x", "architectures": ["TimeSeriesTransformerForPrediction"], "lags_sequence": "x"}',
    '{"model_type": "x", "vocab_size": 1e400, "max_position_embeddings": -1, "transformers_weights": ["a"]}',
]


@pytest.mark.parametrize("text", ODD)
def test_odd_configurations_are_described_not_raised(text: str, tmp_path: Path) -> None:
    found = inspect(package(tmp_path, text))
    assert found.artifacts and not any("gave up" in f.message for f in found.all_findings())


BOMBS = {
    "lists": '{"a":[' + "[]," * 1_100_000 + "[]]}",
    "wide-text": '{"a":"\U0001f600' + "x" * (13 << 20) + '"}',
    "zeros": "{" + "\0" * 1000,
}


@pytest.mark.parametrize("name", BOMBS)
def test_configurations_that_would_cost_too_much_are_not_parsed(name: str, tmp_path: Path) -> None:
    import tracemalloc

    path = package(tmp_path, BOMBS[name])
    tracemalloc.start()
    artifact = artifact_of(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "config.invalid" in codes(artifact)
    assert peak < 60 << 20


def test_context_is_the_nearest(tmp_path: Path) -> None:
    package(tmp_path, tokenizer_config__json="{}")
    (tmp_path / "onnx" / "deep").mkdir(parents=True)
    (tmp_path / "onnx" / "deep" / "model.onnx").write_bytes(b"x")
    scan = Scan.of(tmp_path)
    context = nearest_context(scan, "onnx/deep/model.onnx")
    assert context is not None and context is read_context(scan, "")
    package(tmp_path / "onnx", CONFIG | {"model_type": "bert"})
    inner = nearest_context(Scan.of(tmp_path), "onnx/deep/model.onnx")
    assert inner is not None and inner.architecture is not None and inner.architecture.model_type == "bert"


def test_licence(tmp_path: Path) -> None:
    package(tmp_path, README__md="---\nlanguage: en\nlicense: apache-2.0\n---\nHello", LICENSE="MIT License\n\nfree")
    licence = artifact_of(tmp_path).licence
    assert licence is not None and licence.value == "apache-2.0"
    (tmp_path / "README.md").unlink()
    licence = artifact_of(tmp_path).licence
    assert licence is not None and licence.value == "MIT License"


# ---- tasks -------------------------------------------------------------------------------------

TOKENIZER = '{"model": {"type": "WordLevel", "vocab": {"a": 0}}}'
IMAGES = '{"image_processor_type": "ViTImageProcessor"}'
TASKS: list[tuple[str, str, list[str]]] = [
    ("LlamaForCausalLM", "llama", ["text-generation"]),
    ("GPT2LMHeadModel", "gpt2", ["text-generation"]),
    ("BertForMaskedLM", "bert", ["fill-mask"]),
    ("BertForTokenClassification", "bert", ["token-classification"]),
    ("BertForQuestionAnswering", "bert", ["question-answering"]),
    ("BertForSequenceClassification", "bert", ["text-classification"]),
    ("BertModel", "bert", ["embeddings"]),
    ("T5ForConditionalGeneration", "t5", ["text2text-generation", "translation", "summarization"]),
    ("MarianMTModel", "marian", ["text2text-generation", "translation"]),
    ("PegasusForConditionalGeneration", "pegasus", ["text2text-generation", "summarization"]),
    ("WhisperForConditionalGeneration", "whisper", ["automatic-speech-recognition"]),
    ("SpeechEncoderDecoderModel", "speech-encoder-decoder", ["automatic-speech-recognition"]),
    ("VisionEncoderDecoderModel", "vision-encoder-decoder", ["image-text-to-text"]),
    ("MusicgenForConditionalGeneration", "musicgen", []),
    ("CLIPModel", "clip", ["zero-shot-image-classification"]),
    ("DecisionTransformerModel", "decision_transformer", ["decision"]),
    ("VitsModel", "vits", ["text-to-speech"]),
    ("DetrForSegmentation", "detr", ["image-segmentation"]),
    ("BertForPreTraining", "bert", []),
]


@pytest.mark.parametrize(("name", "kind", "tasks"), TASKS)
def test_tasks_of_class_names(name: str, kind: str, tasks: list[str], tmp_path: Path) -> None:
    config = CONFIG | {"model_type": kind, "architectures": [name]}
    assert artifact_of(package(tmp_path, config, tokenizer__json=TOKENIZER)).task_ids() == tasks


def test_pictures_without_a_head_give_features(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "vit", "architectures": ["ViTModel"]}
    artifact = artifact_of(package(tmp_path, config, preprocessor_config__json=IMAGES))
    assert artifact.task_ids() == ["image-feature-extraction"]


def test_a_picture_model_with_text(tmp_path: Path) -> None:
    config = CONFIG | {"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"]}
    config |= {"vision_config": {"hidden_size": 8}, "text_config": {"hidden_size": 16}}
    artifact = artifact_of(package(tmp_path, config, tokenizer__json=TOKENIZER))
    assert artifact.task_ids() == ["image-text-to-text", "text-generation"]


def test_one_label_is_a_reranker_only_where_its_source_says_so(tmp_path: Path) -> None:
    config = CONFIG | {
        "model_type": "bert",
        "architectures": ["BertForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
    }
    plain = artifact_of(package(tmp_path / "a", config, tokenizer__json=TOKENIZER))
    said = artifact_of(
        package(tmp_path / "b", config | {"sentence_transformers": {"version": "5"}}, tokenizer__json=TOKENIZER)
    )
    assert {t.task: t.strength.name for t in plain.tasks}["rerank"] == "DERIVED"
    assert {t.task: t.strength.name for t in said.tasks}["rerank"] == "CONFIG"


def test_an_encoder_without_a_recipe_says_that_one_would_be_assumed(tmp_path: Path) -> None:
    artifact = artifact_of(hf.encoder(tmp_path))
    assert codes(artifact) == {"recipe.assumed": Severity.WARNING}
    assert {t.task: t.strength.name for t in artifact.tasks} == {"embeddings": "DERIVED"}


def test_speech_forecast_and_decision_have_their_recipes(tmp_path: Path) -> None:
    ctc = artifact_of(hf.ctc(tmp_path / "ctc")).recipe
    whisper = artifact_of(hf.whisper(tmp_path / "whisper")).recipe
    forecast = artifact_of(hf.forecaster(tmp_path / "forecast")).recipe
    decision = artifact_of(hf.decision(tmp_path / "decision")).recipe
    assert (
        ctc is not None and ctc.kind == "ctc" and ctc.settings["blank"] == 0 and ctc.settings["sampling_rate"] == 16000
    )
    assert whisper is not None and whisper.kind == "whisper" and whisper.settings["num_mel_bins"] == 80
    assert forecast is not None and forecast.kind == "forecast" and forecast.settings["required_history"] == 15
    assert decision is not None and decision.settings["state_dim"] == 4
