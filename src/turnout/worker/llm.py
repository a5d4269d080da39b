"""``LLM``: a generating model behind the engine, for many requests at once."""

from __future__ import annotations

import asyncio
import os
import queue
import shutil
import uuid
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from dataclasses import dataclass, field
from operator import index
from pathlib import Path
from types import TracebackType
from typing import Any

from turnout.backends import registry
from turnout.backends.base import Case, Verdict
from turnout.config import WORKER
from turnout.engine.executor import Capabilities
from turnout.engine.request import Event, Finish, GenerationRequest, TokenLogprob, Usage
from turnout.errors import InputError, NotSupportedError, OverloadedError, TurnoutError, UsageError, WorkerError
from turnout.package.facts import Package
from turnout.types import Executed, Sampling, Task
from turnout.worker import wire
from turnout.worker.engine_build import has_engine
from turnout.worker.engine_client import REOPEN, EngineClient
from turnout.worker.judge import Judge, Progress, case_message, default_task, free_memory, open_package
from turnout.worker.process import Worker
from turnout.worker.session import first_supported

Prompt = str | Sequence[int]
Messages = list[dict[str, Any]]
Asked = tuple[GenerationRequest, str, Any]  # with the task and its inputs, where the engine makes the prompt
MORE = ("adapter", "priority", "deadline", "salt", "digests", "speculate", "cache")
TASKS = (Task.CHAT, Task.TEXT_GENERATION, Task.TEXT2TEXT, Task.TRANSLATION, Task.SUMMARIZATION)


@dataclass(slots=True)
class Completion:
    """One generated sequence."""

    index: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] | None = None
    finish: Finish | None = None
    stop: str | int | None = None


@dataclass(slots=True)
class Generation:
    """Answer to one prompt: ``n`` completions and what they cost."""

    completions: list[Completion] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    prompt_logprobs: list[TokenLogprob | None] | None = None

    @property
    def text(self) -> str:
        """Text of the first completion."""
        return self.completions[0].text if self.completions else ""

    def take(self, event: Event) -> None:
        """Adds an event. Raises ``TurnoutError`` when it tells of a failure."""
        if event.error:
            raise failure(event)
        while len(self.completions) <= event.index:
            self.completions.append(Completion(len(self.completions)))
        mine = self.completions[event.index]
        mine.text += event.text
        mine.tokens += event.tokens
        if event.logprobs is not None:
            mine.logprobs = (mine.logprobs or []) + event.logprobs
        if event.finish is not None:
            mine.finish, mine.stop = event.finish, event.stop
        self.prompt_logprobs = event.prompt_logprobs or self.prompt_logprobs
        self.usage = event.usage or self.usage


class LLM:
    """A model in a worker process of its own, driven by the generation engine. A context manager.

    ``model`` is a path or a store name. ``backend`` None takes the best supported one that has an
    executor. ``quantize`` (q8, q6, q5, q4, q3, auto) converts weights while they load. ``speculation`` is
    "ngram" or "draft" (with ``draft``, a model of the same vocabulary). ``adapters`` maps names to LoRA
    directories, ``watermarks`` names to settings (Transformers' ``watermarking_config``) that a request asks for by
    ``Sampling.watermark``. ``mixed_tokens`` bounds the prompt tokens of a step in which others decode: more starts new
    requests sooner and holds up running ones longer. Methods may be called from any thread; requests of all
    of them share the batch. Raises what ``turnout.load`` raises.
    """

    def __init__(
        self,
        model: str,
        *,
        task: str | None = None,
        artifact: str | None = None,
        backend: str | None = None,
        device: str = "cpu",
        options: dict[str, Any] | None = None,
        slots: int = 16,
        context: int | None = None,
        cache_tokens: int | None = None,
        threads: int | None = None,
        kv_dtype: str | None = None,
        quantize: str | None = None,
        speculation: str = "",
        draft: str | None = None,
        draft_tokens: int = 5,
        adapters: dict[str, str] | None = None,
        chunk_tokens: int | None = None,
        mixed_tokens: int | None = None,
        max_waiting: int = 4096,
        prefix_cache: bool = True,
        watermarks: dict[str, dict[str, Any]] | None = None,
        on_progress: Progress | None = None,
    ) -> None:
        if draft is not None and speculation not in ("", "draft"):
            raise UsageError(f"`draft` goes with speculation `draft`, not `{speculation}`")
        if speculation == "draft" and draft is None:
            raise UsageError("speculation `draft` needs the draft model's path", hints=["draft=PATH"])
        options = dict(options or {})
        if quantize is not None:
            options["quantize"] = quantize
        self._pid = os.getpid()
        self._worker = Worker()
        self._client: EngineClient | None = None
        self._folder = ""
        try:
            package, case, verdict, self.why, self._digest = self._choose(
                model, task, artifact, backend, device, options, on_progress
            )
            self.package, self.verdict, self.task = package, verdict, case.task
            self._case = case
            other = None
            if draft is not None:
                drafts = self._choose(draft, task, None, backend or verdict.backend, device, {}, on_progress)
                other = {"backend": drafts[2].backend, "case": case_message(drafts[0], drafts[1])}
            answer = self._worker.call(
                "open_engine",
                timeout=WORKER.load_s,
                memory_bytes=free_memory(),
                backend=verdict.backend,
                case=case_message(package, case),
                options={
                    "slots": slots,
                    "context": context,
                    "cache_tokens": cache_tokens,
                    "threads": threads,
                    "kv_dtype": kv_dtype,
                },
                engine={
                    "speculation": speculation,
                    "chunk_tokens": chunk_tokens,
                    "mixed_tokens": mixed_tokens,
                    "max_waiting": max_waiting,
                    "prefix_cache": prefix_cache,
                    "watermarks": watermarks or {},
                    "draft_tokens": draft_tokens,
                },
                draft=other,
                adapters=adapters or {},
            )
            self.capabilities: Capabilities = wire.rebuild(answer["capabilities"], Capabilities)
            self.dtype, self.recipe, self.load_s = answer["dtype"], answer["recipe"], answer["load_s"]
            self.limit = int(answer["limit"])
            self._folder = str(Path(answer["endpoint"].removeprefix("ipc://")).parent)
            self._client = EngineClient(answer["endpoint"], lambda: self._worker.pid is not None)
        except BaseException:
            self.close()
            raise

    def _choose(
        self,
        model: str,
        task: str | None,
        artifact: str | None,
        backend: str | None,
        device: str,
        options: dict[str, Any],
        on_progress: Progress | None,
    ) -> tuple[Package, Case, Verdict, str, str]:
        package = open_package(model)
        names = [backend] if backend else [name for name in registry.names() if has_engine(name)]
        if backend and not has_engine(backend):
            able = ", ".join(name for name in registry.names() if has_engine(name))
            raise NotSupportedError(f"`{backend}` has no executor for the engine", hints=[f"these have one: {able}"])
        wanted = task or default_task(package, artifact)
        if wanted not in TASKS:
            raise NotSupportedError(f"`{wanted}` is not a generating task", code="task.not_offered")
        with Judge(worker=self._worker) as judge:
            if on_progress:
                judge.progress = on_progress
            case, verdict, why = first_supported(judge, package, wanted, artifact, names, device, options)
            judge.progress(f"loading {case.artifact.id} on {verdict.backend}")
            return package, case, verdict, why, judge.ledger.digest(package, case.artifact)

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def client(self) -> EngineClient:
        """The connection to the engine. Raises ``UsageError`` after ``close``."""
        client = self._client
        if client is None:
            raise UsageError("the model is closed", hints=["open it again: `turnout.LLM(...)`"])
        return client

    @property
    def pid(self) -> int | None:
        """Process id of the worker while it runs."""
        return self._worker.pid

    def executed(self) -> Executed:
        """Identity of what computes here."""
        build = registry.get(self.verdict.backend).describe()
        return Executed(
            self._case.artifact.id,
            self._digest,
            self.verdict.backend,
            build.version,
            self._case.device,
            self.dtype,
            self.recipe,
        )

    # ---- many at once -----------------------------------------------------------------

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling: Sampling | None = None, **more: Any
    ) -> list[Generation]:
        """One ``Generation`` per prompt (text, or token ids), in order; all run in one batch.

        ``more`` are fields of ``GenerationRequest``: adapter, priority, deadline (on ``time.monotonic``'s
        clock), salt, speculate, cache. Raises ``InputError`` for a prompt that does not fit, ``TurnoutError``
        for a request that failed, ``WorkerError`` when the worker ended; then, and when it is interrupted, the
        other requests are cancelled.
        """
        return self._collect([self._prompted(p, sampling, more) for p in _prompts(prompts)])

    def chat(
        self, conversations: Messages | Sequence[Messages], sampling: Sampling | None = None, **more: Any
    ) -> list[Generation]:
        """One ``Generation`` per conversation, through the package's chat template."""
        if not conversations:
            raise InputError("no conversation was given")
        many = [conversations] if isinstance(conversations[0], dict) else conversations
        return self._collect([self._chatted(messages, sampling, more) for messages in many])  # type: ignore[arg-type]

    def stream(self, prompt: Prompt | Messages, sampling: Sampling | None = None, **more: Any) -> Iterator[Event]:
        """Events of one request as they come. Leaving the iteration cancels the request."""
        request, task, inputs = self._any(prompt, sampling, more)
        client = self.client
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        client.submit(request, events.put, task, inputs)
        done = False
        try:
            while not done:
                event = events.get()
                done = event.done
                if event.error:
                    raise self._failure(event)
                yield event
        finally:
            if not done:
                client.abandon(request.id)

    async def agenerate(self, prompt: Prompt | Messages, sampling: Sampling | None = None, **more: Any) -> Generation:
        """``Generation`` of one prompt or conversation."""
        answer = Generation()
        async with aclosing(self.astream(prompt, sampling, **more)) as events:
            async for event in events:
                answer.take(event)
        return answer

    async def astream(
        self, prompt: Prompt | Messages, sampling: Sampling | None = None, **more: Any
    ) -> AsyncGenerator[Event, None]:
        """Events of one request as they come. A task that is cancelled cancels its request."""
        request, task, inputs = self._any(prompt, sampling, more)
        client = self.client
        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            loop.call_soon_threadsafe(events.put_nowait, event)

        done = False
        try:
            try:
                await asyncio.wrap_future(client.start(request, sink, task, inputs))
            except TurnoutError:
                done = True
                raise
            while not done:
                event = await events.get()
                done = event.done
                if event.error:
                    raise self._failure(event)
                yield event
        finally:
            if not done:
                client.abandon(request.id)

    def stats(self) -> dict[str, Any]:
        """The engine's counters (``turnout.engine.job.Stats``)."""
        return dict(self.client.call("stats"))

    def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter while running. Raises ``LoadError`` when it does not fit the base."""
        self.client.call("load_adapter", name=name, path=path)

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Raises ``InputError`` while a request uses it."""
        self.client.call("unload_adapter", name=name)

    def close(self) -> None:
        """Cancels what runs and ends the worker; may be called twice, from any thread. In a forked process it
        leaves the model to the process that opened it."""
        if os.getpid() != self._pid:
            return
        if self._client is not None:
            self._client.close()
            self._client = None
        self._worker.close()
        if self._folder:  # of a worker that was killed
            shutil.rmtree(self._folder, ignore_errors=True)

    # ---- requests ---------------------------------------------------------------------

    def _prompted(self, prompt: Prompt, sampling: Sampling | None, more: dict[str, Any]) -> Asked:
        request = _request(sampling, more)
        if isinstance(prompt, str):
            task = self.task if self.task != Task.CHAT else Task.TEXT_GENERATION
            return request, task, {"prompt" if task == Task.TEXT_GENERATION else "text": prompt}
        try:
            request.prompt = [index(token) for token in prompt]
        except TypeError:
            raise InputError(f"a prompt is text or token ids, not {_shown(prompt)}") from None
        return request, "", None

    def _chatted(self, messages: Messages, sampling: Sampling | None, more: dict[str, Any]) -> Asked:
        if not isinstance(messages, list) or not messages or not all(isinstance(m, dict) for m in messages):
            raise InputError(
                f"a conversation is a list of messages, each with role and content, not {_shown(messages)}"
            )
        return _request(sampling, more), Task.CHAT, {"messages": messages}

    def _any(self, prompt: Prompt | Messages, sampling: Sampling | None, more: dict[str, Any]) -> Asked:
        if not isinstance(prompt, str) and len(prompt) and isinstance(prompt[0], dict):
            return self._chatted(list(prompt), sampling, more)  # type: ignore[arg-type]
        return self._prompted(prompt, sampling, more)  # type: ignore[arg-type]

    def _collect(self, asked: list[Asked]) -> list[Generation]:
        client = self.client
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        answers = {request.id: Generation() for request, _, _ in asked}
        started: list[Future[int]] = []
        try:
            for request, task, inputs in asked:
                started.append(client.start(request, events.put, task, inputs))
            for number, future in enumerate(started):
                _accepted(future, number, len(asked))
            open_ids = set(answers)
            while open_ids:
                event = events.get()
                if event.error:
                    raise self._failure(event)
                answers[event.id].take(event)
                if event.done:
                    open_ids.discard(event.id)
        except BaseException:
            for id in answers:
                client.abandon(id)
            raise
        return list(answers.values())

    def _failure(self, event: Event) -> TurnoutError:
        """What an event that tells of a failure raises."""
        if self._client is None or self._client.dead:
            said = [f"last output: {line}" for line in self._worker.log_tail()[-3:]]
            return WorkerError(event.error, code=event.code, hints=[*said, REOPEN])
        return failure(event)


def failure(event: Event) -> TurnoutError:
    """The exception for an event with an error."""
    kind: type[TurnoutError] = TurnoutError
    if event.code.startswith("grammar."):
        kind = InputError
    elif event.code == OverloadedError.default_code:
        kind = OverloadedError
    return kind(event.error, code=event.code)


def _accepted(future: Future[int], number: int, count: int) -> None:
    """Waits until a request is accepted. Raises why not, naming which of several it was."""
    try:
        future.result()
    except InputError as error:
        if count > 1:
            text = f"prompt {number + 1} of {count}: {error.message}"
            raise InputError(text, code=error.code, hints=error.hints) from None
        raise


def _request(sampling: Sampling | None, more: dict[str, Any]) -> GenerationRequest:
    unknown = sorted(set(more) - set(MORE))
    if unknown:
        raise InputError(f"unknown argument `{unknown[0]}`", hints=["known: " + ", ".join(MORE)])
    if sampling is not None and not isinstance(sampling, Sampling):
        raise InputError(f"`sampling` is a turnout.Sampling, not {_shown(sampling)}")
    return GenerationRequest(uuid.uuid4().hex, [], sampling or Sampling(), **more)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 60 else text[:57] + "..."


def _prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    many = list(prompts.tolist() if hasattr(prompts, "tolist") else prompts)
    if not many:
        raise InputError("no prompt was given")
    return [many] if all(hasattr(token, "__index__") for token in many) else many
