"""Ten thousand mutated real files: inspection describes each and never crashes, hangs or gives up."""

from __future__ import annotations

import io
import json
import struct
import time
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.shapes import bundles, classical, ggufs, graphs, hf

from turnout.package.facts import Package
from turnout.package.inspect import inspect
from turnout.package.store import resolve
from turnout.worker.wire import encode

EXAMPLES = 520  # of each of the twenty seeds
EXTREMES = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0x80000000,
    0xFFFFFFFF,
    1 << 60,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
]
MODULES = json.dumps(
    [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    ]
).encode()
# What stands in place of a JSON value: another type, out of range, a way out, half a character.
ODD: list[Any] = [
    *(None, True, -1, 1 << 70, 1e308, "", "x", [], {}, [[]], {"a": 1}, [None], "../x", "/etc/passwd", "\ud800", 0.5),
]


def seeds(folder: Path) -> dict[str, tuple[str, bytes, dict[str, bytes]]]:
    """Name to (file name, content, files beside it)."""
    llama = hf.llama(folder / "llama")
    config = (llama / "config.json").read_bytes()
    weights = (llama / "model.safetensors").read_bytes()
    tokenizer = (llama / "tokenizer.json").read_bytes()
    ir = graphs.ir(folder / "ir")
    flite = min(resolve("mediapipe").path.rglob("*.tflite"), key=lambda p: p.stat().st_size).read_bytes()
    torch_file = hf.torch_checkpoint(folder / "torch", hostile=False) / "pytorch_model.bin"
    ct2 = classical.ct2_decoder(folder / "ct2")
    shards, bundle = hf.sharded(folder / "shards"), bundles.diffusion(folder / "bundle")
    return {
        "safetensors": ("model.safetensors", weights, {"config.json": config}),
        "config": ("config.json", config, {"model.safetensors": weights}),
        "tokenizer": ("tokenizer.json", tokenizer, {"config.json": config, "model.safetensors": weights}),
        "template": (
            "chat_template.jinja",
            hf.TEMPLATE.encode() * 3,
            {"config.json": config, "model.safetensors": weights},
        ),
        "gguf": ("m.gguf", ggufs.write_gguf(folder / "m.gguf").read_bytes(), {}),
        "onnx": ("m.onnx", graphs.mlp(folder / "m.onnx").read_bytes(), {}),
        "external": ("model.onnx", graphs.external(folder / "ext").read_bytes(), {"weights.bin": graphs.W1.tobytes()}),
        "openvino": ("m.xml", ir.read_bytes(), {"m.bin": ir.with_suffix(".bin").read_bytes()}),
        "tflite": ("m.tflite", flite, {}),
        "torch": ("m.pt", torch_file.read_bytes(), {}),
        "pickle": ("m.pkl", classical.pickled_booster(folder / "m.pkl").read_bytes(), {}),
        "ubj": ("m.ubj", classical.booster(folder / "m.ubj").read_bytes(), {}),
        "json": ("m.json", classical.booster(folder / "m.json").read_bytes(), {}),
        "legacy": ("m.pth", legacy(folder / "m.pth"), {}),
        "index": (
            "model.safetensors.index.json",
            (shards / "model.safetensors.index.json").read_bytes(),
            beside(shards),
        ),
        "bundle": ("model_index.json", (bundle / "model_index.json").read_bytes(), beside(bundle)),
        "modules": ("modules.json", MODULES, {"config.json": config, "model.safetensors": weights}),
        "pieces": ("tokenizer.model", pieces(folder / "pieces"), {"config.json": config, "model.safetensors": weights}),
        "skops": ("m.skops", classical.skops(folder / "m.skops", True).read_bytes(), {}),
        "ctranslate2": (
            "model.bin",
            (ct2 / "model.bin").read_bytes(),
            {"config.json": (ct2 / "config.json").read_bytes()},
        ),
    }


def beside(folder: Path) -> dict[str, bytes]:
    """Other files of a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def legacy(path: Path) -> bytes:
    """A file as torch wrote it before 1.6."""
    torch.save({"w": torch.zeros(4, 4)}, path, _use_new_zipfile_serialization=False)
    return path.read_bytes()


def pieces(prefix: Path) -> bytes:
    """A sentencepiece model of forty pieces."""
    text = [" ".join(f"{a}{b}{c}" for a in "abc" for b in "def" for c in "ghi")]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text * 20), model_prefix=str(prefix), vocab_size=40, hard_vocab_limit=False,
        minloglevel=2, num_threads=1,
    )  # fmt: skip
    return prefix.with_suffix(".model").read_bytes()


NAMES = (
    *("safetensors", "index", "config", "tokenizer", "pieces", "template", "modules", "bundle", "gguf"),
    *("onnx", "external", "openvino", "tflite", "torch", "legacy", "pickle", "json", "ubj", "skops", "ctranslate2"),
)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, bytes, dict[str, bytes]]]:
    return seeds(tmp_path_factory.mktemp("seeds"))


@st.composite
def edits(draw: st.DrawFn) -> list[tuple[str, float, int, bytes]]:
    """Up to four edits: kind, place as a share of the length, a number, some bytes."""
    names = ["flip", "cut", "insert", "delete", "repeat", "number32", "number64", "value", "value", "value", "member"]
    kinds = st.sampled_from(names)
    return draw(
        st.lists(
            st.tuples(kinds, st.floats(0, 1), st.sampled_from(EXTREMES), st.binary(max_size=12)), min_size=1, max_size=4
        )
    )


def replace_value(data: bytes, place: float, number: int) -> bytes:
    """A JSON document with one value replaced; other bytes stay."""
    try:
        document = json.loads(data)
    except ValueError:
        return data
    slots: list[tuple[Any, Any]] = []
    waiting = [document]
    while waiting:
        item = waiting.pop(0)
        keys = item if isinstance(item, dict) else range(len(item))
        # Of a long list (a vocabulary) the first values stand for all.
        for key in list(keys)[:40]:
            slots.append((item, key))
            if isinstance(item[key], dict | list):
                waiting.append(item[key])
    if slots:
        item, key = slots[int(place * (len(slots) - 1))]
        item[key] = ODD[number % len(ODD)]
    return json.dumps(document).encode()


def mutate_member(data: bytes, place: float, number: int, extra: bytes) -> bytes:
    """A zip with one of its members changed and the sums made right again; other bytes stay."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            members = {name: archive.read(name) for name in archive.namelist()}
    except (zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, ValueError):
        return data
    chosen = next((n for n in members if n.endswith(("data.pkl", "schema.json"))), None)
    if chosen is None:
        return data
    kind = ["flip", "insert", "delete", "repeat", "number32", "value"][number % 6]
    members[chosen] = mutate(members[chosen], [(kind, place, number, extra)])
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return stream.getvalue()


def mutate(data: bytes, changes: list[tuple[str, float, int, bytes]]) -> bytes:
    """Applies edits; most fall into the first kilobyte, where headers are."""
    for kind, place, number, extra in changes:
        span = len(data) if place > 0.7 else min(len(data), 1024)
        at = int(place * span)
        if kind == "value":
            data = replace_value(data, place, number + sum(extra))
        elif kind == "member":
            data = mutate_member(data, place, number + sum(extra), extra)
        elif kind == "flip" and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ (1 << (number % 8))]) + data[at + 1 :]
        elif kind == "cut":
            data = data[:at]
        elif kind == "insert":
            data = data[:at] + extra + data[at:]
        elif kind == "delete":
            data = data[:at] + data[at + 1 + number % 64 :]
        elif kind == "repeat":
            data = data[:at] + data[at : at + 1 + number % 64] * 2 + data[at:]
        elif kind == "number32":
            data = data[:at] + struct.pack("<I", number & 0xFFFFFFFF) + data[at + 4 :]
        elif kind == "number64":
            data = data[:at] + struct.pack("<Q", number) + data[at + 8 :]
    return data


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_mutated_files_are_described(
    name: str, material: dict[str, tuple[str, bytes, dict[str, bytes]]], tmp_path: Path
) -> None:
    file, content, beside = material[name]
    for other, data in beside.items():
        (tmp_path / other).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / other).write_bytes(data)
    tried = 0

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(edits())
    def run(changes: list[tuple[str, float, int, bytes]]) -> None:
        nonlocal tried
        tried += 1
        (tmp_path / file).write_bytes(mutate(content, changes))
        started = time.perf_counter()
        package = inspect(tmp_path)
        assert time.perf_counter() - started < 2
        assert isinstance(package, Package) and package.artifacts
        assert not [f.message for f in package.all_findings() if "reader gave up" in f.message]
        encode(package)  # what goes to a worker: no half characters, no numbers beyond 64 bits

    run()
    assert tried >= EXAMPLES * 0.9
