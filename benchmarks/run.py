"""``make bench``: ours and the peers in turns; writes docs/benchmarks/speed.{json,md,svg} (``--name``).

Every system is a process of its own that stays loaded; in each round every system is asked once, in turns,
so that a slow moment of the machine falls on all. While one computes, the CPU time of everything else on the
machine is watched: a round in which other processes took more than ``FOREIGN`` of the cores is thrown away.
Ratios are formed within a round; medians over at least five rounds are reported with smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from benchmarks import shape
from turnout.config import cache_dir

FOREIGN = 0.1  # share of the cores that other processes may take in a round
REPORT = Path(__file__).parent.parent / "docs" / "benchmarks"


@dataclass
class Held:
    """A system in its process."""

    label: str
    process: subprocess.Popen[str]
    version: str = ""
    load_s: float = 0.0

    def ask(self, job: dict[str, Any]) -> dict[str, float]:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.label} died; its last words are in {log_path(self.label)}")
        return json.loads(line)

    def tree(self) -> list[psutil.Process]:
        own = psutil.Process(self.process.pid)
        return [own, *own.children(recursive=True)]

    def cpu_s(self) -> float:
        total = 0.0
        for process in self.tree():
            try:
                times = process.cpu_times()
                total += times.user + times.system
            except psutil.Error:
                continue
        return total

    def memory(self) -> int:
        """Largest resident bytes so far, over the processes of the system."""
        peak = 0
        for process in self.tree():
            try:
                for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
                    if line.startswith("VmHWM"):
                        peak = max(peak, int(line.split()[1]) * 1024)
            except (OSError, psutil.Error):
                continue
        return peak


def log_path(label: str) -> Path:
    """Where a system's own output goes."""
    return cache_dir() / "bench" / f"{label.replace(' ', '-').replace('/', '-')}.log"


def graphs(scheme: str) -> Path:
    """Cache directory of the system that converts weights by ``scheme``."""
    return cache_dir() / "bench" / scheme


def hold(label: str, name: str, model: str, **settings: Any) -> Held | None:
    """Starts a system; None, with its reason printed, when it cannot be had here."""
    log_path(label).parent.mkdir(parents=True, exist_ok=True)
    environment = {"OMP_WAIT_POLICY": "PASSIVE", **os.environ}
    if "quantize" in settings:  # the graphs that it writes are a peer's model too
        environment["TURNOUT_CACHE"] = str(graphs(settings["quantize"]))
    with open(log_path(label), "w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.systems", name, model, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
        )
    assert process.stdout
    line = process.stdout.readline()
    if not line:
        words = log_path(label).read_text(errors="replace").strip().splitlines()
        print(f"  {label}: not here ({words[-1][:150] if words else 'no word'})", flush=True)
        return None
    told = json.loads(line)
    print(f"  {label}: {told['version']}, loaded in {told['load']:.1f} s", flush=True)
    return Held(label, process, told["version"], told["load"])


@dataclass
class Line:
    """One line of the table: a job for several systems, and what is read from an answer (larger is better)."""

    title: str
    job: dict[str, Any]
    value: Callable[[dict[str, float]], float]
    unit: str
    systems: list[str]
    results: dict[str, list[float]] = field(default_factory=dict)
    thrown: int = 0


def decode_rate(answer: dict[str, float]) -> float:
    """Tokens per second after the first of each stream."""
    return (answer["tokens"] - 1) / (answer["total"] - answer["first"])


def total_rate(answer: dict[str, float]) -> float:
    """Tokens per second over all, prompts included in the time."""
    return answer["tokens"] / answer["total"]


def prefill_rate(count: int) -> Callable[[dict[str, float]], float]:
    """Prompt tokens per second until the first token."""
    return lambda answer: count / answer["first"]


def lines(systems: list[str], full: bool) -> list[Line]:
    """What is measured; ``full`` as the design says, else shorter jobs of the same kind."""
    new, prompt = (128, 128) if full else (48, 64)
    eight = [s for s in systems if "4 bit" not in s]
    four = [s for s in systems if "4 bit" in s]
    made = [
        Line("1 stream, decode, 8 bit", {"streams": 1, "prompt": prompt, "new": new}, decode_rate, "tokens/s", eight),
        Line("1 stream, decode, 4 bit", {"streams": 1, "prompt": prompt, "new": new}, decode_rate, "tokens/s", four),
        Line("prefill 512, 8 bit", {"streams": 1, "prompt": 512, "new": 1}, prefill_rate(512), "tokens/s", eight),
        Line("prefill 2048, 8 bit", {"streams": 1, "prompt": 2048, "new": 1}, prefill_rate(2048), "tokens/s", eight),
        Line(
            "16 streams with prefill, 8 bit",
            {"streams": 16, "prompt": prompt, "new": new},
            total_rate,
            "tokens/s",
            eight,
        ),
    ]
    return [line for line in made if line.systems]


@contextmanager
def watched(held: Held) -> Iterator[list[float]]:
    """Share of the cores that others took, as the list's one element afterwards."""
    share: list[float] = []
    before, own, start = psutil.cpu_times(), held.cpu_s(), time.perf_counter()
    yield share
    after, mine, span = psutil.cpu_times(), held.cpu_s(), time.perf_counter() - start
    busy = sum(getattr(after, n) - getattr(before, n) for n in ("user", "nice", "system", "steal"))
    share.append(max(0.0, busy - (mine - own)) / (span * (os.cpu_count() or 1)))


def measure(held: dict[str, Held], table: list[Line], rounds: int, limit_s: float, foreign: float) -> None:
    """Fills the lines' results until each has ``rounds`` quiet rounds or its share of the time is over."""
    for line in table:
        started, number = time.perf_counter(), 0
        while min((len(line.results.get(s, [])) for s in line.systems), default=rounds) < rounds:
            if time.perf_counter() - started > limit_s / len(table):
                print(f"  {line.title}: time is over after {number} rounds", flush=True)
                break
            values, noisy = {}, False
            for label in line.systems:
                with watched(held[label]) as share:
                    answer = held[label].ask({**line.job, "seed": 100 * number + line.job["streams"]})
                values[label] = line.value(answer)
                noisy |= share[0] > foreign
            number += 1
            if number == 1:
                continue  # warms up
            if noisy:
                line.thrown += 1
                continue
            for label, value in values.items():
                line.results.setdefault(label, []).append(value)
        print(
            f"  {line.title}: " + ", ".join(f"{s} {statistics.median(v):.1f}" for s, v in line.results.items()),
            flush=True,
        )


def systems(models: Path, without: str = "$^") -> dict[str, Held]:
    """Ours and the peers, as far as they are installed and their labels do not match ``without``."""
    hf, q8, q4 = str(models / "qwen3"), str(models / "q8_0.gguf"), str(models / "q4_0.gguf")
    wanted: list[tuple[str, str, str, dict[str, Any]]] = [
        ("turnout llama.cpp Q8_0", "turnout", q8, {"backend": "llamacpp"}),
        ("turnout torch q8", "turnout", hf, {"backend": "torch-native", "quantize": "q8"}),
        ("turnout openvino q8", "turnout", hf, {"backend": "openvino-native", "quantize": "q8"}),
        ("llama-server (xllamacpp) Q8_0", "xllamacpp", q8, {}),
        ("llama.cpp native loop Q8_0", "llama.cpp", q8, {}),
        ("turnout llama.cpp Q4_0, 4 bit", "turnout", q4, {"backend": "llamacpp"}),
        ("turnout openvino q4, 4 bit", "turnout", hf, {"backend": "openvino-native", "quantize": "q4"}),
        ("llama-server (xllamacpp) Q4_0, 4 bit", "xllamacpp", q4, {}),
        ("llama.cpp native loop Q4_0, 4 bit", "llama.cpp", q4, {}),
    ]
    for _label, name, _model, settings in wanted:
        if name == "turnout":
            settings |= {"slots": 16, "cache_tokens": 8192, "context": 4096, "prefix_cache": False}
    held = {}
    for label, name, model, settings in wanted:
        if re.search(without, label):
            continue
        one = hold(label, name, model, **settings)
        if one is not None:
            held[label] = one
    for scheme, label in (("q8", "OpenVINO GenAI int8"), ("q4", "OpenVINO GenAI int4, 4 bit")):
        written = graphs(scheme).glob("openvino/*/openvino_model.xml")
        for graph in [path for path in written if not path.parent.name.startswith("genai-")][:1]:
            if re.search(without, label):
                continue
            one = hold(label, "openvino-genai", str(genai_folder(graph.parent, Path(hf))))
            if one is not None:
                held[label] = one
    return held


def genai_folder(graph: Path, hf: Path) -> Path:
    """The very graph that our executor reads, as a directory that GenAI takes: with a tokenizer beside it."""
    from openvino import save_model
    from openvino_tokenizers import convert_tokenizer
    from transformers import PreTrainedTokenizerFast

    folder = graph.parent / f"genai-{graph.name}"
    folder.mkdir(exist_ok=True)
    for file in ("openvino_model.xml", "openvino_model.bin"):
        if not (folder / file).exists():
            (folder / file).symlink_to(graph / file)
    for file in ("config.json", "generation_config.json"):
        if not (folder / file).exists():
            (folder / file).symlink_to(hf / file)
    if not (folder / "openvino_tokenizer.xml").exists():
        fast = PreTrainedTokenizerFast(tokenizer_file=str(hf / "tokenizer.json"), eos_token="filler0")
        for part, name in zip(
            convert_tokenizer(fast, with_detokenizer=True), ("tokenizer", "detokenizer"), strict=True
        ):
            save_model(part, folder / f"openvino_{name}.xml")
    return folder


def report(table: list[Line], held: dict[str, Held], command: str, load: tuple[float, float]) -> dict[str, Any]:
    """All that was seen, as plain data."""
    return {
        "command": command,
        "machine": {"cores": os.cpu_count(), "python": platform.python_version(), "system": platform.platform()},
        "load_average": {"before": load[0], "after": load[1]},
        "systems": {
            label: {"version": one.version, "load_s": one.load_s, "peak_bytes": one.memory()}
            for label, one in held.items()
        },
        "lines": [
            {"title": x.title, "job": x.job, "unit": x.unit, "thrown_rounds": x.thrown, "results": x.results}
            for x in table
        ],
    }


def main() -> None:
    """Command line of ``make bench``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--minutes", type=float, default=40)
    parser.add_argument("--foreign", type=float, default=FOREIGN, help="share of the cores others may take in a round")
    parser.add_argument("--short", action="store_true", help="shorter jobs of the same kind")
    parser.add_argument("--only", default="", help="lines whose titles match this regular expression")
    parser.add_argument("--without", default="$^", help="leave out systems whose labels match this")
    parser.add_argument("--name", default="speed", help="first name of the reports")
    parser.add_argument("--models", type=Path, default=cache_dir() / "bench")
    asked = parser.parse_args()
    print("==> the model, in every format", flush=True)
    shape.hugging_face(asked.models / "qwen3")
    for kind in ("Q8_0", "Q4_0"):
        shape.gguf(asked.models / f"{kind.lower()}.gguf", kind)
    before = os.getloadavg()[0]
    print("==> systems", flush=True)
    held = systems(asked.models, asked.without)
    print("==> rounds", flush=True)
    table = [x for x in lines(list(held), not asked.short) if re.search(asked.only, x.title)]
    try:
        measure(held, table, asked.rounds, asked.minutes * 60, asked.foreign)
        found = report(table, held, " ".join(["python -m benchmarks.run", *sys.argv[1:]]), (before, os.getloadavg()[0]))
    finally:
        for one in held.values():
            one.process.stdin.close()  # type: ignore[union-attr]
        for one in held.values():
            one.process.wait(30)
    from benchmarks.report import write

    write(found, REPORT, asked.name)
    print(f"==> {REPORT}/{asked.name}.md", flush=True)


if __name__ == "__main__":
    main()
