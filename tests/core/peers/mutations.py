"""Damages messages the way networks, bugs and attackers do: bytes, lengths and single values."""

import json
import random
from collections.abc import Callable
from copy import deepcopy

import msgpack

_ODD_VALUES: tuple[object, ...] = (
    None, True, -1, 0, 2**40, -(2**63), 10**25, 1.5, float("nan"), float("inf"), "", "x" * 5000,
    "\ud800", [], {}, [[]], [2**40, 2**40, 3], [-1, 4, 3], "|O", "<c16", "|V8",
    "|S4", "object", "<f8", "|u1", {"__numpy__": "AAAA", "dtype": "|O", "shape": [1]},
)  # fmt: skip
_ODD_BINARY_VALUES: tuple[object, ...] = (
    b"", b"\xff" * 9,
    {"__ndarray__": True, "data": b"abc", "dtype": "|u1", "shape": [2**62]},
    {b"__ndarray__": True, b"data": b"abc", b"dtype": "|O", b"shape": [1]},
    {b"__npgeneric__": True, b"data": "x", b"dtype": "<f4"},
    {"__image__": True, "format": "png", "data": b"\x89PNG\r\n\x1a\n" + b"\0" * 40},
    {"__image__": True, "format": "jpeg", "data": b"\xff\xd8\xff\xe0" + b"\0" * 40},
)  # fmt: skip


def mutate(message: bytes, rng: random.Random) -> bytes:
    """Return a damaged copy."""
    return rng.choice(_MUTATIONS)(message, rng)


def _flip(message: bytes, rng: random.Random) -> bytes:
    damaged = bytearray(message)
    for _ in range(rng.choice((1, 1, 2, 8, 64))):
        if damaged:
            # Structure sits at both ends; the middle is mostly pixels.
            near = rng.choice((40, 200, len(damaged)))
            at = rng.randrange(min(near, len(damaged)))
            damaged[at if rng.random() < 0.5 else -1 - at] ^= 1 << rng.randrange(8)
    return bytes(damaged)


def _truncate(message: bytes, rng: random.Random) -> bytes:
    return message[: rng.randrange(len(message) + 1)]


def _insert(message: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(message) + 1)
    return message[:at] + rng.randbytes(rng.choice((1, 3, 9, 100))) + message[at:]


def _splice(message: bytes, rng: random.Random) -> bytes:
    low, high = sorted(rng.randrange(len(message) + 1) for _ in range(2))
    return message[:low] + message[high:]


def _noise(message: bytes, rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(200))


def _deepen(message: bytes, rng: random.Random) -> bytes:
    depth = rng.choice((10, 600, 20_000))
    return rng.choice((b"[" * depth, b'{"a":' * depth, b"\x91" * depth, b"\x81\xa1a" * depth))


def _replace_value(message: bytes, rng: random.Random) -> bytes:
    """Exchange, remove or add one value somewhere in the message and pack it again."""
    unpack, pack = _codec(message)
    try:
        root = unpack(message)
    except (ValueError, msgpack.UnpackException):
        return _flip(message, rng)
    if not isinstance(root, dict):
        return _flip(message, rng)
    holder: dict[object, object] = root
    while (inner := [one for one in holder.values() if isinstance(one, dict) and one]) and (
        rng.random() < 0.7
    ):
        holder = rng.choice(inner)
    key = rng.choice(list(holder)) if holder else "x"
    if rng.random() < 0.2:
        holder.pop(key, None)
    else:
        odd = _ODD_VALUES if pack is _pack_json else _ODD_VALUES + _ODD_BINARY_VALUES
        holder[key if rng.random() < 0.9 else "extra"] = deepcopy(rng.choice(odd))
    return pack(root)


def _codec(message: bytes) -> tuple[Callable[[bytes], object], Callable[[object], bytes]]:
    if message[:1] == b"{":
        return json.loads, _pack_json
    return msgpack.unpackb, _pack_msgpack


def _pack_json(root: object) -> bytes:
    return json.dumps(root).encode()


def _pack_msgpack(root: object) -> bytes:
    try:
        return bytes(msgpack.packb(root, unicode_errors="surrogatepass"))
    except OverflowError:  # an integer beyond 64 bits exists in JSON only
        return b"\x81\xa1x\xcf" + b"\xff" * 8


_MUTATIONS = (_flip, _flip, _truncate, _insert, _splice, _noise, _deepen) + (_replace_value,) * 5
