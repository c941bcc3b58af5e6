"""JSON messages: the same content as msgpack, and the same refusals."""

import base64
import json
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest
from hypothesis import given, strategies

from deft_core.errors import (
    MalformedMessageError,
    MessageTooLargeError,
    Problem,
    UnusableValueError,
    WireError,
)
from deft_core.types import ServerInfo
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat, count_of, decode
from deft_core.wire.images import ImageEncoding
from deft_core.wire.limits import DEFAULT_LIMITS, WireLimits
from tests.core.samples import assert_same_answer, assert_same_message, full_answer, full_message

pytestmark = pytest.mark.promise

PIXELS = {
    "encoding": "raw",
    "dtype": "uint8",
    "shape": [1, 2, 3],
    "data": base64.b64encode(bytes(range(6))).decode(),
}
INFO = ServerInfo(
    policy="tiny",
    action_dim=7,
    chunk_length=1,
    statistics_keys=("a", "b"),
    default_statistics_key=None,
    image_height=224,
    image_width=224,
    image_chain="libero",
    image_chains=("libero", "none"),
    decoding="lossless",
    decoding_methods=("lossless", "autoregressive"),
    instructions=("lift the cup", "fold the towel, then put it into the basket" * 4),
    held_out={"libero_object": "30-39"},
    versions={"deft-vla": "0.1.0"},
    details={"device": "cpu"},
)


def request(**changes: object) -> bytes:
    return json.dumps({"image": PIXELS, "instruction": "lift the cup", **changes}).encode()


def refusal(data: bytes, limits: WireLimits = DEFAULT_LIMITS) -> WireError:
    with pytest.raises(WireError) as caught:
        codec.decode_request(data, WireFormat.JSON, limits)
    return caught.value


@pytest.mark.parametrize("encoding", [ImageEncoding.RAW, ImageEncoding.PNG])
def test_a_request_arrives_as_it_was_sent(encoding):
    sent = full_message()
    data = codec.encode_request(sent, encoding, wire_format=WireFormat.JSON)
    received = codec.decode_request(data, WireFormat.JSON)
    assert_same_message(sent, received)


def test_an_answer_arrives_bit_for_bit():
    sent = full_answer()
    data = codec.encode_answer(sent, wire_format=WireFormat.JSON)
    assert_same_answer(sent, codec.decode_answer(data, WireFormat.JSON))


def test_the_actions_of_an_answer_are_plain_lists():
    answer = json.loads(codec.encode_answer(full_answer(), wire_format=WireFormat.JSON))
    assert answer["actions"] == full_answer().actions.tolist()
    assert answer["timings"] == {"wire_ms": 0.5, "total_ms": 12.25}


def test_images_are_base64_and_states_may_be_lists():
    received = codec.decode_request(
        request(state=[1, 2.5], cameras={"wrist": PIXELS}), WireFormat.JSON
    )
    for image in (received.observation.image, received.observation.cameras["wrist"]):
        np.testing.assert_array_equal(image, np.arange(6).reshape(1, 2, 3))
    np.testing.assert_array_equal(received.observation.state, np.array([1, 2.5], np.float32))


def test_what_a_server_says_about_itself_arrives_whole():
    assert codec.decode_info(codec.encode_info(INFO)) == INFO


class Version(str):
    """As torch's."""


def test_what_a_server_says_may_be_in_kinds_of_text_numbers_and_maps():
    special = replace(
        INFO,
        state_dim=np.int64(8),
        versions=MappingProxyType({"torch": Version("2.6")}),
    )
    received = codec.decode_info(codec.encode_info(special))
    assert received == replace(INFO, state_dim=8, versions={"torch": "2.6"})


def test_fields_of_a_later_server_are_passed_over():
    later = {**json.loads(codec.encode_info(INFO)), "colour": "blue"}
    assert codec.decode_info(json.dumps(later).encode()) == INFO


def test_a_reset_names_its_session():
    assert codec.decode_reset(codec.encode_reset("robot-1")) == "robot-1"
    with pytest.raises(MalformedMessageError, match="session_id"):
        codec.decode_reset(b"{}")


@pytest.mark.parametrize(
    ("data", "field"),
    [
        (b"", "body"),
        (b"{", "body"),
        (b"\xff\xfe", "body"),
        (b"[" * 5000, "body"),
        (request(state=[float("nan")]), "body"),
        (request(state=[float("-inf")]), "body"),
        (request(instruction="\ud800"), "body"),
        (b"[]", "body"),
        (b"null", "body"),
        (json.dumps({"image": PIXELS}).encode(), "instruction"),
        (request(colour="blue"), "colour"),
    ],
)
def test_what_is_not_a_message_is_malformed(data, field):
    error = refusal(data)
    assert isinstance(error, MalformedMessageError)
    assert error.field == field


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"image": {"encoding": "png", "data": "not base64!"}}, "image.data"),
        ({"image": {"encoding": "png", "data": "ü"}}, "image.data"),
        ({"image": {"dtype": "uint8", "shape": [1, 1, 3], "data": 5}}, "image.data"),
        ({"state": ["1", "2"]}, "state[0]"),
        ({"state": [1, True]}, "state[1]"),
        ({"state": [[1], [2, 3]]}, "state[0]"),
        ({"state": [[1, 2]]}, "state[0]"),
        ({"state": [1e39]}, "state"),
        ({"state": [10**400]}, "state[0]"),
        ({"radius": 10**4000}, "radius"),
    ],
)
def test_values_that_cannot_be_used_are_named(changes, field):
    error = refusal(request(**changes))
    assert isinstance(error, UnusableValueError)
    assert error.field == field


def test_text_that_is_not_utf8_is_refused():
    error = refusal(request(instruction="cafX").replace(b"cafX", b"caf\xe9"))
    assert isinstance(error, MalformedMessageError)
    assert "utf-8" in str(error)


def test_of_a_field_that_is_given_twice_the_last_is_taken():
    """Nothing is judged twice, so that nobody can be shown the first and answered the second."""
    body = request().replace(b'"instruction"', b'"instruction": "first", "instruction"')
    assert codec.decode_request(body, WireFormat.JSON).observation.instruction == "lift the cup"


@pytest.mark.parametrize(
    ("changes", "limits", "field"),
    [
        ({}, replace(DEFAULT_LIMITS, max_bytes=20), "body"),
        ({}, replace(DEFAULT_LIMITS, max_image_pixels=1), "image.shape"),
        ({"state": [0] * 1025}, DEFAULT_LIMITS, "state"),
        ({"instruction": "x" * 2**20}, DEFAULT_LIMITS, "instruction"),
        (
            {"image": {"dtype": "uint8", "shape": [2**20, 2**20, 3], "data": ""}},
            DEFAULT_LIMITS,
            "image.shape",
        ),
    ],
)
def test_what_is_beyond_a_limit_is_refused(changes, limits, field):
    error = refusal(request(**changes), limits)
    assert isinstance(error, MessageTooLargeError)
    assert error.field == field


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b'{"state": [' + b"0," * 131_073 + b"0]}", "131073 entries"),
        (b'{"state": [' + b"0.5," * 131_070 + b'{"a":0.5}]}', "131073 names or fractions"),
        (b'{"a":' + b'{"":' * 65_536 + b"}", "65537 lists or maps"),
    ],
)
def test_json_that_takes_long_to_read_is_refused_unread(body: bytes, what: str):
    """Eight million zeros held the interpreter, and so every answer, for half a second."""
    with pytest.raises(MessageTooLargeError, match=what):
        codec.decode_request(body, WireFormat.JSON)


def test_a_picture_as_lists_of_numbers_is_refused_by_its_name():
    """It takes fifty times its size in memory, and seconds to read."""
    error = refusal(request(image=[[[0, 0, 0]]]))
    assert error.field == "image"


def test_a_problem_arrives_with_all_its_members():
    problem = Problem(422, "Unusable value", "state: must be finite", "about:blank", "state", "r-7")
    assert codec.decode_problem(422, codec.encode_problem(problem)) == problem


@pytest.mark.parametrize("body", [b"", b"<html>Bad gateway</html>", b"[1]", b'{"title": 5}'])
def test_a_problem_is_made_of_whatever_a_proxy_says(body):
    problem = codec.decode_problem(502, body, retry_after_s=1.5)
    assert problem.status == 502
    assert problem.title == "HTTP 502"
    assert problem.retry_after_s == 1.5


def test_a_problem_of_very_many_lists_is_not_read():
    """1.2 MB of empty lists held up a control loop for 0.4 s."""
    body = b'{"title":"Busy","more":[' + b"[]," * 100_000 + b"[]]}"
    problem = codec.decode_problem(429, body)
    assert problem.title == "HTTP 429"
    assert problem.detail.startswith('{"title":"Busy"')


@given(
    gaps=strategies.lists(strategies.integers(0, 9), max_size=300), tail=strategies.integers(0, 9)
)
def test_signs_are_counted_as_the_slow_way_counts_them(gaps: list[int], tail: int):
    text = "".join("x" * gap + "," for gap in gaps) + "x" * tail
    assert count_of(text, ",") == text.count(",")
    assert count_of(text.encode(), b",") == text.count(",")


def test_a_number_of_very_many_digits_is_refused_by_the_name_of_its_field():
    digits = b"9" * 250_000
    with pytest.raises(UnusableValueError, match="^radius: must be an integer from 0 to 65535"):
        codec.parse_request(b'{"radius":' + digits + b"}", WireFormat.JSON)
    with pytest.raises(UnusableValueError, match="^state: integer value out of range"):
        decode(digits, object, WireFormat.JSON, name="state")
