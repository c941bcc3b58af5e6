"""What the routes of all peers' protocols have in common.

A frame may be prepared by its client, here (the chain of a protocol), or by the policy (its own
chain); which of them does is set explicitly. `/v1/info` shows the conventions under `details`.
"""

from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from deft_core.image_chain import ImageChain
from deft_core.peers.conventions import (
    CONVENTIONS,
    DEFT,
    OPENPI,
    REALTIME,
    VLA0,
    VLA_EVAL,
    Convention,
    Gripper,
)
from deft_core.types import ServerInfo
from deft_core.wire.messages import ActMessage
from deft_server.serving.access import Caller
from deft_server.serving.service import Service
from deft_server.settings import Settings


def conventions(settings: Settings, info: ServerInfo) -> dict[str, str]:
    """Return a sentence about every protocol that is served, by its name."""
    chains = {
        DEFT: ImageChain.NONE,
        CONVENTIONS[settings.profile]: settings.act_image_chain,
        OPENPI: settings.socket_image_chain,
        REALTIME: settings.socket_image_chain,
        VLA_EVAL: settings.socket_image_chain,
        VLA0: ImageChain.NONE,
    }
    gripper = info.details.get("gripper", "")
    return {
        one.endpoint: one.sentence(chain.value, info.image_chain, gripper)
        for one, chain in chains.items()
    }


def in_convention(
    actions: NDArray[np.float64], convention: Convention, info: ServerInfo
) -> NDArray[np.float64]:
    """Return actions as the clients expect them; a policy may speak their dialect itself."""
    if info.details.get("gripper") == Gripper.ROBOSUITE.meaning:
        return actions
    return convention.from_policy(actions)


_STAYS_S = 10.0


def staying(caller: Caller) -> Caller:
    """Return a caller whose frames wait where others are told to try again.

    Peers' clients know nothing of 429, and could not try again.
    """
    return replace(caller, overfills_s=_STAYS_S)


async def prepared(message: ActMessage, chain: ImageChain, service: Service) -> ActMessage:
    """Return the message with its main frame as the chain leaves it, as large as the policy's."""
    if chain is ImageChain.NONE:
        return message
    seen, size = message.observation, service.info.image_height
    image = await service.threads.run(partial(chain.apply, seen.image, size))
    return replace(message, observation=replace(seen, image=image))
