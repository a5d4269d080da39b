"""``turnout doctor``: whether this machine is fit, checked by doing rather than by looking."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from turnout.cli import printer
from turnout.cli.options import AsJson
from turnout.config import GIB, cache_dir, data_dir
from turnout.errors import TurnoutError

LOW_DISK = 2 * GIB


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at. ``state`` is ok, missing (an option not taken) or fail."""

    state: str
    subject: str
    detail: str
    hint: str = ""


def doctor(json: AsJson = False) -> int:
    """Check that this machine is fit.

    Looks at memory, disk and directories, and really starts each installed backend.
    """
    with printer.Progress() as progress:
        findings = [*_machine(), *_directories(), *_backends(progress)]
    healthy = all(f.state != "fail" for f in findings)
    if json:
        printer.say_json({"healthy": healthy, "findings": printer.builtins(findings)})
        return 0 if healthy else 1
    for line in printer.columns([(f.state, f.subject, f.detail) for f in findings]):
        printer.say(line)
    failed = [f for f in findings if f.state == "fail"]
    for finding in failed:
        printer.error(f"{finding.subject}: {finding.detail}", [finding.hint] if finding.hint else [])
    return 0 if healthy else 1


def _machine() -> Iterator[Finding]:
    import psutil

    from turnout import __version__
    from turnout.worker.judge import free_memory

    yield Finding("ok", "turnout", f"{__version__}, Python {platform.python_version()}, {sys.executable}")
    yield Finding(
        "ok", "system", f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} cores"
    )
    total, free = psutil.virtual_memory().total, free_memory()
    yield Finding("ok", "memory", f"{printer.size(free)} free of {printer.size(total)}")


def _directories() -> Iterator[Finding]:
    for subject, path in (("data directory", data_dir()), ("cache directory", cache_dir())):
        yield _directory(subject, path)


def _directory(subject: str, path: Path) -> Finding:
    probe = path / f".doctor-{os.getpid()}"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_bytes(b"x")
        probe.unlink()
    except OSError as error:
        variable = "TURNOUT_DATA" if subject.startswith("data") else "TURNOUT_CACHE"
        detail = f"cannot write `{path}`: {error.strerror}"
        return Finding("fail", subject, detail, f"{variable} names another directory")
    free = shutil.disk_usage(path).free
    detail = f"{path}, {printer.size(free)} free"
    if free < LOW_DISK:
        return Finding("fail", subject, detail, "free some disk space")
    return Finding("ok", subject, detail)


def _backends(progress: printer.Progress) -> Iterator[Finding]:
    """Starts each installed backend in a process of its own, as a load would."""
    import turnout
    from turnout.backends.base import BackendBuild
    from turnout.config import WORKER
    from turnout.worker import wire
    from turnout.worker.process import Worker

    usable = 0
    for build in turnout.backends_status():
        if not build.available:
            command = f"`pip install 'turnout[{build.extra}]'` brings it"
            yield Finding("missing", build.name, f"{build.unavailable}; {command}")
            continue
        progress(f"starting {build.name}")
        try:
            with Worker() as worker:
                seen: BackendBuild = wire.rebuild(
                    worker.call("describe", timeout=WORKER.assess_s, backend=build.name), BackendBuild
                )
        except TurnoutError as error:
            yield Finding(
                "fail",
                build.name,
                f"{build.version} does not start: {error.message}",
                f"`pip install --force-reinstall 'turnout[{build.extra}]'`",
            )
            continue
        usable += 1
        yield Finding("ok", build.name, f"{build.version}, devices {', '.join(seen.devices)}")
    if not usable:
        yield Finding("fail", "backends", "none can be used", "`pip install 'turnout[llamacpp]'` is a small one")
