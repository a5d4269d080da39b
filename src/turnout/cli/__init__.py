"""Level 5, the command line: ``turnout``. Data goes to stdout, everything else to stderr.

Ends with 0 when the thing is done, 1 when the answer is no, 2 when the call was wrong.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

__all__ = ["call", "main"]


def main() -> None:
    """Entry point of the ``turnout`` command."""
    sys.exit(call(sys.argv[1:]))


def call(arguments: Sequence[str]) -> int:
    """Exit status of one call. Never raises but for the process being ended."""
    from turnout.cli import printer
    from turnout.cli.app import invoke
    from turnout.errors import TurnoutError

    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")  # a file name need not be valid text
    as_json = "--json" in arguments
    try:
        return invoke(list(arguments))
    except TurnoutError as error:
        printer.error(error.message, error.hints)
        _json_error(as_json, error.code, error.message, error.hints)
        return error.exit_status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader has what it wanted; keep the interpreter from flushing into the void at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except Exception as error:  # a gap of ours: said in one line, shown whole on demand
        if os.environ.get("TURNOUT_TRACEBACK"):
            raise
        message = f"internal error: {type(error).__name__}: {error}"
        printer.error(message, ["set TURNOUT_TRACEBACK=1 to see where"])
        _json_error(as_json, "runtime.failed", message, ())
        return 1


def _json_error(wanted: bool, code: str, message: str, hints: Sequence[str]) -> None:
    from turnout.cli import printer

    if wanted:
        printer.say_json({"error": {"code": code, "message": message, "hints": list(hints)}})
