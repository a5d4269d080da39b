"""Watermarks: green lists and g-values against Transformers' processors, detection against chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from tests.engine.tiny import TinyExecutor, TinyVocabulary

from turnout.engine.core import Engine
from turnout.engine.request import GenerationRequest
from turnout.engine.watermark import (
    GreenList,
    SynthId,
    Watermark,
    _binomial_tail,
    _first_of_permutation,
    _permutation,
    watermark,
)
from turnout.errors import InputError, TurnoutError, UsageError
from turnout.types import Sampling

VOCAB = 1000
KEYS = (654, 400, 836, 123, 340, 443, 597, 160, 57, 29, 590, 639, 13, 715, 468, 990, 966, 226, 324, 585)
MARKS: dict[str, Watermark] = {
    "lefthash": GreenList(VOCAB, bias=3.0),
    "selfhash": GreenList(VOCAB, bias=4.0, seeding_scheme="selfhash", context_width=3),
    "synthid": SynthId(5, KEYS),
}


def draw(mark: Watermark | None, length: int, seed: int, prompt: Sequence[int] = (5, 17, 3)) -> list[int]:
    """Tokens of a random source whose distribution changes at every place, marked or not."""
    rng = np.random.default_rng(seed)
    ids = list(prompt)
    for _ in range(length):
        logits = (2.0 * rng.standard_normal(VOCAB)).astype(np.float32)
        if mark is not None:
            logits = mark(ids, len(prompt), logits)
        weights = np.exp(logits.astype(np.float64) - logits.max())
        ids.append(int(rng.choice(VOCAB, p=weights / weights.sum())))
    return ids[len(prompt) :]


# ---- detection -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MARKS)
def test_marked_text_is_found(name: str) -> None:
    for seed in range(2):
        found = MARKS[name].detect(draw(MARKS[name], 200, seed))
        assert found.flagged and found.p_value < 1e-6 and found.score > 4.5, found
        assert 180 < found.tokens <= 200


@pytest.fixture(scope="module")
def unmarked() -> list[list[int]]:
    return [draw(None, 100, seed) for seed in range(1000, 1200)]


@pytest.mark.parametrize("name", MARKS)
def test_false_alarms_come_at_the_rate_asked(name: str, unmarked: list[list[int]]) -> None:
    """200 texts at 1 in 20: 10 are expected; 20 or more have probability 0.003 and 1 or fewer 0.0005."""
    found = [MARKS[name].detect(text, false_alarms=0.05) for text in unmarked]
    assert 2 <= sum(f.flagged for f in found) <= 19
    assert not any(MARKS[name].detect(text, false_alarms=1e-6).flagged for text in unmarked[:50])
    assert abs(np.mean([f.score for f in found])) < 0.25 and 0.8 < np.std([f.score for f in found]) < 1.2


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("lefthash", GreenList(VOCAB, hashing_key=15485867)),
        ("selfhash", GreenList(VOCAB, hashing_key=15485867, seeding_scheme="selfhash", context_width=3)),
        ("synthid", SynthId(5, tuple(k + 1000 for k in KEYS))),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_another_key_finds_nothing(name: str, other: Watermark) -> None:
    found = other.detect(draw(MARKS[name], 200, 0))
    assert not found.flagged and found.p_value > 1e-3


@pytest.mark.parametrize("name", MARKS)
def test_a_text_that_repeats_itself_or_is_short_proves_nothing(name: str) -> None:
    mark = MARKS[name]
    nothing = mark.detect([])
    assert (nothing.score, nothing.p_value, nothing.tokens, nothing.flagged) == (0.0, 1.0, 0, False)
    assert not mark.detect([7] * 500).flagged and mark.detect([7] * 500).tokens == 1
    assert mark.detect(list(range(2))).tokens <= 1


@pytest.mark.parametrize("mark", [GreenList(64, bias=4.0), SynthId(4, KEYS)], ids=["green", "synthid"])
@pytest.mark.parametrize("filters", [{}, {"top_k": 40, "temperature": 1.5}], ids=["plain", "filtered"])
def test_the_engine_marks_what_it_is_asked_to_mark(mark: Watermark, filters: dict[str, Any]) -> None:
    executor = TinyExecutor(sharpness=0.5, ends=-30.0)
    engine = Engine(executor, TinyVocabulary(), watermarks={"mine": mark})
    for name, watermark_name in (("marked", "mine"), ("bare", None)):
        sampling = Sampling(
            **{"max_tokens": 240, "temperature": 1.0, "seed": 3, "watermark": watermark_name, **filters}
        )
        engine.add(GenerationRequest(name, [0, 9, 12], sampling))
    found: dict[str, list[int]] = {"marked": [], "bare": []}
    while engine.has_work:
        for event in engine.step():
            found[event.id] += event.tokens
    assert mark.detect(found["marked"]).p_value < 1e-6
    assert mark.detect(found["bare"]).p_value > 1e-3


def test_the_tail_is_the_binomials() -> None:
    from scipy.stats import binom

    for hits, count, share in ((0, 5, 0.25), (1, 1, 0.25), (5, 5, 0.5), (70, 200, 0.25), (190, 200, 0.25), (3, 9, 0.1)):
        assert _binomial_tail(hits, count, share) == pytest.approx(binom.sf(hits - 1, count, share), rel=1e-9)


# ---- as Transformers -------------------------------------------------------------------------------


def scores(seed: int, vocab: int = VOCAB) -> np.ndarray:
    return (3.0 * np.random.default_rng(seed).standard_normal(vocab)).astype(np.float32)


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
@pytest.mark.parametrize(
    "more", [{}, {"context_width": 3, "greenlist_ratio": 0.5, "bias": 1.25, "hashing_key": 77}], ids=["plain", "other"]
)
def test_green_lists_are_those_of_transformers(scheme: str, more: dict[str, Any]) -> None:
    import torch
    from transformers import WatermarkingConfig
    from transformers.generation.logits_process import WatermarkLogitsProcessor

    settings = WatermarkingConfig(seeding_scheme=scheme, **more).to_dict()
    theirs = WatermarkLogitsProcessor(vocab_size=VOCAB, device="cpu", **settings)
    ours = watermark(settings, VOCAB)
    assert isinstance(ours, GreenList)
    for seed in range(6):
        ids = np.random.default_rng(seed).integers(0, VOCAB, 9).tolist()
        given = scores(seed)
        wanted = theirs(torch.tensor([ids]), torch.from_numpy(given)[None])[0].numpy()
        np.testing.assert_array_equal(ours(ids, 4, given), wanted)
        greens = theirs._get_greenlist_ids(torch.tensor(ids)).tolist()
        assert sorted(greens) == np.flatnonzero(ours.greens(ids)).tolist()
    short = ours(ids[: ours.context_width - 1], 0, given)
    np.testing.assert_array_equal(short, given)


@pytest.mark.parametrize("vocab", [2, 3, 64, 151_936])
def test_shuffles_of_every_size(vocab: int) -> None:
    import torch

    for seed in (0, 1, 2**31 + 7, 2**64 - 2):
        wanted = torch.randperm(vocab, generator=torch.Generator().manual_seed(seed)).numpy()
        np.testing.assert_array_equal(_permutation(seed, vocab), wanted)
        for count in {1, vocab // 4, vocab // 2, vocab - 1} - {0}:
            found = np.flatnonzero(_first_of_permutation(seed, vocab, count))
            np.testing.assert_array_equal(found, np.sort(wanted[:count]))


@pytest.mark.parametrize("scheme", ["lefthash", "selfhash"])
def test_the_two_detectors_agree(scheme: str) -> None:
    import torch
    from transformers import LlamaConfig, WatermarkDetector, WatermarkingConfig

    settings = WatermarkingConfig(seeding_scheme=scheme, bias=4.0, context_width=2 if scheme == "selfhash" else 1)
    config = LlamaConfig(vocab_size=VOCAB, bos_token_id=1)
    theirs = WatermarkDetector(config, "cpu", settings, ignore_repeated_ngrams=True)
    mark = watermark(settings.to_dict(), VOCAB)
    for text in (draw(mark, 60, 1), draw(None, 60, 2)):
        wanted, found = theirs(torch.tensor([text]), return_dict=True), mark.detect(text)
        assert found.tokens == int(wanted.num_tokens_scored[0])
        assert found.score == pytest.approx(float(wanted.z_score[0]))
        assert found.flagged == bool(wanted.prediction[0])


@pytest.mark.parametrize(
    "more",
    [{}, {"skip_first_ngram_calls": True}, {"sampling_table_size": 1001, "sampling_table_seed": 9}],
    ids=["plain", "skip", "table"],
)
def test_tournaments_are_those_of_transformers(more: dict[str, Any]) -> None:
    """A run of tokens in which contexts come back, call by call, and the g-values of the whole text."""
    import torch
    from transformers import SynthIDTextWatermarkingConfig

    settings = SynthIDTextWatermarkingConfig(ngram_len=4, keys=list(KEYS[:6]), context_history_size=5, **more)
    theirs = settings.construct_processor(VOCAB, "cpu")
    ours = watermark(vars(settings), VOCAB)
    assert isinstance(ours, SynthId)
    prompt = [9, 8, 7]
    text = [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3, 6, 10, 11, 12, 13, 14, 1, 2, 3, 7]
    for place in range(len(text)):
        ids, given = prompt + text[:place], scores(place)
        wanted = theirs(torch.tensor([ids]), torch.from_numpy(given)[None])[0].numpy()
        np.testing.assert_allclose(ours(ids, len(prompt), given), wanted, rtol=2e-5, atol=2e-5)
    wanted = theirs.compute_g_values(torch.tensor([text]))[0].numpy()
    np.testing.assert_array_equal(ours.g_values(text), wanted)
    fresh = theirs.compute_context_repetition_mask(torch.tensor([text]))[0].numpy()
    np.testing.assert_array_equal(ours._fresh(text), fresh)
    assert not fresh.all(), "the text has contexts that repeat"


def test_ids_may_come_as_an_array() -> None:
    """A key times a token outgrows 64 bits."""
    big = GreenList(VOCAB, hashing_key=(1 << 62) + 1)
    for mark in (*MARKS.values(), big):
        ids = draw(mark, 12, 3)
        assert mark.after_filters
        np.testing.assert_array_equal(mark(ids, 2, scores(1)), mark(np.array(ids), 2, scores(1)))
        assert mark.detect(ids) == mark.detect(np.array(ids))  # type: ignore[arg-type]


def test_what_is_cut_away_stays_away_and_the_rest_is_a_distribution() -> None:
    given = scores(1)
    given[100:] = -np.inf
    for mark in MARKS.values():
        found = mark([3, 4, 5], 1, given)
        assert np.isneginf(found[100:]).all() and np.isfinite(found[:100]).all()
        assert found.dtype == np.float32
    assert np.exp(MARKS["synthid"]([3, 4, 5], 1, given).astype(np.float64)).sum() == pytest.approx(1, abs=1e-6)


def test_a_tournament_leaves_the_distribution_as_it_is_on_average() -> None:
    given = scores(2, 8)
    wanted = np.exp(given - given.max())
    wanted /= wanted.sum()
    rng = np.random.default_rng(0)
    found = np.mean(
        [np.exp(SynthId(3, tuple(rng.integers(0, 1 << 40, 4).tolist())).apply(given, [1, 2])) for _ in range(600)],
        axis=0,
    )
    assert np.abs(found - wanted).max() < 0.05  # 3.5 standard errors of a bit's mean at 600 draws


# ---- refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"greenlist_ratio": 1.0}, "greenlist_ratio"),
        ({"greenlist_ratio": 0.0001}, "greenlist_ratio"),
        ({"context_width": 0}, "context_width"),
        ({"seeding_scheme": "righthash"}, "righthash"),
        ({"bias": float("nan")}, "bias"),
        ({"colour": "green"}, "colour"),
        ({"keys": [1, 2], "ngram_len": 1}, "ngram_len"),
        ({"keys": [], "ngram_len": 5}, "keys"),
        ({"keys": [1]}, "ngram_len"),
        ({"keys": [1], "ngram_len": 5, "debug_mode": True}, "debug_mode"),
        ({"keys": [1], "ngram_len": 5, "sampling_table_size": 1 << 25}, "sampling_table_size"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_are_named(settings: dict[str, Any], word: str) -> None:
    with pytest.raises(UsageError, match=word):
        watermark(settings, VOCAB)


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(InputError, match="1000 tokens") as caught:
        GreenList(VOCAB).apply(np.zeros(999, np.float32), [1, 2])
    assert isinstance(caught.value, TurnoutError) and caught.value.code == "option.unsupported"
