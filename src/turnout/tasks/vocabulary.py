"""Text to token ids and back for the generation engine, over a `tokenizers` tokenizer.

What a token adds to a text, in bytes, is read from the tokenizer's own decoder: byte-level BPE writes
bytes as characters (Radford et al. 2019), SentencePiece writes spaces as U+2581 and unknown characters
as `<0x0A>`, WordPiece marks what continues a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from turnout.errors import InputError
from turnout.package.facts import Artifact
from turnout.tasks.tokenization import load_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerVocabulary:
    """``turnout.engine.executor.Vocabulary`` over a tokenizer.

    ``size`` counts the tokenizer's ids; a model may have more (rows of padding), which read as special
    tokens without text.
    """

    def __init__(self, tokenizer: Tokenizer, eos_ids: Iterable[int] = (), bos_id: int | None = None) -> None:
        self.tokenizer = tokenizer
        self.eos_ids = frozenset(eos_ids)
        self.bos_id = bos_id
        added = tokenizer.get_added_tokens_decoder()
        self._special = frozenset(id for id, token in added.items() if token.special)
        self._literal = {id: token.content for id, token in added.items() if not token.special}
        self.size = max(tokenizer.get_vocab_size(with_added_tokens=True), max(added, default=-1) + 1)
        self._steps = _decoder_steps(tokenizer)

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text; ``special`` adds what the tokenizer puts around a prompt. Raises ``InputError``
        for a text that is no Unicode (half a surrogate pair)."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text holds half a character at position {error.start}") from None
        return list(self.tokenizer.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; half a character decodes to U+FFFD, an id that has no token to nothing."""
        text: str = self.tokenizer.decode(list(ids), skip_special_tokens=skip_special)
        return text

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token adds to a text; empty for a special token or an id without one.

        A tokenizer may still drop a space at the very beginning of a text (SentencePiece).
        """
        if self.is_special(token):
            return b""
        literal: str | None = self._literal.get(token)
        if literal is not None:
            return literal.encode()
        return _bytes_of(self.tokenizer.id_to_token(token) or "", self._steps)

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token rather than text; true for ids without a token."""
        return token in self._special or not 0 <= token < self.size


def vocabulary_of(root: str, artifact: Artifact, options: dict[str, Any]) -> TokenizerVocabulary:
    """The artifact's vocabulary without any model library, its ends as generation settings, configuration
    or tokenizer name them. Raises ``InputError`` (``tokenizer.missing``, ``tokenizer.unsupported_kind``)."""
    return named_ends(load_tokenizer(root, artifact, options), artifact)


def named_ends(tokenizer: Tokenizer, artifact: Artifact) -> TokenizerVocabulary:
    """The vocabulary of a tokenizer with the artifact's end and start tokens."""
    return TokenizerVocabulary(tokenizer, _ends(tokenizer, artifact), _start(tokenizer, artifact))


def _ends(tokenizer: Tokenizer, artifact: Artifact) -> list[int]:
    """As ``generate`` ends: the generation settings alone where they name any, else the configuration's,
    else the tokenizer's end token."""
    if artifact.generation is not None and artifact.generation.eos_ids:
        return list(artifact.generation.eos_ids)
    config = artifact.architecture.config if artifact.architecture else {}
    stated = config.get("eos_token_id")
    ids = [i for i in (stated if isinstance(stated, list) else [stated]) if type(i) is int]
    if not ids and artifact.tokenizer is not None and artifact.tokenizer.eos:
        ids = [i for i in [tokenizer.token_to_id(artifact.tokenizer.eos)] if i is not None]
    return ids


def _start(tokenizer: Tokenizer, artifact: Artifact) -> int | None:
    named = artifact.tokenizer.bos if artifact.tokenizer else None
    return tokenizer.token_to_id(named) if named else None


# ---- bytes of a token ------------------------------------------------------------------


@cache
def _byte_of() -> dict[str, int]:
    """Character to byte of byte-level BPE: printable Latin-1 stands for itself, the other bytes follow
    from U+0100 on in their order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(plain)]
    return {**{chr(byte): byte for byte in plain}, **{chr(256 + i): byte for i, byte in enumerate(others)}}


def _decoder_steps(tokenizer: Tokenizer) -> list[dict[str, Any]]:
    """The tokenizer's decoder as a list of its parts, in the form of ``tokenizer.json``."""
    if tokenizer.decoder is None:
        return []
    stored = json.loads(tokenizer.decoder.__getstate__())
    return _flat(stored)


def _flat(step: dict[str, Any]) -> list[dict[str, Any]]:
    if step.get("type") == "Sequence":
        return [part for inner in step["decoders"] for part in _flat(inner)]
    return [step]


def _bytes_of(piece: str, steps: list[dict[str, Any]]) -> bytes:
    """Bytes of a stored token. Steps that look at neighbours (stripping, fusing) add none."""
    for step in steps:
        kind = step["type"]
        if kind == "ByteLevel":
            return _byte_level(piece)
        if kind == "ByteFallback" and (found := _BYTE.fullmatch(piece)):
            return bytes([int(found[1], 16)])
        if kind == "Metaspace":
            piece = piece.replace(step["replacement"], " ")
        elif kind == "WordPiece":
            prefix = step["prefix"]
            piece = piece[len(prefix) :] if piece.startswith(prefix) else " " + piece
        elif kind == "BPEDecoder" and piece.endswith(step["suffix"]):
            piece = piece[: len(piece) - len(step["suffix"])] + " "
        elif kind == "Replace" and "String" in step["pattern"]:
            piece = piece.replace(step["pattern"]["String"], step["content"])
    return piece.encode()


def _byte_level(piece: str) -> bytes:
    table = _byte_of()
    try:
        return bytes([table[character] for character in piece])
    except KeyError:  # a token that was stored as text
        return piece.encode()
