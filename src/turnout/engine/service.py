"""An engine in a thread of its own: the only thread that touches the model.

Two threads through one model give wrong logits (a forward pass may write to the model's own settings),
so everything that reaches the executor goes through one queue to one thread, its closing included.
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
from turnout.engine.job import Prepared, told
from turnout.engine.request import Event, Finish, GenerationRequest
from turnout.errors import InputError, OverloadedError, WorkerError

Sink = Callable[[Event], None]


class EngineService:
    """Runs ``engine.step`` while there is work. Sinks are called on the engine's thread and should only
    hand the event on; a request whose sink raises is cancelled. A sink may submit, cancel, call and close."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.monotonic) -> None:
        self.engine = engine
        self.clock = clock
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._sinks: dict[str, Sink] = {}
        self._sequences: dict[str, int] = {}
        self._held = 0  # sequences of all open requests
        self._lock = threading.Lock()  # of all above and of the three below
        self._closing = False
        self._dead = ""
        self._released = False
        self._release = False  # the thread closes the engine at its end
        self._fault: BaseException | None = None  # of closing
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
            self._check_open()
            if request.id in self._sinks:
                raise InputError(f"a request `{request.id}` is running already")
            waiting = self.engine.config.max_waiting
            if self._held + count > waiting + self.engine.scheduler.max_running:
                raise OverloadedError(f"{self._held} sequences run or wait, the queue takes {waiting}")
            self._sinks[request.id] = sink
            self._sequences[request.id] = count
            self._held += count
            # Inside the lock: the thread ends only when nothing was accepted that it has not seen.
            self._commands.put(lambda: self._add(prepared))

    def cancel(self, id: str) -> None:
        """Ends a request soon; its last event says so. Unknown ids are ignored."""
        self._commands.put(lambda: self.engine.cancel(id))

    def call(self, work: Callable[[], Any]) -> Any:
        """Result of ``work`` run on the engine's thread between two steps; at once when called from there."""
        if threading.current_thread() is self._thread:
            return work()
        future: Future[Any] = Future()

        def run() -> None:
            try:
                if self._dead:
                    raise WorkerError(self._dead)
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)

        with self._lock:
            self._check_open()
            self._commands.put(run)
        return future.result()

    def _check_open(self) -> None:
        if self._closing or self._dead:
            raise WorkerError(self._dead or "the engine is closing")

    def drain(self, timeout: float) -> bool:
        """Accepts nothing more and waits for what runs; False when ``timeout`` seconds were not enough."""
        with self._lock:
            self._closing = True
            self._commands.put(lambda: None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Cancels everything, ends the thread and frees the executor; may be called twice, and from a sink:
        then the engine is freed when the sinks have been told. Raises what freeing the executor raises."""
        with self._lock:
            self._closing = self._release = True
            for id in self._sinks:
                self.cancel(id)
            self._commands.put(lambda: None)
        if threading.current_thread() is not self._thread:
            self._thread.join()
            self._free()
            fault, self._fault = self._fault, None
            if fault is not None:
                raise fault

    def _free(self) -> None:
        with self._lock:
            released, self._released = self._released, True
        if not released:
            try:
                self.engine.close()
            except BaseException as error:
                self._fault = error

    # ---- the engine's thread ----------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._turn():
                pass
        except BaseException as error:  # a fault of the engine itself: nobody may be left waiting
            self._die(f"the engine failed: {type(error).__name__}: {error}")
        if self._release:
            self._free()

    def _turn(self) -> bool:
        """Commands, then one step; False when all is done."""
        working = self.engine.has_work
        if not working:
            with self._lock:
                if self._closing and self._commands.empty():
                    self._dead = self._dead or "the engine is closed"
                    return False
            self._commands.get()()
        while not self._commands.empty():
            self._commands.get()()
        if self.engine.has_work:
            for event in self.engine.step(self.clock()):
                self._deliver(event)
        return True

    def _add(self, prepared: Prepared) -> None:
        try:
            self.engine.add(prepared, bounded=False)
        except Exception as error:  # everything accepted has an end
            message, code = told(error)
            self._deliver(Event(prepared.request.id, finish=Finish.ERROR, error=message, code=code, done=True))

    def _deliver(self, event: Event) -> None:
        id, done = event.id, event.done
        sink = self._sinks.get(id)
        if done:
            with self._lock:
                self._sinks.pop(id, None)
                self._held -= self._sequences.pop(id, 0)
        if sink is None:
            return
        try:
            sink(event)
        except BaseException:  # the receiver is gone; this thread serves all others
            if not done:
                self.engine.cancel(id)

    def _die(self, why: str) -> None:
        with self._lock:
            self._dead = why
            ids = list(self._sinks)
        for id in ids:
            self._deliver(Event(id, finish=Finish.ERROR, error=why, code="runtime.failed", done=True))
        while not self._commands.empty():  # callers of `call` wait for their answers
            self._commands.get()()
