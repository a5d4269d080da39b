"""The commands as called: exit status, what goes to stdout and what to stderr, never a traceback."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from turnout.cli import call
from turnout.package import store
from turnout.package.catalogue import KNOWN

Captured = pytest.CaptureFixture[str]


def turnout(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
    """A real call of the command in a process of its own; ``more`` are environment variables."""
    import os

    return subprocess.run(
        [sys.executable, "-m", "turnout", *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **more},
        stdin=subprocess.DEVNULL,
    )


def test_version_and_help(capsys: Captured) -> None:
    import turnout as package

    assert call(["--version"]) == 0
    assert capsys.readouterr().out == f"turnout {package.__version__}\n"
    assert call(["--help"]) == 0
    out = capsys.readouterr().out
    for command in ("inspect", "check", "run", "backends", "doctor", "list", "pull", "rm"):
        assert f"\n  {command} " in out
        assert call([command, "--help"]) == 0
        assert "--json" in capsys.readouterr().out, command


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["chek"], "no such command `chek`"),
        (["check"], "missing argument `MODEL`"),
        (["inspect", "x", "--nope"], "no such option: --nope"),
        (["run", "x", "y", "--max-tokens", "many"], "invalid value for `--max-tokens`"),
        (["run", "x", "y", "--top-p", "7"], "invalid value for `--top-p`"),
        (["inspect", "no-such-model"], "no model `no-such-model`"),
        (["check", "no-such-model"], "no model `no-such-model`"),
        (["run", "no-such-model", "hi"], "no model `no-such-model`"),
        (["run", "no-such-model", "hi", "--option", "poling=mean"], "unknown option `poling`"),
        (["run", "no-such-model", "hi", "--save", "/nowhere/at/all.txt"], "no directory `/nowhere/at`"),
        (["rm", "no-such-model"], "no pulled or cached model `no-such-model`"),
        (["pull", "noslash"], "`noslash` is not a repository name"),
    ],
)
def test_a_wrong_call_ends_with_2_and_says_what_to_do(arguments: list[str], said: str, capsys: Captured) -> None:
    assert call(arguments) == 2
    seen = capsys.readouterr()
    assert seen.out == ""
    assert seen.err.startswith(f"error: {said}"), seen.err
    assert "\n\nhint: " in seen.err


def test_an_error_is_json_too_when_json_was_asked(capsys: Captured) -> None:
    assert call(["inspect", "smolm2", "--json"]) == 2
    seen = capsys.readouterr()
    error = json.loads(seen.out)["error"]
    assert error["code"] == "artifact.missing" and "did you mean `smollm2`?" in error["hints"]
    assert seen.err.startswith("error: ")


def test_no_arguments_show_the_help(capsys: Captured) -> None:
    assert call([]) == 2
    assert "Commands:" in capsys.readouterr().err


def test_list_names_every_known_model(capsys: Captured) -> None:
    assert call(["list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()][: len(KNOWN)] == list(KNOWN)
    assert call(["list", "--json"]) == 0
    models = json.loads(capsys.readouterr().out)["models"]
    assert models[0]["name"] == "smollm2" and models[0]["install"][0] == "pip"
    assert all(m["installed"] == (m["path"] is not None) for m in models)


def test_rm_asks_and_then_removes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--org--name" / "snapshots" / ("a" * 40)
    place.mkdir(parents=True)
    (place / "config.json").write_text("{}")
    with open("/dev/null") as nobody:
        monkeypatch.setattr(sys, "stdin", nobody)
        assert call(["rm", "org/name"]) == 2
    assert "nobody can be asked" in capsys.readouterr().err and place.exists()
    assert call(["rm", "org/name", "--yes", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["size_bytes"] == 2
    assert list(tmp_path.iterdir()) == []


def test_pull_without_a_hub_ends_with_1() -> None:
    done = turnout("pull", "org/name", HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("error: cannot pull `org/name`: ") and "Traceback" not in done.stderr
    done = turnout("pull", "org/name", HF_HUB_OFFLINE="1")
    assert done.returncode == 1 and "HF_HUB_OFFLINE is set" in done.stderr


def test_our_own_gap_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    def broken() -> None:
        raise RuntimeError("a gap")

    monkeypatch.setattr(store, "listing", broken)
    assert call(["list"]) == 1
    assert capsys.readouterr().err == (
        "error: internal error: RuntimeError: a gap\n\nhint: set TURNOUT_TRACEBACK=1 to see where\n"
    )
    monkeypatch.setenv("TURNOUT_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        call(["list"])


def test_a_reader_may_leave_early() -> None:
    script = f"{sys.executable} -m turnout list --json | head -c 1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "{" and done.stderr == ""


@pytest.mark.slow
def test_doctor_reports_a_directory_it_cannot_write(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = turnout("doctor", "--json", TURNOUT_DATA=str(tmp_path / "file" / "below"))
    findings = {f["subject"]: f for f in json.loads(done.stdout)["findings"]}
    assert done.returncode == 1
    assert findings["data directory"]["state"] == "fail"
