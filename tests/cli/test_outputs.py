"""Every kind of result can be printed, cut by a pipe, and kept in a file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from turnout.cli import outputs, printer
from turnout.errors import UsageError
from turnout.tasks import contract as c

EMBEDDINGS = c.EmbeddingsOutput(np.linspace(0, 1, 16, dtype=np.float32).reshape(2, 8), 8, True, "pooling-1")
TENSORS = c.TensorsOutput({"logits": np.arange(8, dtype=np.float32).reshape(2, 4), "ids": np.array([3], np.int64)})
SAMPLES: list[tuple[Any, str]] = [
    (c.TextOutput("Paris."), "Paris."),
    (c.LabelsOutput([[c.LabelScore("cat", 0.75), c.LabelScore("dog", 0.25)]]), "cat\t0.7500"),
    (c.SpansOutput([[c.Span(0, 4, "John", "GIVEN_NAME", 0.996)]]), "0\t4\tGIVEN_NAME\t0.9960\tJohn"),
    (c.RankingOutput([c.RankedDocument(1, 2.5)]), "1\t2.5000"),
    (c.SegmentsOutput([c.Segment(1.0, 6.25, "", 0.9)]), "1.000\t6.250\t0.900"),
    (c.BoxesOutput([c.Box(1, 2, 3, 4, "cup", 0.5)]), "cup\t0.5000\t1.0\t2.0\t3.0\t4.0"),
    (c.TableOutput(["label", "p"], [["yes, sure", 0.5]]), 'label,p\n"yes, sure",0.5'),
    (c.ForecastOutput([1.0, 2.0], {"0.1": [0.5, 1.5]}), "1\t0.5"),
    (c.ImageOutput([np.zeros((4, 6, 3), np.uint8)]), "image 1: 6 x 4 pixels"),
    (c.AudioOutput(np.zeros(800, np.float32), 16000), "0.05 s of sound at 16000 Hz"),
    (EMBEDDINGS, "0 0.066666"),
    (TENSORS, "logits\tfloat32\t[2, 4]\t0 1 2 3 4 5 6 7"),
]


@pytest.mark.parametrize(("output", "said"), SAMPLES, ids=lambda v: type(v).__name__ if not isinstance(v, str) else "")
def test_each_output_has_lines(output: Any, said: str) -> None:
    assert said in "\n".join(outputs.lines(output, whole=True))


def test_every_contract_has_a_form() -> None:
    assert {contract.output_type for contract in c.CONTRACTS.values()} <= set(outputs._RENDERERS)


def test_a_terminal_gets_a_preview() -> None:
    first = next(outputs.lines(EMBEDDINGS, whole=False))
    assert first.endswith("8 values") and first.count(",") == outputs.PREVIEW
    assert next(outputs.lines(TENSORS, whole=False)).endswith(" ...")


def test_saved_arrays_and_sound_come_back(tmp_path: Path) -> None:
    outputs.save(EMBEDDINGS, str(tmp_path / "v.npy"))
    assert np.array_equal(np.load(tmp_path / "v.npy"), EMBEDDINGS.vectors)
    outputs.save(TENSORS, str(tmp_path / "t.npz"))
    with np.load(tmp_path / "t.npz") as back:
        assert np.array_equal(back["logits"], TENSORS.tensors["logits"])
    outputs.save(c.AudioOutput(np.zeros(800, np.float32), 16000), str(tmp_path / "a.wav"))
    assert (tmp_path / "a.wav").stat().st_size == 44 + 1600
    outputs.save(c.ImageOutput([np.zeros((4, 6, 3), np.uint8)]), str(tmp_path / "i.png"))
    assert (tmp_path / "i.png").read_bytes().startswith(b"\x89PNG")
    outputs.save(c.TextOutput("Paris."), str(tmp_path / "a.txt"))
    assert (tmp_path / "a.txt").read_text() == "Paris.\n"


def test_a_file_that_cannot_hold_the_result_is_refused(tmp_path: Path) -> None:
    for name in ("t.npy", "t.wav", "t.png", "t.npz"):
        with pytest.raises(UsageError, match="the result is TextOutput"):
            outputs.save(c.TextOutput("x"), str(tmp_path / name))
    with pytest.raises(UsageError, match="no directory"):
        outputs.check_save(str(tmp_path / "nowhere" / "x.txt"))


def test_a_terminal_never_gets_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    printer.say("a\x1b[2Jb\x07")
    stream = outputs.Stream(lambda: None)
    stream("c\x1b]0;title\x07")
    stream.end()
    printer.error("bad `\x9b31m`", ["\x1b[1m"])
    seen = capsys.readouterr()
    assert seen.out == "a\\x1b[2Jb\\x07\nc\\x1b]0;title\\x07\n"
    assert seen.err == "error: bad `\\x9b31m`\n\nhint: \\x1b[1m\n"


def test_json_has_no_word_for_nan(capsys: pytest.CaptureFixture[str]) -> None:
    printer.say_json({"a": [float("nan"), float("inf"), 1.5], 2: "é"})
    assert json.loads(capsys.readouterr().out) == {"a": [None, None, 1.5], "2": "é"}


def test_columns_align_and_do_not_cut() -> None:
    assert printer.columns([("a", "bb", "c" * 200), ("aaa", "b")]) == [f"a    bb  {'c' * 200}", "aaa  b"]


def test_sizes_read_well() -> None:
    assert [printer.size(n) for n in (0, 999, 98_362_432, 3_600_000_000)] == ["0 B", "999 B", "98.4 MB", "3.6 GB"]
