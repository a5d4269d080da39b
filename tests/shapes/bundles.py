"""Diffusers, sentence-transformers and adapter shapes of the list (cases 46 to 58), tiny and seeded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tests.shapes import hf


def diffusion(folder: Path) -> Path:
    """Case 46: an unconditional DDPM of 8 by 8 pixels."""
    import diffusers

    torch.manual_seed(0)
    unet = diffusers.UNet2DModel(
        sample_size=8,
        in_channels=3,
        out_channels=3,
        layers_per_block=1,
        block_out_channels=(8, 16),
        norm_num_groups=4,
        down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )
    diffusers.DDPMPipeline(unet, diffusers.DDPMScheduler(num_train_timesteps=10)).save_pretrained(folder)
    return folder


def unet_lacks_tensor(folder: Path) -> Path:
    """Case 47."""
    diffusion(folder)
    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    stored = load_file(path)
    stored.pop("conv_in.weight")
    save_file(stored, path, metadata={"format": "pt"})
    return folder


def component_is_code(folder: Path) -> Path:
    """Case 48: the unet's class comes from a Python file of the package."""
    diffusion(folder)
    (folder / "unet" / "my_unet.py").write_text("open(__file__ + '.ran', 'w').close()\nclass MyUNet: pass\n")
    index = json.loads((folder / "model_index.json").read_text())
    index["unet"] = ["my_unet", "MyUNet"]
    (folder / "model_index.json").write_text(json.dumps(index))
    return folder


def only_fp16(folder: Path) -> Path:
    """Case 49."""
    diffusion(folder)
    path = folder / "unet" / "diffusion_pytorch_model.safetensors"
    half = {name: tensor.half() for name, tensor in load_file(path).items()}
    path.unlink()
    save_file(half, path.with_name("diffusion_pytorch_model.fp16.safetensors"), metadata={"format": "pt"})
    return folder


def dduf(folder: Path) -> Path:
    """Case 50: a zip under the ending .dduf."""
    import zipfile

    diffusion(folder / "whole")
    with zipfile.ZipFile(folder / "model.dduf", "w") as archive:
        for path in sorted((folder / "whole").rglob("*")):
            if path.is_file():
                archive.write(path, path.relative_to(folder / "whole"))
    shutil.rmtree(folder / "whole")
    return folder / "model.dduf"


# ---- sentence-transformers ---------------------------------------------------------------------


def sentences(folder: Path) -> Path:
    """Case 51: BERT, mean pooling, length 1."""
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer

    hf.encoder(folder / "bert")
    transformer = Transformer(str(folder / "bert"))
    SentenceTransformer(modules=[transformer, Pooling(32, "mean"), Normalize()], device="cpu").save(
        str(folder / "model")
    )
    return folder / "model"


def without_modules(folder: Path) -> Path:
    """Case 52."""
    return hf.encoder(folder)


def pooling_width(folder: Path) -> Path:
    """Case 53: pooling for 64 on an encoder of 32."""
    package = sentences(folder)
    path = package / "1_Pooling" / "config.json"
    config = json.loads(path.read_text())
    for name in ("embedding_dimension", "word_embedding_dimension"):
        if name in config:
            config[name] = 64
    path.write_text(json.dumps(config))
    return package


def foreign_module(folder: Path) -> Path:
    """Case 54."""
    package = sentences(folder)
    modules = json.loads((package / "modules.json").read_text())
    modules[-1]["type"] = "my_module.Special"
    (package / "modules.json").write_text(json.dumps(modules))
    (package / "my_module.py").write_text("open(__file__ + '.ran', 'w').close()\nclass Special: pass\n")
    return package


def cross_encoder(folder: Path) -> Path:
    """A reranker with one trained score."""
    hf.encoder(folder, "BertForSequenceClassification", num_labels=1)
    config = json.loads((folder / "config.json").read_text())
    config["sentence_transformers"] = {"activation_fn": "torch.nn.modules.activation.Sigmoid", "version": "5.0.0"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# ---- adapters ----------------------------------------------------------------------------------


def lora(folder: Path, base: str | None = None, **config: Any) -> Path:
    """A LoRA on the query and value projections of ``hf.llama``, beside its base."""
    import peft
    import transformers

    if not (folder / "base").exists():
        hf.llama(folder / "base")
    torch.manual_seed(1)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    adapted = peft.get_peft_model(
        model,
        peft.LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=["q_proj", "v_proj"],
            task_type="CAUSAL_LM",
            init_lora_weights=False,
            **config,
        ),
    )
    adapted.save_pretrained(folder / "adapter")
    settings = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(folder / "base") if base is None else base
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    return folder / "adapter"


def lora_rank(folder: Path) -> Path:
    """Case 57: the configuration says rank 8, the tensors have 4."""
    adapter = lora(folder)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"r": 8}))
    return adapter


def lora_width(folder: Path) -> Path:
    """Case 57: the base is narrower than the adapter."""
    adapter = lora(folder)
    hf.llama(folder / "narrow", hidden_size=16)
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": str(folder / "narrow")}))
    return adapter
