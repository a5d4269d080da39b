"""A bounded, contained view of the files of one package.

Every reader works through a ``Scan``: nothing outside the package root is opened, every link is
classified, sizes are checked before bytes are read. The one exception to containment is a
Hugging Face cache snapshot, whose files are links to ``../../blobs`` of the same cache folder.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from turnout.config import READ
from turnout.package.facts import FileEntry, FileRole, Finding, Severity

T = TypeVar("T")
LFS_MARK = b"version https://git-lfs.github.com/spec/v1"
WIDE_TEXT = 12 << 20  # bytes of JSON with other than ASCII characters, which cost up to four times as much
LONG_NUMBER = re.compile(rb"\d{19}")
HALF_CHARACTER = re.compile(rb"\\u[dD][89a-fA-F]")
SKIP_DIRS = {".git", "__pycache__", ".cache", ".venv", "node_modules"}
PARTIAL_SUFFIXES = (".incomplete", ".part", ".partial", ".crdownload", ".aria2")

_ROLES: tuple[tuple[tuple[str, ...], FileRole], ...] = (
    (("*.index.json", "model_index.json", "modules.json"), FileRole.INDEX),
    (
        (
            "tokenizer*",
            "vocab*",
            "merges.txt",
            "*.tiktoken",
            "tekken.json",
            "special_tokens_map.json",
            "added_tokens.json",
            "spiece.model",
            "sentencepiece*",
        ),
        FileRole.TOKENIZER,
    ),
    (("*.jinja", "chat_template.json"), FileRole.TEMPLATE),
    (("*processor*.json",), FileRole.PROCESSOR),
    (
        ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.ubj", "*.npz", "*.data", "*.onnx_data"),
        FileRole.WEIGHTS,
    ),
    (("*.onnx", "*.xml", "*.tflite", "*.pb", "*.mlmodel"), FileRole.GRAPH),
    (("*.py", "*.so", "*.dll"), FileRole.CODE),
    (("license*", "licence*", "copying*", "notice*"), FileRole.LICENCE),
    (("readme*",), FileRole.README),
    (("*.json", "*.yaml", "*.yml", "*.toml"), FileRole.CONFIG),
)


def role_of(path: str) -> FileRole:
    """Role by file name; a hint that may order work but never decides."""
    name = path.rsplit("/", 1)[-1].lower()
    for patterns, role in _ROLES:
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns):
            return role
    return FileRole.OTHER


class ReadError(ValueError):
    """A file cannot be read within the rules; carries the finding that says why."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.message)
        self.finding = finding


def read_error(code: str, message: str, path: str, observed: str = "", expected: str = "") -> ReadError:
    """A ``ReadError`` of severity error."""
    return ReadError(Finding(code, Severity.ERROR, message, path, observed, expected))


@dataclass(slots=True)
class Scan:
    """Files of a package below ``root`` (absolute, resolved).

    ``focus`` is the one relative path the user named when a file rather than a directory was
    given: then only artifacts whose entry is that file are of interest, siblings serve them.
    """

    root: Path
    entries: dict[str, FileEntry]
    focus: str | None = None
    findings: list[Finding] = field(default_factory=list)
    memo: dict[object, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Scan:
        """Lists ``path`` (a directory or one file). Raises ``FileNotFoundError`` if absent."""
        given = Path(path)
        if not given.exists():
            raise FileNotFoundError(str(path))
        if given.is_dir():
            root, focus = given.resolve(), None
        else:
            # A file that is itself a link (a cache snapshot) stays in the folder it is named in.
            root, focus = given.parent.resolve(), given.name
        scan = cls(root=root, entries={}, focus=focus)
        scan._walk("", 0)
        return scan

    # ---- listing -----------------------------------------------------------------------

    def _walk(self, directory: str, depth: int) -> None:
        if depth > READ.directory_depth:
            self.add(
                "artifact.corrupt",
                Severity.WARNING,
                "directory nesting not followed further",
                directory,
                f"depth {depth}",
                f"at most {READ.directory_depth}",
            )
            return
        try:
            children = sorted(os.scandir(self.root / directory), key=lambda e: e.name)
        except OSError as error:
            self.add("artifact.missing", Severity.WARNING, f"directory cannot be read: {error.strerror}", directory)
            return
        for child in children:
            rel = f"{directory}/{child.name}" if directory else child.name
            if not _is_text(child.name):
                plain = rel.encode("utf-8", "surrogateescape").decode("utf-8", "replace")
                self.add("artifact.corrupt", Severity.WARNING, "a name that is not UTF-8 is left aside", plain)
                continue
            if child.is_dir(follow_symlinks=False):
                if child.name not in SKIP_DIRS and (self.focus is None or depth == 0):
                    self._walk(rel, depth + 1)
                continue
            if len(self.entries) >= READ.files:
                self.add("artifact.corrupt", Severity.WARNING, "file list cut", "", f"over {READ.files} files")
                return
            entry = self._entry(rel, child)
            if entry is not None:
                self.entries[rel] = entry

    def _entry(self, rel: str, child: os.DirEntry[str]) -> FileEntry | None:
        link = self._classify_link(child.path) if child.is_symlink() else None
        try:
            stat = child.stat(follow_symlinks=link != "escape")
        except OSError:
            self.add("artifact.missing", Severity.WARNING, "link leads to nothing", rel)
            return None
        if link == "inside" and os.path.isdir(child.path):
            return None  # its files are listed at their own place
        if not (os.path.isfile(child.path) or link == "escape"):
            return None  # sockets, devices, pipes are never opened
        partial = rel.endswith(PARTIAL_SUFFIXES) or stat.st_size == 0
        return FileEntry(rel, stat.st_size, stat.st_mtime_ns, role_of(rel), link, partial=partial)

    def _classify_link(self, path: str) -> str:
        target = os.path.realpath(path)
        if _within(target, str(self.root)):
            return "inside"
        parts = self.root.parts
        for index in range(len(parts) - 1, 0, -1):
            if parts[index].startswith("models--"):
                blobs = str(Path(*parts[: index + 1]) / "blobs")
                return "cache" if _within(target, blobs) else "escape"
        return "escape"

    def add(
        self, code: str, severity: Severity, message: str, path: str = "", observed: str = "", expected: str = ""
    ) -> Finding:
        """Records a finding of the package and returns it."""
        finding = Finding(code, severity, message, path, observed, expected)
        self.findings.append(finding)
        return finding

    def has(self, rel: str) -> bool:
        """Whether the package lists ``rel``."""
        return rel in self.entries

    def glob(self, pattern: str, directory: str | None = None) -> list[str]:
        """Relative paths whose file name matches ``pattern``; of one directory if given ('' is the root)."""
        return [
            rel
            for rel in self.entries
            if fnmatch.fnmatchcase(rel.rsplit("/", 1)[-1], pattern)
            and (directory is None or parent_of(rel) == directory)
        ]

    def directories(self) -> list[str]:
        """All directories that hold files, the root as ''."""
        return sorted({parent_of(rel) for rel in self.entries})

    # ---- contained access -------------------------------------------------------------

    def refer(self, directory: str, name: str) -> str:
        """Relative path that ``name``, written inside ``directory``, refers to.

        Raises ``ReadError`` ``artifact.path_escape`` for absolute names and names that leave the
        root. The file need not exist.
        """
        if os.path.isabs(name) or "\\" in name or "\0" in name or (len(name) > 1 and name[1] == ":"):
            raise read_error(
                "artifact.path_escape",
                f"reference `{name}` is not relative to the package",
                directory,
                name,
                "a path below the package root",
            )
        parts: list[str] = [p for p in directory.split("/") if p]
        for part in name.split("/"):
            if part in ("", "."):
                continue
            if part == "..":
                if not parts:
                    raise read_error(
                        "artifact.path_escape",
                        f"reference `{name}` leads out of the package",
                        directory,
                        name,
                        "a path below the package root",
                    )
                parts.pop()
            else:
                parts.append(part)
        return "/".join(parts)

    def path(self, rel: str) -> Path:
        """Absolute path of a listed file; raises ``ReadError`` when absent or a link out of the package."""
        entry = self.entries.get(rel)
        if entry is None:
            raise read_error("artifact.missing", f"file `{rel}` is not in the package", rel, "absent", "present")
        if entry.link == "escape":
            raise read_error(
                "artifact.path_escape",
                f"`{rel}` is a link out of the package",
                rel,
                os.path.realpath(self.root / rel),
                "a file below the package root",
            )
        return self.root / rel

    def open(self, rel: str) -> BinaryIO:
        """Opens a listed file for reading bytes."""
        return open(self.path(rel), "rb")

    def read(self, rel: str, limit: int) -> bytes:
        """All bytes of a listed file of at most ``limit`` bytes; raises ``ReadError`` beyond."""
        path = self.path(rel)
        size = self.entries[rel].size
        if size > limit:
            raise read_error(
                "artifact.corrupt", f"`{rel}` is too large to be read here", rel, f"{size} bytes", f"at most {limit}"
            )
        with open(path, "rb") as stream:
            return stream.read(limit + 1)[:limit]

    def head(self, rel: str, count: int) -> bytes:
        """First ``count`` bytes of a listed file, fewer if it is shorter; b'' when unreadable."""
        try:
            with self.open(rel) as stream:
                return stream.read(count)
        except (OSError, ReadError):
            return b""

    def is_lfs_pointer(self, rel: str) -> bool:
        """Whether the file is a git-lfs pointer in place of its content; marks the entry."""
        entry = self.entries.get(rel)
        if entry is None or entry.size > 1024:
            return False
        entry.lfs_pointer = self.head(rel, len(LFS_MARK)) == LFS_MARK
        return entry.lfs_pointer

    def check_weights_file(self, rel: str) -> Finding | None:
        """The finding that makes a weights file unusable before its format is looked at, or None:
        absent, a link out of the package, a git-lfs pointer, empty or a partial download."""
        try:
            self.path(rel)
        except ReadError as error:
            return error.finding
        if self.is_lfs_pointer(rel):
            return Finding(
                "artifact.lfs_pointer",
                Severity.ERROR,
                f"`{rel}` is a git-lfs pointer, not the file itself",
                rel,
                f"{self.entries[rel].size} bytes of pointer text",
                "the weights",
            )
        if self.entries[rel].partial:
            return Finding(
                "artifact.truncated",
                Severity.ERROR,
                f"`{rel}` is empty or a partial download",
                rel,
                f"{self.entries[rel].size} bytes",
                "a complete file",
            )
        return None

    def json(self, rel: str, limit: int | None = None) -> Any:
        """Parsed JSON of a listed file, within size and depth limits.

        Raises ``ReadError`` (``config.invalid``) for text that is not JSON, is nested too deeply,
        holds too many values or repeats a key in one object. A caller that gives ``limit`` expects
        bulk data: then only bytes and depth are bounded. Memoised.
        """
        nodes = READ.json_nodes if limit is None else None
        read = limit or READ.json_config_bytes
        return self.once(("json", rel), lambda: parse_json(self.read(rel, read), rel, nodes))

    def json_object(self, rel: str) -> dict[str, Any] | None:
        """JSON object of a listed file, or None (absent, or invalid: then a finding is recorded once)."""
        if rel not in self.entries:
            return None

        def load() -> dict[str, Any] | None:
            try:
                value = self.json(rel)
            except ReadError as error:
                self.findings.append(error.finding)
                return None
            if isinstance(value, dict):
                return value
            self.add(
                "config.invalid", Severity.ERROR, f"`{rel}` is not a JSON object", rel, type(value).__name__, "object"
            )
            return None

        return self.once(("object", rel), load)

    def once(self, key: object, make: Callable[[], T]) -> T:
        """Value of ``make()`` computed once per scan under ``key``."""
        if key not in self.memo:
            self.memo[key] = make()
        return self.memo[key]  # type: ignore[no-any-return]

    def wanted(self, rel: str) -> bool:
        """Whether an artifact whose entry is ``rel`` is of interest (see ``focus``)."""
        return self.focus is None or rel == self.focus

    def size_of(self, files: Iterable[str]) -> int:
        """Total bytes of the listed files among ``files``."""
        return sum(self.entries[rel].size for rel in set(files) if rel in self.entries)

    def fingerprint(self, files: Iterable[str] | None = None) -> str:
        """Cheap identity: names, sizes and modification times of ``files`` (all by default)."""
        digest = hashlib.sha256()
        for rel in sorted(self.entries if files is None else set(files)):
            entry = self.entries.get(rel)
            stamp = f"{rel}\0{entry.size}\0{entry.mtime_ns}\n" if entry else f"{rel}\0absent\n"
            digest.update(stamp.encode("utf-8", "surrogateescape"))
        return digest.hexdigest()


def parent_of(rel: str) -> str:
    """Directory part of a relative path, '' for the root."""
    return rel.rsplit("/", 1)[0] if "/" in rel else ""


def join(directory: str, name: str) -> str:
    """Relative path of ``name`` in ``directory`` ('' is the root)."""
    return f"{directory}/{name}" if directory else name


def parse_json(data: bytes, where: str, nodes: int | None = None) -> Any:
    """JSON value of ``data`` of at most ``nodes`` brackets and commas; see ``Scan.json`` for the rules."""
    check_json_size(data, where, nodes)
    repeated: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(items)
        if len(result) != len(items) and not repeated:
            seen: set[str] = set()
            repeated.extend(k for k, _ in items if k in seen or seen.add(k))  # type: ignore[func-returns-value]
        return result

    # Such numbers are rare, and a hook for every number is slow.
    whole = _integer if LONG_NUMBER.search(data) else None
    try:
        value = json.loads(data.decode("utf-8-sig"), object_pairs_hook=pairs, parse_int=whole)
    except RecursionError:
        raise read_error(
            "config.invalid", f"`{where}` is nested too deeply", where, "over 1000 levels", f"at most {READ.json_depth}"
        ) from None
    except ValueError as error:
        raise read_error("config.invalid", f"`{where}` is not valid JSON: {error}", where) from None
    if repeated:
        raise read_error(
            "config.invalid",
            f"`{where}` repeats the key `{repeated[0]}`",
            where,
            f"key `{repeated[0]}` twice",
            "each key once",
        )
    check_characters(data, value, where)
    if _depth(value) > READ.json_depth:
        raise read_error(
            "config.invalid",
            f"`{where}` is nested too deeply",
            where,
            f"over {READ.json_depth} levels",
            f"at most {READ.json_depth}",
        )
    return value


def _integer(text: str) -> int | float:
    """A number of JSON; beyond 64 bits (a limit of 1e30 written out) the nearest float."""
    if len(text) <= 20 and -(1 << 63) <= (number := int(text)) < 1 << 64:
        return number
    return float(text)


def check_characters(data: bytes, value: Any, where: str) -> None:
    """Refuses JSON with half of a character (``\\ud800`` alone), which no message could carry."""
    if HALF_CHARACTER.search(data):
        try:
            json.dumps(value, ensure_ascii=False).encode("utf-8")
        except UnicodeEncodeError:
            raise read_error("config.invalid", f"`{where}` holds half of a character", where) from None


def check_json_size(data: bytes, where: str, nodes: int | None) -> None:
    """Refuses bytes that cannot be JSON or would cost too much memory, before anything is decoded."""
    if b"\0" in data:
        raise read_error("config.invalid", f"`{where}` is not valid JSON: it holds zero bytes", where)
    if nodes is not None and len(data) > WIDE_TEXT and not data.isascii():
        raise read_error(
            "config.invalid",
            f"`{where}` is too large to be read here",
            where,
            f"{len(data)} bytes, not all ASCII",
            f"at most {WIDE_TEXT}",
        )
    count = 0 if nodes is None else sum(map(data.count, (b",", b"[", b"{")))
    if nodes is not None and count > nodes:
        raise read_error(
            "config.invalid",
            f"`{where}` holds too many values",
            where,
            f"{count} brackets and commas",
            f"at most {nodes}",
        )


def _depth(value: Any) -> int:
    level, layer = 0, [value]
    while layer and level <= READ.json_depth:
        following: list[Any] = []
        for item in layer:
            if isinstance(item, dict):
                following.extend(v for v in item.values() if isinstance(v, (dict, list)))
            elif isinstance(item, list):
                following.extend(v for v in item if isinstance(v, (dict, list)))
        layer, level = following, level + 1
    return level


def _within(path: str, root: str) -> bool:
    return path == root or path.startswith(root.rstrip("/") + "/")


def _is_text(name: str) -> bool:
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
