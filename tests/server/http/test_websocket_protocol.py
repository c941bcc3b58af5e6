"""The short way for camera frames, against the parser it goes around."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.exceptions import InvalidState, ProtocolError
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol

from deft_server.http.websocket_protocol import FrameParser, FrameReceiver

MAX_SIZE = 200_000
HANDSHAKE = (
    b"GET / HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)


@dataclass(frozen=True)
class Seen:
    """What came out of a parser."""

    frames: list[tuple[Opcode, bytes, bool]]
    sent: bytes
    state: State
    close_code: int | None


def opened(parser: ServerProtocol) -> ServerProtocol:
    parser.receive_data(HANDSHAKE)
    (request,) = parser.events_received()
    parser.send_response(parser.accept(request))
    parser.data_to_send()
    return parser


def seen(parser: ServerProtocol) -> Seen:
    frames = [(one.opcode, bytes(one.data), one.fin) for one in parser.events_received()]
    code = None if parser.close_sent is None else parser.close_sent.code
    return Seen(frames, b"".join(parser.data_to_send()), parser.state, code)


class Owner:
    """Has a receiver read for a parser, as a connection does."""

    def __init__(self) -> None:
        self.parser = FrameParser(MAX_SIZE, None)
        opened(self.parser)
        self.receiver = FrameReceiver(self)
        self.num_large = 0

    def data_received(self, data: bytes) -> None:
        self.parser.receive_data(data)

    def frame_received(self, message: memoryview) -> None:
        assert message.readonly
        self.num_large += 1
        if self.parser.state is State.OPEN:
            self.parser.recv_frame(Frame(Opcode.BINARY, message))

    def arrive(self, data: bytes) -> None:
        """Fill the receiver's memory as the event loop does."""
        while data:
            room = self.receiver.get_buffer(-1)
            size = min(len(room), len(data))
            room[:size] = data[:size]
            room.release()
            data = data[size:]
            self.receiver.buffer_updated(size)


def short(chunks: list[bytes]) -> Seen:
    owner = Owner()
    for chunk in chunks:
        owner.arrive(chunk)
    return seen(owner.parser)


def plain(chunks: list[bytes]) -> Seen:
    parser = opened(ServerProtocol(max_size=MAX_SIZE))
    for chunk in chunks:
        parser.receive_data(chunk)
    return seen(parser)


def masked(opcode: Opcode, data: bytes, fin: bool = True) -> bytes:
    return Frame(opcode, data, fin).serialize(mask=True)


def pixels(size: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(size)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    """Return the data in pieces, none of them empty."""
    edges = [0, *sorted({place % len(data) for place in places} - {0}), len(data)]
    return [data[start:end] for start, end in zip(edges, edges[1:], strict=False)]


BIG = st.builds(
    lambda size, seed: [masked(Opcode.BINARY, pixels(size, seed))],
    st.sampled_from([65_535, 65_536, 65_537, 150_528, 196_608, MAX_SIZE, MAX_SIZE + 1]),
    st.integers(0, 3),
)
SMALL = st.builds(
    lambda opcode, size: [masked(opcode, b"x" * size)],
    st.sampled_from([Opcode.BINARY, Opcode.TEXT, Opcode.PING, Opcode.PONG]),
    st.integers(0, 125),
)
# A large last fragment must not be taken for a message of its own, a large binary frame amid
# fragments is a mistake of the client, and a continuation of nothing as well.
FRAGMENTS = st.builds(
    lambda size, amid: [
        masked(Opcode.BINARY, b"begun", fin=False),
        *amid,
        masked(Opcode.CONT, pixels(size)),
    ],
    st.sampled_from([3, 70_000]),
    st.sampled_from([[], [masked(Opcode.PING, b"?")], [masked(Opcode.BINARY, pixels(70_000))]]),
)
ODD = st.sampled_from(
    [
        [masked(Opcode.CONT, pixels(70_000))],
        [masked(Opcode.CLOSE, b"\x03\xe8")],
        [Frame(Opcode.BINARY, pixels(70_000)).serialize(mask=False)],
        [b"\x82\xff" + (12).to_bytes(8, "big") + b"mask" + b"x" * 12],  # longer than it had to be
        [b"\x82\xff" + (2**63).to_bytes(8, "big") + b"mask"],
        [b"\xc2\xff" + (70_000).to_bytes(8, "big") + b"mask"],  # compressed, which nobody agreed to
    ]
)


def pieces(frames: list[bytes], places: list[int], keeps_starts: bool) -> list[bytes]:
    """Cut what was sent, and where wanted, where frames begin as well: as robots send them."""
    starts = [sum(map(len, frames[:index])) for index in range(len(frames))]
    return cut(b"".join(frames), places + starts * keeps_starts)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.one_of(BIG, SMALL, FRAGMENTS, ODD), min_size=1, max_size=4),
    st.lists(st.integers(0, 500_000), max_size=6),
    st.booleans(),
)
def test_it_reads_what_the_parser_it_goes_around_reads(messages, places, keeps_starts):
    frames = [frame for message in messages for frame in message]
    chunks = pieces(frames, places, keeps_starts)
    assert short(chunks) == plain(chunks)


def test_a_large_frame_amid_fragments_is_refused():
    chunks = [masked(Opcode.BINARY, b"begun", fin=False), masked(Opcode.BINARY, pixels(70_000))]
    assert short(chunks) == plain(chunks)
    assert short(chunks).close_code == 1002


@pytest.mark.parametrize("first", range(1, 20))
def test_pixels_that_look_like_a_header_are_not_taken_for_one(first):
    """The parser may stand in the middle of a frame with nothing left to read."""
    header = b"\x82\xff" + (70_000).to_bytes(8, "big") + b"mask"
    outer = b"\x82\xff" + (14 * 6000).to_bytes(8, "big") + b"\0\0\0\0"  # leaves all as it is
    data = outer + header * 6000 + masked(Opcode.BINARY, pixels(70_000))
    chunks = [data[:first], *([data[first:14]] if first < 14 else []), data[max(first, 14) :]]
    assert short(chunks) == plain(chunks)
    assert len(short(chunks).frames) == 2


def test_small_frames_with_a_long_header_may_come_by_the_thousand():
    data = (b"\x82\xff" + (1).to_bytes(8, "big") + b"mask" + b"x") * 5000
    assert short([data]) == plain([data])


def test_what_arrives_byte_by_byte_is_read_too():
    data = masked(Opcode.BINARY, pixels(65_536)) + masked(Opcode.TEXT, b"and on")
    head = [data[place : place + 1] for place in range(40)]
    assert short([*head, data[40:]]) == plain([*head, data[40:]])


def test_large_frames_do_go_the_short_way():
    """Else the tests above would compare a parser with itself."""
    owner = Owner()
    data = masked(Opcode.BINARY, pixels(196_608)) + masked(Opcode.BINARY, pixels(70_000, 1))
    owner.arrive(data[:65_536])
    assert not owner.parser.reader.buffer
    owner.arrive(data[65_536:196_622])
    owner.arrive(data[196_622:])
    assert owner.num_large == 2
    assert seen(owner.parser).frames == [
        (Opcode.BINARY, pixels(196_608), True),
        (Opcode.BINARY, pixels(70_000, 1), True),
    ]


def test_a_frame_that_was_handed_over_is_not_written_again():
    owner = Owner()
    for seed in range(3):
        owner.arrive(masked(Opcode.BINARY, pixels(100_000, seed)))
    frames = seen(owner.parser).frames
    assert [data for _, data, _ in frames] == [pixels(100_000, seed) for seed in range(3)]


@pytest.mark.parametrize("most", [300_000, 2_000_000])
def test_room_grows_with_what_arrives_not_with_what_is_claimed(most: int):
    owner = Owner()
    owner.parser._most = most
    data = masked(Opcode.BINARY, pixels(most))
    owner.arrive(data[:100])
    assert len(owner.receiver.get_buffer(-1)) < 1 << 18
    owner.arrive(data[100:])
    assert seen(owner.parser).frames == [(Opcode.BINARY, pixels(most), True)]


def test_nothing_is_taken_in_after_a_close():
    owner = Owner()
    data = masked(Opcode.BINARY, pixels(100_000))
    owner.arrive(data[:70_000])
    owner.parser.fail(1011, "keepalive ping timeout")
    owner.arrive(data[70_000:])
    assert owner.parser.events_received() == []


@pytest.mark.parametrize("size", [0, 1, 125, 126, 127, 255, 256, 65_535, 65_536, 70_000])
def test_answers_are_framed_as_the_parser_frames_them(size):
    parsers = opened(FrameParser(MAX_SIZE, None)), opened(ServerProtocol(max_size=MAX_SIZE))
    for parser in parsers:
        parser.send_binary(pixels(size))
        parser.send_binary(b"begun", fin=False)
        parser.send_continuation(b"ended", fin=True)
        parser.send_binary(bytearray(b"again"))
    ours, theirs = (b"".join(parser.data_to_send()) for parser in parsers)
    assert ours == theirs


def test_answers_amid_fragments_and_after_a_close_are_refused_as_before():
    parser = opened(FrameParser(MAX_SIZE, None))
    parser.send_binary(b"begun", fin=False)
    with pytest.raises(ProtocolError):
        parser.send_binary(b"whole")
    parser.send_close(1000)
    with pytest.raises((InvalidState, ProtocolError)):
        parser.send_binary(b"whole")
