"""What must be quick, light and free of heavy imports, measured on a process of its own."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

LAYERS, HIDDEN, FFN, KV, VOCAB, SHARDS = 80, 8192, 28672, 1024, 128256, 30
HEAVY = ("torch", "transformers", "onnxruntime", "openvino", "numpy", "onnx", "gguf", "sentence_transformers")

# Runs a statement, then prints CPU seconds since the interpreter started, the peak resident memory
# in MiB (VmHWM of /proc: ru_maxrss would count the parent's memory before exec) and heavy modules.
MEASURE = """
import sys, json, resource
sys.argv = ["turnout", *json.loads({arguments!r})]
try:
    from turnout.cli import main
    main()
except SystemExit as end:
    code = end.code
usage = resource.getrusage(resource.RUSAGE_SELF)
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({{"cpu": usage.ru_utime + usage.ru_stime, "mib": peak / 1024, "code": code or 0,
                  "heavy": [m for m in {heavy!r} if m in sys.modules]}}), file=sys.stderr)
"""


def measure(*arguments: str) -> dict[str, float]:
    """Best of five runs of ``turnout ARGUMENTS`` (CPU seconds, MiB, exit code, heavy modules)."""
    runs = []
    for _ in range(5):
        source = MEASURE.format(arguments=json.dumps(arguments), heavy=HEAVY)
        done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        runs.append(json.loads(done.stderr.splitlines()[-1]))
    return min(runs, key=lambda run: run["cpu"])


# A fixed piece of work, and the CPU seconds it took on the quiet machine on which the limits were set. One and
# the same program was seen to take 0.26 and 0.31 s there within hours: a busy host is no slower code.
WORK = """
import json, resource
text = json.dumps({str(i): {"dtype": "BF16", "shape": [8192, i], "data_offsets": [i, i + 1]} for i in range(4000)})
for _ in range(12):
    json.loads(text)
usage = resource.getrusage(resource.RUSAGE_SELF)
print(usage.ru_utime + usage.ru_stime)
"""
QUIET_S = 0.08


def slowness() -> float:
    """How much slower this machine is at the moment than the one the limits are for; at least 1."""
    runs = [subprocess.run([sys.executable, "-c", WORK], capture_output=True, text=True, timeout=60) for _ in range(5)]
    return max(1.0, min(float(run.stdout) for run in runs) / QUIET_S)


def llama_70b(directory: Path) -> Path:
    """A directory of the shape of Llama-3-70B in bfloat16: real headers and index, sparse files."""
    tensors = {
        "model.embed_tokens.weight": [VOCAB, HIDDEN],
        "model.norm.weight": [HIDDEN],
        "lm_head.weight": [VOCAB, HIDDEN],
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = [HIDDEN]
        for name, shape in {
            "q_proj": [HIDDEN, HIDDEN],
            "k_proj": [KV, HIDDEN],
            "v_proj": [KV, HIDDEN],
            "o_proj": [HIDDEN, HIDDEN],
        }.items():
            tensors[f"{prefix}self_attn.{name}.weight"] = shape
        for name, shape in {"gate_proj": [FFN, HIDDEN], "up_proj": [FFN, HIDDEN], "down_proj": [HIDDEN, FFN]}.items():
            tensors[f"{prefix}mlp.{name}.weight"] = shape
    directory.mkdir()
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05d}-of-{SHARDS:05d}.safetensors"
        header, offset = {}, 0
        for name in names[shard::SHARDS]:
            size = 2
            for dim in tensors[name]:
                size *= dim
            header[name] = {"dtype": "BF16", "shape": tensors[name], "data_offsets": [offset, offset + size]}
            offset += size
            weight_map[name] = file
        text = json.dumps(header).encode()
        with open(directory / file, "wb") as stream:
            stream.write(struct.pack("<Q", len(text)) + text)
            stream.truncate(8 + len(text) + offset)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "config.json").write_text(
        json.dumps(
            {
                "architectures": ["LlamaForCausalLM"],
                "model_type": "llama",
                "hidden_size": HIDDEN,
                "num_hidden_layers": LAYERS,
                "num_attention_heads": 64,
                "num_key_value_heads": 8,
                "intermediate_size": FFN,
                "vocab_size": VOCAB,
                "max_position_embeddings": 8192,
                "torch_dtype": "bfloat16",
                "tie_word_embeddings": False,
            }
        )
    )
    return directory


def test_help_costs_little_and_imports_nothing_heavy() -> None:
    run = measure("--help")
    assert run["code"] == 0 and run["heavy"] == []
    assert run["cpu"] < 0.2 * slowness()


def test_a_70b_package_is_inspected_from_its_headers(tmp_path: Path) -> None:
    directory = llama_70b(tmp_path / "llama-70b")
    run = measure("inspect", str(directory), "--json")
    assert run["code"] == 0 and run["heavy"] == []
    assert run["cpu"] < 0.3 * slowness()
    assert run["mib"] < 100
    from turnout.package.inspect import inspect

    artifact = inspect(directory).artifacts[0]
    assert artifact.tensors.param_count == 70_553_706_496  # Llama-3-70B's published count
    assert not artifact.findings


def test_a_gguf_of_262144_tokens_is_inspected_in_half_a_second() -> None:
    from turnout.package.store import resolve

    path = resolve("gemma3-270m").path
    run = measure("inspect", str(path), "--json")
    assert run["code"] == 0 and run["heavy"] == []
    assert run["cpu"] < 0.5 * slowness()
    from turnout.package.inspect import inspect

    artifact = inspect(path).artifacts[0]
    assert artifact.tokenizer is not None and artifact.tokenizer.vocab_size == 262_144
