"""How llama.cpp is opened as an executor: every option with its default, checked by name."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from turnout.errors import UsageError
from turnout.types import count_of

MAX_SLOTS = 256  # LLAMA_MAX_SEQ
# ggml_type of what a cache may hold.
CACHE_TYPES = {
    "f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q5_1": 7, "q5_0": 6, "q4_1": 3, "q4_0": 2, "iq4_nl": 20,
}  # fmt: skip
_ENGINE_TYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16", "int8": "q8_0"}
FLASH = {"auto": -1, "off": 0, "on": 1}


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Options of the llama.cpp executor; 0 leaves a number to the executor."""

    slots: int = 16  # sequences at once, at most ``MAX_SLOTS``
    context: int = 0  # tokens of one sequence; 0: what the model was trained for, within the cache
    cache_tokens: int = 4096  # cells that all sequences share
    step_tokens: int = 2048  # tokens of one step (n_batch)
    chunk_tokens: int = 512  # of them computed together (n_ubatch): bounds the working memory
    outputs: int = 0  # rows of logits computed together; 0: 8 a slot, at least 64
    threads: int = 0  # for one token; 0: the processors this process may use
    threads_batch: int = 0  # for more tokens; 0: as ``threads``
    cache_type: str = "f16"  # of keys and values
    flash: str = "auto"  # flash attention
    unified: bool = True  # sequences share one buffer, so that shared prefixes are held once
    window_full: bool = True  # layers with a sliding window keep every token, so that any prefix can be shared
    snapshots: int = 4  # kept states of each slot, for models with recurrent layers
    mmap: bool = True
    repack: bool = True  # weights laid out anew for the processor, at the price of a second copy of some
    device: str = "cpu"
    library: str = "auto"  # llama_cpp, xllamacpp

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> ExecutorOptions:
        """Options from names and values (numbers, booleans, or their text); None leaves the default. The
        engine's own names are known too: ``kv_dtype`` is the cache's type, ``quantize`` is refused.

        Raises ``UsageError`` for an unknown name or a value that is none of the option's.
        """
        given = _own_names({name: value for name, value in given.items() if value is not None})
        kinds = {field.name: type(field.default) for field in fields(cls)}
        unknown = sorted(set(given) - set(kinds))
        if unknown:
            raise UsageError(f"llama.cpp's executor has no option `{unknown[0]}`; it has {', '.join(kinds)}")
        return replace(cls(), **{name: _value(name, value, kinds[name]) for name, value in given.items()}).checked()

    def checked(self) -> ExecutorOptions:
        """These options; raises ``UsageError`` for one out of its range."""
        for name, known in (("cache_type", CACHE_TYPES), ("flash", FLASH)):
            if getattr(self, name) not in known:
                raise UsageError(f"option `{name}` is `{getattr(self, name)}`; known: {', '.join(known)}")
        for name in ("slots", "cache_tokens", "step_tokens", "chunk_tokens"):
            if getattr(self, name) < 1:
                raise UsageError(f"option `{name}` is {getattr(self, name)}; at least 1 is needed")
        for name in ("context", "cache_tokens", "step_tokens", "chunk_tokens", "outputs", "threads", "threads_batch"):
            if not 0 <= getattr(self, name) < 1 << 31:
                raise UsageError(f"option `{name}` is {getattr(self, name)}, which llama.cpp cannot count")
        if self.slots > MAX_SLOTS:
            raise UsageError(f"option `slots` is {self.slots}; llama.cpp holds {MAX_SLOTS} sequences at most")
        return self

    @property
    def same_bits(self) -> bool:
        """Whether a sequence's logits are the same bits whatever else is computed with it.

        Measured for quantized weights (Q4_0, Q4_1, Q5_0, Q8_0) on the CPU. For f16 llama.cpp has attention
        kernels for one row and for tiles of rows; in a unified buffer a sequence's cells lie in the order
        in which cells were free, and attention adds in that order.
        """
        return not self.unified and self.cache_type in ("bf16", "q8_0") and self.flash != "off"

    @property
    def thread_counts(self) -> tuple[int, int]:
        """Threads for one token and for more."""
        single = self.threads or len(os.sched_getaffinity(0))
        return single, self.threads_batch or single


def _own_names(given: dict[str, Any]) -> dict[str, Any]:
    if given.pop("quantize", None):
        raise UsageError("option `quantize`: the types of a GGUF file are fixed when it is written")
    dtype = given.pop("kv_dtype", None)
    if dtype is not None:
        if dtype not in _ENGINE_TYPES:
            raise UsageError(f"option `kv_dtype` is `{dtype}`; known: {', '.join(_ENGINE_TYPES)}")
        given.setdefault("cache_type", _ENGINE_TYPES[dtype])
    return given


def _value(name: str, value: Any, kind: type) -> Any:
    if kind is bool:
        states = {"true": True, "1": True, "on": True, "false": False, "0": False, "off": False}
        found: Any = states.get(str(value).lower())
    elif kind is int:
        found = 0 if str(value) == "0" else count_of(value)
    else:
        found = str(value)
    if found is None:
        raise UsageError(f"option `{name}` is `{value}`, which is no {'switch' if kind is bool else 'whole number'}")
    return found
