"""``turnout pull``: a repository of the Hugging Face Hub at one commit."""

from __future__ import annotations

from typing import Annotated

import typer

from turnout.cli import printer
from turnout.cli.options import AsJson


def pull(
    name: Annotated[str, typer.Argument(metavar="ORG/NAME[@REV]", help="Repository, and revision if not main.")],
    json: AsJson = False,
) -> int:
    """Download a model and pin its name to a commit.

    The name then means that commit until it is pulled again.
    """
    from turnout.package import store

    with printer.Progress() as progress:
        found = store.pull(name, progress)
    if json:
        printer.say_json(
            {"name": found.name, "revision": found.revision, "path": str(found.path), "source": found.source}
        )
    else:
        printer.say(found.path)
        if found.revision:
            printer.note(f"`{found.name}` now means commit {found.revision}")
    return 0
