"""Msgpack messages: what goes in comes out, and what cannot be used is named."""

from dataclasses import replace

import msgpack
import msgspec
import numpy as np
import pytest

from deft_core.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    Problem,
    UnsupportedMessageError,
    UnusableValueError,
    WireError,
)
from deft_core.types import ActionChunk, DecodeTrace, Observation, PassTrace
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat
from deft_core.wire.images import ImageEncoding, encode_image
from deft_core.wire.limits import DEFAULT_LIMITS, WireLimits
from deft_core.wire.messages import ActMessage
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


def there_and_back(sent: ActionChunk, wire_format: WireFormat) -> ActionChunk:
    data = codec.encode_answer(sent, wire_format=wire_format)
    return codec.decode_answer(data, wire_format)


def refusal(message: object, limits: WireLimits = DEFAULT_LIMITS) -> WireError:
    data = message if isinstance(message, bytes) else msgpack.packb(message)
    with pytest.raises(WireError) as caught:
        codec.decode_request(data, limits=limits)
    return caught.value


@pytest.mark.parametrize("encoding", [ImageEncoding.RAW, ImageEncoding.PNG])
def test_a_request_arrives_as_it_was_sent(encoding):
    sent = full_message()
    assert_same_message(sent, codec.decode_request(codec.encode_request(sent, encoding)))


def test_a_jpeg_request_arrives_nearly_as_it_was_sent():
    gradient = np.arange(64, dtype=np.uint8).reshape(8, 8, 1).repeat(3, axis=2)
    sent = ActMessage(Observation(gradient, "lift the cup"))
    data = codec.encode_request(sent, ImageEncoding.JPEG, quality=100)
    received = codec.decode_request(data).observation.image.astype(int)
    assert np.abs(received - gradient).max() <= 2


def test_an_answer_arrives_bit_for_bit():
    sent = full_answer()
    assert_same_answer(sent, codec.decode_answer(codec.encode_answer(sent)))


def test_an_answer_without_trace_or_timings_is_short():
    sent = ActionChunk(np.zeros((1, 7)))
    data = codec.encode_answer(sent)
    assert_same_answer(sent, codec.decode_answer(data))
    assert len(data) < 120


def test_a_message_without_version_or_image_encoding_means_ours_and_raw():
    image = {name: value for name, value in IMAGE.items() if name != "encoding"}
    received = codec.decode_request(msgpack.packb({"image": image, "instruction": ""}))
    assert received.observation.image.shape == (2, 3, 3)


def test_decoded_arrays_cannot_be_written_to():
    received = codec.decode_request(msgpack.packb(GOOD)).observation.image
    assert not received.flags.writeable


def test_a_raw_frame_is_not_copied_out_of_the_message():
    owner = codec.decode_request(msgpack.packb(GOOD)).observation.image
    while isinstance(owner, np.ndarray):
        owner = owner.base
    assert isinstance(owner, bytes)


MALFORMED = [
    (b"", "body"),
    (codec.encode_request(full_message())[:-40], "body"),
    (b"not msgpack at all", "body"),
    (msgpack.packb(GOOD) + b"\x00", "body"),
    (b"\xc0", "body"),
    (b"\xd4\x01\x00", "body"),  # an extension type
    (b"\xd6\xff\x00\x00\x00\x00", "body"),  # a timestamp, which msgpack would build for us
    (b"\x81\xc0\x01", "body"),  # a key that is not text
    ({"v": 1, "image": IMAGE}, "instruction"),
    ({"v": 1, "instruction": "lift the cup"}, "image"),
    ({**GOOD, "statistic_key": "typing error"}, "statistic_key"),
    ({**GOOD, "image": [1, 2, 3]}, "image"),
    (with_image(colour="rgb"), "image.colour"),
    ({**GOOD, "state": 3}, "state"),
    ({**GOOD, "cameras": {"wrist": {}}}, "cameras.wrist.data"),
    ({**GOOD, "cameras": {"wrist": {"data": bytes(3)}}}, "cameras.wrist.dtype"),
    ({**GOOD, "cameras": {"left": IMAGE, "wrist": {**IMAGE, "colour": 1}}}, "cameras.wrist.colour"),
    ({**GOOD, "cameras": {5: IMAGE}}, "cameras"),
    (with_image(encoding="png"), "image.dtype"),
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
        (with_image(shape=[-1, -6, 3]), "image.shape[0]"),
        (with_image(shape=[2, 9]), "image.shape"),
        (with_image(shape=[3, 3, 2]), "image.shape"),
        (with_image(shape=[0, 0, 3], data=b""), "image.shape"),
        (with_image(shape="2x3"), "image.shape"),
        (with_image(shape=[2.0, 3.0, 3.0]), "image.shape[0]"),
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


def test_text_that_is_not_utf8_is_refused():
    error = refusal(b"\x81\xabinstruction\xa4caf\xe9")
    assert isinstance(error, MalformedMessageError)
    assert error.field == "body"
    assert "utf-8" in str(error)


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
        (with_image(shape=[1] * 9), "image.shape"),
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
    assert codec.decode_request(msgpack.packb(message), limits=limits) is not None
    error = refusal(message, replace(limits, max_image_pixels=3 * 30 * 40 - 1))
    assert isinstance(error, MessageTooLargeError)
    assert error.field == "cameras.right"
    assert "3600 pixels" in str(error)


def test_ten_megabytes_beyond_the_limit_are_refused_unread():
    error = refusal(bytes(DEFAULT_LIMITS.max_bytes + 10_000_000))
    assert isinstance(error, MessageTooLargeError)
    assert error.field == "body"


LONG_LIST = b"\xdd\x00\xff\xff\xff"  # a header that promises 16,777,215 items, and no item
LONG_MAP = b"\xdf\x00\xff\xff\xff"


@pytest.mark.parametrize(
    ("body", "field"),
    [
        (b"\x81\xa5state" + LONG_LIST, "state"),
        (b"\x81\xa7cameras" + LONG_MAP, "cameras"),
        (b"\x81\xa5image\x81\xa5shape" + LONG_LIST, "image.shape"),
    ],
)
def test_a_long_list_or_map_is_refused_by_its_header(body: bytes, field: str):
    """One byte on the wire is an empty list of 56 bytes in memory."""
    error = refusal(body)
    assert isinstance(error, MessageTooLargeError)
    assert error.field == field


@pytest.mark.parametrize("field", ["image", "instruction", "id", "nobody", "trace"])
def test_no_list_is_built_where_none_may_be(field: str):
    """What follows the header is never read: here it is not even there."""
    packed = msgpack.packb(field)
    error = refusal(b"\x81" + packed + LONG_LIST)
    assert error.field == field


def test_several_observations_are_counted_by_the_header():
    with pytest.raises(MessageTooLargeError, match="observations"):
        codec.parse_request(b"\x81\xacobservations" + LONG_LIST + b"\x90")


@pytest.mark.parametrize("wire_format", WireFormat)
def test_a_long_text_of_wide_passes_can_be_read_by_whoever_asked_for_it(wire_format: WireFormat):
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
    read = there_and_back(sent, wire_format).trace
    assert read is not None
    assert read.tokens == trace.tokens
    assert read.accepted_lengths == trace.accepted_lengths
    last = read.passes[-1]
    assert (last.tokens, last.parents, last.path) == ((0, 1, 2), (-1, 0, 1), (1, 2))
    assert (last.predictions, last.bonus, last.pass_ms) == ((1, 2, 3), 3, 4.5)
    few = replace(sent, trace=replace(trace, passes=passes[:8]))
    assert there_and_back(few, wire_format).trace.passes[-1] == wide


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
    assert "jpeg, png, raw" in str(error)


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
        codec.decode_answer(
            msgpack.packb({"actions": {"dtype": "float64", "shape": [1], "data": bytes(8)}})
        )
    with pytest.raises(MalformedMessageError, match="actions"):
        codec.decode_answer(msgpack.packb({"v": 1}))


def test_raw_frames_of_any_memory_layout_travel():
    flipped = frame()[::-1, ::-1]
    received = codec.decode_request(codec.encode_request(ActMessage(Observation(flipped, ""))))
    np.testing.assert_array_equal(received.observation.image, flipped)


def test_a_misspelt_field_is_named_with_the_one_that_was_meant():
    for misspelt, meant in (("sesion_id", "session_id"), ("statistic_key", "statistics_key")):
        error = refusal({**GOOD, misspelt: "a"})
        assert isinstance(error, MalformedMessageError)
        assert f"did you mean {meant}?" in str(error)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"radius": -1}, "radius: must be an integer from 0 to 65535, got int -1"),
        ({"radius": "9"}, "radius: must be an integer from 0 to 65535, got text '9'"),
        (
            {"deadline_ms": 0},
            "deadline_ms: must be a number above 0 and at most 86400000, got int 0",
        ),
        ({"trace": "yes"}, "trace: must be true or false, got text 'yes'"),
        ({"image": 5}, "image: must be a map, got int 5"),
        ({"instruction": ["lift"]}, "instruction: must be text, got a list"),
        ({"instruction": None}, "instruction: must be text, got nothing"),
        ({"v": 2}, "v: must be 1, got int 2"),
        ({"state": 3}, "state: must be a map or a list, got int 3"),
    ],
)
def test_a_refusal_says_what_arrived_and_what_was_expected(changes: dict[str, object], said: str):
    assert str(refusal({**GOOD, **changes})) == said


@pytest.mark.parametrize("wire_format", WireFormat)
def test_an_answer_may_have_fields_of_a_later_version(wire_format: WireFormat):
    library = {WireFormat.MSGPACK: msgspec.msgpack, WireFormat.JSON: msgspec.json}[wire_format]
    answer = library.decode(codec.encode_answer(full_answer(), wire_format=wire_format))
    answer["later"] = {"deep": [1, {"er": None}]}
    answer["timings"]["later_ms"] = 7.0
    answer["trace"]["later"] = [1]
    answer["trace"]["passes"][0]["later"] = "x"
    answer["log_probs"]["later"] = 0.5
    received = codec.decode_answer(library.encode(answer), wire_format)
    assert_same_answer(full_answer(), received)


def test_answers_to_several_may_have_fields_of_a_later_version():
    one = msgpack.unpackb(codec.encode_answer(full_answer(), "a"))
    problem = {"status": 409, "title": "Superseded", "later": [1]}
    answers = {"v": 1, "answers": [{**one, "later": 1}, problem], "later": {}}
    received, refused = codec.decode_answers(msgpack.packb(answers))
    assert isinstance(received, ActionChunk)
    assert_same_answer(full_answer(), received)
    assert refused == Problem(409, "Superseded")


def test_an_answer_of_very_many_numbers_is_refused_unread():
    """A number of one byte takes 32 in memory: 16 MB of them would be half a gigabyte."""
    limit = DEFAULT_LIMITS.max_answer_bytes
    with pytest.raises(MessageTooLargeError, match=f"at most {limit}"):
        codec.decode_answer(codec.encode_answer(full_answer()) + bytes(limit))
