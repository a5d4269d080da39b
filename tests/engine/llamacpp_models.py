"""Tiny random models as GGUF whose layers keep other things than keys and values: Mamba, LFM2 (short
convolutions beside attention) and Gemma 3 (sliding windows)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 258
_WIDTH = 64


def _start(path: Path, architecture: str, layers: int) -> Any:
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    writer = gguf.GGUFWriter(path, architecture)
    letters = sorted(ByteLevel.alphabet())
    writer.add_block_count(layers)
    writer.add_context_length(512)
    writer.add_embedding_length(_WIDTH)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([*letters, "<|endoftext|>", letters[60] + letters[61]])
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges([f"{letters[60]} {letters[61]}"])
    writer.add_eos_token_id(256)
    return writer


def _finish(writer: Any, shapes: dict[str, tuple[int, ...]], special: dict[str, NDArray[np.float32]]) -> None:
    rng = np.random.default_rng(0)
    for name, shape in shapes.items():
        data = rng.normal(0, 0.3, shape).astype(np.float32)
        writer.add_tensor(name, np.abs(data) + 1 if name.endswith("norm.weight") else data)
    for name, data in special.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def mamba(path: Path) -> Path:
    """Two layers of Mamba: nothing but recurrent states."""
    writer = _start(path, "mamba", 2)
    inner, state, rank = 2 * _WIDTH, 8, 4
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_ssm_conv_kernel(4)
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(state)
    writer.add_ssm_time_step_rank(rank)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, _WIDTH),
        "output_norm.weight": (_WIDTH,),
    }
    special = {}
    for layer in range(2):
        at = f"blk.{layer}"
        shapes |= {
            f"{at}.attn_norm.weight": (_WIDTH,),
            f"{at}.ssm_in.weight": (2 * inner, _WIDTH),
            f"{at}.ssm_conv1d.weight": (inner, 4),
            f"{at}.ssm_conv1d.bias": (inner,),
            f"{at}.ssm_x.weight": (rank + 2 * state, inner),
            f"{at}.ssm_dt.weight": (inner, rank),
            f"{at}.ssm_dt.bias": (inner,),
            f"{at}.ssm_d": (inner,),
            f"{at}.ssm_out.weight": (_WIDTH, inner),
        }
        special[f"{at}.ssm_a"] = -np.tile(np.arange(1, state + 1, dtype=np.float32), (inner, 1))
    _finish(writer, shapes, special)
    return path


def _attention(at: str, heads: int, kv_heads: int, size: int) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.attn_q.weight": (heads * size, _WIDTH),
        f"{at}.attn_k.weight": (kv_heads * size, _WIDTH),
        f"{at}.attn_v.weight": (kv_heads * size, _WIDTH),
        f"{at}.attn_output.weight": (_WIDTH, heads * size),
        f"{at}.attn_q_norm.weight": (size,),
        f"{at}.attn_k_norm.weight": (size,),
    }


def _feed_forward(at: str) -> dict[str, tuple[int, ...]]:
    return {
        f"{at}.attn_norm.weight": (_WIDTH,),
        f"{at}.ffn_norm.weight": (_WIDTH,),
        f"{at}.ffn_gate.weight": (96, _WIDTH),
        f"{at}.ffn_up.weight": (96, _WIDTH),
        f"{at}.ffn_down.weight": (_WIDTH, 96),
    }


def lfm2(path: Path) -> Path:
    """Three layers of LFM2: convolution, attention, convolution."""
    writer = _start(path, "lfm2", 3)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv([0, 2, 0])
    writer.add_rope_dimension_count(16)
    writer.add_vocab_size(VOCABULARY)
    writer.add_shortconv_l_cache(3)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, _WIDTH),
        "token_embd_norm.weight": (_WIDTH,),
    }
    for layer in range(3):
        at = f"blk.{layer}"
        shapes |= _feed_forward(at)
        if layer == 1:
            shapes |= _attention(at, 4, 2, 16)
        else:
            shapes |= {
                f"{at}.shortconv.conv.weight": (_WIDTH, 3),
                f"{at}.shortconv.in_proj.weight": (3 * _WIDTH, _WIDTH),
                f"{at}.shortconv.out_proj.weight": (_WIDTH, _WIDTH),
            }
    _finish(writer, shapes, {})
    return path


def gemma3(path: Path) -> Path:
    """Six layers of Gemma 3, five of them with a window of 16 tokens."""
    writer = _start(path, "gemma3", 6)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_key_length(16)
    writer.add_value_length(16)
    writer.add_sliding_window(16)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCABULARY, _WIDTH),
        "output_norm.weight": (_WIDTH,),
    }
    for layer in range(6):
        at = f"blk.{layer}"
        shapes |= _attention(at, 4, 2, 16) | _feed_forward(at)
        shapes |= {f"{at}.post_attention_norm.weight": (_WIDTH,), f"{at}.post_ffw_norm.weight": (_WIDTH,)}
    _finish(writer, shapes, {})
    return path


FAMILIES: dict[str, Callable[[Path], Path]] = {"mamba": mamba, "lfm2": lfm2, "gemma3": gemma3}
