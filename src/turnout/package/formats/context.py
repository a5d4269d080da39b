"""What stands around weights and graphs in a directory: config, tokenizer, templates, processors,
generation defaults, labels, pooling recipe, licence."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from turnout.config import READ
from turnout.package.facts import (
    Architecture,
    ChatTemplate,
    CodeNeed,
    Fact,
    Finding,
    Generation,
    Labels,
    Processor,
    Quantization,
    Recipe,
    Severity,
    Strength,
    Tokenizer,
)
from turnout.package.formats.template import read_template
from turnout.package.formats.tokenizer import read_tokenizer
from turnout.package.scan import ReadError, Scan, join, parent_of

# Kinds of rotary embedding that Transformers 5 computes, and those that appear only in other code.
ROPE_TYPES = frozenset({"default", "linear", "dynamic", "yarn", "longrope", "llama3", "proportional", "mrope"})
# Spellings of the same size in different families' configs; the first found counts.
DIMS: dict[str, tuple[str, ...]] = {
    "hidden_size": ("hidden_size", "d_model", "n_embd", "dim"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "num_heads", "n_heads", "encoder_attention_heads"),
    "num_key_value_heads": ("num_key_value_heads", "n_kv_heads"),
    "head_dim": ("head_dim", "d_kv"),
    "intermediate_size": ("intermediate_size", "d_ff", "n_inner", "ffn_dim", "encoder_ffn_dim", "hidden_dim"),
    "vocab_size": ("vocab_size",),
    "max_position_embeddings": (
        "max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_sequence_length",
        "max_target_positions",
    ),
    "num_labels": ("num_labels",),
}
SUB_CONFIGS = (
    "text_config",
    "vision_config",
    "audio_config",
    "encoder",
    "decoder",
    "language_config",
    "talker_config",
    "thinker_config",
    "llm_config",
)


@dataclass(slots=True)
class Context:
    """Everything read from one directory; parts that are absent are None or empty."""

    directory: str
    architecture: Architecture | None = None
    tokenizer: Tokenizer | None = None
    templates: list[ChatTemplate] = field(default_factory=list)
    processors: list[Processor] = field(default_factory=list)
    generation: Generation | None = None
    labels: Labels | None = None
    recipe: Recipe | None = None
    licence: Fact[str] | None = None
    code: CodeNeed = CodeNeed.NONE
    files: list[str] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)


def read_context(scan: Scan, directory: str) -> Context:
    """Context of ``directory`` ('' is the root). Memoised; never raises for odd content."""
    return scan.once(("context", directory), lambda: _read(scan, directory))


def nearest_context(scan: Scan, rel: str) -> Context | None:
    """Context of the nearest directory from the file's own up to the root that has a config or tokenizer."""
    directory = parent_of(rel)
    while True:
        names = ("config.json", "tokenizer.json", "tokenizer_config.json", "preprocessor_config.json", "vocab.txt")
        if any(scan.has(join(directory, name)) for name in names):
            return read_context(scan, directory)
        if not directory:
            return None
        directory = parent_of(directory)


def _read(scan: Scan, directory: str) -> Context:
    context = Context(directory)
    config = _object(scan, join(directory, "config.json"), context)
    if config is not None:
        source = join(directory, "config.json")
        context.architecture = read_architecture(config, source, context.findings)
        context.labels = _labels(config, source)
        if context.architecture.auto_map:
            context.code = CodeNeed.OPTIONAL
    context.tokenizer = read_tokenizer(scan, directory, context.findings)
    context.files += context.tokenizer.files if context.tokenizer else []
    _templates(scan, directory, context)
    _processors(scan, directory, context)
    context.generation = _generation(scan, directory, config or {}, context)
    context.recipe = pooling_recipe(scan, directory, context.findings)
    _check_width(context)
    context.licence = _licence(scan, directory)
    context.files = list(dict.fromkeys(context.files))
    return context


def _object(scan: Scan, rel: str, context: Context) -> dict[str, Any] | None:
    """JSON object of a file that is listed among the context's files; problems become its findings."""
    if not scan.has(rel):
        return None
    context.files.append(rel)
    try:
        value = scan.json(rel)
    except ReadError as error:
        context.findings.append(error.finding)
        return None
    if isinstance(value, dict):
        return value
    context.findings.append(
        Finding("config.invalid", Severity.ERROR, f"`{rel}` is not a JSON object", rel, type(value).__name__, "object")
    )
    return None


# ---- architecture ------------------------------------------------------------------------------


def read_architecture(config: dict[str, Any], source: str, findings: list[Finding], depth: int = 0) -> Architecture:
    """Architecture of a parsed config.json (or one of its parts), old and new spellings."""
    names = config.get("architectures")
    architecture = Architecture(
        model_type=str(config.get("model_type") or ""),
        class_names=[n for n in names if isinstance(n, str)] if isinstance(names, list) else [],
        dims=_dims(config),
        rope=_rope(config, source, findings),
        attention=_attention(config),
        moe=_moe(config),
        tied=config["tie_word_embeddings"] if isinstance(config.get("tie_word_embeddings"), bool) else None,
        dtype=_dtype(config),
        quantization=_quantization(config, source),
        config=config,
        source=source,
    )
    auto_map = config.get("auto_map")
    if isinstance(auto_map, dict):
        architecture.auto_map = {k: v for k, v in auto_map.items() if isinstance(v, str)}
    if depth < 3:
        for name in SUB_CONFIGS:
            if isinstance(config.get(name), dict):
                architecture.sub[name] = read_architecture(config[name], f"{source}#/{name}", findings, depth + 1)
    text = architecture.sub.get("text_config")
    if text is not None and not architecture.dims.get("hidden_size"):
        architecture.dims = {**text.dims, **architecture.dims}
    return architecture


def _dims(config: dict[str, Any]) -> dict[str, int]:
    dims: dict[str, int] = {}
    for name, spellings in DIMS.items():
        for spelling in spellings:
            value = config.get(spelling)
            if type(value) is int and 0 <= value < 1 << 40:
                dims[name] = value
                break
    return dims


def _rope(config: dict[str, Any], source: str, findings: list[Finding]) -> dict[str, Any]:
    parameters = config.get("rope_parameters") or config.get("rope_scaling")
    rope: dict[str, Any] = {}
    if isinstance(config.get("rope_theta"), (int, float)):
        rope["rope_theta"] = config["rope_theta"]
    if not isinstance(parameters, dict):
        return rope
    # Families with several attention kinds keep one set of parameters for each.
    groups = [v for v in parameters.values() if isinstance(v, dict) and ("rope_type" in v or "type" in v)] or [
        parameters
    ]
    for group in groups:
        kind = group.get("rope_type", group.get("type"))
        if isinstance(kind, str) and kind not in ROPE_TYPES:
            findings.append(
                Finding(
                    "config.unsupported_variant",
                    Severity.ERROR,
                    f"rotary embedding of unknown type `{kind}`",
                    f"{source}#/rope_parameters/rope_type",
                    kind,
                    ", ".join(sorted(ROPE_TYPES)),
                )
            )
    rope.update(parameters)
    return rope


def _attention(config: dict[str, Any]) -> dict[str, Any]:
    names = (
        "sliding_window",
        "layer_types",
        "attn_logit_softcapping",
        "final_logit_softcapping",
        "use_sliding_window",
        "attention_bias",
        "max_window_layers",
    )
    return {name: config[name] for name in names if config.get(name) is not None}


def _moe(config: dict[str, Any]) -> dict[str, Any]:
    names = (
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "n_routed_experts",
        "moe_intermediate_size",
        "n_shared_experts",
    )
    return {name: config[name] for name in names if config.get(name) is not None}


def _dtype(config: dict[str, Any]) -> str | None:
    value = config.get("dtype", config.get("torch_dtype"))
    return value.removeprefix("torch.") if isinstance(value, str) else None


def _quantization(config: dict[str, Any], source: str) -> Quantization | None:
    value = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(value, dict):
        return None
    method = value.get("quant_method") or value.get("quant_algo") or "unnamed"
    bits = value.get("bits", value.get("w_bit"))
    if bits is None and (value.get("load_in_4bit") or value.get("load_in_8bit")):
        bits = 4 if value.get("load_in_4bit") else 8
    group = value.get("group_size", value.get("q_group_size"))
    skipped = value.get("modules_to_not_convert") or value.get("ignore") or []
    return Quantization(
        method=str(method).lower(),
        bits=float(bits) if isinstance(bits, (int, float)) else None,
        group_size=group if isinstance(group, int) else None,
        symmetric=value.get("sym") if isinstance(value.get("sym"), bool) else None,
        packing=value.get("checkpoint_format") or value.get("format") or value.get("version"),
        activations=str(value["activation_scheme"]) if value.get("activation_scheme") else None,
        kv=str(value["kv_cache_scheme"]) if value.get("kv_cache_scheme") else None,
        skip_modules=[m for m in skipped if isinstance(m, str)] if isinstance(skipped, list) else [],
        source=f"{source}#/quantization_config",
    )


def _labels(config: dict[str, Any], source: str) -> Labels | None:
    names = config.get("id2label")
    if not isinstance(names, dict) or not names:
        return None
    try:
        ordered = [str(names[key]) for key in sorted(names, key=int)]
    except ValueError:
        return None
    problem = config.get("problem_type")
    return Labels(ordered, f"{source}#/id2label", problem if isinstance(problem, str) else None)


# ---- templates, processors, generation ---------------------------------------------------------


MAX_TEMPLATES = 32


def _templates(scan: Scan, directory: str, context: Context) -> None:
    """Reads the templates one by one; after an unsafe one, or too many, the rest is not looked at."""
    for number, (source, name, text) in enumerate(_template_texts(scan, directory, context)):
        if number >= MAX_TEMPLATES:
            message = f"more than {MAX_TEMPLATES} chat templates"
            context.findings.append(Finding("template.unsafe", Severity.ERROR, message, source.split("#")[0]))
            return
        template, findings = read_template(text, source, name)
        context.templates.append(template)
        context.findings += findings
        if any(f.code == "template.unsafe" for f in findings):
            return


def _template_texts(scan: Scan, directory: str, context: Context) -> list[tuple[str, str, str]]:
    """(source, name, text) of all templates: the jinja file, else the tokenizer's, else the processor's."""
    found: list[tuple[str, str, str]] = []
    rel = join(directory, "chat_template.jinja")
    files = [(rel, "default")] if scan.has(rel) else []
    extra = join(directory, "additional_chat_templates")
    files += [(f, f.rsplit("/", 1)[-1].removesuffix(".jinja")) for f in scan.glob("*.jinja", extra)]
    for path, name in files:
        context.files.append(path)
        try:
            found.append((path, name, scan.read(path, READ.template_bytes).decode("utf-8", "replace")))
        except ReadError as error:
            said = error.finding
            code = "template.unsafe" if said.code == "artifact.corrupt" else said.code
            context.findings.append(Finding(code, Severity.ERROR, said.message, path, said.observed, said.expected))
    if files:
        return found
    for name in ("tokenizer_config.json", "chat_template.json", "processor_config.json"):
        rel = join(directory, name)
        value = (scan.json_object(rel) or {}).get("chat_template")
        source = f"{rel}#/chat_template"
        if isinstance(value, str):
            return [(source, "default", value)]
        if isinstance(value, list):
            named = [t for t in value if isinstance(t, dict) and isinstance(t.get("template"), str)]
            return [(source, str(t.get("name", "default")), t["template"]) for t in named]
        if isinstance(value, dict):
            return [(source, str(k), v) for k, v in value.items() if isinstance(v, str)]
    return []


def _processors(scan: Scan, directory: str, context: Context) -> None:
    kinds = {
        "preprocessor_config.json": "",
        "processor_config.json": "multimodal",
        "image_processor_config.json": "image",
        "video_preprocessor_config.json": "video",
        "feature_extractor_config.json": "audio",
    }
    for name, kind in kinds.items():
        settings = _object(scan, join(directory, name), context)
        if settings is None:
            continue
        names = [settings.get(k) for k in ("image_processor_type", "feature_extractor_type", "processor_class")]
        class_name = next((n for n in names if isinstance(n, str)), None)
        audio = "sampling_rate" in settings or settings.get("feature_extractor_type")
        processor = Processor(kind or ("audio" if audio else "image"), join(directory, name), class_name, settings)
        if isinstance(settings.get("auto_map"), dict):
            processor.code = CodeNeed.OPTIONAL
        context.processors.append(processor)


def _generation(scan: Scan, directory: str, config: dict[str, Any], context: Context) -> Generation | None:
    rel = join(directory, "generation_config.json")
    settings = _object(scan, rel, context)
    values = {**config, **(settings or {})}
    eos = values.get("eos_token_id")
    ids = [i for i in (eos if isinstance(eos, list) else [eos]) if type(i) is int]
    numbers = {name: values.get(name) for name in ("pad_token_id", "bos_token_id", "decoder_start_token_id")}
    pad, bos, start = (v if type(v) is int else None for v in numbers.values())
    if settings is None and not ids and start is None:
        return None
    if context.tokenizer is not None:
        context.tokenizer.eos_ids = ids
    return Generation(
        ids, pad, bos, start, settings or {}, rel if settings is not None else join(directory, "config.json")
    )


def _check_width(context: Context) -> None:
    """Pooling for another width than the encoder's: nobody can tell which of the two is meant."""
    dimension = context.recipe.settings.get("dimension") if context.recipe else None
    width = context.architecture.dims.get("hidden_size") if context.architecture else None
    if dimension is not None and width is not None and dimension != width:
        context.findings.append(
            Finding(
                "recipe.conflict",
                Severity.ERROR,
                "pooling is configured for another width than the encoder has",
                join(context.directory, "modules.json"),
                f"pooling dimension {dimension}",
                f"encoder width {width}",
            )
        )


# ---- recipe and licence ------------------------------------------------------------------------


def pooling_recipe(scan: Scan, directory: str, findings: list[Finding]) -> Recipe | None:
    """Pooling that a sentence-transformers manifest in ``directory`` prescribes, old and new spelling."""
    rel = join(directory, "modules.json")
    try:
        modules = scan.json(rel) if scan.has(rel) else None
    except ReadError as error:
        findings.append(error.finding)
        return None
    if not isinstance(modules, list):
        return None
    settings: dict[str, Any] = {}
    for module in modules:
        kind = str(module.get("type", "")) if isinstance(module, dict) else ""
        if not kind.startswith("sentence_transformers."):
            return None  # what a foreign module does to the vectors, nobody here can say
        if kind.endswith(".Pooling"):
            settings |= _pooling(scan, directory, str(module.get("path", "")), findings)
        elif kind.endswith(".Normalize"):
            settings["normalize"] = True
        elif not kind.endswith((".Transformer", ".Dropout")):
            # A layer of its own weights; what it gives has another length than what went in.
            settings["dense"], settings["normalize"] = str(module.get("path") or kind), False
    if "pooling" not in settings:
        return None
    settings.setdefault("normalize", False)
    _sentence_settings(scan, directory, settings)
    return Recipe("pooling", settings, rel)


def _pooling(scan: Scan, directory: str, path: str, findings: list[Finding]) -> dict[str, Any]:
    try:
        rel = join(scan.refer(directory, path), "config.json")
    except ReadError as error:
        findings.append(error.finding)
        return {}
    config = scan.json_object(rel)
    if config is None:
        return {}
    modes = config.get("pooling_mode")
    if isinstance(modes, str):
        modes = [modes]
    if not isinstance(modes, list):
        legacy = {
            "cls_token": "cls",
            "max_tokens": "max",
            "mean_tokens": "mean",
            "weightedmean_tokens": "weightedmean",
            "mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
            "lasttoken": "lasttoken",
        }
        modes = [name for key, name in legacy.items() if config.get(f"pooling_mode_{key}") is True]
    settings: dict[str, Any] = {"pooling": "+".join(map(str, modes)) or "mean"}
    dimension = config.get("embedding_dimension", config.get("word_embedding_dimension"))
    if isinstance(dimension, int):
        settings["dimension"] = dimension
    settings["include_prompt"] = config.get("include_prompt", True) is not False
    return settings


def _sentence_settings(scan: Scan, directory: str, settings: dict[str, Any]) -> None:
    bert = scan.json_object(join(directory, "sentence_bert_config.json")) or {}
    if isinstance(bert.get("max_seq_length"), int):
        settings["max_length"] = bert["max_seq_length"]
    if bert.get("do_lower_case"):
        settings["lower_case"] = True
    main = scan.json_object(join(directory, "config_sentence_transformers.json")) or {}
    prompts = main.get("prompts")
    if isinstance(prompts, dict) and any(prompts.values()):
        settings["prompts"] = {str(k): str(v) for k, v in prompts.items()}
        settings["default_prompt"] = main.get("default_prompt_name")
    if isinstance(main.get("similarity_fn_name"), str):
        settings["similarity"] = main["similarity_fn_name"]


def _licence(scan: Scan, directory: str) -> Fact[str] | None:
    for where in dict.fromkeys((directory, "")):
        rel = join(where, "README.md")
        text = scan.head(rel, 1 << 16).decode("utf-8", "replace") if scan.has(rel) else ""
        front = re.match(r"---\s*\n(.*?)\n---", text, re.DOTALL)
        found = re.search(r"^license:\s*(\S[^\n]*)", front[1], re.MULTILINE) if front else None
        if found:
            return Fact(found[1].strip().strip("'\""), f"{rel}#license", Strength.DECLARED)
        for name in scan.entries:
            if parent_of(name) == where and re.match(r"(licen[cs]e|copying)", name.rsplit("/", 1)[-1], re.IGNORECASE):
                first = scan.head(name, 2048).decode("utf-8", "replace").strip().splitlines()
                return Fact(first[0].strip()[:80] if first else "", name, Strength.LAYOUT)
    return None
