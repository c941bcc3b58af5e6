"""What a policy is doing while it is loaded, for those that wait. A process loads one at a time.

Commands that take long show it, too, and count what they have done.
"""

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event, Thread
from time import monotonic
from typing import TypeVar

from tqdm import tqdm

Item = TypeVar("Item")
_LEAST_SHARE = 0.05  # before this the rest cannot be estimated
_LINE_EVERY_S = 10.0  # of a command, where there is no terminal to redraw a line on


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


@contextmanager
def shown(every_s: float = _LINE_EVERY_S, written: Event | None = None) -> Iterator[None]:
    """Write what is done just now to standard error, now and then, while a block runs.

    What has not changed since the line before is not written again. `written` is set when a line
    is.
    """
    ended, written = Event(), written or Event()

    def show() -> None:
        said = ""
        while not ended.wait(every_s):
            if (text := describe_progress()) and text != said:
                _say(text)
                said = text
                written.set()

    thread = Thread(target=show, name="deft-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        doing("")
        ended.set()
        thread.join()


def counted(
    items: Iterable[Item], total: int, name: str, unit: str, done: int = 0
) -> Iterator[Item]:
    """Yield items, and show how many are done and how long the others will take.

    On a terminal one line is redrawn; elsewhere a line is written now and then. `done` of the
    `total` were there before.
    """
    if sys.stderr.isatty():
        yield from tqdm(
            items, desc=name, total=total, unit=unit, initial=done, leave=False, file=sys.stderr
        )
        return
    started_s = next_s = monotonic()
    for number, item in enumerate(items):
        yield item
        now_s = monotonic()
        if now_s < next_s + _LINE_EVERY_S:
            continue
        next_s, num_left = now_s, total - done - number - 1
        left_s = (now_s - started_s) / (number + 1) * num_left
        _say(f"{name}: {done + number + 1} of {total} {unit}s, about {left_s:.0f} s left")


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
