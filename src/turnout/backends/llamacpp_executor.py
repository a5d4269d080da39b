"""llama.cpp as an executor of the engine: one ragged batch a step through its low-level interface.

A slot is one of llama.cpp's sequences. With the unified cache all sequences draw their cells from one
buffer, and a copied prefix is the same cells with a second owner, at no cost in memory (``llamacpp_slots``).
Adapters apply to a whole context in llama.cpp, so the rows of a step are grouped by adapter.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnout.backends.llamacpp_api import Api, Batch, open_api
from turnout.backends.llamacpp_model import Model
from turnout.backends.llamacpp_native import NativeLoadError, reason_of
from turnout.backends.llamacpp_options import CACHE_TYPES, FLASH, ExecutorOptions
from turnout.backends.llamacpp_parts import Piece, fits, parts
from turnout.backends.llamacpp_slots import Slots
from turnout.backends.llamacpp_vocabulary import LlamaCppVocabulary
from turnout.engine.executor import Capabilities, Row, Step
from turnout.errors import InputError, LoadError, MemoryAdmissionError, NotSupportedError, TurnoutError, UsageError

_NO_SLOT, _INVALID = 1, -1  # answers of llama_decode


class LlamaCppExecutor:
    """One GGUF model with its cache. Driven by one thread; ``close`` frees it.

    Raises ``LoadError`` for a file llama.cpp refuses, a library whose interface is not the known one, or a
    kind of model that cannot be driven token by token; ``UsageError`` for options that do not fit.
    """

    def __init__(
        self,
        path: str,
        options: ExecutorOptions | None = None,
        *,
        on_progress: Callable[[float], None] | None = None,
    ) -> None:
        self.options = (options or ExecutorOptions()).checked()
        self._api: Api = open_api(self.options.library)
        self._context: int | None = None
        self._adapters: dict[str, int] = {}
        self._adapter: str | None = None  # the one llama.cpp has now
        self._model = Model(
            self._api,
            path,
            device=self.options.device,
            mmap=self.options.mmap,
            repack=self.options.repack,
            on_progress=on_progress,
        )
        try:
            self._refuse_other_kinds()
            self._open()
            self.vocabulary = LlamaCppVocabulary(self._model)
            self._describe()
            self._prepare()
        except BaseException:
            self.close()
            raise

    @property
    def library(self) -> str:
        """Which llama.cpp computes: name, package version, llama.cpp's own version."""
        return f"{self._api.name} {self._api.package_version} (llama.cpp {self._api.version})"

    # ---- opening -------------------------------------------------------------------------

    def _refuse_other_kinds(self) -> None:
        api, model = self._api, self._model.address
        if api.llama_model_has_encoder(model):
            what = "an encoder, whose output llama.cpp keeps for one sequence only"
        elif not api.llama_model_has_decoder(model) or api.llama_model_is_diffusion(model):
            what = "no decoder that adds one token after another"
        else:
            trained, asked = api.llama_model_n_ctx_train(model), self.options.context
            if trained and asked > trained:
                raise UsageError(f"option `context` is {asked}; the model was trained for {trained} tokens")
            return
        raise LoadError(f"the model has {what}", code="architecture.unsupported")

    def _open(self) -> None:
        options, api = self.options, self._api
        params = api.llama_context_default_params()
        params.n_ctx = options.cache_tokens
        params.n_batch = options.step_tokens
        params.n_ubatch = min(options.chunk_tokens, options.step_tokens)
        params.n_seq_max = options.slots
        self._outputs = max(options.slots, options.outputs or max(64, 8 * options.slots))
        params.n_outputs_max = params.n_outputs_max_per_seq = self._outputs
        params.n_threads, params.n_threads_batch = options.thread_counts
        params.flash_attn_type = FLASH[options.flash]
        params.type_k = params.type_v = CACHE_TYPES[options.cache_type]
        params.offload_kqv = params.op_offload = options.device.split(":")[0] != "cpu"
        params.swa_full = options.window_full
        params.kv_unified = options.unified
        with api.caught() as log:
            self._context = api.llama_init_from_model(self._model.address, params)
        if not self._context:
            raise NativeLoadError(reason_of(log, "no context was made, and no reason was logged"))
        self._check_context(params)

    def _check_context(self, params: Any) -> None:
        """The second half of the layouts' proof: what was asked must be what was understood."""
        api, context = self._api, self._context
        cells = -(-params.n_ctx // 256) * 256  # llama.cpp rounds up
        if not params.kv_unified:
            cells = -(-cells // params.n_seq_max // 256) * 256 * params.n_seq_max
        batch = min(params.n_batch, params.n_ctx)
        asked = {
            "n_ctx": cells,
            "n_batch": batch,
            "n_ubatch": min(params.n_ubatch, batch),
            "n_seq_max": params.n_seq_max,
            "n_threads": params.n_threads,
            "n_threads_batch": params.n_threads_batch,
        }
        for name, value in asked.items():
            found = getattr(api, f"llama_{name}")(context)
            if found != value:
                raise api.refusal(f"`{name}` is {found} in the context, {value} was asked")

    def _describe(self) -> None:
        api, context, model = self._api, self._context, self._model.address
        memory = api.llama_get_memory(context)
        if not memory:
            raise LoadError("llama.cpp gives this model no cache", code="architecture.unsupported")
        self._slots = Slots(api, context or 0, memory, model or 0, self.options)
        room: int = api.llama_n_ctx_seq(context)
        self.capabilities = Capabilities(
            vocab_size=self.vocabulary.size,
            context=min(self.options.context or api.llama_model_n_ctx_train(model) or room, room),
            slots=self.options.slots,
            cache_tokens=api.llama_n_ctx(context),
            step_tokens=api.llama_n_batch(context),
            adapters=True,
            weights_bytes=api.llama_model_size(model),
            notes=(f"computed by {self.library}", *self._slots.notes()),
        )

    def _prepare(self) -> None:
        """Arrays that llama.cpp reads a batch from; it gets their addresses once."""
        slots, size = self.options.slots, self.capabilities.step_tokens
        self._vocab = self.capabilities.vocab_size
        self._limits = self._slots.limits(size, self._api.llama_n_ubatch(self._context), min(self._outputs, size))
        self._held = self._slots.held
        self._view, self._view_of = np.empty((0, self._vocab), np.float32), (0, 0)  # of llama.cpp's logits
        self._counting = np.arange(self.capabilities.context, dtype=np.int32)
        self._tokens, self._positions = np.zeros(size, np.int32), np.zeros(size, np.int32)
        self._flags, self._ones = np.zeros(size, np.int8), np.ones(size, np.int32)
        self._sequences = np.zeros(size, np.uint64)  # addresses of the tokens' sequence ids
        self._ids = np.arange(slots, dtype=np.int32)
        self._first_id = self._ids.ctypes.data
        self._batch = Batch(
            token=self._tokens.ctypes.data,
            pos=self._positions.ctypes.data,
            n_seq_id=self._ones.ctypes.data,
            seq_id=self._sequences.ctypes.data,
            logits=self._flags.ctypes.data,
        )

    # ---- computing -----------------------------------------------------------------------

    def execute(self, step: Step) -> NDArray[np.float32]:
        """Logits [step.num_logits, vocab_size]. The array is llama.cpp's own memory where one call computes
        the step, valid until the next call. Raises ``MemoryAdmissionError`` when the cache is full."""
        rows = step.rows
        outputs = self._check(rows)
        self._slots.expect(rows)
        try:
            if fits(rows, outputs, self._limits):
                pieces = [Piece(row, 0, len(row.tokens), row.logits, 0) for row in rows]
                self._decode(pieces, rows[0].adapter if rows else None)
                result = self._logits(outputs)
            else:
                result = self._in_parts(rows, outputs)
        except BaseException:
            self._slots.take_back(rows)
            raise
        self._slots.added(rows)
        return result

    def _check(self, rows: Sequence[Row]) -> int:
        """Outputs of the rows; raises what would otherwise end in llama.cpp's assertions."""
        if self._context is None:
            raise LoadError("the executor is closed")
        outputs = tokens = 0
        context, held = self.capabilities.context, self._held
        for row in rows:
            count = len(row.tokens)
            tokens, outputs = tokens + count, outputs + row.logits
            if not 0 <= row.slot < len(held):
                raise InputError(f"slot {row.slot} is none of {len(held)}")
            if row.start != held[row.slot]:
                raise InputError(f"slot {row.slot} holds {held[row.slot]} tokens, the row starts at {row.start}")
            if not 0 <= row.logits <= count or not count:
                raise InputError(f"a row of {count} tokens cannot have {row.logits} rows of logits")
            if row.start + count > context:
                raise InputError(f"slot {row.slot} would hold {row.start + count} tokens of {context} at most")
            if row.adapter is not None and row.adapter not in self._adapters:
                raise InputError(f"adapter `{row.adapter}` is not loaded")
        if tokens > self.capabilities.step_tokens:
            raise InputError(f"the step has {tokens} tokens of {self.capabilities.step_tokens} at most")
        if len({row.slot for row in rows}) != len(rows):
            raise InputError("a slot occurs twice in one step")
        return outputs

    def _decode(self, pieces: Sequence[Piece], adapter: str | None) -> None:
        """One call of llama.cpp over ``pieces``."""
        if not pieces:
            return
        if adapter != self._adapter:
            self._apply(adapter)
        end = 0
        for piece in pieces:
            row, begin = piece.row, end
            count = piece.last - piece.first
            end = begin + count
            if count == 1:
                token = row.tokens[piece.first]
                self._in_vocabulary(token, token)
                self._tokens[begin] = token
                self._positions[begin] = row.start + piece.first
                self._sequences[begin] = self._first_id + 4 * row.slot
                self._flags[begin] = piece.logits
                continue
            ids = np.asarray(row.tokens[piece.first : piece.last])
            self._in_vocabulary(int(ids.min()), int(ids.max()))
            self._tokens[begin:end] = ids
            first = row.start + piece.first
            self._positions[begin:end] = self._counting[first : first + count]
            self._sequences[begin:end] = self._first_id + 4 * row.slot
            self._flags[begin : end - piece.logits] = 0
            self._flags[end - piece.logits : end] = 1
        self._batch.n_tokens = end
        logger = self._api.catch()
        try:
            answer = self._api.llama_decode(self._context, self._batch)
        finally:
            self._api.release(logger)
        if answer:
            self._fail(answer, end)

    def _in_vocabulary(self, least: int, most: int) -> None:
        if least < 0 or most >= self._vocab:
            wrong = least if least < 0 else most
            raise InputError(
                f"token {wrong} is outside the vocabulary of {self._vocab}", code="tokenizer.id_out_of_range"
            )

    def _fail(self, answer: int, tokens: int) -> None:
        if answer == _NO_SLOT:
            raise MemoryAdmissionError(
                f"the cache has no room for {tokens} more tokens: {sum(self._held)} of "
                f"{self.capabilities.cache_tokens} are held",
                hints=["free slots, or open the executor with more `cache_tokens`"],
            )
        said = reason_of(self._api.lines, f"llama_decode answered {answer}").message
        what = "refused the batch" if answer == _INVALID else "failed"
        raise TurnoutError(f"llama.cpp {what}: {said}", code="runtime.failed")

    def _logits(self, outputs: int) -> NDArray[np.float32]:
        """What the last call computed, [outputs, vocab_size], in the order of its batch."""
        if not outputs:
            return np.empty((0, self._vocab), np.float32)
        address = self._api.llama_get_logits(self._context)
        if not address:
            raise TurnoutError("llama.cpp has no logits for the step", code="runtime.failed")
        if self._view_of != (address, outputs):
            memory = (ctypes.c_float * (outputs * self._vocab)).from_address(address)
            self._view = np.ndarray((outputs, self._vocab), np.float32, memoryview(memory).cast("B"))
            self._view_of = address, outputs
        return self._view

    def _in_parts(self, rows: Sequence[Row], outputs: int) -> NDArray[np.float32]:
        """A step of several calls: one adapter each, and no more than a call may have."""
        result = np.empty((outputs, self._vocab), np.float32)
        # The adapter that is set already goes first: each change makes llama.cpp plan its graph anew.
        for adapter, part in parts(rows, self._limits, self._adapter):
            self._decode(part, adapter)
            logits = self._logits(sum(piece.logits for piece in part))
            begin = 0
            for piece in part:
                result[piece.output : piece.output + piece.logits] = logits[begin : begin + piece.logits]
                begin += piece.logits
        return result

    def encode(self, slot: int, tokens: Sequence[int]) -> None:
        """Refused: models with an encoder are refused when they are opened."""
        raise NotSupportedError("llama.cpp's executor has no encoder")

    # ---- slots ---------------------------------------------------------------------------

    def retained(self, slot: int, length: int) -> int:
        """Largest length the slot can be cut to or copied from: see ``Executor.retained``."""
        return self._slots.retained(slot, length)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """``target`` then holds the first ``length`` tokens of ``source``, as the same cells where the
        cache is unified."""
        self._slots.copy_prefix(source, target, length)

    def roll_back(self, slot: int, length: int) -> None:
        """Cuts the slot to its first ``length`` tokens, an answer of ``retained``."""
        self._slots.roll_back(slot, length)

    def free(self, slot: int) -> None:
        """Empties the slot; free slots may be freed again, also when the executor is closed."""
        if self._context is not None:
            self._slots.free(slot)

    # ---- adapters ------------------------------------------------------------------------

    def load_adapter(self, name: str, path: str) -> None:
        """A LoRA adapter in GGUF. Raises ``LoadError``: ``adapter.base_mismatch`` where it does not fit,
        ``adapter.type_unsupported`` for another form or kind."""
        if self._context is None:
            raise LoadError("the executor is closed")
        if name in self._adapters:
            raise InputError(f"adapter `{name}` is loaded already")
        _expect_gguf(path)
        with self._api.caught() as log:
            adapter = self._api.llama_adapter_lora_init(self._model.address, os.fsencode(path))
        if not adapter:
            raise NativeLoadError(reason_of(log, "lora: the adapter did not load"))
        if self._api.llama_adapter_get_alora_n_invocation_tokens(adapter):
            self._api.llama_adapter_lora_free(adapter)
            raise LoadError("an adapter that wakes at certain tokens (aLoRA)", code="adapter.type_unsupported")
        self._adapters[name] = adapter

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter; unknown names are ignored."""
        adapter = self._adapters.get(name)
        if adapter is None:
            return
        if self._adapter == name:
            self._apply(None)
        del self._adapters[name]
        self._api.llama_adapter_lora_free(adapter)

    def _apply(self, name: str | None) -> None:
        count = 0 if name is None else 1
        adapters = (ctypes.c_void_p * 1)(self._adapters[name] if name is not None else None)
        scales = (ctypes.c_float * 1)(1.0)  # times alpha over rank, which llama.cpp applies itself
        with self._api.caught():
            failed = self._api.llama_set_adapters_lora(self._context, adapters, count, scales)
        if failed:
            raise TurnoutError(f"llama.cpp cannot apply adapter `{name}`", code="runtime.failed")
        self._adapter = name

    # ---- the rest ------------------------------------------------------------------------

    def set_threads(self, single: int, batch: int) -> None:
        """Threads for steps of one token and of more, from the next step on."""
        if self._context is not None:
            self._api.llama_set_n_threads(self._context, max(1, single), max(1, batch))

    def close(self) -> None:
        """Frees context, adapters and model; may be called twice."""
        if self._context:
            with self._api.caught():
                self._api.llama_free(self._context)
            self._context = None
        self._adapters.clear()  # freed with the model
        self._model.close()


def _expect_gguf(path: str) -> None:
    """Refuses an adapter that is not a GGUF file, by name rather than by llama.cpp's parser."""
    where = Path(path)
    if not where.exists():
        raise LoadError(f"there is no adapter `{path}`", code="artifact.missing")
    if where.is_file():
        with where.open("rb") as file:
            if file.read(4) == b"GGUF":
                return
    raise LoadError(
        f"llama.cpp takes adapters as GGUF; `{path}` is none",
        code="adapter.type_unsupported",
        hints=[f"convert it: `python convert_lora_to_gguf.py {path}`"],
    )
