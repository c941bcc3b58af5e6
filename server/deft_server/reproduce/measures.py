"""What a cell of a table can show. Every number of a page is made here, from recorded lines alone.

Lengths and deviations are those of replayed frames, times those of frames that were timed; success
and what has `played` in its name are those of episodes played in closed loop.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType

import numpy as np

from deft_client.libero.report.difference import Difference, difference
from deft_client.libero.report.phases import ArmPhase, phases_of
from deft_client.libero.report.summary import RunSummary, SpeculationSummary, summarise
from deft_client.libero.report.tables import interval_text, points_text, success_text
from deft_client.libero.results.records import AnswerRecord
from deft_client.libero.results.store import RunResults
from deft_policies.benchmark.full_size import action_ms
from deft_policies.benchmark.speedup import expected_speedup
from deft_server.reproduce.study import ReproductionError, Row

MARGIN = 0.05  # of success, in shares: a loss as large as this is to be ruled out
NOTHING = "–"


@dataclass(frozen=True)
class Cell:
    """What a reader sees, and the number that a plot or a sheet takes."""

    text: str = NOTHING
    value: float | None = None


@dataclass(frozen=True, eq=False)
class RowResults:
    """A row's lines and those of its baseline; None where there are none."""

    row: Row
    replayed: RunResults | None = None
    timed: RunResults | None = None
    played: RunResults | None = None
    plain: "RowResults | None" = None  # None: it is the baseline itself

    @property
    def baseline(self) -> "RowResults":
        """What ratios and differences refer to."""
        return self.plain or self

    @cached_property
    def summary(self) -> RunSummary | None:
        """Of the replayed frames."""
        return None if self.replayed is None else summarise(self.replayed)

    @cached_property
    def timed_summary(self) -> RunSummary | None:
        """Of the frames that were timed."""
        return None if self.timed is None else summarise(self.timed)

    @cached_property
    def played_summary(self) -> RunSummary | None:
        """Of the episodes played."""
        return None if self.played is None else summarise(self.played)

    @property
    def speculation(self) -> SpeculationSummary | None:
        """Of the replayed frames; None where nothing was ever drafted."""
        found = None if self.summary is None else self.summary.speculation
        return found if found is not None and found.accepted_counts else None

    @cached_property
    def answers(self) -> tuple[AnswerRecord, ...]:
        """Of all replayed frames."""
        return _answers(self.replayed)

    @cached_property
    def timed_answers(self) -> tuple[AnswerRecord, ...]:
        """Of all frames that were timed."""
        return _answers(self.timed)

    @cached_property
    def full_size_ms(self) -> float | None:
        """What a replayed frame takes there; None where something drafts at an unknown cost."""
        levels = "" if self.replayed is None else self.replayed.header.options["head_levels"]
        if not levels:
            return None
        counted = [action_ms(one.guesses, one.accepted, int(levels)) for one in self.answers]
        return float(np.mean(counted))

    @cached_property
    def apart(self) -> Difference | None:
        """The replayed answers beside the baseline's."""
        return self._difference(self.replayed, self.baseline.replayed)

    @cached_property
    def played_apart(self) -> Difference | None:
        """The played episodes beside the baseline's; None for the baseline itself."""
        return self._difference(self.played, self.plain.played if self.plain else None)

    def _difference(self, own: RunResults | None, plain: RunResults | None) -> Difference | None:
        if own is None or plain is None:
            return None
        return difference(plain, own, (self.baseline.row.name, self.row.name), MARGIN)


def _answers(run: RunResults | None) -> tuple[AnswerRecord, ...]:
    return () if run is None else tuple(one for record in run.records for one in record.answers)


@dataclass(frozen=True)
class Measure:
    """A column: its heading, where {} stands for the number in its name, and its cell."""

    heading: str
    cell: Callable[[RowResults, str], Cell]
    is_time: bool = False  # of this machine, from the frames that were timed


def find_measure(name: str) -> tuple[Measure, str]:
    """The measure of a name and what stands behind the colon; `ReproductionError` if unknown."""
    key, _, number = name.partition(":")
    if key not in MEASURES:
        raise ReproductionError(f"unknown measure {name!r}; known: {', '.join(MEASURES)}")
    return MEASURES[key], number


def heading_of(name: str) -> str:
    """The column heading of a measure by name."""
    measure, number = find_measure(name)
    return measure.heading.replace("{}", number)


def cell_of(name: str, results: RowResults) -> Cell:
    """One cell."""
    measure, number = find_measure(name)
    return measure.cell(results, number)


def _number(value: float | None, form: str = ".2f", unit: str = "") -> Cell:
    if value is None or not np.isfinite(value):
        return Cell()
    return Cell(f"{value:{form}}{unit}", value)


def _success(results: RowResults, _: str) -> Cell:
    found = results.played_summary
    return Cell() if found is None else Cell(success_text(found.successes), found.successes.share)


def _interval(results: RowResults, _: str) -> Cell:
    found = results.played_summary
    return Cell() if found is None else Cell(interval_text(found.successes))


def _verdict(results: RowResults, _: str) -> Cell:
    found = results.played_apart
    if found is None or not found.comparison.num_pairs:
        return Cell()
    if found.is_not_worse:
        return Cell("not worse")
    return Cell("worse" if found.interval.high < 0 else "open")


def _points(results: RowResults, _: str) -> Cell:
    found = results.played_apart
    if found is None or not found.comparison.num_pairs:
        return Cell()
    one = found.comparison
    is_same = one.num_same_actions == one.num_pairs
    return Cell("the same actions" if is_same else points_text(found.interval), one.difference)


def _of_frames(heading: str, pick: Callable[[RunSummary], float], form: str) -> Measure:
    return Measure(heading, lambda one, _: _number(_maybe(pick, one.summary), form))


def _of_times(heading: str, pick: Callable[[RunSummary], float], form: str) -> Measure:
    return Measure(heading, lambda one, _: _number(_maybe(pick, one.timed_summary), form), True)


def _maybe(pick: Callable[[RunSummary], float], found: RunSummary | None) -> float | None:
    return None if found is None else pick(found)


def _share(results: RowResults, length: str) -> Cell:
    """Of the passes that checked drafts, those that kept this many."""
    found = results.speculation
    if found is None:
        return Cell()
    kept = found.accepted_counts.get(int(length), 0)
    return _number(100 * kept / sum(found.accepted_counts.values()), ".1f", "%")


def _start(results: RowResults, position: str) -> Cell:
    """Mean accepted length of the passes whose first draft stands at token `position` of 1..7."""
    found = results.speculation
    spread = None if found is None else found.committed_by_position.get(int(position) - 1)
    return _number(None if spread is None else spread.mean - 1)


def _equal(results: RowResults, _: str) -> Cell:
    own, plain = results.replayed, results.baseline.replayed
    if own is None or plain is None:
        return Cell()
    others = {one.key: one.actions for one in plain.records}
    pairs = [(one.actions, others[one.key]) for one in own.records if one.key in others]
    if not pairs:
        return Cell()
    same = np.concatenate(
        [(mine[: len(its)] == its[: len(mine)]).all(axis=1) for mine, its in pairs]
    )
    return _number(100 * same.sum() / len(same), ".1f", "%")


def _deviation(results: RowResults, unit: str) -> Cell:
    found = results.apart
    whole = None if found is None or not found.deviations else found.deviations[-1]
    return _number(None if whole is None else whole.mm if unit == "mm" else whole.deg)


def _median_ms(results: RowResults) -> float | None:
    return _maybe(lambda one: one.round_trip.p50, results.timed_summary)


def _judging(results: RowResults, _: str) -> Cell:
    """Milliseconds that choosing what stands takes after a pass."""
    passes = sum(len(one.accepted) for one in results.timed_answers)
    spent = sum(one.timings.judge_ms for one in results.timed_answers)
    return _number(spent / passes if passes else None)


def _speedup(results: RowResults, _: str) -> Cell:
    own, plain = _median_ms(results), _median_ms(results.baseline)
    return _number(plain / own if own and plain else None, ".2f", "x")


def _full_speedup(results: RowResults, _: str) -> Cell:
    own, plain = results.full_size_ms, results.baseline.full_size_ms
    return _number(plain / own if own and plain else None, ".2f", "x")


def _phase_passes(results: RowResults, name: str) -> Cell:
    """Passes per action in one phase; phases are those of the frames' own episode."""
    own, plain = results.replayed, results.baseline.replayed
    if own is None or plain is None:
        return Cell()
    known = {one.key: phases_of(one.actions) for one in plain.records}
    counted = [
        len(answer.accepted)
        for one in own.records
        for answer, phase in zip(one.answers, known.get(one.key, ()), strict=False)
        if phase is ArmPhase(name)
    ]
    return _number(float(np.mean(counted)) if counted else None)


@dataclass(frozen=True)
class _Drafting:
    """What drafting cost and brought behind the prefill, of chains; as `benchmark.speedup` has it.

    There a pass knows its tree; here guesses of a chain are its levels.
    """

    acceptance: float
    length: float
    cost: float  # of a level, in plain passes
    gained: float


def _drafting(results: RowResults) -> _Drafting | None:
    own, plain = results.timed_answers, results.baseline.timed_answers
    num_plain = sum(len(one.accepted) - 1 for one in plain)
    passes = [
        (kept, levels)
        for one in own
        for kept, levels in zip(one.accepted[1:], one.guesses[1:], strict=True)
    ]
    checked = [(kept, levels) for kept, levels in passes if levels]
    spent = sum(one.timings.draft_ms + one.timings.verify_ms for one in own)
    if not num_plain or not checked or not spent:
        return None
    pass_ms = sum(one.timings.verify_ms for one in plain) / num_plain
    levels = sum(one for _, one in checked)
    return _Drafting(
        acceptance=sum(kept for kept, _ in checked)
        / sum(min(one[0] + 1, one[1]) for one in checked),
        length=levels / len(checked),
        cost=sum(one.timings.draft_ms for one in own) / levels / pass_ms,
        gained=sum(kept + 1 for kept, _ in passes) * pass_ms / spent,
    )


def _lesson(results: RowResults, name: str) -> Cell:
    found = _drafting(results)
    if found is None:
        return Cell()
    if name == "predicted":
        return _number(expected_speedup(found.acceptance, found.length, found.cost), ".2f", "x")
    return _number(getattr(found, name), ".2f", "x" if name == "gained" else "")


def _rate(results: RowResults) -> float | None:
    spent = _median_ms(results)
    return 1000 * results.row.batch / spent if spent else None


def _rate_gain(results: RowResults, _: str) -> Cell:
    own, plain = _rate(results), _rate(results.baseline)
    return _number(own / plain if own and plain else None, ".2f", "x")


def _passes(found: RunSummary) -> float:
    return found.speculation.passes_per_action if found.speculation else float("nan")


MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "success": Measure("success", _success),
        "interval": Measure("95%", _interval),
        "points": Measure("minus plain, points, 95%", _points),
        "verdict": Measure(f"a loss of {100 * MARGIN:g} points ruled out", _verdict),
        "played-passes": Measure(
            "passes, played", lambda one, _: _number(_maybe(_passes, one.played_summary))
        ),
        "frames": _of_frames("frames", lambda one: one.num_answers, ".0f"),
        "passes": _of_frames("passes per action", _passes, ".2f"),
        "committed": Measure(
            "committed length",
            lambda one, _: _number(one.speculation.committed_length if one.speculation else None),
        ),
        "relaxed": Measure(
            "relaxed tokens",
            lambda one, _: _number(
                100 * one.speculation.relaxed_share if one.speculation else None, ".1f", "%"
            ),
        ),
        "equal": Measure("actions equal to plain's", _equal),
        "mm": Measure("mm from plain's", lambda one, _: _deviation(one, "mm")),
        "deg": Measure("degrees from plain's", lambda one, _: _deviation(one, "deg")),
        "accepted": Measure("{} accepted", _share),
        "start": Measure("from t{}", _start),
        "phase": Measure("passes in {}", _phase_passes),
        "p50": Measure("ms, median", lambda one, _: _number(_median_ms(one), ".1f"), is_time=True),
        "prefill-ms": _of_times("prefill ms", lambda one: _stage(one, "prefill_ms"), ".0f"),
        "vision-ms": _of_times("vision ms", lambda one: _stage(one, "vision_ms"), ".0f"),
        "later-ms": _of_times("ms of later passes", lambda one: _stage(one, "verify_ms"), ".0f"),
        "judge-ms": Measure("judging, ms a pass", _judging, is_time=True),
        "draft-ms": _of_times("drafting ms", lambda one: _stage(one, "draft_ms"), ".1f"),
        "speedup": Measure("speed-up here", _speedup, is_time=True),
        "full-size": Measure(
            "OpenVLA-7B on an H200, ms (predicted)",
            lambda one, _: _number(one.full_size_ms, ".1f"),
        ),
        "full-speedup": Measure("speed-up there (predicted)", _full_speedup),
        "lesson": Measure("{}", _lesson, is_time=True),
        "rate": Measure(
            "actions per second", lambda one, _: _number(_rate(one), ".1f"), is_time=True
        ),
        "rate-gain": Measure("times plain's at this batch", _rate_gain, is_time=True),
    }
)


def _stage(found: RunSummary, name: str) -> float:
    return found.stages[name].p50 if name in found.stages else float("nan")
