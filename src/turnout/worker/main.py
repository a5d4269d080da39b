"""The worker process: a loop over one socket. ``python -m turnout.worker.main FD``."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from turnout.backends import registry
from turnout.backends.base import (
    BackendBuild,
    Case,
    Evidence,
    EvidenceLevel,
    Kind,
    LoadPlan,
    Outcome,
    Reason,
    Requirement,
    Session,
    State,
)
from turnout.backends.requirements import common
from turnout.backends.resolve import Assessment
from turnout.errors import InputError, LoadError, NotFoundError, TurnoutError
from turnout.package.facts import Package
from turnout.package.inspect import inspect
from turnout.types import BASIC_SAMPLING, Request, Sampling
from turnout.worker import wire

if TYPE_CHECKING:
    from turnout.worker.engine_host import EngineHost

ORPHAN_CHECK_S = 1.0
ALONE = 4  # slots of an engine that is asked one request at a time


class Host:
    """Operations of a worker; holds at most one session."""

    def __init__(self, emit: Callable[[Any], None]) -> None:
        self._emit = emit
        self._session: Session | None = None
        self._engine: EngineHost | None = None
        self._alone: Session | None = None  # the session's case under the engine
        self._backend = ""
        self._package: tuple[str, Package] | None = None

    def _case(
        self, source: str, artifact: str, task: str, device: str, options: dict[str, Any], fingerprint: str = ""
    ) -> Case:
        if self._package is None or self._package[0] != source or self._package[1].fingerprint != fingerprint:
            self._package = (source, inspect(source))
        package = self._package[1]
        if fingerprint and package.fingerprint != fingerprint:
            raise LoadError(
                f"the package at `{source}` changed since it was inspected",
                code="artifact.corrupt",
                hints=["run the command again"],
            )
        found = package.artifact(artifact)
        if found is None:
            raise NotFoundError(f"no artifact `{artifact}` in `{source}`")
        return Case(package.root, found, task, device, options)

    def describe(self, backend: str) -> BackendBuild:
        """Build of a backend with the devices its library sees."""
        chosen = registry.get(backend)
        build = chosen.describe()
        if build.available:
            build.devices = chosen.devices()
        return build

    def assess(self, backend: str, case: dict[str, Any]) -> Assessment:
        """Requirements of a case, then the runtime's tables, then a dry load when nothing is against it."""
        chosen, this = registry.get(backend), self._case(**case)
        build = chosen.describe()
        if not build.available:
            return Assessment(common(chosen, this, build))
        assessment = Assessment(common(chosen, this, build, chosen.devices()))
        if this.artifact.kind not in chosen.reads:
            return assessment
        assessment.requirements += _guard(lambda: chosen.requirements(this))
        if _refused_for_good(assessment.requirements):
            return assessment
        assessment.evidence += chosen.inquire(this)
        if any(r.state in (State.UNMET, State.UNKNOWN) for r in assessment.requirements):
            return assessment
        assessment.evidence.append(_timed(lambda: chosen.dry_load(chosen.plan(this))))
        assessment.notes = [e.log for e in assessment.evidence if e.log and e.outcome is Outcome.PASS]
        return assessment

    def load(self, backend: str, case: dict[str, Any]) -> dict[str, Any]:
        """Loads a case as a transaction and keeps the session; a failed load leaves nothing behind."""
        self.unload()
        chosen, this = registry.get(backend), self._case(**case)
        self._check(backend, this)
        started = time.perf_counter()
        plan: LoadPlan = chosen.plan(this)
        session: Session | None = None
        try:
            session = chosen.load(plan)
            unresolved = session.binding.unresolved
            if unresolved:
                raise LoadError(
                    f"{len(unresolved)} required tensors are in no file, first `{unresolved[0]}`", code="tensor.missing"
                )
        except BaseException:
            if session is not None:
                session.close()
            gc.collect()
            raise
        self._session, self._backend = session, backend
        return {
            "binding": session.binding,
            "dtype": session.dtype,
            "recipe": plan.recipe,
            "implementation": plan.implementation,
            "load_s": time.perf_counter() - started,
        }

    def _check(self, backend: str, case: Case) -> None:
        """Also when a caller skipped the verdict: nothing is loaded past a failed integrity check."""
        chosen = registry.get(backend)
        for requirement in common(chosen, case, chosen.describe()):
            if requirement.state is State.UNMET and requirement.reason is not None:
                raise LoadError(requirement.reason.message, code=requirement.reason.code)

    def probe(self) -> Evidence:
        """Runs the backend's probe on the loaded session."""
        session = self._loaded()
        return _timed(lambda: registry.get(self._backend).probe(session))

    def run(self, request: dict[str, Any], stream: bool = False) -> dict[str, Any]:
        """Output of one request on the loaded session."""
        session = self._loaded()
        typed: Request = wire.rebuild(request, Request)
        ignored = _ignored(typed.sampling, getattr(session, "honours", BASIC_SAMPLING))
        if ignored:
            session = self._through_engine(session, ignored)
        started = time.perf_counter()
        first: list[float] = []

        def emit(piece: str) -> None:
            if not first:
                first.append(time.perf_counter() - started)
            if stream:
                self._emit(piece)

        output = session.run(typed, emit)
        timings = {"run_s": time.perf_counter() - started}
        if first:
            timings["first_token_s"] = first[0]
        return {"output": output, "timings": timings}

    def _through_engine(self, session: Session, ignored: list[str]) -> Session:
        """The loaded case under the generation engine, which knows every parameter, from the first request on
        that needs it. Raises ``InputError`` where the backend has no executor."""
        chosen: Any = registry.get(self._backend)
        if not hasattr(chosen, "executor"):
            raise InputError(
                f"`{self._backend}` runs this model without the generation engine and knows no {', '.join(ignored)}",
                hints=["docs/engine.md names the backends that the engine drives"],
            )
        if self._alone is None:
            from turnout.engine.core import Engine
            from turnout.engine.session import EngineSession

            plan = session.plan
            vocabulary = chosen.vocabulary(plan)  # first: when it fails there is no executor to free
            engine = Engine(chosen.executor(plan, {"slots": ALONE}), vocabulary)
            self._alone = EngineSession(plan, engine, session.binding, session.dtype)
        return self._alone

    def open_engine(
        self,
        backend: str,
        case: dict[str, Any],
        options: dict[str, Any],
        engine: dict[str, Any],
        draft: dict[str, Any] | None = None,
        adapters: dict[str, str] | None = None,
    ) -> dict[str, Any]:
        """Loads a case into an engine that other processes reach at the returned ``endpoint``."""
        from turnout.worker.engine_build import open_engine

        self.unload()
        this = self._case(**case)
        self._check(backend, this)
        other = self._case(**draft["case"]) if draft is not None else None
        started = time.perf_counter()
        try:
            self._engine, answer = open_engine(
                backend, this, options, engine, adapters or {}, (draft["backend"], other) if draft and other else None
            )
        except BaseException:
            gc.collect()
            raise
        return {**answer, "load_s": time.perf_counter() - started}

    def score(
        self, backend: str, case: dict[str, Any], options: dict[str, Any], text: str, ids: list[int], path: str
    ) -> list[int]:
        """Writes a text's logits to a file and returns its token ids (``engine_build.score``)."""
        from turnout.worker import engine_build

        self.unload()
        this = self._case(**case)
        self._check(backend, this)
        return engine_build.score(backend, this, options, text, ids, path)

    def unload(self) -> None:
        """Closes the session and the engine if there are any."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None
        if self._alone is not None:
            self._alone.close()
            self._alone = None
        if self._session is not None:
            self._session.close()
            self._session = None
            gc.collect()

    def vanish(self) -> None:
        """Leaves no file behind when the process ends without closing."""
        if self._engine is not None:
            self._engine.vanish()

    def _loaded(self) -> Session:
        if self._session is None:
            raise LoadError("nothing is loaded")
        return self._session


def _ignored(sampling: Sampling, honours: frozenset[str]) -> list[str]:
    """Parameters that a session would ignore."""
    return [
        field.name
        for field in fields(Sampling)
        if field.name not in honours and getattr(sampling, field.name) != field.default
    ]


def _guard(ask: Callable[[], list[Requirement]]) -> list[Requirement]:
    """A backend that cannot finish its own questions leaves the case unknown, not supported."""
    try:
        return ask()
    except TurnoutError as error:
        reason = Reason(error.code, error.message)
        return [Requirement(error.code, Kind.ARCHITECTURE, State.UNMET, reason=reason)]
    except Exception as error:  # the library's own exceptions have no common base
        reason = Reason("runtime.failed", f"the backend could not be asked: {_line(error)}")
        return [Requirement("runtime.failed", Kind.ARCHITECTURE, State.UNKNOWN, reason=reason)]


def _refused_for_good(requirements: list[Requirement]) -> bool:
    return any(r.state is State.UNMET and not r.remedies for r in requirements)


def _timed(rung: Callable[[], Evidence]) -> Evidence:
    started = time.perf_counter()
    try:
        evidence = rung()
    except TurnoutError as error:
        evidence = Evidence(EvidenceLevel.DRY_LOADED, Outcome.FAIL, [Reason(error.code, error.message)])
    except Exception as error:  # the library's own exceptions have no common base
        evidence = Evidence(EvidenceLevel.DRY_LOADED, Outcome.FAIL, [Reason("runtime.failed", _line(error))])
    evidence.duration = time.perf_counter() - started
    evidence.at = time.time()
    return evidence


def _line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__


def _report(error: Exception) -> dict[str, Any]:
    if isinstance(error, TurnoutError):
        return wire.error_message(error)
    if isinstance(error, MemoryError):
        return {"class": "WorkerError", "message": "out of memory", "code": "memory.insufficient", "hints": []}
    import traceback

    traceback.print_exc()  # to the worker's own log, shown only when asked for
    return {"class": "LoadError", "message": _line(error), "code": "runtime.failed", "hints": []}


def serve(sock: socket.socket, host: Host) -> None:
    """Answers calls until the parent closes its end."""
    while True:
        try:
            message = wire.receive(sock)
        except EOFError:
            host.unload()
            return
        try:
            result = getattr(host, message["op"])(**message["arguments"])
            answer = {"result": result}
        except Exception as error:  # every call is answered
            answer = {"error": _report(error)}
        wire.send(sock, answer)


def _end_with_parent(parent: int, host: Host) -> None:
    """Ends a computing worker whose parent died. (prctl's parent-death signal would fire as soon as
    the thread that started the worker ended.)"""
    while os.getppid() == parent:
        time.sleep(ORPHAN_CHECK_S)
    host.vanish()
    os._exit(1)


def main() -> None:
    """Entry of the worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    sock = socket.socket(fileno=int(sys.argv[1]))
    host = Host(lambda piece: wire.send(sock, {"event": piece}))
    threading.Thread(target=_end_with_parent, args=[os.getppid(), host], daemon=True).start()
    with contextlib.suppress(BrokenPipeError, ConnectionError):
        serve(sock, host)
    # Native libraries' exit handlers crash at times; everything of ours is closed.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
