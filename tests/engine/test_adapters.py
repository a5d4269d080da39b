"""LoRA adapters per request: what PEFT's own models say, whatever else is in the batch, and what is refused.

Adapters are made by PEFT; the references are PEFT's unmerged and merged models.
"""

from __future__ import annotations

import gc
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine import adapters_made as made
from tests.engine.driving import drive, request
from tests.engine.test_families import Numbers
from tests.shapes import families, ggufs

from turnout.backends.torch_native import executor_for
from turnout.backends.torch_native_adapters import AdapterSet, merging
from turnout.backends.torch_native_executor import TorchOptions
from turnout.backends.torch_native_rows import RowExecutor, RowOptions
from turnout.engine.core import Engine, EngineConfig
from turnout.engine.executor import Row, Step
from turnout.errors import InputError, LoadError, TurnoutError
from turnout.quantize.int8 import available, quantize_linears

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")

PROMPT = [5, 9, 77, 3, 21, 100, 200, 14, 33, 8, 150]
OTHER = [201, 17, 5, 60, 44]
NEW = 12


def opened(model: Any, **options: Any) -> Any:
    return executor_for(model, TorchOptions(**{"slots": 4, "cache_tokens": 1024, **options}))


def all_logits(executor: Any, slot: int, prompt: list[int], adapter: str | None) -> torch.Tensor:
    """Logits of every token of a prompt, and the slot free again."""
    found = executor.execute(Step([Row(slot, prompt, 0, len(prompt), adapter)]))
    executor.free(slot)
    return torch.from_numpy(np.array(found))


def apart(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).abs().max())


# ---- against PEFT ----------------------------------------------------------------------------

GATED = list(made.GATED)
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("llama", {"target_modules": GATED}),
    "rslora": ("llama", {"target_modules": GATED, "r": 9, "use_rslora": True}),
    "dora": ("llama", {"target_modules": GATED, "use_dora": True}),
    "patterns": (
        "llama",
        {
            "target_modules": "all-linear",
            "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 7},
            "alpha_pattern": {"v_proj": 3, "down_proj": 16},
        },
    ),
    "rslora-patterns": (
        "qwen3",
        {"target_modules": GATED, "use_rslora": True, "rank_pattern": {"up_proj": 16}, "alpha_pattern": {"q_proj": 2}},
    ),
    "expression": ("llama", {"target_modules": r"model\.layers\.\d+\.mlp\.(up|down)_proj"}),
    "layers": (
        "llama",
        {
            "target_modules": ["q_proj", "k_proj", "up_proj"],
            "layers_to_transform": [1],
            "exclude_modules": ["model.layers.1.mlp.up_proj"],
        },
    ),
    "head-and-norm": ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "norm"]}),
    "table": ("llama", {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"]}),
    "lora-table-and-tied-head": ("gemma3", {"target_modules": ["q_proj", "embed_tokens", "lm_head"]}),
    "dora-table": ("gemma3", {"target_modules": ["embed_tokens", "o_proj"], "use_dora": True}),
    "gemma3": ("gemma3", {"target_modules": GATED, "use_dora": True, "rank_pattern": {"q_proj": 5}}),
    "moe": ("qwen3-moe", {"target_modules": list(made.ATTENTION)}),
    "moe-dora": ("qwen3-moe", {"target_modules": list(made.ATTENTION), "use_dora": True}),
    "conv1d": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "conv1d-dora": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True, "use_dora": True}),
    "bias-all": ("gpt2", {"target_modules": ["c_attn"], "fan_in_fan_out": True, "bias": "all"}),
    "bias-lora": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "bias": "lora_only", "lora_bias": True}),
    "bias-dora": ("gpt2", {"target_modules": ["c_attn", "c_fc"], "bias": "lora_only", "use_dora": True}),
    "states": ("mamba2", {"target_modules": ["in_proj"]}),
    "own-attention": ("falcon", {"target_modules": ["query_key_value", "dense"], "use_dora": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_tokens_equal_pefts(case: str) -> None:
    """Greedy tokens and all logits of PEFT's unmerged model, while other rows of the step have no adapter."""
    family, settings = CASES[case]
    wrapped = made.adapted(families.model(family), **settings)
    folder = made.saved(wrapped)
    plain, executor = families.model(family), opened(families.model(family))
    engine = Engine(executor, Numbers())
    engine.load_adapter("mine", str(folder))
    answers = drive(
        engine,
        [
            request("a", PROMPT, NEW, adapter="mine"),
            request("b", PROMPT, NEW),
            request("c", OTHER, NEW, adapter="mine"),
        ],
        [0, 1, 2],
    )
    assert answers["a"].tokens == made.greedy(wrapped, PROMPT, NEW) != answers["b"].tokens
    assert answers["b"].tokens == made.greedy(plain, PROMPT, NEW)
    assert answers["c"].tokens == made.greedy(wrapped, OTHER, NEW)
    engine.cache.clear()
    assert apart(all_logits(executor, 0, PROMPT, "mine"), made.logits(wrapped, PROMPT)) < 2e-5
    assert apart(all_logits(executor, 0, PROMPT, None), made.logits(plain, PROMPT)) < 2e-5
    executor.close()


@pytest.mark.parametrize("case", ["plain", "rslora", "dora", "conv1d-dora", "bias-dora", "bias-lora", "dora-table"])
def test_merged_weights_say_the_same(case: str) -> None:
    """Folded into the weights: every request has it, as in PEFT's merged model; others are refused then."""
    family, settings = CASES[case]
    wrapped = made.adapted(families.model(family), **settings)
    folder, unmerged = made.saved(wrapped), made.logits(wrapped, PROMPT)
    model = merging(str(folder))(families.model(family))
    assert apart(made.logits(model, PROMPT), unmerged) < 1e-4
    executor = opened(model)
    assert apart(all_logits(executor, 0, PROMPT, None), unmerged) < 1e-4
    if case != "dora-table":  # PEFT merges into a tied head what it does not apply to it before
        assert apart(made.logits(wrapped.merge_and_unload(), PROMPT), unmerged) < 1e-4
    with pytest.raises(LoadError, match="is merged into the weights"):
        executor.load_adapter("other", str(folder))


def test_encoders_have_the_adapter_too() -> None:
    for family in ("t5", "bart"):
        wrapped, folder = made.of(family, "dora" if family == "bart" else "rslora")
        executor = opened(families.model(family))
        executor.load_adapter("mine", str(folder))
        for slot, adapter in enumerate(("mine", None)):
            executor.encode(slot, OTHER)
            model = wrapped if adapter else families.model(family)
            with torch.inference_mode():
                ids = {"input_ids": torch.tensor([OTHER]), "decoder_input_ids": torch.tensor([PROMPT])}
                wanted = model(**ids).logits[0]
            found = executor.execute(Step([Row(slot, PROMPT, 0, len(PROMPT), adapter)]))
            assert apart(torch.from_numpy(found), wanted) < 2e-5
        executor.close()


def test_half_precision_adapts_in_float32_as_peft_does() -> None:
    wrapped = made.adapted(families.model("llama").bfloat16(), target_modules=GATED, use_dora=True)
    folder = made.saved(wrapped)
    executor = opened(families.model("llama").bfloat16())
    executor.load_adapter("mine", str(folder))
    wanted, plain = made.logits(wrapped, PROMPT), made.logits(families.model("llama").bfloat16(), PROMPT)
    found = all_logits(executor, 0, PROMPT, "mine")
    assert float((found - wanted).norm() / wanted.norm()) < 0.03 < 0.3 < float((plain - wanted).norm() / wanted.norm())
    executor.close()


@pytest.mark.skipif(not available(), reason="this PyTorch has no packed 8-bit product")
@pytest.mark.parametrize("dora", [False, True])
def test_quantised_linears_take_adapters(dora: bool) -> None:
    """Near PEFT's over float weights, as near as the base alone is; rows without adapter keep their very bits."""
    wrapped = made.adapted(families.model("llama"), target_modules=GATED, use_dora=dora)
    folder = made.saved(wrapped)
    executor = opened(families.model("llama"))
    quantize_linears(executor.model, torch.float32, 1)
    before = all_logits(executor, 0, PROMPT, None)
    executor.load_adapter("mine", str(folder))
    wanted, plain = made.logits(wrapped, PROMPT), made.logits(families.model("llama"), PROMPT)
    found = all_logits(executor, 0, PROMPT, "mine")
    lost = float((before - plain).norm() / plain.norm())
    assert float((found - wanted).norm() / wanted.norm()) < 2 * lost < 0.1
    assert float((plain - wanted).norm() / wanted.norm()) > 0.3
    step = Step([Row(0, PROMPT, 0, 11, None), Row(1, PROMPT, 0, 11, "mine")])
    assert torch.equal(torch.from_numpy(executor.execute(step)[:11]), before)
    executor.free(0)
    executor.unload_adapter("mine")
    with pytest.raises(LoadError, match="float weights only"):
        adapters = AdapterSet(executor.model)
        adapters.load("mine", str(folder))
        adapters.merge("mine")
    executor.close()


# ---- in company ------------------------------------------------------------------------------


class Experts(torch.nn.Module):
    """A list of experts, each given the tokens that are sent to it."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = torch.nn.ModuleList(
            torch.nn.ModuleDict({"up": torch.nn.Linear(32, 32), "down": torch.nn.Linear(32, 32)}) for _ in range(3)
        )

    def forward(self, x: Any) -> Any:
        flat = x.view(-1, x.shape[-1])
        choice, out = flat[:, :3].argmax(-1), torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            chosen = (choice == number).nonzero()[:, 0].flip(0)
            out[chosen] = expert["down"](torch.relu(expert["up"](flat[chosen])))  # type: ignore[index]
        return out.view(x.shape)


def routed() -> Any:
    model = families.model("llama")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        for layer in model.model.layers:
            layer.mlp = Experts()
    return model.eval()


def test_modules_that_gather_tokens_compute_apart() -> None:
    """Rows of such a module are no longer the step's; each adapter then has a pass of its own."""
    folders = [made.saved(made.adapted(routed(), i, target_modules=["up", "down", "q_proj"])) for i in range(2)]
    wrapped = [made.adapted(routed(), i, target_modules=["up", "down", "q_proj"]) for i in range(2)]
    executor = opened(routed())
    for number, folder in enumerate(folders):
        executor.load_adapter(f"a{number}", str(folder))
    adapters = ("a1", None, "a0")
    rows = [Row(slot, PROMPT, 0, 4, adapter) for slot, adapter in enumerate(adapters)]
    found = torch.from_numpy(executor.execute(Step(rows))).split(4)
    for adapter, part in zip(adapters, found, strict=True):
        model = routed() if adapter is None else wrapped[int(adapter[1])]
        assert apart(part, made.logits(model, PROMPT)[-4:]) < 2e-5
    executor.close()


def test_a_head_with_adapters_sees_the_asked_rows_only() -> None:
    """Rows ask for different numbers of logits, in another order than tokens are computed in."""
    wrapped = [made.adapted(families.model("llama"), i, target_modules=["lm_head", "q_proj"]) for i in range(2)]
    executor = opened(families.model("llama"))
    for number, one in enumerate(wrapped):
        executor.load_adapter(f"a{number}", str(made.saved(one)))
    asked = [("a1", PROMPT, 3), (None, OTHER, 5), ("a0", PROMPT[:1], 1), ("a1", OTHER, 0)]
    rows = [Row(slot, tokens, 0, logits, adapter) for slot, (adapter, tokens, logits) in enumerate(asked)]
    found = torch.from_numpy(executor.execute(Step(rows))).split([logits for _, _, logits in asked])
    for (adapter, tokens, count), part in zip(asked, found, strict=True):
        model = families.model("llama") if adapter is None else wrapped[int(adapter[1])]
        assert count == 0 or apart(part, made.logits(model, tokens)[-count:]) < 2e-5
    executor.close()


def test_adapters_come_and_go_while_requests_run() -> None:
    """Loading between steps changes no running request; a name that returns is another adapter."""
    kinds = ("plain", "rslora", "dora")
    executor = opened(families.model("llama"), slots=8)
    engine = Engine(executor, Numbers(), EngineConfig(chunk_tokens=4))
    answers: dict[str, list[int]] = {}

    def steps(count: int) -> None:
        for _ in range(count):
            for event in engine.step():
                assert not event.error, event.error
                answers.setdefault(event.id, []).extend(event.tokens)

    engine.add(request("base", PROMPT, 30))
    steps(3)
    engine.load_adapter("x", str(made.of("llama", "plain")[1]))
    engine.add(request("plain", PROMPT, NEW, adapter="x"))
    steps(4)
    with pytest.raises(InputError, match="1 running requests use"):
        engine.unload_adapter("x")
    engine.load_adapter("y", str(made.of("llama", "rslora")[1]))
    engine.add(request("rslora", PROMPT, NEW, adapter="y"))
    steps(16)
    engine.unload_adapter("x")
    engine.load_adapter("x", str(made.of("llama", "dora")[1]))
    engine.add(request("dora", PROMPT, NEW, adapter="x"))
    while engine.has_work:
        steps(1)
    assert answers["base"] == made.greedy(families.model("llama"), PROMPT, 30)
    for kind in kinds:
        assert answers[kind] == made.greedy(made.of("llama", kind)[0], PROMPT, NEW), kind
    engine.unload_adapter("x")
    engine.unload_adapter("y")
    engine.cache.clear()
    engine.check_idle()
    assert not any("forward" in vars(module) for module in executor.model.modules()), "a module kept our forward"
    executor.close()


def test_prefixes_are_not_shared_between_adapters() -> None:
    executor = opened(families.model("llama"))
    engine = Engine(executor, Numbers())
    prompt = PROMPT * 5
    for name, kind in (("one", "plain"), ("two", "dora")):
        engine.load_adapter(name, str(made.of("llama", kind)[1]))
    order: list[str | None] = [None, "one", "two", "one", None, "two"]
    hits = []
    for number, adapter in enumerate(order):
        before = engine.cache.hits
        answer = drive(engine, [request(f"r{number}", prompt, NEW, adapter=adapter)])[f"r{number}"]
        hits.append(engine.cache.hits > before)
        model = made.of("llama", {"one": "plain", "two": "dora"}[adapter])[0] if adapter else families.model("llama")
        assert answer.tokens == made.greedy(model, prompt, NEW)
    assert hits == [False, False, False, True, True, True]
    executor.close()


def test_closing_gives_the_model_its_own_forward_back() -> None:
    model = families.model("llama")
    before = made.logits(model, PROMPT)
    for kind in (opened, lambda model: RowExecutor(model, RowOptions(slots=2))):
        executor = kind(model)
        executor.load_adapter("mine", str(made.of("llama", "plain")[1]))
        executor.close()
        assert torch.equal(made.logits(model, PROMPT), before)


def test_a_closed_executor_holds_neither_model_nor_adapters() -> None:
    model = families.model("llama")
    gone = weakref.ref(model)
    executor = opened(model)
    executor.load_adapter("mine", str(made.of("llama", "dora")[1]))
    executor.close()
    del model
    gc.collect()
    assert gone() is None
    with pytest.raises(TurnoutError, match="closed"):
        executor.load_adapter("mine", str(made.of("llama", "dora")[1]))


# ---- llama.cpp -------------------------------------------------------------------------------


def test_llamacpp_and_torch_say_the_same_with_the_same_adapter(tmp_path: Path) -> None:
    """One LoRA as PEFT saves it and as GGUF, over one GGUF model, mixed with plain rows."""
    import gguf
    import transformers

    from turnout.backends.llamacpp_executor import LlamaCppExecutor
    from turnout.backends.llamacpp_options import ExecutorOptions

    base = ggufs.write_gguf(tmp_path / "base.gguf", kind="F32")

    def model() -> Any:
        return transformers.AutoModelForCausalLM.from_pretrained(
            str(tmp_path), gguf_file=base.name, dtype=torch.float32
        ).eval()

    # Neither is stored in another order of rows, as queries and keys are.
    places = {"self_attn.v_proj": "attn_v", "mlp.down_proj": "ffn_down"}
    wrapped = made.adapted(model(), target_modules=[name.split(".")[1] for name in places])
    folder = made.saved(wrapped)
    writer = gguf.GGUFWriter(tmp_path / "lora.gguf", "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_float32("adapter.lora.alpha", 8.0)
    for name, tensor in made.load_file(folder / "adapter_model.safetensors").items():
        place = next(short for long, short in places.items() if long in name)
        half = "lora_a" if "lora_A" in name else "lora_b"
        writer.add_tensor(f"blk.0.{place}.weight.{half}", tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    given = {"slots": 4, "cache_tokens": 256, "threads": 1, "cache_type": "f32", "flash": "off"}
    for executor, path in (
        (opened(model()), folder),
        (LlamaCppExecutor(str(base), ExecutorOptions.of(given)), tmp_path / "lora.gguf"),
    ):
        engine = Engine(executor, Numbers())
        engine.load_adapter("mine", str(path))
        asked = [request(f"{i}", PROMPT[i:], NEW, adapter="mine" if i % 2 else None) for i in range(4)]
        answers = drive(engine, asked, [0, 1, 1, 3])
        for number in range(4):
            wanted = made.greedy(wrapped if number % 2 else model(), PROMPT[number:], NEW)
            assert answers[f"{number}"].tokens == wanted
        executor.close()
