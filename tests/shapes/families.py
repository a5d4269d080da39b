"""Tiny random language models of many Transformers families, for the engine's tests.

Each is seeded, fp32, of two to four layers and a vocabulary of 256, knows at least 256 positions, and is
initialised wide enough that greedy decoding does not repeat one token. End tokens are switched off: the
tests count tokens. Sliding windows are 16 wide, so that 64 tokens overrun them several times.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

VOCABULARY, WINDOW, CONTEXT = 256, 16, 256
START = 1  # the decoder's first token of encoder-decoder models


@dataclass(frozen=True)
class Family:
    """One family: how its configuration differs from the common one, and what an executor meets in it.

    ``interface``: every attention layer goes through ``ALL_ATTENTION_FUNCTIONS``. ``recurrent``: some layers
    keep a state that cannot be cut (Mamba, linear attention, short convolutions). ``windows``: some layers
    see only the last ``WINDOW`` tokens. ``encoder_decoder``: needs encoder tokens.
    """

    name: str
    model_type: str
    settings: dict[str, Any] = field(default_factory=dict)
    interface: bool = True
    recurrent: bool = False
    windows: bool = False
    encoder_decoder: bool = False
    common: bool = True  # takes the names of COMMON
    scale: float = 0.25  # standard deviation of matrices
    embedding: float = 1.0  # further factor of the token embedding: a large one in a tied head repeats tokens

    @property
    def seed(self) -> int:
        """Of the weights."""
        return SEEDS.get(self.name, 0)

    def config(self) -> Any:
        """The configuration, as the library validates it."""
        tokens = {"vocab_size": VOCABULARY, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
        common = COMMON if self.common else {}
        if self.encoder_decoder:
            common = {**common, "decoder_start_token_id": START, "forced_eos_token_id": None}
        return transformers.CONFIG_MAPPING[self.model_type](**{**tokens, **common, **self.settings})

    def model(self) -> Any:
        """The model in evaluation mode, always with the same weights."""
        config = self.config()
        auto = transformers.AutoModelForSeq2SeqLM if self.encoder_decoder else transformers.AutoModelForCausalLM
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            model = auto.from_config(config, dtype=torch.float32).eval()
            self._spread(model)
        # Nothing that `generate` would add on its own: no end, no forced or suppressed token.
        settings = {"pad_token_id": 0, "use_cache": True}
        if self.encoder_decoder:
            settings["decoder_start_token_id"] = START
        model.generation_config = transformers.GenerationConfig(**settings)
        return model

    def build(self, directory: Path) -> Path:
        """Saves config.json, generation_config.json and model.safetensors into ``directory``."""
        directory.mkdir(parents=True, exist_ok=True)
        self.model().save_pretrained(directory)
        return directory

    def _spread(self, model: Any) -> None:
        """Random matrices as wide as `scale` says, uneven norms; what decides decay rates stays as the
        class initialised it, for a random one makes states explode, and so do fixed sinusoids."""
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if not parameter.requires_grad or any(part in name for part in KEPT):
                    continue
                if "conv" in name and parameter.ndim > 1:
                    parameter.normal_(0.0, 0.5)
                elif parameter.ndim > 1:
                    parameter.normal_(0.0, self.scale)
                elif name.endswith(("bias", "sinks")):
                    parameter.normal_(0.0, 0.1)
                elif "norm" in name or "ln_" in name:
                    parameter.add_(torch.empty_like(parameter).normal_(0.0, 0.2))
            model.get_input_embeddings().weight.mul_(self.embedding)


# Chosen so that greedy output is varied and never decided by nearly equal logits.
SEEDS = {
    **dict.fromkeys(("qwen2-windows", "phi", "cohere", "olmo", "granitemoe", "ernie4_5"), 1),
    **dict.fromkeys(("gpt2", "gpt-neox", "falcon-h1", "nemotron-h", "blenderbot"), 1),
    **dict.fromkeys(("qwen3", "qwen3-moe", "gemma", "seed-oss", "deepseek-v2", "gpt-oss", "gpt-neo"), 2),
    **dict.fromkeys(("qwen3-next", "lfm2-moe", "kimi-linear", "t5"), 2),
    **dict.fromkeys(("cohere2", "olmo2", "stablelm", "bart"), 3),
    **dict.fromkeys(("gemma3", "bloom", "falcon", "marian"), 4),
    **dict.fromkeys(("gemma2", "falcon-alibi", "umt5"), 5),
}
COMMON: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
}
# Decays, time steps and mixing coefficients: their ranges carry meaning.
KEPT = ("A_log", "dt_bias", "dt_proj", "time_", "recurrent_param", ".D", "router_bias", "e_score", "layer_scalar")
SLIDING = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
DELTA = {
    "head_dim": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
HYBRID = {"layer_types": ["linear_attention", "full_attention", "linear_attention"], "num_hidden_layers": 3}
LATENT = {
    "kv_lora_rank": 16,
    "q_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "n_group": 2,
    "topk_group": 1,
}
SSM = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
NEMOTRON = {
    "num_hidden_layers": 3,
    "layers_block_type": ["linear_attention", "full_attention", "moe"],
    "head_dim": 8,
    "ssm_state_size": 8,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "n_groups": 2,
    "chunk_size": 16,
    "n_routed_experts": 4,
    "moe_intermediate_size": 24,
    "moe_shared_expert_intermediate_size": 24,
}
BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": CONTEXT,
    "dropout": 0.0,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0}
BLOOM = {"hidden_size": 32, "n_layer": 2, "n_head": 4}
GPT = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}


def _plain() -> list[Family]:
    """Decoders whose layers all go through the attention interface."""
    return [
        Family("llama", "llama"),
        Family("mistral", "mistral", {"sliding_window": WINDOW}, windows=True),
        Family("ministral", "ministral", {"sliding_window": WINDOW, "head_dim": 8}, windows=True),
        Family("qwen2", "qwen2"),
        Family("qwen2-windows", "qwen2", {**SLIDING, "use_sliding_window": True}, windows=True),
        Family("qwen3", "qwen3", {"head_dim": 8}),
        Family("qwen2-moe", "qwen2_moe", {**QWEN_EXPERTS, "shared_expert_intermediate_size": 24}),
        Family("qwen3-moe", "qwen3_moe", {**QWEN_EXPERTS, "head_dim": 8}),
        Family("gemma", "gemma", {"head_dim": 8}, embedding=0.1, scale=0.4),
        Family(
            "gemma2",
            "gemma2",
            {**SLIDING, "head_dim": 8, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 1.0},
            windows=True,
            embedding=0.1,
        ),
        Family("gemma3", "gemma3_text", {**SLIDING, "head_dim": 8}, windows=True, embedding=0.1),
        Family("gpt-oss", "gpt_oss", {**SLIDING, **EXPERTS, "head_dim": 8, "rope_parameters": YARN}, windows=True),
        Family("phi", "phi", {"num_key_value_heads": 4}, scale=0.4),
        Family("phi3", "phi3", {"sliding_window": WINDOW}, windows=True),
        Family("cohere", "cohere", {"logit_scale": 0.5}),
        Family("cohere2", "cohere2", {**SLIDING, "head_dim": 8, "logit_scale": 0.5}, windows=True),
        Family("olmo", "olmo"),
        Family("olmo2", "olmo2"),
        Family("olmo3", "olmo3", SLIDING, windows=True),
        Family("olmoe", "olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
        Family("starcoder2", "starcoder2", {"sliding_window": WINDOW}, windows=True, scale=0.4, embedding=0.5),
        Family("granite", "granite", {"attention_multiplier": 0.3, "residual_multiplier": 0.8}),
        Family("granitemoe", "granitemoe", EXPERTS),
        Family("mixtral", "mixtral", EXPERTS),
        Family("stablelm", "stablelm"),
        Family("smollm3", "smollm3", {"no_rope_layers": [1, 0]}),
        Family("glm4", "glm4", {"head_dim": 8}),
        Family("exaone4", "exaone4", {**SLIDING, "head_dim": 8}, windows=True),
        Family("ernie4_5", "ernie4_5", {"head_dim": 8}),
        Family("seed-oss", "seed_oss", {"head_dim": 8}),
        Family("deepseek-v2", "deepseek_v2", {**LATENT, "topk_method": "group_limited_greedy"}),
        Family("deepseek-v3", "deepseek_v3", LATENT),
        Family("gpt2", "gpt2", GPT, common=False, scale=0.4, embedding=0.5),
        Family(
            "llama4",
            "llama4_text",
            {
                **EXPERTS,
                "head_dim": 8,
                "attention_chunk_size": WINDOW,
                "intermediate_size_mlp": 48,
                "interleave_moe_layer_step": 2,
                "no_rope_layers": [1, 0],
            },
            windows=True,
        ),
        Family("gpt-neox", "gpt_neox"),
        Family("gpt-bigcode", "gpt_bigcode", GPT, common=False, scale=0.4, embedding=0.5),
        Family("opt", "opt", {"ffn_dim": 48, "dropout": 0.0, "word_embed_proj_dim": 32}, scale=0.4, embedding=0.5),
    ]


def _older() -> list[Family]:
    """Decoders that compute attention on their own, or share keys and values between layers."""
    return [
        Family("gptj", "gptj", {**GPT, "rotary_dim": 4}, common=False),
        Family("codegen", "codegen", {**GPT, "rotary_dim": 4}, common=False),
        Family(
            "gpt-neo",
            "gpt_neo",
            {
                "hidden_size": 32,
                "num_layers": 2,
                "num_heads": 4,
                "attention_types": [[["global", "local"], 1]],
                "window_size": WINDOW,
                "max_position_embeddings": CONTEXT,
            },
            interface=False,
            windows=True,
            common=False,
        ),
        Family("bloom", "bloom", BLOOM, interface=False, common=False, scale=0.4, embedding=0.5),
        Family("falcon", "falcon", interface=False, scale=0.4, embedding=0.5),
        Family("falcon-alibi", "falcon", {"alibi": True, "multi_query": False}, interface=False, scale=0.4),
        Family(
            "mpt",
            "mpt",
            {"d_model": 32, "n_heads": 4, "n_layers": 2, "max_seq_len": CONTEXT},
            interface=False,
            common=False,
        ),
        Family(
            "gemma3n",
            "gemma3n_text",
            {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": WINDOW,
                "head_dim": 8,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCABULARY,
                "hidden_size_per_layer_input": 8,
                "laurel_rank": 8,
                "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
            },
            windows=True,
        ),
        Family(
            "gemma4",
            "gemma4_text",
            {
                "num_hidden_layers": 4,
                "layer_types": ["sliding_attention", "full_attention"] * 2,
                "sliding_window": WINDOW,
                "head_dim": 8,
                "global_head_dim": 16,
                "num_kv_shared_layers": 2,
                "vocab_size_per_layer_input": VOCABULARY,
                "hidden_size_per_layer_input": 8,
            },
            windows=True,
            embedding=0.2,
        ),
    ]


def _recurrent() -> list[Family]:
    """Models with states: Mamba, gated delta rule, short convolutions, linear recurrences."""
    mamba = {"hidden_size": 32, "state_size": 8, "num_hidden_layers": 2, "expand": 2}
    mamba2 = {**mamba, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16}
    wide: dict[str, Any] = {"recurrent": True}
    return [
        Family("mamba", "mamba", mamba, interface=False, common=False, **wide),
        Family("falcon-mamba", "falcon_mamba", mamba, interface=False, common=False, **wide),
        Family("mamba2", "mamba2", mamba2, interface=False, common=False, **wide),
        Family(
            "qwen3-next",
            "qwen3_next",
            {**QWEN_EXPERTS, **DELTA, **HYBRID, "shared_expert_intermediate_size": 24},
            **wide,
        ),
        Family("qwen3.5", "qwen3_5_text", {**DELTA, **HYBRID}, **wide),
        Family(
            "falcon-h1",
            "falcon_h1",
            {**SSM, "mamba_d_ssm": 64},
            **wide,
        ),
        Family("bamba", "bamba", {**SSM, "attn_layer_indices": [1], "num_hidden_layers": 3}, **wide),
        Family(
            "granitemoehybrid",
            "granitemoehybrid",
            {**SSM, **EXPERTS, **HYBRID, "shared_intermediate_size": 24, "attention_multiplier": 0.3},
            **wide,
        ),
        Family(
            "jamba",
            "jamba",
            {
                "num_hidden_layers": 4,
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "num_experts": 2,
                "mamba_d_state": 8,
                "mamba_dt_rank": 4,
            },
            **wide,
        ),
        Family(
            "zamba2",
            "zamba2",
            {
                "num_hidden_layers": 4,
                "layers_block_type": ["linear_attention", "hybrid", "linear_attention", "hybrid"],
                "num_key_value_heads": 4,
                "mamba_d_state": 8,
                "n_mamba_heads": 8,
                "mamba_headdim": 8,
                "chunk_size": 16,
                "use_mem_rope": True,
            },
            **wide,
        ),
        Family("lfm2", "lfm2", HYBRID | {"layer_types": ["conv", "full_attention", "conv"]}, **wide),
        Family(
            "recurrent-gemma",
            "recurrent_gemma",
            {"num_hidden_layers": 3, "attention_window_size": WINDOW, "lru_width": 32},
            windows=True,
            embedding=0.1,
            **wide,
        ),
        Family(
            "qwen3.5-moe",
            "qwen3_5_moe_text",
            {**QWEN_EXPERTS, **DELTA, **HYBRID, "shared_expert_intermediate_size": 24},
            **wide,
        ),
        Family(
            "lfm2-moe",
            "lfm2_moe",
            {
                "num_hidden_layers": 3,
                "layer_types": ["conv", "full_attention", "conv"],
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 24,
                "num_dense_layers": 1,
            },
            **wide,
        ),
        Family(
            "kimi-linear",
            "kimi_linear",
            {
                **LATENT,
                **HYBRID,
                "q_lora_rank": None,
                "linear_head_dim": 8,
                "linear_num_heads": 4,
                "num_local_experts": 4,
            },
            **wide,
        ),
        Family(
            "rwkv",
            "rwkv",
            {"hidden_size": 32, "num_hidden_layers": 2, "context_length": CONTEXT},
            interface=False,
            common=False,
            **wide,
        ),
        Family("olmo-hybrid", "olmo_hybrid", HYBRID, **wide),
        Family(
            "minimax",
            "minimax",
            {**EXPERTS, "head_dim": 8, "block_size": 16, "layer_types": ["linear_attention", "full_attention"]},
            **wide,
        ),
        Family("nemotron-h", "nemotron_h", NEMOTRON, **wide),
    ]


def _encoder_decoders() -> list[Family]:
    """Models with an encoder; T5 adds relative positions to its scores."""
    pair: dict[str, Any] = {"encoder_decoder": True, "common": False, "embedding": 0.3}
    return [
        Family("t5", "t5", T5, scale=0.5, **pair),
        Family("t5-gated", "t5", {**T5, "feed_forward_proj": "gated-gelu"}, scale=0.5, **pair),
        Family("umt5", "umt5", T5, scale=0.5, **pair),
        Family("bart", "bart", BART, scale=0.5, **pair),
        Family("mbart", "mbart", BART, scale=0.5, **pair),
        Family("pegasus", "pegasus", BART, scale=0.5, **pair),
        Family("marian", "marian", BART, scale=1.0, **pair),
        Family("m2m-100", "m2m_100", BART, scale=1.0, **pair),
        Family("blenderbot", "blenderbot", BART, scale=0.5, **pair),
    ]


FAMILIES: dict[str, Family] = {
    family.name: family for family in (*_plain(), *_older(), *_recurrent(), *_encoder_decoders())
}


def model(name: str) -> Any:
    """The model of a family by name."""
    return FAMILIES[name].model()


def build(name: str, directory: Path) -> Path:
    """Saves the model of a family into ``directory``."""
    return FAMILIES[name].build(directory)
