"""The sentence-transformers backend: vectors and scores by hand from Transformers, and its refusals."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.shapes import bundles, hf

from turnout.backends.base import Case, Outcome, Requirement, State
from turnout.backends.sentence_transformers import SentenceTransformersBackend, module_known
from turnout.errors import InputError, LoadError
from turnout.package.facts import ArtifactKind
from turnout.package.inspect import inspect
from turnout.types import Request, Task

BACKEND = SentenceTransformersBackend()
TEXTS = ["w1 w2 w3 w4 w5", "w9", "w7 w7"]


def case_of(path: Path, task: str = Task.EMBEDDINGS, **options: Any) -> Case:
    package = inspect(path)
    artifact = next(a for a in package.artifacts if a.kind is ArtifactKind.SENTENCE_TRANSFORMERS)
    return Case(package.root, artifact, task, options=options)


def against(case: Case) -> dict[str, Requirement]:
    return {r.id: r for r in BACKEND.requirements(case) if r.state is not State.MET}


def embed(case: Case, texts: list[str] = TEXTS, **options: Any) -> Any:
    session = BACKEND.load(BACKEND.plan(case))
    output = session.run(Request(Task.EMBEDDINGS, {"texts": texts}, options=options))
    session.close()
    session.close()
    return output


def hidden_states(folder: Path, text: str, length: int | None = None) -> torch.Tensor:
    """Last hidden states [tokens, width] of Transformers' encoder for one text alone."""
    from transformers import AutoModel, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    cut = {"truncation": True, "max_length": length} if length else {}
    with torch.inference_mode():
        states: torch.Tensor = (
            AutoModel.from_pretrained(folder).eval()(**tokenizer(text, return_tensors="pt", **cut)).last_hidden_state[0]
        )
    return states


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sentences")


@pytest.fixture(scope="module")
def sentences(folder: Path) -> Path:
    return bundles.sentences(folder)


@pytest.fixture(scope="module")
def cross_encoder(folder: Path) -> Path:
    return bundles.cross_encoder(folder / "cross")


def saved(folder: Path, name: str, *layers: Any, **settings: Any) -> Path:
    """A package of the shared encoder and the given layers, written by the library."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Transformer

    if not (folder / "bert").exists():
        hf.encoder(folder / "bert")
    modules = [Transformer(str(folder / "bert")), *layers]
    SentenceTransformer(modules=modules, device="cpu", **settings).save(str(folder / name))
    return folder / name


@pytest.fixture(scope="module")
def dense(folder: Path, sentences: Path) -> Path:
    """Mean of the tokens, then a dense layer to eight numbers."""
    from sentence_transformers.sentence_transformer.modules import Dense, Pooling

    torch.manual_seed(1)
    return saved(folder, "dense", Pooling(32, "mean"), Dense(32, 8))


# ---- vectors -----------------------------------------------------------------------------------


def test_mean_of_the_tokens_scaled_to_length_one(sentences: Path) -> None:
    case = case_of(sentences)
    assert against(case) == {}
    output = embed(case)
    for text, vector in zip(TEXTS, output.vectors, strict=True):
        mean = hidden_states(sentences, text).mean(0)
        np.testing.assert_allclose(vector, (mean / mean.norm()).numpy(), atol=1e-5)
    assert (output.dimension, output.normalized) == (32, True)
    assert output.recipe == BACKEND.plan(case).recipe


POOLINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "cls": lambda h: h[0],
    "max": lambda h: h.max(0).values,
    "lasttoken": lambda h: h[-1],
    "mean_sqrt_len_tokens": lambda h: h.sum(0) / len(h) ** 0.5,
    "weightedmean": lambda h: (h * torch.arange(1, len(h) + 1)[:, None]).sum(0) / torch.arange(1, len(h) + 1).sum(),
}


@pytest.mark.parametrize("pooling", POOLINGS)
def test_every_pooling(pooling: str, folder: Path, sentences: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    package = saved(folder, f"p-{pooling}", Pooling(32, pooling))
    output = embed(case_of(package))
    for text, vector in zip(TEXTS, output.vectors, strict=True):
        np.testing.assert_allclose(vector, POOLINGS[pooling](hidden_states(package, text)).numpy(), atol=1e-5)
    assert output.normalized is False


def test_a_dense_layer_is_applied_and_has_no_artifact_of_its_own(dense: Path) -> None:
    case = case_of(dense)
    assert against(case) == {}
    assert {a.kind for a in inspect(dense).artifacts} == {
        ArtifactKind.TRANSFORMERS, ArtifactKind.SENTENCE_TRANSFORMERS
    }  # fmt: skip
    output, weights = embed(case), load_file(dense / "2_Dense" / "model.safetensors")
    mean = hidden_states(dense, TEXTS[0]).mean(0)
    expected = torch.tanh(mean @ weights["linear.weight"].T + weights["linear.bias"])
    np.testing.assert_allclose(output.vectors[0], expected.numpy(), atol=1e-5)
    assert output.dimension == 8


def test_options_scale_and_cut(dense: Path) -> None:
    plain, scaled = embed(case_of(dense)), embed(case_of(dense, normalize=True))
    expected = plain.vectors / np.linalg.norm(plain.vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(scaled.vectors, expected, atol=1e-6)
    assert scaled.recipe != plain.recipe and scaled.normalized
    cut = embed(case_of(dense, max_length="4"))
    np.testing.assert_allclose(cut.vectors[0], embed(case_of(dense), ["w1 w2"]).vectors[0], atol=1e-6)
    assert cut.recipe != plain.recipe


@pytest.mark.filterwarnings("ignore:Importing from:DeprecationWarning")
def test_the_places_of_earlier_versions(dense: Path, tmp_path: Path) -> None:
    def change(modules: Any) -> None:
        for module in modules:
            module["type"] = "sentence_transformers.models." + module["type"].rsplit(".", 1)[-1]

    package = edited(dense, tmp_path / "m", "modules.json", change)
    assert against(case_of(package)) == {}
    np.testing.assert_array_equal(embed(case_of(package)).vectors, embed(case_of(dense)).vectors)


def test_prompts_go_before_the_text(folder: Path, sentences: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Pooling

    package = saved(folder, "prompted", Pooling(32, "mean"), prompts={"query": "w40 ", "document": ""})
    case = case_of(package)
    np.testing.assert_allclose(
        embed(case, ["w1"], prompt_name="query").vectors, embed(case, ["w40 w1"]).vectors, atol=1e-6
    )
    with pytest.raises(InputError) as caught:
        embed(case, ["w1"], prompt_name="nothing")
    assert "query" in caught.value.hints[0]


def test_the_element_type_is_an_option(sentences: Path) -> None:
    session = BACKEND.load(BACKEND.plan(case_of(sentences, dtype="bfloat16")))
    assert session.dtype == "bfloat16" and next(session.model.parameters()).dtype is torch.bfloat16
    session.close()
    with pytest.raises(LoadError):
        session.run(Request(Task.EMBEDDINGS, {"texts": TEXTS}))


# ---- scores ------------------------------------------------------------------------------------


def test_scores_are_the_logits_of_transformers(cross_encoder: Path) -> None:
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    case = case_of(cross_encoder, Task.RERANK)
    assert against(case) == {}
    session = BACKEND.load(BACKEND.plan(case))
    assert BACKEND.probe(session).outcome is Outcome.PASS and not session.binding.unresolved
    output = session.run(Request(Task.RERANK, {"query": "w1 w2", "documents": TEXTS}))
    model = AutoModelForSequenceClassification.from_pretrained(cross_encoder).eval()
    tokenizer = AutoTokenizer.from_pretrained(cross_encoder)
    with torch.inference_mode():
        logits = [float(model(**tokenizer("w1 w2", text, return_tensors="pt")).logits[0, 0]) for text in TEXTS]
    order = sorted(range(3), key=lambda i: -logits[i])
    assert [r.index for r in output.ranking] == order
    np.testing.assert_allclose([r.score for r in output.ranking], [logits[i] for i in order], atol=1e-5)


# ---- refusals ----------------------------------------------------------------------------------


def edited(source: Path, target: Path, file: str, change: Callable[[Any], Any]) -> Path:
    shutil.copytree(source, target)
    value = json.loads((target / file).read_text())
    change(value)
    (target / file).write_text(json.dumps(value))
    return target


def test_a_module_that_this_version_does_not_have(sentences: Path, tmp_path: Path) -> None:
    assert not module_known("sentence_transformers.models.Quantum") and not module_known("no_such_library.X")

    def change(modules: Any) -> None:
        modules[-1]["type"] = "sentence_transformers.models.Quantum"

    found = against(case_of(edited(sentences, tmp_path / "m", "modules.json", change)))["architecture.unsupported"]
    assert found.observed.endswith("Quantum") and found.remedies[0].speculative


def test_a_sparse_encoder_is_not_served(sentences: Path, tmp_path: Path) -> None:
    package = edited(
        sentences, tmp_path / "m", "config_sentence_transformers.json", lambda c: c.update(model_type="SparseEncoder")
    )
    assert against(case_of(package))["task.not_offered"].observed == "SparseEncoder"


def test_no_pooling_is_not_invented(sentences: Path, tmp_path: Path) -> None:
    package = edited(sentences, tmp_path / "m", "modules.json", lambda m: m.__delitem__(slice(1, None)))
    assert "recipe.missing" in against(case_of(package))


def test_a_cross_encoder_without_its_head_is_not_loaded(cross_encoder: Path, tmp_path: Path) -> None:
    package = hf.variant(
        cross_encoder, tmp_path / "m", tensors=lambda t: [t.pop(n) for n in list(t) if n.startswith("classifier")]
    )
    case = case_of(package, Task.RERANK)
    assert BACKEND.dry_load(BACKEND.plan(case)).reasons[0].code == "tensor.missing"
    with pytest.raises(LoadError) as caught:
        BACKEND.load(BACKEND.plan(case))
    assert caught.value.code == "tensor.missing"


def test_a_dense_layer_without_its_weights_is_not_loaded(dense: Path, tmp_path: Path) -> None:
    shutil.copytree(dense, tmp_path / "m")
    save_file({"linear.bias": torch.zeros(8)}, tmp_path / "m/2_Dense/model.safetensors")
    with pytest.raises(LoadError) as caught:
        BACKEND.load(BACKEND.plan(case_of(tmp_path / "m")))
    assert "linear.weight" in caught.value.message


def test_an_activation_of_somebodys_needs_trust(dense: Path, tmp_path: Path) -> None:
    package = edited(
        dense, tmp_path / "m", "2_Dense/config.json", lambda c: c.update(activation_function="evil.module.Act")
    )
    finding = next(f for f in case_of(package).artifact.findings if f.code == "code.required")
    assert (finding.observed, finding.path) == ("evil.module.Act", "2_Dense/config.json")


@pytest.mark.parametrize(
    "options",
    [
        {"pooling": "cls"},
        {"normalize": False},
        {"max_length": "many"},
        {"max_length": 0},
        {"max_length": 65},
        {"dtype": "int8"},
    ],
)
def test_options_against_the_package(options: dict[str, Any], sentences: Path) -> None:
    assert "option.unsupported" in against(case_of(sentences, **options))


def test_texts_that_do_not_fit_become_an_input_error(sentences: Path, tmp_path: Path) -> None:
    package = edited(sentences, tmp_path / "m", "tokenizer_config.json", lambda c: c.update(model_max_length=1000))
    (package / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 1000, "do_lower_case": False}))
    with pytest.raises(InputError) as caught:
        embed(case_of(package), ["w1 " * 100])
    assert caught.value.code == "runtime.failed"


# ---- packages of other builds ------------------------------------------------------------------


def pooled(folder: Path, text: str) -> np.ndarray:
    mean: np.ndarray = hidden_states(folder / "bert", text).mean(0).numpy()
    return mean


def test_a_dense_layer_after_the_scaling_is_not_called_scaled(folder: Path, sentences: Path) -> None:
    from sentence_transformers.sentence_transformer.modules import Dense, Normalize, Pooling

    torch.manual_seed(2)
    dense = Dense(32, 8)
    package = saved(folder, "dense_last", Pooling(32, "mean"), Normalize(), dense)
    output = embed(case_of(package))
    mean = torch.from_numpy(pooled(folder, TEXTS[0]))
    with torch.inference_mode():
        expected = torch.tanh(dense.linear(mean / mean.norm()))
    np.testing.assert_allclose(output.vectors[0], expected.numpy(), atol=1e-5)
    assert not output.normalized
    scaled = embed(case_of(package, normalize=True))
    assert scaled.normalized and scaled.recipe != output.recipe
    np.testing.assert_allclose(np.linalg.norm(scaled.vectors, axis=1), 1, atol=1e-5)


def test_modules_are_bound_before_the_load(dense: Path, tmp_path: Path) -> None:
    evidence = BACKEND.dry_load(BACKEND.plan(case_of(dense)))
    assert evidence.outcome is Outcome.PASS and evidence.binding is not None and evidence.binding.loaded == 39
    shutil.copytree(dense, tmp_path / "m")
    (tmp_path / "m/2_Dense/model.safetensors").unlink()
    lost = BACKEND.dry_load(BACKEND.plan(case_of(tmp_path / "m")))
    assert [(r.code, r.where) for r in lost.reasons] == [("tensor.missing", "2_Dense")]
    narrow = edited(dense, tmp_path / "n", "2_Dense/config.json", lambda c: c.update(in_features=16))
    save_file(
        {"linear.weight": torch.zeros(8, 16), "linear.bias": torch.zeros(8)}, narrow / "2_Dense/model.safetensors"
    )
    torn = BACKEND.dry_load(BACKEND.plan(case_of(narrow))).reasons[0]
    assert (torn.code, torn.observed, torn.expected) == ("recipe.conflict", "32", "16")


def test_a_table_of_token_vectors_needs_no_transformer(folder: Path, sentences: Path, tmp_path: Path) -> None:
    """A static embedding is the mean of rows; the package has neither config.json nor a pooling module."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import StaticEmbedding
    from transformers import AutoTokenizer

    torch.manual_seed(3)
    tokenizer = AutoTokenizer.from_pretrained(folder / "bert")
    module = StaticEmbedding(tokenizer, embedding_dim=16)
    SentenceTransformer(modules=[module], device="cpu").save(str(tmp_path / "m"))
    case = case_of(tmp_path / "m")
    assert against(case) == {} and not case.artifact.findings
    output = embed(case)
    rows = load_file(tmp_path / "m/model.safetensors")["embedding.weight"]
    ids = tokenizer(TEXTS[0], add_special_tokens=False).input_ids
    np.testing.assert_allclose(output.vectors[0], rows[ids].mean(0).numpy(), atol=1e-6)
    assert output.dimension == 16 and output.recipe.startswith("static-")
    save_file({"embedding.weight": rows[:80].clone()}, tmp_path / "m/model.safetensors")
    assert "tokenizer.id_out_of_range" in {f.code for f in case_of(tmp_path / "m").artifact.findings}


def test_a_language_model_ranks_by_two_tokens(tmp_path: Path) -> None:
    from sentence_transformers import CrossEncoder
    from sentence_transformers.base.modules import Transformer
    from sentence_transformers.cross_encoder.modules import LogitScore
    from transformers import AutoModelForCausalLM, AutoTokenizer

    hf.llama(tmp_path / "llama", template=None)
    modules = [Transformer(str(tmp_path / "llama"), transformer_task="text-generation"), LogitScore(10, 11)]
    CrossEncoder(modules=modules, device="cpu").save(str(tmp_path / "m"))
    case = case_of(tmp_path / "m", Task.RERANK)
    assert against(case) == {}
    session = BACKEND.load(BACKEND.plan(case))
    assert BACKEND.probe(session).outcome is Outcome.PASS
    output = session.run(Request(Task.RERANK, {"query": "w1 w2", "documents": TEXTS}))
    session.close()
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "llama").eval(),
        AutoTokenizer.from_pretrained(tmp_path / "llama"),
    )
    with torch.inference_mode():
        last = [
            model(**tokenizer("w1 w2", text, return_tensors="pt", return_token_type_ids=False)).logits[0, -1]
            for text in TEXTS
        ]
    expected = [float(logits[10] - logits[11]) for logits in last]
    assert {r.index: pytest.approx(r.score, abs=1e-4) for r in output.ranking} == dict(enumerate(expected))


@pytest.mark.parametrize("labels", [2, 3])
def test_several_labels(labels: int, tmp_path: Path) -> None:
    """Two labels give log-odds; of three none is known to be relevance."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    hf.encoder(tmp_path / "m", "BertForSequenceClassification", num_labels=labels)
    config = json.loads((tmp_path / "m/config.json").read_text())
    (tmp_path / "m/config.json").write_text(json.dumps(config | {"sentence_transformers": {"version": "5.0.0"}}))
    case = case_of(tmp_path / "m", Task.RERANK)
    if labels == 3:
        assert against(case)["task.conflict"].observed == "3 labels"
        with pytest.raises(LoadError):
            BACKEND.load(BACKEND.plan(case))
        return
    session = BACKEND.load(BACKEND.plan(case))
    inputs = {"query": "w1 w2", "documents": TEXTS}
    output = session.run(Request(Task.RERANK, inputs))
    scaled = session.run(Request(Task.RERANK, inputs, options={"normalize": True}))
    session.close()
    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(tmp_path / "m").eval(),
        AutoTokenizer.from_pretrained(tmp_path / "m"),
    )
    with torch.inference_mode():
        logits = [model(**tokenizer("w1 w2", text, return_tensors="pt")).logits[0] for text in TEXTS]
    expected = {i: float(pair[1] - pair[0]) for i, pair in enumerate(logits)}
    assert {r.index: pytest.approx(r.score, abs=1e-5) for r in output.ranking} == expected
    assert all(0 < r.score < 1 for r in scaled.ranking)
    assert [r.index for r in scaled.ranking] == [r.index for r in output.ranking]


def test_a_module_of_the_package_runs_once_it_is_trusted(sentences: Path, tmp_path: Path) -> None:
    code = (
        "import torch\n"
        "class Halve(torch.nn.Module):\n"
        "    def forward(self, features, **_):\n"
        "        features['sentence_embedding'] = features['sentence_embedding'] / 2\n"
        "        return features\n"
        "    def save(self, *_, **__): pass\n"
        "    @classmethod\n"
        "    def load(cls, path): return cls()\n"
    )
    package = edited(sentences, tmp_path / "m", "modules.json", lambda m: m[-1].update(type="my_module.Halve"))
    (package / "my_module.py").write_text(code)
    with pytest.raises(LoadError) as caught:
        BACKEND.load(BACKEND.plan(case_of(package)))
    assert caught.value.code == "code.required"
    output = embed(case_of(package, trust_remote_code=True))
    np.testing.assert_allclose(output.vectors[0], pooled(sentences.parent, TEXTS[0]) / 2, atol=1e-5)
    assert not output.normalized and output.recipe.startswith("modules-")


def test_unknown_request_options_are_refused(sentences: Path) -> None:
    with pytest.raises(InputError, match="nonsense"):
        embed(case_of(sentences), nonsense=1)
