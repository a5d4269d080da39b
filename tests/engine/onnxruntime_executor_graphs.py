"""A Llama of Transformers (a tiny random one, or any other) written out as ONNX decoder graphs, in the forms that
exporters make.

The weights and the rotary tables are the Transformers model's own, so its logits and its ``generate`` are
the reference. Forms: ``concat`` (past joined with what is new, mask and positions as inputs: optimum),
``gqa`` (com.microsoft::GroupQueryAttention, lengths from the mask: onnxruntime-genai), ``plain`` (no cache).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from onnx import TensorProto, helper, numpy_helper
from tests.shapes import graphs

VOCAB, WIDTH, LAYERS, HEADS, KV_HEADS, SIZE, PLACES = 96, 32, 2, 4, 2, 16, 128
MOST_PLACES = 512  # of the rotary tables
FLOAT, HALF, INT64 = TensorProto.FLOAT, TensorProto.FLOAT16, TensorProto.INT64
node, port = helper.make_node, helper.make_tensor_value_info


def llama() -> Any:
    """The model, float32, seeded; its logits are spread so that the greedy choice is clear."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=48,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=SIZE,
        max_position_embeddings=PLACES,
        initializer_range=0.4,
        bos_token_id=1,
        eos_token_id=None,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config).eval()


def reference(model: Any, ids: list[int]) -> np.ndarray:
    """Logits [len(ids), vocab] of a whole sequence."""
    import torch

    with torch.no_grad():
        found: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return found


def greedy(model: Any, ids: list[int], count: int) -> list[int]:
    """Tokens that Transformers' ``generate`` adds."""
    import torch

    with torch.no_grad():
        out = model.generate(torch.tensor([ids]), do_sample=False, max_new_tokens=count, pad_token_id=0)
    return [int(t) for t in out[0, len(ids) :]]


@dataclass
class Writer:
    """Collects nodes and weights; every method returns the name of a value."""

    config: Any
    nodes: list[Any] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)

    def op(self, kind: str, *inputs: str, out: str = "", **more: Any) -> str:
        name = out or f"t{len(self.nodes)}"
        self.nodes.append(node(kind, list(inputs), [name], **more))
        return name

    def const(self, value: Any, dtype: Any = np.int64) -> str:
        array = np.asarray(value, dtype)
        name = f"c_{array.dtype}_{'_'.join(map(str, array.shape))}_{'_'.join(map(str, array.ravel()[:8]))}"
        self.weights[name] = array
        return name

    def weight(self, name: str, tensor: Any) -> str:
        self.weights[name] = np.ascontiguousarray(tensor.detach().numpy().astype(np.float32))
        return name

    @property
    def heads(self) -> int:
        return int(self.config.num_attention_heads)

    @property
    def kv_heads(self) -> int:
        return int(self.config.num_key_value_heads)

    @property
    def size(self) -> int:
        return int(self.config.head_dim)

    def norm(self, x: str, name: str, tensor: Any) -> str:
        mean = self.op("ReduceMean", self.op("Mul", x, x), self.const([-1]), keepdims=1)
        root = self.op("Sqrt", self.op("Add", mean, self.const(self.config.rms_norm_eps, np.float32)))
        return self.op("Mul", self.op("Div", x, root), self.weight(name, tensor))

    def linear(self, x: str, name: str, module: Any) -> str:
        return self.op("MatMul", x, self.weight(name, module.weight.T))


def _tables(model: Any) -> tuple[np.ndarray, np.ndarray]:
    """Cosines and sines [places, size / 2]."""
    places = np.arange(min(model.config.max_position_embeddings, MOST_PLACES))[:, None]
    angles = places * model.model.rotary_emb.inv_freq.numpy()[None].astype(np.float64)
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def _heads(w: Writer, x: str, count: int) -> str:
    """[batch, new, count * size] to [batch, count, new, size]."""
    return w.op("Transpose", w.op("Reshape", x, w.const([0, 0, count, w.size])), perm=[0, 2, 1, 3])


def _rotated(w: Writer, x: str) -> str:
    halves = [f"{x}_left", f"{x}_right"]
    w.nodes.append(node("Split", [x], halves, axis=-1, num_outputs=2))
    turned = w.op("Concat", w.op("Neg", halves[1]), halves[0], axis=-1)
    return w.op("Add", w.op("Mul", x, "cos"), w.op("Mul", turned, "sin"))


def _attend(w: Writer, query: str, key: str, value: str) -> str:
    """Softmax attention; groups of query heads share a key; ``visible`` [batch, 1, new, total] is 0 or -inf."""
    repeat = []
    for x in (key, value):
        five = w.op("Concat", *([w.op("Unsqueeze", x, w.const([2]))] * (w.heads // w.kv_heads)), axis=2)
        shape = w.op("Concat", w.const([0, w.heads]), w.op("Shape", x, start=2), axis=0)
        repeat.append(w.op("Reshape", five, shape))
    scores = w.op("MatMul", query, w.op("Transpose", repeat[0], perm=[0, 1, 3, 2]))
    scores = w.op("Add", w.op("Mul", scores, w.const(w.size**-0.5, np.float32)), "visible")
    mixed = w.op("MatMul", w.op("Softmax", scores, axis=-1), repeat[1])
    return w.op("Reshape", w.op("Transpose", mixed, perm=[0, 2, 1, 3]), w.const([0, 0, w.heads * w.size]))


def _visibility(w: Writer, past: str | None) -> None:
    """``visible`` from the mask and causality: new token i sees places up to past + i that the mask has."""
    new = w.op("Shape", "input_ids", start=1)
    total = w.op("Add", new, w.op("Shape", past, start=2, end=3)) if past else new
    ones = w.op("ConstantOfShape", w.op("Concat", new, total, axis=0), value=numpy_helper.from_array(np.float32([1])))
    offset = w.op("Add", w.op("Sub", total, new), w.const([1]))
    later = w.op("Trilu", ones, w.op("Squeeze", offset), upper=1)  # [new, total]
    masked = w.op("Sub", w.const(1, np.float32), w.op("Cast", "attention_mask", to=FLOAT))  # [batch, total]
    hidden = w.op("Add", later, w.op("Unsqueeze", masked, w.const([1, 2])))
    w.op("Mul", hidden, w.const(-1e9, np.float32), out="visible")


def _ports(w: Writer, form: str, ids: int, half: bool, names: tuple[str, str], new: Any) -> tuple[list[Any], list[Any]]:
    inputs = [port("input_ids", ids, ["batch", new]), port("attention_mask", ids, ["batch", "total"])]
    inputs += [port("position_ids", ids, ["batch", new])] if form != "gqa" else []
    outputs = [port("logits", FLOAT, ["batch", "new", w.config.vocab_size])]
    for layer in range(w.config.num_hidden_layers if form != "plain" else 0):
        for part in ("key", "value") if form != "stacked" else ("",):
            shape = [*([2] if form == "stacked" else []), "batch", w.kv_heads, "{}", w.size]
            kind = HALF if half else FLOAT
            for ports, name, axis in ((inputs, names[0], "past"), (outputs, names[1], "all")):
                ports.append(port(name.format(layer=layer, part=part), kind, [axis if d == "{}" else d for d in shape]))
    return inputs, outputs


def write(
    path: Path,
    model: Any,
    form: str,
    *,
    ids: int = INT64,
    half: bool = False,
    last: bool = False,
    keep: bool = False,
    new: Any = "new",
    names: tuple[str, str] = ("past_key_values.{layer}.{part}", "present.{layer}.{part}"),
) -> Path:
    """The graph at ``path``. ``ids`` is the integers' type, ``half`` keeps the past in float16, ``last`` gives
    the logits of the last token alone, ``keep`` those of as many as the input `num_logits_to_keep` says, ``new``
    is the number of tokens a call takes, ``names`` are the patterns of past and present."""
    w = Writer(model.config)
    inputs, outputs = _ports(w, form, ids, half, names, new)
    cosines, sines = _tables(model)
    x = w.op("Gather", w.weight("embedding", model.model.embed_tokens.weight), "input_ids")
    if form == "gqa":
        w.weights |= {"cosines": cosines, "sines": sines}
        mask = w.op("Cast", "attention_mask", to=INT64)
        count = w.op("ReduceSum", mask, w.const([1]), keepdims=0)
        w.op("Cast", w.op("Sub", count, w.const([1])), to=TensorProto.INT32, out="seqlens_k")
        w.op("Cast", w.op("Gather", w.op("Shape", mask), w.const(1)), to=TensorProto.INT32, out="total_length")
    else:
        w.weights |= {"cosines": np.tile(cosines, 2), "sines": np.tile(sines, 2)}
        for name, table in (("cos", "cosines"), ("sin", "sines")):
            w.op("Unsqueeze", w.op("Gather", table, "position_ids"), w.const([1]), out=name)
        _visibility(w, _first_past(w, form, names[0]))
    for index, layer in enumerate(model.model.layers):
        x = _layer(w, x, layer, index, form, half, names)
    if last:
        x = w.op("Gather", x, w.const([-1]), axis=1)
    if keep:
        inputs.append(port("num_logits_to_keep", INT64, []))
        start = w.op("Unsqueeze", w.op("Neg", "num_logits_to_keep"), w.const([0]))
        x = w.op("Slice", x, start, w.const([1 << 40]), w.const([1]))
    x = w.norm(x, "norm", model.model.norm.weight)
    w.op("MatMul", x, w.weight("head", model.lm_head.weight.T), out="logits")
    weights = [numpy_helper.from_array(value, name) for name, value in w.weights.items()]
    return graphs.save(path, w.nodes, inputs, outputs, weights, domains=("com.microsoft",))


def _first_past(w: Writer, form: str, pattern: str) -> str | None:
    """A value whose axis 2 is as long as the past."""
    if form == "plain":
        return None
    first = pattern.format(layer=0, part="key")
    return w.op("Gather", first, w.const(0)) if form == "stacked" else first


def _grown(w: Writer, states: list[str], past: list[str], present: list[str], half: bool) -> list[str]:
    """Past and new states joined, one by one."""
    for place, (before, after) in enumerate(zip(past, present, strict=True)):
        if half:
            states[place] = w.op("Concat", w.op("Cast", before, to=FLOAT), states[place], axis=2)
            w.op("Cast", states[place], to=HALF, out=after)
        else:
            states[place] = w.op("Concat", before, states[place], axis=2, out=after)
    return states


def _stacked(w: Writer, states: list[str], past: str, present: str) -> list[str]:
    """Past and new states in one value [2, batch, heads, tokens, size], as GPT-2's first exports had them."""
    new = w.op("Concat", *(w.op("Unsqueeze", s, w.const([0])) for s in states), axis=0)
    w.op("Concat", past, new, axis=3, out=present)
    return [w.op("Gather", present, w.const(i)) for i in (0, 1)]


def _layer(w: Writer, x: str, layer: Any, index: int, form: str, half: bool, names: tuple[str, str]) -> str:
    normed = w.norm(x, f"norm_a{index}", layer.input_layernorm.weight)
    attention = layer.self_attn
    query, key, value = (w.linear(normed, f"{n}{index}", getattr(attention, f"{n}_proj")) for n in ("q", "k", "v"))
    past = [names[0].format(layer=index, part=part) for part in ("key", "value")]
    present = [names[1].format(layer=index, part=part) for part in ("key", "value")]
    if form == "gqa":
        mixed = f"mixed{index}"
        inputs = [query, key, value, *past, "seqlens_k", "total_length", "cosines", "sines"]
        more = {"num_heads": w.heads, "kv_num_heads": w.kv_heads, "do_rotary": 1}
        w.nodes.append(node("GroupQueryAttention", inputs, [mixed, *present], domain="com.microsoft", **more))
    else:
        query = _rotated(w, _heads(w, query, w.heads))
        states = [_rotated(w, _heads(w, key, w.kv_heads)), _heads(w, value, w.kv_heads)]
        if form == "concat":
            states = _grown(w, states, past, present, half)
        elif form == "stacked":
            states = _stacked(w, states, past[0], present[0])
        mixed = _attend(w, query, *states)
    x = w.op("Add", x, w.linear(mixed, f"o{index}", attention.o_proj))
    normed = w.norm(x, f"norm_b{index}", layer.post_attention_layernorm.weight)
    gate = w.linear(normed, f"gate{index}", layer.mlp.gate_proj)
    up = w.linear(normed, f"up{index}", layer.mlp.up_proj)
    inner = w.op("Mul", w.op("Mul", gate, w.op("Sigmoid", gate)), up)
    return w.op("Add", x, w.linear(inner, f"down{index}", layer.mlp.down_proj))
