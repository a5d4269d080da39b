"""SQLite ledger of what was executed, with what result.

A row belongs to one case key. When a part of the key changes (package bytes, backend build,
dependencies, device), rows of the old key are withdrawn with the reason, never deleted.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import TracebackType

import msgspec

from turnout.backends.base import CaseKey, Evidence
from turnout.config import data_dir
from turnout.package.facts import Artifact, Package

SCHEMA = """
CREATE TABLE IF NOT EXISTS evidence (
  id INTEGER PRIMARY KEY, key_id TEXT NOT NULL, place TEXT NOT NULL, key TEXT NOT NULL, evidence BLOB NOT NULL,
  at REAL NOT NULL, withdrawn TEXT);
CREATE INDEX IF NOT EXISTS evidence_key ON evidence(key_id);
CREATE INDEX IF NOT EXISTS evidence_place ON evidence(place);
CREATE TABLE IF NOT EXISTS digests (fingerprint TEXT PRIMARY KEY, digest TEXT NOT NULL);
"""
BLOCK = 1 << 22
# Parts of a key whose change withdraws evidence; the others make it evidence of another case.
CHANGING = ("artifact_digest", "build", "dependencies", "recipe", "adapter")


class Ledger:
    """Evidence by case. ``path`` None: ``evidence.sqlite`` in the user's data directory."""

    def __init__(self, path: Path | None = None) -> None:
        self.path = path or data_dir() / "evidence.sqlite"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._db = sqlite3.connect(self.path, timeout=30, isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.executescript(SCHEMA)

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the database; may be called twice."""
        self._db.close()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield self._db
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def record(self, place: str, key: CaseKey, evidence: Evidence) -> None:
        """Adds one piece of evidence of the case ``key`` at ``place`` (package root).

        An earlier row of the same key and level is withdrawn: the newer run speaks.
        """
        with self._transaction() as db:
            db.execute(
                "UPDATE evidence SET withdrawn='superseded' WHERE key_id=? AND withdrawn IS NULL "
                "AND json_extract(evidence, '$.level')=?",
                (key.id, int(evidence.level)),
            )
            db.execute(
                "INSERT INTO evidence(key_id, place, key, evidence, at) VALUES (?,?,?,?,?)",
                (key.id, place, msgspec.json.encode(key).decode(), msgspec.json.encode(evidence).decode(), evidence.at),
            )

    def knows(self, place: str) -> bool:
        """Whether anything standing is recorded for the package at ``place``."""
        row = self._db.execute(
            "SELECT 1 FROM evidence WHERE place=? AND withdrawn IS NULL LIMIT 1", (place,)
        ).fetchone()
        return row is not None

    def standing(self, key: CaseKey) -> list[Evidence]:
        """Evidence of exactly this case that was not withdrawn, oldest first."""
        rows = self._db.execute(
            "SELECT evidence FROM evidence WHERE key_id=? AND withdrawn IS NULL ORDER BY id", (key.id,)
        )
        return [msgspec.json.decode(row[0], type=Evidence) for row in rows]

    def withdraw_stale(self, place: str, key: CaseKey) -> list[str]:
        """Withdraws evidence of the same case whose key has changed since; returns the reasons."""
        now = asdict(key)
        reasons: list[str] = []
        with self._transaction() as db:
            rows = db.execute(
                "SELECT id, key FROM evidence WHERE place=? AND key_id<>? AND withdrawn IS NULL", (place, key.id)
            ).fetchall()
            for row_id, text in rows:
                then = msgspec.json.decode(text)
                if any(then[name] != now[name] for name in now if name not in CHANGING):
                    continue
                changed = [f"{name}: {then[name]} -> {now[name]}" for name in CHANGING if then[name] != now[name]]
                reason = "; ".join(changed)
                db.execute("UPDATE evidence SET withdrawn=? WHERE id=?", (reason, row_id))
                reasons.append(reason)
        return reasons

    def withdrawn(self, place: str) -> list[tuple[CaseKey, str]]:
        """Withdrawn rows of a package with their reasons, oldest first."""
        rows = self._db.execute(
            "SELECT key, withdrawn FROM evidence WHERE place=? AND withdrawn IS NOT NULL ORDER BY id", (place,)
        )
        return [(msgspec.json.decode(key, type=CaseKey), reason) for key, reason in rows]

    def digest(self, package: Package, artifact: Artifact) -> str:
        """SHA-256 over the content of the artifact's files, remembered by their fingerprint.

        The fingerprint is names, sizes and modification times, so an edited file is read again.
        """
        stamps = {entry.path: f"{entry.size}:{entry.mtime_ns}" for entry in package.files}
        listing = "\n".join(f"{rel}:{stamps.get(rel, 'absent')}" for rel in sorted(set(artifact.files)))
        fingerprint = hashlib.sha256(f"{package.root}\n{artifact.id}\n{listing}".encode()).hexdigest()
        row = self._db.execute("SELECT digest FROM digests WHERE fingerprint=?", (fingerprint,)).fetchone()
        if row:
            return str(row[0])
        digest = content_digest(package, artifact)
        self._db.execute("INSERT OR REPLACE INTO digests VALUES (?,?)", (fingerprint, digest))
        return digest


def content_digest(package: Package, artifact: Artifact) -> str:
    """SHA-256 over names and content of the artifact's files; links out of the package count by name only."""
    digest = hashlib.sha256()
    entries = {entry.path: entry for entry in package.files}
    for rel in sorted(set(artifact.files)):
        digest.update(rel.encode("utf-8", "surrogateescape") + b"\0")
        entry = entries.get(rel)
        if entry is None or entry.link == "escape":
            continue
        with open(f"{package.root}/{rel}", "rb") as stream:
            while block := stream.read(BLOCK):
                digest.update(block)
        digest.update(b"\0")
    return digest.hexdigest()
