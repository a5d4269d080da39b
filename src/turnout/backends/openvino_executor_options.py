"""What an OpenVINO executor is opened with, and what its rows must satisfy."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, is_dataclass
from typing import Any

from turnout.backends.openvino import DTYPES
from turnout.engine.executor import Capabilities, Row
from turnout.errors import InputError, LoadError, UsageError
from turnout.types import count_of

KV_DTYPES = {**DTYPES, "int8": "u8"}
ACTIVATIONS = ("float", "int8")
QUANTIZATIONS = ("q8", "q4", "auto")
COUNTS = ("group", "slots", "context", "cache_tokens", "step_tokens", "threads")


@dataclass(frozen=True)
class Settings:
    """How an executor computes and how much it holds; 0 and '' leave the choice to it."""

    dtype: str = "float32"
    kv_dtype: str = ""  # '': as dtype; int8 quantizes each token's keys and values
    activations: str = ""  # float, or int8: quantized as they come, where weights are; '' int8 with `quantize`
    group: int = 0  # of quantized activations, in elements
    quantize: str = ""  # weights of a Hugging Face directory
    slots: int = 16
    context: int = 0  # 0: the model's own
    cache_tokens: int = 0  # 0: as memory allows
    step_tokens: int = 2048
    threads: int = 0  # 0: the cores that the process may use

    @classmethod
    def of(cls, *given: Any) -> Settings:
        """From mappings or ``ExecutorOptions``, later ones first; other options are others'. Raises
        ``UsageError`` (``option.unsupported``) for a value that is none."""
        options: dict[str, Any] = {}
        for more in given:
            named = asdict(more) if is_dataclass(more) and not isinstance(more, type) else dict(more or {})
            options |= {name: value for name, value in named.items() if value not in (None, "", 0, "0")}
        choices: Mapping[str, Any] = {
            "dtype": DTYPES,
            "kv_dtype": KV_DTYPES,
            "activations": ACTIVATIONS,
            "quantize": QUANTIZATIONS,
        }
        values: dict[str, Any] = {}
        for name, allowed in choices.items():
            if name in options:
                values[name] = str(options[name])
                if values[name] not in allowed:
                    raise UsageError(
                        f"option `{name}={values[name]}`: the OpenVINO executor takes {', '.join(allowed)}"
                    )
        for name in COUNTS:
            if name in options:
                count = count_of(options[name])
                if count is None:
                    raise UsageError(f"option `{name}={options[name]}` is no whole number of at least 1")
                values[name] = count
        if values.get("quantize") == "auto":
            values["quantize"] = "q8"
        return cls(**values)

    def properties(self) -> dict[str, Any]:
        """The library's properties. Keys are quantized by token: by channel, a token's numbers would change
        with those after it in its page, also once these are cut off."""
        found: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": DTYPES[self.dtype],
            "INFERENCE_NUM_THREADS": self.threads or len(os.sched_getaffinity(0)),
            "KV_CACHE_PRECISION": KV_DTYPES[self.kv_dtype or self.dtype],
            "NUM_STREAMS": 1,
        }
        if self.kv_dtype == "int8":
            found["KEY_CACHE_QUANT_MODE"] = "BY_TOKEN"
        if (self.activations or ("int8" if self.quantize else "float")) == "float":
            found["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = "0"
        elif self.group:
            found["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = str(self.group)
        return found


def check_row(row: Row, held: int, capabilities: Capabilities) -> None:
    """Raises ``InputError`` for a row that breaks the protocol; ``held`` tokens are in its slot."""
    end = row.start + len(row.tokens)
    if not len(row.tokens) or row.start != held or not 0 <= row.logits <= len(row.tokens):
        raise InputError(
            f"slot {row.slot} holds {held} tokens; a row of {len(row.tokens)} tokens at {row.start} with "
            f"{row.logits} logits does not continue it"
        )
    if end > capabilities.context:
        raise InputError(f"slot {row.slot} would hold {end} tokens, its context is {capabilities.context}")
    if row.adapter is not None:
        raise no_adapters()
    if min(row.tokens) < 0 or max(row.tokens) >= capabilities.vocab_size:
        raise InputError(f"token ids go from 0 to {capabilities.vocab_size - 1}", code="tokenizer.id_out_of_range")


def no_adapters() -> LoadError:
    """What an adapter is answered."""
    return LoadError("the OpenVINO executor applies no adapters", hints=["merge it, or use the torch executor"])
