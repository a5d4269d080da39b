"""llama.cpp's tokenizer behind the engine's ``Vocabulary``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cached_property

from turnout.backends.llamacpp_api import Api, open_api
from turnout.backends.llamacpp_model import Model
from turnout.errors import InputError, LoadError

_UNKNOWN, _CONTROL = 1 << 0, 1 << 3  # llama_token_attr
_PIECE = 128  # bytes tried first for one token


class LlamaCppVocabulary:
    """Text to ids and back, by the vocabulary of a GGUF file.

    Lives as long as ``model``, which it closes only when it opened it itself (``of_file``). Special
    tokens that a text spells out are read as such, as Transformers' tokenizers do.
    """

    def __init__(self, model: Model, *, owned: bool = False) -> None:
        self._api, self._model, self._owned = model.api, model, owned
        self.size: int = self._api.llama_vocab_n_tokens(self._address)
        start = self._api.llama_vocab_bos(self._address)
        # Where the file names none, llama.cpp still answers an id, which is then some word's.
        self.bos_id: int | None = start if 0 <= start < self.size and self.is_special(start) else None
        self._pieces: dict[int, bytes] = {}
        self._spelled: dict[int, bytes] = {}  # with special tokens written out

    @classmethod
    def of_file(cls, path: str, api: Api | None = None) -> LlamaCppVocabulary:
        """The vocabulary of a file, read without its weights. Raises ``LoadError`` as ``Model`` does."""
        return cls(Model(api or open_api(), path, vocabulary_only=True), owned=True)

    @cached_property
    def eos_ids(self) -> frozenset[int]:
        """Every token that ends a generation: end of text, of a turn, of a message."""
        ends = self._api.llama_vocab_is_eog
        return frozenset(token for token in range(self.size) if ends(self._address, token))

    def encode(self, text: str, special: bool = True) -> list[int]:
        """Ids of a text. Raises ``InputError`` for a text that is no valid Unicode."""
        try:
            data = text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InputError(f"the text holds half a character at position {error.start}") from None
        room = len(data) + 16  # a token covers a byte at least, but for those that are added around
        while True:
            ids = (ctypes.c_int32 * room)()
            count = self._api.llama_tokenize(self._address, data, len(data), ids, room, special, True)
            if 0 <= count <= room:
                return ids[:count]
            if count <= -(1 << 31):
                raise InputError("the text has more tokens than can be counted")
            room = -count

    def decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        """Text of ids. Raises ``InputError`` for an id outside the vocabulary.

        Token by token: of some vocabularies ``llama_detokenize`` takes away the spaces before punctuation,
        which breaks code and JSON, and what was streamed already.
        """
        kept = self._pieces if skip_special else self._spelled
        data = b"".join(kept[token] if token in kept else self._read(token, not skip_special) for token in ids)
        if self._strips and data[:1] == b" ":
            data = data[1:]
        return data.decode("utf-8", "replace")

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token adds to a text; empty for a special token."""
        found = self._pieces.get(token)
        return self._read(token, False) if found is None else found

    def _read(self, token: int, special: bool) -> bytes:
        self._known(token)
        found = (self._spelled if special else self._pieces)[token] = self._piece(token, special)
        return found

    def _piece(self, token: int, special: bool) -> bytes:
        room = _PIECE
        while True:
            text = ctypes.create_string_buffer(room)
            count = self._api.llama_token_to_piece(self._address, token, text, room, 0, special)
            if count >= 0:
                return text.raw[:count]
            room = -count

    @cached_property
    def _strips(self) -> bool:
        """Whether the space of a text's first word is the tokenizer's, not the text's (SentencePiece); asked of
        llama.cpp with such a word."""
        for token in range(self.size):
            if self.token_bytes(token)[:1] == b" " and len(self.token_bytes(token)) > 1:
                ids, text = (ctypes.c_int32 * 1)(token), ctypes.create_string_buffer(_PIECE)
                count = self._api.llama_detokenize(self._address, ids, 1, text, _PIECE, False, False)
                if count > 0:
                    return text.raw[:1] != b" "
        return False

    def is_special(self, token: int) -> bool:
        """Whether a token is a control token (or the unknown one) rather than text."""
        self._known(token)
        return bool(self._api.llama_vocab_get_attr(self._address, token) & (_CONTROL | _UNKNOWN))

    @property
    def _address(self) -> int:
        if self._model.address is None:
            raise LoadError("the vocabulary's model is closed")
        return self._model.vocabulary

    def _known(self, token: int) -> None:
        # llama.cpp looks an id up without a check of its own in some of these calls.
        if not 0 <= token < self.size:
            raise InputError(f"token {token} is outside the vocabulary of {self.size}")

    def close(self) -> None:
        """Frees the file's vocabulary where this object opened it; may be called twice."""
        if self._owned:
            self._model.close()
