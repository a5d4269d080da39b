"""The row executor against Transformers' own ``generate``: same weights, greedy, fp32, every schedule."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from tests.shapes.families import FAMILIES, START, VOCABULARY

from turnout.backends.torch_native_rows import RowExecutor, RowOptions
from turnout.engine.executor import Row, Step
from turnout.errors import TurnoutError

PLAIN = ("llama", "gemma2", "gpt-oss", "llama4", "gpt-neo", "bloom", "falcon-alibi", "mpt", "gemma3n", "deepseek-v3")
NAMES = [*PLAIN, *(n for n, f in FAMILIES.items() if f.recurrent or f.encoder_decoder)]
# One of each way to remember: keys only, windows, states that continue, states that do not, states on
# modules, a cache class of its own, a list of tensors, an encoder.
KINDS = ("llama", "gemma3", "mamba2", "qwen3-next", "falcon-h1", "jamba", "recurrent-gemma", "minimax", "rwkv", "t5")
PROMPT, NEW = 40, 14


@cache
def executor_of(name: str) -> RowExecutor:
    torch.set_num_threads(1)
    return RowExecutor(FAMILIES[name].model(), RowOptions(slots=4, context=128))


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> Any:
    made = executor_of(request.param)
    yield made
    for slot in range(made.capabilities.slots):
        made.free(slot)


def tokens_of(seed: int, count: int = PROMPT) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(3, VOCABULARY, count)]


@cache
def expected(name: str, seed: int, count: int = NEW) -> list[int]:
    """Tokens that the library's own loop generates; for encoder-decoders the prompt is the encoder's."""
    model = executor_of(name)._model  # the very weights; the loop and its caches are the library's
    prompt = torch.tensor([tokens_of(seed)])
    out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
    return out[0, -count:].tolist()


def start(executor: RowExecutor, slot: int, seed: int) -> list[int]:
    """Tokens to feed; the encoder has run where there is one."""
    if executor.capabilities.encoder_decoder:
        executor.encode(slot, tokens_of(seed))
        return [START]
    return tokens_of(seed)


def feed(executor: RowExecutor, slot: int, tokens: list[int], begin: int, chunk: int = 64) -> Any:
    """Computes tokens in chunks; logits [vocabulary] of the last."""
    logits = None
    for at in range(0, len(tokens), chunk):
        part = tokens[at : at + chunk]
        last = at + len(part) == len(tokens)
        logits = executor.execute(Step([Row(slot, part, begin + at, int(last))]))
        assert logits.shape == (int(last), executor.capabilities.vocab_size) and logits.dtype == np.float32
    return logits[0]


def greedy(executor: RowExecutor, slot: int, known: list[int], held: int, count: int, chunk: int = 64) -> list[int]:
    """``count`` tokens after ``known``, of which the slot holds ``held``."""
    known = list(known)
    for _ in range(count):
        logits = feed(executor, slot, known[held:], held, chunk)
        held = len(known)
        known.append(int(logits.argmax()))
    return known[-count:]


@pytest.mark.parametrize("executor", NAMES, indirect=True, ids=str)
def test_tokens_equal_generate_whatever_the_chunks(executor: RowExecutor, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["executor"]
    for slot, chunk in enumerate((64, 7, 1)):
        prompt = start(executor, slot, 1)
        assert greedy(executor, slot, prompt, 0, NEW, chunk) == expected(name, 1), f"chunks of {chunk}"


@pytest.mark.parametrize("executor", KINDS, indirect=True, ids=str)
def test_rolled_back_and_run_again(executor: RowExecutor, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["executor"]
    wanted = expected(name, 1)
    known = start(executor, 0, 1)
    assert greedy(executor, 0, known, 0, NEW) == wanted
    known += wanted
    for length in (len(known) - 2, len(known) - 7, 33, 16, 3, 0):
        kept = executor.retained(0, min(length, len(known) - 1))
        assert 0 <= kept <= length
        executor.roll_back(0, kept)
        assert executor.retained(0, len(known)) == kept
        # What was cut does not shine through: other tokens first, then back, then the true ones.
        feed(executor, 0, [5, 6, 7], kept)
        executor.roll_back(0, executor.retained(0, kept))
        held = executor.retained(0, len(known))
        assert greedy(executor, 0, known[:-NEW], held, NEW, 7) == wanted if held < len(known) - NEW else True
        executor.roll_back(0, executor.retained(0, kept))


@pytest.mark.parametrize("executor", KINDS, indirect=True, ids=str)
def test_a_copied_prefix_goes_its_own_way(executor: RowExecutor, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["executor"]
    wanted = expected(name, 1)
    known = start(executor, 0, 1)
    greedy(executor, 0, known, 0, NEW - 1)
    known += wanted[:-1]
    kept = executor.retained(0, 32) if name != "t5" else executor.retained(0, 9)
    assert kept == (9 if name == "t5" else 32), "the last whole block of the prompt is kept"
    executor.copy_prefix(0, 1, kept)
    other = tokens_of(2, 20)
    feed(executor, 1, other, kept)  # the copy leaves the path
    executor.copy_prefix(0, 2, kept)
    assert feed(executor, 0, known[-1:], executor.retained(0, 10**6)).argmax() == wanted[-1], "the source is untouched"
    executor.free(0)
    rest = greedy(executor, 2, known, kept, 1, 7)
    assert rest == wanted[-1:]
    # And the copy that left the path is what the same tokens give alone.
    executor.encode(3, tokens_of(1)) if executor.capabilities.encoder_decoder else None
    alone = feed(executor, 3, [*known[:kept], *other, 9], 0)
    np.testing.assert_allclose(feed(executor, 1, [9], kept + len(other)), alone, atol=2e-3 * alone.std())


@pytest.mark.parametrize("executor", KINDS, indirect=True, ids=str)
def test_slots_do_not_see_each_other(executor: RowExecutor, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["executor"]
    known = [start(executor, slot, slot + 1) for slot in range(3)]
    begun = [len(tokens) for tokens in known]
    held = [0, 0, 0]
    arrival = (0, 2, 5)  # steps at which they begin
    for step in range(NEW + 5):
        rows = []
        for slot in range(3):
            if arrival[slot] <= step and len(known[slot]) < begun[slot] + NEW:
                part = known[slot][held[slot] : held[slot] + (64, 15, 23)[slot]]
                rows.append(Row(slot, part, held[slot], int(held[slot] + len(part) == len(known[slot]))))
        logits = executor.execute(Step(rows))
        for row in rows:
            held[row.slot] += len(row.tokens)
        for row, scores in zip([row for row in rows if row.logits], logits, strict=True):
            known[row.slot].append(int(scores.argmax()))
    for slot, count in enumerate((NEW, NEW, NEW - 1)):
        got = known[slot][begun[slot] :]
        assert got == expected(name, slot + 1)[: len(got)] and len(got) >= count


@pytest.mark.parametrize("executor", KINDS, indirect=True, ids=str)
def test_refused_drafts_leave_no_trace(executor: RowExecutor, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["executor"]
    wanted = expected(name, 1)
    known = [*start(executor, 0, 1), wanted[0]]
    begun = len(known) - 1
    feed(executor, 0, known[:-1], 0)
    held = begun
    while len(known) < begun + NEW - 4:
        right = wanted[len(known) - begun :][:2]
        drafts = [*right, (right[-1] + 1) % VOCABULARY, 3]  # two that will be taken, two that will not
        fed = [*known[held:], *drafts]
        logits = executor.execute(Step([Row(0, fed, held, 1 + len(drafts))]))
        drawn = [int(scores.argmax()) for scores in logits]
        assert drawn[:3] == wanted[len(known) - begun :][:3]
        known += drawn[:3]
        held = executor.retained(0, len(known) - 1)
        executor.roll_back(0, held)
    assert known[begun:] == wanted[: len(known) - begun]


def test_all_logits_of_a_prompt_in_pieces_equal_one_pass() -> None:
    for name in ("llama", "mamba2", "jamba", "t5"):
        executor = executor_of(name)
        start(executor, 0, 1)
        tokens = tokens_of(5, 50)
        whole = executor.execute(Step([Row(0, tokens, 0, 50)]))
        executor.encode(1, tokens_of(1)) if executor.capabilities.encoder_decoder else None
        first = executor.execute(Step([Row(1, tokens[:21], 0, 21)])).copy()
        second = executor.execute(Step([Row(1, tokens[21:], 21, 29)]))
        assert whole.shape == (50, VOCABULARY)
        np.testing.assert_allclose(np.concatenate([first, second]), whole, atol=1e-3 * whole.std())
        assert executor.execute(Step([Row(0, [7], 50, 0), Row(1, [7], 50, 0)])).shape == (0, VOCABULARY)
        executor.free(0), executor.free(1)


def test_snapshots_are_bounded_and_spread() -> None:
    executor = RowExecutor(FAMILIES["mamba2"].model(), RowOptions(slots=1, context=256, snapshots=4))
    for at in range(240):
        executor.execute(Step([Row(0, [at], at)]))
    kept = sorted({executor.retained(0, length) for length in range(240)})
    # Four snapshots, the newest of them at the slot's end.
    assert len(kept) == 1 + 3 and kept[0] == 0 and kept[-1] == 224 and executor.retained(0, 240) == 240
    assert max(b - a for a, b in zip(kept, kept[1:], strict=False)) <= 128


def test_the_same_prompt_again_finds_its_last_block() -> None:
    executor = executor_of("falcon-h1")
    for count, chunk, wanted in ((48, 64, 32), (49, 64, 48), (16, 64, 0), (17, 64, 16), (40, 7, 32), (40, 16, 32)):
        feed(executor, 0, tokens_of(4, count), 0, chunk)
        assert executor.retained(0, count - 1) == wanted
        executor.free(0)


@pytest.mark.parametrize("name", ["mamba2", "jamba", "qwen3-next", "t5"])
def test_half_precision_is_not_mistaken_for_a_lost_state(name: str) -> None:
    plain = executor_of(name)
    executor = RowExecutor(FAMILIES[name].model().bfloat16(), RowOptions(slots=2, context=64))
    assert executor.capabilities.notes == plain.capabilities.notes
    start(executor, 0, 1)
    logits = feed(executor, 0, tokens_of(3, 20), 0)
    assert logits.dtype == np.float32 and np.isfinite(logits).all()


def test_a_class_without_a_cache_is_computed_anew() -> None:
    import transformers

    class Uncached(transformers.LlamaForCausalLM):
        def forward(self, input_ids: Any = None, logits_to_keep: int = 0, use_cache: bool = False) -> Any:
            return super().forward(input_ids=input_ids, logits_to_keep=logits_to_keep, use_cache=False)

    plain = executor_of("llama")._model
    model = Uncached(plain.config).eval()
    model.load_state_dict(plain.state_dict())
    executor = RowExecutor(model, RowOptions(slots=2, context=64))
    assert any("anew" in note for note in executor.capabilities.notes)
    known = tokens_of(1)
    assert greedy(executor, 0, known, 0, NEW, 7) == expected("llama", 1)
    assert executor.retained(0, 17) == 17
    executor.copy_prefix(0, 1, 17)
    executor.roll_back(0, 31)
    for slot, held in ((0, 31), (1, 17)):
        assert greedy(executor, slot, known, held, NEW) == expected("llama", 1)


def test_wrong_calls_are_named_and_change_nothing() -> None:
    executor = executor_of("jamba")
    known = tokens_of(1, 20)
    feed(executor, 0, known, 0)
    for rows, words in (
        ([Row(0, [5], 7)], "holds 20 tokens"),
        ([Row(0, [5], 20), Row(0, [5], 20)], "no slot twice"),
        ([], "needs rows"),
        ([Row(9, [5], 0)], "slot 9 does not exist"),
        ([Row(0, [5], 20, 2)], "2 rows of logits"),
        ([Row(0, [], 20, 0)], "row of 0"),
        ([Row(0, [5] * 109, 20)], "takes 128 tokens, not 129"),
        ([Row(0, [VOCABULARY], 20)], f"token {VOCABULARY}"),
    ):
        with pytest.raises(TurnoutError, match=words):
            executor.execute(Step(rows))
    with pytest.raises(TurnoutError, match="cannot return to 19 tokens, only to 16"):
        executor.roll_back(0, 19)
    with pytest.raises(TurnoutError, match="has no encoder"):
        executor.encode(0, [5])
    with pytest.raises(TurnoutError, match="no adapter directory"):
        executor.load_adapter("a", "nowhere")
    assert executor.retained(0, 20) == 20
    executor.free(0), executor.free(0)

    pair = executor_of("bart")
    with pytest.raises(TurnoutError, match="no encoder pass"):
        pair.execute(Step([Row(0, [START], 0)]))
    for bad in ([], [5] * 257):
        with pytest.raises(TurnoutError, match=f"1 to 256 tokens, not {len(bad)}"):
            pair.encode(0, bad)


def test_a_closed_executor_says_so() -> None:
    executor = RowExecutor(FAMILIES["lfm2"].model(), RowOptions(slots=1, context=32))
    executor.close()
    executor.close()
    executor.free(0)
    with pytest.raises(TurnoutError, match="closed"):
        executor.execute(Step([Row(0, [1], 0)]))
