"""Task contracts: typed inputs and outputs, axes, units, score kind, version.

A contract fixes meaning, not implementation. Two backends that serve the same contract may be
swapped for one another; a change of meaning raises ``version``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from turnout.errors import InputError
from turnout.types import Modality, Request, Task

M = Modality


@dataclass(frozen=True, slots=True)
class Port:
    """One named value of a request or result.

    ``axes`` name the axes of an array, outermost first; ``unit`` is the unit of its numbers
    (``probability``, ``cosine``, ``second``, ``pixel``, ``hertz`` ...).
    """

    name: str
    kind: Modality
    dtype: str = ""
    axes: tuple[str, ...] = ()
    unit: str = ""
    required: bool = True
    many: bool = False


@dataclass(frozen=True, slots=True)
class TaskContract:
    """What a task takes, what it gives and which package parts it needs.

    ``roles`` are the component roles that must be present: tokenizer, template, head, labels,
    recipe, image-processor, feature-extractor, vocoder, scheduler.
    """

    id: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    output_type: type
    score_kind: str = "none"  # none, probability, logit, cosine, log-probability, distance, quantile
    roles: tuple[str, ...] = ()
    streaming: bool = False
    options: tuple[str, ...] = ()
    version: int = 1

    @property
    def key(self) -> str:
        """``id@version``, as it stands in a case key."""
        return f"{self.id}@{self.version}"


# ---- results ---------------------------------------------------------------------------


@dataclass(slots=True)
class TextOutput:
    """Generated text; ``finish_reason`` is ``stop`` or ``length``."""

    text: str
    finish_reason: str = "stop"
    prompt_tokens: int = 0
    completion_tokens: int = 0


@dataclass(slots=True)
class EmbeddingsOutput:
    """``vectors`` float32 [num_texts, dimension]; vectors of different ``recipe`` must not be mixed."""

    vectors: Any
    dimension: int
    normalized: bool
    recipe: str


@dataclass(slots=True)
class LabelScore:
    """A class and its score (unit: the contract's ``score_kind``)."""

    label: str
    score: float
    index: int = 0


@dataclass(slots=True)
class LabelsOutput:
    """Per input, classes with scores, best first."""

    labels: list[list[LabelScore]]


@dataclass(slots=True)
class Span:
    """Half-open character range ``[start, end)`` of the input text."""

    start: int
    end: int
    text: str
    label: str
    score: float


@dataclass(slots=True)
class SpansOutput:
    """Per input text, its labelled spans in order."""

    spans: list[list[Span]]


@dataclass(slots=True)
class RankedDocument:
    """Position of a document in the request and its score."""

    index: int
    score: float


@dataclass(slots=True)
class RankingOutput:
    """Documents, best first."""

    ranking: list[RankedDocument]


@dataclass(slots=True)
class Segment:
    """A stretch of audio, in seconds, with what was found in it."""

    start: float
    end: float
    text: str = ""
    score: float = 0.0


@dataclass(slots=True)
class SegmentsOutput:
    """Segments in order of time; ``text`` of a transcription is their join."""

    segments: list[Segment]
    text: str = ""


@dataclass(slots=True)
class Box:
    """A detected object: corners in pixels of the original image."""

    x_min: float
    y_min: float
    x_max: float
    y_max: float
    label: str
    score: float


@dataclass(slots=True)
class BoxesOutput:
    """Detected objects, best first."""

    boxes: list[Box]


@dataclass(slots=True)
class TableOutput:
    """Rows in the order of the request's rows."""

    columns: list[str]
    rows: list[list[Any]]


@dataclass(slots=True)
class TensorsOutput:
    """Named arrays, as the graph names them."""

    tensors: dict[str, Any]


@dataclass(slots=True)
class ImageOutput:
    """Images as uint8 arrays [height, width, 3]."""

    images: list[Any]


@dataclass(slots=True)
class AudioOutput:
    """Mono float32 samples [num_samples] at ``sampling_rate`` hertz."""

    samples: Any
    sampling_rate: int


@dataclass(slots=True)
class ForecastOutput:
    """``quantiles`` by level, each [horizon]; ``mean`` [horizon]."""

    mean: list[float]
    quantiles: dict[str, list[float]] = field(default_factory=dict)


# ---- the contracts ---------------------------------------------------------------------


def _port(name: str, kind: Modality, **more: Any) -> Port:
    return Port(name, kind, **more)


_TEXT = _port("text", M.TEXT)
_TEXTS = _port("texts", M.TEXT, many=True)
_IMAGE = _port("image", M.IMAGE, dtype="uint8", axes=("height", "width", "channel"), unit="sRGB")
_AUDIO = _port("audio", M.AUDIO, dtype="float32", axes=("sample",), unit="amplitude")
_RATE = _port("sampling_rate", M.SCORES, unit="hertz", required=False)
_TABLE = _port("table", M.TABLE, axes=("row", "column"))
_LABELS_OUT = (_port("labels", M.LABELS, many=True, unit="probability"),)
_TEXT_OUT = (_port("text", M.TEXT),)
_GENERATION = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop")


def _contracts() -> tuple[TaskContract, ...]:
    seq: dict[str, Any] = {
        "outputs": _TEXT_OUT,
        "output_type": TextOutput,
        "streaming": True,
        "options": _GENERATION,
        "roles": ("tokenizer", "head"),
    }
    labels: dict[str, Any] = {"outputs": _LABELS_OUT, "output_type": LabelsOutput, "score_kind": "probability"}
    segments: dict[str, Any] = {
        "outputs": (_port("segments", M.SEGMENTS, many=True, unit="second"),),
        "output_type": SegmentsOutput,
    }
    boxes: dict[str, Any] = {
        "outputs": (_port("boxes", M.BOXES, many=True, unit="pixel"),),
        "output_type": BoxesOutput,
        "score_kind": "probability",
    }
    table: dict[str, Any] = {
        "inputs": (_TABLE,),
        "outputs": (_TABLE,),
        "output_type": TableOutput,
        "roles": ("recipe",),
    }
    image: dict[str, Any] = {"outputs": (_port("images", M.IMAGE, many=True, unit="sRGB"),), "output_type": ImageOutput}
    tensors: dict[str, Any] = {"outputs": (_port("tensors", M.TENSOR, many=True),), "output_type": TensorsOutput}
    spans: dict[str, Any] = {
        "outputs": (_port("spans", M.SPANS, many=True, unit="character"),),
        "output_type": SpansOutput,
        "score_kind": "probability",
    }
    make = TaskContract
    return (
        make(Task.TEXT_GENERATION, (_port("prompt", M.TEXT),), **seq),
        make(Task.CHAT, (_port("messages", M.MESSAGES),), **{**seq, "roles": ("tokenizer", "head", "template")}),
        make(Task.TEXT2TEXT, (_TEXT,), **seq),
        make(Task.TRANSLATION, (_TEXT,), **seq),
        make(Task.SUMMARIZATION, (_TEXT,), **seq),
        make(
            Task.IMAGE_TEXT_TO_TEXT,
            (_port("messages", M.MESSAGES), _port("images", M.IMAGE, many=True)),
            **{**seq, "roles": ("tokenizer", "head", "template", "image-processor")},
        ),
        make(
            Task.EMBEDDINGS,
            (_TEXTS,),
            (_port("vectors", M.VECTOR, dtype="float32", axes=("text", "dimension"), unit="cosine"),),
            EmbeddingsOutput,
            "cosine",
            ("tokenizer", "recipe"),
            options=("pooling", "normalize"),
        ),
        make(
            Task.RERANK,
            (_port("query", M.TEXT), _port("documents", M.TEXT, many=True)),
            (_port("ranking", M.SCORES, many=True),),
            RankingOutput,
            "logit",
            ("tokenizer", "head"),
        ),
        make(Task.TEXT_CLASSIFICATION, (_TEXTS,), roles=("tokenizer", "head", "labels"), **labels),
        make(
            Task.ZERO_SHOT_CLASSIFICATION,
            (_TEXTS, _port("candidates", M.TEXT, many=True)),
            roles=("tokenizer", "head", "labels"),
            **labels,
        ),
        make(Task.TOKEN_CLASSIFICATION, (_TEXTS,), roles=("tokenizer", "head", "labels"), **spans),
        make(Task.FILL_MASK, (_TEXTS,), roles=("tokenizer", "head"), **labels),
        make(
            Task.QUESTION_ANSWERING,
            (_port("question", M.TEXT), _port("context", M.TEXT)),
            roles=("tokenizer", "head"),
            **spans,
        ),
        make(Task.IMAGE_CLASSIFICATION, (_IMAGE,), roles=("labels", "image-processor"), **labels),
        make(
            Task.ZERO_SHOT_IMAGE_CLASSIFICATION,
            (_IMAGE, _port("candidates", M.TEXT, many=True)),
            roles=("tokenizer", "image-processor"),
            **labels,
        ),
        make(Task.OBJECT_DETECTION, (_IMAGE,), roles=("labels", "image-processor"), **boxes),
        make(
            Task.IMAGE_SEGMENTATION,
            (_IMAGE,),
            (_port("masks", M.MASKS, axes=("mask", "height", "width")),),
            TensorsOutput,
            "probability",
            ("image-processor",),
        ),
        make(
            Task.DEPTH_ESTIMATION,
            (_IMAGE,),
            (_port("depth", M.TENSOR, axes=("height", "width")),),
            TensorsOutput,
            "distance",
            ("image-processor",),
        ),
        make(
            Task.IMAGE_FEATURES,
            (_IMAGE,),
            (_port("vectors", M.VECTOR, axes=("image", "dimension")),),
            EmbeddingsOutput,
            "cosine",
            ("image-processor",),
        ),
        make(Task.ASR, (_AUDIO, _RATE), roles=("tokenizer", "head", "feature-extractor"), **segments),
        make(Task.VAD, (_AUDIO, _RATE), score_kind="probability", roles=("recipe",), **segments),
        make(Task.AUDIO_CLASSIFICATION, (_AUDIO, _RATE), roles=("labels", "feature-extractor"), **labels),
        make(
            Task.TTS,
            (_TEXT,),
            (_port("samples", M.AUDIO, dtype="float32", axes=("sample",), unit="amplitude"),),
            AudioOutput,
            roles=("recipe",),
        ),
        make(Task.TEXT_TO_IMAGE, (_port("prompt", M.TEXT),), roles=("recipe", "scheduler"), **image),
        make(Task.IMAGE_TO_IMAGE, (_port("prompt", M.TEXT), _IMAGE), roles=("recipe", "scheduler"), **image),
        make(Task.TABULAR_CLASSIFICATION, score_kind="probability", **table),
        make(Task.TABULAR_REGRESSION, **table),
        make(
            Task.TIME_SERIES,
            (_port("history", M.SERIES, axes=("time",)),),
            (_port("forecast", M.SERIES, axes=("time",)),),
            ForecastOutput,
            "quantile",
            ("recipe",),
        ),
        make(
            Task.DECISION,
            tuple(_port(n, M.TENSOR) for n in ("states", "actions", "returns_to_go", "timesteps")),
            **tensors,
        ),
        make(Task.TENSOR, (_port("tensors", M.TENSOR, many=True),), **tensors),
    )


CONTRACTS: dict[str, TaskContract] = {contract.id: contract for contract in _contracts()}


def contract_of(task: str) -> TaskContract:
    """Contract of a task id. Raises ``InputError`` naming the known ids otherwise."""
    contract = CONTRACTS.get(task)
    if contract is None:
        raise InputError(f"unknown task `{task}`", hints=["known tasks: " + ", ".join(sorted(CONTRACTS))])
    return contract


def validate(request: Request) -> None:
    """Checks that the request's inputs fit the contract's ports. Raises ``InputError``."""
    contract = contract_of(request.task)
    known = {port.name for port in contract.inputs}
    for name in request.inputs:
        if name not in known:
            raise InputError(
                f"`{request.task}` takes no input `{name}`", hints=["it takes: " + ", ".join(sorted(known))]
            )
    for port in contract.inputs:
        if port.name not in request.inputs:
            if port.required:
                raise InputError(f"`{request.task}` needs the input `{port.name}` ({port.kind})")
            continue
        _check_value(port, request.inputs[port.name], request.task)


def _check_value(port: Port, value: Any, task: str) -> None:
    if port.kind is M.TEXT:
        values = value if port.many else [value]
        if not isinstance(values, (list, tuple)) or not values:
            raise InputError(f"input `{port.name}` of `{task}` must be a list of texts with at least one text")
        for item in values:
            if not isinstance(item, str):
                raise InputError(f"input `{port.name}` of `{task}` must be text, got {type(item).__name__}")
    elif port.kind is M.MESSAGES:
        _check_messages(port, value, task)
    elif port.kind is M.TABLE:
        if not isinstance(value, dict) or not value.get("columns") or not isinstance(value.get("rows"), list):
            raise InputError(f"input `{port.name}` of `{task}` must hold `columns` and `rows`")
        width = len(value["columns"])
        for number, row in enumerate(value["rows"], 1):
            if len(row) != width:
                raise InputError(f"row {number} of `{port.name}` has {len(row)} values, the header has {width}")
    elif port.kind is M.TENSOR and port.many and not (isinstance(value, dict) and value):
        raise InputError(f"input `{port.name}` of `{task}` must hold at least one named array")


def _check_messages(port: Port, value: Any, task: str) -> None:
    if not isinstance(value, (list, tuple)) or not value:
        raise InputError(f"input `{port.name}` of `{task}` must be a list with at least one message")
    for number, message in enumerate(value, 1):
        if not isinstance(message, dict) or "role" not in message or "content" not in message:
            raise InputError(f"message {number} of `{task}` needs `role` and `content`")
