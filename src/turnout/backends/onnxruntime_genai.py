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

_UNKNOWN_KEY = re.compile(r"[Uu]nknown value[: ]+\"?([\w.]+)\"?")
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
        name = key[1]
        return Reason(
            "config.unknown_semantic_key",
            f"the runtime knows no key `{name}` in genai_config.json",
            name,
            "keys of this runtime",
            where,
        )
    if "JSON" in text:
        return Reason("config.invalid", first_line(error), where=where)
    return Reason("runtime.failed", f"onnxruntime-genai refuses it: {first_line(error)}", where=where)


class GenAISession:
    """One model with its tokenizer and template."""

    def __init__(self, plan: LoadPlan, model: Any, prompter: Prompter) -> None:
        self.plan, self.model, self.prompter = plan, model, prompter
        self.dtype = plan.dtype
        self.binding = BindingReport(loaded=len(plan.case.artifact.tensors.tensors))

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> TextOutput:
        """Text for one request. Raises ``InputError``."""
        if self.model is None:
            raise LoadError("the session is closed")
        ids = self.prompter.ids(request)
        sampling, room = request.sampling, self.prompter.room(len(ids), request.sampling.max_tokens)
        generator = self._generator(sampling, len(ids) + max(room, 0))
        stream = TextStream(self.prompter.text, sampling.stop, emit)
        reason, count = "length", 0
        try:
            generator.append_tokens(ids)
            while count < room and not generator.is_done():
                generator.generate_next_token()
                token = int(generator.get_next_tokens()[0])
                if token in self.prompter.eos_ids:
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
            options |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
            options |= {"top_k": sampling.top_k} if sampling.top_k else {}
            options |= {"random_seed": sampling.seed} if sampling.seed is not None else {}
        parameters.set_search_options(**options)
        return library.Generator(self.model, parameters)

    def close(self) -> None:
        """Drops the model; may be called twice."""
        self.model = None


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
        """The CPU, and what the runtime says it was built for."""
        library = _library()
        names = ("cuda", "dml", "rocm", "qnn", "webgpu")  # each version knows some of them
        return ["cpu", *(n for n in names if getattr(library, f"is_{n}_available", lambda: False)())]

    def requirements(self, case: Case) -> list[Requirement]:
        """The configuration as the runtime parses it, and the providers that it asks for."""
        entry = "/".join(p for p in (case.artifact.entry, "genai_config.json") if p)
        found = self._providers(case, entry)
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
        fact = case.artifact.facts.get("providers")
        devices = self.devices()
        return [
            unmet(
                Kind.DEVICE,
                "device.unavailable",
                f"genai_config.json asks for the provider `{name}`, which is not here",
                observed=", ".join(devices),
                expected=name,
                where=entry,
            )
            for name in (fact.value or [] if fact else [])
            if DEVICES.get(str(name).lower(), "cpu") not in devices
        ]

    def inquire(self, case: Case) -> list[Evidence]:
        """``requirements`` has put every question that needs no weights."""
        return [passed(EvidenceLevel.INQUIRED)]

    def plan(self, case: Case) -> LoadPlan:
        """One ``og.Model`` over the directory."""
        kind = case.artifact.facts.get("model_type")
        quantization = case.artifact.quantization
        dtype = quantization.method if quantization else "float32"
        return LoadPlan(
            case, self.name, f"onnxruntime_genai.Model({kind.value if kind else ''})", dtype, case.artifact.files
        )

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Constructs the model: the library offers nothing less."""
        try:
            session = self.load(plan)
        except LoadError as error:
            return failed(EvidenceLevel.DRY_LOADED, error.code, error.message)
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
