"""``turnout rm``: deletes a pulled or cached model, after asking."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from turnout.cli import printer
from turnout.cli.options import AsJson
from turnout.errors import UsageError


def rm(
    name: Annotated[str, typer.Argument(metavar="NAME", help="org/name[@rev], or a name of `turnout list`.")],
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
    json: AsJson = False,
) -> int:
    """Delete a pulled or cached model."""
    from turnout.package import store

    plan = store.removal(name)
    if not yes and not _agreed(plan):
        return 1
    plan.execute()
    if json:
        printer.say_json({"name": name, "removed": [str(p) for p in plan.paths], "size_bytes": plan.size_bytes})
    else:
        printer.note(f"removed `{name}`, {printer.size(plan.size_bytes)}")
    return 0


def _agreed(plan: object) -> bool:
    from turnout.package.store import Removal

    assert isinstance(plan, Removal)
    if not sys.stdin.isatty():
        raise UsageError(
            f"removing `{plan.name}` needs a yes, and nobody can be asked here",
            hints=[f"`turnout rm {plan.name} --yes`"],
        )
    for path in plan.paths:
        printer.note(f"  {path}")
    print(
        f"delete this, {printer.size(plan.size_bytes)}? other programs may use the cache too [y/N] ",
        end="",
        file=sys.stderr,
        flush=True,
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")
