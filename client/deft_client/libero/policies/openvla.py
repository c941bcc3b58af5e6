"""Clients of OpenVLA's and OpenVLA-OFT's own servers: `POST /act`, JSON that carries arrays.

Both servers answer `"error"` with status 200 when anything goes wrong; here that is an exception.
"""

import json
import time

import httpx
import numpy as np
from numpy.typing import NDArray

from deft_client.client import HttpRequest, PolicyClient
from deft_client.errors import WireError
from deft_client.libero.errors import PeerAnswerError
from deft_client.peers.openvla import decode_json, oft_fields, openvla_fields, read_answer
from deft_client.settings import ClientSettings
from deft_client.types import ActionChunk, Observation, StageTimings

_SHOWN_CHARACTERS = 200


class OpenVlaPolicy:
    """An OpenVLA server. It has no sessions: `start` has nothing to tell it."""

    def __init__(
        self,
        url: str,
        statistics_key: str | None = None,
        settings: ClientSettings | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self._client = PolicyClient(url, settings, transport)  # its deadlines and limits
        self._statistics_key = statistics_key

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

    def _fields(self, observation: Observation) -> dict[str, object]:
        return openvla_fields(observation, self._statistics_key)

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
