"""Three adapters and none, mixed in every way of scheduling: each request's tokens are PEFT's own, alone.

Plain LoRA, rsLoRA and DoRA of PEFT over tiny random models of many families.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import pytest
from tests.engine import adapters_made as made
from tests.engine.driving import Answer, drive, request
from tests.engine.test_families import Numbers
from tests.shapes import families

from turnout.backends.torch_native import executor_for
from turnout.backends.torch_native_executor import TorchOptions
from turnout.engine.core import Engine, EngineConfig
from turnout.engine.request import GenerationRequest
from turnout.engine.speculative import NGramProposer
from turnout.types import Sampling

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

NEW = 8
ADAPTERS: tuple[str | None, ...] = (None, *made.KINDS)


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Three that begin alike and repeat themselves, and one of its own."""
    rng = random.Random(5)
    period = [rng.randrange(3, families.VOCABULARY) for _ in range(7)]
    shared = tuple((period * 4)[:25])
    return (*((*shared, *(rng.randrange(3, 256) for _ in range(i))) for i in (0, 1, 3)), (9, 200, 31, 8))


@cache
def reference(family: str, adapter: str | None, number: int) -> list[int]:
    model = families.model(family) if adapter is None else made.of(family, adapter)[0]
    return made.greedy(model, list(prompts()[number]), NEW)


def asked(family: str, which: range = range(4), adapters: tuple[str | None, ...] = ADAPTERS) -> list[Any]:
    """Every prompt with every adapter, neighbours with different ones."""
    requests = []
    for number in which:
        for adapter in adapters:
            name, prompt = f"{adapter}/{number}", list(prompts()[number])
            if families.FAMILIES[family].encoder_decoder:
                one = GenerationRequest(
                    name, [families.START], Sampling(max_tokens=NEW), encoder=prompt, adapter=adapter
                )
            else:
                one = request(name, prompt, NEW, adapter=adapter)
            requests.append(one)
    return requests


def opened(family: str, **options: Any) -> Any:
    executor = executor_for(families.model(family), TorchOptions(**options))
    for kind in made.KINDS:
        executor.load_adapter(kind, str(made.of(family, kind)[1]))
    return executor


def compare(family: str, executor: Any, requests: list[Any], arrivals: Any = None, **settings: Any) -> Engine:
    proposer = settings.pop("proposer", None)
    engine = Engine(executor, Numbers(), EngineConfig(**settings), proposer=proposer, adapters=made.KINDS)
    answers: dict[str, Answer] = drive(engine, requests, arrivals)
    for one in requests:
        assert not answers[one.id].error, answers[one.id].error
        assert answers[one.id].tokens == reference(family, one.adapter, int(one.id[-1])), f"{family}, {one.id}"
    engine.cache.clear()
    return engine


@pytest.mark.parametrize("family", made.TARGETS)
def test_adapters_mixed_in_every_way_give_pefts_tokens(family: str) -> None:
    """All ragged at random arrival; chunks of 1, 7 and 64; prefix hits; look-up drafts; forced preemption."""
    pair = families.FAMILIES[family].encoder_decoder
    executor = opened(family, slots=16, cache_tokens=4096)
    said = {str([reference(family, adapter, number) for number in range(4)]) for adapter in ADAPTERS}
    assert len(said) == len(ADAPTERS), "two adapters say the same"
    rng = random.Random(family)
    requests = asked(family)
    compare(family, executor, requests, [rng.randrange(8) for _ in requests])
    for chunk in (1, 7, 64):
        compare(family, executor, asked(family, range(1)), chunk_tokens=chunk)
    again = asked(family, range(3), (None, "plain", "dora"))
    engine = compare(family, executor, again, [i // 3 * 12 for i in range(9)])
    assert pair or engine.cache.hits > 0
    if executor.capabilities.rolls_back:
        proposer = NGramProposer(min_n=1, adaptive=False)
        engine = compare(family, executor, asked(family, range(2)), proposer=proposer)
        assert pair or engine.stats.drafted > 0
    executor.close()
    executor = opened(family, slots=4, cache_tokens=80)
    engine = compare(family, executor, asked(family, range(2, 3)))
    assert pair or engine.stats.preemptions > 0
    executor.close()
