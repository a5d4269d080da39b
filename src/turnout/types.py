"""Words shared by every level: task ids, modalities, devices, sampling parameters. Next to no logic."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Task(StrEnum):
    """Meaning of a request and its result; ids follow the Hugging Face pipeline names."""

    TEXT_GENERATION = "text-generation"
    CHAT = "chat"
    EMBEDDINGS = "embeddings"
    RERANK = "rerank"
    TEXT_CLASSIFICATION = "text-classification"
    TOKEN_CLASSIFICATION = "token-classification"
    FILL_MASK = "fill-mask"
    QUESTION_ANSWERING = "question-answering"
    TEXT2TEXT = "text2text-generation"
    TRANSLATION = "translation"
    SUMMARIZATION = "summarization"
    ZERO_SHOT_CLASSIFICATION = "zero-shot-classification"
    IMAGE_TEXT_TO_TEXT = "image-text-to-text"
    IMAGE_CLASSIFICATION = "image-classification"
    ZERO_SHOT_IMAGE_CLASSIFICATION = "zero-shot-image-classification"
    OBJECT_DETECTION = "object-detection"
    IMAGE_SEGMENTATION = "image-segmentation"
    DEPTH_ESTIMATION = "depth-estimation"
    IMAGE_FEATURES = "image-feature-extraction"
    ASR = "automatic-speech-recognition"
    TTS = "text-to-speech"
    AUDIO_CLASSIFICATION = "audio-classification"
    VAD = "voice-activity-detection"
    TEXT_TO_IMAGE = "text-to-image"
    IMAGE_TO_IMAGE = "image-to-image"
    TABULAR_CLASSIFICATION = "tabular-classification"
    TABULAR_REGRESSION = "tabular-regression"
    TIME_SERIES = "time-series-forecasting"
    DECISION = "decision"
    TENSOR = "tensor"


class Modality(StrEnum):
    """Kind of a port's value."""

    TEXT = "text"
    MESSAGES = "messages"
    TOKENS = "tokens"
    IMAGE = "image"
    AUDIO = "audio"
    TABLE = "table"
    SERIES = "series"
    TENSOR = "tensor"
    VECTOR = "vector"
    LABELS = "labels"
    SPANS = "spans"
    SEGMENTS = "segments"
    BOXES = "boxes"
    MASKS = "masks"
    SCORES = "scores"
    ACTION = "action"


@dataclass(frozen=True, slots=True)
class Grammar:
    """What generated text must match: ``kind`` is json_schema, json_object, regex, lark or choice, ``text`` its
    source (a JSON list of strings for choice, empty for json_object)."""

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Sampling:
    """How the next token is drawn. ``temperature`` 0 is greedy; every default changes nothing.

    Applied in this order: ``logit_bias``, penalties, ``grammar``, ``temperature``, ``top_k``, ``top_p``,
    ``min_p``, ``typical_p``, XTC, draw. The fields from ``min_p`` on need the generation engine; a backend
    without it refuses them by name.
    """

    max_tokens: int = 256
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    min_p: float = 0.0  # of the most likely token's probability
    typical_p: float = 1.0  # mass of the locally typical set (Meister et al. 2023)
    xtc_probability: float = 0.0  # chance that the most likely tokens above the threshold are left out
    xtc_threshold: float = 0.1
    repetition_penalty: float = 1.0  # over prompt and output (Keskar et al. 2019)
    presence_penalty: float = 0.0  # over output, as in OpenAI's API
    frequency_penalty: float = 0.0
    dry_multiplier: float = 0.0  # 0 switches DRY off
    dry_base: float = 1.75
    dry_allowed_length: int = 2
    dry_sequence_breakers: tuple[str, ...] = ("\n", ":", '"', "*")
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, added to its logit)
    min_tokens: int = 0  # ends are masked before
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False  # keep the stop string in the text
    skip_special_tokens: bool = True
    logprobs: int | None = None  # most likely alternatives reported per token; 0 reports the token's own
    logprobs_after: bool = False  # probabilities after processing rather than the model's own
    prompt_logprobs: int | None = None
    n: int = 1
    best_of: int | None = None
    grammar: Grammar | None = None
    processors: tuple[str, ...] = ()  # plug-in logits processors and stopping criteria, by name
    watermark: str | None = None  # name of a watermark configured at load


# Sampling fields that every generating backend honours; the others need the engine.
BASIC_SAMPLING = frozenset({"max_tokens", "temperature", "top_p", "top_k", "seed", "stop"})


@dataclass(frozen=True, slots=True)
class Executed:
    """What truly ran: the identity a result carries."""

    artifact: str
    digest: str
    backend: str
    version: str
    device: str
    dtype: str
    recipe: str


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a task: ``inputs`` by port name, ``sampling`` for generative tasks.

    Tables are ``{"columns": [...], "rows": [[...], ...]}``; images and audio are paths or numpy
    arrays; tensors are numpy arrays by input name.
    """

    task: str
    inputs: dict[str, Any]
    sampling: Sampling = Sampling()
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Result:
    """Output of one request, with what was executed and timings in seconds."""

    task: str
    output: Any
    executed: Executed
    timings: dict[str, float]


def count_of(value: object) -> int | None:
    """Whole number of at least 1 that an option's value (number or text) states, else None."""
    if isinstance(value, bool):
        return None
    text = str(value).strip()
    return int(text) if text.isascii() and text.isdigit() and len(text) < 16 and int(text) else None
