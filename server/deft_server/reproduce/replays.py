"""Rows that answer recorded frames: every row in turn, episode by episode, into lines on disk.

A replay is stored as an evaluation is, so that a killed one goes on, nothing is mixed with what
was made differently, and `deft-client report` and `compare` read it. Actions are kept in
robosuite's units, as those of episodes are.
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
from tqdm import tqdm

from deft_client.libero.results.records import AnswerRecord, EpisodeRecord, Outcome
from deft_client.libero.results.store import ResultsStore, RunHeader
from deft_client.libero.simulator.conventions import to_robosuite
from deft_client.types import ActionChunk, ActOptions
from deft_policies.base import ActRequest
from deft_policies.benchmark.replay import ReplayFrame
from deft_policies.benchmark.scripted import Script, ScriptedPolicy, find_answers
from deft_policies.commands.parse import load_by_words
from deft_policies.decoding.knobs import find_method
from deft_policies.decoding.plan import PLAIN, DraftKind
from deft_policies.errors import RequestError
from deft_policies.memory import SessionMemory
from deft_policies.openvla.policy import OpenVLAPolicy
from deft_server.reproduce.frames import FrameEpisode, FrameSet
from deft_server.reproduce.study import ReproductionError, Row

FOLDER = "frames"
_UNPRICED = {DraftKind.MEDUSA, DraftKind.SMALL_MODEL}  # what they cost at full size is not known


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


@dataclass(frozen=True, eq=False)
class _Answerer:
    """A row that is ready to answer, and where its lines go."""

    row: Row
    policy: OpenVLAPolicy
    options: ActOptions
    store: ResultsStore


@dataclass(eq=False)
class Replays:
    """Everything that is to be replayed; `left_out` grows: rows that this policy cannot answer."""

    words: PolicyWords
    frames: FrameSet
    out: Path
    left_out: dict[str, str] = field(default_factory=dict)  # by slug: why
    told: dict[str, str] = field(default_factory=dict)  # what the policy says of itself

    def record(self, rows: Sequence[Row]) -> None:
        """Answer what is missing."""
        by_flags = sorted(rows, key=lambda row: row.flags)
        num_frames = self.frames.num_frames * len(rows)
        with tqdm(total=num_frames, unit="frame", desc="replaying", smoothing=0) as bar:
            for flags, group in groupby(by_flags, key=lambda row: row.flags):
                self._record_group(flags, list(group), bar.update)

    def _record_group(
        self, flags: tuple[str, ...], rows: list[Row], advance: Callable[[int], object]
    ) -> None:
        policy = self.words.load(flags)
        if not flags:
            self.told |= _describe(policy)
        with ExitStack() as stack:
            known: dict[int, tuple[int, ...]] = {}
            answerers = [
                one for row in rows if (one := self._open(row, policy, known, stack)) is not None
            ]
            advance(self.frames.num_frames * (len(rows) - len(answerers)))
            for episode in self.frames.episodes():
                if any(one.row.acceptance is not None for one in answerers):
                    frames = [ReplayFrame(seen, "") for seen in episode.observations]
                    known |= find_answers(policy, frames)
                for one in answerers:
                    if all(episode.key != record.key for record in one.store.resumed):
                        one.store.append(_replay(one, episode))
                    advance(len(episode.observations))

    def _open(
        self,
        row: Row,
        policy: OpenVLAPolicy,
        known: dict[int, tuple[int, ...]],
        stack: ExitStack,
    ) -> _Answerer | None:
        """The row, once it has answered a frame; None, and said why, where it cannot."""
        first = next(self.frames.episodes()).observations[0]
        options = ActOptions(decoding=row.method, want_trace=False)
        try:
            if row.acceptance is not None:
                known |= find_answers(policy, [ReplayFrame(first, "")])
                script = Script.of_head(row.slug, row.acceptance, chain=row.levels)
                policy, options = ScriptedPolicy(policy, script, known), ActOptions()
            policy.check(first, options)
        except RequestError as error:
            self.left_out[row.slug] = str(error)
            return None
        chunk = policy.act([ActRequest(first, SessionMemory(), options)])[0].chunk
        header = _header(row, self.frames.label, self.told, chunk)
        store = ResultsStore(self.out / FOLDER / row.slug, header)
        stack.callback(store.close)
        return _Answerer(row, policy, options, store)


def _replay(one: _Answerer, episode: FrameEpisode) -> EpisodeRecord:
    """One episode; in a batch every robot sees the same, and the first one's answers are kept."""
    memories = [SessionMemory()] * one.row.batch
    answers, actions, start = [], [], time.perf_counter()
    for step, seen in enumerate(episode.observations):
        asked = time.perf_counter()
        given = one.policy.act([ActRequest(seen, memory, one.options) for memory in memories])
        spent_ms = 1e3 * (time.perf_counter() - asked)
        memories, chunk = [answer.memory for answer in given], given[0].chunk
        timed = replace(chunk, timings=replace(chunk.timings, round_trip_ms=spent_ms))
        answers.append(AnswerRecord.of(timed, step, step))
        actions.append(to_robosuite(chunk.actions[0]))
    return EpisodeRecord(
        key=episode.key,
        instruction=episode.instruction,
        outcome=Outcome.REPLAYED,
        actions=np.array(actions),
        answers=tuple(answers),
        wall_s=time.perf_counter() - start,
        finished_s=time.time(),
    )


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
        "weights": policy.parts.target.model.fingerprint()[:16],
        "taught": "; ".join(info.instructions),
        **{name: info.details[name] for name in ("device", "dtype") if name in info.details},
        **info.versions,
    }
    return {name: value for name, value in told.items() if value}
