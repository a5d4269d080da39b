"""Every sampling parameter with what it must do to a text: the cases of ``test_executors_agree``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tests.engine.driving import Answer

from turnout.engine.request import Finish
from turnout.types import Grammar

END = 256  # the tiny model's end token
Shows = Callable[[Answer, Answer], bool]


def differs(answer: Answer, plain: Answer) -> bool:
    return answer.tokens != plain.tokens


def same(answer: Answer, plain: Answer) -> bool:
    return answer.tokens == plain.tokens


@dataclass
class Case:
    """Sampling parameters, and whether they did to the answer to one prompt what they must.

    ``fields`` may be made from the answer to ``plain``, what the answer is compared with.
    """

    name: str
    fields: dict[str, Any] | Callable[[Answer], dict[str, Any]]
    shows: Shows = differs
    plain: dict[str, Any] = field(default_factory=lambda: {"temperature": 1.0})
    prompt: int = 0


GREEDY: dict[str, Any] = {"temperature": 0.0}


def drawn(**fields: Any) -> dict[str, Any]:
    return {"temperature": 1.0, **fields}


def greedy(**fields: Any) -> dict[str, Any]:
    return {"temperature": 0.0, **fields}


def matches(pattern: str) -> Shows:
    return lambda answer, plain: re.fullmatch(pattern, answer.text) is not None and answer.finish is Finish.STOP


def schema_kept(answer: Answer, plain: Answer) -> bool:
    value = json.loads(answer.text)
    return answer.finish is Finish.STOP and sorted(value) == ["n", "ok"] and 0 <= value["n"] <= 99


# ---- stops -------------------------------------------------------------------------------------


def inner_text(plain: Answer) -> str:
    """Two whole characters from the middle of an answer, the first time they occur there."""
    for place in range(4, len(plain.text) - 4):
        found = plain.text[place : place + 2]
        if found.isascii() and found.isprintable() and plain.text.index(found) == place:
            return found
    raise AssertionError(f"nothing to stop at in {plain.text!r}")


def inner_token(plain: Answer) -> int:
    """A token from the middle of an answer that does not occur before."""
    return next(t for i, t in enumerate(plain.tokens) if i >= 5 and t not in plain.tokens[:i])


def stopped_at_text(kept: bool) -> Shows:
    def shows(answer: Answer, plain: Answer) -> bool:
        text, heard = inner_text(plain), answer.sequences[0]
        cut = plain.text.index(text) + (len(text) if kept else 0)
        return (heard.finish, heard.stop, heard.text) == (Finish.STOP, text, plain.text[:cut])

    return shows


def stopped_at_token(answer: Answer, plain: Answer) -> bool:
    token = inner_token(plain)
    before = plain.tokens[: plain.tokens.index(token) + 1]
    return answer.tokens == before and answer.sequences[0].stop == token and answer.finish is Finish.STOP


def ended_early(answer: Answer, plain: Answer) -> bool:
    return answer.finish is Finish.STOP and answer.tokens[-1] == END and len(answer.tokens) < 24


def ends_ignored(answer: Answer, plain: Answer) -> bool:
    return answer.finish is Finish.LENGTH and END in answer.tokens and len(answer.tokens) == 24


# ---- probabilities and several sequences -------------------------------------------------------


def told(answer: Answer, plain: Answer) -> bool:
    given: list[Any] = answer.sequences[0].logprobs
    return same(answer, plain) and [g.token for g in given] == answer.tokens and {len(g.top) for g in given} == {3}


def told_after(answer: Answer, plain: Answer) -> bool:
    """Of 5 tokens each, whose probabilities are those of what was left to draw from."""
    given: list[Any] = answer.sequences[0].logprobs
    total = [sum(2.718281828**logprob for _, logprob in g.top) for g in given]
    return all(len(g.top) == 5 for g in given) and all(abs(t - 1) < 1e-4 for t in total)


def prompt_told(answer: Answer, plain: Answer) -> bool:
    """Of every token but the first, with two alternatives."""
    given: list[Any] = answer.prompt_logprobs or []
    assert answer.usage is not None and len(given) == answer.usage.prompt > 9
    return given[0] is None and all(len(g.top) == 2 for g in given[1:]) and same(answer, plain)


def several(count: int) -> Shows:
    return lambda answer, plain: len({tuple(s.tokens) for s in answer.sequences.values()}) == count


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"ok": {"type": "boolean"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
        "required": ["ok", "n"],
        "additionalProperties": False,
    }
)
LARK = 'start: word (" " word){1,3} "."\nword: /[a-z]{1,5}/'
WORDS = json.dumps(["true", "tree", "false alarm"])


def grammar(kind: str, text: str = "") -> dict[str, Any]:
    return drawn(grammar=Grammar(kind, text), max_tokens=80)


CASES = [
    Case("greedy", GREEDY, same, GREEDY),
    Case("drawn", drawn(), same),
    Case("temperature", drawn(temperature=0.6)),
    Case("hot", drawn(temperature=1.7)),
    Case("top_k", drawn(top_k=4)),
    Case("top_k-1", drawn(top_k=1), same, GREEDY),
    Case("top_p", drawn(top_p=0.6)),
    Case("min_p", drawn(min_p=0.3)),
    Case("typical_p", drawn(typical_p=0.5)),
    Case("xtc", drawn(xtc_probability=0.7, xtc_threshold=0.05)),
    Case("filters", drawn(temperature=1.3, top_k=30, top_p=0.9, min_p=0.02, typical_p=0.9)),
    Case("repetition", greedy(repetition_penalty=1.5), plain=GREEDY),
    Case("repetition-drawn", drawn(repetition_penalty=1.3)),
    Case("presence", greedy(presence_penalty=2.0), plain=GREEDY),
    Case("frequency", greedy(frequency_penalty=2.0), plain=GREEDY),
    Case("penalties-drawn", drawn(presence_penalty=1.0, frequency_penalty=0.7)),
    Case("dry", greedy(dry_multiplier=4.0, dry_base=1.5, dry_allowed_length=1), plain=GREEDY, prompt=1),
    Case(
        "dry-breakers",
        greedy(dry_multiplier=4.0, dry_allowed_length=1, dry_sequence_breakers=("al", "e", "\n", "true")),
        plain=GREEDY,
        prompt=1,
    ),
    Case("logit_bias", drawn(logit_bias=((65, 6.0), (70, -100.0))), lambda a, p: 65 in a.tokens and 70 not in a.tokens),
    Case("logit_bias-all", greedy(logit_bias=((65, 100.0),)), lambda a, p: set(a.tokens) == {65}, GREEDY),
    Case("end", drawn(logit_bias=((END, 5.0),)), ended_early),
    Case("min_tokens", drawn(logit_bias=((END, 9.0),), min_tokens=12), lambda a, p: 12 < len(a.tokens) < 24),
    Case("ignore_eos", drawn(logit_bias=((END, 5.0),), ignore_eos=True), ends_ignored),
    Case(
        "special-shown",
        drawn(logit_bias=((END, 5.0),), ignore_eos=True, skip_special_tokens=False),
        lambda a, p: a.text.count("<|endoftext|>") == a.tokens.count(END) > 0,
    ),
    Case("stop", lambda plain: greedy(stop=(inner_text(plain),)), stopped_at_text(False), GREEDY),
    Case(
        "include_stop",
        lambda plain: greedy(stop=("no such text", inner_text(plain)), include_stop=True),
        stopped_at_text(True),
        GREEDY,
    ),
    Case("stop_token_ids", lambda plain: greedy(stop_token_ids=(inner_token(plain),)), stopped_at_token, GREEDY),
    Case("max_tokens-0", greedy(max_tokens=0), lambda a, p: a.tokens == [] and a.finish is Finish.LENGTH, GREEDY),
    Case("max_tokens-1", greedy(max_tokens=1), lambda a, p: a.tokens == p.tokens[:1], GREEDY),
    Case("logprobs", drawn(logprobs=3), told),
    Case("logprobs-greedy", greedy(logprobs=3), told, GREEDY),
    Case("logprobs_after", drawn(logprobs=5, logprobs_after=True, top_k=5), told_after),
    Case("prompt_logprobs", drawn(prompt_logprobs=2), prompt_told, prompt=1),
    Case("n", drawn(n=3), several(3)),
    Case("best_of", drawn(n=2, best_of=5), several(2)),
    Case("best_of-told", drawn(n=1, best_of=3, logprobs=1), several(1)),
    Case("json_schema", grammar("json_schema", SCHEMA), schema_kept),
    Case("json_object", grammar("json_object"), lambda a, p: a.text.startswith("{")),
    Case("regex", grammar("regex", "(true|[a-f]{2,4}é?, ){2,5}end"), matches("(true|[a-f]{2,4}é?, ){2,5}end")),
    Case("lark", grammar("lark", LARK), matches("[a-z]{1,5}( [a-z]{1,5}){1,3}[.]")),
    Case("choice", grammar("choice", WORDS), matches("true|tree|false alarm")),
    Case("grammar-greedy", {**grammar("lark", LARK), **GREEDY}, matches("[a-z]{1,5}( [a-z]{1,5}){1,3}[.]"), GREEDY),
    Case("watermark", drawn(watermark="green")),
    Case(
        "watermark-filters", drawn(watermark="green", temperature=0.8, top_k=20), plain=drawn(temperature=0.8, top_k=20)
    ),
    Case("processor", greedy(processors=('no-repeat-ngram:{"size": 1}',)), lambda a, p: len({*a.tokens}) == 24, GREEDY),
    Case(
        "processors", drawn(processors=("even", 'sequence-bias:{"biases": [[[66], 5.0]]}')), lambda a, p: 66 in a.tokens
    ),
    Case("criterion", drawn(processors=("long-enough",)), lambda a, p: a.sequences[0].stop == "long enough"),
    Case(
        "all",
        drawn(
            temperature=0.9,
            top_k=60,
            top_p=0.95,
            min_p=0.01,
            typical_p=0.95,
            xtc_probability=0.3,
            repetition_penalty=1.1,
            presence_penalty=0.2,
            frequency_penalty=0.1,
            dry_multiplier=1.0,
            logit_bias=((END, 3.0), (84, -2.0)),
            min_tokens=4,
            processors=("even",),
            watermark="green",
            logprobs=2,
            n=2,
        ),
        several(2),
    ),
]
