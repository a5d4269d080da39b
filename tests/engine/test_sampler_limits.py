"""What sampling parameters are refused, and that the refusal says what to do."""

from __future__ import annotations

from typing import Any

import pytest

from turnout.engine.sampler import validate
from turnout.errors import InputError
from turnout.types import Sampling

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"max_tokens": 0},
        {"temperature": 2, "top_p": 1, "top_k": 10**6, "seed": -5, "min_p": 1.0, "typical_p": 0.01},
        {"n": 100, "best_of": 100, "logprobs": 0, "prompt_logprobs": 5},
        {"logit_bias": ((0, -100.0), (99, 100)), "stop_token_ids": (0, 99), "min_tokens": 256},
        {"repetition_penalty": 0.5, "presence_penalty": -2.0, "frequency_penalty": 2.0, "dry_multiplier": 3.0},
        {"dry_base": 1.0, "dry_allowed_length": 0, "dry_sequence_breakers": (), "stop": ("x",) * 16},
        {"seed": 2**64 - 1, "xtc_probability": 1.0, "xtc_threshold": 0.0},
    ],
    ids=str,
)
def test_what_can_be_honoured_passes(fields: dict[str, Any]) -> None:
    validate(Sampling(**fields), 100)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "at least 0"),
        ("temperature", NAN, "at least 0"),
        ("temperature", INF, "at least 0"),
        ("temperature", "hot", "a number"),
        ("temperature", True, "a number"),
        ("temperature", None, "a number"),
        ("top_p", 0.0, "more than 0 and at most 1"),
        ("top_p", 1.01, "at most 1"),
        ("top_p", NAN, "at most 1"),
        ("top_k", -1, "at least 0"),
        ("top_k", 2.5, "whole number"),
        ("top_k", True, "whole number"),
        ("min_p", -0.1, "at least 0 and at most 1"),
        ("typical_p", 0, "more than 0"),
        ("xtc_probability", 1.5, "at most 1"),
        ("xtc_threshold", -1, "at least 0"),
        ("repetition_penalty", 0.0, "more than 0"),
        ("repetition_penalty", -INF, "more than 0"),
        ("presence_penalty", 2.5, "at least -2 and at most 2"),
        ("frequency_penalty", -3, "at least -2"),
        ("dry_multiplier", -1.0, "at least 0"),
        ("dry_base", 0.5, "at least 1"),
        ("dry_allowed_length", -1, "at least 0"),
        ("dry_sequence_breakers", ("",), "not empty"),
        ("dry_sequence_breakers", ("x",) * 1000, "at most 256"),
        ("max_tokens", -1, "at least 0"),
        ("max_tokens", 1.0, "whole number"),
        ("min_tokens", -1, "at least 0"),
        ("min_tokens", 257, "at most `max_tokens`, which is 256"),
        ("n", 0, "from 1 to"),
        ("n", 10**9, "from 1 to"),
        ("best_of", 0, "from 1 to"),
        ("logprobs", -1, "from 0 to 100"),
        ("logprobs", 101, "from 0 to 100"),
        ("prompt_logprobs", 10**6, "from 0 to 100"),
        ("seed", 2**64, "from -"),
        ("seed", 1.5, "whole number"),
        ("stop", ("a", ""), "not empty"),
        ("stop", (3,), "text"),
        ("stop_token_ids", (100,), "from 0 to 99"),
        ("stop_token_ids", (-1,), "from 0 to 99"),
        ("logit_bias", ((100, 1.0),), "from 0 to 99"),
        ("logit_bias", ((-1, 1.0),), "from 0 to 99"),
        ("logit_bias", ((True, 1.0),), "from 0 to 99"),
        ("logit_bias", ((1, 101.0),), "from -100 to 100"),
        ("logit_bias", ((1, NAN),), "from -100 to 100"),
        ("logit_bias", ((1, "x"),), "from -100 to 100"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name(name: str, value: Any, expected: str) -> None:
    with pytest.raises(InputError) as caught:
        validate(Sampling(**{name: value}), 100)
    assert f"`{name}`" in caught.value.message
    assert expected in caught.value.message
    assert caught.value.code == "option.unsupported"
    assert caught.value.hints and caught.value.hints[0].startswith(f"{name}: ")


def test_the_value_itself_is_named_and_all_of_them_at_once() -> None:
    with pytest.raises(InputError) as caught:
        validate(Sampling(temperature=-3.5, top_p=7.0, n=0), 100)
    for part in ("`temperature` is `-3.5`", "`top_p` is `7.0`", "`n` is `0`"):
        assert part in caught.value.message
    assert len(caught.value.hints) == 3


def test_best_of_is_at_least_n() -> None:
    with pytest.raises(InputError, match="`best_of` is `2`, expected at least `n`, which is 3"):
        validate(Sampling(n=3, best_of=2), 100)
