"""A worker's engine for other processes: requests and events over ZeroMQ, in MessagePack.

The socket is a ROUTER on a Unix socket inside a directory that only this user can enter. A client sends
maps with ``op``; calls carry a number and get a reply with it, requests get events. What takes long at
the door (tokenizing, compiling a grammar) runs in a small pool, so that one client's grammar does not
hold up another's cancellation.
"""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from queue import SimpleQueue
from typing import Any

import msgspec

from turnout.engine.request import GenerationRequest
from turnout.engine.service import EngineService
from turnout.errors import InputError, TurnoutError
from turnout.tasks.prompting import PromptEncoder
from turnout.types import Request
from turnout.worker import wire

DOORKEEPERS = 4  # threads that prepare requests
POLL_MS = 200


class EngineHost:
    """Serves one engine until ``close``. ``endpoint`` is the address clients connect to."""

    def __init__(self, service: EngineService, encoder: PromptEncoder) -> None:
        import zmq

        self.service = service
        self.encoder = encoder
        self._folder = tempfile.mkdtemp(prefix="turnout-engine-")
        self.endpoint = f"ipc://{self._folder}/engine"
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.bind(self.endpoint)
        self._out: SimpleQueue[tuple[bytes, bytes, str]] = SimpleQueue()
        self._bell = threading.Lock()
        self._ring = self._pair(zmq.PUSH, bind=True)
        self._heard = self._pair(zmq.PULL, bind=False)
        self._pool = ThreadPoolExecutor(DOORKEEPERS, thread_name_prefix="turnout-door")
        self._closing = False
        self._thread = threading.Thread(target=self._serve, name="turnout-host", daemon=True)
        self._thread.start()

    def _pair(self, kind: int, bind: bool) -> Any:
        socket = self._context.socket(kind)
        address = f"inproc://bell-{id(self)}"
        if bind:
            socket.bind(address)
        else:
            socket.connect(address)
        return socket

    def close(self) -> None:
        """Ends the socket, then the engine; may be called twice."""
        if self._closing:
            return
        self._closing = True
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._wake()
        self._thread.join()
        self.service.close()
        for socket in (self._ring, self._heard, self._router):
            socket.close(0)
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    # ---- the socket's thread ----------------------------------------------------------

    def _serve(self) -> None:
        import zmq

        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        poller.register(self._heard, zmq.POLLIN)
        while not self._closing:
            ready = dict(poller.poll(POLL_MS))
            if self._heard in ready:
                while self._heard.poll(0):
                    self._heard.recv()
            while not self._out.empty():
                self._send(*self._out.get())
            if self._router in ready:
                client, data = self._router.recv_multipart()
                self._dispatch(client, data)

    def _send(self, client: bytes, data: bytes, id: str) -> None:
        import zmq

        try:
            self._router.send_multipart([client, data], zmq.DONTWAIT)
        except zmq.ZMQError:  # the client is gone: nobody waits for the rest
            if id:
                self.service.cancel(id)

    def _post(self, client: bytes, message: Any, id: str = "") -> None:
        self._out.put((client, wire.encode(message), id))
        self._wake()

    def _wake(self) -> None:
        with self._bell:
            if not self._ring.closed:
                self._ring.send(b"")

    def _dispatch(self, client: bytes, data: bytes) -> None:
        try:
            message = wire.decode(data)
            op, arguments = str(message["op"]), dict(message.get("arguments") or {})
        except Exception:  # not ours: no number to answer to
            return
        if op == "cancel":
            self.service.cancel(str(arguments.get("id")))
            return
        work: Callable[..., Any] | None = getattr(self, f"_op_{op}", None)
        number = message.get("call")
        self._pool.submit(self._answer, client, number, op, work, arguments)

    def _answer(
        self, client: bytes, number: Any, op: str, work: Callable[..., Any] | None, arguments: dict[str, Any]
    ) -> None:
        try:
            if work is None:
                raise InputError(f"unknown operation `{op}`")
            reply: dict[str, Any] = {"call": number, "result": work(client, **arguments)}
        except TurnoutError as error:
            reply = {"call": number, "error": _error(error)}
        except msgspec.ValidationError as error:
            reply = {"call": number, "error": _error(InputError(f"malformed `{op}`: {error}"))}
        except Exception as error:  # every call is answered
            reply = {"call": number, "error": _error(TurnoutError(f"{type(error).__name__}: {error}"))}
        self._post(client, reply)

    # ---- operations -------------------------------------------------------------------

    def _op_submit(self, client: bytes, request: Any, task: str = "", inputs: Any = None) -> int:
        """Starts a request; where ``inputs`` are given they become its prompt. Returns the prompt's length."""
        asked: GenerationRequest = wire.rebuild(request, GenerationRequest)
        if inputs is not None:
            asked.prompt, asked.encoder = self.encoder.ids(Request(task, inputs))
        self.service.submit(asked, lambda event: self._post(client, {"event": asdict(event)}, event.id))
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


def _error(error: TurnoutError) -> dict[str, Any]:
    return {"class": type(error).__name__, "message": error.message, "code": error.code, "hints": list(error.hints)}

