"""Whether a Transformers class may run over ragged rows, and what each of its attention layers sees.

Three questions, each answered by asking rather than by a list of families:

1. ``static_reasons``: what the class and configuration say without weights (recurrent states, encoder,
   arguments of ``forward``).
2. ``Tracer``: one pass in which the library builds its masks; a mask function of ours turns each into a
   code that arrives at the attention layers, so every layer's window is what the library itself decided.
   Unknown arguments, masks that were altered, and layers that bypass the interface are reasons.
3. ``compare``: logits of a ragged batch that continues one sequence and begins another, against the
   class's own eager attention on whole sequences.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from turnout.backends.torch_native_attention import HONOURED, NAME, NEUTRAL, LayerPlan, Run, Span, rows_attention
from turnout.errors import NotSupportedError

TRACED = "turnout_traced"
CODE = 1024.0  # masks are filled with CODE * 2^n, exact in every float type of interest
TOLERANCES = {"float64": 1e-6, "float32": 1e-4}  # of the largest logit
COSINE = 0.98  # of half-width logits, whose last bits depend on the shape of a batch


def text_config(config: Any) -> Any:
    """The part of a configuration that describes the decoder of text."""
    getter = getattr(config, "get_text_config", None)
    return getter(decoder=True) if getter is not None else config


def static_reasons(config: Any, cls: Any) -> list[str]:
    """Why the class cannot run over ragged rows, as far as that shows without weights; empty if nothing does."""
    from transformers import DynamicCache, cache_utils

    name, found = cls.__name__, []
    if getattr(config, "is_encoder_decoder", False):
        return [f"`{name}` is an encoder and a decoder"]
    arguments = inspect.signature(cls.forward).parameters
    for argument in ("position_ids", "logits_to_keep"):
        if argument not in arguments:
            found.append(f"`{name}.forward` takes no `{argument}`")
    try:
        kinds = {type(layer) for layer in DynamicCache(config=config).layers}
    except Exception as error:  # a configuration that the cache does not understand
        return [*found, f"no cache can be made for `{name}`: {error}"]
    plain = (cache_utils.DynamicLayer, cache_utils.DynamicSlidingWindowLayer)
    for kind in sorted(kinds - set(plain), key=lambda kind: kind.__name__):
        # Gemma 3n and its like skip rows that are shared: nothing is stored there.
        if kind is not cache_utils.DummyLayer:
            found.append(f"`{name}` keeps states other than keys and values (`{kind.__name__}`)")
    return found


def rope_limit(config: Any) -> tuple[int | None, str]:
    """Positions up to which the rotation does not depend on the longest sequence of a batch, and the kind
    of scaling that depends on it. None: no such limit."""
    blocks = getattr(text_config(config), "rope_parameters", None) or {}
    parts = [blocks] if "rope_type" in blocks else [part for part in blocks.values() if isinstance(part, dict)]
    limits = []
    for block in parts:
        kind = str(block.get("rope_type", ""))
        if "dynamic" in kind or kind == "longrope":
            limit = block.get("original_max_position_embeddings")
            limits.append((int(limit or text_config(config).max_position_embeddings), kind))
    return min(limits) if limits else (None, "")


# ---- masks as codes --------------------------------------------------------------------


class Tracer(Run):
    """A run that learns a ``LayerPlan`` per attention call while it computes."""

    def __init__(self, cache: Any, layout: Any) -> None:
        super().__init__(cache, [], layout)
        self.spans: list[Span | str] = []  # by code; a text says why a mask cannot be honoured
        self._seen: list[tuple[Any, Any]] = []  # keys and values, kept so that no address is used twice

    def code(self, span: Span | str) -> float:
        """Number that stands for a span in a mask."""
        if span not in self.spans:
            self.spans.append(span)
        return CODE * math.ldexp(1.0, self.spans.index(span))

    def attend(
        self, module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float | None, extra: dict[str, Any]
    ) -> Any:
        """Learns what the layer sees, then computes as any run does. Raises ``NotSupportedError``."""
        name = type(module).__name__
        self._check(name, module, query, key, extra)
        span = self._span(name, mask)
        window = extra.get("sliding_window")
        if window and span != Span("window", int(window)):
            raise _refused(f"`{name}` is told a window of {window} and a mask of {span.kind} attention")
        source = next((i for i, seen in enumerate(self._seen) if _same(seen[0], key) and _same(seen[1], value)), None)
        self._seen.append((key, value))
        self.layers.append(LayerPlan(span, source))
        return super().attend(module, query, key, value, None, scaling, extra)

    def _check(self, name: str, module: Any, query: Any, key: Any, extra: dict[str, Any]) -> None:
        for word, given in extra.items():
            if word not in NEUTRAL | HONOURED and given is not None and given is not False:
                raise _refused(f"`{name}` gives attention an argument that is not known here: `{word}`")
        causal = extra.get("is_causal")
        if causal is False or (causal is None and getattr(module, "is_causal", True) is False):
            raise _refused(f"`{name}` lets tokens see later ones")
        if query.shape[0] != 1 or query.shape[2] != key.shape[2]:
            raise _refused(f"`{name}` attends from {tuple(query.shape)} to {tuple(key.shape)}, not token by token")

    def _span(self, name: str, mask: Any) -> Span:
        if mask is None:
            raise _refused(f"`{name}` is given no mask of the library's, so what it sees is not known")
        codes = mask.float().flatten()
        number = math.log2(float(codes[0]) / CODE) if float(codes[0]) > 0 else -1.0
        if bool((codes != codes[0]).any()) or number not in range(len(self.spans)):
            raise _refused(f"`{name}` alters its mask")
        span = self.spans[int(number)]
        if isinstance(span, str):
            raise _refused(f"`{name}`: {span}")
        return span


def _same(one: Any, other: Any) -> bool:
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()


def _refused(message: str) -> NotSupportedError:
    return NotSupportedError(message, code="architecture.unsupported")


def span_of(mask_function: Callable[..., Any], size: int | None) -> Span | str:
    """The span that a mask function of Transformers describes, found by asking it about positions around
    ``size``; a text when it describes another pattern."""
    import torch

    def sees(query: int, key: int) -> bool:
        return bool(mask_function(0, 0, torch.tensor(query), torch.tensor(key)))

    wide = size or 1
    queries = sorted({0, 1, wide - 1, wide, wide + 1, 2 * wide - 1, 2 * wide, 3 * wide + 1})
    kinds = [Span()] if size is None else [Span("window", size), Span("chunk", size), Span()]
    for span in kinds:
        wanted = {
            (query, key): span.low(query) <= key <= query
            for query in queries
            for low in (span.low(query), query - wide, query)
            for key in (low - 1, low, low + 1)
            if key >= 0
        }
        if all(sees(query, key) is answer for (query, key), answer in wanted.items()):
            return span
    return "a mask that is neither causal, nor a window, nor chunks"


def register() -> None:
    """Makes the tracing attention and its masks known to Transformers."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(TRACED, rows_attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(TRACED, _coded_mask)


def _coded_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[..., Any],
    device: Any = None,
    local_size: int | None = None,
    **_: Any,
) -> Any:
    """Instead of a mask [batch, 1, queries, keys]: the same shape filled with the code of its span."""
    import torch

    from turnout.backends.torch_native_attention import current

    run = current()
    assert isinstance(run, Tracer), "masks are coded while tracing only"
    try:
        span = span_of(mask_function, local_size)
    except (IndexError, RuntimeError) as error:  # a pattern bound to the very tokens of the batch
        span = f"a mask that depends on the batch ({error})"
    return torch.full((batch_size, 1, q_length, kv_length), run.code(span), device=device)


# ---- numbers ---------------------------------------------------------------------------


def set_attention(model: Any, name: str) -> None:
    """Sets the attention of the model and all its parts; the functions read it at every call."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation = name


def eager_logits(model: Any, tokens: Any) -> Any:
    """Logits of the last token, float32 [batch, vocabulary], by the class's own attention, no cache."""
    set_attention(model, "eager")
    try:
        return model(input_ids=tokens, use_cache=False, logits_to_keep=1).logits[:, -1].float()
    finally:
        set_attention(model, NAME)


def difference(wanted: Any, got: Any, dtype: str) -> str:
    """'' where logits [rows, vocabulary] agree as well as ``dtype`` lets them, else how they differ."""
    import torch

    if not bool(torch.isfinite(got).all()):
        return "logits are not finite"
    scale = float(wanted.abs().max())
    if dtype in TOLERANCES:
        apart = float((wanted - got).abs().max())
        agree = apart <= TOLERANCES[dtype] * max(scale, 1.0)
        return "" if agree else f"logits differ by {apart:.2g} from the class's own (largest {scale:.3g})"
    alike = torch.nn.functional.cosine_similarity(wanted - wanted.mean(-1, True), got - got.mean(-1, True)).min()
    return "" if float(alike) >= COSINE else f"logits have a cosine of {float(alike):.3f} with the class's own"
