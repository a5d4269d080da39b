"""``turnout list``: the models that have a name on this machine."""

from __future__ import annotations

import shlex

from turnout.cli import printer
from turnout.cli.options import AsJson


def list_models(json: AsJson = False) -> int:
    """List the models that have a name here.

    One that is not installed is shown with the command that brings it.
    """
    from turnout.package import store

    models = store.listing()
    if json:
        printer.say_json(
            {
                "models": [
                    {
                        "name": m.name,
                        "source": m.source,
                        "installed": m.path is not None,
                        "path": str(m.path) if m.path else None,
                        "size_bytes": m.size_bytes,
                        "title": m.title,
                        "tasks": list(m.tasks),
                        "licence": m.licence,
                        "revision": m.revision,
                        "install": list(m.install),
                    }
                    for m in models
                ]
            }
        )
        return 0
    rows = []
    for m in models:
        if m.path is None:
            rows.append((m.name, "not installed", f"{m.title}: `{shlex.join(m.install)}`"))
        else:
            what = m.title or f"revision {(m.revision or '')[:12]}"
            rows.append((m.name, printer.size(m.size_bytes), f"{what}; {m.path}"))
    for line in printer.columns(rows):
        printer.say(line)
    return 0
