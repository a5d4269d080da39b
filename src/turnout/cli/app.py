"""The commands put together; usage errors said as all errors are."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
from typer.exceptions import Abort, TyperException

from turnout.cli import backends, bench, check, doctor, inspect, listing, printer, pull, rm, run
from turnout.errors import UsageError

# Plain help: the markup renderer alone would cost half the time that `--help` may take.
app = typer.Typer(
    name="turnout",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
for _command in (
    inspect.inspect,
    check.check,
    run.run,
    bench.bench,
    backends.backends,
    doctor.doctor,
    listing.list_models,
    pull.pull,
    rm.rm,
):
    app.command(name="list" if _command is listing.list_models else None)(_command)
app.info.epilog = "Ends with 0 when done, 1 when the answer is no, 2 when the call was wrong."


def _version(wanted: bool) -> None:
    if wanted:
        from turnout import __version__

        printer.say(f"turnout {__version__}")
        raise typer.Exit


@app.callback()
def turnout(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """Point it at any model package: it says what will run it and why, proves it, and runs it."""


def invoke(arguments: list[str]) -> int:
    """Exit status of one call. Raises ``TurnoutError`` for what goes wrong."""
    # The program's name as typed, so that usage lines and hints can be copied.
    command: Any = typer.main.get_command(app)
    try:
        status = command.main(args=arguments, prog_name="turnout", standalone_mode=False)
    except TyperException as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            printer.note(error.format_message())
            return 2
        context = getattr(error, "ctx", None)
        path = context.command_path if context is not None else "turnout"
        message = error.format_message().rstrip(".")
        raise UsageError(_as_ours(message), hints=[f"`{path} --help` shows how it is called"]) from None
    except Abort:
        return 1
    return status if isinstance(status, int) else 0


def _as_ours(text: str) -> str:
    """Typer's sentence the way all errors are written: small first letter, values in backticks."""
    text = re.sub(r"'([^']*)'", r"`\1`", text)
    return text[:1].lower() + text[1:] if text[1:2].islower() else text
