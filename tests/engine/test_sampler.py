"""The sampler against independent references: Transformers' processors, and formulas written out in numpy."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from turnout.engine.penalties import breakers_of
from turnout.engine.sampler import Drawn, Sampler, SampleRow, SamplerState
from turnout.engine.sampler_rank import SMALL, Ranked, descending
from turnout.errors import NotSupportedError
from turnout.types import Sampling

SIZES = (50, 3 * SMALL + 17)  # one that is sorted whole, one that has a head and a tail
Row = NDArray[np.float32]


def row(seed: int, size: int, spread: float = 3.0) -> Row:
    return np.random.default_rng(seed).normal(0, spread, size).astype(np.float32)


def state(sampling: Sampling, prompt: Iterable[int] = (), *, seed: int = 1, size: int, **more: object) -> SamplerState:
    return SamplerState(sampling, seed, list(prompt), size, **more)  # type: ignore[arg-type]


def log_softmax(x: NDArray[np.floating]) -> NDArray[np.float64]:
    wide = x.astype(np.float64)
    return wide - (wide.max() + np.log(np.exp(wide - wide.max()).sum()))


def hugging_face(x: Row, ids: list[int], *chain: object) -> NDArray[np.float64]:
    scores = torch.from_numpy(x.astype(np.float64))[None]  # so that rounding is not theirs
    for processor in chain:
        scores = processor(torch.tensor([ids], dtype=torch.long), scores)  # type: ignore[operator]
    return log_softmax(scores[0].numpy())


WARPERS = [
    ({"temperature": 0.7}, [transformers.TemperatureLogitsWarper(0.7)]),
    ({"temperature": 1.0, "top_k": 7}, [transformers.TopKLogitsWarper(7)]),
    (
        {"temperature": 1.3, "top_p": 0.8},
        [transformers.TemperatureLogitsWarper(1.3), transformers.TopPLogitsWarper(0.8)],
    ),
    ({"temperature": 1.0, "min_p": 0.05}, [transformers.MinPLogitsWarper(0.05)]),
    ({"temperature": 1.0, "typical_p": 0.6}, [transformers.TypicalLogitsWarper(0.6)]),
    (
        {"temperature": 1.5, "top_k": 40, "top_p": 0.95, "min_p": 0.02, "typical_p": 0.9},
        [
            transformers.TemperatureLogitsWarper(1.5),
            transformers.TopKLogitsWarper(40),
            transformers.TopPLogitsWarper(0.95),
            transformers.MinPLogitsWarper(0.02),
            transformers.TypicalLogitsWarper(0.9),
        ],
    ),
    (
        {"temperature": 1.0, "top_p": 0.9, "typical_p": 0.5},
        [transformers.TopPLogitsWarper(0.9), transformers.TypicalLogitsWarper(0.5)],
    ),
    (
        {"temperature": 1.0, "top_p": 0.97, "min_p": 0.01},
        [transformers.TopPLogitsWarper(0.97), transformers.MinPLogitsWarper(0.01)],
    ),
]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("spread", [0.05, 1.0, 4.0])
@pytest.mark.parametrize(("fields", "chain"), WARPERS, ids=[" ".join(f) for f, _ in WARPERS])
def test_filters_keep_what_those_of_transformers_keep(
    fields: dict[str, float], chain: list[object], spread: float, size: int
) -> None:
    x = row(3, size, spread)
    theirs = hugging_face(x, [0], *chain)
    kept = np.flatnonzero(np.isfinite(theirs))
    ours = draw_set(x, Sampling(**fields))  # type: ignore[arg-type]
    differing = np.setxor1d(ours.spread_ids, kept)
    assert len(differing) <= (len(kept) > 1000), differing  # one on the border, by float32's rounding
    both, mine, _ = np.intersect1d(ours.spread_ids, kept, return_indices=True)
    np.testing.assert_allclose(ours.logs[mine], theirs[both], atol=3e-4 if len(differing) else 3e-5)


class draw_set:
    """What survives the filters of one row, through the public class that the sampler uses."""

    def __init__(self, x: Row, sampling: Sampling) -> None:
        run = Sampler(len(x))._filtered(x, None, SampleRow(state(sampling, size=len(x))))
        spread = run.spread()
        self.spread_ids = np.flatnonzero(np.isfinite(spread))
        self.logs = log_softmax(spread[self.spread_ids])


def penalised(sampling: Sampling, x: Row, prompt: list[int], output: list[int], extra: tuple[int, ...] = ()) -> Row:
    """The row as the grammar and temperature find it."""
    mine = state(sampling, prompt, size=len(x), eos_ids=frozenset({1}))
    for token in output:
        mine.append(token)
    return np.array(Sampler(len(x))._processed(x, SampleRow(mine, extra)))


# Bias and penalties


@pytest.mark.parametrize("size", SIZES)
def test_repetition_penalty_is_that_of_transformers(size: int) -> None:
    x = row(5, size)
    prompt, output = [3, 9, 9, 14], [2, 3, 30]
    theirs = hugging_face(x, prompt + output, transformers.RepetitionPenaltyLogitsProcessor(1.7))
    ours = penalised(Sampling(repetition_penalty=1.7), x, prompt, output)
    np.testing.assert_allclose(log_softmax(ours), theirs, atol=2e-5)


@given(
    output=st.lists(st.integers(0, 9), max_size=12),
    extra=st.lists(st.integers(0, 9), max_size=4),
    presence=st.sampled_from([0.0, 0.5, -1.5]),
    frequency=st.sampled_from([0.0, 0.3, -2.0]),
)
def test_presence_and_frequency_count_the_output(
    output: list[int], extra: list[int], presence: float, frequency: float
) -> None:
    x = row(7, 10)
    ours = penalised(
        Sampling(presence_penalty=presence, frequency_penalty=frequency), x, [4, 4, 5], output, tuple(extra)
    )
    counts = np.bincount(np.array(output + extra, int), minlength=10)
    np.testing.assert_allclose(ours, x - frequency * counts - presence * (counts > 0), atol=1e-5)


def test_bias_comes_before_the_penalties_and_adds_up() -> None:
    x = np.array([2.0, 1.0, -1.0, 0.5], np.float32)
    sampling = Sampling(
        logit_bias=((0, -5.0), (2, 1.0), (2, 2.0)), repetition_penalty=2.0, presence_penalty=0.25, frequency_penalty=0.5
    )
    ours = penalised(sampling, x, [0], [2, 2])
    # 2 - 5 = -3, negative, times 2; -1 + 3 = 2, positive, halved, less 2 * 0.5 and 0.25
    np.testing.assert_allclose(ours, [-6.0, 1.0, 1.0 - 1.25, 0.5])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_of_100_forces_and_of_minus_100_forbids(temperature: float) -> None:
    x = row(1, 50)
    best = int(x.argmax())
    for seed in range(20):
        forced = draw(x, Sampling(temperature=temperature, logit_bias=((7, 100.0),)), seed=seed)
        forbidden = draw(x, Sampling(temperature=temperature, logit_bias=((best, -100.0),)), seed=seed)
        assert forced.token == 7
        assert forbidden.token != best


def test_ids_outside_the_vocabulary_count_for_nothing() -> None:
    x = row(1, 20)
    sampling = Sampling(repetition_penalty=1.5, frequency_penalty=1.0, dry_multiplier=1.0, dry_allowed_length=1)
    ours = penalised(sampling, x, [500, -1, 500], [])
    np.testing.assert_array_equal(ours, x)


def test_min_tokens_masks_the_ends_as_transformers_does() -> None:
    x = row(2, 30)
    prompt = [5, 6, 7]
    for output in ([], [3], [3, 4], [3, 4, 8]):
        theirs = hugging_face(
            x, prompt + output, transformers.MinNewTokensLengthLogitsProcessor(3, 2, [1, 9], device="cpu")
        )
        ours = penalised(Sampling(min_tokens=2, stop_token_ids=(9,)), x, prompt, output)
        np.testing.assert_allclose(log_softmax(ours), theirs, atol=2e-5)
    drafted = penalised(Sampling(min_tokens=2), x, prompt, [3], extra=(4,))
    np.testing.assert_array_equal(drafted, x)
    unended = penalised(Sampling(min_tokens=2, ignore_eos=True, stop_token_ids=(9,)), x, prompt, [])
    assert np.flatnonzero(np.isinf(unended)).tolist() == [9]


def dry_by_hand(sampling: Sampling, tokens: list[int], breakers: list[tuple[int, ...]], size: int) -> Row:
    """DRY from its description, every length and place tried: [size] what is taken."""
    since = len(tokens)
    for end in range(1, len(tokens) + 1):
        if any(len(b) <= end and tuple(tokens[end - len(b) : end]) == b for b in breakers):
            since = len(tokens) - end
    longest = np.full(size, -1)
    for end in range(len(tokens) - 1):  # a repeat that ends at `end` and would go on with tokens[end + 1]
        for length in range(end + 2):
            if tokens[end + 1 - length : end + 1] == tokens[len(tokens) - length :] and length <= since:
                longest[tokens[end + 1]] = max(longest[tokens[end + 1]], length)
    taken = np.zeros(size, np.float32)
    if since >= sampling.dry_allowed_length:
        for token in np.flatnonzero(longest >= sampling.dry_allowed_length):
            if (token,) not in breakers:
                taken[token] = sampling.dry_multiplier * sampling.dry_base ** (
                    longest[token] - sampling.dry_allowed_length
                )
    return taken


@settings(deadline=None, max_examples=200)
@given(
    prompt=st.lists(st.integers(0, 3), max_size=12),
    output=st.lists(st.integers(0, 3), max_size=8),
    extra=st.lists(st.integers(0, 3), max_size=3),
    breakers=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=3).map(tuple), max_size=2),
    allowed=st.integers(0, 3),
    base=st.sampled_from([1.0, 1.75]),
)
def test_dry_is_its_description(
    prompt: list[int], output: list[int], extra: list[int], breakers: list[tuple[int, ...]], allowed: int, base: float
) -> None:
    x = np.zeros(5, np.float32)
    sampling = Sampling(dry_multiplier=0.8, dry_base=base, dry_allowed_length=allowed)
    mine = state(sampling, prompt, size=5, breakers=breakers)
    for token in output:
        mine.append(token)
    ours = Sampler(5)._processed(x, SampleRow(mine, tuple(extra)))
    np.testing.assert_allclose(-ours, dry_by_hand(sampling, prompt + output + extra, breakers, 5), rtol=1e-5)


def test_dry_of_a_long_repeat_is_finite_and_of_koboldcpp_s_example_as_written() -> None:
    endless = penalised(Sampling(dry_multiplier=1.0), np.zeros(3, np.float32), [2] * 3000, [])
    assert np.isfinite(endless).all() and endless[2] < -1e37
    # a b c c b c y a b c: c prolongs a run of 3, b one of 1, y one of 2
    a, b, c, y = range(4)
    taken = -penalised(
        Sampling(dry_multiplier=1.0, dry_base=2.0, dry_allowed_length=1),
        np.zeros(4, np.float32),
        [a, b, c, c, b, c, y, a, b, c],
        [],
    )
    np.testing.assert_allclose(taken, [0, 1.0, 4.0, 2.0])


class Letters:
    """A vocabulary of a few texts."""

    eos_ids: frozenset[int] = frozenset()
    bos_id = None

    def __init__(self, *texts: str) -> None:
        self.texts = texts
        self.size = len(texts)

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [self.texts.index(letter) for letter in text]

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        return "".join(self.texts[i] for i in ids)

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token].encode()

    def is_special(self, token: int) -> bool:
        return False


def test_breakers_are_found_inside_and_across_tokens() -> None:
    vocabulary = Letters("a", "b", "c", "xa", "abc!", "é", "-ab")
    assert breakers_of(["abc"], vocabulary) == ((0, 1, 2), (3, 1, 2), (4,), (6, 2))
    assert breakers_of(["é", ""], vocabulary) == ((5,),)


# XTC


def test_xtc_leaves_the_least_probable_of_the_most_probable() -> None:
    p = np.array([0.4, 0.3, 0.15, 0.1, 0.05])
    x = np.log(p).astype(np.float32)
    for threshold, gone in ((0.35, 0), (0.2, 1), (0.099, 3), (0.0, 4), (0.6, 0)):
        ours = draw_set(x, Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=threshold))
        assert ours.spread_ids.tolist() == list(range(gone, 5)), threshold
    after_top_p = draw_set(x, Sampling(temperature=1.0, top_p=0.8, xtc_probability=1.0, xtc_threshold=0.2))
    assert after_top_p.spread_ids.tolist() == [1, 2]  # of 0.47, 0.35 and 0.18 only the first has more


@pytest.mark.parametrize("spread", [0.3, 3.0])
def test_xtc_on_a_long_row(spread: float) -> None:
    x = row(4, SIZES[1], spread)
    p = np.exp(log_softmax(x))
    threshold = float(np.sort(p)[-6]) * 0.999
    ours = draw_set(x, Sampling(temperature=1.0, xtc_probability=1.0, xtc_threshold=threshold))
    gone = np.setdiff1d(np.arange(len(x)), ours.spread_ids)
    assert sorted(gone.tolist()) == sorted(np.argsort(-p)[:5].tolist())


def test_logprobs_of_a_long_run_without_its_top() -> None:
    x = row(4, SIZES[1], 0.5)
    p = np.exp(log_softmax(x))
    order = np.lexsort((np.arange(len(x)), -x))
    threshold = float(p[order[40]]) * 0.9999
    sampling = Sampling(
        temperature=1.0, xtc_probability=1.0, xtc_threshold=threshold, logprobs=1000, logprobs_after=True
    )
    got = draw(x, sampling).logprob
    assert got is not None and [t for t, _ in got.top] == order[40:1040].tolist()
    left = p[order[40:]].sum()
    np.testing.assert_allclose([v for _, v in got.top], np.log(p[order[40:1040]] / left), atol=1e-5)
    assert got.logprob == pytest.approx(math.log(p[got.token] / left), abs=1e-4)


def test_xtc_s_coin_falls_as_often_as_it_says_and_not_with_the_draw() -> None:
    mine = state(Sampling(), seed=11, size=5)
    coins = np.array([mine.uniform(i, 1) for i in range(4000)])
    draws = np.array([mine.uniform(i) for i in range(4000)])
    assert abs((coins < 0.3).mean() - 0.3) < 0.03
    assert abs(np.corrcoef(coins, draws)[0, 1]) < 0.05


# The draw


def draw(x: Row, sampling: Sampling, *, seed: int = 1, at: int = 0) -> Drawn:
    mine = state(sampling, seed=seed, size=len(x))
    for _ in range(at):
        mine.append(0)
    return Sampler(len(x)).sample(x[None], [SampleRow(mine)])[0]


def test_greedy_takes_the_first_of_the_most_likely() -> None:
    x = np.stack([row(i, 40) for i in range(5)])
    x[3, 7] = x[3, 9] = 50.0
    rows = [SampleRow(state(Sampling(), size=30)) for _ in range(5)]
    sampler = Sampler(30)  # ten columns of padding
    expected = [int(np.argmax(r[:30])) for r in x]
    assert [d.token for d in sampler.sample(x, rows)] == expected
    assert expected[3] == 7
    x[:, 35] = 1e6
    rows[1] = SampleRow(state(Sampling(temperature=1e-9), size=30))
    rows[2] = SampleRow(state(Sampling(temperature=0.0, top_p=0.1, logit_bias=((3, 0.0),)), size=30))
    assert [d.token for d in sampler.sample(x, rows)] == expected
    assert [d.token for d in sampler.sample(x[:1], rows[:1])] == expected[:1]
    assert sampler.sample(x[:0], []) == []


def test_the_uniform_numbers_are_philox_of_seed_and_position() -> None:
    for seed in (0, 7, 2**63, -1):
        mine = state(Sampling(), seed=seed, size=5)
        for position, stream in ((0, 0), (5, 0), (5, 1), (2, 0)):
            reference = np.random.Generator(np.random.Philox(key=seed % 2**64, counter=[position, stream, 0, 0]))
            assert mine.uniform(position, stream) == reference.random()


@pytest.mark.parametrize("spread", [0.0, 0.05, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.3])
@pytest.mark.parametrize("size", SIZES)
def test_the_token_is_where_the_uniform_number_falls_in_the_sorted_distribution(
    size: int, top_p: float, spread: float
) -> None:
    x = row(6, size, spread) if spread else np.zeros(size, np.float32)
    x[::5] = -np.inf
    p = np.exp(log_softmax(x))
    order = np.lexsort((np.arange(size), -x))
    cum = np.cumsum(p[order])
    kept = int(np.searchsorted(cum, top_p * (1 - 1e-9))) + 1 if top_p < 1 else size
    missed = 0
    for seed in range(60):
        u = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, 0])).random()
        expected = order[np.searchsorted(cum[:kept], u * cum[kept - 1] if kept < size else u, side="right")]
        got = draw(x, Sampling(temperature=1.0, top_p=top_p), seed=seed).token
        near = abs(np.flatnonzero(order == got)[0] - np.flatnonzero(order == expected)[0])
        assert near <= 1
        missed += near != 0
    assert missed <= (0 if size < 100 else 2)  # float32 weights of 12,000 nearly equal tokens


def chi_square(counts: NDArray[np.int64], p: NDArray[np.float64]) -> float:
    """Probability of counts at least as odd; rare tokens are put together."""
    expected = p * counts.sum()
    rare = expected < 8
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(expected[~rare], expected[rare].sum())
    keep = wanted > 0
    return float(stats.chisquare(observed[keep], wanted[keep] * observed[keep].sum() / wanted[keep].sum()).pvalue)


@pytest.mark.parametrize("by", ["seed", "position"])
def test_draws_have_the_distribution_over_seeds_and_over_positions(by: str) -> None:
    x = row(8, 40, 1.5)
    chain = [transformers.TemperatureLogitsWarper(0.8), transformers.TopPLogitsWarper(0.95)]
    p = np.exp(hugging_face(x, [0], *chain))
    sampling = Sampling(temperature=0.8, top_p=0.95)
    sampler, counts = Sampler(40), np.zeros(40, np.int64)
    mine = state(sampling, seed=3, size=40)
    for i in range(6000):
        if by == "seed":
            mine = state(sampling, seed=i, size=40)
        drawn = sampler.sample(x[None], [SampleRow(mine)])[0]
        counts[drawn.token] += 1
        mine.append(drawn.token)
    assert counts[p == 0].sum() == 0
    assert chi_square(counts, p) > 1e-3


def test_draws_from_a_long_flat_row_have_the_distribution() -> None:
    x = row(9, SIZES[1], 0.7)
    p = np.exp(log_softmax(x))
    run = Ranked(x)
    mine = state(Sampling(), seed=5, size=len(x))
    counts = np.bincount([run.draw(mine.uniform(i))[0] for i in range(20000)], minlength=len(x))
    strips = np.argsort(-p).reshape(-1, 5 * 23)  # 107 strips of equal probability within
    assert chi_square(counts[strips].sum(axis=1), p[strips].sum(axis=1)) > 1e-3


# A seed's text depends on nothing but its own logits

KINDS = (
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.9),
    Sampling(temperature=1.2, top_k=5, repetition_penalty=1.3),
    Sampling(temperature=1.0, min_p=0.1, presence_penalty=1.0, logprobs=2),
    Sampling(temperature=1.0, typical_p=0.7, frequency_penalty=0.4),
    Sampling(temperature=1.0, xtc_probability=0.5, xtc_threshold=0.05, logprobs=3, logprobs_after=True),
    Sampling(temperature=0.9, top_p=0.8, dry_multiplier=0.8, dry_allowed_length=1, min_tokens=3),
)


def some_row(number: int, size: int) -> tuple[Row, SampleRow]:
    rng = np.random.default_rng(number)
    mine = state(KINDS[number % len(KINDS)], rng.integers(0, size, 6).tolist(), seed=number, size=size)
    for token in rng.integers(0, 8, number % 5).tolist():
        mine.append(token)
    extra = tuple(rng.integers(0, 8, number % 3).tolist())
    mask = None
    if number % 4 == 1:
        mask = rng.integers(0, 2**32, (size + 31) // 32, dtype=np.uint64).astype(np.uint32)
    return row(number + 100, size, 0.5 + number % 3), SampleRow(mine, extra, mask)


@settings(deadline=None, max_examples=60)
@given(numbers=st.lists(st.integers(0, 60), min_size=1, max_size=6), large=st.booleans())
def test_a_draw_does_not_depend_on_the_batch_around_it(numbers: list[int], large: bool) -> None:
    size = SIZES[1] if large else SIZES[0]
    pairs = [some_row(n, size) for n in numbers]
    logits = np.stack([x for x, _ in pairs])
    before = logits.copy()
    together = Sampler(size).sample(logits, [r for _, r in pairs])
    np.testing.assert_array_equal(logits, before)  # and the logits are left as they were
    for (x, one), drawn in zip(pairs, together, strict=True):
        assert Sampler(size).sample(x[None], [one]) == [drawn]


@pytest.mark.parametrize("kind", range(len(KINDS)))
def test_a_draft_s_row_is_the_row_after_its_tokens(kind: int) -> None:
    x = row(kind, 50, 1.0)
    drafted, grown = (state(KINDS[kind], [1, 2, 3], seed=9, size=50) for _ in range(2))
    for token in (4, 2, 3):
        drafted.append(token)
        grown.append(token)
    for token in (5, 5, 2):
        grown.append(token)
    sampler = Sampler(50)
    assert sampler.sample(x[None], [SampleRow(drafted, (5, 5, 2))]) == sampler.sample(x[None], [SampleRow(grown)])
    assert drafted.output == [4, 2, 3]


@pytest.mark.parametrize("number", range(40))
def test_torch_gives_what_numpy_gives(number: int) -> None:
    size = SIZES[number % 2]
    x, one = some_row(number, size)
    tensor = torch.from_numpy(np.stack([x, x]))
    (ours,) = Sampler(size).sample(x[None], [one])
    for on_host in (True, False):
        got = Sampler(size, on_host=on_host).sample(tensor, [one, one])
        assert [d.token for d in got] == [ours.token] * 2
        if ours.logprob is not None and got[0].logprob is not None:
            assert got[0].logprob.logprob == pytest.approx(ours.logprob.logprob, abs=1e-5)
            assert [t for t, _ in got[0].logprob.top] == [t for t, _ in ours.logprob.top]
    assert torch.equal(tensor[0], torch.from_numpy(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats_are_read_as_float32(dtype: torch.dtype) -> None:
    tensor = torch.from_numpy(row(1, 60)[None]).to(dtype)
    for sampling in KINDS:
        want = Sampler(60).sample(tensor.float().numpy(), [SampleRow(state(sampling, size=60))])
        for on_host in (True, False):
            got = Sampler(60, on_host=on_host).sample(tensor, [SampleRow(state(sampling, size=60))])
            assert got[0].token == want[0].token


# Sorting


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=40))
def test_descending_is_a_stable_sort(values: list[float]) -> None:
    array = np.array(values, np.float32)
    assert descending(array).tolist() == sorted(range(len(values)), key=lambda i: (-values[i], i))


def test_top_k_is_exact_among_equals_and_may_exceed_the_vocabulary() -> None:
    x = np.zeros(SIZES[1], np.float32)
    assert draw_set(x, Sampling(temperature=1.0, top_k=3)).spread_ids.tolist() == [0, 1, 2]
    assert len(draw_set(x, Sampling(temperature=1.0, top_k=10**6)).spread_ids) == len(x)
    peaks = row(3, SIZES[1])
    for k in (1, 500, 5000):
        kept = draw_set(peaks, Sampling(temperature=1.0, top_k=k)).spread_ids
        assert sorted(kept.tolist()) == sorted(np.argsort(-peaks)[:k].tolist())


# Masks and bad rows


def packed(allowed: Iterable[int], size: int) -> NDArray[np.uint32]:
    words = np.zeros((size + 31) // 32, np.uint32)
    for token in allowed:
        words[token // 32] |= np.uint32(1) << np.uint32(token % 32)
    return words


@pytest.mark.parametrize("share", [0.001, 0.6])
@pytest.mark.parametrize("sampling", KINDS[:7], ids=str)
def test_a_mask_draws_from_the_distribution_restricted_to_it(sampling: Sampling, share: float) -> None:
    size = SIZES[1]
    x = row(12, size, 2.0)
    allowed = np.flatnonzero(np.random.default_rng(1).random(size) < share)
    restricted = np.full(size, -np.inf, np.float32)
    restricted[allowed] = x[allowed]
    for seed in range(8):
        sampling = replace(sampling, logprobs=None)
        masked = SampleRow(state(sampling, seed=seed, size=size), mask=packed(allowed, size))
        got = Sampler(size).sample(x[None], [masked])[0]
        assert got.token in allowed
        assert got == Sampler(size).sample(restricted[None], [SampleRow(state(sampling, seed=seed, size=size))])[0]


def test_a_mask_that_is_shorter_than_the_vocabulary_forbids_the_rest() -> None:
    x = np.arange(100, dtype=np.float32)
    got = Sampler(100).sample(x[None], [SampleRow(state(Sampling(), size=100), mask=np.full(2, 2**32 - 1, np.uint32))])
    assert got[0].token == 63


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("size", SIZES)
def test_a_bad_row_fails_alone(size: int, temperature: float) -> None:
    rows, logits = [], np.stack([row(i, size) for i in range(6)])
    for i in range(6):
        mask = np.zeros((size + 31) // 32, np.uint32) if i == 1 else None
        rows.append(SampleRow(state(Sampling(temperature=temperature), size=size), mask=mask))
    logits[2, size - 1] = np.nan
    logits[3, 4] = np.inf
    logits[4, :] = -np.inf
    drawn = Sampler(size).sample(logits, rows)
    assert [bool(d.error) for d in drawn] == [False, True, True, True, True, False]
    assert [d.code for d in drawn[1:5]] == [
        "option.unsupported",
        "runtime.numeric_mismatch",
        "runtime.numeric_mismatch",
        "option.unsupported",
    ]
    assert "nan" in drawn[2].error and "no token may follow" in drawn[1].error
    assert all(d.token == -1 for d in drawn[1:5])
    plain = Sampler(size).sample(logits[[0, 5]], [rows[0], rows[5]])
    assert plain == [drawn[0], drawn[5]]
    tensors = Sampler(size, on_host=False).sample(torch.from_numpy(logits), rows)
    assert [(d.token, d.code) for d in tensors] == [(d.token, d.code) for d in drawn]


def test_a_mask_does_not_hide_that_the_model_computes_no_numbers() -> None:
    x = row(1, 50)
    x[3] = np.nan
    one = SampleRow(state(Sampling(temperature=1.0), size=50), mask=packed([1, 2], 50))
    assert Sampler(50).sample(x[None], [one])[0].code == "runtime.numeric_mismatch"


def test_minus_infinity_is_normal() -> None:
    x = np.full(SIZES[1], -np.inf, np.float32)
    x[[5, 7000]] = 1.0
    assert {draw(x, Sampling(temperature=1.0, top_p=0.99), seed=s).token for s in range(30)} == {5, 7000}
    assert draw(x, Sampling()).token == 5


def test_cold_and_hot_temperatures() -> None:
    x = row(1, SIZES[1])
    assert draw(x, Sampling(temperature=2e-5)).token == x.argmax()
    assert not draw(x, Sampling(temperature=1e30)).error


def test_logits_of_another_shape_are_refused() -> None:
    with pytest.raises(NotSupportedError, match=r"\(1, 20\), expected \(1, at least 30\)"):
        Sampler(30).sample(np.zeros((1, 20), np.float32), [SampleRow(state(Sampling(), size=30))])


# Probabilities


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_before_processing_are_the_model_s(size: int, temperature: float) -> None:
    x = row(13, size)
    x[2] = -np.inf
    reference = log_softmax(x)
    order = np.argsort(-reference)
    biased = Sampling(temperature=temperature, top_k=3, logit_bias=((4, 60.0),), logprobs=6)
    got = draw(x, biased)
    assert got.token == 4 and got.logprob is not None
    assert got.logprob.token == 4
    assert got.logprob.logprob == pytest.approx(reference[4], abs=1e-5)
    assert [t for t, _ in got.logprob.top] == order[:6].tolist()
    np.testing.assert_allclose([v for _, v in got.logprob.top], reference[order[:6]], atol=1e-5)
    own = draw(x, replace(biased, logprobs=0)).logprob
    assert own is not None and own.top == [] and own.logprob == got.logprob.logprob
    assert draw(x, replace(biased, logprobs=None)).logprob is None


@pytest.mark.parametrize("size", SIZES)
def test_logprobs_after_processing_are_those_of_the_draw(size: int) -> None:
    x = row(14, size)
    chain = [
        transformers.TemperatureLogitsWarper(0.8),
        transformers.TopKLogitsWarper(12),
        transformers.TopPLogitsWarper(0.9),
    ]
    reference = hugging_face(x, [0], *chain)
    kept = np.flatnonzero(np.isfinite(reference))
    got = draw(x, Sampling(temperature=0.8, top_k=12, top_p=0.9, logprobs=20, logprobs_after=True)).logprob
    assert got is not None and sorted(t for t, _ in got.top) == kept.tolist()
    values = [v for _, v in got.top]
    assert values == sorted(values, reverse=True)
    assert math.fsum(math.exp(v) for v in values) == pytest.approx(1.0)
    assert got.logprob == pytest.approx(reference[got.token], abs=1e-5)


def test_logprobs_after_processing_of_greedy_have_the_temperature_1() -> None:
    x = row(15, SIZES[1])
    biased = x.copy()
    biased[9] += 20
    got = draw(x, Sampling(logit_bias=((9, 20.0),), logprobs=3, logprobs_after=True)).logprob
    reference = log_softmax(biased)
    assert got is not None and got.token == 9
    assert got.logprob == pytest.approx(reference[9], abs=1e-5)
    assert [t for t, _ in got.top] == np.argsort(-reference)[:3].tolist()
    plain = draw(x, Sampling(logprobs=1, logprobs_after=True)).logprob
    assert plain is not None and plain.logprob == pytest.approx(log_softmax(x).max(), abs=1e-5)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_logprobs_of_prompt_tokens(as_tensor: bool) -> None:
    x = np.stack([row(i, SIZES[1]) for i in range(3)])
    tokens = [4, int(x[1].argmax()), 12000]
    got = Sampler(SIZES[1], on_host=not as_tensor).logprobs_of(torch.from_numpy(x) if as_tensor else x, tokens, 2)
    for i, one in enumerate(got):
        reference = log_softmax(x[i])
        assert one.token == tokens[i]
        assert one.logprob == pytest.approx(reference[tokens[i]], abs=1e-5)
        assert [t for t, _ in one.top] == np.argsort(-reference)[:2].tolist()
    many = Sampler(SIZES[1]).logprobs_of(x, tokens, 1000)[0].top
    assert [t for t, _ in many] == np.argsort(-x[0])[:1000].tolist()
    x[1, 0] = np.nan
    with pytest.raises(NotSupportedError, match="nan"):
        Sampler(SIZES[1]).logprobs_of(x, tokens, 1)
