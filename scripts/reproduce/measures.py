"""What a cell of a table can show. Every number of a page is made here, from recorded lines alone.

Lengths and deviations are those of replayed frames, times those of frames that were timed; success
and what has `played` in its name are those of episodes played in closed loop.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType

import numpy as np

from deft_core.measures.answers import AnswerRecord
from deft_core.measures.speculation import Speculation, speculation_of
from deft_core.measures.speed import SpeedUp, speed_up
from deft_core.measures.statistics import LEAST_EPISODES, bootstrap_interval
from deft_core.measures.table import NOTHING, share_text
from deft_libero.report.difference import PHASES, Comparison, compare, phases_of, points_text
from deft_libero.report.speed import speedup_of
from deft_libero.report.summary import RunSummary, summarise
from deft_libero.report.tables import interval_text, success_text
from deft_libero.results.store import RunResults
from scripts.reproduce.study import ReproductionError, Row

MARGIN = 0.05  # of success, in shares: a loss as large as this is to be ruled out


@dataclass(frozen=True, eq=False)
class RowResults:
    """A row's lines and those of its baseline; None where there are none.

    `played` has the starts that the table compares; `few` says of how many of them a row was
    played that has not all, and is therefore not compared.
    """

    row: Row
    replayed: RunResults | None = None
    timed: RunResults | None = None
    played: RunResults | None = None
    plain: "RowResults | None" = None  # None: it is the baseline itself
    few: str = ""

    @property
    def baseline(self) -> "RowResults":
        """What ratios and differences refer to."""
        return self.plain or self

    @property
    def drafted(self) -> Speculation | None:
        """Of the replayed frames; None where nothing was ever drafted."""
        summary = summary_of(self.replayed)
        found = None if summary is None else summary.speculation
        return found if found is not None and found.num_checked else None

    @cached_property
    def speedup(self) -> SpeedUp | None:
        """Of the frames that were timed; None for the baseline itself."""
        if self.timed is None or self.plain is None:
            return None
        return speedup_of(self.timed, self.plain.timed)

    @cached_property
    def apart(self) -> Comparison | None:
        """The replayed answers beside the baseline's."""
        return self._difference(self.replayed, self.baseline.replayed)

    @cached_property
    def played_apart(self) -> Comparison | None:
        """The played episodes beside the baseline's; None for the baseline, and where few were."""
        plain = self.plain.played if self.plain and not self.few else None
        found = self._difference(self.played, plain)
        return found if found is not None and found.num_pairs else None

    def _difference(self, own: RunResults | None, plain: RunResults | None) -> Comparison | None:
        if own is None or plain is None:
            return None
        return compare(plain, own, (self.baseline.row.name, self.row.name), MARGIN)


Cell = tuple[str, float | None]  # what a reader sees, and the number that a plot takes
_EMPTY: Cell = (NOTHING, None)


@dataclass(frozen=True)
class Measure:
    """A column: its heading, where {} stands for the number in its name, and its cell."""

    heading: str
    meaning: str
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


@cache
def summary_of(run: RunResults | None) -> RunSummary | None:
    """Of all episodes."""
    return None if run is None else summarise(run)


@cache
def speculations_of(run: RunResults | None) -> list[Speculation]:
    """Of each episode that has answers with a trace: several columns and tables take it."""
    found = [speculation_of(record.answers) for record in run.records] if run else []
    return [one for one in found if one is not None]


def answers_of(run: RunResults | None) -> list[AnswerRecord]:
    """Of all episodes."""
    return [] if run is None else [one for record in run.records for one in record.answers]


def _number(value: float | None, form: str = ".2f", unit: str = "") -> Cell:
    return _EMPTY if value is None or not np.isfinite(value) else (f"{value:{form}}{unit}", value)


def _ratio(total: float, count: float, form: str = ".2f", unit: str = "") -> Cell:
    return _number(total / count if count else None, form, unit)


def _success(results: RowResults, _: str) -> Cell:
    found = summary_of(results.played)
    if found is None:
        return _EMPTY
    return success_text(found.successes) + results.few, found.successes.share


def _interval(results: RowResults, _: str) -> Cell:
    found = summary_of(results.played)
    return _EMPTY if found is None else (interval_text(found.successes), None)


def _verdict(results: RowResults, _: str) -> Cell:
    found = results.played_apart
    if found is None:
        return _EMPTY
    return "yes" if found.is_not_worse else "no" if found.interval.high < 0 else "open", None


def _points(results: RowResults, _: str) -> Cell:
    found = results.played_apart
    if found is None:
        return _EMPTY
    text = "the same actions" if found.has_identical_actions else points_text(found.interval)
    return text, found.difference


def _frames(results: RowResults, _: str) -> Cell:
    found = summary_of(results.replayed)
    return _number(None if found is None else found.num_answers, ".0f")


def _share(results: RowResults, length: str) -> Cell:
    found = results.drafted
    return _number(None if found is None else 100 * found.share_of_length(int(length)), ".1f", "%")


def _start(results: RowResults, token: str) -> Cell:
    found = results.drafted
    mean, _ = (found.committed_by_start if found else {}).get(int(token) - 1, (float("nan"), 0))
    return _number(mean - 1)


def _share_equal(own: RunResults | None, plain: RunResults | None) -> Cell:
    if own is None or plain is None:
        return _EMPTY
    others = {one.key: one.actions for one in plain.records}
    pairs = [(one.actions, others[one.key]) for one in own.records if one.key in others]
    same = [(a[: len(b)] == b[: len(a)]).all(axis=1) for a, b in pairs]
    num_same, num = sum(int(one.sum()) for one in same), sum(map(len, same))
    return (share_text(num_same / num), 100 * num_same / num) if num else _EMPTY


def _deviation_of(index: int) -> Callable[[RowResults, str], Cell]:
    return lambda results, _: _number(results.apart.apart[index] if results.apart else None)


def _judging(results: RowResults, _: str) -> Cell:
    answers = answers_of(results.timed)
    passes = sum(len(one.accepted) for one in answers)
    return _ratio(sum(one.timings.judge_ms for one in answers), passes)


def _speedup(results: RowResults, _: str) -> Cell:
    found = results.speedup
    if found is None or found.doubts:
        return _EMPTY
    text = f"{found.times:.2f}x ({found.interval:.2f}; medians {found.of_medians:.2f}x)"
    return text, found.times


def _ms_behind(answer: AnswerRecord) -> float:
    spent = answer.timings
    return spent.draft_ms + spent.verify_ms + spent.judge_ms + spent.commit_ms


def _mean_behind(results: RowResults, _: str) -> Cell:
    answers = answers_of(results.timed)
    return _ratio(sum(map(_ms_behind, answers)), len(answers), ".1f")


def _speedup_behind(results: RowResults, _: str) -> Cell:
    whole, own, plain = results.speedup, results.timed, results.baseline.timed
    if whole is None or whole.doubts or own is None or plain is None:
        return _EMPTY
    others = {one.key: one for one in plain.records}
    pairs = [(others[one.key], one) for one in own.records if one.key in others]
    before, behind = (
        [[_ms_behind(one) for one in pair[side].answers] for pair in pairs] for side in (0, 1)
    )
    found = speed_up(before, behind)
    return f"{found.times:.2f}x ({found.interval:.2f})", found.times


def _phase_passes(results: RowResults, name: str) -> Cell:
    """Phases are those of the frames' own episode."""
    own, plain = results.replayed, results.baseline.replayed
    if own is None or plain is None:
        return _EMPTY
    known = {one.key: phases_of(one.actions) for one in plain.records}
    counted = [
        len(answer.accepted)
        for one in own.records
        for answer, phase in zip(one.answers, known.get(one.key, ()), strict=False)
        if phase == PHASES.index(name)
    ]
    return _ratio(sum(counted), len(counted))


def _by_formula(results: RowResults, name: str) -> Cell:
    """What drafting cost and brought behind the prefill, of chains: guesses are their levels."""
    own, plain = answers_of(results.timed), answers_of(results.baseline.timed)
    num_plain = sum(len(one.accepted) - 1 for one in plain)
    passes = [two for one in own for two in list(zip(one.accepted, one.guesses, strict=True))[1:]]
    checked = [(kept, levels) for kept, levels in passes if levels]
    spent = sum(one.timings.draft_ms + one.timings.verify_ms for one in own)
    if not num_plain or not checked or not spent:
        return _EMPTY
    pass_ms = sum(one.timings.verify_ms for one in plain) / num_plain
    levels = sum(count for _, count in checked)
    tries = sum(min(kept + 1, count) for kept, count in checked)
    acceptance, length = sum(kept for kept, _ in checked) / tries, levels / len(checked)
    cost = sum(one.timings.draft_ms for one in own) / levels / pass_ms
    found = {
        "acceptance": acceptance,
        "length": length,
        "cost": cost,
        "predicted": expected_speedup(acceptance, length, cost),
        "measured": sum(kept + 1 for kept, _ in passes) * pass_ms / spent,
    }
    return _number(found[name], ".2f", "x" if name in ("predicted", "measured") else "")


def expected_tokens(acceptance: float, length: float) -> float:
    """Tokens a pass commits where each of `length` drafts in a row stands with this chance.

    1 + a + ... + a^K = (1 - a^(K+1)) / (1 - a)
    """
    if acceptance >= 1.0:
        return length + 1
    missed: float = acceptance ** (length + 1)
    return (1 - missed) / (1 - acceptance)


def expected_speedup(acceptance: float, length: float, cost: float) -> float:
    """How many times faster than one token per pass; drafting one token costs `cost` passes."""
    return expected_tokens(acceptance, length) / (1 + length * cost)


def _rate(results: RowResults, _: str) -> Cell:
    spent = [one.timings.round_trip_ms for one in answers_of(results.timed)]
    return _ratio(1000 * results.row.batch * len(spent), sum(spent), ".1f")


def _passes(run: RunResults | None) -> Cell:
    return _drawn(run, lambda one: (one.num_passes, one.num_answers))


def _drawn(run: RunResults | None, counts: Callable[[Speculation], tuple[float, int]]) -> Cell:
    """A ratio of sums over episodes, with the interval of drawing them anew."""
    counted = np.array([counts(one) for one in speculations_of(run)], np.float64)
    if not len(counted) or not counted[:, 1].any():
        return _EMPTY
    value = float(counted[:, 0].sum() / counted[:, 1].sum())
    if len(counted) < LEAST_EPISODES:
        return _number(value)
    drawn = bootstrap_interval(counted, lambda sums: sums[:, 0] / sums[:, 1])
    interval = f" ({drawn:.2f})" if drawn.high > drawn.low else ""
    return _number(value, unit=interval)


def _stage(results: RowResults, name: str) -> Cell:
    """A median over the frames that were timed."""
    found = summary_of(results.timed)
    return _number(found.stages[name].p50 if found and name in found.stages else None, ".1f")


def _mean_ms(field: str) -> Callable[[RowResults, str], Cell]:
    def cell(results: RowResults, _: str) -> Cell:
        spent = [getattr(one.timings, field) for one in answers_of(results.timed)]
        return _ratio(sum(spent), len(spent), ".1f")

    return cell


def _pass_ms(results: RowResults, _: str) -> Cell:
    answers = answers_of(results.timed)
    passes = sum(max(len(one.accepted) - 1, 0) for one in answers)
    spent = sum(one.timings.verify_ms for one in answers)
    return _ratio(spent, passes, ".1f")


def _committed(results: RowResults, _: str) -> Cell:
    return _drawn(
        results.replayed, lambda one: (one.num_checked * one.committed_length, one.num_checked)
    )


def _without_action(results: RowResults, _: str) -> Cell:
    records = () if results.replayed is None else results.replayed.records
    steps = sum(len(one.answers) for one in records)
    return _ratio(100 * sum(one.held_steps for one in records), steps, ".1f", "%")


def _relaxed(results: RowResults, _: str) -> Cell:
    found = results.drafted
    return _number(100 * found.relaxed_share if found else None, ".1f", "%")


def legend_of(names: Iterator[str]) -> list[tuple[str, str]]:
    """Heading and meaning of measures, each once."""
    found = dict.fromkeys(find_measure(name)[0] for name in names)
    return [(one.heading.replace("{}", "n"), one.meaning) for one in found]


_A_MEDIAN = "; median over the frames that were timed"
MEASURES: Mapping[str, Measure] = MappingProxyType(
    {
        "success": Measure(
            "success", "episodes that reached the goal, of those played to their end", _success
        ),
        "interval": Measure("95%", "Wilson's interval of the success", _interval),
        "points": Measure(
            "success minus plain's, points (95%)",
            "interval of the paired difference, on the same starts (Bonett and Price)",
            _points,
        ),
        "verdict": Measure(
            f"a loss of {100 * MARGIN:g} points is ruled out",
            "yes where that interval lies above it or all actions are plain's; no where the row is "
            "worse; else open: more episodes would decide",
            _verdict,
        ),
        "played-passes": Measure(
            "passes, played",
            "forward passes of the model for an action in the played episodes, prefill included",
            lambda one, _: _passes(one.played),
        ),
        "frames": Measure(
            "frames",
            "how many recorded frames were answered",
            _frames,
        ),
        "passes": Measure(
            "passes",
            "forward passes of the model for an action, prefill included, "
            "with a 95% interval over episodes",
            lambda one, _: _passes(one.replayed),
        ),
        "committed": Measure(
            "committed length",
            "tokens that a pass with drafts commits, the accepted ones and one more, "
            "with a 95% interval over episodes",
            _committed,
        ),
        "no-action": Measure(
            "answers without an action",
            "share of the frames whose text ends in none; the robot would hold",
            _without_action,
        ),
        "relaxed": Measure(
            "relaxed tokens",
            "executed tokens that are not the model's own greedy choice",
            _relaxed,
        ),
        "equal": Measure(
            "equal actions",
            "actions whose tokens are all those of plain decoding",
            lambda one, _: _share_equal(one.replayed, one.baseline.replayed),
        ),
        "served-passes": Measure(
            "passes, as served",
            "forward passes for an action of the frames that were timed, with the plans that the "
            "guard chose",
            lambda one, _: _passes(one.timed),
            is_time=True,
        ),
        "served-equal": Measure(
            "equal actions, as served",
            "actions of the timed frames whose tokens are all those of plain decoding",
            lambda one, _: _share_equal(one.timed, one.baseline.timed),
            is_time=True,
        ),
        "mm": Measure("mm from plain", "mean distance of the commanded motions", _deviation_of(0)),
        "deg": Measure(
            "degrees from plain", "mean distance of the commanded turns", _deviation_of(1)
        ),
        "accepted": Measure(
            "{} accepted", "share of the passes with guesses that accepted so many", _share
        ),
        "start": Measure(
            "from t{}", "mean accepted length of the passes whose first guess is that token", _start
        ),
        "phase": Measure(
            "passes in {}", "passes for an action while the arm is about to do that", _phase_passes
        ),
        "p50": Measure(
            "ms",
            "a whole answer" + _A_MEDIAN,
            lambda one, _: _stage(one, "round_trip_ms"),
            is_time=True,
        ),
        "judge-ms": Measure(
            "acceptance, ms a pass", "choosing which drafts are accepted", _judging, is_time=True
        ),
        "draft-ms": Measure(
            "drafting ms",
            "making guesses" + _A_MEDIAN,
            lambda one, _: _stage(one, "draft_ms"),
            is_time=True,
        ),
        "mean-ms": Measure("ms, mean", "a whole answer", _mean_ms("round_trip_ms"), is_time=True),
        "mean-vision": Measure(
            "vision ms", "towers and projector", _mean_ms("vision_ms"), is_time=True
        ),
        "mean-prefill": Measure(
            "prefill ms", "with the drafts in it", _mean_ms("prefill_ms"), is_time=True
        ),
        "mean-draft": Measure(
            "drafting ms, mean", "making guesses", _mean_ms("draft_ms"), is_time=True
        ),
        "pass-ms": Measure(
            "ms a later pass", "the model over the guesses of one pass", _pass_ms, is_time=True
        ),
        "speedup": Measure(
            "times as fast here",
            "plain decoding's milliseconds over the row's: ratio of sums over the same frames, "
            "rows in turn, with the interval of drawing episodes anew, and the ratio of medians",
            _speedup,
            is_time=True,
        ),
        "behind-ms": Measure(
            "ms behind the prefill, mean",
            "drafting, later passes and choosing what is accepted",
            _mean_behind,
            is_time=True,
        ),
        "behind": Measure(
            "times as fast behind the prefill",
            "the same ratio of these milliseconds alone",
            _speedup_behind,
            is_time=True,
        ),
        "formula": Measure(
            "{}",
            "behind the prefill: acceptance is the chance that a draft is accepted, length the "
            "guesses of a pass, cost that of one guess in plain passes; predicted follows from "
            "these three, measured is committed tokens over the time spent",
            _by_formula,
            is_time=True,
        ),
        "rate": Measure("actions per second", "of the whole batch", _rate, is_time=True),
    }
)
