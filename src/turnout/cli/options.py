"""Arguments that several commands share, spelled and explained once."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from turnout.config import OPTIONS
from turnout.errors import UsageError
from turnout.types import BASIC_SAMPLING, Grammar, Sampling

Model = Annotated[str, typer.Argument(metavar="MODEL", help="Path, short name (`turnout list`) or org/name[@rev].")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object (docs/cli.md).")]
TaskOption = Annotated[str | None, typer.Option("--task", "-t", metavar="TASK", help="Task, for instance chat.")]
BackendOption = Annotated[str | None, typer.Option("--backend", "-b", metavar="NAME", help="This backend alone.")]
DeviceOption = Annotated[str, typer.Option("--device", "-d", metavar="DEVICE", help="Device to run on.")]
ArtifactOption = Annotated[
    str | None, typer.Option("--artifact", "-a", metavar="ID", help="This artifact alone (ids: `turnout inspect`).")
]
CaseOptions = Annotated[
    list[str] | None, typer.Option("--option", "-o", metavar="KEY=VALUE", help="Option of the case; may be repeated.")
]


def parse_options(pairs: list[str] | None) -> dict[str, Any]:
    """``KEY=VALUE`` pairs as a dictionary: true, false and numbers as such, the rest as text.

    Raises ``UsageError`` for a pair without ``=`` and for an unknown key.
    """
    options: dict[str, Any] = {}
    for pair in pairs or []:
        key, found, value = pair.partition("=")
        if not found:
            raise UsageError(f"`--option {pair}` has no value", hints=["write it as `--option KEY=VALUE`"])
        if key not in OPTIONS:
            raise UsageError(f"unknown option `{key}`", hints=_near(key))
        options[key] = _scalar(value)
    return options


def parse_sampling(pairs: list[str] | None, basic: Sampling) -> Sampling:
    """``basic`` with the ``KEY=VALUE`` pairs set; values are JSON where they can be read so.

    Raises ``UsageError`` for an unknown name and for a value of another kind.
    """
    import msgspec

    names = [field.name for field in fields(Sampling) if field.name not in BASIC_SAMPLING | {"grammar"}]
    values: dict[str, Any] = {}
    for pair in pairs or []:
        key, found, text = pair.partition("=")
        if not found:
            raise UsageError(f"`--sampling {pair}` has no value", hints=["write it as `--sampling KEY=VALUE`"])
        if key not in names:
            raise UsageError(f"unknown sampling parameter `{key}`", hints=_near(key, names))
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text
        try:
            msgspec.convert({key: values[key]}, Sampling)
        except msgspec.ValidationError as error:
            raise UsageError(f"`--sampling {pair}`: {str(error).partition(' - ')[0]}") from None
    return replace(basic, **{key: getattr(msgspec.convert({key: v}, Sampling), key) for key, v in values.items()})


def grammar_of(schema: str | None, regex: str | None) -> Grammar | None:
    """What the text must match: a schema (a file, or its text) or a regular expression.

    Raises ``UsageError`` for both, and for a schema that is neither a file nor JSON.
    """
    if schema is not None and regex is not None:
        raise UsageError("`--schema` and `--regex` exclude each other")
    if regex is not None:
        return Grammar("regex", regex)
    if schema is None:
        return None
    if schema.lstrip().startswith("{"):
        return Grammar("json_schema", schema)
    try:
        text = Path(schema).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:  # no file, a folder, a name too long, no text
        shown = schema if len(schema) < 80 else schema[:77] + "..."
        why = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"`--schema {shown}`: {why}", hints=["give a file, or the schema itself"]) from None
    return Grammar("json_schema", text)


def _near(key: str, known: Iterable[str] = OPTIONS) -> list[str]:
    import difflib

    near = difflib.get_close_matches(key, known, n=1)
    return [f"did you mean `{near[0]}`?"] if near else ["known: " + ", ".join(known)]


def _scalar(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text
