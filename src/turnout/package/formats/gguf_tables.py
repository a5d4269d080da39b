"""Facts of the GGUF format as data: element types, architectures, file types, tensor names.

Source: ggml's gguf.md and the constants of the ``gguf`` distribution 0.19.
"""

from __future__ import annotations

# ggml type id -> (name, elements of a block, bytes of a block). Ids 4, 5, 31 to 33 and 36 to 38 were removed.
TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    9: ("Q8_1", 32, 40),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
    40: ("NVFP4", 64, 36),
    41: ("Q1_0", 128, 18),
}
BITS = {name: size * 8 / block for name, block, size in TYPES.values()}

FILE_TYPES: dict[int, str] = {
    0: "F32",
    1: "F16",
    2: "Q4_0",
    3: "Q4_1",
    7: "Q8_0",
    8: "Q5_0",
    9: "Q5_1",
    10: "Q2_K",
    11: "Q3_K_S",
    12: "Q3_K_M",
    13: "Q3_K_L",
    14: "Q4_K_S",
    15: "Q4_K_M",
    16: "Q5_K_S",
    17: "Q5_K_M",
    18: "Q6_K",
    19: "IQ2_XXS",
    20: "IQ2_XS",
    21: "Q2_K_S",
    22: "IQ3_XS",
    23: "IQ3_XXS",
    24: "IQ1_S",
    25: "IQ4_NL",
    26: "IQ3_S",
    27: "IQ3_M",
    28: "IQ2_S",
    29: "IQ2_M",
    30: "IQ4_XS",
    31: "IQ1_M",
    32: "BF16",
    36: "TQ1_0",
    37: "TQ2_0",
    38: "MXFP4_MOE",
    39: "NVFP4",
    40: "Q1_0",
}

# Names that the gguf distribution knows: a lower bound of what llama.cpp runs, and only a hint.
ARCHITECTURES = frozenset(
    """
    afmoe apertus arcee arctic arwkv7 baichuan bailingmoe bailingmoe2 bert bitnet bloom chameleon chatglm clip
    codeshell cogvlm cohere2 command-r dbrx deci deepseek deepseek2 deepseek2-ocr dots1 dream ernie4_5 ernie4_5-moe
    eurobert exaone exaone-moe exaone4 falcon falcon-h1 gemma gemma-embedding gemma2 gemma3 gemma3n gemma4 glm-dsa
    glm4 glm4moe gpt-oss gpt2 gptj gptneox granite granitehybrid granitemoe grok grovemoe hunyuan-dense hunyuan-moe
    hunyuan_vl internlm2 jais jais2 jamba jina-bert-v2 jina-bert-v3 kimi-linear lfm2 lfm2moe llada llada-moe llama
    llama-embed llama4 maincoder mamba mamba2 mimo2 minicpm minicpm3 minimax-m2 mistral3 mistral4 modern-bert mpt
    nemotron nemotron_h nemotron_h_moe neo-bert nomic-bert nomic-bert-moe olmo olmo2 olmoe openelm orion paddleocr
    pangu-embedded phi2 phi3 phimoe plamo plamo2 plamo3 plm qwen qwen2 qwen2moe qwen2vl qwen3 qwen35 qwen35moe
    qwen3moe qwen3next qwen3vl qwen3vlmoe refact rnd1 rwkv6 rwkv6qwen2 rwkv7 seed_oss smallthinker smollm3 stablelm
    starcoder starcoder2 step35 t5 t5encoder wavtokenizer-dec xverse
    """.split()  # noqa: SIM905 (a list of 126 lines reads worse)
)
ENCODERS = frozenset(
    {
        "bert",
        "nomic-bert",
        "nomic-bert-moe",
        "jina-bert-v2",
        "jina-bert-v3",
        "modern-bert",
        "neo-bert",
        "eurobert",
        "gemma-embedding",
        "llama-embed",
        "t5encoder",
    }
)

_LLAMA = ("attn_norm", "attn_q", "attn_k", "attn_v", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")
_QK_NORM = ("attn_q_norm", "attn_k_norm")
_POST = ("post_attention_norm", "post_ffw_norm")
# Weights of every block of a family, without the ending `.weight`; biases are never required here.
BLOCK_TENSORS: dict[str, tuple[str, ...]] = {
    "llama": _LLAMA,
    "mistral3": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA + _QK_NORM,
    "gemma": _LLAMA,
    "gemma2": _LLAMA + _POST,
    "gemma3": _LLAMA + _QK_NORM + _POST,
    "phi3": ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"),
    "gpt2": ("attn_norm", "attn_qkv", "attn_output", "ffn_norm", "ffn_up", "ffn_down"),
    "bert": (
        "attn_q",
        "attn_k",
        "attn_v",
        "attn_output",
        "attn_output_norm",
        "ffn_up",
        "ffn_down",
        "layer_output_norm",
    ),
}
_NO_OUTPUT_NORM = frozenset({"bert"})
_EXPERTS = {"ffn_gate": "ffn_gate_exps", "ffn_up": "ffn_up_exps", "ffn_down": "ffn_down_exps"}


def expected_tensors(architecture: str, blocks: int, experts: int = 0) -> list[str] | None:
    """Names of the weights that every model of the family holds, None for a family not in the table.

    ``output.weight`` is never among them: without it the head is tied to the token embedding.
    """
    names = BLOCK_TENSORS.get(architecture)
    if names is None or not 0 <= blocks <= 10_000:
        return None
    if experts:
        names = (*(_EXPERTS.get(n, n) for n in names), "ffn_gate_inp")
    first = ["token_embd.weight"] + ([] if architecture in _NO_OUTPUT_NORM else ["output_norm.weight"])
    return first + [f"blk.{block}.{name}.weight" for block in range(blocks) for name in names]
