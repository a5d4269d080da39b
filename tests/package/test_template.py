"""Chat templates: rendered as Transformers does, or refused in bounded time and memory."""

from __future__ import annotations

import json
import time
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from turnout.package.formats.context import read_context
from turnout.package.formats.template import PROBE, Refusal, TemplateError, read_template, render
from turnout.package.scan import Scan

CHATML = """{%- if messages[0]['role'] == 'system' -%}
    {{- '<|im_start|>system\n' + messages[0]['content'] | trim + '<|im_end|>\n' }}
    {%- set loop_messages = messages[1:] %}
{%- else %}
    {%- set loop_messages = messages %}
{%- endif %}
{%- for message in loop_messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('roles must alternate') }}
    {%- endif %}
    {%- if message.content is string and '</think>' in message.content %}
        {%- set text = message.content.split('</think>')[-1].lstrip('\n') %}
    {%- else %}
        {%- set text = message.content %}
    {%- endif %}
    {{- '<|im_start|>' ~ message.role ~ '\n' ~ text }}
    {%- generation %}{{ '' }}{% endgeneration %}
    {{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"""
TOOLS = """{% if tools is defined and tools %}
{% for tool in tools %}
{{ tool | tojson(indent=2) }}
{% endfor %}
{% endif %}
{% set ns = namespace(found=false, parts=[]) %}
{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}
{% if m.role == 'user' and not ns.found %}
{% set ns.found = true %}{% set ns.parts = ns.parts + [m.content] %}{% endif %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% endfor %}
{{ ns.parts | join(', ') }} {{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{% macro shout(text) %}{{ text | upper }}!{% endmacro %}
{{ shout(messages[-1]['content']) }} {{ '%s-%d' | format('a', 3) }} {{ 'a-b'.replace('-', '+') }} {{ "%05d" % 7 }}
{{ dict(a=1, b=[1, 2.5, none]) | tojson }} {{ {'é': '<&>'} | tojson }}
{{ [3, 1, 2] | sort | sum }} {{ ('x\ny') | indent(2) }}
{{ range(3) | list }} {{ messages[0].items() | list | length }} {{ undefined_name }} {{ '{} {:>4}'.format('q', 1) }}
"""
MESSAGES = [
    {"role": "system", "content": " Be <brief> & kind. "},
    {"role": "user", "content": "héllo"},
    {"role": "assistant", "content": "<think>hm</think>\n\nhi"},
    {"role": "user", "content": "bye 😀"},
]


@pytest.mark.parametrize("template", [CHATML, TOOLS], ids=["chatml", "tools"])
@pytest.mark.parametrize("messages", [MESSAGES, MESSAGES[1:2]], ids=["all", "one"])
def test_renders_as_transformers(template: str, messages: list[dict[str, str]]) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tools: list[Any] = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    expected, _ = render_jinja_template([messages], tools=tools, chat_template=template, add_generation_prompt=True)
    assert render(template, messages, tools=tools) == expected[0]


def test_what_a_template_uses_is_told() -> None:
    template, findings = read_template(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{{ tools }}", "t"
    )
    assert findings == [] and template.valid
    assert template.uses == ["bos_token", "messages", "tools"]


INVALID = [
    "{% for %}",
    "{{ messages",
    "{% if x %}",
    "{{ messages | nonesuch }}",
    "{{ messages[0]['content'].nonesuch() }}",
    "{{ 1 / 0 }}",
]


@pytest.mark.parametrize("text", INVALID)
def test_templates_that_do_not_work(text: str) -> None:
    template, findings = read_template(text, "chat_template.jinja")
    assert not template.valid
    assert [(f.code, f.path) for f in findings] == [("template.invalid", "chat_template.jinja")]


def doubled(value: str, start: str = "[1]", use: str = "{{ n.x }}") -> str:
    return (
        f"{{% set n = namespace(x={start}) %}}"
        + "{% for i in range(60) %}{% set n.x = "
        + value
        + " %}{% endfor %}"
        + use
    )


LONG = "{% set s = 'a' * 60000 %}"
UNSAFE = {
    "range": "{% for i in range(10**9) %}x{% endfor %}",
    "nested-loops": "{% for a in range(9999) %}{% for b in range(9999) %}{% endfor %}{% endfor %}",
    "endless-macro": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "doubling-macro": "{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "recursive-loop": "{% for a in [1] recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "doubling-list": doubled("[n.x, n.x]"),
    "doubling-list-as-json": doubled("[n.x, n.x]", use="{{ n.x | tojson }}"),
    "doubling-dict": doubled("{'a': n.x, 'b': n.x}"),
    "doubling-dict-call": doubled("dict(a=n.x, b=n.x)"),
    "doubling-namespace": doubled("namespace(a=n.x, b=n.x)"),
    "doubling-text": doubled("n.x ~ n.x", "'ab'"),
    "doubling-number": doubled("n.x + n.x", "9"),
    "doubling-block": "{% set s = 'ab' %}" + "{% set s %}{{ s }}{{ s }}{% endset %}" * 40 + "{{ s }}",
    "static-text": "{% set s %}{% for i in range(99999) %}" + "x" * 10_000 + "{% endfor %}{% endset %}",
    "equal-structures": "{% set n = namespace(x=[1], y=[1]) %}"
    + "{% set n.x=[n.x,n.x] %}{% set n.y=[n.y,n.y] %}" * 40
    + "{{ n.x == n.y }}",
    "power": "{{ 9 ** 9 ** 9 ** 9 }}",
    "repeated": "{{ 'a' * 10000000000 }}",
    "repeated-list": "{{ ([0] * 100000000) | length }}",
    "product": "{{ ('9' * 4000) | int * 9 }}",
    "center": "{{ 'a' | center(3000000000) }}",
    "center-call": "{{ 'a'.center(3000000000) }}",
    "padding": "{{ '%999999999d' % 1 }}",
    "padding-by-value": "{{ '%*d' % (999999999, 1) }}",
    "padding-format": "{{ '{:>999999999}'.format(1) }}",
    "padding-format-by-value": "{{ '{:>{w}}'.format(1, w=250000) * 2 }}",
    "replace": LONG + "{{ s | replace('a', s) }}",
    "replace-call": LONG + "{{ s.replace('a', s) }}",
    "replace-nothing": LONG + "{{ s.replace('', s) }}",
    "join": LONG + "{{ s.join('b' * 60000) }}",
    "join-iterator": LONG + "{{ ''.join(range(99999) | map('string') | map('replace', '1', s)) }}",
    "format-often": LONG + "{{ ('{0}' * 1000).format(s) }}",
    "format-often-named": LONG + "{{ ('%(a)s' * 1000) % {'a': s} }}",
    "expandtabs": "{{ ('\t' * 60000).expandtabs(200000) }}",
    "translate": LONG + "{{ s.translate({97: s}) }}",
    "indent": "{{ ('\n' * 60000) | indent(90000) }}",
    "batch": "{{ [1] | batch(90000000, 'x') | list }}",
    "list-of-long-texts": LONG + "{{ range(99999) | map('string') | map('replace', '1', s) | list | length }}",
    "class": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "class-not-reached": "{% if false %}{{ ''.__class__ }}{% endif %}",
    "class-by-filter": "{{ messages | attr('__class__') }}",
    "class-by-subscript": "{{ messages['__class__'] }}",
    "class-spelt-apart": "{{ messages['__cl' ~ 'ass__'] }}",
    "class-by-map": "{{ messages | map(attribute='__class__') | list }}",
    "class-by-format": "{{ '{0.__class__}'.format(messages) }}",
    "globals-of-macro": "{% macro f() %}{% endmacro %}{{ f.__globals__ }}",
    "change": "{{ messages.append(1) }}",
    "change-dict": "{{ messages[0].update({'role': 'x'}) }}",
    "length": "x" * 200_000,
    "deep": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("name", UNSAFE)
def test_templates_that_do_too_much_are_named_at_once(name: str) -> None:
    started = time.process_time()
    tracemalloc.start()
    template, findings = read_template(UNSAFE[name], "t")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert not template.valid
    assert [f.code for f in findings] == ["template.unsafe"], findings
    assert peak < 100 << 20
    assert time.process_time() - started < 10  # under tracemalloc; without it none takes over 2 s


def test_running_is_bounded_too() -> None:
    for name in ("doubling-list", "nested-loops", "replace", "static-text"):
        with pytest.raises(TemplateError) as caught:
            render(UNSAFE[name].replace("60000", "9000000"), PROBE)
        assert caught.value.code == "template.unsafe"


def test_long_conversations_are_rendered() -> None:
    messages = [{"role": ("user", "assistant")[n % 2], "content": "hello world " * 300} for n in range(2001)]
    started = time.process_time()
    assert len(render(CHATML, messages)) > 7_000_000
    assert time.process_time() - started < 5


def test_templates_that_want_something_else_are_not_at_fault() -> None:
    no_system = "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
    no_system += "{{ m.content }}{% endfor %}"
    only_parts = "{% for m in messages %}{{ (m.content | first).text.strip() }}{% endfor %}"
    wants_tools = "{% if not tools %}{{ raise_exception('tools!') }}{% endif %}"
    for text in (no_system, only_parts, wants_tools):
        assert read_template(text, "t")[1] == []
    with pytest.raises(Refusal, match="no"):
        render(no_system, PROBE)


# ---- where templates stand ---------------------------------------------------------------------


def context_of(directory: Path, **files: Any) -> Any:
    for name, content in files.items():
        text = content if isinstance(content, str) else json.dumps(content)
        (directory / name.replace("__", ".")).write_text(text)
    return read_context(Scan.of(directory), "")


def test_order_of_sources(tmp_path: Path) -> None:
    files = {
        "processor_config__json": {"chat_template": "processor"},
        "chat_template__json": {"chat_template": "old processor"},
        "tokenizer_config__json": {
            "chat_template": [{"name": "default", "template": "a"}, {"name": "rag", "template": "b"}]
        },
        "chat_template__jinja": "file",
    }
    expected = [["processor"], ["old processor"], ["a", "b"], ["file"]]
    for (name, content), texts in zip(files.items(), expected, strict=True):
        context = context_of(tmp_path, **{name: content})
        assert [t.text for t in context.templates] == texts
    extra = tmp_path / "additional_chat_templates"
    extra.mkdir()
    (extra / "rag.jinja").write_text("more")
    assert [(t.name, t.text) for t in context_of(tmp_path).templates] == [("default", "file"), ("rag", "more")]


def test_too_many_and_too_long(tmp_path: Path) -> None:
    many = {"chat_template": [{"name": str(n), "template": f"{n}"} for n in range(100)]}
    context = context_of(tmp_path, tokenizer_config__json=many)
    assert [f.code for f in context.findings] == ["template.unsafe"]
    context = context_of(tmp_path, chat_template__jinja="x" * 200_000)
    assert [f.code for f in context.findings] == ["template.unsafe"]
    loops = {"chat_template": {str(n): UNSAFE["nested-loops"] for n in range(30)}}
    (tmp_path / "chat_template.jinja").unlink()
    started = time.process_time()
    assert [f.code for f in context_of(tmp_path, tokenizer_config__json=loops).findings] == ["template.unsafe"]
    assert time.process_time() - started < 5
