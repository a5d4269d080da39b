"""Messages between a process and its worker: length-prefixed MessagePack over a socket pair.

Dataclasses travel as maps and are rebuilt by the receiver, which knows their type; numpy arrays
travel as an extension (dtype, shape, bytes). Nothing is unpickled, so a worker that was taken
over by a hostile model cannot run code in its parent.
"""

from __future__ import annotations

import socket
import struct
from typing import Any

import msgspec

from turnout.errors import InputError, LoadError, NotSupportedError, OverloadedError, TurnoutError, WorkerError

ERRORS = {cls.__name__: cls for cls in (InputError, LoadError, NotSupportedError, OverloadedError, WorkerError)}
ARRAY = 1
LENGTH = struct.Struct("<Q")
MAX_MESSAGE = 8 << 30


def _encode_other(value: Any) -> Any:
    import numpy as np

    if isinstance(value, np.ndarray):
        plain = np.ascontiguousarray(value)
        if plain.dtype.hasobject:
            return plain.tolist()
        if plain.dtype.kind in "US":
            return plain.tolist()
        head = msgspec.msgpack.encode([plain.dtype.str, list(value.shape)])
        return msgspec.msgpack.Ext(ARRAY, LENGTH.pack(len(head)) + head + plain.tobytes())
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, (set, frozenset, tuple)):
        return list(value)
    raise TypeError(f"a {type(value).__name__} cannot travel to or from a worker")


def _decode_extension(code: int, data: memoryview) -> Any:
    import numpy as np

    if code != ARRAY:
        raise ValueError(f"unknown extension {code}")
    (length,) = LENGTH.unpack_from(data)
    dtype, shape = msgspec.msgpack.decode(data[LENGTH.size : LENGTH.size + length])
    if np.dtype(dtype).hasobject:
        raise ValueError("object arrays do not travel")
    return np.frombuffer(bytearray(data[LENGTH.size + length :]), dtype=dtype).reshape(shape)


def encode(message: Any) -> bytes:
    """Bytes of a message of dataclasses, containers, numbers, text and numpy arrays."""
    return msgspec.msgpack.encode(message, enc_hook=_encode_other)


def decode(data: bytes) -> Any:
    """Plain containers (and arrays) of an encoded message; see ``rebuild``."""
    return msgspec.msgpack.decode(data, ext_hook=_decode_extension)


def rebuild(value: Any, wanted: Any) -> Any:
    """``value`` (plain containers) as an instance of the dataclass or generic ``wanted``."""
    return msgspec.convert(value, wanted, strict=False)


def error_message(error: TurnoutError) -> dict[str, Any]:
    """An error as plain data."""
    return {"class": type(error).__name__, "message": error.message, "code": error.code, "hints": list(error.hints)}


def rebuild_error(value: dict[str, Any]) -> TurnoutError:
    """The error that ``error_message`` described, of its own class where that crosses processes."""
    cls = ERRORS.get(value["class"], TurnoutError)
    return cls(value["message"], code=value["code"], hints=value["hints"])


def send(sock: socket.socket, message: Any) -> None:
    """Sends one message."""
    data = encode(message)
    sock.sendall(LENGTH.pack(len(data)) + data)


def receive(sock: socket.socket) -> Any:
    """Waits for one message; raises ``EOFError`` when the other side is gone."""
    (length,) = LENGTH.unpack(_exactly(sock, LENGTH.size))
    if length > MAX_MESSAGE:
        raise EOFError("message too large")
    return decode(_exactly(sock, length))


def _exactly(sock: socket.socket, count: int) -> bytes:
    chunks = bytearray(count)
    view, have = memoryview(chunks), 0
    while have < count:
        try:
            got = sock.recv_into(view[have:], min(count - have, 1 << 20))
        except ConnectionError:
            got = 0
        if not got:
            raise EOFError("the worker is gone")
        have += got
    return bytes(chunks)
