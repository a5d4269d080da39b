"""The engine when something goes wrong in the middle: an executor, a proposer, a criterion, an order of events.

Whatever fails, every accepted request ends, the others say what they say alone, and nothing is held.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from tests.engine.driving import Answer, drive, engine, request
from tests.engine.tiny import TinyExecutor, TinyVocabulary

from turnout.backends.base import BindingReport, Case, LoadPlan
from turnout.engine.core import Engine
from turnout.engine.executor import Step
from turnout.engine.kv_cache import BlockHashes, KvCache, hash_seed
from turnout.engine.request import Finish, GenerationRequest
from turnout.engine.session import EngineSession
from turnout.engine.speculative import NGramProposer
from turnout.errors import InputError, LoadError
from turnout.package.facts import Artifact, ArtifactKind
from turnout.types import Request, Sampling

PROMPT = list(range(3, 45))


class Faulty(TinyExecutor):
    """A tiny executor whose calls fail: ``broken_calls`` maps a method to the numbers (from 0) of its calls
    that raise before they change anything; "always" means every call."""

    def __init__(self, broken_calls: dict[str, Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.broken_calls = broken_calls
        self.failed_frees = 0
        self.calls = dict.fromkeys(("execute", "encode", "retained", "copy_prefix", "roll_back", "free"), 0)

    def _count(self, name: str) -> None:
        number = self.calls[name]
        self.calls[name] += 1
        which = self.broken_calls.get(name, ())
        if which == "always" or number in which:
            self.failed_frees += name == "free"
            raise RuntimeError(f"{name} {number} fails on purpose")

    def idle(self) -> bool:
        """Whether every slot is empty but those that could not be freed."""
        return sum(map(bool, self._cache)) <= self.failed_frees

    def execute(self, step: Step) -> Any:
        self._count("execute")
        return super().execute(step)

    def encode(self, slot: int, tokens: Sequence[int]) -> None:
        self._count("encode")
        super().encode(slot, tokens)

    def retained(self, slot: int, length: int) -> int:
        self._count("retained")
        return super().retained(slot, length)

    def copy_prefix(self, source: int, target: int, length: int) -> None:
        self._count("copy_prefix")
        super().copy_prefix(source, target, length)
        self.calls["retained"] -= 1  # the tiny executor asks itself

    def roll_back(self, slot: int, length: int) -> None:
        self._count("roll_back")
        super().roll_back(slot, length)

    def free(self, slot: int) -> None:
        self._count("free")
        super().free(slot)


@dataclass
class Always:
    """A proposer that proposes the same, right or wrong; ``raises`` instead, where given."""

    drafts: list[int]
    raises: bool = False

    def propose(self, id: str, ids: Sequence[int], count: int, state: Any = None) -> list[int]:
        return self.propose_many([(id, ids, count, state)])[0]

    def propose_many(self, asked: Sequence[Any]) -> list[list[int]]:
        if self.raises:
            raise RuntimeError("the proposer fails on purpose")
        return [list(self.drafts) for _ in asked]

    def forget(self, id: str) -> None: ...

    def close(self) -> None: ...


def alone(prompt: Sequence[int], count: int, **more: Any) -> Answer:
    """What a request says when nothing else runs and nothing fails."""
    return drive(engine(TinyExecutor(slots=1)), [request("x", prompt, count, **more)])["x"]


# ---- the executor fails ----------------------------------------------------------------


def test_a_copy_that_fails_is_a_miss() -> None:
    executor = Faulty({"copy_prefix": "always"}, slots=4)
    asked = [request("a", PROMPT, 20, ignore_eos=True), request("b", PROMPT, 20, ignore_eos=True)]
    answers = drive(engine(executor), asked, [0, 3])
    assert answers["b"].tokens == answers["a"].tokens == executor.greedy(PROMPT, 20)[:20]
    assert answers["b"].usage is not None and answers["b"].usage.cached == 0


def test_a_cached_slot_that_cannot_be_cut_is_a_miss() -> None:
    executor = Faulty({"roll_back": "always"}, slots=1)
    running = engine(executor)
    asked = [request("a", PROMPT, 5), request("b", PROMPT, 5)]
    answers = drive(running, asked)
    assert answers["a"].tokens == answers["b"].tokens and not answers["b"].error


def test_retained_that_fails_is_a_miss() -> None:
    executor = Faulty({"retained": "always"}, slots=2)
    answers = drive(engine(executor), [request("a", PROMPT, 5), request("b", PROMPT, 5)], [0, 3])
    assert answers["a"].tokens == answers["b"].tokens


def test_a_roll_back_that_fails_ends_its_own_request_only() -> None:
    executor = Faulty({"roll_back": [0]}, slots=2)
    running = engine(executor, proposer=Always([3, 3]))
    asked = [request("a", [5, 6], 9, ignore_eos=True), request("b", [7, 8], 9, ignore_eos=True)]
    answers = drive(running, asked)
    assert [bool(answers[id].error) for id in "ab"] == [True, False]
    assert answers["a"].finish is Finish.ERROR and "on purpose" in answers["a"].error
    assert answers["b"].tokens == alone([7, 8], 9, ignore_eos=True).tokens


def test_a_roll_back_that_fails_at_a_requests_last_token_still_ends_it() -> None:
    """The last token was drawn already: the request has its finish when the executor fails."""
    executor = Faulty({"roll_back": "always"}, slots=1)
    wrong = next(t for t in range(3, 64) if t not in executor.greedy([5, 6], 4))
    running = engine(executor, proposer=Always([wrong]))
    first = executor.greedy([5, 6], 2)[1]
    answers = drive(running, [request("a", [5, 6], 9, ignore_eos=True, stop_token_ids=(first,))])
    assert answers["a"].done


def test_an_encoder_that_fails_ends_its_own_request_only() -> None:
    def ask(id: str, source: list[int]) -> GenerationRequest:
        return GenerationRequest(id, [2], Sampling(max_tokens=6, ignore_eos=True), encoder=source)

    executor = Faulty({"encode": [1]}, slots=3, encoder_decoder=True)
    answers = drive(engine(executor), [ask(f"r{i}", [5 + i, 6]) for i in range(3)])
    assert [bool(answers[f"r{i}"].error) for i in range(3)] == [False, True, False]
    reference = drive(engine(TinyExecutor(slots=1, encoder_decoder=True)), [ask("r2", [7, 6])])
    assert answers["r2"].tokens == reference["r2"].tokens


def test_encoder_input_is_checked_at_the_door() -> None:
    running = engine(TinyExecutor(slots=1, encoder_decoder=True))
    with pytest.raises(InputError, match="encoder input has no tokens"):
        running.add(GenerationRequest("a", [2], Sampling(), encoder=[]))
    with pytest.raises(InputError, match=r"-1 at place 0 of the encoder"):
        running.add(GenerationRequest("a", [2], Sampling(), encoder=[-1]))
    assert not running.has_work


@pytest.mark.parametrize("at", range(6))
def test_a_slot_that_cannot_be_freed_is_not_used_until_it_can(at: int) -> None:
    executor = Faulty({"free": [at]}, slots=2)
    asked = [request(f"r{i}", [5 + i, 6], 6, cache=False, ignore_eos=True) for i in range(6)]
    answers = drive(engine(executor), asked, idle=False)
    for r in asked:
        assert answers[r.id].tokens == alone(r.prompt, 6, ignore_eos=True).tokens


def test_slots_that_can_never_be_freed_are_refused_rather_than_waited_for() -> None:
    executor = Faulty({"free": "always"}, slots=2)
    running = engine(executor)
    asked = [request(f"r{i}", [5 + i, 6], 3, cache=False, ignore_eos=True) for i in range(4)]
    for r in asked:
        running.add(r)
    ended: dict[str, str] = {}
    for _ in range(50):
        for event in running.step():
            if event.done:
                ended[event.id] = event.error
    assert set(ended) == {r.id for r in asked}
    assert [bool(ended[r.id]) for r in asked] == [False, False, True, True]
    assert "free" in ended["r3"]
    running.close()
    assert executor.closed


def test_close_frees_the_executor_also_when_freeing_a_slot_fails() -> None:
    executor = Faulty({"free": "always"}, slots=2)
    running = engine(executor)
    running.add(request("a", [5, 6], 30, ignore_eos=True, cache=False))
    running.step()
    running.close()
    assert executor.closed


@pytest.mark.parametrize("which", ["always", [0], [2], [1, 3]])
def test_steps_that_fail_end_their_requests(which: Any) -> None:
    executor = Faulty({"execute": which}, slots=2)
    asked = [request(f"r{i}", [5 + i, 6], 4, n=2, ignore_eos=True) for i in range(5)]
    answers = drive(engine(executor), asked)
    for r in asked:
        if not answers[r.id].error:
            assert answers[r.id].sequences[1].tokens == alone(r.prompt, 4, ignore_eos=True).tokens
    assert all(a.error for a in answers.values()) or which != "always"


class Nan(TinyExecutor):
    """Gives no numbers for the slot that computes token 63."""

    def execute(self, step: Step) -> Any:
        logits = super().execute(step)
        at = 0
        for row in step.rows:
            if 63 in row.tokens:
                logits[at : at + row.logits] = np.nan
            at += row.logits
        return logits


@pytest.mark.parametrize("wanted", [None, 2])
def test_logits_that_are_no_numbers_end_their_own_request_only(wanted: int | None) -> None:
    asked = [
        request("bad", [5, 63, 6], 5, prompt_logprobs=wanted),
        request("good", [7, 8, 9], 5, prompt_logprobs=wanted, ignore_eos=True),
    ]
    answers = drive(engine(Nan(slots=2)), asked)
    assert answers["bad"].code == "runtime.numeric_mismatch"
    assert not answers["good"].error and answers["good"].tokens == alone([7, 8, 9], 5, ignore_eos=True).tokens


@pytest.mark.parametrize("seed", range(60))
def test_any_call_may_fail(seed: int) -> None:
    """Calls of the executor fail at random: everyone gets an end, who gets no error says what it says alone."""
    rng = random.Random(seed)
    calls = {
        name: [n for n in range(400) if rng.random() < share]
        for name, share in (
            ("execute", 0.02),
            ("retained", 0.1),
            ("copy_prefix", 0.2),
            ("roll_back", 0.05),
            ("free", 0.2),
        )
        if rng.random() < 0.7
    }
    executor = Faulty(calls, slots=3, context=96, cache_tokens=160, snapshot=rng.choice([1, 8]))
    running = engine(executor, proposer=rng.choice([None, NGramProposer(), Always([3, 4, 5])]))
    asked = [
        request(
            f"r{i}",
            PROMPT[: rng.randrange(1, 40)] + [rng.randrange(3, 64) for _ in range(rng.randrange(6))],
            rng.randrange(1, 20),
            n=rng.choice([1, 1, 3]),
            temperature=1.0,
            seed=i,
            cache=rng.random() < 0.8,
        )
        for i in range(8)
    ]
    answers = drive(running, asked, [rng.randrange(10) for _ in asked], idle=False)
    for r in asked:
        reference = drive(engine(TinyExecutor(slots=1, context=96)), [r])[r.id]
        for index, heard in answers[r.id].sequences.items():
            if heard.finish in (Finish.STOP, Finish.LENGTH):
                assert heard.tokens == reference.sequences[index].tokens


# ---- what plugs in fails ---------------------------------------------------------------


def test_a_proposer_that_fails_costs_time_only() -> None:
    running = engine(TinyExecutor(slots=2), proposer=Always([], raises=True))
    answers = drive(running, [request("a", [5, 6], 9, ignore_eos=True)])
    assert answers["a"].tokens == alone([5, 6], 9, ignore_eos=True).tokens


def test_drafts_outside_the_vocabulary_are_not_computed() -> None:
    running = engine(TinyExecutor(slots=2), proposer=Always([64, -1, 5]))
    answers = drive(running, [request("a", [5, 6], 9, ignore_eos=True)])
    assert answers["a"].tokens == alone([5, 6], 9, ignore_eos=True).tokens


def test_more_drafts_than_asked_are_cut() -> None:
    running = engine(TinyExecutor(slots=2, context=32), proposer=Always([3] * 500), draft_tokens=2)
    answers = drive(running, [request("a", [5, 6], 90, ignore_eos=True)])
    assert answers["a"].tokens == alone([5, 6], 30, ignore_eos=True).tokens
    assert max(running.executor.rows) == 1 and running.stats.step_tokens <= 3 * running.stats.steps


class Mute(TinyVocabulary):
    """Cannot decode token 63."""

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        if 63 in ids:
            raise ValueError("no text for 63")
        return super().decode(ids, skip_special)


def test_a_token_without_text_ends_its_own_request_only() -> None:
    running = Engine(TinyExecutor(slots=2), Mute())
    force = ((63, 100.0),)
    asked = [request("bad", [5, 6], 5, logit_bias=force), request("good", [7, 8], 5, ignore_eos=True)]
    answers = drive(running, asked)
    assert "no text for 63" in answers["bad"].error
    assert answers["good"].tokens == alone([7, 8], 5, ignore_eos=True).tokens


def test_a_request_that_cannot_be_set_up_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    running = engine()
    prepared = running.prepare(request("a", [5, 6], 3, n=2))
    prepared.breakers = 7  # type: ignore[assignment]
    prepared.request.sampling = Sampling(max_tokens=3, n=2, dry_multiplier=1.0)
    with pytest.raises(TypeError):
        running.add(prepared)
    assert not running.has_work
    running.check_idle()


def test_an_adapter_unloaded_between_the_door_and_the_queue_is_missed_there() -> None:
    running = engine()
    running.load_adapter("one", "pirate")
    prepared = running.prepare(request("a", [5, 6], 3, adapter="one"))
    running.unload_adapter("one")
    with pytest.raises(InputError, match="no adapter `one`"):
        running.add(prepared)
    assert not running.has_work


def test_an_adapter_that_does_not_load_is_not_known() -> None:
    running = engine()
    with pytest.raises(LoadError):
        running.load_adapter("one", "bad")
    assert running.adapters == []
    running.load_adapter("one", "pirate")


# ---- n and best_of ---------------------------------------------------------------------


def test_the_best_of_what_a_deadline_leaves_has_tokens() -> None:
    """One slot: the second sequence has nothing when time is up, and nothing is not better than something."""
    asked = request("a", [5, 6], 12, n=1, best_of=3, temperature=1.0, seed=2, deadline=9.0, ignore_eos=True)
    answers = drive(engine(TinyExecutor(slots=1)), [asked])
    assert answers["a"].finish is Finish.DEADLINE or len(answers["a"].tokens) == 12
    assert len(answers["a"].tokens) > 0


def test_a_finished_sequence_is_better_than_a_cut_one() -> None:
    asked = request("a", [5, 6], 12, n=1, best_of=2, temperature=1.0, seed=2, deadline=15.0, ignore_eos=True)
    answers = drive(engine(TinyExecutor(slots=1)), [asked])
    assert answers["a"].finish is Finish.LENGTH and len(answers["a"].tokens) == 12


@pytest.mark.parametrize("best_of", [None, 4])
@pytest.mark.parametrize("end", ["cancel", "deadline", "error"])
@pytest.mark.parametrize("at", range(0, 16, 3))
def test_ends_at_every_stage_of_several_sequences(best_of: int | None, end: str, at: int) -> None:
    executor = Faulty({"execute": [at]} if end == "error" else {}, slots=2)
    more = {"deadline": float(at)} if end == "deadline" else {}
    asked = [
        request("a", PROMPT, 10, n=3, best_of=best_of, temperature=1.0, seed=1, ignore_eos=True, **more),  # type: ignore[arg-type]
        request("b", [9, 9], 3, ignore_eos=True),
    ]
    answers = drive(engine(executor, chunk_tokens=10), asked, [0, 30], cancels={"a": at} if end == "cancel" else {})
    wanted = {"cancel": Finish.CANCELLED, "deadline": Finish.DEADLINE, "error": Finish.ERROR}[end]
    heard = answers["a"].sequences
    assert sorted(heard) == [0, 1, 2]
    assert {h.finish for h in heard.values()} <= {wanted, Finish.LENGTH}
    assert wanted in {h.finish for h in heard.values()}
    assert answers["a"].usage is not None
    assert answers["b"].tokens == alone([9, 9], 3, ignore_eos=True).tokens


# ---- cache and schedule ----------------------------------------------------------------


def test_a_context_that_is_no_multiple_of_a_block_is_usable_whole() -> None:
    for slots, context in ((1, 100), (3, 100), (2, 7)):
        executor = TinyExecutor(slots=slots, context=context, block_size=16)
        running = engine(executor)
        asked = [request(f"r{i}", [5 + i, 6], 200, ignore_eos=True, cache=False) for i in range(slots)]
        answers = drive(running, asked)
        assert all(len(answers[r.id].tokens) == context - 2 for r in asked)
        assert running.stats.preemptions == 0


def test_blocks_larger_than_the_context() -> None:
    executor = TinyExecutor(slots=3, context=40, block_size=256)
    asked = [request(f"r{i}", [5 + i, 6], 90, ignore_eos=True) for i in range(3)]
    running = engine(executor)
    answers = drive(running, asked)
    assert all(len(a.tokens) == 38 for a in answers.values())
    assert max(executor.rows) == 3 and running.stats.preemptions == 0


def test_a_short_hit_does_not_cost_a_long_prefix() -> None:
    """Two conversations with one system prompt: the second leaves the first's tokens where they are."""
    executor = TinyExecutor(slots=3)
    running = engine(executor)
    system = list(range(3, 35))
    first = [*system, *range(3, 60), *range(10, 50)]

    def ask(id: str, prompt: list[int]) -> int:
        running.add(request(id, prompt, 2, ignore_eos=True))
        cached = -1
        while running.has_work:
            for event in running.step():
                cached = event.usage.cached if event.usage else cached
        return cached

    assert ask("a", first) == 0
    assert ask("b", [*system, 60, 61, 62]) == len(system)
    assert ask("c", [*first, 7, 7]) >= len(first)
    running.check_idle()


def test_the_least_recently_used_prefix_goes_when_a_short_hit_needs_a_slot() -> None:
    executor = TinyExecutor(slots=2)
    running = engine(executor)
    system = list(range(3, 35))

    def ask(id: str, prompt: list[int]) -> int:
        return drive_kept(running, request(id, prompt, 2, ignore_eos=True))

    long = [*system, *range(3, 60)]
    ask("old", list(range(20, 60)))
    ask("long", long)
    assert ask("short", [*system, 60, 61]) == len(system)  # the slot of `old` is taken
    assert ask("again", [*long, 7]) >= len(long)


def drive_kept(running: Engine, asked: GenerationRequest) -> int:
    """Cached tokens of a request; prefixes stay for the next."""
    running.add(asked)
    cached = -1
    while running.has_work:
        for event in running.step():
            cached = event.usage.cached if event.usage else cached
    return cached


def test_a_waiting_request_does_not_empty_the_cache_while_it_waits() -> None:
    """It has no room yet: cached prefixes are dropped when that helps it, not before."""
    executor = TinyExecutor(slots=2, context=64, cache_tokens=112)
    running = engine(executor)
    drive_kept(running, request("a", list(range(3, 19)), 1, ignore_eos=True))  # a prefix of one block
    running.add(request("long", list(range(5, 50)), 18, ignore_eos=True))
    running.add(request("longer", list(range(6, 66 - 2)), 4, ignore_eos=True))
    running.step()
    before = running.cache.cached_blocks
    assert before == 1 and len(running.scheduler.waiting) == 1
    for _ in range(3):
        running.step()
    assert running.cache.cached_blocks == before


def test_preemption_does_not_thrash() -> None:
    """A cache much smaller than the demand: tokens computed twice stay a small part of all."""
    executor = TinyExecutor(slots=16, context=256, cache_tokens=1024)
    asked = [request(f"r{i}", [3 + i] * 100, 80, ignore_eos=True, cache=False) for i in range(16)]
    running = engine(executor, chunk_tokens=16)
    drive(running, asked)
    needed = sum(len(r.prompt) + r.sampling.max_tokens - 1 for r in asked)
    assert executor.computed < 1.25 * needed, (executor.computed, needed, running.stats.preemptions)


def test_every_running_sequence_gets_a_token_in_every_step() -> None:
    """Drafts of the first must not take the step from the last, however small the step is."""
    executor = TinyExecutor(slots=8, step_tokens=8)
    running = engine(executor, proposer=Always([3, 4, 5, 6, 7]))
    for i in range(8):
        running.add(request(f"r{i}", [5 + i], 40, ignore_eos=True))
    running.step()
    for _ in range(20):
        assert len({event.id for event in running.step()}) == 8


@pytest.mark.parametrize("step", [1, 2, 3, 5])
def test_steps_smaller_than_drafts_and_rows(step: int) -> None:
    executor = TinyExecutor(slots=4, step_tokens=step)
    asked = [request(f"r{i}", [5 + i] * 9, 12, ignore_eos=True) for i in range(6)]
    answers = drive(engine(executor, proposer=Always([3, 4, 5])), asked)
    for r in asked:
        assert answers[r.id].tokens == alone(r.prompt, 12, ignore_eos=True).tokens


def test_a_long_prompt_does_not_hold_up_who_decodes() -> None:
    """While others decode a step takes a bounded part of new prompts, all of them together; alone it is whole."""
    executor = TinyExecutor(slots=8, context=4096)
    running = engine(executor, mixed_tokens=64)
    running.add(request("first", [5, 6], 400, ignore_eos=True))
    running.step()
    for i in range(4):
        running.add(request(f"long{i}", [7 + i] * 1000, 2, ignore_eos=True, cache=False))
    while running.has_work:
        before = executor.computed
        heard = {event.id for event in running.step()}
        decoding = executor.computed - before
        assert "first" not in heard or decoding <= 64 + 8
    running = engine(TinyExecutor(slots=8, context=4096), mixed_tokens=64)
    running.add(request("alone", [7] * 1000, 2, ignore_eos=True))
    running.step()
    assert running.executor.computed == 1000


def test_hits_from_the_only_slot_itself() -> None:
    executor = TinyExecutor(slots=1, cache_tokens=256)
    answers = drive(engine(executor), [request(f"r{i}", PROMPT, 7, ignore_eos=True) for i in range(4)])
    assert len({tuple(a.tokens) for a in answers.values()}) == 1
    assert all(answers[f"r{i}"].usage.cached == len(PROMPT) - 1 for i in range(1, 4))  # type: ignore[union-attr]


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("snapshot", [1, 4])
def test_prefixes_under_eviction_storms(seed: int, snapshot: int) -> None:
    """Few slots, many tenants and adapters, drafts that are rolled back while others copy: nothing gets mixed."""
    rng = random.Random(seed)
    executor = TinyExecutor(slots=3, context=80, cache_tokens=176, block_size=4, snapshot=snapshot)
    running = engine(executor, proposer=Always([3, 4, 5]), chunk_tokens=rng.choice([None, 6]))
    running.load_adapter("a", "pirate")
    base = [rng.randrange(3, 64) for _ in range(30)]
    asked = []
    for i in range(14):
        prompt = base[: rng.randrange(4, 30)] + [rng.randrange(3, 64) for _ in range(rng.randrange(4))]
        asked.append(
            request(
                f"r{i}", prompt, rng.randrange(1, 24), salt=rng.choice(["", "x"]), adapter=rng.choice([None, "a"]),
                ignore_eos=True, n=rng.choice([1, 2]), temperature=1.0, seed=i, priority=rng.randrange(2),
            )
        )  # fmt: skip
    answers = drive(running, asked, [rng.randrange(30) for _ in asked])
    for r in asked:
        single = engine(TinyExecutor(slots=1, context=80))
        single.load_adapter("a", "pirate")
        reference = drive(single, [r])[r.id]
        for index, heard in answers[r.id].sequences.items():
            assert heard.tokens == reference.sequences[index].tokens


def test_a_roll_back_further_than_what_was_known_as_cached() -> None:
    executor = TinyExecutor(slots=2, context=128, block_size=4, snapshot=32)
    asked = [request("a", PROMPT, 30, ignore_eos=True), request("b", PROMPT, 30, ignore_eos=True)]
    running = engine(executor, proposer=Always([3]))
    answers = drive(running, asked, [0, 5])
    assert answers["a"].tokens == answers["b"].tokens == alone(PROMPT, 30, ignore_eos=True).tokens


def test_a_slot_never_promises_more_than_it_holds() -> None:
    class Store:
        def retained(self, slot: int, length: int) -> int:
            return length

        def copy_prefix(self, source: int, target: int, length: int) -> None: ...

        def roll_back(self, slot: int, length: int) -> None: ...

        def free(self, slot: int) -> None: ...

    cache = KvCache(Store(), 2, 64, 4)
    tokens = list(range(20))
    hashes = BlockHashes(hash_seed(), 4)
    slot = cache.acquire("a", 20, None)
    assert slot is not None
    cache.commit(slot, tokens, 18, hashes)  # two tokens are known and not computed
    hit = cache.match([*tokens, 1, 2], BlockHashes(hash_seed(), 4))
    assert hit is not None and hit.length == 18
    cache.commit(slot, tokens, 9, hashes)  # speculation went back further than a block
    hit = cache.match([*tokens, 1, 2], BlockHashes(hash_seed(), 4))
    assert hit is not None and hit.length == 9
    cache.check()


# ---- the door --------------------------------------------------------------------------


def test_stops_are_whole_texts() -> None:
    with pytest.raises(InputError, match="stop"):
        engine().add(request("a", [5], 5, stop=("",)))
    free = alone([7, 8, 9], 12, ignore_eos=True)
    stops = (*(f"never {i}" for i in range(15)), free.text)
    whole = alone([7, 8, 9], 30, ignore_eos=True, stop=stops)
    assert (whole.text, whole.finish, whole.sequences[0].stop) == ("", Finish.STOP, free.text)
    kept = alone([7, 8, 9], 30, ignore_eos=True, stop=stops, include_stop=True)
    assert kept.text == free.text


@pytest.mark.parametrize("length", range(1, 9))
def test_half_characters_never_leave(length: int) -> None:
    """Cut anywhere, the text is whole characters: what the last tokens began is left out."""
    ids = TinyVocabulary().encode("a\N{EURO SIGN}b\N{LATIN SMALL LETTER E WITH ACUTE}", special=False)
    executor = Scripted([*ids, *ids])
    running = engine(executor)
    answers = drive(running, [request("a", [5], length)])
    text = answers["a"].text
    assert "\N{REPLACEMENT CHARACTER}" not in text
    assert "a\N{EURO SIGN}b\N{LATIN SMALL LETTER E WITH ACUTE}a\N{EURO SIGN}b".startswith(text)


def test_bytes_that_are_no_character_are_told_as_such() -> None:
    """An invalid byte in the middle is the model's text, not half a character: it is not held back for ever."""
    half = next(t for t in range(64) if TinyVocabulary().token_bytes(t) == b"\xc3")
    running = engine(Scripted([half, 3, 4, half]))
    answers = drive(running, [request("a", [5], 3)])
    assert answers["a"].text == "\N{REPLACEMENT CHARACTER}ab"


class Scripted(TinyExecutor):
    """Writes the given tokens, whatever the prompt of one token is."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(slots=1)
        self.script = script

    def execute(self, step: Step) -> Any:
        logits = super().execute(step)
        (row,) = step.rows
        for i in range(row.logits):
            logits[i, self.script[row.start + len(row.tokens) - row.logits + i]] = 1000.0
        return logits


@pytest.mark.parametrize("name", ["chunk_tokens", "mixed_tokens", "step_tokens", "max_running", "draft_tokens"])
def test_settings_that_mean_nothing_are_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"`{name}` is `-1`"):
        engine(TinyExecutor(), **{name: -1})


@pytest.mark.parametrize("raises", [RuntimeError, KeyboardInterrupt])
def test_a_session_whose_listener_fails_answers_the_next_request(raises: type[BaseException]) -> None:
    artifact = Artifact("model", ArtifactKind.TRANSFORMERS, "")
    plan = LoadPlan(Case("", artifact, "text-generation", "cpu", {}), "tiny")
    session = EngineSession(plan, engine(TinyExecutor(slots=2)), BindingReport(), "float32")

    def ask(emit: Any = None) -> str:
        return session.run(Request("text-generation", {"prompt": "hello"}, Sampling(max_tokens=8)), emit).text

    def fails(piece: str) -> None:
        raise raises("the listener's own")

    undisturbed = ask()
    with pytest.raises(raises, match="the listener's own"):
        ask(fails)
    session.engine.check_idle()
    assert ask() == undisturbed
