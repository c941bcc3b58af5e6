"""Tables of evaluations that belong to no study: what `deft-client eval` played, from its lines."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from deft_client.libero.report.difference import compare, points_text
from deft_client.libero.report.speed import baseline_of, decoding_of, speedup_of
from deft_client.libero.report.summary import RunSummary, summarise
from deft_client.libero.report.tables import interval_text, other_starts, success_text
from deft_client.libero.results.store import RunResults, load_runs
from deft_client.measures.table import legend, markdown_table, without_empty
from scripts.reproduce.measures import MARGIN, NOTHING
from scripts.reproduce.study import ReproductionError

_AGAINST = "minus plain's, points (95%)"
_MEANINGS = {
    "success": "episodes that reached the goal, of those played to their end",
    "95%": "Wilson's interval of the success",
    "errored": "episodes in which a tool broke; they count neither way",
    _AGAINST: "the paired difference of success to plain decoding, on the starts that both have",
    "passes": "forward passes of the model for an action, prefill included",
    "text": "of these, passes for what it writes before the action",
    "committed": "tokens that a pass with guesses settles: the accepted ones and one more",
}
_TIMES = {
    "ms an action": "from the frame sent to the action received, mean over all frames",
    "times as fast (95%)": "plain decoding's milliseconds over the method's, sums over the same "
    "episodes, played in turn; the interval is of drawing episodes anew",
}


def runs_table(path: Path) -> str:
    """A row for every run in a folder or in a file of packed ones."""
    runs = load_runs(path)
    columns, rows = without_empty(("run", *_MEANINGS), list(_rows(runs)), NOTHING)
    said = [*_starts(runs), *other_starts(runs, [one.header.name for one in runs])]
    notes = "".join(f"- {one}\n" for one in said)
    return "\n".join([markdown_table(columns, rows), legend(columns, _MEANINGS) + notes]).rstrip()


def _starts(runs: Sequence[RunResults]) -> Iterator[str]:
    """What was played, by suite and assets."""
    played: dict[str, set[int]] = {}
    for run in runs:
        trials = played.setdefault(f"{run.header.suite}, assets {run.header.assets}", set())
        trials.update(one.key.trial for one in run.records)
    for what, trials in played.items():
        yield f"{what}: initial states {min(trials)} to {max(trials)}"


def _rows(runs: Sequence[RunResults]) -> Iterator[list[str]]:
    for run in runs:
        found = summarise(run)
        errored = found.successes.num_errored
        yield [
            run.header.name,
            success_text(found.successes),
            interval_text(found.successes),
            str(errored) if errored else NOTHING,
            _points(run, baseline_of(run, runs)),
            *_lengths(found),
        ]


def _points(run: RunResults, baseline: RunResults | None) -> str:
    if baseline is None:
        return NOTHING
    found = compare(baseline, run, (baseline.header.name, run.header.name), MARGIN)
    if not found.num_pairs:
        return NOTHING
    if found.has_identical_actions:
        return f"the same actions in {found.num_pairs} episodes"
    return f"{points_text(found.interval)} ({found.num_pairs} starts)"


def _lengths(found: RunSummary) -> tuple[str, str, str]:
    speculation = found.speculation
    if speculation is None:
        return NOTHING, NOTHING, NOTHING
    thinking = speculation.thinking
    return (
        f"{speculation.passes_per_action:.2f}",
        f"{thinking.text_passes:.2f}" if thinking else NOTHING,
        f"{speculation.committed_length:.2f}" if speculation.num_checked else NOTHING,
    )


def tasks_table(path: Path) -> str:
    """Success by task: a row for every task, a column for every run."""
    summaries = [summarise(run) for run in load_runs(path)]
    cells = {
        (task.suite, task.number, task.instruction, at): success_text(task.successes)
        for at, one in enumerate(summaries)
        for task in one.tasks
    }
    rows = [
        [*map(str, key), *(cells.get((*key, at), NOTHING) for at in range(len(summaries)))]
        for key in sorted({key[:3] for key in cells})
    ]
    names = [one.header.name for one in summaries]
    return markdown_table(["suite", "task", "instruction", *names], rows).rstrip()


def times_table(path: Path) -> str:
    """How long answers took, and how many times sooner than plain decoding's they came."""
    runs = load_runs(path)
    rows, doubts = [], []
    for run in runs:
        took_ms = [answer.timings.round_trip_ms for one in run.records for answer in one.answers]
        speed = speedup_of(run, baseline_of(run, runs))
        told = NOTHING
        if speed is not None and speed.doubts:
            doubts.append(speed.sentence(decoding_of(run), "plain decoding"))
        elif speed is not None:
            told = f"{speed.times:.2f} ({speed.interval_text}; {speed.of_medians:.2f} by medians)"
        mean = f"{sum(took_ms) / len(took_ms):.1f}" if took_ms else NOTHING
        rows.append([decoding_of(run), mean, told])
    columns, rows = without_empty(("method", *_TIMES), rows, NOTHING)
    notes = "".join(f"- {one}\n" for one in [*_starts(runs), *doubts])
    return "\n".join([markdown_table(columns, rows), legend(columns, _TIMES) + notes]).rstrip()


TABLES = {"runs": runs_table, "tasks": tasks_table, "times": times_table}


def table_of(path: Path, key: str) -> str:
    """What a page quotes as PATH#KEY."""
    if key not in TABLES:
        raise ReproductionError(f"{path} has no {key}; it has {', '.join(TABLES)}")
    return TABLES[key](path)
