"""A worker's engine for other processes: requests and events over ZeroMQ, in MessagePack.

The socket is a ROUTER on a Unix socket inside a directory that only this user can enter. A client sends
maps with ``op``; calls carry a number and get a reply with it, requests get events. What takes long at
the door (tokenizing, compiling a grammar) runs in a small pool, so that one client's grammar does not
hold up another's cancellation.

Ids are a client's own: two clients may use the same, and none reaches another's request. What a client
does not read is kept up to a bound; then its requests end and only their ends are kept. A client that is
gone is noticed within a second, and its requests end.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import msgspec

from turnout.engine.request import Event, Finish, GenerationRequest
from turnout.engine.service import EngineService
from turnout.errors import InputError, LoadError, OverloadedError, TurnoutError, WorkerError
from turnout.tasks.prompting import PromptEncoder
from turnout.types import Request
from turnout.worker import wire
from turnout.worker.engine_bell import MAX_CALL, Bell

DOORKEEPERS = 4  # threads that prepare requests
WAITING = 8192  # calls that wait for a doorkeeper
POLL_MS = 200
RETRY_MS = 10  # while a client does not read
PING_S, IDLE_PING_S = 0.5, 30.0  # with and without open requests
PIPE = 128  # messages that ZeroMQ itself holds for a client
BACKLOG_BYTES = 16 << 20  # of one client
FAREWELL_S, LINGER_MS = 2.0, 200  # for the last events when the engine closes
LONGEST_PATH = 100  # of a Unix socket, on every system


@dataclass(slots=True)
class _Entry:
    """One open request of a client."""

    client: bytes
    id: str
    submitted: bool = False
    cancelled: bool = False
    lost: bool = False  # events of it were dropped


@dataclass(slots=True)
class _Peer:
    """A client that was heard: what it could not take yet."""

    backlog: deque[tuple[bytes, _Entry | None, bool]] = field(default_factory=deque)
    held: int = 0  # bytes
    pinged: float = 0.0


class EngineHost:
    """Serves one engine until ``close``. ``endpoint`` is the address clients connect to."""

    def __init__(self, service: EngineService, encoder: PromptEncoder) -> None:
        import zmq

        self.service = service
        self.encoder = encoder
        self._folder = _folder()
        self.endpoint = f"ipc://{self._folder}/engine"
        self._context = zmq.Context()
        try:
            self._router = self._context.socket(zmq.ROUTER)
            self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
            self._router.setsockopt(zmq.LINGER, LINGER_MS)
            self._router.setsockopt(zmq.MAXMSGSIZE, MAX_CALL)
            self._router.setsockopt(zmq.RCVHWM, PIPE)
            self._router.setsockopt(zmq.SNDHWM, PIPE)
            self._router.bind(self.endpoint)
            self._bell = Bell(self._context)
        except zmq.ZMQError as error:
            self._context.destroy(0)
            shutil.rmtree(self._folder, ignore_errors=True)
            raise LoadError(f"no socket at `{self.endpoint}`: {error}", hints=["set TMPDIR to a short path"]) from None
        self._out: SimpleQueue[tuple[bytes, Any, _Entry | None]] = SimpleQueue()
        self._peers: dict[bytes, _Peer] = {}
        self._open: dict[str, _Entry] = {}  # by the id that the service knows
        self._lock = threading.Lock()  # of `_open`
        self._pool = ThreadPoolExecutor(DOORKEEPERS, thread_name_prefix="turnout-door")
        self._waiting = threading.BoundedSemaphore(WAITING)
        self._closing = False
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, name="turnout-host", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends every request, tells the clients, then ends socket and engine; may be called twice."""
        with self._lock:
            closing, self._closing = self._closing, True
        if closing:
            self._thread.join()
            return
        self._pool.shutdown(wait=False, cancel_futures=True)
        try:
            self.service.close()
        finally:
            self._stopping = True
            self._bell.ring()
            self._thread.join()
            shutil.rmtree(self._folder, ignore_errors=True)

    def vanish(self) -> None:
        """Leaves nothing on the disk, for a process that is about to end without closing."""
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- the socket's thread ----------------------------------------------------------

    def _serve(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._bell.heard, zmq.POLLIN)
        behind = False
        while not self._stopping:
            ready = dict(poller.poll(RETRY_MS if behind else POLL_MS))
            if self._bell.heard in ready:
                self._bell.hush()
            self._flush()
            if self._router in ready:
                self._receive()
            behind = self._catch_up()
        for client in list(self._peers):
            self._post(client, {"closed": "the engine was closed"})
        self._flush()
        end = time.monotonic() + FAREWELL_S
        while self._catch_up() and time.monotonic() < end:
            time.sleep(RETRY_MS / 1000)
        self._router.close()
        self._bell.close()
        self._context.term()

    def _flush(self) -> None:
        while not self._out.empty():
            client, message, entry = self._out.get()
            event = message.get("event")
            done = event is not None and event.done
            if entry is not None and done:
                with self._lock:
                    self._open.pop(_inner(client, entry.id), None)
            if entry is not None and entry.lost:
                if not done:
                    continue
                message = {**message, "event": _too_slow(event)}
            try:
                data = wire.encode(message)
            except Exception as error:
                data = wire.encode(
                    {"call": message.get("call"), "error": wire.error_message(TurnoutError(f"no answer: {error}"))}
                )
            self._send(client, data, entry, done)

    def _receive(self) -> None:
        import zmq

        for _ in range(64):  # then the events of others again
            try:
                frames = self._router.recv_multipart(zmq.DONTWAIT)
            except zmq.Again:
                return
            if len(frames) == 2:  # else not ours
                self._peers.setdefault(frames[0], _Peer())
                self._dispatch(*frames)

    def _send(self, client: bytes, data: bytes, entry: _Entry | None, done: bool) -> None:
        peer = self._peers.get(client)
        if peer is None:  # gone
            return
        if peer.backlog or not self._sent(client, data):
            if client not in self._peers:
                return
            peer.backlog.append((data, entry, done))
            peer.held += len(data)
            if peer.held > BACKLOG_BYTES:
                self._give_up(client, peer)

    def _sent(self, client: bytes, data: bytes) -> bool:
        """Whether the client took it; a client that is gone is forgotten."""
        import zmq

        try:
            self._router.send_multipart([client, data], zmq.DONTWAIT)
        except zmq.Again:
            return False
        except zmq.ZMQError:
            self._peers.pop(client, None)
            self._cancel_all(client)
            return False
        return True

    def _catch_up(self) -> bool:
        """Sends what waits, and asks those with open requests whether they still live. Whether more waits."""
        now = time.monotonic()
        with self._lock:
            asking = {entry.client for entry in self._open.values()}
        for client, peer in list(self._peers.items()):
            while peer.backlog and self._sent(client, peer.backlog[0][0]):
                peer.held -= len(peer.backlog.popleft()[0])
            pause = PING_S if client in asking else IDLE_PING_S
            if not peer.backlog and now - peer.pinged > pause:
                peer.pinged = now
                self._sent(client, wire.encode({"ping": 0}))
        return any(peer.backlog for peer in self._peers.values())

    def _give_up(self, client: bytes, peer: _Peer) -> None:
        """Ends the requests of a client that does not read, and forgets what it was to be told of them."""
        with self._lock:
            for entry in self._open.values():
                entry.lost = entry.lost or entry.client == client
        self._cancel_all(client)
        peer.backlog = deque(
            (data, entry, done) for data, entry, done in peer.backlog if entry is None or not entry.lost or done
        )
        peer.held = sum(len(data) for data, _, _ in peer.backlog)

    def _cancel_all(self, client: bytes) -> None:
        with self._lock:
            entries = [entry for entry in self._open.values() if entry.client == client]
        for entry in entries:
            self._cancel(entry)

    def _cancel(self, entry: _Entry) -> None:
        with self._lock:
            entry.cancelled = True
            submitted = entry.submitted
        if submitted:  # else it is cancelled as soon as it is
            self.service.cancel(_inner(entry.client, entry.id))

    def _post(self, client: bytes, message: dict[str, Any], entry: _Entry | None = None) -> None:
        self._out.put((client, message, entry))
        self._bell.ring()

    # ---- calls ------------------------------------------------------------------------

    def _dispatch(self, client: bytes, data: bytes) -> None:
        try:
            message = wire.decode(data)
            op, arguments = str(message["op"]), dict(message.get("arguments") or {})
            number = message.get("call")
        except Exception:  # not ours: no number to answer to
            return
        if op == "cancel":
            with self._lock:
                entry = self._open.get(_inner(client, str(arguments.get("id"))))
            if entry is not None:
                self._cancel(entry)
            return
        if not self._waiting.acquire(blocking=False):
            self._post(
                client, {"call": number, "error": wire.error_message(OverloadedError(f"{WAITING} calls wait already"))}
            )
            return
        try:
            if op == "submit":  # now, so that a cancellation that follows finds it
                arguments["entry"] = self._enter(client, arguments.get("request"))
            future = self._pool.submit(self._answer, client, number, op, arguments)
        except Exception as error:
            self._waiting.release()
            refused = error if isinstance(error, TurnoutError) else WorkerError("the engine is closing")
            self._post(client, {"call": number, "error": wire.error_message(refused)})
            return
        future.add_done_callback(lambda done: self._answered(client, number, done.cancelled()))

    def _answered(self, client: bytes, number: Any, cancelled: bool) -> None:
        self._waiting.release()
        if cancelled:
            self._post(client, {"call": number, "error": wire.error_message(WorkerError("the engine is closing"))})

    def _enter(self, client: bytes, request: Any) -> _Entry:
        id = request.get("id") if isinstance(request, dict) else None
        if not isinstance(id, str):
            raise InputError("malformed `submit`: a request has an `id`, which is text")
        with self._lock:
            if _inner(client, id) in self._open:
                raise InputError(f"a request `{id}` is running already")
            entry = self._open[_inner(client, id)] = _Entry(client, id)
        return entry

    def _answer(self, client: bytes, number: Any, op: str, arguments: dict[str, Any]) -> None:
        try:
            work: Callable[..., Any] | None = getattr(self, f"_op_{op}", None)
            if work is None:
                raise InputError(f"unknown operation `{op}`")
            reply: dict[str, Any] = {"call": number, "result": work(client, **arguments)}
        except TurnoutError as error:
            reply = {"call": number, "error": wire.error_message(error)}
        except (msgspec.ValidationError, TypeError, KeyError, AttributeError) as error:
            reply = {"call": number, "error": wire.error_message(InputError(f"malformed `{op}`: {error}"))}
        except Exception as error:  # every call is answered
            reply = {"call": number, "error": wire.error_message(TurnoutError(f"{type(error).__name__}: {error}"))}
        self._post(client, reply)

    def _op_submit(self, client: bytes, request: Any, entry: _Entry, task: str = "", inputs: Any = None) -> int:
        """Starts a request; where ``inputs`` are given they become its prompt. Returns the prompt's length."""
        inner = _inner(client, entry.id)
        try:
            asked: GenerationRequest = wire.rebuild(request, GenerationRequest)
            if inputs is not None:
                asked.prompt, asked.encoder = self.encoder.ids(Request(task, inputs))
            asked.id = inner
            self.service.submit(asked, lambda event: self._post(client, {"event": event, "id": entry.id}, entry))
        except BaseException:
            with self._lock:
                self._open.pop(inner, None)
            raise
        with self._lock:
            entry.submitted, cancelled = True, entry.cancelled
        if cancelled:
            self.service.cancel(inner)
        return len(asked.prompt)

    def _op_encode(self, client: bytes, task: str, inputs: Any) -> list[int]:
        prompt, encoder = self.encoder.ids(Request(task, inputs))
        return encoder if encoder is not None else prompt

    def _op_decode(self, client: bytes, ids: list[int]) -> str:
        return self.service.engine.vocabulary.decode(ids)

    def _op_stats(self, client: bytes) -> dict[str, Any]:
        return asdict(self.service.engine.stats)

    def _op_adapters(self, client: bytes) -> list[str]:
        return self.service.engine.adapters

    def _op_load_adapter(self, client: bytes, name: str, path: str) -> None:
        self.service.call(lambda: self.service.engine.load_adapter(name, path))

    def _op_unload_adapter(self, client: bytes, name: str) -> None:
        self.service.call(lambda: self.service.engine.unload_adapter(name))


def _folder() -> str:
    """A new directory for the socket, in the system's own place where the user's makes too long a path."""
    folder = tempfile.mkdtemp(prefix="turnout-engine-")
    if len(folder) > LONGEST_PATH - len("/engine") and Path("/tmp").is_dir():
        shutil.rmtree(folder, ignore_errors=True)
        folder = tempfile.mkdtemp(prefix="turnout-engine-", dir="/tmp")
    return folder


def _inner(client: bytes, id: str) -> str:
    """The id that the service knows a client's request by."""
    return f"{client.hex()}/{id}"


def _too_slow(event: Event) -> Event:
    """The end of a request of which events were dropped."""
    why = "its events were not read: the client fell too far behind"
    return Event(
        event.id, event.index, finish=Finish.ERROR, error=why, code="runtime.overloaded", usage=event.usage, done=True
    )
