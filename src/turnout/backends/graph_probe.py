"""Smallest real requests of a task over a stored graph, and whether an output is sound.

Shared by the backends that run graphs; knows no model library.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from turnout.package.facts import Artifact, GraphPort
from turnout.tasks.numeric import TableSchema, numpy_dtype
from turnout.types import Request, Sampling, Task

# Sizes tried for axes that the graph leaves open; 512, 576 and 16000 are usual audio windows.
PROBE_SIZES = (1, 2, 8, 16, 64, 512, 576, 16000)
TEXTS = ("A small probe.",)
_TEXT_TASKS = frozenset({Task.EMBEDDINGS, Task.TEXT_CLASSIFICATION, Task.TOKEN_CLASSIFICATION})
_TABLE_TASKS = frozenset({Task.TABULAR_CLASSIFICATION, Task.TABULAR_REGRESSION})
_SEQ2SEQ = frozenset({Task.TEXT2TEXT, Task.TRANSLATION, Task.SUMMARIZATION})


def probe_requests(
    task: str, artifact: Artifact, ports: Sequence[GraphPort], options: dict[str, Any]
) -> Iterator[Request]:
    """Requests to try in turn until one fits; none for tasks without a probe. ``ports`` are the
    graph's inputs."""
    if task == Task.TENSOR:
        for arrays in probe_arrays(ports):
            yield Request(task, {"tensors": arrays})
    elif task in _TEXT_TASKS:
        yield Request(task, {"texts": list(TEXTS)})
    elif task == Task.FILL_MASK:
        for mask in ("[MASK]", "<mask>"):
            yield Request(task, {"texts": [f"A small {mask}."]})
    elif task == Task.RERANK:
        yield Request(task, {"query": "What is a probe?", "documents": list(TEXTS)})
    elif task == Task.QUESTION_ANSWERING:
        yield Request(task, {"question": "What is small?", "context": TEXTS[0]})
    elif task in _SEQ2SEQ:
        yield Request(task, {"text": TEXTS[0]}, Sampling(max_tokens=2))
    elif task == Task.IMAGE_CLASSIFICATION:
        yield Request(task, {"image": _image()})
    elif task == Task.VAD:
        yield Request(task, {"audio": _tone(), "sampling_rate": 16000})
    elif task in _TABLE_TASKS:
        schema = TableSchema.of(artifact, options)
        columns = list(schema.features) or [f"column_{i}" for i in range(schema.count or 1)]
        yield Request(task, {"table": {"columns": columns, "rows": [[0.5] * len(columns)]}})


def probe_arrays(ports: Sequence[GraphPort]) -> Iterator[dict[str, Any]]:
    """Arrays that fit the ports, seeded: small floats, ids 0, true; open axes take one size after
    another. Ports without a rank get none."""
    import numpy as np

    open_axes = any(not isinstance(dim, int) or dim < 0 for port in ports for dim in port.shape or ())
    for size in PROBE_SIZES if open_axes else (1,):
        rng = np.random.default_rng(0)
        arrays = {}
        for port in ports:
            shape = [dim if isinstance(dim, int) and dim >= 0 else size for dim in port.shape or ()]
            if math.prod(shape) > 1 << 26:
                return
            arrays[port.name] = _array(rng, numpy_dtype(port.dtype) or "float32", shape, port.name)
        yield arrays


def _array(rng: Any, dtype: str, shape: list[int], name: str) -> Any:
    import numpy as np

    if dtype == "str":
        return np.full(shape, "a", dtype=object)
    if dtype == "bool" or name == "attention_mask":
        return np.ones(shape, dtype)
    if dtype.startswith("float"):
        return rng.standard_normal(shape).astype(dtype) * np.asarray(0.1, dtype)
    # A sampling rate is the one integer that is no id (Silero's voice activity model calls it sr).
    return np.full(shape, 16000 if name in ("sr", "sampling_rate") else 0, dtype)


def _image() -> Any:
    import numpy as np

    return np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)


def _tone() -> Any:
    import numpy as np

    return (0.1 * np.sin(2 * np.pi * 440 * np.arange(16000) / 16000)).astype(np.float32)


def sound(output: Any) -> bool:
    """Whether no number anywhere in a task's output is NaN; raw scores may be infinite."""
    if is_dataclass(output) and not isinstance(output, type):
        return all(sound(getattr(output, f.name)) for f in fields(output))
    if isinstance(output, dict):
        return all(sound(value) for value in output.values())
    if isinstance(output, (list, tuple)):
        return all(sound(value) for value in output)
    if isinstance(output, float):
        return not math.isnan(output)
    if hasattr(output, "dtype") and output.dtype.kind == "f":
        return not bool((output != output).any())
    return True
