"""``turnout.LLM`` on a real model: sync, async, streams, errors, and what happens when someone is killed."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

import turnout
from turnout.engine.request import Finish

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120), pytest.mark.xdist_group("llamacpp")]
CAPITAL = "The capital of France is"
ASK = [{"role": "user", "content": "Name a colour."}]
WAIT_S = 30


def few(count: int = 6, **more: object) -> turnout.Sampling:
    return turnout.Sampling(max_tokens=count, **more)  # type: ignore[arg-type]


ENDLESS = few(1500, ignore_eos=True)


def opened() -> turnout.LLM:
    return turnout.LLM("smollm2", task="chat", backend="llamacpp", slots=4, context=2048, cache_tokens=4096, threads=1)


@pytest.fixture(scope="module")
def llm() -> Iterator[turnout.LLM]:
    with opened() as made:
        yield made


def idle(llm: turnout.LLM) -> bool:
    """Whether nothing runs, soon."""
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        stats = llm.stats()
        if not stats["running"] and not stats["waiting"]:
            return True
    return False


# ---- asked rightly ---------------------------------------------------------------------


def test_all_ways_of_asking_say_the_same(llm: turnout.LLM) -> None:
    (whole,) = llm.generate(CAPITAL, few())
    assert "Paris" in whole.text
    assert whole.usage.prompt > 0 and whole.usage.completion == len(whole.completions[0].tokens)
    ids = llm.client.call("encode", task="text-generation", inputs={"prompt": CAPITAL})
    assert [g.text for g in llm.generate([CAPITAL, CAPITAL], few())] == [whole.text] * 2
    assert llm.generate(ids, few())[0].text == llm.generate([ids], few())[0].text == whole.text
    pieces = [event.text for event in llm.stream(CAPITAL, few())]
    assert "".join(pieces) == whole.text and len(pieces) > 1
    assert asyncio.run(llm.agenerate(CAPITAL, few())).text == whole.text


def test_chat_and_several_sequences(llm: turnout.LLM) -> None:
    (one,) = llm.chat(ASK, few(12))
    assert [g.text for g in llm.chat([ASK, ASK], few(12))] == [one.text] * 2
    assert "".join(event.text for event in llm.stream(ASK, few(12))) == one.text
    (many,) = llm.generate(CAPITAL, few(5, n=3, temperature=1.5, seed=1, logprobs=2))
    assert [c.index for c in many.completions] == [0, 1, 2]
    assert all(c.logprobs is not None and len(c.logprobs) == len(c.tokens) for c in many.completions)
    assert len({c.text for c in many.completions}) > 1
    (best,) = llm.generate(CAPITAL, few(5, n=1, best_of=3, temperature=1.5, seed=1))
    assert best.text in {c.text for c in many.completions}


def test_stop_strings_that_cross_tokens(llm: turnout.LLM) -> None:
    (free,) = llm.generate(CAPITAL, few(24))
    stop = free.text[7:12]
    pieces: list[str] = []
    for event in llm.stream(CAPITAL, few(24, stop=(stop,))):
        pieces.append(event.text)
        last = event
    assert "".join(pieces) == free.text[: free.text.index(stop)]
    assert (last.finish, last.stop) == (Finish.STOP, stop)
    (kept,) = llm.generate(CAPITAL, few(24, stop=(stop,), include_stop=True))
    assert kept.text == free.text[: free.text.index(stop) + len(stop)]
    (none,) = llm.generate(CAPITAL, few(24, stop=(free.text, "never")))
    assert none.text == "" and none.completions[0].finish is Finish.STOP


@pytest.mark.parametrize("count", [1, 2, 3, 5, 8])
def test_text_is_whole_characters_wherever_it_is_cut(llm: turnout.LLM, count: int) -> None:
    text = "\N{GRINNING FACE}\N{EURO SIGN}\N{SNOWMAN}\N{GREEK SMALL LETTER OMEGA}\N{CJK UNIFIED IDEOGRAPH-4E2D}"
    grammar = turnout.Grammar("choice", '["' + text + '"]') if hasattr(turnout, "Grammar") else None
    if grammar is None:
        from turnout.types import Grammar

        grammar = Grammar("choice", '["' + text + '"]')
    pieces = [event.text for event in llm.stream("Write:", few(count, grammar=grammar))]
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)
    assert text.startswith("".join(pieces))


def test_a_deadline_on_the_monotonic_clock(llm: turnout.LLM) -> None:
    (late,) = llm.generate(CAPITAL, ENDLESS, deadline=time.monotonic() + 0.5)
    assert late.completions[0].finish is Finish.DEADLINE
    (past,) = llm.generate(CAPITAL, few(), deadline=time.monotonic() - 1)
    assert past.completions[0].finish is Finish.DEADLINE and past.text == ""


# ---- asked wrongly ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "more", "match"),
    [
        ([], {}, "no prompt"),
        ([CAPITAL, [10**9]], {}, r"prompt 2 of 2: token id 1000000000"),
        ([[1, "a"]], {}, "text or token ids"),
        (CAPITAL, {"adapter": "none"}, "no adapter `none`"),
        (CAPITAL, {"addapter": "none"}, "unknown argument `addapter`"),
        (CAPITAL, {"sampling": 7}, "turnout.Sampling"),
        (CAPITAL, {"sampling": few(stop=("",))}, "`stop`"),
        (CAPITAL, {"sampling": few(n=0)}, "`n`"),
        (CAPITAL, {"sampling": few(temperature=float("nan"))}, "temperature"),
        ([[5] * 5000], {}, "context holds 2048|holds 2048"),
    ],
)
def test_mistakes_are_named_and_cost_nothing(llm: turnout.LLM, prompts: object, more: dict, match: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(turnout.InputError, match=match):
        llm.generate(prompts, **more)  # type: ignore[arg-type]
    assert idle(llm)


@pytest.mark.parametrize("messages", [[], [[]], [7], "hello", [{"content": "no role"}]])
def test_conversations_that_are_none(llm: turnout.LLM, messages: object) -> None:
    with pytest.raises(turnout.TurnoutError):
        llm.chat(messages)  # type: ignore[arg-type]
    assert idle(llm)


def test_adapters_that_are_none(llm: turnout.LLM, tmp_path: Path) -> None:
    with pytest.raises(turnout.TurnoutError) as caught:
        llm.load_adapter("a", str(tmp_path / "nowhere"))
    assert "nowhere" in caught.value.message
    with pytest.raises(turnout.InputError, match="no adapter `a`"):
        llm.unload_adapter("a")
    assert llm.generate(CAPITAL, few())[0].text


def test_one_bad_request_ends_the_others_of_its_call_only(llm: turnout.LLM) -> None:
    other: list[str] = []
    thread = threading.Thread(target=lambda: other.append(llm.generate(CAPITAL, few(30))[0].text))
    thread.start()
    with pytest.raises(turnout.InputError, match="prompt 3 of 3"):
        llm.generate([CAPITAL, CAPITAL, [-1]], ENDLESS)
    thread.join(WAIT_S)
    assert other and "Paris" in other[0]
    assert idle(llm)


# ---- left early ------------------------------------------------------------------------


def test_a_stream_that_is_left_is_cancelled(llm: turnout.LLM) -> None:
    for event in llm.stream(CAPITAL, ENDLESS):
        if event.text:
            break
    assert idle(llm)
    events = llm.stream(CAPITAL, ENDLESS)
    next(events)
    events.close()  # type: ignore[attr-defined]
    assert idle(llm)
    unstarted = llm.stream(CAPITAL, ENDLESS)
    unstarted.close()  # type: ignore[attr-defined]
    assert idle(llm)


def test_an_interrupt_cancels(llm: turnout.LLM) -> None:
    events = llm.stream(CAPITAL, ENDLESS)
    next(events)
    with pytest.raises(KeyboardInterrupt):
        events.throw(KeyboardInterrupt())  # type: ignore[attr-defined]
    assert idle(llm)


def test_a_cancelled_task_cancels_its_request(llm: turnout.LLM) -> None:
    async def leave(after: float) -> None:
        task = asyncio.create_task(llm.agenerate(CAPITAL, ENDLESS))
        await asyncio.sleep(after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    async def break_off() -> None:
        async with contextlib.aclosing(llm.astream(CAPITAL, ENDLESS)) as events:
            async for event in events:
                if event.text:
                    break

    async def too_slow() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(llm.agenerate(CAPITAL, ENDLESS), 0.3)

    for after in (0, 0.001, 0.3):
        asyncio.run(leave(after))
        assert idle(llm)
    for work in (break_off, too_slow):
        asyncio.run(work())
        assert idle(llm)


def test_two_loops_at_once(llm: turnout.LLM) -> None:
    async def several() -> list[str]:
        return [g.text for g in await asyncio.gather(*(llm.agenerate(CAPITAL, few(8)) for _ in range(3)))]

    answers: list[list[str]] = []
    threads = [threading.Thread(target=lambda: answers.append(asyncio.run(several()))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    assert answers[0] == answers[1] and len(set(answers[0])) == 1


def test_a_loop_that_ends_early_harms_nobody(llm: turnout.LLM) -> None:
    async def abandon() -> None:
        events = llm.astream(CAPITAL, ENDLESS)
        await anext(events)
        asyncio.get_running_loop().stop()

    loop = asyncio.new_event_loop()
    task = loop.create_task(abandon())
    with contextlib.suppress(RuntimeError):
        loop.run_until_complete(task)
    loop.run_until_complete(loop.shutdown_asyncgens())
    loop.close()
    assert idle(llm)
    assert llm.generate(CAPITAL, few())[0].text


def test_errors_of_async_calls(llm: turnout.LLM) -> None:
    with pytest.raises(turnout.InputError, match="token id"):
        asyncio.run(llm.agenerate([10**9], few()))
    with pytest.raises(turnout.InputError, match="unknown argument"):
        asyncio.run(llm.agenerate(CAPITAL, few(), nothing=1))
    assert idle(llm)


# ---- killed, closed, forked ------------------------------------------------------------


def test_killed_during_generate() -> None:
    with opened() as llm:
        victim = llm.pid
        assert victim is not None
        folder = Path(llm.client._dealer.LAST_ENDPOINT.decode().removeprefix("ipc://")).parent
        threading.Timer(0.5, os.kill, args=[victim, signal.SIGKILL]).start()
        with pytest.raises(turnout.WorkerError, match="worker process ended") as caught:
            llm.generate([CAPITAL] * 3, ENDLESS)
        assert caught.value.code == "runtime.failed"
        with pytest.raises(turnout.WorkerError, match="worker process ended") as again:
            llm.generate(CAPITAL, few())
        for error in (caught.value, again.value):
            assert "open the model again" in error.hints[-1]
        with pytest.raises(turnout.WorkerError):
            next(llm.stream(CAPITAL, few()))
        with pytest.raises(turnout.WorkerError):
            asyncio.run(llm.agenerate(CAPITAL, few()))
        with pytest.raises(turnout.WorkerError):
            llm.stats()
        assert llm.pid is None
    assert not folder.exists()


def test_closed_while_others_generate() -> None:
    llm = opened()
    victim = llm.pid
    raised: list[BaseException] = []

    def generate() -> None:
        try:
            llm.generate(CAPITAL, ENDLESS)
        except BaseException as error:
            raised.append(error)

    threads = [threading.Thread(target=generate) for _ in range(3)]
    for thread in threads:
        thread.start()
    stream = llm.stream(CAPITAL, ENDLESS)
    next(stream)
    llm.close()
    for thread in threads:
        thread.join(WAIT_S)
    assert [type(error) for error in raised] == [turnout.WorkerError] * 3
    with pytest.raises(turnout.WorkerError, match="closed"):
        list(stream)
    assert victim is not None and not psutil.pid_exists(victim)
    llm.close()
    with pytest.raises(turnout.UsageError, match="closed"):
        llm.generate(CAPITAL)
    with pytest.raises(turnout.UsageError, match="closed"):
        next(llm.stream(CAPITAL))


def test_a_load_that_fails_or_is_interrupted_leaves_no_process() -> None:
    others = set(psutil.Process().children())
    with pytest.raises(turnout.TurnoutError):
        turnout.LLM("smollm2", backend="llamacpp", slots=0)
    with pytest.raises(turnout.TurnoutError, match="speculation"):
        turnout.LLM("smollm2", backend="llamacpp", speculation="magic")

    def interrupt(progress: str) -> None:  # with standing evidence nothing is asked; loading is always said
        if progress.startswith("loading"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        turnout.LLM("smollm2", backend="llamacpp", on_progress=interrupt)
    assert not set(psutil.Process().children()) - others


EXIT = """
import sys, threading, turnout
llm = turnout.LLM("smollm2", task="chat", backend="llamacpp", slots=2, context=1024, cache_tokens=2048, threads=1)
sampling = turnout.Sampling(max_tokens=900, ignore_eos=True)
how = sys.argv[1]
if how == "thread":
    threading.Thread(target=llm.generate, args=["Once", sampling], daemon=True).start()
stream = llm.stream("Once", sampling)
next(stream)
print(llm.pid, flush=True)
if how == "raise":
    raise RuntimeError("on purpose")
if how == "killed":
    threading.Event().wait()
"""


@pytest.mark.parametrize("how", ["plain", "thread", "raise", "killed"])
def test_the_end_of_the_interpreter_leaves_no_process(how: str) -> None:
    child = subprocess.Popen(
        [sys.executable, "-W", "error", "-c", EXIT, how], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    worker = psutil.Process(int(child.stdout.readline()))
    if how == "killed":
        child.kill()
    _, errors = child.communicate(timeout=WAIT_S)
    worker.wait(timeout=WAIT_S)
    assert not worker.is_running()
    assert ("on purpose" in errors) if how == "raise" else errors == ""
    assert child.returncode == {"raise": 1, "killed": -9}.get(how, 0)


def test_a_fork_leaves_the_model_to_its_owner(llm: turnout.LLM) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:  # pragma: no cover (the child)
        said = b"nothing raised"
        try:
            llm.generate(CAPITAL)
        except turnout.WorkerError as error:
            said = error.message.encode()
        llm.close()
        os.write(writer, said)
        os._exit(0)
    os.close(writer)
    with open(reader, "rb") as pipe:
        assert b"is a fork of it" in pipe.read()
    os.waitpid(pid, 0)
    assert llm.generate(CAPITAL, few())[0].text


def test_a_watermark_is_found_in_its_text_alone() -> None:
    from turnout.engine.watermark import watermark

    settings = {"greenlist_ratio": 0.25, "bias": 5.0, "hashing_key": 7}
    with turnout.LLM("smollm2", backend="llamacpp", task="text-generation", watermarks={"mine": settings}) as llm:
        sampling = turnout.Sampling(max_tokens=80, temperature=1.0, seed=2, ignore_eos=True, watermark="mine")
        marked = llm.generate("The railway", sampling)[0].completions[0].tokens
        plain = llm.generate("The railway", dataclasses.replace(sampling, watermark=None))[0].completions[0].tokens
        with pytest.raises(turnout.InputError, match="other"):
            llm.generate("The railway", dataclasses.replace(sampling, watermark="other"))
        mark = watermark(settings, llm.capabilities.vocab_size)
    assert mark.detect(marked).flagged
    assert not mark.detect(plain).flagged


def test_a_session_takes_what_only_the_engine_knows() -> None:
    with turnout.load("smollm2", task="chat", backend="llamacpp") as session:
        asked = {"messages": [{"role": "user", "content": "Give me a number."}]}
        grammar = turnout.Sampling(max_tokens=20, grammar=turnout.Grammar("regex", "[0-9]{3}"))
        assert session.run(asked, grammar).output.text.isdigit()
        assert session.run(asked, turnout.Sampling(max_tokens=3)).output.text
