"""Times the commands that must be quick: ``make bench``. Prints CPU seconds (best of five) and memory."""

from __future__ import annotations

import platform
import tempfile
from pathlib import Path

from tests.package.test_speed import llama_70b, measure


def main() -> None:
    """Measures each command in processes of its own and prints a line for each."""
    print(f"Python {platform.python_version()}, {platform.machine()}, {platform.system()} {platform.release()}")
    print(f"{'command':44} {'CPU s':>7} {'MiB':>7}")
    with tempfile.TemporaryDirectory() as folder:
        large = str(llama_70b(Path(folder) / "llama-70b"))
        rows = [
            ("--help", ["--help"]),
            ("list", ["list"]),
            ("backends", ["backends"]),
            ("inspect, 70B shape in 30 shards", ["inspect", large]),
        ]
        rows += [(f"inspect {name}", ["inspect", name]) for name in ("smollm2", "gemma3-270m", "minilm", "silero-vad")]
        for title, arguments in rows:
            run = measure(*arguments)
            note = "" if run["code"] == 0 else f"  (ended with {run['code']:.0f})"
            print(f"{title:44} {run['cpu']:7.3f} {run['mib']:7.1f}{note}")


if __name__ == "__main__":
    main()
