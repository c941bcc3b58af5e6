"""Clients of OpenVLA's and OpenVLA-OFT's own servers: `POST /act`, JSON that carries arrays.

Written from the protocol, so that a robot needs none of their packages. Both servers answer
`"error"` with status 200 when anything goes wrong; here that is an exception.
"""

import base64
import json
import math
import time
from collections.abc import Mapping

import httpx
import numpy as np
from numpy.typing import NDArray

from deft_client.client import transport_error
from deft_client.errors import Problem, problem_error
from deft_client.libero.errors import PeerAnswerError
from deft_client.types import ActionChunk, Observation, StageTimings

_NUMBERS = ("<f2", "<f4", "<f8", "<i4", "<i8")
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
        """Ask for the action that follows an observation."""
        started = time.perf_counter()
        reply = self._post(self._body(observation))
        actions = self._actions(_decode(reply, _place(self._url)))
        round_trip_ms = 1000 * (time.perf_counter() - started)
        return ActionChunk(actions, StageTimings(round_trip_ms=round_trip_ms))

    def close(self) -> None:
        """Close the connection."""
        self._http.close()

    def _body(self, observation: Observation) -> dict[str, object]:
        body: dict[str, object] = {
            "image": encode_array(observation.image),
            "instruction": observation.instruction,
        }
        if self._statistics_key is not None:
            body["unnorm_key"] = self._statistics_key
        return body

    def _actions(self, answer: object) -> NDArray[np.float64]:
        return decode_array(answer, _place(self._url)).reshape(1, -1)

    def _post(self, body: Mapping[str, object]) -> bytes:
        try:
            response = self._http.post("/act", json=body)
        except httpx.TransportError as error:
            raise transport_error(error, self._url) from error
        if response.status_code != httpx.codes.OK:
            title = response.reason_phrase or "no success"
            detail = response.text[:_SHOWN_CHARACTERS]
            raise problem_error(Problem(response.status_code, title, detail))
        return response.content


class OftPolicy(OpenVlaPolicy):
    """An OpenVLA-OFT server: two cameras and the robot's state in, a list of actions out."""

    def _body(self, observation: Observation) -> dict[str, object]:
        body: dict[str, object] = {"full_image": encode_array(observation.image)}
        for name, image in observation.cameras.items():
            body[f"{name}_image"] = encode_array(image)
        if observation.state is not None:
            body["state"] = encode_array(observation.state.astype(np.float64))
        body["instruction"] = observation.instruction
        return body

    def _actions(self, answer: object) -> NDArray[np.float64]:
        place = _place(self._url)
        if not isinstance(answer, list) or not answer:
            raise PeerAnswerError(f"{place} answered {_shown(answer)}, expected a list of actions")
        return np.stack([decode_array(one, place) for one in answer])


def encode_array(array: NDArray[np.generic]) -> dict[str, object]:
    """An array as these servers read it."""
    content = np.ascontiguousarray(array)
    return {
        "__numpy__": base64.b64encode(content.tobytes()).decode(),
        "dtype": content.dtype.str,
        "shape": list(content.shape),
    }


def decode_array(value: object, place: str) -> NDArray[np.float64]:
    """The vector of finite numbers in an answer, or PeerAnswerError."""
    try:
        if not isinstance(value, dict) or value["dtype"] not in _NUMBERS:
            raise ValueError("not an array of numbers")
        raw = base64.b64decode(value["__numpy__"], validate=True)
        numbers = np.frombuffer(raw, dtype=value["dtype"]).astype(np.float64)
        if list(value["shape"]) != [len(numbers)] or not math.isfinite(float(numbers.sum())):
            raise ValueError("not a vector of finite numbers")
    except (ValueError, KeyError, TypeError) as error:
        raise PeerAnswerError(
            f"{place} answered {_shown(value)}, expected an action ({error})"
        ) from error
    return numbers


def _decode(reply: bytes, place: str) -> object:
    try:
        answer: object = json.loads(reply)
    except ValueError as error:
        raise PeerAnswerError(f"{place} answered no JSON: {_shown(reply)}") from error
    if answer == "error":
        raise PeerAnswerError(
            f'{place} answered "error" and keeps the reason to itself; its log has it. Often the '
            "statistics key is missing or unknown: give one with --statistics-key"
        )
    return answer


def _place(url: str) -> str:
    return f"{url.rstrip('/')}/act"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."
