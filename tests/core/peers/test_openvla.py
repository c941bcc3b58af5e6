"""OpenVLA's JSON dialect, against bodies captured from its own client and server."""

import base64
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_core.errors import MalformedMessageError, MessageTooLargeError, WireError
from deft_core.peers.arrays import SAFE_DTYPES
from deft_core.peers.openvla import (
    NotAnObjectError,
    NotJsonError,
    decode_act_body,
    decode_json,
    encode_reply,
)
from deft_core.wire.limits import WireLimits
from tests.core.peers.captures import act_capture


def marked(data: bytes, dtype: object, shape: object) -> dict[str, object]:
    return {"__numpy__": base64.b64encode(data).decode(), "dtype": dtype, "shape": shape}


@pytest.mark.parametrize("name", ["plain", "plain_extra_key", "encoded"])
def test_captured_requests_are_read_in_both_forms(name: str) -> None:
    body = decode_act_body(act_capture(name).request)
    assert body.is_encoded == (name == "encoded")
    image = body.fields["image"]
    assert isinstance(image, np.ndarray)
    assert image.dtype == np.uint8
    assert image.shape == ((224, 224, 3) if name == "plain" else (128, 128, 3))
    assert isinstance(body.fields["instruction"], str)


@pytest.mark.parametrize("name", ["plain", "plain_extra_key", "encoded"])
def test_replies_equal_the_captured_ones_to_the_byte(name: str) -> None:
    captured = act_capture(name).response
    inner = json.loads(captured)
    fields = json.loads(inner) if isinstance(inner, str) else inner
    action = np.frombuffer(base64.b64decode(fields["__numpy__"]), "<f8")
    assert encode_reply(action, is_encoded=name == "encoded") == captured


def test_a_list_of_actions_is_a_list_of_arrays() -> None:
    reply = json.loads(encode_reply([np.zeros(7), np.ones(7)], is_encoded=False))
    assert [one["shape"] for one in reply] == [[7], [7]]


@given(
    st.sampled_from(sorted({dtype.str for dtype in SAFE_DTYPES.values()})),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 2**31),
)
@settings(max_examples=200, deadline=None)
def test_any_array_of_plain_numbers_survives_at_any_depth(
    dtype: str, shape: list[int], seed: int
) -> None:
    count = int(np.prod(shape))
    raw = np.random.default_rng(seed).integers(0, 2, count * np.dtype(dtype).itemsize, np.uint8)
    array = np.frombuffer(raw.tobytes(), dtype).reshape(shape) if count else np.zeros(shape, dtype)
    text = json.dumps({"a": [{"b": marked(array.tobytes(), dtype, shape)}]})
    decoded = decode_json(text.encode())
    assert isinstance(decoded, dict)
    back = decoded["a"][0]["b"]
    assert back.dtype == array.dtype
    np.testing.assert_array_equal(back, array)


@pytest.mark.parametrize(
    "array",
    [
        marked(b"12345678", "|O", [1]),
        marked(b"12345678", "object", [1]),
        marked(b"12345678", "|V8", [1]),
        marked(b"12345678", "<c8", [1]),
        marked(b"12345678", "|S8", [1]),
        marked(b"12345678", "<M8[s]", [1]),
        marked(b"12345678", [["x", "<f8"]], [1]),
        marked(b"12345678", "<f16", [1]),
        marked(b"1234", "<f4", [2]),
        marked(b"1234", "<f4", [2**40]),
        marked(b"1234", "<f4", [2**62, 2**62]),
        marked(b"1234", "<f4", [-1]),
        marked(b"1234", "<f4", [True]),
        marked(b"1234", "<f4", [1.0]),
        marked(b"1234", "<f4", [1] * 9),
        marked(b"1234", "<f4", "1"),
        marked(b"1234", None, [1]),
        {"__numpy__": "not base64!", "dtype": "<f4", "shape": [1]},
        {"__numpy__": "aé==", "dtype": "<f4", "shape": [1]},
        {"__numpy__": 5, "dtype": "<f4", "shape": [1]},
        {"__numpy__": "AAAA"},
    ],
)
def test_arrays_that_are_not_plain_numbers_of_a_true_shape_are_refused(array: object) -> None:
    with pytest.raises(WireError):
        decode_json(json.dumps({"image": array}).encode())


def test_what_is_no_json_says_where_reading_stopped() -> None:
    with pytest.raises(NotJsonError) as caught:
        decode_act_body(b"{nope")
    assert caught.value.position == 1
    with pytest.raises(NotAnObjectError):
        decode_act_body(b"[1]")


@pytest.mark.parametrize(
    "body", [b"[" * 100_000, b'{"a":' * 10_000, b"\xff\xfe\xfd", b'{"a":' + b"9" * 5000 + b"}"]
)
def test_json_that_breaks_parsers_is_only_not_json(body: bytes) -> None:
    with pytest.raises(NotJsonError):
        decode_json(body)


def test_limits_apply_before_parsing() -> None:
    with pytest.raises(MessageTooLargeError, match="at most 10"):
        decode_json(b'{"a": "0123456789"}', WireLimits(max_bytes=10))
    with pytest.raises(MessageTooLargeError, match="lists or maps"):
        decode_json(b"[" + b"[]," * 100_000 + b"0]")


@pytest.mark.parametrize(
    "body",
    [b'{"encoded": "{}", "x": 1}', b'{"encoded": 5}', b'{"encoded": "[]"}', b'{"encoded": "{"}'],
)
def test_the_encoded_form_must_be_alone_and_hold_an_object(body: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        decode_act_body(body)
