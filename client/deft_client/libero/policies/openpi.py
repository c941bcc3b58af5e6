"""Client of openpi's policy server: a WebSocket, one msgpack frame out, one back.

The connection is opened when it is needed and thrown away after any trouble, so that the next
episode starts on a fresh one. Written from the protocol; needs none of openpi's packages.
"""

import time
from contextlib import ExitStack
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection, connect

from deft_client.errors import AnswerTimeoutError, ServerUnreachableError
from deft_client.libero.errors import PeerAnswerError
from deft_client.types import ActionChunk, Observation, StageTimings

_NUMBERS = ("<f2", "<f4", "<f8", "<i4", "<i8")
_CONNECT_TIMEOUT_S = 5.0
_SHOWN_CHARACTERS = 500


class OpenPiPolicy:
    """An openpi server. It has no sessions: `start` has nothing to tell it."""

    def __init__(
        self, url: str, answer_timeout_s: float = 30.0, api_key: str | None = None
    ) -> None:
        self._url = "ws" + url.removeprefix("http") if url.startswith("http") else url
        self._answer_timeout_s = answer_timeout_s
        self._headers = {"Authorization": f"Api-Key {api_key}"} if api_key else {}
        self._socket: ClientConnection | None = None
        self._open = ExitStack()  # websockets wants its connections entered and left

    def start(self, session_id: str) -> None:
        """Nothing to do: the server remembers nothing."""

    def act(self, observation: Observation) -> ActionChunk:
        """Ask for the actions that follow an observation."""
        socket = self._socket or self._connect()
        started = time.perf_counter()
        try:
            socket.send(_pack(_observation_fields(observation)))
            reply = socket.recv(timeout=self._answer_timeout_s)
        except TimeoutError as error:
            self.close()
            raise AnswerTimeoutError(f"{self._url} took too long to answer") from error
        except (ConnectionClosed, OSError) as error:
            self.close()
            raise ServerUnreachableError(f"{self._url} hung up: {error}") from error
        round_trip_ms = 1000 * (time.perf_counter() - started)
        if isinstance(reply, str):
            self.close()
            raise PeerAnswerError(f"{self._url} failed: {reply[-_SHOWN_CHARACTERS:]}")
        return self._chunk(_unpack(reply, self._url), round_trip_ms)

    def close(self) -> None:
        """Hang up; the next observation calls again."""
        self._socket = None
        self._open.close()

    def _connect(self) -> ClientConnection:
        try:
            connection = connect(
                self._url,
                compression=None,
                max_size=None,
                open_timeout=_CONNECT_TIMEOUT_S,
                additional_headers=self._headers,
                ping_interval=None,
            )
            socket = self._open.enter_context(connection)
            socket.recv(timeout=self._answer_timeout_s)  # the server introduces itself first
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:
            self.close()
            raise ServerUnreachableError(
                f"cannot reach {self._url}: {error}; is the server running there?"
            ) from error
        self._socket = socket
        return socket

    def _chunk(self, answer: Any, round_trip_ms: float) -> ActionChunk:
        actions = answer.get("actions") if isinstance(answer, dict) else None
        if (
            not isinstance(actions, np.ndarray)
            or actions.ndim != 2
            or not np.isfinite(actions).all()
        ):
            shown = str(answer)[:200]
            raise PeerAnswerError(
                f"{self._url} answered no finite actions [step, action_dim], but {shown}"
            )
        timing = answer.get("server_timing", {})
        total_ms = float(timing.get("infer_ms", 0.0)) if isinstance(timing, dict) else 0.0
        timings = StageTimings(total_ms=total_ms, round_trip_ms=round_trip_ms)
        return ActionChunk(actions.astype(np.float64), timings)


def _observation_fields(observation: Observation) -> dict[str, object]:
    fields: dict[str, object] = {"observation/image": observation.image}
    for name, image in observation.cameras.items():
        fields[f"observation/{name}_image"] = image
    if observation.state is not None:
        fields["observation/state"] = observation.state
    fields["prompt"] = observation.instruction
    return fields


def _pack(value: object) -> bytes:
    return bytes(msgpack.packb(value, default=_marked))


def _marked(value: object) -> dict[bytes, object]:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot send a {type(value).__name__}")
    return {
        b"__ndarray__": True,
        b"data": value.tobytes(),
        b"dtype": value.dtype.str,
        b"shape": value.shape,
    }


def _unpack(frame: bytes, url: str) -> object:
    try:
        answer: object = msgpack.unpackb(frame, object_hook=_revived)
    except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
        raise PeerAnswerError(f"{url} answered no msgpack message: {error}") from error
    return answer


def _revived(fields: dict[Any, Any]) -> object:
    if b"__npgeneric__" in fields:
        return fields[b"data"]
    return _array(fields) if b"__ndarray__" in fields else fields


def _array(fields: dict[Any, Any]) -> NDArray[np.generic]:
    dtype = fields[b"dtype"]
    if dtype not in _NUMBERS:
        raise ValueError(f"arrays must hold numbers, got dtype {dtype!r}")
    return np.frombuffer(fields[b"data"], dtype=dtype).reshape(fields[b"shape"])
