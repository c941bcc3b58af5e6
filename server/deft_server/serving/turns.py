"""The order of frames: owners take turns, and so do the flows of an owner."""

from collections import Counter
from collections.abc import Collection, Sequence

from deft_server.serving.frame import QueuedFrame

REMEMBERED_TURNS = 256
MAX_CREDIT_TURNS = 8  # an idle or refused owner or flow gets at most so many turns ahead


class Turns:
    """How many frames each name had started."""

    def __init__(self) -> None:
        self._counts: dict[str, int] = {}  # frames started
        self._level = 0  # the count with which a new name begins

    def __getitem__(self, name: str) -> int:
        return self._counts.get(name, self._level)

    def is_behind(self, name: str) -> bool:
        """Whether others had more than one turn since."""
        return self[name] < self._level - 1

    def join(self, name: str) -> None:
        """Note that a name waits again, and limit its credit."""
        self._counts[name] = max(self[name], self._level - MAX_CREDIT_TURNS)

    def start(self, name: str) -> None:
        """Note that a frame was started."""
        count = self[name]
        self._level = max(self._level, count)
        self._counts[name] = count + 1

    def forget_all_but(self, waiting: Collection[str]) -> None:
        """Bound the memory: keep the counts of waiting names alone once there are many."""
        if len(self._counts) > len(waiting) + REMEMBERED_TURNS:
            self._counts = {name: self[name] for name in waiting}


class TurnOrder:
    """The turns of all owners, and of the flows of each.

    The owner with the fewest started frames goes first. Idle time earns at most
    `MAX_CREDIT_TURNS`.
    """

    def __init__(self, patience_s: float) -> None:
        self._patience_s = patience_s
        self._waiting: dict[str, Counter[str]] = {}  # how many frames of each owner's flows wait
        self._owners = Turns()
        self._flows: dict[str, Turns] = {}  # of each owner

    def is_waiting(self, owner: str) -> bool:
        """Whether any frame of an owner waits."""
        return owner in self._waiting

    def join(self, frame: QueuedFrame) -> None:
        """Note that a frame waits."""
        flows = self._waiting.setdefault(frame.owner, Counter())
        if not flows:
            self._owners.join(frame.owner)
        if not flows[frame.flow]:
            self._flows.setdefault(frame.owner, Turns()).join(frame.flow)
        flows[frame.flow] += 1

    def leave(self, frame: QueuedFrame) -> None:
        """Note that a frame waits no more."""
        flows = self._waiting[frame.owner]
        flows[frame.flow] -= 1
        if not flows[frame.flow]:
            del flows[frame.flow]
        if not flows:
            del self._waiting[frame.owner]

    def start(self, frames: Sequence[QueuedFrame]) -> None:
        """Note whose frames were started."""
        for frame in frames:
            self._owners.start(frame.owner)
            self._flows[frame.owner].start(frame.flow)
        self._owners.forget_all_but(self._waiting)
        for owner, turns in list(self._flows.items()):
            turns.forget_all_but(self._waiting.get(owner, ()))
            if owner not in self._waiting and len(self._flows) > REMEMBERED_TURNS:
                del self._flows[owner]

    def flow_turn(self, frame: QueuedFrame) -> int:
        """Return how many frames of its flow were started."""
        return self._flows[frame.owner][frame.flow]

    def is_behind(self, frame: QueuedFrame) -> bool:
        """Whether other flows of its owner had more than one turn since its last one."""
        return self._flows[frame.owner].is_behind(frame.flow)

    def is_urgent(self, frame: QueuedFrame, now_s: float) -> bool:
        """Whether a frame's deadline is near, or it has waited as long as one without should."""
        return frame.due_s <= (now_s + self._patience_s if frame.has_deadline else now_s)

    def in_order(self, frames: Collection[QueuedFrame], now_s: float) -> list[QueuedFrame]:
        """Return the frames in the order in which they should start: by turns of the owners.

        Among those of one owner, urgent ones come first, by turns of the flows.
        """
        if len(frames) < 2:
            return list(frames)
        by_due = sorted(frames, key=lambda one: one.due_s)
        count: Counter[str] = Counter()
        ranks = {}
        for frame in by_due:  # many frames of a flow are not all before others
            turn = self.flow_turn(frame) + count[frame.flow]
            ranks[frame] = (not self.is_urgent(frame, now_s), turn)
            count[frame.flow] += 1
        count.clear()
        turns = {}
        for frame in sorted(by_due, key=ranks.__getitem__):
            turns[frame] = self._owners[frame.owner] + count[frame.owner]
            count[frame.owner] += 1
        return sorted(by_due, key=turns.__getitem__)
