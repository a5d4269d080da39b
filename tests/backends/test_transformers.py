"""The transformers backend on tiny packages: what it says of them, and what its sessions compute.

References are the library's own eager generation and pipelines, or numbers worked out by hand.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tests.shapes.ggufs import write_gguf
from tests.shapes.hf import BERT, VOCABULARY, bert_config, build, llama_config, save_tokenizer, variant

from turnout.backends.base import Case, EvidenceLevel, Outcome, Requirement, State
from turnout.backends.requirements import common
from turnout.backends.transformers import TransformersBackend
from turnout.errors import InputError, LoadError
from turnout.package.facts import Artifact, ArtifactKind
from turnout.package.inspect import inspect
from turnout.types import Request, Sampling

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")

TEXT = "w1 w2 w3 w4"
BACKEND = TransformersBackend()


# ---- packages --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete tiny Llama."""
    return build(tmp_path_factory.mktemp("llama"), "LlamaForCausalLM", llama_config())


def case_of(path: Path, task: str, **options: Any) -> Case:
    """The case of the first artifact of a package that the backend reads, or of its first artifact."""
    package = inspect(path)
    found = next((a for a in package.artifacts if a.kind in BACKEND.reads), package.artifacts[0])
    return Case(package.root, found, task, options=options)


def unmet(case: Case) -> dict[str, Requirement]:
    """All requirements that do not hold, by code."""
    asked = common(BACKEND, case, BACKEND.describe(), ["cpu"]) + BACKEND.requirements(case)
    return {r.id: r for r in asked if r.state in (State.UNMET, State.UNKNOWN)}


def session_of(path: Path, task: str, **options: Any) -> Any:
    """A session of a case that must be supported."""
    case = case_of(path, task, **options)
    assert unmet(case) == {}
    plan = BACKEND.plan(case)
    evidence = BACKEND.dry_load(plan)
    assert evidence.outcome is Outcome.PASS, evidence.reasons
    session = BACKEND.load(plan)
    assert session.binding.unresolved == [] and session.binding.loaded > 0
    return session


def refusal(path: Path, task: str, **options: Any) -> Any:
    """The dry load's evidence of a case that only the dry load refuses; loading it fails alike."""
    case = case_of(path, task, **options)
    assert unmet(case) == {}
    plan = BACKEND.plan(case)
    evidence = BACKEND.dry_load(plan)
    assert evidence.outcome is Outcome.FAIL and evidence.level is EvidenceLevel.DRY_LOADED
    with pytest.raises(LoadError) as error:
        BACKEND.load(plan)
    assert error.value.code == evidence.reasons[0].code
    return evidence


# ---- directories -----------------------------------------------------------------------


def test_complete_llama_generates_what_the_library_generates(llama: Path) -> None:
    session = session_of(llama, "text-generation")
    pieces: list[str] = []
    output = session.run(Request("text-generation", {"prompt": TEXT}, Sampling(max_tokens=12)), pieces.append)
    model = transformers.AutoModelForCausalLM.from_pretrained(llama, attn_implementation="eager")
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    inputs = tokenizer(TEXT, return_tensors="pt")
    expected = model.generate(**inputs, max_new_tokens=12, do_sample=False, pad_token_id=0)[
        0, inputs.input_ids.shape[1] :
    ]
    assert output.text == tokenizer.decode(expected, skip_special_tokens=True)
    assert "".join(pieces) == output.text and output.prompt_tokens == 4
    evidence = BACKEND.probe(session)
    assert evidence.outcome is Outcome.PASS and evidence.measurements["tokens_per_s"] > 0
    assert session.dtype == "float32"
    session.close()
    session.close()


def test_sampling_is_seeded_and_leaves_the_random_state_alone(llama: Path) -> None:
    session = session_of(llama, "text-generation")
    torch.manual_seed(5)
    before = torch.rand(1)
    torch.manual_seed(5)
    hot = [session.run(Request("text-generation", {"prompt": TEXT}, Sampling(16, 1.5, seed=s))).text for s in (1, 1, 2)]
    assert hot[0] == hot[1] != hot[2]
    assert torch.equal(torch.rand(1), before)
    whole = session.run(Request("text-generation", {"prompt": TEXT}, Sampling(16))).text
    stop = whole.split()[3]
    cut = session.run(Request("text-generation", {"prompt": TEXT}, Sampling(16, stop=(stop,))))
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"


def test_context_is_kept(llama: Path) -> None:
    session = session_of(llama, "text-generation")
    long = " ".join(["w1"] * 60)
    output = session.run(Request("text-generation", {"prompt": long}, Sampling(max_tokens=50)))
    assert output.finish_reason == "stop" or output.completion_tokens == 4
    with pytest.raises(InputError, match="64 tokens, the model's context is 64"):
        session.run(Request("text-generation", {"prompt": " ".join(["w1"] * 64)}))


def test_missing_tied_and_misshapen_tensors(llama: Path, tmp_path: Path) -> None:
    headless = variant(llama, tmp_path / "a", tensors=lambda t: t.pop("lm_head.weight"))
    assert refusal(headless, "text-generation").reasons[0].code == "tensor.missing"
    assert "lm_head.weight" in refusal(headless, "text-generation").reasons[0].message
    tied = variant(headless, tmp_path / "b", config=lambda c: c.update(tie_word_embeddings=True))
    session = session_of(tied, "text-generation")
    assert session.binding.tied == ["lm_head.weight = model.embed_tokens.weight"]
    hole = variant(llama, tmp_path / "c", tensors=lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    assert "`model.layers.1.mlp.up_proj.weight`" in refusal(hole, "text-generation").reasons[0].message
    wide = variant(llama, tmp_path / "d", config=lambda c: c.update(intermediate_size=64))
    reason = refusal(wide, "text-generation").reasons[0]
    assert (reason.code, reason.observed, reason.expected) == ("tensor.shape_mismatch", "[32, 48]", "[32, 64]")


def test_surplus_tensors_need_consent(llama: Path, tmp_path: Path) -> None:
    fewer = variant(llama, tmp_path / "a", config=lambda c: c.update(num_hidden_layers=1))
    evidence = refusal(fewer, "text-generation")
    assert evidence.reasons[0].code == "tensor.unexpected"
    assert evidence.remedies[0].argv == ["--option", "allow_unexpected=true"]
    session = session_of(fewer, "text-generation", allow_unexpected="true")
    assert len(session.binding.unexpected) == 9


def test_index_that_omits_a_shard(llama: Path, tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(llama)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    save_tokenizer(tmp_path)
    session_of(tmp_path, "text-generation").close()
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    last = sorted(set(index["weight_map"].values()))[-1]
    index["weight_map"] = {name: file for name, file in index["weight_map"].items() if file != last}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert refusal(tmp_path, "text-generation").reasons[0].code == "tensor.missing"


@pytest.mark.parametrize(
    ("change", "code", "observed", "remedy"),
    [
        ({"rope_parameters": {"rope_type": "su", "rope_theta": 1e4}}, "config.unsupported_variant", "su", None),
        ({"quantization_config": {"quant_method": "nonsense"}}, "quantization.unknown", "nonsense", None),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            "dependency.missing",
            "not installed",
            "install",
        ),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "dependency.missing", "not installed", "install"),
        ({"quantization_config": {"quant_method": "nvfp4"}}, "quantization.unsupported", "nvfp4", None),
        ({"model_type": "no-such-type"}, "architecture.unknown", "no-such-type", "upgrade"),
        (
            {"model_type": "no-such-type", "auto_map": {"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"}},
            "code.required",
            "x.Y",
            "grant_trust",
        ),
    ],
)
def test_refused_configurations(
    llama: Path, tmp_path: Path, change: dict[str, Any], code: str, observed: str, remedy: str | None
) -> None:
    package = variant(llama, tmp_path / "a", config=lambda c: c.update(change))
    found = unmet(case_of(package, "text-generation"))
    assert set(found) == {code}
    assert found[code].observed == observed
    assert [m.action for m in found[code].remedies] == ([remedy] if remedy else [])


def test_unknown_quantization_says_that_the_tensors_are_plain(llama: Path, tmp_path: Path) -> None:
    package = variant(llama, tmp_path / "a", config=lambda c: c.update(quantization_config={"quant_method": "odd"}))
    assert "plain floats" in unmet(case_of(package, "text-generation"))["quantization.unknown"].reason.message


def test_package_code_beside_a_known_type_is_not_needed(llama: Path, tmp_path: Path) -> None:
    code = tmp_path / "a" / "x.py"
    package = variant(
        llama, tmp_path / "a", config=lambda c: c.update(auto_map={"AutoConfig": "x.Y", "AutoModelForCausalLM": "x.Z"})
    )
    code.write_text("raise SystemExit('package code was run')")
    session = session_of(package, "text-generation", trust_remote_code="true")
    assert type(session.model).__module__.startswith("transformers.")


def test_chat_needs_a_template_and_uses_it(llama: Path, tmp_path: Path) -> None:
    messages = {"messages": [{"role": "user", "content": "w5 w6"}]}
    assert set(unmet(case_of(llama, "chat"))) == {"template.missing"}
    template = tmp_path / "template.jinja"
    template.write_text(
        "{% for m in messages %}w1 {{ m.content }} {% endfor %}{% if add_generation_prompt %}w2{% endif %}"
    )
    session = session_of(llama, "chat", chat_template=str(template))
    plain = session_of(llama, "text-generation")
    expected = plain.run(Request("text-generation", {"prompt": "w1 w5 w6 w2"}, Sampling(max_tokens=8)))
    assert session.run(Request("chat", messages, Sampling(max_tokens=8))).text == expected.text
    broken = tmp_path / "broken.jinja"
    broken.write_text("{{ raise_exception('only system messages') }}")
    session = session_of(llama, "chat", chat_template=str(broken))
    with pytest.raises(InputError, match="only system messages"):
        session.run(Request("chat", messages))


def test_clean_torch_file_is_loaded_weights_only(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path, dirs_exist_ok=True)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    text = session_of(tmp_path, "text-generation").run(Request("text-generation", {"prompt": TEXT}, Sampling(8))).text
    assert (
        text == session_of(llama, "text-generation").run(Request("text-generation", {"prompt": TEXT}, Sampling(8))).text
    )


def test_stored_type_is_kept_and_may_be_chosen(llama: Path, tmp_path: Path) -> None:
    def halve(tensors: dict[str, Any]) -> None:
        tensors.update({name: tensor.to(torch.bfloat16) for name, tensor in tensors.items()})

    half = variant(llama, tmp_path / "a", tensors=halve)
    assert session_of(half, "text-generation").model.dtype == torch.bfloat16
    assert session_of(half, "text-generation", dtype="float32").model.dtype == torch.float32
    assert set(unmet(case_of(half, "text-generation", dtype="int3"))) == {"option.unsupported"}


# ---- encoders --------------------------------------------------------------------------


def test_embeddings_are_the_mean_of_the_tokens(tmp_path: Path) -> None:
    build(tmp_path, "BertModel", bert_config(), wrapped=True)
    assert set(unmet(case_of(tmp_path, "embeddings"))) == {"recipe.assumed"}
    session = session_of(tmp_path, "embeddings", pooling="mean", normalize="true")
    texts = ["w1 w2 w3", "w4", "w5 w6 w7 w8 w9"]
    output = session.run(Request("embeddings", {"texts": texts}))
    model = transformers.BertModel.from_pretrained(tmp_path)
    for text, vector in zip(texts, output.vectors, strict=True):
        ids = torch.tensor([[2, *(VOCABULARY.index(word) for word in text.split()), 3]])
        with torch.inference_mode():
            mean = model(ids).last_hidden_state[0].mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-6)
    assert output.recipe == session.plan.recipe
    assert BACKEND.probe(session).outcome is Outcome.PASS


def test_encoder_without_pooler_still_embeds(tmp_path: Path) -> None:
    build(tmp_path, "BertModel", bert_config(), wrapped=True)
    bare = variant(tmp_path, tmp_path / "bare", tensors=lambda t: [t.pop(n) for n in list(t) if n.startswith("pooler")])
    one = session_of(bare, "embeddings", pooling="cls").run(Request("embeddings", {"texts": [TEXT]}))
    two = session_of(tmp_path, "embeddings", pooling="cls").run(Request("embeddings", {"texts": [TEXT]}))
    np.testing.assert_array_equal(one.vectors, two.vectors)


@pytest.mark.parametrize(("problem", "labels"), [("single_label_classification", 3), ("multi_label_classification", 3)])
def test_classification_equals_the_pipeline(tmp_path: Path, problem: str, labels: int) -> None:
    config = bert_config(num_labels=labels, problem_type=problem)
    build(tmp_path, "BertForSequenceClassification", config, wrapped=True)
    output = session_of(tmp_path, "text-classification").run(Request("text-classification", {"texts": [TEXT, "w9"]}))
    pipeline = transformers.pipeline("text-classification", model=str(tmp_path), top_k=None)
    for mine, theirs in zip(output.labels, pipeline([TEXT, "w9"]), strict=True):
        assert [s.label for s in mine] == [s["label"] for s in theirs]
        assert [s.score for s in mine] == pytest.approx([s["score"] for s in theirs], abs=1e-6)


def test_decoder_classification_finds_the_last_token(tmp_path: Path) -> None:
    build(tmp_path, "LlamaForSequenceClassification", llama_config(num_labels=2))
    session = session_of(tmp_path, "text-classification")
    both = session.run(Request("text-classification", {"texts": ["w1 w2 w3", "w1"]})).labels
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    ids = torch.tensor([[VOCABULARY.index(w) for w in ("w1", "w2", "w3")]])
    with torch.inference_mode():
        expected = model(ids).logits.softmax(-1)[0]
    by_index = {score.index: score.score for score in both[0]}
    assert [by_index[0], by_index[1]] == pytest.approx(expected.tolist(), abs=1e-6)


def test_rerank_scores_are_the_logits(tmp_path: Path) -> None:
    build(tmp_path, "BertForSequenceClassification", bert_config(num_labels=1), wrapped=True)
    inputs = {"query": "w1", "documents": ["w2", "w3 w4", "w5"]}
    ranking = session_of(tmp_path, "rerank").run(Request("rerank", inputs)).ranking
    model = transformers.AutoModelForSequenceClassification.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for document in ranking:
        pair = tokenizer("w1", inputs["documents"][document.index], return_tensors="pt")
        with torch.inference_mode():
            assert document.score == pytest.approx(model(**pair).logits.item(), abs=1e-5)
    assert [d.score for d in ranking] == sorted((d.score for d in ranking), reverse=True)


def test_rerank_of_a_headless_encoder_is_refused(tmp_path: Path) -> None:
    build(tmp_path, "BertModel", bert_config(), wrapped=True)
    assert "head.missing" in unmet(case_of(tmp_path, "rerank"))


def test_token_classification_equals_the_pipeline(tmp_path: Path) -> None:
    names = {0: "O", 1: "B-PER", 2: "I-PER", 3: "B-LOC"}
    config = bert_config(id2label=names, label2id={v: k for k, v in names.items()})
    build(tmp_path, "BertForTokenClassification", config, wrapped=True)
    text = " ".join(f"w{i}" for i in range(20))
    spans = (
        session_of(tmp_path, "token-classification").run(Request("token-classification", {"texts": [text]})).spans[0]
    )
    pipeline = transformers.pipeline("token-classification", model=str(tmp_path), aggregation_strategy="simple")
    expected = pipeline(text)
    assert len(expected) > 2
    assert [(s.start, s.end, s.label) for s in spans] == [(e["start"], e["end"], e["entity_group"]) for e in expected]
    assert [s.score for s in spans] == pytest.approx([float(e["score"]) for e in expected], abs=1e-5)


def test_fill_mask_equals_the_pipeline(tmp_path: Path) -> None:
    build(tmp_path, "BertForMaskedLM", bert_config(), wrapped=True)
    best = session_of(tmp_path, "fill-mask").run(Request("fill-mask", {"texts": ["w1 [MASK] w3"]})).labels[0]
    expected = transformers.pipeline("fill-mask", model=str(tmp_path))("w1 [MASK] w3")
    assert [s.index for s in best] == [e["token"] for e in expected]
    assert [s.score for s in best] == pytest.approx([e["score"] for e in expected], abs=1e-6)


def test_question_answering_probes(tmp_path: Path) -> None:
    build(tmp_path, "BertForQuestionAnswering", bert_config(), wrapped=True)
    session = session_of(tmp_path, "question-answering")
    inputs = {"question": "w1", "context": "w2 w3 w4"}
    span = session.run(Request("question-answering", inputs)).spans[0][0]
    assert span.text == inputs["context"][span.start : span.end] != ""
    assert BACKEND.probe(session).outcome is Outcome.PASS


def test_text_to_text_equals_the_library(tmp_path: Path) -> None:
    config = transformers.T5Config(
        vocab_size=100, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, eos_token_id=3
    )
    build(tmp_path, "T5ForConditionalGeneration", config)
    session = session_of(tmp_path, "text2text-generation")
    output = session.run(Request("text2text-generation", {"text": TEXT}, Sampling(max_tokens=10)))
    model = transformers.T5ForConditionalGeneration.from_pretrained(tmp_path)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    expected = model.generate(
        **tokenizer(TEXT, return_tensors="pt", return_token_type_ids=False), max_new_tokens=10, do_sample=False
    )
    assert output.text == tokenizer.decode(expected[0], skip_special_tokens=True)
    assert BACKEND.probe(session).outcome is Outcome.PASS


def test_image_classification_equals_the_library(tmp_path: Path) -> None:
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16, image_size=32, patch_size=8,
        num_labels=3,
    )  # fmt: skip
    build(tmp_path, "ViTForImageClassification", config, tokenizer=False)
    transformers.ViTImageProcessorPil(size={"height": 32, "width": 32}).save_pretrained(tmp_path)
    image = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    output = session_of(tmp_path, "image-classification").run(Request("image-classification", {"image": image}))
    pixels = torch.from_numpy((image / 255.0 - 0.5) / 0.5).float().permute(2, 0, 1)[None]
    model = transformers.ViTForImageClassification.from_pretrained(tmp_path)
    with torch.inference_mode():
        expected = model(pixels).logits.softmax(-1)[0]
    assert {s.index: s.score for s in output.labels[0]} == pytest.approx(dict(enumerate(expected.tolist())), abs=1e-5)


# ---- numbers ---------------------------------------------------------------------------


def test_forecast_refuses_a_short_history_with_both_numbers(tmp_path: Path) -> None:
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4, context_length=8, lags_sequence=[1, 2, 5], d_model=16, encoder_layers=1, decoder_layers=1,
        encoder_ffn_dim=16, decoder_ffn_dim=16, num_time_features=0, num_parallel_samples=20,
    )  # fmt: skip
    build(tmp_path, "TimeSeriesTransformerForPrediction", config, tokenizer=False)
    short = unmet(case_of(tmp_path, "time-series-forecasting", history="12"))
    assert "12 values" in short["option.unsupported"].reason.message and short["option.unsupported"].expected == "13"
    session = session_of(tmp_path, "time-series-forecasting")
    with pytest.raises(InputError, match="12 values is too short: 13 are needed"):
        session.run(Request("time-series-forecasting", {"history": np.ones(12)}))
    history = np.sin(np.arange(20) / 3)
    output = session.run(Request("time-series-forecasting", {"history": history}))
    again = session.run(Request("time-series-forecasting", {"history": history}))
    assert len(output.mean) == 4 and output == again and np.isfinite(output.mean).all()
    assert output.quantiles["0.1"][0] <= output.quantiles["0.9"][0]


def test_decision_transformer_predicts_and_does_not_chat(tmp_path: Path) -> None:
    config = transformers.DecisionTransformerConfig(
        state_dim=3, act_dim=2, hidden_size=16, n_layer=1, n_head=2, n_positions=64, max_ep_len=20
    )
    build(tmp_path, "DecisionTransformerModel", config, tokenizer=False)
    assert "task.not_offered" in unmet(case_of(tmp_path, "chat"))
    session = session_of(tmp_path, "decision")
    inputs = {
        "states": np.ones((4, 3)),
        "actions": np.zeros((4, 2)),
        "returns_to_go": np.ones(4),
        "timesteps": np.arange(4),
    }
    output = session.run(Request("decision", inputs))
    assert output.tensors["action_preds"].shape == (4, 2)
    with pytest.raises(InputError, match=r"`states` has the shape \[4, 5\], expected \[4, 3\]"):
        session.run(Request("decision", {**inputs, "states": np.ones((4, 5))}))


@pytest.mark.parametrize("kind", ["whisper", "wav2vec2"])
def test_speech_equals_the_library(tmp_path: Path, kind: str) -> None:
    if kind == "whisper":
        config = transformers.WhisperConfig(
            vocab_size=100, num_mel_bins=8, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
            decoder_attention_heads=2, encoder_ffn_dim=16, decoder_ffn_dim=16, max_source_positions=50,
            max_target_positions=40, decoder_start_token_id=2, eos_token_id=3, pad_token_id=0, bos_token_id=2,
        )  # fmt: skip
        build(tmp_path, "WhisperForConditionalGeneration", config)
        transformers.WhisperFeatureExtractor(feature_size=8, chunk_length=1).save_pretrained(tmp_path)
    else:
        config = transformers.Wav2Vec2Config(
            **BERT, vocab_size=100, conv_dim=[16, 16], conv_kernel=[10, 3], conv_stride=[5, 2],
            num_feat_extract_layers=2, num_conv_pos_embeddings=16, num_conv_pos_embedding_groups=4,
        )  # fmt: skip
        build(tmp_path, "Wav2Vec2ForCTC", config)
        transformers.Wav2Vec2FeatureExtractor(do_normalize=True).save_pretrained(tmp_path)
    session = session_of(tmp_path, "automatic-speech-recognition")
    audio = np.sin(np.arange(16000) * 0.05).astype(np.float32)
    output = session.run(Request("automatic-speech-recognition", {"audio": audio, "sampling_rate": 16000}))
    assert isinstance(output.text, str) and output.segments[0].end == 1.0
    with pytest.raises(InputError, match="8000 samples a second, the model takes 16000"):
        session.run(Request("automatic-speech-recognition", {"audio": audio, "sampling_rate": 8000}))
    if kind == "whisper":
        with pytest.raises(InputError, match="24000 samples, the model hears 16000"):
            session.run(Request("automatic-speech-recognition", {"audio": np.ones(24000, np.float32)}))


# ---- adapters --------------------------------------------------------------------------


@pytest.fixture
def adapter(llama: Path, tmp_path: Path) -> Path:
    """A LoRA of the tiny Llama with weights that change its answers."""
    import peft

    base = transformers.AutoModelForCausalLM.from_pretrained(llama)
    torch.manual_seed(1)
    settings = peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    wrapped = peft.get_peft_model(base, settings)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.5)
    wrapped.save_pretrained(tmp_path / "lora")
    return tmp_path / "lora"


def test_adapter_runs_on_its_base(llama: Path, adapter: Path) -> None:
    import peft

    session = session_of(adapter, "text-generation")
    request = Request("text-generation", {"prompt": TEXT}, Sampling(max_tokens=8))
    model = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(llama), adapter)
    tokenizer = transformers.AutoTokenizer.from_pretrained(llama)
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    expected = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, pad_token_id=0)[0, 4:]
    assert session.run(request).text == tokenizer.decode(expected, skip_special_tokens=True)
    assert session.run(request).text != session_of(llama, "text-generation").run(request).text


def test_adapter_without_base_or_with_another_width(llama: Path, adapter: Path, tmp_path: Path) -> None:
    def rename(config: dict[str, Any]) -> None:
        config["base_model_name_or_path"] = "nobody/nothing"

    lost = adapter.parent / "lost"
    shutil.copytree(adapter, lost)
    data = json.loads((lost / "adapter_config.json").read_text())
    rename(data)
    (lost / "adapter_config.json").write_text(json.dumps(data))
    assert set(unmet(case_of(lost, "text-generation"))) >= {"adapter.base_missing"}
    found = session_of(lost, "text-generation", base=str(llama), tokenizer=str(llama))
    assert found.binding.loaded > 21
    wide = build(tmp_path / "wide", "LlamaForCausalLM", llama_config(hidden_size=64))
    mismatch = unmet(case_of(lost, "text-generation", base=str(wide), tokenizer=str(wide)))["adapter.base_mismatch"]
    assert ("32" in mismatch.observed) and ("64" in mismatch.expected)
    broken = adapter.parent / "broken"
    shutil.copytree(adapter, broken)
    stored = load_file(broken / "adapter_model.safetensors")
    stored.pop(next(name for name in stored if "layers.1.self_attn.v_proj.lora_B" in name))
    save_file(stored, broken / "adapter_model.safetensors")
    assert refusal(broken, "text-generation").reasons[0].code == "tensor.missing"


# ---- GGUF ------------------------------------------------------------------------------


def test_gguf_runs_expanded_with_consent(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf")
    found = unmet(case_of(path, "text-generation"))
    assert set(found) == {"quantization.kernel_missing"}
    remedy = found["quantization.kernel_missing"].remedies[0]
    assert (
        remedy.changes_numerics
        and remedy.cost.bytes == case_of(path, "text-generation").artifact.tensors.param_count * 4
    )
    session = session_of(path, "text-generation", allow_dequantize="true")
    output = session.run(Request("text-generation", {"prompt": "ab 12"}, Sampling(max_tokens=6)))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=path.name)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file=path.name)
    ids = tokenizer("ab 12", return_tensors="pt").input_ids
    expected = model.generate(input_ids=ids, max_new_tokens=6, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    assert output.text == tokenizer.decode(expected, skip_special_tokens=True)


def test_plain_gguf_needs_no_consent_and_digits_stand_alone(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", kind="F32", pre="smollm")
    session = session_of(path, "text-generation")
    assert session.tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a12")[1:] == [
        ("1", (1, 2)),
        ("2", (2, 3)),
    ]


@pytest.mark.parametrize(
    ("change", "code", "observed"),
    [
        ({"drop": "blk.0.ffn_up"}, "tensor.missing", "1 absent"),
        ({"arch": "no-such-arch"}, "architecture.unknown", "no-such-arch"),
        ({"pre": "no-such-split"}, "tokenizer.pre_unknown", "no-such-split"),
        ({"llama__rope__scaling__type": "yarn"}, "config.unsupported_variant", "yarn"),
    ],
)
def test_what_the_gguf_loader_passes_over(tmp_path: Path, change: dict[str, Any], code: str, observed: str) -> None:
    found = unmet(case_of(write_gguf(tmp_path / "tiny.gguf", **change), "text-generation"))
    assert code in found
    assert found[code].observed == observed


def test_split_and_adapter_gguf_are_refused(tmp_path: Path) -> None:
    alone = write_gguf(tmp_path / "m-00001-of-00002.gguf", split__count=2, split__no=0)
    assert "artifact.shard_missing" in unmet(case_of(alone, "text-generation"))
    lora = write_gguf(tmp_path / "lora.gguf", general__type="adapter")
    case = case_of(lora, "text-generation")
    assert case.artifact.kind is ArtifactKind.GGUF_ADAPTER
    assert isinstance(case.artifact, Artifact) and {"adapter.base_missing", "artifact.missing"} <= set(unmet(case))


def test_describe_names_versions_without_importing() -> None:
    build = BACKEND.describe()
    assert build.available and build.version == transformers.__version__ and "torch" in build.dependencies
    assert "cpu" in BACKEND.devices()
    assert os.environ.get("HF_HUB_OFFLINE") == "1"
