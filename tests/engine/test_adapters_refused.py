"""Adapters that are refused: limits of memory, other kinds, other bases, broken files; nothing is left then."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from tests.engine import adapters_made as made
from tests.engine.test_adapters import GATED, PROMPT, all_logits, apart, opened
from tests.shapes import families, ggufs

from turnout.backends.torch_native_adapters import AdapterLimits, AdapterSet
from turnout.backends.torch_native_rows import RowExecutor, RowOptions
from turnout.engine.executor import Row, Step
from turnout.errors import InputError, LoadError, MemoryAdmissionError

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

# ---- memory ----------------------------------------------------------------------------------


def test_limits_are_kept_with_the_numbers() -> None:
    folder = str(made.of("llama", "plain")[1])
    for executor in (
        opened(families.model("llama"), max_adapters=2),
        RowExecutor(families.model("llama"), RowOptions(slots=2, max_adapters=2)),
    ):
        executor.load_adapter("a", folder)
        executor.load_adapter("b", folder)
        with pytest.raises(MemoryAdmissionError, match="`c`: 2 are loaded, and 2 is the limit"):
            executor.load_adapter("c", folder)
        executor.unload_adapter("a")
        executor.load_adapter("c", folder)
        executor.close()
    adapters = AdapterSet(families.model("llama"), AdapterLimits(bytes=20_000))
    adapters.load("a", folder)
    assert 0 < adapters.bytes < 20_000
    size = adapters.bytes
    with pytest.raises(MemoryAdmissionError, match=f"takes {size:,} bytes; {size:,} of 20,000 are taken"):
        adapters.load("b", folder)
    adapters.unload("a")
    assert adapters.bytes == 0 and len(adapters) == 0
    adapters.unload("a")


# ---- refusals --------------------------------------------------------------------------------


def drop(name: str) -> Callable[[dict[str, Any]], None]:
    def change(tensors: dict[str, Any]) -> None:
        for key in [key for key in tensors if name in key]:
            del tensors[key]

    return change


def put(name: str, *shape: int) -> Callable[[dict[str, Any]], None]:
    return lambda tensors: tensors.update({f"base_model.model.{name}": torch.ones(shape)})


Q = "model.layers.0.self_attn.q_proj"
WRONG: dict[str, tuple[dict[str, Any], Any, str, str]] = {
    "kind": ({"peft_type": "IA3"}, None, "adapter.type_unsupported", "`IA3`"),
    "loha": ({"peft_type": "LOHA"}, None, "adapter.type_unsupported", "`LOHA`"),
    "prefix": ({"peft_type": "PREFIX_TUNING"}, None, "adapter.type_unsupported", "`PREFIX_TUNING`"),
    "activated": ({"alora_invocation_tokens": [1, 2]}, None, "adapter.type_unsupported", "alora_invocation_tokens"),
    "tokens": ({"trainable_token_indices": [3]}, None, "adapter.type_unsupported", "trainable_token_indices"),
    "experts": ({"target_parameters": ["mlp.gate"]}, None, "adapter.type_unsupported", "target_parameters"),
    "layers": ({"layer_replication": [[0, 2]]}, None, "adapter.type_unsupported", "layer_replication"),
    "qalora": ({"use_qalora": True}, None, "adapter.type_unsupported", "use_qalora"),
    "newer": ({"use_something": {"a": 1}}, None, "adapter.type_unsupported", "use_something"),
    "start": ({"init_lora_weights": "pissa_niter_4"}, None, "adapter.type_unsupported", "pissa_niter_4"),
    "rank": ({"r": 5}, None, "adapter.base_mismatch", r"is \[4, 48\]; rank 5 .* ask for \[5, 48\]"),
    "pattern": ({"rank_pattern": {"q_proj": 6}}, None, "adapter.base_mismatch", "rank 6"),
    "no-rank": ({"r": "4"}, None, "config.invalid", "`r` of"),
    "bad-pattern": ({"rank_pattern": {"(": 4}}, None, "config.invalid", r"pattern `\(\?"),
    "slow-pattern": (
        {"target_modules": r"(\w|\w\w|\w\w\w|\w\.|\.\w|\w)+[^\w.]"},
        None,
        "config.invalid",
        "take too long",
    ),
    "untargeted": ({"target_modules": ["q_proj"]}, None, "adapter.base_mismatch", "does not target"),
    "unfilled": ({"target_modules": [*GATED, "k_proj"]}, None, "adapter.base_mismatch", "no tensors for.*k_proj"),
    "half": ({}, drop("layers.0.self_attn.q_proj.lora_B"), "adapter.base_mismatch", f"{Q}`: missing `b`"),
    "no-layer": ({}, drop("layers.1.self_attn.q_proj"), "adapter.base_mismatch", "no tensors for.*layers.1"),
    "surplus": ({}, put("model.layers.7.self_attn.q_proj.lora_A.weight", 4, 32), "adapter.base_mismatch", "layers.7"),
    "magnitude": ({}, put(f"{Q}.lora_magnitude_vector", 32), "adapter.base_mismatch", "surplus"),
    "no-magnitude": ({"use_dora": True}, None, "adapter.base_mismatch", "missing `magnitude`"),
    "unknown": ({}, put("model.layers.0.extra.weight", 2), "adapter.base_mismatch", "model.layers.0.extra"),
    "quiet-norm": ({}, put("model.norm.weight", 32), "adapter.base_mismatch", "model.norm.weight"),
    "not-finite": ({}, lambda t: t[next(iter(t))].fill_(float("nan")), "artifact.corrupt", "not finite"),
    "vocabulary": (
        {"modules_to_save": ["embed_tokens"]},
        put("model.embed_tokens.weight", 260, 32),
        "adapter.base_mismatch",
        "260 tokens in .*, of 256 in the base",
    ),
    "unsaved": ({"modules_to_save": ["lm_head"]}, None, "adapter.base_mismatch", "`lm_head`; its `weight` is missing"),
    "whole-block": (
        {"modules_to_save": ["self_attn"]},
        drop("self_attn"),
        "adapter.type_unsupported",
        "made of other modules",
    ),
    "no-bias": ({"bias": "half"}, None, "config.invalid", "`bias` of"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_fit_is_refused_by_name(case: str) -> None:
    """And leaves nothing: the model says what it said, and a good adapter loads under the same name."""
    settings, tensors, code, words = WRONG[case]
    good = made.of("llama", "plain")[1]
    model = families.model("llama")
    adapters = AdapterSet(model)
    with pytest.raises(LoadError, match=words) as caught:
        adapters.load("mine", str(made.changed(good, tensors, **settings)))
    assert caught.value.code == code
    assert len(adapters) == 0 and not any("forward" in vars(module) for module in model.modules())
    adapters.load("mine", str(good))


def test_another_base_is_refused(tmp_path: Path) -> None:
    """By its shapes, by its modules, and by what its own directory says."""
    for family, words in (("qwen3-moe", "no module"), ("gpt2", "no module"), ("smaller", "ask for")):
        if family == "smaller":
            model = families.Family("smaller", "llama", {"hidden_size": 16}).model()
        else:
            model = families.model(family)
        with pytest.raises(LoadError, match=words) as caught:
            AdapterSet(model).load("mine", str(made.of("llama", "plain")[1]))
        assert caught.value.code == "adapter.base_mismatch"
    (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 3, "hidden_size": 32}))
    folder = made.changed(made.of("llama", "plain")[1], base_model_name_or_path=str(tmp_path))
    with pytest.raises(LoadError, match="num_hidden_layers 3, this model 2"):
        AdapterSet(families.model("llama")).load("mine", str(folder))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": families.VOCABULARY}))
    with pytest.raises(LoadError, match="is a `llama`, this model a `gemma3_text`"):  # of the very same shapes
        AdapterSet(families.model("gemma3")).load("mine", str(folder))


def test_a_carried_table_must_be_the_bases_own() -> None:
    """PEFT saves the whole token table when it is targeted; another base's would change the model."""
    wrapped = made.adapted(families.model("llama"), target_modules=["embed_tokens"])
    folder = made.saved(wrapped)
    carried = [name for name in made.load_file(folder / "adapter_model.safetensors") if "base_layer" in name]
    assert carried, "PEFT no longer carries the table"
    AdapterSet(families.model("llama")).load("mine", str(folder))

    def change(tensors: dict[str, Any]) -> None:
        tensors[carried[0]] += torch.randn_like(tensors[carried[0]])

    with pytest.raises(LoadError, match="differs from this base's `model.embed_tokens.weight`") as caught:
        AdapterSet(families.model("llama")).load("mine", str(made.changed(folder, change)))
    assert caught.value.code == "adapter.base_mismatch"


def test_modules_that_are_not_called_are_refused() -> None:
    """Mamba reads the weight of its time step; T5's common table is called under other names."""
    wrapped = made.adapted(families.model("mamba"), target_modules=["in_proj", "dt_proj"])
    for model, folder in (
        ("mamba", made.saved(wrapped)),
        ("t5", made.saved(made.adapted(families.model("t5"), target_modules=["shared", "q"]))),
    ):
        executor = opened(families.model(model))
        with pytest.raises(LoadError, match=r"never calls .*(dt_proj|shared)") as caught:
            executor.load_adapter("mine", str(folder))
        assert caught.value.code == "adapter.type_unsupported"
        if model == "t5":
            executor.encode(0, PROMPT)
        with pytest.raises(InputError, match="no adapter `mine` is loaded"):
            executor.execute(Step([Row(0, PROMPT, 0, 1, "mine")]))
        executor.close()


def test_files_that_are_missing_or_broken(tmp_path: Path) -> None:
    good = made.of("llama", "plain")[1]
    adapters = AdapterSet(families.model("llama"))

    def refusal(path: Path) -> str:
        with pytest.raises(LoadError) as caught:
            adapters.load("mine", str(path))
        return caught.value.code

    assert refusal(tmp_path / "nothing") == "artifact.missing"
    assert refusal(tmp_path) == "artifact.missing"
    (tmp_path / "adapter_config.json").write_text("{")
    assert refusal(tmp_path) == "config.invalid"
    (tmp_path / "adapter_config.json").write_text((good / "adapter_config.json").read_text())
    assert refusal(tmp_path) == "artifact.missing"
    (tmp_path / "adapter_model.safetensors").write_bytes((good / "adapter_model.safetensors").read_bytes()[:900])
    assert refusal(tmp_path) == "artifact.corrupt"
    assert refusal(ggufs.adapter(tmp_path / "lora.gguf")) == "adapter.type_unsupported"


def test_a_pickle_is_read_only_where_safetensors_is_absent_and_only_as_tensors(tmp_path: Path) -> None:
    wrapped, good = made.of("llama", "plain")
    (tmp_path / "adapter_config.json").write_text((good / "adapter_config.json").read_text())
    torch.save(made.load_file(good / "adapter_model.safetensors"), tmp_path / "adapter_model.bin")
    executor = opened(families.model("llama"))
    executor.load_adapter("mine", str(tmp_path))
    assert apart(all_logits(executor, 0, PROMPT, "mine"), made.logits(wrapped, PROMPT)) < 2e-5
    torch.save({"a": Path("x")}, tmp_path / "adapter_model.bin")
    with pytest.raises(LoadError, match="does not load as tensors alone") as caught:
        executor.load_adapter("other", str(tmp_path))
    assert caught.value.code == "code.pickle_unsafe"
    executor.close()


def test_the_installed_peft_has_no_field_that_is_forgotten() -> None:
    """Every field of PEFT's LoRA is honoured, concerns training only, or is refused when it is used."""
    import dataclasses

    from turnout.backends.torch_native_adapters_read import HONOURED, NEUTRAL

    refused = {
        *("target_parameters", "trainable_token_indices", "alora_invocation_tokens", "layer_replication"),
        *("use_qalora", "use_bdlora", "arrow_config", "kasa_config", "monteclora_config", "velora_config"),
        *("corda_config", "lora_ga_config", "megatron_config"),
    }
    assert {field.name for field in dataclasses.fields(peft.LoraConfig)} - HONOURED - NEUTRAL == refused
