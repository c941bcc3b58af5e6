"""Tables of evaluations that belong to no study: what `deft-client eval` played, from its lines."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from deft_core.measures.speculation import Speculation
from deft_core.measures.speed import SpeedUp
from deft_core.measures.table import NOTHING, Column, column_table, markdown_table
from deft_libero.report.difference import Comparison, compare, points_text
from deft_libero.report.speed import baseline_of, decoding_of, speedup_of
from deft_libero.report.summary import RunSummary, summarise
from deft_libero.report.tables import interval_text, notes_of, success_text
from deft_libero.results.store import RunResults, load_runs, weights_of
from scripts.reproduce.measures import MARGIN
from scripts.reproduce.study import ReproductionError


@dataclass(frozen=True, eq=False)
class Played:
    """A run and the one that it is compared with; none for a baseline."""

    run: RunResults
    baseline: RunResults | None

    @cached_property
    def summary(self) -> RunSummary:
        """Its numbers."""
        return summarise(self.run)

    @cached_property
    def speedup(self) -> SpeedUp | None:
        """Over the baseline."""
        return speedup_of(self.run, self.baseline)


def _apart(one: Played, margin: float = MARGIN) -> Comparison | None:
    run, baseline = one.run, one.baseline
    if baseline is None:
        return None
    found = compare(baseline, run, (baseline.header.name, run.header.name), margin)
    return found if found.num_pairs else None


def _points(one: Played) -> str:
    found = _apart(one)
    if found is None:
        return NOTHING
    if found.has_identical_actions:
        return f"the same actions in {found.num_pairs} episodes"
    return f"{points_text(found.interval)} ({found.num_pairs} starts)"


def _is_ruled_out(one: Played) -> str:
    found = _apart(one, _LOSS)
    if found is None:
        return NOTHING
    return "yes" if found.is_not_worse else "no" if found.interval.high < 0 else "open"


def _of_passes(text: Callable[[Speculation], str]) -> Callable[[Played], str]:
    def cell(one: Played) -> str:
        return text(one.summary.speculation) if one.summary.speculation else NOTHING

    return cell


def _mean_ms(stage: str) -> Callable[[Played], str]:
    def cell(one: Played) -> str:
        timings = [answer.timings for it in one.run.records for answer in it.answers]
        spent: list[float] = [getattr(each, stage) for each in timings]
        return f"{sum(spent) / len(spent):.1f}" if any(spent) else NOTHING

    return cell


def _times(one: Played) -> str:
    found = one.speedup
    if found is None or found.doubts:
        return NOTHING
    return f"{found.times:.2f} ({found.interval:.2f}; {found.of_medians:.2f} by medians)"


_LOSS = 0.10  # of success, in shares: what the last evaluation is to rule out
_SUCCESS = (
    Column[Played]("run", lambda one: one.run.header.name),
    Column[Played](
        "success",
        lambda one: success_text(one.summary.successes),
        "episodes that reached the goal, of those played to their end",
    ),
    Column[Played](
        "95%", lambda one: interval_text(one.summary.successes), "Wilson's interval of the success"
    ),
)
_PASSES = Column[Played](
    "passes",
    _of_passes(lambda one: f"{one.passes_per_action:.2f}"),
    "forward passes of the model for an action, prefill included",
)
_BESIDE = (
    *_SUCCESS,
    Column(
        "minus the first row's, points (95%)",
        _points,
        "the paired difference of success, on the same starts (Bonett and Price)",
    ),
    Column(
        f"a loss of {100 * _LOSS:g} points is ruled out",
        _is_ruled_out,
        "yes: by that interval at most so many points worse; no: worse; "
        "open: too few episodes to tell",
    ),
    _PASSES,
)
_RUNS = (
    *_SUCCESS,
    Column[Played](
        "errored",
        lambda one: str(one.summary.successes.num_errored or NOTHING),
        "episodes in which a tool broke; they count neither way",
    ),
    Column(
        "minus plain's, points (95%)",
        _points,
        "the paired difference of success to plain decoding, on the starts that both have",
    ),
    _PASSES,
    Column(
        "text",
        _of_passes(lambda one: f"{one.thinking.text_passes:.2f}" if one.thinking else NOTHING),
        "of these, passes for what it writes before the action",
    ),
    Column(
        "committed",
        _of_passes(lambda one: f"{one.committed_length:.2f}" if one.num_checked else NOTHING),
        "tokens that a pass with drafts commits: the accepted ones and one more",
    ),
)
_TIMES = (
    Column[Played]("run", lambda one: one.run.header.name),
    Column(
        "ms an action",
        _mean_ms("round_trip_ms"),
        "from the frame sent to the action received, mean over all frames",
    ),
    Column("of these, by the server", _mean_ms("total_ms"), "waiting and computing"),
    Column(
        "times as fast (95%)",
        _times,
        "milliseconds of plain decoding, or else of the first row, over the row's: "
        "sums over the same episodes, played in turn; the interval is of drawing episodes anew",
    ),
)


def runs_table(path: Path) -> str:
    """A row for every run in a folder or in a file of packed ones."""
    runs = load_runs(path)
    said = [*_starts(runs), *notes_of(runs, [one.header.name for one in runs])]
    return _table(_RUNS, _with_baselines(runs), said)


def beside_table(path: Path, folder: str) -> str:
    """Every run beside one of them, which comes first, whatever else differs."""
    runs = {run.folder.name: run for run in load_runs(path)}
    if folder not in runs:
        raise ReproductionError(f"{path} has no run {folder}; it has {', '.join(runs)}")
    first = runs.pop(folder)
    rows = [Played(first, None), *(Played(run, first) for run in runs.values())]
    every = [one.run for one in rows]
    said = [*_starts(every), *notes_of(every, [run.header.name for run in every])]
    return _table(_BESIDE, rows, said)


def times_table(path: Path) -> str:
    """How long answers took, and how many times sooner than plain decoding's they came."""
    runs = load_runs(path)
    doubts = [
        one.speedup.sentence(decoding_of(one.run), "plain decoding")
        for one in _with_baselines(runs)
        if one.speedup is not None and one.speedup.doubts
    ]
    notes = [*_starts(runs), f"weights {weights_of(runs)}", *doubts]
    return _table(_TIMES, _with_baselines(runs), notes)


def _table(columns: Sequence[Column[Played]], rows: Sequence[Played], notes: list[str]) -> str:
    table = column_table(columns, rows)
    return (table + "".join(f"- {one}\n" for one in notes)).rstrip()


def _with_baselines(runs: Sequence[RunResults]) -> list[Played]:
    return [Played(run, baseline_of(run, runs)) for run in runs]


def _starts(runs: Sequence[RunResults]) -> Iterator[str]:
    """What was played, by suite and assets."""
    played: dict[str, set[int]] = {}
    for run in runs:
        trials = played.setdefault(f"{run.header.suite}, assets {run.header.assets}", set())
        trials.update(one.key.trial for one in run.records)
    for what, trials in played.items():
        yield f"{what}: initial states {min(trials)} to {max(trials)}"


def tasks_table(path: Path) -> str:
    """Success by task: a row for every task, a column for every run."""
    runs = load_runs(path)
    summaries = [summarise(run) for run in runs]
    cells = {
        (*key, task.instruction, at): success_text(task.successes)
        for at, one in enumerate(summaries)
        for key, task in one.tasks.items()
    }
    rows = [
        [*map(str, key), *(cells.get((*key, at), NOTHING) for at in range(len(summaries)))]
        for key in sorted({key[:3] for key in cells})
    ]
    names = [one.header.name for one in summaries]
    table = markdown_table(["suite", "task", "instruction", *names], rows)
    return f"{table}\n- weights {weights_of(runs)}"


BESIDE = "beside"  # a run, whose folder's name follows
TABLES = {"runs": runs_table, "tasks": tasks_table, "times": times_table}


def table_of(path: Path, key: str) -> str:
    """What a page quotes as PATH#KEY."""
    name, _, folder = key.partition("/")
    if name == BESIDE:
        return beside_table(path, folder)
    if key not in TABLES:
        known = ", ".join((*TABLES, f"{BESIDE}/RUN"))
        raise ReproductionError(f"{path} has no {key}; it has {known}")
    return TABLES[key](path)
