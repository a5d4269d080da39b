"""Plain decoders (Llama, Mistral, Qwen2, Qwen3) from safetensors straight into an OpenVINO graph.

No PyTorch and no tracing: the graph is written down layer by layer in the stateful form that GenAI
pipelines take and ``openvino_executor_graph`` pages, with weights read from the mapped file and quantized
as they come (``openvino_executor_weights``). What the configuration says and this file does not know is
refused; ``openvino_executor_source`` then tries Transformers' exporter.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from turnout.backends.openvino_executor_weights import Weights
from turnout.errors import LoadError

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
ACTIVATIONS = {"silu": "swish", "swish": "swish", "gelu_pytorch_tanh": "gelu"}


@dataclass(frozen=True, slots=True)
class Decoder:
    """Sizes and settings of one model, as its configuration states them."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    eps: float
    activation: str
    frequencies: tuple[float, ...]  # [head_dim / 2], radians per position

    @classmethod
    def of(cls, config: dict[str, Any]) -> Decoder:
        """Raises ``LoadError`` (``config.unsupported_variant``) for what the graph does not say."""
        family = str(config.get("model_type"))
        if family not in FAMILIES:
            raise _variant("model_type", family, ", ".join(sorted(FAMILIES)))
        activation = str(config.get("hidden_act", "silu"))
        if activation not in ACTIVATIONS:
            raise _variant("hidden_act", activation, ", ".join(ACTIVATIONS))
        if config.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise _variant("partial_rotary_factor", config["partial_rotary_factor"], "1")
        heads, hidden = int(config["num_attention_heads"]), int(config["hidden_size"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        return cls(
            layers=int(config["num_hidden_layers"]),
            hidden=hidden,
            heads=heads,
            kv_heads=int(config.get("num_key_value_heads") or heads),
            head_dim=head_dim,
            vocabulary=int(config["vocab_size"]),
            eps=float(config.get("rms_norm_eps", 1e-6)),
            activation=ACTIVATIONS[activation],
            frequencies=tuple(rotary_frequencies(config, head_dim)),
        )


def _variant(key: str, observed: Any, expected: str) -> LoadError:
    return LoadError(f"`{key}={observed}`: the graph is written for {expected}", code="config.unsupported_variant")


def rotary_frequencies(config: dict[str, Any], head_dim: int) -> list[float]:
    """Angles per position of each pair (Su et al. 2021); ``linear`` (Chen et al. 2023) divides them,
    ``llama3`` divides the slow ones and blends in between (Llama 3.1's report). Raises ``LoadError``."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
    kind = str(rope.get("rope_type") or rope.get("type") or "default")
    plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if kind == "default":
        return plain
    if kind == "linear":
        return [f / float(rope["factor"]) for f in plain]
    if kind != "llama3":
        raise _variant("rope_type", kind, "default, linear, llama3")
    factor, low, high = (float(rope[k]) for k in ("factor", "low_freq_factor", "high_freq_factor"))
    trained = float(rope["original_max_position_embeddings"])
    found = []
    for f in plain:
        turns = trained * f / (2 * math.pi)  # over the trained context
        share = min(1.0, max(0.0, (turns - low) / (high - low)))
        found.append(share * f + (1 - share) * f / factor)
    return found


def decoder_graph(decoder: Decoder, weights: Weights) -> Any:
    """The stateful graph: ``input_ids``, ``attention_mask``, ``position_ids`` [batch, tokens] and ``beam_idx``
    [batch] to ``logits`` [batch, tokens, vocabulary]. Raises ``LoadError`` for absent or left-over tensors."""
    import openvino
    from openvino import opset13 as ops

    builder = _Builder(decoder, weights, ops)
    builder.inputs()
    state = builder.embed()
    for layer in range(decoder.layers):
        state = builder.layer(layer, state)
    state = builder.norm(state, "model.norm.weight")
    head = "lm_head.weight" if weights.has("lm_head.weight") else "model.embed_tokens.weight"
    logits = builder.linear(state, head.removesuffix(".weight"))
    logits.output(0).get_tensor().set_names({"logits"})
    result = ops.result(logits, name="logits")
    weights.finish()
    return openvino.Model([result], builder.sinks, builder.parameters, "decoder")


class _Builder:
    """Writes the nodes; every method returns the node whose first output is meant."""

    def __init__(self, decoder: Decoder, weights: Weights, ops: Any) -> None:
        self.decoder, self.weights, self.ops = decoder, weights, ops
        self.parameters: list[Any] = []
        self.sinks: list[Any] = []

    def inputs(self) -> None:
        """Parameters, and what every layer shares: mask, rotary tables, empty cache."""
        import numpy as np

        ops, decoder = self.ops, self.decoder
        self.ids, mask, positions = (self._parameter(n, "i64") for n in ("input_ids", "attention_mask", "position_ids"))
        self.beam = self._parameter("beam_idx", "i32", 1)
        self.mask = self._causal(mask)
        frequencies = ops.constant(np.array(decoder.frequencies, np.float32).reshape(1, 1, -1))
        angles = ops.multiply(ops.convert(ops.unsqueeze(positions, self._ints(2)), "f32"), frequencies)
        both = ops.concat([angles, angles], -1)
        self.cos = ops.unsqueeze(ops.cos(both), self._ints(1))
        self.sin = ops.unsqueeze(ops.sin(both), self._ints(1))
        batch = ops.gather(ops.shape_of(self.ids, "i64"), self._ints(0), self._int(0))
        shape = ops.concat([batch, self._ints(decoder.kv_heads), self._ints(0), self._ints(decoder.head_dim)], 0)
        self.empty = ops.broadcast(ops.constant(np.float32(0)), shape)

    def _parameter(self, name: str, kind: str, rank: int = 2) -> Any:
        import openvino

        node = self.ops.parameter(openvino.PartialShape([-1] * rank), getattr(openvino.Type, kind), name=name)
        node.output(0).get_tensor().set_names({name})
        self.parameters.append(node)
        return node

    def _int(self, value: int) -> Any:
        import numpy as np

        return self.ops.constant(np.int64(value))

    def _ints(self, *values: int) -> Any:
        import numpy as np

        return self.ops.constant(np.array(values, np.int64))

    def _causal(self, mask: Any) -> Any:
        """[batch, 1, tokens, held]: 0 where a token may look, the smallest number elsewhere."""
        import numpy as np

        ops = self.ops
        held = ops.gather(ops.shape_of(mask, "i64"), self._int(1), self._int(0))
        new = ops.gather(ops.shape_of(self.ids, "i64"), self._int(1), self._int(0))
        keys = ops.unsqueeze(ops.range(self._int(0), held, self._int(1), "i64"), self._ints(0))
        queries = ops.range(ops.subtract(held, new), held, self._int(1), "i64")
        causal = ops.less_equal(keys, ops.unsqueeze(queries, self._ints(1)))
        given = ops.unsqueeze(ops.not_equal(mask, self._int(0)), self._ints(1, 2))
        seen = ops.logical_and(ops.unsqueeze(causal, self._ints(0, 1)), given)
        least = np.float32(np.finfo(np.float32).min)
        return ops.select(seen, ops.constant(np.float32(0)), ops.constant(least))

    def embed(self) -> Any:
        """[batch, tokens, hidden]."""
        table = self.weights.matrix("model.embed_tokens.weight")
        return self.ops.gather(table, self.ops.convert(self.ids, "i32"), self._int(0))

    def norm(self, x: Any, name: str) -> Any:
        """RMSNorm (Zhang and Sennrich 2019) over the last axis."""
        import numpy as np

        ops = self.ops
        mean = ops.reduce_mean(ops.power(x, ops.constant(np.float32(2))), self._ints(-1), True)
        root = ops.sqrt(ops.add(mean, ops.constant(np.float32(self.decoder.eps))))
        scaled = ops.multiply(x, ops.divide(ops.constant(np.float32(1)), root))
        return ops.multiply(self.weights.vector(name), scaled)

    def linear(self, x: Any, name: str) -> Any:
        """``x`` times the transposed matrix, plus the bias where one is stored."""
        product = self.ops.matmul(x, self.weights.matrix(f"{name}.weight"), False, True)
        if self.weights.has(f"{name}.bias"):
            product = self.ops.add(product, self.weights.vector(f"{name}.bias"))
        return product

    def layer(self, number: int, x: Any) -> Any:
        """One block: attention and gated feed-forward, each on a normed copy, added to the stream."""
        ops, at = self.ops, f"model.layers.{number}"
        x = ops.add(x, self._attention(number, self.norm(x, f"{at}.input_layernorm.weight")))
        normed = self.norm(x, f"{at}.post_attention_layernorm.weight")
        gate = self.linear(normed, f"{at}.mlp.gate_proj")
        gate = ops.swish(gate) if self.decoder.activation == "swish" else ops.gelu(gate, "TANH")
        inner = ops.multiply(gate, self.linear(normed, f"{at}.mlp.up_proj"))
        return ops.add(x, self.linear(inner, f"{at}.mlp.down_proj"))

    def _attention(self, number: int, x: Any) -> Any:
        ops, decoder, at = self.ops, self.decoder, f"model.layers.{number}.self_attn"
        query = self._rotate(self._heads(x, f"{at}.q", decoder.heads))
        key = self._rotate(self._heads(x, f"{at}.k", decoder.kv_heads))
        value = self._heads(x, f"{at}.v", decoder.kv_heads)
        key, value = self._remember(number, "key", key), self._remember(number, "value", value)
        found = ops.scaled_dot_product_attention(query, self._repeat(key), self._repeat(value), self.mask)
        rows = ops.transpose(found, self._ints(0, 2, 1, 3))
        flat = ops.reshape(rows, self._ints(0, 0, decoder.heads * decoder.head_dim), True)
        return self.linear(flat, f"{at}.o_proj")

    def _heads(self, x: Any, name: str, heads: int) -> Any:
        """[batch, heads, tokens, head_dim], normed per head where the model does that (Qwen3)."""
        ops = self.ops
        split = ops.reshape(self.linear(x, f"{name}_proj"), self._ints(0, 0, heads, self.decoder.head_dim), True)
        if self.weights.has(f"{name}_norm.weight"):
            split = self.norm(split, f"{name}_norm.weight")
        return ops.transpose(split, self._ints(0, 2, 1, 3))

    def _rotate(self, x: Any) -> Any:
        """Rotary embedding with the halves of a head as pairs."""
        import numpy as np

        ops, half = self.ops, self.decoder.head_dim // 2
        axis, step = self._ints(-1), self._ints(1)
        first = ops.slice(x, self._ints(0), self._ints(half), step, axis)
        second = ops.slice(x, self._ints(half), self._ints(2 * half), step, axis)
        turned = ops.concat([ops.multiply(second, ops.constant(np.float32(-1))), first], -1)
        return ops.add(ops.multiply(x, self.cos), ops.multiply(turned, self.sin))

    def _remember(self, number: int, part: str, new: Any) -> Any:
        """Appends to a state and returns all of it, [batch, kv_heads, held, head_dim]."""
        import openvino
        from openvino.op.util import Variable, VariableInfo

        ops, decoder = self.ops, self.decoder
        info = VariableInfo()
        info.data_shape = openvino.PartialShape([-1, decoder.kv_heads, -1, decoder.head_dim])
        info.data_type = openvino.Type.f32
        info.variable_id = f"past_key_values.{number}.{part}present.{number}.{part}"
        variable = Variable(info)
        read = ops.read_value(self.empty, variable)
        held = ops.concat([ops.gather(read, self.beam, self._int(0)), new], 2)
        self.sinks.append(ops.assign(held, variable))
        return held

    def _repeat(self, x: Any) -> Any:
        """[batch, heads, held, head_dim] from as many as there are key heads."""
        ops, decoder = self.ops, self.decoder
        groups = decoder.heads // decoder.kv_heads
        if groups == 1:
            return x
        wide = ops.unsqueeze(x, self._ints(2))
        shape = ops.shape_of(x, "i64")
        batch, held = (ops.gather(shape, self._ints(axis), self._int(0)) for axis in (0, 2))
        dims = [batch, self._ints(decoder.kv_heads), self._ints(groups), held, self._ints(decoder.head_dim)]
        wide = ops.broadcast(wide, ops.concat(dims, 0), broadcast_spec="BIDIRECTIONAL")
        return ops.reshape(wide, self._ints(0, decoder.heads, -1, decoder.head_dim), True)
