"""Killing the worker of a real model: a clear error, the memory back, the next run as before."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

import turnout

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("llamacpp")]
ASK = {"messages": [{"role": "user", "content": "Count from one to fifty."}]}
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


def test_killed_during_the_load() -> None:
    stop = threading.Event()
    killed: list[int] = []
    others = set(psutil.Process().children())  # workers of other tests in this process

    def hunt() -> None:
        me = psutil.Process()
        while not stop.wait(0.01) and not killed:
            for child in set(me.children()) - others:
                with contextlib.suppress(psutil.Error):  # it may be starting or ending just now
                    if "turnout.worker.main" in " ".join(child.cmdline()):
                        child.kill()
                        killed.append(child.pid)

    hunter = threading.Thread(target=hunt)
    hunter.start()
    try:
        # Asking and loading share a worker; a death while it is asked is a verdict, while it loads an error.
        with pytest.raises((turnout.WorkerError, turnout.NotSupportedError), match="SIGKILL"):
            turnout.load("smollm2", task="chat", backend="llamacpp")
    finally:
        stop.set()
        hunter.join()
    assert killed and not psutil.pid_exists(killed[0])
    with turnout.load("smollm2", task="chat", backend="llamacpp") as session:
        assert session.run(ASK, turnout.Sampling(max_tokens=4)).output.text


def test_a_timeout_and_an_interrupt_leave_the_session_usable(session) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(turnout.WorkerError) as caught:
        session.run(ASK, turnout.Sampling(max_tokens=2000), timeout=0.3)
    assert caught.value.code == "runtime.timeout"

    def interrupt(piece: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        session.run(ASK, MANY, emit=interrupt)
    assert session.run(ASK, turnout.Sampling(max_tokens=4)).output.text


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
    worker.wait(timeout=15)
    assert not worker.is_running()
