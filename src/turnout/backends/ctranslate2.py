"""CTranslate2: decoders and encoder-decoders in its own binary format."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

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
from turnout.errors import InputError, LoadError
from turnout.package.facts import Artifact, ArtifactKind
from turnout.tasks.contract import TextOutput
from turnout.tasks.decoding import TextStream
from turnout.tasks.prompting import Prompter
from turnout.types import Request, Sampling, Task

SEQ2SEQ = frozenset({Task.TRANSLATION, Task.TEXT2TEXT})
TEXT = frozenset({Task.TEXT_GENERATION, Task.CHAT})
# Specification that each task needs (the library refuses others: "cannot be used as ...").
SPECS = {**dict.fromkeys(TEXT, "TransformerDecoderSpec"), **dict.fromkeys(SEQ2SEQ, "TransformerSpec")}


def _library() -> Any:
    import ctranslate2

    return ctranslate2


@cache
def newest_binary_version() -> int | None:
    """Newest binary version that the library reads, from its own refusal of a file from the future."""
    import struct
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        name = b"TransformerSpec\0"
        with open(f"{folder}/model.bin", "wb") as stream:
            stream.write(struct.pack("<IH", 999, len(name)) + name + struct.pack("<II", 1, 0))
        try:
            _library().Translator(folder)
        except (RuntimeError, ValueError) as error:
            found = re.search(r"v(\d+) or below", str(error))
            return int(found[1]) if found else None
    return None


def first_line(error: BaseException) -> str:
    """First line of the library's message."""
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else type(error).__name__


def _fact(artifact: Artifact, name: str) -> Any:
    fact = artifact.facts.get(name)
    return fact.value if fact else None


class CTranslate2Session:
    """A Generator or Translator with the package's tokenizer."""

    def __init__(self, plan: LoadPlan, make: Callable[[], Any], prompter: Prompter) -> None:
        self.plan, self.prompter, self._make, self.model = plan, prompter, make, make()
        plan.dtype = self.dtype = self.model.compute_type
        self.binding = BindingReport(loaded=len(plan.case.artifact.tensors.tensors))

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> TextOutput:
        """Text for one request. Raises ``InputError``."""
        if self.model is None:
            raise LoadError("the session is closed")
        translate = request.task in SEQ2SEQ
        typed = Request(Task.TEXT_GENERATION, {"prompt": request.inputs["text"]}) if translate else request
        ids = self.prompter.ids(typed)
        tokens = [str(self.prompter.tokenizer.id_to_token(i)) for i in ids]
        stream = TextStream(self.prompter.text, request.sampling.stop, emit)
        try:
            self._seed(request.sampling)
            produced, ended = (
                self._translate(tokens, request.sampling)
                if translate
                else self._generate(tokens, len(ids), request.sampling)
            )
        except (RuntimeError, ValueError) as error:
            raise InputError(f"CTranslate2 cannot run this input: {first_line(error)}", code="runtime.failed") from None
        count = 0
        for token in produced:
            if token in self.prompter.eos_ids:
                ended = True
                break
            count += 1
            if not stream.feed(token):
                ended = True
                break
        return TextOutput(stream.finish(), "stop" if ended else "length", len(ids), count)

    def _seed(self, sampling: Sampling) -> None:
        """A thread of the library takes the seed once, when it first draws: new threads for each seed."""
        if sampling.temperature > 0 and sampling.seed is not None:
            _library().set_random_seed(sampling.seed % (1 << 32))
            self.model.unload_model()
            self.model = self._make()

    def _generate(self, tokens: list[str], length: int, sampling: Sampling) -> tuple[list[int], bool]:
        room = max(self.prompter.room(length, sampling.max_tokens), 0)
        result = self.model.generate_batch(
            [tokens], max_length=room, include_prompt_in_result=False, **_sampling(sampling)
        )[0]
        produced = list(result.sequences_ids[0])
        return produced, len(produced) < room

    def _translate(self, tokens: list[str], sampling: Sampling) -> tuple[list[int], bool]:
        result = self.model.translate_batch(
            [tokens], max_decoding_length=sampling.max_tokens, beam_size=1, **_sampling(sampling)
        )[0]
        ids = [self.prompter.tokenizer.token_to_id(token) for token in result.hypotheses[0]]
        return [i for i in ids if i is not None], len(ids) < sampling.max_tokens

    def close(self) -> None:
        """Frees the model; may be called twice."""
        if self.model is not None:
            self.model.unload_model()
            self.model = None


def _sampling(sampling: Sampling) -> dict[str, Any]:
    if sampling.temperature <= 0:
        return {"sampling_topk": 1}
    return {
        "sampling_topk": sampling.top_k,
        "sampling_topp": sampling.top_p,
        "sampling_temperature": sampling.temperature,
    }


class CTranslate2Backend:
    """CTranslate2 directories."""

    name = "ctranslate2"
    reads = frozenset({ArtifactKind.CTRANSLATE2})
    tasks: frozenset[str] = frozenset({*TEXT, *SEQ2SEQ})

    def describe(self) -> BackendBuild:
        """Version from the installed distribution; nothing is imported."""
        build = BackendBuild(self.name, extra="ctranslate2")
        try:
            build.version = version("ctranslate2") if find_spec("ctranslate2") else ""
        except PackageNotFoundError:
            build.version = ""
        if build.version:
            build.dependencies = {"ctranslate2": build.version}
        else:
            build.unavailable, build.missing = "the package `ctranslate2` is not here", ["ctranslate2"]
        return build

    def devices(self) -> list[str]:
        """The CPU, and CUDA when the library counts a device."""
        return ["cpu", *(["cuda"] if _library().get_cuda_device_count() else [])]

    def requirements(self, case: Case) -> list[Requirement]:
        """Binary version, specification of the task, and element type."""
        artifact = case.artifact
        found: list[Requirement] = []
        binary, newest = _fact(artifact, "binary_version"), newest_binary_version()
        if newest is not None and isinstance(binary, int) and binary > newest:
            found.append(
                unmet(
                    Kind.ARTIFACT,
                    "dependency.version",
                    f"the model has binary version {binary}, this library reads up to {newest}",
                    observed=f"v{binary}",
                    expected=f"at most v{newest}",
                    where=artifact.entry,
                    remedies=[Remedy(Action.CONVERT, "convert the model again with the installed version")],
                )
            )
        spec, wanted = _fact(artifact, "spec"), SPECS.get(Task(case.task))
        if wanted is not None and spec != wanted:
            found.append(
                unmet(
                    Kind.TASK_HEAD,
                    "task.not_offered",
                    f"a {spec} cannot serve `{case.task}`",
                    observed=str(spec),
                    expected=wanted,
                    where=artifact.entry,
                )
            )
        found += self._dtype(case)
        return found

    def _dtype(self, case: Case) -> list[Requirement]:
        wanted = str(case.options.get("dtype") or "default")
        known = (
            {"default", *_library().get_supported_compute_types(case.device.split(":")[0])}
            if case.device in self.devices()
            else {wanted}
        )
        if wanted in known:
            return [met("dtype", Kind.DTYPE, wanted)]
        return [
            unmet(
                Kind.OPTION,
                "option.unsupported",
                f"CTranslate2 does not compute in {wanted} here",
                observed=wanted,
                expected=", ".join(sorted(known)),
            )
        ]

    def inquire(self, case: Case) -> list[Evidence]:
        """``requirements`` has put every question that needs no weights."""
        return [passed(EvidenceLevel.INQUIRED)]

    def plan(self, case: Case) -> LoadPlan:
        """The library's class for the specification."""
        name = "Translator" if case.task in SEQ2SEQ else "Generator"
        return LoadPlan(
            case, self.name, f"ctranslate2.{name}", str(case.options.get("dtype") or "default"), case.artifact.files
        )

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Loads and frees: the library offers nothing less."""
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
        library = _library()
        maker = library.Translator if case.task in SEQ2SEQ else library.Generator
        arguments = {"device": case.device.split(":")[0], "compute_type": plan.dtype, "inter_threads": 1}
        make = partial(maker, case.file(case.artifact.entry), intra_threads=len(os.sched_getaffinity(0)), **arguments)
        try:
            return CTranslate2Session(plan, make, prompter)
        except (RuntimeError, ValueError) as error:
            raise LoadError(f"CTranslate2 cannot load it: {first_line(error)}") from None

    def probe(self, session: Session) -> Evidence:
        """A few tokens."""
        assert isinstance(session, CTranslate2Session)
        task = session.plan.case.task
        inputs: dict[str, Any] = {"text": "Hello"} if task in SEQ2SEQ else {"prompt": "Hello"}
        if task == Task.CHAT:
            inputs = {"messages": [{"role": "user", "content": "Hello"}]}
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
