"""The other end of ``engine_host``: calls, requests and their events from any thread of this process."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

from turnout.engine.request import Event, Finish, GenerationRequest
from turnout.errors import (
    InputError,
    LoadError,
    NotSupportedError,
    OverloadedError,
    TurnoutError,
    WorkerError,
)
from turnout.worker import wire

POLL_MS = 200
ERRORS = {c.__name__: c for c in (InputError, LoadError, NotSupportedError, OverloadedError, WorkerError)}
Sink = Callable[[Event], None]


class EngineClient:
    """A connection to an engine. ``alive`` tells whether its process still runs; when it does not, every
    open request gets a last event with an error and every call raises ``WorkerError``."""

    def __init__(self, endpoint: str, alive: Callable[[], bool]) -> None:
        import zmq

        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.connect(endpoint)
        self._alive = alive
        self._out: SimpleQueue[bytes] = SimpleQueue()
        self._calls: dict[int, Future[Any]] = {}
        self._sinks: dict[str, Sink] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._dead = ""
        self._closing = False
        address = f"inproc://bell-{id(self)}"
        self._ring, self._heard = self._context.socket(zmq.PUSH), self._context.socket(zmq.PULL)
        self._ring.bind(address)
        self._heard.connect(address)
        self._thread = threading.Thread(target=self._serve, name="turnout-client", daemon=True)
        self._thread.start()

    def call(self, op: str, timeout: float | None = None, **arguments: Any) -> Any:
        """Result of an operation. Raises what the engine raised, or ``WorkerError``."""
        future: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            if self._dead or self._closing:
                raise WorkerError(self._dead or "the engine is closed")
            self._calls[number] = future
        self._post({"op": op, "call": number, "arguments": arguments})
        return future.result(timeout)

    def submit(self, request: GenerationRequest, sink: Sink, task: str = "", inputs: Any = None) -> int:
        """Starts a request (from ``inputs`` of a task, where given) and returns its prompt's length in tokens.

        ``sink`` gets its events on this client's own thread. Raises ``InputError``, ``OverloadedError``,
        ``WorkerError``; then no event comes.
        """
        with self._lock:
            if request.id in self._sinks:
                raise InputError(f"a request `{request.id}` is running already")
            self._sinks[request.id] = sink
        try:
            return int(self.call("submit", request=asdict(request), task=task, inputs=inputs))
        except BaseException:
            with self._lock:
                self._sinks.pop(request.id, None)
            raise

    def cancel(self, id: str) -> None:
        """Ends a request soon; unknown ids are ignored."""
        self._post({"op": "cancel", "arguments": {"id": id}})

    def close(self) -> None:
        """Leaves; open requests get an error. May be called twice."""
        if self._closing:
            return
        self._closing = True
        self._wake()
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self._fail("the engine was closed")
        for socket in (self._ring, self._heard, self._dealer):
            socket.close(0)
        self._context.term()

    # ---- the socket's thread ----------------------------------------------------------

    def _post(self, message: Any) -> None:
        self._out.put(wire.encode(message))
        self._wake()

    def _wake(self) -> None:
        with self._lock:
            if not self._ring.closed:
                self._ring.send(b"")

    def _serve(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._heard, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(POLL_MS))
            if self._heard in ready:
                while self._heard.poll(0):
                    self._heard.recv()
            while not self._out.empty():
                self._dealer.send(self._out.get())
            while self._dealer.poll(0):
                self._receive(self._dealer.recv())
            if not ready and not self._alive():
                self._fail("the worker process ended")
                return

    def _receive(self, data: bytes) -> None:
        message = wire.decode(data)
        if "event" in message:
            event: Event = wire.rebuild(message["event"], Event)
            with self._lock:
                sink = self._sinks.get(event.id)
                if event.done:
                    self._sinks.pop(event.id, None)
            if sink is not None:
                self._tell(sink, event)
            return
        with self._lock:
            future = self._calls.pop(message["call"], None)
        if future is None:
            return
        if "error" in message:
            future.set_exception(_rebuild(message["error"]))
        else:
            future.set_result(message["result"])

    def _tell(self, sink: Sink, event: Event) -> None:
        try:
            sink(event)
        except Exception:  # a receiver's fault ends its own request only
            if not event.done:
                self._post({"op": "cancel", "arguments": {"id": event.id}})

    def _fail(self, why: str) -> None:
        with self._lock:
            self._dead = self._dead or why
            calls, self._calls = list(self._calls.values()), {}
            sinks, self._sinks = list(self._sinks.items()), {}
        for future in calls:
            future.set_exception(WorkerError(why))
        for id, sink in sinks:
            self._tell(sink, Event(id, finish=Finish.ERROR, error=why, code="runtime.failed", done=True))


def _rebuild(value: dict[str, Any]) -> TurnoutError:
    return ERRORS.get(value["class"], TurnoutError)(value["message"], code=value["code"], hints=value["hints"])
