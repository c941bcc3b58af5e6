"""Bytes that earlier versions wrote are read, with the meaning they had: docs/compatibility.md."""

from pathlib import Path

import numpy as np
import pytest

from deft_core.types import ActOptions
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat

pytestmark = pytest.mark.promise

MESSAGES = Path(__file__).parents[2] / "golden" / "wire_v1"
FORMATS = [(WireFormat.MSGPACK, "msgpack"), (WireFormat.JSON, "json")]


@pytest.mark.parametrize(("wire_format", "suffix"), FORMATS)
def test_a_request_of_version_1_is_understood(wire_format, suffix) -> None:
    message = codec.decode_request((MESSAGES / f"request.{suffix}").read_bytes(), wire_format)
    frame = (np.arange(60) * 3 % 256).astype(np.uint8).reshape(4, 5, 3)
    np.testing.assert_array_equal(message.observation.image, frame)
    np.testing.assert_array_equal(message.observation.cameras["wrist"], frame[::-1])
    np.testing.assert_array_equal(message.observation.state, np.array([0.5, -1.25], np.float32))
    assert message.observation.instruction == "lift the cup"
    assert message.options == ActOptions("arm-1", 80.0, "libero_object", "lossless", 3, True)


@pytest.mark.parametrize(("wire_format", "suffix"), FORMATS)
def test_an_answer_of_version_1_is_understood(wire_format, suffix) -> None:
    chunk = codec.decode_answer((MESSAGES / f"answer.{suffix}").read_bytes(), wire_format)
    np.testing.assert_array_equal(chunk.actions, np.linspace(-1, 1, 14).reshape(2, 7))
    assert (chunk.timings.queue_ms, chunk.timings.total_ms) == (0.5, 12.0)
    assert chunk.trace is not None
    assert (chunk.trace.method, chunk.trace.accepted_lengths) == ("lossless", (2,))
