"""Transformers directories: config.json with weights in safetensors or torch files, single or sharded."""

from __future__ import annotations

from typing import Any

from turnout.package.facts import (
    Architecture,
    Artifact,
    ArtifactKind,
    CodeNeed,
    Finding,
    Labels,
    Recipe,
    Severity,
    Strength,
    TaskEvidence,
    TensorInventory,
)
from turnout.package.formats.context import Context, read_context
from turnout.package.formats.pickle import read_pickle, unsafe_finding
from turnout.package.formats.safetensors import read_safetensors
from turnout.package.scan import ReadError, Scan, join, parent_of
from turnout.types import Task

# Class-name endings of Transformers and the task each says (longest match first).
SUFFIX_TASKS: tuple[tuple[str, str], ...] = (
    ("ForSequenceClassification", Task.TEXT_CLASSIFICATION),
    ("ForTokenClassification", Task.TOKEN_CLASSIFICATION),
    ("ForQuestionAnswering", Task.QUESTION_ANSWERING),
    ("ForMaskedLM", Task.FILL_MASK),
    ("ForCausalLM", Task.TEXT_GENERATION),
    ("LMHeadModel", Task.TEXT_GENERATION),
    ("ForImageClassification", Task.IMAGE_CLASSIFICATION),
    ("ForObjectDetection", Task.OBJECT_DETECTION),
    ("ForSemanticSegmentation", Task.IMAGE_SEGMENTATION),
    ("ForUniversalSegmentation", Task.IMAGE_SEGMENTATION),
    ("ForDepthEstimation", Task.DEPTH_ESTIMATION),
    ("ForAudioClassification", Task.AUDIO_CLASSIFICATION),
    ("ForCTC", Task.ASR),
    ("ForSpeechSeq2Seq", Task.ASR),
    ("ForTextToWaveform", Task.TTS),
    ("ForTextToSpeech", Task.TTS),
    ("ForPrediction", Task.TIME_SERIES),
)
SPEECH = frozenset({"whisper", "speech_to_text", "moonshine", "speecht5", "kyutai_speech_to_text"})
DECISION = frozenset({"decision_transformer", "trajectory_transformer"})
SPEAKING = frozenset({"vits", "bark", "fastspeech2_conformer"})
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
WEIGHT_NAMES = (
    ("model.safetensors", "model.safetensors.index.json"),
    ("pytorch_model.bin", "pytorch_model.bin.index.json"),
)


def detect(scan: Scan) -> list[Artifact]:
    """Every directory with a config.json that names a model, or with weights of such a directory."""
    found = []
    for directory in scan.directories():
        if _is_model(scan, directory) and _focused(scan, directory):
            artifact = _artifact(scan, directory)
            claimed: set[str] = scan.once("claimed", set)
            claimed.update(artifact.files)
            found.append(artifact)
    return found


def detect_in(scan: Scan, directory: str) -> list[Artifact]:
    """The Transformers artifact of one directory, if it holds one."""
    return [_artifact(scan, directory)] if _is_model(scan, directory) else []


def _is_model(scan: Scan, directory: str) -> bool:
    if (
        scan.has(join(directory, "model_index.json"))
        or scan.has(join(parent_of(directory), "model_index.json"))
        and directory
    ):
        return False  # a part of a diffusers bundle
    if directory and scan.has(join(parent_of(directory), "modules.json")):
        config = scan.json_object(join(directory, "config.json")) or {}
        if "model_type" not in config:
            return False  # a layer of a sentence-transformers package
    if not _weights(scan, directory) or scan.has(join(directory, "adapter_config.json")):
        return False
    return scan.has(join(directory, "config.json"))


def _focused(scan: Scan, directory: str) -> bool:
    if scan.focus is None:
        return True
    names = {join(directory, name) for pair in WEIGHT_NAMES for name in pair} | {join(directory, "config.json")}
    return scan.focus in names or scan.focus.endswith(".safetensors")


def _weights(scan: Scan, directory: str) -> str | None:
    """Entry file of the weights in Transformers' order of search, None when there is none."""
    for single, index in WEIGHT_NAMES:
        for name in (single, index):
            if scan.has(join(directory, name)):
                return join(directory, name)
    loose = scan.glob("model-*-of-*.safetensors", directory) or scan.glob("*.safetensors", directory)
    return loose[0] if loose else None


def _artifact(scan: Scan, directory: str) -> Artifact:
    context = read_context(scan, directory)
    entry = _weights(scan, directory) or ""
    artifact = Artifact(f"transformers:{directory or '.'}", ArtifactKind.TRANSFORMERS, directory)
    artifact.files = list(context.files)
    _read_weights(scan, directory, entry, artifact)
    attach(artifact, context)
    _check_config(artifact, directory)
    _check_quantization(artifact)
    _check_vocabulary(artifact)
    tasks_of(artifact)
    artifact.files = list(dict.fromkeys(artifact.files))
    artifact.size_bytes = scan.size_of(artifact.files)
    return artifact


def attach(artifact: Artifact, context: Context) -> None:
    """Gives an artifact what its directory says: architecture, tokenizer, templates and so on."""
    artifact.architecture = context.architecture
    artifact.tokenizer = context.tokenizer
    artifact.templates = list(context.templates)
    artifact.processors = list(context.processors)
    artifact.generation = context.generation
    artifact.labels = context.labels
    artifact.recipe = context.recipe
    artifact.licence = context.licence
    artifact.code = context.code
    artifact.findings += context.findings
    artifact.files += [f for f in context.files if f not in artifact.files]
    if context.architecture is not None:
        artifact.quantization = context.architecture.quantization


# ---- weights -----------------------------------------------------------------------------------


def _read_weights(scan: Scan, directory: str, entry: str, artifact: Artifact) -> None:
    if entry.endswith(".index.json"):
        _read_index(scan, directory, entry, artifact)
    elif entry.endswith(".safetensors") and entry != join(directory, "model.safetensors"):
        artifact.findings.append(
            Finding(
                "artifact.missing",
                Severity.ERROR,
                "safetensors files without an index are not found by loaders",
                directory,
                entry,
                "model.safetensors or model.safetensors.index.json",
            )
        )
        artifact.files.append(entry)
    elif entry.endswith(".safetensors"):
        artifact.files.append(entry)
        artifact.tensors = read_safetensors(scan, entry)
    else:
        _read_torch(scan, entry, artifact)


def _read_torch(scan: Scan, rel: str, artifact: Artifact) -> None:
    artifact.files.append(rel)
    try:
        facts = read_pickle(scan, rel)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return
    if facts is None:
        artifact.findings.append(Finding("artifact.corrupt", Severity.ERROR, f"`{rel}` is not a torch file", rel))
        return
    if facts.unsafe:
        artifact.code = CodeNeed.FORBIDDEN
        artifact.findings.append(unsafe_finding(rel, facts.unsafe))
    artifact.tensors.shards.append(rel)
    artifact.tensors.problems += facts.inventory.problems
    artifact.tensors.tensors.update(facts.inventory.tensors)


def _read_index(scan: Scan, directory: str, entry: str, artifact: Artifact) -> None:
    artifact.files.append(entry)
    try:
        index = scan.json(entry)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        artifact.findings.append(Finding("index.inconsistent", Severity.ERROR, f"`{entry}` has no weight map", entry))
        return
    for name in dict.fromkeys(weight_map.values()):
        _read_shard(scan, directory, entry, name, artifact)
    _compare_index(entry, directory, weight_map, artifact)


def _read_shard(scan: Scan, directory: str, entry: str, name: str, artifact: Artifact) -> None:
    try:
        rel = scan.refer(directory, name)
    except ReadError as error:
        artifact.findings.append(error.finding)
        return
    artifact.files.append(rel)
    if not scan.has(rel):
        artifact.findings.append(
            Finding(
                "artifact.shard_missing",
                Severity.ERROR,
                f"shard `{name}` of `{entry}` is not in the package",
                rel,
                "absent",
                name,
            )
        )
        return
    if not name.endswith(".safetensors"):
        _read_torch(scan, rel, artifact)
        return
    shard = read_safetensors(scan, rel)
    again = artifact.tensors.tensors.keys() & shard.tensors.keys()
    if again:
        artifact.findings.append(
            Finding(
                "artifact.duplicate_tensor",
                Severity.ERROR,
                f"`{min(again)}` is in two shards",
                rel,
                rel,
                artifact.tensors.tensors[min(again)].file,
            )
        )
    artifact.tensors.tensors.update(shard.tensors)
    artifact.tensors.shards.append(rel)
    artifact.tensors.problems += shard.problems


def _compare_index(entry: str, directory: str, weight_map: dict[str, str], artifact: Artifact) -> None:
    """What the index says against what the shards hold; loaders go by the shards, so only a warning."""
    stored = artifact.tensors.tensors
    if artifact.findings or artifact.tensors.problems or not stored:
        return
    wrong = [n for n, f in weight_map.items() if n in stored and stored[n].file != join(directory, f)]
    absent = [n for n in weight_map if n not in stored]
    unnamed = [n for n in stored if n not in weight_map]
    for names, what in (
        (wrong, "names the wrong shard for"),
        (absent, "names a tensor no shard holds:"),
        (unnamed, "does not name the stored tensor"),
    ):
        if names:
            artifact.findings.append(
                Finding(
                    "index.inconsistent",
                    Severity.WARNING,
                    f"`{entry}` {what} `{names[0]}`" + (f" and {len(names) - 1} more" if len(names) > 1 else ""),
                    entry,
                )
            )


# ---- checks ------------------------------------------------------------------------------------


def _check_config(artifact: Artifact, directory: str) -> None:
    architecture = artifact.architecture
    path = join(directory, "config.json")
    if architecture is None:
        if not any(f.path == path for f in artifact.findings):
            artifact.findings.append(Finding("config.invalid", Severity.ERROR, "config.json cannot be used", path))
        return
    if not architecture.model_type:
        artifact.findings.append(
            Finding(
                "config.invalid",
                Severity.ERROR,
                "config.json has no `model_type`",
                f"{path}#/model_type",
                "absent",
                "the name of a model family",
            )
        )


def _check_quantization(artifact: Artifact) -> None:
    if artifact.quantization is not None and artifact.tensors.tensors:
        dtypes = artifact.tensors.dtypes()
        artifact.quantization.tensor_types = dtypes
        artifact.quantization.tensors_plain = set(dtypes) <= FLOATS


def _check_vocabulary(artifact: Artifact) -> None:
    """A token id that no embedding row answers to; more rows than tokens is ordinary padding."""
    tokenizer = artifact.tokenizer
    rows = embedding_rows(artifact.tensors, artifact.architecture)
    if tokenizer is None or tokenizer.max_id is None or rows is None or tokenizer.kind == "ctc-vocab":
        return
    if tokenizer.max_id >= rows:
        artifact.findings.append(
            Finding(
                "tokenizer.id_out_of_range",
                Severity.ERROR,
                f"the tokenizer gives ids up to {tokenizer.max_id}, the embedding has {rows} rows",
                tokenizer.path,
                str(tokenizer.max_id),
                f"at most {rows - 1}",
            )
        )


EMBEDDINGS = (
    "embed_tokens.weight",
    "word_embeddings.weight",
    "wte.weight",
    "embed_in.weight",
    "shared.weight",
    "tok_embeddings.weight",
)


def embedding_rows(tensors: TensorInventory, architecture: Architecture | None) -> int | None:
    """Rows of the token embedding, read from its tensor, else None."""
    rows = [t.shape[0] for n, t in tensors.tensors.items() if n.endswith(EMBEDDINGS) and len(t.shape) == 2]
    return max(rows) if rows else None


# ---- tasks -------------------------------------------------------------------------------------


def tasks_of(artifact: Artifact) -> None:
    """Adds the tasks that the configuration declares, with the recipe each needs."""
    architecture = artifact.architecture
    if architecture is None:
        return
    source = f"{architecture.source}#/architectures"
    automatic = [n for n in architecture.auto_map if n.startswith("AutoModel")]
    for name in [*architecture.class_names, *automatic]:
        for task in _class_tasks(name, artifact):
            artifact.tasks.append(TaskEvidence(task, source, Strength.CONFIG, name))
    _pooled(artifact)
    _heads(artifact)
    if Task.TEXT_GENERATION in artifact.task_ids() and any(t.valid for t in artifact.templates):
        artifact.tasks.insert(0, TaskEvidence(Task.CHAT, artifact.templates[0].source, Strength.CONFIG))


def _class_tasks(name: str, artifact: Artifact) -> list[str]:
    kind = artifact.architecture.model_type if artifact.architecture else ""
    for suffix, task in SUFFIX_TASKS:
        if name.endswith(suffix):
            return [task]
    if kind in DECISION:
        return [Task.DECISION]
    if kind in SPEAKING:
        return [Task.TTS]
    if name.endswith("ForConditionalGeneration"):
        return _conditional(kind, artifact)
    return []


def _conditional(kind: str, artifact: Artifact) -> list[str]:
    assert artifact.architecture is not None
    if kind in SPEECH:
        return [Task.ASR]
    if "vision_config" in artifact.architecture.sub:
        return [Task.IMAGE_TEXT_TO_TEXT, Task.TEXT_GENERATION]
    if "audio_config" in artifact.architecture.sub:
        return [Task.ASR]
    return [Task.TEXT2TEXT, Task.TRANSLATION, Task.SUMMARIZATION]


def _pooled(artifact: Artifact) -> None:
    """An encoder without a task head gives embeddings, if somebody says how to pool."""
    architecture = artifact.architecture
    assert architecture is not None
    names = architecture.class_names
    bare = bool(names) and all(n.endswith("Model") and not n.endswith("LMHeadModel") for n in names)
    text = artifact.tokenizer is not None and architecture.model_type not in DECISION
    if artifact.recipe is not None:
        artifact.tasks.append(TaskEvidence(Task.EMBEDDINGS, artifact.recipe.source, Strength.CONFIG))
    elif bare and text and not artifact.tasks:
        artifact.tasks.append(TaskEvidence(Task.EMBEDDINGS, f"{architecture.source}#/architectures", Strength.DERIVED))
        artifact.findings.append(
            Finding(
                "recipe.assumed",
                Severity.WARNING,
                "nothing says how hidden states become an embedding",
                artifact.entry,
                "no modules.json",
                "a pooling recipe",
            )
        )


def _heads(artifact: Artifact) -> None:
    architecture = artifact.architecture
    assert architecture is not None
    kind, config, source = architecture.model_type, architecture.config, architecture.source
    tasks = artifact.task_ids()
    if Task.TEXT_CLASSIFICATION in tasks and _label_count(artifact) == 1:
        # One score per pair is a reranker or a reward model; only a cross-encoder's own config says which.
        if "sentence_transformers" in config or artifact.facts.get("cross_encoder"):
            artifact.tasks.insert(0, TaskEvidence(Task.RERANK, source, Strength.CONFIG))
        else:
            artifact.tasks.append(TaskEvidence(Task.RERANK, source, Strength.DERIVED))
    if Task.ASR in tasks:
        artifact.recipe = _speech_recipe(artifact)
    elif Task.TIME_SERIES in tasks:
        artifact.recipe = _forecast_recipe(config, source)
    elif kind in DECISION:
        sizes = {n: config[n] for n in ("state_dim", "act_dim", "max_ep_len") if isinstance(config.get(n), int)}
        artifact.recipe = Recipe("decision", sizes, source)


def _label_count(artifact: Artifact) -> int:
    labels: Labels | None = artifact.labels
    if labels is not None:
        return len(labels.names)
    count = artifact.architecture.dims.get("num_labels") if artifact.architecture else None
    return count if count is not None else 2


def _speech_recipe(artifact: Artifact) -> Recipe:
    architecture = artifact.architecture
    assert architecture is not None
    config = architecture.config
    settings: dict[str, Any] = {}
    for processor in artifact.processors:
        settings |= {
            k: processor.settings[k]
            for k in ("sampling_rate", "feature_size", "do_normalize")
            if k in processor.settings
        }
    if any(n.endswith("ForCTC") for n in architecture.class_names):
        settings["blank"] = config.get("pad_token_id", 0)
        settings["delimiter"] = "|"
        return Recipe("ctc", settings, architecture.source)
    settings |= {
        k: config[k] for k in ("num_mel_bins", "decoder_start_token_id", "max_source_positions") if k in config
    }
    return Recipe(
        "whisper" if architecture.model_type == "whisper" else "speech-seq2seq", settings, architecture.source
    )


def _forecast_recipe(config: dict[str, Any], source: str) -> Recipe:
    context, lags = config.get("context_length"), config.get("lags_sequence")
    settings: dict[str, Any] = {"context": context, "horizon": config.get("prediction_length"), "lags": lags}
    settings["inputs"] = config.get("input_size", config.get("num_input_channels", 1))
    if isinstance(context, int):
        longest = max((n for n in lags if isinstance(n, int)), default=0) if isinstance(lags, list) else 0
        settings["required_history"] = context + longest
    return Recipe("forecast", settings, source)
