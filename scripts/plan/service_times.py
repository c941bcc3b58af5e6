"""How long a policy takes for batches of each size: recorded by a server, measured here, or given.

Sizes between two known ones are interpolated, quantile by quantile; none is guessed beyond them.
"""

import re
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deft_client.types import ActOptions
from deft_policies.base import ActRequest, Policy
from deft_policies.benchmark.replay import generate_frames, with_statistics_key
from deft_policies.memory import SessionMemory
from deft_server.settings import SettingsError

QUANTILE_STEPS = 1024

_LOGGED = re.compile(r"a batch of (\d+) took (\d+(?:\.\d+)?) ms")  # what the scheduler writes


@dataclass(frozen=True, eq=False)
class ServiceTimes:
    """Seconds per batch, sorted, by batch size. Neither the map nor a list in it is empty."""

    seconds: Mapping[int, NDArray[np.float64]]  # [sample]

    @property
    def max_batch(self) -> int:
        """The largest size of which something is known."""
        return max(self.seconds)

    def at(self, size: int, quantile: float) -> float:
        """Return the seconds that this share of the batches of `size` stays within."""
        return float(self.all_at(size, np.array([quantile]))[0])

    def all_at(self, size: int, quantiles: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return the seconds for several shares at once."""
        below = max((known for known in self.seconds if known <= size), default=min(self.seconds))
        above = min(known for known in self.seconds if known >= size)
        low, high = (np.quantile(self.seconds[known], quantiles) for known in (below, above))
        return high if above <= below else low + (high - low) * (size - below) / (above - below)

    def most_per_s(self, max_batch: int) -> float:
        """Return the frames that one server can answer per second, at the size that suits best."""
        evenly = np.linspace(0, 1, QUANTILE_STEPS)
        sizes = range(1, max_batch + 1)
        return max(size / float(self.all_at(size, evenly).mean()) for size in sizes)


def collect(samples: Iterable[tuple[int, float]]) -> ServiceTimes:
    """Sort pairs of batch size and seconds; raises `SettingsError` where there is none."""
    by_size = defaultdict(list)
    for size, seconds in samples:
        by_size[size].append(seconds)
    if not by_size:
        raise SettingsError("no service times: not a single batch was found")
    return ServiceTimes({size: np.sort(found) for size, found in by_size.items()})


def read_log(path: Path) -> ServiceTimes:
    """Read the log of a `deft serve --log-batches`, or raise `SettingsError`."""
    try:
        found = _LOGGED.findall(path.read_text("utf-8", errors="replace"))
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error
    if not found:
        raise SettingsError(f"{path} tells of no batch; serve with --log-batches")
    return collect((int(size), float(spent_ms) / 1000) for size, spent_ms in found)


def parse(text: str) -> ServiceTimes:
    """Read `24` or `1:24,8:60`: milliseconds, by batch size; raises `SettingsError`."""
    try:
        pairs = [part.rpartition(":") for part in text.split(",")]
        found = [(int(size or 1), float(spent_ms) / 1000) for size, _, spent_ms in pairs]
    except ValueError as error:
        raise SettingsError(f"{text!r} is no service time; write 24 or 1:24,8:60") from error
    if any(size < 1 or not 0 < seconds < float("inf") for size, seconds in found):
        raise SettingsError(f"{text!r}: sizes start at 1, and milliseconds are above 0")
    return collect(found)


def measure(policy: Policy, sizes: Sequence[int], rounds: int) -> ServiceTimes:
    """Have a policy answer generated frames in batches of these sizes, in turns."""
    policy.warm_up()
    frames = with_statistics_key(generate_frames(rounds + 1), policy)
    memories = [SessionMemory()] * max(sizes)
    found = []
    for number, frame in enumerate(frames):
        options = ActOptions(statistics_key=frame.statistics_key)
        for size in sizes:
            batch = [ActRequest(frame.observation, one, options) for one in memories[:size]]
            started_s = time.perf_counter()
            answers = policy.act(batch)
            spent_s = time.perf_counter() - started_s
            memories[:size] = [answer.memory for answer in answers]
            if number:  # the first of each size is for warming up
                found.append((size, spent_s))
    return collect(found)
