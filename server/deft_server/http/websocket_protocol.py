"""uvicorn's WebSocket protocol with a short way for camera frames.

The parser of `websockets` copies a message three times and takes it apart piece by piece. Here a
large message in one binary frame is recognised by its header, read from the connection into the
memory it is used from, and unmasked where it lies. All else (the handshake, text, small messages,
fragments, control frames, whatever is wrong) goes through that parser as before. Short binary
answers, too, are put together in one step.
"""

import asyncio
import logging
import struct
from collections.abc import Generator
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.streams import StreamReader
from websockets.typing import BytesLike

_HEADER = struct.Struct("!2sQ4s")
_START = b"\x82\xff"  # the last frame of its message, binary; masked, length in the next 8 bytes
_LARGE = 65536  # bytes; what is smaller has a shorter header and costs little to copy
_BINARY, _TWO_BYTE_LENGTH = 0x82, 126
_CONTROL = 0x8  # opcodes from here on may come between the fragments of a message
_WORD = 8
_MARGIN = 2  # left free before a header, so that what follows it can be unmasked in words
_PAYLOAD = _MARGIN + _HEADER.size
_FIRST_ROOM = 1 << 18


class FrameSocketProtocol(WebSocketsSansIOProtocol):
    """Speaks WebSocket on one connection."""

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, object],
        _loop: Any = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.conn = self.parser = FrameParser(config.ws_max_size, self.conn.logger)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Take over a connection that asked for an upgrade; the handshake follows at once."""
        super().connection_made(transport)
        self.loop.call_soon(self._read_frames)

    def frame_received(self, message: memoryview) -> None:
        """Take in a large frame."""
        if self.parser.state is State.OPEN:  # nothing is taken in after a close
            self.parser.recv_frame(Frame(Opcode.BINARY, message))
            self.handle_events()

    def _read_frames(self) -> None:
        """Have what comes after the handshake read by a receiver."""
        if self.transport.is_closing() or self.transport.get_protocol() is not self:
            return
        self.transport.pause_reading()
        self.transport.set_protocol(FrameReceiver(self))
        if not self.read_paused:
            self.transport.resume_reading()


class FrameOwner(Protocol):
    """Whom a receiver reads for."""

    parser: "FrameParser"

    def data_received(self, data: bytes) -> None:
        """Take in bytes of any kind."""

    def frame_received(self, message: memoryview) -> None:
        """Take in a large frame, unmasked."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""

    def eof_received(self) -> bool | None:
        """The other side sends no more."""

    def pause_writing(self) -> None:
        """The connection has more to send than it likes."""

    def resume_writing(self) -> None:
        """It has sent most of that."""


class FrameReceiver(asyncio.BufferedProtocol):
    """Reads what arrives on a connection, large frames into memory of their own.

    That memory is handed over with the frame and never written again.
    """

    def __init__(self, owner: FrameOwner) -> None:
        self._owner = owner
        self._size = _FIRST_ROOM
        self._room: NDArray[np.uint8] | None = None
        self._stop = _MARGIN  # where the next byte goes
        self._end = 0  # where the large frame ends that is arriving; 0: none is
        self._clear = _PAYLOAD  # up to where it is unmasked

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return where to put what has arrived: never beyond a large frame's end."""
        if self._room is None:
            self._room, self._stop = np.empty(self._size, np.uint8), _MARGIN
        elif self._stop == len(self._room):
            self._grow()
        return self._room.data[self._stop : self._end or len(self._room)]

    def buffer_updated(self, nbytes: int) -> None:
        """Take in what was put there."""
        assert self._room is not None
        self._stop += nbytes
        if not self._end:
            length = self._owner.parser.large_frame(self._room.data[_MARGIN : self._stop])
            if not length:
                self._pass_on()
                return
            self._end = _PAYLOAD + length
        if self._stop >= self._end:
            self._finish()
        else:  # the rest is on its way: there is time for what has come
            self._unmask(self._room, self._stop // _WORD * _WORD)

    def connection_lost(self, exc: Exception | None) -> None:
        """Pass this on."""
        self._owner.connection_lost(exc)

    def eof_received(self) -> bool | None:
        """Pass this on."""
        return self._owner.eof_received()

    def pause_writing(self) -> None:
        """Pass this on."""
        self._owner.pause_writing()

    def resume_writing(self) -> None:
        """Pass this on."""
        self._owner.resume_writing()

    def _pass_on(self) -> None:
        """Hand what has arrived to the parser."""
        assert self._room is not None
        data, self._room = self._room[_MARGIN : self._stop].tobytes(), None
        self._owner.data_received(data)

    def _finish(self) -> None:
        """Hand over a large frame, and to the parser what follows it."""
        assert self._room is not None
        room, end, self._room, self._end = self._room, self._end, None, 0
        rest = room[end : self._stop].tobytes()
        self._size = max(_FIRST_ROOM, _whole_words(end) + _WORD)
        self._unmask(room, _whole_words(end))
        self._clear = _PAYLOAD
        self._owner.frame_received(room.data[_PAYLOAD:end].toreadonly())
        if rest:
            self._owner.data_received(rest)

    def _unmask(self, room: NDArray[np.uint8], stop: int) -> None:
        """Unmask whole words up to a place."""
        if stop <= self._clear:
            return
        mask = room[_PAYLOAD - 4 : _PAYLOAD].tobytes()
        words = room[self._clear : stop].view(np.uint64)
        np.bitwise_xor(words, np.frombuffer(mask * 2, np.uint64), out=words)
        self._clear = stop

    def _grow(self) -> None:
        """Make room for more of a large frame: as it comes, not as its header claims."""
        assert self._room is not None
        size = min(2 * len(self._room), _whole_words(self._end))
        grown = np.empty(size, np.uint8)
        grown[: self._stop] = self._room
        self._room = grown


class FrameParser(ServerProtocol):
    """The WebSocket protocol without I/O: bytes in, frames out."""

    def __init__(self, max_size: int, logger: logging.Logger | Any) -> None:
        self._most = max_size
        self._is_fragmented = False
        super().__init__(max_size=max_size, logger=logger)

    def large_frame(self, data: memoryview) -> int:
        """Return the length of the large frame that begins here and may go the short way, or 0.

        It must be of a length that is taken, and nothing else may be going on.
        """
        if data[:2] != _START or len(data) < _HEADER.size or self.state is not State.OPEN:
            return 0
        if self._is_fragmented or not self._boundary.is_between_frames:
            return 0
        length = int(_HEADER.unpack_from(data)[1])
        return length if _LARGE <= length <= self._most else 0

    def recv_frame(self, frame: Frame) -> None:
        """Take in a whole frame."""
        super().recv_frame(frame)
        if frame.opcode < _CONTROL:
            self._is_fragmented = not frame.fin

    def send_binary(self, data: BytesLike, fin: bool = True) -> None:
        """Send a binary frame."""
        is_plain = fin and not self.extensions and not self.expect_continuation_frame
        if is_plain and len(data) < _LARGE and self.state is State.OPEN:
            self.writes.append(_short_header(len(data)) + bytes(data))
        else:
            super().send_binary(data, fin)

    def parse(self) -> Generator[None, None, None]:
        """Read with a reader that knows where frames begin."""
        self.reader = self._boundary = _BoundaryReader()
        yield from super().parse()


def _whole_words(length: int) -> int:
    return -(-length // _WORD) * _WORD


def _short_header(length: int) -> bytes:
    """Return the header of a whole binary frame from a server, of less than 64 kB."""
    if length < _TWO_BYTE_LENGTH:
        return bytes((_BINARY, length))
    return bytes((_BINARY, _TWO_BYTE_LENGTH, length >> 8, length & 0xFF))


class _BoundaryReader(StreamReader):
    """A reader that knows whether all that came so far were whole frames."""

    is_between_frames = False

    def at_eof(self) -> Generator[None, None, bool]:
        """Wait for the next frame to begin, or for the end; the parser asks between frames."""
        self.is_between_frames = not self.buffer
        is_at_end = yield from super().at_eof()
        self.is_between_frames = False
        return is_at_end
