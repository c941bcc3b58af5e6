"""Attacks on a server by one machine that holds no key, over real sockets.

Each is a function that attacks until its time is over; what the server answers does not matter to
it. They come from another address of this machine, so that limits per address do not hit others.
"""

import contextlib
import random
import selectors
import socket
import ssl
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from functools import cache, partial
from io import BytesIO
from multiprocessing.synchronize import Barrier

import msgpack
import numpy as np
import PIL.Image

OWN_ADDRESS = "127.0.0.2"
CHUNK = 256 * 1024
Attack = Callable[[int, float, random.Random], None]

_POST = b"POST /v1/act HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/msgpack\r\n"
_HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nhost: 127.0.0.1\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)


@contextlib.contextmanager
def _connection(port: int) -> Iterator[socket.socket]:
    """Open one; that the server closes it, or takes no more, is what it should do."""
    try:
        with socket.create_connection(("127.0.0.1", port), 5, (OWN_ADDRESS, 0)) as opened:
            opened.settimeout(1)
            yield opened
    except OSError:
        time.sleep(0.005)


def _send_for(opened: socket.socket, data: bytes, until_s: float) -> None:
    """Send the same again and again, and read nothing."""
    while time.monotonic() < until_s:
        opened.sendall(data)


def _repeat(head: bytes, data: bytes) -> Attack:
    """Return an attack that begins with `head` and goes on with `data` without end."""

    def attack(port: int, until_s: float, rng: random.Random) -> None:
        while time.monotonic() < until_s:
            with _connection(port) as opened:
                opened.sendall(head)
                _send_for(opened, data, until_s)

    return attack


def _websocket(data: bytes, pause_s: float = 0.0, path: bytes = b"/v1/stream") -> Attack:
    """Return an attack that sends frames without end over WebSockets."""

    def attack(port: int, until_s: float, rng: random.Random) -> None:
        while time.monotonic() < until_s:
            with _connection(port) as opened:
                opened.sendall(_HANDSHAKE.replace(b"/v1/stream", path))
                opened.recv(4096)
                _send_for(opened, data, until_s)
            time.sleep(pause_s)

    return attack


def _frame(opcode: int, payload: bytes, is_last: bool = True) -> bytes:
    """Return a WebSocket frame with the mask 0."""
    size = len(payload)
    head = bytes([opcode | 0x80 * is_last])
    if size < 126:
        head += bytes([0x80 | size])
    else:
        head += b"\xff" + struct.pack(">Q", size)
    return head + bytes(4) + payload


def unfinished_messages(port: int, until_s: float, rng: random.Random) -> None:
    """Hold as many messages as the server takes, all but their last byte."""
    size = 15 * 1024 * 1024
    begun = _frame(2, bytes(size))[:-1]
    while time.monotonic() < until_s:
        with contextlib.ExitStack() as held:
            for _ in range(64):
                opened = held.enter_context(_connection(port))
                opened.sendall(_HANDSHAKE)
                opened.recv(4096)
                with contextlib.suppress(OSError):
                    opened.sendall(begun)
            time.sleep(max(0.0, min(1.0, until_s - time.monotonic())))


def idle_connections(port: int, until_s: float, rng: random.Random) -> None:
    """Open connections and say nothing."""
    while time.monotonic() < until_s:
        with contextlib.ExitStack() as held:
            for _ in range(3000):
                with contextlib.suppress(OSError):
                    opened = socket.create_connection(("127.0.0.1", port), 1, (OWN_ADDRESS, 0))
                    held.enter_context(opened)
                if time.monotonic() > until_s:
                    break
            time.sleep(max(0.0, min(1.0, until_s - time.monotonic())))


def _posted(
    bodies: Callable[[random.Random], bytes], path: bytes = b"/v1/act", kind: bytes = b"msgpack"
) -> Attack:
    """Return an attack that posts bodies and hangs up at once."""

    def attack(port: int, until_s: float, rng: random.Random) -> None:
        while time.monotonic() < until_s:
            with _connection(port) as opened:
                body = bodies(rng)
                head = _POST.replace(b"/v1/act", path).replace(b"msgpack", kind)
                opened.sendall(head + f"content-length: {len(body)}\r\n\r\n".encode() + body)

    return attack


def _with_picture(encoding: str, picture: bytes, num_cameras: int = 0) -> bytes:
    image = {"encoding": encoding, "data": picture}
    cameras = {f"camera {number}": image for number in range(num_cameras)} or None
    asked = {"v": 1, "instruction": "lift", "image": image, "cameras": cameras}
    return bytes(msgpack.packb(asked))


@cache
def _large_picture() -> bytes:
    """Return a progressive JPEG of 4 million pixels, which decoders are busy with for long."""
    buffer = BytesIO()
    image = np.random.default_rng(0).integers(0, 255, (1024, 1024, 3), np.uint8)
    PIL.Image.fromarray(image).resize((2000, 2000)).save(
        buffer, "JPEG", progressive=True, quality=5
    )
    return buffer.getvalue()


def many_scans(num_scans: int = 4000) -> bytes:
    """Return a progressive JPEG that says its last scan again and again."""
    data = _large_picture()
    last = data.rindex(b"\xff\xda")
    end = last + 2 + int.from_bytes(data[last + 2 : last + 4], "big")
    return data[:last] + (data[last:end] + b"\x00" * 2) * num_scans + b"\xff\xd9"


def _chunk(name: bytes, data: bytes) -> bytes:
    """Return a part of a PNG."""
    crc = struct.pack(">I", zlib.crc32(name + data))
    return struct.pack(">I", len(data)) + name + data + crc


def _bombs(num_cameras: int) -> bytes:
    """Return a message to openpi's socket with 50 pictures of 4 million pixels in 31 kB.

    So many of them are where cameras are read, the others anywhere.
    """
    side = 2048
    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(side * (1 + side // 8)), 9)
    chunks = _chunk(b"IHDR", header) + _chunk(b"IDAT", rows) + _chunk(b"IEND", b"")
    bomb = {"__image__": True, "format": "png", "data": b"\x89PNG\r\n\x1a\n" + chunks}
    cameras = {f"camera {number}": bomb for number in range(num_cameras)}
    others = {f"other {number}": bomb for number in range(50 - num_cameras)}
    return bytes(msgpack.packb({"images": cameras, "prompt": "x", "others": others}))


def many_chunks(kind: bytes = b"iCCP", num_chunks: int = 8000) -> bytes:
    """Return a PNG with profiles that inflate to a megabyte each."""
    header = struct.pack(">IIBBBBB", 64, 64, 8, 2, 0, 0, 0)
    profile = b"x\x00\x00" + zlib.compress(bytes(1024 * 1024 - 1), 9)
    pixels = _chunk(b"IDAT", zlib.compress(bytes(64 * (64 * 3 + 1)))) + _chunk(b"IEND", b"")
    body = _chunk(kind, profile) * num_chunks
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + body + pixels


@cache
def _jpeg() -> bytes:
    return _with_picture("jpeg", many_scans())


@cache
def _png() -> bytes:
    return _with_picture("png", many_chunks())


@cache
def _maps() -> bytes:
    """Return a message that is nothing but small maps, as large as one may be."""
    row = msgpack.packb({f"{number:04x}": 0 for number in range(1024)})
    return b"\x81\xa5image\xdc\x0a\x00" + bytes(row) * 2560


def _nonsense(rng: random.Random) -> bytes:
    return rng.randbytes(rng.randrange(1, 2000))


def handshakes(port: int, until_s: float, rng: random.Random) -> None:
    """Begin TLS handshakes and leave them where they are; for a proxy with TLS."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing).do_handshake()
    hello = outgoing.read()
    with contextlib.ExitStack() as held:
        callers = [held.enter_context(_connection(port)) for _ in range(900)]
        for one in callers:  # all at the same moment
            one.sendall(hello)
        while time.monotonic() < until_s:
            with contextlib.suppress(OSError):
                opened = socket.create_connection(("127.0.0.1", port), 1, (OWN_ADDRESS, 0))
                held.enter_context(opened).sendall(hello)


def many_pictures(port: int, until_s: float, rng: random.Random, num_cameras: int = 0) -> None:
    """Ask with the largest pictures that are taken over many connections, and wait for answers."""
    body = _with_picture("jpeg", _large_picture(), num_cameras)
    request = _POST + f"content-length: {len(body)}\r\n\r\n".encode() + body
    with contextlib.ExitStack() as held, selectors.DefaultSelector() as answered:
        while time.monotonic() < until_s:
            for _ in range(200 - len(answered.get_map())):
                opened = held.enter_context(_connection(port))
                answered.register(opened, selectors.EVENT_READ | selectors.EVENT_WRITE, opened)
            for key, events in answered.select(0.1):
                try:
                    if events & selectors.EVENT_READ and not key.data.recv(65536):
                        raise ConnectionError
                    key.data.sendall(request)
                    answered.modify(key.data, selectors.EVENT_READ, key.data)
                except OSError:  # refused; once more from the beginning
                    answered.unregister(key.data)
                    key.data.close()


def many_requests(port: int, until_s: float, rng: random.Random) -> None:
    """Ask over a thousand connections at once, again and again."""
    request = _POST + b"content-length: 1\r\n\r\n\xc1"
    while time.monotonic() < until_s:
        with contextlib.ExitStack() as held:
            callers = [held.enter_context(_connection(port)) for _ in range(1000)]
            while time.monotonic() < until_s:
                for one in callers:
                    one.sendall(request)
                for one in callers:
                    one.recv(65536)


def many_streams(port: int, until_s: float, rng: random.Random) -> None:
    """Send the smallest frames over hundreds of WebSockets, as many as each of them takes."""
    pongs = _frame(10, b"") * (CHUNK // 6)
    while time.monotonic() < until_s:
        with contextlib.ExitStack() as held:
            callers = [held.enter_context(_connection(port)) for _ in range(300)]
            for one in callers:
                one.sendall(_HANDSHAKE)
                one.recv(4096)
                one.setblocking(False)
            while time.monotonic() < until_s:
                for one in callers:
                    with contextlib.suppress(BlockingIOError):
                        one.send(pongs)
                time.sleep(0.01)


_TRAILERS = _POST + b"transfer-encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
_ZEROS = b'{"image": [' + b"0," * 8_000_000
FLOODS: dict[str, Attack] = {
    "one header without end": _repeat(_POST + b"x-big: ", b"a" * CHUNK),
    "headers without end": _repeat(_POST, b"x-one: 1\r\n" * (CHUNK // 10)),
    "a URL without end": _repeat(b"GET /", b"a" * CHUNK),
    "one trailer without end": _repeat(_TRAILERS + b"x-big: ", b"a" * CHUNK),
    "trailers without end": _repeat(_TRAILERS, b"x-one: 1\r\n" * (CHUNK // 10)),
    "pipelined requests": _repeat(b"", b"GET /v1/info HTTP/1.1\r\nhost: 127.0.0.1\r\n\r\n" * 6000),
    "pings whose answers nobody reads": _websocket(_frame(9, bytes(125)) * 2000),
    "pongs": _websocket(_frame(10, b"") * (CHUNK // 6)),
    "empty fragments": _websocket(_frame(2, b"", False) + _frame(0, b"", False) * (CHUNK // 6)),
    "small messages": _websocket(_frame(2, b"x") * (CHUNK // 7)),
    "unfinished messages": unfinished_messages,
    "idle connections": idle_connections,
    "large resets": _posted(lambda _: b'{"session_id": "' + b"a" * 15_000_000, b"/v1/reset"),
    "JPEGs of 4000 scans": _posted(lambda _: _jpeg()),
    "PNGs of 8000 profiles": _posted(lambda _: _png()),
    "16 MB of zeros in JSON": _posted(lambda _: _ZEROS, kind=b"json"),
    "16 MB of maps in msgpack": _posted(lambda _: _maps()),
    "small messages to a refusal": _websocket(_frame(2, b"x") * (CHUNK // 7), path=b"/"),
    "bombs where no camera is": _websocket(_frame(2, _bombs(1)), path=b"/"),
    "bombs for nine cameras": _websocket(_frame(2, _bombs(9)), path=b"/"),
    "a content type of semicolons": _repeat(
        _POST.replace(b"application/msgpack", b"multipart/form-data" + b";" * 8000)
        + b"content-length: 1\r\n\r\nx",
        b"",
    ),
}


# What the proxy bears: hostile connections by the hundred.
PROXY_FLOODS: dict[str, Attack] = {
    "nonsense": _posted(_nonsense),
    "1000 connections at once": many_requests,
    "300 streams at once": many_streams,
    "large pictures, 200 connections": many_pictures,
    "nine large pictures in a message": partial(many_pictures, num_cameras=8),
}
TLS_FLOODS: dict[str, Attack] = {"TLS handshakes left open": handshakes}


def run_flood(name: str, port: int, seconds: float, seed: int, start: Barrier) -> None:
    """Attack a port of this machine once everybody is there; the target of a process."""
    start.wait()
    attack = (FLOODS | PROXY_FLOODS | TLS_FLOODS)[name]
    attack(port, time.monotonic() + seconds, random.Random(seed))
