"""sentence-transformers directories: modules, recipes in both spellings, and what contradicts them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.shapes import bundles, hf

from turnout.package.facts import Artifact, ArtifactKind, CodeNeed, Severity, Status
from turnout.package.inspect import inspect

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bundles.sentences(tmp_path_factory.mktemp("sentences"))


def artifact_of(path: Path) -> Artifact:
    found = [a for a in inspect(path).artifacts if a.kind is ArtifactKind.SENTENCE_TRANSFORMERS]
    assert len(found) == 1
    return found[0]


def codes(artifact: Artifact) -> list[str]:
    return [f.code for f in artifact.findings]


def edited(whole: Path, target: Path, file: str, change: Callable[[Any], Any]) -> Path:
    """A copy whose JSON ``file`` is what ``change`` gives of it."""
    shutil.copytree(whole, target, dirs_exist_ok=True)
    (target / file).write_text(json.dumps(change(json.loads((target / file).read_text()))))
    return target


def settings_of(whole: Path, target: Path, pooling: dict[str, Any]) -> dict[str, Any]:
    artifact = artifact_of(edited(whole, target, "1_Pooling/config.json", lambda _: pooling))
    assert artifact.recipe is not None, codes(artifact)
    return artifact.recipe.settings


def test_a_complete_package(whole: Path) -> None:
    artifact = artifact_of(whole)
    assert artifact.id == "sentence_transformers:." and codes(artifact) == []
    assert artifact.facts["model_type"].value == "SentenceTransformer"
    assert [c.role for c in artifact.components] == ["Transformer", "Pooling", "Normalize"]
    assert artifact.task_ids() == ["embeddings"]
    recipe = artifact.recipe
    assert recipe is not None and recipe.kind == "pooling"
    assert (recipe.settings["pooling"], recipe.settings["dimension"], recipe.settings["normalize"]) == (
        "mean",
        32,
        True,
    )
    assert [(r.role, r.target) for r in artifact.depends_on] == [("transformer", "transformers:.")]
    assert artifact.tensors.tensors and artifact.tokenizer is not None and artifact.architecture is not None


def test_the_transformer_inside_has_the_same_recipe(whole: Path) -> None:
    inner = next(a for a in inspect(whole).artifacts if a.kind is ArtifactKind.TRANSFORMERS)
    outer = artifact_of(whole)
    assert inner.recipe is not None and outer.recipe is not None and inner.recipe.id == outer.recipe.id


OLD = {"cls_token": "cls", "max_tokens": "max", "mean_tokens": "mean", "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
       "weightedmean_tokens": "weightedmean", "lasttoken": "lasttoken"}  # fmt: skip


@pytest.mark.parametrize("key", OLD)
def test_old_and_new_spelling_say_the_same(key: str, whole: Path, tmp_path: Path) -> None:
    flags = {f"pooling_mode_{name}": name == key for name in OLD}
    old = settings_of(whole, tmp_path / "old", {"word_embedding_dimension": 32, **flags})
    new = settings_of(whole, tmp_path / "new", {"embedding_dimension": 32, "pooling_mode": OLD[key]})
    assert old == new and old["pooling"] == OLD[key]


def test_several_poolings_and_prompts(whole: Path, tmp_path: Path) -> None:
    pooling = {"embedding_dimension": 32, "pooling_mode": ["mean", "cls"], "include_prompt": False}
    settings = settings_of(whole, tmp_path / "a", pooling)
    assert settings["pooling"] == "mean+cls" and settings["include_prompt"] is False
    prompts = {"prompts": {"query": "q: ", "document": ""}, "default_prompt_name": "query", "similarity_fn_name": "dot"}
    artifact = artifact_of(
        edited(tmp_path / "a", tmp_path / "b", "config_sentence_transformers.json", lambda c: c | prompts)
    )
    assert artifact.recipe is not None
    assert artifact.recipe.settings["prompts"]["query"] == "q: " and artifact.recipe.settings["similarity"] == "dot"


def test_a_recipe_for_another_width_is_a_conflict(tmp_path: Path) -> None:
    package = inspect(bundles.pooling_width(tmp_path))
    for artifact in package.artifacts:
        found = [(f.code, f.observed, f.expected) for f in artifact.findings]
        assert found == [("recipe.conflict", "pooling dimension 64", "encoder width 32")]


def test_a_module_from_elsewhere_needs_code(tmp_path: Path) -> None:
    artifact = artifact_of(bundles.foreign_module(tmp_path))
    assert artifact.code is CodeNeed.REQUIRED and codes(artifact) == ["code.required"]
    assert next(c for c in artifact.components if c.role == "Special").code is CodeNeed.REQUIRED
    assert artifact.recipe is None  # what it does to the vectors nobody here can say


@pytest.mark.parametrize("path", ["../1_Pooling", "/etc", "a\\b"])
def test_a_module_outside_the_package(path: str, whole: Path, tmp_path: Path) -> None:
    def change(modules: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [m | {"path": path} if m["type"].endswith("Pooling") else m for m in modules]

    assert "artifact.path_escape" in codes(artifact_of(edited(whole, tmp_path, "modules.json", change)))


def test_a_pooling_folder_that_is_absent(whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "1_Pooling")
    artifact = artifact_of(tmp_path)
    assert codes(artifact) == ["component.missing"]
    assert next(c for c in artifact.components if c.role == "Pooling").status is Status.MISSING


def test_no_pooling_module(whole: Path, tmp_path: Path) -> None:
    path = edited(whole, tmp_path, "modules.json", lambda modules: modules[:1])
    assert "recipe.missing" in codes(artifact_of(path))


def test_weights_absent_or_refused(whole: Path, tmp_path: Path) -> None:
    import torch

    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "model.safetensors").unlink()
    assert any(f.severity is Severity.ERROR for f in artifact_of(tmp_path).findings)
    torch.save({"x": hf.Evil(tmp_path / "ran")}, tmp_path / "pytorch_model.bin")
    artifact = artifact_of(tmp_path)
    assert artifact.code is CodeNeed.FORBIDDEN and "code.pickle_unsafe" in codes(artifact)


def test_a_cross_encoder(tmp_path: Path) -> None:
    artifact = artifact_of(bundles.cross_encoder(tmp_path))
    assert artifact.facts["model_type"].value == "CrossEncoder" and artifact.task_ids() == ["rerank"]
    assert codes(artifact) == [] and artifact.recipe is None


def test_a_sparse_encoder_is_named(whole: Path, tmp_path: Path) -> None:
    main = "config_sentence_transformers.json"
    artifact = artifact_of(edited(whole, tmp_path, main, lambda c: c | {"model_type": "SparseEncoder"}))
    assert artifact.facts["model_type"].value == "SparseEncoder"


def test_an_encoder_without_manifest_is_no_such_package(tmp_path: Path) -> None:
    kinds = {a.kind for a in inspect(bundles.without_modules(tmp_path)).artifacts}
    assert kinds == {ArtifactKind.TRANSFORMERS}


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "null", '[{"type": 3}]', '[{"type": {"a": 1}, "path": []}]', "[" * 5000]
)
def test_odd_manifests(text: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "modules.json").write_text(text)
    package = inspect(tmp_path)
    assert not any("gave up" in f.message for f in package.all_findings())
    assert artifact_of(tmp_path).findings


@pytest.mark.parametrize(
    "text", ["", "[]", '{"pooling_mode": {"a": 1}}', '{"pooling_mode": [1]}', '{"embedding_dimension": "x"}']
)
def test_odd_poolings(text: str, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    (tmp_path / "1_Pooling" / "config.json").write_text(text)
    assert not any("gave up" in f.message for f in inspect(tmp_path).all_findings())
