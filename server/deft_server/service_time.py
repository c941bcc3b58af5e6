"""How long the policy takes for a batch, as measured. Knows nothing of queues or clocks.

The median of the last few batches of a size is what is believed, so that one slow batch (a page
fault, a first compilation) does not make the server refuse work it could do.
"""

from collections import deque
from statistics import median

REMEMBERED_BATCHES = 9


class ServiceTime:
    """Seconds per batch, by batch size."""

    def __init__(self) -> None:
        self._seconds: dict[int, deque[float]] = {}
        self._medians: dict[int, float] = {}

    def observe(self, size: int, seconds: float) -> None:
        """Take in that a batch of `size` frames took `seconds`."""
        recent = self._seconds.setdefault(size, deque(maxlen=REMEMBERED_BATCHES))
        recent.append(seconds)
        self._medians[size] = median(recent)

    def expect(self, size: int) -> float:
        """Return the seconds a batch of `size` will take; 0 while nothing was measured.

        A size never seen takes as long as the nearest larger one, else the nearest smaller one:
        a batch costs little more than a single frame.
        """
        if size in self._medians:
            return self._medians[size]
        larger = [known for known in self._medians if known > size]
        smaller = [known for known in self._medians if known < size]
        if larger:
            return self._medians[min(larger)]
        return self._medians[max(smaller)] if smaller else 0.0
