"""Adapters: their kind, rank and base, told from headers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import save_file
from tests.shapes import bundles, hf

from turnout.package.facts import Artifact, ArtifactKind, CodeNeed
from turnout.package.inspect import inspect

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::DeprecationWarning")

Q = "model.layers.0.self_attn.q_proj"


def adapter(directory: Path, tensors: dict[str, tuple[int, ...]], **config: Any) -> Path:
    """An adapter with given tensors: names after ``base_model.model.`` to shapes."""
    directory.mkdir(parents=True, exist_ok=True)
    settings = {"peft_type": "LORA", "r": 4, "task_type": "CAUSAL_LM", "base_model_name_or_path": None} | config
    (directory / "adapter_config.json").write_text(json.dumps(settings))
    stored = {f"base_model.model.{name}.weight": numpy.zeros(shape, "float32") for name, shape in tensors.items()}
    save_file(stored, directory / "adapter_model.safetensors")
    return directory


def pair(module: str, width_in: int, width_out: int, rank: int = 4) -> dict[str, tuple[int, ...]]:
    return {f"{module}.lora_A": (rank, width_in), f"{module}.lora_B": (width_out, rank)}


def artifact_of(path: Path) -> Artifact:
    found = [a for a in inspect(path).artifacts if a.kind is ArtifactKind.PEFT_ADAPTER]
    assert len(found) == 1
    return found[0]


def said(path: Path) -> list[tuple[str, str, str]]:
    return [(f.code, f.observed, f.expected) for f in artifact_of(path).findings]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder of width 32 with two heads of keys of width 8."""
    return hf.llama(tmp_path_factory.mktemp("base"))


def test_an_adapter_that_peft_wrote(tmp_path: Path) -> None:
    artifact = artifact_of(bundles.lora(tmp_path))
    assert artifact.findings == [] and artifact.facts["dora"].value is False
    assert artifact.task_ids() == ["text-generation", "chat"]
    assert [(r.role, r.target, r.resolved) for r in artifact.depends_on] == [
        ("base_model", str(tmp_path / "base"), True)
    ]
    assert artifact.tokenizer is not None and artifact.architecture is not None


def test_dora_is_told_by_its_tensors(tmp_path: Path) -> None:
    path = bundles.lora(tmp_path, use_dora=True)
    config = json.loads((path / "adapter_config.json").read_text()) | {"use_dora": False}
    (path / "adapter_config.json").write_text(json.dumps(config))
    assert artifact_of(path).facts["dora"].value is True


def test_a_base_that_is_absent_is_named(tmp_path: Path) -> None:
    assert said(adapter(tmp_path / "a", pair(Q, 32, 32), base_model_name_or_path="nobody/none")) == [
        ("adapter.base_missing", "nobody/none", "a directory with the base model")
    ]
    assert said(adapter(tmp_path / "b", pair(Q, 32, 32)))[0][:2] == ("adapter.base_missing", "absent")
    for place in ("/", "/proc"):
        assert [c for c, *_ in said(adapter(tmp_path / "c", pair(Q, 32, 32), base_model_name_or_path=place))] == [
            "adapter.base_missing"
        ]


def test_a_base_inside_the_package(base: Path, tmp_path: Path) -> None:
    hf.llama(tmp_path / "base")
    path = adapter(tmp_path / "adapter", pair(Q, 32, 32), base_model_name_or_path="../base")
    assert said(path) == []
    assert artifact_of(tmp_path).depends_on[0].resolved


MISMATCHES: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any], str, str]] = {
    "rank": (pair(Q, 32, 32), {"r": 8}, "rank 4", "rank 8"),
    "rank-of-one-module": (pair(Q, 32, 32), {"rank_pattern": {"q_proj": 2}}, "rank 4", "rank 2"),
    "width-in": (pair(Q, 48, 32), {}, "width 48", "width 32"),
    "width-out": (pair(Q, 32, 16), {}, "width 16", "width 32"),
    "module": (pair("model.layers.0.self_attn.qkv", 32, 32), {}, "absent", "model.layers.0.self_attn.qkv"),
    "layer": (pair(Q, 32, 32) | pair(Q.replace("0", "7"), 32, 32), {}, "absent", Q.replace("0", "7")),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_what_does_not_fit_is_named_with_both_sides(name: str, base: Path, tmp_path: Path) -> None:
    tensors, config, observed, expected = MISMATCHES[name]
    path = adapter(tmp_path, tensors, base_model_name_or_path=str(base), **config)
    assert said(path) == [("adapter.base_mismatch", observed, expected)]


FITS: dict[str, tuple[dict[str, tuple[int, ...]], dict[str, Any]]] = {
    "keys-are-narrower": (pair("model.layers.1.self_attn.k_proj", 32, 16), {}),
    "rank-of-one-module": (pair(Q, 32, 32, 2), {"rank_pattern": {"self_attn.q_proj": 2}}),
    "rank-by-expression": (pair(Q, 32, 32, 2), {"rank_pattern": {"(a+)+$": 2}}),
    "saved-head": (pair(Q, 32, 32) | {"lm_head": (100, 32)}, {"modules_to_save": ["lm_head"]}),
    "named-adapter": (
        {k.replace("lora_A", "lora_A.mine").replace("lora_B", "lora_B.mine"): v for k, v in pair(Q, 32, 32).items()},
        {},
    ),
    "no-head-prefix": (pair(Q.removeprefix("model."), 32, 32), {}),
    "more-prefix": (pair(f"wrapper.{Q}", 32, 32), {}),
    "other-tuner": ({f"{Q}.hada_w1_a": (32, 4)}, {"peft_type": "LOHA", "r": 9}),
}


@pytest.mark.parametrize("name", FITS)
def test_what_fits_is_not_refused(name: str, base: Path, tmp_path: Path) -> None:
    tensors, config = FITS[name]
    assert said(adapter(tmp_path, tensors, base_model_name_or_path=str(base), **config)) == []


def test_layers_stored_the_other_way_round(tmp_path: Path) -> None:
    """GPT-2 stores [in, out]; peft writes lora_A for in and lora_B for out all the same."""
    import peft
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=8)
    )
    model.save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    path = tmp_path / "adapter" / "adapter_config.json"
    for transposed in (True, False):
        settings = {"base_model_name_or_path": str(tmp_path / "base"), "fan_in_fan_out": transposed}
        path.write_text(json.dumps(json.loads(path.read_text()) | settings))
        assert said(tmp_path / "adapter") == []


def test_packed_bases_do_not_show_their_width(tmp_path: Path) -> None:
    base = hf.llama(tmp_path / "base")
    import torch

    hf.variant(
        base, tmp_path / "packed", None, lambda t: t.update({f"{Q}.weight": torch.zeros(512, 1, dtype=torch.uint8)})
    )
    path = adapter(tmp_path / "adapter", pair(Q, 32, 32), base_model_name_or_path=str(tmp_path / "packed"))
    assert said(path) == []


def test_kinds_are_those_of_the_library(base: Path, tmp_path: Path) -> None:
    from peft import PeftType

    from turnout.package.formats.peft import KNOWN_TYPES

    assert {kind.value for kind in PeftType} <= KNOWN_TYPES
    path = adapter(tmp_path, {}, peft_type="WONDER", base_model_name_or_path=str(base))
    assert said(path) == [("adapter.type_unsupported", "WONDER", "a type that peft knows")]


@pytest.mark.parametrize(
    "text", ["", "[]", "{", "null", '{"peft_type": ["LORA"]}', '{"peft_type": "LORA", "r": "x", "rank_pattern": [1]}']
)
def test_odd_configurations(text: str, tmp_path: Path) -> None:
    adapter(tmp_path, pair(Q, 32, 32))
    (tmp_path / "adapter_config.json").write_text(text)
    assert not any("gave up" in f.message for f in inspect(tmp_path).all_findings())
    assert artifact_of(tmp_path).findings


def test_weights_absent_cut_or_hostile(base: Path, tmp_path: Path) -> None:
    import torch

    path = adapter(tmp_path, pair(Q, 32, 32), base_model_name_or_path=str(base))
    weights = path / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-4])
    assert [p.code for p in artifact_of(path).tensors.problems] == ["artifact.truncated"]
    weights.unlink()
    assert [c for c, *_ in said(path)] == ["artifact.missing"]
    torch.save({"x": hf.Evil(tmp_path / "ran")}, path / "adapter_model.bin")
    artifact = artifact_of(path)
    assert artifact.code is CodeNeed.FORBIDDEN and [f.code for f in artifact.findings] == ["code.pickle_unsafe"]
