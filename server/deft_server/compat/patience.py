"""Lets a frame wait where its client could not try again: peers' clients know nothing of 429.

Their frames name no session, so a busy server takes each for a newcomer's.
"""

import asyncio
import time

from deft_client.types import ActionChunk, ActOptions, Observation
from deft_server.errors import OverloadedError
from deft_server.serving.access import Caller
from deft_server.serving.service import Service

PATIENCE_S = 10.0
_SHORTEST_PAUSE_S = 0.005  # while nothing was measured, the line promises a place at once


async def act_patiently(
    service: Service,
    observation: Observation,
    options: ActOptions,
    caller: Caller,
    arrived_s: float,
) -> ActionChunk:
    """Ask the policy, and again while it is too busy and patience lasts."""
    while True:
        try:
            return await service.act(observation, options, caller, arrived_s)
        except OverloadedError as error:
            pause_s = max(_SHORTEST_PAUSE_S, error.retry_after_s)
            if time.monotonic() - arrived_s + pause_s > PATIENCE_S:
                raise
            await asyncio.sleep(pause_s)
