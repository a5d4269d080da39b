"""An engine in a thread of its own: the only thread that touches the model.

Two threads through one model give wrong logits (a forward pass may write to the model's own settings),
so everything that reaches the executor goes through one queue to one thread.
"""

from __future__ import annotations

import itertools
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from turnout.engine.core import Engine
from turnout.engine.job import Prepared
from turnout.engine.request import Event, Finish, GenerationRequest
from turnout.errors import InputError, OverloadedError, TurnoutError, WorkerError

Sink = Callable[[Event], None]


class EngineService:
    """Runs ``engine.step`` while there is work. Sinks are called on the engine's thread and should only
    hand the event on; a request whose sink raises is cancelled."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.clock = clock
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._lock = threading.Lock()
        self._sequences: dict[str, int] = {}
        self._closing = False
        self._dead = ""
        self._numbers = itertools.count()
        self._thread = threading.Thread(target=self._run, name="turnout-engine", daemon=True)
        self._thread.start()

    def new_id(self) -> str:
        """An id that no request of this service has had."""
        return f"r{next(self._numbers)}"

    def submit(self, request: GenerationRequest, sink: Sink) -> None:
        """Accepts a request; ``sink`` then gets its events, the last one with ``done``.

        Raises ``InputError``, ``OverloadedError`` when the queue is full, ``WorkerError`` after ``close``.
        """
        prepared = self.engine.prepare(request)
        count = len(prepared.seeds)
        with self._lock:
            if self._closing or self._dead:
                raise WorkerError(self._dead or "the engine is closing")
            if request.id in self._sinks:
                raise InputError(f"a request `{request.id}` is running already")
            config = self.engine.config
            held = sum(self._sequences.values())
            if held + count > config.max_waiting + self.engine.scheduler.max_running:
                raise OverloadedError(f"{held} sequences run or wait, the queue takes {config.max_waiting}")
            self._sinks[request.id] = sink
            self._sequences[request.id] = count
        self._commands.put(lambda: self._add(prepared))

    def cancel(self, id: str) -> None:
        """Ends a request soon; its last event says so. Unknown ids are ignored."""
        self._commands.put(lambda: self.engine.cancel(id))

    def call(self, work: Callable[[], Any]) -> Any:
        """Result of ``work`` run on the engine's thread between two steps."""
        future: Future[Any] = Future()

        def run() -> None:
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            if self._closing or self._dead:
                raise WorkerError(self._dead or "the engine is closing")
            self._commands.put(run)
        return future.result()

    def drain(self, timeout: float) -> bool:
        """Accepts nothing more and waits for what runs; False when ``timeout`` seconds were not enough."""
        with self._lock:
            self._closing = True
        self._commands.put(lambda: None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Cancels everything, ends the thread and frees the executor; may be called twice."""
        with self._lock:
            self._closing = True
            ids = list(self._sinks)
        for id in ids:
            self.cancel(id)
        self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
        self.engine.close()

    # ---- the engine's thread ----------------------------------------------------------

    def _run(self) -> None:
        while True:
            self._take_commands(wait=not self.engine.has_work)
            if self.engine.has_work:
                try:
                    events = self.engine.step(self.clock())
                except BaseException as error:  # a fault of the engine itself: nobody may be left waiting
                    self._die(f"the engine failed: {type(error).__name__}: {error}")
                    return
                for event in events:
                    self._deliver(event)
            elif self._closing and self._commands.empty():
                return

    def _take_commands(self, wait: bool) -> None:
        if wait and not (self._closing and self._commands.empty()):
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()

    def _add(self, prepared: Prepared) -> None:
        try:
            self.engine.add(prepared)
        except TurnoutError as error:
            id = prepared.request.id
            self._deliver(Event(id, finish=Finish.ERROR, error=error.message, code=error.code, done=True))

    def _deliver(self, event: Event) -> None:
        sink = self._sinks.get(event.id)
        if event.done:
            with self._lock:
                self._sinks.pop(event.id, None)
                self._sequences.pop(event.id, None)
        if sink is None:
            return
        try:
            sink(event)
        except Exception:  # the receiver is gone
            if not event.done:
                self.engine.cancel(event.id)

    def _die(self, why: str) -> None:
        with self._lock:
            self._dead = why
            ids = list(self._sinks)
        for id in ids:
            self._deliver(Event(id, finish=Finish.ERROR, error=why, code="runtime.failed", done=True))
        while not self._commands.empty():  # callers of `call` wait for their answers
            self._commands.get()()
