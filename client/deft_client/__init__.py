"""The robot side of Deft: send a camera frame and an instruction, receive actions. Never torch."""

from deft_client.client import AsyncPolicyClient, PolicyClient
from deft_client.errors import DeftError, ProblemError, TransportError, WireError
from deft_client.images import ImageEncoding
from deft_client.settings import ClientSettings, Retries, Timeouts
from deft_client.types import (
    ActionChunk,
    ActOptions,
    DecodeTrace,
    Intervention,
    Observation,
    PassTrace,
    ServerInfo,
    StageTimings,
)
from deft_client.wire_limits import WireLimits

__all__ = [
    "ActOptions",
    "ActionChunk",
    "AsyncPolicyClient",
    "ClientSettings",
    "DecodeTrace",
    "DeftError",
    "ImageEncoding",
    "Intervention",
    "Observation",
    "PassTrace",
    "PolicyClient",
    "ProblemError",
    "Retries",
    "ServerInfo",
    "StageTimings",
    "Timeouts",
    "TransportError",
    "WireError",
    "WireLimits",
]
