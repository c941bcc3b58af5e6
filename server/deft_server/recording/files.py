"""The files of a recording: one per episode, continued in parts, the oldest deleted beyond a cap.

Knows nothing of threads or events. Any `OSError` means that the disk failed; the file being written
is then cut back to its last whole record.
"""

import fcntl
import re
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from io import FileIO
from pathlib import Path
from typing import IO

from deft_client.files import append_whole
from deft_client.recordings import (
    SUFFIX,
    EpisodeHeader,
    RecordedStep,
    encode_end,
    encode_header,
    encode_step,
)
from deft_client.types import ServerInfo
from deft_client.wire.images import ImageEncoding

_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")
_CHECK_DISK_EVERY = 64  # records
_NUMBERED = re.compile(r"(\d{8,})-")
LOCK = ".lock"


@dataclass(frozen=True)
class RecordingRules:
    """Where recordings go and how much room they may take."""

    directory: Path
    encoding: ImageEncoding = ImageEncoding.PNG
    max_file_bytes: int = 256 * 1024 * 1024
    max_total_bytes: int = 20 * 1024**3
    min_free_bytes: int = 512 * 1024 * 1024
    max_open_files: int = 64


# Whose episode it is: caller and session. Frames of a caller without one count as one episode.
SessionKey = tuple[str, str]


@dataclass(frozen=True, eq=False)
class TimedStep:
    """A step on its way to the disk, by both clocks: one that jumps and one that does not.

    The step's index is that of its session; in the file it becomes that of the episode.
    """

    key: SessionKey
    step: RecordedStep
    wall_s: float
    monotonic_s: float


class DiskFullError(OSError):
    """There is less room than the rules ask to keep free, or the cap cannot be kept."""


@dataclass(eq=False)
class _OpenEpisode:
    file: FileIO
    path: Path
    header: EpisodeHeader
    started_s: float
    num_steps: int = 0
    num_bytes: int = 0


def open_new(path: Path) -> FileIO:
    """Open a file that must not exist yet, unbuffered: what is written survives a kill."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return FileIO(path, "xb")


@dataclass(eq=False)
class EpisodeFiles:
    """All episodes being written."""

    rules: RecordingRules
    info: ServerInfo | None = None
    open_file: Callable[[Path], FileIO] = open_new
    num_steps: int = 0  # written since the start
    num_bytes: int = 0
    _open: OrderedDict[SessionKey, _OpenEpisode] = field(default_factory=OrderedDict)
    _total_bytes: int = 0

    def __post_init__(self) -> None:
        self._lock = locked(self.rules.directory)
        existing = self._existing()
        self._total_bytes = sum(_num_bytes(path) for path in existing)
        self._number = max((_number_of(path) for path in existing), default=0)

    @property
    def total_bytes(self) -> int:
        """Bytes of all recordings in the directory, those of earlier runs included."""
        return self._total_bytes

    def write(self, timed: TimedStep) -> None:
        """Append a step to its episode, opening a file where it has none."""
        episode = self._open.get(timed.key)
        if episode is not None and episode.num_steps and _starts_anew(timed):
            self._finish(timed.key, "forgotten")
            episode = None
        episode = episode or self._begin(timed, part=0)
        if episode.num_bytes > self.rules.max_file_bytes:
            self._finish(timed.key, "continued")
            episode = self._begin(timed, part=episode.header.part + 1, before=episode)
        self._open.move_to_end(timed.key)
        at_s = timed.monotonic_s - episode.started_s
        step = replace(timed.step, index=episode.num_steps, at_s=at_s)
        self._append(episode, encode_step(step, self.rules.encoding))
        episode.num_steps += 1
        self.num_steps += 1
        if self.num_steps % _CHECK_DISK_EVERY == 0:
            self._make_room()

    def end(self, key: SessionKey, reason: str) -> None:
        """Close an episode, if it has a file."""
        if key in self._open:
            self._finish(key, reason)

    def close(self, reason: str) -> None:
        """Close every episode, as well as the disk allows."""
        for key in list(self._open):
            try:
                self._finish(key, reason)
            except OSError:
                continue  # the disk is what made us stop; the steps before are safe
        self._lock.close()

    def _begin(
        self, timed: TimedStep, part: int, before: _OpenEpisode | None = None
    ) -> _OpenEpisode:
        self._make_room()
        while len(self._open) >= self.rules.max_open_files:
            self._finish(next(iter(self._open)), "idle")
        caller, session_id = timed.key
        header = EpisodeHeader(
            session_id=session_id,
            started_at=timed.wall_s,
            policy="" if self.info is None else self.info.policy,
            caller=caller,
            part=part,
            details={} if self.info is None else _details(self.info),
        )
        self._number += 1
        path = self.rules.directory / _file_name(header, self._number)
        file = self.open_file(path)
        started_s = timed.monotonic_s if before is None else before.started_s
        num_steps = 0 if before is None else before.num_steps
        episode = _OpenEpisode(file, path, header, started_s, num_steps)
        try:
            self._append(episode, encode_header(header))
        except OSError:
            file.close()
            path.unlink(missing_ok=True)  # half a header is nothing that could be read
            raise
        self._open[timed.key] = episode
        return episode

    def _append(self, episode: _OpenEpisode, record: bytes) -> None:
        """Write a record whole or not at all."""
        append_whole(episode.file, record)
        episode.num_bytes += len(record)
        self._total_bytes += len(record)
        self.num_bytes += len(record)

    def _finish(self, key: SessionKey, reason: str) -> None:
        episode = self._open.pop(key)
        with episode.file:
            self._append(episode, encode_end(reason))

    def _make_room(self) -> None:
        """Delete the oldest closed recordings beyond the cap; refuse to fill the disk."""
        self.rules.directory.mkdir(parents=True, exist_ok=True)
        if self._total_bytes > self.rules.max_total_bytes:
            writing = {episode.path for episode in self._open.values()}
            for path in self._existing():
                if self._total_bytes <= self.rules.max_total_bytes:
                    break
                if path not in writing:
                    self._total_bytes -= _num_bytes(path)
                    path.unlink(missing_ok=True)
            if self._total_bytes > self.rules.max_total_bytes:
                raise DiskFullError(
                    f"{self.rules.directory}: the open recordings alone take more than "
                    f"{self.rules.max_total_bytes} bytes"
                )
        free = shutil.disk_usage(self.rules.directory).free
        if free < self.rules.min_free_bytes:
            raise DiskFullError(
                f"{self.rules.directory}: {free} bytes free, "
                f"{self.rules.min_free_bytes} are to be kept free"
            )

    def _existing(self) -> list[Path]:
        """Return all recordings, the oldest first, whatever the clock said when."""
        found = self.rules.directory.glob(f"*/*{SUFFIX}")
        own = [path for path in found if path.is_file() and not path.is_symlink()]
        return sorted(own, key=lambda path: (_number_of(path), path))


def locked(directory: Path) -> IO[bytes]:
    """Return the open lock file of a folder that is ours now, or raise `OSError`.

    Two servers in one folder would each delete what the other is writing.
    """
    directory.mkdir(parents=True, exist_ok=True)
    lock = open(directory / LOCK, "ab")  # noqa: SIM115  it stays open
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise OSError(error.errno, "another server records here", str(directory)) from error
    return lock


def _number_of(path: Path) -> int:
    """Return the number in a recording's name, 0 for those of earlier servers without one."""
    found = _NUMBERED.match(path.name)
    return int(found[1]) if found else 0


def _num_bytes(path: Path) -> int:
    """Return the size of a file; none where somebody else deleted it meanwhile."""
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0


def _starts_anew(timed: TimedStep) -> bool:
    """Is this the first frame of a session that the server had forgotten meanwhile?"""
    return timed.step.index == 0 and timed.key[1] != ""


def _details(info: ServerInfo) -> dict[str, str]:
    return {
        **info.versions,
        "statistics_key": info.default_statistics_key or "",
        "decoding": info.decoding,
        "image_chain": info.image_chain,
    }


def _file_name(header: EpisodeHeader, number: int) -> str:
    """Return `day/number-time-session[-part].deftrec`: numbers tell the order, as clocks jump."""
    moment = datetime.fromtimestamp(header.started_at, timezone.utc)
    identity = f"{header.caller}\0{header.session_id}"
    readable = _UNSAFE.sub("_", header.session_id)[:40] or "unnamed"
    parts = [
        f"{number:08d}",
        moment.strftime("%H%M%S.%f"),
        readable,
        f"{zlib.crc32(identity.encode()):08x}",
    ]
    parts += [f"part{header.part}"] if header.part else []
    return f"{moment:%Y-%m-%d}/{'-'.join(parts)}{SUFFIX}"
