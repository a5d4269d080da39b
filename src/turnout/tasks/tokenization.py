"""Texts to token ids with the package's own tokenizer, without any model library.

Everything is padded on the right: with a mask the real tokens then get the values they would get
alone, whatever position scheme a model has, so that a batch equals its single texts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.errors import InputError
from turnout.package.facts import Artifact

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenizers import Tokenizer

NO_LIMIT = 10**6  # tokenizers without a limit store 1e30
# Families whose first position id is the padding id plus one (RoBERTa's embeddings).
OFFSET_POSITIONS = frozenset({"roberta", "xlm-roberta", "camembert", "xlm-roberta-xl", "longformer", "xmod", "mpnet"})


# ---- finding and building the tokenizer ------------------------------------------------


def load_tokenizer(root: str, artifact: Artifact, options: dict[str, Any]) -> Tokenizer:
    """The artifact's tokenizer, or the one that ``options["tokenizer"]`` names (file or directory).

    Reads ``tokenizer.json``, a WordPiece ``vocab.txt``, or byte-level ``vocab.json`` with
    ``merges.txt``; padding and truncation stored in it are switched off. Raises ``InputError`` with
    the code ``tokenizer.missing`` or ``tokenizer.unsupported_kind``.
    """
    for folder in tokenizer_places(root, artifact, options):
        tokenizer = _read(folder)
        if tokenizer is not None:
            tokenizer.no_padding()
            tokenizer.no_truncation()
            return tokenizer
    kind = artifact.tokenizer.kind if artifact.tokenizer else ""
    if kind:
        raise InputError(
            f"the tokenizer kind `{kind}` cannot be read without a model library",
            code="tokenizer.unsupported_kind",
            hints=["name a `tokenizer.json` with `--option tokenizer=PATH`"],
        )
    raise InputError(
        "the package has no tokenizer",
        code="tokenizer.missing",
        hints=["name one with `--option tokenizer=PATH`"],
    )


def tokenizer_places(root: str, artifact: Artifact, options: dict[str, Any]) -> list[Path]:
    """Files and directories where the tokenizer may be, the named one first and then alone."""
    named = options.get("tokenizer")
    if named:
        place = Path(str(named))
        place = place if place.is_absolute() or place.exists() else Path(root) / place
        if not place.exists():
            raise InputError(f"there is no tokenizer at `{named}`", code="tokenizer.missing")
        return [place]
    base = Path(root)
    places: list[Path] = []
    if artifact.tokenizer is not None:
        places += [base / name for name in [artifact.tokenizer.path, *artifact.tokenizer.files]]
    entry = base / artifact.entry
    places += [entry if entry.is_dir() else entry.parent, base]
    return list(dict.fromkeys(places))


def _read(place: Path) -> Tokenizer | None:
    from tokenizers import Tokenizer

    if place.name == "tokenizer.json" or (place.is_file() and place.suffix == ".json" and _is_tokenizer(place)):
        return _parsed(Tokenizer, place) if place.is_file() else None
    folder = place if place.is_dir() else place.parent
    if (folder / "tokenizer.json").is_file():
        return _parsed(Tokenizer, folder / "tokenizer.json")
    if (folder / "vocab.txt").is_file():
        return _wordpiece(folder)
    if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file():
        return _byte_level(folder)
    return None


def _is_tokenizer(path: Path) -> bool:
    with path.open("rb") as stream:
        head = stream.read(4096)
    return b'"added_tokens"' in head or b'"version": "1.0"' in head


def _parsed(kind: type[Tokenizer], path: Path) -> Tokenizer:
    try:
        return kind.from_file(str(path))
    except Exception as error:  # the Rust library raises bare Exception
        raise InputError(
            f"`{path.name}` cannot be read as a tokenizer: {error}", code="tokenizer.unsupported_kind"
        ) from error


def settings_of(folder: Path) -> dict[str, Any]:
    """``tokenizer_config.json`` beside a tokenizer, with ``special_tokens_map.json`` below it."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        path = folder / name
        if path.is_file():
            loaded = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(loaded, dict):
                merged.update(loaded)
    return merged


def token_text(value: Any) -> str | None:
    """Text of a special token, which is stored as a string or as an object with ``content``."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


def _wordpiece(folder: Path) -> Tokenizer:
    """BERT's tokenizer from its vocabulary (Devlin et al. 2018): lower-cased unless told otherwise."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    config = settings_of(folder)
    names = {
        role: token_text(config.get(f"{role}_token")) or f"[{role.upper()}]" for role in ("cls", "sep", "pad", "mask")
    }
    unk = token_text(config.get("unk_token")) or "[UNK]"
    tokenizer = Tokenizer(models.WordPiece.from_file(str(folder / "vocab.txt"), unk_token=unk))
    lower = bool(config.get("do_lower_case", True))
    strip = config.get("strip_accents")
    tokenizer.normalizer = normalizers.BertNormalizer(
        lowercase=lower, strip_accents=strip, handle_chinese_chars=bool(config.get("tokenize_chinese_chars", True))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    present = [name for name in [*names.values(), unk] if tokenizer.token_to_id(name) is not None]
    tokenizer.add_special_tokens(present)
    sep, cls = (tokenizer.token_to_id(names[role]) for role in ("sep", "cls"))
    if sep is not None and cls is not None:
        tokenizer.post_processor = processors.BertProcessing((names["sep"], sep), (names["cls"], cls))
    return tokenizer


def _byte_level(folder: Path) -> Tokenizer:
    """GPT-2's or RoBERTa's byte-level BPE; which of them, ``tokenizer_class`` says."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

    config = settings_of(folder)
    name = str(config.get("tokenizer_class") or "GPT2Tokenizer").removesuffix("Fast")
    wrapped = name in ("RobertaTokenizer", "BartTokenizer", "LongformerTokenizer", "LEDTokenizer")
    if not wrapped and name not in ("GPT2Tokenizer", "Qwen2Tokenizer"):
        raise InputError(
            f"`vocab.json` with `merges.txt` of the class `{name}` has rules that are not stored beside it",
            code="tokenizer.unsupported_kind",
            hints=["name a `tokenizer.json` with `--option tokenizer=PATH`"],
        )
    model = models.BPE.from_file(str(folder / "vocab.json"), str(folder / "merges.txt"))
    tokenizer = Tokenizer(model)
    prefix = bool(config.get("add_prefix_space", False))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<s>", "</s>", "<pad>", "<unk>", "<mask>"] if wrapped else ["<|endoftext|>"]
    tokenizer.add_special_tokens([token for token in specials if tokenizer.token_to_id(token) is not None])
    if wrapped:
        ends = [(token, tokenizer.token_to_id(token) or 0) for token in ("</s>", "<s>")]
        tokenizer.post_processor = processors.RobertaProcessing(ends[0], ends[1], True, prefix)
    else:
        tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


# ---- encoding --------------------------------------------------------------------------


@dataclass(slots=True)
class Batch:
    """Some texts as model inputs.

    ``inputs`` holds ``input_ids``, ``attention_mask``, ``token_type_ids``, int64 [batch, tokens];
    ``rows`` the positions of the texts in the request (a fixed batch may be longer, with copies at
    its end); ``encodings`` the tokenizer's results with offsets.
    """

    rows: list[int]
    inputs: dict[str, NDArray[Any]]
    encodings: list[Any]


class TextEncoder:
    """Encodes texts or pairs of texts in batches of like length.

    ``limit`` is the number of tokens a text may have (0: none known). ``cut`` says whether a longer
    text is cut or refused.
    """

    def __init__(
        self, root: str, artifact: Artifact, options: dict[str, Any], *, cut: bool, limit: int | None = None
    ) -> None:
        self.tokenizer = load_tokenizer(root, artifact, options)
        self.batch, self.length = _fixed_shape(artifact)
        stated = _positive(options.get("max_length"))
        known = token_limit(artifact)
        self.limit = stated or limit or known
        if known and self.limit > known:
            self.limit = known
        if self.length and (not self.limit or self.limit > self.length):
            self.limit = self.length
        self.cut = cut or stated is not None
        self.pad_id = pad_id(self.tokenizer, artifact)
        self.segments = _gives_segments(root, artifact)

    def encode(self, texts: Sequence[Any], batch_size: int = 32) -> Iterator[Batch]:
        """Batches of ``texts`` (strings, or pairs of strings), shortest first.

        Raises ``InputError`` for a text without tokens, or longer than the limit when it may not be cut.
        """
        if self.cut and self.limit:
            self.tokenizer.enable_truncation(self.limit)
        else:
            self.tokenizer.no_truncation()
        encodings = self.tokenizer.encode_batch(list(texts))
        for number, encoding in enumerate(encodings, 1):
            self._check(number, len(encoding.ids))
        order = sorted(range(len(encodings)), key=lambda i: len(encodings[i].ids))
        size = self.batch or batch_size
        for start in range(0, len(order), size):
            rows = order[start : start + size]
            yield Batch(rows, self._arrays([encodings[i] for i in rows], size), [encodings[i] for i in rows])

    def _check(self, number: int, count: int) -> None:
        if count == 0:
            raise InputError(f"text {number} gives no tokens")
        if self.limit and count > self.limit:
            raise InputError(
                f"text {number} has {count} tokens, the model takes {self.limit}",
                hints=[f"cut it with `--option max_length={self.limit}`"],
            )

    def _arrays(self, encodings: list[Any], size: int) -> dict[str, NDArray[Any]]:
        import numpy as np

        rows = size if self.batch else len(encodings)
        width = self.length or max(len(encoding.ids) for encoding in encodings)
        inputs = {
            "input_ids": np.full((rows, width), self.pad_id, np.int64),
            "attention_mask": np.zeros((rows, width), np.int64),
            "token_type_ids": np.zeros((rows, width), np.int64),
        }
        for row in range(rows):
            encoding = encodings[min(row, len(encodings) - 1)]
            count = len(encoding.ids)
            inputs["input_ids"][row, :count] = encoding.ids
            inputs["attention_mask"][row, :count] = 1
            if self.segments:
                inputs["token_type_ids"][row, :count] = encoding.type_ids
        return inputs


def _gives_segments(root: str, artifact: Artifact) -> bool:
    """Whether the package's tokenizer hands segment ids to its model. ``model_input_names`` says so;
    where it is absent, Transformers' plain fast tokenizer gives none, the classes of families do."""
    if artifact.tokenizer is None:
        return True
    stored = settings_of((Path(root) / artifact.tokenizer.path).parent)
    names = stored.get("model_input_names")
    if isinstance(names, list):
        return "token_type_ids" in names
    return stored.get("tokenizer_class") not in ("TokenizersBackend", "PreTrainedTokenizerFast")


def token_limit(artifact: Artifact) -> int:
    """Tokens that one text may have as far as tokenizer and positions say; 0 when neither does."""
    limits = []
    if artifact.tokenizer is not None and artifact.tokenizer.max_length:
        limits.append(artifact.tokenizer.max_length)
    architecture = artifact.architecture
    if architecture is not None:
        positions = architecture.dims.get("max_position_embeddings") or _positive(
            architecture.config.get("max_position_embeddings") or architecture.config.get("n_positions")
        )
        if positions and architecture.model_type in OFFSET_POSITIONS:
            pad = architecture.config.get("pad_token_id")
            positions -= (pad if isinstance(pad, int) else 1) + 1
        if positions and architecture.model_type not in ("t5", "mt5", "umt5"):  # relative positions, no limit
            limits.append(positions)
    return min((limit for limit in limits if 0 < limit < NO_LIMIT), default=0)


def pad_id(tokenizer: Tokenizer, artifact: Artifact) -> int:
    """Id to pad with; any id does under a mask, so 0 stands in where no padding token is known."""
    names = [artifact.tokenizer.pad if artifact.tokenizer else None, "[PAD]", "<pad>"]
    for name in names:
        found = tokenizer.token_to_id(name) if name else None
        if found is not None:
            return int(found)
    return 0


def _fixed_shape(artifact: Artifact) -> tuple[int, int]:
    """Batch and length that the graph fixes for ``input_ids``; 0 where it takes any."""
    for port in artifact.graph.inputs if artifact.graph else []:
        if port.name == "input_ids" and port.shape is not None and len(port.shape) == 2:
            batch, length = (dim if isinstance(dim, int) and dim > 0 else 0 for dim in port.shape)
            return batch, length
    return 0, 0


def _positive(value: Any) -> int | None:
    if value is None or value == "":
        return None
    try:
        number = int(value)
    except (TypeError, ValueError):
        raise InputError(f"`{value}` is not a number of tokens") from None
    if number <= 0:
        raise InputError(f"`{value}` is not a positive number of tokens")
    return number
