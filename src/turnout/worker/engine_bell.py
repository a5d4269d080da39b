"""What both ends of an engine's socket need: a bell that wakes the socket's thread, and the largest call."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

MAX_CALL = 32 << 20  # bytes: some million tokens of a prompt


class Bell:
    """Wakes a thread that polls sockets. ``heard`` is the socket it polls; any thread may ``ring``.

    A bell that rings already is not rung again, so ringing never waits for the thread, also when that has
    ended. Whoever rings has put down its message before, and the thread calls ``hush`` before it looks.
    """

    def __init__(self, context: Any) -> None:
        import zmq

        address = f"inproc://bell-{id(self)}"
        self._ring, self.heard = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._ring.bind(address)
        self.heard.connect(address)
        self._lock = threading.Lock()
        self._rung = False
        self._closed = False

    def ring(self) -> None:
        """Wakes the thread."""
        import zmq

        if self._rung:
            return
        with self._lock:
            if not self._rung and not self._closed:
                self._rung = True
                self._ring.send(b"", zmq.DONTWAIT)

    def hush(self) -> None:
        """The thread is awake."""
        import zmq

        self._rung = False
        with contextlib.suppress(zmq.Again):
            while True:
                self.heard.recv(zmq.DONTWAIT)

    def close(self) -> None:
        """Rings no more; called by the thread."""
        with self._lock:
            self._closed = True
            self._ring.close(0)
            self.heard.close(0)
