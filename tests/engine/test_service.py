"""The engine's thread and its socket: many callers, one model, everyone gets an end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator

import pytest
from tests.engine.driving import Answer, engine, request
from tests.engine.tiny import TinyExecutor, TinyVocabulary

from turnout.engine.request import Event, Finish
from turnout.engine.service import EngineService
from turnout.errors import InputError, OverloadedError, WorkerError
from turnout.package.facts import Artifact, ArtifactKind
from turnout.tasks.prompting import PromptEncoder
from turnout.worker.engine_client import EngineClient
from turnout.worker.engine_host import EngineHost

WAIT_S = 30


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


@pytest.fixture
def service() -> Iterator[EngineService]:
    made = EngineService(engine(TinyExecutor(slots=4), max_waiting=40))
    yield made
    made.close()


def test_many_threads_ask_at_once(service: EngineService) -> None:
    prompts = {f"t{i}": [3 + i, 4, 5] for i in range(24)}
    answers: dict[str, Answer] = {}

    def ask(id: str) -> None:
        listener = Listener()
        service.submit(request(id, prompts[id], 10), listener)
        answers[id] = listener.answer()

    threads = [threading.Thread(target=ask, args=[id]) for id in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    reference = TinyExecutor()
    assert {id: a.tokens for id, a in answers.items()} == {id: reference.greedy(p, 10) for id, p in prompts.items()}
    service.call(service.engine.check_idle)


def test_a_receiver_that_fails_ends_its_own_request_only(service: EngineService) -> None:
    def broken(event: Event) -> None:
        raise RuntimeError("gone")

    listener = Listener()
    service.submit(request("broken", [3], 10_000, ignore_eos=True), broken)
    service.submit(request("good", [4], 10), listener)
    assert listener.answer().tokens == TinyExecutor().greedy([4], 10)
    assert service.drain(WAIT_S)  # the broken one does not run on


def test_the_queue_is_bounded_and_bad_requests_are_refused_at_once(service: EngineService) -> None:
    with pytest.raises(InputError, match="no tokens"):
        service.submit(request("empty", []), Listener())
    with pytest.raises(OverloadedError):
        service.submit(request("many", [3], 5, n=45), Listener())
    gate = threading.Event()
    threading.Thread(target=lambda: service.call(lambda: gate.wait(WAIT_S))).start()
    listeners = [Listener() for _ in range(44)]
    for i, listener in enumerate(listeners):
        service.submit(request(f"r{i}", [3], 2, ignore_eos=True), listener)
    with pytest.raises(OverloadedError, match="44"):
        service.submit(request("more", [3]), Listener())
    gate.set()
    ended = [listener.answer() for listener in listeners]
    assert all(answer.finish is Finish.LENGTH or answer.code == "runtime.overloaded" for answer in ended)


def test_close_ends_what_runs() -> None:
    service = EngineService(engine(TinyExecutor(slots=1)))
    listeners = [Listener(), Listener()]
    for i, listener in enumerate(listeners):
        service.submit(request(f"r{i}", [3], 200, ignore_eos=True), listener)
    service.close()
    assert {listener.answer().finish for listener in listeners} <= {Finish.CANCELLED, Finish.LENGTH}
    with pytest.raises(WorkerError):
        service.submit(request("late", [3]), Listener())


def test_a_fault_of_the_engine_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    service = EngineService(engine(TinyExecutor()))
    monkeypatch.setattr(service.engine.scheduler, "plan", lambda: 1 / 0)
    listener = Listener()
    service.submit(request("r", [3]), listener)
    answer = listener.answer()
    assert answer.error.startswith("the engine failed: ZeroDivisionError")
    with pytest.raises(WorkerError, match="ZeroDivisionError"):
        service.submit(request("s", [3]), Listener())
    with pytest.raises(WorkerError):
        service.call(lambda: None)
    service.close()


# ---- over the socket -------------------------------------------------------------------


@pytest.fixture
def host() -> Iterator[EngineHost]:
    artifact = Artifact("model", ArtifactKind.TRANSFORMERS, "")
    service = EngineService(engine(TinyExecutor(slots=4), max_waiting=100))
    made = EngineHost(service, PromptEncoder(artifact, {}, TinyVocabulary()))
    yield made
    made.close()


def test_clients_share_the_engine(host: EngineHost) -> None:
    clients = [EngineClient(host.endpoint, lambda: True) for _ in range(3)]
    listeners = {}
    for i in range(12):
        listeners[f"r{i}"] = (Listener(), [3 + i, 7])
        assert clients[i % 3].submit(request(f"r{i}", [3 + i, 7], 10), listeners[f"r{i}"][0]) == 2
    for listener, prompt in listeners.values():
        assert listener.answer().tokens == TinyExecutor().greedy(prompt, 10)
    text = Listener()
    ids = TinyVocabulary().encode("hello")
    count = clients[0].submit(request("text", [], 10), text, "text-generation", {"prompt": "hello"})
    assert count == len(ids) and text.answer().tokens == TinyExecutor().greedy(ids, 10)
    assert clients[1].call("encode", task="text-generation", inputs={"prompt": "hello"}) == ids
    assert clients[1].call("decode", ids=ids) == "hello"
    assert clients[2].call("stats")["generation_tokens"] > 0
    for client in clients:
        client.close()


def test_errors_cross_the_socket_as_what_they_were(host: EngineHost) -> None:
    client = EngineClient(host.endpoint, lambda: True)
    listener = Listener()
    with pytest.raises(InputError, match="temperature"):
        client.submit(request("a", [3], temperature=-1.0), listener)
    with pytest.raises(OverloadedError):
        client.submit(request("a", [3], n=120), listener)
    with pytest.raises(InputError, match="chat template"):
        client.submit(request("a", []), listener, "chat", {"messages": [{"role": "user", "content": "hi"}]})
    with pytest.raises(InputError, match="unknown operation"):
        client.call("nonsense")
    with pytest.raises(InputError, match="malformed"):
        client.call("submit", request={"id": 7})
    client.call("load_adapter", name="one", path="pirate")
    assert client.call("adapters") == ["one"]
    client.submit(request("b", [3], 5, adapter="one"), listener)
    assert listener.answer().done
    client.call("unload_adapter", name="one")
    client.close()


def test_cancel_over_the_socket_and_a_client_that_leaves(host: EngineHost) -> None:
    client = EngineClient(host.endpoint, lambda: True)
    listener = Listener()
    client.submit(request("long", [3], 250, ignore_eos=True), listener)
    client.cancel("long")
    assert listener.answer().finish in (Finish.CANCELLED, Finish.LENGTH)
    client.submit(request("left", [3], 250, ignore_eos=True), listener)
    client.close()
    other = EngineClient(host.endpoint, lambda: True)
    again = Listener()
    other.submit(request("next", [5], 5), again)
    assert again.answer().tokens == TinyExecutor().greedy([5], 5)
    other.close()


def test_a_dead_worker_is_told_to_everyone(host: EngineHost) -> None:
    alive = [True]
    client = EngineClient(host.endpoint, lambda: alive[0])
    gate = threading.Event()
    threading.Thread(target=lambda: host.service.call(lambda: gate.wait(WAIT_S))).start()
    listener = Listener()
    client.submit(request("r", [3], 5), listener)
    alive[0] = False
    answer = listener.answer()
    gate.set()
    assert "worker process ended" in answer.error
    with pytest.raises(WorkerError, match="worker process ended"):
        client.call("stats")
    client.close()
