"""Parent's side of a worker: start, call with limits, stream events, kill, say what happened."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

from turnout.config import WORKER
from turnout.errors import TurnoutError, WorkerError
from turnout.worker import wire

TICK_S = 0.1


class Worker:
    """One worker process. A context manager; not for use by several threads at once."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._log: Any = None

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Process id while the worker runs."""
        return self._process.pid if self._process and self._process.poll() is None else None

    def start(self) -> None:
        """Starts the process unless it runs."""
        if self.pid is not None:
            return
        self.close()
        ours, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (closed in close)
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "turnout.worker.main", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[theirs.fileno()],
                env=_environment(),
                close_fds=True,
            )
        finally:
            theirs.close()
        self._socket = ours

    def call(
        self,
        op: str,
        *,
        timeout: float,
        memory_bytes: int | None = None,
        on_event: Callable[[Any], None] | None = None,
        **arguments: Any,
    ) -> Any:
        """Result of ``op`` in the worker as plain containers.

        Raises ``WorkerError`` (``runtime.timeout``, ``memory.insufficient``, ``runtime.failed``)
        after killing the process when it takes longer than ``timeout`` seconds, outgrows
        ``memory_bytes`` of resident memory or dies; errors raised by the worker come back as
        what they were.
        """
        self.start()
        assert self._socket is not None
        try:
            with self._lifeline(op):
                wire.send(self._socket, {"op": op, "arguments": arguments})
            return self._await_reply(op, time.monotonic() + timeout, timeout, memory_bytes, on_event)
        except BaseException as error:
            # An interrupt leaves a reply under way; the next call would read it as its own.
            if not isinstance(error, TurnoutError):
                self.kill()
            raise

    @contextlib.contextmanager
    def _lifeline(self, op: str) -> Iterator[None]:
        """Turns a broken connection to the worker, and nothing else, into the worker's death."""
        try:
            yield
        except (EOFError, ConnectionError):
            raise self._death(op) from None

    def _await_reply(
        self, op: str, deadline: float, timeout: float, memory_bytes: int | None, on_event: Callable[[Any], None] | None
    ) -> Any:
        assert self._socket is not None
        due = time.monotonic() + TICK_S
        while True:
            ready, _, _ = select.select([self._socket], [], [], TICK_S)
            if not ready or time.monotonic() > due:  # limits hold for a worker that never falls silent, too
                self._enforce(op, deadline, timeout, memory_bytes)
                due = time.monotonic() + TICK_S
            if not ready:
                continue
            with self._lifeline(op):
                message = wire.receive(self._socket)
            if "event" in message:
                if on_event is not None:
                    self._hand_on(message["event"], on_event)
            elif "error" in message:
                raise wire.rebuild_error(message["error"])
            else:
                return message["result"]

    def _hand_on(self, event: Any, on_event: Callable[[Any], None]) -> None:
        try:
            on_event(event)
        except BaseException:
            # Whatever the handler raises, errors of ours too: the reply is still under way.
            self.kill()
            raise

    def _enforce(self, op: str, deadline: float, timeout: float, memory_bytes: int | None) -> None:
        if time.monotonic() > deadline:
            self.kill()
            raise WorkerError(f"`{op}` took longer than {timeout:g} s and was ended", code="runtime.timeout")
        if memory_bytes is None:
            return
        used = self.resident_bytes()
        if used > memory_bytes:
            self.kill()
            raise WorkerError(
                f"`{op}` used {used >> 20} MiB, its limit is {memory_bytes >> 20} MiB; it was ended",
                code="memory.insufficient",
            )

    def resident_bytes(self) -> int:
        """Resident memory of the worker in bytes, 0 when it does not run."""
        pid = self.pid
        if pid is None:
            return 0
        import psutil  # type: ignore[import-untyped]

        try:
            return int(psutil.Process(pid).memory_info().rss)
        except psutil.Error:
            return 0

    def _death(self, op: str) -> WorkerError:
        process = self._process
        code = None
        if process is not None:
            try:
                code = process.wait(WORKER.stop_s)
            except subprocess.TimeoutExpired:
                self.kill()
        tail = self.log_tail()
        self.close()
        how = _describe_exit(code)
        error = WorkerError(
            f"the worker process ended during `{op}` ({how})",
            code="runtime.failed",
            hints=[f"last output: {line}" for line in tail[-3:]],
        )
        return error

    def log_tail(self, lines: int = 8) -> list[str]:
        """Last lines that the worker's libraries wrote to stdout or stderr."""
        if self._log is None or self._log.closed:
            return []
        self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, self._log.tell() - 8192))
        text = self._log.read().decode("utf-8", "replace")
        return [line for line in text.splitlines() if line.strip()][-lines:]

    def kill(self) -> None:
        """Ends the process at once and waits for it, so that its memory is free on return."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        self.close()

    def close(self) -> None:
        """Ends the worker in peace, by force after a while; may be called twice."""
        if self._socket is not None:
            self._socket.close()  # the worker's loop ends at end of file
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(WORKER.stop_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None
        if self._log is not None:
            self._log.close()
            self._log = None


def _environment() -> dict[str, str]:
    # Waiting OpenMP threads must sleep: spinning ones stall everything where a core is shared
    # (measured: 0.6 against 17 tokens/s). Read once, when the library loads; a user's own value stays.
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    environment.update(
        {
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "HF_DATASETS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "PYTHONUNBUFFERED": "1",
            "OPENVINO_TELEMETRY_DISABLE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }
    )
    return environment


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "it did not answer"
    if code < 0:
        try:
            return f"signal {signal.Signals(-code).name}"
        except ValueError:
            return f"signal {-code}"
    return f"exit status {code}"
