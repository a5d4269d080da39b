"""The engine: requests in, events out, one step at a time.

A step: expire and cancel, propose drafts, plan, compute, draw, tell. The engine is a plain object with
no thread and no clock of its own; ``service.py`` runs one in a thread. Whatever happens, every request
that was accepted gets a last event.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from turnout.engine.core_drafts import propose, rows_of
from turnout.engine.executor import Capabilities, Executor, Vocabulary
from turnout.engine.intake import Intake
from turnout.engine.job import Job, Live, Prepared, Stats, best_events, told
from turnout.engine.kv_cache import BlockHashes, KvCache, hash_seed
from turnout.engine.output import Output
from turnout.engine.processors import LogitsProcessor
from turnout.engine.request import Event, Finish, GenerationRequest
from turnout.engine.sampler import Drawn, Sampler, SampleRow, SamplerState
from turnout.engine.scheduler import Plan, Scheduler, Sequence
from turnout.errors import InputError, NotSupportedError, OverloadedError, TurnoutError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from turnout.engine.speculative import Proposer


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the engine works. Zero and None mean: what the executor offers."""

    chunk_tokens: int | None = None  # prompt tokens of one sequence in a step
    mixed_tokens: int | None = None  # prompt tokens of all sequences in a step in which others decode
    step_tokens: int | None = None
    max_running: int | None = None
    max_waiting: int = 4096  # sequences; more are refused as overload
    prefix_cache: bool = True
    draft_tokens: int = 5  # proposed at most per step and sequence, where there is a proposer


class Engine:
    """One executor with its scheduler, sampler and grammar. One thread at a time calls it, except
    ``prepare``, which may run beside ``step``."""

    def __init__(
        self,
        executor: Executor,
        vocabulary: Vocabulary,
        config: EngineConfig | None = None,
        *,
        proposer: Proposer | None = None,
        watermarks: Mapping[str, LogitsProcessor] | None = None,
        adapters: Iterable[str] = (),
    ) -> None:
        self.executor = executor
        self.vocabulary = vocabulary
        self.config = _checked(config or EngineConfig())
        capabilities = executor.capabilities
        shares = self.config.prefix_cache and capabilities.shares_prefix
        block, tokens = _counted(capabilities)
        self.cache = KvCache(executor, capabilities.slots, tokens, block, shares=shares)
        self.scheduler = Scheduler(
            capabilities,
            self.cache,
            chunk_tokens=self.config.chunk_tokens,
            step_tokens=self.config.step_tokens,
            max_running=self.config.max_running,
            mixed_tokens=self.config.mixed_tokens,
        )
        self.sampler = Sampler(capabilities.vocab_size)
        self.proposer = proposer
        self.stats = Stats()
        self.limit = min(capabilities.context, self.cache.total_blocks * self.cache.block_size)
        self._intake = Intake(capabilities, vocabulary, self.limit, watermarks)
        self._adapters = dict.fromkeys(adapters, 0)  # name to the number of its loading
        self._loadings = 0
        self._jobs: dict[str, Job] = {}
        self._lives: dict[str, Live] = {}
        self._timed: dict[str, Job] = {}  # jobs with a deadline
        self._events: list[Event] = []
        self._cancelled: set[str] = set()

    # ---- requests ---------------------------------------------------------------------

    def prepare(self, request: GenerationRequest) -> Prepared:
        """Checks a request and compiles what it needs. Raises ``InputError`` naming value, place and way
        out; safe to call from another thread."""
        return self._intake.prepare(request, self._adapters)

    def add(self, request: GenerationRequest | Prepared, *, bounded: bool = True) -> None:
        """Accepts a request; its events come from ``step``. Raises ``OverloadedError`` when the queue is
        full (``bounded`` False: the caller has counted), ``InputError`` for a bad request or an id in use."""
        prepared = request if isinstance(request, Prepared) else self.prepare(request)
        asked = prepared.request
        if asked.id in self._jobs:
            raise InputError(f"a request `{asked.id}` is running already")
        self._intake.check_adapter(asked, self._adapters)  # it may have been unloaded since
        waiting = len(self.scheduler.waiting)
        if bounded and waiting + len(prepared.seeds) > self.config.max_waiting:
            raise OverloadedError(f"{waiting} sequences are waiting, the queue takes {self.config.max_waiting}")
        job = Job(prepared)
        job.usage.prompt = len(asked.prompt)
        for index, seed in enumerate(prepared.seeds):
            job.lives.append(self._live(job, index, seed))
        job.open = len(job.lives)
        self._jobs[asked.id] = job
        if asked.deadline is not None:
            self._timed[asked.id] = job
        if asked.sampling.max_tokens == 0 and asked.sampling.prompt_logprobs is None:
            self._end_job(job, Finish.LENGTH)
            return
        for live in job.lives:
            self._lives[live.sequence.id] = live
            self.scheduler.add(live.sequence)

    def _live(self, job: Job, index: int, seed: int) -> Live:
        prepared, request = job.prepared, job.request
        sampling, capabilities = request.sampling, self.executor.capabilities
        cache = request.cache and request.encoder is None and self.config.prefix_cache
        loading = self._adapters.get(request.adapter) if request.adapter is not None else None
        chain = hash_seed(request.salt, request.adapter, loading, request.digests)
        sequence = Sequence(
            f"{request.id}/{index}",
            list(request.prompt),
            len(request.prompt),
            min(prepared.limit, len(request.prompt) + max(1, sampling.max_tokens)),
            BlockHashes(chain, self.cache.block_size),
            priority=request.priority,
            adapter=request.adapter,
            prompt_logits=sampling.prompt_logprobs is not None and index == 0,
            cache=cache,
            sibling=job.lives[0].sequence if index and cache and capabilities.shares_prefix else None,
        )
        state = SamplerState(
            # The probabilities of the drawn tokens rank the sequences of best_of.
            replace(sampling, logprobs=0) if sampling.best_of and sampling.logprobs is None else sampling,
            seed,
            request.prompt,
            capabilities.vocab_size,
            eos_ids=prepared.ends,
            breakers=prepared.breakers,
            processors=prepared.processors,
        )
        output = Output(sampling, self.vocabulary, prepared.ends)
        matcher = prepared.matcher.copy() if prepared.matcher is not None else None
        return Live(sequence, output, state, matcher, job, index)

    def cancel(self, id: str) -> None:
        """Ends a request at the next step; unknown and ended ones are ignored."""
        if id in self._jobs:
            self._cancelled.add(id)

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has something to do."""
        return bool(self._jobs or self._events)

    # ---- adapters ---------------------------------------------------------------------

    @property
    def adapters(self) -> list[str]:
        """Names of the loaded adapters."""
        return sorted(self._adapters)

    def load_adapter(self, name: str, path: str) -> None:
        """Loads a LoRA adapter under a name. Raises ``NotSupportedError``, ``LoadError``, or ``InputError``
        for a name in use."""
        if not self.executor.capabilities.adapters:
            raise NotSupportedError("this backend cannot apply adapters per request", code="adapter.unsupported")
        if name in self._adapters:
            raise InputError(f"an adapter `{name}` is loaded already", hints=["unload it first"])
        self.executor.load_adapter(name, path)
        self._loadings += 1
        self._adapters[name] = self._loadings

    def unload_adapter(self, name: str) -> None:
        """Forgets an adapter. Raises ``InputError`` when it is unknown or a request uses it."""
        if name not in self._adapters:
            raise InputError(f"no adapter `{name}` is loaded", code="adapter.missing")
        users = sum(1 for job in self._jobs.values() if job.request.adapter == name)
        if users:
            raise InputError(f"{users} running requests use the adapter `{name}`", hints=["try again when they ended"])
        del self._adapters[name]
        self.executor.unload_adapter(name)

    # ---- one step ---------------------------------------------------------------------

    def step(self, now: float = 0.0) -> list[Event]:
        """Computes one step and returns what became known; ``now`` is compared with deadlines."""
        self._expire(now)
        if self.scheduler.running or self.scheduler.waiting:
            self._propose()
            plan = self.scheduler.plan()
            self.stats.preemptions += len(plan.preempted)
            for sequence in plan.preempted:
                self._lives[sequence.id].job.usage.preempted += 1
            if plan.step.rows:
                self._compute(plan)
            elif not plan.preempted:
                self._stuck()
        self._gauges()
        events, self._events = self._events, []
        return events

    def _expire(self, now: float) -> None:
        for id in self._cancelled:
            if id in self._jobs:
                self._end_job(self._jobs[id], Finish.CANCELLED)
        self._cancelled.clear()
        for job in [j for j in self._timed.values() if now >= (j.request.deadline or 0.0)]:
            self._end_job(job, Finish.DEADLINE)

    def _propose(self) -> None:
        able = self.executor.capabilities.rolls_back
        lives = []
        for sequence in self.scheduler.running:
            sequence.drafts = []
            live = self._lives[sequence.id]
            able_here = self.proposer is not None or live.matcher is not None
            if able and able_here and sequence.decoding and live.job.request.speculate:
                lives.append(live)
        if lives:
            propose(lives, self.proposer, self.config.draft_tokens, self.executor.capabilities.vocab_size)

    def _compute(self, plan: Plan) -> None:
        self._encode(plan)
        if not plan.step.rows:
            return
        self.stats.steps += 1
        self.stats.step_tokens += plan.step.num_tokens
        try:
            self._draw(plan, self.executor.execute(plan.step))
        except Exception as error:  # the requests of this step end, the engine lives
            for sequence in plan.sequences:
                if sequence.id in self._lives:
                    self._fail_job(self._lives[sequence.id].job, error)

    def _encode(self, plan: Plan) -> None:
        """Encoder passes of sequences at their start; who fails leaves the plan."""
        if not self.executor.capabilities.encoder_decoder:
            return
        for sequence in plan.sequences:
            live = self._lives.get(sequence.id)
            if live is None or sequence.encoded or live.job.request.encoder is None:
                continue
            try:
                self.executor.encode(sequence.slot, live.job.request.encoder)
                sequence.encoded = True
            except Exception as error:
                self._fail_job(live.job, error)
        plan.drop_ended()

    def _fail_job(self, job: Job, error: Exception) -> None:
        """Ends a request with what was raised."""
        self._end_job(job, Finish.ERROR, *told(error))

    def _stuck(self) -> None:
        """Nothing runs and nothing fits although all is free: refuse the first rather than wait for ever."""
        if not self.scheduler.running and self.scheduler.waiting:
            job = self._lives[self.scheduler.waiting[0].id].job
            why = f"the executor failed ({self.cache.trouble})" if self.cache.trouble else "it does not fit the cache"
            self._end_job(job, Finish.ERROR, f"the request cannot start: {why}", "memory.insufficient")

    # ---- drawing ----------------------------------------------------------------------

    def _draw(self, plan: Plan, logits: Any) -> None:
        rows: list[SampleRow] = []
        places: list[int] = []
        refused: dict[str, Exception] = {}
        offset = 0
        for sequence, row in zip(plan.sequences, plan.step.rows, strict=True):
            live = self._lives[sequence.id]
            drawn: list[SampleRow] = []
            try:
                if sequence.prompt_logits and sequence.computed < sequence.prompt_length:
                    self._prompt_logprobs(live, logits[offset : offset + row.logits], row.tokens)
                drawn = rows_of(live, row.start + len(row.tokens) - len(sequence.drafts))
            except Exception as error:  # no numbers, a grammar with no way on: this request's own end
                refused[sequence.id] = error
            rows += drawn
            places += range(offset + row.logits - len(drawn), offset + row.logits)
            offset += row.logits
        if len(places) != offset:
            logits = logits[places]
        drawn_tokens = self.sampler.sample(logits, rows) if rows else []
        for id, why in refused.items():
            if id in self._lives:
                self._fail_job(self._lives[id].job, why)
        self._take_all(plan, drawn_tokens, refused)

    def _take_all(self, plan: Plan, drawn: list[Drawn], refused: Mapping[str, Exception]) -> None:
        at = 0
        for sequence, row in zip(plan.sequences, plan.step.rows, strict=True):
            live = self._lives.get(sequence.id)
            complete = row.start + len(row.tokens) - len(sequence.drafts) == len(sequence.tokens)
            count = 1 + len(sequence.drafts) if complete and sequence.id not in refused else 0
            mine, at = drawn[at : at + count], at + count
            if live is None:  # its request ended through a sibling in this very step
                continue
            if not complete:
                self.scheduler.advance(sequence, row.start + len(row.tokens))
                continue
            try:
                self._take(live, mine, row.start + len(row.tokens))
            except Exception as error:  # a grammar, a processor, a criterion, a slot: this request's own
                self._fail_job(live.job, error)

    def _take(self, live: Live, drawn: list[Drawn], held: int) -> None:
        """Accepts drafts while they equal the draws, then the one draw that differs or comes on top."""
        sequence, drafts = live.sequence, live.sequence.drafts
        sequence.drafts = []
        accepted = 0
        known = held - len(drafts)
        if live.job.request.sampling.max_tokens == 0:
            self.scheduler.advance(sequence, known)
            live.output.end(Finish.LENGTH)
            self._close(live)
            return
        for place, draw in enumerate(drawn):
            if draw.error:
                raise TurnoutError(draw.error, code=draw.code)
            goes_on = self._append(live, draw)
            fits = place < len(drafts) and drafts[place] == draw.token
            accepted += fits and goes_on
            if not goes_on or not fits:
                break
        self._count_drafts(live, len(drafts), accepted)
        self._keep(live, known + accepted, held)
        if live.output.finish is not None:
            self._close(live)
        else:
            self._tell(live)

    def _keep(self, live: Live, valid: int, held: int) -> None:
        """Cuts what the slot holds to what is valid. An executor that cannot costs a text that is complete its
        place in the cache only; others cannot go on."""
        sequence = live.sequence
        if valid < held:
            try:
                valid = self.executor.retained(sequence.slot, valid)
                self.executor.roll_back(sequence.slot, valid)
            except Exception:
                if live.output.finish is None:
                    raise
                sequence.cache = False
                return
        self.scheduler.advance(sequence, valid)

    def _append(self, live: Live, draw: Drawn) -> bool:
        sequence = live.sequence
        sequence.tokens.append(draw.token)
        live.state.append(draw.token)
        self.stats.generation_tokens += 1
        room = sequence.max_length - len(sequence.tokens)
        goes_on = live.output.take(draw.token, draw.logprob, room)
        if live.matcher is not None and goes_on:
            if not live.matcher.accept(draw.token) and live.matcher.error:
                raise InputError(live.matcher.error, code="grammar.too_complex")
            if live.matcher.stopped:
                goes_on = live.output.end(Finish.STOP)
        for criterion in live.job.prepared.criteria if goes_on else ():
            answer = criterion(np.asarray(sequence.tokens, np.int64), sequence.prompt_length, live.output.so_far)
            if answer:
                return live.output.end(Finish.STOP, answer if isinstance(answer, str) else None)
        return goes_on

    def _count_drafts(self, live: Live, drafted: int, accepted: int) -> None:
        if drafted:
            live.job.usage.drafted += drafted
            live.job.usage.accepted += accepted
            self.stats.drafted += drafted
            self.stats.accepted += accepted

    def _prompt_logprobs(self, live: Live, logits: NDArray[np.float32], tokens: Any) -> None:
        """Probabilities of prompt tokens: row i of a chunk tells of the token after it."""
        sequence, job = live.sequence, live.job
        if job.prompt_logprobs is None:
            job.prompt_logprobs = [None]  # nothing precedes the first token
        first = sequence.computed + 1
        targets = sequence.tokens[first : min(first + len(tokens), sequence.prompt_length)]
        known = len(job.prompt_logprobs) - first  # told before a preemption
        targets = targets[max(0, known) :]
        if targets:
            begin = max(0, known)
            top = job.request.sampling.prompt_logprobs or 0
            job.prompt_logprobs += self.sampler.logprobs_of(logits[begin : begin + len(targets)], targets, top)

    # ---- telling ----------------------------------------------------------------------

    def _tell(self, live: Live) -> None:
        event = live.output.event(live.job.request.id, live.index)
        if event is None:
            return
        if live.index == 0 and live.job.prompt_logprobs is not None:
            event.prompt_logprobs, live.job.prompt_logprobs = live.job.prompt_logprobs, None
            live.sequence.prompt_logits = False
        (live.job.held if live.job.request.sampling.best_of is not None else self._events).append(event)

    def _close(self, live: Live) -> None:
        """The sequence has its finish: free what it holds, tell, and end the request with its last one."""
        job, sequence = live.job, live.sequence
        live.closed = True
        self._lives.pop(sequence.id, None)
        if self.proposer is not None:
            with suppress(Exception):  # its guesses are not worth a request
                self.proposer.forget(sequence.id)
        self.scheduler.end(sequence)
        job.usage.completion += len(live.output.tokens)
        job.usage.cached = max(job.usage.cached, sequence.cached_tokens)
        self._tell(live)
        job.open -= 1
        if job.open == 0:
            self._finish_job(job)

    def _finish_job(self, job: Job) -> None:
        self._jobs.pop(job.request.id, None)
        self._timed.pop(job.request.id, None)
        self.stats.prompt_tokens += job.usage.prompt
        if job.request.sampling.best_of is not None:
            self._events += best_events(job)
        last = next(event for event in reversed(self._events) if event.id == job.request.id)
        last.usage, last.done = job.usage, True

    def _end_job(self, job: Job, finish: Finish, error: str = "", code: str = "") -> None:
        """Ends all open sequences of a request: cancelled, late or failed."""
        for live in job.lives:
            if not live.closed:
                live.output.end(finish)
                if finish is Finish.ERROR:
                    live.sequence.cache = False  # what its slot holds is not known
                self._close(live)
        if error:
            last = next(event for event in reversed(self._events) if event.id == job.request.id)
            last.error, last.code = error, code

    def _gauges(self) -> None:
        stats, scheduler = self.stats, self.scheduler
        stats.running, stats.waiting = len(scheduler.running), len(scheduler.waiting)
        stats.cache_usage = self.cache.usage
        stats.prefix_queries, stats.prefix_hits = self.cache.queries, self.cache.hits

    def check_idle(self) -> None:
        """Proves that nothing is held when nothing runs. Raises ``AssertionError``."""
        self.cache.check()
        if self._jobs or self._lives or self.scheduler.running or self.scheduler.waiting:
            raise AssertionError(f"{len(self._jobs)} requests are open")
        if self.cache.free_blocks + self.cache.cached_blocks != self.cache.total_blocks:
            raise AssertionError("blocks are in use although nothing runs")

    def close(self) -> None:
        """Ends every request with an error and frees the executor; may be called twice."""
        try:
            for job in list(self._jobs.values()):
                self._end_job(job, Finish.ERROR, "the engine was closed", "runtime.failed")
        finally:
            self.executor.close()
            if self.proposer is not None:
                self.proposer.close()  # a draft model has an executor of its own


def _checked(config: EngineConfig) -> EngineConfig:
    """The configuration. Raises ``InputError`` for a number that means nothing."""
    least = {"chunk_tokens": 0, "mixed_tokens": 0, "step_tokens": 0, "max_running": 0, "draft_tokens": 0}
    for name, low in {**least, "max_waiting": 1}.items():
        value = getattr(config, name)
        if value is not None and value < low:
            raise InputError(f"`{name}` is `{value}`, expected at least {low}", hints=[f"leave `{name}` out"])
    return config


def _counted(can: Capabilities) -> tuple[int, int]:
    """Block size and tokens to count with. Where the cache is no whole number of blocks they are not pages but
    a measure of ours, and need not leave the end of each slot unused."""
    if can.cache_tokens % can.block_size == 0:
        return can.block_size, can.cache_tokens
    block = max(1, min(can.block_size, can.context, can.cache_tokens))
    if can.cache_tokens < can.slots * can.context:
        return block, can.cache_tokens
    return block, can.slots * -(-can.context // block) * block
