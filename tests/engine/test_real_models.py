"""Trained weights through the torch executor: greedy tokens are those of Transformers' ``generate`` of each request
alone, however the engine schedules them.

SmolLM2 and Gemma 3 (whose windows of 512 tokens the longest prompt passes) in float32. A batch is multiplied by other
kernels than a single row, so where two tokens are as good as equal the other one may come: then the reference's own
logits must show it (``TIE``), and what follows is another text and is not compared.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from tests.engine import agreeing_models as models
from tests.engine.driving import Answer, drive, request

from turnout.backends.torch_native import TorchNativeBackend
from turnout.engine.core import Engine, EngineConfig
from turnout.engine.executor import Executor, Vocabulary
from turnout.engine.request import GenerationRequest
from turnout.engine.speculative import DraftProposer, NGramProposer

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("executors"),  # with the tests that expand the same weights
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"),
]

NEW = 8
TIE = 1e-3  # of logits, whose standard deviation is 3 to 6
SHARED = (
    "The steam engine is a machine that turns the heat of steam into motion. Thomas Newcomen built the first one that "
    "was of use in 1712; James Watt improved it. "
)
CODE = "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n    return a - b\n\ndef mul(a, b):\n"
TEXTS = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6,",
    CODE,
    "Water boils at",
    "Q: Who wrote Hamlet?\nA:",
    "import numpy as np\n\nx = np.",
    "The",
    "Dear Sir or Madam,\n\nI am writing to you because",
    "To be, or not to be, that is the",
    "Les enfants vont à l'école parce que",
    SHARED * 16,  # longer than a window
    SHARED + "Watt's partner was",
    SHARED + "It was used in mines, where",
    SHARED,
    SHARED + "It was used in mines, where",
)


@dataclass
class Trained:
    """A model's executor, the unchanged library's model, and what that generates."""

    folder: Path
    name: str
    executor: Executor
    vocabulary: Vocabulary
    model: Any
    prompts: list[list[int]]
    expected: list[list[int]] = field(default_factory=list)
    ties: int = 0

    def open(self, **options: int) -> Executor:
        backend = TorchNativeBackend()
        plan = backend.plan(models.case_of(self.folder, dtype="float32"))
        return backend.executor(plan, {"slots": 16, "context": 768, "cache_tokens": 4096, "threads": 1, **options})


def generated(model: Any, prompt: list[int]) -> list[int]:
    """Greedy tokens by the library, nothing but this prompt in its batch."""
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        out = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False, eos_token_id=None
        )
    return [int(token) for token in out[0, len(prompt) :]]


@pytest.fixture(scope="module", params=["smollm2", "gemma3-270m"])
def trained(request: pytest.FixtureRequest) -> Iterator[Trained]:
    name = str(request.param)
    folder, vocabulary = models.trained(name), models.read_vocabulary(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.pad_token_id = 0
    made = Trained(folder, name, None, vocabulary, model, [vocabulary.encode(text) for text in TEXTS])  # type: ignore[arg-type]
    made.prompts[14] = made.prompts[14][:-1]  # cut within a word
    assert 512 < len(made.prompts[11]) < 700
    made.expected = [generated(model, prompt) for prompt in made.prompts]
    made.executor = made.open()
    yield made
    print(f"{name}: {made.ties} texts left `generate` at a tie")
    made.executor.close()
    vocabulary.close()


def asked(trained: Trained, which: Any, **more: Any) -> list[GenerationRequest]:
    return [request(f"r{i}", trained.prompts[i], NEW, ignore_eos=True, **more) for i in which]


def compare(trained: Trained, which: Any, arrivals: Any = None, **settings: Any) -> Engine:
    """Drives some of the requests and compares every token; the engine is returned for its counters."""
    executor, proposer = settings.pop("executor", trained.executor), settings.pop("proposer", None)
    cache = settings.pop("cache", True)
    engine = Engine(executor, trained.vocabulary, EngineConfig(**settings), proposer=proposer)
    answers = drive(engine, asked(trained, which, cache=cache), arrivals)
    for i in which:
        check(trained, answers[f"r{i}"], trained.prompts[i], trained.expected[i], trained.model)
    engine.cache.clear()
    return engine


def check(trained: Trained, answer: Answer, prompt: list[int], expected: list[int], model: Any) -> None:
    assert not answer.error, answer.error
    assert len(answer.tokens) == NEW
    if answer.tokens == expected:
        return
    place = next(i for i, (a, b) in enumerate(zip(answer.tokens, expected, strict=True)) if a != b)
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *expected[:place]]])).logits[0, -1]
    gap = float(logits[expected[place]] - logits[answer.tokens[place]])
    assert abs(gap) < TIE, f"token {place} is {answer.tokens[place]}, `generate` says {expected[place]} by {gap:.4f}"
    trained.ties += 1


def test_each_alone(trained: Trained) -> None:
    for i in (0, 3, 7, 11):
        compare(trained, [i])


def test_sixteen_ragged_at_random_arrival(trained: Trained) -> None:
    rng = random.Random(5)
    engine = compare(trained, range(16), [rng.randrange(10) for _ in range(16)], cache=False)
    assert engine.stats.steps < 40 and engine.stats.preemptions == 0


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks(trained: Trained, chunk: int) -> None:
    """One token at a time for short prompts; 7 and 64 with a prompt of more than one chunk."""
    compare(
        trained,
        {1: (0, 4, 5), 7: (1, 3, 13), 64: (0, 11)}[chunk],
        [0, 1, 2][: 2 if chunk == 64 else 3],
        chunk_tokens=chunk,
    )


def test_preemption(trained: Trained) -> None:
    """Three requests that each outgrow their last block, in a cache with two blocks more than the prompts fill."""
    which = (1, 9, 13)
    lengths = [len(trained.prompts[i]) for i in which]
    assert all(-(-(n + NEW - 1) // 16) > -(-n // 16) for n in lengths)
    executor = trained.open(slots=3, cache_tokens=16 * (2 + sum(-(-n // 16) for n in lengths)))
    try:
        engine = compare(trained, which, [0, 0, 2], executor=executor)
        assert engine.stats.preemptions > 0
    finally:
        executor.close()


def test_prefix_hits(trained: Trained) -> None:
    """Prompts that begin alike: while the first runs, right after it and when nothing runs any more."""
    engine = compare(trained, (12, 13, 14, 15), [0, 3, 5, 40])
    assert engine.cache.hits > 0
    engine = compare(trained, (11, 15), [0, 40])
    assert engine.cache.hits > 0


def test_drafts_by_look_up(trained: Trained) -> None:
    engine = compare(trained, (2, 3, 5, 12, 13), proposer=NGramProposer(adaptive=False, min_n=1))
    assert engine.stats.drafted > 20


def test_drafts_by_the_model_in_fewer_bits(trained: Trained) -> None:
    """The GGUF file itself on llama.cpp drafts for its float32 weights here, and most of it is accepted."""
    forms = models.Forms(trained.folder, models.original(trained.name), trained.folder)
    draft = models.opened("llama.cpp", forms, slots=4)
    proposer = DraftProposer(draft, adaptive=False)  # closes its executor
    try:
        engine = compare(trained, (0, 1, 3, 9), proposer=proposer)
        assert engine.stats.accepted > 0.6 * engine.stats.drafted > 0
    finally:
        proposer.close()


def test_drafts_by_itself(trained: Trained) -> None:
    """The executor's own weights as draft: all is accepted but what falls on a tie."""
    proposer = DraftProposer(trained.open(slots=4), adaptive=False)
    try:
        engine = compare(trained, (1, 3, 6), proposer=proposer)
        assert engine.stats.accepted > 0.9 * engine.stats.drafted > 0
    finally:
        proposer.close()


def test_adapters_mixed(trained: Trained, tmp_path: Path) -> None:
    """Two LoRAs and the base in one batch, against PEFT's model of each."""
    assert trained.executor.capabilities.adapters
    import peft

    which, expected = (0, 1, 5), {}
    for number, name in enumerate(("one", "two")):
        torch.manual_seed(number)
        config = peft.LoraConfig(
            r=4, lora_alpha=16, target_modules=["q_proj", "v_proj", "down_proj"], use_rslora=number == 1
        )
        base = transformers.AutoModelForCausalLM.from_pretrained(trained.folder, dtype=torch.float32)
        adapted = peft.get_peft_model(base, config).eval()
        for key, weight in adapted.named_parameters():
            if "lora_B" in key:
                torch.nn.init.normal_(weight, std=0.04)
        adapted.save_pretrained(tmp_path / name)
        adapted.generation_config.pad_token_id = 0
        expected[name] = adapted, {i: generated(adapted, trained.prompts[i]) for i in which}
        assert expected[name][1] != {i: trained.expected[i] for i in which}
    engine = Engine(trained.executor, trained.vocabulary)
    for name in expected:
        engine.load_adapter(name, str(tmp_path / name))
    requests = [
        request(f"{name} {i}", trained.prompts[i], NEW, ignore_eos=True, adapter=name or None)
        for i in which
        for name in ("one", "", "two")
    ]
    answers = drive(engine, requests, [i % 4 for i in range(len(requests))])
    for one in requests:
        name, i = one.id.split(" ")
        model, wanted = expected[name] if name else (trained.model, dict(enumerate(trained.expected)))
        check(trained, answers[one.id], one.prompt, wanted[int(i)], model)
    for name in expected:
        engine.unload_adapter(name)
    engine.cache.clear()
