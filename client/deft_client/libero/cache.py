"""Where this package may write without being asked: one folder per user, never the home.

`DEFT_CACHE_DIR` moves it. The default lies in the system's temporary folder, readable by its owner
alone; a folder of that name that belongs to somebody else is refused.
"""

import os
import tempfile
from pathlib import Path

from deft_client.libero.errors import SimulationError


def cache_folder(chosen: Path | None = None) -> Path:
    """The cache folder, made if missing: `chosen`, or $DEFT_CACHE_DIR, or a temporary one."""
    if chosen is None and os.environ.get("DEFT_CACHE_DIR"):
        chosen = Path(os.environ["DEFT_CACHE_DIR"])
    folder = chosen or Path(tempfile.gettempdir()) / f"deft-cache-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        owner = folder.stat().st_uid
    except OSError as error:
        raise SimulationError(
            f"cannot use {folder} as cache: {error}; set DEFT_CACHE_DIR to a folder of yours"
        ) from error
    if chosen is None and owner != os.getuid():
        raise SimulationError(f"{folder} belongs to user {owner}; set DEFT_CACHE_DIR")
    return folder.resolve()


def write_atomically(path: Path, content: bytes) -> None:
    """Write a file so that readers see the old content or the new, never a part of it."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(path)
    except BaseException:
        aside.unlink(missing_ok=True)
        raise
