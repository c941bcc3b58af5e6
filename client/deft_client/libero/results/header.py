"""The header of a run: everything that decides what its results mean, in `run.json`.

Two results may share a folder only if their headers agree; what a run was started for (which
trials, how many workers, at which address the server was) may differ between two sittings.
"""

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from deft_client.libero.results.errors import (
    ResultsDamagedError,
    ResultsError,
    ResultsMismatchError,
    ResultsWriteError,
)

FORMAT = "deft-libero-results"
FORMAT_VERSION = 1
HEADER_FILE = "run.json"


@dataclass(frozen=True)
class RunHeader:
    """`options`, `versions`, `server` and `assets` must agree for results to be added.

    `notes` (machine, address of the server) are kept for the reader and never compared.
    """

    run: str
    created: str  # UTC, ISO 8601
    name: str  # what reports call it, e.g. "libero_object lossless"
    suite: str
    assets: str
    options: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    server: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, str] = field(default_factory=dict)
    format: str = FORMAT
    format_version: int = FORMAT_VERSION


def read_header(folder: Path) -> RunHeader:
    """The header of the run in `folder`."""
    path = folder / HEADER_FILE
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError as error:
        raise ResultsError(
            f"{folder} holds no results: there is no {HEADER_FILE}. "
            "Give the folder that `deft-client eval` wrote"
        ) from error
    except (OSError, ValueError) as error:
        raise ResultsDamagedError(f"{path} cannot be read: {error}") from error
    return _checked_header(path, values)


def _checked_header(path: Path, values: object) -> RunHeader:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ResultsDamagedError(f"{path} is not the header of an evaluation")
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise ResultsMismatchError(
            f"{path} has results of format version {version}; this program reads and writes "
            f"{FORMAT_VERSION}. Use the version that wrote them, or another --out"
        )
    try:
        return RunHeader(**values)
    except TypeError as error:
        raise ResultsDamagedError(f"{path} has missing or unknown fields: {error}") from error


def write_header(folder: Path, header: RunHeader) -> None:
    """Write the header so that it is there whole or not at all."""
    text = json.dumps(asdict(header), indent=2, ensure_ascii=False, default=dict)
    write_whole(folder / HEADER_FILE, text.encode() + b"\n")


def write_whole(path: Path, content: bytes) -> None:
    """Replace a file in one step: after a crash it has the old content or the new, never a part."""
    beside = path.with_name(path.name + ".part")
    try:
        with beside.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        with suppress(OSError):
            beside.unlink(missing_ok=True)
        raise ResultsWriteError(f"cannot write {path}: {error.strerror or error}") from error


def sync_folder(folder: Path) -> None:
    """Make the names in a folder survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_same_run(folder: Path, found: RunHeader, wanted: RunHeader) -> None:
    """Raise ResultsMismatchError, listing every difference, unless results may be mixed."""
    differences = list(_differences(found, wanted))
    if differences:
        listed = "\n".join(f"  {one}" for one in differences)
        raise ResultsMismatchError(
            f"{folder} holds results of run {found.run}, which was made differently:\n{listed}\n"
            "Choose another folder with --out, or repeat the options of that run"
        )


def _differences(found: RunHeader, wanted: RunHeader) -> Iterator[str]:
    pairs = (
        ("", {"suite": found.suite, "assets": found.assets}, _top(wanted)),
        ("option ", found.options, wanted.options),
        ("version of ", found.versions, wanted.versions),
        ("server's ", found.server, wanted.server),
    )
    for what, there, here in pairs:
        for key in sorted({*there, *here}):
            if there.get(key) != here.get(key):
                yield f"{what}{key}: there {there.get(key)!r}, now {here.get(key)!r}"


def _top(header: RunHeader) -> dict[str, str]:
    return {"suite": header.suite, "assets": header.assets}
