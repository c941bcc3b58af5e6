"""From a run's answers to the numbers that are reported. Pure; prints nothing."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from deft_core.measures.answers import AnswerRecord
from deft_core.measures.speculation import Speculation, speculation_of
from deft_core.measures.speed import SpeedUp, cpu_contention_warnings, speed_up
from deft_core.measures.statistics import Percentiles, percentiles
from deft_core.types import ActOptions, DecodeTrace
from deft_policies.benchmark.replay import Contender, Replay, ReplayFrame
from deft_policies.decoding.acceptance.rule import ActionSpace, DimensionGroup
from deft_policies.decoding.plan import ACTION_PLANS, NUMBER_PLANS, PLAIN, TEXT_PLANS, Plan
from deft_policies.families.policy import VlaPolicy
from deft_policies.model.sizes import TokenRange

# Stage names as users know them, and their fields.
STAGES = (
    ("preprocess", "prepare_ms"),
    ("vision", "vision_ms"),
    ("prefill", "prefill_ms"),
    ("draft", "draft_ms"),
    ("decode", "verify_ms"),
    ("judge", "judge_ms"),
    ("commit", "commit_ms"),
    ("post", "finish_ms"),
)


@dataclass(frozen=True)
class Speed:
    """How long a contender took for one answer, in all and by stage."""

    name: str
    batch_size: int
    num_answers: int
    total: Percentiles
    stages: dict[str, Percentiles]
    chunk_length: int = 1
    episodes_ms: tuple[tuple[float, ...], ...] = ()  # every answer, episode by episode
    worked_ms: float = 0.0  # of a core, of all of them; 0 where it was not measured

    @property
    def actions_per_s(self) -> float:
        """Over all answers, if whole chunks are executed."""
        return 1e3 * self.batch_size * self.chunk_length / self.total.mean

    def faster_than(self, baseline: "Speed") -> SpeedUp:
        """Actions a second relative to the baseline's, on the same frames."""
        scale = self.batch_size * self.chunk_length / baseline.batch_size / baseline.chunk_length
        doubts = []
        for side in (baseline, self):
            doubts += cpu_contention_warnings(side.worked_ms, side.total.mean * side.num_answers)
        own = [[spent / scale for spent in episode] for episode in self.episodes_ms]
        return speed_up(baseline.episodes_ms, own, list(dict.fromkeys(doubts)))


@dataclass(frozen=True)
class Decoding:
    """How a contender decoded, and how its actions differ from plain decoding's.

    Differences are over the tokens of all actions; units are 0 where unknown.
    """

    name: str
    speculation: Speculation | None  # None where its engine counts no passes
    relaxed_share: float
    equal_actions: float
    mean_bins: float
    max_bins: int
    mean_mm: float
    mean_deg: float
    rule: str = ""  # with its numbers; empty where nothing drafts
    plans: dict[str, int] = field(default_factory=dict)  # answers by the plan that drafted them
    plan_meanings: dict[str, str] = field(default_factory=dict)


def summarise_speed(run: Replay, frames: Sequence[ReplayFrame] = ()) -> Speed:
    """Quantiles of a run. Totals are wall-clock times around the whole call.

    `frames` say which answers are of one episode; without them no speed-up can be reported.
    """
    timings = [answer.chunk.timings for answer in run.answers]
    by_episode = groupby(zip(frames, run.answers, strict=False), lambda pair: pair[0].episode)
    return Speed(
        name=run.contender.name,
        batch_size=run.contender.batch_size,
        num_answers=len(run.answers),
        total=percentiles([answer.wall_ms for answer in run.answers]),
        stages={
            stage: percentiles([getattr(timing, field) for timing in timings])
            for stage, field in STAGES
        },
        chunk_length=max(1, len(run.answers[0].chunk.actions)),  # a text may hold none
        episodes_ms=tuple(tuple(one.wall_ms for _, one in pairs) for _, pairs in by_episode),
        worked_ms=sum(answer.worked_ms for answer in run.answers),
    )


def summarise_decoding(
    run: Replay,
    plain: Replay,
    spaces: Sequence[ActionSpace],
    action_tokens: TokenRange | None = None,
) -> Decoding:
    """Compare a run with plain decoding of the same frames; `spaces` is per frame.

    A token outside `action_tokens` counts as the nearest inside, as it does for the robot.
    """
    traces = [answer.chunk.trace for answer in run.answers]
    reference = [answer.chunk.trace for answer in plain.answers]
    pairs = [
        (own, other, space)
        for own, other, space in zip(traces, reference, spaces, strict=True)
        if own is not None and other is not None
    ]
    acting = [
        (_bins_of(own, space, action_tokens), _bins_of(other, space, action_tokens), space)
        for own, other, space in pairs
    ]
    acting = [one for one in acting if len(one[0]) == len(one[1]) == one[2].length]
    bins, moved = [np.abs(own - other) for own, other, _ in acting], [one[2] for one in acting]
    own_traces = [own for own, _, _ in pairs]
    known = _plans_of(run.contender)
    plans = dict(Counter(trace.plan for trace in own_traces if trace.plan).most_common())
    return Decoding(
        name=run.contender.name,
        speculation=speculation_of([AnswerRecord.of(answer.chunk, 0, 0) for answer in run.answers]),
        relaxed_share=_mean([own.relaxed_share for own in own_traces]),
        equal_actions=_mean([own.tokens == other.tokens for own, other, _ in pairs]),
        mean_bins=_mean([float(distances.mean()) for distances in bins]),
        max_bins=max((int(distances.max()) for distances in bins), default=0),
        mean_mm=_mean_distance(bins, moved, DimensionGroup.MOVE),
        mean_deg=_mean_distance(bins, moved, DimensionGroup.TURN),
        rule=own_traces[0].rule if own_traces else "",
        plans=plans,
        plan_meanings={name: known[name].meaning for name in plans if name in known},
    )


def _plans_of(contender: Contender) -> dict[str, Plan]:
    """The plans that a contender's answers may be drafted by, by name."""
    policy = contender.policy
    if contender.decoding is None or not isinstance(policy, VlaPolicy):
        return {}
    method = policy.method_for(ActOptions(decoding=contender.decoding, radius=contender.radius))
    all_plans = (*ACTION_PLANS, *TEXT_PLANS, *NUMBER_PLANS, PLAIN, *method.plans)
    return {plan.name: plan for plan in all_plans}


def _bins_of(
    trace: DecodeTrace, space: ActionSpace, action_tokens: TokenRange | None
) -> NDArray[np.int64]:
    """The tokens of an action: all of them, or those before the stop token of a text."""
    is_text = bool(trace.parts)
    tokens = np.array(trace.tokens[-1 - space.length : -1] if is_text else trace.tokens)
    if action_tokens is None:
        return tokens
    # The lowest id decodes like its neighbour (`ActionCodec`).
    return np.asarray(np.clip(tokens, action_tokens.first + 1, action_tokens.last))


def _mean_distance(
    bins: list[NDArray[np.int64]], spaces: Sequence[ActionSpace], group: DimensionGroup
) -> float:
    """Mean over the positions of the group whose unit is known."""
    moved = [
        float(apart) * unit
        for row, space in zip(bins, spaces, strict=True)
        for apart, unit, own in zip(row, space.unit_per_bin, space.groups, strict=True)
        if own is group and unit > 0.0
    ]
    return _mean(moved)


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
