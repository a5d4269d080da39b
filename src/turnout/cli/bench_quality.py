"""``turnout bench --quality``: logits of every backend and quantization against full precision."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from turnout.cli import printer
from turnout.errors import TurnoutError, UsageError

if TYPE_CHECKING:
    from turnout.qualify.quality import Candidate, Compared

REFERENCE = "torch-native"  # computes a directory's or a GGUF file's weights in float32


def compare(
    model: str,
    backends: list[str] | None,
    artifact: str | None,
    device: str,
    options: dict[str, Any],
    quantize: str | None,
    json: bool,
    progress: Any,
) -> int:
    """Prints the distance of each candidate from the reference. Raises ``TurnoutError`` without one."""
    from turnout.backends import registry
    from turnout.qualify.quality import compare_all
    from turnout.worker.engine_build import has_engine

    full = {**{k: v for k, v in options.items() if k != "quantize"}, "dtype": "float32"}
    reference, why = _candidate(model, REFERENCE, artifact, device, full, "reference")
    if reference is None:
        raise TurnoutError(f"there is no reference: {why}", hints=["the torch executor computes it in float32"])
    others: list[Candidate] = []
    refused: list[str] = []
    for name in backends or [n for n in registry.names() if has_engine(n)]:
        for scheme in quantize.split(",") if quantize else [None]:
            chosen = dict(options)
            if scheme is not None:
                chosen["quantize"] = scheme
            title = f"{name} {scheme}" if scheme else name
            found, why = _candidate(model, name, artifact, device, chosen, title)
            if found is not None:
                others.append(found)
            else:
                refused.append(f"{title}: {why}")
    if not others:
        raise UsageError("nothing to compare\n" + "\n".join(refused))
    results = []
    for other in others:
        progress(f"comparing {other.name}")
        results += compare_all(reference, [other])
    if json:
        printer.say_json({"results": printer.builtins(results), "refused": refused})
        return 0
    _print(results)
    for line in refused:
        printer.note(line)
    return 0


def _candidate(
    model: str, backend: str, artifact: str | None, device: str, options: dict[str, Any], title: str
) -> tuple[Candidate | None, str]:
    from turnout.backends import registry
    from turnout.qualify.quality import Candidate
    from turnout.worker.judge import cases_of, open_package, select_artifacts

    package = open_package(model)
    reads = registry.get(backend).reads
    for case in cases_of(package, select_artifacts(package, artifact), "text-generation", device, options):
        if case.artifact.kind in reads:
            return Candidate(title, backend, package, case), ""
    return None, f"{backend} reads no artifact of this package"


def _print(results: list[Compared]) -> None:
    count = results[0].quality.tokens
    printer.say(f"against float32 in PyTorch, {count} tokens of prose and code")
    printer.say(f"{'case':28} {'KL mean':>9} {'KL p99':>9} {'top-1':>7} {'perplexity':>11}")
    for one in results:
        q = one.quality
        printer.say(
            f"{one.name:28} {q.kl_mean:9.5f} {q.kl_p99:9.4f} {q.top1_agreement:7.4f} {q.perplexity_ratio:10.4f}x"
        )
