"""A run on disk: `run.json`, which decides what its results mean, and a line per episode.

Two results may share a folder only if their headers agree; what a run was started for (which
trials, how many workers, at which address the server was) may differ when it is resumed. An
append survives `kill -9` and a full disk at any moment: the line of an episode is written and
synced before the next episode is handed out. What a crash can leave behind is at most one torn
line at the end; opening the run again cuts it off.
"""

import fcntl
import gzip
import json
import os
import zlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from io import FileIO
from pathlib import Path

from deft_core.files import append_whole, read_file, sync, write_atomically
from deft_libero.errors import ResultsError, ResultsMismatchError, ResultsWriteError
from deft_libero.results.records import (
    EpisodeRecord,
    Outcome,
    TrialKey,
    decode_record,
    encode_record,
)

FORMAT = "deft-libero-results"
FORMAT_VERSION = 1
HEADER_FILE = "run.json"
EPISODES_FILE = "episodes.jsonl"
WEIGHTS = "digest of weights"  # in `RunHeader.server`, as /v1/info calls it
_DIGITS = 12  # of a digest, where people read it
_FOLDER = "folder"  # what packed headers say first
PACKED_FILE = f"{EPISODES_FILE}.gz"  # the same lines as they are kept in a repository

# What headers of earlier versions call the simulators and policies that have names now.
_EXPERT = "tiny_libero_recipe.expert_policy:expert"
_NAMES_NOW = {
    ("environment", "deft_client.libero.environment:open_environment"): "libero",
    ("policy_factory", "deft_client.libero.expert_policy:build_expert"): _EXPERT,
    ("policy_factory", "expert"): _EXPERT,
    ("policy_factory", "scripts.tiny_libero.expert_policy:expert"): _EXPERT,
}


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

    @property
    def weights(self) -> str:
        """The digest of the policy's weights; empty where nobody recorded it."""
        return self.server.get(WEIGHTS, "")


@dataclass(frozen=True, eq=False)
class RunResults:
    """What a folder holds: a header and its episodes in the order of their keys."""

    folder: Path
    header: RunHeader
    records: tuple[EpisodeRecord, ...]
    has_torn_line: bool = False  # the last line was cut short by a crash, and is not in records

    def video(self, record: EpisodeRecord) -> Path | None:
        """The film of an episode, if it is there; a record from elsewhere may name any file."""
        folder = self.folder.resolve()
        path = (folder / record.video).resolve()
        return path if path.is_relative_to(folder) and path.is_file() else None


def weights_of(runs: Iterable[RunResults]) -> str:
    """What a table says of its runs' weights: the digest's beginning, or that nobody recorded it.

    Raises ResultsMismatchError where two runs are of different weights.
    """
    known: dict[str, RunResults] = {}
    unknown = []
    for run in runs:
        if run.header.weights:
            known.setdefault(run.header.weights, run)
        else:
            unknown.append(run.header.name)
    if len(known) > 1:
        first, second, *_ = (
            f"{run.header.name} in {run.folder} is of weights {digest[:_DIGITS]}"
            for digest, run in known.items()
        )
        raise ResultsMismatchError(
            f"{first}, but {second}. A table of both would compare policies, not ways of decoding; "
            "give runs of one policy"
        )
    digests = [digest[:_DIGITS] for digest in known]
    missing = f"not recorded of {', '.join(unknown)}" if known else "not recorded"
    return "; ".join([*digests, missing] if unknown else digests)


def read_header(folder: Path) -> RunHeader:
    """The header of the run in `folder`."""
    path = folder / HEADER_FILE
    try:
        values = json.loads(read_file(path))
    except FileNotFoundError as error:
        raise ResultsError(
            f"{folder} holds no results: there is no {HEADER_FILE}. "
            "Give the folder that `deft-client eval` wrote"
        ) from error
    except (OSError, ValueError, RecursionError) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from error
    return _checked_header(path, values)


def _checked_header(path: Path, values: object) -> RunHeader:
    if not isinstance(values, dict) or values.get("format") != FORMAT:
        raise ResultsError(f"{path} is not the header of an evaluation")
    version = values.get("format_version")
    if version != FORMAT_VERSION:
        raise ResultsMismatchError(
            f"{path} has results of format version {version}; this program reads and writes "
            f"{FORMAT_VERSION}. Use the version that wrote them, or another --out"
        )
    try:
        header = RunHeader(**values)
    except TypeError as error:
        raise ResultsError(f"{path} has missing or unknown fields: {error}") from error
    for name, value in vars(header).items():
        if name in _TEXTS and not isinstance(value, str):
            raise ResultsError(f"{path}: {name} must be a text, got {_kind(value)}")
        if name in _TABLES and not (isinstance(value, dict) and _holds_texts(value)):
            raise ResultsError(f"{path}: {name} must be an object of texts, got {_kind(value)}")
    options = {name: _NAMES_NOW.get((name, value), value) for name, value in header.options.items()}
    return replace(header, options=options)


_TEXTS = ("run", "created", "name", "suite", "assets")
_TABLES = ("options", "versions", "server", "notes")


def _holds_texts(values: Mapping[object, object]) -> bool:
    return all(isinstance(value, str) for value in values.values())


def _kind(value: object) -> str:
    return "an object of others" if isinstance(value, dict) else type(value).__name__


def load_run(folder: Path) -> RunResults:
    """Read a run without changing it, even while it is being written; it may have been gzipped."""
    header = read_header(folder)
    path = folder / EPISODES_FILE
    content = _read_episodes(folder)
    whole, _, torn = content.rpartition(b"\n")
    records: dict[TrialKey, EpisodeRecord] = {}
    for number, line in enumerate(whole.split(b"\n") if whole else (), start=1):
        record = decode_record(line, header.run, f"{path} line {number}")
        if record.key in records:
            raise ResultsError(
                f"{path} line {number} has {record.key} again; delete one of the two lines"
            )
        records[record.key] = record
    ordered = tuple(records[key] for key in sorted(records))
    return RunResults(folder, header, ordered, has_torn_line=bool(torn))


def _read_episodes(folder: Path) -> bytes:
    """The lines of a run, which may have been gzipped; two copies that differ are refused."""
    path, packed = folder / EPISODES_FILE, folder / PACKED_FILE
    try:
        content = read_file(path) if path.exists() else b""
        if not packed.exists():
            return content
        path = packed
        unpacked = gzip.decompress(read_file(packed))
    except (OSError, EOFError, zlib.error) as error:
        raise ResultsError(f"{path} cannot be read: {error}") from error
    path = folder / EPISODES_FILE
    if path.exists() and content != unpacked:  # they are equal where a kill came between
        raise ResultsError(
            f"{folder} has {EPISODES_FILE} and {PACKED_FILE}, and they differ: keep the newer one"
        )
    return unpacked


def load_runs(path: Path) -> list[RunResults]:
    """The run in a folder, or those in its folders or in a file of `pack_runs`, oldest first."""
    if path.is_file():
        return _oldest_first(_unpacked(path))
    if (path / HEADER_FILE).is_file():
        return [load_run(path)]
    runs = [load_run(header.parent) for header in path.glob(f"*/{HEADER_FILE}")]
    if not runs:
        raise ResultsError(
            f"{path} holds no results: there is no {HEADER_FILE} in it or in its folders. "
            "Give a folder that `deft-client eval` wrote"
        )
    return _oldest_first(runs)


def _oldest_first(runs: Iterable[RunResults]) -> list[RunResults]:
    return sorted(runs, key=lambda run: (run.header.created, run.header.name, run.folder.name))


def pack_runs(path: Path, runs: Iterable[RunResults]) -> None:
    """Write whole runs into one gzipped file of lines: a header, then its episodes, and so on.

    The same runs make the same bytes.
    """
    lines = []
    for run in sorted(runs, key=lambda run: run.folder.name):
        header = {_FOLDER: run.folder.name, **asdict(run.header)}
        lines.append(json.dumps(header, ensure_ascii=False, default=dict).encode() + b"\n")
        lines += [encode_record(record, run.header.run) for record in run.records]
    write_atomically(path, gzip.compress(b"".join(lines), 9, mtime=0))


def unpack_runs(path: Path, folder: Path) -> None:
    """Give every run of a packed file its folder again, so that it can go on."""
    for run in _unpacked(path):
        with closing(ResultsStore(folder / run.folder.name, run.header)) as store:
            known = {record.key for record in store.resumed}
            for record in run.records:
                if record.key not in known:
                    store.append(record)


def _header_values(line: bytes, place: str) -> dict[str, object]:
    try:
        values = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ResultsError(f"{place} is no header: {error}") from error
    return dict(values)


def _unpacked(path: Path) -> list[RunResults]:
    try:
        lines = gzip.decompress(read_file(path)).splitlines()
    except (OSError, EOFError, zlib.error) as error:
        raise ResultsError(f"{path} holds no packed results: {error}") from error
    found: dict[str, tuple[RunHeader, list[EpisodeRecord]]] = {}
    current: tuple[RunHeader, list[EpisodeRecord]] | None = None
    for number, line in enumerate(lines, start=1):
        place = f"{path} line {number}"
        if line.startswith(f'{{"{_FOLDER}":'.encode()):
            values = _header_values(line, place)
            folder = str(values.pop(_FOLDER))
            # A header that comes again goes on with its run: lines may be added at the end.
            current = found.setdefault(folder, (_checked_header(Path(place), values), []))
        elif current is not None:
            current[1].append(decode_record(line, current[0].run, place))
        else:
            raise ResultsError(f"{place}: an episode before the header of its run")
    return [RunResults(path / name, one, tuple(records)) for name, (one, records) in found.items()]


class ResultsStore:
    """Appends episodes to one run. Holds a lock on the folder until it is closed."""

    def __init__(self, folder: Path, header: RunHeader) -> None:
        """Create the run, or go on with the one that is there if its header agrees."""
        self.folder = folder
        self._lock = _lock_folder(folder)
        self._file: FileIO | None = None
        try:
            self.header, finished = self._open_run(header)
            self.resumed = tuple(finished)
            self._file = FileIO(folder / EPISODES_FILE, "ab")
            sync(folder)
        except BaseException:
            self.close()
            raise
        self._keys = {record.key for record in self.resumed}

    def _open_run(self, wanted: RunHeader) -> tuple[RunHeader, Iterable[EpisodeRecord]]:
        if not (self.folder / HEADER_FILE).exists():
            if (self.folder / EPISODES_FILE).exists():
                raise ResultsError(
                    f"{self.folder} has {EPISODES_FILE} but no {HEADER_FILE}: nobody can tell "
                    "what those results mean. Choose another folder with --out"
                )
            text = json.dumps(asdict(wanted), indent=2, ensure_ascii=False, default=dict)
            _replace(self.folder / HEADER_FILE, text.encode() + b"\n")
            return wanted, ()
        found = read_header(self.folder)
        check_same_run(self.folder, found, wanted)
        if (self.folder / PACKED_FILE).exists():
            _replace(self.folder / EPISODES_FILE, _read_episodes(self.folder))
            (self.folder / PACKED_FILE).unlink()
        return found, self._repair(load_run(self.folder))

    def _repair(self, run: RunResults) -> list[EpisodeRecord]:
        """Drop a torn line and the Errored episodes, which are to be played again."""
        kept = [record for record in run.records if record.outcome is not Outcome.ERRORED]
        if run.has_torn_line or len(kept) < len(run.records):
            lines = b"".join(encode_record(record, run.header.run) for record in kept)
            _replace(self.folder / EPISODES_FILE, lines)
        return kept

    def append(self, record: EpisodeRecord) -> None:
        """Write one episode and wait until the disk has it. On failure nothing is left of it."""
        if record.key in self._keys:
            raise ResultsError(f"{record.key} has a result already; this is a defect, report it")
        assert self._file is not None
        try:
            append_whole(self._file, encode_record(record, self.header.run))
            os.fsync(self._file)
        except OSError as error:
            raise ResultsWriteError(
                f"cannot write to {self.folder / EPISODES_FILE}: {error.strerror or error}. "
                f"The {len(self._keys)} episodes before are safe; make room on the disk and run "
                "the same command again"
            ) from error
        self._keys.add(record.key)

    def close(self) -> None:
        """Let others write to the folder."""
        if self._file is not None:
            self._file.close()
        if self._lock >= 0:
            os.close(self._lock)
        self._lock = -1


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
        ("suite", {"": found.suite}, {"": wanted.suite}),
        ("assets", {"": found.assets}, {"": wanted.assets}),
        ("option ", found.options, wanted.options),
        ("version of ", found.versions, wanted.versions),
        ("server's ", found.server, wanted.server),
    )
    for what, there, here in pairs:
        for key in sorted({*there, *here}):
            if there.get(key) != here.get(key):
                was, now = (one.get(key, "not noted") for one in (there, here))
                yield f"{what}{key}: there {was!r}, now {now!r}"


def _replace(path: Path, content: bytes) -> None:
    try:
        write_atomically(path, content)
    except OSError as error:
        raise ResultsWriteError(f"cannot write {path}: {error.strerror or error}") from error


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
        raise ResultsError(
            f"another evaluation is writing to {folder}; wait for it, or choose another --out"
        ) from error
    return descriptor
