"""Bytes of tokens and ends of a vocabulary, against the tokenizers' own decoding."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from turnout.errors import InputError
from turnout.package.inspect import inspect
from turnout.package.store import resolve
from turnout.tasks.vocabulary import TokenizerVocabulary, vocabulary_of

TEXTS = ["Hello, world!", "naïve café 東京 🙂\n\ttabs", "  two  spaces", "x = [1, 2]"]


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<s>", "</s>"]
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def sentencepiece() -> Tokenizer:
    """Llama 2's form: spaces as U+2581, bytes as <0x..>, a start token, the first space stripped."""
    letters = sorted(set("".join(TEXTS[0])) - {" "})
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters, "ll", "▁H"]
    merges = [("l", "l"), ("▁", "H")]
    tokenizer = Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("text", TEXTS)
def test_the_bytes_of_tokens_are_those_of_the_text(make, text: str) -> None:  # type: ignore[no-untyped-def]
    vocabulary = TokenizerVocabulary(make())
    ids = vocabulary.encode(text, special=False)
    together = b"".join(vocabulary.token_bytes(token) for token in ids)
    assert together.decode().removeprefix(" " if make is sentencepiece else "") == text
    assert vocabulary.decode(ids) == text


def test_every_byte_has_its_token() -> None:
    vocabulary = TokenizerVocabulary(byte_level())
    assert {vocabulary.token_bytes(token) for token in range(vocabulary.size)} >= {bytes([b]) for b in range(256)}
    vocabulary = TokenizerVocabulary(sentencepiece())
    newline = vocabulary.tokenizer.token_to_id("<0x0A>")
    assert vocabulary.token_bytes(newline) == b"\n"
    assert vocabulary.decode([vocabulary.tokenizer.token_to_id("<0xE2>")]) == "\N{REPLACEMENT CHARACTER}"


def test_special_and_added_tokens() -> None:
    tokenizer = byte_level()
    tokenizer.add_tokens([AddedToken("<tool>é", special=False, normalized=False)])
    vocabulary = TokenizerVocabulary(tokenizer, {1}, 0)
    tool = tokenizer.token_to_id("<tool>é")
    assert vocabulary.token_bytes(tool) == "<tool>é".encode() and not vocabulary.is_special(tool)
    assert vocabulary.is_special(0) and vocabulary.token_bytes(0) == b""
    assert vocabulary.size == tool + 1
    # A model's padding rows have ids without tokens.
    assert vocabulary.is_special(vocabulary.size) and vocabulary.token_bytes(vocabulary.size + 5) == b""
    assert vocabulary.decode([0, *vocabulary.encode("x"), 1, vocabulary.size]) == "x"
    assert vocabulary.decode([0, *vocabulary.encode("x")], skip_special=False) == "<s>x"
    assert vocabulary.encode("</s>") == [1]
    with pytest.raises(InputError, match="half a character at position 1"):
        vocabulary.encode("a\ud800")


def test_start_tokens_come_with_a_prompt_only() -> None:
    vocabulary = TokenizerVocabulary(sentencepiece(), {2}, 1)
    assert vocabulary.encode("Hello")[0] == 1 and vocabulary.encode("Hello", special=False)[0] != 1


@pytest.mark.parametrize(
    ("decoder", "piece", "wanted"),
    [
        (decoders.WordPiece("##"), "##ing", b"ing"),
        (decoders.WordPiece("##"), "word", b" word"),
        (decoders.Metaspace(), "▁word", b" word"),
        (decoders.BPEDecoder("</w>"), "word</w>", b"word "),
        (None, "word", b"word"),
    ],
)
def test_other_decoders(decoder, piece: str, wanted: bytes) -> None:  # type: ignore[no-untyped-def]
    tokenizer = Tokenizer(models.WordLevel({piece: 0, "[UNK]": 1}, unk_token="[UNK]"))
    if decoder is not None:
        tokenizer.decoder = decoder
    assert TokenizerVocabulary(tokenizer).token_bytes(0) == wanted


def test_a_package_names_its_ends() -> None:
    folder = Path(resolve("minilm").path)
    package = inspect(str(folder))
    artifact = next(a for a in package.artifacts if a.tokenizer is not None)
    vocabulary = vocabulary_of(str(package.root), artifact, {})
    assert vocabulary.encode("hello")[0] == vocabulary.tokenizer.token_to_id("[CLS]")
    assert vocabulary.token_bytes(vocabulary.encode("playing", special=False)[0]) == b" playing"
