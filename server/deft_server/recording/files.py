"""The files of a recording: one per episode, continued in parts, the oldest deleted beyond a cap.

Knows nothing of threads or events. Any `OSError` means that the disk failed, or has less room than
is to be kept; the file being written is then cut back to its last whole record.
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

# Whose episode it is: caller and session. Frames of a caller without one count as one episode.
SessionKey = tuple[str, str]


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


def num_free(where: int | Path) -> int:
    """Return the bytes that are free on the disk of an open file or a folder."""
    return shutil.disk_usage(where).free


@dataclass(eq=False)
class EpisodeFiles:
    """All episodes being written: where they go, and how much room they may take."""

    directory: Path
    encoding: ImageEncoding = ImageEncoding.PNG
    max_file_bytes: int = 256 * 1024 * 1024
    max_total_bytes: int = 20 * 1024**3
    min_free_bytes: int = 512 * 1024 * 1024
    max_open_files: int = 64
    info: ServerInfo | None = None
    open_file: Callable[[Path], FileIO] = open_new
    num_free: Callable[[int | Path], int] = num_free
    num_steps: int = 0  # written since the start
    num_bytes: int = 0
    total_bytes: int = 0  # of all recordings in the directory, those of earlier runs included
    _open: OrderedDict[SessionKey, _OpenEpisode] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._lock = locked(self.directory)
        existing = self._existing()
        self.total_bytes = sum(_num_bytes(path) for path in existing)
        self._number = max((_number_of(path) for path in existing), default=0)

    def write(self, key: SessionKey, step: RecordedStep, wall_s: float) -> None:
        """Append a step to its episode, opening a file where it has none.

        A step has two times: `wall_s` by the clock that jumps, `at_s` by the one that does not. Its
        index is that of its session. In the file both become those of the episode.
        """
        episode = self._open.get(key)
        if episode is not None and episode.num_steps and _starts_anew(key, step):
            self._finish(key, "forgotten")
            episode = None
        episode = episode or self._begin(key, wall_s, step.at_s)
        if episode.num_bytes > self.max_file_bytes:
            self._finish(key, "continued")
            episode = self._begin(key, wall_s, step.at_s, before=episode)
        self._open.move_to_end(key)
        step = replace(step, index=episode.num_steps, at_s=step.at_s - episode.started_s)
        record = encode_step(step, self.encoding)
        self._keep_free(episode.file.fileno(), len(record))
        self._append(episode, record)
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
        self, key: SessionKey, wall_s: float, at_s: float, before: _OpenEpisode | None = None
    ) -> _OpenEpisode:
        self._make_room()
        while len(self._open) >= self.max_open_files:
            self._finish(next(iter(self._open)), "idle")
        caller, session_id = key
        header = EpisodeHeader(
            session_id=session_id,
            started_at=wall_s,
            policy="" if self.info is None else self.info.policy,
            caller=caller,
            part=0 if before is None else before.header.part + 1,
            details={} if self.info is None else _details(self.info),
        )
        self._number += 1
        path = self.directory / _file_name(header, self._number)
        file = self.open_file(path)
        started_s = at_s if before is None else before.started_s
        num_steps = 0 if before is None else before.num_steps
        episode = _OpenEpisode(file, path, header, started_s, num_steps)
        try:
            self._append(episode, encode_header(header))
        except OSError:
            file.close()
            path.unlink(missing_ok=True)  # half a header is nothing that could be read
            raise
        self._open[key] = episode
        return episode

    def _append(self, episode: _OpenEpisode, record: bytes) -> None:
        """Write a record whole or not at all."""
        append_whole(episode.file, record)
        episode.num_bytes += len(record)
        self.total_bytes += len(record)
        self.num_bytes += len(record)

    def _finish(self, key: SessionKey, reason: str) -> None:
        episode = self._open.pop(key)
        with episode.file:
            self._append(episode, encode_end(reason))

    def _make_room(self) -> None:
        """Delete the oldest closed recordings beyond the cap; refuse to fill the disk."""
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.total_bytes > self.max_total_bytes:
            writing = {episode.path for episode in self._open.values()}
            for path in self._existing():
                if self.total_bytes <= self.max_total_bytes:
                    break
                if path not in writing:
                    self.total_bytes -= _num_bytes(path)
                    path.unlink(missing_ok=True)
            if self.total_bytes > self.max_total_bytes:
                raise OSError(
                    f"{self.directory}: the open recordings alone take more than "
                    f"{self.max_total_bytes} bytes"
                )
        self._keep_free(self.directory)

    def _keep_free(self, where: int | Path, num_bytes: int = 0) -> None:
        """Raise `OSError` where so many more bytes would leave less than is to be kept free."""
        free = self.num_free(where)
        if free - num_bytes < self.min_free_bytes:
            raise OSError(
                f"{self.directory}: {free} bytes free, {self.min_free_bytes} are to be kept free"
            )

    def _existing(self) -> list[Path]:
        """Return all recordings, the oldest first, whatever the clock said when."""
        found = self.directory.glob(f"*/*{SUFFIX}")
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


def _starts_anew(key: SessionKey, step: RecordedStep) -> bool:
    """Is this the first frame of a session that the server had forgotten meanwhile?"""
    return step.index == 0 and key[1] != ""


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
