"""The binary dialects of openpi and vla-eval, against captured frames."""

import msgpack
import numpy as np
import pytest

from deft_core.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    UnsupportedMessageError,
    UnusableValueError,
    WireError,
)
from deft_core.peers.arrays import pack, read_frame, unpack
from deft_core.wire.limits import ReadContext, WireLimits
from deft_server.compat.vla_eval import MessageType, looks_like_message, read_message
from tests.core.peers.captures import frame, frames


def ndarray(data: bytes, dtype: object, shape: object) -> bytes:
    return bytes(
        msgpack.packb(
            {"x": {b"__ndarray__": True, b"data": data, b"dtype": dtype, b"shape": shape}}
        )
    )


def test_a_captured_openpi_observation_is_read() -> None:
    observation = unpack(frame("openpi_1_observation.bin"))
    assert isinstance(observation, dict)
    assert observation["observation/image"].shape == (224, 224, 3)
    assert observation["observation/state"].dtype == np.float64
    assert observation["prompt"] == "put the white bowl to the right of the plate"


def test_scalars_booleans_and_nested_values_of_a_captured_frame_are_read() -> None:
    observation = unpack(frame("openpi_3_observation_dtypes.bin"))
    assert isinstance(observation, dict)
    np.testing.assert_array_equal(observation["flags"], [True, False])
    assert observation["count"] == 3
    assert observation["zero_d"].shape == ()
    assert observation["zero_d"] == 2.5
    assert observation["nested"] == {"a": [1, 7, None]}
    assert observation["prompt"] == "café"


@pytest.mark.parametrize("name", ["openpi_2_result.bin", "openpi_4_result.bin"])
def test_packing_a_captured_result_again_gives_the_same_bytes(name: str) -> None:
    assert pack(unpack(frame(name))) == frame(name)


def test_numpy_scalars_are_packed_as_openpi_packs_them() -> None:
    captured = frame("openpi_0_metadata.bin")
    metadata = unpack(captured)
    assert isinstance(metadata, dict)
    metadata["scale"] = np.float32(metadata["scale"])
    assert pack(metadata) == captured


@pytest.mark.parametrize(
    "name", [name for name in frames("vlaeval") if "action" in name or "hello" in name]
)
def test_a_captured_vla_eval_message_encodes_to_the_same_bytes(name: str) -> None:
    assert read_message(unpack(frame(name))).encode() == frame(name)


def test_every_captured_vla_eval_message_is_recognised() -> None:
    for name, captured in frames("vlaeval").items():
        value = unpack(captured)
        assert looks_like_message(value), name
        assert isinstance(read_message(value).type, MessageType)
    for name, captured in frames("openpi").items():
        if "error" not in name:
            assert not looks_like_message(unpack(captured)), name


def test_pictures_arrive_as_png_jpeg_or_raw() -> None:
    shapes = {}
    for form in ("03_observation_png", "05_observation_raw", "07_observation_jpeg"):
        payload = read_message(unpack(frame(f"vlaeval_{form}.bin"))).payload
        images = payload["images"]
        assert isinstance(images, dict)
        shapes[form[3:]] = read_frame(images["agentview"], "agentview", ReadContext()).shape
    assert shapes == {
        "observation_png": (224, 224, 3),
        "observation_raw": (8, 6, 3),
        "observation_jpeg": (224, 224, 3),
    }


@pytest.mark.parametrize(
    "bad",
    [
        ndarray(b"12345678", "|O", [1]),
        ndarray(b"12345678", "|V8", [1]),
        ndarray(b"12345678", "<c8", [1]),
        ndarray(b"1234", "<f4", [2**40]),
        ndarray(b"1234", "<f4", [-1]),
        ndarray(b"1234", b"<f4", [1]),
        ndarray(b"1234", "<f4", None),
        ndarray("1234", "<f4", [1]),  # type: ignore[arg-type]
        msgpack.packb({b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"}),
        msgpack.packb({b"__npgeneric__": True, b"data": 1.5, b"dtype": "<i4"}),
        msgpack.packb({"__image__": True, "format": "gif", "data": b""}),
        msgpack.packb({"__image__": True, "format": "raw", "data": b"abc", "shape": [3]}),
        msgpack.packb({"__image__": True}),
        msgpack.packb(msgpack.ExtType(5, b"x")),
        msgpack.packb({1: 2}),
        b"",
        b"\xc1",
        b"\x91" * 50_000,
        b"\xdd\xff\xff\xff\xff",
        b"\xc6\xff\xff\xff\xff",
    ],
)
def test_frames_that_hold_anything_else_are_refused(bad: bytes) -> None:
    with pytest.raises(WireError):
        unpack(bad)


def test_a_frame_of_many_small_lists_is_refused_early() -> None:
    with pytest.raises(MessageTooLargeError, match="lists and maps"):
        unpack(bytes(msgpack.packb([[]] * 200)), WireLimits(max_lists=100))
    with pytest.raises(MessageTooLargeError, match="at most 4"):
        unpack(b"\x93\x01\x02\x03\x04", WireLimits(max_bytes=4))


def test_extensions_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedMessageError, match="extension type 5"):
        unpack(bytes(msgpack.packb({"x": msgpack.ExtType(5, b"x")})))


@pytest.mark.parametrize(
    ("value", "field"),
    [
        ([], "frame"),
        ({"type": "hello", "payload": {}}, "seq"),
        ({"type": "what", "payload": {}, "seq": 1, "timestamp": 0.0}, "type"),
        ({"type": "hello", "payload": [], "seq": 1, "timestamp": 0.0}, "payload"),
        ({"type": "hello", "payload": {b"x": 1}, "seq": 1, "timestamp": 0.0}, "payload"),
        ({"type": "hello", "payload": {}, "seq": True, "timestamp": 0.0}, "seq"),
        ({"type": "hello", "payload": {}, "seq": -1, "timestamp": 0.0}, "seq"),
        ({"type": "hello", "payload": {}, "seq": 1, "timestamp": "now"}, "timestamp"),
    ],
)
def test_a_message_with_a_wrong_field_is_refused_by_that_name(value: object, field: str) -> None:
    with pytest.raises((MalformedMessageError, UnusableValueError)) as caught:
        read_message(value)
    assert caught.value.field == field
