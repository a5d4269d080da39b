"""CTranslate2: decoders and encoder-decoders in its own binary format."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
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
    State,
    failed,
    met,
    passed,
    unmet,
)
from turnout.errors import InputError, LoadError
from turnout.package.facts import Artifact, ArtifactKind
from turnout.tasks.contract import EmbeddingsOutput, TextOutput
from turnout.tasks.decoding import TextStream
from turnout.tasks.language import EmbeddingsAdapter, pooling_recipe
from turnout.tasks.prompting import Prompter
from turnout.tasks.tokenization import load_tokenizer
from turnout.types import Request, Sampling, Task

SEQ2SEQ = frozenset({Task.TRANSLATION, Task.TEXT2TEXT})
TEXT = frozenset({Task.TEXT_GENERATION, Task.CHAT})
# Specification that each task needs (the library refuses others: "cannot be used as ...").
SPECS = {
    **dict.fromkeys(TEXT, "TransformerDecoderSpec"),
    **dict.fromkeys(SEQ2SEQ, "TransformerSpec"),
    Task.EMBEDDINGS: "TransformerEncoderSpec",
}
CLASSES = {
    "TransformerDecoderSpec": "Generator",
    "TransformerSpec": "Translator",
    "TransformerEncoderSpec": "Encoder",
}
OPTIONS = frozenset({"chat_template", "context", "dtype", "max_length", "normalize", "pooling", "tokenizer"})


# A few tokens may be pruned from a vocabulary; more than this share means another tokenizer.
FOREIGN_SHARE = 0.01


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
        named = {prompter.tokenizer.id_to_token(i) for i in prompter.eos_ids}
        self.ends = frozenset({*named, stored_settings(plan.case).get("eos_token", "</s>")} - {None})

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> TextOutput:
        """Text for one request, piece by piece as the library's steps give it. Raises ``InputError``."""
        if self.model is None:
            raise LoadError("the session is closed")
        translate = request.task in SEQ2SEQ
        typed = Request(Task.TEXT_GENERATION, {"prompt": request.inputs["text"]}) if translate else request
        ids = self.prompter.ids(typed)
        tokens = [str(self.prompter.tokenizer.id_to_token(i)) for i in ids]
        room = request.sampling.max_tokens if translate else self.prompter.room(len(ids), request.sampling.max_tokens)
        stream = TextStream(self.prompter.text, request.sampling.stop, emit)
        if room <= 0:
            return TextOutput(stream.finish(), "length", len(ids), 0)
        steps = _Steps(stream, self.prompter.tokenizer, self.ends)
        try:
            self._seed(request.sampling)
            self._compute(translate, tokens, room, {**_sampling(request.sampling), "beam_size": 1, "callback": steps})
        except (RuntimeError, ValueError) as error:
            raise InputError(f"CTranslate2 cannot run this input: {first_line(error)}", code="runtime.failed") from None
        return TextOutput(stream.finish(), "stop" if steps.ended else "length", len(ids), steps.count)

    def _compute(self, translate: bool, tokens: list[str], room: int, given: dict[str, Any]) -> None:
        if translate:
            # The library's own bounds would cut a long text in silence and forbid an empty answer.
            bounds = {"max_input_length": 0, "min_decoding_length": 0, "max_decoding_length": room}
            self.model.translate_batch([tokens], **bounds, **given)
        else:
            self.model.generate_batch([tokens], max_length=room, include_prompt_in_result=False, **given)

    def _seed(self, sampling: Sampling) -> None:
        """A thread of the library takes the seed once, when it first draws: new threads for each seed."""
        if sampling.temperature > 0 and sampling.seed is not None:
            _library().set_random_seed(sampling.seed % (1 << 32))
            self.model.unload_model()
            self.model = self._make()

    def close(self) -> None:
        """Frees the model; may be called twice."""
        if self.model is not None:
            self.model.unload_model()
            self.model = None


class _Steps:
    """What the library calls after each token; it stops when told True."""

    def __init__(self, stream: TextStream, tokenizer: Any, ends: frozenset[str]) -> None:
        self.stream, self.tokenizer, self.ends = stream, tokenizer, ends
        self.count, self.ended = 0, False

    def __call__(self, step: Any) -> bool:
        if step.token in self.ends:
            self.ended = True
            return True
        self.count += 1
        token = self.tokenizer.token_to_id(step.token)  # rows that only fill the table up have no text
        self.ended = token is not None and not self.stream.feed(token)
        return self.ended


class CTranslate2EncoderSession:
    """An Encoder with the package's tokenizer and pooling recipe."""

    def __init__(self, plan: LoadPlan, model: Any, adapter: EmbeddingsAdapter) -> None:
        self.plan, self.model, self.adapter = plan, model, adapter
        plan.dtype = self.dtype = model.compute_type
        self.binding = BindingReport(loaded=len(plan.case.artifact.tensors.tensors))

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> EmbeddingsOutput:
        """Vectors of the texts. Raises ``InputError``."""
        if self.model is None:
            raise LoadError("the session is closed")
        try:
            return self.adapter.run(request, self._infer)
        except (RuntimeError, ValueError) as error:
            raise InputError(f"CTranslate2 cannot run this input: {first_line(error)}", code="runtime.failed") from None

    def _infer(self, inputs: dict[str, Any]) -> dict[str, Any]:
        import numpy as np

        view = _library().StorageView.from_array
        lengths = inputs["attention_mask"].sum(axis=1)
        segments = inputs["token_type_ids"]
        more = {"token_type_ids": segments.tolist()} if _has_segments(self.plan.case.artifact) else {}
        output = self.model.forward_batch(
            view(inputs["input_ids"].astype(np.int32)), view(lengths.astype(np.int32)), **more
        )
        states = output.last_hidden_state.to(_library().DataType.float32)
        return {"last_hidden_state": np.array(states)}

    def close(self) -> None:
        """Frees the model; may be called twice."""
        if self.model is not None:
            self.model.unload_model()
            self.model = None


def _has_segments(artifact: Artifact) -> bool:
    return any("token_type" in name or "embeddings_1" in name for name in artifact.tensors.tensors)


def stored_settings(case: Case) -> dict[str, Any]:
    """The library's ``config.json`` beside the model, {} when there is none to read."""
    try:
        data = json.loads((Path(case.file(case.artifact.entry)) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return data if isinstance(data, dict) else {}


def _words(case: Case) -> list[list[str]]:
    """The model's vocabularies: one, or source and target."""
    found = []
    folder = Path(case.file(case.artifact.entry))
    for path in sorted(folder.glob("*vocabulary.*")):
        text = path.read_text(encoding="utf-8")
        found.append(json.loads(text) if path.suffix == ".json" else text.split("\n"))
    return found


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
    tasks: frozenset[str] = frozenset({*TEXT, *SEQ2SEQ, Task.EMBEDDINGS})

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
        """The CPU, and every CUDA device that the library counts."""
        return ["cpu", *(f"cuda:{i}" for i in range(_library().get_cuda_device_count()))]

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
        if case.task in SEQ2SEQ and stored_settings(case).get("decoder_start_token", "<s>") is None:
            message = "every text needs a start token of its own (the target language), which no request gives yet"
            found.append(
                unmet(
                    Kind.RECIPE,
                    "recipe.missing",
                    message,
                    observed="no decoder_start_token",
                    expected="a decoder_start_token",
                    where=f"{artifact.entry}/config.json".lstrip("/"),
                )
            )
        found += _vocabularies(case)
        found += [
            unmet(
                Kind.OPTION,
                "option.unsupported",
                f"CTranslate2 takes no option `{name}`",
                observed=name,
                expected=", ".join(sorted(OPTIONS)),
            )
            for name in case.options
            if name not in OPTIONS
        ]
        found += self._dtype(case)
        return found

    def _dtype(self, case: Case) -> list[Requirement]:
        wanted = str(case.options.get("dtype") or "default")
        known = (
            {"default", *_library().get_supported_compute_types(case.device.split(":")[0])}
            if case.device.split(":")[0] in {d.split(":")[0] for d in self.devices()}
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
        name = CLASSES.get(SPECS.get(Task(case.task), ""), "Generator")
        dtype = str(case.options.get("dtype") or "default")
        recipe = pooling_recipe(case.artifact, case.options).id if case.task == Task.EMBEDDINGS else ""
        return LoadPlan(case, self.name, f"ctranslate2.{name}", dtype, case.artifact.files, recipe)

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
        refused = next((r for r in self.requirements(case) if r.state is State.UNMET), None)
        if refused is not None and refused.reason is not None:
            raise LoadError(refused.reason.message, code=refused.reason.code)
        maker = getattr(_library(), plan.implementation.rpartition(".")[2])
        kind, _, index = case.device.partition(":")
        arguments = {"device": kind, "device_index": int(index or 0), "compute_type": plan.dtype, "inter_threads": 1}
        make = partial(maker, case.file(case.artifact.entry), intra_threads=len(os.sched_getaffinity(0)), **arguments)
        try:
            if case.task == Task.EMBEDDINGS:
                adapter = EmbeddingsAdapter(case.root, case.artifact, case.options)
                return CTranslate2EncoderSession(plan, make(), adapter)
            return CTranslate2Session(plan, make, Prompter(case.root, case.artifact, case.options))
        except (RuntimeError, ValueError) as error:
            raise LoadError(f"CTranslate2 cannot load it: {first_line(error)}") from None

    def probe(self, session: Session) -> Evidence:
        """A few tokens, or two vectors: what is alone must equal what stands beside a longer text."""
        if isinstance(session, CTranslate2EncoderSession):
            return _probe_vectors(session)
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
        speed = max(output.completion_tokens, 1) / spent
        return passed(EvidenceLevel.EXECUTED, measurements={"latency_s": spent, "tokens_per_s": speed})


def _vocabularies(case: Case) -> list[Requirement]:
    """Whether tokenizer and model speak of the same words; unknown ones the library reads as unknown."""
    try:
        known = load_tokenizer(case.root, case.artifact, case.options).get_vocab()
        lists = _words(case)
    except (InputError, OSError, ValueError):
        return []  # said by others: no tokenizer, no vocabulary
    for words in lists:
        strange = [word for word, number in known.items() if number < len(words)]
        lost = sorted(set(strange) - set(words))
        if len(lost) > FOREIGN_SHARE * len(strange):
            message = f"{len(lost)} of the tokenizer's {len(strange)} tokens are not in the model's vocabulary"
            return [
                unmet(
                    Kind.COMPONENT,
                    "component.invalid",
                    message,
                    observed=lost[0],
                    expected="the tokenizer the model was converted with",
                    where=case.artifact.entry,
                )
            ]
    return [met("vocabulary", Kind.COMPONENT, case.artifact.entry)]


def _probe_vectors(session: CTranslate2EncoderSession) -> Evidence:
    import numpy as np

    texts = ["A probe.", "A second and rather longer probe."]
    started = time.perf_counter()
    both = session.run(Request(Task.EMBEDDINGS, {"texts": texts})).vectors
    spent = time.perf_counter() - started
    alone = session.run(Request(Task.EMBEDDINGS, {"texts": texts[:1]})).vectors
    off = float(np.abs(both[0] - alone[0]).max())
    if not np.isfinite(both).all() or (session.dtype == "float32" and not off <= 1e-4):
        message = "a text alone gives another vector than in a batch"
        return failed(
            EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", message, observed=f"{off:.2g}", expected="at most 1e-4"
        )
    return passed(EvidenceLevel.EXECUTED, measurements={"latency_s": spent})
