"""What every request passes before any route sees it, and every error on its way out.

On the way in: a request id, the caller's key, the web origin, the limits of the body. On the way
out: the request id again, the count, and every error as problem+json. Work ends for callers
who have gone away, or whose API key was taken out of the file. Plain ASGI, because this is on the
way of every frame.
"""

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import ExitStack, closing

from starlette.requests import ClientDisconnect, HTTPConnection
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deft_core.errors import WireError
from deft_server.errors import BodyTooLargeError, BodyTooSlowError, CallerGoneError, MissingKeyError
from deft_server.http.connections import COUNT_FOR
from deft_server.http.problems import describe, problem_response
from deft_server.http.watches import KeyWatch
from deft_server.serving.access import (
    REQUEST_ID_HEADER,
    Caller,
    current_request_id,
    request_id_from,
)
from deft_server.serving.bounds import ConnectionBounds, Exchange
from deft_server.serving.service import Service
from deft_server.settings import is_loopback

logger = logging.getLogger(__name__)


ADMIN_PREFIX = "/v1/admin"
OPEN_PATHS = frozenset(
    ("/", "/healthz", "/health", "/readyz", "/docs", "/openapi.json", "/favicon.ico")
)
METRICS_PATH = "/metrics"
ANY_HOST_PATHS = frozenset(("/healthz", "/readyz", METRICS_PATH))  # probes use what names they like
PAGES_PREFIX = "/dashboard"  # the feed asks for a key itself: browsers cannot send a header
# Whose bodies may be large.
FRAME_PATHS = frozenset(("/v1/act", "/act", "/predict_base64", "/predict_base64_stream"))
SMALL_BODY_BYTES = 2048  # of requests that are not frames: a name, at most, however escaped
# Somebody else asks through a proxy, wherever the connection comes from.
PROXY_HEADERS = (b"forwarded", b"via", b"x-forwarded-for", b"x-forwarded-host", b"x-real-ip")
_CALLER = "deft.caller"
_EXCHANGE = "deft.exchange"
NOBODY = "(none)"  # in place of a key's name, where no key was accepted
_SAFE_METHODS = ("GET", "HEAD", "OPTIONS")


def caller_of(scope: Scope) -> Caller:
    """Return who sent this request, as the gate found out."""
    caller: Caller = scope[_CALLER]
    return caller


def exchange_of(scope: Scope) -> Exchange:
    """Return what counts the bytes of this request."""
    exchange: Exchange = scope[_EXCHANGE]
    return exchange


def take_exchange(message: Message) -> Exchange:
    """Return what counts the bytes of a WebSocket's message. Close it when the answer has left."""
    exchange: Exchange = message.pop(_EXCHANGE)
    return exchange


class Gate:
    """The outermost layer of the app, but for CORS."""

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service
        self._bounds = service.bounds
        self._key_watch = KeyWatch(service.access)
        self._open_paths = set(OPEN_PATHS)
        if service.settings.open_metrics:
            self._open_paths.add(METRICS_PATH)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in, or say why not."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        headers: dict[bytes, bytes] = dict(scope["headers"])
        request_id = request_id_from(headers.get(REQUEST_ID_HEADER))
        current_request_id.set(request_id)
        if scope["type"] == "websocket":
            await self._websocket(scope, headers, receive, send)
        else:
            await self._http(scope, headers, request_id, receive, send)

    async def _http(
        self,
        scope: Scope,
        headers: Mapping[bytes, bytes],
        request_id: str,
        receive: Receive,
        send: Send,
    ) -> None:
        started_s = time.perf_counter()
        status = 0

        async def reply(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                own = (REQUEST_ID_HEADER, request_id.encode("ascii"))
                message["headers"] = [*message.get("headers", ()), own]
            await send(message)

        self._service.num_in_hand += 1
        try:
            caller = self._admit(scope, headers)
            most = self._max_body_bytes(scope["path"])
            if scope["path"] in FRAME_PATHS:  # others may not exist: 404 for any body
                check_length(headers.get(b"content-length", b""), most)
            scope[_EXCHANGE] = exchange = Exchange(self._bounds.budget, caller.owner)
            with (
                self._bounds.in_hand(caller.address),
                closing(BoundedBody(receive, self._bounds, most, exchange)) as body,
            ):
                await self._app(scope, body, reply)
        except (CallerGoneError, ClientDisconnect):
            status = 499  # there is nobody to answer
        except Exception as error:
            if status:
                raise
            self._count_refusal(scope, error)
            problem = describe(error, HTTPConnection(scope))
            await problem_response(problem)(scope, receive, reply)
        finally:
            self._service.num_in_hand -= 1
            self._count(scope, status, started_s)

    async def _websocket(
        self, scope: Scope, headers: Mapping[bytes, bytes], receive: Receive, send: Send
    ) -> None:
        with ExitStack() as held:
            try:
                caller = self._admit(scope, headers)
                held.enter_context(self._bounds.in_hand(caller.address))
            except Exception as error:  # noqa: BLE001  the caller gets the error
                self._count_refusal(scope, error)
                problem = describe(error, HTTPConnection(scope))
                await _refuse_handshake(scope, problem_response(problem), receive, send)
                self._count(scope, problem.status, time.perf_counter())
                return
            await self._serve_websocket(scope, caller, receive, send)

    async def _serve_websocket(
        self, scope: Scope, caller: Caller, receive: Receive, send: Send
    ) -> None:
        started_s = time.perf_counter()

        async def counted_send(message: Message) -> None:
            if message["type"] == "websocket.accept":
                self._count(scope, 101, started_s, scope["path"])  # only paths of ours are accepted
            await send(message)

        # What arrives counts from its first byte on.
        scope.get("extensions", {}).get(COUNT_FOR, lambda owner: None)(caller.owner)
        messages = BoundedMessages(receive, self._bounds, caller.owner)
        try:
            async with self._key_watch.watching(caller):
                await self._app(scope, messages, counted_send)
        except MissingKeyError as error:
            await send({"type": "websocket.close", "code": 1008, "reason": str(error)})
        finally:
            messages.close()

    def _admit(self, scope: Scope, headers: Mapping[bytes, bytes]) -> Caller:
        """Check host name, web origin, API key and, for administration, rights; return who calls.

        Once per request or WebSocket, before its body; how often a caller sends frames is checked
        by `Service.admit`.
        """
        access = self._service.access
        path, method = scope["path"], scope.get("method")
        if path not in ANY_HOST_PATHS:
            named = [value for name, value in scope["headers"] if name == b"host"]
            access.check_host([one.decode("latin-1") for one in named])
        origin = headers.get(b"origin", b"")
        if origin and method not in _SAFE_METHODS:
            host = headers.get(b"host", b"").decode("latin-1")
            access.check_origin(origin.decode("latin-1"), host)
        address = _address_of(scope)
        # The WebSocket at `/` is a robot's; only the page there is open.
        is_page = scope["type"] == "http" and path in self._open_paths
        is_open = is_page or path.startswith(PAGES_PREFIX)
        if is_open or method == "OPTIONS":
            scope[_CALLER] = Caller(address=address)
            return caller_of(scope)
        authorization = headers.get(b"authorization", b"").decode("latin-1")
        caller = access.identify(authorization, address)
        if path.startswith(ADMIN_PREFIX) and not self._is_at_the_machine(headers, address):
            access.require_admin(caller)
        scope[_CALLER] = caller
        return caller

    def _is_at_the_machine(self, headers: Mapping[bytes, bytes], address: str) -> bool:
        """Whether a caller sits at this machine, and no key could say who that is.

        Only where nobody else reaches the server: neither directly nor through a proxy here.
        """
        settings = self._service.settings
        return (
            settings.keys_file is None
            and settings.tls_client_ca is None
            and not settings.trusted_proxies
            and is_loopback(settings.host)
            and is_loopback(address)
            and headers.keys().isdisjoint(PROXY_HEADERS)
        )

    def _count_refusal(self, scope: Scope, error: Exception) -> None:
        """Count a frame that was refused before the service saw it."""
        if scope["type"] == "http" and scope["path"] not in FRAME_PATHS:
            return
        caller = scope.get(_CALLER)
        if caller is None or isinstance(error, WireError | BodyTooLargeError | BodyTooSlowError):
            self._service.metrics.count_outcome(NOBODY if caller is None else caller.name, error)

    def _max_body_bytes(self, path: str) -> int:
        largest = self._service.settings.max_body_bytes
        return largest if path in FRAME_PATHS else min(largest, SMALL_BODY_BYTES)

    def _count(self, scope: Scope, status: int, started_s: float, unnamed: str = "unknown") -> None:
        """Count a request under its route, never its raw path: those could be without number."""
        route = getattr(scope.get("route"), "path", unnamed)
        self._service.metrics.count_request(route, status)
        if logger.isEnabledFor(logging.DEBUG):
            spent_ms = (time.perf_counter() - started_s) * 1000
            logger.debug(
                "%s %s %d in %.1f ms", scope.get("method"), scope["path"], status, spent_ms
            )


def _address_of(scope: Scope) -> str:
    return scope["client"][0] if scope.get("client") else ""


async def _refuse_handshake(scope: Scope, response: Response, receive: Receive, send: Send) -> None:
    """Answer a WebSocket handshake with a plain HTTP response, where the server can."""
    if "websocket.http.response" not in scope.get("extensions", {}):
        await send({"type": "websocket.close", "code": 1008})
        return
    await receive()  # websocket.connect
    start = {
        "type": "websocket.http.response.start",
        "status": response.status_code,
        "headers": response.raw_headers,
    }
    await send(start)
    await send({"type": "websocket.http.response.body", "body": response.body})


class BoundedBody:
    """Wraps an ASGI `receive`; raises an error of the server as soon as a bound is passed.

    Close it when the request is answered: until then its bytes count for the exchange.
    """

    def __init__(
        self, receive: Receive, bounds: ConnectionBounds, max_bytes: int, exchange: Exchange
    ) -> None:
        self._receive = receive
        self._exchange = exchange
        self._bounds = bounds
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._ends_at: float | None = None  # by the loop's clock
        self.is_complete = False

    async def __call__(self) -> Message:
        """Return the next part of the body, or the news that the caller has gone."""
        if self.is_complete:
            return await self._receive()
        timeout_s = self._bounds.settings.body_timeout_s
        if self._ends_at is None:
            self._ends_at = asyncio.get_running_loop().time() + timeout_s
        try:
            async with asyncio.timeout_at(self._ends_at):
                message = await self._receive()
        except TimeoutError:
            raise BodyTooSlowError(f"the body did not arrive within {timeout_s:g} s") from None
        self._take(len(message.get("body", b"")))
        self.is_complete = not message.get("more_body", False)
        return message

    def close(self) -> None:
        """Let go of the bytes."""
        self._exchange.close()

    def _take(self, num_bytes: int) -> None:
        self._num_bytes += num_bytes
        self._exchange.hold(num_bytes)
        if self._num_bytes > self._max_bytes:
            raise BodyTooLargeError(f"over the {self._max_bytes} bytes that are allowed here")


class BoundedMessages:
    """Wraps the ASGI `receive` of a WebSocket: a message that was received is in hand.

    It counts until its exchange is closed by who took it over (see `take_exchange`), or, where
    nobody did, until the next message is asked for.
    """

    def __init__(self, receive: Receive, bounds: ConnectionBounds, owner: str) -> None:
        self._receive = receive
        self._bounds = bounds
        self._owner = owner
        self._last: Message = {}

    async def __call__(self) -> Message:
        """Return the next message, which the connection itself counted until now."""
        self.close()
        message = await self._receive()
        if message["type"] == "websocket.receive":
            size = len(message.get("bytes") or message.get("text") or b"")
            message[_EXCHANGE] = Exchange(self._bounds.budget, self._owner, size)
        self._last = message
        return message

    def close(self) -> None:
        """Let go of the last message, unless somebody took it over."""
        if _EXCHANGE in self._last:
            take_exchange(self._last).close()


def check_length(content_length: bytes, most: int) -> None:
    """Refuse a body by what its header says, which may be digits without number."""
    digits = content_length.lstrip(b"0")
    if digits.isdigit() and (len(digits) > len(str(most)) or int(digits) > most):
        raise BodyTooLargeError(f"{digits[:20].decode()} bytes; at most {most} are allowed here")
