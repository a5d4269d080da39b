"""llama.cpp over GGUF files: generation, chat, embeddings, ranking.

What llama.cpp can say is asked of it: its answer about architecture, vocabulary and tensors comes from a
stand-in without weights (``llamacpp_ask``), its tensor types from the library's own list.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from turnout.backends.admission import DEFAULT_CONTEXT
from turnout.backends.base import (
    BackendBuild,
    BindingReport,
    Case,
    Evidence,
    EvidenceLevel,
    LoadPlan,
    Outcome,
    Requirement,
    failed,
    passed,
)
from turnout.backends.llamacpp_case import (
    asked,
    context_of,
    has_rank_head,
    main_type,
    pooling_of,
    readable_header,
    required_model,
    requirements_of,
    template_of,
)
from turnout.backends.llamacpp_native import CONTEXT_STEP, Native, NativeLoadError, Settings, library
from turnout.errors import InputError, LoadError, TurnoutError
from turnout.package.facts import Artifact, ArtifactKind
from turnout.tasks.contract import EmbeddingsOutput, RankedDocument, RankingOutput, TextOutput
from turnout.tasks.language import pooling_recipe
from turnout.types import Request, Sampling, Task, count_of

if TYPE_CHECKING:
    from turnout.backends.llamacpp_executor import LlamaCppExecutor
    from turnout.backends.llamacpp_vocabulary import LlamaCppVocabulary

GENERATING = frozenset({Task.TEXT_GENERATION, Task.CHAT})
# Above this many bytes a dry load only asks with the stand-in: mapping the weights would read them.
DRY_LOAD_BYTES = 2 << 30


class LlamaCppBackend:
    """llama.cpp by the prebuilt ``xllamacpp`` wheel."""

    name = "llamacpp"
    # PEFT adapters are read only to say which form of them llama.cpp takes.
    reads = frozenset({ArtifactKind.GGUF, ArtifactKind.GGUF_ADAPTER, ArtifactKind.PEFT_ADAPTER})
    tasks = frozenset({*GENERATING, Task.EMBEDDINGS, Task.RERANK})

    def describe(self) -> BackendBuild:
        """Version of the wheel, which is that of the llama.cpp build inside."""
        try:
            installed = version("xllamacpp")
        except PackageNotFoundError:
            installed = ""
        there = bool(installed) and find_spec("xllamacpp") is not None
        return BackendBuild(
            self.name,
            installed if there else "",
            {"xllamacpp": installed} if there else {},
            unavailable="" if there else "the wheel `xllamacpp` is absent",
            missing=[] if there else ["xllamacpp"],
            extra="llamacpp",
        )

    def devices(self) -> list[str]:
        """``cpu``, then what ggml's device list holds beyond it."""
        names = [re.match(r"[A-Za-z]*", device["name"]) for device in library().get_device_info()]  # CUDA0, Vulkan1
        return list(dict.fromkeys(["cpu", *(found.group().lower() for found in names if found and found.group())]))

    def requirements(self, case: Case) -> list[Requirement]:
        """Options, tensor types, llama.cpp's answer to the stand-in, and the task's own parts."""
        return requirements_of(case)

    def inquire(self, case: Case) -> list[Evidence]:
        """llama.cpp's answer to the stand-in, as evidence."""
        try:
            model = required_model(case)
        except TurnoutError:
            return []  # said among the requirements
        if not readable_header(model.artifact):
            return []
        reason = asked(model)
        if reason is None:
            return [passed(EvidenceLevel.INQUIRED)]
        return [Evidence(EvidenceLevel.INQUIRED, Outcome.FAIL, [reason])]

    def plan(self, case: Case) -> LoadPlan:
        """llama.cpp's own implementation of the file's architecture, in the file's own types."""
        artifact = case.artifact
        architecture = artifact.architecture.model_type if artifact.architecture else ""
        recipe = ""
        if case.task == Task.EMBEDDINGS:
            recipe = pooling_recipe(artifact, case.options).id
        return LoadPlan(case, self.name, f"llama.cpp {architecture}", main_type(artifact), list(artifact.files), recipe)

    def dry_load(self, plan: LoadPlan) -> Evidence:
        """Binds every tensor, with a small context. Beyond ``DRY_LOAD_BYTES`` the answer to the stand-in
        stands for it: it binds the same names and shapes, and opens no context."""
        case = plan.case
        model = required_model(case)
        if model.artifact.tensors.total_bytes > DRY_LOAD_BYTES:
            reason = asked(model)
            if reason is not None:
                return Evidence(EvidenceLevel.DRY_LOADED, Outcome.FAIL, [reason])
            count = len(model.artifact.tensors.tensors)
            return passed(EvidenceLevel.DRY_LOADED, binding=BindingReport(loaded=count))
        try:
            session = self._open(plan, context=CONTEXT_STEP, repack=False)
        except NativeLoadError as error:
            return Evidence(EvidenceLevel.DRY_LOADED, Outcome.FAIL, [error.reason])
        except LoadError as error:
            return failed(EvidenceLevel.DRY_LOADED, error.code, error.message)
        binding = session.binding
        session.close()
        return passed(EvidenceLevel.DRY_LOADED, binding=binding)

    def load(self, plan: LoadPlan) -> LlamaCppSession:
        """Session over the whole model. llama.cpp refuses a file with a tensor missing or too many."""
        return self._open(plan, 0, repack=True)

    def executor(
        self,
        plan: LoadPlan,
        options: Mapping[str, Any] | None = None,
        on_progress: Callable[[float], None] | None = None,
    ) -> LlamaCppExecutor:
        """The whole model for the generation engine; ``options`` are those of ``llamacpp_options``.

        An adapter file is loaded with its base, and rows name it by the artifact's id.
        """
        from turnout.backends.llamacpp_executor import LlamaCppExecutor
        from turnout.backends.llamacpp_options import ExecutorOptions

        case = plan.case
        model = required_model(case)
        given: dict[str, Any] = {"context": context_of(case, model.artifact), "device": case.device, **(options or {})}
        # Room for the longest sequence at least, where nothing is said about the cache.
        given.setdefault("cache_tokens", max(count_of(given["context"]) or 0, DEFAULT_CONTEXT))
        executor = LlamaCppExecutor(model.path, ExecutorOptions.of(given), on_progress=on_progress)
        if case.artifact.kind is ArtifactKind.GGUF_ADAPTER:
            try:
                executor.load_adapter(case.artifact.id, case.file(case.artifact.entry))
            except BaseException:
                executor.close()
                raise
        return executor

    def vocabulary(self, plan: LoadPlan) -> LlamaCppVocabulary:
        """The model's vocabulary, read without its weights."""
        from turnout.backends.llamacpp_vocabulary import LlamaCppVocabulary

        return LlamaCppVocabulary.of_file(required_model(plan.case).path)

    def _open(self, plan: LoadPlan, context: int, *, repack: bool) -> LlamaCppSession:
        case = plan.case
        model = required_model(case)
        if case.task == Task.RERANK and not has_rank_head(model.artifact):
            raise LoadError("the file has no ranking head", code="head.missing")
        settings = Settings(
            context or context_of(case, model.artifact),
            device=case.device,
            pooling=pooling_of(case, model.artifact),
            chat=case.task == Task.CHAT,
            chat_template=template_of(case, model.artifact),
            adapter=case.file(case.artifact.entry) if case.artifact.kind is ArtifactKind.GGUF_ADAPTER else "",
            repack=repack,
        )
        return LlamaCppSession(plan, model.artifact, Native(model.path, settings))

    def probe(self, session: LlamaCppSession) -> Evidence:
        """A few greedy tokens with their speed, or one text's vector, or one document's score."""
        return _PROBES[Task(session.plan.case.task)](session)


class LlamaCppSession:
    """A loaded model bound to one task."""

    def __init__(self, plan: LoadPlan, artifact: Artifact, native: Native) -> None:
        self.plan = plan
        self.dtype = main_type(artifact)
        tensors = artifact.tensors.tensors
        tied = ["output.weight"] if "output.weight" not in tensors and "token_embd.weight" in tensors else []
        self.binding = BindingReport(loaded=len(tensors), tied=tied if plan.case.task in GENERATING else [])
        self._native: Native | None = native
        self._normalize = False
        if plan.case.task == Task.EMBEDDINGS:
            settings = pooling_recipe(artifact, plan.case.options).settings
            self._normalize = bool(settings.get("normalize", False))

    def run(self, request: Request, emit: Callable[[str], None] | None = None) -> Any:
        """Output of the task's contract. Raises ``InputError`` with both numbers where the input is
        longer than the context."""
        if self._native is None:
            raise LoadError("the session is closed")
        if request.task == Task.EMBEDDINGS:
            return self._embed(self._native, request)
        if request.task == Task.RERANK:
            return self._rank(self._native, request)
        body = _sampling(request.sampling)
        if request.task == Task.CHAT:
            body["messages"] = list(request.inputs["messages"])
        else:
            body["prompt"] = request.inputs["prompt"]
        text, usage, finish = self._native.complete(body, emit)
        return TextOutput(
            text,
            finish if finish in ("stop", "length") else "stop",
            int(usage.get("prompt_tokens", 0)),
            int(usage.get("completion_tokens", 0)),
        )

    def _embed(self, native: Native, request: Request) -> EmbeddingsOutput:
        import numpy as np

        texts = list(request.inputs["texts"])
        if any(not text for text in texts):
            raise InputError("llama.cpp embeds no empty text")
        vectors = np.array(native.embed(texts, self._normalize), dtype=np.float32)  # [num_texts, dimension]
        return EmbeddingsOutput(vectors, int(vectors.shape[1]), self._normalize, self.plan.recipe)

    def _rank(self, native: Native, request: Request) -> RankingOutput:
        scores = native.rank(request.inputs["query"], list(request.inputs["documents"]))
        ordered = sorted(scores, key=lambda item: -item[1])
        return RankingOutput([RankedDocument(index, score) for index, score in ordered])

    def close(self) -> None:
        """Frees the model."""
        if self._native is not None:
            self._native.close()
            self._native = None


def _sampling(sampling: Sampling) -> dict[str, Any]:
    """llama.cpp's sampler settings; its own defaults (top_k 40, min_p 0.05) are all overridden."""
    body: dict[str, Any] = {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": 0.0,
        "repeat_penalty": 1.0,
        "stop": list(sampling.stop),
    }
    if sampling.seed is not None:
        body["seed"] = sampling.seed
    return body


# ---- probes --------------------------------------------------------------------------------


def _probe_text(session: LlamaCppSession) -> Evidence:
    task = session.plan.case.task
    inputs = {"messages": [{"role": "user", "content": "Hi"}]} if task == Task.CHAT else {"prompt": "Hello"}
    started = time.perf_counter()
    first: list[float] = []
    output = session.run(
        Request(task, inputs, Sampling(max_tokens=16)), lambda piece: first.append(time.perf_counter())
    )
    ended = time.perf_counter()
    if output.completion_tokens < 1:
        return failed(
            EvidenceLevel.EXECUTED, "runtime.failed", "no token was generated", observed="0", expected="1 to 16"
        )
    measured = {"latency_s": ended - started}
    if output.completion_tokens > 1 and first and ended > first[0]:
        measured["tokens_per_s"] = (output.completion_tokens - 1) / (ended - first[0])
        measured["first_token_s"] = first[0] - started
    return passed(EvidenceLevel.EXECUTED, measurements=measured, binding=session.binding)


def _probe_vector(session: LlamaCppSession) -> Evidence:
    started = time.perf_counter()
    output = session.run(Request(Task.EMBEDDINGS, {"texts": ["Hello"]}))
    values = output.vectors[0].tolist()
    if not values or not all(map(math.isfinite, values)) or not any(values):
        return failed(EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", "the vector is empty, zero or not finite")
    return passed(
        EvidenceLevel.EXECUTED, measurements={"latency_s": time.perf_counter() - started}, binding=session.binding
    )


def _probe_rank(session: LlamaCppSession) -> Evidence:
    started = time.perf_counter()
    output = session.run(Request(Task.RERANK, {"query": "Hello", "documents": ["Hello there", "Rain"]}))
    if len(output.ranking) != 2 or not all(math.isfinite(item.score) for item in output.ranking):
        return failed(EvidenceLevel.EXECUTED, "runtime.numeric_mismatch", "the scores are missing or not finite")
    return passed(
        EvidenceLevel.EXECUTED, measurements={"latency_s": time.perf_counter() - started}, binding=session.binding
    )


_PROBES: dict[Task, Callable[[LlamaCppSession], Evidence]] = {
    Task.TEXT_GENERATION: _probe_text,
    Task.CHAT: _probe_text,
    Task.EMBEDDINGS: _probe_vector,
    Task.RERANK: _probe_rank,
}
