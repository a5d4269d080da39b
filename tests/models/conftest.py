"""Real trained weights and the other forms made of them, once per test process."""

from __future__ import annotations

from pathlib import Path

import pytest

from turnout.package.store import resolve


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct, Q4_1."""
    return Path(resolve("smollm2").path)


@pytest.fixture(scope="session")
def smollm2_hf(smollm2_gguf: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model as a Transformers directory in bfloat16, dequantized by Transformers itself."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    target = tmp_path_factory.mktemp("smollm2-hf")
    folder, file = str(smollm2_gguf.parent), smollm2_gguf.name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.bfloat16)
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    AutoTokenizer.from_pretrained(folder, gguf_file=file).save_pretrained(target)
    return target


@pytest.fixture(scope="session")
def minilm() -> Path:
    """all-MiniLM-L6-v2 as a sentence-transformers directory."""
    return Path(resolve("minilm").path)


SENTENCES = ["Someone is eating food.", "A man eats a piece of bread.", "The girl is carrying a baby.", "x"]


@pytest.fixture(scope="session")
def minilm_reference(minilm: Path):  # type: ignore[no-untyped-def]
    """Embeddings [4, 384] of ``SENTENCES``: Transformers' model, one text at a time, mean over its
    tokens, scaled to length 1. No padding, no batching, none of our code."""
    import torch
    from transformers import AutoModel, AutoTokenizer

    model = AutoModel.from_pretrained(minilm, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(minilm)
    rows = []
    for text in SENTENCES:
        with torch.inference_mode():
            hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        mean = hidden.mean(0)
        rows.append((mean / mean.norm()).numpy())
    import numpy as np

    return np.stack(rows)


@pytest.fixture(scope="session")
def minilm_onnx(minilm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model exported to ONNX fp32 by PyTorch, with tokenizer and recipe beside it."""
    import shutil
    import warnings

    import torch
    from transformers import AutoModel

    target = tmp_path_factory.mktemp("minilm-onnx")
    shutil.copytree(minilm, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns("*.safetensors", "*.py*"))
    model = AutoModel.from_pretrained(minilm, dtype=torch.float32, attn_implementation="eager").eval()

    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model  # a submodule, so that its weights are exported as such

        def forward(self, input_ids, attention_mask, token_type_ids):  # type: ignore[no-untyped-def]
            return self.model(
                input_ids=input_ids, attention_mask=attention_mask, token_type_ids=token_type_ids
            ).last_hidden_state

    names = ["input_ids", "attention_mask", "token_type_ids"]
    example = (
        torch.ones(2, 7, dtype=torch.long),
        torch.tensor([[1] * 7, [1] * 5 + [0] * 2]),
        torch.zeros(2, 7, dtype=torch.long),
    )
    axes = {name: {0: "batch", 1: "sequence"} for name in [*names, "last_hidden_state"]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer speaks of every Python branch
        torch.onnx.export(
            Hidden().eval(),
            example,
            str(target / "model.onnx"),
            input_names=names,
            output_names=["last_hidden_state"],
            dynamic_axes=axes,
            opset_version=18,
            dynamo=False,
        )
    return target
