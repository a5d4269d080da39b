"""Speculation: look-up against brute force, a draft model's cache, unchanged texts and distributions, the pace."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from tests.engine.tiny import EOS, TinyExecutor, TinyVocabulary

from turnout.engine.executor import Row, Step
from turnout.engine.sampler import Sampler, SampleRow, SamplerState
from turnout.engine.speculative import (
    MOST_FAILURES,
    DraftProposer,
    NGramProposer,
    Proposer,
    check_vocabularies,
)
from turnout.engine.speculative_pace import FIRST_REST, LONGEST_REST, Pace
from turnout.errors import InputError
from turnout.types import Sampling

# Look-up


def searched(ids: Sequence[int], count: int, max_n: int, min_n: int) -> list[int]:
    """Brute force: the longest suffix that occurs earlier, its last occurrence, read on over the proposal."""
    for n in range(max_n, min_n - 1, -1):
        for end in range(len(ids) - 1, n - 1, -1):
            if n <= len(ids) and list(ids[end - n : end]) == list(ids[len(ids) - n :]):
                whole = list(ids)
                for i in range(count):
                    whole.append(whole[end + i])
                return whole[len(ids) :]
    return []


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=12), min_size=1, max_size=8),
    st.integers(1, 4),
    st.integers(0, 3),
    st.integers(0, 6),
)
def test_look_up_is_the_brute_force_search(parts: list[list[int]], min_n: int, more: int, count: int) -> None:
    proposer = NGramProposer(max_n=min_n + more, min_n=min_n, adaptive=False)
    ids: list[int] = []
    for part in parts:
        ids += part
        assert proposer.propose("a", ids, count) == searched(ids, count, min_n + more, min_n)
    assert proposer.propose("b", ids, count) == searched(ids, count, min_n + more, min_n)


def test_look_up_notices_another_text_under_a_known_id() -> None:
    proposer = NGramProposer(adaptive=False)
    assert proposer.propose("a", [1, 2, 3, 4, 1, 2], 2) == [3, 4]
    other = [5, 6, 7, 8, 9, 9, 9, 5, 6]
    assert proposer.propose("a", other, 2) == [7, 8]
    proposer.forget("a")
    proposer.forget("never seen")
    proposer.close()
    assert proposer.propose("a", [1, 2], 2) == []
    with pytest.raises(InputError):
        NGramProposer(max_n=1, min_n=2)


class Counting(Sequence[int]):
    """A text that counts the tokens read from it."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.read = ids, 0

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, at: Any) -> Any:
        part = self.ids[at]
        self.read += len(part) if isinstance(part, list) else 1
        return part


@pytest.mark.parametrize("length", [100, 10_000])
def test_look_up_costs_the_new_tokens(length: int) -> None:
    random = np.random.default_rng(1)
    ids = Counting([int(t) for t in random.integers(0, 50, length)])
    proposer = NGramProposer(adaptive=False)
    proposer.propose("a", ids, 5)
    for _ in range(20):
        ids.ids.append(int(random.integers(0, 50)))
        ids.read = 0
        proposer.propose("a", ids, 5)
        assert ids.read < 60


# A draft model's cache


def follow(
    executor: TinyExecutor, lengths: Sequence[int], steps: int, count: int, seed: int = 0, proposer: Any = None
) -> int:
    """Drives requests whose texts grow by some of the drafts and another token; returns the drafts compared
    with what the model writes without a cache."""
    random = np.random.default_rng(seed)
    proposer = proposer or DraftProposer(executor, TinyVocabulary(), adaptive=False)
    texts = {f"r{i}": [int(t) for t in random.integers(3, 64, n)] for i, n in enumerate(lengths)}
    compared = 0
    for _ in range(steps):
        called = [id for id in texts if random.random() < 0.8]
        answers = proposer.propose_many([(id, texts[id], count, None) for id in called])
        for id, drafts in zip(called, answers, strict=True):
            if drafts:
                assert drafts == executor.greedy(texts[id], len(drafts))
                assert len(drafts) == count or drafts[-1] == EOS or len(texts[id]) + count > 250
                compared += 1
            texts[id] += [*drafts[: int(random.integers(0, count + 1))], int(random.integers(3, 64))]
        if random.random() < 0.1:
            id = str(random.choice(list(texts)))
            proposer.forget(id)
            texts[id] = texts[id][:5]
    assert executor.broken == [] and proposer.error == ""
    for id in texts:
        proposer.forget(id)
    assert executor.idle()
    return compared


@pytest.mark.parametrize(
    "options",
    [
        {"slots": 3},
        {"slots": 3, "snapshot": 8},
        {"slots": 3, "step_tokens": 7},
        {"slots": 2, "cache_tokens": 96},
        {"slots": 8, "cache_tokens": 64, "block_size": 16},
        {"slots": 3, "context": 60},
        {"slots": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("count", [1, 4])
def test_drafts_are_what_the_model_writes_without_a_cache(options: dict[str, Any], count: int) -> None:
    assert follow(TinyExecutor(ends=-3.0, **options), [1, 5, 40], steps=30, count=count) > 15


def test_one_forward_pass_serves_all_requests() -> None:
    executor = TinyExecutor(slots=4, ends=-30.0)
    proposer = DraftProposer(executor, adaptive=False)
    proposer.propose_many([(str(i), [5 + i, 6, 7], 3, None) for i in range(4)])
    assert executor.rows == [4, 4, 4]
    assert proposer.propose("9", [1] * 300, 3) == [] and executor.steps == 3  # longer than its context


def test_a_long_prompt_is_caught_up_over_several_calls() -> None:
    executor = TinyExecutor(slots=2, step_tokens=16, ends=-30.0)
    proposer = DraftProposer(executor, adaptive=False)
    long, short = [5] * 40, [6, 7]
    lengths = []
    for _ in range(4):
        lengths.append([len(d) for d in proposer.propose_many([("long", long, 2, None), ("short", short, 2, None)])])
        short = [*short, 8]
    assert lengths == [[0, 2], [0, 2], [2, 2], [2, 2]] and executor.broken == []


def test_a_failing_draft_model_costs_drafts_only() -> None:
    executor = TinyExecutor(fails=[1])
    proposer = DraftProposer(executor, adaptive=False)
    assert proposer.propose("a", [5, 6], 3) == [] and "fails on purpose" in proposer.error and executor.idle()
    assert proposer.propose("a", [5, 6], 3) == executor.greedy([5, 6], 3)
    broken = TinyExecutor(fails=range(9))
    proposer = DraftProposer(broken, adaptive=False)
    for _ in range(9):
        assert proposer.propose("a", [5, 6], 3) == []
    assert broken.steps == MOST_FAILURES
    proposer.close()
    proposer.close()
    assert broken.closed and proposer.propose("a", [5, 6], 3) == []


def test_tokens_that_the_draft_model_lacks_are_not_computed() -> None:
    executor = TinyExecutor()
    proposer = DraftProposer(executor, adaptive=False)
    answers = proposer.propose_many([("image", [5, 90, 6], 2, None), ("text", [5, 6], 2, None)])
    assert answers == [[], executor.greedy([5, 6], 2)] and executor.broken == []


# What is accepted, and that nothing else changes


def speak(
    target: TinyExecutor, prompt: list[int], sampling: Sampling, seed: int, length: int, proposer: Proposer | None
) -> tuple[list[int], int]:
    """A text by the rule of the module: draw at each position, accept drafts that equal the draws.
    Returns its tokens and how many drafts were accepted."""
    state, sampler = SamplerState(sampling, seed, prompt, 64), Sampler(64)
    ids, accepted = list(prompt), 0
    while len(ids) < len(prompt) + length:
        room = len(prompt) + length - len(ids) - 1
        drafts = proposer.propose("x", ids, min(4, room), state) if proposer and room else []
        target.free(0)
        logits = target.execute(Step([Row(0, [*ids, *drafts], 0, 1 + len(drafts))]))
        rows = [SampleRow(state, tuple(drafts[:i])) for i in range(len(drafts) + 1)]
        for draw, draft in itertools.zip_longest(sampler.sample(logits, rows), drafts):
            ids.append(draw.token)
            state.append(draw.token)
            if draw.token != draft:
                break
            accepted += 1
    if proposer:
        proposer.forget("x")
    return ids[len(prompt) :], accepted


def proposers() -> dict[str, Proposer]:
    return {
        "ngram": NGramProposer(min_n=1),
        "coupled": DraftProposer(TinyExecutor(memory=0.3)),
        "greedy": DraftProposer(TinyExecutor(memory=0.3), coupled=False, adaptive=False),
        "unrelated": DraftProposer(TinyExecutor(seed=5), adaptive=False),
    }


SAMPLINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.9, top_k=20, presence_penalty=0.5),
    Sampling(temperature=1.0, min_p=0.05, repetition_penalty=1.2, min_tokens=5),
]


@pytest.mark.parametrize("name", ["ngram", "coupled", "greedy", "unrelated"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=range(len(SAMPLINGS)))
def test_a_seeded_text_is_the_same_with_speculation(name: str, sampling: Sampling) -> None:
    proposer, total = proposers()[name], 0
    target = TinyExecutor()
    for seed in range(4):
        prompt = [5 + seed, 6, 7, 5, 6, 7]
        plain, _ = speak(target, prompt, sampling, seed, 40, None)
        text, accepted = speak(target, prompt, sampling, seed, 40, proposer)
        assert text == plain
        total += accepted
    if name == "coupled" or (name == "greedy" and sampling.temperature == 0):
        assert total > 20


@pytest.mark.parametrize("name", ["ngram", "coupled", "greedy"])
def test_the_distribution_of_texts_is_the_models_own(name: str) -> None:
    """Texts of three tokens over many seeds, against products of softmax computed without engine (chi-square)."""
    target = TinyExecutor(sharpness=3.0, memory=0.3)
    proposer = NGramProposer(min_n=1, adaptive=False) if name == "ngram" else proposers()[name]
    prompt = [5]
    for _ in range(4):  # so that the look-up finds likely tokens
        prompt.append(int(target._bigram[prompt[-1]].argmax()))
    prompt += [6, 5]
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        longer = {}
        for text, chance in exact.items():
            weights = np.exp(target.alone([*prompt, *text])[-1].astype(np.float64))
            for token, share in enumerate(weights / weights.sum()):
                if chance * share > 1e-4:
                    longer[(*text, token)] = chance * share
        exact = longer
    counts, drafts, runs = Counter[tuple[int, ...]](), 0, 2500
    for seed in range(runs):
        text, accepted = speak(target, prompt, Sampling(temperature=1.0), seed, 3, proposer)
        counts[tuple(text)] += 1
        drafts += accepted
    assert drafts > 50
    common = [text for text, chance in exact.items() if chance * runs >= 5]
    seen = [counts[text] for text in common]
    want = [exact[text] * runs for text in common]
    test = stats.chisquare([*seen, runs - sum(seen)], [*want, runs - sum(want)])
    assert len(common) > 20 and test.pvalue > 0.001


def test_coupled_drafts_are_accepted_more_often_than_the_likeliest() -> None:
    shares = {}
    for coupled in (True, False):
        proposer = DraftProposer(TinyExecutor(memory=0.2), coupled=coupled, adaptive=False)
        target = TinyExecutor(memory=0.4)
        runs = [speak(target, [5, 6], Sampling(temperature=1.0), seed, 30, proposer) for seed in range(20)]
        shares[coupled] = sum(accepted for _, accepted in runs)
    assert shares[True] > 1.1 * shares[False]


# The pace


def rate_after(pace: Pace, fits: Sequence[bool]) -> list[int]:
    """Lengths proposed while the given drafts turn out right or wrong."""
    ids, lengths, outcomes = [0], [], iter(fits)
    while True:
        count = pace.length("a", ids, 8)
        lengths.append(count)
        pace.proposed("a", ids, [1] * count)
        for _ in range(count):
            fit = next(outcomes, None)
            if fit is None:
                return lengths
            if not fit:
                break
            ids.append(1)
        ids.append(2)
        if len(lengths) > 2000:
            return lengths


def test_the_pace_rises_when_drafts_are_right_and_rests_when_they_are_wrong() -> None:
    assert rate_after(Pace(), [True] * 100)[-3:] == [8, 8, 8]
    wrong = rate_after(Pace(), [False] * 40)
    assert wrong[0] >= 2 and sum(1 for n in wrong if n) < 0.03 * len(wrong)
    probes = [i for i, n in enumerate(wrong) if n][-4:]
    assert [b - a for a, b in itertools.pairwise(probes)] == [LONGEST_REST + 1] * 3
    woken = rate_after(Pace(), [False] * 14 + [True] * 50)
    assert woken[-1] == 8 and FIRST_REST < woken.count(0) < 4 * LONGEST_REST


@pytest.mark.parametrize("rate", [0.05, 0.3, 0.6, 0.9])
@pytest.mark.parametrize(("verify", "draft", "batch"), [(0.08, 0.0, 1), (0.08, 0.2, 1), (0.08, 0.0, 32), (1.0, 0.5, 1)])
def test_the_pace_takes_the_length_that_pays_most(rate: float, verify: float, draft: float, batch: int) -> None:
    """Against the mean tokens per time of every length, each draft drawn by chance (a million steps)."""
    runs = np.random.default_rng(2).random((100_000, 8)) < rate
    accepted = np.cumprod(runs, axis=1).cumsum(axis=1).mean(axis=0)
    base = 1 + (batch - 1) * verify
    cost = [(1 + (batch * (1 + k) - 1) * verify) / base + k * draft for k in range(9)]
    speed = [1.0, *((1 + accepted[k - 1]) / cost[k] for k in range(1, 9))]
    chosen = Pace(verify=verify, draft=draft)._best(rate, 8, batch)
    assert speed[chosen] > max(speed) - 0.01


def test_drafts_that_the_engine_cut_are_no_refusals() -> None:
    pace = Pace()
    for n in range(20):
        ids = [1] * (1 + n)
        pace.length("a", ids, 8)
        pace.proposed("a", ids, [1] * 8)  # the text grew by one of them
    assert pace.length("a", [1] * 21, 8) == 8
    pace.forget("a")
    pace.forget("a")


# Vocabularies


class Other(TinyVocabulary):
    """The tiny vocabulary with one token spelt otherwise, or tokens behind its end."""

    def __init__(self, token: int = -1, spelled: bytes = b"", more: int = 0) -> None:
        self.token, self.spelled, self.size = token, spelled, 64 + more

    def token_bytes(self, token: int) -> bytes:
        if token == self.token:
            return self.spelled
        return super().token_bytes(token) if token < 64 else b""

    def is_special(self, token: int) -> bool:
        return super().is_special(token)


def test_another_vocabulary_is_refused_by_name() -> None:
    check_vocabularies(TinyVocabulary(), TinyVocabulary())
    check_vocabularies(Other(more=8), TinyVocabulary())  # padding
    check_vocabularies(TinyVocabulary(), Other(more=8))
    executor = TinyExecutor()
    with pytest.raises(InputError, match="token 5 is b'zz' and b'c'") as raised:
        DraftProposer(executor, Other(5, b"zz"), TinyVocabulary())
    assert raised.value.code == "tokenizer.mismatch" and executor.closed
    with pytest.raises(InputError, match=r"token 66, b'q', exists in the draft only"):
        check_vocabularies(Other(66, b"q", more=8), TinyVocabulary())
    ends = Other()
    ends.eos_ids = frozenset({1, 2})
    with pytest.raises(InputError, match=r"end tokens are \[1, 2\] and \[1\]"):
        check_vocabularies(ends, TinyVocabulary())
    with pytest.raises(InputError, match="cannot go back"):
        DraftProposer(TinyExecutor(rolls_back=False))
    with pytest.raises(InputError, match="needs an encoder"):
        DraftProposer(TinyExecutor(encoder_decoder=True))
