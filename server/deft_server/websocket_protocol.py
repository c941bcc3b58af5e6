"""uvicorn's WebSocket protocol with a short way for camera frames.

The parser of `websockets` copies a message three times and takes it apart piece by piece. Here a
large message in one binary frame is recognised by its header, unmasked while it arrives and put
together once. All else (the handshake, text, small messages, fragments, control frames, whatever is
wrong) goes through that parser as before. Short binary answers, too, are put together in one step.
"""

import logging
import struct
from collections.abc import Generator
from typing import Any

from uvicorn.config import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import Frame, Opcode
from websockets.protocol import State
from websockets.server import ServerProtocol
from websockets.streams import StreamReader
from websockets.typing import BytesLike

try:
    from websockets.speedups import apply_mask
except ImportError:  # no compiled wheel for this platform
    from websockets.utils import apply_mask

_HEADER = struct.Struct("!2sQ4s")
_START = b"\x82\xff"  # the last frame of its message, binary; masked, length in the next 8 bytes
_LARGE = 65536  # bytes; what is smaller has a shorter header and costs little to copy
_BINARY, _TWO_BYTE_LENGTH = 0x82, 126
_CONTROL = 0x8  # opcodes from here on may come between the fragments of a message


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
        self.conn = FrameParser(max_size=config.ws_max_size, logger=self.conn.logger)


class FrameParser(ServerProtocol):
    """The WebSocket protocol without I/O: bytes in, frames out."""

    def __init__(self, max_size: int, logger: logging.Logger | Any) -> None:
        self._most = max_size
        self._is_fragmented = False
        self._parts: list[bytes] = []  # of the large frame that is arriving
        self._mask = b""
        self._num_missing = 0
        super().__init__(max_size=max_size, logger=logger)

    def receive_data(self, data: bytes | bytearray) -> None:
        """Take in what arrived."""
        if self._num_missing:
            self._continue(data)
        elif data[:2] == _START and self._may_shorten(data):
            _, length, self._mask = _HEADER.unpack_from(data)
            self._num_missing = length
            self._continue(memoryview(data)[_HEADER.size :])
        else:
            super().receive_data(data)

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

    def _may_shorten(self, data: bytes | bytearray) -> bool:
        """Does a frame begin here, of a length that is taken, and is nothing else going on?"""
        if not self._boundary.is_between_frames or self._is_fragmented:
            return False
        if self.state is not State.OPEN or len(data) < _HEADER.size:
            return False
        return _LARGE <= int(_HEADER.unpack_from(data)[1]) <= self._most

    def _continue(self, data: bytes | bytearray | memoryview) -> None:
        """Take in more of a large frame; what came is unmasked while the rest is on its way."""
        part, rest = data[: self._num_missing], data[self._num_missing :]
        self._parts.append(apply_mask(part, self._mask))
        shift = len(part) % len(self._mask)
        self._mask = self._mask[shift:] + self._mask[:shift]
        self._num_missing -= len(part)
        if self._num_missing:
            return
        message, self._parts = b"".join(self._parts), []
        if self.state is State.OPEN:  # nothing is taken in after a close
            self.recv_frame(Frame(Opcode.BINARY, message))
        if rest:
            self.receive_data(bytes(rest))


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
