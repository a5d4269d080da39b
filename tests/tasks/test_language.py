"""Language adapters against results worked out by hand; the graphs are plain functions."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from turnout.errors import InputError, NotSupportedError
from turnout.package.facts import Artifact, ArtifactKind, Graph, GraphPort, Labels, Recipe
from turnout.package.facts import Tokenizer as TokenizerFacts
from turnout.tasks.adapter import adapter_for
from turnout.tasks.language import (
    EmbeddingsAdapter,
    QuestionAnsweringAdapter,
    Seq2SeqGenerator,
    Stopper,
    TextStream,
    generator,
    load_tokenizer,
    pool,
    sample,
)
from turnout.types import Request, Sampling

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "alice", "smith", "went", "to", "paris", "acme", "x"]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a word-level tokenizer that wraps texts as BERT does."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens(WORDS[:5])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    # Stored padding and truncation (as all-MiniLM's file has them) must not leak into results.
    tokenizer.enable_padding(length=16)
    tokenizer.enable_truncation(4)
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def artifact(**more: object) -> Artifact:
    """An artifact with nothing but what a test names."""
    return Artifact(id="onnx:model.onnx", kind=ArtifactKind.ONNX, entry="model.onnx", **more)  # type: ignore[arg-type]


def one_hot(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hidden states that tell their token: 1 at its id; padding gives noise that must be masked."""
    hidden = np.eye(len(WORDS), dtype=np.float32)[inputs["input_ids"]]
    hidden[inputs["attention_mask"] == 0] = 77.0
    return {"last_hidden_state": hidden}


HIDDEN = np.array([[[1.0, 4.0], [3.0, 2.0], [9.0, 9.0]]], dtype=np.float32)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("mean", [2.0, 3.0]),
        ("cls", [1.0, 4.0]),
        ("lasttoken", [3.0, 2.0]),
        ("max", [3.0, 4.0]),
        ("mean_sqrt_len_tokens", [4 / 2**0.5, 6 / 2**0.5]),
        ("weightedmean", [(1 + 2 * 3) / 3, (4 + 2 * 2) / 3]),
    ],
)
def test_pooling_modes_on_either_side(mode: str, expected: list[float]) -> None:
    right = pool(HIDDEN, np.array([[1, 1, 0]]), mode)
    left = pool(HIDDEN[:, [2, 0, 1]], np.array([[0, 1, 1]]), mode)
    np.testing.assert_allclose(right[0], expected, rtol=1e-6)
    np.testing.assert_allclose(left[0], expected, rtol=1e-6)


def test_embeddings_keep_order_and_ignore_padding(root: Path) -> None:
    facts = artifact(recipe=Recipe("pooling", {"pooling": "mean", "normalize": True}))
    adapter = adapter_for(str(root), facts, "embeddings", {})
    texts = ["alice went to paris", "x", "acme x"]
    output = adapter.run(Request("embeddings", {"texts": texts}), one_hot)
    for text, vector in zip(texts, output.vectors, strict=True):
        counts = np.zeros(len(WORDS))
        for word in ["[CLS]", *text.split(), "[SEP]"]:
            counts[WORDS.index(word)] += 1
        np.testing.assert_allclose(vector, counts / np.linalg.norm(counts), atol=1e-6)
    assert output.recipe == facts.recipe.id and output.normalized and output.vectors.dtype == np.float32


def test_embedding_options_change_the_recipe_id(root: Path) -> None:
    facts = artifact(recipe=Recipe("pooling", {"pooling": "mean", "normalize": True}))
    same = EmbeddingsAdapter(str(root), facts, {"pooling": "mean"})
    other = EmbeddingsAdapter(str(root), facts, {"pooling": "cls", "normalize": "false"})
    assert same.recipe == facts.recipe.id != other.recipe
    assert not other.normalize


def test_embeddings_take_a_pooled_output_unless_pooling_is_chosen(root: Path) -> None:
    def infer(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**one_hot(inputs), "sentence_embedding": np.full((len(inputs["input_ids"]), 2), 3.0)}

    request = Request("embeddings", {"texts": ["x"]})
    assert EmbeddingsAdapter(str(root), artifact(), {}).run(request, infer).vectors.tolist() == [[3.0, 3.0]]
    chosen = EmbeddingsAdapter(str(root), artifact(), {"pooling": "cls"}).run(request, infer)
    assert chosen.vectors[0].argmax() == WORDS.index("[CLS]")
    with pytest.raises(InputError, match="how to pool"):
        EmbeddingsAdapter(str(root), artifact(), {}).run(request, one_hot)


def test_embeddings_cut_at_max_length_and_use_prompts(root: Path) -> None:
    settings = {"pooling": "max", "max_length": 4, "prompts": {"query": "alice "}, "include_prompt": False}
    adapter = EmbeddingsAdapter(str(root), artifact(recipe=Recipe("pooling", settings)), {})
    seen: list[np.ndarray] = []

    def infer(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        seen.append(inputs["input_ids"])
        return one_hot(inputs)

    request = Request("embeddings", {"texts": ["smith went to paris"]}, options={"prompt_name": "query"})
    output = adapter.run(request, infer)
    assert [WORDS[i] for i in seen[0][0]] == ["[CLS]", "alice", "smith", "[SEP]"]
    assert [WORDS[i] for i in np.flatnonzero(output.vectors[0])] == ["[SEP]", "smith"]


def test_fixed_shapes_are_filled(root: Path) -> None:
    port = GraphPort("input_ids", "int64", [2, 6])
    facts = artifact(graph=Graph(inputs=[port]), recipe=Recipe("pooling", {"pooling": "mean"}))
    shapes = []

    def infer(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        shapes.append(inputs["input_ids"].shape)
        return one_hot(inputs)

    output = adapter_for(str(root), facts, "embeddings", {}).run(
        Request("embeddings", {"texts": ["x", "x", "acme"]}), infer
    )
    assert shapes == [(2, 6), (2, 6)] and output.vectors.shape == (3, len(WORDS))


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        (None, [0.7310586, 0.2689414]),
        ("multi_label_classification", [0.7310586, 0.5]),
        ("regression", [1.0, 0.0]),
    ],
)
def test_text_classification_scores(root: Path, problem: str | None, expected: list[float]) -> None:
    facts = artifact(labels=Labels(["bad", "good"], "config.json", problem))
    adapter = adapter_for(str(root), facts, "text-classification", {})
    output = adapter.run(Request("text-classification", {"texts": ["x"]}), lambda _: {"logits": np.array([[0.0, 1.0]])})
    assert [s.label for s in output.labels[0]] == ["good", "bad"]
    assert [s.score for s in output.labels[0]] == pytest.approx(expected)


def test_classification_refuses_too_long_text_and_wrong_labels(root: Path) -> None:
    facts = artifact(tokenizer=TokenizerFacts("WordLevel", "tokenizer.json", max_length=4))
    adapter = adapter_for(str(root), facts, "text-classification", {})
    request = Request("text-classification", {"texts": ["alice went to paris"]})
    with pytest.raises(InputError, match="6 tokens, the model takes 4"):
        adapter.run(request, lambda _: {"logits": np.zeros((1, 2))})
    cutting = adapter_for(str(root), facts, "text-classification", {"max_length": "4"})
    assert cutting.run(request, lambda i: {"logits": np.zeros((1, i["input_ids"].shape[1]))}).labels[0][3].index == 3
    named = artifact(labels=Labels(["one"], "config.json"))
    with pytest.raises(NotSupportedError, match="names 1 classes, the model gives 2"):
        adapter_for(str(root), named, "text-classification", {}).run(request, lambda _: {"logits": np.zeros((1, 2))})


def test_rerank_orders_pairs(root: Path) -> None:
    def infer(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        # Relevance: whether the second text (type 1) names paris.
        second = (inputs["input_ids"] == WORDS.index("paris")) & (inputs["token_type_ids"] == 1)
        return {"logits": second.sum(axis=1, keepdims=True).astype(np.float32) * 2 - 1}

    adapter = adapter_for(str(root), artifact(), "rerank", {})
    inputs = {"query": "paris", "documents": ["x", "went to paris", "acme"]}
    ranking = adapter.run(Request("rerank", inputs), infer).ranking
    assert [(d.index, d.score) for d in ranking] == [(1, 1.0), (0, -1.0), (2, -1.0)]
    scaled = adapter.run(Request("rerank", inputs, options={"normalize": True}), infer).ranking
    assert scaled[0].score == pytest.approx(1 / (1 + np.exp(-1)))
    with pytest.raises(NotSupportedError, match="3 labels"):
        adapter.run(Request("rerank", inputs), lambda i: {"logits": np.zeros((len(i["input_ids"]), 3))})


@pytest.mark.parametrize(
    ("names", "labels", "expected"),
    [
        (["O", "B-PER", "I-PER", "B-LOC"], [1, 2, 0, 0, 3], [("alice smith", "PER"), ("paris", "LOC")]),
        (["O", "B-PER", "I-PER"], [1, 1, 0, 0, 2], [("alice", "PER"), ("smith", "PER"), ("paris", "PER")]),
        (["O", "B-PER", "E-PER", "S-PER"], [1, 2, 0, 0, 3], [("alice smith", "PER"), ("paris", "PER")]),
        (["O", "PERSON", "CITY"], [1, 1, 0, 0, 2], [("alice smith", "PERSON"), ("paris", "CITY")]),
    ],
)
def test_token_classification_joins_entities(
    root: Path, names: list[str], labels: list[int], expected: list[tuple[str, str]]
) -> None:
    def infer(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        logits = np.zeros((1, inputs["input_ids"].shape[1], len(names)), dtype=np.float32)
        for place, label in enumerate([0, *labels, 0]):
            logits[0, place, label] = 50.0
        return {"logits": logits}

    facts = artifact(labels=Labels(names, "config.json"))
    text = "alice smith went to paris"
    spans = (
        adapter_for(str(root), facts, "token-classification", {})
        .run(Request("token-classification", {"texts": [text]}), infer)
        .spans[0]
    )
    assert [(s.text, s.label) for s in spans] == expected
    assert all(text[s.start : s.end] == s.text and s.score == pytest.approx(1.0) for s in spans)


def test_fill_mask_needs_exactly_one_mask(root: Path) -> None:
    adapter = adapter_for(str(root), artifact(), "fill-mask", {})

    def infer(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        logits = np.zeros((*inputs["input_ids"].shape, len(WORDS)), dtype=np.float32)
        logits[0, 3, WORDS.index("paris")] = 9.0
        return {"logits": logits}

    request = Request("fill-mask", {"texts": ["went to [MASK]"]}, options={"top_k": 2})
    best = adapter.run(request, infer).labels[0]
    assert len(best) == 2 and best[0].label == "paris" and best[0].score > 0.99
    with pytest.raises(InputError, match="has 0 mask tokens"):
        adapter.run(Request("fill-mask", {"texts": ["x"]}), infer)


def test_question_answering_stays_inside_the_context(root: Path) -> None:
    def infer(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        start = np.where(inputs["input_ids"] == WORDS.index("paris"), 9.0, 0.0)  # also in the question
        return {"start_logits": start, "end_logits": np.where(inputs["input_ids"] == WORDS.index("acme"), 9.0, 0.0)}

    inputs = {"question": "paris x", "context": "alice went to paris acme"}
    span = (
        QuestionAnsweringAdapter(str(root), artifact(), {})
        .run(Request("question-answering", inputs), infer)
        .spans[0][0]
    )
    assert (span.text, span.label) == ("paris acme", "answer") and span.score > 0.9


# ---- tokenizers ------------------------------------------------------------------------


def test_tokenizer_from_wordpiece_vocabulary(tmp_path: Path) -> None:
    (tmp_path / "vocab.txt").write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "un", "##able", "a"]))
    encoding = load_tokenizer(str(tmp_path), artifact(), {}).encode("Unable A", "a")
    assert encoding.tokens == ["[CLS]", "un", "##able", "a", "[SEP]", "a", "[SEP]"]
    assert encoding.type_ids == [0, 0, 0, 0, 0, 1, 1]


def test_tokenizer_named_by_option_or_refused(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    empty = tmp_path_factory.mktemp("empty")
    named = load_tokenizer(str(empty), artifact(), {"tokenizer": str(root / "tokenizer.json")})
    assert named.encode("x").tokens == ["[CLS]", "x", "[SEP]"]
    with pytest.raises(InputError) as missing:
        load_tokenizer(str(empty), artifact(), {})
    assert missing.value.code == "tokenizer.missing"
    with pytest.raises(InputError, match="there is no tokenizer at"):
        load_tokenizer(str(empty), artifact(), {"tokenizer": "nowhere"})


# ---- decoding --------------------------------------------------------------------------


def test_sample_is_greedy_seeded_and_bounded() -> None:
    logits = np.array([0.0, 3.0, 2.0, 1.0])
    assert sample(logits, Sampling(), generator(None)) == 1
    hot = Sampling(temperature=5.0, top_k=2)
    drawn = [sample(logits, hot, rng) for rng in [generator(7)] for _ in range(200)]
    assert set(drawn) == {1, 2}
    assert drawn == [sample(logits, hot, rng) for rng in [generator(7)] for _ in range(200)]
    share = drawn.count(1) / len(drawn)
    assert share == pytest.approx(1 / (1 + np.exp(-1 / 5)), abs=0.1)
    assert {sample(logits, Sampling(temperature=1.0, top_p=0.1), generator(i)) for i in range(20)} == {1}


def test_sample_refuses_numbers_that_are_not_finite() -> None:
    with pytest.raises(NotSupportedError, match="not finite"):
        sample(np.array([np.nan, 1.0]), Sampling(), generator(0))


def test_stopper_holds_back_what_may_become_a_stop() -> None:
    stopper = Stopper(["END", "\n\n"])
    assert [stopper.feed(piece) for piece in ["a E", "N", "x\n", "b", "EN", "D c"]] == ["a ", "", "ENx", "\nb", "", ""]
    assert stopper.stopped and stopper.finish() == ""
    open_end = Stopper(["END"])
    assert open_end.feed("xE") == "x" and open_end.finish() == "E"


def test_text_stream_waits_for_whole_characters() -> None:
    data = "é €!".encode()
    pieces: list[str] = []
    stream = TextStream(lambda ids: bytes(ids).decode("utf-8", "replace"), [], pieces.append)
    for byte in data:
        stream.feed(byte)
    assert stream.finish() == "é €!" == "".join(pieces) and pieces[0] == "é"


def test_seq2seq_loop_feeds_back_and_ends_at_eos(root: Path) -> None:
    calls: list[list[int]] = []

    def encode(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {"last_hidden_state": inputs["input_ids"][..., None].astype(np.float32)}

    def decode(inputs: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        calls.append(inputs["input_ids"][0].tolist())
        source = inputs["encoder_hidden_states"][0, :, 0].astype(int)  # repeats the words, then ends
        place = len(calls[-1])
        logits = np.zeros((1, place, len(WORDS)), dtype=np.float32)
        logits[0, -1, 1 if source[place] == 3 else source[place]] = 5.0
        return {"logits": logits}

    made = Seq2SeqGenerator(str(root), artifact(), {})
    pieces: list[str] = []
    output = made.generate(Request("text2text-generation", {"text": "alice went"}), encode, decode, pieces.append)
    assert (output.text, output.finish_reason, output.prompt_tokens, output.completion_tokens) == (
        "alice went",
        "stop",
        4,
        2,
    )
    assert "".join(pieces) == output.text and calls == [[0], [0, 5], [0, 5, 7]]
    short = made.generate(
        Request("text2text-generation", {"text": "alice went"}, Sampling(max_tokens=1)), encode, decode
    )
    assert (short.text, short.finish_reason) == ("alice", "length")
