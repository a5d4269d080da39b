"""Memory estimates and admission. Pure: free memory comes in as an argument."""

from __future__ import annotations

from typing import Any

from turnout.backends.base import Admission, Estimates
from turnout.config import WORKER
from turnout.package.facts import Architecture, Artifact, ArtifactKind
from turnout.types import Task, count_of

DEFAULT_CONTEXT = 4096
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
CACHING = frozenset({Task.TEXT_GENERATION, Task.CHAT, Task.IMAGE_TEXT_TO_TEXT})
# Resident memory of a worker beyond weights and cache, after one request on a small model: measured
# (transformers 358, sentence-transformers 422, onnxruntime 100 to 156, openvino 165, llamacpp 104 MiB;
# the others by their imports) and rounded up.
RUNTIME_BYTES = {
    "transformers": 450 << 20,
    "sentence-transformers": 500 << 20,
    "diffusers": 500 << 20,
    "openvino": 200 << 20,
    "openvino-genai": 250 << 20,
    "onnxruntime": 170 << 20,
    "onnxruntime-genai": 180 << 20,
    "llamacpp": 130 << 20,
    "ctranslate2": 130 << 20,
    "tabular": 250 << 20,
}


def estimate(artifact: Artifact, task: str, backend: str, options: dict[str, Any]) -> Estimates:
    """Bytes of weights, cache and peak for one case.

    Cache per token is 2 (keys, values) x layers x key-value heads x head width x bytes of the
    computing type. Weights are the stored tensors, or the files where tensors are not listed.
    """
    weights = artifact.tensors.total_bytes or artifact.size_bytes
    if artifact.kind is ArtifactKind.GGUF and backend == "transformers":
        weights = artifact.tensors.param_count * DTYPE_BYTES.get(str(options.get("dtype") or "float32"), 4)
    context, per_token = 0, 0
    if task in CACHING and artifact.architecture is not None:
        per_token = kv_bytes_per_token(artifact.architecture)
        limit = artifact.architecture.dims.get("max_position_embeddings") or DEFAULT_CONTEXT
        # A value that counts nothing is refused as a requirement; here the default stands in for it.
        context = count_of(options.get("context")) or min(limit, DEFAULT_CONTEXT)
    peak = weights + per_token * context + RUNTIME_BYTES.get(backend, 300 << 20)
    return Estimates(weights, per_token, context, peak, round(weights / 1e9 + 0.5, 2))


def kv_bytes_per_token(architecture: Architecture, element_bytes: int = 2) -> int:
    """Bytes that one token adds to a key-value cache."""
    dims = architecture.dims
    heads = dims.get("num_key_value_heads") or dims.get("num_attention_heads") or 0
    width = dims.get("head_dim") or (dims.get("hidden_size", 0) // max(1, dims.get("num_attention_heads", 1)))
    return 2 * dims.get("num_hidden_layers", 0) * heads * width * element_bytes


def admit(estimates: Estimates, free_bytes: int) -> tuple[Admission, str]:
    """Whether ``estimates.peak`` fits what is free, and a line with the numbers."""
    allowed = int(free_bytes * WORKER.memory_share)
    detail = (
        f"weights {_mib(estimates.weights)}, cache {_mib(estimates.kv_per_token * estimates.context)} "
        f"({estimates.context} tokens), peak {_mib(estimates.peak)}, free {_mib(free_bytes)}"
    )
    if estimates.peak > allowed:
        return Admission.INSUFFICIENT_MEMORY, detail
    return Admission.ADMITTED, detail


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.0f} MiB"
