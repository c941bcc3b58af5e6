"""Asks questions one after the other within a given time; what was answered is never lost.

After every question a line of JSON is on the disk and a table on the terminal. An exception ends
its own question only. A run that was killed goes on where it was.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from enum import Enum
from hashlib import sha256
from pathlib import Path
from types import FrameType
from typing import Protocol

from deft_core.measures.table import NOTHING, markdown_table

Value = str | int | float | bool | None
Row = dict[str, Value]  # of a question's table, by column

LINES = "gpu_run.jsonl"
ROOT = Path(__file__).parents[3]
_SOURCES = ("client", "policies/deft_policies", "scripts")
# Lines that agree in these answer the same questions.
_SAME = ("card", "size", "torch", "triton", "commit", "sources")
_PATIENCE = 2.0  # times its budget that a question may take
_AGAIN_S = 1.0  # until it is told again that its time is up, where it did not listen
_ERROR_LINES = 3  # of a traceback, in a table


@dataclass(frozen=True)
class Question:
    """What is asked, and within how many seconds it should be answered."""

    name: str
    seconds: float
    ask: Callable[[], Iterable[Row]]


class State(Enum):
    """What became of a question."""

    ANSWERED = "answered"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass
class Answer:
    """What is known of a question: its line."""

    name: str
    state: State
    seconds: float = 0.0
    rows: list[Row] = field(default_factory=list)
    error: str = ""  # a traceback, or why it was skipped
    device: Row = field(default_factory=dict)  # its clocks, and the most memory

    def table(self, aligned: bool = True) -> str:
        """For a terminal; without aligning it is as short as can be."""
        lines = [f"{self.name}: {self.state.value}, {self.seconds:.1f} s"]
        if self.rows:
            columns = list(dict.fromkeys(column for row in self.rows for column in row))
            cells = [[_text(row.get(column)) for column in columns] for row in self.rows]
            lines.append(markdown_table(columns, cells, aligned).rstrip())
        lines += self.error.strip().splitlines()[-_ERROR_LINES:]
        return "\n".join(lines) + "\n"


def _text(value: Value) -> str:
    if value is None:
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


class Device(Protocol):
    """What is asked about."""

    def state(self) -> Row:
        """Its clocks now, and the most memory since `clear`."""

    def clear(self) -> None:
        """Give memory back that nobody holds; raises where the device cannot go on."""


class TimeUp(Exception):
    """A question took much longer than its budget."""


class Stopped(BaseException):
    """A signal ends the run."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Run:
    """Questions that are asked, and what was answered."""

    def __init__(self, folder: Path, seconds: float, about: Mapping[str, Value]) -> None:
        """`about` says of what; it is in every line."""
        self._lines, self._about = folder / LINES, dict(about)
        self._ends = time.monotonic() + seconds
        self.answers: list[Answer] = []

    def resume(self) -> None:
        """Take over what was answered before: on the same card, at the same size and commit."""
        text = self._lines.read_text() if self._lines.exists() else ""
        for line in text.splitlines():
            try:
                known = json.loads(line)
            except ValueError:  # cut off when the machine went away
                continue
            is_same = all(known.get(name) == self._about.get(name) for name in _SAME)
            if is_same and known["state"] == State.ANSWERED.value:
                given = {name: known[name] for name in ("name", "seconds", "rows", "device")}
                self.answers = [one for one in self.answers if one.name != known["name"]]
                self.answers.append(Answer(state=State.ANSWERED, **given))

    def ask(self, questions: Sequence[Question], device: Device) -> int:
        """Ask what is not yet answered; 0 if in the end all is, 128 and more after a signal."""
        known = {one.name for one in self.answers}
        try:
            with _signals():
                for question in questions:
                    if question.name not in known:
                        self._ask(question, device)
                        _print(self.answers[-1].table())
                        device.clear()
        except Stopped as stopped:
            _print(f"stopped by {stopped}\n")
            return 128 + stopped.number
        except RuntimeError as error:
            _print(f"the device cannot go on: {error}\nrun again with --resume\n")
            return 1
        finally:
            _print(self.summary)
        return int(any(one.state is not State.ANSWERED for one in self.answers))

    @property
    def summary(self) -> str:
        """All tables, what was asked first at the end: of an output often only that is kept."""
        about = "\n".join(f"{name}: {_text(value)}" for name, value in self._about.items())
        states = [[one.name, one.state.value, f"{one.seconds:.1f}"] for one in self.answers]
        tables = "\n".join(one.table(aligned=False) for one in reversed(self.answers))
        return f"{about}\n\n{tables}\n{markdown_table(('question', 'state', 's'), states, True)}"

    def _ask(self, question: Question, device: Device) -> None:
        answer, started = Answer(question.name, State.FAILED), time.monotonic()
        left = self._ends - started
        if left < question.seconds:
            answer.state = State.SKIPPED
            answer.error = f"{left:.0f} s are left, it needs {question.seconds:g} s"
            self._note(answer)
            return
        try:
            with _alarm(min(_PATIENCE * question.seconds, left)):
                for row in question.ask():
                    answer.rows.append(row)
            answer.state = State.ANSWERED
        except Exception:  # noqa: BLE001 - the next question may well be answered
            answer.error = traceback.format_exc()
        finally:  # what was answered before a signal came, too
            answer.seconds = time.monotonic() - started
            answer.device = device.state()
            self._note(answer)

    def _note(self, answer: Answer) -> None:
        """Write the line, and wait until it is on the disk."""
        self.answers.append(answer)
        self._lines.parent.mkdir(parents=True, exist_ok=True)
        fields = asdict(answer) | {"state": answer.state.value} | self._about
        line = json.dumps(fields, default=str)
        with self._lines.open("a+") as file:
            file.seek(max(0, file.tell() - 1))
            is_cut_off = file.read() not in ("", "\n")
            file.write("\n" * is_cut_off + line + "\n")
            file.flush()
            os.fsync(file.fileno())


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


@contextmanager
def _signals() -> Iterator[None]:
    """A block in which SIGTERM and SIGINT raise `Stopped`."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped(number)

    with _handling({signal.SIGTERM: stop, signal.SIGINT: stop}):
        yield


@contextmanager
def _alarm(seconds: float) -> Iterator[None]:
    """A block that `TimeUp` is raised in after so many seconds, and again and again."""

    def ring(number: int, frame: FrameType | None) -> None:
        raise TimeUp(f"no answer within {seconds:.0f} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    with _handling({signal.SIGALRM: ring}):
        before = signal.setitimer(signal.ITIMER_REAL, seconds, _AGAIN_S)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, *before)


@contextmanager
def _handling(handlers: Mapping[signal.Signals, Callable[..., None]]) -> Iterator[None]:
    """Only the main thread may handle signals; on others they are left as they are."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def describe_tree(root: Path = ROOT) -> Row:
    """Commit, whether the sources were changed since, and a digest of them.

    A copy of the files alone has no commit; the digest tells it from others.
    """
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    changes = _output(
        *("git", "-C", str(root), "status", "--porcelain", "--untracked-files=no", *_SOURCES)
    )
    digest = sha256()
    for folder in _SOURCES:
        for path in sorted((root / folder).rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\n" + path.read_bytes())
    return {
        "commit": commit,
        "dirty": None if changes is None else bool(changes),
        "sources": digest.hexdigest()[:12],
    }


def _output(*command: str) -> str | None:
    """What a command prints; None where there is no such program, or it fails."""
    try:
        run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return run.stdout.strip()


def ask_nvidia(*fields: str) -> Row:
    """What nvidia-smi says of the first device, by field."""
    told = _output(
        "nvidia-smi", "--id=0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"
    )
    values = [None] * len(fields) if told is None else told.splitlines()[0].split(", ")
    return dict(zip(fields, values, strict=True))
