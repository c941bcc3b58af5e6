"""The one writer of a run's results: an append survives `kill -9` and a full disk at any moment.

One line per episode, written and synced before the next episode is handed out. What a crash can
leave behind is at most one torn line at the end; opening the run again cuts it off.
"""

import fcntl
import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from deft_client.libero.results.errors import (
    ResultsBusyError,
    ResultsDamagedError,
    ResultsError,
    ResultsWriteError,
)
from deft_client.libero.results.header import (
    HEADER_FILE,
    RunHeader,
    check_same_run,
    read_header,
    sync_folder,
    write_header,
    write_whole,
)
from deft_client.libero.results.records import (
    EpisodeKey,
    EpisodeRecord,
    Outcome,
    decode_record,
    encode_record,
)

EPISODES_FILE = "episodes.jsonl"


@dataclass(frozen=True, eq=False)
class Run:
    """What a folder holds: a header and its episodes in the order of their keys."""

    folder: Path
    header: RunHeader
    records: tuple[EpisodeRecord, ...]
    has_torn_line: bool = False  # the last line was cut short by a crash, and is not in records


def load_run(folder: Path) -> Run:
    """Read a run without changing it, even while it is being written."""
    header = read_header(folder)
    path = folder / EPISODES_FILE
    try:
        content = path.read_bytes() if path.exists() else b""
    except OSError as error:
        raise ResultsError(f"{path} cannot be read: {error.strerror or error}") from error
    whole, _, torn = content.rpartition(b"\n")
    records: dict[EpisodeKey, EpisodeRecord] = {}
    for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
        record = decode_record(line, header.run, f"{path} line {number}")
        if record.key in records:
            raise ResultsDamagedError(
                f"{path} line {number} has {record.key} again; delete one of the two lines"
            )
        records[record.key] = record
    ordered = tuple(records[key] for key in sorted(records))
    return Run(folder, header, ordered, has_torn_line=bool(torn))


class ResultsStore:
    """Appends episodes to one run. Holds a lock on the folder until it is closed."""

    def __init__(self, folder: Path, header: RunHeader) -> None:
        """Create the run, or go on with the one that is there if its header agrees."""
        self.folder = folder
        self._lock = _lock_folder(folder)
        self._file = -1
        try:
            self.header, finished = self._open_run(header)
            self.resumed = tuple(finished)
            self._file = os.open(folder / EPISODES_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            self._num_bytes = os.fstat(self._file).st_size
            sync_folder(folder)
        except BaseException:
            self.close()
            raise
        self._keys = {record.key for record in self.resumed}

    def _open_run(self, wanted: RunHeader) -> tuple[RunHeader, Iterable[EpisodeRecord]]:
        if not (self.folder / HEADER_FILE).exists():
            if (self.folder / EPISODES_FILE).exists():
                raise ResultsDamagedError(
                    f"{self.folder} has {EPISODES_FILE} but no {HEADER_FILE}: nobody can tell "
                    "what those results mean. Choose another folder with --out"
                )
            write_header(self.folder, wanted)
            return wanted, ()
        found = read_header(self.folder)
        check_same_run(self.folder, found, wanted)
        return found, self._repair(load_run(self.folder))

    def _repair(self, run: Run) -> list[EpisodeRecord]:
        """Drop a torn line and the Errored episodes, which are to be played again."""
        kept = [record for record in run.records if record.outcome is not Outcome.ERRORED]
        if run.has_torn_line or len(kept) < len(run.records):
            lines = b"".join(encode_record(record, run.header.run) for record in kept)
            write_whole(self.folder / EPISODES_FILE, lines)
        return kept

    def append(self, record: EpisodeRecord) -> None:
        """Write one episode and wait until the disk has it. On failure nothing is left of it."""
        if record.key in self._keys:
            raise ResultsError(f"{record.key} has a result already; this is a defect, report it")
        try:
            _write_all(self._file, encode_record(record, self.header.run))
            os.fsync(self._file)
            self._num_bytes = os.fstat(self._file).st_size
        except OSError as error:
            with suppress(OSError):  # a disk that is gone; opening the run again cuts the line off
                os.ftruncate(self._file, self._num_bytes)
            raise ResultsWriteError(
                f"cannot write to {self.folder / EPISODES_FILE}: {error.strerror or error}. "
                f"The {len(self._keys)} episodes before are safe; make room on the disk and run "
                "the same command again"
            ) from error
        self._keys.add(record.key)

    def close(self) -> None:
        """Let others write to the folder."""
        for descriptor in (self._file, self._lock):
            if descriptor >= 0:
                os.close(descriptor)
        self._file = self._lock = -1


def _write_all(descriptor: int, content: bytes) -> None:
    left = memoryview(content)
    while left:
        left = left[os.write(descriptor, left) :]


def _lock_folder(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ResultsWriteError(
            f"cannot use {folder} for results: {error.strerror or error}. "
            "Choose another folder with --out"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise ResultsBusyError(
            f"another evaluation is writing to {folder}; wait for it, or choose another --out"
        ) from error
    return descriptor
