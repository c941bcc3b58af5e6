"""What tiny-libero can do in episodes it was not trained on: every figure of its model card.

python -m scripts.check_tiny_libero --out results/tiny_libero --lines docs/results/tiny_libero.jsonl

Plays the same trials with plain decoding and with speculation, as they are and with things moved by
some centimetres, and prints a row per run and PASS or FAIL per promise. A killed check goes on with
the same command.
"""

import argparse
import json
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import httpx
import numpy as np

from deft_client import ActOptions, Observation, PolicyClient
from deft_client.libero.commands import evaluate as evaluate_command
from deft_client.libero.report.summary import RunSummary, summarise
from deft_client.libero.results.records import EpisodeRecord, Outcome
from deft_client.libero.results.statistics import Interval
from deft_client.libero.results.store import RunResults, load_run
from deft_policies.commands.act import load_image
from deft_server.reproduce.local_server import local_server

SUITE, TASKS, TRIALS = "libero_object", "0,6,7", "40-49"
PLAIN, LOSSLESS, DEFT = "autoregressive", "lossless", "deft"
DECODINGS = (PLAIN, LOSSLESS, DEFT)
GOLDEN = Path("tests/golden/tiny_libero")
NUM_TIMED = 400
STILL, STILL_STEPS = 0.02, 40  # commands of 1 are the fastest; two seconds of less than this
CPU_SECONDS = re.compile(rb"^process_cpu_seconds_total (\S+)", re.MULTILINE)


@dataclass(frozen=True)
class PlayedRun:
    """One run, and the server's processor time for each of its actions."""

    decoding: str
    widened_cm: float
    run: RunResults
    cpu_ms: float

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
        judged, low = self.summary.successes, self.summary.successes.interval
        return {
            "decoding": self.decoding,
            "widened_cm": self.widened_cm,
            "succeeded": judged.num_succeeded,
            "judged": judged.num_judged,
            "errored": judged.num_errored,
            "wilson_95": [round(low.low, 3), round(low.high, 3)],
            "tasks": {
                one.instruction: f"{one.successes.num_succeeded}/{one.successes.num_judged}"
                for one in self.summary.tasks
            },
            "actions": self.summary.num_answers,
            "passes_per_action": round(self.passes, 3),
            "server_cpu_ms_per_action": round(self.cpu_ms, 2),
            "frozen_episodes": self.num_frozen,
        }


def stands_still(record: EpisodeRecord) -> bool:
    """Was the arm told to stay where it is for two seconds on end, in an episode that failed?"""
    is_still = np.abs(record.actions[:, :6]).max(axis=1) < STILL
    runs = (sum(1 for _ in steps) for still, steps in groupby(is_still.tolist()) if still)
    return record.outcome is Outcome.FAILED and max(runs, default=0) >= STILL_STEPS


def play(url: str, out: Path, decoding: str, widened_cm: float) -> PlayedRun:
    """Play what is missing of a run; the processor time is that of its last playing."""
    folder = out / f"{decoding}-{widened_cm:g}cm"
    before_s = cpu_seconds(url)
    code = evaluate_command.main(
        [
            *(SUITE, "--tasks", TASKS, "--trials", TRIALS, "--url", url, "--stream"),
            *("--decoding", decoding, "--widen-cm", str(widened_cm), "--workers", "2"),
            *("--out", str(folder), "--assets", "stand-in"),  # what the policy was trained on
        ]
    )
    if code != evaluate_command.DONE:
        raise SystemExit(f"the evaluation ended with {code}; the same command goes on")
    spent_s = cpu_seconds(url) - before_s
    (run_folder,) = (path.parent for path in folder.glob("*/run.json"))
    run, kept = load_run(run_folder), folder / "cpu.json"
    if not kept.exists():
        num_actions = sum(len(one.answers) for one in run.records)
        kept.write_text(json.dumps(1000 * spent_s / num_actions))
    return PlayedRun(decoding, widened_cm, run, json.loads(kept.read_text()))


def cpu_seconds(url: str) -> float:
    """Processor time of the server so far."""
    match = CPU_SECONDS.search(httpx.get(f"{url}/metrics").content)
    assert match is not None
    return float(match[1])


def actions_per_s(url: str, decoding: str) -> float:
    """How fast one robot that asks by POST gets its answers: camera frames of an episode."""
    cases = [json.loads(line) for line in (GOLDEN / "cases.jsonl").read_text().splitlines()]
    frames = [Observation(load_image(GOLDEN / one["image"]), one["instruction"]) for one in cases]
    options = ActOptions(decoding=decoding)
    with PolicyClient(url) as policy:
        for frame in frames:
            policy.act(frame, options)
        started_s = time.perf_counter()
        for number in range(NUM_TIMED):
            policy.act(frames[number % len(frames)], options)
        return NUM_TIMED / (time.perf_counter() - started_s)


def share_of_equal_episodes(one: RunResults, other: RunResults) -> float:
    """Episodes whose actions are the same to the last bit, of those that both runs have."""
    pairs = zip(one.records, other.records, strict=True)
    return float(np.mean([np.array_equal(a.actions, b.actions) for a, b in pairs]))


def promises(
    runs: Mapping[tuple[str, float], PlayedRun], rates: Mapping[str, float]
) -> Iterator[tuple[str, str, bool]]:
    """What must hold, the figure for it, and whether it does."""
    plain, lossless, deft = (runs[decoding, 0.0] for decoding in DECODINGS)
    share = plain.summary.successes.share
    bounds: Interval = plain.summary.successes.interval
    yield "plain decoding succeeds in 80% or more", f"{share:.0%}", share >= 0.8
    for decoding in DECODINGS:
        rate = rates[decoding]
        yield f"{decoding}: 20 actions a second over HTTP", f"{rate:.1f}", rate >= 20
    equal = share_of_equal_episodes(plain.run, lossless.run)
    yield "lossless acts as plain decoding does", f"{equal:.0%} of the episodes", equal == 1
    yield "lossless: 3.5 passes or fewer", f"{lossless.passes:.2f}", lossless.passes <= 3.5
    yield "deft: 2.2 passes or fewer", f"{deft.passes:.2f}", deft.passes <= 2.2
    relaxed = deft.summary.successes.share
    told = f"{relaxed:.0%}, plain {bounds.low:.0%} to {bounds.high:.0%}"
    yield "deft succeeds as often, within plain decoding's interval", told, relaxed >= bounds.low
    yield "deft: no frozen episode", str(deft.num_frozen), deft.num_frozen == 0
    for one in (lossless, deft):
        told = f"{one.cpu_ms:.1f} ms, plain {plain.cpu_ms:.1f} ms"
        yield f"{one.decoding}: less processor time", told, one.cpu_ms < plain.cpu_ms


def print_rows(runs: Sequence[PlayedRun]) -> None:
    """One row per run."""
    print("| decoding | moved by | succeeded | 95% | passes | CPU ms | frozen |")
    print("|---|---|---|---|---|---|---|")
    for one in runs:
        judged = one.summary.successes
        print(
            f"| {one.decoding} | {one.widened_cm:g} cm | {judged.num_succeeded}/{judged.num_judged}"
            f" | {judged.interval.low:.0%} to {judged.interval.high:.0%} | {one.passes:.2f}"
            f" | {one.cpu_ms:.1f} | {one.num_frozen} |"
        )


def main() -> int:
    """Run the check; return its exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("results/tiny_libero"))
    parser.add_argument("--lines", type=Path, help="where to keep a line per run")
    parser.add_argument(
        "--widen-cm", type=float, nargs="*", default=[2.0], metavar="CM", help="play these as well"
    )
    given = parser.parse_args()
    with local_server("--policy", "tiny-libero") as url:
        rates = {decoding: actions_per_s(url, decoding) for decoding in DECODINGS}
        runs = [
            play(url, given.out, decoding, moved)
            for moved in (0.0, *given.widen_cm)
            for decoding in DECODINGS
        ]
    print_rows(runs)
    held = []
    by_name = {(one.decoding, one.widened_cm): one for one in runs}
    for promise, figure, holds in promises(by_name, rates):
        print(f"{'PASS' if holds else 'FAIL'}  {promise}: {figure}")
        held.append(holds)
    if given.lines:
        given.lines.parent.mkdir(parents=True, exist_ok=True)
        lines = [*(one.line() for one in runs), {"actions_per_s": rates}]
        given.lines.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return 0 if all(held) else 1


if __name__ == "__main__":
    raise SystemExit(main())
