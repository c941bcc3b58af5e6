"""Clients of OpenVLA's and OpenVLA-OFT's own servers: `POST /act`, JSON that carries arrays.

Both servers answer `"error"` with status 200 when anything goes wrong; here that is an exception.
"""

import time

import httpx
import numpy as np
from numpy.typing import NDArray

from deft_client.client import transport_error
from deft_client.errors import Problem, WireError, problem_error
from deft_client.libero.errors import PeerAnswerError
from deft_client.peers.openvla import decode_json, oft_fields, openvla_fields, read_answer
from deft_client.types import ActionChunk, Observation, StageTimings

_CONNECT_RETRIES = 2
_SHOWN_CHARACTERS = 200


class OpenVlaPolicy:
    """An OpenVLA server. It has no sessions: `start` has nothing to tell it."""

    def __init__(
        self,
        url: str,
        statistics_key: str | None = None,
        answer_timeout_s: float = 30.0,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._url = url
        self._statistics_key = statistics_key
        self._http = httpx.Client(
            base_url=url,
            timeout=httpx.Timeout(answer_timeout_s, connect=5.0),
            transport=transport or httpx.HTTPTransport(retries=_CONNECT_RETRIES),
        )

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
        self._http.close()

    def _fields(self, observation: Observation) -> dict[str, object]:
        return openvla_fields(observation, self._statistics_key)

    def _post(self, fields: dict[str, object]) -> bytes:
        try:
            response = self._http.post("/act", json=fields)
        except httpx.TransportError as error:
            raise transport_error(error, self._url) from error
        if response.status_code != httpx.codes.OK:
            title = response.reason_phrase or "no success"
            detail = response.text[:_SHOWN_CHARACTERS]
            raise problem_error(Problem(response.status_code, title, detail))
        return response.content

    def _actions(self, reply: bytes) -> NDArray[np.float64]:
        place = f"{self._url.rstrip('/')}/act"
        if reply.strip() == b'"error"':
            raise PeerAnswerError(
                f'{place} answered "error" and keeps the reason to itself; its log has it. Often '
                "the statistics key is missing or unknown: give one with --statistics-key"
            )
        try:
            return read_answer(decode_json(reply))
        except WireError as error:
            shown = reply[:_SHOWN_CHARACTERS].decode("utf-8", "replace")
            raise PeerAnswerError(
                f"{place} answered {shown}, expected an action ({error})"
            ) from error


class OftServerPolicy(OpenVlaPolicy):
    """An OpenVLA-OFT server: two cameras and the robot's state in, a list of actions out."""

    def _fields(self, observation: Observation) -> dict[str, object]:
        return oft_fields(observation)
