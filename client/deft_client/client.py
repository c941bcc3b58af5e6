"""The client a robot uses: `with PolicyClient(url) as policy: policy.act(observation)`.

It uses httpx's transport without httpx's client around it: cookies, redirects and authentication
flows are of no use here, and took a third of the processor time of a call. Nor are bodies inflated:
nobody asks for compressed answers, and a small one can become gigabytes.
"""

import logging
import math
import os
import random
import socket
import ssl
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from email.utils import parsedate_to_datetime
from typing import Any, cast

import httpx

from deft_client.actions import check_actions
from deft_client.deadlines import DeadlineTransport, ending_at, ends_at
from deft_client.errors import (
    AnswerTimeoutError,
    DeftError,
    MessageTooLargeError,
    OverloadedError,
    Problem,
    ProblemError,
    ServerUnreachableError,
    TransportError,
    UnusableValueError,
    WrongServerError,
    problem_error,
)
from deft_client.settings import DEFAULT_URL, ClientSettings, Retries, check_url
from deft_client.types import ActionChunk, ActOptions, Observation, ServerInfo, replace_unchecked
from deft_client.wire import json_codec, msgpack_codec
from deft_client.wire.messages import ActMessage

logger = logging.getLogger(__name__)
ACT_PATH = "/v1/act"
REQUEST_ID = "x-request-id"
RETRIED_STATUS = (429, 502, 503)
UNKNOWN_NAMES = (socket.EAI_NONAME, getattr(socket, "EAI_NODATA", socket.EAI_NONAME))
SHORTEST_WAIT_S = 0.001  # 0 would mean not to wait at all
# A server counts a deadline from the arrival of the frame, and answers one that it missed with 504:
# that answer is worth waiting for, as it keeps the connection.
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


class PolicyClient:
    """A policy behind HTTP, one connection kept open. May be shared by threads.

    Raises the exceptions of `deft_client.errors` and no others. Each client is one robot's
    session unless the options name another.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        settings: ClientSettings | None = None,
        transport: httpx.BaseTransport | None = None,
    ) -> None:
        self.url = check_url(url)
        self.settings = settings or ClientSettings()
        self.session_id = uuid.uuid4().hex  # of acts and resets that name no other
        self._headers = {"user-agent": "deft-client", **authorization(self.settings)}
        self._urls: dict[str, httpx.URL] = {}
        # What `info` promised, once it was asked: the size of an action, and how many there are;
        # and all of it until the first frame after.
        self._info: ServerInfo | None = None
        self._action_dim: int | None = None
        self._chunk_length: int | None = None
        self._repeats_request_ids = False  # until the server has shown that it does
        self._context: ssl.SSLContext | bool = True
        if not self.url.startswith("https"):  # httpx would read all authorities first: 25 ms
            self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        elif self.settings.tls is not None:
            self._context = self.settings.tls.context()
        self._given = transport
        self._connect()

    def _connect(self) -> None:
        """Begin without connections, in this process."""
        self._process = os.getpid()
        self._transport = self._given or DeadlineTransport(self._context, self.settings.proxy)

    def _leave_parents_connections(self) -> None:
        """After a fork they are the other process's: its answers are not for us."""
        if self._process != os.getpid():
            self._connect()

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Return the actions that follow an observation; `round_trip_ms` is filled in."""
        started, settings = time.perf_counter(), self.settings
        options = options or ActOptions()
        gives_up_at = self._gives_up_at(options.deadline_ms)
        options = replace_unchecked(options, {"session_id": options.session_id or self.session_id})
        self._warn_of_unread(observation)
        message = ActMessage(observation, options, self._message_id())
        body = msgpack_codec.encode_request(message, settings.image_encoding, settings.jpeg_quality)
        reply = self._post_act(body, gives_up_at)
        chunk = msgpack_codec.decode_answer(reply.body, settings.limits)
        return timed(self._checked(chunk), started)

    def act_all(
        self, observations: Mapping[str, Observation], options: ActOptions | None = None
    ) -> dict[str, ActionChunk | DeftError]:
        """Return the actions of several robots or environments, asked for in one message.

        They go by session: the names are those that `reset` takes, and the options' own is not
        used. One that could not be answered has its error in place of its actions; what fails the
        message as a whole is raised.
        """
        started, settings = time.perf_counter(), self.settings
        options = options or ActOptions()
        gives_up_at = self._gives_up_at(options.deadline_ms)
        body = msgpack_codec.encode_requests(
            [
                ActMessage(one, replace_unchecked(options, {"session_id": name}))
                for name, one in observations.items()
            ],
            self._message_id(),
            settings.image_encoding,
            settings.jpeg_quality,
        )
        reply = self._post_act(body, gives_up_at)
        answers = msgpack_codec.decode_answers(reply.body, settings.limits)
        if len(answers) != len(observations):
            raise UnusableValueError(
                "answers", f"{len(answers)} of them to {len(observations)} observations"
            )
        return {
            name: self._judged(answer, started)
            for name, answer in zip(observations, answers, strict=True)
        }

    def _warn_of_unread(self, observation: Observation) -> None:
        """Say once, where `info` was asked, what the policy does not look at."""
        if self._info is None:
            return
        for name, reason in self._info.unread(observation).items():
            logger.warning("%s: %s", name, reason)
        self._info = None

    def reset(self, session_id: str | None = None) -> None:
        """Tell the server that an episode starts: what it remembers of the last one is void."""
        body = json_codec.encode_reset(session_id or self.session_id)
        headers = {"content-type": json_codec.CONTENT_TYPE}
        self.ask(HttpRequest("POST", "/v1/reset", self._gives_up_at(), body, headers))

    def info(self) -> ServerInfo:
        """Return what the server says about itself; later answers are held to it."""
        reply = self.ask(HttpRequest("GET", "/v1/info", self._gives_up_at()))
        info = json_codec.decode_info(reply.body, self.settings.limits)
        self._action_dim, self._chunk_length = info.action_dim, info.chunk_length
        self._info = info
        return info

    def ping(self) -> float:
        """Return the milliseconds of one round trip; raises where the server is not ready."""
        started = time.perf_counter()
        self.ask(HttpRequest("GET", "/readyz", self._gives_up_at()), attempts=1)
        return 1000 * (time.perf_counter() - started)

    def close(self) -> None:
        """Close the connection."""
        self._leave_parents_connections()
        self._transport.close()

    def __enter__(self) -> "PolicyClient":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def _gives_up_at(self, deadline_ms: float | None = None) -> float:
        """Return when an answer comes too late to be waited for, by time.monotonic."""
        patience_s = self.settings.timeouts.answer_s
        if deadline_ms is not None:
            patience_s = min(patience_s, max(deadline_ms, 0.0) / 1000 + WAY_BACK_S)
        return min(time.monotonic() + patience_s, ends_at())

    def _post_act(self, body: bytes, gives_up_at: float) -> HttpReply:
        headers = {"content-type": msgpack_codec.CONTENT_TYPE, "accept": msgpack_codec.CONTENT_TYPE}
        return self.ask(HttpRequest("POST", ACT_PATH, gives_up_at, body, headers))

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

    def ask(self, request: HttpRequest, attempts: int | None = None) -> HttpReply:
        """Send a request until it is answered, or it is no use asking again."""
        retries = self.settings.retries
        if attempts is not None:
            retries = replace(retries, attempts=attempts)
        attempt = 1
        while True:
            failure: DeftError
            try:
                reply = self._send(request)
                if reply.status < 300:
                    return reply
                waits_s = retry_after_s(reply.headers)
                problem = json_codec.decode_problem(reply.status, reply.body, waits_s)
                failure = problem_error(problem)
            except TransportError as error:
                failure = error
            pause_s = next_pause_s(failure, attempt, retries)
            if pause_s is None or time.monotonic() + pause_s > request.gives_up_at:
                raise failure
            time.sleep(pause_s)
            attempt += 1

    def _send(self, request: HttpRequest) -> HttpReply:
        """Send a request once."""
        self._leave_parents_connections()
        sent = self._prepared(request)
        try:
            with ending_at(request.gives_up_at):
                return self._reply(sent, self._transport.handle_request(sent))
        except httpx.TransportError as error:
            raise transport_error(error, self.url) from error

    def _prepared(self, request: HttpRequest) -> httpx.Request:
        """Return the request as the transport takes it."""
        left_s = max(request.gives_up_at - time.monotonic(), SHORTEST_WAIT_S)
        connect_s = min(self.settings.timeouts.connect_s, left_s)
        per_phase = {"connect": connect_s, "write": left_s, "read": left_s, "pool": left_s}
        url = self._urls.get(request.path)
        if url is None:
            url = self._urls[request.path] = httpx.URL(self.url + request.path)
        return httpx.Request(
            request.method,
            url,
            headers={REQUEST_ID: uuid.uuid4().hex, **self._headers, **request.headers},
            content=request.body,
            extensions={"timeout": per_phase},
        )

    def _reply(self, sent: httpx.Request, response: httpx.Response) -> HttpReply:
        """Read an answer, or refuse one that is too long or that another request asked for.

        Its connection is closed where more came than was asked for: it would be the next answer.
        """
        body, most = bytearray(), self.settings.limits.max_bytes
        own, repeated = sent.headers[REQUEST_ID], response.headers.get(REQUEST_ID)
        # Who never repeats an id is believed; proxies that do not repeat it only tell of problems.
        is_missed = self._repeats_request_ids and response.status_code < 300
        is_ours = repeated == own or (repeated is None and not is_missed)
        try:
            for part in cast(Iterable[bytes], response.stream):
                if len(body) + len(part) > most:
                    raise MessageTooLargeError(
                        "answer", f"is longer than the {most} bytes that are taken"
                    )
                body += part
            if not is_ours or has_unasked_bytes(response):
                response.extensions["network_stream"].close()
        finally:
            response.close()
        if not is_ours:
            raise ServerUnreachableError(
                f"{self.url} sent an answer to another request; it was not used"
            )
        self._repeats_request_ids |= repeated is not None
        return HttpReply(response.status_code, bytes(body), response.headers)


def has_unasked_bytes(response: httpx.Response) -> bool:
    """Did more come with the end of an answer? No public name of httpx leads to what was read."""
    found: Any = response.stream
    for name in ("_httpcore_stream", "_stream", "_connection", "_h11_state"):
        found = getattr(found, name, None)
    return found is not None and bool(found.trailing_data[0])


def authorization(settings: ClientSettings) -> dict[str, str]:
    """Return the header that carries the API key, if there is one."""
    return {"authorization": f"Bearer {settings.api_key}"} if settings.api_key else {}


def timed(chunk: ActionChunk, started: float) -> ActionChunk:
    """Return the chunk with the time since `started` as its round trip."""
    round_trip_ms = 1000 * (time.perf_counter() - started)
    timings = replace_unchecked(chunk.timings, {"round_trip_ms": round_trip_ms})
    return replace_unchecked(chunk, {"timings": timings})


def transport_error(error: httpx.TransportError, url: str) -> TransportError:
    """Return our exception for one of httpx's."""
    if isinstance(error, httpx.ReadTimeout | httpx.WriteTimeout | httpx.PoolTimeout):
        return AnswerTimeoutError(f"{url} took too long to answer ({type(error).__name__})")
    reason = f"cannot reach {url}: {error or type(error).__name__}"
    if is_wrong_server(error):
        return WrongServerError(reason)
    return ServerUnreachableError(f"{reason}; is the server running there?")


def is_wrong_server(error: BaseException | None) -> bool:
    """Is the cause a name that no host has, or a certificate that is not trusted?"""
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        if isinstance(error, socket.gaierror):
            return error.errno in UNKNOWN_NAMES
        error = error.__cause__ or error.__context__
    return False


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
