"""Tokenizer facts against the libraries that wrote the files, and files that are not what they say."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models

from turnout.package.facts import ArtifactKind, CodeNeed, Finding, Tokenizer
from turnout.package.formats.tokenizer import read_tokenizer
from turnout.package.inspect import inspect
from turnout.package.scan import Scan

PIECES = ["<unk>", "a", "b", "ab", 'quo"te', "back\\", "\n", '"vocab": {"x": 9}', "é", "😀", "}", "]", "\\u0041"]
VOCABULARY = {piece: number for number, piece in enumerate(PIECES)}


def read(directory: Path) -> tuple[Tokenizer | None, list[Finding]]:
    findings: list[Finding] = []
    return read_tokenizer(Scan.of(directory), "", findings), findings


def found(directory: Path) -> Tokenizer:
    tokenizer, findings = read(directory)
    assert tokenizer is not None and findings == [], findings
    return tokenizer


def write(directory: Path, **files: Any) -> Path:
    for name, content in files.items():
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        (directory / name.replace("__", ".")).write_bytes(text)
    return directory


MODELS = {
    "BPE": lambda: models.BPE(VOCABULARY, [("a", "b")], unk_token="<unk>"),
    "WordPiece": lambda: models.WordPiece(VOCABULARY, unk_token="<unk>"),
    "WordLevel": lambda: models.WordLevel(VOCABULARY, unk_token="<unk>"),
    "Unigram": lambda: models.Unigram([(piece, -0.5 * n - 1e-5) for n, piece in enumerate(PIECES)], 0),
}


@pytest.mark.parametrize("pretty", [True, False])
@pytest.mark.parametrize("kind", MODELS)
def test_fast_tokenizers_of_every_model(kind: str, pretty: bool, tmp_path: Path) -> None:
    tokenizer = tokenizers.Tokenizer(MODELS[kind]())
    tokenizer.add_special_tokens(["<s>", "a", '"vocab":'])
    tokenizer.save(str(tmp_path / "tokenizer.json"), pretty=pretty)
    facts = found(tmp_path)
    assert facts.kind == kind
    assert facts.vocab_size == tokenizer.get_vocab_size()
    assert facts.max_id == max(tokenizer.get_vocab().values())


def test_merges_as_pairs_and_as_texts_and_ascii_escapes(tmp_path: Path) -> None:
    for merges in ([["a", "b"], ['"', "\\"]], ["a b", '" \\']):
        model = {"type": "BPE", "merges": merges, "vocab": VOCABULARY}
        write(tmp_path, tokenizer__json={"added_tokens": [{"id": 20, "content": "<x>"}], "model": model})
        facts = found(tmp_path)
        assert (facts.vocab_size, facts.max_id) == (len(PIECES) + 1, 20)


def test_odd_spellings_are_read_without_the_short_cut(tmp_path: Path) -> None:
    write(tmp_path, tokenizer__json={"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1.0}}})
    assert found(tmp_path).vocab_size == 2
    write(tmp_path, tokenizer__json={"vocab": {"decoy": 99}, "model": {"type": "BPE", "merges": [], "vocab": {"a": 3}}})
    assert found(tmp_path).max_id == 3


def test_a_large_tokenizer_costs_little(tmp_path: Path) -> None:
    generator = random.Random(0)
    vocabulary = {f"{generator.getrandbits(40):x}é{n}": n for n in range(150_000)}
    merges = [[f"{n:x}", "é"] for n in range(150_000)]
    text = json.dumps({"model": {"type": "BPE", "vocab": vocabulary, "merges": merges}}, ensure_ascii=False, indent=1)
    (tmp_path / "tokenizer.json").write_text(text, encoding="utf-8")
    started = time.process_time()
    facts = found(tmp_path)
    assert (facts.vocab_size, facts.max_id) == (150_000, 149_999)
    assert time.process_time() - started < 1.0  # 0.2 s here; a parse into objects takes 0.7 s and ten times the memory


def test_vocabulary_files(tmp_path: Path) -> None:
    for name, content, kind, size in (
        ("vocab.txt", b"[PAD]\n[UNK]\nlast", "wordpiece-vocab", 3),
        ("vocab.txt", b"[PAD]\n[UNK]\nlast\n", "wordpiece-vocab", 3),
        ("vocab.json", json.dumps({"<pad>": 0, "a": 1, "|": 2}).encode(), "ctc-vocab", 3),
        ("vocab.json", json.dumps({"eng": {"a": 0, "b": 1}, "deu": {"a": 0}}).encode(), "ctc-vocab", 2),
        ("x.tiktoken", b"YQ== 0\nYg== 1\n", "tiktoken", 2),
        ("tokenizer.model", b"YQ== 0\nYg== 1", "tiktoken", 2),
        (
            "tekken.json",
            json.dumps({"config": {"default_vocab_size": 50}, "vocab": [{"rank": 0}]}).encode(),
            "tekken",
            50,
        ),
    ):
        directory = tmp_path / f"{kind}-{len(content)}-{name}"
        directory.mkdir()
        (directory / name).write_bytes(content)
        facts = found(directory)
        assert (facts.kind, facts.vocab_size, facts.max_id) == (kind, size, size - 1)


def test_byte_pairs_need_their_merges(tmp_path: Path) -> None:
    write(tmp_path, vocab__json=VOCABULARY, merges__txt=b"#version\na b\n")
    facts = found(tmp_path)
    assert facts.kind == "bpe-vocab" and facts.files == ["vocab.json", "merges.txt"]


def test_sentencepiece(tmp_path: Path) -> None:
    # ModelProto: repeated SentencePiece pieces = 1 {string piece = 1; float score = 2}, TrainerSpec = 2
    piece = b"\x0a\x0a" + b"\x0a\x03abc" + b"\x15\0\0\0\0"
    (tmp_path / "tokenizer.model").write_bytes(piece * 5 + b"\x12\x02\x08\x01")
    assert (found(tmp_path).kind, found(tmp_path).vocab_size) == ("sentencepiece", 5)
    (tmp_path / "tokenizer.model").rename(tmp_path / "source.spm")
    write(tmp_path, vocab__json={"a": 0, "<pad>": 60})
    facts = found(tmp_path)
    assert (facts.kind, facts.max_id) == ("sentencepiece", 60) and "vocab.json" in facts.files


def test_configuration_adds_tokens_ends_and_sides(tmp_path: Path) -> None:
    write(
        tmp_path,
        vocab__txt=b"a\nb\n",
        tokenizer_config__json={
            "tokenizer_class": "BertTokenizer",
            "padding_side": "left",
            "model_max_length": 1e30,
            "eos_token": {"content": "</s>"},
            "added_tokens_decoder": {"7": {"content": "<x>"}, "²": {}, "9" * 30: {}},
            "auto_map": {"AutoTokenizer": ["tokenization_x.T", None]},
        },
        special_tokens_map__json={"pad_token": "<pad>"},
        added_tokens__json={"<y>": 9},
    )
    facts = found(tmp_path)
    assert (facts.max_id, facts.eos, facts.pad, facts.padding_side, facts.max_length) == (
        9,
        "</s>",
        "<pad>",
        "left",
        None,
    )
    assert facts.code is CodeNeed.OPTIONAL


def test_byte_tokenizers_have_no_files(tmp_path: Path) -> None:
    write(tmp_path, tokenizer_config__json={"tokenizer_class": "ByT5Tokenizer"})
    facts = found(tmp_path)
    assert (facts.kind, facts.vocab_size) == ("bytes", 384)


BROKEN = {
    "not-json": ("tokenizer.json", b"{"),
    "no-model": ("tokenizer.json", b"{}"),
    "list": ("tokenizer.json", b"[]"),
    "model-text": ("tokenizer.json", b'{"model": "BPE"}'),
    "repeated": ("tokenizer.json", b'{"model": {}, "model": {}}'),
    "deep": ("tokenizer.json", b'{"model":' + b"[" * 5000 + b"]" * 5000 + b"}"),
    "not-protobuf": ("tokenizer.model", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"),
    "cut-protobuf": ("tokenizer.model", b"\x0a\x20abc"),
    "not-ranks": ("x.tiktoken", b"hello world\n"),
    "list-of-ids": ("vocab.json", b"[1, 2]"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_said(name: str, tmp_path: Path) -> None:
    file, data = BROKEN[name]
    (tmp_path / file).write_bytes(data)
    tokenizer, findings = read(tmp_path)
    assert tokenizer is None
    assert [f.code for f in findings] == ["tokenizer.unsupported_kind"]


def test_a_pointer_in_place_of_a_tokenizer(tmp_path: Path) -> None:
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 10\n"
    (tmp_path / "tokenizer.json").write_text(pointer)
    assert [f.code for f in read(tmp_path)[1]] == ["artifact.lfs_pointer"]


def test_many_small_fields_end_soon(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\x00" * (4 << 20))
    started = time.process_time()
    assert [f.code for f in read(tmp_path)[1]] == ["tokenizer.unsupported_kind"]
    assert time.process_time() - started < 5


def test_a_package_of_only_a_tokenizer(tmp_path: Path) -> None:
    tokenizers.Tokenizer(MODELS["BPE"]()).save(str(tmp_path / "tokenizer.json"))
    artifacts = inspect(tmp_path).artifacts
    assert [(a.kind, a.entry) for a in artifacts] == [(ArtifactKind.TOKENIZER, "tokenizer.json")]
