"""The other end of ``engine_host``: calls, requests and their events from any thread of this process."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from turnout.engine.request import Event, Finish, GenerationRequest
from turnout.errors import (
    InputError,
    TurnoutError,
    WorkerError,
)
from turnout.worker import wire
from turnout.worker.engine_bell import MAX_CALL, Bell

POLL_MS = 200
RETRY_MS = 10  # while the engine does not read
REOPEN = "open the model again (`turnout.LLM(...)`); a worker that ended does not come back by itself"
Sink = Callable[[Event], None]


class EngineClient:
    """A connection to an engine. ``alive`` tells whether its process still runs; when it does not, every
    open request gets a last event with an error and every call raises ``WorkerError``.

    A connection belongs to the process that made it: in a forked one every call raises ``WorkerError``.
    """

    def __init__(self, endpoint: str, alive: Callable[[], bool]) -> None:
        import zmq

        self._pid = os.getpid()
        self._context = zmq.Context()
        self._dealer = self._context.socket(zmq.DEALER)
        self._dealer.setsockopt(zmq.LINGER, 0)
        self._dealer.connect(endpoint)
        self._bell = Bell(self._context)
        self._alive = alive
        self._out: SimpleQueue[bytes] = SimpleQueue()
        self._waiting: deque[bytes] = deque()  # what the socket did not take yet
        self._calls: dict[int, Future[Any]] = {}
        self._sinks: dict[str, Sink] = {}
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()  # of calls, sinks and the two below
        self._dead = ""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="turnout-client", daemon=True)
        self._thread.start()

    @property
    def dead(self) -> str:
        """Why the connection is of no use any more; empty while it is."""
        return self._dead

    def call(self, op: str, timeout: float | None = None, **arguments: Any) -> Any:
        """Result of an operation. Raises what the engine raised, ``WorkerError``, or ``TimeoutError``."""
        return self._start(op, arguments).result(timeout)

    def submit(self, request: GenerationRequest, sink: Sink, task: str = "", inputs: Any = None) -> int:
        """Starts a request (from ``inputs`` of a task, where given) and returns its prompt's length in tokens.

        ``sink`` gets its events on this client's own thread. Raises ``InputError``, ``OverloadedError``,
        ``WorkerError``; then no event comes. Interrupted, it cancels the request.
        """
        try:
            return int(self.start(request, sink, task, inputs).result())
        except TurnoutError:
            raise
        except BaseException:
            self.abandon(request.id)
            raise

    def start(self, request: GenerationRequest, sink: Sink, task: str = "", inputs: Any = None) -> Future[int]:
        """``submit`` that does not wait: the future has the prompt's length, or what ``submit`` raises."""
        id = request.id
        with self._lock:
            if id in self._sinks:
                raise InputError(f"a request `{id}` is running already")
            self._sinks[id] = sink

        def refused(future: Future[int]) -> None:
            if not future.cancelled() and future.exception() is not None:
                with self._lock:
                    self._sinks.pop(id, None)

        try:
            future = self._start("submit", {"request": request, "task": task, "inputs": inputs})
        except BaseException:
            with self._lock:
                self._sinks.pop(id, None)
            raise
        future.add_done_callback(refused)
        return future

    def _start(self, op: str, arguments: dict[str, Any]) -> Future[Any]:
        number = next(self._numbers)
        try:
            data = wire.encode({"op": op, "call": number, "arguments": arguments})
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise InputError(f"`{op}` cannot be sent: {error}") from None
        if len(data) > MAX_CALL:
            raise InputError(f"`{op}` has {len(data) >> 20} MiB, the engine takes {MAX_CALL >> 20}")
        future: Future[Any] = Future()
        with self._lock:
            self._check()
            self._calls[number] = future
        future.add_done_callback(lambda _: self._calls.pop(number, None))
        self._out.put(data)
        self._bell.ring()
        return future

    def _check(self) -> None:
        if os.getpid() != self._pid:
            raise WorkerError(
                f"the model belongs to process {self._pid}, this is a fork of it",
                hints=["open the model after forking, or start processes with `spawn`"],
            )
        if self._dead or self._closing:
            raise WorkerError(self._dead or "the engine was closed", hints=[REOPEN])

    def cancel(self, id: str) -> None:
        """Ends a request soon; unknown ids are ignored, and so is everything after the end."""
        if os.getpid() == self._pid and not self._dead and not self._closing:
            self._out.put(wire.encode({"op": "cancel", "arguments": {"id": id}}))
            self._bell.ring()

    def abandon(self, id: str) -> None:
        """Cancels a request of which nothing more is to be heard."""
        with self._lock:
            self._sinks.pop(id, None)
        self.cancel(id)

    def close(self) -> None:
        """Leaves; open requests get an error. May be called twice, from a sink, and in a forked process (where
        it does nothing)."""
        if os.getpid() != self._pid:
            return
        self._closing = True
        self._bell.ring()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    # ---- the socket's thread ----------------------------------------------------------

    def _run(self) -> None:
        why = "the engine was closed"
        try:
            why = self._serve() or why
        except Exception as error:  # nobody may be left waiting
            why = f"the connection to the engine failed: {type(error).__name__}: {error}"
        self._fail(why)
        self._bell.close()
        self._dealer.close(0)
        self._context.term()

    def _serve(self) -> str:
        """Serves until the end and returns why it came; empty when this side closes."""
        import zmq

        poller = zmq.Poller()
        poller.register(self._dealer, zmq.POLLIN)
        poller.register(self._bell.heard, zmq.POLLIN)
        looked = time.monotonic()
        while not self._closing:
            ready = dict(poller.poll(RETRY_MS if self._waiting else POLL_MS))
            if self._bell.heard in ready:
                self._bell.hush()
            self._send()
            while not self._closing and (data := self._received()) is not None:
                if ended := self._receive(data):
                    return ended
            if time.monotonic() - looked > POLL_MS / 1000:
                looked = time.monotonic()
                if not self._alive():
                    return "the worker process ended"
        return ""

    def _send(self) -> None:
        import zmq

        while not self._out.empty():
            self._waiting.append(self._out.get())
        with suppress(zmq.Again):
            while self._waiting:
                self._dealer.send(self._waiting[0], zmq.DONTWAIT)
                self._waiting.popleft()

    def _received(self) -> bytes | None:
        import zmq

        try:
            return bytes(self._dealer.recv(zmq.DONTWAIT))
        except zmq.Again:
            return None

    def _receive(self, data: bytes) -> str:
        """Hands a message on; why the engine ended, when it tells so."""
        message = wire.decode(data)
        if "event" in message:
            event: Event = wire.rebuild(message["event"], Event)
            event.id = message["id"]
            with self._lock:
                sink = self._sinks.get(event.id)
                if event.done:
                    self._sinks.pop(event.id, None)
            if sink is not None:
                self._tell(sink, event)
        elif "call" in message:
            future = self._calls.get(message["call"])
            if future is not None:
                with suppress(InvalidStateError):  # cancelled by whoever waited
                    if "error" in message:
                        future.set_exception(wire.rebuild_error(message["error"]))
                    else:
                        future.set_result(message["result"])
        return str(message.get("closed", ""))

    def _tell(self, sink: Sink, event: Event) -> None:
        try:
            sink(event)
        except BaseException:  # a receiver's fault ends its own request only
            if not event.done:
                self.cancel(event.id)

    def _fail(self, why: str) -> None:
        with self._lock:
            self._dead = self._dead or why
            calls, sinks = list(self._calls.values()), list(self._sinks.items())
            self._sinks = {}
        for future in calls:
            with suppress(InvalidStateError):
                future.set_exception(WorkerError(why, hints=[REOPEN]))
        for id, sink in sinks:
            self._tell(sink, Event(id, finish=Finish.ERROR, error=why, code="runtime.failed", done=True))
