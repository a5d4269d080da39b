"""One Llama in the forms that four executors read: a Transformers directory, a GGUF file, an ONNX decoder.

The weights are the same float32 numbers in each; OpenVINO's executor writes its graph from the directory.
``tiny`` is random with a byte-level vocabulary, ``smollm2`` and ``gemma3`` are trained weights of installed
packages, expanded to float32 by Transformers. Everything is made once per process, in a temporary folder.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import gguf
import numpy as np
import torch
import transformers
from tests.engine import onnxruntime_executor_graphs as onnx_graphs
from tests.engine.agreeing_gguf import with_floats, without_vocabulary
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from turnout.backends.base import Case
from turnout.backends.llamacpp import LlamaCppBackend
from turnout.backends.llamacpp_vocabulary import LlamaCppVocabulary
from turnout.backends.onnxruntime import OnnxRuntimeBackend
from turnout.backends.openvino_native import OpenVINONativeBackend
from turnout.backends.torch_native import TorchNativeBackend
from turnout.engine.executor import Executor, Vocabulary
from turnout.package.inspect import inspect
from turnout.package.store import resolve
from turnout.types import Task

NAMES = ("torch", "llama.cpp", "openvino", "onnxruntime")
# llama.cpp computes in float32 throughout only without flash attention and with a float32 cache.
EXACT = {"cache_type": "f32", "flash": "off"}


@dataclass
class Forms:
    """The same weights as a Transformers directory, a GGUF file and a directory with an ONNX decoder."""

    folder: Path
    gguf: Path
    onnx: Path


_kept: list[tempfile.TemporaryDirectory[str]] = []  # removed when the process ends


def new_folder() -> Path:
    """An empty folder that lives as long as this process."""
    _kept.append(tempfile.TemporaryDirectory(prefix="turnout-models-"))
    return Path(_kept[-1].name)


# ---- a tiny model ------------------------------------------------------------------------------

END = "<|endoftext|>"
WORDS = ("th", "the", "in", "er", "an", "tr", "tru", "true", "fa", "al", "fal", "fals", "false", "on", '":', '{"')


def _pieces() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-level vocabulary: 256 bytes, the end, some words, each word joined from one known before."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*letters, END])}
    merges = []
    for word in [*WORDS, *(f"Ġ{letter}" for letter in "abcdefghij")]:  # Ġ is a space
        vocabulary[word] = len(vocabulary)
        merges.append((word[:-1], word[-1]))
    return vocabulary, merges


@cache
def tiny() -> Forms:
    """A random Llama of two layers; its distributions are neither flat nor certain."""
    folder = new_folder()
    vocabulary, merges = _pieces()
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=len(vocabulary),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.22,
        bos_token_id=None,
        eos_token_id=256,
        tie_word_embeddings=False,
        attn_implementation="eager",
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.save_pretrained(folder / "hf")
    tokenizer = Tokenizer(models.BPE(vocab={k: v for k, v in vocabulary.items() if k != END}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # An id between others: the end is an entry of the model, then a special token of the same text.
    tokenizer.model = models.BPE(vocab=vocabulary, merges=merges)
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    save_tokenizer(folder / "hf", tokenizer)
    return Forms(folder / "hf", _tiny_gguf(folder / "tiny.gguf", model, vocabulary, merges), _onnx(folder, model))


def save_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END).save_pretrained(folder)


def _onnx(folder: Path, model: Any) -> Path:
    """The decoder with its past as ONNX, beside the directory's configuration and tokenizer."""
    target = folder / "onnx"
    target.mkdir()
    for source in (folder / "hf").iterdir():
        if source.suffix != ".safetensors":
            (target / source.name).write_bytes(source.read_bytes())
    onnx_graphs.write(target / "model.onnx", model, "concat")
    return target


# Names of a Llama's tensors in GGUF; those of a layer come after `blk.N.`.
TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _gguf_tensors(model: Any) -> dict[str, np.ndarray]:
    """Tensors under GGUF's names; rows of queries and keys in pairs, as llama.cpp turns neighbours."""
    config = model.config
    found = {}
    for name, tensor in model.state_dict().items():
        data, stem = tensor.float().numpy(), name.removesuffix(".weight")
        if stem in TOP:
            found[f"{TOP[stem]}.weight"] = data
            continue
        _, _, layer, part = stem.split(".", 3)
        heads = {"self_attn.q_proj": config.num_attention_heads, "self_attn.k_proj": config.num_key_value_heads}
        if part in heads:
            halves = data.reshape(heads[part], 2, -1, data.shape[1])
            data = halves.swapaxes(1, 2).reshape(data.shape)
        found[f"blk.{layer}.{LAYER[part]}.weight"] = np.ascontiguousarray(data)
    return found


def _tiny_gguf(path: Path, model: Any, vocabulary: dict[str, int], merges: list[tuple[str, str]]) -> Path:
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_file_type(0)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(list(vocabulary))
    writer.add_token_types([3 if token == END else 1 for token in vocabulary])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(vocabulary[END])
    return _finished(writer, path, _gguf_tensors(model))


def _finished(writer: Any, path: Path, tensors: dict[str, np.ndarray]) -> Path:
    for name, data in tensors.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


# ---- trained weights ---------------------------------------------------------------------------


def original(name: str) -> Path:
    """The GGUF file of a model of the store."""
    return Path(resolve(name).path)


@cache
def trained(name: str) -> Path:
    """A trained model of the store as a float32 Transformers directory, expanded by Transformers itself.

    Without tokenizer: the GGUF file has it.
    """
    source, folder = original(name), new_folder()
    without_vocabulary(source, folder / "model.gguf")
    # The loader makes the same table of names for every module of the model: a quarter of a minute.
    with patch("gguf.get_tensor_name_map", cache(gguf.get_tensor_name_map)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    (folder / "model.gguf").unlink()
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder / "hf")
    return folder / "hf"


@cache
def smollm2() -> Forms:
    """SmolLM2-135M-Instruct: the float32 directory, a GGUF of the same float32 values with the original file's keys,
    and an ONNX decoder."""
    source, folder = original("smollm2"), trained("smollm2")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tensors = _gguf_tensors(model)
    if model.config.tie_word_embeddings:
        del tensors["output.weight"]
    floats = with_floats(source, folder.parent / "smollm2-f32.gguf", tensors)
    return Forms(folder, floats, _onnx(folder.parent, model))


def read_vocabulary(name: str) -> LlamaCppVocabulary:
    """A trained model's vocabulary, read by llama.cpp from the original file."""
    return LlamaCppVocabulary.of_file(str(original(name)))


# ---- executors ---------------------------------------------------------------------------------


def case_of(path: Path, **options: Any) -> Case:
    """The first artifact of a package, to generate text."""
    package = inspect(path)
    return Case(package.root, package.artifacts[0], Task.TEXT_GENERATION, options=options)


def opened(name: str, forms: Forms, slots: int = 4, context: int = 256, cache_tokens: int = 1024) -> Executor:
    """An executor of one thread over the weights, everything in float32; opened as a worker opens it, by the names of
    ``ExecutorOptions``."""
    counts = {"slots": slots, "context": context, "cache_tokens": cache_tokens, "threads": 1}
    if name == "torch":
        torch_native = TorchNativeBackend()
        plan = torch_native.plan(case_of(forms.folder, dtype="float32"))
        return torch_native.executor(plan, counts)
    if name == "llama.cpp":
        llamacpp = LlamaCppBackend()
        return llamacpp.executor(llamacpp.plan(case_of(forms.gguf)), {**counts, **EXACT})
    if name == "openvino":
        openvino = OpenVINONativeBackend()
        return openvino.executor(openvino.plan(case_of(forms.folder, dtype="float32")), counts)
    runtime = OnnxRuntimeBackend()
    return runtime.executor(runtime.plan(case_of(forms.onnx)), counts)


def vocabulary(name: str, forms: Forms) -> Vocabulary:
    """What the executor's backend reads text with."""
    if name == "torch":
        backend = TorchNativeBackend()
        return backend.vocabulary(backend.plan(case_of(forms.folder)))
    if name == "llama.cpp":
        llamacpp = LlamaCppBackend()
        return llamacpp.vocabulary(llamacpp.plan(case_of(forms.gguf)))
    if name == "openvino":
        openvino = OpenVINONativeBackend()
        return openvino.vocabulary(openvino.plan(case_of(forms.folder)))
    runtime = OnnxRuntimeBackend()
    return runtime.vocabulary(runtime.plan(case_of(forms.onnx)))
