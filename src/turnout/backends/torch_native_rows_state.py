"""What a sequence leaves behind in a Transformers model: how to cut, copy and keep it.

Three kinds of remains, and a model may have all of them:

- keys and values of attention (`DynamicLayer`): cut to any length. Windows of the library forget old
  tokens; they are replaced by layers that keep all, and the mask alone makes the window.
- recurrent states (Mamba, linear attention, short convolutions): cannot be cut, only kept as copies
  (*snapshots*) at some lengths. A cache of a class unknown here is treated so as a whole.
- tensors that a class leaves on its own modules (RecurrentGemma): put in place before each pass.

Layers of the library append keys by making new tensors, so sharing one is safe; states are overwritten
in place, so a kept one is always a copy.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

# Names under which classes take and return what they remember.
CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state")


@dataclass(slots=True)
class Snapshot:
    """What cannot be cut, as it was after ``length`` tokens. Never handed to a model, only copies of it."""

    length: int
    layers: dict[int, dict[str, Any]] = field(default_factory=dict)  # state attributes by layer
    whole: Any = None  # the cache itself, where its class is unknown
    modules: list[Any] = field(default_factory=list)


@dataclass(slots=True)
class Held:
    """One slot: its tokens' remains, and the lengths to which it can return.

    ``tokens`` are kept only where everything is computed anew each time. ``encoder`` is the encoder's
    output of encoder-decoder models, or the list of its tokens while that is still to be computed.
    """

    length: int = 0
    cache: Any = None
    modules: list[Any] = field(default_factory=list)
    encoder: Any = None
    tokens: list[int] = field(default_factory=list)
    snapshots: list[Snapshot] = field(default_factory=list)  # by rising length
    broken: str = ""  # why the slot must be freed before it is used again


class Memory:
    """How one model remembers; found out by ``learn`` in ``torch_native_rows_probe``.

    ``name`` is the argument that takes the cache ("" where there is none), ``known`` says that the cache
    is the library's own with layers listed above, ``fresh`` makes an empty one (None where the class makes
    its own), ``places`` are module attributes that hold states, with their values of a fresh model.
    """

    def __init__(self, name: str, known: bool, fresh: Any, places: list[tuple[Any, str, Any]]) -> None:
        self.name, self.known, self.places = name, known, places
        self._fresh = fresh
        # Nothing but keys and values: any length can be returned to.
        self.cuttable = bool(name) and known and not places
        self.cuttable = self.cuttable and not any(_has_state(layer) for layer in _layers(fresh()))

    def empty(self) -> Held:
        """A slot without tokens."""
        return Held(cache=self._fresh(), modules=[value for _, _, value in self.places])

    def enter(self, held: Held) -> dict[str, Any]:
        """Arguments for the model; module states are put in place."""
        for (module, attribute, _), value in zip(self.places, held.modules, strict=True):
            setattr(module, attribute, value)
        return {self.name: held.cache} if self.name else {}

    def leave(self, held: Held, output: Any) -> None:
        """Takes what the pass left."""
        if self.places:
            held.modules = [getattr(module, attribute) for module, attribute, _ in self.places]
        if self.name and not self.known:
            returned = getattr(output, self.name, None)
            held.cache = held.cache if returned is None else returned

    def snapshot(self, held: Held) -> Snapshot:
        """A copy of what cannot be cut, at the slot's length."""
        taken = Snapshot(held.length, modules=copy.deepcopy(held.modules))
        if self.known:
            for index, layer in enumerate(_layers(held.cache)):
                if _has_state(layer):
                    taken.layers[index] = copy.deepcopy(_state(layer))
        elif self.name:
            taken.whole = copy.deepcopy(held.cache)
        return taken

    def cut(self, held: Held, length: int, snapshot: Snapshot | None) -> None:
        """Returns the slot to ``length`` tokens, by ``snapshot`` where there are states. Keeps the encoder."""
        if length == 0 or (snapshot is None and not self.cuttable):
            fresh = self.empty()
            held.cache, held.modules = fresh.cache, fresh.modules
        elif snapshot is not None and not self.known:
            held.cache = copy.deepcopy(snapshot.whole)
            held.modules = copy.deepcopy(snapshot.modules)
        else:
            held.modules = copy.deepcopy(snapshot.modules) if snapshot else held.modules
            for index, layer in enumerate(_layers(held.cache)):
                _cut(layer, length)
                if snapshot and index in snapshot.layers:
                    vars(layer).update(copy.deepcopy(snapshot.layers[index]))
        held.length = length
        del held.tokens[length:]
        held.snapshots = [kept for kept in held.snapshots if kept.length <= length]

    def copy(self, held: Held, length: int, snapshot: Snapshot | None) -> Held:
        """A slot of its own with the first ``length`` tokens of ``held``."""
        made = Held(length, encoder=held.encoder, tokens=held.tokens[:length])
        if snapshot is not None:
            made.modules = copy.deepcopy(snapshot.modules)
        if self.known:
            made.cache = _copied(held.cache, length, snapshot)
        elif snapshot is not None:
            made.cache = copy.deepcopy(snapshot.whole)
        if snapshot is not None:
            made.snapshots = [snapshot]
        return made

    def state_bytes(self, held: Held) -> int:
        """Bytes of one snapshot."""
        taken = self.snapshot(held)
        return _bytes([list(taken.layers.values()), taken.modules, getattr(taken.whole, "__dict__", taken.whole)])


def library_cache(config: Any, encoder_decoder: bool = False) -> Any:
    """An empty cache of the library for ``config`` that forgets nothing."""
    import transformers
    from transformers import cache_utils

    if encoder_decoder:
        # Encoders' and decoders' layers of such models are plain; without a configuration layers are plain.
        return transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    cache = transformers.DynamicCache(config=config)
    full = {
        cache_utils.DynamicSlidingWindowLayer: cache_utils.DynamicLayer,
        cache_utils.LinearAttentionAndSlidingWindowAttentionLayer: cache_utils.LinearAttentionAndFullAttentionLayer,
    }
    for index, layer in enumerate(cache.layers):
        kind = full.get(type(layer))
        if kind is not None:
            states = getattr(layer, "number_of_states", None)
            cache.layers[index] = kind() if states is None else kind(number_of_states=states)
    return cache


def is_known(cache: Any) -> bool:
    """Whether every layer of a cache is of a kind that this module can cut or copy."""
    import transformers
    from transformers import cache_utils

    if type(cache) not in (transformers.DynamicCache, transformers.EncoderDecoderCache):
        return False
    kinds = (
        cache_utils.DynamicLayer,
        cache_utils.DynamicIndexedLayer,
        cache_utils.DynamicSlidingWindowLayer,  # replaced by a full one in the caches made here
        cache_utils.LinearAttentionLayer,
        cache_utils.LinearAttentionAndFullAttentionLayer,
        cache_utils.LinearAttentionAndSlidingWindowAttentionLayer,
        cache_utils.DummyLayer,
    )
    return all(type(layer) in kinds for layer in _layers(cache))


def _layers(cache: Any) -> list[Any]:
    """Layers of the decoder's own cache; cross-attention is never cut."""
    return list(getattr(cache, "self_attention_cache", cache).layers)


def _has_state(layer: Any) -> bool:
    return hasattr(layer, "recurrent_states")


def _state(layer: Any) -> dict[str, Any]:
    """Everything of a layer but its keys and values."""
    return {name: value for name, value in vars(layer).items() if name not in ("keys", "values")}


def _cut(layer: Any, length: int) -> None:
    """Keys and values of the first ``length`` tokens, [1, heads, tokens, width] each."""
    keys = getattr(layer, "keys", None)
    if keys is None or keys.numel() == 0 or keys.shape[-2] <= length:
        return
    layer.keys, layer.values = keys[..., :length, :], layer.values[..., :length, :]
    if getattr(layer, "indexer_keys", None) is not None:  # [1, tokens, width]
        layer.indexer_keys = layer.indexer_keys[:, :length]
    if getattr(layer, "indexer_position_ids", None) is not None:  # [dimensions, 1, tokens]
        layer.indexer_position_ids = layer.indexer_position_ids[..., :length]


def _copied(cache: Any, length: int, snapshot: Snapshot | None) -> Any:
    """A cache whose keys are shared (they are never written in place) and whose states are copies."""
    inner = getattr(cache, "self_attention_cache", None)
    made = copy.copy(cache)
    if inner is not None:  # the cross-attention's layers are complete and shared
        made.self_attention_cache = _copied(inner, length, snapshot)
        made.is_updated = dict(cache.is_updated)
        return made
    made.layers = []
    for index, layer in enumerate(cache.layers):
        twin = copy.copy(layer)
        _cut(twin, length)
        if snapshot and index in snapshot.layers:
            vars(twin).update(copy.deepcopy(snapshot.layers[index]))
        made.layers.append(twin)
    return made


def _bytes(value: Any) -> int:
    if hasattr(value, "element_size"):
        return int(value.numel() * value.element_size())
    if isinstance(value, dict):
        return sum(_bytes(part) for part in value.values())
    if isinstance(value, list | tuple):
        return sum(_bytes(part) for part in value)
    return _bytes(vars(value)) if hasattr(value, "keys") and hasattr(value, "values") else 0
