"""Grammars in the fields of other programs' requests."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.engine.tiny import TinyVocabulary

from turnout.engine.grammar import GrammarCompiler
from turnout.engine.grammar_formats import grammar_of, response_format, structured_outputs
from turnout.errors import InputError
from turnout.types import Grammar

SCHEMA = {"type": "object", "properties": {"a": {"const": "é"}}, "required": ["a"]}
AS_SCHEMA = Grammar("json_schema", json.dumps(SCHEMA, ensure_ascii=False))
GBNF = 'root ::= "yes" | "no" tail\ntail ::= [a-c]+'


@pytest.mark.parametrize(
    ("body", "grammar"),
    [
        ({}, None),
        ({"response_format": None, "text": "a prompt", "messages": []}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, Grammar("json_object")),
        ({"response_format": {"type": "json_object", "schema": SCHEMA}}, AS_SCHEMA),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "x", "strict": True, "schema": SCHEMA},
                }
            },
            AS_SCHEMA,
        ),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}}, AS_SCHEMA),
        ({"text": {"format": {"type": "text"}}}, None),
        ({"response_format": {"type": "regex", "pattern": "[ab]+"}}, Grammar("regex", "[ab]+")),
        ({"structured_outputs": {"json": SCHEMA, "regex": None, "json_object": False}}, AS_SCHEMA),
        ({"structured_outputs": {"json_object": True}}, Grammar("json_object")),
        ({"structured_outputs": {"choice": ["a", "b"]}}, Grammar("choice", '["a", "b"]')),
        ({"guided_json": json.dumps(SCHEMA)}, AS_SCHEMA),
        ({"guided_regex": "a+"}, Grammar("regex", "a+")),
        ({"guided_choice": ["é"]}, Grammar("choice", '["é"]')),
        ({"guided_grammar": 'start: "a"'}, Grammar("lark", 'start: "a"')),
        ({"json_schema": SCHEMA}, AS_SCHEMA),
        ({"guided_json": SCHEMA, "json_schema": SCHEMA}, AS_SCHEMA),
    ],
)
def test_fields(body: dict[str, Any], grammar: Grammar | None) -> None:
    assert grammar_of(body) == grammar


@pytest.mark.parametrize("field", ["grammar", "ebnf", "guided_grammar"])
def test_gbnf(field: str) -> None:
    grammar = grammar_of({field: GBNF})
    assert grammar is not None and grammar.kind == "lark"
    compiler, vocabulary = GrammarCompiler(TinyVocabulary()), TinyVocabulary()
    for text, fits in (("yes", True), ("noabc", True), ("no", False), ("nod", False)):
        matcher = compiler.compile(grammar)
        assert (all(matcher.accept(t) for t in vocabulary.encode(text, special=False)) and matcher.complete) is fits


@pytest.mark.parametrize(
    ("body", "code", "words"),
    [
        ({"response_format": "json"}, "grammar.invalid", "`response_format` is 'json'"),
        ({"response_format": {"type": "xml"}}, "grammar.unsupported", "`response_format.type` is `xml`"),
        ({"response_format": {}}, "grammar.unsupported", "`response_format.type` is `None`"),
        ({"response_format": {"type": "json_schema"}}, "grammar.invalid", "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": 3}}}, "grammar.invalid", "is 3"),
        ({"text": {"format": {"type": "xml"}}}, "grammar.unsupported", "text.format.type"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "grammar.unsupported", "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json_object": "yes"}}, "grammar.invalid", "true or false"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "grammar.conflict", "structured_outputs.choice"),
        ({"guided_json": "{"}, "grammar.invalid", "`guided_json` is not JSON"),
        ({"guided_choice": []}, "grammar.invalid", "at least one string"),
        ({"guided_choice": "yes"}, "grammar.invalid", "at least one string"),
        ({"guided_regex": ""}, "grammar.invalid", "not empty"),
        ({"guided_regex": "a", "guided_json": SCHEMA}, "grammar.conflict", "`guided_regex`"),
        ({"grammar": "root ::= other"}, "grammar.invalid", "other"),
        ({"grammar": "root ::= (" + "x" * (1 << 16)}, "grammar.too_complex", "65546 characters"),
        ({"grammar": {"type": "json"}}, "grammar.invalid", "`grammar`"),
    ],
)
def test_refusals(body: dict[str, Any], code: str, words: str) -> None:
    with pytest.raises(InputError) as raised:
        grammar_of(body)
    assert raised.value.code == code and words in raised.value.message, raised.value.message


def test_each_reader_alone() -> None:
    assert response_format({"type": "json_object"}) == Grammar("json_object")
    assert structured_outputs({}) is None
