"""Packages made to hurt: none runs, none hangs, none takes over 200 MB, each is named.

Every one is inspected in a process of its own, whose peak memory and time are measured there.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

HUGE = 1 << 60
INSPECT = """
import json, sys, time
from turnout.package.inspect import inspect
started = time.perf_counter()
package = inspect(sys.argv[1])
seconds = time.perf_counter() - started
peak = next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024
found = [[f.code, f.severity, f.message] for f in package.all_findings()]
found += [[f.code, f.severity, f.message] for a in package.artifacts for f in a.tensors.problems]
print(json.dumps({"seconds": seconds, "mib": peak, "found": found}))
"""


def inspected(path: Path) -> dict[str, Any]:
    """Codes found by inspecting ``path``, with the seconds and peak MiB that it took."""
    done = subprocess.run([sys.executable, "-c", INSPECT, str(path)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr[-2000:]
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def write(directory: Path, files: dict[str, bytes | str | dict[str, Any]]) -> Path:
    for name, content in files.items():
        target = directory / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, dict):
            content = json.dumps(content)
        target.write_bytes(content.encode() if isinstance(content, str) else content)
    return directory


def safetensors(tensors: dict[str, list[int]], raw_header: bytes | None = None) -> bytes:
    header, offset = {}, 0
    for name, shape in tensors.items():
        size = 4
        for dim in shape:
            size *= dim
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = raw_header if raw_header is not None else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(offset)


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "vocab_size": 8,
    "intermediate_size": 8,
}
GOOD = safetensors({"model.embed_tokens.weight": [8, 8]})


class Evil:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/turnout-was-here",)


def torch_zip(data: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", data)
        archive.writestr("archive/version", "3\n")
    return buffer.getvalue()


def bomb(directory: Path, name: str, member: str, extra: dict[str, str]) -> Path:
    """A zip whose ``member`` holds 1 GiB of zeros in a megabyte."""
    with zipfile.ZipFile(directory / name, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open(member, "w", force_zip64=True) as stream:
            block = bytes(1 << 20)
            for _ in range(1024):
                stream.write(block)
        for other, text in extra.items():
            archive.writestr(other, text)
    return directory


def gguf(tensors: int, keys: int, body: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, keys) + body


def gguf_string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def templated(template: str) -> Callable[[Path], Path]:
    return lambda directory: write(
        directory, {"config.json": LLAMA, "model.safetensors": GOOD, "chat_template.jinja": template}
    )


def linked(directory: Path) -> Path:
    write(directory, {"config.json": LLAMA})
    (directory / "model.safetensors").symlink_to("/etc/hostname")
    return directory


def pipe(directory: Path) -> Path:
    write(directory, {"model.safetensors": GOOD})
    os.mkfifo(directory / "config.json")
    return directory


def loop(directory: Path) -> Path:
    write(directory, {"config.json": LLAMA, "model.safetensors": GOOD})
    (directory / "again").symlink_to(directory, target_is_directory=True)
    return directory


def onnx_outside(directory: Path) -> Path:
    import onnx
    from onnx import TensorProto, helper

    weight = TensorProto(name="w", data_type=TensorProto.FLOAT, dims=[2, 2], data_location=TensorProto.EXTERNAL)
    for key, value in {"location": "../../etc/hostname", "offset": "0", "length": "16"}.items():
        weight.external_data.add(key=key, value=value)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"])],
        "g",
        [helper.make_tensor_value_info("x", 1, [1, 2])],
        [helper.make_tensor_value_info("y", 1, [1, 2])],
        [weight],
    )
    (directory / "model.onnx").write_bytes(helper.make_model(graph).SerializeToString())
    assert onnx.__version__
    return directory


LAUGHS = (
    """<?xml version="1.0"?><!DOCTYPE net [<!ENTITY a "aaaaaaaaaa">"""
    + "".join(f'<!ENTITY {chr(98 + i)} "{("&" + chr(97 + i) + ";") * 10}">' for i in range(9))
    + """]><net name="&j;" version="11"></net>"""
)

Build = Callable[[Path], Path]
HOSTILE: dict[str, tuple[Build, str]] = {
    "index-outside": (
        lambda d: write(
            d,
            {
                "config.json": LLAMA,
                "model.safetensors.index.json": {"weight_map": {"model.embed_tokens.weight": "../outside.safetensors"}},
            },
        ),
        "artifact.path_escape",
    ),
    "index-absolute": (
        lambda d: write(
            d, {"config.json": LLAMA, "model.safetensors.index.json": {"weight_map": {"a": "/etc/hostname"}}}
        ),
        "artifact.path_escape",
    ),
    "link-outside": (linked, "artifact.path_escape"),
    "onnx-data-outside": (onnx_outside, "artifact.path_escape"),
    "skops-bomb": (lambda d: bomb(d, "m.skops", "schema.json", {}), "artifact.corrupt"),
    "torch-bomb": (lambda d: bomb(d, "m.pt", "archive/data.pkl", {"archive/version": "3"}), "artifact.corrupt"),
    "safetensors-header": (
        lambda d: write(d, {"config.json": LLAMA, "model.safetensors": struct.pack("<Q", HUGE) + b"{}"}),
        "artifact.",
    ),
    "safetensors-shape": (
        lambda d: write(
            d,
            {
                "config.json": LLAMA,
                "model.safetensors": safetensors(
                    {}, json.dumps({"a": {"dtype": "F32", "shape": [HUGE, HUGE], "data_offsets": [0, 4]}}).encode()
                ),
            },
        ),
        "artifact.",
    ),
    "safetensors-negative": (
        lambda d: write(
            d,
            {
                "config.json": LLAMA,
                "model.safetensors": safetensors(
                    {}, json.dumps({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [-4, 0]}}).encode()
                ),
            },
        ),
        "artifact.",
    ),
    "gguf-tensors": (lambda d: write(d, {"m.gguf": gguf(HUGE, 0)}), "artifact."),
    "gguf-keys": (lambda d: write(d, {"m.gguf": gguf(0, HUGE)}), "artifact."),
    "gguf-array": (
        lambda d: write(
            d, {"m.gguf": gguf(0, 1, gguf_string("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, HUGE))}
        ),
        "artifact.",
    ),
    "gguf-nested-arrays": (
        lambda d: write(
            d, {"m.gguf": gguf(0, 1, gguf_string("a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000)}
        ),
        "artifact.",
    ),
    "gguf-string": (lambda d: write(d, {"m.gguf": gguf(0, 1, struct.pack("<Q", HUGE) + b"a")}), "artifact."),
    "json-deep": (
        lambda d: write(d, {"config.json": '{"a":' + "[" * 100_000 + "]" * 100_000 + "}", "model.safetensors": GOOD}),
        "config.invalid",
    ),
    "json-repeated": (
        lambda d: write(d, {"config.json": '{"model_type":"llama","model_type":"bert"}', "model.safetensors": GOOD}),
        "config.invalid",
    ),
    "template-range": (templated("{% for i in range(1000000000) %}x{% endfor %}"), "template."),
    "template-nested-loops": (
        templated(
            "{% for a in range(9999) %}{% for b in range(9999) %}{% for c in range(9999) %}" + "{% endfor %}" * 3
        ),
        "template.",
    ),
    "template-attributes": (templated("{{ ''.__class__.__mro__[1].__subclasses__() }}"), "template.unsafe"),
    "template-attribute-filter": (templated("{{ messages|attr('__class__') }}"), "template.unsafe"),
    "template-repeated-text": (templated("{{ 'a' * 10000000000 }}"), "template."),
    "template-power": (templated("{{ 9 ** 9 ** 9 ** 9 }}"), "template."),
    "template-padding": (templated("{{ 'a'|center(3000000000) }}"), "template."),
    "template-recursion": (templated("{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}"), "template."),
    "template-doubling": (
        templated("{% set n = namespace(s='aaaaaaaaaa') %}" + "{% set n.s = n.s ~ n.s %}" * 60 + "{{ n.s }}"),
        "template.",
    ),
    "pickle-bin": (
        lambda d: write(d, {"config.json": LLAMA, "pytorch_model.bin": torch_zip(pickle.dumps(Evil()))}),
        "code.pickle_unsafe",
    ),
    "pickle-pt": (lambda d: write(d, {"m.pt": torch_zip(pickle.dumps({"w": Evil()}))}), "code.pickle_unsafe"),
    "pickle-legacy": (lambda d: write(d, {"m.pth": pickle.dumps(Evil(), protocol=2)}), "code.pickle_unsafe"),
    "pickle-pkl": (lambda d: write(d, {"m.pkl": pickle.dumps(Evil())}), "code.pickle_unsafe"),
    "pickle-joblib": (lambda d: write(d, {"m.joblib": pickle.dumps(Evil())}), "code.pickle_unsafe"),
    "xml-laughs": (lambda d: write(d, {"openvino_model.xml": LAUGHS, "openvino_model.bin": b"x"}), "artifact."),
    "xml-deep": (
        lambda d: write(d, {"openvino_model.xml": "<net>" * 200_000, "openvino_model.bin": b"x"}),
        "artifact.",
    ),
    "ubj-count": (
        lambda d: write(d, {"m.ubj": b"{L" + struct.pack(">q", 7) + b"learner{L" + struct.pack(">q", HUGE)}),
        "artifact.",
    ),
    "ubj-deep": (
        lambda d: write(d, {"m.ubj": b"{L" + struct.pack(">q", 7) + b"learner" + b"[" * 100_000}),
        "artifact.",
    ),
    "protobuf-length": (
        lambda d: write(d, {"m.onnx": b"\x08\x08\x3a\xff\xff\xff\xff\xff\xff\xff\x7f" + bytes(40)}),
        "artifact.",
    ),
    "tflite-offsets": (
        lambda d: write(d, {"m.tflite": struct.pack("<I", 0xFFFFFFF0) + b"TFL3" + bytes(64)}),
        "artifact.",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_named_in_bounded_time_and_memory(name: str, tmp_path: Path) -> None:
    build, code = HOSTILE[name]
    root = tmp_path / "a" / "package"
    root.mkdir(parents=True)
    result = inspected(build(root))
    refusing = [found for found in result["found"] if found[1] in ("error", "fatal")]
    assert any(found[0].startswith(code) for found in refusing), result["found"]
    assert not any("reader gave up" in found[2] for found in refusing), refusing
    assert result["mib"] < 200
    assert result["seconds"] < 5
    assert not Path("/tmp/turnout-was-here").exists()


@pytest.mark.parametrize("build", [pipe, loop])
def test_odd_files_do_not_hang(build: Build, tmp_path: Path) -> None:
    result = inspected(build(tmp_path))
    assert result["seconds"] < 5 and result["mib"] < 200


@pytest.mark.slow
def test_package_code_is_never_imported(tmp_path: Path, judge) -> None:  # type: ignore[no-untyped-def]
    """Checked and run on every backend, custom code of a package stays text."""
    from turnout.backends.base import VerdictStatus
    from turnout.worker.judge import check

    marker = tmp_path / "ran"
    code = f"open({str(marker)!r}, 'w').close()\nclass M: pass\n"
    root = write(
        tmp_path / "p",
        {
            "config.json": LLAMA
            | {
                "model_type": "unheard",
                "architectures": ["M"],
                "auto_map": {"AutoConfig": "modeling_m.M", "AutoModelForCausalLM": "modeling_m.M"},
            },
            "modeling_m.py": code,
            "configuration_m.py": code,
            "tokenization_m.py": code,
            "custom_generate/generate.py": code,
            "tokenizer_config.json": {"auto_map": {"AutoTokenizer": ["tokenization_m.M", None]}},
            "model.safetensors": GOOD,
        },
    )
    report = check(str(root), "text-generation", execute=True, judge=judge)
    assert all(v.status is not VerdictStatus.SUPPORTED for v in report.verdicts)
    assert any(r.code == "code.required" for v in report.verdicts if v.backend == "transformers" for r in v.reasons)
    assert not marker.exists()
