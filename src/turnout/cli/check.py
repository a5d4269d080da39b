"""``turnout check``: which backend can run what, with every reason and remedy."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from turnout.cli import printer
from turnout.cli.options import (
    ArtifactOption,
    AsJson,
    BackendOption,
    CaseOptions,
    DeviceOption,
    Model,
    TaskOption,
    parse_options,
)

if TYPE_CHECKING:
    from turnout.backends.base import Reason, Remedy, Verdict
    from turnout.worker.judge import Report

FOLD_ABOVE = 20  # verdicts; above, backends that do not read a format share a line
_STYLES = {"supported": "green", "conditional": "yellow", "unknown": "magenta", "unsupported": "red"}


def check(
    model: Model,
    task: TaskOption = None,
    backend: BackendOption = None,
    device: DeviceOption = "cpu",
    artifact: ArtifactOption = None,
    option: CaseOptions = None,
    execute: Annotated[bool, typer.Option("--execute", help="Really load and run each possible case.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="One line a verdict, however many.")] = False,
    json: AsJson = False,
) -> int:
    """Judge a package against every backend.

    Every reason is named, with what would help. Ends with 1 when no case is supported.
    """
    options = parse_options(option)
    import turnout

    with printer.Progress() as progress:
        report = turnout.check(
            model,
            task=task,
            artifact=artifact,
            backend=backend,
            device=device,
            execute=execute,
            options=options,
            on_progress=progress,
        )
    if json:
        printer.say_json(report.to_json())
    else:
        show(report, everything)
    return 0 if report.chosen is not None else 1


def show(report: Report, everything: bool = False) -> None:
    """Prints a report: the verdicts, what stands against each, what would help, the choice."""
    verdicts = report.verdicts
    folded: dict[tuple[str, str], list[str]] = {}
    if not everything and len(verdicts) > FOLD_ABOVE:
        verdicts, folded = fold(verdicts)
    rows = [
        (str(v.status), v.backend, v.artifact, v.task, v.level.name.lower().replace("_", "-"), _summary(v))
        for v in verdicts
    ]
    if printer.colours(sys.stdout):
        _table(rows)
    else:
        for line in printer.columns(rows):
            printer.say(line)
    for (artifact, message), backends in folded.items():
        printer.say(f"unsupported  {', '.join(dict.fromkeys(backends))}: {artifact}: {message}")
    for verdict in verdicts:
        for line in _details(verdict):
            printer.say(line)
    printer.say()
    if report.chosen is None:
        printer.say(f"chosen: none, {report.why}")
    else:
        best = report.chosen
        printer.say(f"chosen: {best.backend} for {best.task} on {best.artifact} ({best.device}): {report.why}")


def fold(verdicts: list[Verdict]) -> tuple[list[Verdict], dict[tuple[str, str], list[str]]]:
    """Verdicts worth a line, and the backends that merely do not read an artifact's format."""
    kept: list[Verdict] = []
    folded: dict[tuple[str, str], list[str]] = {}
    for verdict in verdicts:
        if any(r.code == "artifact.missing" and " reads " in r.message for r in verdict.reasons):
            folded.setdefault((verdict.artifact, "does not read this format"), []).append(verdict.backend)
        else:
            kept.append(verdict)
    return kept, folded


def _summary(verdict: Verdict) -> str:
    reasons = [*verdict.reasons, *verdict.unknowns]
    if reasons:
        more = f" (and {len(reasons) - 1} more)" if len(reasons) > 1 else ""
        return f"{reasons[0].code}: {reasons[0].message}{more}"
    if str(verdict.admission) == "insufficient_memory":
        return f"does not fit memory now: {verdict.admission_detail}"
    speed = verdict.measurements.get("tokens_per_s")
    measured = f"{speed:.1f} tokens/s; " if speed else ""
    return measured + verdict.admission_detail


def _details(verdict: Verdict) -> list[str]:
    """Further reasons (the first stands in the table), observed and expected values, remedies."""
    reasons = [*verdict.reasons, *verdict.unknowns]
    lines = [_seen(reason, first=index == 0) for index, reason in enumerate(reasons)]
    lines += [_remedy(remedy) for remedy in verdict.remedies]
    lines += [f"  note: {text}" for text in verdict.notes]
    lines = [line for line in lines if line]
    if not lines:
        return []
    return ["", f"{verdict.backend} on {verdict.artifact} for {verdict.task}: {verdict.status}", *lines]


def _seen(reason: Reason, first: bool) -> str:
    facts = "; ".join(
        filter(
            None,
            [
                f"in {reason.where}" if reason.where else "",
                f"found {reason.observed}" if reason.observed else "",
                f"expected {reason.expected}" if reason.expected else "",
            ],
        )
    )
    told = all(text in reason.message for text in (reason.observed, reason.expected))
    if first and (told or not facts):
        return ""  # the table's line says it all
    return f"  {reason.code}: {printer.one_line(reason.message)}{f' ({printer.one_line(facts)})' if facts else ''}"


def _remedy(remedy: Remedy) -> str:
    line = shlex.join(remedy.argv or [])
    command = f": `{line}`" if line and line not in remedy.text else ""
    changes = [word for word, flag in (("numbers", remedy.changes_numerics), ("trust", remedy.changes_trust)) if flag]
    cost = [
        printer.size(remedy.cost.bytes) if remedy.cost.bytes else "",
        f"{remedy.cost.seconds:.0f} s" if remedy.cost.seconds else "",
        f"changes {' and '.join(changes)}" if changes else "",
    ]
    tail = ", ".join(filter(None, cost))
    return f"  fix: {printer.one_line(remedy.text)}{command}{f' ({tail})' if tail else ''}"


def _table(rows: Sequence[tuple[str, ...]]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table("status", "backend", "artifact", "task", "level", "why", box=None, pad_edge=False)
    for status, *rest in rows:
        table.add_row(Text(status, _STYLES.get(status, "")), *(Text(printer.one_line(cell)) for cell in rest))
    Console().print(table)
