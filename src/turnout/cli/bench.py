"""``turnout bench``: how fast a model generates here, on every backend that can, side by side."""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

import typer

from turnout.cli import printer
from turnout.cli.options import ArtifactOption, AsJson, CaseOptions, DeviceOption, Model, TaskOption, parse_options
from turnout.errors import TurnoutError, UsageError

if TYPE_CHECKING:
    from turnout.qualify.speed import Speed
    from turnout.worker.llm import LLM


def bench(
    model: Model,
    task: TaskOption = None,
    backend: Annotated[
        list[str] | None, typer.Option("--backend", "-b", metavar="NAME", help="This backend; may be repeated.")
    ] = None,
    device: DeviceOption = "cpu",
    artifact: ArtifactOption = None,
    option: CaseOptions = None,
    quantize: Annotated[
        str | None, typer.Option("--quantize", metavar="SCHEME", help="q8, q6, q5, q4, q3 or auto.")
    ] = None,
    streams: Annotated[str, typer.Option("--streams", metavar="N,N", help="Requests at once.")] = "1,4,16",
    prompt: Annotated[int, typer.Option("--prompt", min=1, help="Tokens of each prompt.")] = 128,
    new: Annotated[int, typer.Option("--new", min=2, help="Tokens drawn for each.")] = 64,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="Counted rounds.")] = 5,
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Threads of each backend.")] = None,
    quality: Annotated[bool, typer.Option("--quality", help="Compare logits with full precision instead.")] = False,
    json: AsJson = False,
) -> int:
    """Measure latency and throughput, or numerical quality.

    All backends stay loaded and are asked in turns. Ends with 1 when none can generate.
    """
    from turnout.qualify.speed import Load, measure

    loads = [Load(count, prompt, new) for count in _counts(streams)]
    options = parse_options(option)
    settings = {"quantize": quantize, "threads": threads, "slots": max(load.streams for load in loads)}
    settings["context"] = prompt + new + 1
    settings["cache_tokens"] = (prompt + new + 16) * max(load.streams for load in loads)
    with ExitStack() as stack, printer.Progress() as progress:
        if quality:
            from turnout.cli.bench_quality import compare

            return compare(model, backend, artifact, device, options, quantize, json, progress)
        opened, refused = _open(stack, model, backend, task, artifact, device, options, settings, progress)
        if not opened:
            raise TurnoutError("no backend of the engine runs this model\n" + "\n".join(refused))
        speeds = measure(opened, loads, rounds, progress)
        about = {name: {"load_s": llm.load_s, "dtype": llm.dtype, **_build(llm)} for name, llm in opened.items()}
    if json:
        printer.say_json(
            {"machine": _machine(), "models": about, "speeds": printer.builtins(speeds), "refused": refused}
        )
        return 0
    _print(speeds, about, rounds)
    for line in refused:
        printer.note(line)
    return 0


def _counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise UsageError(f"`--streams {text}` is no list of counts", hints=["write it as `--streams 1,4,16`"])
    return counts


def _open(
    stack: ExitStack,
    model: str,
    backends: list[str] | None,
    task: str | None,
    artifact: str | None,
    device: str,
    options: dict[str, Any],
    settings: dict[str, Any],
    progress: Any,
) -> tuple[dict[str, LLM], list[str]]:
    """A loaded model per backend, and one line for each that refused."""
    from turnout.backends import registry
    from turnout.worker.engine_build import has_engine
    from turnout.worker.llm import LLM

    opened: dict[str, LLM] = {}
    refused = []
    for name in backends or [n for n in registry.names() if has_engine(n)]:
        try:
            llm = LLM(
                model,
                task=task,
                artifact=artifact,
                backend=name,
                device=device,
                options=options,
                on_progress=progress,
                **settings,
            )
        except TurnoutError as error:
            if backends:
                raise
            refused.append(f"{name}: {printer.one_line(error.message)[:200]}")
            continue
        stack.callback(llm.close)
        opened[name] = llm
    return opened, refused


def _build(llm: LLM) -> dict[str, str]:
    executed = llm.executed()
    return {"artifact": executed.artifact, "version": executed.version}


def _machine() -> dict[str, Any]:
    return {
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_average": os.getloadavg()[0],
    }


def _print(speeds: list[Speed], about: dict[str, dict[str, Any]], rounds: int) -> None:
    machine = _machine()
    printer.say(
        f"median of {rounds} rounds in turns (smallest to largest); {machine['cores']} cores, "
        f"load average {machine['load_average']:.1f}"
    )
    for name, facts in about.items():
        printer.say(
            f"{name} {facts['version']}: {facts['artifact']}, {facts['dtype']}, loaded in {facts['load_s']:.1f} s"
        )
    printer.say()
    printer.say(f"{'backend':18} {'streams':>7} {'first token s':>22} {'decode tokens/s':>24} {'total tokens/s':>14}")
    for speed in speeds:
        first = f"{speed.first_s.median:.3f} ({speed.first_s.low:.3f} to {speed.first_s.high:.3f})"
        decode = f"{speed.decode.median:.1f} ({speed.decode.low:.1f} to {speed.decode.high:.1f})"
        printer.say(f"{speed.name:18} {speed.load.streams:7d} {first:>22} {decode:>24} {speed.total.median:14.1f}")
