"""A session's memory as bytes: nothing is lost, and nothing else is taken for one."""

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deft_client.errors import UnsupportedMessageError, WireError
from deft_policies.memory import STEPS_KEPT, PlanPasses, SessionMemory
from deft_policies.memory_codec import decode_memory, encode_memory

FULL = SessionMemory(
    own=((31_999,) * 7,) * STEPS_KEPT,
    executed=((31_744,) * 7,) * STEPS_KEPT,
    drift=(0.1,) * 7,
    num_steps=400,
    num_draws=9_000,
    passes_needed=tuple(PlanPasses(f"plan-{number}", 1.5, 400) for number in range(4)),
    last_action=(0.25,) * 7,
)
finite = st.floats(allow_nan=False, allow_infinity=False)
count = st.integers(0, 2**63 - 1)
plans = st.builds(PlanPasses, st.text("abc-é", max_size=20), finite, count)


@st.composite
def memories(draw: st.DrawFn) -> SessionMemory:
    length = draw(st.integers(1, 8))
    step = st.tuples(*[st.integers(0, 2**31 - 1)] * length)
    steps = draw(st.lists(st.tuples(step, step), max_size=STEPS_KEPT))
    return SessionMemory(
        own=tuple(own for own, _ in steps),
        executed=tuple(executed for _, executed in steps),
        drift=tuple(draw(st.lists(finite, max_size=8))),
        num_steps=draw(count),
        num_draws=draw(count),
        passes_needed=tuple(draw(st.lists(plans, max_size=6))),
        last_action=draw(st.none() | st.lists(finite, max_size=8).map(tuple)),
    )


@settings(max_examples=60, deadline=None)
@given(memories())
def test_a_memory_survives_the_way_there_and_back(memory: SessionMemory) -> None:
    assert decode_memory(encode_memory(memory)) == memory


def test_a_full_memory_is_small() -> None:
    assert len(encode_memory(FULL)) < 2500


@settings(max_examples=200, deadline=None)
@given(st.integers(0, len(encode_memory(FULL)) - 1), st.integers(1, 255), st.booleans())
def test_damaged_bytes_are_refused_or_are_another_memory(
    place: int, change: int, is_cut: bool
) -> None:
    data = bytearray(encode_memory(FULL))
    data[place] ^= change
    try:
        found = decode_memory(bytes(data[:place] if is_cut else data))
    except WireError:
        return
    assert decode_memory(encode_memory(found)) == found


@pytest.mark.parametrize("data", [b"", b"\xc0", b"\x80", b"\x01", b"\x93\x01\x02\x03"])
def test_what_is_no_memory_is_refused(data: bytes) -> None:
    with pytest.raises(WireError):
        decode_memory(data)


def entries(**changed: object) -> bytes:
    return bytes(msgpack.packb(msgpack.unpackb(encode_memory(FULL)) | changed))


def test_a_memory_of_another_version_is_refused_by_its_version() -> None:
    with pytest.raises(UnsupportedMessageError, match="version 1"):
        decode_memory(entries(v=2))


@pytest.mark.parametrize(
    "changed",
    [
        {"extra": 1},
        {"num_steps": -1},
        {"num_steps": 1.5},
        {"drift": [float("nan")]},
        {"last_action": [float("inf")]},
        {"drift": [0.0] * 300},
        {"own": [0, b""]},
        {"own": [0, b"\0" * 4]},
        {"own": [-7, b"\0" * 28]},
        {"own": [2**20, b""]},
        {"own": [7, b"\0" * 27]},
        {"own": [7, b"\0" * 28 * 33], "executed": [7, b"\0" * 28 * 33]},
        {"own": [1, b"\xff" * 4], "executed": [1, b"\0" * 4]},
        {"own": [True, b""]},
        {"own": [[1], [2]]},
        {"passes_needed": [{"plan": "a", "value": 1.0, "count": -1}]},
    ],
)
def test_values_no_session_can_have_are_refused(changed: dict[str, object]) -> None:
    with pytest.raises(WireError):
        decode_memory(entries(**changed))
