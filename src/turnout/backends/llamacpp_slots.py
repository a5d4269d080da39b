"""What llama.cpp's sequences hold: cutting them, sharing them, and the states that make both possible.

Keys and values can be cut anywhere. Recurrent layers keep one state a sequence, which cannot be cut; so
states are saved where a cut is likely (the ends of prompts and their chunks, and where drafts begin), and
taken back from there. Layers with a sliding window may have lost what is older than the window.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from turnout.backends.llamacpp_api import Api
from turnout.backends.llamacpp_options import ExecutorOptions
from turnout.backends.llamacpp_parts import Limits
from turnout.engine.executor import Row
from turnout.errors import InputError, TurnoutError

_PARTIAL = 1  # LLAMA_STATE_SEQ_FLAGS_PARTIAL_ONLY: recurrent states without keys and values
_PROMPT = 16  # a row of more tokens is a prompt or a chunk of one


class Slots:
    """Sequences 0 to ``slots`` - 1 of one context. ``held`` counts each one's tokens; pointers are
    llama.cpp's and must be alive while methods are called."""

    def __init__(self, api: Api, context: int, memory: int, model: int, options: ExecutorOptions) -> None:
        self._api, self._context, self._memory, self._options = api, context, memory, options
        self._recurrent = bool(api.llama_model_is_recurrent(model) or api.llama_model_is_hybrid(model))
        self._window = int(api.llama_model_n_swa(model))
        self.held = [0] * options.slots
        self._saved: list[dict[int, NDArray[np.uint8]]] = [{} for _ in self.held]

    def limits(self, step: int, chunk: int, outputs: int) -> Limits:
        """What one call may have, of ``step`` tokens at most, where llama.cpp computes ``chunk`` together.

        llama.cpp places all chunks of a call on trial before it computes the first. Where a layer has a
        window, a later chunk may be placed over cells that the window has passed by then; the trial drops
        older cells with them, and does not put those back (``llama_kv_cache::prepare``, seen in builds
        b11500 to b11549: logits were wrong by more than their deviation). So such models get one chunk a
        call; where sequences are not simply strung together, chunks are made of rows of one length.
        """
        if not self._window:
            return Limits(step, outputs)
        return Limits(min(step, chunk), outputs, equal=self._recurrent or not self._options.unified)

    def notes(self) -> tuple[str, ...]:
        """What is missing, for people."""
        notes = []
        if self._recurrent:
            notes.append("recurrent layers: a slot is cut or shared only where one of its last states was saved")
        if self._window and not self._options.window_full:
            notes.append("sliding layers keep only their window: older prefixes can neither be shared nor cut to")
        if not self._options.unified:
            notes.append("every sequence has a buffer of its own: a shared prefix is copied")
        if not self._options.same_bits:
            notes.append("what else is in a step changes last bits; `unified=off` and `cache_type=bf16` avoid it")
        return tuple(notes)

    # ---- around a step -------------------------------------------------------------------

    def expect(self, rows: Sequence[Row]) -> None:
        """Before a step: drafts may be taken back to where they begin."""
        if self._recurrent:
            for row in rows:
                if 1 < row.logits <= _PROMPT and row.start:
                    self._save(row.slot)

    def added(self, rows: Sequence[Row]) -> None:
        """After a step: counts the rows' tokens."""
        for row in rows:
            self.held[row.slot] = row.start + len(row.tokens)
            if self._recurrent and len(row.tokens) > _PROMPT:
                self._save(row.slot)

    def take_back(self, rows: Sequence[Row]) -> None:
        """After a failed step: cuts what parts of it may have added; a slot that cannot be cut is emptied."""
        for row in rows:
            if self._api.llama_memory_seq_pos_max(self._memory, row.slot) < row.start:
                continue
            if not row.start or not self._cut(row.slot, row.start):
                self.free(row.slot)

    # ---- the executor's methods ----------------------------------------------------------

    def retained(self, slot: int, length: int) -> int:
        """Largest length the slot can be cut to or copied from: see ``Executor.retained``."""
        held = self.held[slot]
        if length >= held:
            return held
        if length <= 0:
            return 0
        if self._recurrent:
            return max((kept for kept in self._saved[slot] if kept <= length), default=0)
        if self._window:
            # The next token sees the window before it; cells older than a window may be gone.
            first = self._api.llama_memory_seq_pos_min(self._memory, slot)
            if first > 0 and first > length - self._window:
                return 0
        return length

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """``target``, which is empty, then holds the first ``length`` tokens of ``source``."""
        if self.held[target]:
            raise InputError(f"slot {target} is not empty")
        self._answered(source, length)
        if not length:
            return
        whole = length == self.held[source]
        if not self._recurrent and self._options.unified:
            self._api.llama_memory_seq_cp(self._memory, source, target, 0, length)
        else:
            # Buffers of their own, and recurrent states, are copied whole and cut afterwards.
            self._api.llama_memory_seq_cp(self._memory, source, target, -1, -1)
            if self._recurrent and not whole:
                self._restore(target, self._saved[source][length])
            if not whole and not self._cut(target, length):
                self.free(target)
                raise TurnoutError(f"llama.cpp cannot cut slot {target} to {length}", code="runtime.failed")
        self.held[target] = length
        self._keep(target, source, length)

    def roll_back(self, slot: int, length: int) -> None:
        """Cuts the slot to its first ``length`` tokens."""
        self._answered(slot, length)
        if length == self.held[slot]:
            return
        if not length:
            self.free(slot)
            return
        if self._recurrent:
            self._restore(slot, self._saved[slot][length])
        if not self._cut(slot, length):
            self.free(slot)
            raise TurnoutError(f"llama.cpp cannot cut slot {slot} to {length}", code="runtime.failed")
        self.held[slot] = length
        self._keep(slot, slot, length)

    def free(self, slot: int) -> None:
        """Empties the slot."""
        self._cut(slot, -1)
        self.held[slot] = 0
        self._saved[slot] = {}

    # ---- within --------------------------------------------------------------------------

    def _cut(self, slot: int, length: int) -> bool:
        return bool(self._api.llama_memory_seq_rm(self._memory, slot, length, -1))

    def _answered(self, slot: int, length: int) -> None:
        if length != self.retained(slot, length):
            raise InputError(f"slot {slot} of {self.held[slot]} tokens has no state of {length} tokens")

    def _keep(self, slot: int, source: int, length: int) -> None:
        self._saved[slot] = {kept: state for kept, state in self._saved[source].items() if kept <= length}

    def _save(self, slot: int) -> None:
        saved, held = self._saved[slot], self.held[slot]
        if held in saved or not self._options.snapshots:
            return
        size = self._api.llama_state_seq_get_size_ext(self._context, slot, _PARTIAL)
        state = np.empty(size, np.uint8)
        written = self._api.llama_state_seq_get_data_ext(self._context, state.ctypes.data, size, slot, _PARTIAL)
        if not written:
            return  # `retained` then answers an earlier one
        while len(saved) >= self._options.snapshots:
            del saved[next(iter(saved))]
        saved[held] = state[:written]

    def _restore(self, slot: int, state: NDArray[np.uint8]) -> None:
        address = state.ctypes.data
        if not self._api.llama_state_seq_set_data_ext(self._context, address, state.size, slot, _PARTIAL):
            self.free(slot)
            raise TurnoutError(f"llama.cpp did not take back the state of slot {slot}", code="runtime.failed")
