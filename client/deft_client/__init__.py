"""The robot side of Deft: send a camera frame and an instruction, receive actions. Never torch.

The names below are loaded when they are first used, so that importing the package costs next to
nothing: the server wants only the types of it, a shell command only one module.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deft_client.actions import ActionQueue, ActionRules, Seam
    from deft_client.async_client import AsyncPolicyClient
    from deft_client.client import PolicyClient
    from deft_client.control_loop import Arm, ControlLoop, LoopSettings, LoopStatus
    from deft_client.errors import DeftError, ProblemError, TransportError, WireError
    from deft_client.recorder import Recorder
    from deft_client.settings import ClientSettings, Retries, Timeouts, TlsFiles
    from deft_client.stream import StreamClient
    from deft_client.types import (
        ActionChunk,
        ActOptions,
        DecodeTrace,
        Observation,
        PassTrace,
        ServerInfo,
        StageTimings,
    )
    from deft_client.wire.fields import WireLimits
    from deft_client.wire.images import ImageEncoding

__all__ = [
    "ActOptions",
    "ActionChunk",
    "ActionQueue",
    "ActionRules",
    "Arm",
    "AsyncPolicyClient",
    "ClientSettings",
    "ControlLoop",
    "DecodeTrace",
    "DeftError",
    "ImageEncoding",
    "LoopSettings",
    "LoopStatus",
    "Observation",
    "PassTrace",
    "PolicyClient",
    "ProblemError",
    "Recorder",
    "Retries",
    "Seam",
    "ServerInfo",
    "StageTimings",
    "StreamClient",
    "Timeouts",
    "TlsFiles",
    "TransportError",
    "WireError",
    "WireLimits",
]

_HOMES = {
    "actions": ("ActionQueue", "ActionRules", "Seam"),
    "async_client": ("AsyncPolicyClient",),
    "client": ("PolicyClient",),
    "control_loop": ("Arm", "ControlLoop", "LoopSettings", "LoopStatus"),
    "errors": ("DeftError", "ProblemError", "TransportError", "WireError"),
    "wire.images": ("ImageEncoding",),
    "recorder": ("Recorder",),
    "settings": ("ClientSettings", "Retries", "Timeouts", "TlsFiles"),
    "stream": ("StreamClient",),
    "types": (
        *("ActOptions", "ActionChunk", "DecodeTrace", "Observation"),
        *("PassTrace", "ServerInfo", "StageTimings"),
    ),
    "wire.fields": ("WireLimits",),
}


def __getattr__(name: str) -> object:
    """Load a public name from the module it lives in."""
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, for those who look around."""
    return __all__
