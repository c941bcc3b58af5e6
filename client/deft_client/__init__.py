"""The robot side of Deft: send a camera frame and an instruction, receive actions. Never torch.

The names below are loaded when they are first used, so that importing the package costs next to
nothing: a shell command wants only one module.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from deft_client.actions import ActionQueue, ActionRules
    from deft_client.async_client import AsyncPolicyClient
    from deft_client.client import PolicyClient
    from deft_client.control_loop import Arm, ControlLoop, LoopSettings, LoopStatus
    from deft_client.errors import ProblemError, TransportError
    from deft_client.recorder import Recorder
    from deft_client.settings import ClientSettings, Retries, Timeouts, TlsFiles
    from deft_client.stream import StreamClient
    from deft_core.errors import DeftError, WireError
    from deft_core.types import (
        ActionChunk,
        ActOptions,
        ChunkBlending,
        DecodeTrace,
        Observation,
        PassTrace,
        ServerInfo,
        StageTimings,
    )
    from deft_core.wire.images import ImageEncoding
    from deft_core.wire.limits import WireLimits

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
    "ChunkBlending",
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
    "deft_client.actions": ("ActionQueue", "ActionRules"),
    "deft_client.async_client": ("AsyncPolicyClient",),
    "deft_client.client": ("PolicyClient",),
    "deft_client.control_loop": ("Arm", "ControlLoop", "LoopSettings", "LoopStatus"),
    "deft_client.errors": ("ProblemError", "TransportError"),
    "deft_client.recorder": ("Recorder",),
    "deft_client.settings": ("ClientSettings", "Retries", "Timeouts", "TlsFiles"),
    "deft_client.stream": ("StreamClient",),
    "deft_core.errors": ("DeftError", "WireError"),
    "deft_core.types": (
        *("ActOptions", "ActionChunk", "DecodeTrace", "Observation"),
        *("PassTrace", "ChunkBlending", "ServerInfo", "StageTimings"),
    ),
    "deft_core.wire.images": ("ImageEncoding",),
    "deft_core.wire.limits": ("WireLimits",),
}


def __getattr__(name: str) -> object:
    """Load a public name from the module it lives in."""
    if name == "Seam":  # the earlier name
        import_module("deft_core.errors").warn_renamed("deft_client.Seam", "ChunkBlending")
        name = "ChunkBlending"
    for home, names in _HOMES.items():
        if name in names:
            return getattr(import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, for those who look around."""
    return __all__
