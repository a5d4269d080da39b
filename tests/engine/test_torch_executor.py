"""The torch executor against Transformers' own `generate` and forward passes, on tiny random models."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from tests.shapes import families

from turnout.backends.torch_native_cache import FloatRows, Int8Rows, SlotCache
from turnout.backends.torch_native_executor import TorchExecutor, TorchOptions
from turnout.engine.executor import Row, Step
from turnout.errors import NotSupportedError, UsageError

NEW = 10  # tokens generated
LENGTHS = (3, 70, 17, 33, 1, 20)  # prompts; windows are 16 wide
RUNS = [name for name, f in families.FAMILIES.items() if f.interface and not f.recurrent and not f.encoder_decoder]


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, families.VOCABULARY, (n,), generator=generator).tolist() for n in LENGTHS]


@cache
def model_of(name: str) -> Any:
    return families.model(name)


@cache
def reference(name: str) -> list[list[int]]:
    """Greedy tokens of each prompt alone, by Transformers, before our attention touches the model."""
    model = families.model(name)
    return [
        model.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts()
    ]


def greedy(executor: TorchExecutor, texts: Sequence[list[int]], chunk: int, slots: Sequence[int]) -> list[list[int]]:
    """All prompts at once, ``chunk`` tokens of each a step, so that prefill and decoding mix."""
    known = [list(text) for text in texts]
    done = [0] * len(texts)
    while any(len(k) < len(t) + NEW for k, t in zip(known, texts, strict=True)):
        rows = []
        for i, tokens in enumerate(known):
            if len(tokens) < len(texts[i]) + NEW:
                part = tokens[done[i] : done[i] + chunk]
                rows.append(Row(slots[i], part, done[i], int(done[i] + len(part) == len(tokens))))
                done[i] += len(part)
        logits = executor.execute(Step(rows))
        best = iter(logits.argmax(-1).tolist())
        for row in rows:
            if row.logits:
                known[slots.index(row.slot)].append(next(best))
    return [tokens[len(text) :] for tokens, text in zip(known, texts, strict=True)]


@pytest.fixture
def executor_of(request: pytest.FixtureRequest):  # type: ignore[no-untyped-def]
    made = []

    def make(name: str, **options: Any) -> TorchExecutor:
        executor = TorchExecutor(model_of(name), TorchOptions(**{"slots": 8, **options}))
        made.append(executor)
        return executor

    yield make
    for executor in made:
        executor.close()


@pytest.mark.parametrize("name", RUNS)
def test_tokens_are_those_of_generate(name: str, executor_of: Any) -> None:
    executor = executor_of(name)
    slots = [5, 1, 7, 2, 3, 0]  # neither in order nor without a gap
    for chunk in (1, 7, 64):
        assert greedy(executor, prompts(), chunk, slots) == reference(name), f"chunks of {chunk}"
        for slot in slots:
            executor.free(slot)


CACHED = ["llama", "gemma2", "gpt-oss", "deepseek-v3", "gemma3n", "llama4"]


@pytest.mark.parametrize("name", CACHED)
def test_a_copied_prefix_and_a_cut_row_go_on_as_computed(name: str, executor_of: Any) -> None:
    executor = executor_of(name)
    text = prompts()[1]
    whole = executor.execute(Step([Row(0, text, 0, 5)])).copy()
    assert executor.retained(0, 40) == 40 and executor.retained(0, 99) == 70
    executor.copy_prefix(0, 4, 50)
    assert executor.retained(4, 99) == 50
    both = executor.execute(Step([Row(4, text[50:], 50, 5), Row(0, text[:1], 70)]))
    np.testing.assert_allclose(both[:5], whole, atol=2e-5, rtol=1e-5)
    # Draft tokens that were refused leave nothing behind.
    executor.roll_back(0, 60)
    executor.execute(Step([Row(0, [9, 8, 7], 60)]))
    executor.roll_back(0, 60)
    again = executor.execute(Step([Row(0, text[60:], 60, 5)]))
    np.testing.assert_allclose(again, whole, atol=2e-5, rtol=1e-5)
    # A freed slot starts anew although its memory holds the old row.
    executor.free(0)
    executor.free(0)
    fresh = executor.execute(Step([Row(0, text, 0, 5)]))
    np.testing.assert_allclose(fresh, whole, atol=2e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gemma2", "cohere", "granite"])
def test_logits_of_every_prompt_token(name: str, executor_of: Any) -> None:
    """Soft caps and scales behind the head are the class's own (Gemma 2, Cohere, Granite)."""
    text, other = prompts()[1], prompts()[2]
    with torch.inference_mode():
        wanted = families.model(name)(torch.tensor([text])).logits[0].numpy()
    executor = executor_of(name)
    logits = executor.execute(Step([Row(3, other, 0, 0), Row(1, text, 0, len(text))]))
    assert logits.dtype == np.float32 and logits.shape == (len(text), executor.capabilities.vocab_size)
    np.testing.assert_allclose(logits, wanted, atol=2e-4, rtol=1e-4)
    nothing = executor.execute(Step([Row(3, text[:2], len(other), 0)]))
    assert nothing.shape == (0, families.VOCABULARY)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_bfloat16_rows_do_not_depend_on_their_company(name: str) -> None:
    model = families.model(name).to(torch.bfloat16)
    text, other = prompts()[1], prompts()[2]
    with torch.inference_mode():
        wanted = model(torch.tensor([text])).logits[0, -1].float().numpy()
    executor = TorchExecutor(model, TorchOptions(slots=4))
    executor.execute(Step([Row(0, other, 0), Row(1, text[:-1], 0, 0)]))
    logits = executor.execute(Step([Row(0, [5], len(other)), Row(1, text[-1:], len(text) - 1)]))
    assert logits.dtype == np.float32
    assert np.corrcoef(logits[1], wanted)[0, 1] > 0.999


# ---- what cannot run so is refused -------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("mamba2", "keeps states other than keys and values"),
        ("qwen3-next", "keeps states other than keys and values"),
        ("lfm2", "keeps states other than keys and values"),
        ("t5", "is an encoder and a decoder"),
        ("bloom", "takes no `position_ids`"),
        ("falcon", "has 2 layers and calls attention 0 times"),
    ],
)
def test_other_families_are_refused_with_a_reason(name: str, reason: str) -> None:
    model = families.model(name)
    before = model.config._attn_implementation
    with pytest.raises(NotSupportedError, match=reason) as caught:
        TorchExecutor(model)
    assert caught.value.code == "architecture.unsupported"
    assert model.config._attn_implementation == before  # another executor may take it


def test_an_unknown_argument_of_attention_is_named() -> None:
    model = families.model("llama")
    attention = model.model.layers[1].self_attn
    attention.forward = partial(attention.forward, position_bias=torch.ones(1, 4, 3, 3))
    with pytest.raises(NotSupportedError, match="`LlamaAttention` gives attention an argument.*`position_bias`"):
        TorchExecutor(model)


def test_an_altered_mask_is_noticed() -> None:
    model = families.model("llama")
    attention = model.model.layers[0].self_attn
    inner = attention.forward

    def shifted(*args: Any, attention_mask: Any, **more: Any) -> Any:
        bias = torch.arange(attention_mask.shape[-1])
        return inner(*args, attention_mask=attention_mask - bias, **more)

    attention.forward = shifted
    with pytest.raises(NotSupportedError, match="alters its mask"):
        TorchExecutor(model)


def test_mixing_of_tokens_outside_attention_is_noticed() -> None:
    model = families.model("llama")
    model.model.layers[0].mlp.register_forward_hook(lambda _m, _i, out: out + 0.5 * torch.roll(out, 1, dims=1))
    with pytest.raises(NotSupportedError, match="over ragged rows: logits differ by"):
        TorchExecutor(model)


def test_positions_whose_scaling_depends_on_the_batch_bound_the_context() -> None:
    """LongRoPE takes other factors for the whole batch once one row is longer than the original context."""
    import transformers

    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "factor": 4.0,
    }
    positions = {"max_position_embeddings": 128, "original_max_position_embeddings": 32, "rope_parameters": rope}
    config = transformers.Phi3Config(**{**families.COMMON, "vocab_size": 256, "pad_token_id": 0, **positions})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    executor = TorchExecutor(model, TorchOptions(slots=2))
    assert executor.capabilities.context == 32
    assert "`longrope` changes beyond 32 tokens" in executor.capabilities.notes[0]
    with pytest.raises(UsageError, match="a context of 64 tokens: the model takes 32 here"):
        TorchExecutor(model, TorchOptions(slots=2, context=64))


def test_steps_that_break_the_protocol_are_refused(executor_of: Any) -> None:
    executor = executor_of("llama", slots=2, context=16)
    executor.execute(Step([Row(0, [5, 6, 7], 0)]))
    for step, words in [
        (Step([]), "needs rows"),
        (Step([Row(0, [5], 3), Row(0, [6], 3)]), "no slot twice"),
        (Step([Row(2, [5], 0)]), "slot 2 does not exist"),
        (Step([Row(0, [5], 2)]), "holds 3 tokens"),
        (Step([Row(1, list(range(17)), 0)]), "takes 16 tokens, not 17"),
        (Step([Row(1, [5], 0, 2)]), "2 rows of logits"),
        (Step([Row(1, [-1], 0)]), "-1 is not a token"),
    ]:
        with pytest.raises(UsageError, match=words):
            executor.execute(step)
    with pytest.raises(UsageError, match="cannot take a copy"):
        executor.copy_prefix(0, 0, 2)
    with pytest.raises(UsageError, match="holds 3 tokens, not 4"):
        executor.copy_prefix(0, 1, 4)
    # A token beyond the vocabulary fails inside the model; the slot holds what it held.
    with pytest.raises(Exception, match="the forward pass failed"):
        executor.execute(Step([Row(0, [families.VOCABULARY], 3)]))
    assert executor.retained(0, 9) == 3 and executor.execute(Step([Row(0, [5], 3)])).shape == (1, 256)
    executor.close()
    executor.close()
    with pytest.raises(Exception, match="is closed"):
        executor.execute(Step([Row(0, [5], 0)]))


# ---- the rows ----------------------------------------------------------------------------


def test_int8_rows_are_close_and_independent_of_the_schedule(executor_of: Any) -> None:
    text = prompts()[1]
    plain = executor_of("llama").execute(Step([Row(0, text, 0, len(text))])).copy()
    executor_of("llama").close()
    small = executor_of("llama", kv_dtype="int8")
    whole = small.execute(Step([Row(0, text, 0, len(text))])).copy()
    error = np.abs(whole - plain).max() / np.abs(plain).max()
    assert 0 < error < 0.02, error
    parts = [small.execute(Step([Row(1, text[i : i + 7], i, len(text[i : i + 7]))])).copy() for i in range(0, 70, 7)]
    np.testing.assert_allclose(np.concatenate(parts), whole, atol=1e-3)
    small.copy_prefix(0, 2, 30)
    small.roll_back(1, 30)
    again = small.execute(Step([Row(2, text[30:], 30, 40), Row(1, text[30:], 30, 40)]))
    np.testing.assert_allclose(again[:40], again[40:], atol=1e-4)
    assert any("int8" in note for note in small.capabilities.notes)


def test_int8_codes_are_within_half_a_step() -> None:
    values = torch.randn(1, 3, 40, 16, generator=torch.Generator().manual_seed(1))
    rows = Int8Rows(2, values)
    rows.reserve(64, [0, 0])
    rows.write_many(1, 5, values[0])
    read = rows.read(1, 2, 5, 45)
    step = values.abs().amax(-1, keepdim=True) / 127
    assert bool(((read - values).abs() <= step / 2 + 1e-6).all())
    assert rows.token_bytes == 3 * (16 + 4)


def test_memory_follows_use() -> None:
    """Room for 64 rows of 16,384 tokens is mapped; two of 4,096 are resident."""
    import psutil

    like = torch.zeros(1, 8, 0, 128)
    resident = psutil.Process().memory_info().rss
    rows = FloatRows(64, like)
    rows.reserve(16384, [0] * 64)
    rows.write_many(0, 0, torch.ones(8, 4096, 128))
    rows.write_many(63, 0, torch.ones(8, 4096, 128))
    grown = psutil.Process().memory_info().rss - resident
    assert rows.data.nbytes == 64 * 16384 * rows.token_bytes  # 4 GiB
    assert grown < 100 << 20, f"{grown >> 20} MiB"
    rows.release(0)
    assert psutil.Process().memory_info().rss - resident < grown - (8 << 20)
    assert float(rows.read(0, 1, 0, 16384).abs().max()) == 0 and float(rows.read(63, 64, 0, 4096).min()) == 1


def test_freed_rows_are_given_back_when_the_budget_needs_it() -> None:
    cache = SlotCache(4, 1024)
    cache.budget = 1000
    key = torch.ones(1, 2, 600, 8)
    for slot in (0, 1):
        cache.reserve({slot: 600})
        cache.layer(0, key, key)[0].write_many(slot, 0, key[0])
        cache.lengths[slot] = 600
        cache.lengths[0] = 0
    assert cache.touched == [0, 600, 0, 0]  # slot 0 was released when slot 1 passed the budget
    assert float(cache.layer(0, key, key)[0].read(0, 1, 0, 600).max()) == 0
    cache.reserve({1: 1000})
    assert cache.layer(0, key, key)[0].capacity == 1024
    assert float(cache.layer(0, key, key)[0].read(1, 2, 0, 600).min()) == 1  # growing keeps what is held
