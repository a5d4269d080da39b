"""What inspection found in a package: plain values, each with its source and strength.

Four identities are kept apart: a *repository* is a place, an *artifact* is exact bytes with
everything they depend on, an *architecture* is a computation, a *task* is the meaning of a
request. Nothing here reads a file or imports a backend library.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum, StrEnum
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Status(StrEnum):
    """State of one fact or component."""

    PRESENT = "present"
    MISSING = "missing"
    INVALID = "invalid"
    UNSUPPORTED = "unsupported"
    UNINSPECTED = "uninspected"


class Strength(IntEnum):
    """How far a source is to be trusted; a larger value wins over a smaller one."""

    NAME = 0
    DERIVED = 1
    DECLARED = 2
    LAYOUT = 3
    CONFIG = 4
    HEADER = 5


class Severity(StrEnum):
    """Weight of a finding. ``error`` and ``fatal`` refuse the artifact (or the part they name)."""

    INFO = "info"
    WARNING = "warning"
    ERROR = "error"
    FATAL = "fatal"


class CodeNeed(StrEnum):
    """Whether using a component means running code that came with the package."""

    NONE = "none"
    OPTIONAL = "optional"
    REQUIRED = "required"
    FORBIDDEN = "forbidden"


class FileRole(StrEnum):
    """What a file is for, as far as its name and place tell."""

    WEIGHTS = "weights"
    INDEX = "index"
    CONFIG = "config"
    TOKENIZER = "tokenizer"
    TEMPLATE = "template"
    PROCESSOR = "processor"
    GRAPH = "graph"
    CODE = "code"
    LICENCE = "licence"
    README = "readme"
    OTHER = "other"


class ArtifactKind(StrEnum):
    """Format of an artifact."""

    TRANSFORMERS = "transformers"
    SAFETENSORS = "safetensors"
    DIFFUSERS = "diffusers"
    DIFFUSERS_SINGLE_FILE = "diffusers_single_file"
    DDUF = "dduf"
    SENTENCE_TRANSFORMERS = "sentence_transformers"
    PEFT_ADAPTER = "peft_adapter"
    GGUF = "gguf"
    GGUF_MMPROJ = "gguf_mmproj"
    GGUF_ADAPTER = "gguf_adapter"
    GGUF_OTHER = "gguf_other"
    ONNX = "onnx"
    ONNX_SEQ2SEQ = "onnx_seq2seq"
    ONNX_GENAI = "onnx_genai"
    OPENVINO_IR = "openvino_ir"
    OPENVINO_GENAI = "openvino_genai"
    TFLITE = "tflite"
    TF_SAVED_MODEL = "tf_saved_model"
    COREML = "coreml"
    CTRANSLATE2 = "ctranslate2"
    TORCH_PICKLE = "torch_pickle"
    TORCHSCRIPT = "torchscript"
    TORCH_EXPORT = "torch_export"
    XGBOOST = "xgboost"
    LIGHTGBM = "lightgbm"
    CATBOOST = "catboost"
    SKLEARN_SKOPS = "sklearn_skops"
    SKLEARN_PICKLE = "sklearn_pickle"
    PICKLE = "pickle"
    FASTTEXT = "fasttext"
    TOKENIZER = "tokenizer"
    UNKNOWN = "unknown"


@dataclass(slots=True)
class Fact(Generic[T]):
    """One value with where it came from.

    ``source`` is ``relpath#json-pointer``, ``tensor:NAME``, ``kv:KEY``, ``layout:RELPATH`` or
    ``option:NAME``.
    """

    value: T | None
    source: str
    strength: Strength
    status: Status = Status.PRESENT


@dataclass(slots=True)
class Finding:
    """Something worth saying about a package; ``code`` is from the ``boundary.code`` space."""

    code: str
    severity: Severity
    message: str
    path: str = ""
    observed: str = ""
    expected: str = ""


@dataclass(slots=True)
class FileEntry:
    """One file below the package root. ``path`` is relative with forward slashes.

    ``link`` is ``inside`` (a link to a file below the root), ``cache`` (a link into the blobs of
    the same Hugging Face cache folder), ``escape`` (a link out of the package) or None.
    """

    path: str
    size: int
    mtime_ns: int = 0
    role: FileRole = FileRole.OTHER
    link: str | None = None
    lfs_pointer: bool = False
    partial: bool = False
    sha256: str | None = None


@dataclass(slots=True)
class TensorInfo:
    """One stored tensor. ``shape`` is slowest axis first, also for GGUF; ``dtype`` as in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclass(slots=True)
class TensorInventory:
    """All tensors of an artifact, read from headers alone."""

    tensors: dict[str, TensorInfo] = field(default_factory=dict)
    shards: list[str] = field(default_factory=list)
    problems: list[Finding] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(t.nbytes for t in self.tensors.values())

    @property
    def param_count(self) -> int:
        """Number of stored elements (packed formats count packed elements)."""
        total = 0
        for tensor in self.tensors.values():
            count = 1
            for dim in tensor.shape:
                count *= dim
            total += count
        return total

    def dtypes(self) -> dict[str, int]:
        """Stored dtype to number of tensors."""
        counts: dict[str, int] = {}
        for tensor in self.tensors.values():
            counts[tensor.dtype] = counts.get(tensor.dtype, 0) + 1
        return counts


@dataclass(slots=True)
class Quantization:
    """Identity of a quantization; weight-only is not KV-cache quantization."""

    method: str
    bits: float | None = None
    group_size: int | None = None
    symmetric: bool | None = None
    packing: str | None = None
    scale_dtype: str | None = None
    activations: str | None = None
    kv: str | None = None
    skip_modules: list[str] = field(default_factory=list)
    tensor_types: dict[str, int] = field(default_factory=dict)
    source: str = ""
    tensors_plain: bool | None = None  # True: the stored tensors are ordinary floats after all


@dataclass(slots=True)
class Architecture:
    """A computation with its sizes. ``config`` is the parsed configuration as it stands."""

    model_type: str
    class_names: list[str] = field(default_factory=list)
    dims: dict[str, int] = field(default_factory=dict)
    rope: dict[str, Any] = field(default_factory=dict)
    attention: dict[str, Any] = field(default_factory=dict)
    moe: dict[str, Any] = field(default_factory=dict)
    tied: bool | None = None
    dtype: str | None = None
    quantization: Quantization | None = None
    sub: dict[str, Architecture] = field(default_factory=dict)
    auto_map: dict[str, str] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(slots=True)
class Component:
    """A part an artifact is made of (model, tokenizer, scheduler, vae ...)."""

    role: str
    status: Status
    library: str | None = None
    class_name: str | None = None
    path: str = ""
    files: list[str] = field(default_factory=list)
    code: CodeNeed = CodeNeed.NONE


@dataclass(slots=True)
class Tokenizer:
    """Facts of a tokenizer. ``kind`` is BPE, WordPiece, Unigram, WordLevel, sentencepiece,
    tiktoken, tekken, wordpiece-vocab, bpe-vocab, ctc-vocab, gguf or openvino-ir."""

    kind: str
    path: str
    files: list[str] = field(default_factory=list)
    class_name: str | None = None
    vocab_size: int | None = None
    max_id: int | None = None
    pre: str | None = None
    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    eos_ids: list[int] = field(default_factory=list)
    padding_side: str | None = None
    max_length: int | None = None
    code: CodeNeed = CodeNeed.NONE


@dataclass(slots=True)
class ChatTemplate:
    """One chat template; ``valid`` after it parsed and rendered a probe in the sandbox."""

    source: str
    text: str
    name: str = "default"
    valid: bool = True
    uses: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Processor:
    """Image or audio preprocessing facts as stored."""

    kind: str  # image, audio, video, multimodal
    path: str
    class_name: str | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    code: CodeNeed = CodeNeed.NONE


@dataclass(slots=True)
class Generation:
    """Generation defaults; eos may be several ids."""

    eos_ids: list[int] = field(default_factory=list)
    pad_id: int | None = None
    bos_id: int | None = None
    decoder_start_id: int | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    source: str = ""


@dataclass(slots=True)
class Recipe:
    """What turns model outputs into the task's result: pooling, CTC, diffusion, tabular ...

    ``settings`` per kind: ``pooling`` {pooling, dimension, normalize, max_length, prompts,
    include_prompt, similarity}; ``ctc`` {blank, delimiter}; ``whisper`` {...}; ``tabular``
    {features, feature_types, objective, classes}; ``forecast`` {context, horizon, lags}.
    """

    kind: str
    settings: dict[str, Any] = field(default_factory=dict)
    source: str = ""
    strength: Strength = Strength.CONFIG

    @property
    def id(self) -> str:
        """Stable id of the recipe's meaning, for results that must not be mixed."""
        import hashlib
        import json

        text = json.dumps([self.kind, self.settings], sort_keys=True, default=str)
        return f"{self.kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


@dataclass(slots=True)
class GraphPort:
    """Input or output of a graph; a dimension is an int, a symbol, or None when unknown."""

    name: str
    dtype: str
    shape: list[int | str | None] | None = None


@dataclass(slots=True)
class Graph:
    """Facts of a stored graph (ONNX, OpenVINO IR, TFLite).

    ``ops`` maps ``domain::Type`` (domain empty for the default) to the number of nodes,
    subgraphs included. ``external`` lists external data as found.
    """

    ir_version: int | None = None
    opsets: dict[str, int] = field(default_factory=dict)
    ops: dict[str, int] = field(default_factory=dict)
    functions: list[str] = field(default_factory=list)
    inputs: list[GraphPort] = field(default_factory=list)
    outputs: list[GraphPort] = field(default_factory=list)
    external: list[str] = field(default_factory=list)
    states: list[str] = field(default_factory=list)
    kv_inputs: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)
    producer: str = ""


@dataclass(slots=True)
class Labels:
    """Names of classes by index."""

    names: list[str]
    source: str
    problem_type: str | None = None  # single_label_classification, multi_label_classification, regression


@dataclass(slots=True)
class TaskEvidence:
    """A task the artifact may serve, and where that is said."""

    task: str
    source: str
    strength: Strength
    head: str | None = None


@dataclass(slots=True)
class ArtifactRef:
    """Reference to another artifact: by id inside the package, or by name outside it."""

    role: str  # base_model, mmproj, encoder ...
    target: str
    revision: str | None = None
    resolved: bool = False


@dataclass(slots=True)
class Artifact:
    """Exact bytes with everything they depend on. ``id`` is ``kind:entry``, unique in a package.

    ``entry`` and ``files`` are relative to the package root. ``findings`` of severity error or
    fatal refuse the artifact, or only the tasks that need the part their code names.
    """

    id: str
    kind: ArtifactKind
    entry: str
    files: list[str] = field(default_factory=list)
    tensors: TensorInventory = field(default_factory=TensorInventory)
    architecture: Architecture | None = None
    components: list[Component] = field(default_factory=list)
    tokenizer: Tokenizer | None = None
    templates: list[ChatTemplate] = field(default_factory=list)
    processors: list[Processor] = field(default_factory=list)
    generation: Generation | None = None
    graph: Graph | None = None
    recipe: Recipe | None = None
    labels: Labels | None = None
    quantization: Quantization | None = None
    tasks: list[TaskEvidence] = field(default_factory=list)
    depends_on: list[ArtifactRef] = field(default_factory=list)
    code: CodeNeed = CodeNeed.NONE
    licence: Fact[str] | None = None
    facts: dict[str, Fact[Any]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    size_bytes: int = 0

    def task_ids(self) -> list[str]:
        """Ids of the evidenced tasks, strongest source first, without repeats; raw tensors, which
        any graph gives, come last."""
        ordered = sorted(self.tasks, key=lambda t: (t.task == "tensor", -int(t.strength)))
        return list(dict.fromkeys(t.task for t in ordered))


@dataclass(slots=True)
class Package:
    """Everything one path holds. ``fingerprint`` is cheap (names, sizes, times)."""

    root: str
    source: str
    fingerprint: str
    files: list[FileEntry] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    scan_ms: float = 0.0

    def artifact(self, artifact_id: str) -> Artifact | None:
        """The artifact of that id, or None."""
        return next((a for a in self.artifacts if a.id == artifact_id), None)

    def all_findings(self) -> Iterator[Finding]:
        """Findings of the package, then of each artifact."""
        yield from self.findings
        for artifact in self.artifacts:
            yield from artifact.findings
