"""What a policy is doing while it is loaded, for whoever waits. A process loads one at a time."""

from dataclasses import dataclass
from time import monotonic

_LEAST_SHARE = 0.05  # before this nobody can say how long the rest takes


@dataclass(frozen=True)
class _Step:
    text: str = ""
    since_s: float = 0.0  # monotonic
    share: float | None = None  # of it that is done, where that is known


_now = _Step()


def doing(text: str, share: float | None = None) -> None:
    """Say what is done from now on, and how much of it is done; empty where nothing is left."""
    global _now
    goes_on = text == _now.text and (share or 0.0) >= (_now.share or 0.0)
    since_s = _now.since_s if goes_on else monotonic()  # what begins anew has a clock of its own
    _now = _Step(text, since_s, share)


def describe_progress() -> str:
    """Return what is done just now, and how long it still takes where that is known."""
    step = _now
    if step.share is None or not step.text:
        return step.text
    text = f"{step.text}, {step.share:.0%}"
    if step.share < _LEAST_SHARE:
        return text
    spent_s = monotonic() - step.since_s
    return f"{text}, about {spent_s * (1 - step.share) / step.share:.0f} s left"
