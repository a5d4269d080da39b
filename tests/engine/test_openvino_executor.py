"""The OpenVINO executor against Transformers: pages, ragged steps, prefixes, cuts, sources, refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tests.shapes import ggufs, hf

from turnout.backends.base import Case, LoadPlan
from turnout.backends.openvino import core
from turnout.backends.openvino_executor import OpenVINOExecutor
from turnout.backends.openvino_executor_graph import Unpaged, windows_of
from turnout.backends.openvino_executor_options import Settings
from turnout.backends.openvino_executor_pages import Pages
from turnout.backends.openvino_executor_rows import OpenVINORowExecutor
from turnout.backends.openvino_executor_source import open_executor, source_of
from turnout.backends.openvino_genai import OpenVINOGenAIBackend
from turnout.engine.executor import Row, Step
from turnout.errors import InputError, LoadError, MemoryAdmissionError, TurnoutError, UsageError
from turnout.package.inspect import inspect
from turnout.package.store import resolve
from turnout.types import Task

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "vocab_size": 100,
    "max_position_embeddings": 256,
}
QWEN = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FAMILIES: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", hf.llama_config(**SIZES)),
    "llama3-bias-tied": (
        "LlamaForCausalLM",
        hf.llama_config(**SIZES, attention_bias=True, mlp_bias=True, rope_parameters=LLAMA3, tie_word_embeddings=True),
    ),
    "mistral": ("MistralForCausalLM", transformers.MistralConfig(**QWEN, sliding_window=None)),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config(**{**QWEN, "head_dim": 16})),
    "qwen3": ("Qwen3ForCausalLM", transformers.Qwen3Config(**QWEN)),
}


def plan_of(path: Path | str, dtype: str = "float32", device: str = "cpu", **options: Any) -> LoadPlan:
    package = inspect(path)
    case = Case(package.root, package.artifacts[0], Task.TEXT_GENERATION, device=device, options=options)
    return LoadPlan(case, "openvino-genai", dtype=dtype)


def tiny(folder: Path, family: str) -> Path:
    """A random model whose biases and norms are not what they start from."""
    target = folder / family
    if not target.exists():
        cls, config = FAMILIES[family]
        hf.build(folder / f"{family}-plain", cls, config)
        hf.variant(
            folder / f"{family}-plain", target, tensors=lambda stored: [_stir(name, t) for name, t in stored.items()]
        )
    return target


def _stir(name: str, tensor: torch.Tensor) -> None:
    if tensor.ndim == 1:
        tensor.add_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))) * 0.3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("openvino-executor")


Opener = Callable[..., Any]


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens executors with one thread and closes them; by then every page must be free again."""
    kept: list[Any] = []

    def opener(plan: LoadPlan, **options: Any) -> Any:
        kept.append(open_executor(plan, {"threads": 1, "slots": 4, **options}))
        return kept[-1]

    yield opener
    for executor in kept:
        for slot in range(executor.capabilities.slots):
            executor.free(slot)
        if isinstance(executor, OpenVINOExecutor):
            executor.pages.check()
            assert executor.pages.free_pages == executor.pages.total
        executor.close()
        executor.close()


def reference(path: Path, ids: list[int]) -> np.ndarray:
    """Logits [tokens, vocabulary] of Transformers' eager float32."""
    return _reference(_model(path), ids)


def _model(path: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager"
    ).eval()


def _reference(model: Any, ids: list[int]) -> np.ndarray:
    with torch.inference_mode():
        found: np.ndarray = model(torch.tensor([ids])).logits[0].numpy()
    return found


def tokens(count: int, seed: int = 0) -> list[int]:
    return [int(t) for t in np.random.default_rng(seed).integers(5, 95, count)]


def feed(executor: Any, slot: int, ids: list[int], start: int = 0, chunk: int = 64) -> np.ndarray:
    """Logits of the last token after ``ids`` were appended in chunks."""
    logits = None
    for at in range(0, len(ids), chunk):
        piece = ids[at : at + chunk]
        last = at + chunk >= len(ids)
        logits = executor.execute(Step([Row(slot, piece, start + at, int(last))]))
    assert logits is not None and logits.dtype == np.float32
    result: np.ndarray = logits[0].copy()
    return result


def greedy(executor: Any, prompts: list[list[int]], count: int, chunk: int = 64) -> list[list[int]]:
    """Greedy tokens of all prompts together: request i joins at step i, prompts come in chunks."""
    known = [list(p) for p in prompts]
    done = [0] * len(prompts)
    step = 0
    while any(len(k) < len(p) + count for k, p in zip(known, prompts, strict=True)):
        rows = []
        for slot, ids in enumerate(known[: step + 1]):
            if len(ids) < len(prompts[slot]) + count:
                piece = ids[done[slot] : done[slot] + chunk]
                rows.append(Row(slot, piece, done[slot], int(done[slot] + len(piece) == len(ids))))
        logits = executor.execute(Step(rows))
        step, at = step + 1, 0
        for row in rows:
            done[row.slot] += len(row.tokens)
            if row.logits:
                known[row.slot].append(int(logits[at].argmax()))
                at += 1
    return [k[len(p) :] for k, p in zip(known, prompts, strict=True)]


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """Transformers' own greedy loop; no end token."""
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
    return [int(t) for t in ids[0, len(prompt) :]]


# ---- numbers ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(folder: Path, opened: Opener, family: str) -> None:
    path = tiny(folder, family)
    executor = opened(plan_of(path))
    assert isinstance(executor, OpenVINOExecutor) and not executor.capabilities.notes
    first, second = tokens(75), tokens(41, 1)
    none = executor.execute(Step([Row(0, first[:40], 0, 0)]))
    assert none.shape == executor.execute(Step([])).shape == (0, 100)
    mixed = executor.execute(Step([Row(0, first[40:], 40, 5), Row(2, second, 0, 41)]))
    expected = np.concatenate([reference(path, first)[-5:], reference(path, second)])
    np.testing.assert_allclose(mixed, expected, atol=2e-4)


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_greedy_tokens_of_ragged_requests(folder: Path, opened: Opener, chunk: int) -> None:
    path = tiny(folder, "qwen3")
    model = _model(path)
    prompts = [tokens(n, n) for n in (33, 1, 64, 10)]
    found = greedy(opened(plan_of(path)), prompts, 12, chunk)
    assert found == [generated(model, p, 12) for p in prompts]


@pytest.mark.parametrize("quantize", ["q8", "q4"])
def test_quantized_weights_are_exactly_their_steps(folder: Path, opened: Opener, quantize: str) -> None:
    """Against Transformers with the same rounding written in numpy."""
    path = tiny(folder, "mistral")
    model = _model(path)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                small = quantize == "q4" and "embed" not in name and "head" not in name
                weight.copy_(torch.from_numpy(_rounded(weight.numpy().copy(), 64 if small else 0)))
    ids = tokens(50)
    for _ in range(2):  # the second comes from the cache
        found = opened(plan_of(path), quantize=quantize, activations="float").execute(Step([Row(0, ids, 0, 50)]))
        np.testing.assert_allclose(found, _reference(model, ids), atol=5e-4)


def _rounded(weight: np.ndarray, group: int) -> np.ndarray:
    result: np.ndarray
    if not group:
        scale = np.abs(weight).max(1, keepdims=True) / 127
        result = np.rint(weight / scale) * scale
        return result
    groups = weight.reshape(len(weight), -1, group)
    peak = np.take_along_axis(groups, np.abs(groups).argmax(2, keepdims=True), 2)
    scale = (peak / -8).astype(np.float16).astype(np.float32)
    result = (np.clip(np.rint(groups / scale), -8, 7) * scale).reshape(weight.shape)
    return result


def test_a_cache_in_8_bits_is_near_and_forgets_what_is_cut(folder: Path, opened: Opener) -> None:
    path = tiny(folder, "qwen3")
    executor = opened(plan_of(path), kv_dtype="int8")
    ids, other = tokens(40), tokens(20, 3)
    expected = feed(executor, 0, ids)
    assert np.abs(expected - reference(path, ids)[-1]).max() < 0.5
    feed(executor, 1, ids[:35])
    feed(executor, 1, other, 35)
    executor.roll_back(1, 35)
    np.testing.assert_allclose(feed(executor, 1, ids[35:], 35), feed(executor, 2, ids, chunk=35), atol=1e-5)


# ---- slots -----------------------------------------------------------------------------


def test_prefixes_are_shared_and_written_apart(folder: Path, opened: Opener) -> None:
    path = tiny(folder, "llama")
    executor = opened(plan_of(path), cache_tokens=512)
    ids, tail = tokens(70), tokens(9, 5)
    feed(executor, 0, ids)
    before = executor.pages.free_pages
    executor.copy_prefix(0, 1, executor.retained(0, 50))
    executor.copy_prefix(0, 2, 64)
    assert executor.pages.free_pages == before
    pairs = [(0, ids + tail), (1, ids[:50] + tail), (2, ids[:64] + tail)]
    rows = [Row(slot, tail, len(whole) - len(tail)) for slot, whole in pairs]
    found = executor.execute(Step(rows))
    executor.pages.check()
    np.testing.assert_allclose(found, [reference(path, whole)[-1] for _, whole in pairs], atol=2e-4)
    again = executor.execute(Step([Row(0, [7], 79)]))[0]
    np.testing.assert_allclose(again, reference(path, [*ids, *tail, 7])[-1], atol=2e-4)


def test_a_cut_slot_does_not_write_into_shared_pages(folder: Path, opened: Opener) -> None:
    path = tiny(folder, "llama")
    executor = opened(plan_of(path))
    ids, other = tokens(64), tokens(12, 7)
    feed(executor, 0, ids)
    executor.copy_prefix(0, 1, 64)
    for length in (40, 10, 0):
        executor.roll_back(0, length)
        found = feed(executor, 0, other, length)
        np.testing.assert_allclose(found, reference(path, ids[:length] + other)[-1], atol=2e-4)
    np.testing.assert_allclose(feed(executor, 1, [9], 64), reference(path, [*ids, 9])[-1], atol=2e-4)


def test_a_step_that_does_not_fit_changes_nothing(folder: Path, opened: Opener) -> None:
    executor = opened(plan_of(tiny(folder, "llama")), cache_tokens=96, step_tokens=80)
    assert executor.capabilities.cache_tokens == 96 and executor.capabilities.block_size == 32
    feed(executor, 0, tokens(60))
    with pytest.raises(MemoryAdmissionError, match="2 pages of 32 tokens, 1 are free") as caught:
        executor.execute(Step([Row(1, tokens(33), 0)]))
    assert caught.value.code == "memory.insufficient"
    wrong = [
        Row(0, [5], 59),
        Row(0, [], 60),
        Row(0, [5], 60, 2),
        Row(0, [100], 60),
        Row(0, [-1], 60),
        Row(1, tokens(81), 0),
    ]
    for row in wrong:
        with pytest.raises(InputError):
            executor.execute(Step([row]))
    with pytest.raises(LoadError, match="adapters"):
        executor.execute(Step([Row(0, [5], 60, adapter="a")]))
    for call in (lambda: executor.roll_back(0, 61), lambda: executor.copy_prefix(0, 1, 61)):
        with pytest.raises(InputError):
            call()
    assert executor.pages.lengths == [60, 0, 0, 0]
    executor.execute(Step([Row(1, tokens(32), 0)]))
    executor.close()
    with pytest.raises(LoadError, match="closed"):
        executor.execute(Step([Row(0, [5], 60)]))


def test_pages_under_random_use() -> None:
    """Every slot's tokens, kept in numpy beside the tables, stay its own."""
    rng = np.random.default_rng(0)
    pages = Pages(5, 40, 4)
    store = np.zeros((40, 4), np.int64)
    held: list[list[int]] = [[] for _ in range(5)]
    for number in range(3000):
        slot, other = (int(s) for s in rng.integers(0, 5, 2))
        action = rng.integers(0, 4)
        if action == 0:
            count = int(rng.integers(1, 12))
            if pages.wanted(slot, count) <= pages.free_pages:
                copied = pages.extend(slot, count)
                if copied:
                    store[copied[1]] = store[copied[0]]
                for i in range(len(held[slot]), len(held[slot]) + count):
                    store[pages.tables[slot][i // 4], i % 4] = number
                    held[slot].append(number)
        elif action == 1:
            length = int(rng.integers(0, len(held[slot]) + 1))
            pages.cut(slot, length)
            del held[slot][length:]
        elif action == 2 and slot != other:
            pages.cut(other, 0)
            length = int(rng.integers(0, len(held[slot]) + 1))
            pages.share(slot, other, length)
            held[other] = held[slot][:length]
        pages.check()
        for s in range(5):
            table = pages.tables[s]
            assert [int(store[table[i // 4], i % 4]) for i in range(len(held[s]))] == held[s]


# ---- row by row ------------------------------------------------------------------------


def test_graphs_without_a_paged_form_run_row_by_row(folder: Path) -> None:
    path = tiny(folder, "qwen3")
    model, _kept = source_of(plan_of(path).case, Settings(), 256)()
    executor = OpenVINORowExecutor(
        model, Settings(slots=4, threads=1), 256, "a test", lambda m, p: core().compile_model(m, "CPU", p)
    )
    assert executor.capabilities.notes == ("rows run one after the other: a test",)
    prompts = [tokens(n, n) for n in (33, 1, 10)]
    found = greedy(executor, prompts, 6, 7)
    model = _model(path)
    assert found == [generated(model, p, 6) for p in prompts]
    executor.copy_prefix(0, 3, 20)
    executor.roll_back(0, 30)
    tail = tokens(4, 8)
    mixed = executor.execute(Step([Row(3, tail, 20, 2), Row(0, tail, 30, 0)]))
    np.testing.assert_allclose(mixed, _reference(model, prompts[0][:20] + tail)[-2:], atol=2e-4)
    executor.free(1)
    np.testing.assert_allclose(feed(executor, 1, tail), _reference(model, tail)[-1], atol=2e-4)
    executor.close()
    with pytest.raises(LoadError, match="closed"):
        executor.execute(Step([Row(0, [5], 34)]))


@pytest.mark.slow
def test_windows_go_through_the_exporter_and_stay_windows(folder: Path, opened: Opener) -> None:
    """A window shorter than the context: never dropped in silence."""
    path = folder / "window"
    hf.build(path, "MistralForCausalLM", transformers.MistralConfig(**QWEN, sliding_window=16))
    executor = opened(plan_of(path))
    ids = tokens(60)
    np.testing.assert_allclose(feed(executor, 0, ids, chunk=13), reference(path, ids)[-1], atol=2e-4)
    inside = opened(plan_of(path), context=16)
    assert isinstance(inside, OpenVINOExecutor)
    np.testing.assert_allclose(feed(inside, 0, ids[:16]), reference(path, ids[:16])[-1], atol=2e-4)


# ---- sources ---------------------------------------------------------------------------


def test_a_gguf_file_and_the_directory_saved_from_it(folder: Path, opened: Opener, tmp_path: Path) -> None:
    import openvino_genai

    path = tmp_path / "m" / "m.gguf"
    path.parent.mkdir()
    ggufs.write_gguf(path, pre="smollm", kind="Q8_0")
    prompt = tokens(20)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    ).eval()
    expected = [generated(model, prompt, 10)]
    assert greedy(opened(plan_of(path)), [prompt], 10) == expected
    openvino_genai.LLMPipeline(str(path), "CPU", enable_save_ov_model=True)
    path.unlink()
    assert greedy(opened(plan_of(path.parent), context=64), [prompt], 10) == expected


@pytest.fixture(scope="module")
def smollm2(folder: Path) -> Path:
    """SmolLM2-135M-Instruct as a Transformers directory in bfloat16."""
    source, target = Path(resolve("smollm2").path), folder / "smollm2"
    model = transformers.AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16
    )
    model.hf_quantizer = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(target)
    return target


TEXTS = (
    "The capital of France is Paris. The capital of Germany is",
    "def add(a, b):\n    return",
    "Water boils at a hundred degrees Celsius at sea level. On a high mountain the pressure of the air is lower, so",
)


@pytest.mark.slow
def test_a_trained_model(smollm2: Path, opened: Opener) -> None:
    """Greedy tokens in float32 are Transformers' own; in 8 bits the distributions stay near."""
    model = _model(smollm2)
    vocabulary = OpenVINOGenAIBackend().vocabulary(plan_of(resolve("smollm2").path))
    assert vocabulary.decode(vocabulary.encode(TEXTS[1])) == TEXTS[1] and vocabulary.is_special(0)
    assert b"".join(vocabulary.token_bytes(i) for i in vocabulary.encode("né €")) == "né €".encode()
    prompts = [vocabulary.encode(text) for text in TEXTS]
    exact = opened(plan_of(smollm2), context=512)
    found = greedy(exact, prompts, 16, 16)
    assert found == [generated(model, prompt, 16) for prompt in prompts]
    ids = prompts[2] + found[2]
    expected = torch.from_numpy(_reference(model, ids)).log_softmax(-1)
    for options in ({"quantize": "q8"}, {"kv_dtype": "int8"}):
        logits = opened(plan_of(smollm2), context=512, **options).execute(Step([Row(0, ids, 0, len(ids))]))
        given = torch.from_numpy(logits.copy()).log_softmax(-1)
        divergence = (expected.exp() * (expected - given)).sum(-1).mean().item()
        agreement = (expected.argmax(-1) == given.argmax(-1)).float().mean().item()
        assert divergence < 0.05 and agreement > 0.85, options


def test_refusals_name_what_is_wrong(folder: Path) -> None:
    path = tiny(folder, "llama")
    for options, text in (
        ({"context": 257}, "made for 256"),
        ({"slots": "many"}, "slots=many"),
        ({"kv_dtype": "int3"}, "kv_dtype=int3"),
        ({"quantize": "q5"}, "quantize=q5"),
    ):
        with pytest.raises(UsageError, match=text):
            open_executor(plan_of(path), options)
    with pytest.raises(TurnoutError, match="not on `gpu`"):
        open_executor(plan_of(path, device="gpu"))
    extra = hf.variant(path, folder / "extra", tensors=lambda t: t.update(wonder=torch.ones(2, 2)))
    with pytest.raises(LoadError, match="wonder"):
        open_executor(plan_of(extra))
    absent = hf.variant(path, folder / "absent", tensors=lambda t: t.pop("model.norm.weight"))
    with pytest.raises(LoadError, match=r"model\.norm\.weight"):
        open_executor(plan_of(absent))


def test_windows_of_configurations() -> None:
    assert windows_of({"sliding_window": 64, "model_type": "mistral"}, 2, 65) == [64, 64]
    assert windows_of({"sliding_window": 64, "model_type": "mistral"}, 2, 64) == [0, 0]
    assert windows_of({"sliding_window": 64, "use_sliding_window": False}, 2, 65) == [0, 0]
    kinds = {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]}
    assert windows_of(kinds, 2, 65) == [8, 0]
    with pytest.raises(Unpaged, match="which layers"):
        windows_of({"sliding_window": 8, "model_type": "unheardof"}, 2, 65)


def test_the_backend_opens_it(folder: Path) -> None:
    backend = OpenVINOGenAIBackend()
    plan = plan_of(tiny(folder, "llama"), context="128")
    executor = backend.executor(plan, {"threads": 1, "slots": 2})
    vocabulary = backend.vocabulary(plan)
    assert executor.capabilities.context == 128 and executor.capabilities.slots == 2
    ids = vocabulary.encode("w1 w2", special=False)
    assert executor.execute(Step([Row(0, ids, 0)])).shape == (1, executor.capabilities.vocab_size)
    assert json.dumps(executor.capabilities.notes) == "[]"
    executor.close()
