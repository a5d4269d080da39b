"""OpenVINO behind the engine's executor protocol: paged attention with the cache given from outside.

A decoder's graph is brought into its paged form (``openvino_executor_graph``): one flat ragged batch per
step, page tables per row, logits only for the tokens that are asked. Pages are handed out here, and
shared between slots with the same prefix. Graphs without such a form run row by row
(``openvino_executor_rows``), which the capabilities' notes say.

Inputs of the paged form after openvino.genai's model runner and the specification of PagedAttention
(openvino, docs/articles_en/documentation/openvino-ir-format/operation-sets): ``block_indices`` is the
concatenation of the rows' page tables, ``*_begins`` are offsets with one more entry than there are rows.
"""

from __future__ import annotations

from typing import Any

from turnout.backends.openvino_executor_graph import ASKED_ROWS, LOGITS, caches
from turnout.backends.openvino_executor_options import Settings, check_row, no_adapters
from turnout.backends.openvino_executor_pages import Pages
from turnout.backends.openvino_reading import first_line
from turnout.engine.executor import Capabilities, Step
from turnout.errors import InputError, LoadError, MemoryAdmissionError, TurnoutError

PAGE = 32  # tokens of a page on the CPU (openvino.genai, KVCacheManager)
CACHE_SHARE = 0.25  # of the memory that is free, where nobody says how many tokens to hold


class OpenVINOExecutor:
    """A compiled paged decoder with its cache. ``compiled`` is an ``openvino.CompiledModel`` of a model that
    went through ``paged_form``; ``gathers`` is that function's answer; ``context`` counts positions;
    ``owner`` is kept as long as the graph, which may read weights that it mapped.

    Raises ``LoadError`` when the cache does not fit the memory.
    """

    def __init__(
        self, compiled: Any, gathers: bool, settings: Settings, context: int, weights: int, owner: Any = None
    ) -> None:
        self.request = compiled.create_infer_request()
        self._owner = owner
        self._gathers = gathers
        self._inputs = frozenset(name for port in compiled.inputs for name in port.get_names())
        layers = list(caches(compiled))
        page_size = PAGE
        token_bytes = sum(_bytes_of(element, shape) for _, element, shape in layers) // page_size
        tokens = settings.cache_tokens or _cache_tokens(settings.slots, context, token_bytes)
        self.pages = Pages(settings.slots, -(-tokens // page_size), page_size)
        self._stores = [_store(self.request, name, element, shape, self.pages.total) for name, element, shape in layers]
        shape = compiled.output(LOGITS).get_partial_shape()
        self._closed = False
        self.dtype = settings.dtype
        self.capabilities = Capabilities(
            vocab_size=shape[len(shape) - 1].get_length(),
            context=min(context, self.pages.total * page_size),
            slots=settings.slots,
            cache_tokens=self.pages.total * page_size,
            block_size=page_size,
            step_tokens=settings.step_tokens,
            weights_bytes=weights,
            notes=() if gathers else ("logits are computed for every token of a step, not only for the asked ones",),
        )

    # ---- steps ------------------------------------------------------------------------

    def execute(self, step: Step) -> Any:
        """Logits [step.num_logits, vocabulary], float32, valid until the next call. Raises ``TurnoutError``
        with every slot as it was."""
        import numpy as np

        if self._closed:
            raise LoadError("the executor is closed")
        if not step.rows:
            return np.zeros((0, self.capabilities.vocab_size), np.float32)
        self._check(step)
        before = [(row.slot, self.pages.lengths[row.slot]) for row in step.rows]
        try:
            for row in step.rows:
                copied = self.pages.extend(row.slot, len(row.tokens))
                if copied:
                    self._copy(*copied)
            asked = self._feed(step)
            self.request.infer(share_outputs=True)
        except Exception as error:
            for slot, length in before:
                self.pages.cut(slot, length)
            raise TurnoutError(f"OpenVINO failed: {first_line(error)}") from error
        logits = self.request.get_output_tensor(0).data.reshape(-1, self.capabilities.vocab_size)
        if not self._gathers:
            logits = logits[asked]
        return np.asarray(logits[: step.num_logits], np.float32)

    def _check(self, step: Step) -> None:
        held = self.capabilities
        if step.num_tokens > held.step_tokens:
            raise InputError(f"a step of {step.num_tokens} tokens, the executor takes {held.step_tokens}")
        wanted = 0
        for row in step.rows:
            check_row(row, self.pages.lengths[row.slot], held)
            wanted += self.pages.wanted(row.slot, len(row.tokens))
        if wanted > self.pages.free_pages:
            raise MemoryAdmissionError(
                f"a step needs {wanted} pages of {self.pages.size} tokens, {self.pages.free_pages} are free"
            )

    def _feed(self, step: Step) -> Any:
        """Sets the inputs of a step; returns the numbers of the asked tokens."""
        import numpy as np

        counts = [len(row.tokens) for row in step.rows]
        begins = np.cumsum([0, *counts], dtype=np.int32)
        tables = [self.pages.tables[row.slot] for row in step.rows]
        asked = [np.arange(begins[i + 1] - row.logits, begins[i + 1]) for i, row in enumerate(step.rows)]
        rows = np.concatenate(asked).astype(np.int32)
        positions = [np.arange(row.start, row.start + count) for row, count in zip(step.rows, counts, strict=True)]
        feeds = {
            "input_ids": np.array([token for row in step.rows for token in row.tokens], np.int64),
            "position_ids": np.concatenate(positions).astype(np.int64),
            "past_lens": np.array([row.start for row in step.rows], np.int32),
            "subsequence_begins": begins,
            "block_indices": np.array([page for table in tables for page in table], np.int32),
            "block_indices_begins": np.cumsum([0, *map(len, tables)], dtype=np.int32),
            "max_context_len": np.array(max(self.pages.lengths[row.slot] for row in step.rows), np.int32),
            # A head over no rows at all is nothing that kernels are tested with.
            ASKED_ROWS: rows if len(rows) else np.zeros(1, np.int32),
        }
        self._set(feeds)
        return rows

    def _set(self, feeds: dict[str, Any]) -> None:
        import openvino

        for name, value in feeds.items():
            if name in self._inputs:
                self.request.set_tensor(name, openvino.Tensor(value))

    def _copy(self, source: int, target: int) -> None:
        for store in self._stores:
            store[target] = store[source]

    # ---- slots ------------------------------------------------------------------------

    def encode(self, slot: int, tokens: Any) -> None:
        """Decoders have no encoder. Raises ``InputError``."""
        raise InputError("this model has no encoder")

    def retained(self, slot: int, length: int) -> int:
        """``length``, or what the slot holds if that is less: attention keeps every token."""
        return min(length, self.pages.lengths[slot])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Shares the pages of the prefix; whoever appends to the last of them copies it then."""
        if self.pages.lengths[target] or length > self.pages.lengths[source]:
            raise InputError(
                f"{length} tokens of slot {source} ({self.pages.lengths[source]} held) cannot go to slot {target} "
                f"({self.pages.lengths[target]} held)"
            )
        self.pages.share(source, target, length)

    def roll_back(self, slot: int, length: int) -> None:
        """Cuts the slot to its first ``length`` tokens."""
        if not 0 <= length <= self.pages.lengths[slot]:
            raise InputError(f"slot {slot} holds {self.pages.lengths[slot]} tokens and cannot be cut to {length}")
        self.pages.cut(slot, length)

    def free(self, slot: int) -> None:
        """Empties the slot."""
        self.pages.cut(slot, 0)

    def load_adapter(self, name: str, path: str) -> None:
        """Weights of a compiled graph are fixed. Raises ``LoadError``."""
        raise no_adapters()

    def unload_adapter(self, name: str) -> None:
        """Nothing was loaded."""

    def close(self) -> None:
        """Drops the request and the cache; may be called twice."""
        self._closed = True
        self._stores = []
        self.request = self._owner = None


def _bytes_of(element: Any, shape: list[int]) -> int:
    size = element.bitwidth // 8
    for dim in shape:
        size *= dim
    return int(size)


def _cache_tokens(slots: int, context: int, token_bytes: int) -> int:
    """Tokens for all slots, if a share of the free memory allows, and one whole context at least."""
    import psutil

    affordable = int(psutil.virtual_memory().available * CACHE_SHARE) // max(1, token_bytes)
    return min(slots * context, max(context, affordable))


def _store(request: Any, name: str, element: Any, shape: list[int], pages: int) -> Any:
    """Binds a cache of ``pages`` pages to the request; returns its bytes as [pages, bytes of one]. Memory is
    taken from the system as pages are first written."""
    import numpy as np
    import openvino

    try:
        data = np.zeros((pages, _bytes_of(element, shape)), np.uint8)
    except MemoryError as error:
        raise LoadError(f"no memory for a cache of {pages} pages", code="memory.insufficient") from error
    request.set_tensor(name, openvino.Tensor(data, openvino.Shape([pages, *shape]), element))
    return data
