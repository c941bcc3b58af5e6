"""What several observations in one message save: their time by that of as many single messages.

python -m scripts.bench_several                      # frames of a picture that is panned
python -m scripts.bench_several --recording FOLDER   # frames of recordings, or of any data set

The shipped policy, served on one thread of this machine, answers both ways in turn, step by step;
every session sees its own frames. A ratio is one of sums.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

import numpy as np
from PIL import Image

from deft_client import ActionChunk, ActOptions, DeftError, Observation, PolicyClient
from deft_client.datasets.formats import read_dataset
from deft_policies.tiny_libero import STATISTICS_KEY
from scripts.local_server import local_server

EXAMPLE = Path(__file__).parents[1] / "examples" / "frame.png"
INSTRUCTION = "pick up the butter and place it in the basket"
METHODS = ("autoregressive", "lossless")
WARM_UP_STEPS = 3


@dataclass
class Sums:
    """Milliseconds of all steps, and how many answers the two ways gave differently."""

    alone_ms: float = 0.0
    together_ms: float = 0.0
    different: int = 0

    @property
    def ratio(self) -> float:
        return self.together_ms / self.alone_ms


def panned(count: int, steps: int) -> list[list[Observation]]:
    """The example picture as `count` cameras see it that pan, [step][session]."""
    with Image.open(EXAMPLE) as picture:
        pixels = np.asarray(picture.convert("RGB"))
    return [
        [
            Observation(np.roll(pixels, 2 * step + 11 * one, axis=1), INSTRUCTION)
            for one in range(count)
        ]
        for step in range(steps)
    ]


def recorded(folder: Path, count: int, steps: int) -> list[list[Observation]]:
    """Frames of the first `count` episodes of a data set that are long enough, [step][session]."""
    long_enough: list[list[Observation]] = []
    for episode in read_dataset(folder):
        frames = [one.observation for one in islice(episode.steps(), steps)]
        if len(frames) >= steps:
            long_enough.append(frames)
        if len(long_enough) == count:
            return [list(step) for step in zip(*long_enough, strict=True)]
    raise SystemExit(f"{folder} has {len(long_enough)} episodes of {steps} steps, not {count}")


Ask = Callable[[PolicyClient, Sequence[Observation], ActOptions], list[ActionChunk | DeftError]]


def one_by_one(
    policy: PolicyClient, observations: Sequence[Observation], options: ActOptions
) -> list[ActionChunk | DeftError]:
    return [
        policy.act(one, replace(options, session_id=f"{options.decoding} alone {at}"))
        for at, one in enumerate(observations)
    ]


def at_once(
    policy: PolicyClient, observations: Sequence[Observation], options: ActOptions
) -> list[ActionChunk | DeftError]:
    named = {f"{options.decoding} together {at}": one for at, one in enumerate(observations)}
    return list(policy.act_all(named, options).values())


def measure(policy: PolicyClient, steps: Sequence[Sequence[Observation]], method: str) -> Sums:
    """Answer every step one by one and at once, the two in turn."""
    sums, options = Sums(), ActOptions(decoding=method)
    for number, observations in enumerate(steps):
        answers: dict[Ask, list[ActionChunk | DeftError]] = {}
        spent_ms: dict[Ask, float] = {}
        for ask in (one_by_one, at_once) if number % 2 else (at_once, one_by_one):
            started = time.perf_counter()
            answers[ask] = ask(policy, observations, options)
            spent_ms[ask] = 1000 * (time.perf_counter() - started)
        if number >= WARM_UP_STEPS:
            sums.alone_ms += spent_ms[one_by_one]
            sums.together_ms += spent_ms[at_once]
        for first, second in zip(answers[one_by_one], answers[at_once], strict=True):
            if isinstance(first, DeftError) or isinstance(second, DeftError):
                raise SystemExit(f"not answered: {first} / {second}")
            sums.different += not np.array_equal(first.actions, second.actions)
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=8, help="observations a message (default 8)")
    parser.add_argument("--steps", type=int, default=40, help="of each session (default 40)")
    parser.add_argument("--recording", type=Path, help="where frames come from")
    given = parser.parse_args()
    steps = given.steps + WARM_UP_STEPS
    frames = (
        panned(given.count, steps)
        if given.recording is None
        else recorded(given.recording, given.count, steps)
    )
    flags = ("--threads", "1", "--statistics-key", STATISTICS_KEY)
    with local_server(*flags) as url, PolicyClient(url) as policy:
        for method in METHODS:
            sums = measure(policy, frames, method)
            print(
                f"{method}: {given.count} in one message take {sums.ratio:.3f} of the time of "
                f"{given.count} messages ({sums.together_ms / given.steps:.1f} ms by "
                f"{sums.alone_ms / given.steps:.1f} ms a step, {given.steps} steps); "
                f"{sums.different} of {given.count * steps} answers differ",
                flush=True,
            )


if __name__ == "__main__":
    main()
