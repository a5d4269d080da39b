"""``turnout backends``: which backends there are, and why one cannot be used."""

from __future__ import annotations

from typing import Any

from turnout.cli import printer
from turnout.cli.options import AsJson


def backends(json: AsJson = False) -> int:
    """List the backends, their versions and formats."""
    import turnout
    from turnout.backends import registry

    builds = turnout.backends_status()
    rows: list[dict[str, Any]] = []
    for build in builds:
        backend = registry.get(build.name)
        rows.append(
            {
                **printer.builtins(build),
                "available": build.available,
                "reads": sorted(backend.reads),
                "tasks": sorted(backend.tasks),
            }
        )
    if json:
        printer.say_json({"backends": rows})
        return 0
    table = [(row["name"], row["version"] or "not installed", _remark(row)) for row in rows]
    for line in printer.columns(table):
        printer.say(line)
    return 0


def _remark(row: dict[str, Any]) -> str:
    if not row["available"]:
        return f"{row['unavailable']}{_command(row)}"
    return f"reads {', '.join(row['reads'])}"


def _command(row: dict[str, Any]) -> str:
    return f": `pip install 'turnout[{row['extra']}]'`" if row["extra"] else ""
