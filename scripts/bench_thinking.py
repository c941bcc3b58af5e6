"""Does a session that acts at once keep its deadlines beside sessions that think aloud?

`python -m scripts.bench_thinking --url URL --image FRAME --instruction TEXT` asks a server whose
policy does both. Frames of one robot are sent at a steady rate, each with a deadline, while others
ask for answers with reasoning as fast as they get them. Exits with 1 where fewer than 95 % of the
robot's frames were answered in time.
"""

import argparse
import sys
import threading
import time
from pathlib import Path

import numpy as np
from PIL import Image

from deft_client import ActOptions, DeftError, Observation, PolicyClient
from deft_client.errors import NoActionError

WANTED = 0.95


def think(
    url: str, observation: Observation, name: str, is_over: threading.Event, took_ms: list[float]
) -> None:
    """Ask for texts until it is over."""
    with PolicyClient(url) as client:
        options = ActOptions(session_id=name, want_reasoning=True)
        while not is_over.is_set():
            started = time.perf_counter()
            try:
                client.act(observation, options)
            except NoActionError:
                pass  # a text without an action takes as long
            except DeftError as error:
                sys.stderr.write(f"{name}: {error}\n")
                continue
            took_ms.append(1000 * (time.perf_counter() - started))


def act(
    url: str, observation: Observation, period_s: float, deadline_ms: float, num_frames: int
) -> list[float | None]:
    """Milliseconds of every frame of the robot; None where it was not answered."""
    found: list[float | None] = []
    with PolicyClient(url) as client:
        options = ActOptions(session_id="quick", deadline_ms=deadline_ms)
        due_s = time.perf_counter()
        for _ in range(num_frames):
            started = time.perf_counter()
            try:
                client.act(observation, options)
                found.append(1000 * (time.perf_counter() - started))
            except DeftError:
                found.append(None)
            due_s = max(due_s + period_s, time.perf_counter())
            time.sleep(max(0.0, due_s - time.perf_counter()))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m scripts.bench_thinking", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--image", type=Path, required=True, help="a frame that all are shown")
    parser.add_argument("--instruction", required=True, metavar="TEXT")
    parser.add_argument("--thinkers", type=int, default=2, metavar="N")
    parser.add_argument("--frames", type=int, default=100, metavar="N")
    parser.add_argument("--deadline-ms", type=float, default=300.0, metavar="MS")
    given = parser.parse_args()
    picture = np.asarray(Image.open(given.image).convert("RGB"))
    observation = Observation(picture, given.instruction)
    with PolicyClient(given.url) as client:
        if not client.info().thinks_when_asked:
            parser.error("its policy does not act at once and think aloud, each when asked to")
    is_over, thought_ms = threading.Event(), list[float]()
    period_s = given.deadline_ms / 1000
    alone = act(given.url, observation, period_s, given.deadline_ms, given.frames)
    thinkers = [
        threading.Thread(
            target=think, args=(given.url, observation, f"thinker-{n}", is_over, thought_ms)
        )
        for n in range(given.thinkers)
    ]
    for one in thinkers:
        one.start()
    beside = act(given.url, observation, period_s, given.deadline_ms, given.frames)
    is_over.set()
    for one in thinkers:
        one.join()
    for name, times in (("alone", alone), (f"beside {given.thinkers} that think", beside)):
        answered = [one for one in times if one is not None and one <= given.deadline_ms]
        middle = f"{np.median(answered):.1f} ms" if answered else "none"
        share = len(answered) / len(times)
        print(f"{name}: {share:.1%} within {given.deadline_ms:g} ms, median {middle}")
    if thought_ms:
        print(f"the others: {len(thought_ms)} texts, median {np.median(thought_ms):.0f} ms")
    in_time = sum(one is not None and one <= given.deadline_ms for one in beside)
    return int(in_time < WANTED * len(beside))


if __name__ == "__main__":
    sys.exit(main())
