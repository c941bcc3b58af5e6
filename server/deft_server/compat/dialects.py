"""One connection at `/`, in whichever of two dialects its client speaks. Knows no sockets.

openpi's client waits for a metadata frame before it sends anything; vla-eval's client waits for a
HELLO message. The first frame of this server is both, and what arrives next tells them apart.
"""

import time
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deft_client.peers.msgpack_numpy import pack
from deft_client.peers.openpi import openpi_request
from deft_client.peers.vla_eval import PROTOCOL_VERSION, Message, MessageType, vla_eval_request
from deft_client.types import ActionChunk, ServerInfo
from deft_client.wire.fields import WireLimits
from deft_client.wire.messages import ActMessage
from deft_server.compat.profiles import OPENPI, VLA_EVAL, in_convention

_POSITION = {"name": "position", "dims": 3, "format": "delta_xyz", "range": [-1, 1]}
_ROTATION = {"name": "rotation", "dims": 3, "format": "axis_angle", "range": [-3.15, 3.15]}
_GRIPPER = {"name": "gripper", "dims": 1, "format": "binary_close_positive", "range": [-1, 1]}
_IMAGE = {"name": "image", "dims": 0, "format": "rgb_hwc_uint8"}
_LANGUAGE = {"name": "language", "dims": 0, "format": "language"}
_ARM_DIMENSIONS = 7  # position, rotation and gripper: the only layout these specs describe


def greeting(info: ServerInfo, session_id: str, version: str) -> bytes:
    """Return metadata for openpi that is at the same time a HELLO for vla-eval."""
    payload: dict[str, object] = {
        "harness_version": f"deft {version}",
        "protocol_version": PROTOCOL_VERSION,
        "model_server": info.policy,
        "capabilities": {},
        "observation_params": {"send_wrist_image": False, "send_state": False},
        "observation_spec": {"image": _IMAGE, "language": _LANGUAGE},
    }
    if info.action_dim == _ARM_DIMENSIONS:
        payload["action_spec"] = {
            "position": _POSITION,
            "rotation": _ROTATION,
            "gripper": _GRIPPER,
        }
    hello = Message(MessageType.HELLO, payload, seq=0, timestamp=time.time())
    metadata: Mapping[str, object] = {
        "policy": info.policy,
        "action_dim": info.action_dim,
        "action_horizon": info.chunk_length,
        "image_size": [info.image_height, info.image_width],
        "image_chain": info.image_chain,
        "gripper": OPENPI.gripper.value,
        "statistics_keys": list(info.statistics_keys),
        "decoding": info.decoding,
        "session_id": session_id,
    }
    return pack({**hello.to_map(), **metadata})


@dataclass
class OpenpiDialect:
    """Turns openpi's observations into requests and answers into its results."""

    limits: WireLimits
    prev_total_ms: float | None = None

    def request(self, fields: Mapping[str, object]) -> ActMessage:
        """Return the observation."""
        return openpi_request(fields, self.limits)

    def result(self, chunk: ActionChunk, infer_ms: float) -> bytes:
        """Return the frame that answers it."""
        timing = {"infer_ms": infer_ms}
        if self.prev_total_ms is not None:
            timing["prev_total_ms"] = self.prev_total_ms
        timings = chunk.timings
        policy_ms = timings.total_ms - timings.queue_ms - timings.wire_ms
        return pack(
            {
                "actions": in_convention(chunk.actions, OPENPI),
                "policy_timing": {"infer_ms": policy_ms},
                "server_timing": timing,
            }
        )


class VlaEvalDialect:
    """Turns vla-eval's observations into requests, and hands out a chunk one action at a time."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._planned: deque[NDArray[np.float64]] = deque()

    def request(self, message: Message) -> ActMessage:
        """Return the observation."""
        return vla_eval_request(message.payload, self._limits)

    def planned_action(self) -> NDArray[np.float64] | None:
        """Return the next action of the chunk in hand, if there is one left."""
        return self._planned.popleft() if self._planned else None

    def plan(self, chunk: ActionChunk) -> NDArray[np.float64]:
        """Keep a new chunk, and return its first action."""
        self._planned = deque(in_convention(chunk.actions, VLA_EVAL))
        return self._planned.popleft()

    def start_episode(self) -> None:
        """Forget the plan of the episode before."""
        self._planned.clear()


def action_message(action: NDArray[np.float64], seq: int) -> bytes:
    """Return vla-eval's answer to the observation with that number."""
    return Message(MessageType.ACTION, {"actions": action}, seq, time.time()).encode()


def error_message(text: str, seq: int) -> bytes:
    """Return vla-eval's way of saying that an observation could not be answered."""
    return Message(MessageType.ERROR, {"error": text}, seq, time.time()).encode()
