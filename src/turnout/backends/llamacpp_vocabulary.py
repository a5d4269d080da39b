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
        self.bos_id: int | None = start if start >= 0 else None
        self._pieces: dict[int, bytes] = {}

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
        """Text of ids. Raises ``InputError`` for an id outside the vocabulary."""
        for token in ids:
            self._known(token)
        tokens = (ctypes.c_int32 * len(ids))(*ids)
        room = 16 + 8 * len(ids)
        while True:
            text = ctypes.create_string_buffer(room)
            count = self._api.llama_detokenize(self._address, tokens, len(ids), text, room, False, not skip_special)
            if count >= 0:
                return text.raw[:count].decode("utf-8", "replace")
            room = -count

    def token_bytes(self, token: int) -> bytes:
        """Bytes that a token adds to a text; empty for a special token."""
        if (found := self._pieces.get(token)) is None:
            self._known(token)
            found = self._pieces[token] = self._piece(token)
        return found

    def _piece(self, token: int) -> bytes:
        room = _PIECE
        while True:
            text = ctypes.create_string_buffer(room)
            count = self._api.llama_token_to_piece(self._address, token, text, room, 0, False)
            if count >= 0:
                return text.raw[:count]
            room = -count

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
