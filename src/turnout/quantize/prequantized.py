"""Hugging Face directories whose weights are stored quantised, read as floats layer by layer.

``weights`` gives a mapping of parameters that Transformers' own loader takes as a state dict: a value is expanded
when the loader asks for it, so that the floats of one layer at a time are held beside the model. What computes
afterwards (8 bits, bf16) is the executor's choice; the expanded numbers are those of the stored format exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from turnout.errors import LoadError, NotSupportedError
from turnout.quantize import stored

# Parts of a layer that say how activations or caches were quantised where the file was made; activations are
# quantised here per token as they come, which is at least as fine.
UNUSED = frozenset(
    {"input_scale", "input_zero_point", "input_global_scale", "input_scale_ub", "k_scale", "v_scale", "q_scale"}
)


@dataclass(frozen=True, slots=True)
class Format:
    """How one directory stores its quantised layers. ``main``: the part that marks such a layer; ``needs`` and
    ``may`` its other parts; ``expand`` makes its weight [out, in] of them; ``target`` is what it is called then
    (put behind the layer's name). ``identity``: for evidence."""

    identity: str
    main: str
    needs: frozenset[str]
    may: frozenset[str]
    expand: Callable[[stored.Parts], Any]
    target: str = ".weight"
    joint: str = "."  # between a layer's name and a part's


class Expanded:
    """A weight that is expanded when it is asked for, in the way of safetensors' slices."""

    def __init__(self, name: str, parts: Mapping[str, Any], form: Format) -> None:
        self.name, self.parts, self.form = name, parts, form

    def __getitem__(self, index: Any) -> Any:
        """The float32 weight, or a part of it. Raises ``LoadError`` naming the layer whose parts do not fit."""
        held = {part: tensor[...] for part, tensor in self.parts.items()}
        try:
            return self.form.expand(held)[index]
        except LoadError as error:
            raise LoadError(f"`{self.name}`: {error.message}", code=error.code, hints=error.hints) from error


def format_of(settings: Mapping[str, Any]) -> Format:
    """The format that a ``quantization_config`` tells of. Raises ``NotSupportedError`` with the reason for one that is
    not read here."""
    method = str(settings.get("quant_method") or "").lower()
    if method not in READERS:
        raise _refused(f"`{method or 'no quant_method'}` weights are not read here")
    return READERS[method](settings)


def weights(settings: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters by name: plain tensors as they are, quantised layers as ``Expanded``.

    ``tensors`` are tensors or safetensors slices by stored name. Raises ``NotSupportedError`` for a format, and
    ``LoadError`` for a layer with a part too few or one that nothing explains.
    """
    form = format_of(settings)
    layers = {name.removesuffix(form.joint + form.main) for name in tensors if name.endswith(form.joint + form.main)}
    known = {form.main, *form.needs, *form.may}
    found: dict[str, Any] = {}
    parts: dict[str, dict[str, Any]] = {layer: {} for layer in layers}
    for name, tensor in tensors.items():
        layer, part = _cut(name, layers, form.joint)
        if layer and part in known:
            parts[layer][part] = tensor
        elif name.rpartition(".")[2] not in UNUSED:
            found[name] = tensor
    for layer, held in parts.items():
        missing = form.needs - set(held)
        if form.main == "weight" and missing == form.needs:  # an ordinary layer beside quantised ones
            found |= {f"{layer}{form.joint}{part}": tensor for part, tensor in held.items()}
        elif missing:
            raise LoadError(
                f"`{layer}` is stored as {form.identity} without `{'`, `'.join(sorted(missing))}`",
                code="tensor.missing",
                hints=["download the package again; a shard may be incomplete"],
            )
        else:
            found[layer + form.target] = Expanded(layer, held, form)
    _explain(found, form)
    return found


def _cut(name: str, layers: Iterable[str], joint: str) -> tuple[str, str]:
    layer, _, part = name.rpartition(joint)
    return (layer, part) if layer in layers else ("", name)


def _explain(found: Mapping[str, Any], form: Format) -> None:
    """No part of a quantised layer may be left over as a parameter."""
    strange = [
        name
        for name, value in found.items()
        if not isinstance(value, Expanded) and name.rpartition(form.joint)[2] in form.needs | form.may - {"bias"}
    ]
    if strange:
        raise LoadError(
            f"`{strange[0]}` ({len(strange)} such) belongs to no layer with `{form.main}`", code="tensor.unexpected"
        )


# ---- one reader per method -----------------------------------------------------------------


def _gptq(settings: Mapping[str, Any]) -> Format:
    bits = settings.get("bits")
    if bits not in (2, 3, 4, 8):
        raise _refused(f"GPTQ in {bits} bits")
    written = str(settings.get("checkpoint_format") or "gptq").lower()
    if written not in ("gptq", "gptq_v2"):
        raise _refused(f"GPTQ stored as `{written}`")
    if settings.get("dynamic"):
        raise _refused("GPTQ with settings of single layers (`dynamic`)")
    version, group = "v1" if written == "gptq" else "v2", int(settings.get("group_size") or -1)

    def expand(parts: stored.Parts) -> Any:
        return stored.gptq(parts, bits, version == "v1", group)

    needs = frozenset({"qzeros", "scales"})
    return Format(f"gptq {version}, {bits} bits", "qweight", needs, frozenset({"g_idx"}), expand)


def _awq(settings: Mapping[str, Any]) -> Format:
    bits, version = settings.get("bits", settings.get("w_bit", 4)), str(settings.get("version", "gemm")).lower()
    if version != "gemm" or bits != 4:
        raise _refused(f"AWQ packed as `{version}` in {bits} bits")

    def expand(parts: stored.Parts) -> Any:
        return stored.awq(parts, bits)

    return Format("awq gemm, 4 bits", "qweight", frozenset({"qzeros", "scales"}), frozenset(), expand)


def _compressed(settings: Mapping[str, Any]) -> Format:
    groups = settings.get("config_groups")
    groups = [g for g in groups.values() if isinstance(g, Mapping)] if isinstance(groups, Mapping) else []
    stores = {
        (str(g.get("format") or settings.get("format")), *_kind(g["weights"])) for g in groups if g.get("weights")
    }
    if len(stores) != 1:
        raise _refused(f"compressed-tensors with {len(stores)} ways of storing weights")
    written, bits, kind, block = stores.pop()
    sparse = settings.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise _refused(f"compressed-tensors with `{sparse.get('format')}` sparsity")
    transforms = settings.get("transform_config")
    if isinstance(transforms, Mapping) and transforms.get("config_groups"):
        raise _refused("compressed-tensors with `transform_config`")
    name = f"compressed-tensors {written}, {kind} of {bits} bits"
    zero = frozenset({"weight_zero_point"})
    if written == "pack-quantized" and kind == "int" and bits in (4, 8):

        def unpack(parts: stored.Parts) -> Any:
            return stored.packed_ints(parts, int(bits))

        needs = frozenset({"weight_shape", "weight_scale"})
        return Format(name, "weight_packed", needs, zero | {"weight_g_idx"}, unpack)
    if written in ("int-quantized", "float-quantized", "naive-quantized") and (kind == "int" or bits == 8):

        def expand(parts: stored.Parts) -> Any:
            return stored.plain_numbers(parts, block)

        return Format(name, "weight", frozenset({"weight_scale"}), zero, expand)
    raise _refused(name)


def _kind(weights: Any) -> tuple[Any, str, tuple[int, int] | None]:
    """Bits, type and block of a group's ``weights``."""
    if not isinstance(weights, Mapping):
        return None, "?", None
    sides = weights.get("block_structure") if weights.get("strategy") == "block" else None
    if isinstance(sides, str):  # "128x128"
        sides = [int(side) for side in sides.split("x") if side.isdigit()]
    block = (int(sides[0]), int(sides[1])) if isinstance(sides, list) and len(sides) == 2 else None
    return weights.get("num_bits"), str(weights.get("type", "int")), block


def _fp8(settings: Mapping[str, Any]) -> Format:
    block = settings.get("weight_block_size")
    if block is None:
        needs = frozenset({"weight_scale"})
        return Format("fp8, a scale per tensor or row", "weight", needs, frozenset(), stored.plain_numbers)
    if not (isinstance(block, (list, tuple)) and len(block) == 2 and all(isinstance(n, int) and n > 0 for n in block)):
        raise _refused(f"FP8 in blocks of {block}")
    sides = (block[0], block[1])

    def expand(parts: stored.Parts) -> Any:
        return stored.fp8_blocks(parts, sides)

    name = f"fp8, blocks of {sides[0]} x {sides[1]}"
    return Format(name, "weight", frozenset({"weight_scale_inv"}), frozenset(), expand)


def _mxfp4(settings: Mapping[str, Any]) -> Format:
    return Format("mxfp4", "blocks", frozenset({"scales"}), frozenset(), stored.mxfp4, target="", joint="_")


READERS: dict[str, Callable[[Mapping[str, Any]], Format]] = {
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "mxfp4": _mxfp4,
}


def _refused(what: str) -> NotSupportedError:
    return NotSupportedError(
        f"{what}; read are GPTQ (2, 3, 4, 8 bits), AWQ (gemm), compressed-tensors (4 or 8 bits packed, int8, FP8), "
        "FP8 with scales and MXFP4",
        code="quantization.unsupported",
        hints=["take the same model unquantised and convert it while loading: `--quantize q8`", "or as a GGUF file"],
    )
