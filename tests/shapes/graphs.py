"""ONNX and OpenVINO shapes of the list (cases 30 to 45, 65), made by hand, tiny and seeded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper

FLOAT = TensorProto.FLOAT
RNG = np.random.default_rng(0)
W1, W2 = RNG.normal(size=(4, 8)).astype(np.float32), RNG.normal(size=(8, 3)).astype(np.float32)


def mlp_reference(x: np.ndarray) -> np.ndarray:
    """What ``mlp`` computes: relu(x W1) W2."""
    result: np.ndarray = np.maximum(x @ W1, 0) @ W2
    return result


def save(
    path: Path,
    nodes: list[Any],
    inputs: list[Any],
    outputs: list[Any],
    weights: list[Any],
    opset: int = 18,
    ir: int = 9,
    domains: tuple[str, ...] = (),
) -> Path:
    """Writes a model; nothing is checked, so that broken ones can be written too."""
    graph = helper.make_graph(nodes, "g", inputs, outputs, weights)
    imports = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(model.SerializeToString())
    return path


def mlp(path: Path, opset: int = 18, ir: int = 9, kind: int = FLOAT) -> Path:
    """Cases 30 to 32, 34, 35: x [batch, 4] -> y [batch, 3], in the element type ``kind``."""
    dtype = helper.tensor_dtype_to_np_dtype(kind)
    weights = [numpy_helper.from_array(W1.astype(dtype), "w1"), numpy_helper.from_array(W2.astype(dtype), "w2")]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"]),
    ]
    return save(
        path,
        nodes,
        [helper.make_tensor_value_info("x", kind, ["batch", 4])],
        [helper.make_tensor_value_info("y", kind, ["batch", 3])],
        weights,
        opset,
        ir,
    )


def matmul(path: Path, kind: int) -> Path:
    """Case 34 and 35 with a float32 rim: x is cast, multiplied in ``kind``, and cast back."""
    weight = numpy_helper.from_array(W1.astype(helper.tensor_dtype_to_np_dtype(kind)), "w1")
    nodes = [
        helper.make_node("Cast", ["x"], ["c"], to=kind),
        helper.make_node("MatMul", ["c", "w1"], ["m"]),
        helper.make_node("Cast", ["m"], ["y"], to=FLOAT),
    ]
    return save(
        path,
        nodes,
        [helper.make_tensor_value_info("x", FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", 8])],
        [weight],
    )


def custom_domain(path: Path) -> Path:
    """Case 33: an operator nobody but its author has."""
    nodes = [helper.make_node("MyOp", ["x"], ["y"], domain="com.acme")]
    port = [helper.make_tensor_value_info(n, FLOAT, [1, 4]) for n in ("x", "y")]
    return save(path, nodes, port[:1], port[1:], [], domains=("com.acme",))


def external(folder: Path, location: str = "weights.bin", write: bool = True) -> Path:
    """Cases 36 and 37: the first weight lies in another file."""
    tensor = TensorProto(name="w1", data_type=FLOAT, dims=[4, 8], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": location, "offset": "0", "length": str(W1.nbytes)}.items():
        tensor.external_data.add(key=key, value=value)
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"]),
        helper.make_node("Relu", ["h"], ["r"]),
        helper.make_node("MatMul", ["r", "w2"], ["y"]),
    ]
    path = save(
        folder / "model.onnx",
        nodes,
        [helper.make_tensor_value_info("x", FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("y", FLOAT, ["batch", 3])],
        [tensor, numpy_helper.from_array(W2, "w2")],
    )
    if write:
        (folder / location).write_bytes(W1.tobytes())
    return path


def linked_data(folder: Path) -> Path:
    """Case 37: external data behind a link out of the package."""
    outside = folder / "outside.bin"
    outside.write_bytes(W1.tobytes())
    package = folder / "package"
    external_path = external(package, write=False)
    (package / "weights.bin").symlink_to(outside)
    return external_path


def hub_cache(folder: Path) -> Path:
    """Case 38: a snapshot of the Hugging Face cache; model and data are links into blobs."""
    cache = folder / "models--org--mlp"
    plain = folder / "plain"
    external(plain)
    (cache / "blobs").mkdir(parents=True)
    snapshot = cache / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    for number, name in enumerate(("model.onnx", "weights.bin")):
        blob = cache / "blobs" / (str(number) * 64)
        (plain / name).rename(blob)
        (snapshot / name).symlink_to(f"../../blobs/{blob.name}")
    return snapshot


# ---- language models as graphs -----------------------------------------------------------------

VOCAB, HIDDEN = 100, 32


def decoder(path: Path, past: bool, layers: int = 1) -> Path:
    """Case 39 (without past) and a decoder with past and present: an embedding, attention, a head."""
    rng = np.random.default_rng(1)
    table = rng.normal(size=(VOCAB, HIDDEN)).astype(np.float32)
    head = rng.normal(size=(HIDDEN, VOCAB)).astype(np.float32)
    weights = [numpy_helper.from_array(table, "table"), numpy_helper.from_array(head, "head")]
    nodes = [helper.make_node("Gather", ["table", "input_ids"], ["e"])]
    ids = [
        helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", length])
        for n, length in (("input_ids", "sequence"), ("attention_mask", "total"))
    ]
    outputs = [helper.make_tensor_value_info("logits", FLOAT, ["batch", "sequence", VOCAB])]
    nodes += [
        helper.make_node("Cast", ["attention_mask"], ["m"], to=FLOAT),
        helper.make_node("ReduceSum", ["m"], ["s"], keepdims=0),
        helper.make_node("Mul", ["s", "zero"], ["z"]),
        helper.make_node("Add", ["e", "z"], ["h"]),
    ]
    weights.append(numpy_helper.from_array(np.float32(0), "zero"))
    if past:
        for layer in range(layers):
            for part in ("key", "value"):
                ids.append(
                    helper.make_tensor_value_info(
                        f"past_key_values.{layer}.{part}", FLOAT, ["batch", 1, "past", HIDDEN]
                    )
                )
                outputs.append(
                    helper.make_tensor_value_info(f"present.{layer}.{part}", FLOAT, ["batch", 1, "total", HIDDEN])
                )
                nodes += [
                    helper.make_node("Unsqueeze", ["h", "one"], [f"u{layer}{part}"]),
                    helper.make_node(
                        "Concat",
                        [f"past_key_values.{layer}.{part}", f"u{layer}{part}"],
                        [f"present.{layer}.{part}"],
                        axis=2,
                    ),
                ]
        weights.append(numpy_helper.from_array(np.array([1], np.int64), "one"))
    nodes.append(helper.make_node("MatMul", ["h", "head"], ["logits"]))
    return save(path, nodes, ids, outputs, weights)


def decoder_package(folder: Path, past: bool) -> Path:
    """A decoder graph with the config and tokenizer of a tiny Llama beside it."""
    from tests.shapes import hf

    hf.llama(folder / "whole")
    package = folder / "package"
    package.mkdir()
    for name in (
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    ):
        (package / name).write_bytes((folder / "whole" / name).read_bytes())
    decoder(package / "model.onnx", past)
    return package


def genai(folder: Path, **changes: Any) -> Path:
    """Cases 40 to 42: an onnxruntime-genai directory; ``changes`` are laid over its model section."""
    package = decoder_package(folder, past=True)
    model: dict[str, Any] = {
        "type": "llama",
        "bos_token_id": 2,
        "eos_token_id": 3,
        "pad_token_id": 0,
        "context_length": 64,
        "vocab_size": VOCAB,
        "decoder": {
            "session_options": {"provider_options": []},
            "filename": "model.onnx",
            "head_size": HIDDEN,
            "hidden_size": HIDDEN,
            "num_attention_heads": 1,
            "num_hidden_layers": 1,
            "num_key_value_heads": 1,
            "inputs": {
                "input_ids": "input_ids",
                "attention_mask": "attention_mask",
                "past_key_names": "past_key_values.%d.key",
                "past_value_names": "past_key_values.%d.value",
            },
            "outputs": {
                "logits": "logits",
                "present_key_names": "present.%d.key",
                "present_value_names": "present.%d.value",
            },
        },
    }
    for key, value in changes.items():
        target = model
        *path, last = key.split("__")
        for part in path:
            target = target[part]
        target[last] = value
    search = {"do_sample": False, "max_length": 64, "past_present_share_buffer": False}
    (package / "genai_config.json").write_text(json.dumps({"model": model, "search": search}))
    return package


# ---- OpenVINO ----------------------------------------------------------------------------------


def ir(folder: Path) -> Path:
    """A plain graph as OpenVINO IR: what ``mlp`` computes."""
    import openvino

    mlp(folder / "mlp.onnx")
    openvino.save_model(openvino.convert_model(folder / "mlp.onnx"), folder / "mlp.xml", compress_to_fp16=False)
    (folder / "mlp.onnx").unlink()
    return folder / "mlp.xml"


def ir_cut(folder: Path) -> Path:
    """Case 43: weights shorter than the XML says."""
    path = ir(folder)
    data = path.with_suffix(".bin").read_bytes()
    path.with_suffix(".bin").write_bytes(data[: len(data) // 2])
    return path


def genai_ir(folder: Path, stateful: bool, tokenizer: bool) -> Path:
    """Cases 44 and 45: a directory for OpenVINO GenAI with or without states and tokenizer graphs."""
    import openvino
    import transformers
    from openvino_tokenizers import convert_tokenizer

    package = decoder_package(folder, past=stateful)
    graph = openvino.convert_model(package / "model.onnx")
    (package / "model.onnx").unlink()
    if stateful:
        pairs = {f"past_key_values.0.{p}": f"present.0.{p}" for p in ("key", "value")}
        openvino._offline_transformations.apply_make_stateful_transformation(graph, pairs)
    openvino.save_model(graph, package / "openvino_model.xml", compress_to_fp16=False)
    if tokenizer:
        fast = transformers.AutoTokenizer.from_pretrained(package)
        for part, name in zip(
            convert_tokenizer(fast, with_detokenizer=True), ("tokenizer", "detokenizer"), strict=True
        ):
            openvino.save_model(part, package / f"openvino_{name}.xml")
    return package
