"""Tasks of a Transformers configuration, told by class names and model families, with the recipe of each."""

from __future__ import annotations

from typing import Any

from turnout.package.facts import Artifact, Finding, Labels, Recipe, Severity, Strength, TaskEvidence
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
    ("ForInstanceSegmentation", Task.IMAGE_SEGMENTATION),
    ("ForSegmentation", Task.IMAGE_SEGMENTATION),
    ("ForAudioClassification", Task.AUDIO_CLASSIFICATION),
    ("ForCTC", Task.ASR),
    ("ForSpeechSeq2Seq", Task.ASR),
    ("ForTextToWaveform", Task.TTS),
    ("ForTextToSpeech", Task.TTS),
    ("ForPrediction", Task.TIME_SERIES),
    ("ForTimeSeriesPrediction", Task.TIME_SERIES),
)
SPEECH = frozenset({"whisper", "speech_to_text", "moonshine", "speecht5", "kyutai_speech_to_text"})
DECISION = frozenset({"decision_transformer", "trajectory_transformer"})
SPEAKING = frozenset({"vits", "bark", "fastspeech2_conformer"})
# Two towers, text and picture, whose similarity is the answer.
CONTRASTIVE = frozenset({"clip", "siglip", "siglip2", "chinese_clip", "altclip", "align", "metaclip_2"})
TRANSLATORS = frozenset({"marian", "m2m_100", "fsmt", "nllb-moe", "seamless_m4t"})
SUMMARIZERS = frozenset({"pegasus", "pegasus_x", "led", "bigbird_pegasus", "longt5"})
MUSICAL = frozenset({"musicgen", "musicgen_melody"})


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
    if kind in CONTRASTIVE and name.endswith("Model"):
        return [Task.ZERO_SHOT_IMAGE_CLASSIFICATION]
    whole: dict[str, list[str]] = {"MTModel": _text_to_text(kind), "EncoderDecoderModel": [Task.TEXT2TEXT]}
    whole |= {"VisionEncoderDecoderModel": [Task.IMAGE_TEXT_TO_TEXT], "SpeechEncoderDecoderModel": [Task.ASR]}
    for suffix in sorted(whole, key=len, reverse=True):
        if name.endswith(suffix):
            return whole[suffix]
    if name.endswith("ForConditionalGeneration"):
        return _conditional(kind, artifact)
    pictures = any(p.kind == "image" for p in artifact.processors) and artifact.tokenizer is None
    return [Task.IMAGE_FEATURES] if pictures and name.endswith("Model") else []


def _conditional(kind: str, artifact: Artifact) -> list[str]:
    assert artifact.architecture is not None
    if kind in SPEECH:
        return [Task.ASR]
    if kind in MUSICAL:
        return []  # music is none of the tasks
    if "vision_config" in artifact.architecture.sub:
        return [Task.IMAGE_TEXT_TO_TEXT, Task.TEXT_GENERATION]
    if "audio_config" in artifact.architecture.sub:
        return [Task.ASR]
    return _text_to_text(kind)


def _text_to_text(kind: str) -> list[str]:
    """What an encoder with a decoder is trained for, where its family tells."""
    if kind in TRANSLATORS:
        return [Task.TEXT2TEXT, Task.TRANSLATION]
    if kind in SUMMARIZERS:
        return [Task.TEXT2TEXT, Task.SUMMARIZATION]
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
