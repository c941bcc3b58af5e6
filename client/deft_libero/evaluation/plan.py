"""A plan of held-out states: committed before they are played, and every entry is played once.

Held-out states say something only of a policy that was chosen without them. So git must have the
plan as it is, a plan does not change after its first result, and a ledger beside it says which
folder has the results of which entry. That folder can be resumed; another one is refused.
"""

import hashlib
import json
import subprocess
import tomllib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from deft_core.errors import UsageError
from deft_core.files import read_file, write_atomically
from deft_core.program import did_you_mean
from deft_core.types import ServerInfo
from deft_libero.errors import PlanError, ResultsWriteError
from deft_libero.evaluation.runs import RunConfig

LEDGER_SUFFIX = ".played.jsonl"  # beside the plan, in place of its suffix
PLAN_FILE = "plan.json"  # in the folder of results: which plan they are of
# What decides what a result means; addresses, workers and videos are the command line's to say.
OPTIONS = (
    *("tasks", "trials", "episodes", "decoding", "radius", "reasoning", "seed", "step_limit"),
    *("profile", "stream", "local_policy", "statistics_key", "image_chain", "gripper", "wrist"),
    *("executed_steps", "real_time", "blending", "seam", "network_delay_ms", "widen_cm", "assets"),
    *("any_mujoco", "environment", "fast"),
)
_SHORT = 12  # digits of a digest in a message


@dataclass(frozen=True)
class Entry:
    """One evaluation of a plan. `options` are those of `deft-client eval`, without dashes."""

    name: str
    suites: tuple[str, ...]
    options: Mapping[str, Any]
    served: Mapping[str, str]  # what the server must say of its policy

    def words(self) -> list[str]:
        """The entry as a command line of `deft-client eval`."""
        words = list(self.suites)
        for name, value in self.options.items():
            flag = "--" + name.replace("_", "-")
            if value is True:
                words.append(flag)
            elif name == "decoding" and isinstance(value, list):
                words += [flag, *map(str, value)]
            elif value is not False:
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                words.append(f"{flag}={text}")
        return words


@dataclass(frozen=True)
class Plan:
    """A plan file. `attempt` is 1, or more where an earlier plan played the same states."""

    path: Path
    digest: str
    attempt: int  # `look` in the file
    entries: tuple[Entry, ...]

    @contextmanager
    def naming(self, entry: Entry) -> Iterator[None]:
        """Begin the message of whatever is wrong with an entry with its place."""
        try:
            yield
        except UsageError as error:
            raise PlanError(f"{self.path}, entry {entry.name!r}: {error}") from error


def load_plan(path: Path) -> Plan:
    """Read a plan, TOML or JSON; `PlanError` says which key of it is wrong."""
    try:
        content = read_file(path)
        text = content.decode("utf-8")
        values = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise PlanError(f"cannot read the plan {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise PlanError(f"{path} is no plan: {error}") from error
    known = ("look", "served", "entry")
    if not isinstance(values, dict) or not isinstance(values.get("entry"), list):
        raise PlanError(f"{path} is no plan: expected a list of [[entry]] tables")
    _refuse_unknown(values, known, str(path))
    attempt = values.get("look", 1)
    if type(attempt) is not int or attempt < 1:
        raise PlanError(f"{path}: look must be a number from 1, got {attempt!r}")
    served = _served(values, str(path))
    entries = [_entry(one, served, f"{path}, entry {n}") for n, one in enumerate(values["entry"])]
    names = [entry.name for entry in entries]
    if not entries or len(set(names)) < len(names):
        raise PlanError(f"{path}: expected entries with different names, got {names}")
    return Plan(path, hashlib.sha256(content).hexdigest(), attempt, tuple(entries))


def _entry(values: object, served: Mapping[str, str], place: str) -> Entry:
    if not isinstance(values, dict):
        raise PlanError(f"{place} must be a table, got {values!r}")
    name, suite = values.get("name"), values.get("suite")
    if not isinstance(name, str) or not name:
        raise PlanError(f"{place}: name must be a text, got {name!r}")
    place = f"{place.rpartition(' ')[0]} {name!r}"
    suites: list[Any] = suite if isinstance(suite, list) else [suite]
    if not suites or not all(isinstance(one, str) and one for one in suites):
        raise PlanError(f"{place}: suite must be a name or a list of names, got {suite!r}")
    _refuse_unknown(values, ("name", "suite", "served", *OPTIONS), place)
    options = {key: values[key] for key in OPTIONS if key in values}
    for key, value in options.items():
        parts = value if isinstance(value, list) else [value]
        if not parts or not all(isinstance(one, str | int | float) for one in parts):
            raise PlanError(
                f"{place}: {key} must be a text, a number, true or a list, got {value!r}"
            )
    return Entry(name, tuple(suites), options, {**served, **_served(values, place)})


def _served(values: Mapping[str, Any], place: str) -> Mapping[str, str]:
    served = values.get("served", {})
    if not isinstance(served, dict) or not all(isinstance(one, str) for one in served.values()):
        raise PlanError(f"{place}: served must be a table of texts, got {served!r}")
    return served


def _refuse_unknown(values: Mapping[str, Any], known: Sequence[str], place: str) -> None:
    for key in values:
        if key not in known:
            raise PlanError(f"{place}: unknown key {key!r}{did_you_mean(key, known)}")


def differences(entry: Entry, info: ServerInfo | None) -> str:
    """What the server is not that the entry asks for; empty where it may be played."""
    details = {} if info is None else info.details
    return ", ".join(
        f"{name} must be {wanted}, and the server has {details.get(name, 'none')}"
        for name, wanted in entry.served.items()
        if details.get(name) != wanted
    )


def require_apart(plan: Plan, planned: Mapping[str, Sequence[RunConfig]]) -> None:
    """Raise `PlanError` where two entries are the same run, or would mix in one folder."""
    known: dict[Path, tuple[str, RunConfig]] = {}
    for name, runs in planned.items():
        for run in runs:
            other, first = known.setdefault(run.folder, (name, run))
            if first is not run and (
                set(first.keys) & set(run.keys)
                or first.header().options != run.header().options
                or first.header().assets != run.header().assets
            ):
                raise PlanError(
                    f"{plan.path}: entries {other!r} and {name!r} are both the run {run.name!r}: "
                    "they play the same episodes, or differ in what its name does not say. Put "
                    "one of them into a plan of its own"
                )


@dataclass(frozen=True)
class Note:
    """A line of the ledger: the first episode of an entry was about to be played."""

    entry: str
    results: str  # the id of the results folder
    plan: str  # sha256 of the plan's bytes
    commit: str  # of the plan
    began: str  # UTC, ISO 8601


class Ledger:
    """The ledger of a plan, opened for one folder of results.

    Opening raises `PlanError` where git does not have the plan as it is, where the plan or the
    ledger was changed afterwards, and where another folder has results of an entry.
    """

    def __init__(self, plan: Plan, out: Path) -> None:
        self.path = plan.path.with_suffix(LEDGER_SUFFIX)
        self._plan, self._out = plan, out
        self._commit = _commit_of(plan.path)
        self._notes = _read_notes(self.path)
        for note in self._notes:
            if note.plan != plan.digest:
                raise PlanError(
                    f"{plan.path} was changed after its first result: {self.path} has entry "
                    f"{note.entry!r} of {note.began} by sha256 {note.plan[:_SHORT]}, and the file "
                    f"is {plan.digest[:_SHORT]}. Restore it (git checkout {note.commit[:_SHORT]} "
                    f"-- {plan.path.name}), or commit another plan under another name"
                )
        self._played = _read_played(out, plan) or {
            "results": uuid.uuid4().hex[:_SHORT],
            "plan": plan.path.name,
            "sha256": plan.digest,
            "commit": self._commit,
            "look": plan.attempt,
            "entries": {},
        }
        names = {entry.name for entry in plan.entries}
        for note in self._notes:
            if note.entry in names and note.results != self._played["results"]:
                raise PlanError(
                    f"entry {note.entry!r} was played on {note.began}, into the results "
                    f"{note.results}, and {out} is another folder. Held-out states are played "
                    "once: give --out that folder to resume it. A second look takes a plan of "
                    f"its own, with look = {plan.attempt + 1}"
                )

    def check(self, entry: Entry, runs: Sequence[RunConfig]) -> None:
        """Raise `PlanError` where an entry that was begun would now be other runs."""
        begun = self._played["entries"].get(entry.name)
        now = _episodes(runs)
        if begun is not None and begun["runs"] != now:
            raise PlanError(
                f"it was begun as {begun['runs']} (episodes by run), and with this server it would "
                f"be {now}. A plan's `served` says which server each entry is of"
            )

    def is_complete(self, entry: Entry) -> bool:
        """Whether every episode of an entry has been played."""
        return bool(self._played["entries"].get(entry.name, {}).get("is_complete"))

    def begin(self, entry: Entry, runs: Sequence[RunConfig]) -> None:
        """Note that an entry is about to be played, before its first episode is."""
        entries = self._played["entries"]
        entries.setdefault(entry.name, {"runs": _episodes(runs), "is_complete": False})
        with _writing():
            self._out.mkdir(parents=True, exist_ok=True)
            self._write_played()
            if entry.name not in [note.entry for note in self._notes]:
                now = f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"
                results = self._played["results"]
                self._notes.append(Note(entry.name, results, self._plan.digest, self._commit, now))
                lines = [json.dumps(asdict(note), ensure_ascii=False) for note in self._notes]
                write_atomically(self.path, "".join(f"{line}\n" for line in lines).encode())

    def complete(self, entry: Entry) -> None:
        """Note that every episode of an entry has been played."""
        self._played["entries"][entry.name]["is_complete"] = True
        with _writing():
            self._write_played()

    def _write_played(self) -> None:
        text = json.dumps(self._played, indent=2, ensure_ascii=False)
        write_atomically(self._out / PLAN_FILE, text.encode() + b"\n")


@contextmanager
def _writing() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResultsWriteError(
            f"cannot note what is played: {error}. Make room on the disk, or give another --out"
        ) from error


def _episodes(runs: Sequence[RunConfig]) -> dict[str, int]:
    return {run.folder.name: len(run.keys) for run in runs}


def _read_played(out: Path, plan: Plan) -> dict[str, Any] | None:
    path = out / PLAN_FILE
    if not path.exists():
        return None
    try:
        found = {"entries": {}, "results": "", **json.loads(read_file(path))}
        name, digest = found["plan"], found["sha256"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{path} does not say which plan the results are of: {error}") from error
    if digest != plan.digest:
        raise PlanError(
            f"{out} has results of the plan {name} (sha256 {digest[:_SHORT]}): choose another --out"
        )
    return found


def _read_notes(path: Path) -> list[Note]:
    content = path.read_bytes() if path.exists() else b""
    if not content.startswith(_git(path, "show", f"HEAD:./{path.name}") or b""):
        raise PlanError(
            f"{path} lacks lines that git has: lines are only ever added to a ledger. Restore it "
            f"(git checkout HEAD -- {path.name})"
        )
    try:
        return [Note(**json.loads(line)) for line in content.splitlines()]
    except (ValueError, TypeError) as error:
        raise PlanError(f"{path} has a line that is no entry of a ledger: {error}") from error


def _commit_of(path: Path) -> str:
    """The commit that has the file as it is."""
    commit = _git(path, "log", "-1", "--format=%H", "--", path.name)
    if not commit or _git(path, "status", "--porcelain", "--", path.name) != b"":
        raise PlanError(
            f"{path} is not committed as it is, and a plan must not change after the states were "
            "seen. Commit it and give the same command again"
        )
    return commit.decode().strip()


def _git(path: Path, *words: str) -> bytes | None:
    """What git says in the folder of a file; None where it refuses."""
    try:
        ended = subprocess.run(
            ["git", *words], cwd=path.resolve().parent, capture_output=True, check=False
        )
    except FileNotFoundError as error:
        raise PlanError(f"git is not installed, and {path} must be committed in it") from error
    return ended.stdout if ended.returncode == 0 else None
