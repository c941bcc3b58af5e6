"""Where each peer's message keeps the picture, the instruction and the state.

Pure functions from unpacked messages to `ActMessage`; whether a frame is already rotated or
cropped is the matter of `profiles`.
"""

from collections.abc import Mapping

import numpy as np

from deft_client.errors import MessageTooLargeError, UnusableValueError
from deft_client.types import ActOptions, Image, Observation
from deft_client.wire.fields import WireLimits
from deft_client.wire.messages import ActMessage
from deft_server.compat.frames import (
    brief,
    missing,
    read_frame,
    read_name,
    read_openpi_frame,
    read_state,
    read_text,
)

Fields = Mapping[str, object]

# LIBERO, DROID and a plain key, in the order in which openpi's own configurations use them.
_OPENPI_IMAGES = ("observation/image", "observation/exterior_image_1_left", "image")
_OPENPI_WRISTS = ("observation/wrist_image", "observation/wrist_image_left", "wrist_image")
_OPENPI_STATES = ("observation/state", "state")
_DROID_STATE = ("observation/joint_position", "observation/gripper_position")
_ALOHA_MAIN_CAMERA = "cam_high"


def openvla_request(fields: Fields, limits: WireLimits) -> ActMessage:
    """Read what OpenVLA's `deploy.py` takes; unknown fields are ignored, as there."""
    image = read_frame(_take(fields, "image"), "image", limits)
    instruction = read_text(_take(fields, "instruction"), "instruction", limits)
    key = read_name(fields.get("unnorm_key"), "unnorm_key", limits)
    return ActMessage(Observation(image, instruction), ActOptions(statistics_key=key))


def oft_request(fields: Fields, limits: WireLimits) -> ActMessage:
    """Read what OpenVLA-OFT's server takes: every field with `wrist` in its name is a camera."""
    image = read_frame(_take(fields, "full_image"), "full_image", limits)
    instruction = read_text(_take(fields, "instruction"), "instruction", limits)
    wrists = [name for name in fields if "wrist" in name]
    _check_camera_count(wrists, limits)
    cameras = {name: read_frame(fields[name], name, limits) for name in wrists}
    state = read_state(fields["state"], "state", limits) if "state" in fields else None
    return ActMessage(Observation(image, instruction, cameras, state))


def openpi_request(fields: Fields, limits: WireLimits) -> ActMessage:
    """Read a LIBERO, DROID or ALOHA observation of openpi."""
    prompt = read_text(_take(fields, "prompt"), "prompt", limits)
    cameras: dict[str, Image] = {}
    if "images" in fields:
        image, cameras = _aloha_frames(fields["images"], limits)
    else:
        name = _first(fields, _OPENPI_IMAGES)
        image = read_openpi_frame(fields[name], name, limits)
    for name in _OPENPI_WRISTS:
        if name in fields:
            cameras["wrist"] = read_openpi_frame(fields[name], name, limits)
    return ActMessage(Observation(image, prompt, cameras, _openpi_state(fields, limits)))


def vla_eval_request(payload: Fields, limits: WireLimits) -> ActMessage:
    """Read an observation of the vla-eval harness: named images, the first or `agentview` leads."""
    images = _take(payload, "images")
    if not isinstance(images, dict) or not images:
        raise UnusableValueError("images", f"must be a map of pictures, got {brief(images)}")
    _check_camera_count(images, limits)
    frames = {_camera(name): read_frame(one, "images", limits) for name, one in images.items()}
    main = "agentview" if "agentview" in frames else next(iter(frames))
    image = frames.pop(main)
    text = read_text(_take(payload, "task_description"), "task_description", limits)
    state = read_state(payload["states"], "states", limits) if "states" in payload else None
    return ActMessage(Observation(image, text, frames, state))


def _take(fields: Fields, name: str) -> object:
    if name not in fields:
        raise missing(name, fields)
    return fields[name]


def _first(fields: Fields, names: tuple[str, ...]) -> str:
    found = next((name for name in names if name in fields), None)
    if found is None:
        raise missing(" or ".join(names), fields)
    return found


def _aloha_frames(value: object, limits: WireLimits) -> tuple[Image, dict[str, Image]]:
    if not isinstance(value, dict) or not value:
        raise UnusableValueError("images", f"must be a map of pictures, got {brief(value)}")
    _check_camera_count(value, limits)
    frames = {
        _camera(name): read_openpi_frame(one, "images", limits) for name, one in value.items()
    }
    main = _ALOHA_MAIN_CAMERA if _ALOHA_MAIN_CAMERA in frames else next(iter(frames))
    return frames.pop(main), frames


def _openpi_state(
    fields: Fields, limits: WireLimits
) -> np.ndarray[tuple[int], np.dtype[np.float32]] | None:
    for name in _OPENPI_STATES:
        if name in fields:
            return read_state(fields[name], name, limits)
    parts = [read_state(fields[name], name, limits) for name in _DROID_STATE if name in fields]
    return np.concatenate(parts) if parts else None


def _camera(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= 64 or not name.isprintable():
        raise UnusableValueError("images", f"a camera needs a printable name, got {brief(name)}")
    return name


def _check_camera_count(names: object, limits: WireLimits) -> None:
    count = len(names) if isinstance(names, dict | list) else 0
    if count > limits.max_cameras + 1:
        raise MessageTooLargeError(
            "images", f"{count} cameras; at most {limits.max_cameras + 1} are taken"
        )
