"""A PEFT directory as it is stored: what its configuration asks, and its tensors by module and role.

Nothing of a model is known here. A field of the configuration is honoured, or concerns training only, or the
adapter is refused by the field's name: what a field unknown here would change cannot be told. Patterns of a
stranger's configuration are regular expressions, so they are tried with a limit on time.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from turnout.errors import LoadError

WEIGHTS, PICKLED, CONFIG = "adapter_model.safetensors", "adapter_model.bin", "adapter_config.json"
PATTERN_SECONDS = 2.0  # for all patterns of one adapter
# Fields that change nothing once training is over, or only say where the adapter comes from.
NEUTRAL = frozenset(
    {
        *("peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
        *("inference_mode", "lora_dropout", "fan_in_fan_out", "megatron_core", "runtime_config", "loftq_config"),
        *("eva_config", "qalora_group_size", "enable_lora"),
    }
)
HONOURED = frozenset(
    {
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora", "lora_bias", "bias"),
        *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "modules_to_save"),
        *("init_lora_weights", "ensure_weight_tying"),
    }
)
# Ways to begin that leave the base as it is; others (PiSSA, OLoRA, CorDA, LoftQ ...) train beside an altered base.
PLAIN_STARTS = ("true", "false", "none", "gaussian", "eva", "orthogonal", "mica")
ROLES = {"lora_A": "a", "lora_B": "b", "lora_embedding_A": "a", "lora_embedding_B": "b"}
ROLES["lora_magnitude_vector"] = "magnitude"
_LORA = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.(?P<part>lora_A|lora_B|lora_embedding_A|lora_embedding_B|"
    r"lora_magnitude_vector)(?:\.default)?(?P<end>\.weight|\.bias)?"
)


def refused(code: str, message: str, *hints: str) -> LoadError:
    """The error that every refusal here is."""
    return LoadError(message, code=code, hints=hints)


def some(names: Iterable[str], limit: int = 4) -> str:
    """A few names, and how many more there are."""
    listed = sorted(names)
    rest = f" and {len(listed) - limit} more" if len(listed) > limit else ""
    return ", ".join(f"`{name}`" for name in listed[:limit]) + rest


@dataclass(frozen=True, slots=True)
class Settings:
    """What an adapter_config.json asks. ``targets`` is a list of names, one expression, or None where the
    configuration names none; ``layers`` None means all."""

    rank: int
    alpha: float
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    rslora: bool
    dora: bool
    lora_bias: bool
    bias: str
    targets: list[str] | str | None
    exclude: list[str] | str
    layers: list[int] | None
    layers_pattern: list[str]
    saved: list[str]
    tying: bool
    base: str  # directory or name of the base model, "" where none is stated


@dataclass(slots=True)
class Stored:
    """Settings and tensors of one directory. ``groups``: names of tensors by module and role (``a``, ``b``,
    ``b_bias``, ``magnitude``); ``others``: names of tensors by the module and attribute of the base they are for."""

    path: str
    settings: Settings
    shapes: dict[str, tuple[int, ...]]
    groups: dict[str, dict[str, str]] = field(default_factory=dict)
    others: dict[tuple[str, str], str] = field(default_factory=dict)
    embeddings: frozenset[str] = frozenset()  # modules whose tensors are `lora_embedding_*`
    source: Any = None

    def tensor(self, name: str) -> Any:
        """A tensor on the CPU, as it is stored."""
        try:
            return self.source[name] if isinstance(self.source, dict) else self.source.get_tensor(name)
        except Exception as error:  # a file that is cut short, a type that PyTorch lacks
            raise refused("artifact.corrupt", f"tensor `{name}` of {self.path}: {error}") from error


def read(path: str) -> Stored:
    """Configuration and names of tensors. Raises ``LoadError`` for what is missing, broken or of another kind."""
    if not os.path.isdir(path):
        if os.path.isfile(path) and path.endswith(".gguf"):
            raise refused("adapter.type_unsupported", f"`{path}` is a GGUF adapter, which llama.cpp runs")
        raise refused("artifact.missing", f"there is no adapter directory `{path}`")
    settings = read_settings(os.path.join(path, CONFIG))
    source, shapes = _open(path)
    stored = Stored(path, settings, shapes, source=source)
    embeddings = set()
    for name in shapes:
        found = _LORA.fullmatch(name)
        if found is None:
            module, _, attribute = name.removeprefix("base_model.model.").rpartition(".")
            stored.others[module.replace(".modules_to_save", "").removesuffix(".base_layer"), attribute] = name
            continue
        part = found["part"]
        role = ROLES[part] if found["end"] != ".bias" else {"lora_B": "b_bias"}.get(part)
        if role is None:
            raise refused("adapter.base_mismatch", f"tensor `{name}` of {path} has no use in LoRA")
        stored.groups.setdefault(found["module"], {})[role] = name
        if "embedding" in part:
            embeddings.add(found["module"])
    stored.embeddings = frozenset(embeddings)
    if not stored.groups and not stored.others:
        raise refused("artifact.corrupt", f"the adapter {path} holds no tensors")
    return stored


def _open(path: str) -> tuple[Any, dict[str, tuple[int, ...]]]:
    """What gives tensors by name, and their shapes."""
    import torch
    from safetensors import safe_open

    place = os.path.join(path, WEIGHTS)
    if os.path.isfile(place):
        try:
            source = safe_open(place, framework="pt", device="cpu")
            return source, {name: tuple(source.get_slice(name).get_shape()) for name in source.keys()}  # noqa: SIM118
        except Exception as error:
            raise refused("artifact.corrupt", f"{place}: {error}") from error
    place = os.path.join(path, PICKLED)
    if not os.path.isfile(place):
        raise refused("artifact.missing", f"the adapter {path} has no weights ({WEIGHTS})")
    try:
        loaded = torch.load(place, map_location="cpu", weights_only=True)
    except Exception as error:
        hint = "let PEFT save it as safetensors: model.save_pretrained(PATH, safe_serialization=True)"
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise refused("code.pickle_unsafe", f"{place} does not load as tensors alone: {line}", hint) from error
    if not isinstance(loaded, dict) or not all(torch.is_tensor(value) for value in loaded.values()):
        raise refused("artifact.corrupt", f"{place} holds other things than tensors")
    return loaded, {str(name): tuple(value.shape) for name, value in loaded.items()}


# ---- the configuration -----------------------------------------------------------------


def read_settings(place: str) -> Settings:
    """Reads an adapter_config.json. Raises ``LoadError`` naming the field that cannot be honoured."""
    try:
        with open(place, encoding="utf-8") as stream:
            config = json.load(stream)
    except FileNotFoundError as error:
        raise refused("artifact.missing", f"there is no `{place}`") from error
    except (OSError, ValueError) as error:
        raise refused("config.invalid", f"{place}: {error}") from error
    if not isinstance(config, dict):
        raise refused("config.invalid", f"{place} is not an object")
    kind = str(config.get("peft_type") or "").upper()
    if kind != "LORA":
        raise refused(
            "adapter.type_unsupported",
            f"the adapter is of the type `{kind or 'absent'}`; per request only LoRA, rsLoRA and DoRA are applied",
            "merge it into its base with PEFT's merge_and_unload, or use --backend transformers",
        )
    _check_fields(config, place)
    return _settings(config, place)


def _check_fields(config: dict[str, Any], place: str) -> None:
    for name, value in config.items():
        if name in NEUTRAL or name in HONOURED or value in (None, False, "", 0) or value == [] or value == {}:
            continue
        raise refused(
            "adapter.type_unsupported",
            f"`{name}` of {place} changes what the adapter computes and is not applied per request",
            "merge it into its base with PEFT's merge_and_unload, or use --backend transformers",
        )
    start = str(config.get("init_lora_weights", True)).lower()
    if start not in PLAIN_STARTS:
        raise refused(
            "adapter.type_unsupported",
            f"the adapter began as `{start}`, beside a base that this altered",
            "let PEFT convert it: save_pretrained(..., path_initial_model_for_weight_conversion=...)",
        )


def _settings(config: dict[str, Any], place: str) -> Settings:
    def wrong(name: str) -> LoadError:
        return refused("config.invalid", f"`{name}` of {place} is `{config.get(name)}`")

    def names(name: str) -> list[str]:
        value = config.get(name) or []
        value = [value] if isinstance(value, str) else value
        if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
            raise wrong(name)
        return value

    def numbers(name: str, kinds: tuple[type, ...]) -> dict[str, Any]:
        value = config.get(name) or {}
        if not isinstance(value, dict) or not all(type(one) in kinds and one > 0 for one in value.values()):
            raise wrong(name)
        return value

    rank, alpha, bias = config.get("r", 8), config.get("lora_alpha", 8), config.get("bias") or "none"
    if type(rank) is not int or rank < 1:
        raise wrong("r")
    if type(alpha) not in (int, float) or not math.isfinite(alpha):
        raise wrong("lora_alpha")
    if bias not in ("none", "all", "lora_only"):
        raise wrong("bias")
    layers = config.get("layers_to_transform")
    layers = [layers] if type(layers) is int else layers or None
    if layers is not None and not all(type(one) is int for one in layers):
        raise wrong("layers_to_transform")
    if config.get("use_dora") and config.get("lora_bias"):
        raise refused("adapter.type_unsupported", f"{place}: DoRA with `lora_bias` is not applied per request")
    return Settings(
        rank=rank,
        alpha=float(alpha),
        rank_pattern=numbers("rank_pattern", (int,)),
        alpha_pattern=numbers("alpha_pattern", (int, float)),
        rslora=bool(config.get("use_rslora")),
        dora=bool(config.get("use_dora")),
        lora_bias=bool(config.get("lora_bias")),
        bias=bias,
        targets=_names_or_pattern(config, "target_modules", names) or None,
        exclude=_names_or_pattern(config, "exclude_modules", names),
        layers=layers,
        layers_pattern=names("layers_pattern"),
        saved=names("modules_to_save"),
        tying=bool(config.get("ensure_weight_tying")),
        base=str(config.get("base_model_name_or_path") or ""),
    )


def _names_or_pattern(config: dict[str, Any], name: str, names: Any) -> list[str] | str:
    value = config.get(name)
    return value if isinstance(value, str) else names(name)


# ---- patterns --------------------------------------------------------------------------


class Patterns:
    """Which modules a configuration means, by PEFT's rules. Raises ``LoadError`` (``config.invalid``) for a
    pattern that is no expression or takes too long."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self._until = time.monotonic() + PATTERN_SECONDS

    def rank(self, module: str) -> int:
        """Rank of a module: of the first pattern that ends its name, else the common one."""
        return int(self._pattern(self.settings.rank_pattern, module, self.settings.rank))

    def scaling(self, module: str, rank: int) -> float:
        """alpha / rank, or alpha / sqrt(rank) for rsLoRA (Kalajdzievski 2023)."""
        alpha = float(self._pattern(self.settings.alpha_pattern, module, self.settings.alpha))
        return alpha / (math.sqrt(rank) if self.settings.rslora else rank)

    def targeted(self, module: str, head: str) -> bool:
        """Whether the configuration targets a linear layer or a token table of this name; ``head`` is the output
        layer, which `all-linear` leaves out."""
        settings = self.settings
        if self._excluded(module) or settings.targets is None:
            return False
        if settings.targets == "all-linear":
            return module != head
        if isinstance(settings.targets, str):
            return self._full(settings.targets, module)
        if module in settings.targets:
            return True
        return any(module.endswith(f".{name}") for name in settings.targets) and self._layer(module)

    def saved(self, module: str) -> bool:
        """Whether `modules_to_save` names the module."""
        return any(module.endswith(name) for name in self.settings.saved)

    def _excluded(self, module: str) -> bool:
        exclude = self.settings.exclude
        if isinstance(exclude, str):
            if exclude and self._full(exclude, module):
                return True
        elif any(module == name or module.endswith(f".{name}") for name in exclude):
            return True
        return any(self._full(rf"(?:.*\.)?(?:{name})(?:\..*)?", module) for name in self.settings.saved)

    def _layer(self, module: str) -> bool:
        """Whether the layer of the module is one of `layers_to_transform`."""
        if self.settings.layers is None:
            return True
        patterns = [rf"(?:^|.*?\.)(?:{name})\.(\d+)\." for name in self.settings.layers_pattern]
        for pattern in patterns or [r".*?\.[^.]*\.(\d+)\."]:
            found = self._match(pattern, module)
            if found is not None:
                return int(found[1]) in self.settings.layers
        return False

    def _pattern(self, patterns: dict[str, Any], module: str, default: float) -> float:
        for name, value in patterns.items():
            if self._match(rf"(?:.*\.)?(?:{name})$", module) is not None:
                return float(value)
        return default

    def _full(self, pattern: str, module: str) -> bool:
        return self._match(rf"(?:{pattern})\Z", module) is not None

    def _match(self, pattern: str, module: str) -> Any:
        import regex  # type: ignore[import-untyped]  # a dependency of Transformers; has time limits

        with suppress(TimeoutError):
            try:
                left = self._until - time.monotonic()
                if left > 0:
                    return regex.match(pattern, module, timeout=left)
            except (regex.error, RecursionError) as error:
                raise refused("config.invalid", f"the adapter's pattern `{pattern}`: {error}") from error
        raise refused("config.invalid", f"the adapter's patterns take too long (`{pattern[:80]}`)")
