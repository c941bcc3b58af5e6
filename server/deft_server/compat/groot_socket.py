"""GR00T's ZMQ server, on a port of its own. Needs the extra `groot` (pyzmq).

GR00T's own server answers one client after the other; here each has its sessions and its turn.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine
from typing import Any

from deft_client.errors import WireError
from deft_client.types import ActOptions
from deft_client.wire_limits import WireLimits
from deft_policies.errors import PolicyError
from deft_server.access import Caller
from deft_server.compat.groot import (
    Call,
    modality_config,
    pack,
    read_call,
    read_observations,
    reply_actions,
)
from deft_server.errors import MissingKeyError, ServerError
from deft_server.problems import describe
from deft_server.service import Service
from deft_server.settings import SettingsError

_KNOWN = (WireError, PolicyError, ServerError)
_ENDPOINTS = "ping, get_action, reset, get_modality_config"
_SESSION_PREFIX = "groot-"
_MAX_IN_HAND = 256


class GrootSocket:
    """Answers GR00T's clients for as long as the app runs. A client's robots are its sessions."""

    def __init__(self, service: Service, host: str, port: int) -> None:
        self._service = service
        self._limits: WireLimits = service.settings.wire_limits
        self._address = f"tcp://{host}:{port}"
        self._task: asyncio.Task[None] | None = None
        self._zmq = _import_zmq()
        self.port = port  # the real one once it listens, where 0 was asked for

    def start(self) -> None:
        """Listen; call on the event loop. Raises `SettingsError` where the port is taken."""
        context = self._zmq.asyncio.Context.instance()
        socket = context.socket(self._zmq.ROUTER)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.MAXMSGSIZE, self._limits.max_bytes)
        try:
            if self._address.endswith(":0"):
                self.port = socket.bind_to_random_port(self._address.removesuffix(":0"))
            else:
                socket.bind(self._address)
        except self._zmq.ZMQError as error:
            raise SettingsError(f"cannot listen on {self._address}: {error}") from error
        self._loop = asyncio.get_running_loop()
        self._task = self._loop.create_task(self._serve(socket))

    def stop(self) -> None:
        """Stop listening; called on another thread, while the loop still runs."""
        if self._task is not None:
            self._loop.call_soon_threadsafe(self._task.cancel)

    async def _serve(self, socket: Any) -> None:
        room = asyncio.Semaphore(_MAX_IN_HAND)
        answering: set[asyncio.Task[None]] = set()

        async def reply(client: bytes, envelope: list[bytes], frame: bytes) -> None:
            try:
                answer = await self.answer(frame, f"{_SESSION_PREFIX}{client.hex()}")
                await socket.send_multipart([client, *envelope, answer])
            finally:
                room.release()

        try:
            while True:
                await room.acquire()
                client, *envelope, frame = await socket.recv_multipart()
                task = asyncio.create_task(reply(client, envelope, frame))
                answering.add(task)
                task.add_done_callback(answering.discard)
        finally:
            for task in answering:
                task.cancel()
            socket.close()

    async def answer(self, frame: bytes, robot: str) -> bytes:
        """Return the reply to one request of a client; an error is a reply too."""
        try:
            call = read_call(frame, self._limits)
            return await self._answer(call, self._identify(call.token), robot)
        except MissingKeyError:
            return pack({"error": "Unauthorized: Invalid API token"})
        except Exception as error:  # noqa: BLE001  the client waits for a reply, whatever happens
            return pack({"error": describe(error).detail})

    async def _answer(self, call: Call, caller: Caller, robot: str) -> bytes:
        answers: dict[str, Callable[[], Coroutine[Any, Any, bytes]]] = {
            "ping": self._ping,
            "get_modality_config": self._config,
            "reset": lambda: self._reset(caller, robot),
            "get_action": lambda: self._act(call, caller, robot),
        }
        answer = answers.get(call.endpoint)
        if answer is None:
            return pack({"error": f"{call.endpoint[:40]!r} is not offered here; {_ENDPOINTS} are"})
        return await answer()

    async def _ping(self) -> bytes:
        return pack({"status": "ok", "message": "Server is running"})

    async def _config(self) -> bytes:
        return modality_config(self._service.info)

    async def _reset(self, caller: Caller, robot: str) -> bytes:
        for named, session_id in self._service.sessions.names():
            if named == caller.name and session_id.startswith(f"{robot}-"):
                self._service.reset(session_id, caller)
        return pack({})

    async def _act(self, call: Call, caller: Caller, robot: str) -> bytes:
        arrived_s = time.monotonic()
        messages = await asyncio.to_thread(read_observations, call.data, self._limits)
        with self._service.in_hand():
            chunks = await asyncio.gather(
                *(
                    self._service.act(
                        one.observation,
                        ActOptions(session_id=f"{robot}-{number}"),
                        caller,
                        arrived_s,
                    )
                    for number, one in enumerate(messages)
                )
            )
        return await asyncio.to_thread(reply_actions, chunks)

    def _identify(self, token: str | None) -> Caller:
        return self._service.access.identify(f"Bearer {token}" if token else "", "zmq")


def _import_zmq() -> Any:
    try:
        import zmq
        import zmq.asyncio
    except ImportError:
        raise SettingsError(
            "--groot-port needs pyzmq: pip install 'deft-vla[groot]', or leave the flag out"
        ) from None
    return zmq
