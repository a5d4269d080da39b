"""The model of the speed tables: Qwen3-0.6B's shape with random weights, in every format that is run.

28 layers, hidden 1024, 16 heads and 8 key-value heads of 128, feed-forward 3072, vocabulary 151,936, tied:
596 M parameters. Speed does not depend on the values; they are drawn with a small spread, so that
activations stay finite. Files are written once into the cache directory.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "use_sliding_window": False,
}
# GGUF name of each tensor of a layer.
_LAYER = {
    "input_layernorm.weight": "attn_norm",
    "self_attn.q_proj.weight": "attn_q",
    "self_attn.k_proj.weight": "attn_k",
    "self_attn.v_proj.weight": "attn_v",
    "self_attn.o_proj.weight": "attn_output",
    "self_attn.q_norm.weight": "attn_q_norm",
    "self_attn.k_norm.weight": "attn_k_norm",
    "post_attention_layernorm.weight": "ffn_norm",
    "mlp.gate_proj.weight": "ffn_gate",
    "mlp.up_proj.weight": "ffn_up",
    "mlp.down_proj.weight": "ffn_down",
}


def shapes(config: dict[str, Any] = CONFIG) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """(Hugging Face name, GGUF name, shape) of every tensor."""
    hidden, ffn, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    of_layer = {
        "attn_norm": (hidden,),
        "attn_q": (queries, hidden),
        "attn_k": (keys, hidden),
        "attn_v": (keys, hidden),
        "attn_output": (hidden, queries),
        "attn_q_norm": (head,),
        "attn_k_norm": (head,),
        "ffn_norm": (hidden,),
        "ffn_gate": (ffn, hidden),
        "ffn_up": (ffn, hidden),
        "ffn_down": (hidden, ffn),
    }
    yield "model.embed_tokens.weight", "token_embd.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for name, short in _LAYER.items():
            yield f"model.layers.{layer}.{name}", f"blk.{layer}.{short}.weight", of_layer[short]
    yield "model.norm.weight", "output_norm.weight", (hidden,)


def values(index: int, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """float32 values of the ``index``-th tensor: norms are 1, the rest normal with a spread of 0.02."""
    if len(shape) == 1:
        return np.ones(shape, np.float32)
    return np.random.default_rng(index).standard_normal(shape, np.float32) * np.float32(0.02)


def hugging_face(folder: Path, config: dict[str, Any] = CONFIG) -> Path:
    """Directory with bf16 safetensors and a byte-level tokenizer of the full vocabulary's size."""
    import torch
    from safetensors.torch import save_file

    if (folder / "model.safetensors").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": config["eos_token_id"]}))
    tokens = vocabulary(config["vocab_size"])
    (folder / "tokenizer.json").write_text(json.dumps(_tokenizer(tokens)))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": tokens[config["eos_token_id"]]})
    )
    tensors = {
        name: torch.from_numpy(values(index, shape)).bfloat16()
        for index, (name, _gguf, shape) in enumerate(shapes(config))
    }
    temporary = folder / "model.safetensors.part"
    save_file(tensors, temporary, metadata={"format": "pt"})
    temporary.rename(folder / "model.safetensors")
    return folder


def gguf(path: Path, kind: str, config: dict[str, Any] = CONFIG) -> Path:
    """GGUF file of one of ``kind`` Q8_0, Q4_0, BF16; norms stay float32, the tied head is kept in Q8_0 at 4 bits
    as llama.cpp's own quantizer does (Q6_K there)."""
    import gguf as library

    if path.is_file():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    writer = library.GGUFWriter(str(temporary), "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    tokens = vocabulary(config["vocab_size"])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * len(tokens))
    writer.add_token_merges(["a b"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_bos_token_id(config["bos_token_id"])
    for index, (_name, name, shape) in enumerate(shapes(config)):
        data = values(index, shape)
        if len(shape) == 1:
            writer.add_tensor(name, data)
            continue
        used = "Q8_0" if kind == "Q4_0" and name.startswith("token_embd") else kind
        type_ = library.GGMLQuantizationType[used]
        packed = library.quants.quantize(data, type_)
        writer.add_tensor(name, packed, raw_dtype=type_)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(path)
    return path


def vocabulary(size: int) -> list[str]:
    """``size`` distinct tokens: the 256 bytes in GPT-2's alphabet, then fillers."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    alphabet = [chr(b) for b in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    return alphabet + [f"filler{i}" for i in range(size - len(alphabet))]


def _tokenizer(tokens: list[str]) -> dict[str, Any]:
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": {token: i for i, token in enumerate(tokens)}, "merges": []},
    }


def clear(folder: Path) -> None:
    """Removes what was written."""
    shutil.rmtree(folder, ignore_errors=True)
