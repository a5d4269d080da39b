"""Grammars: JSON-Schema-Test-Suite from a random model, the matcher's own rules, other programs' fields."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validators
from jsonschema.protocols import Validator
from numpy.typing import NDArray

from tests.engine.tiny import EOS, TinyVocabulary
from turnout.engine.grammar import KEPT_GRAMMARS, GrammarCompiler, Matcher
from turnout.errors import InputError
from turnout.types import Grammar

SUITE = Path(__file__).resolve().parent.parent / "data" / "json_schemas.json"
END = 256


class Bytes:
    """Every byte is a token; 256 ends a text."""

    eos_ids = frozenset({END})
    bos_id: int | None = None
    size = 257

    def encode(self, text: str, special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        return bytes(i for i in ids if i < END).decode("utf-8", "replace") or ("" if skip_special else "</s>")

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < END else b""

    def is_special(self, token: int) -> bool:
        return token >= END


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(Bytes())


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return [int(t) for t in np.flatnonzero(bits)]


def accepts(matcher: Matcher, text: bytes) -> bool:
    """Whether a matcher, put back to its start, takes a whole text and may end there."""
    matcher.reset()
    return all(matcher.accept(byte) for byte in text) and matcher.complete


def draw(logits: NDArray[np.float32], mask: NDArray[np.uint32], uniform: float) -> int:
    """A token at temperature 1 from the masked logits: inverse of the cumulated softmax."""
    bits = np.unpackbits(mask.view(np.uint8), bitorder="little")[: len(logits)].astype(bool)
    weights = np.where(bits, np.exp(logits.astype(np.float64) - logits.max()), 0.0)
    cumulated = np.cumsum(weights)
    assert cumulated[-1] > 0, "nothing is allowed"
    return int(np.searchsorted(cumulated, uniform * cumulated[-1], side="right"))


# Biased toward closing, so that a random text ends.
CLOSING = np.zeros(257, dtype=np.float32)
CLOSING[[ord('"'), ord("]"), ord("}"), END]] = 4


def random_text(matcher: Matcher, seed: int, most: int = 2000) -> bytes | None:
    """Text of a random model under a grammar; None when it has not ended after ``most`` tokens."""
    random = np.random.default_rng(seed)
    text = bytearray()
    for _ in range(most):
        logits = random.standard_normal(257).astype(np.float32) + CLOSING
        token = draw(logits, matcher.mask(), random.random())
        assert matcher.accept(token), matcher.error
        if token == END:
            return bytes(text)
        text.append(token)
    return None


def groups() -> list[tuple[str, str, str, Any, list[tuple[Any, bool]]]]:
    """(draft, file, description, schema, instances); a schema says which draft it follows."""
    read = json.loads(SUITE.read_text(encoding="utf-8"))["groups"]
    for group in read:
        if isinstance(group[3], dict):
            group[3].setdefault("$schema", DRAFTS[group[0]].META_SCHEMA.get("$schema"))
    return [tuple(group) for group in read]


DRAFTS = {
    "draft2020-12": validators.Draft202012Validator,
    "draft2019-09": validators.Draft201909Validator,
    "draft7": validators.Draft7Validator,
    "draft6": validators.Draft6Validator,
    "draft4": validators.Draft4Validator,
}


def reference(draft: str, schema: Any) -> Validator:
    return DRAFTS[draft](schema)  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def compiled(compiler: GrammarCompiler) -> Iterator[list[tuple[str, str, Any, list[tuple[Any, bool]], Matcher]]]:
    """Every schema of the suite that llguidance supports; the others must say why, and quickly."""
    kept, refused, slowest = [], Counter[str](), 0.0
    for draft, file, description, schema, tests in groups():
        began = time.process_time()
        try:
            matcher = compiler.compile(Grammar("json_schema", json.dumps(schema)))
        except InputError as error:
            assert error.code.startswith("grammar.") and len(error.message) > 20, description
            refused[error.code] += 1
        else:
            kept.append((draft, f"{file}: {description}", schema, tests, matcher))
        slowest = max(slowest, time.process_time() - began)
    print(f"\n{len(kept)} of {len(groups())} schemas compile; refused {dict(refused)}; slowest {slowest:.3f} s")
    assert slowest < 5
    yield kept


def test_a_random_model_writes_valid_json(compiled: list[Any]) -> None:
    assert len(compiled) >= 200
    wrong = []
    for draft, name, schema, _, matcher in compiled:
        for seed in (1, 2):
            matcher.reset()
            text = random_text(matcher, seed)
            if text is None:
                wrong.append(f"{name}: no end")
                continue
            try:
                errors = [e.message for e in reference(draft, schema).iter_errors(json.loads(text))]
            except ValueError as error:
                errors = [f"not JSON: {error}"]
            wrong += [f"{name}: {text[:80]!r}: {message}" for message in errors]
    assert not wrong, "\n".join(wrong)


def test_the_suites_own_instances(compiled: list[Any]) -> None:
    """Invalid ones are rejected; of the valid ones, those in another order of properties are too."""
    taken, valid, wrong = 0, 0, []
    for _, name, _, tests, matcher in compiled:
        for instance, holds in tests:
            fits = accepts(matcher, json.dumps(instance, ensure_ascii=False).encode())
            taken += holds and fits
            valid += holds
            if fits and not holds:
                wrong.append(f"{name}: {json.dumps(instance)}")
    print(f"\n{taken} of {valid} valid instances accepted")
    assert not wrong, "\n".join(wrong)
    assert taken > 0.85 * valid
