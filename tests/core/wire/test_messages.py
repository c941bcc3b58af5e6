"""Msgpack messages: what goes in comes out, and what cannot be used is named."""

from dataclasses import replace
from typing import Any

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
from deft_core.types import ActionChunk, DecodeTrace, Observation, PassTrace
from deft_core.wire import json_codec, msgpack_codec
from deft_core.wire.fields import DEFAULT_LIMITS, MAX_MAP_ENTRIES, ReadContext, WireLimits
from deft_core.wire.images import ImageEncoding, encode_image
from deft_core.wire.messages import ANSWER, REQUEST, ActMessage, answer_fields, request_fields
from tests.core.samples import (
    assert_same_answer,
    assert_same_message,
    frame,
    full_answer,
    full_message,
    png_bomb,
)

pytestmark = pytest.mark.promise

IMAGE = {"encoding": "raw", "dtype": "uint8", "shape": [2, 3, 3], "data": bytes(18)}
GOOD = {"v": 1, "image": IMAGE, "instruction": "lift the cup"}


def with_image(**changes: object) -> dict[str, object]:
    return {**GOOD, "image": {**IMAGE, **changes}}


def state(**changes: object) -> dict[str, object]:
    sound = {"dtype": "float32", "shape": [2], "data": np.zeros(2, "<f4").tobytes()}
    return {**GOOD, "state": {**sound, **changes}}


def refusal(message: object, limits: WireLimits = DEFAULT_LIMITS) -> WireError:
    data = message if isinstance(message, bytes) else msgpack.packb(message)
    with pytest.raises(WireError) as caught:
        msgpack_codec.decode_request(data, limits)
    return caught.value


@pytest.mark.parametrize("encoding", [ImageEncoding.RAW, ImageEncoding.PNG])
def test_a_request_arrives_as_it_was_sent(encoding):
    sent = full_message()
    assert_same_message(
        sent, msgpack_codec.decode_request(msgpack_codec.encode_request(sent, encoding))
    )


def test_a_jpeg_request_arrives_nearly_as_it_was_sent():
    gradient = np.arange(64, dtype=np.uint8).reshape(8, 8, 1).repeat(3, axis=2)
    sent = ActMessage(Observation(gradient, "lift the cup"))
    data = msgpack_codec.encode_request(sent, ImageEncoding.JPEG, quality=100)
    received = msgpack_codec.decode_request(data).observation.image.astype(int)
    assert np.abs(received - gradient).max() <= 2


def test_an_answer_arrives_bit_for_bit():
    sent = full_answer()
    assert_same_answer(sent, msgpack_codec.decode_answer(msgpack_codec.encode_answer(sent)))


def test_an_answer_without_trace_or_timings_is_short():
    sent = ActionChunk(np.zeros((1, 7)))
    data = msgpack_codec.encode_answer(sent)
    assert_same_answer(sent, msgpack_codec.decode_answer(data))
    assert len(data) < 120


def test_a_message_without_version_or_image_encoding_means_ours_and_raw():
    image = {name: value for name, value in IMAGE.items() if name != "encoding"}
    received = msgpack_codec.decode_request(msgpack.packb({"image": image, "instruction": ""}))
    assert received.observation.image.shape == (2, 3, 3)


def test_decoded_arrays_cannot_be_written_to():
    received = msgpack_codec.decode_request(msgpack.packb(GOOD)).observation.image
    assert not received.flags.writeable


def test_a_raw_frame_is_not_copied_out_of_the_message():
    owner = msgpack_codec.decode_request(msgpack.packb(GOOD)).observation.image
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner, bytes)


MALFORMED = [
    (b"", "body"),
    (msgpack_codec.encode_request(full_message())[:-40], "body"),
    (b"not msgpack at all", "body"),
    (msgpack.packb(GOOD) + b"\x00", "body"),
    (b"\xc0", "body"),
    (b"\xd4\x01\x00", "body"),  # an extension type
    (b"\xd6\xff\x00\x00\x00\x00", "body"),  # a timestamp, which msgpack would build for us
    (b"\x82" + msgpack.packb("v") + b"\x01" + msgpack.packb("v") + b"\x01", "body"),
    (b"\x81\xc0\x01", "body"),  # a key that is not text
    ({"v": 1, "image": IMAGE}, "instruction"),
    ({"v": 1, "instruction": "lift the cup"}, "image"),
    ({**GOOD, "statistic_key": "typing error"}, "statistic_key"),
    ({**GOOD, "image": [1, 2, 3]}, "image"),
    (with_image(colour="rgb"), "image.colour"),
    ({**GOOD, "state": 3}, "state"),
    ({**GOOD, "cameras": {"wrist": {}}}, "cameras.wrist.dtype"),
]


@pytest.mark.parametrize(("message", "field"), MALFORMED)
def test_what_is_not_a_message_is_malformed(message, field):
    error = refusal(message)
    assert isinstance(error, MalformedMessageError)
    assert error.field == field


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (with_image(dtype="float32"), "image.dtype"),
        (with_image(data=bytes(72)), "image.data"),
        (with_image(data="eighteen characters"), "image.data"),
        (with_image(shape=[-1, -6, 3]), "image.shape"),
        (with_image(shape=[2, 9]), "image.shape"),
        (with_image(shape=[3, 3, 2]), "image.shape"),
        (with_image(shape=[0, 0, 3], data=b""), "image.shape"),
        (with_image(shape="2x3"), "image.shape"),
        (with_image(shape=[2.0, 3.0, 3.0]), "image.shape"),
        ({**GOOD, "instruction": 5}, "instruction"),
        ({**GOOD, "instruction": None}, "instruction"),
        (state(dtype="float64"), "state.dtype"),
        (state(dtype="object"), "state.dtype"),
        (state(shape=[1, 2]), "state"),
        (state(data=np.array([1, np.nan], "<f4").tobytes()), "state"),
        (state(data=np.array([1, np.inf], "<f4").tobytes()), "state"),
        ({**GOOD, "cameras": {"": IMAGE}}, "cameras"),
        ({**GOOD, "cameras": {"wr\nist": IMAGE}}, "cameras"),
        ({**GOOD, "radius": -1}, "radius"),
        ({**GOOD, "radius": True}, "radius"),
        ({**GOOD, "radius": 9.5}, "radius"),
        ({**GOOD, "deadline_ms": float("nan")}, "deadline_ms"),
        ({**GOOD, "deadline_ms": 0}, "deadline_ms"),
        ({**GOOD, "deadline_ms": 1e300}, "deadline_ms"),
        ({**GOOD, "trace": "yes"}, "trace"),
        ({**GOOD, "session_id": 7}, "session_id"),
    ],
)
def test_values_of_the_wrong_type_shape_dtype_or_range_are_named(message, field):
    error = refusal(message)
    assert isinstance(error, UnusableValueError | MalformedMessageError)
    assert error.field == field


def test_an_instruction_that_is_not_utf8_is_named():
    data = msgpack.packb({**GOOD, "instruction": b"caf\xe9"}, use_bin_type=False)
    error = refusal(data)
    assert isinstance(error, UnusableValueError)
    assert error.field == "instruction"
    assert "UTF-8" in str(error)


def test_a_field_name_that_is_not_utf8_can_still_be_printed():
    str(refusal(b"\x81\xa2\xff\xfe\x01")).encode()


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (with_image(shape=[2**20, 2**20, 3]), "image.shape"),
        (with_image(shape=[2**62, 2**62, 3]), "image.shape"),
        (with_image(shape=[5000, 1, 3], data=bytes(15_000)), "image.shape"),
        ({**GOOD, "instruction": "x" * 2**20}, "instruction"),
        ({**GOOD, "session_id": "x" * 129}, "session_id"),
        (state(shape=[2**40]), "state.shape"),
        ({**GOOD, "cameras": dict.fromkeys(map(str, range(9)), IMAGE)}, "cameras"),
    ],
)
def test_what_is_beyond_a_limit_is_refused_before_it_is_built(message, field):
    error = refusal(message)
    assert isinstance(error, MessageTooLargeError)
    assert error.field == field


def test_a_decompression_bomb_is_refused_by_its_header():
    bomb = png_bomb(4200, 4200)
    assert len(bomb) < 100_000
    error = refusal({**GOOD, "image": {"encoding": "png", "data": bomb}})
    assert isinstance(error, MessageTooLargeError)
    assert error.field == "image"
    assert "4200x4200" in str(error)


@pytest.mark.parametrize("encoding", ["png", "jpeg"])
def test_pictures_of_a_message_have_no_more_pixels_together_than_one_may(encoding: str):
    picture = {"encoding": encoding, "data": encode_image(frame(30, 40), ImageEncoding(encoding))}
    cameras = dict.fromkeys(("left", "right"), picture)
    message = {**GOOD, "image": picture, "cameras": cameras}
    limits = replace(DEFAULT_LIMITS, max_image_pixels=3 * 30 * 40)
    assert msgpack_codec.decode_request(msgpack.packb(message), limits) is not None
    error = refusal(message, replace(limits, max_image_pixels=3 * 30 * 40 - 1))
    assert isinstance(error, MessageTooLargeError)
    assert error.field == "cameras.right"
    assert "3600 pixels" in str(error)


def test_ten_megabytes_beyond_the_limit_are_refused_unread():
    error = refusal(bytes(DEFAULT_LIMITS.max_bytes + 10_000_000))
    assert isinstance(error, MessageTooLargeError)
    assert error.field == "body"


def test_a_message_of_empty_lists_cannot_grow_a_hundredfold_in_memory():
    """One byte on the wire is an empty list of 56 bytes in memory: lists are counted."""
    nested = b"\xdc\xff\xff" + b"\x90" * 0xFFFF
    error = refusal(b"\x81\xa5state" + nested)
    assert isinstance(error, MessageTooLargeError)


@pytest.mark.parametrize("bounds", [{"max_lists": 3}, {"max_entries": 4}])
def test_as_many_lists_and_entries_as_the_limits_say_are_read(bounds):
    items = [[1, 2], []]
    assert msgpack_codec.unpack(msgpack.packb(items), WireLimits(**bounds)) == items
    with pytest.raises(MessageTooLargeError, match="lists and maps"):
        msgpack_codec.unpack(msgpack.packb([*items, []]), WireLimits(**bounds))


@pytest.mark.parametrize("codec", [msgpack_codec, json_codec])
def test_a_long_text_of_wide_passes_can_be_read_by_whoever_asked_for_it(codec: Any):
    """Of 300 passes over 512 nodes every number would be more than a message may hold."""
    wide = PassTrace(
        is_prefill=False,
        tokens=tuple(range(512)),
        parents=tuple(range(-1, 511)),
        sources=("", *["previous-answer"] * 511),
        predictions=tuple(range(1, 513)),
        path=(1, 2),
        bonus=3,
        pass_ms=4.5,
    )
    passes = (replace(wide, is_prefill=True), *[wide] * 299)
    trace = DecodeTrace("lossless", (3,) * 900, (3,) * 900, (0.5,) * 900, passes)
    sent = ActionChunk(np.zeros((1, 7)), trace=trace, reasoning="a plan")
    read = codec.decode_answer(codec.encode_answer(sent)).trace
    assert read.tokens == trace.tokens
    assert read.accepted_lengths == trace.accepted_lengths
    last = read.passes[-1]
    assert (last.tokens, last.parents, last.path) == ((0, 1, 2), (-1, 0, 1), (1, 2))
    assert (last.predictions, last.bonus, last.pass_ms) == ((1, 2, 3), 3, 4.5)
    few = replace(sent, trace=replace(trace, passes=passes[:8]))
    assert codec.decode_answer(codec.encode_answer(few)).trace.passes[-1] == wide


def test_a_map_of_more_names_than_messages_have_is_refused_by_its_header():
    """Its entries would take two hundred bytes each before anybody could count them."""
    header = b"\x81\xa5image\xde"  # and then the number of entries, none of which is here
    assert "incomplete" in str(refusal(header + MAX_MAP_ENTRIES.to_bytes(2, "big")))
    assert "exceeds" in str(refusal(header + (MAX_MAP_ENTRIES + 1).to_bytes(2, "big")))


@pytest.mark.parametrize("version", [0, 2, "1", 1.5, True, [1]])
def test_another_version_is_unsupported_and_says_which_is_spoken(version):
    error = refusal({**GOOD, "v": version})
    assert isinstance(error, UnsupportedMessageError)
    assert error.field == "v"
    assert "must be 1" in str(error)


@pytest.mark.parametrize("encoding", ["webp", 7, [1]])
def test_an_unknown_image_encoding_is_unsupported(encoding):
    error = refusal(with_image(encoding=encoding))
    assert isinstance(error, UnsupportedMessageError)
    assert error.field == "image.encoding"
    assert "raw, png, jpeg" in str(error)


def test_a_picture_that_is_neither_png_nor_jpeg_is_unsupported():
    error = refusal({**GOOD, "image": {"encoding": "png", "data": b"GIF89a..."}})
    assert isinstance(error, UnsupportedMessageError)


def test_limits_are_the_servers_to_choose():
    tight = replace(DEFAULT_LIMITS, max_image_pixels=5)
    assert isinstance(refusal(GOOD, tight), MessageTooLargeError)
    with pytest.raises(ValueError, match="at least 1"):
        WireLimits(max_cameras=0)
    with pytest.raises(ValueError, match="max_image_pixels"):
        WireLimits(max_image_pixels=2**40)


def test_bytes_that_answer_nothing_are_refused():
    with pytest.raises(UnusableValueError, match="actions"):
        msgpack_codec.decode_answer(
            msgpack.packb({"actions": {"dtype": "float64", "shape": [1], "data": bytes(8)}})
        )
    with pytest.raises(MalformedMessageError, match="actions"):
        msgpack_codec.decode_answer(msgpack.packb({"v": 1}))


def test_raw_frames_of_any_memory_layout_travel():
    flipped = frame()[::-1, ::-1]
    received = msgpack_codec.decode_request(
        msgpack_codec.encode_request(ActMessage(Observation(flipped, "")))
    )
    np.testing.assert_array_equal(received.observation.image, flipped)


def test_the_schemas_list_every_field_that_travels():
    sent = request_fields(replace(full_message(), id="f-1"))
    answered = answer_fields(full_answer(), "f-1")
    limits = WireLimits(max_instruction_chars=7)
    request = REQUEST.schema(limits)["properties"]
    assert set(sent) == set(request)
    assert request["instruction"]["maxLength"] == 7
    assert set(answered) == set(ANSWER.schema(limits)["properties"])


def test_a_message_of_very_many_entries_is_refused_while_it_is_read():
    """Sixteen megabytes of small maps held the event loop, and so everybody, for a second."""
    row = msgpack.packb([0] * 60_000)
    for count, error in ((2, WireError), (3, MessageTooLargeError)):
        body = b"\x81\xa5image" + bytes([0x90 | count]) + row * count
        with pytest.raises(error, match="entries" if count == 3 else "missing"):
            msgpack_codec.decode_request(body)


def test_a_misspelt_field_is_named_with_the_one_that_was_meant():
    sent = request_fields(full_message()) | {"sesion_id": "a"}
    with pytest.raises(MalformedMessageError, match=r"did you mean session_id\?"):
        REQUEST.read(sent, "", ReadContext())
