"""Adapters of the language tasks: encode texts, run the graph, decode its outputs.

They need the package's tokenizer, labels and recipe, and know no model library. Arrays are numpy.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.errors import InputError, NotSupportedError
from turnout.package.facts import Artifact, Recipe, Strength
from turnout.tasks.adapter import Infer
from turnout.tasks.contract import (
    EmbeddingsOutput,
    LabelScore,
    LabelsOutput,
    RankedDocument,
    RankingOutput,
    Span,
    SpansOutput,
)
from turnout.tasks.decoding import Seq2SeqGenerator, Stopper, TextStream, generator, sample
from turnout.tasks.tokenization import TextEncoder, load_tokenizer, settings_of, token_text, tokenizer_places
from turnout.types import Request

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = [
    "EmbeddingsAdapter",
    "FillMaskAdapter",
    "QuestionAnsweringAdapter",
    "RerankAdapter",
    "Seq2SeqGenerator",
    "Stopper",
    "TextClassificationAdapter",
    "TextEncoder",
    "TextStream",
    "TokenClassificationAdapter",
    "generator",
    "load_tokenizer",
    "pool",
    "sample",
]

POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
POOLED_OUTPUTS = ("sentence_embedding", "sentence_embeddings", "text_embeds", "embeddings")
HIDDEN_OUTPUTS = ("last_hidden_state", "token_embeddings", "hidden_states")


# ---- shared ----------------------------------------------------------------------------


def truthy(value: Any) -> bool:
    """Whether an option's value (bool or text) means yes."""
    return value is True or str(value).strip().lower() in ("1", "true", "yes", "on")


def output_of(outputs: dict[str, Any], names: Sequence[str], axes: int) -> NDArray[Any]:
    """The output of one of ``names``, else the only one with ``axes`` axes, as float32.

    Raises ``NotSupportedError`` when the graph has no such output.
    """
    import numpy as np

    for name in names:
        if name in outputs:
            return np.asarray(outputs[name], dtype=np.float32)
    fitting = [value for value in outputs.values() if np.asarray(value).ndim == axes]
    if len(fitting) == 1:
        return np.asarray(fitting[0], dtype=np.float32)
    raise NotSupportedError(
        f"the model gives no output `{names[0]}`",
        code="graph.output_kind",
        hints=["it gives: " + ", ".join(f"{name} {list(np.shape(value))}" for name, value in outputs.items())],
    )


def softmax(logits: NDArray[Any]) -> NDArray[Any]:
    """Probabilities over the last axis."""
    import numpy as np

    shifted = np.exp(logits - logits.max(axis=-1, keepdims=True))
    result: NDArray[Any] = shifted / shifted.sum(axis=-1, keepdims=True)
    return result


def sigmoid(logits: NDArray[Any]) -> NDArray[Any]:
    """Probability of each logit alone, without overflow at either end."""
    import numpy as np

    result: NDArray[Any] = np.exp(-np.logaddexp(0, -logits))
    return result


def label_names(artifact: Artifact, options: dict[str, Any], count: int) -> list[str]:
    """Names of ``count`` classes: the file ``options["labels"]``, else the package's.

    Raises ``NotSupportedError`` when there are more or fewer names than classes.
    """
    if options.get("labels"):
        text = Path(str(options["labels"])).read_text(encoding="utf-8")
        names = json.loads(text) if text.lstrip().startswith("[") else text.splitlines()
    elif artifact.labels is not None:
        names = artifact.labels.names
    else:
        names = [f"LABEL_{i}" for i in range(count)]
    if len(names) != count:
        raise NotSupportedError(
            f"the package names {len(names)} classes, the model gives {count} scores", code="task.label_map_missing"
        )
    return [str(name) for name in names]


# ---- embeddings ------------------------------------------------------------------------


def pool(hidden: NDArray[Any], mask: NDArray[Any], mode: str) -> NDArray[Any]:
    """One vector per text from token vectors (Reimers and Gurevych 2019, and later modes).

    ``hidden`` float [batch, tokens, width], ``mask`` [batch, tokens] with 1 at the tokens that count;
    padding may be on either side. Returns float32 [batch, width].
    """
    import numpy as np

    hidden = np.asarray(hidden, dtype=np.float32)
    weights = np.asarray(mask, dtype=np.float32)  # [batch, tokens]
    rows = np.arange(hidden.shape[0])
    if mode == "cls":
        return np.asarray(hidden[rows, weights.argmax(axis=1)])
    if mode == "lasttoken":
        last = weights.shape[1] - 1 - weights[:, ::-1].argmax(axis=1)
        return np.asarray(hidden[rows, last])
    if mode == "max":
        return np.asarray(np.where(weights[:, :, None] > 0, hidden, np.float32(-1e9)).max(axis=1))
    if mode == "weightedmean":  # later tokens weigh more (SGPT, Muennighoff 2022)
        weights = weights * np.cumsum(weights, axis=1)
    total = np.einsum("btw,bt->bw", hidden, weights)
    count = np.maximum(weights.sum(axis=1, keepdims=True), 1e-9)
    if mode in ("mean", "weightedmean"):
        return np.asarray(total / count, dtype=np.float32)
    if mode == "mean_sqrt_len_tokens":
        return np.asarray(total / np.sqrt(count), dtype=np.float32)
    raise InputError(f"unknown pooling `{mode}`", hints=["known: " + ", ".join(POOLING)])


def pooling_recipe(artifact: Artifact, options: dict[str, Any]) -> Recipe:
    """The package's pooling recipe with the options' choices laid over it.

    Raises ``InputError`` (``recipe.missing``) when neither says how to pool.
    """
    stored = artifact.recipe if artifact.recipe is not None and artifact.recipe.kind == "pooling" else None
    settings = dict(stored.settings) if stored else {}
    changed = False
    for name, value in (("pooling", options.get("pooling")), ("max_length", options.get("max_length"))):
        if value is not None and str(settings.get(name)) != str(value):
            settings[name], changed = (int(value) if name == "max_length" else str(value)), True
    if options.get("normalize") is not None and bool(settings.get("normalize")) != truthy(options["normalize"]):
        settings["normalize"], changed = truthy(options["normalize"]), True
    for mode in _modes(settings):
        if mode not in POOLING:
            raise InputError(f"unknown pooling `{mode}`", hints=["known: " + ", ".join(POOLING)])
    if stored is not None and not changed:
        return stored
    return Recipe("pooling", settings, "option:pooling", Strength.DECLARED)


def _modes(settings: dict[str, Any]) -> list[str]:
    value = settings.get("pooling") or []
    modes = value if isinstance(value, (list, tuple)) else str(value).replace("+", ",").split(",")
    return [str(mode).strip() for mode in modes]


class EmbeddingsAdapter:
    """Texts to vectors of one recipe: cut, run, pool, scale."""

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self._recipe = pooling_recipe(artifact, options)
        settings = self._recipe.settings
        self.recipe = self._recipe.id
        self.modes = _modes(settings)
        self.normalize = bool(settings.get("normalize", False))
        self._chosen = options.get("pooling") is not None
        self._lower = bool(settings.get("lower_case", settings.get("do_lower_case", False)))
        length = settings.get("max_length") or settings.get("max_seq_length")
        self.encoder = TextEncoder(root, artifact, options, cut=True, limit=int(length) if length else None)

    def run(self, request: Request, infer: Infer) -> EmbeddingsOutput:
        """Vectors float32 [texts, dimension] in the request's order.

        ``request.options["prompt_name"]`` picks one of the recipe's prompts.
        """
        import numpy as np

        prompt = self._prompt(request)
        texts = [prompt + (text.lower() if self._lower else text) for text in request.inputs["texts"]]
        vectors: list[NDArray[Any] | None] = [None] * len(texts)
        for batch in self.encoder.encode(texts):
            pooled = self._pooled(infer(batch.inputs), self._mask(batch.inputs["attention_mask"], prompt))
            for row, vector in zip(batch.rows, pooled, strict=False):  # a fixed batch has copies at its end
                vectors[row] = vector
        result = np.stack([vector for vector in vectors if vector is not None]).astype(np.float32)
        if self.normalize:
            result = result / np.maximum(np.linalg.norm(result, axis=1, keepdims=True), 1e-12)
        return EmbeddingsOutput(result, int(result.shape[1]), self.normalize, self.recipe)

    def _pooled(self, outputs: dict[str, Any], mask: NDArray[Any]) -> NDArray[Any]:
        import numpy as np

        named = next((name for name in POOLED_OUTPUTS if name in outputs and np.ndim(outputs[name]) == 2), None)
        if named is None and len(outputs) == 1 and np.ndim(next(iter(outputs.values()))) == 2:
            named = next(iter(outputs))
        if named is not None and not self._chosen:
            return np.asarray(outputs[named], dtype=np.float32)
        if not self.modes or not self.modes[0]:
            raise InputError(
                "nothing says how to pool hidden states",
                code="recipe.missing",
                hints=["choose with `--option pooling=mean`"],
            )
        if self._recipe.settings.get("dense"):
            raise NotSupportedError(
                "the recipe ends with a dense layer, which only sentence-transformers applies", code="recipe.conflict"
            )
        hidden = output_of(outputs, HIDDEN_OUTPUTS, 3)
        return np.concatenate([pool(hidden, mask, mode) for mode in self.modes], axis=1)

    def _prompt(self, request: Request) -> str:
        prompts = self._recipe.settings.get("prompts") or {}
        name = request.options.get("prompt_name") or self._recipe.settings.get("default_prompt")
        if not name:
            return ""
        if name not in prompts:
            raise InputError(f"the package has no prompt `{name}`", hints=["it has: " + ", ".join(sorted(prompts))])
        return str(prompts[name])

    def _mask(self, mask: NDArray[Any], prompt: str) -> NDArray[Any]:
        """The attention mask, without the prompt's tokens where the recipe leaves them out."""
        if not prompt or self._recipe.settings.get("include_prompt", True):
            return mask
        encoding = self.encoder.tokenizer.encode(prompt)
        # Closing special tokens of the prompt alone are not part of the prompt in front of a text.
        ends = list(encoding.special_tokens_mask)
        count = len(ends)
        while count and ends[count - 1]:
            count -= 1
        masked = mask.copy()
        masked[:, :count] = 0
        return masked


# ---- classification --------------------------------------------------------------------


class TextClassificationAdapter:
    """Texts to classes: softmax over one label, sigmoid over several, raw values for regression."""

    recipe = ""

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self.encoder = TextEncoder(root, artifact, options, cut=False)
        self.problem = artifact.labels.problem_type if artifact.labels else None
        if self.problem is None and artifact.architecture is not None:
            self.problem = artifact.architecture.config.get("problem_type")
        self._artifact, self._options = artifact, options

    def run(self, request: Request, infer: Infer) -> LabelsOutput:
        """All classes of each text, best first. The score of a regression is its value."""
        texts = request.inputs["texts"]
        found: list[list[LabelScore]] = [[] for _ in texts]
        for batch in self.encoder.encode(texts):
            logits = output_of(infer(batch.inputs), ("logits", "output", "scores"), 2)  # [batch, classes]
            names = label_names(self._artifact, self._options, logits.shape[1])
            for row, scores in zip(batch.rows, self._scores(logits), strict=False):
                found[row] = ranked_labels(scores, names)
        return LabelsOutput(found)

    def _scores(self, logits: NDArray[Any]) -> NDArray[Any]:
        if self.problem == "regression":
            return logits
        if self.problem == "multi_label_classification" or logits.shape[1] == 1:
            return sigmoid(logits)
        return softmax(logits)


def ranked_labels(scores: NDArray[Any], names: Sequence[str]) -> list[LabelScore]:
    """Classes with their scores [classes], best first, ties by index."""
    import numpy as np

    order = np.argsort(-scores, kind="stable")
    return [LabelScore(names[i], float(scores[i]), int(i)) for i in order]


class RerankAdapter:
    """A query and documents to documents by relevance; the score is the head's logit.

    A head with two labels gives the difference of its logits (log-odds of the second label). With
    ``request.options["normalize"]`` the score is its sigmoid instead. Pairs are cut to the model's
    length, the longer text first.
    """

    recipe = ""

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        settings = artifact.recipe.settings if artifact.recipe else {}
        length = settings.get("max_length")
        self.encoder = TextEncoder(root, artifact, options, cut=True, limit=int(length) if length else None)

    def run(self, request: Request, infer: Infer) -> RankingOutput:
        """All documents, best first."""
        query, documents = request.inputs["query"], request.inputs["documents"]
        scores = [0.0] * len(documents)
        for batch in self.encoder.encode([(query, document) for document in documents]):
            logits = output_of(infer(batch.inputs), ("logits", "output", "scores"), 2)
            for row, score in zip(batch.rows, self._relevance(logits), strict=False):
                scores[row] = float(score)
        if truthy(request.options.get("normalize")):
            import numpy as np

            scores = [float(score) for score in sigmoid(np.array(scores))]
        order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
        return RankingOutput([RankedDocument(i, scores[i]) for i in order])

    def _relevance(self, logits: NDArray[Any]) -> NDArray[Any]:
        if logits.shape[1] == 1:
            return logits[:, 0]
        if logits.shape[1] == 2:
            result: NDArray[Any] = logits[:, 1] - logits[:, 0]
            return result
        raise NotSupportedError(
            f"a head with {logits.shape[1]} labels does not say which one is relevance", code="task.conflict"
        )


# ---- tokens ----------------------------------------------------------------------------


class TokenClassificationAdapter:
    """Texts to labelled spans: neighbouring tokens of one entity are joined, ``O`` is dropped.

    Reads BIO, BIOES, BILOU and plain labels. A span's score is the mean of its tokens' probabilities.
    """

    recipe = ""

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self.encoder = TextEncoder(root, artifact, options, cut=False)
        self._artifact, self._options = artifact, options

    def run(self, request: Request, infer: Infer) -> SpansOutput:
        """Spans of each text in order; positions count characters of the text."""
        texts = request.inputs["texts"]
        found: list[list[Span]] = [[] for _ in texts]
        for batch in self.encoder.encode(texts):
            logits = output_of(infer(batch.inputs), ("logits", "output"), 3)  # [batch, tokens, classes]
            names = label_names(self._artifact, self._options, logits.shape[2])
            for row, encoding, scores in zip(batch.rows, batch.encodings, softmax(logits), strict=False):
                found[row] = spans_of(texts[row], encoding, scores, names)
        return SpansOutput(found)


def spans_of(text: str, encoding: Any, scores: NDArray[Any], names: Sequence[str]) -> list[Span]:
    """Entities of one text from the class probabilities of its tokens [tokens, classes]."""
    groups: list[tuple[str, int, int, list[float]]] = []
    open_kind = ""  # entity that the next inside-token may continue; '' for none
    for index, (start, end) in enumerate(encoding.offsets):
        if encoding.special_tokens_mask[index] or end <= start:
            continue
        best = int(scores[index].argmax())
        mark, kind = _split_label(names[best])
        if kind == "O":
            open_kind = ""
            continue
        if kind != open_kind or mark in ("B", "S", "U"):
            groups.append((kind, start, end, []))
        name, first, _, values = groups[-1]
        groups[-1] = (name, first, end, values)
        values.append(float(scores[index, best]))
        open_kind = "" if mark in ("E", "S", "L", "U") else kind
    return [_trimmed(text, *group) for group in groups]


def _split_label(label: str) -> tuple[str, str]:
    """Mark and kind of a label: ``B-PER`` is (B, PER); a plain label has the mark I."""
    if len(label) > 2 and label[1] in "-_" and label[0] in "BIESLU":
        return label[0], label[2:]
    return "I", label


def _trimmed(text: str, kind: str, start: int, end: int, values: list[float]) -> Span:
    while start < end and text[start].isspace():
        start += 1
    while end > start and text[end - 1].isspace():
        end -= 1
    return Span(start, end, text[start:end], kind, sum(values) / len(values))


class FillMaskAdapter:
    """Texts with one mask token to the likeliest tokens in its place."""

    recipe = ""

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self.encoder = TextEncoder(root, artifact, options, cut=False)
        tokenizer = self.encoder.tokenizer
        stored = [
            settings_of(place if place.is_dir() else place.parent)
            for place in tokenizer_places(root, artifact, options)
        ]
        names = [*(token_text(settings.get("mask_token")) for settings in stored), "[MASK]", "<mask>"]
        self.mask = next((name for name in names if name and tokenizer.token_to_id(name) is not None), "")
        if not self.mask:
            raise NotSupportedError("the tokenizer has no mask token", code="tokenizer.unsupported_kind")
        self.mask_id = tokenizer.token_to_id(self.mask)

    def run(self, request: Request, infer: Infer) -> LabelsOutput:
        """The ``request.options["top_k"]`` (5) likeliest tokens per text with their probabilities."""
        import numpy as np

        texts = [
            str(text).replace("[MASK]", self.mask).replace("<mask>", self.mask) for text in request.inputs["texts"]
        ]
        count = int(request.options.get("top_k") or 5)
        found: list[list[LabelScore]] = [[] for _ in texts]
        for batch in self.encoder.encode(texts):
            places = [[i for i, t in enumerate(e.ids) if t == self.mask_id] for e in batch.encodings]
            for row, place in zip(batch.rows, places, strict=True):
                if len(place) != 1:
                    raise InputError(f"text {row + 1} has {len(place)} mask tokens, one `{self.mask}` is needed")
            logits = output_of(infer(batch.inputs), ("logits", "output"), 3)  # [batch, tokens, vocab]
            for index, row in enumerate(batch.rows):
                scores = softmax(logits[index, places[index][0]])
                order = np.argsort(-scores, kind="stable")[:count]
                found[row] = [LabelScore(self._token(int(i)), float(scores[i]), int(i)) for i in order]
        return LabelsOutput(found)

    def _token(self, index: int) -> str:
        text: str = self.encoder.tokenizer.decode([index], skip_special_tokens=False)
        return text.strip() or str(self.encoder.tokenizer.id_to_token(index))


class QuestionAnsweringAdapter:
    """A question and a context to the likeliest answer span of the context."""

    recipe = ""
    longest = 30  # tokens of an answer, as in Transformers' pipeline

    def __init__(self, root: str, artifact: Artifact, options: dict[str, Any]) -> None:
        self.encoder = TextEncoder(root, artifact, options, cut=False)

    def run(self, request: Request, infer: Infer) -> SpansOutput:
        """The best span, label ``answer``; its score is the product of both ends' probabilities."""
        import numpy as np

        context = request.inputs["context"]
        batch = next(iter(self.encoder.encode([(request.inputs["question"], context)])))
        outputs, encoding = infer(batch.inputs), batch.encodings[0]
        count = len(encoding.ids)
        allowed = np.array([s == 1 for s in encoding.sequence_ids])
        ends = []
        for name in ("start_logits", "end_logits"):
            logits = output_of(outputs, (name,), 2)[0, :count]
            ends.append(softmax(np.where(allowed, logits, np.float32(-1e9))))
        table = np.triu(np.outer(ends[0], ends[1]))  # [start, end]
        table = np.tril(table, self.longest - 1)
        first, last = np.unravel_index(int(table.argmax()), table.shape)
        start, end = encoding.offsets[first][0], encoding.offsets[last][1]
        return SpansOutput([[_trimmed(context, "answer", start, end, [float(table[first, last])])]])
