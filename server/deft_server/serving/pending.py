"""What the scheduler has in hand: frames that wait for an answer, and batches of them."""

import asyncio
from dataclasses import dataclass
from typing import NamedTuple

from deft_client.types import ActionChunk, altered
from deft_policies.base import ActAnswer, ActRequest
from deft_server.serving.sessions import RobotSession
from deft_server.serving.waiting_frames import Ticket


class Answered(NamedTuple):
    """One frame's answer, and how long it waited for its batch."""

    chunk: ActionChunk
    queue_s: float
    batch_size: int


@dataclass(eq=False)
class PendingFrame:
    """A frame of a session, and who waits for its answer."""

    ticket: Ticket
    request: ActRequest
    session: RobotSession
    answer: asyncio.Future[Answered]
    joined_s: float

    def take(self, answer: ActAnswer, started_s: float, batch_size: int) -> None:
        """Hand the answer out, unless it comes too late: then it changes nothing."""
        if not self.answer.done():
            self.session.learn(answer.memory)
            queue_s = max(0.0, started_s - self.joined_s)
            self.answer.set_result(Answered(answer.chunk, queue_s, batch_size))

    def fail(self, error: Exception) -> None:
        """Tell who waits that there is no answer."""
        if not self.answer.done():
            self.answer.set_exception(error)


@dataclass(eq=False)
class PendingBatch:
    """Frames that are with the policy; `line` is what the waiting line knows them by."""

    frames: tuple[PendingFrame, ...]
    line: tuple[Ticket, ...]
    hang_timer: asyncio.TimerHandle | None
    company_s: float  # that it waited for one more frame

    @property
    def requests(self) -> list[ActRequest]:
        """What the policy is asked, with each session's memory as it is now."""
        return [altered(one.request, {"memory": one.session.memory}) for one in self.frames]

    def fail(self, error: Exception) -> None:
        """Tell all who wait for an answer."""
        for frame in self.frames:
            frame.fail(error)

    def unwatch(self) -> None:
        """Let it take as long as it likes: it is over."""
        if self.hang_timer is not None:
            self.hang_timer.cancel()
