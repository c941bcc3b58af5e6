"""The files of a recording: one per episode, continued in parts, the oldest deleted for room.

Knows nothing of threads or events. Any `OSError` but `NoRoomError` means that the disk failed; the
file being written is then cut back to its last whole record. No file stays open between steps.
"""

import fcntl
import os
import re
import shutil
import zlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from typing import IO

from deft_core.files import append_whole
from deft_core.recordings import (
    SUFFIX,
    EpisodeHeader,
    RecordedStep,
    RecordingError,
    encode_end,
    encode_header,
    encode_step,
    read_header,
)
from deft_core.types import ServerInfo
from deft_core.wire.images import ImageEncoding

_UNSAFE = re.compile(r"[^A-Za-z0-9.-]+")
PARTS_IN_ROOM = 8  # at least: what is deleted for room is a part
_NUMBERED = re.compile(r"(\d{8,})-")
LOCK = ".lock"

# Whose episode it is: caller and session. Frames of a caller without one count as one episode.
SessionKey = tuple[str, str]


class NoRoomError(OSError):
    """There is no room for another step, although nothing older is left to delete."""


@dataclass(eq=False)
class _Episode:
    """An episode that goes on, and the file of its latest part."""

    started_s: float
    started_at: float
    path: Path | None = None  # None until its next step begins another part
    num_steps: int = 0
    num_parts: int = 0
    num_bytes: int = 0  # of the latest part


@dataclass(eq=False)
class _CallersFiles:
    """The recordings of one caller, the oldest first."""

    sizes: dict[Path, int] = field(default_factory=dict)
    total: int = 0


def open_file(path: Path, is_new: bool) -> FileIO:
    """Open a recording to write behind what it has, unbuffered: what is written survives a kill."""
    if is_new:
        path.parent.mkdir(parents=True, exist_ok=True)
        return FileIO(path, "xb")
    file = FileIO(path, "r+b")  # not "ab", which would make a file without a header
    file.seek(0, os.SEEK_END)
    return file


def num_free(directory: Path) -> int:
    """Return the bytes that are free on the disk of a folder."""
    return shutil.disk_usage(directory).free


@dataclass(eq=False)
class EpisodeFiles:
    """All episodes being written: where they go, and how much room they may take.

    A recording is a ring: where room is needed, whoever has the most recorded loses the oldest.
    """

    directory: Path
    encoding: ImageEncoding = ImageEncoding.PNG
    max_file_bytes: int = 256 * 1024 * 1024
    max_total_bytes: int = 20 * 1024**3
    min_free_bytes: int = 512 * 1024 * 1024
    max_episodes: int = 4096  # that go on at a time; beyond it the one longest idle ends
    info: ServerInfo | None = None
    open_file: Callable[[Path, bool], FileIO] = open_file
    num_free: Callable[[Path], int] = num_free
    num_steps: int = 0  # written since the start
    num_bytes: int = 0
    total_bytes: int = 0  # of all recordings in the directory, those of earlier runs included
    _episodes: OrderedDict[SessionKey, _Episode] = field(default_factory=OrderedDict)
    _callers: dict[str, _CallersFiles] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._lock = locked(self.directory)
        existing = self._existing()
        for path in existing:
            self._count(_caller_of(path), path, _num_bytes(path))
        self._number = max((_number_of(path) for path in existing), default=0)

    def write(self, key: SessionKey, step: RecordedStep, wall_s: float) -> None:
        """Append a step to its episode, beginning one where there is none.

        A step has two times: `wall_s` by the clock that jumps, `at_s` by the one that does not. Its
        index is that of its session. In the file both become those of the episode.
        """
        if key in self._episodes and _starts_anew(key, step):
            self.end(key, "forgotten")
        episode = self._episodes.get(key) or self._begin(key, wall_s, step.at_s)
        self._episodes.move_to_end(key)
        step = replace(step, index=episode.num_steps, at_s=step.at_s - episode.started_s)
        record = encode_step(step, self.encoding)
        free = self.num_free(self.directory)
        self._make_room(len(record), free)
        if episode.num_bytes > self._most_in_a_part(free):
            self._finish(key, episode, "continued")
        try:
            self._append(key, episode, record)
        except FileNotFoundError:  # somebody deleted the part
            self._forget(key[0], episode.path)
            episode.path = None
            self._append(key, episode, record)
        episode.num_steps += 1
        self.num_steps += 1

    def end(self, key: SessionKey, reason: str) -> None:
        """End an episode, if there is one."""
        episode = self._episodes.pop(key, None)
        if episode is not None:
            self._finish(key, episode, reason)

    def close(self, reason: str) -> None:
        """End every episode, as well as the disk allows."""
        for key in list(self._episodes):
            with suppress(OSError):  # the disk is what made us stop; the steps before are safe
                self.end(key, reason)
        self._lock.close()

    def _begin(self, key: SessionKey, wall_s: float, at_s: float) -> _Episode:
        while len(self._episodes) >= self.max_episodes:
            self.end(next(iter(self._episodes)), "idle")
        episode = self._episodes[key] = _Episode(at_s, wall_s)
        return episode

    def _append(self, key: SessionKey, episode: _Episode, record: bytes) -> None:
        """Write a record to the episode's part, or to a new one, whole or not at all."""
        if episode.path is not None:
            with self.open_file(episode.path, False) as file:
                append_whole(file, record)
        else:
            record = self._begin_part(key, episode, record)
        episode.num_bytes += len(record)
        self.num_bytes += len(record)
        self._count(key[0], episode.path, len(record))

    def _begin_part(self, key: SessionKey, episode: _Episode, record: bytes) -> bytes:
        """Write the start of a part and its first record, and return both."""
        caller, session_id = key
        header = EpisodeHeader(
            session_id=session_id,
            started_at=episode.started_at,
            policy="" if self.info is None else self.info.policy,
            caller=caller,
            part=episode.num_parts,
            details={} if self.info is None else _details(self.info),
        )
        start = encode_header(header)
        self._number += 1
        path = self.directory / _file_name(header, self._number)
        try:
            with self.open_file(path, True) as file:
                append_whole(file, start)
                append_whole(file, record)
        except OSError:
            path.unlink(missing_ok=True)  # a part without a step is of no use
            raise
        episode.path, episode.num_bytes = path, 0
        episode.num_parts += 1
        return start + record

    def _finish(self, key: SessionKey, episode: _Episode, reason: str) -> None:
        """Close the episode's part; its next step begins another one."""
        if episode.path is not None:
            with suppress(FileNotFoundError):  # somebody deleted it
                self._append(key, episode, encode_end(reason))
            episode.path, episode.num_bytes = None, 0

    def _most_in_a_part(self, free: int) -> int:
        """Return the bytes of a part: small where there is little room, as parts go as a whole."""
        room = min(self.max_total_bytes, self.total_bytes + free - self.min_free_bytes)
        return min(self.max_file_bytes, room // PARTS_IN_ROOM)

    def _make_room(self, num_bytes: int, free: int) -> None:
        """Delete the oldest recordings until so many more bytes are allowed, or `NoRoomError`."""
        lacking = self.min_free_bytes + num_bytes - free
        while lacking > 0 or self.total_bytes + num_bytes > self.max_total_bytes:
            if not self.total_bytes:
                raise NoRoomError(
                    f"{self.directory}: {free} bytes free, {self.min_free_bytes} are to be kept "
                    f"free; a step takes {num_bytes} of {self.max_total_bytes} bytes"
                )
            lacking -= self._delete_oldest()

    def _delete_oldest(self) -> int:
        """Delete the oldest part of whoever has the most, and return the bytes that it had."""
        caller, files = max(self._callers.items(), key=lambda one: one[1].total)
        writing = {one.path: one for one in self._episodes.values()}
        path = next((one for one in files.sizes if one not in writing), next(iter(files.sizes)))
        num_bytes = _num_bytes(path)
        path.unlink(missing_ok=True)
        self._forget(caller, path)
        if path in writing:
            writing[path].path, writing[path].num_bytes = None, 0
        return num_bytes

    def _count(self, caller: str, path: Path | None, num_bytes: int) -> None:
        if path is not None:
            files = self._callers.setdefault(caller, _CallersFiles())
            files.sizes[path] = files.sizes.get(path, 0) + num_bytes
            files.total += num_bytes
            self.total_bytes += num_bytes

    def _forget(self, caller: str, path: Path | None) -> None:
        files = self._callers.get(caller)
        if files is not None and path in files.sizes:
            num_bytes = files.sizes.pop(path)
            files.total -= num_bytes
            self.total_bytes -= num_bytes
            if not files.sizes:
                del self._callers[caller]

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


def _caller_of(path: Path) -> str:
    """Return whose recording a file is; nobody's where that is not readable."""
    try:
        return read_header(path).caller
    except (OSError, RecordingError):
        return ""


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
    moment = datetime.fromtimestamp(header.started_at, UTC)
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
