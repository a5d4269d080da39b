"""``turnout run``: one request on the best supported case, and what computed it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from turnout.cli import printer
from turnout.cli.options import (
    ArtifactOption,
    AsJson,
    BackendOption,
    CaseOptions,
    DeviceOption,
    Model,
    TaskOption,
    grammar_of,
    parse_options,
    parse_sampling,
)
from turnout.errors import NotSupportedError, UsageError
from turnout.types import Sampling

if TYPE_CHECKING:
    from turnout.package.facts import Artifact, Package
    from turnout.types import Result

DEFAULT = Sampling()


def run(
    model: Model,
    values: Annotated[
        list[str] | None,
        typer.Argument(metavar="INPUT", help="Text, picture, sound, CSV, name=array.npy; `-` reads stdin."),
    ] = None,
    task: TaskOption = None,
    backend: BackendOption = None,
    device: DeviceOption = "cpu",
    artifact: ArtifactOption = None,
    option: CaseOptions = None,
    text: Annotated[list[str] | None, typer.Option("--text", help="One more text; may be repeated.")] = None,
    system: Annotated[str | None, typer.Option("--system", help="System message of a chat.")] = None,
    max_tokens: Annotated[
        int, typer.Option("--max-tokens", min=1, help="Tokens to generate at most.")
    ] = DEFAULT.max_tokens,
    temperature: Annotated[
        float, typer.Option("--temperature", min=0.0, help="0 takes the likeliest token.")
    ] = DEFAULT.temperature,
    top_p: Annotated[
        float, typer.Option("--top-p", min=0.0, max=1.0, help="Share of probability to draw from.")
    ] = DEFAULT.top_p,
    top_k: Annotated[int, typer.Option("--top-k", min=0, help="Tokens to draw from; 0 is all.")] = DEFAULT.top_k,
    seed: Annotated[int | None, typer.Option("--seed", help="Seed of the drawing.")] = DEFAULT.seed,
    sampling: Annotated[
        list[str] | None,
        typer.Option("--sampling", metavar="KEY=VALUE", help="Any other sampling parameter (docs/cli.md)."),
    ] = None,
    schema: Annotated[
        str | None, typer.Option("--schema", metavar="FILE", help="JSON schema the text must follow (or the schema).")
    ] = None,
    regex: Annotated[str | None, typer.Option("--regex", help="Regular expression the text must match.")] = None,
    quantize: Annotated[
        str | None, typer.Option("--quantize", metavar="SCHEME", help="q8, q6, q5, q4, q3 or auto, while loading.")
    ] = None,
    stop: Annotated[list[str] | None, typer.Option("--stop", help="Text that ends it; may be repeated.")] = None,
    save: Annotated[str | None, typer.Option("--save", metavar="FILE", help="Keep the result in a file.")] = None,
    json: AsJson = False,
) -> int:
    """Run one request on the best backend.

    The result goes to stdout; which backend ran, and why that one, to stderr.
    """
    import turnout
    from turnout.cli import inputs, outputs

    options = parse_options(option)
    if quantize is not None:
        options["quantize"] = quantize
    if save is not None:
        outputs.check_save(save)
    package = turnout.inspect(model)
    wanted = _task_of(package, artifact, task)
    typed = inputs.Typed(tuple(values or ()), tuple(text or ()), system)
    given = inputs.inputs_of(wanted, typed, _artifact_of(package, artifact, wanted))
    basic = Sampling(max_tokens, temperature, top_p, top_k, seed, tuple(stop or ()), grammar=grammar_of(schema, regex))
    drawn = parse_sampling(sampling, basic)
    with printer.Progress() as progress:
        stream = outputs.Stream(progress.clear)
        with turnout.load(
            model, task=wanted, artifact=artifact, backend=backend, device=device, options=options, on_progress=progress
        ) as session:
            progress(f"running {session.verdict.backend}")
            try:
                result = session.run(given, drawn, emit=None if json else stream)
            finally:
                stream.end()
            why = session.why
    _print(result, stream.used, json)
    if save is not None:
        outputs.save(result.output, save)
    printer.note(_credit(result, why))
    return 0


def _task_of(package: Package, artifact: str | None, task: str | None) -> str:
    from turnout.tasks.contract import contract_of
    from turnout.worker.judge import default_task

    if task is not None:
        return contract_of(task).id
    if not any(found.task_ids() for found in package.artifacts):
        first = next(package.all_findings(), None)
        raise NotSupportedError(
            f"nothing in `{package.source}` offers a task: {first.message if first else 'no model was found'}",
            hints=[f"`turnout inspect {package.source}` shows what was read", "name a task with `--task`"],
        )
    return str(default_task(package, artifact))


def _artifact_of(package: Package, artifact: str | None, task: str) -> Artifact | None:
    """The artifact asked for, or the first with a graph that offers the task."""
    if artifact is not None:
        found = package.artifact(artifact)
        if found is None:
            raise UsageError(
                f"no artifact `{artifact}` in `{package.source}`",
                hints=["artifacts here: " + ", ".join(a.id for a in package.artifacts)],
            )
        return found
    return next((a for a in package.artifacts if a.graph is not None and a.graph.inputs), None)


def _print(result: Result, streamed: bool, json: bool) -> None:
    import turnout
    from turnout.cli import outputs

    if json:
        printer.say_json(turnout.result_json(result))
    elif not streamed:
        for line in outputs.lines(result.output, whole=not sys.stdout.isatty()):
            printer.say(line)


def _credit(result: Result, why: str) -> str:
    """Who computed it, why that one, and how long it took."""
    executed, timings = result.executed, result.timings
    parts = [
        f"load {timings['load_s']:.1f} s" if "load_s" in timings else "",
        f"run {timings['run_s']:.2f} s" if "run_s" in timings else "",
    ]
    tokens = getattr(result.output, "completion_tokens", 0)
    if tokens and timings.get("run_s"):
        parts.append(f"{tokens} tokens, {tokens / timings['run_s']:.1f} tokens/s")
    dtype = f", {executed.dtype}" if executed.dtype else ""
    return (
        f"ran on {executed.backend} {executed.version} ({executed.device}{dtype}): {why}\n"
        f"{result.task} of {executed.artifact}; {', '.join(filter(None, parts))}"
    )
