"""Rows that answer recorded frames, in turn at every frame, into lines on disk.

What they answer is asked of a policy that computes once what rows share. Times are taken apart from
that, of fewer frames, by the policy as it is served. A replay is stored as an evaluation is, so
that a killed one goes on, nothing is mixed with what was made differently, and `deft-client report`
and `compare` read it. Actions are kept in robosuite's units, as those of episodes are.
"""

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import datetime, timezone
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deft_client.libero.results.records import AnswerRecord, EpisodeRecord, Outcome
from deft_client.libero.results.store import ResultsStore, RunHeader
from deft_client.libero.simulator.conventions import to_robosuite
from deft_client.types import ActionChunk, ActOptions, Observation, StageTimings
from deft_policies.base import ActRequest
from deft_policies.benchmark.replay import ReplayFrame
from deft_policies.benchmark.scripted import Script, ScriptedPolicy, find_answers
from deft_policies.commands.parse import load_by_words
from deft_policies.decoding.knobs import find_method
from deft_policies.decoding.plan import PLAIN, DraftKind
from deft_policies.errors import RequestError
from deft_policies.memory import SessionMemory
from deft_policies.openvla.policy import OpenVLAPolicy
from deft_policies.openvla.shared_frames import sharing_frames
from deft_server.reproduce.frames import FrameEpisode, FrameSet
from deft_server.reproduce.study import ReproductionError, Row

FOLDER, TIMED = "frames", "timed"
TIMES = "times"  # the fact that says how they were taken
_UNPRICED = {DraftKind.MEDUSA, DraftKind.SMALL_MODEL}  # what they cost at full size is not known
_OWN_CORE = 0.97  # of the time that passes, where nothing else wants the core


@dataclass(frozen=True)
class PolicyWords:
    """Which policy, as the command line names it."""

    name: str
    flags: tuple[str, ...]

    def load(self, flags: Sequence[str] = ()) -> OpenVLAPolicy:
        """The policy with further flags; plans are fixed, so that a replay is repeatable."""
        policy = load_by_words(self.name, *self.flags, *flags, "--no-guard")
        if not isinstance(policy, OpenVLAPolicy):
            raise ReproductionError(
                f"--policy {self.name} decodes in one way; studies compare methods of OpenVLA's"
            )
        return policy


@dataclass(eq=False)
class CoreClock:
    """How long answers took, and how much of that this thread was given to work."""

    passed_s: float = 0.0
    worked_s: float = 0.0
    _began: tuple[float, float] = (0.0, 0.0)

    def start(self) -> None:
        """Begin an answer."""
        self._began = time.perf_counter(), time.thread_time()

    def stop(self) -> float:
        """End it; its milliseconds."""
        passed_s = time.perf_counter() - self._began[0]
        self.passed_s += passed_s
        self.worked_s += time.thread_time() - self._began[1]
        return 1e3 * passed_s

    def told(self, frames: str) -> str:
        """What to say of times that were taken with it."""
        share = self.worked_s / self.passed_s
        verdict = "" if share > _OWN_CORE else ": the machine did other work, do not believe them"
        return f"of {frames}, rows in turn at every frame; had {share:.0%} of a core{verdict}"


@dataclass(eq=False)
class _Told:
    """What a row has answered to one episode so far; `memories` are of the copies of a batch."""

    memories: list[SessionMemory]
    answers: list[AnswerRecord] = field(default_factory=list)
    actions: list[NDArray[np.float64]] = field(default_factory=list)

    def take(self, chunk: ActionChunk) -> None:
        """The next frame's."""
        step = len(self.answers)
        self.answers.append(AnswerRecord.of(chunk, step, step))
        self.actions.append(to_robosuite(chunk.actions[0]))

    def record(self, episode: FrameEpisode) -> EpisodeRecord:
        """All of it."""
        return EpisodeRecord(
            key=episode.key,
            instruction=episode.instruction,
            outcome=Outcome.REPLAYED,
            actions=np.array(self.actions),
            answers=tuple(self.answers),
            finished_s=time.time(),
        )


@dataclass(frozen=True, eq=False)
class _Answerer:
    """A row that is ready to answer, and where its lines go."""

    row: Row
    policy: OpenVLAPolicy
    options: ActOptions
    store: ResultsStore

    def has(self, episode: FrameEpisode) -> bool:
        """Whether there is a line of it."""
        return any(episode.key == record.key for record in self.store.resumed)

    def act(self, seen: Observation, told: _Told, clock: CoreClock | None) -> None:
        """Answer the next frame; of a batch of copies the first answer is kept."""
        batch = [ActRequest(seen, memory, self.options) for memory in told.memories]
        if clock is not None:
            clock.start()
        given = self.policy.act(batch)
        spent_ms = 0.0 if clock is None else clock.stop()
        told.memories, chunk = [answer.memory for answer in given], given[0].chunk
        timings = replace(chunk.timings, round_trip_ms=spent_ms)
        told.take(replace(chunk, timings=StageTimings() if clock is None else timings))


@dataclass(frozen=True)
class _Sitting:
    """Which frames are answered, into which folder; a clock where it is for the times."""

    frames: FrameSet
    folder: str
    clock: CoreClock | None = None

    def prepared(self, policy: OpenVLAPolicy) -> OpenVLAPolicy:
        """The policy that answers."""
        return sharing_frames(policy) if self.clock is None else policy

    def answer(
        self,
        answerers: Sequence[_Answerer],
        episode: FrameEpisode,
        advance: Callable[[int], object],
    ) -> None:
        """Every row answers what it has not, rows in turn at every frame."""
        told = {
            one: _Told([SessionMemory()] * one.row.batch)
            for one in answerers
            if not one.has(episode)
        }
        for seen in episode.observations:
            for one, known in told.items():
                one.act(seen, known, self.clock)
            advance(len(answerers))
        for one, known in told.items():
            one.store.append(known.record(episode))


@dataclass(eq=False)
class Replays:
    """Everything that is to be replayed; `left_out` grows: rows that this policy cannot answer."""

    words: PolicyWords
    frames: FrameSet
    out: Path
    left_out: dict[str, str] = field(default_factory=dict)  # by slug: why
    told: dict[str, str] = field(default_factory=dict)  # what the policy says of itself

    def record(self, rows: Sequence[Row]) -> None:
        """Answer what is missing. Batches of copies answer as one does: they are only timed."""
        self._record([row for row in rows if row.batch == 1], _Sitting(self.frames, FOLDER))

    def time(self, rows: Sequence[Row], frames: FrameSet) -> None:
        """Answer what is missing as it would be served, and say how the times were taken."""
        clock = CoreClock()
        self._record(rows, _Sitting(frames, TIMED, clock))
        if clock.passed_s:
            self.told[TIMES] = clock.told(frames.label)

    def _record(self, rows: Sequence[Row], sitting: _Sitting) -> None:
        by_flags = sorted(rows, key=lambda row: row.flags)
        total = sitting.frames.num_frames * len(rows)
        with tqdm(total=total, unit="frame", desc=sitting.folder, smoothing=0) as bar:
            for flags, group in groupby(by_flags, key=lambda row: row.flags):
                self._record_group(flags, list(group), sitting, bar.update)

    def _record_group(
        self,
        flags: tuple[str, ...],
        rows: list[Row],
        sitting: _Sitting,
        advance: Callable[[int], object],
    ) -> None:
        loaded = self.words.load(flags)
        if not flags:
            self.told |= _describe(loaded)
        with ExitStack() as stack:
            opened = _Rows(self, sitting, sitting.prepared(loaded), stack)
            answerers = [one for row in rows if (one := opened.open(row)) is not None]
            advance(sitting.frames.num_frames * (len(rows) - len(answerers)))
            for episode in sitting.frames.episodes():
                if any(one.row.acceptance is not None for one in answerers):
                    opened.find_answers(episode.observations)
                sitting.answer(answerers, episode, advance)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Rows of a policy on their way to answering."""

    replays: Replays
    sitting: _Sitting
    policy: OpenVLAPolicy
    stack: ExitStack  # closes their stores
    known: dict[int, tuple[int, ...]] = field(default_factory=dict)  # what scripted drafts know

    def find_answers(self, seen: Sequence[Observation]) -> None:
        """Tell scripted drafts what is right."""
        self.known.update(find_answers(self.policy, [ReplayFrame(one, "") for one in seen]))

    def open(self, row: Row) -> _Answerer | None:
        """The row, once it has answered a frame; None, and said why, where it cannot."""
        replays, policy = self.replays, self.policy
        first = next(self.sitting.frames.episodes()).observations[0]
        options = ActOptions(decoding=row.method, want_trace=False)
        try:
            if row.acceptance is not None:
                self.find_answers([first])
                script = Script.of_head(row.slug, row.acceptance, chain=row.levels)
                policy, options = ScriptedPolicy(policy, script, self.known), ActOptions()
            policy.check(first, options)
        except RequestError as error:
            replays.left_out[row.slug] = str(error)
            return None
        request = ActRequest(first, SessionMemory(), options)
        header = _header(
            row, self.sitting.frames.label, replays.told, policy.act([request])[0].chunk
        )
        store = ResultsStore(replays.out / self.sitting.folder / row.slug, header)
        self.stack.callback(store.close)
        return _Answerer(row, policy, options, store)


def _header(row: Row, label: str, told: Mapping[str, str], chunk: ActionChunk) -> RunHeader:
    """`told` is of the policy without the row's flags: weights of few bits have no digest."""
    now = datetime.now(timezone.utc)
    return RunHeader(
        run=f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}",
        created=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        name=row.slug,
        suite="frames",
        assets=label,
        options={
            "decoding": row.method,
            "flags": " ".join(row.flags),
            "batch": str(row.batch),
            "scripted": "" if row.acceptance is None else f"{row.acceptance:g}, {row.levels}",
            "head_levels": _head_levels(row, chunk),
            "pacing": "replay",
        },
        versions={name: told[name] for name in ("deft", "torch")},
        server={name: told[name] for name in ("policy", "weights")},
    )


def _head_levels(row: Row, chunk: ActionChunk) -> str:
    """How many levels a head grows before a pass, by the plan that this policy uses.

    Empty where something else drafts at a cost.
    """
    if row.acceptance is not None:
        return str(row.levels)
    assert chunk.trace is not None
    plans = {plan.name: plan for plan in find_method(row.method).plans}
    plan = plans.get(chunk.trace.plan, PLAIN)
    if _UNPRICED & set(plan.rounds):
        return ""
    return str(plan.shape.levels if DraftKind.HEAD in plan.rounds else 0)


def _describe(policy: OpenVLAPolicy) -> Mapping[str, str]:
    """What a page says of the policy."""
    info = policy.info
    told = {
        "policy": info.policy,
        "weights": policy.fingerprint(),
        "taught": "; ".join(info.instructions),
        **{name: info.details[name] for name in ("device", "dtype") if name in info.details},
        **info.versions,
    }
    return {name: value for name, value in told.items() if value}
