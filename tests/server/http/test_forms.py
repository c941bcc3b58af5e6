"""Forms, as curl sends them."""

import numpy as np
import PIL.Image
import pytest

from deft_core.errors import (
    MalformedMessageError,
    UnsupportedMessageError,
    UnusableValueError,
    WireError,
)
from deft_core.types import ActOptions
from deft_core.wire.limits import ReadContext
from deft_core.wire.messages import ActMessage
from deft_server.http.frame_bodies import decode_form
from tests.core.samples import frame, saved

pytestmark = pytest.mark.promise

PNG = saved(PIL.Image.fromarray(frame()), "PNG")
JPEG = saved(PIL.Image.fromarray(frame()), "JPEG")


def read(texts: dict[str, str], files: dict[str, bytes]) -> ActMessage:
    parts = [
        (f'name="{name}"', text.encode("utf-8", "surrogateescape")) for name, text in texts.items()
    ]
    parts += [(f'name="{name}"; filename="x"', data) for name, data in files.items()]
    body = b"".join(
        b"--xyz\r\ncontent-disposition: form-data; " + head.encode() + b"\r\n\r\n" + data + b"\r\n"
        for head, data in parts
    )
    return decode_form(body + b"--xyz--\r\n", "xyz", ReadContext())


def test_a_form_carries_everything_a_message_does():
    texts = {
        "instruction": "lift the cup",
        "session_id": "robot-1",
        "deadline_ms": "150",
        "statistics_key": "libero_goal",
        "decoding": "lossless",
        "radius": "9",
        "trace": "true",
        "log_probs": "true",
        "state": "[0.5, 1]",
    }
    message = read(texts, {"image": PNG, "camera.wrist": JPEG})
    np.testing.assert_array_equal(message.observation.image, frame())
    assert message.observation.cameras["wrist"].shape == frame().shape
    assert message.observation.instruction == "lift the cup"
    np.testing.assert_array_equal(message.observation.state, np.array([0.5, 1], np.float32))
    wanted = ActOptions("robot-1", 150.0, "libero_goal", "lossless", 9, True, want_log_probs=True)
    assert message.options == wanted


def test_options_left_empty_are_options_left_out():
    texts = {"instruction": "lift", "radius": "", "decoding": "", "deadline_ms": "", "trace": ""}
    assert read(texts, {"image": JPEG}).options == ActOptions()


@pytest.mark.parametrize(
    ("texts", "files", "kind", "field"),
    [
        ({}, {"image": PNG}, MalformedMessageError, "instruction"),
        ({"instruction": "lift"}, {}, MalformedMessageError, "image"),
        ({"instruction": "lift", "image": "@x.png"}, {}, UnusableValueError, "image"),
        ({}, {"image": PNG, "instruction": b"lift"}, UnusableValueError, "instruction"),
        ({"instruction": "lift"}, {"image": b"GIF89a"}, UnsupportedMessageError, "image"),
        ({"instruction": "lift"}, {"image": b""}, UnsupportedMessageError, "image"),
        ({"instruction": "lift"}, {"image": PNG, "camera.": PNG}, UnusableValueError, "cameras"),
        ({"instruction": "lift"}, {"image": PNG, "photo": PNG}, MalformedMessageError, "photo"),
        ({"instruction": "lift", "radius": "nine"}, {"image": PNG}, UnusableValueError, "radius"),
        ({"instruction": "lift", "radius": "-1"}, {"image": PNG}, UnusableValueError, "radius"),
        (
            {"instruction": "lift", "deadline_ms": "nan"},
            {"image": PNG},
            UnusableValueError,
            "deadline_ms",
        ),
        ({"instruction": "lift", "trace": "maybe"}, {"image": PNG}, UnusableValueError, "trace"),
        ({"instruction": "lift", "state": "[NaN]"}, {"image": PNG}, MalformedMessageError, "state"),
        (
            {"instruction": "lift", "state": "0.5, 1"},
            {"image": PNG},
            MalformedMessageError,
            "state",
        ),
        ({"instruction": "x\udcff"}, {"image": PNG}, UnusableValueError, "instruction"),
        ({"instruction": "lift", "v": "2"}, {"image": PNG}, UnsupportedMessageError, "v"),
    ],
)
def test_what_is_wrong_with_a_form_is_named(texts, files, kind, field):
    with pytest.raises(WireError) as caught:
        read(texts, files)
    assert isinstance(caught.value, kind)
    assert caught.value.field == field
