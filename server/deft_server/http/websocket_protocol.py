"""uvicorn's WebSocket protocol with bounds that uvicorn lacks: the work of one turn of the event
loop, the bytes that all connections hold, the time and fragments of a message; and back-pressure.
"""

import asyncio
from collections.abc import Generator
from struct import pack
from typing import Any

import uvicorn
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState
from websockets.frames import CloseCode, Frame
from websockets.protocol import CONNECTING, OPEN
from websockets.streams import StreamReader
from websockets.typing import BytesLike

from deft_server.errors import OverloadedError
from deft_server.http.bounds import ConnectionBounds
from deft_server.http.http_protocol import peer_of

MAX_FRAMES_A_TURN = 256  # of the smallest, three milliseconds' work; then others have a turn
MAX_FRAGMENTS = 4096  # of one message
MAX_CONTROLS = 1000  # pings and pongs, within the time that a message may take
_SHORT = 65_536  # bytes; what is shorter has a header of two or four
_WHOLE_BINARY, _TWO_BYTE_SIZE = 0x82, 126


def build_websocket_protocol(bounds: ConnectionBounds) -> type[WebSocketsSansIOProtocol]:
    """Return the protocol within bounds."""
    return type("BoundedWebSocketProtocol", (_BoundedWebSocket,), {"bounds": bounds})


class _FrameReader(StreamReader):
    """Hands out frames, a few in a turn, and without a copy if their parts came together."""

    def __init__(self) -> None:
        super().__init__()
        self.num_frames_left = 0  # in this turn
        self._arrived = memoryview(b"")  # last, if the buffer is empty

    def __len__(self) -> int:
        return len(self._arrived) + len(self.buffer)

    def take(self, data: bytes) -> None:
        """Take in what arrives after the handshake."""
        if self._arrived or self.buffer:
            self.buffer += self._arrived
            self.buffer += data
            self._arrived = memoryview(b"")
        else:
            self._arrived = memoryview(data)

    def at_eof(self) -> Generator[None, None, bool]:
        """Wait for the next frame, and its turn; nobody tells the parser of an end."""
        while not (self.num_frames_left and (self._arrived or self.buffer)):
            yield
        self.num_frames_left -= 1
        return False

    def read_exact(self, n: int) -> Generator[None, None, Any]:
        """Return the next part of a frame when it is here."""
        while len(self._arrived) < n > len(self.buffer):
            yield
        arrived = self._arrived
        if len(arrived) >= n:
            self._arrived = arrived[n:]
            return arrived[:n]
        if len(self.buffer) == n:
            whole, self.buffer = self.buffer, bytearray()
            return whole
        return (yield from super().read_exact(n))

    def discard(self) -> None:
        """Forget what is here."""
        self._arrived = memoryview(b"")
        super().discard()


class _BoundedWebSocket(WebSocketsSansIOProtocol):
    """Parses a few frames at a time, and reads on only when all that has come was parsed."""

    bounds: ConnectionBounds

    def __init__(self, config: uvicorn.Config, server_state: ServerState, app_state: Any) -> None:
        super().__init__(config, server_state, app_state)
        self._address = ""
        self._reader = self.conn.reader = _FrameReader()
        self.conn.parser = self.conn.parse()  # anew, with this reader
        next(self.conn.parser)
        self._send_any = self.conn.send_binary
        self.conn.send_binary = self._send_binary  # type: ignore[method-assign]
        self._is_behind = False  # there may be more to parse than was parsed
        self._awaits_turn = False
        self._num_controls = 0
        self._controls_until_s = 0.0
        self._held = 0
        self._num_message_bytes = 0  # of the messages, and parts of one, that nobody is done with
        self._num_taken_bytes = 0  # of the message that the app has in hand
        self._clock: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._address = peer_of(transport)
        super().connection_made(transport)

    def connection_lost(self, error: Exception | None) -> None:
        self._stop_clock()
        self.bounds.held.release(self._held, self._address)
        self.bounds.connections.leave(self._address)
        self._reader.discard()
        super().connection_lost(error)

    def data_received(self, data: bytes) -> None:
        take = self._reader.take if self.handshake_initiated else self._reader.feed_data
        take(data)
        self._is_behind = True
        self._go_on()
        if self._is_behind and not self.transport.is_closing():
            self.transport.pause_reading()
            self._count_bytes()

    async def receive(self) -> Any:
        """Return the next message; the one before it is done with.

        Where many are here already, everybody else has a turn before each.
        """
        if not self.queue.empty():
            await asyncio.sleep(0)
        self._num_message_bytes -= self._num_taken_bytes
        self._num_taken_bytes = 0
        message: Any = await super().receive()
        self._num_taken_bytes = len(message.get("bytes") or (message.get("text") or "").encode())
        if self._is_behind:
            self._go_on()
        elif self.frames or self._held != self._num_message_bytes:
            self._count_bytes()
        return message

    def pause_writing(self) -> None:
        super().pause_writing()
        self.transport.pause_reading()  # who reads no pongs may send no pings

    def resume_writing(self) -> None:
        super().resume_writing()
        self._go_on()

    def handle_cont(self, event: Frame) -> None:
        self._num_message_bytes += len(event.data)
        if len(self.frames) >= MAX_FRAGMENTS:
            self._fail(CloseCode.MESSAGE_TOO_BIG, f"more than {MAX_FRAGMENTS} fragments")
            return
        super().handle_cont(event)

    def handle_text(self, event: Frame) -> None:
        self._num_message_bytes += len(event.data)
        super().handle_text(event)

    def handle_bytes(self, event: Frame) -> None:
        self._num_message_bytes += len(event.data)
        super().handle_bytes(event)

    def handle_ping(self) -> None:
        super().handle_ping()
        self._count_control()

    def handle_pong(self, event: Frame) -> None:
        super().handle_pong(event)
        self._count_control()

    def _send_binary(self, data: BytesLike, fin: bool = True) -> None:
        """Send a message as the library does; a short one in one step."""
        size, conn = len(data), self.conn
        if not fin or size >= _SHORT or conn.state is not OPEN or conn.extensions:
            self._send_any(data, fin)
        elif size < _TWO_BYTE_SIZE:
            conn.writes.append(bytes((_WHOLE_BINARY, size)) + bytes(data))
        else:
            conn.writes.append(pack("!BBH", _WHOLE_BINARY, _TWO_BYTE_SIZE, size) + bytes(data))

    def _count_control(self) -> None:
        now_s = self.loop.time()
        if now_s > self._controls_until_s:
            self._num_controls = 0
            self._controls_until_s = now_s + self.bounds.message_timeout_s
        self._num_controls += 1
        if self._num_controls > MAX_CONTROLS:
            self._fail(CloseCode.POLICY_VIOLATION, f"more than {MAX_CONTROLS} pings and pongs")

    def _parse(self) -> None:
        """Parse until enough was done for a turn, or until somebody must catch up first."""
        self._awaits_turn = False
        if self._may_go_on():
            self._reader.num_frames_left = MAX_FRAMES_A_TURN
            super().data_received(b"")
            self._is_behind = not self._reader.num_frames_left
            if self.conn.handshake_exc is not None:  # uvicorn would leave it without an answer
                self.transport.write(b"".join(self.conn.data_to_send()))
                self.transport.close()
        if self.transport.is_closing():
            return
        if self._may_go_on():
            if self._is_behind:
                self.transport.pause_reading()
                self.loop.call_soon(self._go_on)
            else:
                self.transport.resume_reading()
        self._count_bytes()

    def _may_go_on(self) -> bool:
        return not self.read_paused and self.writable.is_set() and not self.transport.is_closing()

    def _go_on(self) -> None:
        if not self._awaits_turn:
            self._awaits_turn = True
            self.bounds.calls.make(self._address, self._parse)

    def _count_bytes(self) -> None:
        if self.disconnected:
            return  # all of it was given back
        num_partial = len(self._reader)
        held = num_partial + self._num_message_bytes
        more, self._held = held - self._held, held
        if more:
            try:
                self.bounds.held.hold(more, self._address)
            except OverloadedError as error:
                self._fail(CloseCode.TRY_AGAIN_LATER, str(error))
                return
        if not (num_partial or self.frames) or self.read_paused:
            self._stop_clock()
        elif self._clock is None:
            self._clock = self.loop.call_later(self.bounds.message_timeout_s, self._time_out)

    def _time_out(self) -> None:
        """End it, unless the rest is here already and waits for its turn."""
        clock = self._clock
        self.bounds.calls.make(self._address, lambda: self._end_late(clock))

    def _end_late(self, clock: asyncio.TimerHandle | None) -> None:
        if clock is not None and clock is self._clock:
            self._fail(
                CloseCode.POLICY_VIOLATION,
                f"a message did not arrive within {self.bounds.message_timeout_s:g} s",
            )

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _fail(self, code: CloseCode, reason: str) -> None:
        if self.close_sent or self.transport.is_closing():
            return
        if self.conn.state is CONNECTING:  # nothing can be said yet
            self.transport.close()
            return
        self.conn.fail(code, reason)
        self.handle_parser_exception()
