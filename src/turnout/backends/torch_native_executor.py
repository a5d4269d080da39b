"""A Transformers decoder behind the engine's executor protocol: ragged batches over slot rows.

The model's classes are untouched. They compute a flat batch [1, total tokens] with the positions of
every token; attention goes through ``torch_native_attention``, and only the hidden states of asked rows
reach the head (``logits_to_keep`` of the class, so that what a class does after its head is kept).

CUDA: rows are laid out and computed in the same way there, with logits left on the device. Written
with care and untested: no machine with a GPU was at hand.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from turnout.backends import torch_native_probe as probe
from turnout.backends import transformers_models as models
from turnout.backends.base import BindingReport
from turnout.backends.torch_native_adapters import ASKED, TRIAL, AdapterLimits, AdapterSet
from turnout.backends.torch_native_attention import NAME, LayerPlan, Layout, Prefill, Run, register
from turnout.backends.torch_native_cache import SlotCache
from turnout.backends.torch_native_threads import Steps
from turnout.engine.executor import Capabilities, Row, Step
from turnout.errors import NotSupportedError, TurnoutError, UsageError

# Names of a configuration for the number of positions a model was made for.
POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len", "max_sequence_length", "seq_length", "n_ctx")
DEFAULT_CONTEXT = 4096  # where neither the configuration nor the caller states one
CACHE_SHARE = 0.5  # of free memory, where the caller states no number of tokens
FLOATS = ("bfloat16", "float16", "float32")
PROBED = 4  # tokens of each sequence of the check at load


@dataclass(frozen=True, slots=True)
class TorchOptions:
    """How a torch executor is made. 0 means: as the model, the machine or the default says.

    ``cache_tokens`` bounds the tokens over all slots, ``context`` those of one. ``kv_dtype`` is "" for
    the model's own type, a type of ``FLOATS`` (attention then also computes in it), or "int8". ``threads`` 0
    takes PyTorch's number as the most and fewer while other processes hold the cores; another number is kept.
    ``check`` compares the model's logits at load with its eager attention (a few small passes). ``max_adapters``
    and ``adapter_bytes`` bound the adapters that are loaded at once.
    """

    slots: int = 16
    cache_tokens: int = 0
    context: int = 0
    dtype: str = ""
    threads: int = 0
    kv_dtype: str = ""
    step_tokens: int = 2048
    check: bool = True
    max_adapters: int = 0
    adapter_bytes: int = 0


class TorchExecutor:
    """Ragged batches of one decoder. Raises ``NotSupportedError`` (``architecture.unsupported``) on
    construction for a class that cannot run so; its message says why. ``binding`` is set by who loads."""

    binding: BindingReport | None = None

    def __init__(self, model: Any, options: TorchOptions = TorchOptions()) -> None:
        models.environment()
        reasons = probe.static_reasons(model.config, type(model))
        if reasons:
            raise NotSupportedError("; ".join(reasons), code="architecture.unsupported")
        if options.kv_dtype not in ("", "int8", *FLOATS):
            known = ", ".join(("int8", *FLOATS))
            raise UsageError(f"`{options.kv_dtype}` is not a type of the cache", hints=[f"leave it out, or {known}"])
        self._steps = _steps(options.threads)
        context, notes = context_of(model.config, options.context)
        register()
        probe.register()
        self._model: Any = model.eval()
        limits = AdapterLimits.of(options.max_adapters, options.adapter_bytes)
        self._adapters = AdapterSet(model, limits, self._try_adapter)
        self._device = model.device
        self._attention = str(model.config._attn_implementation)
        self._layers: list[LayerPlan] = []
        try:
            vocabulary, token_bytes = self._learn(options)
        except BaseException:
            probe.set_attention(model, self._attention)  # another executor may want the model
            raise
        quantized = options.kv_dtype == "int8"
        self._cache = SlotCache(options.slots, context, quantized)
        if options.kv_dtype in FLOATS:
            self._cache.compute = models.torch_dtype(options.kv_dtype)
        tokens = options.cache_tokens or _affordable(token_bytes, self._device)
        self._cache.budget = min(tokens, options.slots * context)
        self._cell = max(1, token_bytes // max(1, len(self._layers)))
        if quantized:
            notes.append("keys and values are kept as int8: logits differ slightly from those of a full cache")
        self.capabilities = Capabilities(
            vocab_size=vocabulary,
            context=context,
            slots=options.slots,
            cache_tokens=self._cache.budget,
            step_tokens=options.step_tokens,
            adapters=True,
            weights_bytes=weights_bytes(model),
            notes=tuple(notes),
        )

    # ---- the protocol ----------------------------------------------------------------------

    def execute(self, step: Step) -> Any:
        """Logits, float32 [asked rows, vocabulary], in the order of the step's rows: numpy on the CPU
        (the model's own memory where it computes float32), else a tensor."""
        rows = step.rows
        wanted = {row.slot: row.start + len(row.tokens) for row in rows}
        self._check(rows, wanted)
        logits = self._adapters.each(rows, self._compute)
        for slot, length in wanted.items():
            self._cache.lengths[slot] = length
        return logits if self._device.type != "cpu" else logits.numpy()

    def encode(self, slot: int, tokens: Sequence[int]) -> None:
        """Refused: the model has no encoder."""
        raise NotSupportedError(f"`{type(self._model).__name__}` has no encoder", code="architecture.unsupported")

    def retained(self, slot: int, length: int) -> int:
        """``length``, or what the slot holds if that is less."""
        return min(length, self._cache.lengths[slot])

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        """Copies the keys and values of ``length`` tokens."""
        import torch

        if self._cache.lengths[target]:
            raise UsageError(f"slot {target} holds {self._cache.lengths[target]} tokens and cannot take a copy")
        if not 0 <= length <= self._cache.lengths[source]:
            raise UsageError(f"slot {source} holds {self._cache.lengths[source]} tokens, not {length}")
        if length:
            with torch.inference_mode():
                self._cache.copy(source, target, length)

    def roll_back(self, slot: int, length: int) -> None:
        """Forgets the tokens behind ``length``; what is written next overwrites them."""
        if not 0 <= length <= self._cache.lengths[slot]:
            raise UsageError(f"slot {slot} holds {self._cache.lengths[slot]} tokens, not {length}")
        self._cache.lengths[slot] = length

    def free(self, slot: int) -> None:
        """Empties the slot; its memory serves the next one, or is given back when the budget needs it."""
        self._cache.lengths[slot] = 0

    def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA, rsLoRA or DoRA directory of PEFT. Raises ``LoadError`` for one that does not fit."""
        if self._model is None:
            raise TurnoutError("the executor is closed", code="runtime.failed")
        self._adapters.load(name, path)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter."""
        self._adapters.unload(name)

    def close(self) -> None:
        """Frees weights and rows; a model that someone else holds gets its own attention back."""
        self._adapters.close()
        if self._model is not None:
            probe.set_attention(self._model, self._attention)
        self._model = None
        self._cache.clear()

    @property
    def model(self) -> Any:
        """The Transformers model, None once closed."""
        return self._model

    # ---- one pass --------------------------------------------------------------------------

    def _check(self, rows: Sequence[Row], wanted: dict[int, int]) -> None:
        if self._model is None:
            raise TurnoutError("the executor is closed", code="runtime.failed")
        if not rows or len(wanted) != len(rows):
            raise UsageError("a step needs rows, and no slot twice")
        for row in rows:
            if not 0 <= row.slot < self._cache.slots:
                raise UsageError(f"slot {row.slot} does not exist; there are {self._cache.slots}")
            held = self._cache.lengths[row.slot]
            if row.start != held or not row.tokens:
                raise UsageError(
                    f"slot {row.slot} holds {held} tokens; a row of {len(row.tokens)} cannot begin at {row.start}"
                )
            if wanted[row.slot] > self._cache.context:
                raise UsageError(f"slot {row.slot} takes {self._cache.context} tokens, not {wanted[row.slot]}")
            if not 0 <= row.logits <= len(row.tokens):
                raise UsageError(f"{row.logits} rows of logits are asked of {len(row.tokens)} tokens")
            self._adapters.check(row)

    def _compute(self, rows: list[Row]) -> Any:
        """Rows of one token first, so that attention takes them together; then by adapter, then by slot."""
        ordered = sorted(rows, key=lambda row: (len(row.tokens) != 1, row.adapter or "", row.slot))
        return self._forward(self._cache, ordered, rows)

    def _try_adapter(self, name: str) -> None:
        """One small pass with an adapter, beside the cache that is in use."""
        cache = SlotCache(1, TRIAL, self._cache.quantized)
        cache.compute = self._cache.compute
        row = [Row(0, list(range(TRIAL)), 0, ASKED, name)]
        self._forward(cache, row, row)

    def _forward(self, cache: SlotCache, ordered: list[Row], rows: Sequence[Row], tracer: bool = False) -> Any:
        """Logits float32 [asked, vocabulary] in the order of ``rows``; the flat batch is in that of ``ordered``."""
        import torch

        tokens: list[int] = []
        positions: list[int] = []
        begins: dict[int, int] = {}
        for row in ordered:
            begins[row.slot] = len(tokens)
            tokens += row.tokens
            positions += range(row.start, row.start + len(row.tokens))
        if min(tokens) < 0:
            raise UsageError(f"{min(tokens)} is not a token")
        asked = [begins[row.slot] + len(row.tokens) - row.logits + i for row in rows for i in range(row.logits)]
        cache.reserve({row.slot: row.start + len(row.tokens) for row in ordered})
        layout = self._layout(ordered, begins)
        run = probe.Tracer(cache, layout) if tracer else Run(cache, self._layers, layout)
        adapted = self._adapters.select(
            [(row.adapter, len(row.tokens)) for row in ordered], [(row.adapter, row.logits) for row in rows]
        )
        device = self._device
        try:
            with self._steps, torch.inference_mode(), run, adapted:
                output = self._model(
                    input_ids=torch.tensor([tokens], device=device),
                    position_ids=torch.tensor([positions], device=device),
                    use_cache=False,
                    logits_to_keep=torch.tensor(asked, dtype=torch.long, device=device),
                )
                logits = output.logits[0].float()
        except (RuntimeError, IndexError) as error:
            raise _failed(error) from error
        if tracer:
            self._layers = run.layers
        elif run.calls != len(self._layers):
            raise TurnoutError(
                f"attention was called {run.calls} times, not {len(self._layers)}", code="architecture.unsupported"
            )
        return logits

    def _layout(self, ordered: list[Row], begins: dict[int, int]) -> Layout:
        singles = [(row.slot, row.start) for row in ordered if len(row.tokens) == 1]
        prefills = [
            Prefill(row.slot, begins[row.slot], begins[row.slot] + len(row.tokens), row.start)
            for row in ordered
            if len(row.tokens) > 1
        ]
        return Layout(singles, prefills, getattr(self, "_cell", 1), self._device)

    # ---- at load ---------------------------------------------------------------------------

    def _learn(self, options: TorchOptions) -> tuple[int, int]:
        """Traces one pass, then checks numbers. Width of the logits and bytes of a token's keys and values."""
        import torch

        model, cache = self._model, SlotCache(2, PROBED, options.kv_dtype == "int8")
        size = int(probe.text_config(model.config).vocab_size)
        first, second = ([(seed * (i + 1)) % size for i in range(PROBED)] for seed in (101, 57))
        begun = [Row(0, first[:-1], 0)]
        with models.hushed():
            try:
                probe.set_attention(model, probe.TRACED)
                logits = self._forward(cache, begun, begun, tracer=True)
            except TurnoutError:
                raise
            except Exception as error:  # a class that looks the implementation's name up elsewhere
                message = f"`{type(model).__name__}` does not run with another attention: {models.first_line(error)}"
                raise NotSupportedError(message, code="architecture.unsupported") from error
            finally:
                probe.set_attention(model, NAME)
            layers = int(getattr(probe.text_config(model.config), "num_hidden_layers", 0) or 0)
            if len(self._layers) < max(1, layers):
                raise NotSupportedError(
                    f"`{type(model).__name__}` has {layers} layers and calls attention {len(self._layers)} times",
                    code="architecture.unsupported",
                )
            if options.check and not cache.quantized:
                cache.lengths[0] = PROBED - 1
                rows = [Row(0, first[-1:], PROBED - 1), Row(1, second, 0)]
                got = self._forward(cache, rows, rows)
                with torch.inference_mode():
                    wanted = probe.eager_logits(model, torch.tensor([first, second], device=self._device))
                apart = probe.difference(wanted, got, str(model.dtype).removeprefix("torch."))
                if apart:
                    raise NotSupportedError(
                        f"`{type(model).__name__}` over ragged rows: {apart}", code="architecture.unsupported"
                    )
        return int(logits.shape[-1]), cache.token_bytes


def _steps(threads: int) -> Any:
    """Around every pass: a fixed number of threads, or one that follows the load of the machine."""
    import torch

    if threads:
        torch.set_num_threads(threads)
        return contextlib.nullcontext()
    most = torch.get_num_threads()
    return Steps(most) if most > 1 else contextlib.nullcontext()


def _failed(error: Exception) -> TurnoutError:
    line = models.first_line(error)
    code = "memory.insufficient" if "allocate" in line or "out of memory" in line.lower() else "runtime.failed"
    return TurnoutError(f"the forward pass failed: {line}", code=code)


def context_of(config: Any, asked: int) -> tuple[int, list[str]]:
    """Tokens of one slot, with notes. Raises ``UsageError`` for more than the model's positions allow."""
    text = probe.text_config(config)
    stated = next((int(getattr(text, name)) for name in POSITIONS if getattr(text, name, None)), 0)
    limit, kind = probe.rope_limit(config)
    most, notes = stated, []
    if limit is not None and (not most or limit < most):
        most = limit
        notes.append(f"position scaling `{kind}` changes beyond {limit} tokens, so a slot takes {limit}")
    if asked and most and asked > most:
        raise UsageError(
            f"a context of {asked} tokens: the model takes {most} here",
            code="option.unsupported",
            hints=[f"--option context={most}", *notes],
        )
    return asked or most or DEFAULT_CONTEXT, notes


def weights_bytes(model: Any) -> int:
    """Bytes of parameters and buffers; tied ones count once."""
    sizes = {}
    for tensor in (*model.parameters(), *model.buffers()):
        sizes[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
    return sum(sizes.values())


def _affordable(token_bytes: int, device: Any) -> int:
    """Tokens whose keys and values fit a share of the memory that is free now."""
    if device.type == "cuda":
        import torch

        free = torch.cuda.mem_get_info(device)[0]
    else:
        import psutil

        free = psutil.virtual_memory().available
    return max(1, int(free * CACHE_SHARE) // max(1, token_bytes))
