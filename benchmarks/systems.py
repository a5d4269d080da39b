"""What is measured: Turnout through ``turnout.LLM``, and its peers through their own ways in.

``python -m benchmarks.systems NAME MODEL`` holds one system and answers jobs, one JSON object a line. All
systems stay loaded side by side; only the one that is asked computes.

A job is ``{"streams", "prompt", "new", "seed"}``: that many requests of ``prompt`` random tokens (or the same
``shared`` first tokens) that each draw ``new`` tokens greedily, ends ignored. The answer holds seconds:
``first`` until every stream had its first token, ``total`` until all had all, and ``tokens`` drawn.
"""

from __future__ import annotations

import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

VOCABULARY = 256  # prompts are drawn from the byte tokens, which every format has


def prompts_of(job: dict[str, Any]) -> list[list[int]]:
    """Token ids of each stream's prompt."""
    rng = random.Random(job["seed"])
    shared = [rng.randrange(VOCABULARY) for _ in range(job.get("shared", 0))]
    return [shared + [rng.randrange(VOCABULARY) for _ in range(job["prompt"])] for _ in range(job["streams"])]


class Clock:
    """Notes when each stream got its tokens."""

    def __init__(self, streams: int) -> None:
        self.start = time.perf_counter()
        self.first = [0.0] * streams
        self.tokens = 0
        self._lock = threading.Lock()

    def took(self, stream: int, count: int = 1) -> None:
        """``count`` tokens came for a stream."""
        with self._lock:
            if not self.first[stream]:
                self.first[stream] = time.perf_counter() - self.start
            self.tokens += count

    def report(self) -> dict[str, float]:
        """The job's answer."""
        return {"first": max(self.first), "total": time.perf_counter() - self.start, "tokens": self.tokens}


class System(Protocol):
    """Something that generates."""

    version: str

    def measure(self, job: dict[str, Any]) -> dict[str, float]:
        """Runs a job."""
        ...


class Turnout:
    """Ours. ``settings`` are ``turnout.LLM``'s."""

    def __init__(self, model: str, **settings: Any) -> None:
        import turnout

        self.llm = turnout.LLM(model, task="text-generation", **settings)
        done = self.llm.executed()
        self.version = f"{turnout.__version__} on {done.backend} {done.version} {done.dtype}"

    def measure(self, job: dict[str, Any]) -> dict[str, float]:
        from turnout import Sampling
        from turnout.engine.request import GenerationRequest

        prompts = prompts_of(job)
        sampling = Sampling(max_tokens=job["new"], ignore_eos=True)
        ended = threading.Semaphore(0)
        clock = Clock(len(prompts))

        def sink(stream: int) -> Callable[[Any], None]:
            def take(event: Any) -> None:
                if event.error:
                    print(event.error, file=sys.stderr)
                if event.tokens:
                    clock.took(stream, len(event.tokens))
                if event.done:
                    ended.release()

            return take

        for stream, prompt in enumerate(prompts):
            request = GenerationRequest(f"{job['seed']}-{stream}-{clock.start}", prompt, sampling)
            self.llm.client.submit(request, sink(stream))
        for _ in prompts:
            ended.acquire()
        return clock.report()


class XllamaCpp:
    """llama.cpp's own server code from the prebuilt wheel ``xllamacpp`` (AVX2)."""

    def __init__(self, model: str, threads: int = 0, streams: int = 16, context: int = 8192) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        import xllamacpp

        params = xllamacpp.CommonParams()
        params.model.path = model
        params.n_ctx = context
        params.n_parallel = streams
        params.kv_unified = True
        params.warmup = False
        params.cpuparams.n_threads = threads or os.cpu_count() or 1
        params.cpuparams_batch.n_threads = threads or os.cpu_count() or 1
        self.server = xllamacpp.Server(params)
        self.version = f"xllamacpp {xllamacpp.__version__}"

    def measure(self, job: dict[str, Any]) -> dict[str, float]:
        prompts = prompts_of(job)
        clock = Clock(len(prompts))

        def ask(stream: int) -> None:
            def take(chunk: Any) -> bool:
                choices = chunk.get("choices") if isinstance(chunk, dict) else None
                if choices is None or choices[0].get("finish_reason") is None:
                    clock.took(stream)
                return False

            body = {
                "prompt": prompts[stream],
                "max_tokens": job["new"],
                "temperature": 0,
                "ignore_eos": True,
                "stream": True,
                "cache_prompt": bool(job.get("shared")),
            }
            self.server.handle_completions(body, take)

        threads = [threading.Thread(target=ask, args=[stream]) for stream in range(len(prompts))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        answer = clock.report()
        answer["tokens"] = len(prompts) * job["new"]  # chunks may carry several tokens
        return answer


class LlamaCpp:
    """llama.cpp compiled for this processor (``llama-cpp-python``), its batch API in a bare greedy loop."""

    def __init__(self, model: str, threads: int = 0, streams: int = 16, context: int = 8192) -> None:
        os.environ.setdefault("OMP_WAIT_POLICY", "passive")
        import llama_cpp

        self.lib = llama_cpp
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_seq_max, params.n_batch, params.n_ubatch = context, streams, 2048, 512
        params.kv_unified = True
        params.n_threads = params.n_threads_batch = threads or os.cpu_count() or 1
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self.model))
        self.batch = llama_cpp.llama_batch_init(2048, 0, 1)
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def measure(self, job: dict[str, Any]) -> dict[str, float]:
        import numpy as np

        prompts = prompts_of(job)
        clock = Clock(len(prompts))
        memory = self.lib.llama_get_memory(self.context)
        self.lib.llama_memory_clear(memory, True)
        rows = [(s, t, p, p == len(ids) - 1) for s, ids in enumerate(prompts) for p, t in enumerate(ids)]
        last: dict[int, int] = {}
        for at in range(0, len(rows), 2048):
            last.update(self._decode(rows[at : at + 2048], np))
        for stream in last:
            clock.took(stream)
        place = len(prompts[0])
        for step in range(job["new"] - 1):
            last = self._decode([(s, t, place + step, True) for s, t in last.items()], np)
            for stream in last:
                clock.took(stream)
        return clock.report()

    def _decode(self, rows: list[tuple[int, int, int, bool]], np: Any) -> dict[int, int]:
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (stream, token, place, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i] = token, place, 1
            batch.seq_id[i][0], batch.logits[i] = stream, wanted
        if self.lib.llama_decode(self.context, batch):
            raise SystemExit("llama_decode failed")
        drawn = {}
        for i, (stream, _token, _place, wanted) in enumerate(rows):
            if wanted:
                pointer = self.lib.llama_get_logits_ith(self.context, i)
                drawn[stream] = int(np.ctypeslib.as_array(pointer, shape=(self.size,)).argmax())
        return drawn


class OpenVinoGenAI:
    """OpenVINO GenAI's continuous batching over an IR directory."""

    def __init__(self, model: str, streams: int = 16) -> None:
        import openvino
        import openvino_genai

        self.lib, self.tensor = openvino_genai, openvino.Tensor
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs, scheduler.cache_size = streams, 2
        scheduler.enable_prefix_caching = False
        self.pipe = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self.version = f"openvino-genai {openvino_genai.__version__}"

    def measure(self, job: dict[str, Any]) -> dict[str, float]:
        import numpy as np

        prompts = prompts_of(job)
        config = self.lib.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = job["new"], True, False
        clock = Clock(len(prompts))
        handles = [
            self.pipe.add_request(i, self.tensor(np.array([ids], np.int64)), config) for i, ids in enumerate(prompts)
        ]
        while self.pipe.has_non_finished_requests():
            self.pipe.step()
            for stream, handle in enumerate(handles):
                while handle.can_read():
                    handle.read()
                    clock.took(stream)
        answer = clock.report()
        answer["tokens"] = len(prompts) * job["new"]
        return answer


SYSTEMS: dict[str, Callable[..., System]] = {
    "turnout": Turnout,
    "xllamacpp": XllamaCpp,
    "llama.cpp": LlamaCpp,
    "openvino-genai": OpenVinoGenAI,
}


def main() -> None:
    """Loads a system and answers jobs until end of file."""
    name, model, settings = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]) if len(sys.argv) > 3 else {}
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with answers
    started = time.perf_counter()
    system = SYSTEMS[name](model, **settings)
    print(json.dumps({"version": system.version, "load": time.perf_counter() - started}), file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(system.measure(json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
