"""Arguments that several commands share, spelled and explained once."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from turnout.config import OPTIONS
from turnout.errors import UsageError

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


def _near(key: str) -> list[str]:
    import difflib

    near = difflib.get_close_matches(key, OPTIONS, n=1)
    return [f"did you mean `{near[0]}`?"] if near else ["known options: " + ", ".join(OPTIONS)]


def _scalar(text: str) -> Any:
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, (bool, int, float)) else text
