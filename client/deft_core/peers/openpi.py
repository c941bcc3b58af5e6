"""openpi's messages, for its server's side and its client's: msgpack maps with arrays.

Whether a frame is already rotated or cropped is the matter of profiles.
"""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from deft_core.errors import UnusableValueError
from deft_core.peers.arrays import (
    missing,
    read_actions,
    read_cameras,
    read_frames,
    read_state,
    read_text,
    take,
)
from deft_core.types import ActionChunk, Observation, StageTimings
from deft_core.wire.limits import ReadContext, WireLimits
from deft_core.wire.messages import ActMessage
from deft_core.wire.refusals import brief

Fields = Mapping[str, object]
_Picture = tuple[str, object]  # with its field, for complaints

# LIBERO, DROID and a plain key, in the order in which openpi's own configurations use them.
_IMAGES = ("observation/image", "observation/exterior_image_1_left", "image")
_WRISTS = ("observation/wrist_image", "observation/wrist_image_left", "wrist_image")
_STATES = ("observation/state", "state")
_DROID_STATE = ("observation/joint_position", "observation/gripper_position")
_ALOHA_MAIN_CAMERA = "cam_high"


def observation_fields(observation: Observation) -> dict[str, object]:
    """Return an observation as openpi's LIBERO servers take it."""
    fields: dict[str, object] = {"observation/image": observation.image}
    for name, image in observation.cameras.items():
        fields[f"observation/{name}_image"] = image
    if observation.state is not None:
        fields["observation/state"] = observation.state
    fields["prompt"] = observation.instruction
    return fields


def read_answer(answer: object) -> ActionChunk:
    """Return the actions in a server's answer, or raise `WireError`."""
    if not isinstance(answer, dict):
        raise UnusableValueError("answer", f"no map, but {brief(answer)}")
    actions = read_actions(answer.get("actions"), "actions", num_axes=2)
    timing = answer.get("server_timing")
    infer_ms = timing.get("infer_ms") if isinstance(timing, dict) else None
    total_ms = float(infer_ms) if isinstance(infer_ms, int | float) else 0.0
    return ActionChunk(actions, StageTimings(total_ms=total_ms))


def openpi_request(fields: Fields, context: ReadContext) -> ActMessage:
    """Read a LIBERO, DROID or ALOHA observation of openpi."""
    prompt = read_text(take(fields, "prompt"), "prompt", context.limits)
    main, cameras = _pictures(fields, context.limits)
    image, *others = read_frames([main, *cameras.values()], context)
    frames = dict(zip(cameras, others, strict=True))
    return ActMessage(Observation(image, prompt, frames, _state(fields, context.limits)))


def _pictures(fields: Fields, limits: WireLimits) -> tuple[_Picture, dict[str, _Picture]]:
    """Return the main picture and those of further cameras, none of them decoded."""
    cameras: dict[str, _Picture] = {}
    if "images" in fields:
        for camera, value in read_cameras(fields["images"], limits).items():
            cameras[camera] = _picture(value, "images")
        is_aloha = _ALOHA_MAIN_CAMERA in cameras
        main = cameras.pop(_ALOHA_MAIN_CAMERA if is_aloha else next(iter(cameras)))
    else:
        name = next((name for name in _IMAGES if name in fields), None)
        if name is None:
            raise missing(" or ".join(_IMAGES), fields)
        main = _picture(fields[name], name)
    for name in _WRISTS:
        if name in fields:
            cameras["wrist"] = _picture(fields[name], name)
    return main, cameras


def _state(fields: Fields, limits: WireLimits) -> NDArray[np.float32] | None:
    for name in _STATES:
        if name in fields:
            return read_state(fields[name], name, limits)
    parts = [read_state(fields[name], name, limits) for name in _DROID_STATE if name in fields]
    return np.concatenate(parts) if parts else None


def _picture(value: object, field: str) -> _Picture:
    """Return a picture as openpi's transforms see it: floats in [0, 1] and channels first too."""
    if isinstance(value, np.ndarray) and value.ndim == 3:
        if value.dtype.kind == "f":
            value = _from_unit_range(value, field)
        if value.shape[0] == 3 and value.shape[2] != 3:
            value = np.ascontiguousarray(np.moveaxis(value, 0, 2))
    return field, value


def _from_unit_range(value: NDArray[np.generic], field: str) -> NDArray[np.uint8]:
    if not np.isfinite(value).all() or value.min(initial=0) < 0 or value.max(initial=0) > 1:
        raise UnusableValueError(field, "a picture of floats must stay within [0, 1]")
    return (255 * value.astype(np.float32)).astype(np.uint8)
