"""The measured numbers as a table and a plot, without any library."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

OURS = "turnout"


def write(found: dict[str, Any], folder: Path, name: str) -> None:
    """Writes ``name``.json, .md and .svg into ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (folder / f"{name}.md").write_text(table(found))
    (folder / f"{name}.svg").write_text(plot(found))


def table(found: dict[str, Any]) -> str:
    """Markdown: a block per line, with ratios of one round against the best peer."""
    machine, load = found["machine"], found["load_average"]
    text = [
        "# Speed",
        "",
        f"`{found['command']}`, {machine['cores']} cores, Python {machine['python']}; load average "
        f"{load['before']:.1f} before, {load['after']:.1f} after. Qwen3-0.6B's shape with random weights.",
        "Median (smallest to largest); the ratio is formed within each round against the best peer's median.",
        "",
    ]
    for line in found["lines"]:
        results = {k: v for k, v in line["results"].items() if v}
        if not results:
            text += [f"## {line['title']}", "", "No counted round: noisy, or the time was over.", ""]
            continue
        peers = {k: v for k, v in results.items() if not k.startswith(OURS)}
        best = max(peers, key=lambda k: statistics.median(peers[k]), default=None)
        text += [
            f"## {line['title']}",
            "",
            f"{len(next(iter(results.values())))} rounds, {line['thrown_rounds']} thrown away as noisy.",
            "",
            f"| system | {line['unit']} | ratio to {best or '-'} |",
            "|---|---|---|",
        ]
        for label, values in sorted(results.items(), key=lambda item: -statistics.median(item[1])):
            ratio = "-"
            if best is not None:
                ratio = f"{statistics.median(a / b for a, b in zip(values, results[best], strict=True)):.2f}"
            text.append(
                f"| {label} | {statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f}) | {ratio} |"
            )
        text.append("")
    text += ["## Systems", "", "| system | version | load s | peak MB |", "|---|---|---|---|"]
    for label, facts in found["systems"].items():
        text.append(f"| {label} | {facts['version']} | {facts['load_s']:.1f} | {facts['peak_bytes'] / 1e6:.0f} |")
    return "\n".join(text) + "\n"


def plot(found: dict[str, Any]) -> str:
    """Bars of the medians with their spread, one group per line."""
    row, left, width = 18, 290, 360
    parts: list[str] = []
    y = 30
    for line in found["lines"]:
        results = {k: v for k, v in line["results"].items() if v}
        parts.append(f'<text x="8" y="{y}" font-weight="bold">{escape(line["title"])} ({line["unit"]})</text>')
        y += row
        top = max((max(v) for v in results.values()), default=1.0)
        for label, values in sorted(results.items(), key=lambda item: -statistics.median(item[1])):
            middle = statistics.median(values)
            colour = "#2a7ab0" if label.startswith(OURS) else "#999999"
            low, high, end = (left + width * v / top for v in (min(values), max(values), middle))
            parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{escape(label)}</text>')
            parts.append(f'<rect x="{left}" y="{y - 7}" width="{end - left:.1f}" height="12" fill="{colour}"/>')
            parts.append(f'<line x1="{low:.1f}" x2="{high:.1f}" y1="{y - 1}" y2="{y - 1}" stroke="#222222"/>')
            parts.append(f'<text x="{max(end, high) + 5:.1f}" y="{y + 4}">{middle:.1f}</text>')
            y += row
        y += 10
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + width + 90}" height="{y}" '
        f'font-family="sans-serif" font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )
