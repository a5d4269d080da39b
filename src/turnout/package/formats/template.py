"""Chat templates: parsed, checked and rendered in a sandbox with bounded work.

Semantics are those of Transformers' ``apply_chat_template``: Jinja with trim_blocks and
lstrip_blocks, loop controls, ``raise_exception``, ``strftime_now``, ``tojson`` that leaves
characters as they are, and a ``generation`` block that renders its body.
"""

from __future__ import annotations

import json
import re
from contextvars import ContextVar
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from turnout.config import READ
from turnout.package.facts import ChatTemplate, Finding, Severity

if TYPE_CHECKING:
    from jinja2 import Template, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_TEXT = 8 << 20  # characters that one value or a rendering may have
MAX_WORK = 400_000  # loop turns and calls of one rendering
MAX_NUMBER = 1 << 40
PROBE = [
    {"role": "system", "content": "You are a test."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]
_work: ContextVar[list[int]] = ContextVar("work")


class TemplateError(ValueError):
    """A template cannot be used; ``code`` is template.invalid or template.unsafe."""

    def __init__(self, message: str, code: str = "template.invalid") -> None:
        super().__init__(message)
        self.code = code


class Refusal(ValueError):
    """The template's own ``raise_exception``: these messages do not fit it."""


def _spend(count: int = 1) -> None:
    left = _work.get(None)
    if left is not None:
        left[0] -= count
        if left[0] < 0:
            raise TemplateError("the template does too much work", "template.unsafe")


def _sized(value: Any) -> Any:
    if isinstance(value, (str, bytes, list, tuple)) and len(value) > MAX_TEXT:
        raise TemplateError("the template makes a value too large", "template.unsafe")
    return value


def _counted(values: Any) -> Any:
    for value in values:
        _spend()
        yield value


def _concat(values: list[Any]) -> str:
    parts = [str(value) for value in values]
    if sum(map(len, parts)) > MAX_TEXT:
        raise TemplateError("the template makes a text too large", "template.unsafe")
    return "".join(parts)


def _binary(operator: str, left: Any, right: Any) -> None:
    """Refuses operations whose result would be out of proportion."""
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, (str, list, tuple)) and isinstance(other, int) and len(one) * max(other, 0) > MAX_TEXT:
                raise TemplateError("the template repeats a value too often", "template.unsafe")
        if isinstance(left, int) and isinstance(right, int) and abs(left * right) > MAX_NUMBER:
            raise TemplateError("the template makes a number too large", "template.unsafe")
    elif operator == "**":
        if not (isinstance(left, (int, float)) and isinstance(right, (int, float)) and abs(left) <= 1000 and abs(right) <= 12):
            raise TemplateError("the template raises to too high a power", "template.unsafe")
    elif operator == "%" and isinstance(left, str) and re.search(r"\d{5,}|\*", left):
        raise TemplateError("the template pads a text too far", "template.unsafe")


def _call_allowed(function: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
    _spend()
    owner = getattr(function, "__self__", None)
    numbers = [a for a in (*arguments, *keywords.values()) if isinstance(a, int)]
    if any(abs(n) > MAX_TEXT for n in numbers):
        raise TemplateError("the template passes a number too large", "template.unsafe")
    if not isinstance(owner, str):
        return
    name = getattr(function, "__name__", "")
    if name == "replace" and len(arguments) >= 2 and len(owner) * len(str(arguments[1])) > MAX_TEXT:
        raise TemplateError("the template replaces too much", "template.unsafe")
    if name == "join" and arguments and hasattr(arguments[0], "__len__") and len(owner) * len(arguments[0]) > MAX_TEXT:
        raise TemplateError("the template joins too much", "template.unsafe")
    if name in ("format", "format_map") and re.search(r"\d{5,}", owner):
        raise TemplateError("the template pads a text too far", "template.unsafe")


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _strftime_now(form: str) -> str:
    from datetime import datetime

    return datetime.now().strftime(form)


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None,
            sort_keys: bool = False) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


@lru_cache(maxsize=1)
def _environment_class() -> type[ImmutableSandboxedEnvironment]:
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        """Sandbox in which loops, calls, texts and numbers are counted and bounded."""

        intercepted_binops = frozenset(["*", "**", "%", "+"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _binary(operator, left, right)
            return _sized(super().call_binop(context, operator, left, right))

        def call(self, context: Any, obj: Any, *args: Any, **kwargs: Any) -> Any:
            _call_allowed(obj, args, kwargs)
            return _sized(super().call(context, obj, *args, **kwargs))

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            return _bounded(super()._parse(source, name, filename))

    return Environment


def _bounded(tree: nodes.Template) -> nodes.Template:
    """The tree with loops counted and concatenations measured; refuses reaches for internals."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    class Bound(NodeTransformer):
        def visit_For(self, node: nodes.For) -> nodes.Node:
            self.generic_visit(node)
            node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None)
            return node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            return nodes.Filter(nodes.List(node.nodes), "_concat", [], [], None, None)

        def visit_Filter(self, node: nodes.Filter) -> nodes.Node:
            self.generic_visit(node)
            for argument in node.args:
                if isinstance(argument, nodes.Const) and isinstance(argument.value, int) and abs(argument.value) > MAX_TEXT:
                    raise TemplateError(f"the filter `{node.name}` gets too large a number", "template.unsafe")
            return node

    for node in tree.find_all(nodes.Getattr):
        if node.attr.startswith("__"):
            raise TemplateError(f"the template reaches for `{node.attr}`", "template.unsafe")
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str) and re.fullmatch(r"__\w+__", constant.value):
            raise TemplateError(f"the template reaches for `{constant.value}`", "template.unsafe")
    bounded: nodes.Template = Bound().visit(tree)
    bounded.set_environment(tree.environment)  # type: ignore[arg-type]
    return bounded


def _environment() -> ImmutableSandboxedEnvironment:
    from jinja2 import nodes
    from jinja2.ext import Extension, loopcontrols

    class Generation(Extension):
        """``{% generation %}`` marks what the assistant said; it renders as its body."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    environment = _environment_class()(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    environment.filters.update({"tojson": _tojson, "_counted": _counted, "_concat": _concat})
    for name in ("center", "indent", "wordwrap"):
        environment.filters[name] = _padding(environment.filters[name])
    environment.filters["join"] = _join
    environment.filters["format"] = _format
    environment.globals.update({"raise_exception": _raise_exception, "strftime_now": _strftime_now})
    return environment


def _join(values: Any, d: str = "", attribute: str | None = None) -> str:
    """Jinja's join, measured before it is made."""
    parts = [str(value[attribute] if attribute else value) for value in values]
    if sum(map(len, parts)) + len(str(d)) * len(parts) > MAX_TEXT:
        raise TemplateError("the template joins too much", "template.unsafe")
    return str(d).join(parts)


def _format(value: str, *args: Any, **kwargs: Any) -> str:
    _binary("%", str(value), args or kwargs)
    return str(_sized(str(value) % (kwargs or args)))


def _padding(original: Any) -> Any:
    import functools

    @functools.wraps(original)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        numbers = [a for a in (*args, *kwargs.values()) if isinstance(a, int)]
        if any(abs(n) > 100_000 for n in numbers):
            raise TemplateError("the template pads a text too far", "template.unsafe")
        return _sized(original(*args, **kwargs))

    return guarded


@lru_cache(maxsize=64)
def compile_template(text: str) -> Template:
    """Compiled template. Raises ``TemplateError`` (template.invalid, template.unsafe)."""
    from jinja2 import TemplateSyntaxError

    if len(text) > READ.template_bytes:
        raise TemplateError(f"the template is longer than {READ.template_bytes} characters", "template.unsafe")
    try:
        return _environment().from_string(text)
    except TemplateSyntaxError as error:
        raise TemplateError(f"line {error.lineno}: {error.message}") from None
    except (RecursionError, MemoryError, OverflowError):
        raise TemplateError("the template is nested too deeply", "template.unsafe") from None
    except SyntaxError as error:  # the compiled Python nests too deeply
        raise TemplateError(f"the template cannot be compiled: {error.msg}") from None


def render(template: str, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any) -> str:
    """Text of a conversation. ``variables`` are bos_token, eos_token, tools and so on.

    Raises ``TemplateError`` when the template fails or does too much, ``Refusal`` when the template
    itself refuses these messages.
    """
    from jinja2 import TemplateError as JinjaError
    from jinja2.exceptions import SecurityError

    compiled = compile_template(template)
    token = _work.set([MAX_WORK])
    pieces: list[str] = []
    size = 0
    try:
        for piece in compiled.generate(messages=messages, add_generation_prompt=add_generation_prompt, **variables):
            size += len(piece)
            if size > MAX_TEXT:
                raise TemplateError("the template renders too much text", "template.unsafe")
            pieces.append(piece)
    except (TemplateError, Refusal):
        raise
    except SecurityError as error:
        raise TemplateError(str(error), "template.unsafe") from None
    except (RecursionError, MemoryError, OverflowError) as error:
        raise TemplateError(f"the template does not end: {type(error).__name__}", "template.unsafe") from None
    except (JinjaError, TypeError, ValueError, KeyError, AttributeError, IndexError, ZeroDivisionError) as error:
        raise TemplateError(f"{type(error).__name__}: {error}") from None
    finally:
        _work.reset(token)
    return "".join(pieces)


def read_template(text: str, source: str, name: str = "default") -> tuple[ChatTemplate, list[Finding]]:
    """Facts of a template and what is wrong with it, after rendering a fixed conversation."""
    template = ChatTemplate(source, text, name)
    try:
        compiled = compile_template(text)
        template.uses = _variables(compiled, text)
        _probe(text)
    except TemplateError as error:
        template.valid = False
        path = source.split("#", 1)[0]
        return template, [Finding(error.code, Severity.ERROR, f"chat template: {error}", path, observed=name)]
    return template, []


def _variables(compiled: Template, text: str) -> list[str]:
    from jinja2 import meta

    names = meta.find_undeclared_variables(_environment().parse(text))
    return sorted(names - {"raise_exception", "strftime_now"})


def _probe(text: str) -> None:
    """Renders with a system message, then without; a template that refuses both refuses these messages
    only (some want tools or images), which is no fault of it."""
    tokens: dict[str, Any] = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
    try:
        render(text, PROBE, **tokens)
    except Refusal:
        try:
            render(text, PROBE[1:2], **tokens)
        except Refusal:
            return
