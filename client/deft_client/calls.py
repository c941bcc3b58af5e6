"""One call to the server, decided but not performed: which requests, which pauses, which result.

A call is a generator that yields requests and pauses and is sent what came of them, so that the
blocking and the asynchronous client share every decision and differ only in the I/O.
"""

import math
import random
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Protocol, TypeVar

from deft_client.actions import check_actions
from deft_client.errors import (
    AnswerTimeoutError,
    DeftError,
    OverloadedError,
    ProblemError,
    TransportError,
    problem_error,
)
from deft_client.settings import ClientSettings, Retries
from deft_client.types import ActionChunk, ActOptions, Observation, ServerInfo
from deft_client.wire import json_codec, msgpack_codec
from deft_client.wire.messages import ActMessage


class ActingPolicy(Protocol):
    """A policy as its caller sees it: `PolicyClient`, `StreamClient`, `Recorder`, or one's own."""

    @property
    def session_id(self) -> str:
        """The session of acts and resets that name no other."""

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Return the actions that follow an observation."""

    def reset(self, session_id: str | None = None) -> None:
        """Say that an episode starts."""


ResultT = TypeVar("ResultT")
RETRIED_STATUS = (429, 503)
ACT_PATH = "/v1/act"
# A server counts a deadline from the arrival of the frame, and answers one that it missed with 504
# or with an action that holds: that word is worth waiting for, and it keeps the connection.
WAY_BACK_S = 0.05


@dataclass(frozen=True)
class HttpRequest:
    """What to send."""

    method: str
    path: str
    gives_up_at: float  # by time.monotonic: nothing of the call goes on beyond it
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class HttpReply:
    """What came back."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case


@dataclass(frozen=True)
class Pause:
    """Wait before going on."""

    seconds: float


Step = HttpRequest | Pause
Outcome = HttpReply | TransportError | None
Call = Generator[Step, Outcome, ResultT]


def act_call(
    observation: Observation,
    options: ActOptions,
    settings: ClientSettings,
    action_dim: int | None = None,
) -> Call[ActionChunk]:
    """Send an observation, receive actions that a robot can execute, of the size it expects."""
    gives_up_at = time.monotonic() + _patience_s(options, settings)
    message = ActMessage(observation, options)
    body = msgpack_codec.encode_request(message, settings.image_encoding, settings.jpeg_quality)
    headers = {"content-type": msgpack_codec.CONTENT_TYPE, "accept": msgpack_codec.CONTENT_TYPE}
    request = HttpRequest("POST", ACT_PATH, gives_up_at, body, headers)
    reply = yield from _answered(request, settings)
    chunk = msgpack_codec.decode_answer(reply.body, settings.limits)
    check_actions(chunk.actions, action_dim)
    if settings.action_rules is not None:
        settings.action_rules.check(chunk.actions)
    return chunk


def _patience_s(options: ActOptions, settings: ClientSettings) -> float:
    longest_s = settings.timeouts.answer_s
    if options.deadline_ms is None:
        return longest_s
    return min(longest_s, max(options.deadline_ms, 0.0) / 1000 + WAY_BACK_S)


def reset_call(session_id: str, settings: ClientSettings) -> Call[None]:
    """End a session: an episode starts."""
    headers = {"content-type": json_codec.CONTENT_TYPE}
    body = json_codec.encode_reset(session_id)
    gives_up_at = time.monotonic() + settings.timeouts.answer_s
    request = HttpRequest("POST", "/v1/reset", gives_up_at, body, headers)
    yield from _answered(request, settings)


def info_call(settings: ClientSettings) -> Call[ServerInfo]:
    """Ask what the server says about itself."""
    gives_up_at = time.monotonic() + settings.timeouts.answer_s
    reply = yield from _answered(HttpRequest("GET", "/v1/info", gives_up_at), settings)
    return json_codec.decode_info(reply.body, settings.limits)


def ping_call(settings: ClientSettings) -> Call[None]:
    """Ask whether the server would answer an observation now; raises where it would not."""
    alone = replace(settings, retries=replace(settings.retries, attempts=1))
    gives_up_at = time.monotonic() + settings.timeouts.answer_s
    yield from _answered(HttpRequest("GET", "/readyz", gives_up_at), alone)


def _answered(request: HttpRequest, settings: ClientSettings) -> Call[HttpReply]:
    """Yield the request until it is answered, or it is no use asking again."""
    attempt = 1
    while True:
        outcome = yield request
        if isinstance(outcome, HttpReply) and outcome.status < 300:
            return outcome
        failure = _failure(outcome)
        pause_s = next_pause_s(failure, attempt, settings.retries)
        if pause_s is None:
            raise failure
        if time.monotonic() + pause_s > request.gives_up_at:
            raise failure
        yield Pause(pause_s)
        attempt += 1


def next_pause_s(failure: DeftError, attempt: int, retries: Retries) -> float | None:
    """Return how long to wait before asking again, or None where that is no use.

    A request that timed out is not made again: the server may still be at work on it.
    """
    if attempt >= retries.attempts or isinstance(failure, AnswerTimeoutError):
        return None
    if retries.only_when_overloaded and not isinstance(failure, OverloadedError):
        return None
    if isinstance(failure, ProblemError):
        if failure.status not in RETRIED_STATUS:
            return None
        if failure.retry_after_s is not None:
            if failure.retry_after_s > retries.longest_pause_s:
                return None
            return failure.retry_after_s + random.uniform(0, retries.first_pause_s)
    pause_s = min(retries.first_pause_s * 2 ** (attempt - 1), retries.longest_pause_s)
    return random.uniform(pause_s / 2, pause_s)


def retry_after_s(headers: Mapping[str, str]) -> float | None:
    """Return what Retry-After asks for, in seconds from now; None where it asks for nothing."""
    value = headers.get("retry-after", "").strip()
    if not value:
        return None
    try:
        seconds = float(value)
    except ValueError:
        return _seconds_until(value)
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _seconds_until(http_date: str) -> float | None:
    try:
        moment = parsedate_to_datetime(http_date)
    except ValueError:
        return None
    return max(moment.timestamp() - time.time(), 0.0)


def _failure(outcome: Outcome) -> DeftError:
    if isinstance(outcome, HttpReply):
        waits_s = retry_after_s(outcome.headers)
        return problem_error(json_codec.decode_problem(outcome.status, outcome.body, waits_s))
    return outcome or TransportError("nothing came of the request")
