"""The paged-attention form of a decoder graph: transformation, rows of the head, what it must satisfy.

``SDPAToPagedAttention`` turns a stateful decoder (ReadValue, ScaledDotProductAttention, Assign) into one
that takes a flat batch of tokens with page tables and gets its cache from outside. It looks at the shape
of the graph only: a mask that is not plainly causal is dropped unless the pass knows it, so windows are
compared with the configuration and everything left over is a reason to stay with the stateful form.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from turnout.backends.openvino_reading import first_line

LOGITS = "logits"
ASKED_ROWS = "asked_rows"  # the input that `gather_rows` adds: which tokens get logits
FED = frozenset(
    {
        "input_ids",
        "position_ids",
        "past_lens",
        "subsequence_begins",
        "block_indices",
        "block_indices_begins",
        "max_context_len",
    }
)
# Between the head's matrix and the result: what keeps every row to itself.
ROWWISE = frozenset({"Convert", "Add", "Subtract", "Multiply", "Divide", "Tanh", "Squeeze", "Unsqueeze"})
# Families whose every layer has the window, where the configuration does not list the layers.
WINDOWED = frozenset({"mistral", "mixtral", "phi3", "starcoder2"})
WINDOW_INPUT = 10  # of PagedAttentionExtension (its specification, `sliding_window`)


class Unpaged(Exception):
    """Why a graph has no paged form that computes the same."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def paged_form(model: Any, windows: list[int] | None) -> bool:
    """Transforms ``model`` (a stateful decoder) in place; afterwards it takes the inputs ``FED``, caches
    ``key_cache.N`` and ``value_cache.N``, and, when the answer is True, ``ASKED_ROWS``.

    ``windows`` states each layer's sliding window (0: none), None when nobody knows. Raises ``Unpaged``;
    the model is then spoilt.
    """
    from openvino._offline_transformations import paged_attention_transformation

    try:
        paged_attention_transformation(model)
    except Exception as error:  # the library raises RuntimeError and others
        raise Unpaged(first_line(error)) from error
    left = [op.get_friendly_name() for op in model.get_ops() if op.get_type_name() in ("ReadValue", "Assign")]
    if left:
        raise Unpaged(f"`{left[0]}` and {len(left) - 1} other nodes still keep a state of their own")
    names = [name for port in model.inputs for name in port.get_names()]
    strange = [name for name in names if name not in FED and not is_cache(name)]
    if strange:
        raise Unpaged("its paged form asks for " + ", ".join(f"`{name}`" for name in strange))
    found = [window_of(op) for op in model.get_ordered_ops() if op.get_type_name() == "PagedAttentionExtension"]
    if windows is not None and found != windows:
        raise Unpaged(f"its paged form has the windows {found}, the configuration says {windows}")
    return gather_rows(model)


def is_cache(name: str) -> bool:
    """Whether an input is a layer's cache."""
    return name.startswith(("key_cache.", "value_cache."))


def window_of(op: Any) -> int | None:
    """Sliding window of a paged attention (0: none; None when it is not a constant)."""
    source = op.input_value(WINDOW_INPUT).get_node()
    return int(source.data.reshape(-1)[0]) if source.get_type_name() == "Constant" else None


def gather_rows(model: Any, axis: int | None = None) -> bool:
    """Puts a selection of tokens in front of the head, so that only asked rows meet the vocabulary. Tokens
    lie along ``axis``, else along the one dynamic axis while the others are 1.
    False when the head is not a matrix followed by row-wise operations; the model is then as before."""
    import openvino
    from openvino import opset13 as ops

    head = _head(model.output(LOGITS).get_node())
    if head is None:
        return False
    hidden = head.input_value(0)
    shape = hidden.get_partial_shape()
    if axis is None:
        axis = next((a for a in range(len(shape) - 1) if shape[a].is_dynamic), None)
        others = [shape[a] for a in range(len(shape) - 1) if a != axis]
        if axis is None or any(dim.is_dynamic or dim.get_length() != 1 for dim in others):
            return False
    asked = ops.parameter(openvino.PartialShape([-1]), openvino.Type.i32, name=ASKED_ROWS)
    asked.output(0).get_tensor().set_names({ASKED_ROWS})
    head.input(0).replace_source_output(ops.gather(hidden, asked, axis).output(0))
    model.add_parameters([asked])
    model.validate_nodes_and_infer_types()
    return True


def _head(node: Any) -> Any:
    """The last matrix product above a result, None when something else comes first."""
    while True:
        sources = [node.input_value(i).get_node() for i in range(node.get_input_size())]
        moving = [source for source in sources if not _is_weight(source)]
        if len(moving) != 1:
            return None
        node = moving[0]
        if node.get_type_name() == "MatMul":
            return node if not _is_weight(node.input_value(0).get_node()) else None
        if node.get_type_name() not in ROWWISE:
            return None


def _is_weight(node: Any) -> bool:
    """Whether a node depends on constants only."""
    waiting, depth = [node], 0
    while waiting:
        node = waiting.pop()
        depth += 1
        if node.get_type_name() != "Constant" and (not node.get_input_size() or depth > 16):
            return False
        waiting += [node.input_value(i).get_node() for i in range(node.get_input_size())]
    return True


def caches(compiled: Any) -> Iterator[tuple[str, Any, list[int]]]:
    """Name, element type and shape of one page, of every cache of a compiled paged model."""
    for port in compiled.inputs:
        for name in port.get_names():
            if is_cache(name):
                shape = port.get_partial_shape()
                yield name, port.get_element_type(), [shape[a].get_length() for a in range(1, len(shape))]


def weights_bytes(model: Any) -> int:
    """Bytes of a model's constants."""
    return sum(int(op.get_byte_size()) for op in model.get_ops() if op.get_type_name() == "Constant")


def windows_of(config: dict[str, Any], layers: int, context: int) -> list[int]:
    """Sliding window of each layer (0: none) as a Transformers configuration states it; windows that
    ``context`` tokens never fill count as none. Raises ``Unpaged`` when it names a window but not for
    which layers."""
    window = config.get("sliding_window") or config.get("attention_chunk_size") or 0
    if not isinstance(window, int) or not 0 < window < context or config.get("use_sliding_window") is False:
        return [0] * layers
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and len(kinds) == layers:
        return [0 if kind == "full_attention" else window for kind in kinds]
    if config.get("model_type") in WINDOWED:
        return [window] * layers
    raise Unpaged(f"its configuration has a window of {window} tokens and does not say for which layers")
