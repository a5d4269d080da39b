"""The engine over a tiny model: every way of scheduling gives what the model says alone."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest
from tests.engine.driving import drive, engine, request
from tests.engine.tiny import EOS, TinyExecutor, TinyVocabulary

from turnout.engine import processors
from turnout.engine.core import Engine
from turnout.engine.request import Finish, GenerationRequest
from turnout.engine.speculative import DraftProposer, NGramProposer
from turnout.errors import InputError, OverloadedError
from turnout.types import Grammar, Sampling

VOCABULARY = TinyVocabulary()


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(3, 64) for _ in range(rng.randrange(1, longest))] for _ in range(count)]


def expected(executor: TinyExecutor, prompt: list[int], count: int, adapter: str | None = None) -> list[int]:
    return executor.greedy(prompt, count, adapter)


@pytest.mark.parametrize("chunk", [1, 7, 64, None])
@pytest.mark.parametrize("snapshot", [1, 16])
def test_ragged_batches_equal_each_alone(chunk: int | None, snapshot: int) -> None:
    executor = TinyExecutor(slots=16, snapshot=snapshot)
    asked = [request(f"r{i}", p, 12) for i, p in enumerate(prompts(16))]
    rng = random.Random(1)
    answers = drive(engine(executor, chunk_tokens=chunk), asked, [rng.randrange(20) for _ in asked])
    for r in asked:
        assert answers[r.id].tokens == expected(executor, r.prompt, 12), r.id
    assert max(executor.rows) > 4  # they did share steps


def test_preempted_requests_say_the_same() -> None:
    executor = TinyExecutor(slots=4, context=128, cache_tokens=160)
    asked = [request(f"r{i}", p, 40, ignore_eos=True) for i, p in enumerate(prompts(6, 60, seed=3))]
    running = engine(executor)
    answers = drive(running, asked)
    for r in asked:
        alone = TinyExecutor(slots=1, context=128)
        assert answers[r.id].tokens == drive(engine(alone), [r])[r.id].tokens
    assert running.stats.preemptions > 0
    assert any(answer.usage and answer.usage.preempted for answer in answers.values())


def test_lower_priority_gives_way() -> None:
    executor = TinyExecutor(slots=2, context=128, cache_tokens=96)
    low = request("low", range(3, 43), 40, priority=5, ignore_eos=True)
    high = request("high", range(13, 53), 40, priority=0, ignore_eos=True)
    answers = drive(engine(executor), [low, high], [0, 3])
    assert answers["low"].usage and answers["low"].usage.preempted > 0
    assert answers["high"].usage and answers["high"].usage.preempted == 0


@pytest.mark.parametrize("snapshot", [1, 16])
def test_prefix_hits_say_the_same_and_compute_less(snapshot: int) -> None:
    executor = TinyExecutor(slots=4, snapshot=snapshot)
    running = engine(executor)
    shared = prompts(1, 100, seed=5)[0] + list(range(3, 60))
    first = drive(running, [request("a", [*shared, 10], 6)], idle=True)
    before = executor.computed
    del first
    running = engine(executor)
    running.add(request("b", [*shared, 10], 6))
    while running.has_work:
        running.step()
    whole = executor.computed - before
    running.add(request("c", [*shared, 11], 6))
    tokens: list[int] = []
    while running.has_work:
        for event in running.step():
            tokens += event.tokens
            usage = event.usage
    assert tokens == expected(executor, [*shared, 11], 6)
    assert usage is not None and usage.cached >= len(shared) - snapshot
    assert executor.computed - before - whole < whole / 2
    running.cache.check()


def test_a_running_prefix_is_copied_and_tenants_are_kept_apart() -> None:
    executor = TinyExecutor(slots=4)
    prompt = list(range(3, 60))
    asked = [request("a", prompt, 30, ignore_eos=True), request("b", prompt, 30), request("c", prompt, 30, salt="x")]
    answers = drive(engine(executor), asked, [0, 2, 2])
    assert answers["b"].usage and answers["b"].usage.cached == len(prompt) - 1
    assert answers["c"].usage and answers["c"].usage.cached == 0
    assert answers["b"].tokens == expected(executor, prompt, 30)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("snapshot", [1, 16])
def test_speculation_changes_nothing(temperature: float, snapshot: int) -> None:
    asked = [
        request(f"r{i}", p, 24, temperature=temperature, seed=i, ignore_eos=True)
        for i, p in enumerate(prompts(8, 30, seed=9))
    ]
    plain = drive(engine(TinyExecutor(slots=4, snapshot=snapshot)), asked)
    draft = TinyExecutor(slots=4, memory=0.0)
    proposers = [NGramProposer(), DraftProposer(draft)]
    for proposer in proposers:
        running = engine(TinyExecutor(slots=4, snapshot=snapshot), proposer=proposer)
        answers = drive(running, asked)
        assert {id: a.tokens for id, a in answers.items()} == {id: a.tokens for id, a in plain.items()}
        assert {id: a.text for id, a in answers.items()} == {id: a.text for id, a in plain.items()}
        if isinstance(proposer, DraftProposer):
            assert running.stats.accepted > 5, running.stats
            assert not draft.broken


def test_adapters_mix_in_one_batch() -> None:
    executor = TinyExecutor(slots=8)
    running = engine(executor)
    running.load_adapter("one", "pirate")
    running.load_adapter("two", "poet")
    names = [None, "one", "two"]
    asked = [request(f"r{i}", range(3, 40), 10, adapter=names[i % 3]) for i in range(6)]
    answers = drive(running, asked, idle=False)
    outputs = []
    for name in names:
        reference = expected(executor, list(range(3, 40)), 10, name)
        outputs.append(reference)
        assert all(answers[r.id].tokens == reference for r in asked if r.adapter == name)
    assert len({tuple(o) for o in outputs}) == 3
    with pytest.raises(InputError, match="nobody"):
        running.add(request("x", [3], adapter="nobody"))
    running.unload_adapter("two")
    running.load_adapter("two", "other")  # the same name is another adapter: no prefix of the old one is used
    again = drive(running, [request("y", range(3, 40), 10, adapter="two")], idle=False)
    assert again["y"].usage and again["y"].usage.cached == 0
    assert again["y"].tokens == expected(executor, list(range(3, 40)), 10, "two")


def test_an_adapter_in_use_stays() -> None:
    running = engine()
    running.load_adapter("one", "pirate")
    running.add(request("r", [3, 4], 50, adapter="one", ignore_eos=True))
    running.step()
    with pytest.raises(InputError, match="1 running"):
        running.unload_adapter("one")


def test_encoder_decoder() -> None:
    executor = TinyExecutor(slots=2, cache_tokens=64, encoder_decoder=True)
    asked = [
        GenerationRequest(f"r{i}", [0], Sampling(max_tokens=20, ignore_eos=True), encoder=p)
        for i, p in enumerate(prompts(5))
    ]
    together = drive(engine(executor), asked)
    for r in asked:
        alone = drive(engine(TinyExecutor(slots=1, encoder_decoder=True)), [r])
        assert together[r.id].tokens == alone[r.id].tokens
    assert len({tuple(a.tokens) for a in together.values()}) > 3
    with pytest.raises(InputError, match="needs encoder input"):
        engine(executor).add(request("x", [0]))


# ---- any schedule ----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(200))
def test_random_schedules(seed: int) -> None:
    """Whatever arrives when, with whatever sizes: each request says what it says alone, nothing leaks."""
    rng = random.Random(seed)
    snapshot = rng.choice([1, 1, 8, 16])
    block = rng.choice([1, 4, 16])
    slots = rng.randrange(1, 6)
    executor = TinyExecutor(
        slots=slots,
        context=96,
        cache_tokens=rng.randrange(96, 96 * slots + 1) + block,
        block_size=block,
        step_tokens=rng.choice([8, 33, 2048]),
        snapshot=snapshot,
        shares_prefix=rng.random() < 0.8,
    )
    proposer = rng.choice([None, NGramProposer(), DraftProposer(TinyExecutor(slots=slots, context=96, memory=0.1))])
    running = engine(executor, chunk_tokens=rng.choice([1, 5, 16, None]), proposer=proposer)
    base = [rng.randrange(3, 64) for _ in range(40)]
    asked, arrivals, cancels = [], [], {}
    for i in range(rng.randrange(2, 9)):
        prompt = base[: rng.randrange(1, 40)] + [rng.randrange(3, 64) for _ in range(rng.randrange(0, 8))]
        greedy = rng.random() < 0.4
        asked.append(
            request(
                f"r{i}",
                prompt,
                rng.randrange(1, 30),
                temperature=0.0 if greedy else rng.choice([0.7, 1.0, 1.5]),
                seed=rng.randrange(1000),
                n=1 if greedy else rng.choice([1, 1, 2, 3]),
                repetition_penalty=rng.choice([1.0, 1.2]),
                priority=rng.randrange(3),
                cache=rng.random() < 0.8,
                speculate=rng.random() < 0.8,
            )
        )
        arrivals.append(rng.randrange(12))
        if rng.random() < 0.15:
            cancels[f"r{i}"] = arrivals[-1] + rng.randrange(10)
    answers = drive(running, asked, arrivals, cancels)
    for r in asked:
        alone = drive(engine(TinyExecutor(slots=1, context=96)), [r])[r.id]
        for index, heard in answers[r.id].sequences.items():
            if heard.finish is Finish.CANCELLED:
                assert alone.sequences[index].tokens[: len(heard.tokens)] == heard.tokens
            else:
                assert (heard.tokens, heard.text) == (alone.sequences[index].tokens, alone.sequences[index].text)


# ---- limits and ends -------------------------------------------------------------------


def test_prompts_that_cannot_fit_are_refused_with_numbers() -> None:
    running = engine(TinyExecutor(slots=2, context=64))
    with pytest.raises(InputError, match=r"65 tokens.*context holds 64"):
        running.add(request("a", [3] * 65))
    with pytest.raises(InputError, match=r"64 tokens.*context holds 64"):
        running.add(request("a", [3] * 64))
    running = engine(TinyExecutor(slots=2, context=64, cache_tokens=48))
    with pytest.raises(InputError, match=r"50 tokens.*cache holds 48"):
        running.add(request("a", [3] * 50))
    with pytest.raises(InputError, match="no tokens"):
        running.add(request("a", []))
    with pytest.raises(InputError, match=r"token id 64"):
        running.add(request("a", [64]))
    assert not running.has_work


def test_the_context_ends_a_request() -> None:
    executor = TinyExecutor(slots=1, context=32)
    answer = drive(engine(executor), [request("a", [3] * 20, 1000, ignore_eos=True)])["a"]
    assert len(answer.tokens) == 12
    assert answer.finish is Finish.LENGTH


@pytest.mark.parametrize("count", [0, 1])
def test_few_tokens(count: int) -> None:
    executor = TinyExecutor()
    answer = drive(engine(executor), [request("a", [5, 6, 7], count)])["a"]
    assert answer.tokens == expected(executor, [5, 6, 7], count)
    assert answer.finish is (Finish.LENGTH if answer.tokens != [EOS] else Finish.STOP)
    assert answer.usage and answer.usage.completion == count


def test_a_hundred_sequences_of_one_request() -> None:
    executor = TinyExecutor(slots=8)
    prompt = list(range(3, 50))
    answer = drive(engine(executor), [request("a", prompt, 5, n=100, temperature=1.0, seed=1, ignore_eos=True)])["a"]
    assert sorted(answer.sequences) == list(range(100))
    assert all(len(heard.tokens) == 5 for heard in answer.sequences.values())
    assert len({tuple(heard.tokens) for heard in answer.sequences.values()}) > 50
    assert answer.usage and answer.usage.completion == 500
    assert executor.computed < 47 + 100 * 6  # the prompt was computed once
    with pytest.raises(InputError, match="129"):
        engine().add(request("b", prompt, n=129))


def test_best_of_gives_the_likeliest() -> None:
    executor = TinyExecutor(slots=4)
    prompt = [3, 4, 5]
    many = drive(engine(executor), [request("a", prompt, 6, n=6, temperature=1.0, seed=1, logprobs=0)])["a"]
    best = drive(engine(executor), [request("b", prompt, 6, n=2, best_of=6, temperature=1.0, seed=1)])["b"]

    def mean(heard: object) -> float:
        return float(np.mean([value.logprob for value in heard.logprobs]))  # type: ignore[attr-defined]

    ranked = sorted(many.sequences.values(), key=mean, reverse=True)
    assert [best.sequences[i].tokens for i in range(2)] == [heard.tokens for heard in ranked[:2]]
    assert best.usage and best.usage.completion == sum(len(h.tokens) for h in many.sequences.values())


def test_stop_strings_and_tokens() -> None:
    executor = TinyExecutor()
    prompt = [7, 8, 9]
    free = drive(engine(executor), [request("a", prompt, 30, ignore_eos=True)])["a"]
    stop = free.text[3:6]
    place = free.text.index(stop)
    cut = drive(engine(executor), [request("a", prompt, 30, ignore_eos=True, stop=(stop,))])["a"]
    assert (cut.text, cut.finish, cut.sequences[0].stop) == (free.text[:place], Finish.STOP, stop)
    kept = drive(engine(executor), [request("a", prompt, 30, ignore_eos=True, stop=(stop,), include_stop=True)])["a"]
    assert kept.text == free.text[: place + len(stop)]
    first = free.tokens[0]
    at_once = drive(engine(executor), [request("a", prompt, 30, stop_token_ids=(first,))])["a"]
    assert (at_once.text, at_once.tokens, at_once.sequences[0].stop) == ("", [first], first)
    late = drive(engine(executor), [request("a", prompt, 30, stop_token_ids=(first,), min_tokens=3)])["a"]
    assert len(late.tokens) >= 3 and first not in late.tokens[:3]


def test_prompt_probabilities_equal_the_models_own() -> None:
    prompt = prompts(1, 50, seed=4)[0] + [5, 6, 7]
    for chunk in (1, 7, None):
        executor = TinyExecutor(slots=2)
        answer = drive(engine(executor, chunk_tokens=chunk), [request("a", prompt, 2, prompt_logprobs=2)])["a"]
        rows = executor.alone(prompt).astype(np.float64)
        logs = rows - np.log(np.exp(rows).sum(axis=1, keepdims=True))
        assert answer.prompt_logprobs is not None and len(answer.prompt_logprobs) == len(prompt)
        assert answer.prompt_logprobs[0] is None
        for i, value in enumerate(answer.prompt_logprobs[1:]):
            assert value.token == prompt[i + 1]  # type: ignore[attr-defined]
            assert value.logprob == pytest.approx(logs[i, prompt[i + 1]], abs=1e-5)  # type: ignore[attr-defined]
            assert value.top[0][0] == int(rows[i].argmax())  # type: ignore[attr-defined]
    only = drive(engine(TinyExecutor()), [request("a", prompt, 0, prompt_logprobs=0)])["a"]
    assert only.prompt_logprobs is not None and only.tokens == []


@pytest.mark.parametrize("at", range(12))
def test_cancelled_at_every_stage(at: int) -> None:
    executor = TinyExecutor(slots=1)
    asked = [request("a", range(3, 50), 20, ignore_eos=True), request("b", range(3, 30), 5)]
    answers = drive(engine(executor, chunk_tokens=10), asked, cancels={"a": at})
    assert answers["a"].finish is Finish.CANCELLED
    assert answers["b"].tokens == expected(executor, asked[1].prompt, 5)


def test_deadline() -> None:
    answers = drive(engine(TinyExecutor(slots=1)), [request("a", [3], 100, deadline=7.0, ignore_eos=True)])
    assert answers["a"].finish is Finish.DEADLINE
    assert 0 < len(answers["a"].tokens) <= 7


def test_five_hundred_wait_their_turn_and_the_queue_is_bounded() -> None:
    executor = TinyExecutor(slots=8)
    running = engine(executor, max_waiting=500)
    asked = [request(f"r{i}", [3 + i % 60, 4], 3, ignore_eos=True) for i in range(500)]
    for r in asked:
        running.add(r)
    with pytest.raises(OverloadedError, match="500"):
        running.add(request("more", [3]))
    ended = 0
    while running.has_work:
        ended += sum(event.done for event in running.step())
    assert ended == 500
    running.check_idle()


def test_a_failing_step_ends_its_requests_and_nothing_else() -> None:
    executor = TinyExecutor(slots=2, fails=[1])
    running = engine(executor)
    answers = drive(running, [request("a", [3, 4], 9, ignore_eos=True), request("b", [5], 3)], [0, 2])
    assert answers["a"].finish is Finish.ERROR and "on purpose" in answers["a"].error
    assert answers["b"].tokens == expected(executor, [5], 3)


def test_ids_are_unique_and_bad_sampling_is_named() -> None:
    running = engine()
    running.add(request("a", [3], 5))
    with pytest.raises(InputError, match="`a`"):
        running.add(request("a", [3], 5))
    with pytest.raises(InputError, match="temperature"):
        running.add(request("b", [3], 5, temperature=-1.0))


def test_text_is_never_broken() -> None:
    """Characters of several tokens arrive whole, and the pieces add up to the text."""
    running = Engine(TinyExecutor(), VOCABULARY)
    text = "a€é b€"
    running.add(request("a", [3], 60, grammar=Grammar("choice", json.dumps([text]))))
    pieces = []
    while running.has_work:
        pieces += [event.text for event in running.step()]
    assert "".join(pieces) == text
    assert "\N{REPLACEMENT CHARACTER}" not in "".join(pieces)
    assert "€" in "".join(pieces) and len(pieces) > 2


def test_what_a_grammar_forces_is_not_computed_one_by_one() -> None:
    executor = TinyExecutor()
    grammar = Grammar("regex", "abc(def){3}[0-9]{2}xyz")
    answer = drive(engine(executor), [request("a", [3], 60, temperature=1.0, seed=1, grammar=grammar)])["a"]
    assert re.fullmatch(grammar.text, answer.text)
    assert answer.finish is Finish.STOP
    assert executor.steps < len(answer.tokens)
    slow = drive(
        engine(TinyExecutor()), [request("a", [3], 60, temperature=1.0, seed=1, grammar=grammar, speculate=False)]
    )
    assert slow["a"].tokens == answer.tokens


def test_a_grammar_without_a_way_on_ends_its_own_request() -> None:
    dead = Grammar("lark", 'start: "t" A\nA: /a+/ & /b+/')
    asked = [request("bad", [3], 9, grammar=dead), request("good", [5], 9, ignore_eos=True)]
    answers = drive(engine(TinyExecutor()), asked)
    assert answers["bad"].finish is Finish.ERROR and answers["bad"].error
    assert len(answers["good"].tokens) == 9


def test_a_failing_criterion_or_processor_ends_its_own_request() -> None:
    class Breaks:
        kind = "stop"

        def __call__(self, ids: object, prompt_length: int, text: str) -> bool:
            raise RuntimeError("no more")

    class Ends:
        kind = "stop"

        def __call__(self, ids: object, prompt_length: int, text: str) -> str:
            return "enough" if len(text) > 3 else ""

    processors.register("breaks", Breaks())
    processors.register("ends", Ends())
    try:
        executor = TinyExecutor()
        asked = [
            request("bad", [3], 9, processors=("breaks",), ignore_eos=True),
            request("ends", [4], 30, processors=("ends",), ignore_eos=True),
            request("good", [5], 9),
        ]
        answers = drive(engine(executor), asked)
    finally:
        processors.unregister("breaks")
        processors.unregister("ends")
    assert answers["bad"].finish is Finish.ERROR and "no more" in answers["bad"].error
    assert answers["ends"].finish is Finish.STOP and answers["ends"].sequences[0].stop == "enough"
    assert answers["good"].tokens == expected(executor, [5], 9)
