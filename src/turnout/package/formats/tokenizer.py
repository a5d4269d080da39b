"""Tokenizer facts of every common kind, read without a tokenizer library."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from turnout.package.facts import Artifact, ArtifactKind, CodeNeed, Finding, Severity, Tokenizer
from turnout.package.scan import ReadError, Scan, join, parent_of

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "source.spm")
LIMIT = 64 << 20


def read_tokenizer(scan: Scan, directory: str, findings: list[Finding]) -> Tokenizer | None:
    """Facts of the tokenizer in ``directory``, None when there is none. Problems go to ``findings``."""
    tokenizer = _first(scan, directory, findings)
    config = scan.json_object(join(directory, "tokenizer_config.json")) or {}
    if tokenizer is None:
        return None
    _from_config(tokenizer, config, scan, directory)
    return tokenizer


def _first(scan: Scan, directory: str, findings: list[Finding]) -> Tokenizer | None:
    readers = [
        ("tokenizer.json", _fast), ("tekken.json", _tekken), *((name, _sentencepiece) for name in SENTENCEPIECE),
        ("vocab.txt", _vocab_txt), ("vocab.json", _vocab_json),
    ]
    for rel in scan.glob("*.tiktoken", directory):
        readers.append((rel.rsplit("/", 1)[-1], _tiktoken))
    for name, reader in readers:
        rel = join(directory, name)
        if not scan.has(rel):
            continue
        try:
            return reader(scan, rel)
        except ReadError as error:
            findings.append(Finding("tokenizer.unsupported_kind", Severity.ERROR, error.finding.message, rel,
                                    error.finding.observed, error.finding.expected))
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            findings.append(Finding("tokenizer.unsupported_kind", Severity.ERROR,
                                    f"`{rel}` is not a tokenizer of the kind its name says: {error}", rel))
    return None


def _fast(scan: Scan, rel: str) -> Tokenizer:
    value = scan.json(rel)
    model = value["model"]
    vocabulary = model.get("vocab") or {}
    kind = model.get("type") or ("BPE" if "merges" in model else "WordPiece")
    added = [t["id"] for t in value.get("added_tokens") or [] if isinstance(t.get("id"), int)]
    if isinstance(vocabulary, dict):
        top = max(vocabulary.values(), default=-1)
    else:
        top = len(vocabulary) - 1
    highest = max([top, *added])
    return Tokenizer(kind, rel, [rel], vocab_size=len(vocabulary) + sum(1 for i in added if i > top), max_id=highest)


def _tekken(scan: Scan, rel: str) -> Tokenizer:
    value = scan.json(rel)
    size = int(value["config"]["default_vocab_size"])
    return Tokenizer("tekken", rel, [rel], vocab_size=size, max_id=size - 1)


def _sentencepiece(scan: Scan, rel: str) -> Tokenizer:
    """Counts field 1 (pieces) of the ModelProto of sentencepiece_model.proto."""
    data = scan.read(rel, LIMIT)
    if scan.is_lfs_pointer(rel):
        raise ValueError("it is a git-lfs pointer")
    count, position = 0, 0
    while position < len(data):
        key, position = _varint(data, position)
        field, wire = key >> 3, key & 7
        if wire == 2:
            length, position = _varint(data, position)
            position += length
        elif wire == 0:
            _, position = _varint(data, position)
        elif wire in (1, 5):
            position += 8 if wire == 1 else 4
        else:
            raise ValueError("not a protobuf message")
        count += field == 1
    if position != len(data) or not count:
        raise ValueError("no pieces")
    return Tokenizer("sentencepiece", rel, [rel], vocab_size=count, max_id=count - 1)


def _varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        if position >= len(data) or shift > 63:
            raise ValueError("cut inside a number")
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


def _vocab_txt(scan: Scan, rel: str) -> Tokenizer:
    count = scan.read(rel, LIMIT).count(b"\n")
    return Tokenizer("wordpiece-vocab", rel, [rel], vocab_size=count, max_id=count - 1)


def _vocab_json(scan: Scan, rel: str) -> Tokenizer:
    value = scan.json(rel)
    merges = join(parent_of(rel), "merges.txt")
    kind = "bpe-vocab" if scan.has(merges) else "ctc-vocab"
    files = [rel, merges] if kind == "bpe-vocab" else [rel]
    ids = [i for i in value.values() if isinstance(i, int)]
    return Tokenizer(kind, rel, files, vocab_size=len(value), max_id=max(ids, default=-1))


def _tiktoken(scan: Scan, rel: str) -> Tokenizer:
    ranks = []
    for line in scan.read(rel, LIMIT).splitlines():
        if line:
            token, _, rank = line.partition(b" ")
            try:
                base64.b64decode(token, validate=True)
            except binascii.Error:
                raise ValueError("lines are not `base64 rank`") from None
            ranks.append(int(rank))
    return Tokenizer("tiktoken", rel, [rel], vocab_size=len(ranks), max_id=max(ranks, default=-1))


def _from_config(tokenizer: Tokenizer, config: dict[str, Any], scan: Scan, directory: str) -> None:
    name = config.get("tokenizer_class")
    tokenizer.class_name = name if isinstance(name, str) else None
    side = config.get("padding_side")
    tokenizer.padding_side = side if isinstance(side, str) else None
    length = config.get("model_max_length")
    if isinstance(length, (int, float)) and 0 < length < 1 << 40:
        tokenizer.max_length = int(length)
    tokenizer.bos, tokenizer.eos, tokenizer.pad = (_token(config.get(f"{n}_token")) for n in ("bos", "eos", "pad"))
    special = scan.json_object(join(directory, "special_tokens_map.json")) or {}
    for attribute in ("bos", "eos", "pad"):
        if getattr(tokenizer, attribute) is None:
            setattr(tokenizer, attribute, _token(special.get(f"{attribute}_token")))
    if isinstance(config.get("auto_map"), dict) and "AutoTokenizer" in config["auto_map"]:
        tokenizer.code = CodeNeed.OPTIONAL
    added = scan.json_object(join(directory, "added_tokens.json")) or {}
    ids = [i for i in added.values() if isinstance(i, int)]
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        ids += [int(i) for i in decoder if i.isdigit()]
    if ids and tokenizer.max_id is not None:
        tokenizer.max_id = max(tokenizer.max_id, *ids)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        rel = join(directory, name)
        if scan.has(rel) and rel not in tokenizer.files:
            tokenizer.files.append(rel)


def _token(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def detect(scan: Scan) -> list[Artifact]:
    """A package that holds a tokenizer and nothing else."""
    if any(scan.glob(pattern) for pattern in ("*.safetensors", "*.bin", "*.onnx", "*.gguf", "*.xml", "*.tflite", "*.pt",
                                              "*.pth", "config.json", "model_index.json", "adapter_config.json")):
        return []
    found = []
    for directory in scan.directories():
        findings: list[Finding] = []
        tokenizer = read_tokenizer(scan, directory, findings)
        if tokenizer is not None and scan.wanted(tokenizer.path):
            found.append(Artifact(f"tokenizer:{directory or '.'}", ArtifactKind.TOKENIZER, tokenizer.path, tokenizer.files,
                                  tokenizer=tokenizer, findings=findings, size_bytes=scan.size_of(tokenizer.files)))
    return found


