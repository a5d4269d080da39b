"""`check` and `run` from the typed line to the printed result, over a real graph in a real worker."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from turnout.cli import call

Captured = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An ONNX graph: ``doubled = x + x`` over float32 [batch, 3]."""
    import onnx
    from onnx import TensorProto, helper

    ports = [helper.make_tensor_value_info(n, TensorProto.FLOAT, ["batch", 3]) for n in ("x", "doubled")]
    body = helper.make_graph([helper.make_node("Add", ["x", "x"], ["doubled"])], "double", ports[:1], ports[1:])
    model = helper.make_model(body, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path_factory.mktemp("double") / "model.onnx"
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def array(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("array") / "x.npy"
    np.save(path, np.array([[1.0, 2.0, 3.0]], dtype=np.float32))
    return path


def test_check_prints_the_stable_object(graph: Path, capsys: Captured) -> None:
    assert call(["check", str(graph), "--task", "tensor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(report) == {"package", "verdicts", "chosen"}
    by_backend = {v["backend"]: v for v in report["verdicts"]}
    assert by_backend["onnxruntime"]["status"] == "supported"
    assert by_backend["llamacpp"]["status"] == "unsupported"
    for verdict in report["verdicts"]:
        assert set(verdict) >= {
            "artifact",
            "kind",
            "task",
            "backend",
            "device",
            "status",
            "level",
            "reasons",
            "remedies",
            "estimates",
        }
        assert (verdict["reasons"] == []) == (verdict["status"] == "supported")
        for reason in verdict["reasons"]:
            assert set(reason) == {"code", "message", "observed", "expected", "where"}
        for remedy in verdict["remedies"]:
            assert set(remedy) >= {"action", "argv", "cost", "changes_numerics", "changes_trust"}
    assert report["chosen"]["backend"] in ("onnxruntime", "openvino") and report["chosen"]["why"]


def test_check_says_a_line_a_verdict_that_can_be_searched(graph: Path, capsys: Captured) -> None:
    assert call(["check", str(graph), "--task", "tensor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("supported ") and " onnxruntime " in line for line in lines)
    assert any(line.startswith("unsupported ") and "artifact.missing" in line for line in lines)
    assert lines[-1].startswith("chosen: ")


def test_check_without_a_supported_case_ends_with_1(graph: Path, capsys: Captured) -> None:
    assert call(["check", str(graph), "--task", "tensor", "--backend", "llamacpp"]) == 1
    assert "chosen: none" in capsys.readouterr().out


def test_run_prints_arrays_and_who_computed_them(graph: Path, array: Path, capsys: Captured) -> None:
    arguments = ["run", str(graph), f"x={array}", "--task", "tensor", "--backend", "onnxruntime"]
    assert call(arguments) == 0
    seen = capsys.readouterr()
    assert seen.out == "doubled\tfloat32\t[1, 3]\t2 4 6\n"
    assert "ran on onnxruntime " in seen.err and "asked for" in seen.err
    assert call([*arguments, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert set(result) == {"task", "output", "executed", "timings"}
    assert result["output"]["tensors"]["doubled"] == [[2.0, 4.0, 6.0]]
    assert set(result["executed"]) == {"artifact", "digest", "backend", "version", "device", "dtype", "recipe"}
    assert result["executed"]["backend"] == "onnxruntime" and len(result["executed"]["digest"]) >= 32


def test_run_saves_what_it_printed(graph: Path, array: Path, tmp_path: Path, capsys: Captured) -> None:
    target = tmp_path / "out.npz"
    assert call(["run", str(graph), str(array), "--task", "tensor", "--save", str(target)]) == 0
    with np.load(target) as saved:
        assert saved["doubled"].tolist() == [[2.0, 4.0, 6.0]]


@pytest.mark.parametrize(
    ("more", "status", "said"),
    [
        (["--task", "tensor", "--backend", "llamacpp"], 1, "nothing here runs"),
        (["--task", "tensor", "--backend", "nosuch"], 2, "unknown backend `nosuch`"),
        (["--task", "nosuch"], 2, "unknown task `nosuch`"),
        (["--task", "tensor", "--artifact", "nosuch"], 2, "no artifact `nosuch`"),
        (["--task", "tensor", "--device", "nosuch"], 1, "nothing here runs"),
    ],
)
def test_run_refuses_with_the_reason(
    graph: Path, array: Path, more: list[str], status: int, said: str, capsys: Captured
) -> None:
    assert call(["run", str(graph), f"x={array}", *more]) == status
    seen = capsys.readouterr()
    assert seen.out == "" and said in seen.err and "Traceback" not in seen.err


def test_an_array_that_does_not_fit_is_named(graph: Path, tmp_path: Path, capsys: Captured) -> None:
    np.save(tmp_path / "wrong.npy", np.zeros((1, 4), np.float32))
    assert call(["run", str(graph), f"x={tmp_path / 'wrong.npy'}", "--task", "tensor"]) == 2
    assert "x" in capsys.readouterr().err


def test_inspect_tells_the_graph(graph: Path, capsys: Captured) -> None:
    assert call(["inspect", str(graph)]) == 0
    out = capsys.readouterr().out
    assert "onnx:model.onnx" in out and "x float32[batch, 3]" in out
    assert call(["inspect", str(graph), "--json"]) == 0
    package = json.loads(capsys.readouterr().out)
    assert package["artifacts"][0]["graph"]["inputs"][0]["name"] == "x"


def test_inspect_of_nothing_known_ends_with_1(tmp_path: Path, capsys: Captured) -> None:
    (tmp_path / "notes.txt").write_text("no model here")
    assert call(["inspect", str(tmp_path)]) == 1
    assert "artifact.missing" in capsys.readouterr().out
