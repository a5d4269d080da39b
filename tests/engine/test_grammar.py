"""Grammars: JSON-Schema-Test-Suite from a random model, the matcher's own rules, other programs' fields."""

from __future__ import annotations

import itertools
import json
import re
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import validators
from jsonschema.protocols import Validator
from numpy.typing import NDArray
from scipy import stats
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


def random_text(matcher: Matcher, seed: int, closing: float, most: int = 2000) -> bytes | None:
    """Text of a random model under a grammar; None when it has not ended after ``most`` tokens.

    ``closing`` is added to the logits of what closes something, so that a random text ends.
    """
    random = np.random.default_rng(seed)
    text = bytearray()
    for _ in range(most):
        logits = random.standard_normal(257).astype(np.float32)
        logits[[ord('"'), ord("]"), ord("}"), END]] += closing
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
        for seed, closing in ((1, 4.0), (2, 4.0), (3, 2.0)):
            matcher.reset()
            text = random_text(matcher, seed, closing)
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


# Masks against brute force over finite languages, and what a draw's distribution becomes.

LANGUAGES = ["(a|bc?)d{1,2}", "a(bc)?", "[ab]{0,3}", "(true|tree|the )x?", "(?:t|tr|tru|true)", "é|€|ß?"]


def language(pattern: str) -> set[bytes]:
    """Every text of at most 6 of the characters that the patterns above use."""
    signs = [c for c in "abcdtruehx é€ß" if c in pattern]
    texts = ("".join(t) for n in range(7) for t in itertools.product(signs, repeat=n))
    return {t.encode() for t in texts if re.fullmatch(pattern, t)}


def followers(prefix: bytes, texts: set[bytes], vocabulary: Any) -> set[int]:
    """Tokens that keep a prefix a prefix of some text, and the ends where it is one."""
    spelled = ((t, vocabulary.token_bytes(t)) for t in range(vocabulary.size))
    inside = {t for t, data in spelled if data and any(x.startswith(prefix + data) for x in texts)}
    return inside | (set(vocabulary.eos_ids) if prefix in texts else set())


@pytest.mark.parametrize("pattern", LANGUAGES)
@pytest.mark.parametrize("vocabulary", [Bytes(), TinyVocabulary()], ids=["bytes", "words"])
def test_masks_allow_what_may_follow(pattern: str, vocabulary: Any) -> None:
    """Everything that may follow, or, where one text is forced, a single token of it."""
    texts = language(pattern)
    reached: list[tuple[bytes, Matcher]] = [(b"", GrammarCompiler(vocabulary).compile(Grammar("regex", pattern)))]
    seen = set()
    while reached:
        prefix, matcher = reached.pop()
        if prefix in seen:
            continue
        seen.add(prefix)
        may, does = followers(prefix, texts, vocabulary), set(allowed(matcher))
        assert matcher.complete == (prefix in texts)
        assert matcher.stopped == (may == set(vocabulary.eos_ids))
        if does != may:
            starts = {vocabulary.token_bytes(t) for t in may}
            assert does and does < may and len({s[:1] for s in starts}) == 1, (prefix, does, may)
        for token in does - vocabulary.eos_ids:
            further = matcher.copy()
            assert further.accept(token)
            reached.append((prefix + vocabulary.token_bytes(token), further))
    if vocabulary.size == 257:
        assert seen >= texts


def logits_after(prefix: Sequence[int], width: int) -> NDArray[np.float32]:
    return np.random.default_rng([7, *prefix]).standard_normal(width).astype(np.float32)


@pytest.mark.parametrize("pattern", ["(a|bc?)d{1,2}", "[ab]{0,3}"])
def test_a_masked_draw_is_the_restriction_renormalised(pattern: str, compiler: GrammarCompiler) -> None:
    """Frequencies of whole texts against the product of renormalised probabilities (chi-square)."""
    texts, exact = language(pattern), {}
    for text in texts:
        chance = 1.0
        for n in range(len(text) + 1):
            weights = np.exp(logits_after(text[:n], 257).astype(np.float64))
            token = text[n] if n < len(text) else END
            chance *= weights[token] / weights[sorted(followers(text[:n], texts, Bytes()))].sum()
        exact[text] = chance
    assert sum(exact.values()) == pytest.approx(1)
    matcher = compiler.compile(Grammar("regex", pattern))
    random, counts, draws = np.random.default_rng(3), Counter[bytes](), 6000
    known: dict[bytes, tuple[NDArray[np.float32], NDArray[np.uint32]]] = {}
    for _ in range(draws):
        matcher.reset()
        text = b""
        while not matcher.stopped:
            if text not in known:
                known[text] = logits_after(text, 257), matcher.mask().copy()
            token = draw(*known[text], random.random())
            assert matcher.accept(token)
            text += Bytes().token_bytes(token)
        counts[text] += 1
    assert set(counts) <= texts
    order = sorted(texts)
    test = stats.chisquare([counts[t] for t in order], [exact[t] * draws for t in order])
    assert test.pvalue > 0.001


SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["true", "the "]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(0, 63), st.just(-1), st.integers(-6, -2)), max_size=30), st.booleans())
def test_a_matcher_rolled_back_is_the_one_that_never_went(moves: list[int], schema: bool) -> None:
    """Random walks with roll-backs, wrong tokens and ends, against a fresh matcher fed what remains."""
    grammar = Grammar("json_schema", SCHEMA) if schema else Grammar("regex", "(true|the |[a-c]{2,4})+x?")
    compiler = GrammarCompiler(TinyVocabulary())
    matcher, taken = compiler.compile(grammar), []
    for move in moves:
        if move < -1:
            count = min(-move - 1, len(taken))
            matcher.roll_back(count)
            del taken[len(taken) - count :]
            continue
        fits = allowed(matcher)
        token = fits[len(taken) % len(fits)] if move == -1 else move
        ended = bool(taken) and taken[-1] == EOS
        assert matcher.accept(token) == (token in fits and not ended)
        if token in fits and not ended:
            taken.append(token)
    fresh = compiler.compile(grammar)
    assert all(fresh.accept(token) for token in taken)
    for other in (matcher, matcher.copy()):
        assert allowed(other) == allowed(fresh)
        assert (other.complete, other.stopped, other.error) == (fresh.complete, fresh.stopped, "")
        assert other.forced() == fresh.forced()
    matcher.reset()
    assert allowed(matcher) == allowed(compiler.compile(grammar))


def test_an_end_is_counted() -> None:
    matcher = GrammarCompiler(Bytes()).compile(Grammar("regex", "ab*"))
    assert not matcher.accept(END) and not matcher.error
    assert matcher.accept(ord("a")) and matcher.complete and not matcher.stopped
    assert matcher.accept(END) and matcher.stopped
    assert allowed(matcher) == [END]
    assert not matcher.accept(END) and not matcher.accept(ord("b"))
    matcher.roll_back(1)
    assert allowed(matcher) == [ord("b"), END]
    with pytest.raises(ValueError, match="cannot roll back 2 of 1"):
        matcher.roll_back(2)


def test_forced_tokens_follow_and_leave_the_matcher_where_it_was(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar("json_schema", SCHEMA))
    assert matcher.accept(ord("{"))
    forced = matcher.forced()
    assert bytes(forced) in (b'"name"', b'"name":', b"") and allowed(matcher)
    while not matcher.accept(ord('"')):
        raise AssertionError(matcher.error)
    forced = matcher.forced()
    assert bytes(forced).startswith(b'name"')
    assert all(matcher.accept(token) for token in forced)
    done = compiler.compile(Grammar("choice", '["yes"]'))
    assert bytes(done.forced()) == b"yes" and all(done.accept(t) for t in b"yes")
    assert done.stopped and done.complete and done.forced() == [] and allowed(done) == [END]


class Doubled(Bytes):
    """Two tokens of the same spelling, as byte and text tokens of SentencePiece."""

    size = 260

    def token_bytes(self, token: int) -> bytes:
        return {257: b"a", 258: b"ab", 259: b"ab"}.get(token) or super().token_bytes(token)

    def is_special(self, token: int) -> bool:
        return token == END


def test_tokens_of_one_spelling_are_all_allowed() -> None:
    matcher = GrammarCompiler(Doubled()).compile(Grammar("regex", "ab|ac"))
    assert allowed(matcher) == [97, 257, 258, 259]
    assert all(matcher.copy().accept(token) for token in (97, 257, 258, 259))


class NoEnd(Bytes):
    """Without an end token, and a text that `encode` cannot spell."""

    eos_ids = frozenset[int]()

    def encode(self, text: str, special: bool = True) -> list[int]:
        raise ValueError("no tokens for this")


def test_logits_wider_or_narrower_than_the_vocabulary() -> None:
    grammar = Grammar("regex", "[^a]?")
    wide = GrammarCompiler(Bytes(), width=300).compile(grammar)
    assert wide.mask().shape == (10,) and max(allowed(wide)) == END
    assert not wide.accept(257) and not wide.accept(300) and not wide.accept(-1)
    narrow = GrammarCompiler(Bytes(), width=100).compile(grammar)
    assert narrow.mask().shape == (4,) and max(allowed(narrow)) < 100
    for width in (257, 256, 320):
        endless = GrammarCompiler(NoEnd(), width=width).compile(Grammar("regex", "ab"))
        assert all(endless.accept(token) for token in b"ab") and endless.complete and endless.stopped
        assert allowed(endless) == []


class Spaced(Bytes):
    """As SentencePiece does: a space before every text; 300 is a word of several bytes."""

    size = 301

    def encode(self, text: str, special: bool = True) -> list[int]:
        ids: list[int] = []
        for part in re.split("(yes)", " " + text):
            ids += [300] if part == "yes" else part.encode()
        return ids

    def token_bytes(self, token: int) -> bytes:
        return b"yes" if token == 300 else super().token_bytes(token)

    def is_special(self, token: int) -> bool:
        return token == END


def test_a_forced_text_is_tokenised_as_the_vocabulary_does() -> None:
    matcher = GrammarCompiler(Spaced()).compile(Grammar("choice", '["yesyes!"]'))
    assert matcher.forced() == [300, 300, ord("!")]


def test_special_tokens_have_names_in_lark_and_nowhere_else() -> None:
    compiler = GrammarCompiler(TinyVocabulary())
    matcher = compiler.compile(Grammar("lark", 'start: <pad> "a"'))
    assert allowed(matcher) == [2] and matcher.accept(2) and matcher.accept(3) and matcher.complete
    anything = compiler.compile(Grammar("regex", "(?s:.*)"))
    assert not {0, 2} & set(allowed(anything)) and EOS in allowed(anything)


@pytest.mark.parametrize(
    ("grammar", "right", "wrong"),
    [
        (Grammar("choice", '["a", "ab", "€ \\"\\n", ""]'), ["a", "ab", '€ "\n', ""], ["b", "abc", "€"]),
        (Grammar("json_object"), ["{}", '{"a": [1, {"b": null}]}'], ["[]", "1", "{", '{"a":}']),
        (Grammar("json_schema", "true"), ["1", "[]", '{"a":"b"}'], ["", "{"]),
        (Grammar("regex", r"\d{2,3}-[a-z]+"), ["12-a", "123-xyz"], ["1-a", "12-", "12-A"]),
        (Grammar("lark", "start: NUMBER (OP NUMBER)*\nNUMBER: /[0-9]+/\nOP: /[-+*]/"), ["1", "12+3*4"], ["", "1+"]),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else "",
)
def test_kinds(grammar: Grammar, right: list[str], wrong: list[str], compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(grammar)
    assert all(accepts(matcher, text.encode()) for text in right)
    assert not any(accepts(matcher, text.encode()) for text in wrong)


def test_white_space_ends_and_a_schema_may_say_otherwise(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar("json_object"))
    assert accepts(matcher, b"{" + b" " * 40 + b"}") and not accepts(matcher, b"{" + b" " * 41 + b"}")
    tight = {"type": "object", "x-guidance": {"whitespace_flexible": False}}
    matcher = compiler.compile(Grammar("json_schema", json.dumps(tight)))
    assert accepts(matcher, b'{"a":1}') and not accepts(matcher, b'{"a": 1}')


DEEP = '{"items":' * 3000 + "{}" + "}" * 3000
NESTED = '{"items":' * 150 + "{}" + "}" * 150
WIDE = json.dumps({"allOf": [{"anyOf": [{"properties": {f"p{i}{j}": {}}} for j in range(4)]} for i in range(10)]})


@pytest.mark.parametrize(
    ("grammar", "code", "words"),
    [
        (Grammar("json_schema", '{"type": "bogus"}'), "grammar.invalid", "bogus"),
        (Grammar("json_schema", '{"type": '), "grammar.invalid", "line 1 column 10"),
        (Grammar("json_schema", "[1]"), "grammar.invalid", "is an object, not"),
        (Grammar("json_schema", "false"), "grammar.unsatisfiable", "matches nothing"),
        (
            Grammar("json_schema", '{"properties": {"a/b": {"items": {"not": {}}}}}'),
            "grammar.unsupported",
            "/properties/a~1b/items/not",
        ),
        (Grammar("json_schema", '{"$ref": "http://example.org/x.json"}'), "grammar.unsupported", "example.org"),
        (Grammar("json_schema", '{"$ref": "#"}'), "grammar.unsatisfiable", "no text matches"),
        (Grammar("json_schema", '{"type": "integer", "minimum": 3, "maximum": 1}'), "grammar.unsatisfiable", "minimum"),
        (Grammar("json_schema", DEEP), "grammar.too_complex", "too deeply"),
        (Grammar("json_schema", NESTED), "grammar.too_complex", "limit"),
        (Grammar("json_schema", WIDE), "grammar.too_complex", "too large"),
        (Grammar("regex", "a" * (1 << 20) + "b"), "grammar.too_complex", "1048577 bytes"),
        (Grammar("regex", "a(b"), "grammar.invalid", "unclosed group"),
        (Grammar("regex", "(?=a)b"), "grammar.unsupported", "look-around"),
        (Grammar("lark", "start: foo"), "grammar.invalid", 'unknown name: "foo"'),
        (Grammar("lark", "start: X\nX: /a+/ & /b+/"), "grammar.unsatisfiable", "no text matches"),
        (Grammar("choice", "[]"), "grammar.invalid", "at least one string"),
        (Grammar("choice", '["a", 1]'), "grammar.invalid", "at least one string"),
        (Grammar("choice", "yes"), "grammar.invalid", "not JSON"),
        (Grammar("bnf", "x"), "grammar.invalid", "`bnf`"),
        (Grammar("regex", "a\ud800"), "grammar.invalid", "not Unicode"),
        (Grammar("choice", '["\\ud800"]'), "grammar.invalid", "invalid"),
        (Grammar("json_schema", '{"const": "\\ud800"}'), "grammar.invalid", "not JSON serializable"),
        (Grammar("json_schema", '{"minimum": NaN}'), "grammar.invalid", "expected value"),
    ],
    ids=lambda value: value.kind if isinstance(value, Grammar) else str(value)[:20],
)
def test_refusals(grammar: Grammar, code: str, words: str, compiler: GrammarCompiler) -> None:
    began = time.process_time()
    with pytest.raises(InputError) as raised:
        compiler.compile(grammar)
    assert raised.value.code == code and words in raised.value.message, raised.value.message
    assert len(raised.value.message) < 1000 and time.process_time() - began < 5


ENDLESS = [
    Grammar("lark", 'start: "a" start'),
    Grammar("json_schema", '{"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]}'),
    Grammar("regex", "(?:a{1,1000}){1,1000}"),
    Grammar("regex", "(a|b)*a(a|b){24}"),
    Grammar("lark", 'start: start start | "a" | ""'),
    Grammar("lark", 'start: x x x x x x x x\nx: "a" x | "a" x "a" | "a"'),
    Grammar("choice", json.dumps([f"word {i}" for i in range(20_000)])),
    Grammar("json_schema", json.dumps({"anyOf": [{"const": f"x{i}"} for i in range(5000)]})),
]


@pytest.mark.parametrize("grammar", ENDLESS, ids=range(len(ENDLESS)))
def test_hostile_grammars_end(grammar: Grammar, compiler: GrammarCompiler) -> None:
    """300 steps, or a refusal by name, in bounded time."""
    began = time.process_time()
    try:
        matcher = compiler.compile(grammar)
        for _ in range(300):
            if matcher.stopped:
                break
            if not matcher.accept(allowed(matcher)[0]):
                assert matcher.error and not matcher.stopped
                matcher.mask()
                raise AssertionError("an allowed token was refused")
    except InputError as error:
        assert error.code == "grammar.too_complex"
    assert time.process_time() - began < 20


def test_a_dead_end_further_on_is_named(compiler: GrammarCompiler) -> None:
    matcher = compiler.compile(Grammar("lark", 'start: "x" A\nA: /a+/ & /b+/'))
    assert matcher.accept(ord("x"))
    with pytest.raises(InputError, match="dead end: nothing can follow the 1 tokens") as raised:
        matcher.mask()
    assert raised.value.code == "grammar.unsatisfiable" and matcher.error and not matcher.complete
    assert not matcher.stopped and not matcher.accept(ord("a")) and matcher.forced() == []
    matcher.roll_back(1)
    with pytest.raises(InputError):
        matcher.mask()


def test_a_grammar_is_compiled_once_and_kept_a_while(compiler: GrammarCompiler) -> None:
    own = GrammarCompiler(Bytes())
    own.prepare()
    first = own.compile(Grammar("regex", "x{1,9}"))
    assert first.accept(ord("x"))
    again = own.compile(Grammar("regex", "x{1,9}"))
    assert not again.complete and first.complete
    for i in range(KEPT_GRAMMARS + 5):
        own.compile(Grammar("choice", json.dumps([str(i)])))
    assert len(own._kept) == KEPT_GRAMMARS and Grammar("regex", "x{1,9}") not in own._kept
