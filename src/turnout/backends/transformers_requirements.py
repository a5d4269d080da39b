"""What Transformers itself says of a case: architecture, task class, configuration, quantization,
time series and adapters. Every question is asked; none stops the others."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turnout.backends import transformers_models as models
from turnout.backends.base import Action, Case, Kind, Remedy, Requirement, met, unknown, unmet
from turnout.backends.requirements import truthy
from turnout.package.facts import CodeNeed, Quantization
from turnout.types import Task

DEPENDENCY_HELP = re.compile(r"pip install (?:-U |--upgrade )?([A-Za-z0-9][A-Za-z0-9_.-]*)")
# Distributions behind quantization methods whose error names none or only one of them.
QUANTIZATION_PACKAGES = {
    "gptq": ["optimum", "gptqmodel"],
    "awq": ["gptqmodel"],
    "hqq": ["hqq"],
    "torchao": ["torchao"],
    "aqlm": ["aqlm"],
    "quanto": ["optimum-quanto"],
    "compressed-tensors": ["compressed-tensors"],
    "bitsandbytes": ["bitsandbytes"],
}


def directory_requirements(case: Case) -> list[Requirement]:
    """Requirements of a Transformers directory."""
    models.quiet()
    data = config_data(case)
    found, config = _architecture(case, data)
    found += quantization(case, data)
    found += dtype_option(case)
    if config is not None:
        found += _task_class(case, config)
        if case.task == Task.TIME_SERIES:
            found += time_series(case, config)
    if case.task == Task.ASR:
        found += _extractor(case)
    if case.task == Task.EMBEDDINGS and case.artifact.recipe and case.artifact.recipe.settings.get("dense"):
        message = "the recipe ends with a dense layer, which only sentence-transformers applies"
        found.append(unmet(Kind.RECIPE, "recipe.conflict", message, observed="dense layer", expected="pooling alone"))
    return found


def config_data(case: Case) -> dict[str, Any]:
    """The stored configuration as plain JSON, {} when there is none to read."""
    if case.artifact.architecture is not None and case.artifact.architecture.config:
        return case.artifact.architecture.config
    import json

    path = Path(models.folder(case)) / "config.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


# ---- architecture ----------------------------------------------------------------------


def _architecture(case: Case, data: dict[str, Any]) -> tuple[list[Requirement], Any]:
    """Whether the library knows the type and can build its configuration; with it the configuration."""
    from transformers import CONFIG_MAPPING

    model_type = data.get("model_type")
    where = f"{case.artifact.entry}#/model_type"
    if not isinstance(model_type, str) or not model_type:
        if any(finding.code == "config.invalid" for finding in case.artifact.findings):
            return [], None
        message = "config.json names no `model_type`"
        return [unmet(Kind.CONFIG, "config.invalid", message, expected="model_type", where=where)], None
    if model_type not in CONFIG_MAPPING:
        return _unknown_type(case, model_type, data, where)
    found = [met("architecture", Kind.ARCHITECTURE, model_type, "built in")]
    if data.get("auto_map"):
        found.append(met("code.optional", Kind.TRUST, model_type, "the package's code is not needed and not run"))
    refusal, config = _build_config(case, data)
    return found + refusal, config


# A later version may know more; nobody can tell before asking it.
UPGRADE = Remedy(
    Action.UPGRADE,
    "a newer Transformers may know it",
    ["pip", "install", "--upgrade", "transformers"],
    speculative=True,
)


def _unknown_type(case: Case, model_type: str, data: dict[str, Any], where: str) -> tuple[list[Requirement], Any]:
    import transformers

    if "AutoConfig" in (data.get("auto_map") or {}):
        if models.trusted(case):
            refusal, config = _build_config(case, data)
            return refusal, config
        if case.artifact.code is CodeNeed.REQUIRED:
            return [], None  # the common requirements say so
        remedy = Remedy(
            Action.GRANT_TRUST,
            "read the package's code, then allow it",
            ["--option", "trust_remote_code=true"],
            changes_trust=True,
        )
        message = f"`{model_type}` is computed by Python code of the package"
        observed = str(data["auto_map"]["AutoConfig"])
        return [unmet(Kind.TRUST, "code.required", message, observed=observed, where=where, remedies=[remedy])], None
    message = f"Transformers {transformers.__version__} does not know the model type `{model_type}`"
    known = f"one of {len(list(transformers.CONFIG_MAPPING.keys()))} known types"
    # An upgrade may help, but nothing here shows that a later version knows the type.
    return [
        unmet(
            Kind.ARCHITECTURE,
            "architecture.unknown",
            message,
            observed=model_type,
            expected=known,
            where=where,
            remedies=[UPGRADE],
        )
    ], None


def _build_config(case: Case, data: dict[str, Any]) -> tuple[list[Requirement], Any]:
    rope = _rope(case, data)
    try:
        config = models.read_config(case)
    except Exception as error:  # the library raises KeyError, ValueError, TypeError, its own strict errors
        if rope or any(f.code in ("config.unsupported_variant", "config.invalid") for f in case.artifact.findings):
            return rope, None
        message = f"the configuration cannot be built: {models.first_line(error)}"
        return [unmet(Kind.CONFIG, "config.invalid", message, where=case.artifact.entry)], None
    return rope, config


def _rope(case: Case, data: dict[str, Any]) -> list[Requirement]:
    """Position scalings of the configuration and its parts that the library has no function for."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if any(finding.code == "config.unsupported_variant" for finding in case.artifact.findings):
        return []  # inspection has named it already
    known = {"default", *ROPE_INIT_FUNCTIONS}
    found = []
    for pointer, section in _sections(data):
        for key in ("rope_parameters", "rope_scaling"):
            for inner, block in _rope_blocks(section.get(key)):
                kind = block.get("rope_type") or block.get("type")
                # Multi-axis rotations of vision models are part of their own code.
                if isinstance(kind, str) and kind not in known and kind != "mrope":
                    message = f"Transformers has no position scaling `{kind}`"
                    where = f"{case.artifact.entry}#{pointer}/{key}{inner}"
                    expected = ", ".join(sorted(known))
                    code = "config.unsupported_variant"
                    found.append(unmet(Kind.CONFIG, code, message, observed=kind, expected=expected, where=where))
    return found


def _sections(data: dict[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    parts = [(f"/{key}", value) for key, value in data.items() if key.endswith("_config") and isinstance(value, dict)]
    return [("", data), *parts]


def _rope_blocks(value: Any) -> list[tuple[str, dict[str, Any]]]:
    """One block, or one per kind of layer (``full_attention``, ``sliding_attention``)."""
    if not isinstance(value, dict):
        return []
    if "rope_type" in value or "type" in value:
        return [("", value)]
    return [(f"/{key}", block) for key, block in value.items() if isinstance(block, dict)]


def _task_class(case: Case, config: Any) -> list[Requirement]:
    if case.task not in models.AUTO_CLASSES and case.task not in models.NAMED_CLASSES:
        return []  # the common requirements refuse tasks that the backend does not serve
    cls = models.model_class(case, config)
    model_type = str(getattr(config, "model_type", ""))
    if cls is None:
        message = f"Transformers has no class of `{model_type}` for `{case.task}`"
        expected = ", ".join(models.AUTO_CLASSES.get(case.task, models.NAMED_CLASSES.get(case.task, ())))
        observed = ", ".join(str(name) for name in getattr(config, "architectures", None) or []) or model_type
        return [unmet(Kind.ARCHITECTURE, "architecture.unsupported", message, observed=observed, expected=expected)]
    text = getattr(cls, "main_input_name", "input_ids") == "input_ids"
    if case.task == Task.EMBEDDINGS and (not text or _needs_decoder(cls, config)):
        message = f"`{cls.__name__}` does not turn texts alone into hidden states"
        return [unmet(Kind.TASK_HEAD, "task.not_offered", message, observed=str(cls.main_input_name))]
    return [met("task.class", Kind.TASK_HEAD, case.task, cls.__name__)]


def _needs_decoder(cls: Any, config: Any) -> bool:
    return bool(getattr(config, "is_encoder_decoder", False)) and not cls.__name__.endswith("EncoderModel")


def dtype_option(case: Case) -> list[Requirement]:
    """Whether the option ``dtype`` names a type that the backend computes in."""
    named = case.options.get("dtype")
    if named is None or str(named) in ("float32", "bfloat16", "float16", "float64"):
        return []
    message = f"`{named}` is not a type to compute in"
    expected = "float32, bfloat16, float16"
    return [unmet(Kind.OPTION, "option.unsupported", message, observed=str(named), expected=expected, where="dtype")]


# ---- quantization ----------------------------------------------------------------------


def quantization(case: Case, data: dict[str, Any]) -> list[Requirement]:
    """Whether the library knows the stored quantization and has what it needs for it here."""
    settings = data.get("quantization_config")
    pointer = "/quantization_config"
    if settings is None and isinstance(data.get("text_config"), dict):
        settings, pointer = data["text_config"].get("quantization_config"), "/text_config/quantization_config"
    if not isinstance(settings, dict):
        return [met("quantization", Kind.QUANTIZATION, "", "none")]
    from transformers.quantizers.auto import AutoHfQuantizer

    where = f"{case.artifact.entry}#{pointer}"
    method = str(settings.get("quant_method") or "")
    try:
        with models.hushed():
            known = AutoHfQuantizer.supports_quant_method(dict(settings))
    except ValueError:
        known = False
    if not known:
        return [_unknown_quantization(case, method, where)]
    return _environment(case, method, settings, where)


def _unknown_quantization(case: Case, method: str, where: str) -> Requirement:
    plain = tensors_plain(case)
    detail = {
        True: "the stored tensors are plain floats, so the declaration and the file contradict each other",
        False: "the stored tensors are packed",
        None: "nothing tells whether the stored tensors are plain",
    }[plain]
    return unmet(
        Kind.QUANTIZATION,
        "quantization.unknown",
        f"Transformers knows no quantization `{method or 'without a quant_method'}` and would read the weights as "
        f"they are; {detail}",
        observed=method or "no quant_method",
        expected="a method of transformers.quantizers.auto",
        where=where,
    )


def tensors_plain(case: Case) -> bool | None:
    """Whether all stored tensors are ordinary floats; None when none is listed."""
    stored: Quantization | None = case.artifact.quantization
    if stored is not None and stored.tensors_plain is not None:
        return stored.tensors_plain
    kinds = set(case.artifact.tensors.dtypes())
    return kinds <= set(models.DTYPES) if kinds else None


def _environment(case: Case, method: str, settings: dict[str, Any], where: str) -> list[Requirement]:
    import torch
    from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig

    try:
        with models.hushed():
            made = AutoQuantizationConfig.from_dict(dict(settings))
            quantizer = AutoHfQuantizer.from_config(made, pre_quantized=True)
            quantizer.validate_environment(device_map={"": case.device}, dtype=torch.float32)
    except (ImportError, NameError) as error:
        return [_missing_package(method, error, where)]
    except Exception as error:  # ValueError, RuntimeError, TypeError: each method has its own
        message = f"`{method}` on `{case.device}`: {models.first_line(error)}"
        code = "quantization.unsupported"
        return [unmet(Kind.QUANTIZATION, code, message, observed=method, where=where)]
    if getattr(quantizer.quantization_config, "dequantize", False) and not truthy(case.options.get("allow_dequantize")):
        return [dequantized(case, method, where, 2)]
    message = (
        f"Transformers accepts `{method}` on `{case.device}`; running it (`--execute`) shows whether its kernels do"
    )
    return [unknown(Kind.QUANTIZATION, "quantization.kernel_missing", message, observed=method, where=where)]


def _missing_package(method: str, error: Exception, where: str) -> Requirement:
    packages = QUANTIZATION_PACKAGES.get(method) or DEPENDENCY_HELP.findall(str(error)) or [method]
    packages = [name for name in packages if find_spec(name.replace("-", "_")) is None] or packages
    return unmet(
        Kind.DEPENDENCY,
        "dependency.missing",
        f"`{method}` weights need {' and '.join(f'`{name}`' for name in packages)}: {models.first_line(error)}",
        observed="not installed",
        expected=", ".join(packages),
        where=where,
        remedies=[Remedy(Action.INSTALL, f"install {' '.join(packages)}", ["pip", "install", *packages])],
    )


def dequantized(case: Case, method: str, where: str, width: int) -> Requirement:
    """Weights that only run expanded to floats of ``width`` bytes: the option that allows it, with the memory."""
    size = case.artifact.tensors.param_count * width
    remedy = Remedy(
        Action.SET_OPTION,
        f"allow it with `--option allow_dequantize=true` ({_mib(size)} instead of "
        f"{_mib(case.artifact.tensors.total_bytes)})",
        ["--option", "allow_dequantize=true"],
        changes_numerics=True,
    )
    remedy.cost.bytes = size
    return unmet(
        Kind.QUANTIZATION,
        "quantization.kernel_missing",
        f"Transformers computes `{method}` weights only after expanding them to floats of {width} bytes: "
        f"{_mib(size)} in memory",
        observed=f"{method}, {_mib(case.artifact.tensors.total_bytes)}",
        expected="a kernel for the stored type",
        where=where,
        remedies=[remedy],
    )


def _mib(count: int) -> str:
    return f"{count / (1 << 20):,.1f} MiB"


# ---- time series -----------------------------------------------------------------------


def history_needed(config: Any) -> tuple[int, int]:
    """Context length and longest lag of a forecasting model; the history must hold their sum."""
    context = int(getattr(config, "context_length", None) or getattr(config, "prediction_length", 0) or 0)
    lags = [int(lag) for lag in getattr(config, "lags_sequence", None) or []]
    return context, max(lags, default=0)


def time_series(case: Case, config: Any) -> list[Requirement]:
    """Covariates that a request cannot give, and the length of the history where it is told."""
    found: list[Requirement] = []
    names = (
        "num_dynamic_real_features",
        "num_static_categorical_features",
        "num_static_real_features",
        "num_time_features",
    )
    wanted = {name: int(getattr(config, name, 0) or 0) for name in names}
    needs = [f"{name}={count}" for name, count in wanted.items() if count]
    if needs:
        message = f"the model takes covariates that a history alone does not give: {', '.join(needs)}"
        found.append(unmet(Kind.RECIPE, "recipe.missing", message, observed=", ".join(needs), expected="none"))
    if case.options.get("history") is not None:
        context, lag = history_needed(config)
        given = int(case.options["history"])
        if given < context + lag:
            message = (
                f"a history of {given} values is too short: {context + lag} are needed "
                f"(context {context} and longest lag {lag})"
            )
            code, expected = "option.unsupported", str(context + lag)
            found.append(unmet(Kind.SHAPE, code, message, observed=str(given), expected=expected, where="history"))
    return found or [met("recipe.covariates", Kind.RECIPE, case.task, "none needed")]


def _extractor(case: Case) -> list[Requirement]:
    """Whether the package says how sound becomes features."""
    names = ("preprocessor_config.json", "processor_config.json")
    if any((Path(models.folder(case)) / name).is_file() for name in names):
        return [met("component.extractor", Kind.COMPONENT, case.task)]
    message = "the package has no feature extractor"
    remedy = Remedy(Action.ADD_FILE, "add `preprocessor_config.json`")
    code, expected = "component.missing", " or ".join(names)
    return [unmet(Kind.COMPONENT, code, message, observed="none", expected=expected, remedies=[remedy])]


# ---- adapters --------------------------------------------------------------------------


def adapter_base(case: Case) -> str | None:
    """Directory of an adapter's base model: the option ``base``, else a resolved reference."""
    named = case.options.get("base")
    if named:
        path = Path(str(named))
        return str(path if path.is_absolute() or path.exists() else Path(case.root) / path)
    for reference in case.artifact.depends_on:
        if reference.role == "base_model" and reference.resolved:
            path = Path(reference.target)
            return str(path if path.is_absolute() else Path(case.root) / path)
    return None


def adapter_requirements(case: Case) -> list[Requirement]:
    """PEFT itself, its kind of adapter, and the base model with the adapter's dimensions."""
    if find_spec("peft") is None:
        remedy = Remedy(Action.INSTALL, "install peft", ["pip", "install", "peft"])
        return [
            unmet(Kind.DEPENDENCY, "dependency.missing", "adapters need `peft`", expected="peft", remedies=[remedy])
        ]
    found = dtype_option(case)
    base = adapter_base(case)
    if base is None or not (Path(base) / "config.json").is_file():
        if base is not None or not any(f.code == "adapter.base_missing" for f in case.artifact.findings):
            found.append(_base_missing(case, base))
        return found
    from turnout.backends.transformers_adapter import adapter_checks

    models.quiet()
    return found + adapter_checks(case, base)


def _base_missing(case: Case, base: str | None) -> Requirement:
    target = base or next((ref.target for ref in case.artifact.depends_on if ref.role == "base_model"), "")
    remedy = Remedy(Action.SET_OPTION, "name the base model with `--option base=PATH`", ["--option", "base=PATH"])
    return unmet(
        Kind.ARTIFACT,
        "adapter.base_missing",
        f"the adapter's base model {f'`{target}` ' if target else ''}is not here",
        observed=target or "no base named",
        expected="a Transformers directory",
        where=case.artifact.entry,
        remedies=[remedy],
    )
