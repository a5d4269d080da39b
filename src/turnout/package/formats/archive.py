"""Zip files within bounds: the directory is read, single members are unpacked, nothing is extracted."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

from turnout.config import READ
from turnout.package.scan import ReadError, Scan, read_error

# What zipfile raises on bytes that are no zip, or a broken one.
BROKEN = (
    *(zipfile.BadZipFile, zlib.error, struct.error),
    *(EOFError, NotImplementedError, RuntimeError, ValueError, OSError),
)


@contextmanager
def open_zip(scan: Scan, rel: str) -> Iterator[zipfile.ZipFile]:
    """The zip ``rel``. Raises ``ReadError`` when it is broken, there or while the caller reads of it."""
    try:
        with scan.open(rel) as stream, zipfile.ZipFile(stream) as archive:
            count = len(archive.infolist())
            if count > READ.zip_entries:
                raise read_error("artifact.corrupt", f"`{rel}` has too many members", rel, str(count))
            yield archive
    except ReadError:
        raise
    except BROKEN as error:
        raise read_error("artifact.truncated", f"`{rel}` is a broken zip: {error}", rel) from None


def read_member(archive: zipfile.ZipFile, member: zipfile.ZipInfo, rel: str, limit: int) -> bytes:
    """Content of a zip member of at most ``limit`` bytes, whatever its header claims."""
    if member.file_size > limit:
        raise read_error(
            "artifact.corrupt",
            f"`{member.filename}` in `{rel}` unpacks to {member.file_size} bytes",
            rel,
            str(member.file_size),
            f"at most {limit}",
        )
    with archive.open(member) as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise read_error("artifact.corrupt", f"`{member.filename}` in `{rel}` unpacks to more than it claims", rel)
    return data
