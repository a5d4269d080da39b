"""Adapters made by PEFT for the tiny families, and what PEFT's own models say with them."""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.engine.agreeing_models import new_folder
from tests.shapes import families

ATTENTION = ("q_proj", "v_proj", "o_proj")
GATED = (*ATTENTION, "up_proj", "down_proj")
# Linear layers of each family that PEFT can adapt, some of attention (or what stands for it) and some others.
TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("llama", "qwen3", "gemma2", "gemma3", "olmo2", "cohere2", "granite", "stablelm"), GATED),
    **dict.fromkeys(("qwen3-moe", "gpt-oss", "mixtral"), ATTENTION),
    "phi3": ("qkv_proj", "down_proj"),
    "gpt2": ("c_attn", "c_proj", "c_fc"),
    "gpt-neox": ("query_key_value", "dense_h_to_4h"),
    "deepseek-v2": ("q_b_proj", "kv_b_proj", "o_proj"),
    "falcon": ("query_key_value", "dense_4h_to_h"),
    "bloom": ("query_key_value", "dense"),
    "mamba2": ("in_proj",),
    "qwen3-next": ("q_proj", "in_proj_qkvz", "out_proj"),
    "falcon-h1": ("q_proj", "v_proj", "down_proj"),
    "jamba": ("q_proj", "in_proj", "x_proj"),
    "lfm2": ("q_proj", "out_proj", "w1"),
    "t5": ("q", "v", "wo", "lm_head"),
    "bart": ("q_proj", "v_proj", "fc1"),
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "rslora": {"r": 6, "use_rslora": True},
    "dora": {"r": 3, "lora_alpha": 6, "use_dora": True},
}


@contextmanager
def quiet() -> Iterator[None]:
    """Without PEFT's advice."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def adapted(model: Any, seed: int = 1, **settings: Any) -> Any:
    """PEFT's model with a random adapter that changes what it says, B, magnitudes, biases and copies alike."""
    import peft

    with quiet(), torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        made = peft.get_peft_model(model, peft.LoraConfig(**{"r": 4, "lora_alpha": 8, **settings})).eval()
        for name, parameter in made.named_parameters():
            if "lora_B" in name or "lora_embedding_A" in name:
                parameter.normal_(0, 0.3)
            elif "magnitude" in name:
                parameter.mul_(torch.rand_like(parameter) + 0.5)
            elif "modules_to_save" in name or (parameter.requires_grad and name.endswith("bias")):
                parameter.add_(torch.randn_like(parameter) * 0.2)
    return made


def saved(made: Any, folder: Path | None = None) -> Path:
    """Saves PEFT's model as it saves itself."""
    folder = folder or new_folder()
    with quiet():
        made.save_pretrained(folder)
    return folder


@cache
def of(family: str, kind: str, seed: int = 1) -> tuple[Any, Path]:
    """PEFT's model of a family with an adapter of a kind, and the adapter's directory."""
    made = adapted(families.model(family), seed, target_modules=list(TARGETS[family]), **KINDS[kind])
    return made, saved(made)


def greedy(made: Any, prompt: list[int], count: int) -> list[int]:
    """Tokens that the library's loop gives for a prompt alone (the encoder's, where there is one)."""
    ids = torch.tensor([prompt])
    with torch.inference_mode(), quiet():
        out = made.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[0, -count:].tolist()  # type: ignore[no-any-return]


def logits(model: Any, prompt: list[int]) -> Any:
    """All logits of a prompt, float32 [tokens, vocabulary]."""
    with torch.inference_mode():
        return model(input_ids=torch.tensor([prompt])).logits[0].float()


def changed(source: Path, tensors: Any = None, **settings: Any) -> Path:
    """A copy of an adapter's directory with other settings; ``tensors`` changes the dict of its tensors."""
    folder = new_folder()
    held = load_file(source / "adapter_model.safetensors")
    if tensors is not None:
        tensors(held)
    save_file({name: tensor.contiguous() for name, tensor in held.items()}, folder / "adapter_model.safetensors")
    config = json.loads((source / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **settings}))
    return folder
