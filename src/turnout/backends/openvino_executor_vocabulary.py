"""The vocabulary of a package for the engine: its ``tokenizer.json``, else the tokenizer that GenAI reads
(graphs of a GenAI directory, or the one in a GGUF file)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from turnout.backends.base import Case
from turnout.backends.openvino_gguf import adds_bos, model_path
from turnout.backends.openvino_reading import first_line
from turnout.engine.executor import Vocabulary
from turnout.errors import InputError, LoadError
from turnout.tasks.vocabulary import vocabulary_of


class GenAIVocabulary:
    """``Vocabulary`` over an ``openvino_genai.Tokenizer``; ``bos`` is put before a prompt that lacks it."""

    def __init__(self, tokenizer: Any, eos_ids: frozenset[int], bos: int | None) -> None:
        self._tokenizer = tokenizer
        self._bytes = {int(token): piece for piece, token in tokenizer.get_vocab().items()}
        self._texts: dict[int, bool] = {}
        self._bos = bos
        self.size = max(self._bytes, default=-1) + 1
        self.eos_ids = eos_ids
        start = tokenizer.get_bos_token_id()
        self.bos_id: int | None = bos if bos is not None else start if start >= 0 else None

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text. Raises ``InputError`` for a text that is no Unicode."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the text holds half a character at position {error.start}") from None
        found = self._tokenizer.encode(text, add_special_tokens=special).input_ids.data.reshape(-1)
        ids = [int(i) for i in found] if text else []
        if special and self._bos is not None and ids[:1] != [self._bos]:
            ids = [self._bos, *ids]
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids; half a character decodes to U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)) if ids else ""

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token adds to a text; empty for a special token."""
        piece: bytes = b"" if self.is_special(token) else self._bytes.get(token, b"")
        return piece

    def is_special(self, token: int) -> bool:
        """Whether the tokenizer leaves the token out of a text; true for ids without a token."""
        if token not in self._texts:
            piece = self._bytes.get(token)
            self._texts[token] = piece is not None and (not piece or bool(self.decode([token])))
        return not self._texts[token]


def vocabulary_of_case(case: Case) -> Vocabulary:
    """The package's tokenizer, or the option ``tokenizer``. Raises ``InputError`` or ``LoadError``."""
    try:
        return vocabulary_of(case.root, case.artifact, case.options)
    except InputError:
        if case.options.get("tokenizer"):
            raise
    import openvino_genai

    try:
        tokenizer = openvino_genai.Tokenizer(model_path(case))
    except Exception as error:  # the library raises RuntimeError and others
        raise LoadError(f"OpenVINO GenAI reads no tokenizer: {first_line(error)}", code="tokenizer.missing") from error
    artifact = case.artifact
    ends = set(artifact.generation.eos_ids if artifact.generation else [])
    ends |= set(artifact.tokenizer.eos_ids if artifact.tokenizer else [])
    ends |= {tokenizer.get_eos_token_id()}
    start = int(tokenizer.get_bos_token_id())
    bos = start if adds_bos(case) and start >= 0 else None
    return GenAIVocabulary(tokenizer, frozenset(end for end in ends if end >= 0), bos)
