"""Files that appear whole or not at all, and an error that says so where one cannot be written."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from safetensors import SafetensorError

from deft_draft_training.errors import StorageError


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a file beside its final name: a reader sees all of the old content or of the new."""
    partial = path.with_name(f"{path.name}.{os.getpid()}")
    with explained(path):
        try:
            with partial.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Replace a file's content."""
    with replacing(path) as file:
        file.write(data)


@contextmanager
def explained(path: Path) -> Iterator[None]:
    """Say which file could not be written, and that nothing is lost."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise StorageError(
            f"{path} cannot be written: {reason}; what was there before is unchanged. Make room, "
            "and the same command goes on from there"
        ) from error
