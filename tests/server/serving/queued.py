"""Frames as the queue sees them: a number to tell them apart, a flow, times."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from deft_core.types import ActOptions
from deft_server.serving.frame import QueuedFrame
from deft_server.serving.sessions import RobotSession
from tests.standins.policies import frame

_SEEN = frame()


def queued(
    number: int,
    flow: str,
    arrived_s: float,
    deadline_s: float = math.inf,
    is_session: bool = True,
    **fields: Any,
) -> QueuedFrame:
    session = RobotSession("caller", flow if is_session else None, arrived_s)
    seen = replace(_SEEN, instruction=str(number))
    return QueuedFrame(seen, ActOptions(), session, arrived_s, deadline_s, flow, **fields)


def number_of(frame: QueuedFrame) -> int:
    return int(frame.observation.instruction)


def numbers(frames: Sequence[QueuedFrame]) -> list[int]:
    return [number_of(one) for one in frames]
