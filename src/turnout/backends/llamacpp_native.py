"""llama.cpp in this process, by the server class of the ``xllamacpp`` wheel.

``xllamacpp`` was taken over ``llama-cpp-python`` because its wheel is prebuilt, a failed load comes
back as an exception instead of ending the process, and chat, embeddings and ranking are llama.cpp's
own. What it lacks is made up here: the reason of a failed load is read from the native log, the
HTTP listener it insists on gets a socket file nobody else can open, and a fresh server is used
once before it may be closed (closing one whose loop has not started yet waits for ever).
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, BinaryIO

from turnout.backends.base import Reason
from turnout.errors import InputError, LoadError, NotSupportedError, TurnoutError

LOG_WAIT_S = 2.0
CONTEXT_STEP = 256  # llama.cpp rounds a context up to a multiple of this
# Any valid template: llama.cpp refuses to load a model whose own template does not parse, even where
# no chat is asked for.
_NO_CHAT = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
_LAST_LINE = "exiting due to model loading error"


@dataclass(frozen=True, slots=True)
class Settings:
    """What a server is opened with: ``context`` in tokens; ``pooling`` mean, cls, lasttoken, rank, or empty."""

    context: int
    device: str = "cpu"
    pooling: str = ""
    chat: bool = False
    chat_template: str = ""
    adapter: str = ""
    repack: bool = True


class NativeLoadError(LoadError):
    """llama.cpp refused the file; ``reason`` is its own first error line, put to a code."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.message, code=reason.code)
        self.reason = reason


class Native:
    """One model held by llama.cpp. Not thread-safe; ``close`` frees it."""

    def __init__(self, path: str, settings: Settings) -> None:
        xllamacpp = library()
        self.context = -(-settings.context // CONTEXT_STEP) * CONTEXT_STEP
        self._pooled = bool(settings.pooling)
        self._folder = tempfile.mkdtemp(prefix="turnout-")  # only this user can enter it
        self._server: Any = None
        params = _params(xllamacpp, path, settings, self.context, f"{self._folder}/listener.sock")
        try:
            with _native_log() as log:
                self._server = _open(xllamacpp, params, log)
                self._settle()
                _log_lines(log, "send_error", LOG_WAIT_S)
        except BaseException:
            self.close()
            raise

    def _settle(self) -> None:
        """One refused request (longer than the context), so that the server's loop is known to run."""
        tokens = [0] * (self.context + 1)
        if self._pooled:
            self._server.handle_embeddings({"input": [tokens]})
        else:
            self._server.handle_completions({"prompt": tokens, "max_tokens": 1})

    def complete(self, body: dict[str, Any], emit: Callable[[str], None] | None) -> tuple[str, dict[str, Any], str]:
        """Text, token usage and finish reason of a completion (``prompt``) or chat (``messages``)."""
        handler = self._server.handle_chat_completions if "messages" in body else self._server.handle_completions
        chunks = _Chunks(emit)
        request = {**body, "stream": True, "stream_options": {"include_usage": True}}
        _call(lambda: handler(request, chunks.take))
        return chunks.finish()

    def embed(self, texts: list[str], normalize: bool) -> list[list[float]]:
        """One vector per text, in order."""
        body = {"input": texts, "embd_normalize": 2 if normalize else -1}
        answer = _checked(_call(lambda: self._server.handle_embeddings(body)))
        return [item["embedding"] for item in sorted(answer["data"], key=lambda item: item["index"])]

    def rank(self, query: str, documents: list[str]) -> list[tuple[int, float]]:
        """Index and raw score of every document."""
        body = {"query": query, "documents": documents}
        answer = _checked(_call(lambda: self._server.handle_rerank(body)))
        return [(int(item["index"]), float(item["relevance_score"])) for item in answer["results"]]

    def close(self) -> None:
        """Frees the model and its listener; may be called twice."""
        self._server = None
        shutil.rmtree(self._folder, ignore_errors=True)


def library() -> Any:
    """``xllamacpp``, imported with threads that sleep while they wait.

    Threads that spin lose all speed as soon as anything else runs on their cores: 0.6 instead of 30
    tokens/s of a 135M model on two busy cores. A policy set by the user is kept.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("GGML_NO_BACKTRACE", "1")  # it would attach a debugger to this process
    import xllamacpp

    return xllamacpp


def _params(lib: Any, path: str, settings: Settings, context: int, socket: str) -> Any:
    """llama.cpp's parameters. Whatever would change the case in silence is off: fitting the context
    to free memory, shifting it when full, caching prompts between requests."""
    params = lib.CommonParams()
    params.model.path = path
    params.n_ctx = context
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = len(os.sched_getaffinity(0))
    params.n_parallel = 1
    params.fit_params = params.warmup = params.ctx_shift = False
    params.cache_prompt = False  # a reused prefix is computed in other batches: greedy answers would vary
    params.cache_ram_mib = 0
    params.n_ctx_checkpoints = 0
    params.verbosity = 1
    params.hostnames = [socket]
    params.endpoint_slots = params.ui = False
    on_cpu = settings.device.split(":")[0] == "cpu"  # a build with other devices would take them unasked
    params.n_gpu_layers = 0 if on_cpu else 999
    params.no_op_offload = params.no_kv_offload = on_cpu
    params.no_extra_bufts = not settings.repack
    params.reasoning_format = lib.common_reasoning_format.COMMON_REASONING_FORMAT_NONE
    params.chat_template = settings.chat_template if settings.chat else _NO_CHAT
    if settings.adapter:
        params.lora_adapters = [lib.CommonAdapterLoraInfo(settings.adapter, 1.0)]
    if settings.pooling:
        params.embedding = True
        # A pooled text is one batch: attention that is not causal cannot be computed in pieces.
        params.n_batch = params.n_ubatch = context
        kinds = lib.llama_pooling_type
        params.pooling_type = {
            "mean": kinds.LLAMA_POOLING_TYPE_MEAN,
            "cls": kinds.LLAMA_POOLING_TYPE_CLS,
            "lasttoken": kinds.LLAMA_POOLING_TYPE_LAST,
            "rank": kinds.LLAMA_POOLING_TYPE_RANK,
        }[settings.pooling]
    return params


def _open(lib: Any, params: Any, log: BinaryIO) -> Any:
    try:
        return lib.Server(params)
    except (RuntimeError, ValueError) as error:
        raise NativeLoadError(reason_of(_log_lines(log, _LAST_LINE, LOG_WAIT_S), str(error))) from None


@contextmanager
def _native_log() -> Iterator[BinaryIO]:
    """The process's stderr turned into a file for the time of a load: llama.cpp names the reason of a
    failure only there."""
    sys.stderr.flush()
    kept = os.dup(2)
    with tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 2)
        try:
            yield log
        finally:
            os.dup2(kept, 2)
            os.close(kept)


def _log_lines(log: BinaryIO, last: str, wait_s: float) -> list[str]:
    """Lines logged up to the one with ``last``; waits for it, as llama.cpp logs from a thread of its own."""
    deadline = time.monotonic() + wait_s
    while True:
        text = os.pread(log.fileno(), 1 << 20, 0).decode("utf-8", "replace")
        if last in text or time.monotonic() > deadline:
            return text.splitlines()
        time.sleep(0.005)


# ---- requests ------------------------------------------------------------------------------


class _Chunks:
    """Collects a streamed answer. A failing ``emit`` stops the generation and fails the request."""

    def __init__(self, emit: Callable[[str], None] | None) -> None:
        self._emit = emit
        self._pieces: list[str] = []
        self._usage: dict[str, Any] = {}
        self._finish = "stop"
        self._failure: BaseException | None = None
        self._error: dict[str, Any] | None = None

    def take(self, chunk: Any) -> bool:
        """One chunk; True asks llama.cpp to stop."""
        for part in chunk if isinstance(chunk, list) else [chunk]:
            if "error" in part:
                self._error = part
                return True
            self._usage = part.get("usage") or self._usage
            for choice in part.get("choices", ()):
                self._finish = choice.get("finish_reason") or self._finish
                piece = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
                if piece and not self._add(piece):
                    return True
        return False

    def _add(self, piece: str) -> bool:
        self._pieces.append(piece)
        if self._emit is None:
            return True
        try:
            self._emit(piece)
        except BaseException as error:  # raised again where the request ends
            self._failure = error
            return False
        return True

    def finish(self) -> tuple[str, dict[str, Any], str]:
        """Text, usage and finish reason; raises what went wrong."""
        if self._failure is not None:
            raise self._failure
        if self._error is not None:
            _checked(self._error)
        return "".join(self._pieces), self._usage, self._finish


def _call(request: Callable[[], Any]) -> Any:
    """A request's answer; llama.cpp's exceptions for malformed requests become ``InputError``."""
    try:
        return request()
    except (ValueError, TypeError) as error:
        raise InputError(f"llama.cpp refused the request: {_first(str(error))}") from None
    except RuntimeError as error:
        raise TurnoutError(f"llama.cpp failed: {_first(str(error))}", code="runtime.failed") from None


def _checked(answer: Any) -> Any:
    """The answer, or the error it stands for."""
    if not (isinstance(answer, dict) and "error" in answer):
        return answer
    error = answer["error"]
    message, code = _first(str(error.get("message", ""))), error.get("code")
    too_long = re.search(r"\((\d+) tokens\).*\D(\d+)(?: tokens)?\)", message)
    if too_long:
        tokens, limit = too_long.groups()
        raise InputError(
            f"the input has {tokens} tokens, the context holds {limit}",
            hints=[f"reserve more with `--option context={tokens}`, if the model was trained for it"],
        )
    if code == 501:
        raise NotSupportedError(message)
    if code == 400:
        raise InputError(message)
    raise TurnoutError(f"llama.cpp failed: {message}", code="runtime.failed")


# ---- reasons -------------------------------------------------------------------------------

# llama.cpp's error texts (llama-model-loader.cpp, llama-model.cpp, llama-vocab.cpp, server-context.cpp) to codes,
# first match first. Groups, where there are any, are the observed and the expected value.
_REASONS: tuple[tuple[str, str, str, str], ...] = (
    # pattern, code, observed and expected where the text has no group for them
    (r"unknown model architecture: '(?P<observed>[^']*)'", "architecture.unknown", "", "one that llama.cpp has"),
    (r"unknown pre-tokenizer type: '(?P<observed>[^']*)'", "tokenizer.pre_unknown", "", "one that llama.cpp has"),
    (r"unknown tokenizer: '(?P<observed>[^']*)'", "tokenizer.unsupported_kind", "", "one that llama.cpp has"),
    (r"error loading model vocabulary", "tokenizer.unsupported_kind", "", ""),
    (r"key not found in model: (?P<expected>\S+)", "config.invalid", "absent", ""),
    (r"error loading model hyperparameters", "config.invalid", "", ""),
    (r"key (?P<observed>\S+) has wrong (?:type|array)", "config.invalid", "", ""),
    (r"missing tensor '(?P<expected>[^']+)'", "tensor.missing", "absent", ""),
    (r"tensor '(?P<expected>[^']+)' not found", "tensor.missing", "absent", ""),
    (r"has wrong shape; expected (?P<expected>.+), got (?P<observed>.+)", "tensor.shape_mismatch", "", ""),
    (r"wrong number of tensors; expected (?P<observed>\d+), got (?P<expected>\d+)", "tensor.unexpected", "", ""),
    (r"not within the file bounds", "artifact.truncated", "", "a complete file"),
    (r"(?:invalid|illegal) split", "artifact.shard_missing", "", ""),
    (r"invalid ggml type|has invalid type", "quantization.unknown", "", ""),
    (r"chat template parsing error", "template.invalid", "", ""),
    (r"lora", "adapter.base_mismatch", "", ""),
    (r"failed to allocate|unable to allocate|out of memory|mmap failed", "memory.insufficient", "", ""),
    (r"invalid magic|failed to read", "artifact.corrupt", "", ""),
)


def reason_of(lines: list[str], fallback: str) -> Reason:
    """The reason that native log lines name, most telling line first; ``fallback`` if none does."""
    errors = [re.sub(r"^[\d.]+ [EW] ", "", line).strip() for line in lines if re.match(r"[\d.]+ E ", line)]
    for pattern, code, observed, expected in _REASONS:
        for line in errors:
            match = re.search(pattern, line)
            if match:
                said = match.groupdict()
                message = "llama.cpp: " + re.sub(r"^\w+ *: (error loading model: )?", "", line)[:300]
                return Reason(code, message, said.get("observed") or observed, said.get("expected") or expected)
    first = errors[0] if errors else _first(fallback)
    return Reason("runtime.failed", f"llama.cpp: {first[:300]}")


def _first(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0][:300] if lines else "no reason given"
