"""The sandbox in which chat templates run: reaches for internals end it, and so does too much work.

Jinja's immutable sandbox keeps a template from Python's internals and from changing what it is given;
it does not bound time or memory. Here every loop turn, call, filter and output spends from a
``Budget``, and every value a template makes is weighed (its texts and elements, counted as often as
they occur) before anything that would have to walk it, so that neither doubling structures nor
repeated texts can grow out of proportion.
"""

from __future__ import annotations

import functools
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import GeneratorType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_NUMBER = 1 << 48
MAX_COUNT = 100_000  # an argument of a filter that makes as many things or spaces
COUNTED_FILTERS = frozenset({"center", "indent", "wordwrap", "batch", "slice", "truncate"})
# Filters that look at no more than one element, so that what they are given need not be weighed.
CHEAP_FILTERS = frozenset(
    {"length", "count", "first", "last", "default", "d", "int", "float", "abs", "round", "random", "items"}
)
# Filters of no use in a prompt whose work cannot be told beforehand, and one global of the same kind.
REMOVED_FILTERS = ("pprint", "urlize", "xmlattr")
REMOVED_GLOBALS = ("lipsum",)
# Names by which templates have left sandboxes; what is spelt otherwise is caught when it is looked up.
INTERNALS = frozenset(dir(object)) | frozenset(
    f"__{name}__"
    for name in (
        "bases",
        "base",
        "mro",
        "subclasses",
        "globals",
        "builtins",
        "import",
        "code",
        "func",
        "self",
        "dict",
        "closure",
        "loader",
    )
)


class TemplateError(ValueError):
    """A template cannot be used; ``code`` is template.invalid or template.unsafe."""

    def __init__(self, message: str, code: str = "template.invalid") -> None:
        super().__init__(message)
        self.code = code


class Refusal(ValueError):
    """The template's own ``raise_exception``: these messages do not fit it."""


def _unsafe(message: str) -> TemplateError:
    return TemplateError(message, "template.unsafe")


@dataclass(slots=True)
class Budget:
    """What one rendering may do: ``turns`` of loops and calls, ``text`` characters and elements that one
    value may weigh, ``made`` that all together may, and ``seconds``."""

    turns: int
    text: int
    made: int
    seconds: float
    deadline: float = field(init=False)

    def __post_init__(self) -> None:
        self.deadline = time.monotonic() + self.seconds

    def spend(self, made: int = 0) -> None:
        """Takes one turn and ``made`` characters. Raises ``TemplateError`` when either is used up."""
        self.turns -= 1
        self.made -= made
        if self.turns < 0 or time.monotonic() > self.deadline:
            raise _unsafe("the template does too much work")
        if self.made < 0:
            raise _unsafe("the template makes too much text")


def probing() -> Budget:
    """Budget of the fixed conversation that inspection renders."""
    return Budget(turns=100_000, text=1 << 18, made=1 << 23, seconds=2.0)


def running() -> Budget:
    """Budget of a user's conversation: millions of characters and thousands of messages."""
    return Budget(turns=2_000_000, text=1 << 24, made=1 << 28, seconds=20.0)


current: ContextVar[Budget] = ContextVar("budget")


def _budget() -> Budget:
    return current.get(None) or probing()  # constant parts are evaluated while compiling


def weigh(value: Any, limit: int) -> int:
    """Characters and elements of a value, shared ones as often as they occur.

    Raises ``TemplateError`` beyond ``limit``, or a sixteenth of it in elements (each costs a step here).
    """
    from jinja2.utils import Namespace

    total, stack, left = 0, [value], limit >> 4
    while stack:
        item = stack.pop()
        left -= 1
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, dict):
            stack += item.keys()
            stack += item.values()
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack += item
        elif isinstance(item, Namespace):
            stack += item._Namespace__attrs.values()
        if total > limit or len(stack) > left:
            raise _unsafe("the template makes a value too large")
    return total + (limit >> 4) - left


def _taken(values: Iterable[Any], limit: int) -> list[Any]:
    """Elements of anything iterable, given up as soon as they weigh too much."""
    taken, total = [], 0
    for value in values:
        total += weigh(value, limit)
        if total > limit:
            raise _unsafe("the template makes a value too large")
        taken.append(value)
    return taken


# ---- operations whose result can be told beforehand --------------------------------------------


def _within(size: int) -> None:
    if size > _budget().text:
        raise _unsafe("the template makes a text too large")


def _formatted(form: str, mark: str, arguments: Any) -> None:
    """Bounds ``form % arguments`` and ``form.format(arguments)`` by fields, widths and arguments."""
    if mark == "%" and re.search(r"%[^a-zA-Z%]*\*", form):
        raise _unsafe("the template takes a width from a value")
    limit = _budget().text
    widest = max((int(n[:9]) for n in re.findall(r"\d+", form)), default=0)
    given = (
        max((abs(n) for n in _numbers(arguments)), default=0) if mark == "{" and "{" in form.partition(":")[2] else 0
    )
    _within(len(form) + form.count(mark) * (widest + given + weigh(arguments, limit)))


def _numbers(arguments: Any) -> list[int]:
    values = (
        arguments.values() if isinstance(arguments, dict) else arguments if isinstance(arguments, (list, tuple)) else ()
    )
    return [v for v in values if isinstance(v, int)]


def _replaced(owner: str, old: str, new: str) -> None:
    _within(len(owner) + owner.count(old) * len(new))


def _binary(operator: str, left: Any, right: Any) -> None:
    """Refuses operations whose result would be out of proportion."""
    if operator == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, (str, bytes, list, tuple)) and isinstance(other, int):
                _within(weigh(one, _budget().text) * max(other, 0))
        if isinstance(left, int) and isinstance(right, int) and abs(left * right) > MAX_NUMBER:
            raise _unsafe("the template makes a number too large")
    elif operator == "**":
        numbers = isinstance(left, (int, float)) and isinstance(right, (int, float))
        if not (numbers and abs(left) <= 1000 and abs(right) <= 12):
            raise _unsafe("the template raises to too high a power")
    elif operator == "%" and isinstance(left, str):
        _formatted(left, "%", right)
    elif operator == "+" and isinstance(left, int) and isinstance(right, int) and abs(left + right) > MAX_NUMBER:
        raise _unsafe("the template makes a number too large")


def _text_call(owner: str, name: str, arguments: list[Any], keywords: dict[str, Any]) -> None:
    """Bounds the result of a method of a text; may replace an iterator among the arguments by its list."""
    texts = [a for a in (*arguments, *keywords.values()) if isinstance(a, str)]
    if name == "replace" and len(texts) == 2:
        _replaced(owner, *texts)
    elif name == "join" and arguments:
        arguments[0] = _taken(arguments[0], _budget().text)
        _within(sum(len(str(part)) for part in arguments[0]) + len(owner) * len(arguments[0]))
    elif name in ("format", "format_map"):
        _formatted(owner, "{", {**{str(n): a for n, a in enumerate(arguments)}, **keywords})
    elif name == "expandtabs":
        width = next((n for n in (*arguments, *keywords.values()) if isinstance(n, int)), 8)
        _within(len(owner) + owner.count("\t") * abs(width))
    elif name == "translate":
        raise _unsafe("the template translates a text")


# ---- environment -------------------------------------------------------------------------------


def _guard(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that spends, and whose arguments and result are weighed."""

    @functools.wraps(original)
    def guarded(*given: Any, **keywords: Any) -> Any:
        budget = _budget()
        budget.spend()
        for value in (*given, *keywords.values()):
            if isinstance(value, int) and name in COUNTED_FILTERS and abs(value) > MAX_COUNT:
                raise _unsafe(f"the filter `{name}` gets too large a number")
            if name not in CHEAP_FILTERS:
                weigh(value, budget.text)
        result = original(*given, **keywords)
        return result if name in CHEAP_FILTERS or isinstance(result, GeneratorType) else _made(result)

    return guarded


def _made(value: Any) -> Any:
    budget = _budget()
    budget.made -= weigh(value, budget.text)
    return value


def _join(values: Iterable[Any], d: str = "", attribute: str | None = None) -> str:
    parts = _taken((value[attribute] if attribute else value for value in values), _budget().text)
    _within(sum(len(str(part)) for part in parts) + len(str(d)) * len(parts))
    return str(d).join(map(str, parts))


def _replace(value: str, old: str, new: str, count: int | None = None) -> str:
    _replaced(str(value), str(old), str(new))
    return str(value).replace(str(old), str(new), -1 if count is None else count)


def _indent(value: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    space = width if isinstance(width, str) else " " * width
    lines = str(value).split("\n")
    _within(len(value) + len(space) * len(lines))
    indented = [space + line if (line or blank) and (number or first) else line for number, line in enumerate(lines)]
    return "\n".join(indented)


def _format(value: str, *arguments: Any, **keywords: Any) -> str:
    _formatted(str(value), "%", keywords or arguments)
    return str(value) % (keywords or arguments)


def _sum(values: Iterable[Any], attribute: str | None = None, start: float = 0) -> float:
    parts = [value[attribute] if attribute else value for value in values]
    if not all(isinstance(part, (int, float)) for part in (start, *parts)):
        raise TypeError("only numbers are summed")
    return sum(parts, start)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    if isinstance(indent, int) and abs(indent) > 16:
        raise _unsafe("the template indents too far")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _counted(values: Iterable[Any], static: int = 0) -> Iterator[Any]:
    """The values of a loop, each a turn; ``static`` characters of plain text stand in its body."""
    budget = _budget()
    for value in values:
        budget.spend(static)
        yield value


def _concat(values: list[Any]) -> str:
    _within(weigh(values, _budget().text))
    return "".join(str(value) for value in values)


def _raise_exception(message: str) -> None:
    raise Refusal(message)


def _strftime_now(form: str) -> str:
    from datetime import datetime

    if len(form) > 200:
        raise _unsafe("the template asks for too long a date")
    return datetime.now().strftime(form)


@functools.lru_cache(maxsize=1)
def environment() -> ImmutableSandboxedEnvironment:
    """The one environment of all templates."""
    from jinja2.ext import loopcontrols

    made = _environment_class()(
        trim_blocks=True, lstrip_blocks=True, extensions=[_generation(), loopcontrols], finalize=_output
    )
    for name in REMOVED_FILTERS:
        made.filters.pop(name, None)
    for name in REMOVED_GLOBALS:
        made.globals.pop(name, None)
    own = {"tojson": _tojson, "join": _join, "replace": _replace, "indent": _indent, "format": _format, "sum": _sum}
    made.filters.update(own)
    made.filters = {name: _guard(name, original) for name, original in made.filters.items()}
    made.filters.update({"_counted": _counted, "_concat": _concat, "_built": _made})
    made.globals.update({"raise_exception": _raise_exception, "strftime_now": _strftime_now})
    return made


def _output(value: Any) -> Any:
    """What ``{{ }}`` puts out, before it becomes text."""
    return _made(value)


def _generation() -> Any:
    from jinja2.ext import Extension

    class Generation(Extension):
        """``{% generation %}`` marks what the assistant said; it renders as its body."""

        tags = {"generation"}

        def parse(self, parser: Any) -> list[nodes.Node]:
            next(parser.stream)
            body: list[nodes.Node] = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return body

    return Generation


def _environment_class() -> type[ImmutableSandboxedEnvironment]:
    from jinja2.runtime import LoopContext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Environment(ImmutableSandboxedEnvironment):
        """Sandbox in which loops, calls, texts and numbers are counted and bounded."""

        intercepted_binops = frozenset(["*", "**", "%", "+"])

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            _binary(operator, left, right)
            result = super().call_binop(context, operator, left, right)
            if isinstance(result, (str, list, tuple)):
                weigh(result, _budget().text)
            return result

        def call(self, context: Any, obj: Any, *given: Any, **keywords: Any) -> Any:  # noqa: N805
            budget, arguments = _budget(), list(given)
            budget.spend()
            for value in (*arguments, *keywords.values()):
                weigh(value, budget.text)
                if isinstance(value, int) and abs(value) > budget.text:
                    raise _unsafe("the template passes a number too large")
            if isinstance(obj, LoopContext) and arguments:
                arguments[0] = _counted(arguments[0])
            owner = getattr(obj, "__self__", None)
            if isinstance(owner, str):
                _text_call(owner, getattr(obj, "__name__", ""), arguments, keywords)
            return _made(super().call(context, obj, *arguments, **keywords))

        def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
            wrapped = super().wrap_str_format(value)
            if wrapped is None:
                return None

            def bounded(*given: Any, **keywords: Any) -> str:
                _text_call(value.__self__, "format", list(given), keywords)
                return wrapped(*given, **keywords)

            return bounded

        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:
            raise _unsafe(f"the template reaches for `{attribute}` of a {type(obj).__name__}")

        def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
            return _bounded(super()._parse(source, name, filename))

    return Environment


def _bounded(tree: nodes.Template) -> nodes.Template:
    """The tree with loops counted and built values weighed; refuses reaches for internals."""
    from jinja2 import nodes
    from jinja2.visitor import NodeTransformer

    def filtered(node: Any, name: str, *arguments: nodes.Expr) -> nodes.Filter:
        return nodes.Filter(node, name, list(arguments), [], None, None)

    class Bound(NodeTransformer):
        def visit_For(self, node: nodes.For) -> nodes.Node:
            static = sum(len(text.data) for text in node.find_all(nodes.TemplateData))
            self.generic_visit(node)
            node.iter = filtered(node.iter, "_counted", nodes.Const(static))
            return node

        def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
            self.generic_visit(node)
            return filtered(nodes.List(node.nodes), "_concat")

        def built(self, node: Any) -> nodes.Node:
            self.generic_visit(node)
            return node if getattr(node, "ctx", "load") != "load" else filtered(node, "_built")

        visit_List = visit_Tuple = visit_Dict = built

    for access in tree.find_all(nodes.Getattr):
        if access.attr.startswith("__"):
            raise _unsafe(f"the template reaches for `{access.attr}`")
    for constant in tree.find_all(nodes.Const):
        if isinstance(constant.value, str) and constant.value in INTERNALS:
            raise _unsafe(f"the template reaches for `{constant.value}`")
    bounded: nodes.Template = Bound().visit(tree)
    bounded.set_environment(tree.environment)  # type: ignore[arg-type]
    return bounded
