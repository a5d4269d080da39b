"""The engine's tokens are Transformers' own, on tiny random models of many families, however they are scheduled.

The reference is ``generate`` of each request alone (greedy, float32), made by the unchanged library.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
import torch
from tests.engine.driving import Answer, drive, request
from tests.shapes import families

from turnout.backends.torch_native import executor_for
from turnout.backends.torch_native_executor import TorchOptions
from turnout.engine.core import Engine, EngineConfig
from turnout.engine.request import GenerationRequest
from turnout.engine.speculative import DraftProposer, NGramProposer
from turnout.types import Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

NEW = 10
NAMES = (
    *("llama", "mistral", "qwen2", "qwen3", "qwen3-moe", "qwen3-next", "qwen3.5", "gemma", "gemma2", "gemma3"),
    *("gpt-oss", "phi3", "cohere2", "olmo2", "starcoder2", "granite", "granitemoe", "mixtral", "stablelm", "smollm3"),
    *("deepseek-v2", "gpt2", "gpt-neox", "opt", "gptj", "bloom", "falcon", "mamba", "mamba2", "falcon-h1", "bamba"),
    *("lfm2", "t5", "bart", "marian"),
)


class Numbers:
    """Token ids as text: what the engine needs of a vocabulary."""

    eos_ids: frozenset[int] = frozenset()
    bos_id: int | None = 1
    size = families.VOCABULARY

    def encode(self, text: str, special: bool = True) -> list[int]:
        return [int(part) for part in text.split()]

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        return "".join(f" {i}" for i in ids)

    def token_bytes(self, token: int) -> bytes:
        return f" {token}".encode()

    def is_special(self, token: int) -> bool:
        return False


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Sixteen ragged prompts; the last four begin alike, and repeat themselves, so that drafts are found."""
    rng = random.Random(11)
    made = [tuple(rng.randrange(3, families.VOCABULARY) for _ in range(rng.randrange(1, 40))) for _ in range(12)]
    period = tuple(rng.randrange(3, families.VOCABULARY) for _ in range(9))
    shared = (period * 4)[:28]
    made += [(*shared, *(rng.randrange(3, families.VOCABULARY) for _ in range(i))) for i in range(4)]
    return tuple(made)


@cache
def reference(name: str) -> tuple[tuple[int, ...], ...]:
    """Greedy tokens of each prompt alone, by the library as it is."""
    model = families.model(name)
    answers = []
    with torch.inference_mode():
        for prompt in prompts():
            ids = torch.tensor([prompt])
            out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)[0]
            start = 1 if model.config.is_encoder_decoder else len(prompt)
            answers.append(tuple(out[start:].tolist()))
    return tuple(answers)


def asked(name: str, which: range = range(16), **more: Any) -> list[GenerationRequest]:
    encoder_decoder = families.FAMILIES[name].encoder_decoder
    made = []
    for i in which:
        if encoder_decoder:
            one = GenerationRequest(
                f"r{i}", [families.START], Sampling(max_tokens=NEW), encoder=list(prompts()[i]), **more
            )
        else:
            one = request(f"r{i}", prompts()[i], NEW, **more)
        made.append(one)
    return made


def open_executor(name: str, **options: Any) -> Any:
    return executor_for(families.model(name), TorchOptions(**options))


def compare(
    name: str, executor: Any, requests: list[GenerationRequest], arrivals: Any = None, **settings: Any
) -> Engine:
    """Drives the requests and compares every token with the reference."""
    proposer = settings.pop("proposer", None)
    engine = Engine(executor, Numbers(), EngineConfig(**settings), proposer=proposer)
    answers: dict[str, Answer] = drive(engine, requests, arrivals)
    for one in requests:
        number = int(one.id[1:])
        assert not answers[one.id].error, answers[one.id].error
        assert tuple(answers[one.id].tokens) == reference(name)[number], f"{name}, prompt {number}"
    engine.cache.clear()
    return engine


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_every_way_of_scheduling_gives_the_librarys_tokens(name: str) -> None:
    """Alone; sixteen ragged at random arrival; chunks of 1, 7 and 64; forced preemption; prefix hits;
    n-gram and draft speculation."""
    executor = open_executor(name, slots=16, cache_tokens=4096)
    try:
        for one in asked(name, range(0, 16, 5)):
            compare(name, executor, [one])
        rng = random.Random(name)
        compare(name, executor, asked(name), [rng.randrange(12) for _ in range(16)])
        for chunk in (1, 7, 64):
            compare(name, executor, asked(name, range(3)), chunk_tokens=chunk)
        if not families.FAMILIES[name].encoder_decoder:
            check_prefixes(name, executor)
        check_speculation(name, executor)
    finally:
        executor.close()
    check_preemption(name)


def check_prefixes(name: str, executor: Any) -> None:
    """Prompts that begin alike, one after another and while the first still runs."""
    engine = compare(name, executor, asked(name, range(12, 16)), [0, 2, 4, 40])
    assert engine.cache.hits > 0


def check_speculation(name: str, executor: Any) -> None:
    if not executor.capabilities.rolls_back:
        return
    # Random models hardly repeat themselves: every token that occurred before counts as a beginning.
    engine = compare(name, executor, asked(name, cache=False), proposer=NGramProposer(min_n=1, adaptive=False))
    assert engine.stats.drafted > 0 or families.FAMILIES[name].encoder_decoder
    if families.FAMILIES[name].encoder_decoder:
        return
    draft = open_executor("llama", slots=4, cache_tokens=1024)
    compare(name, executor, asked(name, range(10, 14)), proposer=DraftProposer(draft, adaptive=False))
    draft.close()


def check_preemption(name: str) -> None:
    """Three requests in a cache that holds two of their prompts, but not what is added to them."""
    executor = open_executor(name, slots=3, cache_tokens=80)
    try:
        engine = compare(name, executor, asked(name, range(12, 15)))
        if not families.FAMILIES[name].encoder_decoder:
            assert engine.stats.preemptions > 0
    finally:
        executor.close()


def test_a_draft_that_agrees_is_accepted() -> None:
    """The same model as its own draft: nearly every token is accepted, and all are the library's."""
    for name in ("qwen3", "gemma3"):
        executor, draft = open_executor(name, slots=4), open_executor(name, slots=4)
        engine = compare(name, executor, asked(name, range(4)), proposer=DraftProposer(draft, adaptive=False))
        assert engine.stats.accepted > 0.8 * engine.stats.drafted > 0
        executor.close()
        draft.close()
