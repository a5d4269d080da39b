"""Chat templates: parsed, checked and rendered in a sandbox with bounded work.

Semantics are those of Transformers' ``apply_chat_template``: Jinja with trim_blocks and
lstrip_blocks, loop controls, ``raise_exception``, ``strftime_now``, ``tojson`` that leaves
characters as they are, and a ``generation`` block that renders its body.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from turnout.config import READ
from turnout.package.facts import ChatTemplate, Finding, Severity
from turnout.package.formats.template_sandbox import (
    Budget,
    Refusal,
    TemplateError,
    current,
    environment,
    probing,
    running,
)

if TYPE_CHECKING:
    from jinja2 import Template

__all__ = ["Refusal", "TemplateError", "compile_template", "read_template", "render"]

PROBE = [
    {"role": "system", "content": "You are a test."},
    {"role": "user", "content": "Hello"},
    {"role": "assistant", "content": "Hi"},
    {"role": "user", "content": "Bye"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}


@lru_cache(maxsize=64)
def _compiled(text: str) -> tuple[Template, tuple[str, ...]]:
    """Compiled template and the variables it takes."""
    from jinja2 import TemplateSyntaxError, meta

    if len(text) > READ.template_bytes:
        raise TemplateError(f"the template is longer than {READ.template_bytes} characters", "template.unsafe")
    try:
        tree = environment().parse(text)
        names = meta.find_undeclared_variables(tree)
        return environment().from_string(tree), tuple(sorted(names - {"raise_exception", "strftime_now"}))
    except TemplateSyntaxError as error:
        raise TemplateError(f"line {error.lineno}: {error.message}") from None
    except (RecursionError, MemoryError, OverflowError):
        raise TemplateError("the template is nested too deeply", "template.unsafe") from None
    except (SyntaxError, ValueError) as error:  # the compiled Python nests too deeply, or holds odd characters
        if isinstance(error, TemplateError):
            raise
        raise TemplateError(f"the template cannot be compiled: {error}") from None


def compile_template(text: str) -> Template:
    """Compiled template. Raises ``TemplateError`` (template.invalid, template.unsafe)."""
    return _compiled(text)[0]


def render(
    template: str, messages: list[dict[str, Any]], *, add_generation_prompt: bool = True, **variables: Any
) -> str:
    """Text of a conversation. ``variables`` are bos_token, eos_token, tools and so on.

    Raises ``TemplateError`` when the template fails or does too much, ``Refusal`` when the template
    itself refuses these messages.
    """
    given = {"messages": messages, "add_generation_prompt": add_generation_prompt, **variables}
    return _render(template, given, running())


def _render(template: str, variables: dict[str, Any], budget: Budget) -> str:
    from jinja2 import TemplateError as JinjaError
    from jinja2.exceptions import SecurityError

    compiled = compile_template(template)
    token = current.set(budget)
    pieces: list[str] = []
    try:
        for piece in compiled.generate(**variables):
            budget.made -= len(piece)
            if budget.made < 0:
                raise TemplateError("the template renders too much text", "template.unsafe")
            pieces.append(piece)
    except (TemplateError, Refusal):
        raise
    except SecurityError as error:
        raise TemplateError(str(error), "template.unsafe") from None
    except (RecursionError, MemoryError, OverflowError) as error:
        raise TemplateError(f"the template does not end: {type(error).__name__}", "template.unsafe") from None
    except (JinjaError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError) as error:
        raise TemplateError(f"{type(error).__name__}: {error}"[:300]) from None
    finally:
        current.reset(token)
    return "".join(pieces)


def read_template(text: str, source: str, name: str = "default") -> tuple[ChatTemplate, list[Finding]]:
    """Facts of a template and what is wrong with it, after rendering a fixed conversation."""
    template = ChatTemplate(source, text, name)
    try:
        template.uses = list(_compiled(text)[1])
        _probe(text)
    except TemplateError as error:
        template.valid = False
        path = source.split("#", 1)[0]
        return template, [Finding(error.code, Severity.ERROR, f"chat template: {error}", path, observed=name)]
    return template, []


def _probe(text: str) -> None:
    """Renders a conversation with a system message, without one, and with content in parts.

    One that works is enough: templates for pictures want parts, some know no system message. A template
    that refuses all of them by its own words wants something else (tools, documents), which is no fault.
    """
    parts = [{**message, "content": [{"type": "text", "text": message["content"]}]} for message in PROBE[1:]]
    failed: TemplateError | None = None
    for messages in (PROBE, PROBE[1:], PROBE[1:2], parts):
        try:
            _render(text, {"messages": messages, "add_generation_prompt": True, **TOKENS}, probing())
        except Refusal:
            continue
        except TemplateError as error:
            if error.code == "template.unsafe":
                raise
            failed = failed or error
            continue
        return
    if failed is not None:
        raise failed
