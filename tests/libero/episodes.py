"""Builds episode records and headers for tests, with every field filled with something."""

import numpy as np

from deft_core.measures.answers import AnswerRecord
from deft_core.types import StageTimings
from deft_libero.results.records import EpisodeRecord, Outcome, SeamSizes, TrialKey
from deft_libero.results.store import RunHeader


def header(run: str = "r1", suite: str = "libero_object", **options: str) -> RunHeader:
    return RunHeader(
        run=run,
        created="2025-01-02T03:04:05Z",
        name=f"{suite} lossless",
        suite=suite,
        assets="stand-in 1234",
        options={"decoding": "lossless", **options},
        versions={"deft-client": "0.1.0"},
        server={"policy": "constant"},
    )


def record(
    task: int = 0,
    trial: int = 0,
    outcome: Outcome = Outcome.SUCCEEDED,
    num_steps: int = 4,
    passes: tuple[int, ...] = (2, 3),
) -> EpisodeRecord:
    """An episode whose numbers differ from step to step; `passes` are accepted lengths."""
    rng = np.random.default_rng((task, trial))
    timings = [
        StageTimings(prefill_ms=10.0 + step, total_ms=12.5 + step, round_trip_ms=14.125 + step)
        for step in range(num_steps)
    ]
    answers = tuple(
        AnswerRecord(step, step, timings[step], passes, 7, step % 2, "lossless")
        for step in range(num_steps)
    )
    return EpisodeRecord(
        key=TrialKey("libero_object", task, trial),
        instruction="pick up the soup “now”",
        outcome=outcome,
        actions=rng.normal(size=(num_steps, 7)),
        answers=answers,
        held_steps=1,
        late_steps=2,
        seams=SeamSizes(commanded=0.75, inside=0.5),
        wall_s=3.25,
        finished_s=1.7e9 + 100 * task + trial,
        assets="stand-in 1234",
        video="videos/task00-trial00-succeeded.mp4",
        error="the server went away" if outcome is Outcome.ERRORED else "",
    )
