"""A Prometheus histogram that only one thread writes: no locks, and so a fraction of the time."""

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString


class LoopHistogram(Collector):
    """Counts values by upper bound. For the event loop alone."""

    def __init__(
        self, name: str, about: str, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._name = name
        self._about = about
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0
        registry.register(self)

    def observe(self, value: float) -> None:
        """Count a value; one that equals a bound belongs under it."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """Return what was counted, as Prometheus wants it: each bound with all that is below."""
        labels = [*map(floatToGoString, self._bounds), "+Inf"]
        totals = list(accumulate(self._counts))
        family = HistogramMetricFamily(self._name, self._about)
        family.add_metric([], list(zip(labels, totals, strict=True)), self._sum)
        yield family
