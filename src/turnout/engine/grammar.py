"""Grammars as token masks, through llguidance: compiled once per text, one matcher per sequence.

A matcher follows the tokens of one sequence. Before each draw `Matcher.mask` says which ids may follow;
the sampler sets the others' logits to minus infinity, so a draw has the model's distribution restricted to
those ids and renormalised, nothing else. Where the grammar leaves one text only (a key of a JSON object),
llguidance allows only the first token of that text's own tokenisation, not every token that begins it:
the model then reads the tokens that it was trained on.

Ends are counted here rather than by llguidance, which forgets an end token that comes when nothing else
could: an end token is allowed when the text so far is a whole match, and after it nothing follows.
"""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from turnout.engine.executor import Vocabulary
from turnout.errors import InputError
from turnout.types import Grammar

KINDS = ("json_schema", "json_object", "regex", "lark", "choice")
MAX_TEXT = 1 << 20  # bytes of a grammar's source
KEPT_GRAMMARS = 64
# JSON allows any amount of white space between two parts, and a weak model then writes nothing else.
# A schema's own `x-guidance` comes before it.
WHITE_SPACE = r"[\x20\x0A\x0D\x09]{1,40}"
# llguidance's own bounds, except the states of the lexer: 50,000 of one to two kilobytes each.
LIMITS = {
    "max_items_in_row": 2_000,
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 200_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 500_000,
}
SPACED = {"whitespace_pattern": WHITE_SPACE}
DEAD_END = "NoExtensionBias"  # llguidance's name for a state that nothing can follow and that is no match
# Words of llguidance's messages about what a schema may say and it cannot enforce.
UNSUPPORTED = (
    "unimplemented",
    "unsupported",
    "not supported",
    "unknown format",
    "not disjoint",
    "too many digits",
    "not present in a registry",  # a reference to another document; nothing is fetched
)


class _Tokens:
    """A vocabulary as llguidance's constructor reads it."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary, width: int) -> None:
        known = range(min(vocabulary.size, width))
        special = [t for t in known if vocabulary.is_special(t)]
        tokens = [vocabulary.token_bytes(t) for t in known] + [b""] * (width - len(known))
        for token in special:  # a Lark grammar may name them: <|tool_call|>
            tokens[token] = vocabulary.decode([token], skip_special=False).encode()
        ends = sorted(t for t in vocabulary.eos_ids if t < width)
        if not ends:  # llguidance wants one; an id that no logits have
            ends, tokens = [width], [*tokens, b""]
            special.append(width)
        self.tokens = tokens
        self.special_token_ids = sorted({*special, *ends})
        self.eos_token_id = ends[0]
        self.bos_token_id = vocabulary.bos_id
        self.ends = ends
        self._vocabulary = vocabulary
        self._by_length: dict[int, dict[bytes, int]] | None = None

    def __call__(self, text: str) -> list[int]:
        """Ids that spell a forced text exactly. Never raises: llguidance would panic."""
        wanted = text.encode()
        # A SentencePiece tokenizer puts a space before a text; after a line feed it does not.
        for anchor in ("", "\n"):
            try:
                ids = self._vocabulary.encode(anchor + text, special=False)
                spelled = [self._vocabulary.token_bytes(t) for t in ids]
            except Exception:  # a text that this vocabulary cannot spell
                continue
            lead = 0
            while anchor and lead < len(ids) and b"".join(spelled[:lead]) not in (b"\n", b" \n"):
                lead += 1
            if b"".join(spelled[lead:]) == wanted and all(spelled[lead:]):
                return ids[lead:]
        return self._longest(wanted)

    def _longest(self, text: bytes) -> list[int]:
        """Longest token first; stops at a byte without a token."""
        if self._by_length is None:
            self._by_length = {}
            hidden = set(self.special_token_ids)
            for token, spelled in enumerate(self.tokens):
                if spelled and token not in hidden:
                    self._by_length.setdefault(len(spelled), {}).setdefault(spelled, token)
        lengths, ids, at = sorted(self._by_length, reverse=True), [], 0
        while at < len(text):
            for length in lengths:
                token = self._by_length[length].get(text[at : at + length], -1)
                if token >= 0:
                    break
            else:
                break
            ids.append(token)
            at += length
        return ids


class GrammarCompiler:
    """Grammars of one vocabulary. The vocabulary is read at the first grammar, once; threads may share it.

    ``width`` is that of the logits where it differs from the vocabulary's size: ids that the vocabulary
    lacks are never allowed.
    """

    def __init__(self, vocabulary: Vocabulary, width: int | None = None) -> None:
        self._vocabulary = vocabulary
        self._width = width or vocabulary.size
        self._lock = threading.Lock()
        self._tokens: _Tokens | None = None
        self._tokenizer: Any = None
        self._kept: OrderedDict[Grammar, Any] = OrderedDict()  # llguidance matchers that took no token

    def compile(self, grammar: Grammar) -> Matcher:
        """A matcher at the start of a text. A grammar asked again is copied, not compiled.

        Raises ``InputError``: ``grammar.invalid`` (malformed), ``grammar.unsupported`` (a keyword that
        llguidance does not enforce), ``grammar.unsatisfiable`` (nothing matches), ``grammar.too_complex``
        (beyond a bound).
        """
        with self._lock:
            inner = self._kept.get(grammar)
            if inner is None:
                inner = self._build(grammar)
                self._kept[grammar] = inner
                if len(self._kept) > KEPT_GRAMMARS:
                    self._kept.popitem(last=False)
            else:
                self._kept.move_to_end(grammar)
            assert self._tokens is not None
            return Matcher(inner.deep_copy(), self._tokens.ends, self._width)

    def prepare(self) -> None:
        """Reads the vocabulary now (a second for 150,000 tokens) rather than at the first grammar."""
        with self._lock:
            self._read()

    def _read(self) -> None:
        if self._tokens is None:
            tokens = _Tokens(self._vocabulary, self._width)
            self._tokenizer = _library().LLTokenizer(tokens, eos_token=tokens.ends)
            self._tokens = tokens

    def _build(self, grammar: Grammar) -> Any:
        source = _source(grammar)
        llguidance = _library()
        self._read()
        limits = llguidance.LLParserLimits(**LIMITS, verbose_errors=False)
        inner = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=limits)
        probe = inner.deep_copy()  # some dead ends and excesses show at the first step only
        probe.compute_bitmask()
        probe.compute_ff_tokens()
        for each in (inner, probe):
            if each.is_error():
                raise _refusal(grammar, _tidy(each.get_error()))
        return inner


class Matcher:
    """Where one sequence stands in its grammar."""

    def __init__(self, inner: Any, ends: list[int], width: int) -> None:
        self._inner = inner
        self._ends = ends
        self._width = width
        words = (width + 31) // 32
        # llguidance writes its own vocabulary's bits, one more where it has no end token.
        self._written = np.zeros((max(width, ends[-1] + 1) + 31) // 32, dtype=np.uint32)
        self._mask = self._written[:words]
        self._last = np.uint32((1 << (width % 32 or 32)) - 1)
        self._only_ends = np.zeros(words, dtype=np.uint32)
        for token in ends:
            if token < width:
                self._only_ends[token // 32] |= np.uint32(1 << (token % 32))
        self._accepted = 0  # tokens that the inner matcher took
        self._ended = False  # an end token came after them

    @property
    def complete(self) -> bool:
        """Whether the text so far is a whole match."""
        return self._ended or (self._inner.is_accepting() and not self._inner.is_error())

    @property
    def stopped(self) -> bool:
        """Whether nothing but an end token can follow. False in an error, which is no end of a text."""
        return self._ended or (self._inner.is_stopped() and not self._inner.is_error())

    @property
    def error(self) -> str:
        """Why the matcher can go no further; empty while all is well."""
        return _tidy(self._inner.get_error())

    @property
    def warnings(self) -> tuple[str, ...]:
        """What llguidance found doubtful in the grammar."""
        return tuple(self._inner.get_grammar_warnings())

    def mask(self) -> NDArray[np.uint32]:
        """Allowed ids, uint32 [ceil(width / 32)]: id t is bit t % 32 of word t // 32.

        Only end tokens (none, if the vocabulary has none) when nothing else can follow. The array is
        written anew by this matcher's next call. Raises ``InputError``, ``grammar.too_complex`` when the
        step is beyond a bound or ``grammar.unsatisfiable`` at a dead end; the sequence cannot go on then.
        """
        if self._ended:
            return self._only_ends
        self._inner.unsafe_compute_mask_ptr(self._written.ctypes.data, self._written.nbytes)
        self._check()
        self._mask[-1] &= self._last
        return self._mask

    def _check(self) -> None:
        if not self._inner.is_error():
            return
        if DEAD_END in self.error:
            raise InputError(
                f"the grammar leads to a dead end: nothing can follow the {self._accepted} tokens so far",
                code="grammar.unsatisfiable",
            )
        raise InputError(
            f"the grammar became too complex after {self._accepted} tokens: {self.error}",
            code="grammar.too_complex",
            hints=("simplify the grammar: fewer alternatives, shorter repetitions, longer terminals",),
        )

    def accept(self, token: int) -> bool:
        """Takes the next token; False, and nothing changed, when it does not fit.

        Also False when taking it is beyond a bound: `error` is set then and the next `mask` raises.
        """
        if self._ended or not 0 <= token < self._width:
            return False
        if token in self._ends and self.complete:
            self._ended = True
            return True
        if self._inner.is_stopped() or self._inner.try_consume_tokens([token]) != 1:
            return False
        self._accepted += 1
        return True

    def roll_back(self, count: int) -> None:
        """Forgets the last ``count`` accepted tokens. Raises ValueError when there are fewer.

        An error is not forgotten, by `reset` neither.
        """
        taken = self._accepted + self._ended
        if not 0 <= count <= taken:
            raise ValueError(f"cannot roll back {count} of {taken} tokens")
        if count and self._ended:
            self._ended = False
            count -= 1
        if count:
            self._inner.rollback(count)  # fails in an error only, which stays: `mask` will tell
            self._accepted -= count

    def forced(self) -> list[int]:
        """Tokens that must follow, as drafts; often none. Those of the text's own tokenisation."""
        if self.stopped:
            return []
        return [t for t in self._inner.compute_ff_tokens() if t < self._width]

    def reset(self) -> None:
        """Back to the start of the text."""
        self.roll_back(self._accepted + self._ended)

    def copy(self) -> Matcher:
        """An independent matcher at the same place."""
        other = Matcher(self._inner.deep_copy(), self._ends, self._width)
        other._accepted, other._ended = self._accepted, self._ended
        return other


def _library() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise InputError(
            "grammars need `llguidance`, which is not installed",
            code="dependency.missing",
            hints=("pip install 'turnout[engine]'",),
        ) from error
    return llguidance


def _source(grammar: Grammar) -> str:
    """llguidance's own form of a grammar. Raises ``InputError`` for what can be seen before compiling."""
    try:
        size = len(grammar.text.encode())
    except UnicodeEncodeError as error:
        raise InputError(f"the {grammar.kind} grammar is not Unicode: {error}", code="grammar.invalid") from None
    if size > MAX_TEXT:
        raise InputError(
            f"a {grammar.kind} grammar of {size} bytes; the most is {MAX_TEXT}", code="grammar.too_complex"
        )
    matcher = _library().LLMatcher
    match grammar.kind:
        case "json_schema":
            schema = _schema(grammar.text)
            own = schema.get("x-guidance")
            says = isinstance(own, dict) and own.keys() & {"whitespace_flexible", "whitespace_pattern"}
            try:
                return str(
                    matcher.grammar_from_json_schema(
                        json.dumps(schema, ensure_ascii=False), defaults=None if says else SPACED
                    )
                )
            except ValueError as error:
                raise _refusal(grammar, _tidy(str(error))) from None
        case "json_object":
            return str(matcher.grammar_from_json_schema('{"type": "object"}', defaults=SPACED))
        case "regex":
            return str(matcher.grammar_from_regex(grammar.text))
        case "lark":
            return str(matcher.grammar_from_lark(grammar.text))
        case "choice":
            return str(matcher.grammar_from_regex("|".join(map(_literal, _choices(grammar.text)))))
    raise InputError(
        f"unknown kind of grammar `{grammar.kind}`", code="grammar.invalid", hints=("kinds: " + ", ".join(KINDS),)
    )


def _schema(text: str) -> dict[str, Any]:
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise InputError(f"the JSON schema is not JSON: {error}", code="grammar.invalid") from None
    except RecursionError:
        raise InputError("the JSON schema is nested too deeply", code="grammar.too_complex") from None
    if schema is True:
        return {}
    if schema is False:
        raise InputError("the JSON schema `false` matches nothing", code="grammar.unsatisfiable")
    if not isinstance(schema, dict):
        raise InputError(f"a JSON schema is an object, not {json.dumps(schema)[:60]}", code="grammar.invalid")
    return schema


def _choices(text: str) -> list[str]:
    try:
        choices = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(f"the choices are not JSON: {error}", code="grammar.invalid") from None
    if not isinstance(choices, list) or not choices or not all(isinstance(c, str) for c in choices):
        raise InputError(
            f"choices are a JSON list of at least one string, not {text[:60]}",
            code="grammar.invalid",
            hints=('for instance ["yes", "no"]',),
        )
    return choices


def _literal(text: str) -> str:
    """Regular expression that matches just this text."""
    return "".join(c if c.isascii() and c.isalnum() else f"\\x{{{ord(c):x}}}" for c in text)


def _tidy(message: str) -> str:
    """llguidance's message without the parser's state."""
    lines = [line for line in message.replace("<non-verbose/>", "").splitlines() if line.strip()]
    return "\n".join(lines).encode(errors="backslashreplace").decode()


def _refusal(grammar: Grammar, message: str) -> InputError:
    lower = message.lower()
    code = "grammar.invalid"
    if any(words in lower for words in UNSUPPORTED):
        code = "grammar.unsupported"
    elif "unsatisfiable" in lower or DEAD_END in message:
        code, message = "grammar.unsatisfiable", message.replace(DEAD_END, "no text matches")
    elif any(words in lower for words in ("too large", "too complex", "too many items", "fuel", "limit")):
        code = "grammar.too_complex"
    if len(message) > 600:
        message = f"{message[:300]} ... {message[-200:]}"
    places = list(_places(grammar, message))
    where = f" (at {', '.join(places[:5])})" if places else ""
    return InputError(f"the {grammar.kind} grammar cannot be used: {message}{where}", code=code)


def _places(grammar: Grammar, message: str) -> Iterator[str]:
    """JSON pointers of the keywords that llguidance names without their place."""
    _, found, listed = message.partition("Unimplemented keys: ")
    if grammar.kind != "json_schema" or not found:
        return
    try:
        keys = set(json.JSONDecoder().raw_decode(listed)[0])
    except ValueError:
        return
    waiting: list[tuple[str, Any]] = [("", json.loads(grammar.text))]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, dict):
            for key, inner in value.items():
                place = f"{path}/{key.replace('~', '~0').replace('/', '~1')}"
                if key in keys:
                    yield place
                waiting.append((place, inner))
        elif isinstance(value, list):
            waiting += [(f"{path}/{i}", inner) for i, inner in enumerate(value)]
