"""What the engine asks of a forward pass, whatever computes it.

An executor holds the model and the cache of a fixed number of *slots*. A slot is one sequence of
tokens whose keys and values (or recurrent states) are kept; how they are laid out (a contiguous row,
pages, llama.cpp's cells) is the executor's own business. The engine counts tokens in blocks and never
sees the layout. One thread calls an executor.

One step computes a ragged batch: every row adds tokens at the end of one slot. Prefill, chunked
prefill, decoding and drafts are rows that differ only in how many tokens they bring and for how many
of them logits are asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an executor can do and how much it holds. What it cannot do becomes a verdict's reason."""

    vocab_size: int  # width of the logits
    context: int  # tokens of one slot at most
    slots: int  # sequences held at once
    cache_tokens: int  # tokens over all slots at most
    block_size: int = 16  # tokens the engine counts together
    step_tokens: int = 2048  # tokens of one step at most
    mixed_tokens: int = 128  # prompt tokens worth computing beside sequences that decode; they wait for them
    shares_prefix: bool = True  # copy_prefix works
    rolls_back: bool = True  # roll_back to any length, or to what `retained` answers
    encoder_decoder: bool = False  # `encode` must be called before a slot's first step
    adapters: bool = False  # `load_adapter` works and rows may name one
    weights_bytes: int = 0
    notes: tuple[str, ...] = ()  # what is missing or approximate, for people


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """What an executor is opened with; None leaves the choice to it."""

    slots: int = 16
    context: int | None = None  # tokens of one sequence; None takes the model's own, as far as memory allows
    cache_tokens: int | None = None  # tokens over all sequences
    step_tokens: int | None = None
    threads: int | None = None  # None: every core of this process
    kv_dtype: str | None = None  # of the cache: float32, bfloat16, float16, int8


@dataclass(slots=True)
class Row:
    """Tokens appended to one slot in one step.

    ``tokens`` [n] are computed at positions ``start`` .. ``start + n - 1``; ``start`` equals the tokens
    the slot holds already. Logits are returned for the last ``logits`` of them (0 while a prompt is
    incomplete, 1 for decoding, 1 + drafts when drafts are verified, all for prompt probabilities).
    """

    slot: int
    tokens: Sequence[int]
    start: int
    logits: int = 1
    adapter: str | None = None


@dataclass(slots=True)
class Step:
    """Rows of one forward pass; no slot occurs twice."""

    rows: list[Row] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(len(row.tokens) for row in self.rows)

    @property
    def num_logits(self) -> int:
        """Rows of logits asked."""
        return sum(row.logits for row in self.rows)


class Executor(Protocol):
    """A model with its cache, driven by one thread. Errors are ``TurnoutError`` with a code."""

    capabilities: Capabilities

    def execute(self, step: Step) -> Any:
        """Logits, float32 [step.num_logits, vocab_size], rows in the order of ``step.rows``; a numpy
        array, or a torch tensor where the model is not on the CPU. The array is the caller's until the
        next call. When it raises, the slots of the step hold what they held before or must be freed.
        """
        ...

    def encode(self, slot: int, tokens: Sequence[int]) -> None:
        """Encoder pass of an encoder-decoder model; the slot keeps the cross-attention's keys and values
        until it is freed. Only when ``capabilities.encoder_decoder``."""
        ...

    def retained(self, slot: int, length: int) -> int:
        """Largest number of tokens <= ``length`` to which the slot can be cut or from which it can be
        copied: ``length`` itself for attention, the last kept snapshot for recurrent states, perhaps 0."""
        ...

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """``target`` (empty) then holds the first ``length`` tokens of ``source``; ``length`` is an
        answer of ``retained(source, ...)``. ``source`` may be in use."""
        ...

    def roll_back(self, slot: int, length: int) -> None:
        """Cuts the slot to its first ``length`` tokens, an answer of ``retained(slot, ...)``."""
        ...

    def free(self, slot: int) -> None:
        """Empties the slot; free slots may be freed again."""
        ...

    def load_adapter(self, name: str, path: str) -> None:
        """Makes a LoRA adapter usable by rows that name it. Raises ``LoadError`` (``adapter.base_mismatch``
        ...) and changes nothing when it does not fit the base."""
        ...

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; the engine calls it only when no slot uses it."""
        ...

    def close(self) -> None:
        """Frees everything; may be called twice."""
        ...


class Vocabulary(Protocol):
    """Text to token ids and back, the same for every executor of a model."""

    eos_ids: frozenset[int]
    bos_id: int | None
    size: int

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text. ``special`` adds what the tokenizer adds around a prompt (a start token)."""
        ...

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; half a character decodes to U+FFFD."""
        ...

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token adds to a text; empty for a special token."""
        ...

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token rather than text."""
        ...
