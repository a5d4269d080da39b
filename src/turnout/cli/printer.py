"""What the command line writes: data to stdout, the rest to stderr, readable without colour.

Names and texts come out of packages nobody vouches for, so control characters (a terminal's
escape sequences among them) are shown, not sent.
"""

from __future__ import annotations

import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, TextIO

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_RED, _CYAN, _RESET = "\x1b[1;31m", "\x1b[1;36m", "\x1b[0m"
QUIET_S = 5.0  # seconds between progress lines when nobody watches a terminal


def clean(text: object) -> str:
    """Text without control characters (newline and tab stay)."""
    return _CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", str(text))


def one_line(text: object) -> str:
    """Text as a single clean line."""
    return " ".join(clean(text).split())


def colours(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that may get colours (NO_COLOR turns them off)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def say(text: object = "") -> None:
    """One piece of data, with a newline, to stdout."""
    print(clean(text), flush=True)


def note(text: object) -> None:
    """A remark to stderr."""
    print(clean(text), file=sys.stderr, flush=True)


def error(message: str, hints: Sequence[str] = ()) -> None:
    """``error: ...``, an empty line, then a ``hint: ...`` each, to stderr."""
    red, cyan, reset = (_RED, _CYAN, _RESET) if colours(sys.stderr) else ("", "", "")
    lines = [f"{red}error{reset}: {clean(message)}"]
    if hints:
        lines += ["", *(f"{cyan}hint{reset}: {clean(hint)}" for hint in hints)]
    print("\n".join(lines), file=sys.stderr, flush=True)


def say_json(value: Any) -> None:
    """One JSON object to stdout; numbers JSON has no word for become null."""
    print(json.dumps(_finite(value), ensure_ascii=False, indent=2), flush=True)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return value


def builtins(value: Any) -> Any:
    """Dataclasses, enums and arrays as plain containers."""
    import msgspec

    return msgspec.to_builtins(value, enc_hook=_plain, str_keys=True)


def _plain(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


def size(count: float) -> str:
    """Bytes as people write them, in powers of ten."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(count) < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return ""


def columns(rows: Sequence[Sequence[object]], gap: str = "  ") -> list[str]:
    """Rows as aligned lines; the last column is not padded and nothing is wrapped or cut."""
    text = [[one_line(cell) for cell in row] for row in rows]
    count = max((len(row) for row in text), default=0)
    widths = [max((len(row[i]) for row in text if i < len(row)), default=0) for i in range(count)]
    return [
        gap.join(cell.ljust(widths[i]) if i < len(row) - 1 else cell for i, cell in enumerate(row)).rstrip()
        for row in text
    ]


class Progress:
    """One moving line on a terminal; a line every few seconds where nobody watches."""

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stderr
        self._live = self._stream.isatty()
        self._shown = 0
        self._last = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.clear()

    def __call__(self, text: str) -> None:
        """Shows what is being done now."""
        line = one_line(text)
        if self._live:
            width = max(20, _width(self._stream) - 1)
            line = line[:width]
            self._stream.write("\r" + line + " " * max(0, self._shown - len(line)))
            self._shown = len(line)
            self._stream.flush()
        elif time.monotonic() - self._last >= QUIET_S:
            self._last = time.monotonic()
            self._stream.write(line + "\n")
            self._stream.flush()

    def clear(self) -> None:
        """Takes the moving line off the terminal."""
        if self._live and self._shown:
            self._stream.write("\r" + " " * self._shown + "\r")
            self._stream.flush()
            self._shown = 0


def _width(stream: TextIO) -> int:
    try:
        return os.get_terminal_size(stream.fileno()).columns
    except (OSError, ValueError):
        return 80
