"""Fixtures of all tests: a data directory of their own, one judge per test process, real weights."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(scope="session", autouse=True)
def own_data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Ledger and caches of the test run, so that a user's own are neither read nor written."""
    data = tmp_path_factory.mktemp("turnout-data")
    patch = pytest.MonkeyPatch()
    patch.setenv("TURNOUT_DATA", str(data / "data"))
    patch.setenv("TURNOUT_CACHE", str(data / "cache"))
    yield data
    patch.undo()


@pytest.fixture(scope="session")
def judge(own_data: Path):  # type: ignore[no-untyped-def]
    """One worker and ledger for all verdicts of this test process."""
    from turnout.worker.judge import Judge

    with Judge() as shared:
        yield shared


def package_dir(import_name: str) -> Path:
    """Folder of an installed package that carries weights, found without importing it.

    The Makefile installs them (requirements/models.txt); their absence is a failure, not a skip.
    """
    spec = importlib.util.find_spec(import_name)
    assert spec is not None and spec.submodule_search_locations, (
        f"`{import_name}` is not installed: `make test` does it"
    )
    return Path(next(iter(spec.submodule_search_locations)))
