"""Any Transformers language model behind the engine's executor protocol, one row at a time.

The path that is right for everything: recurrent and hybrid families, encoder-decoders, and classes that
compute attention on their own. It runs the library's classes with the library's caches as they are;
``torch_native_executor`` is the faster one for plain decoders.

Snapshots of recurrent states (they cannot be cut) are taken where the engine is likely to return to:

- at the last block boundary in each row of prompt tokens (the row is computed in two passes for it),
  before the prompt's last token, because cached prefixes are whole blocks;
- whenever decoding completes a block;
- before a row that asks for several logits of a few tokens, because drafts may be refused.

A slot keeps ``snapshots`` of them; one too many, and of all but the two newest that goes whose loss opens
the smallest gap.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnout.backends import transformers_models as models
from turnout.backends.torch_native_adapters import ASKED, TRIAL, AdapterLimits, AdapterSet
from turnout.backends.torch_native_executor import context_of, weights_bytes
from turnout.backends.torch_native_rows_probe import Learnt, Method, learn, unsupported
from turnout.backends.torch_native_rows_state import Held, Memory, Snapshot
from turnout.engine.executor import Capabilities, Row, Step
from turnout.errors import InputError, TurnoutError, UsageError

BLOCK = 16  # tokens the engine counts together; prefixes it keeps are whole blocks
SNAPSHOT_BYTES = 256 * 2**20  # of one slot at most, where the caller states no number
SNAPSHOTS = (3, 8)  # fewest and most then


@dataclass(frozen=True, slots=True)
class RowOptions:
    """How a row executor is made. 0 means: as the model or the default says.

    ``cache_tokens`` bounds the tokens over all slots, ``context`` those of one, ``step_tokens`` those of
    a step; ``snapshots`` of recurrent states are kept per slot, 0 as many as fit ``SNAPSHOT_BYTES``.
    ``max_adapters`` and ``adapter_bytes`` bound the adapters that are loaded at once.
    """

    slots: int = 16
    cache_tokens: int = 0
    context: int = 0
    snapshots: int = 0
    step_tokens: int = 2048
    threads: int = 0
    max_adapters: int = 0
    adapter_bytes: int = 0


class RowExecutor:
    """One model, one row at a time. The model keeps its attention implementation (eager or sdpa).

    Raises ``NotSupportedError`` (``architecture.unsupported``) on construction for a class that cannot
    compute logits of plain tokens; ``capabilities.notes`` say what is slower than it could be.
    """

    def __init__(self, model: Any, options: RowOptions = RowOptions()) -> None:
        import torch

        models.environment()
        if options.threads:
            torch.set_num_threads(options.threads)
        self._model: Any = model.eval()
        limits = AdapterLimits.of(options.max_adapters, options.adapter_bytes)
        self._adapters = AdapterSet(model, limits, self._try_adapter)
        self._taken = inspect.signature(model.forward).parameters
        self._pair = bool(getattr(model.config, "is_encoder_decoder", False))
        self._encoder_limit = _encoder_limit(model.config) if self._pair else 0
        context, notes = context_of(model.config, options.context)
        self._ids = int(model.get_input_embeddings().weight.shape[0])
        learnt = self._learn()
        self._memory, self._method = learnt.memory, learnt.method
        self._snapshots = options.snapshots or self._affordable_snapshots()
        self._slots = [self._memory.empty() for _ in range(options.slots)]
        step_tokens = options.step_tokens
        if self._method is Method.SINGLE:
            # An empty slot takes a prompt in one pass; what follows a first chunk is computed singly.
            step_tokens = max(step_tokens, context)
        self.capabilities = Capabilities(
            vocab_size=learnt.vocabulary,
            context=context,
            slots=options.slots,
            cache_tokens=options.cache_tokens or options.slots * context,
            block_size=BLOCK,
            step_tokens=step_tokens,
            encoder_decoder=self._pair,
            adapters=True,
            weights_bytes=weights_bytes(model),
            notes=(*notes, *learnt.notes),
        )

    # ---- the protocol ----------------------------------------------------------------------

    def execute(self, step: Step) -> Any:
        """Logits, float32 [step.num_logits, vocabulary]: numpy on the CPU, else a tensor. A slot whose
        row failed must be freed; the other slots of the step are as after the step or before it."""
        import torch

        self._check(step.rows)
        with torch.inference_mode():
            parts = [part for row in step.rows for part in self._run(row)]
            if not parts:
                parts = [torch.empty(0, self.capabilities.vocab_size, device=self._model.device)]
            logits = torch.cat(parts)
        return logits.numpy() if logits.device.type == "cpu" else logits

    def encode(self, slot: int, tokens: Sequence[int]) -> None:
        """Encoder pass; the slot must hold no tokens. Raises ``InputError`` for no or too many tokens.

        While adapters are loaded the pass is made with the slot's first row, which says whose it is.
        """
        import torch

        held = self._slot(slot)
        if not self._pair:
            raise UsageError(f"`{type(self._model).__name__}` has no encoder")
        if held.length:
            raise UsageError(f"slot {slot} holds {held.length} tokens; free it before another encoder pass")
        if not tokens or (self._encoder_limit and len(tokens) > self._encoder_limit):
            raise InputError(
                f"the encoder takes 1 to {self._encoder_limit or 'any number of'} tokens, not {len(tokens)}"
            )
        self._check_ids(tokens)
        if len(self._adapters):
            held.encoder = list(tokens)
            return
        with torch.inference_mode():
            held.encoder = self._encoded(tokens)

    def retained(self, slot: int, length: int) -> int:
        """``length`` where everything can be cut, else the slot's end or its last snapshot before that."""
        held = self._slot(slot)
        if length >= held.length or self._memory.cuttable or self._method is Method.AGAIN:
            return min(length, held.length)
        return max((kept.length for kept in held.snapshots if kept.length <= length), default=0)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """The first ``length`` tokens of ``source`` in ``target``; keys are shared, states copied."""
        import torch

        held = self._slot(source)
        if self._slot(target).length:
            raise UsageError(f"slot {target} holds {self._slots[target].length} tokens; free it before a copy")
        with torch.inference_mode():
            if length == 0:
                self._slots[target] = self._memory.empty()
                self._slots[target].encoder = held.encoder
            else:
                self._slots[target] = self._memory.copy(held, length, self._snapshot_at(source, length))

    def roll_back(self, slot: int, length: int) -> None:
        """Cuts the slot; ``length`` is an answer of ``retained``."""
        import torch

        held = self._slot(slot)
        if length < held.length:
            with torch.inference_mode():
                self._memory.cut(held, length, self._snapshot_at(slot, length) if length else None)

    def free(self, slot: int) -> None:
        """Empties the slot, its encoder's output too."""
        if self._model is not None:
            self._at(slot)
            self._slots[slot] = self._memory.empty()

    def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA, rsLoRA or DoRA directory of PEFT. Raises ``LoadError`` for one that does not fit."""
        if self._model is None:
            raise TurnoutError("the executor is closed", code="runtime.failed")
        self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter."""
        self._adapters.unload(name)

    def close(self) -> None:
        """Frees weights, adapters and slots."""
        self._adapters.close()
        self._model = None
        self._slots = []

    # ---- one row ---------------------------------------------------------------------------

    def _check(self, rows: Sequence[Row]) -> None:
        """Every row is right before any is computed, so that a wrong one changes nothing."""
        if not rows or len({row.slot for row in rows}) != len(rows):
            raise UsageError("a step needs rows, and no slot twice")
        for row in rows:
            held = self._slot(row.slot)
            if row.start != held.length or not row.tokens:
                raise UsageError(
                    f"slot {row.slot} holds {held.length} tokens; "
                    f"a row of {len(row.tokens)} cannot begin at {row.start}"
                )
            if not 0 <= row.logits <= len(row.tokens):
                raise UsageError(f"{row.logits} rows of logits are asked of {len(row.tokens)} tokens")
            if row.start + len(row.tokens) > self.capabilities.context:
                raise UsageError(
                    f"slot {row.slot} takes {self.capabilities.context} tokens, not {row.start + len(row.tokens)}"
                )
            self._check_ids(row.tokens)
            if self._pair and held.encoder is None:
                raise UsageError(f"slot {row.slot} has no encoder pass yet")
            self._adapters.check(row)

    def _check_ids(self, tokens: Sequence[int]) -> None:
        least, most = min(tokens), max(tokens)
        if least < 0 or most >= self._ids:
            wrong = least if least < 0 else most
            raise InputError(f"token {wrong} is not one of the model's {self._ids}", code="tokenizer.id_out_of_range")

    def _slot(self, slot: int) -> Held:
        held = self._at(slot)
        if held.broken:
            raise UsageError(f"slot {slot} was lost in a pass that failed ({held.broken}); free it first")
        return held

    def _at(self, slot: int) -> Held:
        if self._model is None:
            raise TurnoutError("the executor is closed", code="runtime.failed")
        if not 0 <= slot < len(self._slots):
            raise UsageError(f"slot {slot} does not exist; there are {len(self._slots)}")
        return self._slots[slot]

    def _run(self, row: Row) -> list[Any]:
        """Logits of one row, in pieces [n, vocabulary] that end with its last token."""
        held = self._slots[row.slot]
        try:
            with self._adapters.select([(row.adapter, len(row.tokens))]):
                if isinstance(held.encoder, list):
                    held.encoder = self._encoded(held.encoder)
                return self._advance(held, row)
        except Exception as error:
            line = models.first_line(error)
            held.broken = line
            code = "memory.insufficient" if "allocate" in line or "out of memory" in line.lower() else "runtime.failed"
            raise TurnoutError(f"the forward pass failed: {line}", code=code) from error

    def _advance(self, held: Held, row: Row) -> list[Any]:
        states = not self._memory.cuttable and self._method is not Method.AGAIN
        if states and row.logits > 1 and row.start:
            self._keep(held)
        parts: list[Any] = []
        done, total = 0, len(row.tokens)
        for count in self._cuts(row, states):
            done += count
            asked = max(0, min(count, row.logits - (total - done)))
            logits = self._forward(self._memory, held, row.tokens[done - count : done], asked)
            if asked:
                parts.append(logits)
            if states and held.length % BLOCK == 0 and total - done <= BLOCK:
                self._keep(held)
        return parts

    def _cuts(self, row: Row, states: bool) -> list[int]:
        """Sizes of the passes of a row."""
        total = len(row.tokens)
        single = self._method is Method.SINGLE
        if single and row.start:
            return [1] * total
        # The last whole block before the last token: the same prompt again needs its last token's logits.
        boundary = (row.start + total - (row.logits > 0)) // BLOCK * BLOCK - row.start
        drafts = row.logits > 1 and total <= BLOCK and row.start > 0
        if not states or drafts or boundary <= 0 or boundary == total:
            return [total]
        return [boundary, *([1] * (total - boundary) if single else [total - boundary])]

    def _forward(self, memory: Memory, held: Held, tokens: Sequence[int], keep: int) -> Any:
        """One pass of the model: logits, float32 [keep, vocabulary]; ``held`` then has the tokens too."""
        import torch

        again = not memory.name
        if again:
            held.tokens.extend(tokens)
            tokens = held.tokens
        start = 0 if again else held.length
        ids = torch.tensor([list(tokens)], device=self._model.device)
        arguments: dict[str, Any] = {"use_cache": not again, **memory.enter(held)}
        if "position_ids" in self._taken:
            arguments["position_ids"] = torch.arange(start, start + len(tokens), device=ids.device)[None]
        if "logits_to_keep" in self._taken:
            arguments["logits_to_keep"] = max(1, keep)
        if self._pair:
            encoder = held.encoder
            mask = torch.ones(encoder[0].shape[:2], dtype=torch.long, device=ids.device)
            output = self._model(encoder_outputs=encoder, attention_mask=mask, decoder_input_ids=ids, **arguments)
        else:
            output = self._model(input_ids=ids, **arguments)
        memory.leave(held, output)
        held.length = start + len(tokens)
        return (
            output.logits[0, max(0, output.logits.shape[1] - keep) :].float() if keep else output.logits[0, :0].float()
        )

    def _try_adapter(self, name: str) -> None:
        """One small pass with an adapter, in no slot."""
        import torch

        held, tokens = self._memory.empty(), list(range(TRIAL))
        adapted = self._adapters.select([(name, TRIAL)], [(name, ASKED)])
        with torch.inference_mode(), models.hushed(), adapted:
            if self._pair:
                held.encoder = self._encoded(tokens)
            self._forward(self._memory, held, tokens, ASKED)

    # ---- snapshots -------------------------------------------------------------------------

    def _keep(self, held: Held) -> None:
        """Takes a snapshot at the slot's end, unless there is one."""
        kept = held.snapshots
        if kept and kept[-1].length == held.length:
            return
        kept.append(self._memory.snapshot(held))
        if len(kept) > self._snapshots:
            lengths = [0, *(one.length for one in kept)]
            # The two newest stay: a prompt that was seen as a whole returns to the last but one at latest.
            kept.pop(min(range(max(1, len(kept) - 2)), key=lambda i: (lengths[i + 2] - lengths[i], lengths[i])))

    def _snapshot_at(self, slot: int, length: int) -> Snapshot | None:
        """The states after ``length`` tokens; None where nothing but keys is kept."""
        held = self._slots[slot]
        if self.retained(slot, length) != length:
            raise UsageError(f"slot {slot} cannot return to {length} tokens, only to {self.retained(slot, length)}")
        if self._memory.cuttable or self._method is Method.AGAIN:
            return None
        for kept in held.snapshots:
            if kept.length == length:
                return kept
        return self._memory.snapshot(held)

    # ---- at load ---------------------------------------------------------------------------

    def _learn(self) -> Learnt:
        import torch

        model = self._model
        size = self._ids
        with torch.inference_mode(), models.hushed():
            try:
                encoder = self._encoded([(3 + 7 * i) % size for i in range(6)]) if self._pair else None
                return learn(model, self._forward, size, encoder)
            except Exception as error:
                raise unsupported(model, models.first_line(error)) from error

    def _encoded(self, tokens: Sequence[int]) -> Any:
        import torch

        ids = torch.tensor([list(tokens)], device=self._model.device)
        return self._model.get_encoder()(input_ids=ids, attention_mask=torch.ones_like(ids))

    def _affordable_snapshots(self) -> int:
        """How many snapshots of one slot fit into ``SNAPSHOT_BYTES``."""
        import torch

        if self._memory.cuttable or self._method is Method.AGAIN:
            return SNAPSHOTS[0]
        held = self._memory.empty()
        with torch.inference_mode(), models.hushed():
            self._forward(self._memory, held, [0, 1], 1)
            size = max(1, self._memory.state_bytes(held))
        return max(SNAPSHOTS[0], min(SNAPSHOTS[1], SNAPSHOT_BYTES // size))


def _encoder_limit(config: Any) -> int:
    """Positions of the encoder; 0 where they are relative."""
    return int(
        next((n for k in ("max_source_positions", "max_position_embeddings") if (n := getattr(config, k, 0))), 0)
    )
