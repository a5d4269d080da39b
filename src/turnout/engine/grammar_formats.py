"""Grammars as other programs' requests state them: OpenAI's ``response_format`` (chat completions) and
``text.format`` (responses), vLLM's ``structured_outputs`` and ``guided_*``, SGLang's and llama.cpp's fields.

Every way to ask is read here and means one `Grammar`; two at once, or a field that nothing here honours,
are refused by name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from turnout.errors import InputError
from turnout.types import Grammar

# The converter of GBNF is plain Python and walks every character.
MAX_GBNF = 1 << 16

Reader = Callable[[Any, str], Grammar | None]


def grammar_of(body: Mapping[str, Any]) -> Grammar | None:
    """The grammar that a request's body asks for, None when it asks for none.

    Reads ``response_format``, ``text.format``, ``structured_outputs``, ``guided_json``, ``guided_regex``,
    ``guided_choice``, ``guided_grammar``, ``json_schema``, ``regex``, ``ebnf`` and ``grammar``; other fields
    are not looked at. Raises ``InputError`` (``grammar.invalid``, ``grammar.conflict``,
    ``grammar.unsupported``) with the field's name.
    """
    asked: dict[str, Grammar] = {}
    text = body.get("text")
    found = [(name, body[name], read) for name, read in FIELDS.items() if body.get(name) is not None]
    if isinstance(text, Mapping) and text.get("format") is not None:
        found.append(("text.format", text["format"], response_format))
    for name, value, read in found:
        grammar = read(value, name)
        if grammar is not None:
            asked[name] = grammar
    return _only(asked)


def response_format(value: Any, place: str = "response_format") -> Grammar | None:
    """Grammar of OpenAI's ``response_format``; both nestings of ``json_schema`` and their ``text`` are read.

    ``strict`` changes nothing: a grammar is always enforced.
    """
    if not isinstance(value, Mapping):
        raise _invalid(place, value, 'an object such as {"type": "json_object"}')
    kind = value.get("type")
    match kind:
        case "text":
            return None
        case "json_object":
            # llama.cpp's server and others let a schema stand beside it.
            return _schema(value["schema"], f"{place}.schema") if value.get("schema") else Grammar("json_object")
        case "json_schema":
            inner = value.get("json_schema", value)
            if not isinstance(inner, Mapping) or inner.get("schema") is None:
                raise _invalid(f"{place}.json_schema.schema", inner, "a JSON schema")
            return _schema(inner["schema"], f"{place}.json_schema.schema")
        case "regex" | "lark" | "choice" | "grammar":
            named = value.get(str(kind), value.get("value", value.get("pattern")))
            return STRUCTURED[str(kind)](named, f"{place}.{kind}")
    raise InputError(
        f"`{place}.type` is `{kind}`",
        code="grammar.unsupported",
        hints=("known are text, json_object, json_schema, regex, lark, grammar and choice",),
    )


def structured_outputs(value: Any, place: str = "structured_outputs") -> Grammar | None:
    """Grammar of vLLM's ``structured_outputs``: one of json, json_object, regex, choice, grammar."""
    if not isinstance(value, Mapping):
        raise _invalid(place, value, 'an object such as {"regex": "[0-9]+"}')
    asked = {}
    for name, inner in value.items():
        if inner is None or inner is False:
            continue
        read = STRUCTURED.get(name)
        if read is None:
            raise InputError(
                f"`{place}.{name}` is not known",
                code="grammar.unsupported",
                hints=("known are " + ", ".join(STRUCTURED),),
            )
        grammar = read(inner, f"{place}.{name}")
        if grammar is not None:
            asked[f"{place}.{name}"] = grammar
    return _only(asked)


def _only(asked: dict[str, Grammar]) -> Grammar | None:
    if len(set(asked.values())) > 1:
        raise InputError(
            "a text can follow one grammar; " + " and ".join(f"`{name}`" for name in asked) + " each name one",
            code="grammar.conflict",
            hints=("keep one of them",),
        )
    return next(iter(asked.values()), None)


def _schema(value: Any, place: str) -> Grammar:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise InputError(f"`{place}` is not JSON: {error}", code="grammar.invalid") from None
    if not isinstance(value, (Mapping, bool)):
        raise _invalid(place, value, "a JSON schema")
    return Grammar("json_schema", json.dumps(value, ensure_ascii=False))


def _any_object(value: Any, place: str) -> Grammar | None:
    if not isinstance(value, bool):
        raise _invalid(place, value, "true or false")
    return Grammar("json_object") if value else None


def _regex(value: Any, place: str) -> Grammar:
    return Grammar("regex", _text(value, place))


def _lark(value: Any, place: str) -> Grammar:
    return Grammar("lark", _text(value, place))


def _choice(value: Any, place: str) -> Grammar:
    if not isinstance(value, list) or not value or not all(isinstance(v, str) for v in value):
        raise _invalid(place, value, "a list of at least one string")
    return Grammar("choice", json.dumps(value, ensure_ascii=False))


def _any_grammar(value: Any, place: str) -> Grammar:
    """Lark as it is, GBNF (its rules are written ``name ::= ...``) turned into Lark."""
    text = _text(value, place)
    if "::=" not in text:
        return Grammar("lark", text)
    if len(text) > MAX_GBNF:
        raise InputError(f"`{place}` has {len(text)} characters; the most is {MAX_GBNF}", code="grammar.too_complex")
    try:
        from llguidance.gbnf_to_lark import any_to_lark
    except ImportError as error:
        raise InputError(
            f"`{place}` needs `llguidance`, which is not installed",
            code="dependency.missing",
            hints=("pip install 'turnout[engine]'",),
        ) from error
    try:
        return Grammar("lark", str(any_to_lark(text)))
    except Exception as error:  # the converter raises whatever it stumbles over
        raise InputError(f"`{place}` is not a GBNF grammar: {error}", code="grammar.invalid") from None


def _text(value: Any, place: str) -> str:
    if not isinstance(value, str) or not value:
        raise _invalid(place, value, "a text that is not empty")
    return value


def _invalid(place: str, value: Any, wanted: str) -> InputError:
    shown = repr(value)
    return InputError(f"`{place}` is {shown[:80]}; it should be {wanted}", code="grammar.invalid")


STRUCTURED: dict[str, Reader] = {
    "json": _schema,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _any_grammar,
    "lark": _lark,
}
FIELDS: dict[str, Reader] = {
    "response_format": response_format,
    "structured_outputs": structured_outputs,
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _any_grammar,
    "json_schema": _schema,
    "regex": _regex,
    "ebnf": _any_grammar,
    "grammar": _any_grammar,
}
