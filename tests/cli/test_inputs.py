"""What is typed becomes the inputs of a contract, or an error that names the value and the place."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from turnout.cli.inputs import Typed, inputs_of
from turnout.cli.options import parse_options
from turnout.errors import InputError, UsageError
from turnout.package.facts import Artifact, ArtifactKind, Graph, GraphPort
from turnout.tasks.contract import CONTRACTS, validate
from turnout.types import Modality, Request


def typed(*values: str, texts: tuple[str, ...] = (), system: str | None = None, stdin: str = "") -> Typed:
    return Typed(values, texts, system, lambda: stdin)


def test_chat_takes_a_text_and_a_system_message() -> None:
    given = inputs_of("chat", typed("hi", system="be brief"))
    assert given == {"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}
    assert inputs_of("chat", typed(stdin="from a pipe\n"))["messages"][-1]["content"] == "from a pipe"
    assert inputs_of("chat", typed("-", stdin="a\nb\n"))["messages"][-1]["content"] == "a\nb"


def test_texts_come_from_arguments_options_and_lines() -> None:
    assert inputs_of("embeddings", typed("a", texts=("b",))) == {"texts": ["a", "b"]}
    assert inputs_of("embeddings", typed("a", "-", stdin="b\n\nc\n")) == {"texts": ["a", "b", "c"]}
    assert inputs_of("text-classification", typed(stdin="one\ntwo")) == {"texts": ["one", "two"]}


@pytest.mark.parametrize(
    ("task", "given", "said"),
    [
        ("chat", typed(), "`chat` needs a text"),
        ("chat", typed("what", "is", "this"), "takes one text, got 3"),
        ("text-generation", typed("a", system="b"), "`--system` is for chat"),
        ("embeddings", typed(), "needs at least one text"),
        ("rerank", typed("only a query"), "needs `query`, then `documents`"),
        ("image-classification", typed(), "takes one image file, got 0"),
        ("image-classification", typed("absent.png"), "no image file at `absent.png`"),
        ("voice-activity-detection", typed("absent.wav"), "no audio file at `absent.wav`"),
        ("tabular-regression", typed("absent.csv"), "no table at `absent.csv`"),
        ("tensor", typed(), "needs at least one array"),
        ("tensor", typed("x=absent.npy"), "no array file at `absent.npy`"),
        ("no-such-task", typed("x"), "unknown task `no-such-task`"),
    ],
)
def test_refusals_name_the_value(task: str, given: Typed, said: str) -> None:
    with pytest.raises(InputError) as caught:
        inputs_of(task, given)
    assert said in caught.value.message
    assert caught.value.exit_status == 2


def test_rerank_takes_a_query_then_documents() -> None:
    assert inputs_of("rerank", typed("q", "a", texts=("b",))) == {"query": "q", "documents": ["a", "b"]}


def test_a_table_keeps_its_columns_and_text(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text('\ufeffage, "income"\n1,2.5\n\n3,"1,000"\n', encoding="utf-8")
    assert inputs_of("tabular-classification", typed(str(path))) == {
        "table": {"columns": ["age", '"income"'], "rows": [["1", "2.5"], ["3", "1,000"]]}
    }
    path.write_text("a,b\n1,2\n3\n")
    with pytest.raises(InputError, match="line 3 of .* has 1 values, the header has 2"):
        inputs_of("tabular-classification", typed(str(path)))
    path.write_text("a,b\n")
    with pytest.raises(InputError, match="no rows"):
        inputs_of("tabular-classification", typed(str(path)))


def artifact_with_inputs(*names: str) -> Artifact:
    graph = Graph(inputs=[GraphPort(name, "float32") for name in names])
    return Artifact("onnx:m.onnx", ArtifactKind.ONNX, "m.onnx", graph=graph)


def test_arrays_are_named_by_pair_archive_or_lone_input(tmp_path: Path) -> None:
    one, archive = tmp_path / "one.npy", tmp_path / "all.npz"
    np.save(one, np.arange(3.0))
    np.savez(archive, x=np.zeros((1, 2), np.float32), y=np.ones(1, np.int64))
    assert list(inputs_of("tensor", typed(f"x={one}"))["tensors"]) == ["x"]
    assert sorted(inputs_of("tensor", typed(str(archive), f"z={one}"))["tensors"]) == ["x", "y", "z"]
    lone = inputs_of("tensor", typed(str(one)), artifact_with_inputs("input"))
    assert lone["tensors"]["input"].tolist() == [0, 1, 2]
    with pytest.raises(InputError) as caught:
        inputs_of("tensor", typed(str(one)), artifact_with_inputs("a", "b"))
    assert "inputs of the graph: a, b" in caught.value.hints


def test_pickled_arrays_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "objects.npy"
    np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(InputError, match="no .npy or .npz file"):
        inputs_of("tensor", typed(f"x={path}"))
    path.write_bytes(b"not an array")
    with pytest.raises(InputError, match="no .npy or .npz file"):
        inputs_of("tensor", typed(f"x={path}"))


def test_what_is_built_fits_its_contract(tmp_path: Path) -> None:
    table, array = tmp_path / "t.csv", tmp_path / "a.npy"
    table.write_text("a\n1\n")
    np.save(array, np.zeros(1))
    samples = {
        "tabular-classification": [str(table)],
        "tabular-regression": [str(table)],
        "tensor": [f"x={array}"],
        "rerank": ["q", "d"],
        "question-answering": ["q", "c"],
        "zero-shot-classification": ["text", "label"],
        "decision": [f"{name}={array}" for name in ("states", "actions", "returns_to_go", "timesteps")],
    }
    for task in CONTRACTS:
        takes_file = bool({port.kind for port in CONTRACTS[task].inputs} & {Modality.IMAGE, Modality.AUDIO})
        values = samples.get(task, [str(array) if takes_file else "text"])
        try:
            given = inputs_of(task, typed(*values))
        except InputError as error:
            assert "cannot be asked from the command line yet" in error.message, task
            continue
        validate(Request(task, given))


def test_options_are_known_and_typed() -> None:
    assert parse_options(["normalize=true", "max_length=128", "threshold=0.5", "pooling=mean", "labels=a=b"]) == {
        "normalize": True,
        "max_length": 128,
        "threshold": 0.5,
        "pooling": "mean",
        "labels": "a=b",
    }
    assert parse_options(None) == {}
    with pytest.raises(UsageError) as caught:
        parse_options(["poling=mean"])
    assert caught.value.hints == ("did you mean `pooling`?",)
    with pytest.raises(UsageError, match="has no value"):
        parse_options(["pooling"])
