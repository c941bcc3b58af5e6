"""Clients of other projects' servers. They have no sessions: `start` has nothing to tell them."""

import json
import math
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from socket import SO_SNDTIMEO, SOL_SOCKET

import httpcore
import numpy as np
from numpy.typing import NDArray
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI
from websockets.sync.client import ClientConnection, connect

from deft_client.calls import HttpRequest
from deft_client.client import PolicyClient
from deft_client.errors import AnswerTimeoutError, ServerUnreachableError
from deft_client.settings import ClientSettings
from deft_core.errors import WireError
from deft_core.peers import openpi, openvla
from deft_core.peers.arrays import pack, unpack
from deft_core.types import ActionChunk, Observation, StageTimings
from deft_libero.errors import PeerAnswerError

_CONNECT_TIMEOUT_S = 5.0
_SHOWN_OF_ANSWER, _SHOWN_OF_ERROR = 200, 500  # characters


class OpenVlaPolicy:
    """A server of OpenVLA or OpenVLA-OFT: `POST /act`, JSON that carries arrays.

    Both answer `"error"` with status 200 when anything goes wrong; here that is an exception.
    """

    def __init__(
        self,
        url: str,
        fields: Callable[[Observation], dict[str, object]],
        settings: ClientSettings | None = None,
        transport: httpcore.ConnectionPool | None = None,
    ) -> None:
        self._client = PolicyClient(url, settings, transport)  # its deadlines and limits
        self._fields = fields  # of a request

    def start(self, session_id: str) -> None:
        """Nothing to do: the server remembers nothing."""

    def act(self, observation: Observation) -> ActionChunk:
        """Ask for the actions that follow an observation."""
        started = time.perf_counter()
        actions = self._actions(self._post(self._fields(observation)))
        round_trip_ms = 1000 * (time.perf_counter() - started)
        return ActionChunk(actions, StageTimings(round_trip_ms=round_trip_ms))

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _post(self, fields: dict[str, object]) -> bytes:
        gives_up_at = time.monotonic() + self._client.settings.timeouts.answer_s
        headers = {"content-type": "application/json"}
        body = json.dumps(fields).encode()
        return self._client.ask(HttpRequest("POST", "/act", gives_up_at, body, headers)).body

    def _actions(self, reply: bytes) -> NDArray[np.float64]:
        place = f"{self._client.url}/act"
        if reply.strip() == b'"error"':
            raise PeerAnswerError(
                f'{place} answered "error" and keeps the reason to itself; its log has it. Often '
                "the statistics key is missing or unknown: give one with --statistics-key"
            )
        try:
            return openvla.read_answer(openvla.decode_json(reply))
        except WireError as error:
            shown = reply[:_SHOWN_OF_ANSWER].decode("utf-8", "replace")
            raise PeerAnswerError(
                f"{place} answered {shown}, expected an action ({error})"
            ) from error


class OpenPiPolicy:
    """A server of openpi: a WebSocket, one msgpack frame out, one back.

    The connection is opened when it is needed and thrown away after any trouble, so that the next
    episode starts on a fresh one.
    """

    def __init__(self, url: str, settings: ClientSettings | None = None) -> None:
        settings = settings or ClientSettings()
        self._url = "ws" + url.removeprefix("http") if url.startswith("http") else url
        self._answer_timeout_s = settings.timeouts.answer_s
        self._max_bytes = settings.limits.max_bytes
        key = settings.api_key
        self._headers = {"Authorization": f"Api-Key {key}"} if key else {}
        self._socket: ClientConnection | None = None
        self._open = ExitStack()  # websockets wants its connections entered and left

    def start(self, session_id: str) -> None:
        """Nothing to do: the server remembers nothing."""

    def act(self, observation: Observation) -> ActionChunk:
        """Ask for the actions that follow an observation."""
        socket = self._socket or self._connect()
        started = time.perf_counter()
        try:
            socket.send(pack(openpi.observation_fields(observation)))
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
            raise PeerAnswerError(f"{self._url} failed: {reply[-_SHOWN_OF_ERROR:]}")
        try:
            chunk = openpi.read_answer(unpack(reply))
        except WireError as error:
            raise PeerAnswerError(f"{self._url} answered no actions: {error}") from error
        return replace(chunk, timings=replace(chunk.timings, round_trip_ms=round_trip_ms))

    def close(self) -> None:
        """Hang up; the next observation calls again."""
        self._socket = None
        self._open.close()

    def _connect(self) -> ClientConnection:
        try:
            connection = connect(
                self._url,
                compression=None,
                max_size=self._max_bytes,
                open_timeout=_CONNECT_TIMEOUT_S,
                additional_headers=self._headers,
                ping_interval=None,
            )
            socket = self._open.enter_context(connection)
            # websockets bounds how long it waits for bytes, but not for room to send its own.
            patience = struct.pack("ll", math.ceil(self._answer_timeout_s), 0)
            socket.socket.setsockopt(SOL_SOCKET, SO_SNDTIMEO, patience)
            socket.recv(timeout=self._answer_timeout_s)  # the server introduces itself first
        except (OSError, TimeoutError, InvalidHandshake, InvalidURI, ConnectionClosed) as error:
            self.close()
            raise ServerUnreachableError(
                f"cannot reach {self._url}: {error}; is the server running there?"
            ) from error
        self._socket = socket
        return socket
