"""The client a robot uses: `with PolicyClient(url) as policy: policy.act(observation)`.

It uses httpcore, which knows connections and HTTP and nothing else: cookies, redirects and
authentication flows are of no use here. Nor are bodies inflated: nobody asks for compressed
answers, and a small one can become gigabytes.
"""

import os
import time
import uuid
from collections.abc import Mapping
from dataclasses import replace

import httpcore

from deft_client.calls import (
    NETWORK_STREAM,
    REQUEST_ID,
    Attempts,
    ClientCalls,
    HttpReply,
    HttpRequest,
    Readiness,
    headers_of,
)
from deft_client.deadlines import connection_pool, ending_at
from deft_client.errors import TransportError
from deft_client.settings import DEFAULT_URL, LOADING_S, ClientSettings
from deft_client.unreachable import FAILURES, transport_error
from deft_core.errors import DeftError
from deft_core.types import ActionChunk, ActOptions, Observation, ServerInfo


class PolicyClient(ClientCalls):
    """A policy behind HTTP, one connection kept open. May be shared by threads.

    Raises the exceptions of `deft_client.errors` and no others. Each client is one robot's
    session unless the options name another. `api_key` and `timeout` (seconds of a whole call) take
    the place of the settings' own; without a key the variable DEFT_API_KEY counts, if it is set.
    """

    def __init__(
        self,
        url: str = DEFAULT_URL,
        settings: ClientSettings | None = None,
        transport: httpcore.ConnectionPool | None = None,
        *,
        api_key: str | None = None,
        timeout: float | None = None,
    ) -> None:
        super().__init__(url, settings, api_key, timeout)
        self._given = transport
        self._connect()

    def _connect(self) -> None:
        """Begin without connections, in this process."""
        self._process = os.getpid()
        self._transport = self._given or connection_pool(self._context, self._proxy)

    def _leave_parents_connections(self) -> None:
        """After a fork they are the other process's: its answers are not for us."""
        if self._process != os.getpid():
            self._connect()

    def act(self, observation: Observation, options: ActOptions | None = None) -> ActionChunk:
        """Return the actions that follow an observation; `round_trip_ms` is filled in."""
        started = time.perf_counter()
        return self._answer(self.ask(self._act_request(observation, options)), started)

    def act_all(
        self, observations: Mapping[str, Observation], options: ActOptions | None = None
    ) -> dict[str, ActionChunk | DeftError]:
        """Return the actions of several robots or environments, asked for in one message.

        They go by session: the names are those that `reset` takes, and the options' own is not
        used. One that could not be answered has its error in place of its actions; what fails the
        message as a whole is raised.
        """
        started = time.perf_counter()
        reply = self.ask(self._act_all_request(observations, options))
        return self._answers(reply, observations, started)

    def reset(self, session_id: str | None = None) -> None:
        """Tell the server that an episode starts: what it remembers of the last one is void."""
        self.ask(self._reset_request(session_id))

    def info(self) -> ServerInfo:
        """Return what the server says about itself; later answers are held to it."""
        return self._server_info(self.ask(self._info_request()))

    def ping(self) -> float:
        """Return the milliseconds of one round trip; raises where the server is not ready."""
        started = time.perf_counter()
        self.ask(self._ready_request(), attempts=1)
        return 1000 * (time.perf_counter() - started)

    def wait_ready(self, timeout: float = LOADING_S) -> None:
        """Wait until the server is ready; raises why it is not once `timeout` seconds are over."""
        readiness = Readiness(timeout, self._waits)
        while True:
            try:
                self.ask(self._ready_request(readiness.until), attempts=1)
            except DeftError as failure:
                time.sleep(readiness.pause_s(failure))
            else:
                return

    def close(self) -> None:
        """Close the connection."""
        self._leave_parents_connections()
        self._transport.close()

    def __enter__(self) -> "PolicyClient":
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def ask(self, request: HttpRequest, attempts: int | None = None) -> HttpReply:
        """Send a request until it is answered, or it is no use asking again."""
        retries = self.settings.retries
        if attempts is not None:
            retries = replace(retries, attempts=attempts)
        tries = Attempts(request, retries, self._waits)
        while True:
            failure: DeftError
            try:
                reply = self._send(tries.request)
                if reply.status < 300:
                    return reply
                failure = self._failure(reply)
            except TransportError as error:
                failure = error
            time.sleep(tries.pause_s(failure))

    def _send(self, request: HttpRequest) -> HttpReply:
        """Send a request once."""
        self._leave_parents_connections()
        request_id = uuid.uuid4().hex
        sent = self._prepared(request, request_id)
        try:
            with ending_at(request.gives_up_at), self._transport.stream(**sent) as response:
                return self._believed(request_id, self._read(response, request_id))
        except FAILURES as error:
            raise transport_error(error, self.url) from error

    def _read(self, response: httpcore.Response, request_id: str) -> HttpReply:
        """Read an answer, or refuse one that is too long.

        A connection is kept only where answers say which request they are to: on any other, what
        came unasked would be the next answer.
        """
        body = bytearray()
        for part in response.iter_stream():
            self._take(body, part)
        reply = HttpReply(response.status, bytes(body), headers_of(response))
        if reply.headers.get(REQUEST_ID) != request_id and NETWORK_STREAM in response.extensions:
            response.extensions[NETWORK_STREAM].close()
        return reply
