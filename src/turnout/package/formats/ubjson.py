"""UBJSON within bounds: values as Python has them, long arrays walked and dropped.

Format: https://ubjson.org (and the typed containers that xgboost writes)
"""

from __future__ import annotations

import struct
from typing import Any

INTS = {"i": "b", "U": "B", "I": "h", "l": "i", "L": "q"}
FLOATS = {"d": "f", "D": "d"}
MAX_DEPTH, MAX_ITEMS, KEPT = 48, 20_000_000, 4096


class UbjError(ValueError):
    """Bytes that are no UBJSON, or that end too early."""


class _Reader:
    def __init__(self, data: Any) -> None:
        self.data, self.size, self.at, self.items = data, len(data), 0, 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > self.size:
            raise UbjError("cut short")
        value = bytes(self.data[self.at : self.at + count])
        self.at += count
        return value

    def mark(self) -> str:
        while (value := self.take(1).decode("latin-1")) == "N":
            continue
        return value

    def number(self, kind: str) -> Any:
        form = INTS.get(kind) or FLOATS.get(kind)
        if form is None:
            raise UbjError(f"`{kind}` is no number")
        return struct.unpack(">" + form, self.take(struct.calcsize(form)))[0]

    def length(self) -> int:
        kind = self.mark()
        if kind not in INTS:
            raise UbjError("a length is no number")
        count = int(self.number(kind))
        if count < 0 or count > self.size - self.at:
            raise UbjError(f"a length of {count} is beyond the end")
        return count

    def text(self) -> str:
        return self.take(self.length()).decode("utf-8", "replace")

    def value(self, kind: str, depth: int) -> Any:
        self.items += 1
        if self.items > MAX_ITEMS or depth > MAX_DEPTH:
            raise UbjError("too many or too deeply nested values")
        if kind in INTS or kind in FLOATS:
            return self.number(kind)
        if kind in ("S", "H"):
            return self.text()
        if kind == "C":
            return self.take(1).decode("latin-1")
        if kind in ("Z", "T", "F"):
            return {"Z": None, "T": True, "F": False}[kind]
        if kind == "{":
            return self.object(depth + 1)
        if kind == "[":
            return self.array(depth + 1)
        raise UbjError(f"unknown mark {kind!r}")

    def typed(self) -> tuple[str | None, int | None]:
        """Element type and count of an optimised container, if it states them."""
        kind: str | None = None
        if self.data[self.at : self.at + 1] == b"$":
            self.at += 1
            kind = self.take(1).decode("latin-1")
        if self.data[self.at : self.at + 1] == b"#":
            self.at += 1
            return kind, self.length_of(kind)
        if kind is not None:
            raise UbjError("a typed container without a count")
        return None, None

    def length_of(self, kind: str | None) -> int:
        mark = self.mark()
        if mark not in INTS:
            raise UbjError("a count is no number")
        count = int(self.number(mark))
        width = struct.calcsize(INTS.get(kind or "") or FLOATS.get(kind or "") or "B")
        if count < 0 or count * width > self.size - self.at:
            raise UbjError(f"a count of {count} is beyond the end")
        return count

    def array(self, depth: int) -> Any:
        kind, count = self.typed()
        if kind is not None and count is not None and (kind in INTS or kind in FLOATS) and count > KEPT:
            self.at += count * struct.calcsize(INTS.get(kind) or FLOATS[kind])
            return None
        values: list[Any] = []
        while count is None or count > 0:
            mark = kind or self.mark()
            if count is None and mark == "]":
                return values
            item = self.value(mark, depth)
            if len(values) < KEPT:
                values.append(item)
            count = None if count is None else count - 1
        return values

    def object(self, depth: int) -> dict[str, Any]:
        kind, count = self.typed()
        values: dict[str, Any] = {}
        while count is None or count > 0:
            if count is None and self.data[self.at : self.at + 1] == b"}":
                self.at += 1
                return values
            key = self.text()
            values[key] = self.value(kind or self.mark(), depth)
            count = None if count is None else count - 1
        return values


def loads(data: Any) -> Any:
    """Value of a UBJSON document. Raises ``UbjError``. Numeric arrays of over 4096 items become None."""
    reader = _Reader(data)
    return reader.value(reader.mark(), 0)
