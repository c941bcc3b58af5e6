"""Decides which waiting frames are answered next, and which will not be. Pure: no clock, no I/O.

A flow is a session, or all frames of one caller that name no session. An owner is an API key, or
an address where there are none; its flows share what it gets. The rules:

- a session has at most one frame with the policy and one waiting; a newer frame takes the place
  of the one that waits;
- frames of owners that had more of the policy lately than others that wait go last: an owner is
  ahead when it had the time of a batch more than the one that had least;
- frames with a deadline go before frames without, except for one place in `OVERDUE_EVERY`, which
  belongs to the frame without that has waited longest beyond `patience`. So neither starves;
- then the earliest due time goes first. A deadline is a due time; a frame without one is due
  `patience` after it arrived, later still if its flow asks for more than its share;
- the line is bounded. Running sessions (those answered before) may use all of it, newcomers only
  what is cleared in `newcomer_batches` batches, so that overload costs no robot its place. When it
  is full, an owner with many waiting frames loses its newest to an owner with fewer, a flow with
  many to a flow with none, and a frame without a deadline to one with;
- a frame that `stays_until_s` joins a full line, too: its caller could not try again. It takes no
  place from the frames of other flows, and they take none from it;
- a frame that cannot meet its deadline is refused at once, or dropped before its batch starts;
- a batch that is not full waits up to `max_wait`, and no longer than it takes itself, for a session
  that is about to send, unless a replica would be free for that, too.

The policy is there once, or in replicas that each take one batch at a time.

Times are seconds on any one monotonic clock.
"""

import heapq
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import chain
from typing import NamedTuple

from deft_server.serving.estimates import OwnerShares, Rhythm, ServiceTime
from deft_server.serving.waiting_frames import Ticket, Turn, WaitingFrames

OVERDUE_EVERY = 8  # places, of which one is for a frame without a deadline
STALE_AFTER_S = 1.0  # a measurement older than this does not justify a refusal


@dataclass(frozen=True)
class LineRules:
    """The bounds of the line."""

    max_batch: int = 8
    max_wait_s: float = 0.004
    max_waiting: int = 64
    newcomer_batches: int = 2
    patience_s: float = 0.2
    num_replicas: int = 1


class _Flight(NamedTuple):
    """A batch that is with the policy, and since when."""

    batch: tuple[Ticket, ...]
    started_s: float


class Admission(Enum):
    """What becomes of a frame that is offered."""

    WAITS = "waits"
    FULL = "full"
    TOO_LATE = "too late"


class Offer(NamedTuple):
    """What became of one frame, and whose place it took."""

    admission: Admission
    superseded: Ticket | None = None  # an older frame of the same session
    displaced: Ticket | None = None  # a frame of a flow that had more than its share


class Decision(NamedTuple):
    """What to do now: start `batch` if there is one, fail `expired`, look again in `wake_s`."""

    batch: tuple[Ticket, ...] = ()
    expired: tuple[Ticket, ...] = ()
    wake_s: float | None = None


class WaitingLine:
    """The frames that wait for the policy, and the sessions that are with it."""

    def __init__(self, rules: LineRules) -> None:
        self.rules = rules
        self.max_batch = rules.max_batch
        self.num_replicas = rules.num_replicas
        self.service_time = ServiceTime()
        self._waiting = WaitingFrames()
        self._flights: dict[int, _Flight] = {}  # by the first frame's number, the oldest first
        self._flying: set[str] = set()  # sessions
        self._measured_s = -math.inf
        self._share_used_s: dict[str, float] = {}
        self._shares = OwnerShares()
        self._overdue_credit = 0.0  # places, or parts of one, that overdue frames are owed
        self._rhythm = Rhythm()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def in_flight(self) -> tuple[Ticket, ...]:
        """The frames that are with the policy."""
        return tuple(ticket for flight in self._flights.values() for ticket in flight.batch)

    def offer(self, ticket: Ticket, now_s: float) -> Offer:
        """Let a frame join the line, or say why it may not."""
        self._rhythm.asked(ticket.flow, now_s)
        older = self._waiting.of_flow(ticket.flow) if ticket.is_session else None
        turn = self._turn_of(ticket, older, now_s)
        if self._is_hopeless(ticket, turn, now_s):
            return Offer(Admission.TOO_LATE)
        displaced = None
        has_place = older is not None and older.stays_until_s is None
        if not has_place and self._is_full_for(ticket):
            displaced = self._displaced_by(ticket)
            if displaced is None:
                return Offer(Admission.FULL)
        if ticket.owner not in self._waiting.owners:
            self._shares.join(ticket.owner)
        for leaving in (older, displaced):
            if leaving is not None:
                self.withdraw(leaving.number)
        self._waiting.add(ticket, turn)
        self._spend_share(ticket.flow, now_s)
        return Offer(Admission.WAITS, older, displaced)

    def withdraw(self, number: int) -> None:
        """Take a frame out of the line, if it is still in it."""
        self._waiting.remove(number)

    def forget(self, flow: str) -> Ticket | None:
        """Take out what a session has waiting, because it was reset; return that."""
        self._rhythm.forget(flow)
        waiting = self._waiting.of_flow(flow)
        if waiting is not None:
            self.withdraw(waiting.number)
        return waiting

    def decide(self, now_s: float) -> Decision:
        """Choose the next batch if a replica is free; a chosen batch is in flight from then on.

        Where there are replicas, ask again after a batch: another may be free.
        """
        if len(self._flights) >= self.num_replicas or not self._waiting:
            return Decision()
        chosen, expired = self._choose(now_s)
        for ticket in expired:
            self.withdraw(ticket.number)
        wait_s = self._worth_waiting_s(chosen, now_s)
        if wait_s > 0:
            return Decision(expired=expired, wake_s=wait_s)
        for ticket in chosen:
            self.withdraw(ticket.number)
        if chosen:
            self._flights[chosen[0].number] = _Flight(chosen, now_s)
            self._flying.update(one.flow for one in chosen if one.is_session)
            self._note_places(chosen)
        return Decision(batch=chosen, expired=expired)

    def finish(
        self, now_s: float, service_s: float | None = None, batch: tuple[Ticket, ...] | None = None
    ) -> None:
        """Take in that a replica is free again; `service_s` is what its batch took, if it was
        answered in one go. Without `batch` it is the one that was started first."""
        number = next(iter(self._flights)) if batch is None else batch[0].number
        done = self._flights.pop(number).batch
        self._flying -= {one.flow for one in done if one.is_session}
        if service_s is not None:
            self.service_time.observe(len(done), service_s)
            self._measured_s = now_s
        for ticket in done:
            if ticket.is_session:
                self._rhythm.answered(ticket.flow, now_s)

    def clears_in_s(self, now_s: float) -> float:
        """Return the seconds until all that waits now will have been answered."""
        batches = math.ceil((len(self._waiting) + 1) / self.max_batch)
        last_s = self._free_s(batches - 1, now_s)
        return last_s - now_s + self.service_time.expect(self.max_batch)

    def _turn_of(self, ticket: Ticket, older: Ticket | None, now_s: float) -> Turn:
        """Return a frame's turn; one that replaces another is due no later than that was."""
        due_s = ticket.deadline_s
        if due_s == math.inf:
            due_s = self._fair_start_s(ticket.flow, now_s) + self.rules.patience_s
        is_patient = not ticket.has_deadline
        if older is None:
            return Turn(is_patient, due_s, ticket.number, ticket.arrived_s)
        turn = self._waiting.turn_of(older)
        return Turn(is_patient, min(due_s, turn.due_s), turn.number, turn.since_s)

    def _fair_start_s(self, flow: str, now_s: float) -> float:
        """Return now, or later if the flow has used up its share until then."""
        return max(now_s, self._share_used_s.get(flow, now_s))

    def _spend_share(self, flow: str, now_s: float) -> None:
        """Take one frame's part of the policy's time off what a flow may still ask for."""
        share_s = self.service_time.expect(self.max_batch) / self._capacity
        self._share_used_s[flow] = self._fair_start_s(flow, now_s) + share_s
        if len(self._share_used_s) > 2 * self.rules.max_waiting:
            kept = {name: used for name, used in self._share_used_s.items() if used > now_s}
            self._share_used_s = kept

    def _is_hopeless(self, ticket: Ticket, turn: Turn, now_s: float) -> bool:
        """Would a frame be answered after its deadline, as far as fresh measurements tell?"""
        if not ticket.has_deadline:
            return False
        if ticket.deadline_s <= now_s:
            return True
        if now_s - self._measured_s > STALE_AFTER_S and not self._flights:
            return False
        ahead = self._waiting.num_before(ticket, turn, self._ahead())
        ready_s = self._free_s(ahead // self.max_batch, now_s)
        ready_s += self.service_time.expect(ahead % self.max_batch + 1)
        return ready_s > ticket.deadline_s

    @property
    def _capacity(self) -> int:
        """How many frames can be with the policy at a time."""
        return self.max_batch * max(1, self.num_replicas)

    def _free_s(self, batches_ahead: int, now_s: float) -> float:
        """Return when a replica is free for one more batch, after so many full ones."""
        free_s = [
            max(now_s, one.started_s + self.service_time.expect(len(one.batch)))
            for one in self._flights.values()
        ]
        free_s += [now_s] * (max(1, self.num_replicas) - len(free_s))
        heapq.heapify(free_s)
        full_s = self.service_time.expect(self.max_batch)
        for _ in range(batches_ahead):
            heapq.heapreplace(free_s, free_s[0] + full_s)
        return free_s[0]

    def _is_full_for(self, ticket: Ticket) -> bool:
        if ticket.stays_until_s is not None:
            return False
        taken = self._waiting.num_places(ticket.flow)
        if ticket.is_running:
            return taken >= self.rules.max_waiting
        return taken >= min(self.rules.max_waiting, self.rules.newcomer_batches * self._capacity)

    def _displaced_by(self, ticket: Ticket) -> Ticket | None:
        """Return the frame that loses its place to a newcomer, if one should."""
        presses = ticket.has_deadline and self._waiting.has_patient
        if self._waiting.is_even_for(ticket) and not presses:
            return None
        movable = [one for one in self._waiting if one.stays_until_s is None]
        for name_of in (_owner_of, _flow_of):
            counts = Counter(name_of(one) for one in movable)
            largest, count = max(counts.items(), key=lambda one: one[1], default=("", 0))
            if count >= counts[name_of(ticket)] + 2:
                return _newest([one for one in movable if name_of(one) == largest])
        patient = [one for one in movable if not one.has_deadline]
        is_behind = _owner_of(ticket) in self._ahead()
        return _newest(patient) if patient and ticket.has_deadline and not is_behind else None

    def _ahead(self) -> frozenset[str]:
        """Return the waiting owners that had more than their share lately."""
        if len(self._waiting.owners) < 2:
            return frozenset()
        return self._shares.ahead(self._waiting.owners, self.service_time.expect(self.max_batch))

    def _in_order(self, now_s: float) -> Iterator[Ticket]:
        """Return what waits, in the order in which it should go."""
        ahead = self._ahead()
        ordered = self._waiting.in_order(ahead)
        overdue = self._waiting.first_patient(ahead) if self._overdue_credit >= 1 else None
        if overdue is None or self._waiting.turn_of(overdue).due_s > now_s:
            return ordered
        return chain([overdue], (one for one in ordered if one is not overdue))

    def _note_places(self, chosen: Sequence[Ticket]) -> None:
        """Count what the owners had, and the places that were not left to overdue frames."""
        each_s = self.service_time.expect(len(chosen)) / len(chosen)
        self._shares.use([one.owner for one in chosen], each_s, self._waiting.owners)
        num_urgent = sum(one.has_deadline for one in chosen)
        earned = num_urgent / (OVERDUE_EVERY - 1) - (num_urgent < len(chosen))
        self._overdue_credit = min(1.0, max(0.0, self._overdue_credit + earned))

    def _choose(self, now_s: float) -> tuple[tuple[Ticket, ...], tuple[Ticket, ...]]:
        """Return the batch to start now, and the frames whose deadline cannot be met any more."""
        chosen: list[Ticket] = []
        expired: list[Ticket] = []
        tightest_s = math.inf
        alone_s = now_s + self._believed_s(1, now_s)
        for ticket in self._in_order(now_s):
            if ticket.deadline_s < alone_s or ticket.deadline_s <= now_s:
                expired.append(ticket)
                continue
            if ticket.flow in self._flying:
                continue  # its memory is with another replica
            if len(chosen) == self.max_batch:
                break
            limit_s = min(tightest_s, ticket.deadline_s)
            if not chosen or now_s + self._believed_s(len(chosen) + 1, now_s) <= limit_s:
                chosen.append(ticket)
                tightest_s = limit_s
        return tuple(chosen), tuple(expired)

    def _believed_s(self, size: int, now_s: float) -> float:
        if now_s - self._measured_s > STALE_AFTER_S:
            return 0.0
        return self.service_time.expect(size)

    def _worth_waiting_s(self, chosen: Sequence[Ticket], now_s: float) -> float:
        """Return how much longer a batch should wait for company."""
        if not chosen or len(chosen) >= self.max_batch:
            return 0.0
        if len(self._flights) + 1 < self.num_replicas:
            return 0.0
        due_s = self._rhythm.next_due_s(now_s - self.rules.max_wait_s)  # robots are late, too
        if due_s == math.inf:
            return 0.0
        # Never longer than a batch takes: beyond that, going twice is quicker.
        patience_s = min(self.rules.max_wait_s, self.service_time.expect(len(chosen) + 1))
        until_s = patience_s + min(self._waiting.turn_of(one).since_s for one in chosen)
        slack_s = min(one.deadline_s for one in chosen) - self._believed_s(self.max_batch, now_s)
        until_s = min(until_s, slack_s)
        return max(0.0, until_s - now_s) if due_s <= until_s else 0.0


def _owner_of(ticket: Ticket) -> str:
    return ticket.owner


def _flow_of(ticket: Ticket) -> str:
    return ticket.flow


def _newest(tickets: Sequence[Ticket]) -> Ticket:
    return max(tickets, key=lambda one: one.number)
