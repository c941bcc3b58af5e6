"""What one episode leaves behind, and how it becomes one line of JSON and back.

Columns instead of rows: an episode has hundreds of answers, and naming every number once per
answer would make the line five times as long. Actions keep every bit, because two runs are
compared to the last one.
"""

import base64
import json
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_core.measures.answers import AnswerRecord
from deft_core.types import StageTimings
from deft_libero.errors import ResultsError

STAGES = tuple(one.name for one in fields(StageTimings))
VIDEO_FPS = 30  # a frame a step, as the published evaluations; robots make 20 steps a second
_MS_DECIMALS = 3
# Fields that stand in a line as they are.
_PLAIN: dict[str, Callable[[Any], Any]] = {
    **dict.fromkeys(("instruction", "assets", "video", "error"), str),
    **dict.fromkeys(("held_steps", "late_steps"), int),
}


class Outcome(Enum):
    """How an episode ended. ERRORED means that something broke: it says nothing of the policy.

    REPLAYED frames were recorded earlier and answered again: nothing ended, so nothing is judged.
    """

    SUCCEEDED = "succeeded"
    FAILED = "failed"
    ERRORED = "errored"
    REPLAYED = "replayed"

    @property
    def is_judged(self) -> bool:
        """Whether it counts in a success rate."""
        return self in (Outcome.SUCCEEDED, Outcome.FAILED)


@dataclass(frozen=True, order=True)
class TrialKey:
    """Which episode; at most one result per key and run."""

    suite: str
    task: int
    trial: int

    def __str__(self) -> str:
        return f"{self.suite} task {self.task} trial {self.trial}"


@dataclass(frozen=True)
class SeamSizes:
    """The largest change of a motion from one action to the next.

    Where commands change more than chunks do inside, as they were answered, they do so where one
    chunk gives way to the next. From a hold nothing is counted.
    """

    commanded: float = 0.0
    inside: float = 0.0


@dataclass(frozen=True, eq=False)
class EpisodeRecord:
    """One finished episode. `error` is empty unless it Errored."""

    key: TrialKey
    instruction: str
    outcome: Outcome
    actions: NDArray[np.float64] = field(default_factory=lambda: np.zeros((0, 7)))  # [step, dim]
    answers: tuple[AnswerRecord, ...] = ()
    held_steps: int = 0  # steps without an action, because no answer had come: the arm held
    late_steps: int = 0  # real-time steps for which the simulator itself was too slow
    seams: SeamSizes = SeamSizes()  # in real time
    wall_s: float = 0.0
    worked_s: float = 0.0  # of a core that answering was given; 0 where nobody measured it
    finished_s: float = 0.0  # when, in seconds since 1970; puts episodes in the order of playing
    assets: str = ""
    video: str = ""  # relative to the folder of the run
    error: str = ""

    @property
    def num_steps(self) -> int:
        """Steps after the wait, executed actions included."""
        return len(self.actions)


def encode_record(record: EpisodeRecord, run: str) -> bytes:
    """One line of JSON, newline included."""
    fields_of_line = {
        "run": run,
        "suite": record.key.suite,
        "task": record.key.task,
        "trial": record.key.trial,
        "outcome": record.outcome.value,
        "steps": record.num_steps,
        **{name: getattr(record, name) for name in _PLAIN},
        "seams": asdict(record.seams),
        "wall_s": round(record.wall_s, 3),
        **({"worked_s": round(record.worked_s, 3)} if record.worked_s else {}),
        "finished_s": round(record.finished_s, 3),
        "answers": _encode_answers(record.answers),
        "actions": _encode_actions(record.actions),
    }
    text = json.dumps(fields_of_line, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode() + b"\n"


def decode_record(line: bytes, run: str, place: str) -> EpisodeRecord:
    """The record in a line of run `run`; `place` names file and line in errors."""
    try:
        values = json.loads(line)
        if values["run"] != run:
            raise ResultsError(
                f"{place} belongs to run {values['run']!r}, the folder to run {run!r}; "
                "move the line to a folder of its own run or delete it"
            )
        return EpisodeRecord(
            key=TrialKey(str(values["suite"]), int(values["task"]), int(values["trial"])),
            outcome=Outcome(values["outcome"]),
            actions=_decode_actions(values["actions"]),
            answers=_decode_answers(values["answers"]),
            seams=SeamSizes(**values.get("seams", {})),  # earlier versions did not measure them
            wall_s=float(values["wall_s"]),
            worked_s=float(values.get("worked_s", 0.0)),  # nor this
            finished_s=float(values["finished_s"]),
            **{name: kind(values[name]) for name, kind in _PLAIN.items()},
        )
    except (ValueError, KeyError, TypeError, RecursionError, zlib.error) as error:
        raise ResultsError(
            f"{place} is no episode ({type(error).__name__}: {error}); "
            "delete that line and run the same command again: the episode is redone"
        ) from error


# What is kept of each answer, and what stands for it where nothing is written.
_COLUMNS = {
    one.name: one.default
    for one in (*fields(AnswerRecord), *fields(StageTimings))
    if one.name not in ("asked_step", "timings")
}


_OFTEN_ALIKE = ("method", "plan")  # written once where all answers have the same


def _encode_answers(answers: tuple[AnswerRecord, ...]) -> dict[str, Any]:
    """Columns; one that holds nothing but its default is left out."""
    rows = [{**vars(one), **vars(one.timings)} for one in answers]
    columns: dict[str, Any] = {"asked_step": [row["asked_step"] for row in rows]}
    for name, default in _COLUMNS.items():
        values = [row[name] for row in rows]
        if name.endswith("_ms"):
            values = [round(value, _MS_DECIMALS) for value in values]
        if any(value != default for value in values):
            columns[name] = values
    if columns.get("used_step") == columns["asked_step"]:
        del columns["used_step"]
    for name in _OFTEN_ALIKE:
        if len(set(columns.get(name, ()))) == 1:
            columns[name] = columns[name][0]
    return columns


def _decode_answers(columns: dict[str, Any]) -> tuple[AnswerRecord, ...]:
    columns = {"used_step": columns["asked_step"], **columns}
    for name in _OFTEN_ALIKE:
        if isinstance(columns.get(name), str):
            columns[name] = [columns[name]] * len(columns["asked_step"])
    stages = [name for name in STAGES if name in columns]
    lists = [name for name in ("accepted", "guesses") if name in columns]
    answers = []
    for values in zip(*columns.values(), strict=True):
        row = dict(zip(columns, values, strict=True))
        timings = StageTimings(**{name: row.pop(name) for name in stages})
        row.update({name: tuple(row[name]) for name in lists})
        answers.append(AnswerRecord(timings=timings, **row))
    return tuple(answers)


def _encode_actions(actions: NDArray[np.float64]) -> dict[str, Any]:
    packed = zlib.compress(np.ascontiguousarray(actions, dtype="<f8").tobytes(), 9)
    return {"shape": list(actions.shape), "zlib_f8": base64.b64encode(packed).decode()}


def _decode_actions(packed: dict[str, Any]) -> NDArray[np.float64]:
    raw = zlib.decompress(base64.b64decode(packed["zlib_f8"], validate=True))
    return np.frombuffer(raw, dtype="<f8").reshape(packed["shape"]).astype(np.float64)
