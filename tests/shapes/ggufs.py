"""GGUF files of the list of shapes (cases 22 to 29, 58), tiny, seeded and really loadable."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np


def write_gguf(
    path: Path, *, kind: str = "Q8_0", pre: str = "gpt-2", arch: str = "llama", drop: str = "", **keys: Any
) -> Path:
    """A tiny Llama of one layer as GGUF, with a byte-level vocabulary."""
    import gguf
    from tokenizers.pre_tokenizers import ByteLevel

    writer = gguf.GGUFWriter(path, arch)
    letters = sorted(ByteLevel.alphabet())
    tokens = [*letters, "<|endoftext|>", letters[60] + letters[61]]
    writer.add_block_count(1)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(16)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3, 1])
    writer.add_token_merges([f"{tokens[60]} {tokens[61]}"])
    writer.add_eos_token_id(256)
    writer.add_file_type({"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q8_0": 7, "Q5_0": 8}[kind])
    for key, value in keys.items():
        name = key.replace("__", ".")
        writer.add_string(name, value) if isinstance(value, str) else writer.add_uint16(name, value)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (258, 64), "output": (258, 64), "output_norm": (64,), "blk.0.attn_norm": (64,),
        "blk.0.ffn_norm": (64,), "blk.0.attn_q": (64, 64), "blk.0.attn_k": (32, 64), "blk.0.attn_v": (32, 64),
        "blk.0.attn_output": (64, 64), "blk.0.ffn_gate": (96, 64), "blk.0.ffn_up": (96, 64), "blk.0.ffn_down": (64, 96),
    }  # fmt: skip
    for name, shape in shapes.items():
        if name == drop:
            continue
        data = rng.normal(0, 0.3, shape).astype(np.float32)
        if len(shape) == 1 or kind == "F32":
            writer.add_tensor(f"{name}.weight", np.abs(data) + 1 if len(shape) == 1 else data)
        else:
            quant = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"{name}.weight", gguf.quants.quantize(data, quant), raw_dtype=quant)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def split_alone(folder: Path) -> Path:
    """Case 24: part 1 of 2 without the other."""
    path = folder / "tiny-00001-of-00002.gguf"
    return write_gguf(path, split__count=2, split__no=0)


def adapter(path: Path) -> Path:
    """Case 25: a LoRA of one matrix, as llama.cpp's converter writes it."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    writer.add_string("general.base_model.0.name", "Tiny Llama")
    rng = np.random.default_rng(0)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", rng.normal(0, 0.1, (4, 64)).astype(np.float32))
    writer.add_tensor("blk.0.attn_q.weight.lora_b", rng.normal(0, 0.1, (64, 4)).astype(np.float32))
    return _finish(writer, path)


def projector(path: Path, width: int) -> Path:
    """Case 26: a vision projector of the given output width."""
    import gguf

    writer = gguf.GGUFWriter(path, "clip")
    writer.add_type("mmproj")
    writer.add_bool("clip.has_vision_encoder", True)
    writer.add_string("clip.projector_type", "mlp")
    writer.add_uint32("clip.vision.projection_dim", width)
    writer.add_tensor("mm.0.weight", np.zeros((width, 32), np.float32))
    return _finish(writer, path)


def _finish(writer: Any, path: Path) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def cut_short(path: Path) -> Path:
    """A complete header over half of the data."""
    write_gguf(path)
    data = path.read_bytes()
    path.write_bytes(data[: len(data) * 3 // 4])
    return path


def header(tensors: int, keys: int, body: bytes = b"") -> bytes:
    """The first bytes of a GGUF file of version 3."""
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body
