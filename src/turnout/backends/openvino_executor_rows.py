"""Decoders without a paged form behind the executor protocol: one request with its own state per slot.

Rows of a step run one after the other, so a batch is no faster than its rows alone. Prefixes are copied
through the requests' states, not shared. States that do not grow with the tokens (recurrent layers) can
be copied only whole and never cut back.
"""

from __future__ import annotations

from typing import Any

from turnout.backends.openvino_executor_graph import ASKED_ROWS, LOGITS, gather_rows, weights_bytes
from turnout.backends.openvino_executor_options import Settings, check_row, no_adapters
from turnout.backends.openvino_reading import first_line
from turnout.engine.executor import Capabilities, Step
from turnout.errors import InputError, LoadError, MemoryAdmissionError, TurnoutError

FED = frozenset({"input_ids", "attention_mask", "position_ids", "beam_idx"})


class OpenVINORowExecutor:
    """Runs a stateful decoder (``openvino.Model``) row by row. ``reason`` says why it is not paged. Raises
    ``LoadError`` for a graph without state or with inputs that a decoder does not have."""

    def __init__(self, model: Any, settings: Settings, context: int, reason: str, compile_model: Any) -> None:
        names = {name for port in model.inputs for name in port.get_names()}
        if not {"input_ids", "beam_idx"} <= names <= FED:
            raise LoadError(
                f"the graph takes {', '.join(sorted(names))}; a stateful decoder takes {', '.join(sorted(FED))}",
                code="graph.io_mismatch",
            )
        self._axes = {v.get_info().variable_id: _growing(v.get_info().data_shape) for v in model.get_variables()}
        if not self._axes:
            raise LoadError("the graph keeps no state between tokens", code="graph.state_missing")
        weights = weights_bytes(model)
        self._gathers = gather_rows(model, 1)
        try:
            self._compiled = compile_model(model, settings.properties())
        except Exception as error:  # the library raises RuntimeError and others
            raise LoadError(f"OpenVINO does not compile it: {first_line(error)}") from error
        self._inputs = names
        self._requests: list[Any] = [None] * settings.slots
        self._lengths = [0] * settings.slots
        shape = self._compiled.output(LOGITS).get_partial_shape()
        whole = None not in self._axes.values()
        notes = [f"rows run one after the other: {reason}"]
        notes += [] if whole else ["recurrent states cannot be cut back, only copied as they stand"]
        self.capabilities = Capabilities(
            vocab_size=shape[len(shape) - 1].get_length(),
            context=context,
            slots=settings.slots,
            cache_tokens=settings.cache_tokens or settings.slots * context,
            block_size=1,
            step_tokens=settings.step_tokens,
            rolls_back=whole,
            weights_bytes=weights,
            notes=tuple(notes),
        )
        self.dtype = settings.dtype

    def execute(self, step: Step) -> Any:
        """Logits [step.num_logits, vocabulary], float32. When it raises, the step's slots must be freed."""
        import numpy as np

        if self._compiled is None:
            raise LoadError("the executor is closed")
        for row in step.rows:
            check_row(row, self._lengths[row.slot], self.capabilities)
        if sum(self._lengths) + step.num_tokens > self.capabilities.cache_tokens:
            raise MemoryAdmissionError(f"no room for {step.num_tokens} tokens", code="memory.insufficient")
        found = [np.zeros((0, self.capabilities.vocab_size), np.float32)]
        for row in step.rows:
            found.append(self._run(row.slot, list(row.tokens), row.logits))
            self._lengths[row.slot] += len(row.tokens)
        return np.concatenate(found)

    def _run(self, slot: int, tokens: list[int], logits: int) -> Any:
        import numpy as np
        import openvino

        request, start, count = self._request(slot), self._lengths[slot], len(tokens)
        feeds = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, start + count), np.int64),
            "position_ids": np.arange(start, start + count, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
        for name in self._inputs:
            request.set_tensor(name, openvino.Tensor(feeds[name]))
        if self._gathers:
            asked = np.arange(count - max(1, logits), count, dtype=np.int32)
            request.set_tensor(ASKED_ROWS, openvino.Tensor(asked))
        try:
            request.infer(share_outputs=True)
        except Exception as error:
            raise TurnoutError(f"OpenVINO failed: {first_line(error)}") from error
        rows = np.asarray(request.get_tensor(LOGITS).data, np.float32).reshape(-1, self.capabilities.vocab_size)
        return rows[len(rows) - logits :].copy()

    def _request(self, slot: int) -> Any:
        if self._requests[slot] is None:
            self._requests[slot] = self._compiled.create_infer_request()
        return self._requests[slot]

    # ---- slots ------------------------------------------------------------------------

    def encode(self, slot: int, tokens: Any) -> None:
        """Decoders have no encoder. Raises ``InputError``."""
        raise InputError("this model has no encoder")

    def retained(self, slot: int, length: int) -> int:
        """``length`` where every state grows with the tokens; else all of the slot, or nothing."""
        held = self._lengths[slot]
        if self.capabilities.rolls_back:
            return min(length, held)
        return held if length >= held else 0

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copies the states of the first ``length`` tokens."""
        if self._lengths[target] or length != self.retained(source, length):
            raise InputError(f"{length} tokens of slot {source} cannot go to slot {target}")
        if length:
            self._restore(target, self._states(source, length))
        self._lengths[target] = length

    def roll_back(self, slot: int, length: int) -> None:
        """Cuts the slot to its first ``length`` tokens."""
        if length != self.retained(slot, length):
            raise InputError(f"slot {slot} holds {self._lengths[slot]} tokens and cannot be cut to {length}")
        if not length:
            self.free(slot)
        elif length < self._lengths[slot]:
            self._restore(slot, self._states(slot, length))
            self._lengths[slot] = length

    def _states(self, slot: int, length: int) -> dict[str, Any]:
        import numpy as np
        import openvino

        found = {}
        for state in self._request(slot).query_state():
            axis = self._axes[state.name]
            whole = state.state
            values = whole.data if axis is None else whole.data.take(range(length), axis)
            copied = np.array(values, copy=True)
            found[state.name] = openvino.Tensor(copied, openvino.Shape(list(copied.shape)), whole.element_type)
        return found

    def _restore(self, slot: int, states: dict[str, Any]) -> None:
        request = self._request(slot)
        request.reset_state()
        for state in request.query_state():
            state.state = states[state.name]

    def free(self, slot: int) -> None:
        """Empties the slot."""
        if self._requests[slot] is not None:
            self._requests[slot].reset_state()
        self._lengths[slot] = 0

    def load_adapter(self, name: str, path: str) -> None:
        """Weights of a compiled graph are fixed. Raises ``LoadError``."""
        raise no_adapters()

    def unload_adapter(self, name: str) -> None:
        """Nothing was loaded."""

    def close(self) -> None:
        """Drops the graph and its requests; may be called twice."""
        self._requests = [None] * len(self._requests)
        self._compiled = None


def _growing(shape: Any) -> int | None:
    """Axis of a state that grows with the tokens: the dynamic one that is not the batch."""
    axes = [axis for axis in range(1, len(shape)) if shape[axis].is_dynamic]
    return axes[-1] if axes else None
