"""Transformers directories of the list of shapes (docs: cases 1 to 21, 68 to 70), tiny and seeded."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, pre_tokenizers, processors

VOCABULARY = ["<pad>", "<unk>", "<s>", "</s>", "[MASK]", *(f"w{i}" for i in range(90))]
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 40}
TEMPLATE = (
    "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}{% if add_generation_prompt %}assistant{% endif %}"
)


def save_tokenizer(folder: Path, *, wrapped: bool = False) -> None:
    """A word-level tokenizer; ``wrapped`` puts <s> and </s> around texts."""
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(VOCABULARY)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(VOCABULARY[:5])
    if wrapped:
        tokenizer.post_processor = processors.BertProcessing(("</s>", 3), ("<s>", 2))
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        cls_token="<s>",
        sep_token="</s>",
        mask_token="[MASK]",
    ).save_pretrained(folder)


def build(folder: Path, cls: str, config: Any, *, wrapped: bool = False, tokenizer: bool = True) -> Path:
    """A seeded random model of a class of the library with a tokenizer beside it."""
    torch.manual_seed(0)
    model = getattr(transformers, cls)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(4.0) if parameter.ndim > 1 else None  # sharper than the library's 0.02
    model.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder, wrapped=wrapped)
    return folder


def llama_config(**more: Any) -> Any:
    """A decoder of two layers and 64 positions."""
    settings: dict[str, Any] = {
        "vocab_size": 100,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eos_token_id": 3,
        "bos_token_id": 2,
    }
    return transformers.LlamaConfig(**{**settings, **more})


def bert_config(**more: Any) -> Any:
    """An encoder of two layers."""
    return transformers.BertConfig(
        **{"vocab_size": 100, "max_position_embeddings": 64, "pad_token_id": 0, **BERT, **more}
    )


Change = Callable[[dict[str, Any]], Any]


def variant(source: Path, target: Path, config: Change | None = None, tensors: Change | None = None) -> Path:
    """A copy of a package with its configuration or tensors changed."""
    shutil.copytree(source, target, dirs_exist_ok=True)
    if config is not None:
        data = json.loads((target / "config.json").read_text())
        config(data)
        (target / "config.json").write_text(json.dumps(data))
    if tensors is not None:
        stored = load_file(target / "model.safetensors")
        tensors(stored)
        save_file(stored, target / "model.safetensors", metadata={"format": "pt"})
    return target


def llama(folder: Path, template: str | None = TEMPLATE, **config: Any) -> Path:
    """Case 1: a complete decoder with tokenizer and chat template."""
    build(folder, "LlamaForCausalLM", llama_config(**config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


def changed(folder: Path, config: Change | None = None, tensors: Change | None = None, **settings: Any) -> Path:
    """A complete decoder whose configuration or tensors were changed afterwards."""
    llama(folder / "whole", **settings)
    return variant(folder / "whole", folder / "model", config, tensors)


def head_absent(folder: Path, tied: bool) -> Path:
    """Cases 2 and 3: no ``lm_head.weight``, tied or not."""
    return changed(folder, lambda c: c.update(tie_word_embeddings=tied), lambda t: t.pop("lm_head.weight"))


def layer_weight_absent(folder: Path) -> Path:
    """Case 4."""
    return changed(folder, tensors=lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))


def sharded(folder: Path) -> Path:
    """A decoder in three shards with an index."""
    llama(folder / "whole")
    target = folder / "model"
    shutil.copytree(folder / "whole", target)
    stored = load_file(target / "model.safetensors")
    (target / "model.safetensors").unlink()
    names, weight_map = sorted(stored), {}
    for shard in range(3):
        file = f"model-{shard + 1:05d}-of-00003.safetensors"
        part = {name: stored[name] for name in names[shard::3]}
        save_file(part, target / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    write_index(target, weight_map)
    return target


def write_index(target: Path, weight_map: dict[str, str]) -> None:
    """Writes model.safetensors.index.json."""
    (target / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    )


def read_index(target: Path) -> dict[str, str]:
    """Weight map of model.safetensors.index.json."""
    found: dict[str, str] = json.loads((target / "model.safetensors.index.json").read_text())["weight_map"]
    return found


def index_omits_shard(folder: Path) -> Path:
    """Case 5."""
    target = sharded(folder)
    write_index(target, {n: f for n, f in read_index(target).items() if "00002" not in f})
    return target


def shard_absent(folder: Path) -> Path:
    """Case 6."""
    target = sharded(folder)
    (target / "model-00002-of-00003.safetensors").unlink()
    return target


def index_escapes(folder: Path) -> Path:
    """Case 7: the index names a file beside the package."""
    target = sharded(folder)
    (target / "model-00002-of-00003.safetensors").rename(folder / "outside.safetensors")
    write_index(target, {n: "../outside.safetensors" if "00002" in f else f for n, f in read_index(target).items()})
    return target


def index_wrong_owner(folder: Path) -> Path:
    """Case 8."""
    target = sharded(folder)
    weight_map = read_index(target)
    first = sorted(weight_map)[0]
    weight_map[first] = next(f for f in weight_map.values() if f != weight_map[first])
    write_index(target, weight_map)
    return target


def cut_in_half(folder: Path) -> Path:
    """Case 9."""
    llama(folder)
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[: len(data) // 2])
    return folder


def lfs_pointer(folder: Path) -> Path:
    """Case 10."""
    llama(folder)
    (folder / "model.safetensors").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 1000000\n"
    )
    return folder


def auto_map(folder: Path, known: bool) -> Path:
    """Cases 11 and 12: code beside a known or an unknown model type."""
    code = "open(__file__ + '.ran', 'w').close()\nclass Custom: pass\n"

    def change(config: dict[str, Any]) -> None:
        config["auto_map"] = {"AutoConfig": "modeling_x.Custom", "AutoModelForCausalLM": "modeling_x.Custom"}
        if not known:
            config.update(model_type="unheard_of", architectures=["Custom"])

    target = changed(folder, change)
    (target / "modeling_x.py").write_text(code)
    return target


def quantized(folder: Path, **config: Any) -> Path:
    """Cases 14 to 16: a quantization is declared over plain float tensors."""
    return changed(folder, lambda c: c.update(quantization_config=config))


def rope(folder: Path, kind: str) -> Path:
    """Case 13."""

    def change(config: dict[str, Any]) -> None:
        config.pop("rope_parameters", None)
        config.update(rope_scaling={"type": kind, "factor": 2.0})

    return changed(folder, change)


def tokenizer_too_large(folder: Path) -> Path:
    """Case 19: 95 tokens over 80 embedding rows."""
    return llama(folder, vocab_size=80)


def torch_checkpoint(folder: Path, hostile: bool) -> Path:
    """Cases 20 and 21: pytorch_model.bin, clean or with a call of ``os.system``."""
    llama(folder / "whole")
    target = folder / "model"
    shutil.copytree(folder / "whole", target)
    stored = dict(load_file(target / "model.safetensors"))
    (target / "model.safetensors").unlink()
    if hostile:
        stored["extra"] = Evil(target / "ran")
    torch.save(stored, target / "pytorch_model.bin", pickle_module=pickle)
    return target


class Evil:
    """Unpickles into a shell command that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        import os

        return os.system, (f"touch {self.mark}",)


# ---- other families ----------------------------------------------------------------------------


def encoder(folder: Path, cls: str = "BertModel", **config: Any) -> Path:
    """A BERT encoder, bare or with the head of ``cls``."""
    return build(folder, cls, bert_config(**config), wrapped=True)


def ctc(folder: Path) -> Path:
    """Case 68: wav2vec2 with a CTC head."""
    config = transformers.Wav2Vec2Config(
        vocab_size=12,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        conv_dim=(8, 8),
        conv_stride=(5, 2),
        conv_kernel=(10, 3),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=16,
        num_conv_pos_embedding_groups=2,
        pad_token_id=0,
    )
    build(folder, "Wav2Vec2ForCTC", config, tokenizer=False)
    vocabulary = {t: i for i, t in enumerate(["<pad>", "<s>", "</s>", "<unk>", "|", *"abcdefg"])}
    (folder / "vocab.json").write_text(json.dumps(vocabulary))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Wav2Vec2CTCTokenizer", "pad_token": "<pad>", "word_delimiter_token": "|"})
    )
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "feature_extractor_type": "Wav2Vec2FeatureExtractor",
                "sampling_rate": 16000,
                "feature_size": 1,
                "do_normalize": True,
                "padding_value": 0.0,
                "return_attention_mask": False,
            }
        )
    )
    return folder


def whisper(folder: Path) -> Path:
    """Case 68: a Whisper decoder."""
    config = transformers.WhisperConfig(
        vocab_size=100,
        d_model=32,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=80,
        max_source_positions=50,
        max_target_positions=32,
        pad_token_id=0,
        bos_token_id=2,
        eos_token_id=3,
        decoder_start_token_id=2,
    )
    build(folder, "WhisperForConditionalGeneration", config)
    (folder / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "feature_extractor_type": "WhisperFeatureExtractor",
                "sampling_rate": 16000,
                "feature_size": 80,
                "n_fft": 400,
                "hop_length": 160,
                "chunk_length": 1,
                "nb_max_frames": 100,
                "n_samples": 16000,
            }
        )
    )
    return folder


def forecaster(folder: Path) -> Path:
    """Case 69: context 8, lags up to 7."""
    config = transformers.TimeSeriesTransformerConfig(
        prediction_length=4,
        context_length=8,
        lags_sequence=[1, 2, 7],
        num_time_features=0,
        d_model=16,
        encoder_layers=1,
        decoder_layers=1,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=16,
        decoder_ffn_dim=16,
        num_parallel_samples=10,
    )
    return build(folder, "TimeSeriesTransformerForPrediction", config, tokenizer=False)


def decision(folder: Path) -> Path:
    """Case 70."""
    config = transformers.DecisionTransformerConfig(
        state_dim=4, act_dim=2, hidden_size=16, n_layer=1, n_head=2, max_ep_len=32, n_positions=96
    )
    return build(folder, "DecisionTransformerModel", config, tokenizer=False)
