"""What frames cost: the seconds that each flow's take alone, and how much longer in company.

    seconds of a frame among n = seconds alone x (1 + share x (n - 1))

`share` is what each further frame adds to a round, as a part of its time alone: near 0 where a GPU
computes many rows as fast as one, near 1 where a processor computes one after the other. It follows
from frames of the same flow that were answered in different company. So a flow's estimate is its
own: how many neighbours it had when it was measured is taken out again.
"""

import math
from collections import OrderedDict, deque
from dataclasses import dataclass
from statistics import median

STALE_AFTER_S = 1.0  # a flow's measurement older than this does not justify a refusal
REMEMBERED_FRAMES = 9  # of a flow
REMEMBERED_FLOWS = 1024
REMEMBERED_SHARES = 31
CLEAR = 1.0
CAREFUL_RANK = 0.75  # of a flow's frames, so many were quicker than what is expected


@dataclass(frozen=True)
class Measurement:
    """One frame: what it took, among how many."""

    seconds: float
    company: float  # the mean number of frames in its rounds, itself among them
    is_whole: bool = True  # one that was cut before its end would have taken longer


class FlowTimes:
    """What the last few frames of a flow took."""

    def __init__(self) -> None:
        self.measured_s = -math.inf  # when the last one was
        self.recent: deque[Measurement] = deque(maxlen=REMEMBERED_FRAMES)

    def is_fresh(self, now_s: float) -> bool:
        """Whether a frame was measured lately."""
        return self.measured_s >= now_s - STALE_AFTER_S

    def note(self, one: Measurement, now_s: float) -> None:
        """Take in one more frame.

        What cut frames took is forgotten for a longer cut, and for the first that was answered.
        """
        if not any(known.is_whole for known in self.recent):
            self.recent.clear()
        self.recent.append(one)
        self.measured_s = now_s

    def alone_s(self, share: float, rank: float = CAREFUL_RANK) -> float:
        """Return the seconds that so large a part of the frames would not have exceeded alone."""
        if not self.recent:
            return 0.0
        found = sorted(one.seconds / slowdown(share, one.company) for one in self.recent)
        return found[int(rank * (len(found) - 1))]


class Prices:
    """Learns what frames cost, flow by flow."""

    def __init__(self) -> None:
        self._flows: OrderedDict[str, FlowTimes] = OrderedDict()  # the last seen comes last
        self._all = FlowTimes()  # what is believed of a flow that was never seen
        self._shares = deque([1.0] * 3, maxlen=REMEMBERED_SHARES)

    @property
    def share(self) -> float:
        """What each further frame adds, as a part of one's time alone; 1 until it was measured."""
        return median(self._shares)

    def slowdown(self, company: float) -> float:
        """Return how much longer a frame takes among so many than alone."""
        return slowdown(self.share, company)

    def observe(
        self, flow: str, seconds: float, now_s: float, company: float = 1.0, is_whole: bool = True
    ) -> None:
        """Take in what a frame took. One that was cut before its end would have taken longer."""
        one = Measurement(seconds, max(1.0, company), is_whole)
        if not is_whole and seconds / self.slowdown(company) <= self.expect(flow, now_s):
            return  # that was known
        known = self._flows.setdefault(flow, FlowTimes())
        whole = [other for other in known.recent if other.is_whole]
        if is_whole and whole:
            other = max(whole, key=lambda other: abs(other.company - one.company))
            self._learn_share(one, other)
        if is_whole:
            self._all.note(one, now_s)
        known.note(one, now_s)
        self._flows.move_to_end(flow)
        if len(self._flows) > REMEMBERED_FLOWS:
            self._flows.popitem(last=False)

    def expect(self, flow: str, now_s: float) -> float:
        """Return the seconds that a frame of a flow takes alone, probably; 0 if nobody knows.

        Where the flow was not measured lately, the least that it or others have shown is believed.
        """
        known = self._flows.get(flow)
        if known is None:
            return self._all.alone_s(self.share)
        if known.is_fresh(now_s):
            return known.alone_s(self.share)
        least_s = known.alone_s(self.share, 0.0)
        return min(least_s, self._all.alone_s(self.share, 0.5)) if self._all.recent else least_s

    def proven(self, flow: str, now_s: float) -> float:
        """Return what justifies a refusal: what the flow itself has shown, while anything is new.

        So nobody is refused for ever because of what was measured once.
        """
        known = self._flows.get(flow)
        if known is None or not (known.is_fresh(now_s) or self._all.is_fresh(now_s)):
            return 0.0
        if known.is_fresh(now_s):
            return known.alone_s(self.share, 0.5)
        return self.expect(flow, now_s)

    def _learn_share(self, one: Measurement, other: Measurement) -> None:
        """Learn from two frames of a flow, if their company differed enough to tell."""
        many, few = (one, other) if one.company > other.company else (other, one)
        if many.company - few.company < CLEAR or few.seconds <= 0:
            return
        # seconds = alone x (1 + share x (company - 1)), twice, solved for the share
        longer = many.seconds - few.seconds
        rest = few.seconds * (many.company - 1) - many.seconds * (few.company - 1)
        share = 0.0 if longer <= 0 else longer / rest if rest > longer else 1.0
        self._shares.append(share)


def slowdown(share: float, company: float) -> float:
    """Return how much longer a frame takes among so many than alone."""
    return 1 + share * (max(1.0, company) - 1)
