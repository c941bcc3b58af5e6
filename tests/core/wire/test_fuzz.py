"""Whatever arrives, reading it gives a message or a `WireError`: nothing else ever escapes."""

import contextlib
import json
from collections.abc import Callable
from functools import partial

import msgpack
import PIL.Image
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deft_core.errors import WireError
from deft_core.wire import codec
from deft_core.wire.codec import decode_info, decode_problem, decode_reset
from deft_core.wire.formats import WireFormat
from deft_core.wire.images import ImageEncoding, decode_image
from tests.core.samples import frame, full_answer, full_message, saved

FUZZ = settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow], database=None
)
DECODERS: list[Callable[[bytes], object]] = [
    *(partial(codec.decode_request, wire_format=one) for one in WireFormat),
    *(partial(codec.decode_answer, wire_format=one) for one in WireFormat),
    codec.decode_answers,
    codec.message_id,
    decode_reset,
    decode_info,
    lambda data: decode_problem(500, data),
]
MESSAGES = [
    *(codec.encode_request(full_message(), encoding) for encoding in ImageEncoding),
    codec.encode_answer(full_answer()),
    codec.encode_request(full_message(), wire_format=WireFormat.JSON),
    codec.encode_answer(full_answer(), wire_format=WireFormat.JSON),
]
PICTURES = [
    saved(PIL.Image.fromarray(frame(9, 8)).convert(mode), kind)
    for kind, mode in [("PNG", "RGB"), ("PNG", "P"), ("PNG", "LA"), ("JPEG", "RGB"), ("JPEG", "L")]
]
NAMES = st.sampled_from(
    [
        *("v", "image", "instruction", "cameras", "state", "dtype", "shape", "data", "encoding"),
        *("actions", "timings", "trace", "tokens", "passes", "margins", "path", "wire_ms"),
        *("radius", "deadline_ms", "session_id", "method", "title", "field", "retry_after_s"),
        *("policy", "versions"),
    ]
)
WORDS = st.sampled_from(["raw", "png", "jpeg", "uint8", "float32", "float64", "", "\x00"])
LEAVES = (
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text(max_size=9)
    | st.binary(max_size=24) | WORDS
)  # fmt: skip
TREES = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=6),
    max_leaves=12,
)


@st.composite
def mutated(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """One of the originals with a few bytes changed, cut out or put in."""
    data = bytearray(draw(st.sampled_from(originals)))
    for _ in range(draw(st.integers(1, 6))):
        at = draw(st.integers(0, len(data)))
        removed = draw(st.sampled_from([0, 1, 1, 1, 4, 50]))
        data[at : at + removed] = draw(st.binary(max_size=4))
    return bytes(data)


def read_with_all(data: bytes) -> None:
    for decode in DECODERS:
        with contextlib.suppress(WireError):
            decode(data)


@FUZZ
@given(st.binary(max_size=200))
def test_random_bytes_are_read_or_refused_with_a_wire_error(data):
    read_with_all(data)


@FUZZ
@given(mutated(MESSAGES))
def test_messages_with_changed_bytes_are_read_or_refused_with_a_wire_error(data):
    read_with_all(data)


@FUZZ
@given(TREES)
def test_messages_of_any_structure_are_read_or_refused_with_a_wire_error(tree):
    read_with_all(msgpack.packb(tree, unicode_errors="surrogatepass"))
    read_with_all(json.dumps(tree, default=str).encode())


@FUZZ
@given(st.dictionaries(NAMES, TREES, min_size=1, max_size=8))
def test_sound_messages_with_replaced_fields_are_read_or_refused_with_a_wire_error(changes):
    sound = msgpack.unpackb(MESSAGES[0])
    read_with_all(msgpack.packb({**sound, **changes}, unicode_errors="surrogatepass"))
    answer = msgpack.unpackb(codec.encode_answer(full_answer()))
    read_with_all(msgpack.packb({**answer, "trace": {**answer["trace"], **changes}}))
    read_with_all(json.dumps({**json.loads(MESSAGES[-2]), **changes}, default=str).encode())


@FUZZ
@given(mutated(PICTURES))
def test_pictures_with_changed_bytes_are_read_or_refused_with_a_wire_error(data):
    with contextlib.suppress(WireError):
        decode_image(data, "image")


def test_every_prefix_of_a_message_is_refused():
    data = MESSAGES[0]
    for end in range(0, len(data), 7):
        with pytest.raises(WireError):
            codec.decode_request(data[:end])
