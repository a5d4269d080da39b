"""The engine's thread and socket against whatever comes: faults, floods, foreign bytes, clients that vanish."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.engine.driving import Answer, engine, request
from tests.engine.tiny import TinyExecutor, TinyVocabulary

from turnout.engine.executor import Step
from turnout.engine.request import Event, Finish
from turnout.engine.service import EngineService
from turnout.errors import InputError, OverloadedError, WorkerError
from turnout.package.facts import Artifact, ArtifactKind
from turnout.tasks.prompting import PromptEncoder
from turnout.worker import engine_client, engine_host
from turnout.worker.engine_client import EngineClient
from turnout.worker.engine_host import EngineHost

pytestmark = pytest.mark.timeout(60)
WAIT_S = 20
ENDLESS = 1_000_000


class Listener:
    """Collects the events of one request."""

    def __init__(self) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def __call__(self, event: Event) -> None:
        self.events.put(event)

    def answer(self) -> Answer:
        answer = Answer()
        while not answer.done:
            answer.take(self.events.get(timeout=WAIT_S))
        return answer


class Gated(TinyExecutor):
    """Computes a step when the gate is open; ``entered`` tells that one waits."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.gate, self.entered = threading.Event(), threading.Event()

    def execute(self, step: Step) -> Any:
        self.entered.set()
        assert self.gate.wait(WAIT_S)
        return super().execute(step)


def soon(holds: Any) -> bool:
    """Whether something becomes true within the time that tests wait."""
    end = time.monotonic() + WAIT_S
    while not holds():
        if time.monotonic() > end:
            return False
        threading.Event().wait(0.005)
    return True


# ---- the thread ------------------------------------------------------------------------


@pytest.fixture
def service() -> Iterator[EngineService]:
    made = EngineService(engine(TinyExecutor(slots=4, context=4096), max_waiting=40))
    yield made
    made.close()


def test_a_request_that_cannot_be_added_gets_its_error(service: EngineService, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise MemoryError("no room for the request")

    with monkeypatch.context() as patch:
        patch.setattr(service.engine, "add", fails)
        listener = Listener()
        service.submit(request("a", [3], 5), listener)
        assert "no room" in listener.answer().error
    listener = Listener()
    service.submit(request("b", [3], 5), listener)
    assert listener.answer().tokens == TinyExecutor().greedy([3], 5)


@pytest.mark.parametrize("drains", [True, False])
def test_what_is_accepted_while_the_engine_ends_has_an_end(drains: bool) -> None:
    """However submit and drain or close interleave: refused, or answered."""
    for _ in range(30):
        service = EngineService(engine(TinyExecutor(slots=1)))
        listener, started = Listener(), threading.Event()
        thread = threading.Thread(target=_submit, args=[service, listener, started])
        thread.start()
        started.wait()
        if drains:
            assert service.drain(WAIT_S)
        service.close()
        thread.join()
        assert listener.answer().done


def _submit(service: EngineService, listener: Listener, started: threading.Event) -> None:
    started.set()
    try:
        service.submit(request("a", [3], 2), listener)
    except WorkerError as error:
        listener(Event("a", finish=Finish.ERROR, error=error.message, done=True))


def test_a_sink_may_close_the_engine_and_everyone_is_told() -> None:
    service = EngineService(engine(executor := TinyExecutor(slots=1)))
    heard: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def closes(event: Event) -> None:
        service.close()
        heard.put(event)

    listener = Listener()
    gate, waits = threading.Event(), threading.Event()
    holding = threading.Thread(target=lambda: service.call(lambda: (waits.set(), gate.wait(WAIT_S))))
    holding.start()
    assert waits.wait(WAIT_S)  # nothing is computed before both are in
    service.submit(request("a", [3], 200, ignore_eos=True), closes)
    service.submit(request("b", [4], 200, ignore_eos=True), listener)
    gate.set()
    holding.join(WAIT_S)
    assert listener.answer().finish in (Finish.CANCELLED, Finish.ERROR)
    while not heard.get(timeout=WAIT_S).done:
        pass
    service.close()
    assert executor.closed and not executor.broken


def test_a_sink_may_call_the_engine(service: EngineService) -> None:
    answers: queue.SimpleQueue[int] = queue.SimpleQueue()
    service.submit(request("a", [3], 3), lambda event: answers.put(service.call(lambda: 7)))
    assert answers.get(timeout=WAIT_S) == 7


def test_a_sink_that_exits_ends_its_own_request_only(service: EngineService) -> None:
    def exits(event: Event) -> None:
        raise SystemExit(1)

    listener = Listener()
    service.submit(request("a", [3], ENDLESS, ignore_eos=True), exits)
    service.submit(request("b", [4], 10), listener)
    assert listener.answer().tokens == TinyExecutor().greedy([4], 10)
    assert service.drain(WAIT_S)


def test_a_slow_sink_holds_up_nobody_for_ever(service: EngineService) -> None:
    listener = Listener()
    service.submit(request("slow", [3], 20, ignore_eos=True), lambda event: time.sleep(0.01))
    service.submit(request("b", [4], 20), listener)
    assert listener.answer().done


def test_closing_tells_what_the_executor_says_and_closes_once() -> None:
    class Stubborn(TinyExecutor):
        closings = 0

        def close(self) -> None:
            self.closings += 1
            raise RuntimeError("the device does not answer")

    executor = Stubborn()
    service = EngineService(engine(executor))
    with pytest.raises(RuntimeError, match="does not answer"):
        service.close()
    service.close()
    assert executor.closings == 1


def test_a_dead_engine_closes_its_executor(monkeypatch: pytest.MonkeyPatch) -> None:
    service = EngineService(engine(executor := TinyExecutor()))
    monkeypatch.setattr(service.engine.scheduler, "plan", lambda: 1 / 0)
    listener = Listener()
    service.submit(request("a", [3], 5), listener)
    assert "ZeroDivisionError" in listener.answer().error
    service.close()
    assert executor.closed


def test_accepted_requests_are_not_overloaded_later() -> None:
    """While a step computes, as many are accepted as the queue and the slots take, and all of them run."""
    executor = Gated(slots=2)
    service = EngineService(engine(executor, max_waiting=6))
    listeners = [Listener() for _ in range(8)]
    service.submit(request("r0", [3], 2, ignore_eos=True), listeners[0])
    assert executor.entered.wait(WAIT_S)
    for i in range(1, 8):
        service.submit(request(f"r{i}", [3], 2, ignore_eos=True), listeners[i])
    with pytest.raises(OverloadedError):
        service.submit(request("more", [3]), Listener())
    executor.gate.set()
    assert [listener.answer().error for listener in listeners] == [""] * 8
    service.close()


# ---- the socket ------------------------------------------------------------------------


def serve(executor: TinyExecutor, **settings: Any) -> EngineHost:
    artifact = Artifact("model", ArtifactKind.TRANSFORMERS, "")
    service = EngineService(engine(executor, **settings))
    return EngineHost(service, PromptEncoder(artifact, {}, TinyVocabulary()))


@pytest.fixture
def host() -> Iterator[EngineHost]:
    made = serve(TinyExecutor(slots=4, context=4096), max_waiting=10_000)
    yield made
    made.close()


@pytest.fixture
def client(host: EngineHost) -> Iterator[EngineClient]:
    made = EngineClient(host.endpoint, lambda: True)
    yield made
    made.close()


@pytest.fixture
def raw(host: EngineHost) -> Iterator[Any]:
    """A bare socket to the host."""
    import zmq

    context = zmq.Context()
    made = context.socket(zmq.DEALER)
    made.setsockopt(zmq.LINGER, 0)
    made.setsockopt(zmq.RCVTIMEO, WAIT_S * 1000)
    made.connect(host.endpoint)
    yield made
    made.close(0)
    context.term()


def running(host: EngineHost) -> int:
    return host.service.call(lambda: len(host.service.engine._jobs))


def ask(client: EngineClient, id: str, count: int = 5) -> Answer:
    listener = Listener()
    client.submit(request(id, [3, 7], count), listener)
    return listener.answer()


def test_the_same_id_of_two_clients_is_two_requests(host: EngineHost, client: EngineClient) -> None:
    other = EngineClient(host.endpoint, lambda: True)
    mine, theirs = Listener(), Listener()
    client.submit(request("x", [3], ENDLESS, ignore_eos=True), mine)
    other.submit(request("x", [4], 6, ignore_eos=True), theirs)
    answer = theirs.answer()
    assert answer.tokens == TinyExecutor().greedy([4], 6) or len(answer.tokens) == 6
    again = Listener()
    other.submit(request("y", [5], ENDLESS, ignore_eos=True), again)
    client.cancel("y")  # not this client's
    client.cancel("x")
    assert mine.answer().finish is Finish.CANCELLED
    assert running(host) == 1
    other.cancel("y")
    assert again.answer().finish is Finish.CANCELLED
    with pytest.raises(InputError, match="`z` is running"):
        client.submit(request("z", [5], ENDLESS, ignore_eos=True), Listener())
        client.submit(request("z", [5], 3), Listener())
    other.close()


JUNK = [
    b"",
    b"\x00" * 100,
    b"not a message",
    os.urandom(1000),
    msgspec.msgpack.encode(7),
    msgspec.msgpack.encode([1, 2]),
    msgspec.msgpack.encode({"op": 7}),
    msgspec.msgpack.encode({"op": "submit"}),
    msgspec.msgpack.encode({"op": "submit", "arguments": [1]}),
    msgspec.msgpack.encode({"op": "submit", "arguments": {"request": None}}),
    msgspec.msgpack.encode({"op": "submit", "call": 1, "arguments": {"request": {"id": "a", "prompt": "text"}}}),
    msgspec.msgpack.encode({"op": "submit", "call": 1, "arguments": {"request": {"id": "b", "prompt": [1 << 62]}}}),
    msgspec.msgpack.encode({"op": "submit", "call": 1, "arguments": {"request": {"id": 7, "prompt": [3]}}}),
    msgspec.msgpack.encode({"op": "submit", "call": {"x": []}, "arguments": {"client": 1, "entry": 2}}),
    msgspec.msgpack.encode({"op": "cancel", "arguments": {"id": [1]}}),
    msgspec.msgpack.encode({"op": "cancel"}),
    msgspec.msgpack.encode({"op": "__class__", "call": 2}),
    msgspec.msgpack.encode({"op": "decode", "call": 3, "arguments": {"ids": ["a"]}}),
    msgspec.msgpack.encode({"op": "decode", "call": 3, "arguments": {"ids": [10**9]}}),
    msgspec.msgpack.encode({"op": "encode", "call": 4, "arguments": {"task": "chat", "inputs": 3}}),
    msgspec.msgpack.encode({"op": "stats", "call": 5, "arguments": {1: 2}}),
    msgspec.msgpack.encode(msgspec.msgpack.Ext(1, b"\xff" * 20)),
    msgspec.msgpack.encode({"op": msgspec.msgpack.Ext(9, b"x")}),
    b"\x81\xa2op" + b"\x91" * 100_000 + b"\xc0",  # nested 100,000 deep
]


@pytest.mark.parametrize("number", range(len(JUNK)))
def test_foreign_messages_harm_nobody(client: EngineClient, raw: Any, number: int) -> None:
    raw.send(JUNK[number])
    for frames in ([], [b""], [b"", JUNK[number]], [JUNK[number]] * 5):
        if frames:
            raw.send_multipart(frames)
    assert ask(client, "after").tokens == TinyExecutor().greedy([3, 7], 5)


def test_a_huge_message_is_not_taken(client: EngineClient, raw: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    raw.send(b"\xc6" + (100 << 20).to_bytes(4, "big") + bytes(100 << 20))
    assert ask(client, "after").done
    monkeypatch.setattr(engine_client, "MAX_CALL", 2 << 20)
    with pytest.raises(InputError, match=r"`submit` has \d+ MiB"):
        client.submit(request("huge", [3] * (engine_client.MAX_CALL + 1)), Listener())
    assert ask(client, "after too").done


def test_what_cannot_be_sent_is_refused(client: EngineClient) -> None:
    with pytest.raises(InputError, match="cannot be sent"):
        client.call("encode", task="chat", inputs=object())
    with pytest.raises(InputError, match="cannot be sent"):
        client.submit(request("a", [1 << 70]), Listener())
    assert ask(client, "a").done


def test_closing_with_thousands_waiting_tells_all_of_them() -> None:
    executor = Gated(slots=1)
    host = serve(executor, max_waiting=10_000)
    client = EngineClient(host.endpoint, lambda: True)
    listeners = [Listener() for _ in range(3000)]
    started = [client.start(request(f"r{i}", [3], 5), listener) for i, listener in enumerate(listeners)]
    for future in started:
        future.result(WAIT_S)
    threading.Timer(0.2, executor.gate.set).start()
    host.close()
    assert all(listener.answer().finish is not None for listener in listeners)
    with pytest.raises(WorkerError, match="closed"):
        client.call("stats")
    client.close()


def test_a_cancellation_finds_a_request_that_is_still_at_the_door(
    host: EngineHost, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its submission waits for a doorkeeper, or is being prepared."""
    gate, inside = threading.Event(), threading.Event()
    prepare = host.service.engine.prepare

    def slow(asked: Any) -> Any:
        inside.set()
        assert gate.wait(WAIT_S)
        return prepare(asked)

    monkeypatch.setattr(host.service.engine, "prepare", slow)
    listeners = [Listener() for _ in range(engine_host.DOORKEEPERS + 2)]
    for i, listener in enumerate(listeners):
        client.start(request(f"r{i}", [3], 4000, ignore_eos=True), listener)
    assert inside.wait(WAIT_S)
    for i in range(len(listeners)):
        client.cancel(f"r{i}")
    time.sleep(0.05)  # the cancellations travel, while nothing can tell that they arrived
    gate.set()
    assert [listener.answer().finish for listener in listeners] == [Finish.CANCELLED] * len(listeners)


def test_an_interrupted_submission_leaves_nothing_running(
    host: EngineHost, client: EngineClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted(Exception):
        pass

    def interrupt(*_: Any) -> Any:
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(engine_client.Future, "result", interrupt)
        with pytest.raises(Interrupted):
            client.submit(request("a", [3], ENDLESS, ignore_eos=True), Listener())
    assert soon(lambda: running(host) == 0)


def test_a_client_that_does_not_read_is_given_up_in_bounded_memory(
    host: EngineHost, client: EngineClient, raw: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests end, their ends say why, and it can go on when it reads again."""
    monkeypatch.setattr(engine_host, "BACKLOG_BYTES", 100_000)
    sampling = {"max_tokens": 4000, "ignore_eos": True, "logprobs": 20}
    wanted = {"id": "x", "prompt": [3], "sampling": sampling}
    raw.setsockopt(__import__("zmq").RCVHWM, 1)
    for i in range(4):
        raw.send(
            msgspec.msgpack.encode({"op": "submit", "call": i, "arguments": {"request": {**wanted, "id": f"x{i}"}}})
        )
    assert soon(lambda: host.service.engine.stats.generation_tokens > 100)
    assert soon(lambda: running(host) == 0)
    held = [peer.held for peer in host._peers.values()]
    assert max(held, default=0) < 200_000
    assert host.service.engine.stats.generation_tokens < 4 * 4000
    ends: dict[str, dict[str, Any]] = {}
    while len(ends) < 4:
        message = msgspec.msgpack.decode(raw.recv())
        if message.get("event", {}).get("done"):
            ends[message["id"]] = message["event"]
    assert any("not read" in end["error"] for end in ends.values())
    assert ask(client, "x0").done


CHILD = """
import sys, threading
from turnout.engine.request import GenerationRequest
from turnout.types import Sampling
from turnout.worker.engine_client import EngineClient
client = EngineClient(sys.argv[1], lambda: True)
count = int(sys.argv[2])
best = {"best_of": 2} if count == 2 else {}
for i in range(6):
    asked = GenerationRequest(f"r{i}", [3 + i], Sampling(max_tokens=4000, ignore_eos=True, **best))
    client.submit(asked, lambda event: None)
print("running", flush=True)
threading.Event().wait()
"""


@pytest.mark.parametrize("sequences", [1, 2])
def test_a_killed_client_leaves_nothing_running(host: EngineHost, sequences: int) -> None:
    """Also requests that wait, and those of best_of, which tell nothing before their end."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, host.endpoint, str(sequences)], stdout=subprocess.PIPE)
    assert child.stdout is not None and child.stdout.readline() == b"running\n"
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    killed = time.monotonic()
    assert soon(lambda: running(host) == 0)
    assert time.monotonic() - killed < 5
    host.service.call(host.service.engine.check_idle)


def test_the_client_of_a_worker_that_hangs_can_be_closed() -> None:
    """Nobody reads on the other side: calls fill the pipe, and neither they nor closing block."""
    with contextlib.ExitStack() as stack:
        import zmq

        context = zmq.Context()
        mute = context.socket(zmq.ROUTER)
        mute.setsockopt(zmq.RCVHWM, 1)
        folder = stack.enter_context(__import__("tempfile").TemporaryDirectory())
        mute.bind(f"ipc://{folder}/engine")
        client = EngineClient(f"ipc://{folder}/engine", lambda: True)
        for i in range(5000):
            client.cancel(f"r{i}" + "x" * 500)
        waiting = client.start(request("a", [3]), listener := Listener())
        closer = threading.Thread(target=client.close)
        closer.start()
        closer.join(WAIT_S)
        assert not closer.is_alive()
        with pytest.raises(WorkerError):
            waiting.result(WAIT_S)
        assert listener.answer().error
        mute.close(0)
        context.term()


def test_calls_after_the_worker_ended_say_what_to_do_and_never_block(host: EngineHost) -> None:
    client = EngineClient(host.endpoint, lambda: False)
    assert soon(lambda: client.dead)
    for i in range(3000):
        client.cancel(f"r{i}")
    with pytest.raises(WorkerError, match="worker process ended") as caught:
        client.call("stats")
    assert "open the model again" in caught.value.hints[-1]
    client.close()
    client.close()


def test_death_is_noticed_also_while_events_come(host: EngineHost) -> None:
    alive = [True]
    client = EngineClient(host.endpoint, lambda: alive[0])
    listener = Listener()
    client.submit(request("a", [3], 4000, ignore_eos=True), listener)
    alive[0] = False
    answer = listener.answer()
    assert answer.error or answer.finish is Finish.LENGTH
    assert soon(lambda: client.dead)
    client.close()


def test_a_sink_may_close_the_client(host: EngineHost) -> None:
    client = EngineClient(host.endpoint, lambda: True)
    heard: queue.SimpleQueue[Event] = queue.SimpleQueue()

    def closes(event: Event) -> None:
        client.close()
        heard.put(event)

    client.submit(request("a", [3], ENDLESS, ignore_eos=True), closes)
    last = heard.get(timeout=WAIT_S)
    while not last.done:
        last = heard.get(timeout=WAIT_S)
    assert soon(lambda: running(host) == 0)
    client.close()


def test_nonsense_from_the_engine_ends_the_connection_not_the_patience() -> None:
    import zmq

    context = zmq.Context()
    liar = context.socket(zmq.ROUTER)
    with __import__("tempfile").TemporaryDirectory() as folder:
        liar.bind(f"ipc://{folder}/engine")
        client = EngineClient(f"ipc://{folder}/engine", lambda: True)
        future = client.start(request("a", [3]), listener := Listener())
        name, _ = liar.recv_multipart()
        liar.send_multipart([name, b"\xff\xff"])
        with pytest.raises(WorkerError, match="connection to the engine failed"):
            future.result(WAIT_S)
        assert "connection" in listener.answer().error
        client.close()
        liar.close(0)
        context.term()


def test_a_forked_process_is_told_and_harms_nothing(client: EngineClient) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover (the child)
        said = b"nothing raised"
        try:
            client.cancel("a")
            client.call("stats")
        except WorkerError as error:
            said = error.message.encode()
        client.close()
        os.write(writer, said)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert b"is a fork of it" in pipe.read()
    os.waitpid(pid, 0)
    assert ask(client, "after").done


def test_five_hundred_requests_from_fifty_threads(host: EngineHost, client: EngineClient) -> None:
    answers: dict[str, list[int]] = {}

    def work(number: int) -> None:
        listeners = {f"t{number}/{i}": Listener() for i in range(10)}
        for i, (id, listener) in enumerate(listeners.items()):
            client.submit(request(id, [3 + number, 4 + i], 4), listener)
        for id, listener in listeners.items():
            answers[id] = listener.answer().tokens

    threads = [threading.Thread(target=work, args=[n]) for n in range(50)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    reference = TinyExecutor()
    assert len(answers) == 500
    assert all(answers[f"t{n}/{i}"] == reference.greedy([3 + n, 4 + i], 4) for n in range(50) for i in range(10))
    host.service.call(host.service.engine.check_idle)


CROWD = """
import queue, sys
from turnout.engine.request import GenerationRequest
from turnout.types import Sampling
from turnout.worker.engine_client import EngineClient
client = EngineClient(sys.argv[1], lambda: True)
events = queue.SimpleQueue()
tokens = {}
for i in range(20):
    client.submit(GenerationRequest(f"r{i}", [3 + i, 9], Sampling(max_tokens=5)), events.put)
while len([1 for t in tokens.values() if t[-1] is None]) < 20:
    event = events.get(timeout=30)
    tokens.setdefault(event.id, []).extend([*event.tokens, *([None] if event.done else [])])
client.close()
print([tokens[f"r{i}"][:-1] for i in range(20)])
"""


@pytest.mark.slow
def test_eight_processes_at_once(host: EngineHost) -> None:
    children = [
        subprocess.Popen([sys.executable, "-c", CROWD, host.endpoint], stdout=subprocess.PIPE, text=True)
        for _ in range(8)
    ]
    reference = TinyExecutor()
    expected = str([reference.greedy([3 + i, 9], 5) for i in range(20)])
    assert [child.communicate(timeout=WAIT_S * 2)[0].strip() for child in children] == [expected] * 8


def test_a_long_temporary_directory_does_not_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / ("x" * 60) / ("y" * 60)
    folder.mkdir(parents=True)
    monkeypatch.setattr(__import__("tempfile"), "tempdir", str(folder))
    host = serve(TinyExecutor())
    client = EngineClient(host.endpoint, lambda: True)
    assert ask(client, "a").done
    client.close()
    host.close()
    assert not list(folder.iterdir()) and not Path(host.endpoint.removeprefix("ipc://")).parent.exists()


def test_the_socket_is_this_users_alone(host: EngineHost) -> None:
    folder = Path(host.endpoint.removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    with socket.socket(socket.AF_UNIX) as plain:  # something that does not even speak ZeroMQ
        plain.connect(str(folder / "engine"))
        plain.sendall(os.urandom(4000))
