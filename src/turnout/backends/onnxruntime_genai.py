"""onnxruntime-genai directories: the runtime's own configuration parser, model and generator."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from turnout.backends.base import (
    BackendBuild,
    BindingReport,
    Case,
    Evidence,
    EvidenceLevel,
    Kind,
    LoadPlan,
    Reason,
    Requirement,
    Session,
    failed,
    met,
    passed,
    unmet,
)
from turnout.errors import InputError, LoadError
from turnout.package.facts import ArtifactKind
from turnout.tasks.contract import TextOutput
from turnout.tasks.decoding import TextStream
from turnout.tasks.prompting import Prompter
from turnout.types import Request, Sampling, Task

# As the runtime's parser puts it: `JSON Error: model:decoder: Unknown value "wonder" at line 1 index 645`.
_JSON = re.compile(r"JSON Error: (.*)")
_UNKNOWN_KEY = re.compile(r"JSON Error: (?:([\w:]+): )?Unknown value \"([^\"]+)\"")
_PROVIDER = re.compile(r"Unknown provider name '([^']+)'|(\w+) interface not available")
_PORT = re.compile(r"(?:Missing Input|Invalid (?:input|output) name|Required inputs)\b.*")
_MODEL_TYPE = re.compile(r"Unsupported model_type in config.json: (\S+)")
# Providers by the name that genai_config.json uses, and the device each runs on.
DEVICES = {
    "cuda": "cuda",
    "rocm": "rocm",
    "dml": "dml",
    "webgpu": "webgpu",
    "qnn": "qnn",
    "nvtensorrtrtx": "cuda",
    "openvino": "openvino",
}
ACCELERATORS = {
    "cuda": "CUDAExecutionProvider",
    "rocm": "ROCMExecutionProvider",
    "dml": "DmlExecutionProvider",
    "webgpu": "WebGpuExecutionProvider",
    "qnn": "QNNExecutionProvider",
    "openvino": "OpenVINOExecutionProvider",
}
# Names that the library takes where the configuration states none.
DEFAULT_INPUTS = ("input_ids", "attention_mask", "position_ids", "past_key_values.%d.key", "past_key_values.%d.value")
# Parts that take sound or pictures (or another text, for an encoder).
SENSES = frozenset({"encoder", "vision", "speech", "embedding", "joiner"})


def _library() -> Any:
    import onnxruntime_genai

    return onnxruntime_genai


def first_line(error: BaseException) -> str:
    """First line of the runtime's message."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def refusal(error: BaseException, where: str) -> Reason:
    """The runtime's refusal of a configuration or model as a reason."""
    text = str(error)
    kind = _MODEL_TYPE.search(text)
    if kind:
        return Reason(
            "architecture.unsupported",
            f"the runtime knows no model type `{kind[1]}`",
            kind[1],
            "a model type of the runtime",
            where,
        )
    key = _UNKNOWN_KEY.search(text)
    if key:
        name = ".".join([*(key[1] or "").split(":"), key[2]]).lstrip(".")
        return Reason(
            "config.unknown_semantic_key",
            f"the runtime knows no key `{name}` in genai_config.json",
            name,
            "keys of this runtime",
            where,
        )
    fault, provider, port = _JSON.search(text), _PROVIDER.search(text), _PORT.search(text)
    if fault:
        return Reason("config.invalid", f"the runtime cannot read it: {fault[1]}", where=where)
    if provider:
        name = provider[1] or provider[2]
        return Reason("device.unavailable", f"this runtime has no provider `{name}`", name, "a provider here", where)
    if port:
        return Reason("graph.io_mismatch", f"the runtime does not fit the graph: {port[0][:200]}", where=where)
    return Reason("runtime.failed", f"onnxruntime-genai refuses it: {first_line(error)}", where=where)


class GenAISession:
    """One model with its tokenizer and template."""

    def __init__(self, plan: LoadPlan, model: Any, prompter: Prompter) -> None:
        self.plan, self.model, self.prompter = plan, model, prompter
        self.dtype = plan.dtype
        self.binding = BindingReport(loaded=len(plan.case.artifact.tensors.tensors))
        # The runtime stops at the ids and the length of its own configuration, so we must know them.
        config = (plan.case.artifact.facts["config"].value or {})["model"]
        own = config.get("eos_token_id")
        self.eos_ids = prompter.eos_ids | set(own if isinstance(own, list) else [own]) - {None}
        context = config.get("context_length")
        if isinstance(context, int) and context > 0:
            prompter.limit = min(prompter.limit or context, context)

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> TextOutput:
        """Text for one request. Raises ``InputError``."""
        if self.model is None:
            raise LoadError("the session is closed")
        ids = self.prompter.ids(request)
        sampling, room = request.sampling, self.prompter.room(len(ids), request.sampling.max_tokens)
        stream = TextStream(self.prompter.text, sampling.stop, emit)
        reason, count = "length", 0
        try:
            generator = self._generator(sampling, len(ids) + max(room, 0))
            generator.append_tokens(ids)
            while count < room and not generator.is_done():
                generator.generate_next_token()
                token = int(generator.get_next_tokens()[0])
                if token in self.eos_ids:
                    reason = "stop"
                    break
                count += 1
                if not stream.feed(token):
                    reason = "stop"
                    break
        except RuntimeError as error:
            raise InputError(
                f"onnxruntime-genai cannot run this input: {first_line(error)}", code="runtime.failed"
            ) from None
        return TextOutput(stream.finish(), reason, len(ids), count)

    def _generator(self, sampling: Sampling, length: int) -> Any:
        library = _library()
        parameters = library.GeneratorParams(self.model)
        options: dict[str, Any] = {
            "max_length": length,
            "do_sample": sampling.temperature > 0,
            "batch_size": 1,
            "num_beams": 1,
        }
        if sampling.temperature > 0:
            # Left out, `top_k` would be the library's 50; 0 is all.
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k}
            options |= {"random_seed": sampling.seed} if sampling.seed is not None else {}
        parameters.set_search_options(**options)
        return library.Generator(self.model, parameters)

    def first_token(self) -> None:
        """Computes one token. Raises the library's ``RuntimeError`` where graph and configuration differ."""
        generator = self._generator(Sampling(), 2)
        generator.append_tokens([min(self.eos_ids, default=0)])
        generator.generate_next_token()

    def close(self) -> None:
        """Drops the model; may be called twice."""
        self.model = None


def _mismatch(case: Case) -> Reason | None:
    """Why the first token failed, if the graph takes an input that the configuration does not name (the
    library runs it all the same, and fails in the node that meets the absent value)."""
    model = (case.artifact.facts["config"].value or {})["model"]
    stated = model.get("decoder", {}).get("inputs") or {}
    patterns = [p for p in stated.values() if isinstance(p, str)] + list(DEFAULT_INPUTS)
    known = re.compile("|".join(re.escape(p).replace("%d", r"\d+") for p in patterns))
    ports = case.artifact.graph.inputs if case.artifact.graph else []
    strange = [p.name for p in ports if not known.fullmatch(p.name)]
    if not strange:
        return None
    message = f"the graph takes the input `{strange[0]}`, which genai_config.json does not name"
    return Reason("graph.io_mismatch", message, ", ".join(strange), ", ".join(patterns), case.artifact.entry)


class OnnxRuntimeGenAIBackend:
    """onnxruntime-genai's own packages."""

    name = "onnxruntime-genai"
    reads = frozenset({ArtifactKind.ONNX_GENAI})
    tasks: frozenset[str] = frozenset({Task.TEXT_GENERATION, Task.CHAT})

    def describe(self) -> BackendBuild:
        """Version from the installed distribution; nothing is imported."""
        build = BackendBuild("onnxruntime-genai", extra="onnx")
        try:
            build.version = version("onnxruntime-genai") if find_spec("onnxruntime_genai") else ""
        except PackageNotFoundError:
            build.version = ""
        if build.version:
            build.dependencies = {"onnxruntime-genai": build.version}
        else:
            build.unavailable, build.missing = "the package `onnxruntime-genai` is not here", ["onnxruntime-genai"]
        return build

    def devices(self) -> list[str]:
        """The CPU, and what both the library was built for and the runtime below it has a provider of:
        the library's own answer speaks of its build alone (a CPU wheel says yes to QNN and WebGPU)."""
        from onnxruntime import get_available_providers

        library, providers = _library(), get_available_providers()
        return [
            "cpu",
            *(
                device
                for device, provider in ACCELERATORS.items()
                if provider in providers and getattr(library, f"is_{device}_available", lambda: False)()
            ),
        ]

    def requirements(self, case: Case) -> list[Requirement]:
        """The configuration as the runtime parses it, and the providers that it asks for."""
        entry = "/".join(p for p in (case.artifact.entry, "genai_config.json") if p)
        found = [*self._providers(case, entry), *self._parts(case, entry)]
        try:
            _library().Config(case.file(case.artifact.entry))
        except RuntimeError as error:
            reason = refusal(error, entry)
            found.append(
                unmet(
                    Kind.CONFIG,
                    reason.code,
                    reason.message,
                    observed=reason.observed,
                    expected=reason.expected,
                    where=entry,
                )
            )
        return found or [met("config.parsed", Kind.CONFIG, entry)]

    def _providers(self, case: Case, entry: str) -> list[Requirement]:
        """Providers that the configuration asks for and this runtime lacks, and a device that the
        configuration never asks for: the runtime would compute on the CPU and not say so."""
        fact = case.artifact.facts.get("providers")
        asked = [str(name) for name in (fact.value or [] if fact else [])]
        places = {name: DEVICES.get(name.lower().removesuffix("executionprovider"), "cpu") for name in asked}
        devices = self.devices()
        found = [
            unmet(
                Kind.DEVICE,
                "device.unavailable",
                f"genai_config.json asks for the provider `{name}`, which is not here",
                observed=", ".join(devices),
                expected=name,
                where=entry,
            )
            for name, place in places.items()
            if place not in devices
        ]
        wanted = case.device.split(":")[0]
        if wanted in devices and wanted not in (set(places.values()) - {"cpu"} or {"cpu"}):
            message = f"genai_config.json asks for {', '.join(asked) or 'the CPU'}, the case for `{case.device}`"
            found.append(
                unmet(
                    Kind.DEVICE,
                    "device.silent_fallback",
                    message,
                    observed=", ".join(asked) or "cpu",
                    expected=case.device,
                    where=entry,
                )
            )
        return found

    def _parts(self, case: Case, entry: str) -> list[Requirement]:
        """Graphs besides the decoder: a prompt alone is not what such a model takes."""
        others = sorted({c.role for c in case.artifact.components} & SENSES)
        if not others:
            return []
        return [
            unmet(
                Kind.ARCHITECTURE,
                "architecture.unsupported",
                f"the model has the part `{others[0]}`; models of text alone are served here",
                observed=", ".join(others),
                expected="a decoder",
                where=entry,
            )
        ]

    def inquire(self, case: Case) -> list[Evidence]:
        """``requirements`` has put every question that needs no weights."""
        return [passed(EvidenceLevel.INQUIRED)]

    def plan(self, case: Case) -> LoadPlan:
        """One ``og.Model`` over the directory."""
        kind = case.artifact.facts.get("model_type")
        tensors = case.artifact.tensors.tensors.values()
        dtype = max(tensors, key=lambda t: t.nbytes).dtype if tensors else "float32"
        return LoadPlan(
            case, self.name, f"onnxruntime_genai.Model({kind.value if kind else ''})", dtype, case.artifact.files
        )

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Constructs the model and computes one token: the library offers nothing less that finds a
        graph with other ports than its configuration says."""
        try:
            session = self.load(plan)
        except LoadError as error:
            return failed(EvidenceLevel.DRY_LOADED, error.code, error.message)
        assert isinstance(session, GenAISession)
        try:
            session.first_token()
        except RuntimeError as error:
            reason = _mismatch(plan.case) or refusal(error, plan.case.artifact.entry)
            return failed(
                EvidenceLevel.DRY_LOADED,
                reason.code,
                reason.message,
                observed=reason.observed,
                expected=reason.expected,
                where=reason.where,
            )
        finally:
            session.close()
        return passed(EvidenceLevel.DRY_LOADED)

    def load(self, plan: LoadPlan) -> Session:
        """Model and tokenizer. Raises ``LoadError``."""
        case = plan.case
        prompter = Prompter(case.root, case.artifact, case.options)
        try:
            model = _library().Model(case.file(case.artifact.entry))
        except RuntimeError as error:
            reason = refusal(error, case.artifact.entry)
            raise LoadError(reason.message, code=reason.code) from None
        return GenAISession(plan, model, prompter)

    def probe(self, session: Session) -> Evidence:
        """A few tokens: the constructor alone proves nothing here."""
        assert isinstance(session, GenAISession)
        task = session.plan.case.task
        inputs = {"messages": [{"role": "user", "content": "Hello"}]} if task == Task.CHAT else {"prompt": "Hello"}
        started = time.perf_counter()
        try:
            output = session.run(Request(task, inputs, Sampling(max_tokens=8)))
        except InputError as error:
            return failed(EvidenceLevel.EXECUTED, error.code, error.message)
        spent = time.perf_counter() - started
        return passed(
            EvidenceLevel.EXECUTED,
            measurements={"latency_s": spent, "tokens_per_s": max(output.completion_tokens, 1) / spent},
        )
