"""GGUF in Transformers: its loader asked for a configuration, its gaps checked by us.

The loader reads one file, expands every tensor to floats, and passes over in silence: further
splits, tensors that are absent or that it has no name for, position scalings, and pre-tokenizers
outside its table (transformers 5.24: integrations/gguf, modeling_gguf_pytorch_utils). The questions
are put to the library with a small copy of the file: the same keys without the vocabulary, the same
tensor table over an empty, sparse data section.
"""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from turnout.backends import transformers_models as models
from turnout.backends.base import Action, Case, Kind, Remedy, Requirement, met, unknown, unmet
from turnout.backends.requirements import REFUSING, truthy
from turnout.backends.transformers_requirements import dequantized, dtype_option
from turnout.errors import LoadError
from turnout.package.facts import Severity
from turnout.tasks.contract import CONTRACTS

# Families whose tensors the loader only renames, so that the names alone say what is missing.
RENAMED_ONLY = frozenset({"llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3", "stablelm", "starcoder2"})
# Byte-level pre-tokenizers with GPT-2's own split, and those that first set single digits apart
# (llama.cpp, src/llama-vocab.cpp, llm_tokenizer_bpe).
GPT2_SPLIT = frozenset({"gpt-2", "phi-2", "jina-es", "jina-de", "jina-v2-es", "jina-v2-de", "olmo", "mpt", "trillion"})
DIGITS_SPLIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})


def path_of(case: Case) -> str:
    """Absolute path of the artifact's file."""
    return case.file(case.artifact.entry)


def gguf_requirements(case: Case) -> list[Requirement]:
    """Requirements of a GGUF file; all are evaluated."""
    absent = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if absent:
        remedy = Remedy(Action.INSTALL, f"install {' '.join(absent)}", ["pip", "install", *absent])
        message = f"reading GGUF needs {' and '.join(f'`{name}`' for name in absent)}"
        return [unmet(Kind.DEPENDENCY, "dependency.missing", message, expected=", ".join(absent), remedies=[remedy])]
    found = [*_dequantization(case), *dtype_option(case)]
    findings = [*case.artifact.findings, *case.artifact.tensors.problems]
    if any(
        f.severity is Severity.FATAL or (f.severity in REFUSING and f.code.startswith("artifact.")) for f in findings
    ):
        return found  # the file itself is damaged or incomplete; inspection says how
    models.quiet()
    from transformers.integrations.gguf import read_gguf_metadata

    try:
        metadata, names = read_gguf_metadata(path_of(case))
    except Exception as error:  # struct.error, ValueError, UnicodeDecodeError
        message = f"the library cannot read the file's keys: {models.first_line(error)}"
        return [*found, unmet(Kind.CONFIG, "config.invalid", message, where=case.artifact.entry)]
    found += _splits(case, metadata) + _rope(case, metadata, names) + _tokenizer(case, metadata)
    return found + _types(case) + _model(case, metadata, names)


# ---- the file --------------------------------------------------------------------------


def _dequantization(case: Case) -> list[Requirement]:
    packed = {dtype: n for dtype, n in case.artifact.tensors.dtypes().items() if dtype.upper() not in models.DTYPES}
    if not packed:
        return [met("quantization", Kind.QUANTIZATION, case.artifact.entry, "plain floats")]
    if truthy(case.options.get("allow_dequantize")):
        return [met("quantization", Kind.QUANTIZATION, case.artifact.entry, "expanded to floats, as allowed")]
    width = {"float64": 8, "float32": 4}.get(models.compute_dtype(case), 2)
    return [dequantized(case, ", ".join(sorted(packed)), case.artifact.entry, width)]


def _splits(case: Case, metadata: dict[str, Any]) -> list[Requirement]:
    count = int(metadata.get("split.count") or 0)
    if count <= 1:
        return [met("artifact.single", Kind.ARTIFACT, case.artifact.entry)]
    remedy = Remedy(
        Action.CONVERT,
        "join the files with llama.cpp's `llama-gguf-split --merge`",
        ["llama-gguf-split", "--merge", path_of(case), "merged.gguf"],
    )
    message = f"Transformers reads one GGUF file; this model is split into {count}"
    return [
        unmet(
            Kind.ARTIFACT,
            "artifact.shard_missing",
            message,
            observed=f"{count} files",
            expected="1 file",
            where=f"{case.artifact.entry}#split.count",
            remedies=[remedy],
        )
    ]


def _rope(case: Case, metadata: dict[str, Any], names: tuple[str, ...]) -> list[Requirement]:
    """Position scalings that the loader leaves out of the configuration it makes."""
    architecture = str(metadata.get("general.architecture"))
    kind = metadata.get(f"{architecture}.rope.scaling.type")
    found = []
    if kind not in (None, "none") and architecture not in ("gpt-oss", "qwen35", "qwen35moe"):
        message = f"Transformers' GGUF loader leaves out the position scaling `{kind}`"
        where = f"{case.artifact.entry}#{architecture}.rope.scaling.type"
        code = "config.unsupported_variant"
        found.append(unmet(Kind.CONFIG, code, message, observed=str(kind), expected="none", where=where))
    factors = [name for name in names if name.startswith(("rope_freqs", "rope_factors"))]
    if factors:
        message = f"Transformers' GGUF loader leaves out the position factors `{factors[0]}`"
        code = "config.unsupported_variant"
        found.append(unmet(Kind.CONFIG, code, message, observed=factors[0], expected="none", where=factors[0]))
    return found


def _types(case: Case) -> list[Requirement]:
    """Whether the library can expand each stored element type, asked with one block of zeros."""
    import gguf
    import numpy as np

    strange = []
    for dtype in case.artifact.tensors.dtypes():
        try:
            kind = gguf.GGMLQuantizationType[dtype.upper()]
            _, size = gguf.GGML_QUANT_SIZES[kind]
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), kind)
        except (KeyError, NotImplementedError, ValueError, AttributeError):
            strange.append(dtype)
    if not strange:
        return [met("tensor.dtype", Kind.DTYPE, case.artifact.entry)]
    message = f"Transformers cannot expand the element type {', '.join(f'`{name}`' for name in strange)}"
    code = "tensor.dtype_unsupported"
    return [unmet(Kind.DTYPE, code, message, observed=", ".join(strange), where=case.artifact.entry)]


# ---- tokenizer -------------------------------------------------------------------------


def _tokenizer(case: Case, metadata: dict[str, Any]) -> list[Requirement]:
    contract = CONTRACTS.get(case.task)
    if contract is None or "tokenizer" not in contract.roles or "tokenizer" in case.options:
        return []
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_TYPES

    remedy = Remedy(
        Action.SET_OPTION,
        "name the model's tokenizer with `--option tokenizer=PATH`",
        ["--option", "tokenizer=PATH"],
        changes_numerics=True,
    )
    kind = str(metadata.get("tokenizer.ggml.model"))
    if kind not in GGUF_TOKENIZER_TYPES:
        message = f"Transformers builds no tokenizer from the GGUF kind `{kind}`"
        expected = ", ".join(sorted(GGUF_TOKENIZER_TYPES))
        code, where = "tokenizer.unsupported_kind", f"{case.artifact.entry}#tokenizer.ggml.model"
        return [unmet(Kind.COMPONENT, code, message, observed=kind, expected=expected, where=where, remedies=[remedy])]
    pre = metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or _known_split(pre) or any(f.code == "tokenizer.pre_unknown" for f in case.artifact.findings):
        return [met("tokenizer.pre", Kind.COMPONENT, kind, str(pre or ""))]
    message = f"Transformers does not know the pre-tokenizer `{pre or 'unnamed'}` and would split text as GPT-2 does"
    return [
        unmet(
            Kind.COMPONENT,
            "tokenizer.pre_unknown",
            message,
            observed=str(pre or "none"),
            expected="a pre-tokenizer that the library splits rightly",
            where=f"{case.artifact.entry}#tokenizer.ggml.pre",
            remedies=[remedy],
        )
    ]


def _known_split(pre: Any) -> bool:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    return pre in GGUF_PRE_TOKENIZER_SPLITS or pre in GPT2_SPLIT or pre in DIGITS_SPLIT


def gguf_tokenizer(case: Case) -> Any:
    """The library's tokenizer of the file; where single digits must be set apart first, they are.

    ``AutoTokenizer`` would come to the same after reading the whole vocabulary twice more.
    """
    from tokenizers import pre_tokenizers
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, stored, settings = get_gguf_tokenizer(path_of(case))
    backend, more = convert_gguf_tokenizer(architecture, stored)
    if stored.get("tokenizer_type") == "gpt2" and stored.get("pre_tokenizer_type") in DIGITS_SPLIT:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **{**settings, **more})


# ---- the model -------------------------------------------------------------------------


def read_config(case: Case) -> Any:
    """The configuration that the library makes of the file's keys. Raises whatever it raises."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory(prefix="turnout-gguf-") as folder, models.hushed():
        small = Path(folder) / "small.gguf"
        write_small_copy(path_of(case), small)
        return AutoConfig.from_pretrained(folder, gguf_file=small.name, local_files_only=True, trust_remote_code=False)


def write_small_copy(source: str, target: Path) -> None:
    """Keys without string arrays, tensor table, and a data section of holes.

    The vocabulary's size, which the library counts in the token list, is written as a key.
    """
    import gguf
    from transformers.integrations.gguf import read_gguf_metadata
    from transformers.integrations.gguf.reader import _mapped, _read_metadata, _read_tensor_table

    metadata, _ = read_gguf_metadata(source)
    architecture = str(metadata["general.architecture"])
    metadata.setdefault(f"{architecture}.vocab_size", metadata.get("tokenizer.ggml.tokens") or 0)
    metadata.setdefault("general.name", "")
    blob = _mapped(source)
    _, count, position = _read_metadata(blob, source)
    table, _ = _read_tensor_table(blob, count, position)
    writer = gguf.GGUFWriter(target, architecture)
    for key, value in metadata.items():
        _add_key(writer, key, value)
    size = 0
    for name, shape, kind, _ in table:
        kind = gguf.GGMLQuantizationType(kind)
        stored = gguf.quants.quant_shape_to_byte_shape(shape, kind) if shape else shape
        length = 1
        for dim in stored:
            length *= dim
        import numpy as np

        writer.add_tensor_info(name, stored, np.dtype(np.uint8), length, raw_dtype=kind)
        size += length + 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(target, target.stat().st_size + size + 64)


def _add_key(writer: Any, key: str, value: Any) -> None:
    strings = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores", "tokenizer.ggml.token_type")
    if key in strings or key in ("general.architecture", "GGUF.version", "general.alignment"):
        return
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value) if 0 <= value < 1 << 32 else writer.add_int64(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif isinstance(value, list) and value:
        writer.add_array(key, value)


def _model(case: Case, metadata: dict[str, Any], names: tuple[str, ...]) -> list[Requirement]:
    """Architecture, class for the task, and every tensor of the model by name."""
    architecture = str(metadata.get("general.architecture"))
    where = f"{case.artifact.entry}#general.architecture"
    try:
        config = read_config(case)
    except Exception as error:  # ValueError for an architecture, KeyError and others for its keys
        return [_refused_config(architecture, error, where)]
    cls = models.model_class(case, config)
    if cls is None:
        message = f"Transformers has no class of `{config.model_type}` for `{case.task}`"
        return [unmet(Kind.ARCHITECTURE, "architecture.unsupported", message, observed=architecture, where=where)]
    found = [met("architecture", Kind.ARCHITECTURE, architecture, cls.__name__)]
    if architecture not in RENAMED_ONLY:
        message = f"the loader merges tensors of `{architecture}`; loading it (`--execute`) shows whether all are there"
        return [*found, unknown(Kind.TENSOR, "tensor.missing", message, observed=architecture, where=where)]
    binding = _bind_names(config, cls, names, architecture)
    for reason in binding.reasons(case.artifact.entry, truthy(case.options.get("allow_unexpected"))):
        found.append(
            unmet(Kind.TENSOR, reason.code, reason.message, observed=reason.observed, expected=reason.expected)
        )
    return found


def _refused_config(architecture: str, error: Exception, where: str) -> Requirement:
    import gguf
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    line = models.first_line(error)
    if "not supported" not in line:
        return unmet(Kind.CONFIG, "config.invalid", f"the configuration cannot be built: {line}", where=where)
    known = architecture in gguf.MODEL_ARCH_NAMES.values()
    return unmet(
        Kind.ARCHITECTURE,
        "architecture.unsupported" if known else "architecture.unknown",
        f"Transformers loads no GGUF of the architecture `{architecture}`",
        observed=architecture,
        expected=", ".join(sorted(set(GGUF_CONFIG_MAPPING) - {"general", "tokenizer"})),
        where=where,
    )


def _bind_names(config: Any, cls: Any, names: tuple[str, ...], architecture: str) -> models.Binding:
    """The model on the meta device with its tensors looked up in the file's table by the library's map."""
    import gguf
    import torch

    with torch.device("meta"), models.hushed():
        model = cls._from_config(config)
    model.tie_weights()
    kind = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    table = gguf.get_tensor_name_map(kind, int(config.num_hidden_layers))
    stored, bound, missing = set(names), set(), []
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    for name in model.state_dict():
        stem, dot, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "")
        in_file = f"{table.get_name(stem)}{dot}{suffix}"
        if in_file in stored:
            bound.add(in_file)
        elif name not in tied:
            missing.append(name)
    ignored = {name for name in stored if name.startswith(("rope_freqs", "rope_factors"))}  # refused on their own
    return models.Binding(model, sorted(missing), sorted(stored - bound - ignored))


def dry_bind(case: Case) -> models.Binding:
    """Names bound on the meta device; types and shapes are the loader's to check."""
    from transformers.integrations.gguf import read_gguf_metadata

    config = read_config(case)
    cls = models.model_class(case, config)
    if cls is None:
        raise LoadError(f"no class for `{case.task}`", code="architecture.unsupported")
    metadata, names = read_gguf_metadata(path_of(case))
    return _bind_names(config, cls, names, str(metadata["general.architecture"]))


def bind(case: Case, dtype: Any) -> models.Binding:
    """The model with all weights expanded to ``dtype``; surplus tensors are those without a name in it."""
    config = read_config(case)
    cls = models.model_class(case, config)
    if cls is None:
        raise LoadError(f"no class for `{case.task}`", code="architecture.unsupported")
    folder, name = os.path.split(path_of(case))
    with models.hushed():
        model, info = cls.from_pretrained(
            folder,
            gguf_file=name,
            config=config,
            dtype=dtype,
            device_map={"": case.device},
            output_loading_info=True,
            ignore_mismatched_sizes=True,
            local_files_only=True,
        )
    tied = set(getattr(model, "all_tied_weights_keys", None) or {})
    missing = sorted(set(info.get("missing_keys", ())) - tied)
    mismatched = [(key, tuple(a), tuple(b)) for key, a, b in info.get("mismatched_keys", ())]
    return models.Binding(model, missing, sorted(info.get("unexpected_keys", ())), sorted(mismatched))
