"""Files that are there whole or not at all, whatever happens while they are written."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name beside `path` to write to; at the end, what is there takes the place of `path`.

    Readers, also those after a crash, see the old content or the new, never a part of it. If the
    block raises, the old content stays. The name is hidden and keeps the suffix of `path`.
    """
    beside = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield beside
        sync(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)
    sync(path.parent)


@contextmanager
def creating(folder: Path) -> Iterator[Path]:
    """A folder beside `folder` to fill; when the block ends it takes the name, which must be free.

    If the block raises, nothing is left.
    """
    beside = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)  # of a killed process that had our id
    beside.mkdir(parents=True)
    try:
        yield beside
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def read_file(path: Path) -> bytes:
    """Return the content of a regular file. Raises OSError, for a pipe too: it may never end."""
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    return path.read_bytes()


def write_atomically(path: Path, content: bytes) -> None:
    """Replace the content of a file in one step. Raises OSError."""
    with replacing(path) as beside:
        beside.write_bytes(content)


def append_whole(file: FileIO | BinaryIO, data: bytes) -> None:
    """Write all of it behind what is there, or leave nothing of it and raise OSError.

    A disk may take it in parts before it says that it is full.
    """
    start, left = file.tell(), memoryview(data)
    try:
        while left:
            written = file.write(left)
            if not written:
                raise OSError(errno.ENOSPC, f"{len(left)} of {len(data)} bytes were not written")
            left = left[written:]
    except OSError:
        if len(left) < len(data):
            # Both: what is written next would leave zeros before it, and end the reading there.
            file.seek(start)
            file.truncate()
        raise


def sync(path: Path) -> None:
    """Make the content of a file, or the names in a folder, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
