"""Weights of safetensors files as OpenVINO constants, quantized while they are read.

``q8``: one scale per output channel, symmetric. ``q4``: one scale per 64 inputs of a channel, symmetric.
Both are written as Constant, Convert, Multiply: the form in which the CPU plugin keeps weights compressed
and multiplies whole numbers where activations are quantized too (``DYNAMIC_QUANTIZATION_GROUP_SIZE``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from turnout.errors import LoadError
from turnout.package.facts import TensorInfo

STORED = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
GROUP = 64  # inputs that share a scale in q4
CHUNK = 1 << 24  # elements that are quantized at a time


@dataclass(slots=True)
class Weights:
    """Tensors by name, read through ``root``. ``quantize`` is '', q8 or q4."""

    root: str
    tensors: dict[str, TensorInfo]
    quantize: str = ""
    _nodes: dict[str, Any] = field(default_factory=dict)
    _files: dict[str, Any] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        """Whether a tensor of this name is stored."""
        return name in self.tensors

    def vector(self, name: str) -> Any:
        """A bias or a norm's scale as a float32 constant."""
        import numpy as np
        from openvino import opset13 as ops

        if name not in self._nodes:
            self._nodes[name] = ops.constant(np.ascontiguousarray(widened(self._stored(name))))
        return self._nodes[name]

    def matrix(self, name: str) -> Any:
        """A matrix [outputs, inputs] as a node that yields float32; the same node for the same name."""
        if name not in self._nodes:
            stored = self._stored(name)
            if self.quantize == "q4" and stored.shape[1] % GROUP == 0 and "embed" not in name and "head" not in name:
                self._nodes[name] = _q4(stored)
            elif self.quantize:  # the table and the head lose most at 4 bits
                self._nodes[name] = _q8(stored)
            else:
                self._nodes[name] = _plain(stored, STORED[self.tensors[name].dtype])
        return self._nodes[name]

    def finish(self) -> None:
        """Raises ``LoadError`` when a stored tensor was not used: the graph would compute something else."""
        left = sorted(name for name in self.tensors if name not in self._nodes and not name.endswith("inv_freq"))
        if left:
            raise LoadError(
                f"{len(left)} tensors have no place in the graph, first `{left[0]}`", code="tensor.unexpected"
            )

    def _stored(self, name: str) -> Any:
        """The tensor as in the file; bfloat16 as uint16."""
        import numpy as np

        info = self.tensors.get(name)
        if info is None:
            raise LoadError(f"the tensor `{name}` is in no file", code="tensor.missing")
        if info.dtype not in STORED:
            raise LoadError(f"`{name}` is stored as {info.dtype}", code="tensor.dtype_unsupported")
        if info.file not in self._files:
            self._files[info.file] = np.memmap(f"{self.root}/{info.file}", np.uint8, "r")
        data = self._files[info.file][info.offset : info.offset + info.nbytes]
        kind = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[info.dtype]
        return data.view(kind).reshape(info.shape)


def widened(stored: Any) -> Any:
    """float32 of float32, float16, or of bfloat16 as uint16."""
    import numpy as np

    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float32)


def _plain(stored: Any, kind: str) -> Any:
    import numpy as np
    import openvino
    from openvino import opset13 as ops

    element = getattr(openvino.Type, kind)
    tensor = openvino.Tensor(np.ascontiguousarray(stored), openvino.Shape(list(stored.shape)), element)
    node = ops.constant(tensor, shared_memory=True)
    return node if kind == "f32" else ops.convert(node, "f32")


def _q8(stored: Any) -> Any:
    import numpy as np
    from openvino import opset13 as ops

    steps, scales = np.empty(stored.shape, np.int8), np.empty((stored.shape[0], 1), np.float32)
    rows = max(1, CHUNK // stored.shape[1])
    for first in range(0, stored.shape[0], rows):
        values = widened(stored[first : first + rows])
        scale = np.maximum(np.abs(values).max(1, keepdims=True), 1e-12) / 127
        steps[first : first + rows] = np.rint(values / scale)
        scales[first : first + rows] = scale
    whole = ops.convert(ops.constant(steps), "f32")
    return ops.multiply(whole, ops.constant(scales))


def _q4(stored: Any) -> Any:
    """Two steps a byte, the first in the low half, as OpenVINO packs i4."""
    import numpy as np
    import openvino
    from openvino import opset13 as ops

    outputs, inputs = stored.shape
    packed = np.empty((outputs, inputs // 2), np.uint8)
    scales = np.empty((outputs, inputs // GROUP, 1), np.float16)
    rows = max(1, CHUNK // inputs)
    for first in range(0, outputs, rows):
        groups = widened(stored[first : first + rows]).reshape(-1, inputs // GROUP, GROUP)
        # The largest value sits at -8, so that all sixteen steps are used.
        peak = np.take_along_axis(groups, np.abs(groups).argmax(2, keepdims=True), 2)
        scale = (np.where(np.abs(peak) < 1e-7, 1e-7, peak) / -8).astype(np.float16)
        steps = np.clip(np.rint(groups / scale.astype(np.float32)), -8, 7).astype(np.int8).reshape(-1, inputs)
        packed[first : first + rows] = (steps[:, 0::2] & 15).astype(np.uint8) | (steps[:, 1::2].astype(np.uint8) << 4)
        scales[first : first + rows] = scale
    shape = [outputs, inputs // GROUP, GROUP]
    tensor = openvino.Tensor(packed.reshape(-1), openvino.Shape(shape), openvino.Type.i4)
    whole = ops.convert(ops.constant(tensor, shared_memory=False), "f32")
    scaled = ops.multiply(whole, ops.convert(ops.constant(scales), "f32"))
    return ops.reshape(scaled, ops.constant(np.array([outputs, inputs], np.int64)), False)


def compress(model: Any, quantize: str) -> int:
    """Quantizes the constant float matrices of a graph's products in place; returns how many. Only those
    laid out as [outputs, inputs] are: the others are left as they are."""
    done = {}
    for op in model.get_ordered_ops():
        if op.get_type_name() != "MatMul" or not op.get_attributes().get("transpose_b"):
            continue
        source = op.input_value(1).get_node()
        if source.get_type_name() == "Convert":
            source = source.input_value(0).get_node()
        if source.get_type_name() != "Constant" or len(source.get_output_shape(0)) != 2:
            continue
        name = source.get_friendly_name()
        if name not in done:
            stored = source.data
            if stored.dtype.kind != "f":
                continue
            small = quantize == "q4" and stored.shape[1] % GROUP == 0
            done[name] = _q4(stored) if small else _q8(stored)
        op.input(1).replace_source_output(done[name].output(0))
    model.validate_nodes_and_infer_types()
    return len(done)
