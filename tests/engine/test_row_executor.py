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
