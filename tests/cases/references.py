"""What the listed shapes must compute, by independent means: the libraries called directly, or numpy.

Each function takes the package's path and an output of ours, and asserts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from tests.shapes import classical, graphs

PROMPT, TOKENS = "w1 w2 w3", 8
TEXTS = ["w1 w2 w3 w4 w5", "w9"]
X = np.linspace(-1, 1, 8, dtype=np.float32).reshape(2, 4)
ROWS = [[0.5, -0.2, 0.1, 1.0], [-1.5, 0.3, 0.7, -0.4]]


def inputs_of(task: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Inputs and request options of the comparison."""
    table = {"columns": classical.FEATURES, "rows": ROWS}
    known: dict[str, dict[str, Any]] = {
        "text-generation": {"prompt": PROMPT},
        "chat": {"messages": [{"role": "user", "content": PROMPT}]},
        "embeddings": {"texts": TEXTS},
        "rerank": {"query": "w1 w2", "documents": TEXTS},
        "tensor": {"tensors": {"x": X}},
        "tabular-classification": {"table": table},
        "text-to-image": {"prompt": ""},
    }
    return known[task], {"steps": 2} if task == "text-to-image" else {}


def _generated(model: Any, folder: Path, prompt: str) -> str:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(prompt, return_tensors="pt").input_ids
    new = model.eval().generate(input_ids=ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)[
        0, ids.shape[1] :
    ]
    text: str = tokenizer.decode(new, skip_special_tokens=True)
    return text


def eager(path: Path, output: Any) -> None:
    """Greedy text of Transformers' own generate."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    assert output.text == _generated(model, path, PROMPT) != ""


def eager_chat(path: Path, output: Any) -> None:
    """The same after rendering the template by hand."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager")
    assert output.text == _generated(model, path, f"user {PROMPT} assistant")


def beside(path: Path, output: Any) -> None:
    """Greedy text of the directory that a conversion was made from."""
    eager(path.parent / "whole", output)


def adapted(path: Path, output: Any) -> None:
    """Greedy text of peft's own model."""
    import peft
    from transformers import AutoModelForCausalLM

    base = path.parent / "base"
    model = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), path)
    assert output.text == _generated(model, base, PROMPT)


def dequantized(path: Path, output: Any) -> None:
    """Greedy text of Transformers' GGUF loader; ours may quantize activations, so the beginning counts."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name).eval()
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    new = model.generate(input_ids=ids, max_new_tokens=TOKENS, do_sample=False, pad_token_id=0)[0, ids.shape[1] :]
    expected = tokenizer.decode(new, skip_special_tokens=True)
    assert output.text[:2] == expected[:2], (output.text, expected)


def hand_decoder(path: Path, output: Any) -> None:
    """The made decoder is a table and a head: the next token is the best match of the last one."""
    import onnx
    from onnx import numpy_helper
    from transformers import AutoTokenizer

    file = path / "model.onnx"
    weights = {w.name: numpy_helper.to_array(w) for w in onnx.load(file).graph.initializer}
    tokenizer = AutoTokenizer.from_pretrained(path)
    token, produced = tokenizer(PROMPT).input_ids[-1], []
    for _ in range(TOKENS):
        token = int(np.argmax(weights["table"][token] @ weights["head"]))
        if token == 3:
            break
        produced.append(token)
    assert output.text == tokenizer.decode(produced, skip_special_tokens=True)


def mlp(path: Path, output: Any) -> None:
    np.testing.assert_allclose(output.tensors["y"], graphs.mlp_reference(X), rtol=1e-5, atol=1e-6)


def product(tolerance: float) -> Any:
    """x W1 in a narrower type, within that type's rounding."""

    def compare(path: Path, output: Any) -> None:
        np.testing.assert_allclose(output.tensors["y"], X @ graphs.W1, rtol=tolerance, atol=tolerance)

    return compare


def pooled(pooling: str, normalize: bool) -> Any:
    """Hidden states of Transformers' encoder, pooled by hand one text at a time."""

    def compare(path: Path, output: Any) -> None:
        import torch
        from transformers import AutoModel, AutoTokenizer

        model, tokenizer = AutoModel.from_pretrained(path).eval(), AutoTokenizer.from_pretrained(path)
        for text, vector in zip(TEXTS, output.vectors, strict=True):
            with torch.inference_mode():
                hidden = model(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
            expected = hidden[0] if pooling == "cls" else hidden.mean(0)
            expected = expected / expected.norm() if normalize else expected
            np.testing.assert_allclose(vector, expected.numpy(), atol=1e-5)

    return compare


def scored(path: Path, output: Any) -> None:
    """Order by the logits of Transformers' classifier."""
    import torch
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model, tokenizer = (
        AutoModelForSequenceClassification.from_pretrained(path).eval(),
        AutoTokenizer.from_pretrained(path),
    )
    with torch.inference_mode():
        logits = [float(model(**tokenizer("w1 w2", text, return_tensors="pt")).logits[0, 0]) for text in TEXTS]
    assert [r.index for r in output.ranking] == [int(i) for i in np.argsort(logits)[::-1]]


def _probabilities(output: Any) -> np.ndarray:
    names = [i for i, column in enumerate(output.columns) if column.startswith("p(")]
    return np.array([[row[i] for i in names] for row in output.rows], float)


def boosted(path: Path, output: Any) -> None:
    """xgboost's own probability of class 1."""
    import xgboost

    model = xgboost.Booster(model_file=path)
    expected = model.predict(xgboost.DMatrix(np.array(ROWS, np.float32), feature_names=classical.FEATURES))
    np.testing.assert_allclose(_probabilities(output)[:, 1], expected, atol=1e-5)


def classified(path: Path, output: Any) -> None:
    """scikit-learn's own probabilities, from the same training."""
    expected = classical.classifier().predict_proba(np.array(ROWS, np.float32))
    np.testing.assert_allclose(_probabilities(output), expected, atol=1e-5)


def piped(path: Path, output: Any) -> None:
    """scikit-learn's own probabilities of the stored pipeline."""
    import skops.io

    expected = skops.io.load(path, trusted=[]).predict_proba(np.array(ROWS, np.float32))
    np.testing.assert_allclose(_probabilities(output), expected, atol=1e-6)


def painted(variant: str | None) -> Any:
    """The pipeline called directly with the same seed."""

    def compare(path: Path, output: Any) -> None:
        import diffusers
        import torch

        pipeline = diffusers.DDPMPipeline.from_pretrained(path, variant=variant, torch_dtype=torch.float32)
        pipeline.set_progress_bar_config(disable=True)
        expected = pipeline(num_inference_steps=2, generator=torch.Generator().manual_seed(7), output_type="np").images[
            0
        ]
        np.testing.assert_allclose(output.images[0], expected * 255, atol=1)

    return compare
