"""Whole texts of the engine have the model's own distribution: with drafts, with a grammar, with both.

Thousands of requests with seeds of their own go through the engine itself (scheduler, verification of drafts, masks,
sampler); how often each text came is compared with products of softmax computed here without any of it (chi-square).
The last tests put known faults in, so that one sees that the statistics would find them.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from scipy import stats
from tests.engine.driving import drive, request
from tests.engine.tiny import EOS, TinyExecutor, TinyVocabulary

from turnout.engine.core import Engine
from turnout.engine.sampler import Drawn, Sampler, SampleRow, SamplerState
from turnout.engine.speculative import DraftProposer, NGramProposer, Proposer
from turnout.types import Grammar

pytestmark = pytest.mark.slow
RUNS, EACH = 2400, 100  # texts, and sequences of one request
LENGTH, COMPARED = 6, 4  # tokens of a text without grammar, and the first of them, where there is room for drafts
PATTERN = "[abc]{1,2}(the |[tx1]){0,2}"
ALPHABET = ("a", "b", "c", "the ", "t", "x", "1")
FILTERS: dict[str, Any] = {"temperature": 0.7, "top_k": 6, "min_p": 0.02}
Text = tuple[int, ...]


def settings(grammar: bool, **more: Any) -> dict[str, Any]:
    """Of the model: sharp enough that a few dozen texts are common."""
    return {"sharpness": 0.8 if grammar else 4.0, "memory": 0.3, "slots": 32, **more}


@cache
def prompt() -> Text:
    """Ends as it begins, with what the model likes to say there, so that the look-up drafts likely tokens."""
    ids = [TinyVocabulary().encode("a", special=False)[0]]
    table = TinyExecutor(**settings(False))._bigram
    for _ in range(4):
        ids.append(int(table[ids[-1]].argmax()))
    return (*ids, *TinyVocabulary().encode("bt", special=False), ids[0])


# ---- the exact distribution --------------------------------------------------------------------


@cache
def language() -> frozenset[bytes]:
    """Every text of the pattern, by brute force."""
    texts = ("".join(parts) for n in range(5) for parts in itertools.product(ALPHABET, repeat=n))
    return frozenset(text.encode() for text in texts if re.fullmatch(PATTERN, text))


def allowed(text: Sequence[int]) -> set[int]:
    """Tokens after which the text still begins one of the language; the end where it is one."""
    said = b"".join(TinyVocabulary().token_bytes(t) for t in text)
    found = {EOS} if said in language() else set()
    for token in range(64):
        spelled = TinyVocabulary().token_bytes(token)
        if spelled and any(known.startswith(said + spelled) for known in language()):
            found.add(token)
    return found


def shares(logits: np.ndarray, may: set[int] | None, filters: bool) -> dict[int, float]:
    """Probabilities of the next token: softmax over what may come, after the filters' textbook definitions."""
    ids = sorted(range(64) if may is None else may)
    values = logits[ids].astype(np.float64) / (FILTERS["temperature"] if filters else 1.0)
    weights = np.exp(values - values.max())
    if filters:
        order = np.argsort(-weights)[: FILTERS["top_k"]]
        kept = [i for i in order if weights[i] >= FILTERS["min_p"] * weights.max()]
        return {ids[i]: float(weights[i] / weights[kept].sum()) for i in kept}
    return {token: float(weight / weights.sum()) for token, weight in zip(ids, weights, strict=True)}


@cache
def exact(grammar: bool, filters: bool) -> dict[Text, float]:
    """Probability of every text that is not too rare to matter."""
    model, done, growing = TinyExecutor(**settings(grammar)), {}, {(): 1.0}
    while growing:
        longer: dict[Text, float] = {}
        for text, chance in growing.items():
            may = allowed(text) if grammar else None
            if may == {EOS} or (text and text[-1] == EOS) or (not grammar and len(text) == COMPARED):
                done[text] = chance
                continue
            for token, share in shares(model.alone([*prompt(), *text])[-1], may, filters).items():
                if chance * share > 1e-5:
                    longer[(*text, token)] = chance * share
        growing = longer
    assert sum(done.values()) > 0.97
    return done


# ---- what the engine says ----------------------------------------------------------------------


PROPOSERS = ("none", "look-up", "coupled", "likeliest", "unrelated")


def proposer_of(name: str, grammar: bool) -> Proposer | None:
    """Look-up, or another model that is like the target, or unlike it."""
    if name in ("none", "look-up"):
        return NGramProposer(min_n=1, adaptive=False) if name == "look-up" else None
    model = TinyExecutor(**settings(grammar, memory=0.2, seed=5 if name == "unrelated" else 0))
    return DraftProposer(model, coupled=name != "likeliest", adaptive=False)


def said(proposer: str, grammar: bool, filters: bool) -> tuple[Counter[Text], Engine]:
    """How often the engine said each text."""
    fields: dict[str, Any] = dict(FILTERS) if filters else {"temperature": 1.0}
    if grammar:
        fields["grammar"] = Grammar("regex", PATTERN)
    engine = Engine(TinyExecutor(**settings(grammar)), TinyVocabulary(), proposer=proposer_of(proposer, grammar))
    length = 12 if grammar else LENGTH
    asked = [request(str(seed), prompt(), length, seed=seed, n=EACH, **fields) for seed in range(0, RUNS, EACH)]
    answers = drive(engine, asked)
    assert not any(answer.error for answer in answers.values())
    texts = [heard.tokens for answer in answers.values() for heard in answer.sequences.values()]
    assert len(texts) == RUNS
    return Counter(tuple(text if grammar else text[:COMPARED]) for text in texts), engine


def p_value(counts: Counter[Text], wanted: dict[Text, float]) -> float:
    """Of the chi-square test over the texts expected five times or more, the others counted together."""
    common = [text for text, chance in wanted.items() if chance * RUNS >= 5]
    assert len(common) > 15
    seen, want = [counts[text] for text in common], [wanted[text] * RUNS for text in common]
    return float(stats.chisquare([*seen, RUNS - sum(seen)], [*want, RUNS - sum(want)]).pvalue)


@pytest.mark.parametrize("grammar", [False, True], ids=["free", "grammar"])
@pytest.mark.parametrize(
    ("proposer", "filters"), [*((name, False) for name in PROPOSERS), ("look-up", True), ("likeliest", True)]
)
def test_texts_have_the_models_distribution(proposer: str, grammar: bool, filters: bool) -> None:
    counts, engine = said(proposer, grammar, filters)
    value = p_value(counts, exact(grammar, filters))
    print(f"p {value:.3f}, {engine.stats.drafted} drafts, {engine.stats.accepted} accepted")
    assert value > 0.001
    if filters:
        assert set(counts) <= set(exact(grammar, filters))
    if grammar:
        spelled = {b"".join(TinyVocabulary().token_bytes(t) for t in text) for text in counts}
        assert spelled <= language()
    if proposer == "none":
        assert grammar or engine.stats.drafted == 0
    else:
        assert engine.stats.drafted > 300
        assert proposer == "unrelated" or engine.stats.accepted > 100


# ---- faults that must be found -----------------------------------------------------------------


def drafts_of(rows: Sequence[SampleRow]) -> list[int | None]:
    """By row: the draft that the row's draw decides on, if there is one."""
    following = [*rows[1:], None]
    return [
        after.extra[-1]
        if after is not None and after.state is row.state and len(after.extra) == len(row.extra) + 1
        else None
        for row, after in zip(rows, following, strict=True)
    ]


def easy_drafts(patch: pytest.MonkeyPatch) -> None:
    """One draft in two is accepted whatever was drawn."""
    inner, coin = Sampler.sample, np.random.default_rng(1)

    def sample(self: Sampler, logits: Any, rows: Sequence[SampleRow]) -> list[Drawn]:
        drawn = inner(self, logits, rows)
        pairs = zip(drawn, drafts_of(rows), strict=True)
        return [replace(d, token=draft) if draft is not None and coin.random() < 1 / 2 else d for d, draft in pairs]

    patch.setattr(Sampler, "sample", sample)


def drawn_twice(patch: pytest.MonkeyPatch) -> None:
    """Where a draft was wrong the token is drawn once more, as rejection sampling does, but from all of the
    distribution instead of what the draft left of it."""
    inner, coin = Sampler.sample, np.random.default_rng(2)

    def sample(self: Sampler, logits: Any, rows: Sequence[SampleRow]) -> list[Drawn]:
        drawn = inner(self, logits, rows)
        for place, draft in enumerate(drafts_of(rows)):
            if draft is not None and drawn[place].token != draft:
                state = SamplerState(rows[place].state.sampling, int(coin.integers(1 << 60)), [0], 64)
                drawn[place] = inner(self, logits[place : place + 1], [SampleRow(state, (), rows[place].mask)])[0]
        return drawn

    patch.setattr(Sampler, "sample", sample)


def same_number_for_drafts(patch: pytest.MonkeyPatch) -> None:
    """The number drawn with does not count the drafts before a row."""
    patch.setattr(SamplerState, "uniform", _uniform(SamplerState.uniform))


def _uniform(inner: Callable[..., float]) -> Callable[..., float]:
    def uniform(self: SamplerState, position: int, stream: int = 0) -> float:
        return inner(self, len(self.output), stream)

    return uniform


def masked_after_the_draw(patch: pytest.MonkeyPatch) -> None:
    """A forbidden draw becomes the likeliest of what is allowed, instead of the mask coming first."""
    inner = Sampler.sample

    def sample(self: Sampler, logits: Any, rows: Sequence[SampleRow]) -> list[Drawn]:
        masked = inner(self, logits, rows)
        free = inner(self, logits, [replace(row, mask=None) for row in rows])
        for place, row in enumerate(rows):
            if row.mask is None:
                continue
            token = free[place].token
            if not row.mask[token // 32] >> (token % 32) & 1:
                bits = np.unpackbits(row.mask.view(np.uint8), bitorder="little")[:64].astype(bool)
                token = int(np.where(bits, np.asarray(logits[place])[:64], -np.inf).argmax())
            masked[place] = replace(masked[place], token=token)
        return masked

    patch.setattr(Sampler, "sample", sample)


@pytest.mark.parametrize(
    ("fault", "proposer", "grammar"),
    [
        (easy_drafts, "look-up", False),
        (easy_drafts, "likeliest", False),
        (easy_drafts, "look-up", True),
        (drawn_twice, "likeliest", False),
        (same_number_for_drafts, "likeliest", False),
        (same_number_for_drafts, "look-up", True),
        (masked_after_the_draw, "none", True),
    ],
)
def test_a_fault_would_be_found(
    fault: Callable[[pytest.MonkeyPatch], None], proposer: str, grammar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault(monkeypatch)
    counts, _ = said(proposer, grammar, False)
    value = p_value(counts, exact(grammar, False))
    print(f"p {value:.1e}")
    assert value < 1e-6
