"""The worker is a crash boundary: whatever happens in it ends in a result or a clear error."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import psutil
import pytest

from turnout.backends.base import Evidence, Outcome
from turnout.errors import InputError, LoadError, WorkerError
from turnout.package.inspect import inspect
from turnout.types import Request
from turnout.worker import wire
from turnout.worker.process import Worker

CALL: dict[str, Any] = {"timeout": 60.0, "backend": "mine"}


@pytest.fixture
def worker(plugin: Path):  # type: ignore[no-untyped-def]
    with Worker() as started:
        yield started


@pytest.fixture
def message(package_dir: Path) -> dict[str, Any]:
    package = inspect(package_dir)
    return {
        "source": str(package_dir),
        "artifact": package.artifacts[0].id,
        "task": "tensor",
        "device": "cpu",
        "options": {},
        "fingerprint": package.fingerprint,
    }


def request(how: str = "") -> Request:
    return Request("tensor", {"tensors": {"x": [1]}}, options={"variant": how})


def test_load_probe_run_and_stream(worker: Worker, message: dict[str, Any]) -> None:
    loaded = worker.call("load", case=message, **CALL)
    assert loaded["dtype"] == "float32" and loaded["binding"]["loaded"] == 1
    probed = wire.rebuild(worker.call("probe", timeout=60), Evidence)
    assert probed.outcome is Outcome.PASS and probed.measurements == {"latency_s": 0.5}
    pieces: list[str] = []
    answer = worker.call("run", timeout=60, request=request(), stream=True, on_event=pieces.append)
    assert pieces == ["a", "b"]
    assert answer["output"]["tensors"]["pid"] == [worker.pid] != [os.getpid()]


@pytest.mark.parametrize(
    ("how", "code", "text"), [("abort", "runtime.failed", "SIGABRT"), ("exit", "runtime.failed", "exit status 7")]
)
@pytest.mark.parametrize("when", ["requirements", "load", "run"])
def test_a_death_is_an_error_and_the_next_call_works(
    worker: Worker, message: dict[str, Any], how: str, code: str, text: str, when: str
) -> None:
    with pytest.raises(WorkerError, match=text) as caught:
        if when == "requirements":
            worker.call("assess", case=message | {"options": {"variant": how}}, **CALL)
        elif when == "load":
            worker.call("load", case=message | {"options": {"dtype": how}}, **CALL)
        else:
            worker.call("load", case=message, **CALL)
            worker.call("run", timeout=60, request=request(how))
    assert caught.value.code == code
    if how == "abort":
        assert any("native code gave up" in hint for hint in caught.value.hints)
    assert worker.pid is None
    assert worker.call("load", case=message, **CALL)["dtype"] == "float32"


def test_a_hang_is_ended_at_its_time_limit(worker: Worker, message: dict[str, Any]) -> None:
    worker.call("load", case=message, **CALL)
    pid = worker.pid
    with pytest.raises(WorkerError) as caught:
        worker.call("run", timeout=0.3, request=request("hang"))
    assert caught.value.code == "runtime.timeout"
    assert pid is not None and not psutil.pid_exists(pid)


def test_too_much_memory_is_ended_at_its_limit(worker: Worker, message: dict[str, Any]) -> None:
    with pytest.raises(WorkerError) as caught:
        worker.call("assess", case=message | {"options": {"variant": "eat"}}, memory_bytes=400 << 20, **CALL)
    assert caught.value.code == "memory.insufficient"
    assert worker.pid is None


@pytest.mark.parametrize(
    ("timeout", "memory_bytes", "code"), [(0.5, None, "runtime.timeout"), (60, 400 << 20, "memory.insufficient")]
)
def test_limits_hold_for_a_worker_that_never_falls_silent(
    worker: Worker, message: dict[str, Any], timeout: float, memory_bytes: int | None, code: str
) -> None:
    worker.call("load", case=message, **CALL)
    heard: list[str] = []
    with pytest.raises(WorkerError) as caught:
        worker.call(
            "run",
            timeout=timeout,
            memory_bytes=memory_bytes,
            request=request("talk"),
            stream=True,
            on_event=heard.append,
        )
    assert caught.value.code == code and heard
    assert worker.pid is None


def test_errors_come_back_as_what_they_were(worker: Worker, message: dict[str, Any]) -> None:
    worker.call("load", case=message, **CALL)
    with pytest.raises(InputError, match="no such thing") as caught:
        worker.call("run", timeout=60, request=request("input"))
    assert caught.value.hints == ("try another",)
    with pytest.raises(LoadError, match="unordered_map::at"):
        worker.call("run", timeout=60, request=request("raise"))
    assert worker.call("run", timeout=60, request=request())["output"]["tensors"]["pid"]


def test_an_unresolved_tensor_fails_the_load_and_leaves_nothing(worker: Worker, message: dict[str, Any]) -> None:
    with pytest.raises(LoadError, match="lm_head.weight") as caught:
        worker.call("load", case=message | {"options": {"dtype": "unresolved"}}, **CALL)
    assert caught.value.code == "tensor.missing"
    with pytest.raises(LoadError, match="nothing is loaded"):
        worker.call("run", timeout=60, request=request())


def test_a_failing_event_handler_does_not_shift_answers(worker: Worker, message: dict[str, Any]) -> None:
    worker.call("load", case=message, **CALL)

    def stop(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        worker.call("run", timeout=60, request=request(), stream=True, on_event=stop)
    assert worker.call("load", case=message, **CALL)["dtype"] == "float32"


def test_close_ends_the_process(plugin: Path) -> None:
    worker = Worker()
    worker.start()
    pid = worker.pid
    assert pid is not None
    worker.close()
    worker.close()
    assert not psutil.pid_exists(pid)


def test_a_package_that_changed_is_not_loaded(worker: Worker, message: dict[str, Any], package_dir: Path) -> None:
    (package_dir / "weights.mine").write_bytes(b"other bytes")
    with pytest.raises(LoadError, match="changed since"):
        worker.call("load", case=message, **CALL)
