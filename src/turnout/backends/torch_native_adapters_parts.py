"""What an adapter does to the rows of one module, and how it is folded into weights.

LoRA (Hu et al. 2021): y = W x + s B A x. DoRA (Liu et al. 2024, section 4.1, as PEFT computes it): the rows of
W + s B A are scaled to trained lengths m, so y = g (W x + s B A x) + bias with g = m / ||W + s B A|| per output;
g is a constant once training is over and computed at load. A token table looks A up instead of multiplying.

Adapters compute in float32 (float64 if they are stored so), whatever the base computes in, as PEFT has them.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

from turnout.backends.torch_native_adapters_fit import Fitted, Place
from turnout.backends.torch_native_adapters_read import Stored, refused

CHUNK = 256  # rows of an identity matrix at a time
PACKED_APART = 0.05  # mean difference of a quantised weight from the float one, relative to the mean size


@dataclass(slots=True)
class Part:
    """One adapter in one module; None where it does nothing of the kind.

    ``a`` [rank, inputs] ([tokens, rank] of a token table), ``b`` [outputs, rank] with scaling and gain folded in,
    ``b_bias`` [outputs]; ``gain`` [outputs] and ``shift`` [outputs] of DoRA: gain * (y - bias) + bias is
    gain * y - shift; ``bias`` [outputs] is added to what the base adds; ``replaced`` stands in for the module.
    """

    a: Any = None
    b: Any = None
    b_bias: Any = None
    gain: Any = None
    shift: Any = None
    bias: Any = None
    replaced: Any = None
    lookup: bool = False

    def apply(self, x: Any, out: Any) -> None:
        """Changes ``out`` [.., outputs], what the base gives for ``x`` [.., inputs] (or tokens), in place."""
        from torch.nn.functional import embedding, linear

        if self.replaced is not None:
            out.copy_(self.replaced(x))
        work = out
        if self.gain is not None:
            work = out.to(self.gain.dtype)  # not in steps of a narrow type
            work.mul_(self.gain)
            if self.shift is not None:
                work.sub_(self.shift)
        if self.a is not None:
            inner = embedding(x, self.a) if self.lookup else linear(x.to(self.a.dtype), self.a)
            work.add_(linear(inner, self.b, self.b_bias))
        if self.bias is not None:
            work.add_(self.bias)
        if work is not out:
            out.copy_(work)

    def tensors(self) -> list[Any]:
        """Everything it holds."""
        held = [self.a, self.b, self.b_bias, self.gain, self.shift, self.bias]
        held += list(self.replaced.parameters()) if self.replaced is not None else []
        return [tensor for tensor in held if tensor is not None]


def build(stored: Stored, fitted: Fitted, module: Any, forward: Any, device: Any) -> Part:
    """Makes the part of one module; ``forward`` is the module's own, without adapters. Raises ``LoadError``."""
    import torch

    def take(name: str) -> Any:
        tensor = stored.tensor(name)
        kept = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        tensor = tensor.to(device=device, dtype=kept)
        if not bool(torch.isfinite(tensor).all()):
            raise refused("artifact.corrupt", f"`{name}` holds numbers that are not finite")
        return tensor

    place = fitted.place
    part = Part(lookup=place.kind == "embedding")
    if fitted.lora:
        a, b = take(fitted.lora["a"]), take(fitted.lora["b"]) * fitted.scaling
        if "b_bias" in fitted.lora:
            part.b_bias = take(fitted.lora["b_bias"]) * fitted.scaling
        if "magnitude" in fitted.lora:
            part.gain = gain(take(fitted.lora["magnitude"]), weight_of(module, place, forward), a, b, place)
            part.shift = _shift(part.gain, module, place, forward)
            b = b * part.gain[:, None]
        part.a = a.T.contiguous() if part.lookup else a
        part.b = b * place.scale if part.lookup else b
    if fitted.bias:
        part.bias = take(fitted.bias) - own_bias(module, place, forward)
    if fitted.replaced:
        part.replaced = _replacement(module, place, {n: take(t) for n, t in fitted.replaced.items()})
    return part


def gain(magnitude: Any, weight: Any, a: Any, b: Any, place: Place) -> Any:
    """DoRA's m / ||W + B A|| [outputs]; ``weight`` [outputs, inputs] ([tokens, width] of a token table, whose
    outputs are its columns), ``b`` scaled."""
    import torch

    if place.kind == "embedding":
        weight = weight.T
    squares = torch.empty_like(magnitude)
    for start in range(0, weight.shape[0], CHUNK):  # the sum is as large as the weight itself
        rows = slice(start, start + CHUNK)
        squares[rows] = (weight[rows].to(b.dtype) + b[rows] @ a).norm(dim=1)
    return magnitude / squares


def _shift(scale: Any, module: Any, place: Place, forward: Any) -> Any:
    if place.kind == "embedding":
        return None
    bias = own_bias(module, place, forward)
    return (scale - 1) * bias if bool((bias != 0).any()) else None


def weight_of(module: Any, place: Place, forward: Any) -> Any:
    """The weight [outputs, inputs], of a token table [tokens, width]; of a quantised module what its product with
    the identity says, in float32."""
    import torch
    from transformers.pytorch_utils import Conv1D

    weight: Any = getattr(module, "weight", None)
    floats = torch.is_tensor(weight) and weight.is_floating_point()
    if floats and tuple(weight.shape) == place.shapes.get("weight", tuple(weight.shape)):
        weight = weight.detach()
        return weight.T if isinstance(module, Conv1D) else weight
    device = _device(module)
    with torch.inference_mode():
        parts = []
        for start in range(0, place.inputs, CHUNK):
            ids = torch.arange(start, min(start + CHUNK, place.inputs), device=device)
            if place.kind == "embedding":
                parts.append(forward(ids).float() / place.scale)
            else:
                parts.append(forward(torch.nn.functional.one_hot(ids, place.inputs).float()).float())
        made = torch.cat(parts)
        return made if place.kind == "embedding" else (made - own_bias(module, place, forward)).T


def own_bias(module: Any, place: Place, forward: Any) -> Any:
    """The bias [outputs] that a module adds, float32; zeros for none."""
    import torch

    device = _device(module)
    if hasattr(module, "bias"):
        return torch.zeros(place.outputs, device=device) if module.bias is None else module.bias.detach().float()
    if place.kind != "linear":
        return torch.zeros(place.outputs, device=device)
    with torch.inference_mode():
        return forward(torch.zeros(1, place.inputs, device=device))[0].float()


def _device(module: Any) -> Any:
    import torch

    tensors = (*module.parameters(), *module.buffers(), *(v for v in vars(module).values() if torch.is_tensor(v)))
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def _replacement(module: Any, place: Place, tensors: dict[str, Any]) -> Any:
    """The module with other parameters, sharing nothing that is changed."""
    import torch

    own = dict(module.named_parameters(recurse=False))
    if set(own) == set(tensors) and all(parameter.is_floating_point() for parameter in own.values()):
        twin = copy.copy(module)
        twin.__dict__.pop("forward", None)  # the wrapped one
        twin._parameters = dict(module._parameters)
        for name, tensor in tensors.items():
            twin._parameters[name] = torch.nn.Parameter(tensor.to(own[name].dtype), requires_grad=False)
        return twin
    if place.kind != "linear":
        raise refused(
            "adapter.type_unsupported",
            f"`modules_to_save` replaces a quantised `{type(module).__name__}`",
            "run the base without --quantize",
        )
    return _FloatLinear(tensors["weight"], tensors.get("bias"))


@dataclass(slots=True)
class _FloatLinear:
    """Stands in for a quantised layer: ``weight`` [outputs, inputs] and ``bias`` [outputs] in float32."""

    weight: Any
    bias: Any

    def __call__(self, x: Any) -> Any:
        from torch.nn.functional import linear

        return linear(x.float(), self.weight, self.bias)

    def parameters(self) -> list[Any]:
        return [self.weight] if self.bias is None else [self.weight, self.bias]


def check_carried(stored: Stored, carried: list[tuple[str, str, str]], modules: Any, places: dict[str, Place]) -> None:
    """Raises ``LoadError`` unless the base's tensors that an adapter carries are the base's own. ``modules`` gives
    (module, its own forward) by name."""
    import torch

    for name, attribute, tensor in carried:
        module, forward = modules(name)
        own: Any = getattr(module, attribute, None)
        place = places[name] if places[name].inputs else replace(places[name], inputs=stored.shapes[tensor][-1])
        exact = torch.is_tensor(own) and own.is_floating_point() and tuple(own.shape) == stored.shapes[tensor]
        if not exact and not (attribute == "weight" and place.kind in ("linear", "embedding")):
            message = f"`{tensor}` would change `{name}`, which the adapter does not target"
            raise refused("adapter.base_mismatch", message)
        theirs = stored.tensor(tensor)
        if exact:
            same = bool(torch.allclose(theirs.to(own.dtype).float(), own.detach().cpu().float(), rtol=1e-2, atol=1e-6))
        else:
            apart = (weight_of(module, place, forward).cpu().float() - theirs.float()).abs().mean()
            same = bool(apart <= PACKED_APART * theirs.float().abs().mean())
        if not same:
            raise refused(
                "adapter.base_mismatch",
                f"the adapter carries `{tensor}`, which differs from this base's `{name}.{attribute}`",
                "load the base that the adapter was trained on",
            )


# ---- merging ---------------------------------------------------------------------------


def check_merge(module: Any) -> None:
    """Raises ``LoadError`` for quantised weights; they cannot take an adapter without being quantised anew."""
    own = dict(module.named_parameters(recurse=False))
    if not own or not all(parameter.is_floating_point() for parameter in own.values()):
        raise refused(
            "adapter.type_unsupported",
            f"an adapter is merged into float weights only, not into a `{type(module).__name__}`",
            "apply it per request, or merge it before quantising",
        )


def merge(part: Part, module: Any, place: Place) -> None:
    """Folds a part into the module's float parameters, which become its own (a tied head keeps its weight)."""
    import torch
    from transformers.pytorch_utils import Conv1D

    def put(name: str, tensor: Any, like: Any) -> None:
        setattr(module, name, torch.nn.Parameter(tensor.to(like.dtype).contiguous(), requires_grad=False))

    own = dict(module.named_parameters(recurse=False))
    if part.replaced is not None:
        for name, parameter in part.replaced.named_parameters():
            put(name, parameter.detach(), own[name])
        own = dict(module.named_parameters(recurse=False))
    first = next(iter(own.values()))
    if part.a is not None:
        turned = isinstance(module, Conv1D)
        kept = own["weight"].detach()
        weight = kept.T.to(part.b.dtype) if turned else kept.to(part.b.dtype)
        if part.lookup:
            weight = (weight if part.gain is None else weight * part.gain) + part.a @ part.b.T / place.scale
        else:
            weight = (weight if part.gain is None else weight * part.gain[:, None]) + part.b @ part.a
        put("weight", weight.T if turned else weight, kept)
    added = [tensor for tensor in (part.b_bias, part.bias) if tensor is not None]
    if added:
        bias = own.get("bias")
        total = sum(added[1:], added[0])
        put("bias", total if bias is None else bias.detach().to(total.dtype) + total, first)
