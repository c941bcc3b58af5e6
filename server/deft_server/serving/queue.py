"""The queue of frames that wait for the policy. Begin at `FrameQueue.enqueue` and `next_batch`.

`turns` orders the frames, and `admission` says which of them may go. Callers pass the time, in
seconds on any one monotonic clock: the queue reads no clock and starts nothing.
"""

from collections import Counter

from deft_server.errors import DeadlineError, OverloadedError
from deft_server.serving.admission import Admission
from deft_server.serving.frame import QueuedFrame
from deft_server.serving.turns import TurnOrder

RESERVED_FRACTION = 1 / 8  # of the queue: see `_is_full_for`


class FrameQueue:
    """The frames that wait; `admission` has those that are with the policy.

    A flow is a session, or all frames of one caller that name no session. An owner is an API key,
    or an address where there are no keys; its flows share what it gets.
    """

    def __init__(
        self,
        max_batch: int = 8,
        max_waiting: int = 64,
        patience_s: float = 2.0,
        num_replicas: int = 1,
    ) -> None:
        self.admission = Admission(max_batch, num_replicas, patience_s)
        self._max_waiting = max_waiting
        self._patience_s = patience_s
        self._turns = TurnOrder(patience_s)
        self._frames: dict[QueuedFrame, None] = {}  # in the order of arrival
        self._sessions: dict[str, QueuedFrame] = {}  # the waiting frame of each, by flow
        self._staying: Counter[str] = Counter()  # frames of each owner that may overfill

    def __len__(self) -> int:
        return len(self._frames)

    @property
    def waiting(self) -> list[QueuedFrame]:
        """The waiting frames, in the order of arrival."""
        return list(self._frames)

    def enqueue(self, frame: QueuedFrame, now_s: float) -> QueuedFrame | None:
        """Add a frame, and return the older one of its session, which it replaces.

        The newer frame takes over the older one's place, and its due time if that is earlier. A
        frame without a deadline is due `patience_s` from now. A frame with `overfills_until_s` may
        overfill the queue: its caller could not try again.

        Raises `DeadlineError` if the frame would be late even if it went next and alone, and
        `OverloadedError` if it finds no place.
        """
        older = self._sessions.get(frame.flow) if frame.is_session else None
        self.admission.note_arrival(frame, now_s)
        if frame.has_deadline and self.admission.is_hopeless(frame, now_s):
            raise DeadlineError("cannot be answered in time; nothing was computed")
        has_place = older is not None and older.overfills_until_s is None
        if not has_place and frame.overfills_until_s is None and self._is_full_for(frame):
            raise self.refusal(now_s)
        frame.due_s = frame.deadline_s if frame.has_deadline else now_s + self._patience_s
        if older is not None:
            frame.due_s = min(frame.due_s, older.due_s)
            self.remove(older)
        self._frames[frame] = None
        self._turns.join(frame)
        self._staying[frame.owner] += frame.overfills_until_s is not None
        if frame.is_session:
            self._sessions[frame.flow] = frame
        return older

    def _is_full_for(self, frame: QueuedFrame) -> bool:
        """Whether a frame finds no place. Not counted: what other owners overfill the queue with.

        The last part is kept for frames with a deadline and for owners with no frame waiting.
        """
        others_staying = sum(self._staying.values()) - self._staying[frame.owner]
        limit = self._max_waiting
        if not frame.has_deadline and self._turns.is_waiting(frame.owner):
            limit -= int(self._max_waiting * RESERVED_FRACTION)
        return len(self._frames) - others_staying >= limit

    def next_batch(self, now_s: float) -> tuple[list[QueuedFrame], list[QueuedFrame]]:
        """Take out the frames that go to the policy now, and those that are too late for it.

        Ask again until none go: there may be other places.

        Owners take turns, and so do the flows of an owner. Within a turn the earliest due time goes
        first. A frame joins others if no frame, itself included, becomes late by it. A session has
        at most one frame with the policy.
        """
        admission = self.admission
        num_free = min(admission.num_free, admission.max_batch)
        if not num_free or not self._frames:
            return [], []
        admission.note_progress(now_s)
        free_for_texts = admission.free_for_texts(now_s)
        busy = {frame.flow for frame in admission.in_flight if frame.is_session}
        chosen: list[QueuedFrame] = []
        expired: list[QueuedFrame] = []
        late_alone: list[QueuedFrame] = []  # one of them goes if no other frame can
        passed_over: dict[str, int] = {}  # the turn of each owner's first frame that did not fit
        for frame in self._turns.in_order(self._frames, now_s):
            turn = self._turns.flow_turn(frame)
            if not admission.is_in_time(frame, now_s, now_s):
                expired.append(frame)
            elif frame.flow in busy or (frame.is_text and free_for_texts <= 0):
                continue  # its session has one with the policy, or actions need the place
            elif len(chosen) == num_free:
                break
            elif turn > passed_over.get(frame.owner, turn):
                continue  # or else the one passed over, whose turn is earlier, might never fit
            elif admission.is_late(frame, 1.0, now_s) and not self._turns.is_behind(frame):
                late_alone.append(frame)
            elif admission.may_join(frame, chosen, now_s):
                chosen.append(frame)
                free_for_texts -= frame.is_text
            elif frame.has_deadline:
                passed_over.setdefault(frame.owner, turn)
            elif self._turns.is_urgent(frame, now_s):
                break  # it has waited long enough: nobody goes before it
        if late_alone and not chosen and not admission.in_flight:
            chosen = [max(late_alone, key=lambda one: one.deadline_s)]
        for frame in (*expired, *chosen):
            self.remove(frame)
        if chosen:
            self._turns.start(chosen)
            self._staying = +self._staying
            admission.start(chosen, now_s)
        return chosen, expired

    def remove(self, frame: QueuedFrame) -> bool:
        """Take a frame out, and return whether it still waited."""
        if frame not in self._frames:
            return False
        del self._frames[frame]
        self._turns.leave(frame)
        self._staying[frame.owner] -= frame.overfills_until_s is not None
        if frame.is_session:
            del self._sessions[frame.flow]
        return True

    def remove_session(self, flow: str) -> QueuedFrame | None:
        """Take out the frame of a session that was reset, and return it."""
        frame = self._sessions.get(flow)
        if frame is not None:
            self.remove(frame)
        return frame

    def refusal(self, now_s: float) -> OverloadedError:
        """Return the error for a frame that finds the queue full."""
        retry_after_s = self.clears_in_s(now_s)
        return OverloadedError(
            f"{len(self)} frames are waiting; try again in {retry_after_s * 1000:.0f} ms",
            retry_after_s,
        )

    def clears_in_s(self, now_s: float) -> float:
        """Return the seconds until all waiting frames will have been answered, roughly."""
        admission = self.admission
        each_s = max(
            (admission.service_times.expected_s(one.timing_key, now_s) for one in self._frames),
            default=0,
        )
        num_batches = (len(self._frames) + admission.num_places) // admission.num_places
        return admission.free_s(now_s) - now_s + num_batches * each_s
