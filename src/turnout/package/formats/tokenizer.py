"""Tokenizer facts of every common kind, read without a tokenizer library.

Vocabularies are large (a 33 MB tokenizer.json is ordinary) and only their number of entries and
highest id are wanted, so those parts of a file are lifted out by a pattern over its bytes and never
become Python objects; what is left is small and parsed as JSON.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from turnout.config import READ
from turnout.package.facts import Artifact, ArtifactKind, CodeNeed, Finding, Severity, Tokenizer
from turnout.package.scan import ReadError, Scan, join, parent_of, parse_json, read_error

SENTENCEPIECE = ("tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
# Tokenizers without a vocabulary file, by class, with their number of ids (Transformers' defaults).
BYTES = {"ByT5Tokenizer": 384, "PerceiverTokenizer": 262, "CanineTokenizer": 1_114_112}
LIMIT = 16 << 20  # bytes of a vocabulary that is walked piece by piece; real ones have up to 5 MB
MAX_FIELDS = 1 << 20
MAX_ENTRIES = 4_000_000

# JSON by possessive patterns: one pass, no backtracking, nothing kept.
_TEXT = rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_S = rb"[ \t\r\n]*+"
_COMMA = _S + rb"(?:," + _S + rb")?+"
_ENTRY = _TEXT + _S + rb":" + _S
_PIECE = rb"\[" + _S + _TEXT + _S + rb"," + _S + rb"[-+.\deE]++" + _S + rb"\]"
_PAIR = rb"\[" + _S + _TEXT + _S + rb"," + _S + _TEXT + _S + rb"\]"
IDS = re.compile(_ENTRY + rb"(\d++)")
PIECES = re.compile(_PIECE)
VOCABULARIES = (
    re.compile(rb"\{" + _S + rb"(?:" + _ENTRY + rb"\d++" + _COMMA + rb")*+\}"),  # {"piece": id}
    re.compile(rb"\[" + _S + rb"(?:" + _PIECE + _COMMA + rb")*+\]"),  # [["piece", score]]
    re.compile(rb"\[" + _S + rb'(?:\{(?:[^"{}\[\]]++|' + _TEXT + rb")*+\}" + _COMMA + rb")*+\]"),  # [{"rank": ...}]
)
MERGES = re.compile(rb"\[" + _S + rb"(?:(?:" + _TEXT + rb"|" + _PAIR + rb")" + _COMMA + rb")*+\]")
LIFTED = "\0lifted"


def read_tokenizer(scan: Scan, directory: str, findings: list[Finding]) -> Tokenizer | None:
    """Facts of the tokenizer in ``directory``, None when there is none. Problems go to ``findings``."""
    config = scan.json_object(join(directory, "tokenizer_config.json")) or {}
    tokenizer = _first(scan, directory, findings) or _bytes(scan, directory, config)
    if tokenizer is not None:
        _from_config(tokenizer, config, scan, directory)
    return tokenizer


def _first(scan: Scan, directory: str, findings: list[Finding]) -> Tokenizer | None:
    readers = [
        ("tokenizer.json", _fast),
        ("tekken.json", _tekken),
        *((name, _sentencepiece) for name in SENTENCEPIECE),
        ("source.spm", _marian),
        ("vocab.txt", _vocab_txt),
        ("vocab.json", _vocab_json),
        *((rel.rsplit("/", 1)[-1], _tiktoken) for rel in scan.glob("*.tiktoken", directory)),
    ]
    for name, reader in readers:
        rel = join(directory, name)
        if not scan.has(rel):
            continue
        before = scan.check_weights_file(rel)
        if before is not None:
            if before.code == "artifact.truncated":  # an empty vocabulary stops no task but those that need it
                before.code = "tokenizer.unsupported_kind"
            findings.append(before)
            continue
        try:
            return _in_range(reader(scan, rel))
        except ReadError as error:
            said = error.finding
            findings.append(
                Finding("tokenizer.unsupported_kind", Severity.ERROR, said.message, rel, said.observed, said.expected)
            )
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
            message = f"`{rel}` is not a tokenizer of the kind its name says: {error}"[:300]
            findings.append(Finding("tokenizer.unsupported_kind", Severity.ERROR, message, rel))
    return None


def _in_range(tokenizer: Tokenizer) -> Tokenizer:
    if not all(-1 <= n < 1 << 40 for n in (tokenizer.vocab_size or 0, tokenizer.max_id or 0)):
        raise ValueError("ids out of range")
    return tokenizer


# ---- JSON --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """Where the lifted vocabulary stands in the file's bytes."""

    data: bytes
    start: int = 0
    end: int = 0

    def count(self) -> tuple[int, int]:
        """Number of entries and highest id."""
        if self.data[self.start : self.start + 1] == b"{":
            count, top = 0, -1
            for entry in _bounded(IDS.finditer(self.data, self.start, self.end)):
                count, top = count + 1, max(top, int(entry[1]))
            return count, top
        count = sum(1 for _ in _bounded(PIECES.finditer(self.data, self.start, self.end)))
        return count, count - 1


def _bounded(matches: Iterator[re.Match[bytes]]) -> Iterator[re.Match[bytes]]:
    for number, match in enumerate(matches):
        if number >= MAX_ENTRIES:
            raise ValueError(f"more than {MAX_ENTRIES} entries")
        yield match


def _lifted(scan: Scan, rel: str) -> tuple[dict[str, Any], _Vocabulary]:
    """Parsed document with its vocabulary and merges replaced by ``LIFTED``, and the vocabulary's place."""
    data = scan.read(rel, READ.json_bytes)
    spans: list[tuple[int, int]] = []
    vocabulary = _Vocabulary(data)
    for key, patterns in ((rb'"vocab"\s*:\s*', VOCABULARIES), (rb'"merges"\s*:\s*', (MERGES,))):
        for found in islice(re.finditer(key, data), 2):  # the first may be inside a text
            match = next((m for p in patterns if (m := p.match(data, found.end())) is not None), None)
            if match is not None:
                spans.append(match.span())
                if patterns is VOCABULARIES:
                    vocabulary = _Vocabulary(data, *match.span())
                break
    if len(data) - sum(stop - start for start, stop in spans) > READ.json_config_bytes:
        raise read_error("config.invalid", f"`{rel}` is too large to be read here", rel, f"{len(data)} bytes")
    parts, end = [], 0
    for start, stop in sorted(spans):
        if start >= end:
            parts += [data[end:start], b'"\\u0000lifted"']
            end = stop
    parts.append(data[end:])
    value = parse_json(b"".join(parts), rel, READ.json_nodes)
    if not isinstance(value, dict):
        raise read_error("config.invalid", f"`{rel}` is not a JSON object", rel, type(value).__name__, "object")
    return value, vocabulary


def _fast(scan: Scan, rel: str) -> Tokenizer:
    value, lifted = _lifted(scan, rel)
    model = value["model"]
    vocabulary = model.get("vocab") or {}
    if vocabulary == LIFTED:
        count, top = lifted.count()
    else:
        ids = list(vocabulary.values()) if isinstance(vocabulary, dict) else range(len(vocabulary))
        count, top = len(ids), max(ids, default=-1)
    kind = model.get("type") or ("BPE" if "merges" in model else "WordPiece")
    added = {i for t in value.get("added_tokens") or [] if type(i := t.get("id")) is int}
    size = count + sum(1 for i in added if i > top)
    return Tokenizer(str(kind), rel, [rel], vocab_size=size, max_id=max([top, *added]))


def _tekken(scan: Scan, rel: str) -> Tokenizer:
    value, _ = _lifted(scan, rel)
    size = int(value["config"]["default_vocab_size"])
    return Tokenizer("tekken", rel, [rel], vocab_size=size, max_id=size - 1)


def _vocab_json(scan: Scan, rel: str) -> Tokenizer:
    value = scan.json(rel)
    if value and all(isinstance(part, dict) for part in value.values()):
        value = next(iter(value.values()))  # one vocabulary a language (MMS); Transformers takes one of them
    merges = join(parent_of(rel), "merges.txt")
    kind = "bpe-vocab" if scan.has(merges) else "ctc-vocab"
    files = [rel, merges] if kind == "bpe-vocab" else [rel]
    ids = [i for i in value.values() if type(i) is int]
    return Tokenizer(kind, rel, files, vocab_size=len(value), max_id=max(ids, default=-1))


# ---- other files -------------------------------------------------------------------------------


def _sentencepiece(scan: Scan, rel: str) -> Tokenizer:
    """Counts field 1 (pieces) of the ModelProto of sentencepiece_model.proto; Llama 3 puts ranks in
    text under the same name."""
    data = scan.read(rel, LIMIT)
    if re.match(rb"[A-Za-z0-9+/]+=* \d+\r?\n", data):
        return _tiktoken(scan, rel)
    pieces = fields = position = 0
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
        pieces += field == 1
        fields += 1
        if fields > MAX_FIELDS:
            raise ValueError(f"more than {MAX_FIELDS} pieces")
    if position != len(data) or not pieces:
        raise ValueError("no pieces, or cut inside one")
    return Tokenizer("sentencepiece", rel, [rel], vocab_size=pieces, max_id=pieces - 1)


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


def _marian(scan: Scan, rel: str) -> Tokenizer:
    """Two sentencepiece models that share the ids of a vocab.json."""
    tokenizer = _sentencepiece(scan, rel)
    directory = parent_of(rel)
    if scan.has(join(directory, "vocab.json")):
        shared = _vocab_json(scan, join(directory, "vocab.json"))
        tokenizer.vocab_size, tokenizer.max_id = shared.vocab_size, shared.max_id
        tokenizer.files.append(shared.path)
    if scan.has(join(directory, "target.spm")):
        tokenizer.files.append(join(directory, "target.spm"))
    return tokenizer


def _vocab_txt(scan: Scan, rel: str) -> Tokenizer:
    data = scan.read(rel, LIMIT)
    if not data or b"\0" in data:
        raise ValueError("not a list of pieces")
    count = data.count(b"\n") + (not data.endswith(b"\n"))
    return Tokenizer("wordpiece-vocab", rel, [rel], vocab_size=count, max_id=count - 1)


def _tiktoken(scan: Scan, rel: str) -> Tokenizer:
    data = scan.read(rel, LIMIT)
    if not re.fullmatch(rb"(?:[A-Za-z0-9+/]++=*+ \d++(?:\r?\n|\Z))++", data):
        raise ValueError("lines are not `base64 rank`")
    ranks = [int(rank) for rank in re.findall(rb" (\d+)", data)]
    return Tokenizer("tiktoken", rel, [rel], vocab_size=len(ranks), max_id=max(ranks))


def _bytes(scan: Scan, directory: str, config: dict[str, Any]) -> Tokenizer | None:
    name = config.get("tokenizer_class")
    size = BYTES.get(name) if isinstance(name, str) else None
    rel = join(directory, "tokenizer_config.json")
    return Tokenizer("bytes", rel, [rel], vocab_size=size, max_id=size - 1) if size else None


# ---- configuration -----------------------------------------------------------------------------


def _from_config(tokenizer: Tokenizer, config: dict[str, Any], scan: Scan, directory: str) -> None:
    name = config.get("tokenizer_class")
    tokenizer.class_name = name if isinstance(name, str) else None
    side = config.get("padding_side")
    tokenizer.padding_side = side if isinstance(side, str) else None
    length = config.get("model_max_length")
    if isinstance(length, (int, float)) and 0 < length < 1 << 40:
        tokenizer.max_length = int(length)
    special = scan.json_object(join(directory, "special_tokens_map.json")) or {}
    for attribute in ("bos", "eos", "pad"):
        token = _token(config.get(f"{attribute}_token"))
        setattr(tokenizer, attribute, token if token is not None else _token(special.get(f"{attribute}_token")))
    auto_map = config.get("auto_map")
    if isinstance(auto_map, dict) and "AutoTokenizer" in auto_map:
        tokenizer.code = CodeNeed.OPTIONAL
    ids = _added_ids(scan, directory, config)
    if ids and tokenizer.max_id is not None:
        tokenizer.max_id = max(tokenizer.max_id, *ids)
    for name in ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"):
        rel = join(directory, name)
        if scan.has(rel) and rel not in tokenizer.files:
            tokenizer.files.append(rel)


def _added_ids(scan: Scan, directory: str, config: dict[str, Any]) -> list[int]:
    added = scan.json_object(join(directory, "added_tokens.json")) or {}
    ids = [i for i in added.values() if type(i) is int]
    decoder = config.get("added_tokens_decoder")
    if isinstance(decoder, dict):
        ids += [int(i) for i in decoder if re.fullmatch(r"[0-9]{1,18}", i)]
    return ids


def _token(value: Any) -> str | None:
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


# ---- packages that are tokenizers --------------------------------------------------------------

MODELS = (
    *("*.safetensors", "*.bin", "*.onnx", "*.gguf", "*.xml", "*.tflite", "*.pt", "*.pth", "*.ckpt"),
    *("config.json", "model_index.json", "adapter_config.json"),
)


def detect(scan: Scan) -> list[Artifact]:
    """A package that holds tokenizers and nothing else."""
    if any(scan.glob(pattern) for pattern in MODELS):
        return []
    found = []
    for directory in scan.directories():
        findings: list[Finding] = []
        tokenizer = read_tokenizer(scan, directory, findings)
        if tokenizer is not None and scan.wanted(tokenizer.path):
            name = f"tokenizer:{directory or '.'}"
            artifact = Artifact(name, ArtifactKind.TOKENIZER, tokenizer.path, tokenizer.files)
            artifact.tokenizer, artifact.findings = tokenizer, findings
            artifact.size_bytes = scan.size_of(tokenizer.files)
            found.append(artifact)
    return found
