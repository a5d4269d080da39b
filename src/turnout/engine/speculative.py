"""Speculation: tokens proposed cheaply, verified by the target in one step, the distribution unchanged.

At output position i the target's distribution given the text (after every processor) is p_i, and its token is
x_i = F(p_i, u_i), where the random number u_i is a function of (seed, i) alone. The engine draws x_i at each
position as long as the drafts before it were right, and accepts a draft d_i iff d_i = x_i. A draft may depend
on the text and on u_i; x_i does not depend on the draft. So x_i has the law p_i, whatever is proposed.

This is rejection sampling (Leviathan et al. 2023; Chen et al. 2023) for a proposal that is a point, q = [d]:
the draft is *accepted* with probability min(1, p(d) / q(d)) = p(d) = P(x = d); otherwise x is *recovered*
from max(p - q, 0) / (1 - p(d)), which is p without d renormalised, the law of x given x != d; when all drafts
are accepted, the row after the last draft gives the *bonus* token as ever. Coupling says more than equal
laws: the text is the same function of (prompt, seed) with and without speculation, token by token, as far as
the executor's logits of a batch are those of single steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from turnout.engine.executor import Executor, Row, Step, Vocabulary
from turnout.engine.sampler import Sampler, SampleRow, SamplerState
from turnout.engine.speculative_pace import Pace
from turnout.errors import InputError
from turnout.types import Sampling

# One request of a batch: id, tokens so far (prompt and output), most drafts, what its sampler knows.
Asked = tuple[str, Sequence[int], int, SamplerState | None]

MOST_FAILURES = 3  # of a draft executor in a row


class Proposer(Protocol):
    """Guesses what may follow. Guesses cost time when they are wrong and never change a text."""

    def propose(self, id: str, ids: Sequence[int], count: int, state: SamplerState | None = None) -> list[int]:
        """Up to ``count`` tokens that may follow ``ids`` (prompt and output); ``ids`` of an id only grow."""
        ...

    def propose_many(self, asked: Sequence[Asked]) -> list[list[int]]:
        """`propose` for several requests, each once, in one go."""
        ...

    def forget(self, id: str) -> None:
        """The request is over; unknown ids are forgotten too."""
        ...

    def close(self) -> None:
        """Frees everything; may be called twice."""
        ...


@dataclass(slots=True)
class _Index:
    """Where each n-gram of a text last ended, for those that something follows."""

    ends: list[dict[int, int]]  # per n - min_n: hash of the n-gram to the place after it
    covered: int = 0  # n-grams that end at or before this place are in
    tail: list[int] = field(default_factory=list)  # tokens before `covered`, to notice another text


class NGramProposer:
    """Prompt look-up: what followed the last time that the text's end occurred before.

    The longest suffix of ``max_n`` down to ``min_n`` tokens that occurs earlier decides, its last occurrence,
    and what follows there is read on, into the proposal itself where it reaches the text's end (a loop goes
    on as a loop). A call costs the tokens that are new since the last one, not the length of the text.
    Without ``adaptive`` always as many as asked are proposed; ``pace`` says what drafts cost.
    """

    def __init__(self, *, max_n: int = 4, min_n: int = 2, adaptive: bool = True, pace: Pace | None = None) -> None:
        if not 1 <= min_n <= max_n:
            raise InputError(f"n-grams of {min_n} to {max_n} tokens", code="option.unsupported")
        self.max_n = max_n
        self.min_n = min_n
        self._pace = (pace or Pace()) if adaptive else None
        self._index: dict[str, _Index] = {}

    def propose(self, id: str, ids: Sequence[int], count: int, state: SamplerState | None = None) -> list[int]:
        """Up to ``count`` tokens that followed the end of ``ids`` when it occurred before; often none."""
        return self.propose_many([(id, ids, count, state)])[0]

    def propose_many(self, asked: Sequence[Asked]) -> list[list[int]]:
        """`propose` for several requests."""
        answers = []
        for id, ids, count, _ in asked:
            if self._pace is not None:
                count = self._pace.length(id, ids, count, len(asked))
            index = self._grown(id, ids)
            drafts = self._follow(index, ids, count) if count > 0 else []
            if self._pace is not None:
                self._pace.proposed(id, ids, drafts)
            answers.append(drafts)
        return answers

    def forget(self, id: str) -> None:
        """The request is over."""
        self._index.pop(id, None)
        if self._pace is not None:
            self._pace.forget(id)

    def close(self) -> None:
        """Forgets every request."""
        self._index.clear()

    def _grown(self, id: str, ids: Sequence[int]) -> _Index:
        """The index of a request with what is new in its text."""
        index = self._index.get(id)
        if index is None or list(ids[index.covered - len(index.tail) : index.covered]) != index.tail:
            index = self._index[id] = _Index([{} for _ in range(self.min_n, self.max_n + 1)])
        first = max(index.covered + 1, self.min_n)
        base = max(0, first - self.max_n)
        recent = list(ids[base:])
        for end in range(first, len(ids)):  # the n-gram at the very end has nothing after it yet
            for n in range(self.min_n, min(self.max_n, end) + 1):
                index.ends[n - self.min_n][hash(tuple(recent[end - base - n : end - base]))] = end
        index.covered = max(index.covered, len(ids) - 1)
        index.tail = list(ids[max(0, index.covered - self.max_n) : index.covered])
        return index

    def _follow(self, index: _Index, ids: Sequence[int], count: int) -> list[int]:
        length = len(ids)
        for n in range(min(self.max_n, length), self.min_n - 1, -1):
            suffix = tuple(ids[length - n :])
            end = index.ends[n - self.min_n].get(hash(suffix))
            if end is None or tuple(ids[end - n : end]) != suffix:  # unknown, or another n-gram of that hash
                continue
            drafts: list[int] = []
            for place in range(end, end + count):
                drafts.append(ids[place] if place < length else drafts[place - length])
            return drafts
        return []


@dataclass(slots=True)
class _Held:
    """A draft executor's slot and the tokens in it."""

    slot: int
    tokens: list[int] = field(default_factory=list)
    used: int = 0  # number of the call that last used it


@dataclass(slots=True)
class _Work:
    """One request of a call."""

    place: int  # in the call's list
    id: str
    ids: Sequence[int]
    count: int
    state: SamplerState
    drafts: list[int] = field(default_factory=list)


class DraftProposer:
    """A small model that writes ahead, on an executor of its own, one slot per request.

    Its cache follows each request: cut back to what the text and the slot have in common, then caught up.
    One forward pass serves all requests of a call, ``count`` passes give ``count`` drafts. A call computes at
    most one step's worth of text that is new to the draft model (``step_tokens``), so a long prompt is caught
    up over several calls, without drafts meanwhile. More requests than slots take turns: a request of this
    call gets the slot that was idle longest, or none.

    ``coupled`` draws each draft with the very random number, temperature and filters that the target's draw
    of that position will use, so two models that agree draw the same token at any temperature; else, and
    without a state, the most likely token is proposed. Grammars are the engine's business.

    The executor becomes the proposer's, also when it is refused: ``InputError`` ``tokenizer.mismatch`` for a
    vocabulary that is not the ``target``'s, ``option.unsupported`` for a model that cannot go back or needs an
    encoder. An executor that fails three times in a row is not asked again; `error` then says why.
    """

    def __init__(
        self,
        executor: Executor,
        vocabulary: Vocabulary | None = None,
        target: Vocabulary | None = None,
        *,
        coupled: bool = True,
        adaptive: bool = True,
        pace: Pace | None = None,
    ) -> None:
        self.executor = executor
        self.error = ""
        can = executor.capabilities
        try:
            if not can.rolls_back or can.encoder_decoder:
                lack = "cannot go back in its text" if not can.rolls_back else "needs an encoder"
                raise InputError(f"a draft model that {lack} cannot be used", code="option.unsupported")
            if vocabulary is not None and target is not None:
                check_vocabularies(vocabulary, target)
        except InputError:
            executor.close()
            raise
        self._ends = vocabulary.eos_ids if vocabulary is not None else frozenset[int]()
        width = min(can.vocab_size, target.size if target is not None else can.vocab_size)
        self._sampler = Sampler(width)
        self._greedy = SamplerState(Sampling(), 0, (), width)
        self._coupled = coupled
        self._pace = (pace or Pace(draft=0.2)) if adaptive else None
        self._held: dict[str, _Held] = {}
        self._free = list(range(can.slots))
        self._calls = 0
        self._failures = 0

    def propose(self, id: str, ids: Sequence[int], count: int, state: SamplerState | None = None) -> list[int]:
        """Up to ``count`` tokens that the draft model writes after ``ids``."""
        return self.propose_many([(id, ids, count, state)])[0]

    def propose_many(self, asked: Sequence[Asked]) -> list[list[int]]:
        """`propose` for several requests; one forward pass of the draft model serves them all."""
        self._calls += 1
        answers: list[list[int]] = [[] for _ in asked]
        if self._failures >= MOST_FAILURES:
            return answers
        works = self._works(asked)
        try:
            self._write(self._caught_up(self._placed(works)))
            self._failures = 0
        except Exception as error:  # the requests go on without drafts
            self._failures += 1
            self.error = f"{type(error).__name__}: {error}"
            for work in works:
                work.drafts = []
            self._abandon()
        for work in works:
            answers[work.place] = work.drafts
            if self._pace is not None:
                self._pace.proposed(work.id, work.ids, work.drafts)
        return answers

    def forget(self, id: str) -> None:
        """The request is over: its slot is free."""
        self._release(id)
        if self._pace is not None:
            self._pace.forget(id)

    def close(self) -> None:
        """Closes the executor; may be called twice."""
        self._held.clear()
        self._failures = MOST_FAILURES
        self.executor.close()

    def _works(self, asked: Sequence[Asked]) -> list[_Work]:
        works = []
        context = self.executor.capabilities.context
        for place, (id, ids, count, state) in enumerate(asked):
            if self._pace is not None:
                count = self._pace.length(id, ids, count, len(asked))
            # The last draft is never computed: the slot ends with len(ids) + count - 1 tokens.
            count = min(count, context - len(ids) + 1)
            if count > 0 and ids:
                used = state if state is not None and self._coupled else self._greedy
                works.append(_Work(place, id, ids, count, used))
        return works

    def _placed(self, works: list[_Work]) -> list[_Work]:
        """Works with a slot that holds a true prefix of their text, as far as slots and cache reach."""
        can = self.executor.capabilities
        mine = {work.id for work in works}
        idle = sorted((i for i in self._held if i not in mine), key=lambda i: -self._held[i].used)

        def blocks(tokens: int) -> int:
            return -(-tokens // can.block_size) * can.block_size

        placed, room = [], can.cache_tokens - sum(blocks(len(self._held[i].tokens)) for i in idle)
        for work in works:
            need = blocks(len(work.ids) + work.count - 1)
            known = work.id in self._held
            while idle and (room < need or not (known or self._free)):
                room += blocks(len(self._held[idle[-1]].tokens))
                self._release(idle.pop())
            if room < need or not (known or self._free):
                self._release(work.id)
                continue
            room -= need
            self._align(work)
            placed.append(work)
        return placed

    def _align(self, work: _Work) -> None:
        """Cuts the work's slot to what it has in common with the text, one token short of all of it."""
        held = self._held.get(work.id)
        if held is None:
            held = self._held[work.id] = _Held(self._free.pop())
        held.used = self._calls
        most = min(len(held.tokens), len(work.ids) - 1)
        keep = _common(held.tokens, work.ids, most)
        if keep < len(held.tokens):
            keep = self.executor.retained(held.slot, keep)
            self.executor.roll_back(held.slot, keep)
            del held.tokens[keep:]

    def _caught_up(self, works: list[_Work]) -> list[tuple[_Work, int]]:
        """Computes the texts' new tokens; works with the token drawn after them, where all fitted the step."""
        budget = self.executor.capabilities.step_tokens
        rows, ready = [], []
        for work in sorted(works, key=lambda w: len(w.ids) - len(self._held[w.id].tokens)):
            held = self._held[work.id]
            start, stop = len(held.tokens), min(len(work.ids), len(held.tokens) + budget)
            if stop == start:
                break
            tokens, whole = list(work.ids[start:stop]), stop == len(work.ids)
            if min(tokens) < 0 or max(tokens) >= self.executor.capabilities.vocab_size:
                continue  # placeholders of images, or special tokens that only the target has
            rows.append(Row(held.slot, tokens, start, int(whole)))
            held.tokens += tokens
            budget -= len(tokens)
            ready += [work] * whole
        if not rows:
            return []
        logits = self.executor.execute(Step(rows))
        return list(zip(ready, self._draw(logits, ready), strict=True)) if ready else []

    def _write(self, drawn: list[tuple[_Work, int]]) -> None:
        """Drafts until every work has its count, an end token, or logits that are no numbers."""
        while drawn:
            going = []
            for work, token in drawn:
                if token < 0:
                    continue
                work.drafts.append(token)
                if len(work.drafts) < work.count and token not in self._ends:
                    going.append(work)
            rows = []
            for work in going:
                held = self._held[work.id]
                rows.append(Row(held.slot, [work.drafts[-1]], len(held.tokens)))
                held.tokens.append(work.drafts[-1])
            drawn = list(zip(going, self._draw(self.executor.execute(Step(rows)), going), strict=True)) if rows else []

    def _draw(self, logits: Any, works: list[_Work]) -> list[int]:
        rows = [SampleRow(work.state, () if work.state is self._greedy else tuple(work.drafts)) for work in works]
        return [draw.token for draw in self._sampler.sample(logits, rows)]

    def _abandon(self) -> None:
        """Empties every slot after a failure: what they hold is not known."""
        self._held.clear()
        self._free = list(range(self.executor.capabilities.slots))
        for slot in self._free:
            try:
                self.executor.free(slot)
            except Exception:  # the failure that led here has been noted
                self._failures = MOST_FAILURES

    def _release(self, id: str) -> None:
        held = self._held.pop(id, None)
        if held is not None:
            self.executor.free(held.slot)
            self._free.append(held.slot)


def _common(ours: list[int], theirs: Sequence[int], most: int) -> int:
    """Length of the common prefix, ``most`` at most."""
    if ours[:most] == list(theirs[:most]):  # the usual case, at the speed of memory
        return most
    return next((i for i in range(most) if ours[i] != theirs[i]), most)


def check_vocabularies(draft: Vocabulary, target: Vocabulary) -> None:
    """Raises ``InputError`` ``tokenizer.mismatch`` when a draft model's ids do not mean what the target's do.

    An id that one of them lacks may only be padding or a special token in the other.
    """
    if draft.eos_ids != target.eos_ids:
        raise _mismatch(f"end tokens are {sorted(draft.eos_ids)} and {sorted(target.eos_ids)}")
    shared = min(draft.size, target.size)
    for token in range(shared):
        ours, theirs = ("special" if v.is_special(token) else repr(v.token_bytes(token)) for v in (draft, target))
        if ours != theirs:
            raise _mismatch(f"token {token} is {ours} and {theirs}")
    longer, name = (draft, "draft") if draft.size > shared else (target, "target")
    for token in range(shared, longer.size):
        if longer.token_bytes(token) and not longer.is_special(token):
            raise _mismatch(f"token {token}, {longer.token_bytes(token)!r}, exists in the {name} only")


def _mismatch(what: str) -> InputError:
    return InputError(
        f"the draft model's vocabulary is not the target's: {what}",
        code="tokenizer.mismatch",
        hints=("take a smaller model of the same family as draft", "or speculate by n-grams, without a draft model"),
    )
