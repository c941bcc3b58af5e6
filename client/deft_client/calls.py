"""What the clients share: requests, who is asked again and when, what is believed of an answer.

Nothing here sends or waits.
"""

import logging
import math
import os
import random
import ssl
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import unquote, urlsplit

import httpcore

from deft_client.actions import check_actions
from deft_client.deadlines import ends_at
from deft_client.errors import (
    AnswerTimeoutError,
    NotReadyError,
    OverloadedError,
    ProblemError,
    ServerUnreachableError,
    WrongServerError,
    problem_error,
)
from deft_client.settings import API_KEY_VARIABLE, ClientSettings, Retries, check_url
from deft_core.errors import DeftError, MessageTooLargeError, Problem, UnusableValueError
from deft_core.types import ActionChunk, ActOptions, Observation, ServerInfo
from deft_core.wire.codec import (
    decode_answer,
    decode_answers,
    decode_info,
    decode_problem,
    encode_request,
    encode_requests,
    encode_reset,
)
from deft_core.wire.formats import WireFormat
from deft_core.wire.messages import ActMessage

logger = logging.getLogger(__name__)
ACT_PATH = "/v1/act"
REQUEST_ID = "x-request-id"
NETWORK_STREAM = "network_stream"  # what httpcore calls the connection of a response
RETRIED_STATUS = (429, 502, 503)
SHORTEST_WAIT_S = 0.001  # 0 would mean not to wait at all
# A server counts a deadline from the arrival of the frame, and answers one that it missed with 504:
# that answer is worth waiting for, as it keeps the connection.
DEADLINE_GRACE_S = 0.05
PROBE_S = 1.0  # between two questions whether a server is ready
WAIT_LOGGED_EVERY_S = 10.0


@dataclass(frozen=True)
class HttpRequest:
    """What to send."""

    method: str
    path: str
    gives_up_at: float  # by time.monotonic: nothing of the call goes on beyond it
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    # A server that is loading is waited for until then; a request that follows has all its time.
    loading_until: float = 0.0


@dataclass(frozen=True)
class HttpReply:
    """What came back."""

    status: int
    body: bytes
    headers: Mapping[str, str] = field(default_factory=dict)  # names in lower case


class WaitLog:
    """Logs what a client waits for: when that changes, and every ten seconds."""

    def __init__(self) -> None:
        self._logged = ""
        self._again_at = 0.0

    def note(self, reason: str) -> None:
        """Log the reason, unless it was logged a moment ago, by this call or one before."""
        now = time.monotonic()
        if reason == self._logged and now < self._again_at:
            return
        self._logged, self._again_at = reason, now + WAIT_LOGGED_EVERY_S
        logger.warning("waiting: %s", reason)


class Attempts:
    """One request, sent until it is answered or it is no use asking again."""

    def __init__(self, request: HttpRequest, retries: Retries, waits: WaitLog) -> None:
        self.request = request
        self._retries = retries
        self._waits = waits
        self._allowed_s = request.gives_up_at - time.monotonic()
        self._number = 1

    def pause_s(self, failure: DeftError) -> float:
        """Return how long to wait before `request` is sent again; raises what is no use."""
        now = time.monotonic()
        if isinstance(failure, NotReadyError) and failure.is_loading:
            pause_s = failure.retry_after_s or PROBE_S
            if now + pause_s < self.request.loading_until:
                self._waits.note(failure.detail)
                gives_up_at = min(now + pause_s + self._allowed_s, ends_at())
                gives_up_at = max(self.request.gives_up_at, gives_up_at)
                self.request = replace(self.request, gives_up_at=gives_up_at)
                return pause_s
        found = next_pause_s(failure, self._number, self._retries)
        if found is None or now + found > self.request.gives_up_at:
            raise failure
        self._number += 1
        return found


class Readiness:
    """A server that is waited for until it is ready."""

    def __init__(self, timeout: float, waits: WaitLog) -> None:
        self.until = min(time.monotonic() + timeout, ends_at())
        self._waits = waits

    def pause_s(self, failure: DeftError) -> float:
        """Return how long to wait before asking again; raises what no waiting helps."""
        retryable = NotReadyError | OverloadedError | ServerUnreachableError | AnswerTimeoutError
        is_over = time.monotonic() + PROBE_S > self.until
        if is_over or not isinstance(failure, retryable) or isinstance(failure, WrongServerError):
            raise failure
        reason = failure.detail if isinstance(failure, ProblemError) else str(failure)
        self._waits.note(reason)
        return PROBE_S


class ClientCalls:
    """The calls of a client as requests, and its answers as what they say."""

    def __init__(
        self,
        url: str,
        settings: ClientSettings | None,
        api_key: str | None,
        timeout: float | None,
    ) -> None:
        self.url = check_url(url)
        self.settings = _completed(settings or ClientSettings(), api_key, timeout)
        self.session_id = uuid.uuid4().hex  # of acts and resets that name no other
        self._waits = WaitLog()
        self._headers = {"user-agent": "deft-client", **authorization(self.settings)}
        self._urls: dict[str, httpcore.URL] = {}
        # What `info` promised, once it was asked: the size of an action, and how many there are;
        # and all of it until the first frame after.
        self._info: ServerInfo | None = None
        self._action_dim: int | None = None
        self._chunk_length: int | None = None
        self._repeats_request_ids = False  # until the server has shown that it does
        self._proxy = _proxy(self.settings.proxy)
        self._context: ssl.SSLContext | None = None
        if self.url.startswith("https"):
            tls = self.settings.tls
            self._context = httpcore.default_ssl_context() if tls is None else tls.context()

    def _act_request(self, observation: Observation, options: ActOptions | None) -> HttpRequest:
        settings, options = self.settings, options or ActOptions()
        until = self._until(options.deadline_ms)
        options = replace(options, session_id=options.session_id or self.session_id)
        self._warn_of_ignored_inputs(observation)
        message = ActMessage(observation, options, self._message_id())
        body = encode_request(message, settings.image_encoding, settings.jpeg_quality)
        return _act_post(body, *until)

    def _act_all_request(
        self, observations: Mapping[str, Observation], options: ActOptions | None
    ) -> HttpRequest:
        settings, options = self.settings, options or ActOptions()
        until = self._until(options.deadline_ms)
        body = encode_requests(
            [
                ActMessage(one, replace(options, session_id=name))
                for name, one in observations.items()
            ],
            self._message_id(),
            settings.image_encoding,
            settings.jpeg_quality,
        )
        return _act_post(body, *until)

    def _reset_request(self, session_id: str | None) -> HttpRequest:
        body = encode_reset(session_id or self.session_id)
        gives_up_at, loading_until = self._until()
        headers = {"content-type": WireFormat.JSON.value}
        return HttpRequest("POST", "/v1/reset", gives_up_at, body, headers, loading_until)

    def _info_request(self) -> HttpRequest:
        gives_up_at, loading_until = self._until()
        return HttpRequest("GET", "/v1/info", gives_up_at, loading_until=loading_until)

    def _ready_request(self, latest: float = math.inf) -> HttpRequest:
        return HttpRequest("GET", "/readyz", min(self._until()[0], latest))

    def _answer(self, reply: HttpReply, started: float) -> ActionChunk:
        chunk = decode_answer(reply.body, limits=self.settings.limits)
        return timed(self._checked(chunk), started)

    def _answers(
        self, reply: HttpReply, observations: Mapping[str, Observation], started: float
    ) -> dict[str, ActionChunk | DeftError]:
        answers = decode_answers(reply.body, limits=self.settings.limits)
        if len(answers) != len(observations):
            raise UnusableValueError(
                "answers", f"{len(answers)} of them to {len(observations)} observations"
            )
        return {
            name: self._judged(answer, started)
            for name, answer in zip(observations, answers, strict=True)
        }

    def _server_info(self, reply: HttpReply) -> ServerInfo:
        info = decode_info(reply.body, self.settings.limits)
        self._action_dim, self._chunk_length = info.action_dim, info.chunk_length
        self._info = info
        return info

    def _failure(self, reply: HttpReply) -> ProblemError:
        waits_s = retry_after_s(reply.headers)
        return problem_error(decode_problem(reply.status, reply.body, waits_s))

    def _warn_of_ignored_inputs(self, observation: Observation) -> None:
        """Say once, where `info` was asked, what the policy does not look at or was not taught."""
        if self._info is None:
            return
        for name, reason in self._info.ignored_inputs(observation).items():
            logger.warning("%s: %s", name, reason)
        if note := self._info.untrained(observation.instruction):
            logger.warning("%s", note)
        self._info = None

    def _until(self, deadline_ms: float | None = None) -> tuple[float, float]:
        """Return when an answer comes too late to be waited for, and a server that is loading.

        Both by time.monotonic.
        """
        now, settings = time.monotonic(), self.settings
        patience_s = settings.timeouts.answer_s
        if deadline_ms is not None:
            patience_s = min(patience_s, max(deadline_ms, 0.0) / 1000 + DEADLINE_GRACE_S)
        gives_up_at = min(now + patience_s, ends_at())
        if settings.retries.only_when_overloaded:
            return gives_up_at, 0.0
        if deadline_ms is not None:
            return gives_up_at, gives_up_at
        return gives_up_at, min(now + settings.retries.loading_s, ends_at())

    def _checked(self, chunk: ActionChunk) -> ActionChunk:
        """Return an answer that the robot may execute, or raise `UnusableValueError`."""
        check_actions(chunk.actions, self._action_dim, self._chunk_length)
        if self.settings.action_rules is not None:
            self.settings.action_rules.check(chunk.actions)
        return chunk

    def _judged(self, answer: ActionChunk | Problem, started: float) -> ActionChunk | DeftError:
        if isinstance(answer, Problem):
            return problem_error(answer)
        try:
            return timed(self._checked(answer), started)
        except UnusableValueError as error:
            return error

    def _message_id(self) -> str | None:
        """HTTP tells answers apart by its own header."""
        return None

    def _prepared(self, request: HttpRequest, request_id: str) -> dict[str, Any]:
        """Return the request as a pool of connections takes it: the arguments of `stream`."""
        left_s = max(request.gives_up_at - time.monotonic(), SHORTEST_WAIT_S)
        connect_s = min(self.settings.timeouts.connect_s, left_s)
        per_phase = {"connect": connect_s, "write": left_s, "read": left_s, "pool": left_s}
        url = self._urls.get(request.path)
        if url is None:
            url = self._urls[request.path] = httpcore.URL(self.url + request.path)
        return {
            "method": request.method,
            "url": url,
            "headers": {REQUEST_ID: request_id, **self._headers, **request.headers},
            "content": request.body,
            "extensions": {"timeout": per_phase},
        }

    def _take(self, body: bytearray, part: bytes) -> None:
        """Add to an answer, or refuse one that is too long."""
        most = self.settings.limits.max_bytes
        if len(body) + len(part) > most:
            raise MessageTooLargeError(
                "answer", f"is longer than the {most} bytes that are allowed"
            )
        body += part

    def _is_ours(self, request_id: str, reply: HttpReply) -> bool:
        """Is it the answer to this request?

        Who never repeats an id is believed; proxies that do not repeat it only tell of problems.
        """
        repeated = reply.headers.get(REQUEST_ID)
        is_missed = self._repeats_request_ids and reply.status < 300
        return repeated == request_id or (repeated is None and not is_missed)

    def _believed(self, request_id: str, reply: HttpReply) -> HttpReply:
        """Return an answer, or raise where it is the one to another request."""
        if not self._is_ours(request_id, reply):
            raise ServerUnreachableError(
                f"{self.url} sent an answer to another request; it was not used"
            )
        self._repeats_request_ids |= REQUEST_ID in reply.headers
        return reply


def headers_of(response: httpcore.Response) -> dict[str, str]:
    """Return the headers of an answer, their names in lower case."""
    return {
        name.decode("latin-1").lower(): value.decode("latin-1") for name, value in response.headers
    }


def _proxy(url: str | None) -> httpcore.Proxy | None:
    """Return a proxy; its URL may hold a name and a password."""
    if url is None:
        return None
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https", "socks5", "socks5h") or not parts.hostname:
        raise ValueError(f"proxy must be the URL of one, such as http://proxy:3128, got {url!r}")
    auth = (unquote(parts.username), unquote(parts.password or "")) if parts.username else None
    return httpcore.Proxy(url, auth)


def _act_post(body: bytes, gives_up_at: float, loading_until: float) -> HttpRequest:
    headers = dict.fromkeys(("content-type", "accept"), WireFormat.MSGPACK.value)
    return HttpRequest("POST", ACT_PATH, gives_up_at, body, headers, loading_until)


def _completed(
    settings: ClientSettings, api_key: str | None, timeout: float | None
) -> ClientSettings:
    """Return the settings with what was given beside them, or is in the environment."""
    key = settings.api_key if api_key is None else api_key
    key = os.environ.get(API_KEY_VARIABLE) if key is None else key
    timeouts = (
        settings.timeouts if timeout is None else replace(settings.timeouts, answer_s=timeout)
    )
    return replace(settings, api_key=key or None, timeouts=timeouts)


def authorization(settings: ClientSettings) -> dict[str, str]:
    """Return the header that carries the API key, if there is one."""
    return {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}


def timed(chunk: ActionChunk, started: float) -> ActionChunk:
    """Return the chunk with the time since `started` as its round trip."""
    round_trip_ms = 1000 * (time.perf_counter() - started)
    timings = replace(chunk.timings, round_trip_ms=round_trip_ms)
    return replace(chunk, timings=timings)


def next_pause_s(failure: DeftError, attempt: int, retries: Retries) -> float | None:
    """Return how long to wait before asking again, or None where that is no use.

    A request that timed out is not made again: the server may still be at work on it. Nor is one to
    the wrong server.
    """
    if attempt >= retries.attempts or isinstance(failure, AnswerTimeoutError | WrongServerError):
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
