"""Names to directories: local paths, packaged models by short name, the Hugging Face cache.

Order: a path that exists, then a short name of the catalogue, then ``org/name[@revision]`` in the
Hugging Face cache. Nothing here contacts the network but ``pull``, and no package is imported: a
package's directory is found by its import specification alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from turnout.config import MIB, cache_dir, data_dir
from turnout.errors import NotFoundError, TurnoutError, UsageError
from turnout.package.catalogue import KNOWN, Known

Progress = Callable[[str], None]
# Repository names as the Hub allows them: one or two parts of letters, digits, `-`, `_`, `.`.
_REPO = re.compile(r"(?!.*(?:--|\.\.))[A-Za-z0-9][\w.-]{0,95}(?:/[A-Za-z0-9][\w.-]{0,95})?", re.ASCII)
_REVISION = re.compile(r"(?!.*\.\.)[A-Za-z0-9][\w./-]{0,199}", re.ASCII)
_COMMIT = re.compile(r"[0-9a-f]{40}")
_REF_BYTES = 256


@dataclass(frozen=True, slots=True)
class Resolved:
    """Where a name leads. ``source`` is ``path``, ``package`` or ``hub``; ``revision`` is the commit
    of a Hub snapshot."""

    path: Path
    name: str
    revision: str | None = None
    source: str = "path"


@dataclass(frozen=True, slots=True)
class Listed:
    """One model that has a name here. ``path`` is None when it is not installed; ``install`` is the
    command that brings it; ``size_bytes`` counts what lies on disk."""

    name: str
    source: str
    path: Path | None
    size_bytes: int
    title: str = ""
    tasks: tuple[str, ...] = ()
    licence: str = ""
    revision: str | None = None
    install: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Removal:
    """What ``rm`` would delete; nothing is deleted before ``execute``."""

    name: str
    paths: tuple[Path, ...]
    size_bytes: int

    def execute(self) -> None:
        """Deletes the paths and forgets the recorded pull. Raises ``TurnoutError`` on refusal of the disk."""
        try:
            for path in self.paths:
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise TurnoutError(f"`{self.name}` could not be removed whole: {error}") from None
        _record_pull(self.name.partition("@")[0], None)


# ---- resolving -------------------------------------------------------------------------------


def resolve(name_or_path: str | os.PathLike[str]) -> Resolved:
    """Directory or file of a path or model name.

    Raises ``NotFoundError`` with the command that would bring the model as hint, ``TurnoutError``
    when a packaged model's pieces do not give the file they should.
    """
    text = os.fspath(name_or_path)
    if not text:
        raise UsageError("an empty model name", hints=["`turnout list` shows the models that are known here"])
    try:
        path = Path(text).expanduser()
        if path.exists():
            return Resolved(path, text)
    except (OSError, ValueError, RuntimeError):
        pass  # not a path the system accepts: it may still be a name
    if text in KNOWN:
        return _resolve_known(KNOWN[text])
    repo, revision = split_name(text)
    if repo is not None:
        found = _resolve_hub(repo, revision)
        if found is not None:
            return found
    raise NotFoundError(f"no model `{text}`: no such path, short name or cached repository", hints=_suggest(text, repo))


def split_name(text: str) -> tuple[str | None, str | None]:
    """Repository and revision of ``org/name[@revision]``; (None, None) when it cannot be one."""
    repo, _, revision = text.partition("@")
    if not _REPO.fullmatch(repo) or (revision and not _REVISION.fullmatch(revision)):
        return None, None
    return repo, revision or None


def _suggest(text: str, repo: str | None) -> list[str]:
    import difflib

    hints = [f"did you mean `{name}`?" for name in difflib.get_close_matches(text, KNOWN, n=1)]
    if repo is not None and "/" in repo and not text.startswith((".", "/", "~")):
        hints.append(f"`turnout pull {text}` downloads it")
    return [*hints, "`turnout list` shows the models that are known here"]


# ---- models inside packages ------------------------------------------------------------------


def _module_dir(module: str) -> list[Path]:
    """Directories of a top-level package, without importing it."""
    import importlib.util

    try:
        spec = importlib.util.find_spec(module)
    except (ImportError, ValueError):
        return []
    return [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []


def _first(module: str, inside: str) -> Path | None:
    return next((place / inside for place in _module_dir(module) if (place / inside).exists()), None)


def _pieces(known: Known) -> list[Path] | None:
    """Paths of a model's pieces in order, or None unless all are there."""
    found = [_first(*piece.split("/", 1)) for piece in known.pieces]
    return [path for path in found if path is not None] if all(found) else None


def assembled_path(known: Known) -> Path:
    """Where the joined file of a model in pieces lies in the cache."""
    return cache_dir() / "assembled" / known.name / known.sha256[:16] / known.inside


def _resolve_known(known: Known) -> Resolved:
    path = _assemble(known) if known.pieces else _first(known.module, known.inside)
    if path is None:
        raise NotFoundError(
            f"the model `{known.name}` ({known.title}) is not installed", hints=[f"`{' '.join(known.install_argv())}`"]
        )
    return Resolved(path, known.name, source="package")


def _assemble(known: Known) -> Path | None:
    """Joins a model's pieces in the cache, once; its SHA-256 is checked before it gets its name."""
    target = assembled_path(known)
    if target.is_file() and target.stat().st_size == known.size:
        return target
    pieces = _pieces(known)
    if pieces is None:
        return None
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, suffix=".part", delete=False) as stream:
            part = Path(stream.name)
            digest = hashlib.sha256()
            for block in _blocks(pieces):
                digest.update(block)
                stream.write(block)
        if digest.hexdigest() != known.sha256:
            part.unlink()
            raise TurnoutError(
                f"the pieces of `{known.name}` do not give the file they should: SHA-256 is "
                f"`{digest.hexdigest()}`, expected `{known.sha256}`",
                code="artifact.corrupt",
                hints=[f"`{' '.join([*known.install_argv(), '--force-reinstall'])}`"],
            )
        os.replace(part, target)
    except OSError as error:
        raise TurnoutError(
            f"`{known.name}` cannot be put together in `{target.parent}`: {error.strerror or error}",
            hints=["TURNOUT_CACHE names another cache directory"],
        ) from None
    return target


def _blocks(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        with path.open("rb") as stream:
            while block := stream.read(4 * MIB):
                yield block


# ---- the Hugging Face cache ------------------------------------------------------------------


def hub_cache() -> Path:
    """Directory of the Hugging Face cache, by the variables that huggingface_hub documents."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "huggingface" / "hub"


def _repo_dir(repo: str) -> Path:
    return hub_cache() / ("models--" + repo.replace("/", "--"))


def _snapshots(repo: str) -> list[str]:
    """Commits of a cached repository that have a snapshot directory."""
    try:
        names = sorted(p.name for p in (_repo_dir(repo) / "snapshots").iterdir() if p.is_dir())
    except OSError:
        return []
    return [name for name in names if _COMMIT.fullmatch(name)]


def _read_ref(repo: str, ref: str) -> str | None:
    try:
        with (_repo_dir(repo) / "refs" / ref).open("rb") as stream:
            commit = stream.read(_REF_BYTES).decode("ascii", "replace").strip()
    except OSError:
        return None
    return commit if _COMMIT.fullmatch(commit) else None


def _resolve_hub(repo: str, revision: str | None) -> Resolved | None:
    """Snapshot of a cached repository: a commit, a prefix of one, a branch or tag; without a
    revision the pulled one, then `main`, then the only one."""
    snapshots = _snapshots(repo)
    if not snapshots:
        return None
    commit = _commit_of(repo, revision, snapshots)
    if commit is None:
        known = ", ".join(f"`{name[:12]}`" for name in snapshots)
        which = (
            f"revision `{revision}` of `{repo}` is not in the cache"
            if revision
            else (f"`{repo}` has several cached revisions and none is `main`")
        )
        raise NotFoundError(which, hints=[f"cached revisions: {known}", f"name one as `{repo}@REVISION`"])
    return Resolved(_repo_dir(repo) / "snapshots" / commit, repo, commit, "hub")


def _commit_of(repo: str, revision: str | None, snapshots: list[str]) -> str | None:
    if revision is None:
        for candidate in (_pulls().get(repo), _read_ref(repo, "main")):
            if candidate in snapshots:
                return candidate
        return snapshots[0] if len(snapshots) == 1 else None
    named = _read_ref(repo, revision)
    if named in snapshots:
        return named
    matching = [name for name in snapshots if len(revision) >= 7 and name.startswith(revision)]
    return matching[0] if len(matching) == 1 else None


# ---- pulling ---------------------------------------------------------------------------------


def pull(name: str, on_progress: Progress | None = None) -> Resolved:
    """Downloads ``org/name[@revision]`` into the Hugging Face cache at one commit and records it.

    The name then means that commit until it is pulled again. Raises ``TurnoutError`` when the Hub
    cannot be reached or has no such model, ``UsageError`` for a name that is none.
    """
    if name in KNOWN:
        return _resolve_known(KNOWN[name])
    repo, revision = split_name(name)
    if repo is None or "/" not in repo:
        raise UsageError(f"`{name}` is not a repository name", hints=["write it as `org/name` or `org/name@revision`"])
    say = on_progress or (lambda text: None)
    import huggingface_hub

    try:
        say(f"asking for the commit of {repo}@{revision or 'main'}")
        commit = huggingface_hub.HfApi().model_info(repo, revision=revision, timeout=20).sha
        say(f"downloading {repo} at {commit}")
        path = huggingface_hub.snapshot_download(repo, revision=commit, cache_dir=hub_cache())
    except Exception as error:  # its own errors, those of its HTTP library and the system's have no common base
        raise _pull_error(name, error) from None
    _record_pull(repo, commit)
    return Resolved(Path(path), repo, commit, "hub")


def _pull_error(name: str, error: Exception) -> TurnoutError:
    kind = type(error).__name__
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), kind)
    hints = []
    if kind in ("RepositoryNotFoundError", "GatedRepoError"):
        hints = ["check the name; private and gated models need `hf auth login`"]
    elif kind == "OfflineModeIsEnabled":
        hints = ["HF_HUB_OFFLINE is set; unset it to download"]
    elif not kind.startswith(("Revision", "Entry")):
        hints = ["the model hub could not be reached; a model that is on this machine can be named by its path"]
    return TurnoutError(f"cannot pull `{name}`: {first[:300]}", code="artifact.missing", hints=hints)


def _pulls_file() -> Path:
    return data_dir() / "pulls.json"


def _pulls() -> dict[str, str]:
    """Repository to pulled commit."""
    try:
        value = json.loads(_pulls_file().read_bytes())
    except (OSError, ValueError):
        return {}
    return {str(k): str(v) for k, v in value.items()} if isinstance(value, dict) else {}


def _record_pull(repo: str, commit: str | None) -> None:
    pulls = _pulls()
    if pulls.get(repo) == commit:
        return
    pulls.pop(repo, None)
    if commit is not None:
        pulls[repo] = commit
    target = _pulls_file()
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_suffix(f".{os.getpid()}.part")
    part.write_text(json.dumps(pulls, indent=1, sort_keys=True))
    os.replace(part, target)


# ---- listing and removing --------------------------------------------------------------------


def listing() -> list[Listed]:
    """Every model with a name here: the catalogue in its order, then the Hugging Face cache."""
    models = [_listed_known(known) for known in KNOWN.values()]
    try:
        folders = sorted(p for p in hub_cache().iterdir() if p.name.startswith("models--") and p.is_dir())
    except OSError:
        folders = []
    for folder in folders:
        repo = folder.name.removeprefix("models--").replace("--", "/")
        for commit in _snapshots(repo):
            path = folder / "snapshots" / commit
            models.append(
                Listed(
                    repo,
                    "hub",
                    path,
                    disk_bytes(path),
                    revision=commit,
                    install=("turnout", "pull", f"{repo}@{commit}"),
                )
            )
    return models


def _listed_known(known: Known) -> Listed:
    path: Path | None
    if known.pieces:
        pieces, whole = _pieces(known), assembled_path(known)
        path = whole if whole.is_file() else (pieces[0].parent if pieces else None)
        size = whole.stat().st_size if whole.is_file() else sum(p.stat().st_size for p in pieces or [])
    else:
        path = _first(known.module, known.inside)
        size = disk_bytes(path) if path else 0
    return Listed(
        known.name, "package", path, size, known.title, known.tasks, known.licence, install=tuple(known.install_argv())
    )


def disk_bytes(path: Path) -> int:
    """Bytes of the files at ``path``, links followed (a snapshot is made of links)."""
    if path.is_file():
        return path.stat().st_size
    total = 0
    for base, _, names in os.walk(path):
        for name in names:
            try:
                total += os.stat(os.path.join(base, name)).st_size
            except OSError:
                continue
    return total


def removal(name: str) -> Removal:
    """What removing ``name`` would delete: a repository (or one revision) of the Hugging Face cache,
    or the assembled file of a packaged model. Raises ``UsageError`` for anything else."""
    known = KNOWN.get(name)
    if known is not None:
        whole = assembled_path(known)
        if known.pieces and whole.is_file():
            return Removal(name, (whole.parent,), whole.stat().st_size)
        raise UsageError(
            f"`{name}` belongs to an installed package or is not here; only pulled and cached models are removed",
            hints=[f"`{' '.join(known.uninstall_argv())}`"],
        )
    repo, revision = split_name(name)
    if repo is None or not _snapshots(repo):
        raise NotFoundError(f"no pulled or cached model `{name}`", hints=["`turnout list` shows what is here"])
    folder = _repo_dir(repo)
    if revision is None:
        return Removal(name, (folder,), disk_bytes(folder / "blobs") or disk_bytes(folder))
    found = _resolve_hub(repo, revision)
    assert found is not None and found.revision is not None
    return _revision_removal(name, repo, found.revision)


def _revision_removal(name: str, repo: str, commit: str) -> Removal:
    """One snapshot, the references to it, and the blobs that no other snapshot links to."""
    folder = _repo_dir(repo)
    others = [c for c in _snapshots(repo) if c != commit]
    if not others:
        return Removal(name, (folder,), disk_bytes(folder / "blobs") or disk_bytes(folder))
    kept = {target for other in others for target in _targets(folder / "snapshots" / other)}
    blobs = {t for t in _targets(folder / "snapshots" / commit) if t not in kept and t.parent == folder / "blobs"}
    refs = [p for p in (folder / "refs").rglob("*") if p.is_file() and p.read_text(errors="replace").strip() == commit]
    size = sum(blob.stat().st_size for blob in blobs if blob.exists())
    return Removal(name, (folder / "snapshots" / commit, *refs, *sorted(blobs)), size)


def _targets(snapshot: Path) -> Iterator[Path]:
    for base, _, names in os.walk(snapshot):
        for name in names:
            path = Path(base, name)
            if path.is_symlink():
                yield Path(os.path.normpath(path.parent / os.readlink(path)))
