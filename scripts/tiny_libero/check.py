"""What tiny-libero can do in episodes it was not trained on: every figure of its model card.

python -m scripts.tiny_libero check --out results/tiny_libero --lines docs/results/tiny_libero.jsonl

Plays trials of the tasks it was trained on with plain decoding and with speculation, and plainly
again with things moved by some centimetres; prints a row per run and PASS or FAIL per promise. A
killed check goes on with the same command. Which plan drafts is fixed (`--no-guard`), because what
is measured would change relaxed actions; how fast they are is measured with the guard, as `make
demo` does.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import numpy as np

from deft_client import PolicyClient
from deft_client.libero.commands import evaluate as evaluate_command
from deft_client.libero.evaluation.selection import TRAINED
from deft_client.libero.report.summary import RunSummary, summarise
from deft_client.libero.report.tables import LUCK, compare
from deft_client.libero.results.records import EpisodeRecord, Outcome
from deft_client.libero.results.store import RunResults, load_runs
from scripts import demo
from scripts.interleaved import MethodSpeed, speed_table
from scripts.local_server import local_server

PLAIN, LOSSLESS, DEFT = DECODINGS = demo.METHODS
STILL, STILL_STEPS = 0.02, 40  # commands of 1 are the fastest; two seconds of less than this
LEAST_FASTER = {LOSSLESS: 1.15, DEFT: 1.5}


@dataclass(frozen=True)
class PlayedRun:
    """One run."""

    decoding: str
    widened_cm: float
    run: RunResults

    @property
    def summary(self) -> RunSummary:
        return summarise(self.run)

    @property
    def passes(self) -> float:
        speculation = self.summary.speculation
        return speculation.passes_per_action if speculation else float("nan")

    @property
    def num_frozen(self) -> int:
        return sum(stands_still(one) for one in self.run.records)

    def line(self) -> dict[str, object]:
        """What is kept in the repository."""
        judged, bounds = self.summary.successes, self.summary.successes.interval
        return {
            "decoding": self.decoding,
            "widened_cm": self.widened_cm,
            "assets": self.run.header.assets,
            "succeeded": judged.num_succeeded,
            "judged": judged.num_judged,
            "errored": judged.num_errored,
            "wilson_95": [round(bounds.low, 3), round(bounds.high, 3)],
            "tasks": {
                one.instruction: f"{one.successes.num_succeeded}/{one.successes.num_judged}"
                for one in self.summary.tasks
            },
            "actions": self.summary.num_answers,
            "passes_per_action": round(self.passes, 3),
            "frozen_episodes": self.num_frozen,
        }


def stands_still(record: EpisodeRecord) -> bool:
    """Was the arm told to stay where it is for two seconds on end, in an episode that failed?"""
    is_still = np.abs(record.actions[:, :6]).max(axis=1) < STILL
    runs = (sum(1 for _ in steps) for still, steps in groupby(is_still.tolist()) if still)
    return record.outcome is Outcome.FAILED and max(runs, default=0) >= STILL_STEPS


def play(
    url: str, given: argparse.Namespace, decodings: Sequence[str], widened_cm: float
) -> list[PlayedRun]:
    """Play what is missing of runs."""
    folder = given.out / f"{widened_cm:g}cm"
    code = evaluate_command.main(
        [
            *(demo.SUITE, "--tasks", TRAINED, "--trials", given.trials),
            *("--url", url, "--stream", "--workers", "2", "--out", str(folder)),
            *("--decoding", *decodings, "--widen-cm", str(widened_cm)),
        ]
    )
    if code != evaluate_command.DONE:
        raise SystemExit(f"the evaluation ended with {code}; the same command goes on")
    return [PlayedRun(run.header.options["decoding"], widened_cm, run) for run in load_runs(folder)]


def play_all(given: argparse.Namespace) -> dict[tuple[str, float], PlayedRun]:
    """Every run, by decoding method and centimetres."""
    with local_server("--policy", "tiny-libero", "--no-guard", "--threads", "1") as url:
        runs = play(url, given, DECODINGS, 0.0)
        for moved in given.widen_cm:
            runs += play(url, given, [PLAIN], moved)
    return {(one.decoding, one.widened_cm): one for one in runs}


def measure() -> list[MethodSpeed]:
    """How fast one robot gets its answers, as the demonstration measures it."""
    threads = demo.server_threads()
    with local_server("--policy", "tiny-libero", "--threads", threads) as url:
        with PolicyClient(url) as client:
            info = client.info()
        return demo.compare(url, info, demo.choose_tasks(info))


Promise = tuple[str, str, bool]  # what must hold, the figure for it, and whether it does


def promises_of_success(runs: Mapping[tuple[str, float], PlayedRun]) -> Iterator[Promise]:
    """What must hold of the episodes."""
    plain, lossless, deft = (runs[decoding, 0.0] for decoding in DECODINGS)
    for (decoding, moved), one in runs.items():
        if decoding == PLAIN:
            judged, least = one.summary.successes, 0.7 if moved else 0.8
            told = f"{judged.share:.0%} ({judged.interval.low:.0%} to {judged.interval.high:.0%})"
            yield f"plain, moved by {moved:g} cm: {least:.0%}", told, judged.share >= least
    worst = min(plain.summary.tasks, key=lambda one: one.successes.share)
    told = f"{worst.successes.share:.0%} of {worst.instruction!r}"
    yield "plain: no task below 50%", told, worst.successes.share >= 0.5
    pair = compare(plain.run, lossless.run, PLAIN, LOSSLESS)
    told = f"{pair.num_same_actions} of {pair.num_pairs} episodes"
    yield "lossless acts as plain does, to the bit", told, pair.num_same_actions == pair.num_pairs
    pair = compare(plain.run, deft.run, PLAIN, DEFT)
    told = f"{pair.only_first} won by plain alone, {pair.only_second} by deft, p {pair.p_value:.2f}"
    is_worse = pair.only_first > pair.only_second and pair.p_value < LUCK
    yield "deft is not worse than plain (McNemar)", told, not is_worse
    told = ", ".join(f"{one.passes:.2f}" for one in (plain, lossless, deft))
    yield "deft takes the fewest passes", told, deft.passes < min(plain.passes, lossless.passes)


def promises_of_speed(speeds: Sequence[MethodSpeed]) -> Iterator[Promise]:
    """What must hold of the answers' times."""
    for one in speeds:
        rate = one.actions_per_s
        yield f"{one.method}: 20 actions a second over HTTP", f"{rate:.1f}", rate >= 20
        if least := LEAST_FASTER.get(one.method):
            told = f"{one.times_faster:.2f}, by formula {one.predicted:.2f}"
            yield f"{one.method}: {least} times plain", told, one.times_faster >= least


def print_rows(runs: Sequence[PlayedRun]) -> None:
    """One row per run."""
    print("| decoding | moved by | succeeded | 95% | passes | frozen |")
    print("|---|---|---|---|---|---|")
    for one in runs:
        judged = one.summary.successes
        print(
            f"| {one.decoding} | {one.widened_cm:g} cm | {judged.num_succeeded}/{judged.num_judged}"
            f" | {judged.interval.low:.0%} to {judged.interval.high:.0%} | {one.passes:.2f}"
            f" | {one.num_frozen} |"
        )


def main(arguments: list[str]) -> int:
    """Run the check; return its exit code."""
    parser = argparse.ArgumentParser("python -m scripts.tiny_libero check", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/tiny_libero"))
    parser.add_argument("--lines", type=Path, help="where to keep a line per run")
    parser.add_argument("--trials", default="40-49", help="[%(default)s]")
    parser.add_argument(
        "--widen-cm", type=float, nargs="*", default=[2.0], metavar="CM", help="play these plainly"
    )
    given = parser.parse_args(arguments)
    runs, speeds = play_all(given), measure()
    print_rows(list(runs.values()))
    print(speed_table(speeds))
    promises = [*promises_of_success(runs), *promises_of_speed(speeds)]
    for promise, figure, holds in promises:
        print(f"{'PASS' if holds else 'FAIL'}  {promise}: {figure}")
    if given.lines:
        given.lines.parent.mkdir(parents=True, exist_ok=True)
        lines = [*(one.line() for one in runs.values()), *map(asdict, speeds)]
        given.lines.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return 0 if all(holds for _, _, holds in promises) else 1
