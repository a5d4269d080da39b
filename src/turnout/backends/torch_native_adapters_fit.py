"""Whether an adapter fits a model: places of the model, and the adapter's tensors put to them.

Everything is compared by names and shapes before a tensor is read. What does not fit is refused with the
names (``adapter.base_mismatch``); what has no place here, by what it is (``adapter.type_unsupported``).
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from turnout.backends.torch_native_adapters_read import CONFIG, Patterns, Stored, refused, some

BASE_FIELDS = ("hidden_size", "num_hidden_layers", "vocab_size")


@dataclass(frozen=True, slots=True)
class Place:
    """A module without children. ``kind``: ``linear`` (nn.Linear, Conv1D, or a quantised one that stands for
    it), ``embedding``, ``norm`` (adds its bias last), ``other``. ``inputs`` (0: not known) and ``outputs`` are
    widths; of an embedding, tokens and width. ``scale`` is the factor by which a token table multiplies."""

    kind: str
    inputs: int = 0
    outputs: int = 0
    scale: float = 1.0
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)  # of its own parameters


@dataclass(slots=True)
class Fitted:
    """What an adapter does to one module; tensors by their stored names."""

    place: Place
    rank: int = 0
    scaling: float = 1.0
    lora: dict[str, str] = field(default_factory=dict)  # by role
    bias: str = ""  # the module's own bias, trained
    replaced: dict[str, str] = field(default_factory=dict)  # parameters that `modules_to_save` replaces


@dataclass(slots=True)
class Fit:
    """All that an adapter does. ``carried`` are copies of the base's tensors (module, attribute, stored name),
    which must equal the base's own."""

    modules: dict[str, Fitted] = field(default_factory=dict)
    carried: list[tuple[str, str, str]] = field(default_factory=list)


def survey(model: Any) -> dict[str, Place]:
    """Places by name, as the model has them now."""
    found = {}
    for name, module in model.named_modules():
        if name and next(module.children(), None) is None:
            found[name] = place_of(module)
    return found


def place_of(module: Any) -> Place:
    """What kind of place a module is."""
    import torch
    from transformers.pytorch_utils import Conv1D

    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters(recurse=False)}
    if isinstance(module, Conv1D):
        return Place("linear", int(module.weight.shape[0]), int(module.weight.shape[1]), shapes=shapes)
    if isinstance(module, torch.nn.Linear) or hasattr(module, "out_features"):
        return Place("linear", int(getattr(module, "in_features", 0)), int(module.out_features), shapes=shapes)
    if isinstance(module, torch.nn.Embedding):
        scale = float(getattr(module, "embed_scale", 1.0))
        return Place("embedding", module.num_embeddings, module.embedding_dim, scale, shapes)
    return Place("norm" if isinstance(module, torch.nn.LayerNorm) else "other", shapes=shapes)


class Model:
    """A model's places, and the names by which an adapter may mean its two ends."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.places = survey(model)  # as it was before anything was quantised: packed weights show no widths

    def refresh(self) -> None:
        """Learns of modules that came later."""
        self.places = {**survey(self.model), **self.places}

    @property
    def head(self) -> str:
        """Name of the output layer, "" without one."""
        return self._name(self.model.get_output_embeddings())

    @property
    def table(self) -> str:
        """Name of the token table."""
        return self._name(self.model.get_input_embeddings())

    def _name(self, wanted: Any) -> str:
        return next((name for name, module in self.model.named_modules() if module is wanted), "")

    def holders(self, wanted: Any) -> int:
        """How many modules hold ``wanted`` as a child."""
        return sum(any(child is wanted for child in parent.children()) for parent in self.model.modules())


def fit(stored: Stored, model: Model) -> Fit:
    """Puts an adapter's tensors to the model's modules. Raises ``LoadError``."""
    _check_base(stored, model)
    patterns, made = Patterns(stored.settings), Fit()
    _check_modules(stored, model, patterns)
    for name, roles in stored.groups.items():
        place, rank = _widened(model.places[name], stored.shapes.get(roles.get("a", ""), ())), patterns.rank(name)
        _check_shapes(stored, name, roles, place, rank)
        made.modules[name] = Fitted(place, rank, patterns.scaling(name, rank), dict(roles))
    _place_others(stored, model, patterns, made)
    for name in made.modules:
        if model.holders(model.model.get_submodule(name)) > 1:
            # PEFT changes it for the one that bears the name, and leaves the others as they are.
            message = f"`{name}` is shared by several parts of the model; it cannot be adapted for one of them"
            raise refused("adapter.type_unsupported", message)
    tied = {model.head, model.table} & set(made.modules)
    if stored.settings.tying and tied:
        raise refused(
            "adapter.type_unsupported",
            f"`ensure_weight_tying` with {some(tied)}: an adapter that ties both ends is not applied per request",
            "merge it into its base with PEFT's merge_and_unload",
        )
    return made


def _widened(place: Place, shape: tuple[int, ...]) -> Place:
    """A place of unknown width, with that of a tensor [.., inputs]; a pass at load shows whether it is right."""
    return place if place.inputs or len(shape) != 2 else replace(place, inputs=shape[1])


def _check_base(stored: Stored, model: Model) -> None:
    """Sizes of the named base against the model's, where the base is a directory of this machine."""
    named = stored.settings.base
    place = os.path.join(stored.path, named, "config.json") if named else ""
    try:
        with open(place, encoding="utf-8") as stream:
            theirs = json.load(stream)
    except (OSError, ValueError):
        return  # elsewhere: the tensors' shapes decide
    if not isinstance(theirs, dict):
        return
    own = model.model.config.get_text_config(decoder=True)
    kinds = {theirs.get("model_type"), (theirs.get("text_config") or {}).get("model_type")} - {None}
    if kinds and not kinds & {model.model.config.model_type, own.model_type}:
        message = f"the adapter's base `{named}` is a {some(map(str, kinds))}, this model a `{own.model_type}`"
        raise refused("adapter.base_mismatch", message)
    for name in BASE_FIELDS:
        given, have = theirs.get(name), getattr(own, name, None)
        if type(given) is int and type(have) is int and given != have:
            message = f"the adapter's base `{named}` has {name} {given}, this model {have}"
            raise refused("adapter.base_mismatch", message)


def _check_modules(stored: Stored, model: Model, patterns: Patterns) -> None:
    """Names against the model and against what the configuration targets."""
    places, settings = model.places, stored.settings
    absent = [name for name in stored.groups if name not in places]
    if absent:
        raise refused("adapter.base_mismatch", f"the base has no module {some(absent)}, which the adapter changes")
    for name in stored.groups:
        kind = "embedding" if name in stored.embeddings else "linear"
        if places[name].kind != kind:
            made = type(model.model.get_submodule(name)).__name__
            raise refused("adapter.type_unsupported", f"`{name}` is a `{made}`: no {kind} layer to adapt")
    if settings.targets is None:
        if stored.groups:
            raise refused("config.invalid", f"{CONFIG} of {stored.path} names no `target_modules`")
        return
    adaptable = (name for name, place in places.items() if place.kind in ("linear", "embedding"))
    targeted = {name for name in adaptable if patterns.targeted(name, model.head)}
    missing, surplus = targeted - set(stored.groups), set(stored.groups) - targeted
    if missing:
        raise refused("adapter.base_mismatch", f"the adapter has no tensors for {some(missing)}, which it targets")
    if surplus:
        raise refused("adapter.base_mismatch", f"the adapter has tensors for {some(surplus)}, which it does not target")


def _check_shapes(stored: Stored, name: str, roles: dict[str, str], place: Place, rank: int) -> None:
    settings, embedding = stored.settings, place.kind == "embedding"
    wanted: dict[str, tuple[int, ...]] = {"a": (rank, place.inputs), "b": (place.outputs, rank)}
    if settings.dora:
        wanted["magnitude"] = (place.outputs,)
    if settings.lora_bias and not embedding:
        wanted["b_bias"] = (place.outputs,)
    if set(roles) != set(wanted):
        odd = some(roles[role] for role in set(roles) - set(wanted)) or some(set(wanted) - set(roles))
        verb = "surplus" if set(roles) - set(wanted) else "missing"
        raise refused("adapter.base_mismatch", f"adapter tensors of `{name}`: {verb} {odd}")
    for role, shape in wanted.items():
        given = stored.shapes[roles[role]]
        if given != shape:
            what = "tokens" if embedding and role == "a" else "sizes"
            raise refused(
                "adapter.base_mismatch",
                f"`{roles[role]}` is {list(given)}; rank {rank} and the base's {what} ask for {list(shape)}",
            )


def _place_others(stored: Stored, model: Model, patterns: Patterns, made: Fit) -> None:
    """Tensors that are no LoRA: trained biases, replaced modules, copies of the base's own."""
    settings = stored.settings
    replaced: dict[str, dict[str, str]] = defaultdict(dict)
    for (name, attribute), tensor in stored.others.items():
        place = model.places.get(name)
        shape = _shape(model, place, name, attribute)
        if place is None or shape is None:
            raise refused("adapter.base_mismatch", f"the base has no tensor `{name}.{attribute}` for `{tensor}`")
        if stored.shapes[tensor] != shape:
            given = list(stored.shapes[tensor])
            if name in (model.table, model.head) and attribute == "weight":
                message = f"a vocabulary of {given[0]} tokens in `{tensor}`, of {shape[0]} in the base"
            else:
                message = f"`{tensor}` is {given}, the base's {list(shape)}"
            raise refused("adapter.base_mismatch", message)
        if patterns.saved(name):
            replaced[name][attribute] = tensor
        elif attribute == "bias" and settings.bias != "none":
            if place.kind not in ("linear", "norm"):
                raise refused("adapter.type_unsupported", f"a trained bias of `{name}` is not applied per request")
            made.modules.setdefault(name, Fitted(place)).bias = tensor
        else:
            made.carried.append((name, attribute, tensor))
    for name in _saved(model, patterns):
        lacking = set(model.places[name].shapes) - set(replaced.get(name, {}))
        if lacking:
            raise refused("adapter.base_mismatch", f"`modules_to_save` names `{name}`; its {some(lacking)} is missing")
    for name, tensors in replaced.items():
        made.modules.setdefault(name, Fitted(model.places[name])).replaced = tensors
    if settings.bias == "lora_only":
        bare = [n for n in stored.groups if "bias" in model.places[n].shapes and not made.modules[n].bias]
        if bare:
            raise refused("adapter.base_mismatch", f"`bias` is lora_only; the adapter has none for {some(bare)}")


def _saved(model: Model, patterns: Patterns) -> Iterator[str]:
    """Places that `modules_to_save` names. Raises for a module that has parts."""
    names = list(patterns.settings.saved)
    found = [name for name, _ in model.model.named_modules() if name and patterns.saved(name)]
    if names and not found:
        raise refused("adapter.base_mismatch", f"the base has no module {some(names)} of `modules_to_save`")
    for name in found:
        if name not in model.places:
            raise refused(
                "adapter.type_unsupported",
                f"`modules_to_save` names `{name}`, which is made of other modules; it is not replaced per request",
                "merge the adapter into its base with PEFT's merge_and_unload",
            )
        yield name


def _shape(model: Model, place: Place | None, name: str, attribute: str) -> tuple[int, ...] | None:
    """Shape of a base tensor, also where it is packed now."""
    if place is None:
        return None
    if attribute in place.shapes:
        return place.shapes[attribute]
    shape = getattr(getattr(model.model.get_submodule(name), attribute, None), "shape", None)
    return None if shape is None else tuple(shape)
