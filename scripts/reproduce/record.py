"""Rows answer recorded frames, in turn at every frame, into lines on disk.

A replay is stored as an evaluation is, so that a killed one goes on, nothing is mixed with what was
made differently, and `deft-client report` and `compare` read it. Actions are kept in robosuite's
units, as those of episodes are.
"""

import hashlib
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from deft_core.datasets.episodes import StoredEpisode
from deft_core.datasets.formats import read_dataset
from deft_core.measures.answers import AnswerRecord
from deft_core.measures.statistics import LEAST_EPISODES
from deft_core.peers.conventions import to_robosuite
from deft_core.types import ActionChunk, Observation, StageTimings
from deft_libero.results.records import EpisodeRecord, Outcome, TrialKey
from deft_libero.results.store import ResultsStore, RunHeader
from deft_policies.base import PolicyRequest
from deft_policies.benchmark.replay import Contender, Replay, ReplayFrame, replay
from deft_policies.benchmark.transformers_loops import find_baseline
from deft_policies.commands.parse import load_by_words
from deft_policies.decoding import kinds
from deft_policies.decoding.methods import AUTOREGRESSIVE, find_method
from deft_policies.decoding.plan import PLAIN
from deft_policies.errors import RequestError
from deft_policies.families.policy import VlaPolicy
from scripts.reproduce.acceptance import measured_chances
from scripts.reproduce.study import ReproductionError, Row
from scripts.scripted_drafts import Script, ScriptedPolicy, find_answers

FRAMES, TIMED = "frames", "timed"
_UNPRICED = {kinds.MEDUSA, kinds.SMALL_MODEL}  # what they cost at full size is not known


@dataclass(frozen=True)
class PolicyWords:
    """Which policy, as the command line names it."""

    name: str
    flags: tuple[str, ...]

    def load(self, flags: Sequence[str] = ("--no-guard",)) -> VlaPolicy:
        """The policy with further flags; without a guard its plans are fixed."""
        policy = load_by_words(self.name, *self.flags, *flags)
        if not isinstance(policy, VlaPolicy):
            raise ReproductionError(
                f"--policy {self.name} decodes in one way; studies compare methods of OpenVLA's"
            )
        return policy


@dataclass(frozen=True, eq=False)
class FrameSet:
    """Whole episodes, one of each instruction in turn, until there are `limit` frames.

    With `stretch`, so many frames of each episode: from its start in the first, to its end in the
    last. Read anew each time they are iterated over: thousands of frames do not stay in memory.
    """

    data: Path
    limit: int
    cameras: tuple[str, ...] = ()
    stretch: int | None = None

    def for_times(self, limit: int) -> "FrameSet":
        """Frames to be timed, of as many episodes as a speed-up needs."""
        return replace(self, limit=limit, stretch=max(1, limit // LEAST_EPISODES))

    def episodes(self) -> Iterator[tuple[TrialKey, Sequence[Observation]]]:
        """Every episode; the last one may be cut."""
        left = self.limit
        for number, (key, read) in enumerate(self._in_order):
            if left <= 0:
                return
            seen = read()
            if self.stretch is not None:
                place = min(number / max(1, self.limit // self.stretch - 1), 1.0)
                start = round(place * max(0, len(seen) - self.stretch))
                seen = seen[start : start + self.stretch]
            yield key, seen[:left]
            left -= len(seen)

    @cached_property
    def label(self) -> str:
        """How many there are of what, and a digest of every pixel."""
        digest, counts = hashlib.sha256(), []
        for _, seen in self.episodes():
            counts.append(len(seen))
            for one in seen:
                digest.update(one.image.tobytes())
                digest.update(one.instruction.encode())
        told = f"{sum(counts)} recorded frames of {len(counts)} episodes"
        return f"{told} ({digest.hexdigest()[:12]})"

    @cached_property
    def _in_order(self) -> list[tuple[TrialKey, Callable[[], list[Observation]]]]:
        """Keys number instructions and their episodes; frames are read when they are called for."""
        by_instruction: dict[str, list[Callable[[], list[Observation]]]] = {}
        for stored in read_dataset(self.data, self.cameras):
            if (first := next(iter(stored.steps()), None)) is not None:
                episodes = by_instruction.setdefault(first.observation.instruction, [])
                episodes.append(partial(_read, stored))
        if not by_instruction:
            raise ReproductionError(f"{self.data}: none of its episodes has a step")
        keys = [
            (TrialKey(FRAMES, task, number), read)
            for task, text in enumerate(sorted(by_instruction))
            for number, read in enumerate(by_instruction[text])
        ]
        return sorted(keys, key=lambda one: (one[0].trial, one[0].task))


def _read(stored: StoredEpisode) -> list[Observation]:
    return [step.observation for step in stored.steps()]


@dataclass(frozen=True, eq=False)
class _Opened:
    """A row that is ready to answer, and where its lines go."""

    contender: Contender
    store: ResultsStore

    def has(self, key: TrialKey) -> bool:
        return any(key == record.key for record in self.store.resumed)


@dataclass(eq=False)
class Replays:
    """Everything that is to be replayed; `left_out` grows: rows that this policy cannot answer."""

    words: PolicyWords
    out: Path
    left_out: dict[str, str] = field(default_factory=dict)  # by slug: why
    told: dict[str, str] = field(default_factory=dict)  # what the policy says of itself
    _known: dict[int, tuple[int, ...]] = field(default_factory=dict)  # right answers, for scripts

    def record(self, rows: Sequence[Row], frames: FrameSet) -> None:
        """Answer what is missing. Batches of copies answer as one does: they are only timed."""
        self._answer([row for row in rows if row.batch == 1], frames, FRAMES)

    def time(self, rows: Sequence[Row], frames: FrameSet) -> None:
        """Answer what is missing of frames that are there for their times."""
        self._answer(rows, frames, TIMED)

    def _answer(self, rows: Sequence[Row], frames: FrameSet, folder: str) -> None:
        for flags, group in groupby(sorted(rows, key=lambda row: row.flags), lambda row: row.flags):
            # Times are of the policy as it is served; other lines are to be the same every time.
            policy = self.words.load(flags if folder == TIMED else (*flags, "--no-guard"))
            if not flags:
                self.told |= _describe(policy)
            self._answer_with(policy, list(group), frames, folder)

    def _answer_with(
        self, policy: VlaPolicy, rows: list[Row], frames: FrameSet, folder: str
    ) -> None:
        """Rows of one policy, in turn at every frame of every episode that they lack."""
        is_captured = policy.model.runner.reserve is not None
        if is_captured:  # before anything is answered without
            policy.warm_up([row.method for row in rows if row.is_method])
        scripted = self._scripted(policy, rows)
        with ExitStack() as stack:
            opened = []
            for row in rows:
                if (one := self._open(policy, scripted, row, frames, folder)) is not None:
                    opened.append(one)
                    stack.callback(one.store.close)
            ours = [one.contender for one in opened if one.contender.policy is policy]
            methods = [one.decoding for one in ours if one.decoding]
            drafts = any(method != AUTOREGRESSIVE for method in methods)
            if folder == TIMED and drafts and not is_captured:
                policy.warm_up(methods)  # as a server measures plans and widths at its start
            for key, seen in tqdm(frames.episodes(), unit="episode", desc=folder, disable=None):
                missing = [one for one in opened if not one.has(key)]
                asked = [ReplayFrame(one, str(key)) for one in seen]
                if any(one.contender.policy is scripted for one in missing):
                    self._known.update(find_answers(policy, asked))
                runs = replay([one.contender for one in missing], asked, 0)
                for one, run in zip(missing, runs, strict=True):
                    one.store.append(_record(key, seen[0].instruction, run, folder == TIMED))

    def _scripted(self, policy: VlaPolicy, rows: Sequence[Row]) -> ScriptedPolicy | None:
        """One engine for all rows whose drafts are right to order: its passes are captured once."""
        scripts = [_script(row) for row in rows if row.is_scripted]
        if not scripts:
            return None
        scripted = ScriptedPolicy(policy, scripts, self._known)
        scripted.warm_up()
        return scripted

    def _open(
        self,
        policy: VlaPolicy,
        scripted: ScriptedPolicy | None,
        row: Row,
        frames: FrameSet,
        folder: str,
    ) -> _Opened | None:
        """The row, once it has answered a frame; None, and said why, where it cannot."""
        first = next(frames.episodes())[1][0]
        thinks = not policy.info.thinks_when_asked  # unless it always does, it acts at once
        contender = Contender(row.slug, policy, row.method, None, row.batch, thinks)
        try:
            if row.is_scripted:
                assert scripted is not None
                self._known.update(find_answers(policy, [ReplayFrame(first, "")]))
                contender = Contender(row.slug, scripted, row.slug, want_reasoning=thinks)
            if row.loop:
                theirs = find_baseline(policy, row.loop)
                contender = Contender(row.slug, theirs, want_reasoning=thinks)
            options = contender.options(ReplayFrame(first, ""))
            contender.policy.check(first, options)
        except RequestError as error:
            self.left_out[row.slug] = str(error)
            return None
        chunk = contender.policy.act([PolicyRequest(first, options=options)])[0].chunk
        header = _header(row, frames.label, self.told, chunk)
        return _Opened(contender, ResultsStore(self.out / folder / row.slug, header))


def _script(row: Row) -> Script:
    """How often the drafts of a row are right."""
    if row.without_head:
        return Script(row.slug, row.acceptance or 0.0, num_chains=1)
    if row.acceptance is not None:
        return Script.of_head(row.slug, row.acceptance, chain=row.levels)
    return Script.like(row.slug, find_method(row.like), measured_chances(row.like))


def _describe_script(row: Row) -> str:
    if row.acceptance is not None:
        return f"{row.acceptance:g}, {row.levels}"
    if not row.like:
        return ""
    chances = ", ".join(f"{one:.2f}" for one in measured_chances(row.like))
    return f"as {row.like}: {chances}"


def _record(key: TrialKey, instruction: str, run: Replay, is_timed: bool) -> EpisodeRecord:
    answers = []
    for step, one in enumerate(run.answers):
        times = (
            replace(one.chunk.timings, round_trip_ms=one.wall_ms) if is_timed else StageTimings()
        )
        answers.append(AnswerRecord.of(replace(one.chunk, timings=times), step, step))
    return EpisodeRecord(
        key=key,
        instruction=instruction,
        outcome=Outcome.REPLAYED,
        actions=np.array([_executed(one.chunk) for one in run.answers]),
        answers=tuple(answers),
        held_steps=sum(not len(one.chunk.actions) for one in run.answers),
        worked_s=sum(one.worked_ms for one in run.answers) / 1000 if is_timed else 0.0,
        finished_s=time.time(),
    )


def _executed(chunk: ActionChunk) -> NDArray[np.float64]:
    """What a robot does with an answer; where that has no action, it holds."""
    return (
        to_robosuite(chunk.actions[0]) if len(chunk.actions) else np.zeros(chunk.actions.shape[1])
    )


def _header(row: Row, label: str, told: Mapping[str, str], chunk: ActionChunk) -> RunHeader:
    """`told` is of the policy without the row's flags, which the options have."""
    now = datetime.now(UTC)
    return RunHeader(
        run=f"{now:%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}",
        created=f"{now:%Y-%m-%dT%H:%M:%SZ}",
        name=row.slug,
        suite=FRAMES,
        assets=label,
        options={
            "decoding": row.method,
            "flags": " ".join(row.flags),
            "batch": str(row.batch),
            "scripted": _describe_script(row),
            "head_levels": _head_levels(row, chunk),
            "pacing": "replay",
        },
        versions={name: told[name] for name in ("deft", "torch")},
        server={
            name: text
            for name, text in told.items()
            if name in ("policy", "weights", "device", "dtype", "processor")
            or name.startswith("digest of ")
        },
    )


def _head_levels(row: Row, chunk: ActionChunk) -> str:
    """How many levels a head grows before a pass, by the plan that this policy uses.

    Empty where something else drafts at a cost.
    """
    if row.is_scripted:
        return str(row.levels)
    assert chunk.trace is not None
    plans = {plan.name: plan for plan in find_method(row.method).plans}
    plan = plans.get(chunk.trace.plan, PLAIN)
    if _UNPRICED & set(plan.rounds):
        return ""
    return str(plan.shape.levels if kinds.HEAD in plan.rounds else 0)


def _describe(policy: VlaPolicy) -> Mapping[str, str]:
    """What a page says of the policy."""
    info = policy.info
    told = {
        "policy": info.policy,
        **{name: info.details[name] for name in ("weights", "device", "dtype", "processor")},
        **policy.digests,
        **info.versions,
    }
    if info.max_tokens is not None and not info.thinks_when_asked:
        told["answers"] = "a text, then an action"
    return {name: value for name, value in told.items() if value}
