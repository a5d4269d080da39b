"""OpenVINO GenAI: text generation from GenAI directories and straight from GGUF files.

GenAI constructs pipelines that cannot run and reads GGUF metadata selectively, so its requirements
are asked with small copies of the file (``openvino_gguf``), its graphs are checked port by port, and
every probe generates. Texts are encoded here and token ids handed over, so that chat templates and
beginning-of-text ids are the package's.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from turnout.backends import openvino_gguf as gguf
from turnout.backends.base import (
    Action,
    BackendBuild,
    BindingReport,
    Case,
    Evidence,
    EvidenceLevel,
    Kind,
    LoadPlan,
    Remedy,
    Requirement,
    Session,
    failed,
    met,
    passed,
    unmet,
)
from turnout.backends.openvino import (
    COMPILE_BYTES,
    capabilities_of,
    compute_properties,
    core,
    device_names,
    dtype_of,
    dtype_requirement,
    installed,
    library_device,
)
from turnout.backends.openvino_executor_source import open_executor
from turnout.backends.openvino_executor_vocabulary import vocabulary_of_case
from turnout.backends.openvino_reading import first_line, read_failures
from turnout.engine.executor import Executor, Vocabulary
from turnout.errors import InputError, LoadError, TurnoutError
from turnout.package.facts import ArtifactKind
from turnout.package.formats.template import Refusal, TemplateError, render
from turnout.tasks.contract import TextOutput
from turnout.tasks.decoding import TextStream
from turnout.tasks.tokenization import load_tokenizer
from turnout.types import Request, Sampling, Task

LANGUAGE_MODEL = "openvino_model.xml"
# Ports that GenAI's language pipeline sets or reads, as `optimum` exports them.
NEEDED_INPUTS = ("input_ids", "attention_mask", "beam_idx")
KNOWN_INPUTS = frozenset({"input_ids", "attention_mask", "position_ids", "beam_idx"})
PROBE_TOKENS = 8
PROBE_TEXT = "The capital of France is"


def pipeline_properties(dtype: str, device: str) -> dict[str, Any]:
    """Properties of a pipeline that computes, and keeps its cache, in ``dtype``."""
    properties = compute_properties(dtype, device)
    if device.startswith("cpu"):
        # The default is 8-bit: a quantization of the cache that nobody asked for.
        properties["KV_CACHE_PRECISION"] = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}[dtype]
    return properties


class OpenVINOGenAIBackend:
    """Language models on OpenVINO GenAI's pipelines."""

    name = "openvino-genai"
    reads = frozenset({ArtifactKind.OPENVINO_GENAI, ArtifactKind.GGUF})
    tasks: frozenset[str] = frozenset({Task.TEXT_GENERATION, Task.CHAT})

    def describe(self) -> BackendBuild:
        """Versions from the installed distributions; nothing is imported."""
        versions = {
            distribution: installed(distribution, distribution.replace("-", "_"))
            for distribution in ("openvino-genai", "openvino", "openvino-tokenizers")
        }
        build = BackendBuild(self.name, versions["openvino-genai"], {k: v for k, v in versions.items() if v})
        build.extra = "openvino"
        build.missing = [name for name, found in versions.items() if not found]
        if build.missing:
            build.unavailable = "not here: " + ", ".join(f"`{name}`" for name in build.missing)
        return build

    def devices(self) -> list[str]:
        """Devices with a plugin that can be used here."""
        return device_names(core().available_devices)

    def requirements(self, case: Case) -> list[Requirement]:
        """Of a GGUF file: architecture, settings, tensors, element types, tokenizer, each asked. Of a
        directory: the graph's operators and ports, and its tokenizer."""
        found = [dtype_requirement(case, lambda: capabilities_of(case.device))]
        if case.artifact.kind is ArtifactKind.GGUF:
            return found + gguf.gguf_requirements(case)
        return found + directory_requirements(case)

    def inquire(self, case: Case) -> list[Evidence]:
        """``requirements`` has put every question there is."""
        return [passed(EvidenceLevel.INQUIRED)]

    def plan(self, case: Case) -> LoadPlan:
        """One language pipeline."""
        return LoadPlan(case, self.name, "openvino_genai.LLMPipeline", dtype_of(case), list(case.artifact.files))

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Generates one token where the model is small; GenAI finds out no earlier."""
        if plan.case.artifact.size_bytes > COMPILE_BYTES:
            return passed(EvidenceLevel.DRY_LOADED)
        session = self.load(plan)
        try:
            session.run(probe_request(plan.case, 1))
        except TurnoutError as error:
            return failed(EvidenceLevel.DRY_LOADED, error.code, error.message)
        finally:
            session.close()
        return passed(EvidenceLevel.DRY_LOADED)

    def load(self, plan: LoadPlan) -> Session:
        """A pipeline with every tensor bound. Raises ``LoadError`` and keeps nothing otherwise."""
        import openvino_genai

        case = plan.case
        gguf.refuse_for_good(self.requirements(case))
        binding = gguf.binding_of(case)
        place = gguf.model_path(case)
        try:
            pipeline = openvino_genai.LLMPipeline(
                place, library_device(case.device), **pipeline_properties(plan.dtype, case.device)
            )
        except Exception as error:  # the library raises RuntimeError and others
            raise LoadError(f"OpenVINO GenAI cannot load it: {first_line(error)}") from error
        return GenAISession(plan, plan.dtype, pipeline, Text.of(case, pipeline), binding)

    def executor(self, plan: LoadPlan, options: Any = None) -> Executor:
        """The model for the generation engine: paged where its graph allows it. ``options`` is an
        ``ExecutorOptions`` or a mapping; a Hugging Face directory is taken too."""
        return open_executor(plan, options)

    def vocabulary(self, plan: LoadPlan) -> Vocabulary:
        """Token ids and texts of the package's tokenizer, or of the option ``tokenizer``."""
        return vocabulary_of_case(plan.case)

    def probe(self, session: Session) -> Evidence:
        """Generates a few tokens; their rate is the decoding rate of the pipeline's own clock."""
        assert isinstance(session, GenAISession)
        output = session.run(probe_request(session.plan.case, PROBE_TOKENS))
        if not output.completion_tokens:
            return failed(EvidenceLevel.EXECUTED, "runtime.failed", "the pipeline generated nothing")
        return passed(EvidenceLevel.EXECUTED, measurements=session.measured)


def probe_request(case: Case, tokens: int) -> Request:
    """The smallest request of the case's task."""
    sampling = Sampling(max_tokens=tokens)
    if case.task == Task.CHAT:
        return Request(case.task, {"messages": [{"role": "user", "content": PROBE_TEXT}]}, sampling)
    return Request(case.task, {"prompt": PROBE_TEXT}, sampling)


# ---- directories -----------------------------------------------------------------------


def directory_requirements(case: Case) -> list[Requirement]:
    """Operators, ports and state of the graph, and a tokenizer that loads."""
    folder = gguf.model_path(case)
    graph = os.path.join(folder, LANGUAGE_MODEL)
    where = os.path.relpath(graph, case.root)
    if not os.path.isfile(graph):
        return [
            unmet(
                Kind.COMPONENT,
                "component.missing",
                "the directory has no language model",
                expected=LANGUAGE_MODEL,
                where=where,
            )
        ]
    try:
        model = core().read_model(graph)
    except Exception as error:  # the library raises RuntimeError and others
        return read_failures(error, case.artifact.graph, where) + _directory_tokenizer(case, folder)
    told = {f.code for f in case.artifact.findings}
    return [r for r in _ports(model, where) if r.id not in told] + _directory_tokenizer(case, folder)


def _ports(model: Any, where: str) -> list[Requirement]:
    inputs = {name for port in model.inputs for name in port.get_names()}
    outputs = {name for port in model.outputs for name in port.get_names()}
    lacking = [name for name in NEEDED_INPUTS if name not in inputs]
    lacking += ["logits"] if "logits" not in outputs else []
    strange = [
        port.get_node().get_friendly_name() for port in model.inputs if KNOWN_INPUTS.isdisjoint(port.get_names())
    ]
    found = []
    if lacking or strange:
        found.append(
            unmet(
                Kind.SHAPE,
                "graph.io_mismatch",
                "the graph's ports are not those of a language model: "
                + ", ".join([*(f"no `{name}`" for name in lacking), *(f"unknown `{name}`" for name in strange)]),
                observed=", ".join(sorted(inputs | outputs)),
                expected=", ".join([*NEEDED_INPUTS, "logits"]),
                where=where,
            )
        )
    if not any(op.get_type_name() == "ReadValue" for op in model.get_ops()):
        found.append(
            unmet(
                Kind.SHAPE,
                "graph.state_missing",
                "the graph keeps no state, so nothing of the text before would be remembered",
                observed="no ReadValue",
                expected="a key-value cache as state (ReadValue and Assign)",
                where=where,
            )
        )
    return found or [met("graph.ports", Kind.SHAPE, where)]


def _directory_tokenizer(case: Case, folder: str) -> list[Requirement]:
    import openvino_genai

    if any(f.code == "tokenizer.missing" for f in case.artifact.findings):
        return []
    try:
        openvino_genai.Tokenizer(folder).encode("a")
    except Exception as error:  # the library raises RuntimeError and others
        return [
            unmet(
                Kind.COMPONENT,
                "tokenizer.missing",
                f"OpenVINO GenAI finds no tokenizer it can use: {first_line(error)}",
                expected="openvino_tokenizer.xml and openvino_detokenizer.xml",
                where=os.path.relpath(folder, case.root),
                remedies=[
                    Remedy(Action.ADD_FILE, "convert the tokenizer with `convert_tokenizer` of openvino-tokenizers")
                ],
            )
        ]
    return [met("tokenizer", Kind.COMPONENT, folder)]


# ---- text ------------------------------------------------------------------------------


@dataclass(slots=True)
class Text:
    """Texts to ids and back; ``bos`` is put before plain prompts, ``eos`` ends a generation."""

    encode: Callable[[str, bool], list[int]]  # text, whether special tokens are put around it
    decode: Callable[[list[int]], str]
    template: str
    tokens: dict[str, Any]
    bos: int | None
    eos: set[int]

    @classmethod
    def of(cls, case: Case, pipeline: Any) -> Text:
        """Tokenizer and template of the case: the options' ones, else the package's."""
        tokenizer = pipeline.get_tokenizer()
        encode, decode = _library_codec(tokenizer)
        if case.options.get("tokenizer"):
            named = load_tokenizer(case.root, case.artifact, case.options)
            encode, decode = _named_codec(named)
        config = pipeline.get_generation_config()
        eos = {config.eos_token_id, tokenizer.get_eos_token_id(), *config.stop_token_ids}
        eos |= set(case.artifact.generation.eos_ids if case.artifact.generation else [])
        eos |= set(case.artifact.tokenizer.eos_ids if case.artifact.tokenizer else [])
        tokens: dict[str, Any] = {"bos_token": tokenizer.get_bos_token(), "eos_token": tokenizer.get_eos_token()}
        bos = tokenizer.get_bos_token_id() if gguf.adds_bos(case) else None
        return cls(encode, decode, _template(case), tokens, bos, {e for e in eos if e is not None and e >= 0})

    def prompt(self, request: Request) -> list[int]:
        """Token ids of a request. Raises ``InputError`` when the template refuses the messages."""
        if request.task != Task.CHAT:
            ids = self.encode(str(request.inputs["prompt"]), True)
        else:
            try:
                text = render(self.template, list(request.inputs["messages"]), **self.tokens)
            except (Refusal, TemplateError) as error:
                raise InputError(f"the chat template: {error}", code="template.invalid") from None
            ids = self.encode(text, False)  # a template brings its own special tokens
        if self.bos is not None and ids[:1] != [self.bos]:
            ids = [self.bos, *ids]
        if not ids:
            raise InputError("the prompt gives no tokens")
        return ids


Codec = tuple[Callable[[str, bool], list[int]], Callable[[list[int]], str]]


def _library_codec(tokenizer: Any) -> Codec:
    def encode(text: str, special: bool) -> list[int]:
        ids = tokenizer.encode(text, add_special_tokens=special).input_ids
        return [int(i) for i in ids.data.reshape(-1)]

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""

    return encode, decode


def _named_codec(tokenizer: Any) -> Codec:
    def encode(text: str, special: bool) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(ids: list[int]) -> str:
        return str(tokenizer.decode(ids, skip_special_tokens=True))

    return encode, decode


def _template(case: Case) -> str:
    named = case.options.get("chat_template")
    if named:
        path = Path(str(named))
        return (path if path.is_absolute() or path.exists() else Path(case.root) / path).read_text(encoding="utf-8")
    templates = sorted(case.artifact.templates, key=lambda t: t.name != "default")
    return templates[0].text if templates else ""


# ---- session ---------------------------------------------------------------------------


@dataclass(slots=True)
class GenAISession:
    """A language pipeline; ``measured`` holds the rates of the last request."""

    plan: LoadPlan
    dtype: str
    pipeline: Any
    text: Text
    binding: BindingReport
    measured: dict[str, float] = field(default_factory=dict)

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> TextOutput:
        """Generated text. Raises ``InputError`` for a prompt that is empty or longer than the context."""
        import numpy as np
        import openvino

        if self.pipeline is None:
            raise LoadError("the session is closed")
        ids = self.text.prompt(request)
        room = self._room(len(ids))
        config = generation_config(request.sampling, min(request.sampling.max_tokens, room), self.text.eos)
        streamer = Streamer(TextStream(self.text.decode, request.sampling.stop, emit), self.text.eos)
        try:
            result = self.pipeline.generate(openvino.Tensor(np.array([ids], np.int64)), config, streamer.library())
        except RuntimeError as error:
            raise LoadError(f"OpenVINO GenAI failed: {first_line(error)}") from error
        metrics = result.perf_metrics
        self.measured = {
            "tokens_per_s": float(metrics.get_throughput().mean),
            "first_token_s": float(metrics.get_ttft().mean) / 1000,
        }
        reason = "stop" if streamer.stopped else "length"
        # Counted here: after a stop string the library's own count runs on by a token or two.
        return TextOutput(streamer.stream.finish(), reason, len(ids), streamer.count)

    def _room(self, prompt: int) -> int:
        architecture = self.plan.case.artifact.architecture
        limit = architecture.dims.get("max_position_embeddings", 0) if architecture else 0
        if limit and prompt >= limit:
            raise InputError(f"the prompt has {prompt} tokens, the model's context holds {limit}")
        return limit - prompt if limit else 1 << 30

    def close(self) -> None:
        """Drops the pipeline; may be called twice."""
        self.pipeline = None


@dataclass(slots=True)
class Streamer:
    """Hands generated ids to a text stream and stops at its stop strings and end ids."""

    stream: TextStream
    eos: set[int]
    stopped: bool = False
    count: int = 0

    def feed(self, ids: Iterable[int]) -> bool:
        """Whether generation should go on."""
        for token in ids:
            if self.stopped:
                return False
            self.count += 1
            if token in self.eos or not self.stream.feed(int(token)):
                self.stopped = True
                return False
        return True

    def library(self) -> Any:
        """The same as the library's streamer object."""
        import openvino_genai

        outer = self

        class Adapter(openvino_genai.StreamerBase):
            """Called by the pipeline with ids as they come."""

            def write(self, token: Any) -> Any:
                ids = token if isinstance(token, (list, tuple)) else [token]
                running = outer.feed(ids)
                return openvino_genai.StreamingStatus.RUNNING if running else openvino_genai.StreamingStatus.STOP

            def end(self) -> None:
                """Nothing is held back here."""

        return Adapter()


def generation_config(sampling: Sampling, tokens: int, eos: set[int]) -> Any:
    """The library's settings for one request; ``seed`` None draws a fresh one."""
    import secrets

    import openvino_genai

    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = tokens
    config.apply_chat_template = False
    if eos:
        config.stop_token_ids = set(eos)
        config.eos_token_id = min(eos)
    config.do_sample = sampling.temperature > 0
    if config.do_sample:
        config.temperature = sampling.temperature
        config.top_p = sampling.top_p
        if sampling.top_k > 0:
            config.top_k = sampling.top_k
        config.rng_seed = secrets.randbits(31) if sampling.seed is None else sampling.seed
    return config
