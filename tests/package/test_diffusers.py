"""Diffusers bundles: components, variants, code, indexes; single files told by their tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from safetensors.numpy import save_file
from tests.shapes import bundles, hf

from turnout.package.facts import Artifact, ArtifactKind, CodeNeed, Status
from turnout.package.inspect import inspect

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")


def artifact_of(path: Path) -> Artifact:
    artifacts = inspect(path).artifacts
    assert len(artifacts) == 1, [a.id for a in artifacts]
    return artifacts[0]


def codes(artifact: Artifact) -> list[str]:
    return [f.code for f in [*artifact.findings, *artifact.tensors.problems]]


def indexed(directory: Path, **changes: Any) -> Path:
    """A bundle whose model_index.json is changed."""
    bundles.diffusion(directory)
    index = json.loads((directory / "model_index.json").read_text()) | changes
    (directory / "model_index.json").write_text(json.dumps(index))
    return directory


def test_a_complete_bundle(tmp_path: Path) -> None:
    artifact = artifact_of(bundles.diffusion(tmp_path))
    assert artifact.id == "diffusers:." and codes(artifact) == [] and artifact.code is CodeNeed.NONE
    parts = {c.role: (c.library, c.class_name, c.status) for c in artifact.components}
    assert parts == {
        "unet": ("diffusers", "UNet2DModel", Status.PRESENT),
        "scheduler": ("diffusers", "DDPMScheduler", Status.PRESENT),
    }
    assert artifact.task_ids() == ["text-to-image"]
    assert "unet/conv_in.weight" in artifact.tensors.tensors
    assert artifact.recipe is not None and artifact.recipe.kind == "diffusion"
    assert artifact.recipe.settings["class_name"] == "DDPMScheduler" and artifact.facts["variants"].value == []
    assert {"model_index.json", "unet/config.json", "scheduler/scheduler_config.json"} <= set(artifact.files)


def test_components_of_transformers_are_no_artifacts_of_their_own(tmp_path: Path) -> None:
    indexed(tmp_path, text_encoder=["transformers", "BertModel"])
    hf.encoder(tmp_path / "text_encoder")
    artifact = artifact_of(tmp_path)
    assert "text_encoder/embeddings.word_embeddings.weight" in artifact.tensors.tensors


def test_a_component_that_is_a_python_file(tmp_path: Path) -> None:
    artifact = artifact_of(bundles.component_is_code(tmp_path))
    assert artifact.code is CodeNeed.REQUIRED and codes(artifact) == ["code.required"]
    assert next(c for c in artifact.components if c.role == "unet").code is CodeNeed.REQUIRED


def test_a_pipeline_that_is_a_python_file(tmp_path: Path) -> None:
    artifact = artifact_of(indexed(tmp_path, _class_name=["pipeline", "MyPipeline"]))
    assert artifact.code is CodeNeed.REQUIRED and codes(artifact) == ["code.required"]
    assert artifact.facts["pipeline"].value == "MyPipeline"


def test_only_a_variant_is_there(tmp_path: Path) -> None:
    artifact = artifact_of(bundles.only_fp16(tmp_path))
    assert codes(artifact) == [] and artifact.facts["variants"].value == ["fp16"]
    assert artifact.tensors.dtypes() == {"F16": len(artifact.tensors.tensors)}


def test_a_component_may_be_null_or_absent(tmp_path: Path) -> None:
    artifact = artifact_of(indexed(tmp_path, safety_checker=[None, None], vae=["diffusers", "AutoencoderKL"]))
    assert codes(artifact) == ["component.missing"]
    assert {c.role: c.status for c in artifact.components if c.role in ("vae", "safety_checker")} == {
        "vae": Status.MISSING,
        "safety_checker": Status.MISSING,
    }


def test_weights_absent_cut_or_hostile(tmp_path: Path) -> None:
    bundles.diffusion(tmp_path)
    weights = tmp_path / "unet" / "diffusion_pytorch_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    assert codes(artifact_of(tmp_path)) == ["artifact.truncated"]
    weights.unlink()
    assert codes(artifact_of(tmp_path)) == ["artifact.missing"]
    torch.save({"x": hf.Evil(tmp_path / "ran")}, weights.with_suffix(".bin"))
    artifact = artifact_of(tmp_path)
    assert codes(artifact) == ["code.pickle_unsafe"] and artifact.code is CodeNeed.FORBIDDEN


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("../../outside.safetensors", "artifact.path_escape"),
        ("/etc/hostname", "artifact.path_escape"),
        ("gone.safetensors", "artifact.shard_missing"),
    ],
)
def test_an_index_that_leads_away(name: str, code: str, tmp_path: Path) -> None:
    bundles.diffusion(tmp_path)
    index = {"weight_map": {"conv_in.weight": name}}
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors.index.json").write_text(json.dumps(index))
    assert codes(artifact_of(tmp_path)) == [code]


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"../outside": ["diffusers", "X"]}, "artifact.path_escape"),
        ({"unet": [1, {}]}, "config.invalid"),
        ({"_class_name": 5}, None),
        ({"_class_name": []}, None),
        ({"unet": "diffusers"}, None),
        ({"_class_name": ["a"]}, "code.required"),
    ],
)
def test_odd_manifests(changes: dict[str, Any], code: str | None, tmp_path: Path) -> None:
    package = inspect(indexed(tmp_path, **changes))
    assert not any("gave up" in f.message for f in package.all_findings())
    assert code is None or code in codes(package.artifacts[0])


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}'])
def test_manifests_that_are_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "model_index.json").write_text(text)
    assert codes(artifact_of(tmp_path)) == ["config.invalid"]


def test_an_archive_is_recognised(tmp_path: Path) -> None:
    artifact = artifact_of(bundles.dduf(tmp_path))
    assert artifact.kind is ArtifactKind.DDUF and artifact.id == "dduf:model.dduf"


SINGLE = {
    "stable-diffusion": ["model.diffusion_model.input_blocks.0.0.weight"],
    "stable-diffusion-xl": ["model.diffusion_model.input_blocks.0.0.weight", "conditioner.embedders.1.model.x"],
    "stable-diffusion-3": ["model.diffusion_model.joint_blocks.0.x"],
    "flux": ["double_blocks.0.img_attn.qkv.weight"],
}


@pytest.mark.parametrize("family", SINGLE)
def test_single_files_are_told_by_their_tensors(family: str, tmp_path: Path) -> None:
    save_file({name: numpy.zeros(2, "float32") for name in SINGLE[family]}, tmp_path / "m.safetensors")
    artifact = artifact_of(tmp_path)
    assert artifact.kind is ArtifactKind.DIFFUSERS_SINGLE_FILE and artifact.facts["family"].value == family
    (tmp_path / "m.safetensors").unlink()
    torch.save({"state_dict": {name: torch.zeros(2) for name in SINGLE[family]}}, tmp_path / "m.ckpt")
    artifact = artifact_of(tmp_path)
    assert artifact.kind is ArtifactKind.DIFFUSERS_SINGLE_FILE and artifact.facts["family"].value == family


def test_other_loose_files_stay_what_they_are(tmp_path: Path) -> None:
    save_file({"w": numpy.zeros(2, "float32")}, tmp_path / "m.safetensors")
    torch.save({"w": torch.zeros(2)}, tmp_path / "n.ckpt")
    kinds = {a.entry: a.kind for a in inspect(tmp_path).artifacts}
    assert kinds == {"m.safetensors": ArtifactKind.SAFETENSORS, "n.ckpt": ArtifactKind.TORCH_PICKLE}
