"""What was typed, as the inputs of a task's contract: texts, pictures, sound, tables, arrays.

Everything is checked here, before anything is loaded; errors name the value and the place.
"""

from __future__ import annotations

import csv
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from turnout.errors import InputError
from turnout.tasks.contract import TaskContract, contract_of
from turnout.types import Modality

if TYPE_CHECKING:
    from turnout.package.facts import Artifact

STDIN = "-"
TEXT_BYTES = 64 << 20
TABLE_BYTES = 512 << 20


@dataclass(slots=True)
class Typed:
    """What the command line got: positional values, ``--text`` values, the system message."""

    values: Sequence[str] = ()
    texts: Sequence[str] = ()
    system: str | None = None
    read_stdin: Callable[[], str] = field(default=lambda: _read_stdin())


def inputs_of(task: str, typed: Typed, artifact: Artifact | None = None) -> dict[str, Any]:
    """Inputs by port name. ``artifact`` gives the name of a lone array's port.

    Raises ``InputError`` for a value that is missing, too many, or of the wrong kind.
    """
    contract = contract_of(task)
    ports = [port for port in contract.inputs if port.required]
    if ports and all(port.kind is Modality.TENSOR for port in ports):
        arrays = tensors(typed, artifact)
        return {ports[0].name: arrays} if ports[0].many else arrays
    kinds = [port.kind for port in ports]
    values = [*typed.values, *typed.texts]
    if kinds == [Modality.MESSAGES]:
        return {ports[0].name: messages(_one(contract, typed), typed.system)}
    if typed.system is not None:
        raise InputError(f"`--system` is for chat; `{task}` takes no system message")
    if kinds == [Modality.TEXT] and not ports[0].many:
        return {ports[0].name: _one(contract, typed)}
    if kinds == [Modality.TEXT]:
        return {ports[0].name: _many(contract, typed)}
    if kinds == [Modality.TEXT, Modality.TEXT]:
        return _two(contract, values)
    if kinds in ([Modality.IMAGE], [Modality.AUDIO]):
        return {ports[0].name: existing_file(_only(contract, typed.values), contract)}
    if kinds == [Modality.TABLE]:
        return {ports[0].name: table(_only(contract, typed.values))}
    raise InputError(f"`{task}` cannot be asked from the command line yet", hints=["use the Python API: turnout.load"])


# ---- text --------------------------------------------------------------------------------------


def messages(text: str, system: str | None) -> list[dict[str, str]]:
    """One user message, after the system message if there is one."""
    before = [{"role": "system", "content": system}] if system is not None else []
    return [*before, {"role": "user", "content": text}]


def _read_stdin() -> str:
    if sys.stdin is None or sys.stdin.isatty():
        return ""
    return sys.stdin.buffer.read(TEXT_BYTES).decode("utf-8", "replace")


def _one(contract: TaskContract, typed: Typed) -> str:
    """The one text: positional, ``--text``, or stdin."""
    values = [*typed.values, *typed.texts]
    if len(values) > 1:
        raise InputError(
            f"`{contract.id}` takes one text, got {len(values)}", hints=["put a text of several words in quotes"]
        )
    text = typed.read_stdin() if not values or values == [STDIN] else values[0]
    if not text.strip():
        raise _missing(contract, "a text")
    return text if values and values != [STDIN] else text.rstrip("\n")


def _many(contract: TaskContract, typed: Typed) -> list[str]:
    """All texts; ``-`` or nothing at all stands for the lines of stdin."""
    values = [*typed.values, *typed.texts] or [STDIN]
    texts: list[str] = []
    for value in values:
        texts += [line for line in typed.read_stdin().splitlines() if line.strip()] if value == STDIN else [value]
    if not texts:
        raise _missing(contract, "at least one text")
    return texts


def _two(contract: TaskContract, values: Sequence[str]) -> dict[str, Any]:
    first, second = (port for port in contract.inputs if port.required)
    if len(values) < 2:
        raise _missing(contract, f"`{first.name}`, then `{second.name}`")
    if not second.many and len(values) > 2:
        raise InputError(f"`{contract.id}` takes two texts, got {len(values)}")
    one = [values[0]] if first.many else values[0]
    return {first.name: one, second.name: list(values[1:]) if second.many else values[1]}


def _missing(contract: TaskContract, what: str) -> InputError:
    return InputError(
        f"`{contract.id}` needs {what}",
        hints=[f"`turnout run MODEL INPUT --task {contract.id}`; `-` reads it from stdin"],
    )


# ---- files -------------------------------------------------------------------------------------


def _only(contract: TaskContract, values: Sequence[str]) -> str:
    kind = contract.inputs[0].kind
    if len(values) != 1:
        raise InputError(
            f"`{contract.id}` takes one {kind} file, got {len(values)}",
            hints=[f"`turnout run MODEL FILE --task {contract.id}`"],
        )
    return values[0]


def existing_file(path: str, contract: TaskContract) -> str:
    """Absolute path of a file that is there; a picture or sound is opened where it is computed on."""
    full = Path(path).expanduser()
    if not full.is_file():
        raise InputError(f"no {contract.inputs[0].kind} file at `{path}`", code="artifact.missing")
    return os.path.abspath(full)


def table(path: str) -> dict[str, Any]:
    """``columns`` and ``rows`` of a CSV file with a header line; ``-`` reads stdin. Values stay text."""
    if path == STDIN:
        text = _read_stdin()
    else:
        full = Path(path).expanduser()
        if not full.is_file():
            raise InputError(f"no table at `{path}`", code="artifact.missing", hints=["a CSV file with a header line"])
        if full.stat().st_size > TABLE_BYTES:
            raise InputError(f"`{path}` is larger than {TABLE_BYTES >> 20} MiB", hints=["split the table"])
        text = full.read_text(encoding="utf-8-sig", errors="replace")
    lines = [row for row in csv.reader(text.splitlines()) if row]
    if len(lines) < 2:
        raise InputError(f"`{path}` has no rows below a header line")
    columns, rows = [name.strip() for name in lines[0]], lines[1:]
    for number, row in enumerate(rows, 2):
        if len(row) != len(columns):
            raise InputError(f"line {number} of `{path}` has {len(row)} values, the header has {len(columns)}")
    return {"columns": columns, "rows": rows}


# ---- arrays ------------------------------------------------------------------------------------


def tensors(typed: Typed, artifact: Artifact | None) -> dict[str, Any]:
    """Named arrays of ``name=file.npy`` pairs, ``.npz`` archives, or one ``.npy`` for a graph with
    one input. Pickled objects are refused."""
    named: dict[str, Any] = {}
    for value in typed.values:
        name, found, path = value.partition("=")
        if not found:
            name, path = "", value
        loaded = _load_arrays(path)
        if isinstance(loaded, dict):
            if name:
                raise InputError(f"`{path}` holds named arrays; give it without `{name}=`")
            named.update(loaded)
        else:
            named[name or _lone_input(path, artifact)] = loaded
    if not named:
        raise InputError(
            "`tensor` needs at least one array",
            hints=["`turnout run MODEL name=file.npy ... --task tensor`, or one .npz file"],
        )
    return named


def _load_arrays(path: str) -> Any:
    import numpy as np

    full = Path(path).expanduser()
    if not full.is_file():
        raise InputError(f"no array file at `{path}`", code="artifact.missing")
    try:
        loaded = np.load(full, allow_pickle=False)
        if isinstance(loaded, np.ndarray):
            return loaded
        with loaded:
            return {name: loaded[name] for name in loaded.files}
    except (OSError, ValueError, EOFError) as error:
        raise InputError(
            f"`{path}` is no .npy or .npz file: {str(error).splitlines()[0]}", code="artifact.corrupt"
        ) from None


def _lone_input(path: str, artifact: Artifact | None) -> str:
    graph = artifact.graph if artifact is not None else None
    names = [port.name for port in graph.inputs] if graph is not None else []
    if len(names) == 1:
        return names[0]
    known = f"inputs of the graph: {', '.join(names)}" if names else "`turnout inspect MODEL` shows the inputs"
    raise InputError(f"which input is `{path}`?", hints=[f"write it as `NAME={path}`", known])
