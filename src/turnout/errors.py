"""Errors that reach a user: what failed, its code, and the way out.

Codes follow ``boundary.code`` (for instance ``tensor.missing``). A hint is one line that
says what to do next, preferably a command that can be run as it stands.
"""

from __future__ import annotations

from collections.abc import Sequence


class TurnoutError(Exception):
    """Base of every error raised on purpose.

    ``exit_status`` is what the command line ends with (1: the answer is no, 2: the call was
    wrong); ``http_status`` is what a server answers with.
    """

    exit_status = 1
    http_status = 500
    default_code = "runtime.failed"

    def __init__(self, message: str, *, code: str | None = None, hints: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.hints = tuple(hints)


class UsageError(TurnoutError):
    """The call itself is wrong: an unknown option value, a path that does not exist."""

    exit_status = 2
    http_status = 400
    default_code = "option.unsupported"


class NotFoundError(UsageError):
    """A model name or path leads to nothing on this machine."""

    http_status = 404
    default_code = "artifact.missing"


class InputError(UsageError):
    """The request's input does not fit the task contract; names the value and the place."""

    default_code = "option.unsupported"


class NotSupportedError(TurnoutError):
    """No backend supports the case; the message carries the smallest true gap."""

    http_status = 422
    default_code = "task.not_offered"


class LoadError(TurnoutError):
    """A load transaction failed and left nothing behind."""

    http_status = 503


class WorkerError(TurnoutError):
    """The worker process died, froze or outgrew its memory."""

    http_status = 503


class MemoryAdmissionError(TurnoutError):
    """The case is compatible, but the memory for it is not free."""

    http_status = 503
    default_code = "memory.insufficient"


class OverloadedError(TurnoutError):
    """The queue is full; the same request may succeed later."""

    http_status = 429
    default_code = "runtime.overloaded"
