"""Killing the worker of a real model: a clear error, the memory back, the next run as before."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

import turnout

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llamacpp")]
ASK = {"messages": [{"role": "user", "content": "Count from one to fifty."}]}
LONG = {"messages": [{"role": "user", "content": "Write a long story about a fox."}]}
MANY = turnout.Sampling(max_tokens=64)


@pytest.fixture
def session():  # type: ignore[no-untyped-def]
    with turnout.load("smollm2", task="chat", backend="llamacpp") as loaded:
        yield loaded


def test_killed_during_a_run(session) -> None:  # type: ignore[no-untyped-def]
    undisturbed = session.run(ASK, MANY).output.text
    victim = session.pid

    def kill(piece: str) -> None:
        if psutil.pid_exists(victim):
            os.kill(victim, signal.SIGKILL)

    with pytest.raises(turnout.WorkerError, match="SIGKILL") as caught:
        session.run(ASK, MANY, emit=kill)
    assert caught.value.code == "runtime.failed"
    assert not psutil.pid_exists(victim)
    assert session.run(ASK, MANY).output.text == undisturbed
    assert session.pid not in (None, victim)


def start(hunt: Callable[[threading.Event], None]) -> Callable[[], None]:
    """Runs ``hunt`` beside the test; the result ends it."""
    stop = threading.Event()
    hunter = threading.Thread(target=hunt, args=[stop])
    hunter.start()

    def end() -> None:
        stop.set()
        hunter.join()

    return end


def test_killed_as_soon_as_it_exists() -> None:
    """Asking and loading share a worker; a death while it is asked is a verdict, while it loads an error."""
    others = set(psutil.Process().children())  # workers of other tests in this process
    killed: list[int] = []

    def hunt(stop: threading.Event) -> None:
        while not stop.wait(0.01) and not killed:
            for child in set(psutil.Process().children()) - others:
                with contextlib.suppress(psutil.Error):  # it may be starting or ending just now
                    if "turnout.worker.main" in " ".join(child.cmdline()):
                        child.kill()
                        killed.append(child.pid)

    end = start(hunt)
    try:
        with pytest.raises((turnout.WorkerError, turnout.NotSupportedError), match="SIGKILL"):
            turnout.load("smollm2", task="chat", backend="llamacpp")
    finally:
        end()
    assert killed and not psutil.pid_exists(killed[0])
    assert not set(psutil.Process().children()) - others
    with turnout.load("smollm2", task="chat", backend="llamacpp") as session:
        assert session.run(ASK, turnout.Sampling(max_tokens=4)).output.text


def test_killed_while_it_reads_the_weights() -> None:
    """The weights are mapped while llama.cpp loads them: the first sight of them is the moment."""
    others = set(psutil.Process().children())
    loading = threading.Event()
    killed: list[int] = []

    def hunt(stop: threading.Event) -> None:
        while not stop.wait(0.001) and not killed:
            for child in set(psutil.Process().children()) - others if loading.is_set() else ():
                with contextlib.suppress(OSError):
                    if ".gguf" in Path(f"/proc/{child.pid}/maps").read_text():
                        os.kill(child.pid, signal.SIGKILL)
                        killed.append(child.pid)

    def heard(progress: str) -> None:
        if progress.startswith("loading"):
            loading.set()

    end = start(hunt)
    try:
        with pytest.raises(turnout.WorkerError, match=r"`load` \(signal SIGKILL\)") as caught:
            turnout.load("smollm2", task="chat", backend="llamacpp", on_progress=heard)
    finally:
        end()
    assert caught.value.code == "runtime.failed"
    assert killed and not psutil.pid_exists(killed[0])
    assert not set(psutil.Process().children()) - others
    with turnout.load("smollm2", task="chat", backend="llamacpp") as session:
        assert session.run(ASK, turnout.Sampling(max_tokens=4)).output.text


def test_a_run_beyond_its_time(session) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(turnout.WorkerError) as caught:
        session.run(LONG, turnout.Sampling(max_tokens=4000), timeout=0.05)
    assert caught.value.code == "runtime.timeout"
    assert session.pid is None
    assert session.run(ASK, turnout.Sampling(max_tokens=4)).output.text


@pytest.mark.parametrize("error", [KeyboardInterrupt, turnout.InputError, BrokenPipeError])
def test_what_the_listener_raises_is_its_own(session, error: type[BaseException]) -> None:  # type: ignore[no-untyped-def]
    """It comes out as it is, not as the worker's death, and the next answer is the next question's."""
    few = turnout.Sampling(max_tokens=16)
    undisturbed = session.run(ASK, few).output.text

    def interrupt(piece: str) -> None:
        raise error("the listener's own")

    with pytest.raises(error, match="the listener's own"):
        session.run(LONG, few, emit=interrupt)
    assert session.run(ASK, few).output.text == undisturbed


ORPHAN = """
import os, sys, turnout
session = turnout.load("smollm2", task="chat", backend="llamacpp")
print(session.pid, flush=True)
session.run({"messages": [{"role": "user", "content": "Go on."}]}, turnout.Sampling(max_tokens=4000))
"""


def test_a_dead_parent_leaves_no_worker() -> None:
    parent = subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    worker.wait(timeout=10)
    assert not worker.is_running()
