"""Protobuf wire format, walked within bounds and without a schema compiler.

Format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


class WireError(ValueError):
    """Bytes that are no message, or a message that ends too early."""


def fields(data: Any, start: int = 0, end: int | None = None) -> Iterator[tuple[int, int, int, int]]:
    """Fields of the message in ``data[start:end]``: (number, wire type, value or start, end).

    For varints the third item is the value; for bytes the third and fourth delimit the content, which
    is neither copied nor looked at. ``data`` is anything indexable, for instance a memory map.
    """
    at, stop = start, len(data) if end is None else end
    while at < stop:
        key, at = varint(data, at, stop)
        number, wire = key >> 3, key & 7
        if number == 0:
            raise WireError("a field has the number 0")
        if wire == VARINT:
            value, at = varint(data, at, stop)
            yield number, wire, value, at
        elif wire == BYTES:
            length, at = varint(data, at, stop)
            if length > stop - at:
                raise WireError(f"field {number} claims {length} bytes, {stop - at} are left")
            yield number, wire, at, at + length
            at += length
        elif wire in (FIXED64, FIXED32):
            width = 8 if wire == FIXED64 else 4
            if width > stop - at:
                raise WireError("cut inside a number")
            yield number, wire, at, at + width
            at += width
        else:
            raise WireError(f"field {number} has the wire type {wire}")


def varint(data: Any, at: int, stop: int) -> tuple[int, int]:
    """Value and end of a base-128 number of at most ten bytes."""
    value = shift = 0
    while True:
        if at >= stop or shift > 63:
            raise WireError("cut inside a number")
        byte = data[at]
        at += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value & 0xFFFF_FFFF_FFFF_FFFF, at
        shift += 7


def signed(value: int) -> int:
    """A varint as the int64 it stands for."""
    return value - (1 << 64) if value >= 1 << 63 else value


def text(data: Any, start: int, end: int) -> str:
    """Text field as str; bytes that are no UTF-8 are replaced."""
    return bytes(data[start:end]).decode("utf-8", "replace")


def packed(data: Any, wire: int, start: int, end: int) -> list[int]:
    """Values of a repeated varint field, packed or single."""
    if wire == VARINT:
        return [signed(start)]
    values = []
    while start < end:
        value, start = varint(data, start, end)
        values.append(signed(value))
    return values
