"""Which tokens are computed next.

One invariant carries everything: a sequence knows some tokens (its prompt and what was drawn) and some
of them are computed, that is, in the cache. Every step gives each running sequence as many of its known
but uncomputed tokens as fit, until computed has caught up with known; then a new token is drawn and is
known. Chunked prefill is catching up in parts, a prefix hit starts further on, a preempted sequence
starts again from zero, drafts are tokens known on trial.

Running sequences go first, decoding ones before those with prompts left, and each that decodes gets a
token; then waiting ones by priority and age. While some decode, the others' prompts share a small part of each
step, for a whole one would hold up every stream for as long as it takes. (SmolLM2 on two busy cores: a
prompt of 600 tokens beside one stream holds that up for 7.9 s when computed whole, for 3.9 s in parts of
256, 2.3 s of 128, 2.5 s of 64, 0.8 s of 32; its own first token comes after 7.9, 9.8, 9.3, 12.4 and 11.9 s.
Prompt tokens per second hardly depend on the part: 79 with 64, 51 with 1,024 of them in a step.)

Priority is strict: while more important requests keep coming the others wait, until their deadlines if they
have any. When the cache is full, the running sequence of lowest priority (the youngest among equals) gives
its slot back and waits again; it comes back when all its tokens find room, with a block to spare for
everyone. Pure bookkeeping: no clock, no model.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field

from turnout.engine.executor import Capabilities, Row, Step
from turnout.engine.kv_cache import BlockHashes, KvCache, PrefixLostError


@dataclass(slots=True, eq=False)
class Sequence:
    """One token sequence of a request as the scheduler sees it."""

    id: str
    tokens: list[int]  # prompt, then output
    prompt_length: int
    max_length: int  # tokens at most, prompt included
    hashes: BlockHashes
    priority: int = 0
    age: int = 0  # order of arrival
    adapter: str | None = None
    prompt_logits: bool = False  # logits of every prompt token are wanted
    cache: bool = True  # may take and leave prefixes
    sibling: Sequence | None = None  # waits until this one's prompt is computed, to share it
    drafts: list[int] = field(default_factory=list)
    computed: int = 0
    slot: int = -1
    cached_tokens: int = 0
    preempted: int = 0
    ended: bool = False
    encoded: bool = False

    @property
    def rank(self) -> tuple[int, int]:
        """Sort key: who goes first."""
        return (self.priority, self.age)

    @property
    def decoding(self) -> bool:
        """Whether only the last known token is uncomputed."""
        return self.computed == len(self.tokens) - 1


@dataclass(slots=True)
class Plan:
    """One step: ``sequences[i]`` owns ``step.rows[i]``."""

    step: Step = field(default_factory=Step)
    sequences: list[Sequence] = field(default_factory=list)
    preempted: list[Sequence] = field(default_factory=list)

    def drop_ended(self) -> None:
        """Leaves out sequences that ended since they were planned."""
        kept = [(s, row) for s, row in zip(self.sequences, self.step.rows, strict=True) if not s.ended]
        self.sequences, self.step.rows = [s for s, _ in kept], [row for _, row in kept]


class Scheduler:
    """Running and waiting sequences over one cache.

    ``chunk_tokens`` bounds the prompt tokens that one sequence computes in a step, ``mixed_tokens`` those of
    all together in a step in which others decode, ``step_tokens`` all tokens of a step, ``max_running`` the
    sequences that hold a slot.
    """

    def __init__(
        self,
        capabilities: Capabilities,
        cache: KvCache,
        *,
        chunk_tokens: int | None = None,
        step_tokens: int | None = None,
        max_running: int | None = None,
        mixed_tokens: int | None = None,
    ) -> None:
        self.cache = cache
        self.step_tokens = max(1, min(step_tokens or capabilities.step_tokens, capabilities.step_tokens))
        self.chunk_tokens = max(1, min(chunk_tokens or self.step_tokens, self.step_tokens))
        self.mixed_tokens = max(1, min(mixed_tokens or capabilities.mixed_tokens, self.step_tokens))
        # Who runs has a token in every step, so there are no more than a step has room for.
        self.max_running = max(1, min(max_running or capabilities.slots, capabilities.slots, self.step_tokens))
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self._ages = 0

    def add(self, sequence: Sequence) -> None:
        """Puts a new sequence at its place among the waiting."""
        sequence.age = self._ages
        self._ages += 1
        insort(self.waiting, sequence, key=lambda s: s.rank)

    def end(self, sequence: Sequence, keep: bool = True) -> None:
        """The sequence is over, whatever its state; ``keep`` leaves its tokens as a cached prefix."""
        if sequence.ended:
            return
        sequence.ended = True
        slot, sequence.slot = sequence.slot, -1
        if slot >= 0:
            self.running.remove(sequence)
            self.cache.release(slot, sequence.computed, keep and sequence.cache)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def plan(self) -> Plan:
        """Rows of the next step; empty when nothing can be computed."""
        plan = Plan()
        order = sorted(self.running, key=self._turn)
        decoding = sum(1 for s in order if s.decoding)
        budget = self.step_tokens
        prompts = self.mixed_tokens if decoding else budget
        for place, sequence in enumerate(order):
            if sequence.slot < 0:  # preempted for an earlier one of this loop
                continue
            if place < decoding:  # those after it, and the first prompt, get a token too
                budget -= self._give(plan, sequence, budget - min(decoding, len(order) - 1) + place)
            elif prompts > 0 and budget > 0:
                given = self._give(plan, sequence, min(budget, prompts))
                budget, prompts = budget - given, prompts - given
        budget = min(budget, prompts)
        while budget > 0 and self.waiting and len(self.running) < self.max_running and not plan.preempted:
            candidate = next((s for s in self.waiting if not self._held_back(s)), None)
            if candidate is None or not self._admit(candidate, budget):
                break
            budget -= self._give(plan, candidate, budget)
        return plan

    def _turn(self, sequence: Sequence) -> tuple[int, int, int]:
        """Sort key of a step: who decodes, who catches up after a roll-back, who has a prompt left."""
        pending = len(sequence.tokens) - sequence.computed
        late = 0 if pending == 1 else 1
        if late and (len(sequence.tokens) == sequence.prompt_length or pending > self.mixed_tokens):
            late = 2
        return (late, sequence.priority, sequence.age)

    def advance(self, sequence: Sequence, computed: int) -> None:
        """``computed`` tokens of the sequence are in the cache for good."""
        sequence.computed = computed
        if sequence.slot >= 0 and sequence.cache:
            self.cache.commit(sequence.slot, sequence.tokens, computed, sequence.hashes)

    # ---- steps of a plan --------------------------------------------------------------

    def _held_back(self, sequence: Sequence) -> bool:
        first = sequence.sibling
        return first is not None and not first.ended and first.computed < sequence.prompt_length - 1

    def _admit(self, sequence: Sequence, budget: int) -> bool:
        """Gives a waiting sequence a slot, with the longest prefix that is cached."""
        reuse = sequence.cache and not sequence.prompt_logits
        hit = self.cache.match(sequence.tokens, sequence.hashes) if reuse else None
        if self.running and not self._has_room(sequence):
            return False
        slot, start = None, 0
        while slot is None:
            start = hit.length if hit else 0
            first = start + min(len(sequence.tokens) - start, self.chunk_tokens, budget)
            try:
                slot = self.cache.acquire(sequence.id, first, hit)
            except PrefixLostError:
                hit = None
                continue
            if slot is None:
                return False
        self.waiting.remove(sequence)
        self.running.append(sequence)
        sequence.slot, sequence.computed = slot, start
        if not sequence.preempted:
            sequence.cached_tokens = min(start, sequence.prompt_length)
            self.cache.queries += sequence.prompt_length
            self.cache.hits += sequence.cached_tokens
        return True

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether all that is known of the sequence fits beside what the running ones before it know, with a
        block to spare for each that may grow. Else it would only be preempted again."""
        cache, wanted = self.cache, 0
        for running in self.running:
            if running.rank > sequence.rank:  # gives way when it must
                continue
            known = len(running.tokens)
            wanted += cache.outstanding(running.slot, known)
            wanted += cache.blocks_of(running.max_length) > cache.blocks_of(known)
        return cache.fits(len(sequence.tokens), wanted)

    def _give(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Adds the sequence's row and returns its tokens; 0 when it had to give up its slot."""
        pending = len(sequence.tokens) - sequence.computed
        count = min(pending, self.chunk_tokens, budget)
        drafts = sequence.drafts
        if drafts:
            room = min(budget - count, sequence.max_length - len(sequence.tokens) - 1)
            drafts = drafts[: max(0, room)] if count == pending else []
        while not self.cache.grow(sequence.slot, sequence.computed + count + len(drafts)):
            if drafts:  # trying something out is not worth another's place
                drafts = []
                continue
            victim = max(self.running, key=lambda s: s.rank)
            self._preempt(plan, victim)
            if victim is sequence:
                return 0
        sequence.drafts = drafts
        end = sequence.computed + count
        logits = 1 + len(drafts) if count == pending else 0
        if sequence.prompt_logits and sequence.computed < sequence.prompt_length:
            logits = count + len(drafts)
        tokens = [*sequence.tokens[sequence.computed : end], *drafts]
        plan.step.rows.append(Row(sequence.slot, tokens, sequence.computed, logits, sequence.adapter))
        plan.sequences.append(sequence)
        return len(tokens)

    def _preempt(self, plan: Plan, victim: Sequence) -> None:
        """Takes the slot back; the sequence starts again later, from what may still be cached."""
        if victim in plan.sequences:
            place = plan.sequences.index(victim)
            del plan.sequences[place], plan.step.rows[place]
        self.running.remove(victim)
        self.cache.release(victim.slot, victim.computed, victim.cache)
        victim.slot, victim.computed, victim.drafts, victim.encoded = -1, 0, [], False
        victim.preempted += 1
        plan.preempted.append(victim)
        insort(self.waiting, victim, key=lambda s: s.rank)
