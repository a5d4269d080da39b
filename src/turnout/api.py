"""Parts of the public Python API that join rooms of several levels."""

from __future__ import annotations

import os

from turnout.backends import registry
from turnout.backends.base import BackendBuild
from turnout.package.facts import Package
from turnout.package.inspect import inspect as inspect_path
from turnout.package.store import resolve


def inspect(path: str | os.PathLike[str]) -> Package:
    """Facts of the package at a path or under a store name; nothing of it is executed.

    Raises ``NotFoundError`` when nothing is there.
    """
    return inspect_path(resolve(os.fspath(path)).path)


def backends_status() -> list[BackendBuild]:
    """Every registered backend with its version, or why it cannot be used. Imports no backend library."""
    return [registry.get(name).describe() for name in registry.names()]
