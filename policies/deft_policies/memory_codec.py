"""A robot's memory as bytes: msgpack, read as strictly as what crosses the network."""

from collections.abc import Sequence
from itertools import chain

import msgpack
import numpy as np

from deft_client.errors import UnsupportedMessageError, UnusableValueError
from deft_client.wire import msgpack_codec
from deft_client.wire.fields import Kind, Terms, WireLimits, list_of, record_of, unusable, whole
from deft_policies.memory import PlanPasses, SessionMemory, Tokens

VERSION = 1
_LIMITS = WireLimits(max_bytes=64 * 1024, max_trace_values=256, max_lists=512)
_MAX_WIDTH = 256  # tokens of a step


def encode_memory(memory: SessionMemory) -> bytes:
    """Return a memory as bytes."""
    entries = {
        **vars(memory),
        "v": VERSION,
        "own": _pack_steps(memory.own),
        "executed": _pack_steps(memory.executed),
        "passes_needed": [vars(one) for one in memory.passes_needed],
    }
    return bytes(msgpack.packb(entries))


def decode_memory(data: bytes) -> SessionMemory:
    """Return the memory in the bytes, or raise `WireError`."""
    entries = msgpack_codec.unpack(data, _LIMITS)
    if not isinstance(entries, dict) or entries.pop("v", None) != VERSION:
        raise UnsupportedMessageError("v", f"is no session memory of version {VERSION}")
    try:
        return _MEMORY.read(entries, "", Terms(_LIMITS))
    except ValueError as error:
        raise UnusableValueError("body", str(error)) from error


def _pack_steps(steps: Sequence[Tokens]) -> list[object]:
    """Tokens of a step, and all of them as little-endian int32."""
    width = len(steps[0]) if steps else 0
    return [width, np.fromiter(chain.from_iterable(steps), "<i4").tobytes()]


def _read_steps(value: object, where: str, terms: Terms) -> tuple[Tokens, ...]:
    if not (isinstance(value, list) and [type(one) for one in value] == [int, bytes]):
        raise unusable(where, "a width and bytes", value)
    width, data = value
    if not 0 <= width <= _MAX_WIDTH or (len(data) % (4 * width) if width else data):
        raise UnusableValueError(where, f"{len(data)} bytes are no steps of {width} tokens")
    tokens = np.frombuffer(data, "<i4").reshape(-1, width) if width else np.empty((0, 0))
    if tokens.size and tokens.min() < 0:
        raise UnusableValueError(where, "must hold no negative token")
    return tuple(map(tuple, tokens.tolist()))


_STEPS = Kind(_read_steps, lambda _: {"type": "array"})
_COUNT = whole(low=0)
_MEMORY = record_of(
    SessionMemory,
    {
        "own": _STEPS,
        "executed": _STEPS,
        "num_steps": _COUNT,
        "num_draws": _COUNT,
        "passes_needed": list_of(record_of(PlanPasses, {"count": _COUNT})),
    },
)
