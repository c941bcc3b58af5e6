"""Each peer's message becomes the same kind of observation."""

import numpy as np
import pytest

from deft_core.errors import MessageTooLargeError, WireError
from deft_core.peers.arrays import unpack
from deft_core.peers.openpi import openpi_request
from deft_core.peers.openvla import decode_act_body, oft_request, openvla_request
from deft_core.wire.limits import ReadContext, WireLimits
from deft_server.compat.vla_eval import read_message, vla_eval_request
from tests.core.peers.captures import act_capture, act_captures, frame

FRAME = np.arange(4 * 5 * 3, dtype=np.uint8).reshape(4, 5, 3)


def test_openvla_fields_become_an_observation_and_a_statistics_key() -> None:
    message = openvla_request(decode_act_body(act_capture("plain").request).fields, ReadContext())
    assert message.observation.image.shape == (224, 224, 3)
    assert message.observation.instruction == "put the white bowl to the right of the plate"
    assert message.options.statistics_key == "libero_spatial"


@pytest.mark.parametrize(
    "name",
    [
        one.name
        for one in act_captures()
        # A statistics key is the policy's matter, not that of the message.
        if one.name.startswith("error_") and "unnorm_key" not in one.name
    ],
)
def test_a_bad_openvla_request_names_its_field(name: str) -> None:
    with pytest.raises(WireError) as caught:
        openvla_request(decode_act_body(act_capture(name).request).fields, ReadContext())
    assert caught.value.field.split(".")[0] in ("image", "instruction", "encoded")


@pytest.mark.parametrize(
    "shape", [(4, 5), (4, 5, 1), (4, 5, 2), (4, 5, 3), (4, 5, 4)], ids=lambda shape: str(shape)
)
def test_grey_and_transparent_pictures_become_rgb(shape: tuple[int, ...]) -> None:
    pixels = np.arange(np.prod(shape), dtype=np.uint8).reshape(shape)
    image = openvla_request({"image": pixels, "instruction": "x"}, ReadContext()).observation.image
    assert image.shape == (4, 5, 3)
    grey = pixels.reshape(4, 5, -1)
    expected = grey[:, :, :3] if grey.shape[2] >= 3 else np.repeat(grey[:, :, :1], 3, axis=2)
    np.testing.assert_array_equal(image, expected)


def test_oft_takes_every_wrist_camera_and_the_state() -> None:
    fields = {
        "full_image": FRAME,
        "left_wrist_image": FRAME,
        "state": np.arange(8, dtype=np.float64),
        "right_wrist": FRAME,
        "instruction": "x",
    }
    observation = oft_request(fields, ReadContext()).observation
    assert list(observation.cameras) == ["left_wrist_image", "right_wrist"]
    assert observation.state is not None
    assert observation.state.dtype == np.float32


def test_openpi_takes_libero_droid_and_aloha_observations() -> None:
    libero = unpack(frame("openpi_1_observation.bin"))
    assert isinstance(libero, dict)
    observation = openpi_request(libero, ReadContext()).observation
    assert observation.cameras["wrist"].shape == (56, 56, 3)
    assert observation.state is not None
    assert observation.state.shape == (8,)

    droid = {
        "observation/exterior_image_1_left": FRAME,
        "observation/wrist_image_left": FRAME,
        "observation/joint_position": np.arange(7.0),
        "observation/gripper_position": np.arange(1.0),
        "prompt": "x",
    }
    observation = openpi_request(droid, ReadContext()).observation
    assert observation.state is not None
    assert observation.state.shape == (8,)

    tall = np.moveaxis(FRAME, 2, 0)
    aloha = {
        "images": {"cam_low": tall * 0, "cam_high": tall},
        "state": np.zeros(14),
        "prompt": "x",
    }
    observation = openpi_request(aloha, ReadContext()).observation
    np.testing.assert_array_equal(observation.image, FRAME)
    assert list(observation.cameras) == ["cam_low"]


def test_openpi_pictures_of_floats_are_scaled() -> None:
    floats = np.full((4, 5, 3), 0.5, np.float32)
    image = openpi_request({"image": floats, "prompt": "x"}, ReadContext()).observation.image
    assert image.dtype == np.uint8
    assert (image == 127).all()
    with pytest.raises(WireError, match=r"within \[0, 1\]"):
        openpi_request({"image": floats * 255, "prompt": "x"}, ReadContext())


def test_vla_eval_leads_with_the_agent_view() -> None:
    message = read_message(unpack(frame("vlaeval_05_observation_raw.bin")))
    observation = vla_eval_request(message.payload, ReadContext()).observation
    assert observation.image.shape == (8, 6, 3)
    assert observation.cameras["wrist"].shape == (4, 4, 3)
    assert observation.instruction == "x"


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"instruction": "x"}, "image"),
        ({"image": FRAME}, "instruction"),
        ({"image": FRAME.astype(np.float32), "instruction": "x"}, "image"),
        ({"image": FRAME[:0], "instruction": "x"}, "image"),
        ({"image": np.zeros((4, 5, 5), np.uint8), "instruction": "x"}, "image.shape"),
        ({"image": np.uint8(3), "instruction": "x"}, "image"),
        ({"image": FRAME, "instruction": "\ud800"}, "instruction"),
        ({"image": FRAME, "instruction": "x" * 5000}, "instruction"),
        ({"image": FRAME, "instruction": "x", "unnorm_key": 3}, "unnorm_key"),
    ],
)
def test_unusable_openvla_fields_are_named(fields: dict[str, object], field: str) -> None:
    with pytest.raises(WireError) as caught:
        openvla_request(fields, ReadContext())
    assert caught.value.field == field


def test_oft_takes_a_state_as_a_list_as_its_own_server_does() -> None:
    fields = {"full_image": np.zeros((4, 4, 3), np.uint8), "instruction": "x", "state": [1, 0.5]}
    state = oft_request(fields, ReadContext()).observation.state
    assert state is not None
    assert state.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 1), (4, 5, 4)])
def test_oft_takes_no_grey_and_no_transparent_picture(shape: tuple[int, ...]) -> None:
    fields = {"full_image": np.zeros(shape, np.uint8), "instruction": "x"}
    with pytest.raises(WireError, match="full_image"):
        oft_request(fields, ReadContext())


@pytest.mark.parametrize(
    "state",
    [
        np.array([np.nan]),
        np.array([1e300]),
        np.zeros((2, 2)),
        np.array([True]),
        "1",
        [[1]],
        [True],
        [10**400],
        [1e300],
        ["1"],
        [0] * 5000,
    ],
)
def test_a_state_that_is_no_vector_of_finite_numbers_is_refused(state: object) -> None:
    with pytest.raises(WireError, match="state"):
        openpi_request({"image": FRAME, "prompt": "x", "state": state}, ReadContext())


def test_frames_cameras_and_states_beyond_the_limits_are_refused() -> None:
    narrow = WireLimits(max_image_side=4, max_cameras=1, max_state_dim=2)
    with pytest.raises(MessageTooLargeError, match="4x5 pixels"):
        openvla_request({"image": FRAME, "instruction": "x"}, ReadContext(narrow))
    small = FRAME[:2, :2]
    payload = {"images": {str(n): small for n in range(3)}, "task_description": "x"}
    with pytest.raises(MessageTooLargeError, match="3 cameras"):
        vla_eval_request(payload, ReadContext(narrow))
    with pytest.raises(MessageTooLargeError, match="3 numbers"):
        openpi_request({"image": small, "prompt": "x", "state": np.zeros(3)}, ReadContext(narrow))


@pytest.mark.parametrize("images", [[], {}, {"a": 1}, {b"a": FRAME}, {"": FRAME}, {"a\n": FRAME}])
def test_images_that_are_no_map_of_named_pictures_are_refused(images: object) -> None:
    with pytest.raises(WireError, match="images"):
        vla_eval_request({"images": images, "task_description": "x"}, ReadContext())
    with pytest.raises(WireError, match="images"):
        openpi_request({"images": images, "prompt": "x"}, ReadContext())
