"""Every default, once. CLI, server and Python read it here."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class ReadLimits:
    """Bounds on what inspection reads from a package it does not trust."""

    json_bytes: int = 100 * MIB  # where a reader expects bulk data (boosters, vocabularies)
    json_config_bytes: int = 32 * MIB  # configurations, manifests, indexes
    json_nodes: int = 1_000_000  # brackets and commas: what a parsed document costs in memory
    json_depth: int = 100
    files: int = 20_000
    directory_depth: int = 12
    safetensors_header: int = 48 * MIB  # the library takes 100 MB; 125,000 tensors need 16
    gguf_string: int = 16 * MIB
    gguf_keys: int = 1 << 16
    tensors: int = 1 << 20
    protobuf_bytes: int = 512 * MIB
    xml_bytes: int = 256 * MIB
    pickle_bytes: int = 64 * MIB
    zip_entries: int = 100_000
    template_bytes: int = MIB // 8  # real ones have up to 30 KB; compiling takes 10 s per MiB


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Bounds on a worker process: seconds per operation and resident memory."""

    assess_s: float = 120.0
    load_s: float = 900.0
    run_s: float = 3600.0
    probe_s: float = 300.0
    dry_load_bytes: int = 6 * GIB
    memory_share: float = 0.92
    stop_s: float = 3.0


READ = ReadLimits()
WORKER = WorkerLimits()


def data_dir() -> Path:
    """User's data directory (``TURNOUT_DATA`` overrides): ledger and pulled packages."""
    override = os.environ.get("TURNOUT_DATA")
    if override:
        return Path(override)
    from platformdirs import user_data_path

    return user_data_path("turnout", appauthor=False)


def cache_dir() -> Path:
    """User's cache directory (``TURNOUT_CACHE`` overrides): assembled and converted files."""
    override = os.environ.get("TURNOUT_CACHE")
    if override:
        return Path(override)
    from platformdirs import user_cache_path

    return user_cache_path("turnout", appauthor=False)


# Options of a case, by name: what each decides. They are part of a case's identity.
OPTIONS = {
    "allow_dequantize": "expand quantized weights to floats where the backend cannot keep them",
    "allow_unexpected": "load although the file holds tensors the model does not use",
    "base": "path of the base model of an adapter",
    "chat_template": "path of a Jinja chat template to use instead of the package's",
    "context": "tokens of context to reserve",
    "dtype": "element type to compute in: float32, bfloat16, float16",
    "history": "length of the history a forecast will be given",
    "image_layout": "NCHW or NHWC, where the graph does not tell",
    "image_mean": "per-channel mean, comma separated, where no processor is stored",
    "image_size": "height and width the model takes, where no processor is stored",
    "image_std": "per-channel standard deviation, comma separated, where no processor is stored",
    "labels": "path of a file with one class name a line (or a JSON list)",
    "materialise": "copy or hard-link the package's linked files so that a strict loader accepts them",
    "max_length": "tokens after which an input text is cut",
    "normalize": "scale embeddings to length 1",
    "pooling": "mean, cls, max, lasttoken, weightedmean or mean_sqrt_len_tokens",
    "quantize": "weights are converted while they load: q8, q6, q5, q4, q3 or auto",
    "threshold": "score above which something counts as found",
    "tokenizer": "path of a tokenizer.json, or of a directory that holds one",
    "trust_remote_code": "run the Python code that came with the package",
    "variant": "weights variant of a diffusers bundle, for instance fp16",
}
