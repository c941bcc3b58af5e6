"""GR00T's request and reply messages: msgpack with arrays as .npy files. Knows no sockets.

`np.load` is not used: it evaluates a header and allocates what that claims. The header must look
exactly as `np.save` writes it, its dtype must be a plain one, and its shape must fit the bytes.
"""

import asyncio
import re
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from functools import partial
from io import BytesIO
from typing import Any

import msgpack
import numpy as np
from numpy.typing import NDArray

from deft_client.errors import (
    MalformedMessageError,
    UnsupportedMessageError,
    UnusableValueError,
    WireError,
)
from deft_client.peers.arrays import (
    build_array,
    check_camera_count,
    missing,
    read_frame,
    read_state,
    read_text,
    unpack_maps,
)
from deft_client.types import ActionChunk, ActOptions, Image, Observation, ServerInfo
from deft_client.wire.fields import WireLimits, brief
from deft_client.wire.messages import ActMessage
from deft_policies.errors import PolicyError
from deft_server.compat.profiles import GROOT, in_convention
from deft_server.errors import MissingKeyError, ServerError
from deft_server.http.problems import describe
from deft_server.serving.access import Caller
from deft_server.serving.service import Service
from deft_server.settings import SettingsError

_ARM = ("x", "y", "z", "roll", "pitch", "yaw", "gripper")
_MAX_BATCH = 64
_NPY_HEADER = re.compile(
    rb"\x93NUMPY\x01\x00..\{'descr': '([^']{3,4})', 'fortran_order': (True|False), "
    rb"'shape': \(((?:[0-9]{1,12},? ?){0,8})\), \} *\n",
    re.DOTALL,
)
_OLD_INSTRUCTION = "annotation.human.action.task_description"


@dataclass(frozen=True)
class Call:
    """One request: which endpoint, with what, and the caller's token."""

    endpoint: str
    data: Mapping[str, object]
    token: str | None


def read_call(frame: bytes, limits: WireLimits) -> Call:
    """Return a request, arrays rebuilt."""
    value = unpack_maps(frame, limits, _revive)
    if not isinstance(value, dict) or not isinstance(value.get("endpoint"), str):
        raise MalformedMessageError("endpoint", f"missing; got {brief(value)}")
    data, token = _text_map(value.get("data") or {}, "data"), value.get("api_token")
    return Call(value["endpoint"], data, token if isinstance(token, str) else None)


def read_observations(data: Mapping[str, object], limits: WireLimits) -> list[ActMessage]:
    """Return one message per robot of the batch; each array's last time step counts."""
    observation = _text_map(data.get("observation", data), "observation")
    if any(name.startswith("video.") for name in observation):
        observation = _nested(observation)
    videos = _part(observation, "video")
    frames = {name: _batched(value, f"video.{name}", 5) for name, value in videos.items()}
    states = {
        name: _batched(value, f"state.{name}", 3)
        for name, value in _part(observation, "state", is_required=False).items()
    }
    texts = _instructions(observation, limits)
    size = len(texts)
    sizes = {one.shape[0] for one in (*frames.values(), *states.values())} | {size}
    if sizes != {size} or size > _MAX_BATCH:
        raise UnusableValueError(
            "observation",
            f"all parts must have one batch size up to {_MAX_BATCH}, got {sorted(sizes)}",
        )
    return [_message(number, frames, states, texts, limits) for number in range(size)]


def reply_actions(chunks: list[ActionChunk]) -> bytes:
    """Return `[actions, info]`: one array [batch, step, 1] per dimension of an arm."""
    stacked = np.stack([in_convention(chunk.actions, GROOT) for chunk in chunks])
    names = _action_names(stacked.shape[2])
    if len(names) == 1:
        return pack([{names[0]: stacked}, {}])
    return pack([{name: stacked[:, :, at : at + 1] for at, name in enumerate(names)}, {}])


def modality_config(info: ServerInfo) -> bytes:
    """Return which parts of an observation are read, and which actions come back."""

    def config(keys: tuple[str, ...], steps: int) -> object:
        told = {"delta_indices": list(range(steps)), "modality_keys": list(keys)}
        return {"__ModalityConfig_class__": True, "as_json": told}

    return pack(
        {
            "video": config(("image",), 1),
            "state": config((), 1),
            "action": config(_action_names(info.action_dim), info.chunk_length),
            "language": config((_OLD_INSTRUCTION,), 1),
        }
    )


def pack(value: object) -> bytes:
    """Return a reply."""
    return bytes(msgpack.packb(value, default=_as_npy))


def _action_names(action_dim: int) -> tuple[str, ...]:
    return _ARM if action_dim == len(_ARM) else ("action",)


def _revive(entries: dict[object, object]) -> object:
    if "__ndarray_class__" not in entries:
        return entries
    data = entries.get("as_npy")
    if not isinstance(data, bytes):
        raise MalformedMessageError("as_npy", f"must be bytes, got {brief(data)}")
    header = _NPY_HEADER.match(data)
    if header is None or 10 + int.from_bytes(data[8:10], "little") != header.end():
        raise MalformedMessageError("as_npy", "not a .npy file of version 1 with plain numbers")
    dtype, order, shape = (one.decode() for one in header.groups())
    if order == "True":
        raise UnsupportedMessageError("as_npy", "send arrays in C order")
    lengths = [int(length) for length in shape.split(",") if length.strip()]
    return build_array(data[header.end() :], dtype, lengths, "as_npy")


def _as_npy(value: object) -> object:
    if not isinstance(value, np.ndarray):
        raise TypeError(f"cannot send a {type(value).__name__}")
    file = BytesIO()
    np.save(file, np.ascontiguousarray(value), allow_pickle=False)
    return {"__ndarray_class__": True, "as_npy": file.getvalue()}


def _nested(flat: Mapping[str, object]) -> dict[str, object]:
    """Return the flat observation of older versions in the form of the newer ones."""
    nested: dict[str, dict[str, object]] = {"video": {}, "state": {}, "language": {}}
    for name, value in flat.items():
        part, _, rest = name.partition(".")
        if part in ("video", "state"):
            is_single = isinstance(value, np.ndarray) and value.ndim == (
                4 if part == "video" else 2
            )
            nested[part][rest] = value[None] if is_single else value  # type: ignore[index]
        elif part == "annotation":
            nested["language"][name] = value
    return dict(nested)


def _text_map(value: object, field: str) -> Mapping[str, object]:
    if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
        raise UnusableValueError(field, f"must be a map with text keys, got {brief(value)}")
    return value


def _part(
    observation: Mapping[str, object], name: str, is_required: bool = True
) -> Mapping[str, object]:
    part = _text_map(observation.get(name, {}), name)
    if is_required and not part:
        raise missing(name, observation)
    return part


def _batched(value: object, field: str, ndim: int) -> NDArray[np.generic]:
    """Return an array [batch, time, ...] at its last time step: [batch, ...]."""
    if not isinstance(value, np.ndarray) or value.ndim != ndim or 0 in value.shape:
        raise UnusableValueError(
            field,
            f"must be an array [batch, time, ...] of {ndim} dimensions, got {brief(value)}",
        )
    last: NDArray[np.generic] = value[:, -1]
    return last


def _instructions(observation: Mapping[str, object], limits: WireLimits) -> list[str]:
    """Return one instruction per robot; they come as a list, or a list of lists by time."""
    values = next(iter(_part(observation, "language").values()))
    listed = values if isinstance(values, list) else [values]
    last = [one[-1] if isinstance(one, list) and one else one for one in listed]
    return [read_text(one, "language", limits) for one in last[: _MAX_BATCH + 1]]


def _message(
    number: int,
    frames: Mapping[str, NDArray[np.generic]],
    states: Mapping[str, NDArray[np.generic]],
    texts: list[str],
    limits: WireLimits,
) -> ActMessage:
    check_camera_count(len(frames), limits, "video")
    images: dict[str, Image] = {
        name: read_frame(batch[number], f"video.{name}", limits) for name, batch in frames.items()
    }
    main = next(iter(images))
    state = None
    if states:
        joined = np.concatenate([np.atleast_1d(batch[number]) for batch in states.values()])
        state = read_state(joined, "state", limits)
    message = ActMessage(Observation(images.pop(main), texts[number]))
    return replace(message, observation=replace(message.observation, cameras=images, state=state))


_KNOWN = (WireError, PolicyError, ServerError)
_ENDPOINTS = "ping, get_action, reset, get_modality_config"
_SESSION_PREFIX = "groot-"
_MAX_IN_HAND = 256
_ADDRESS = "zmq"  # which tells none: all its clients share


class GrootSocket:
    """Answers GR00T's clients for as long as the app runs. A client's robots are its sessions."""

    def __init__(self, service: Service, port: int) -> None:
        self._service = service
        self._held = service.held
        self._limits: WireLimits = service.settings.wire_limits
        self._address = f"tcp://{service.settings.host}:{port}"
        self._task: asyncio.Task[None] | None = None
        self._zmq = _import_zmq()
        self.port = port  # the real one once it listens, where 0 was asked for

    def start(self) -> None:
        """Listen; call on the event loop. Raises `SettingsError` where the port is taken."""
        context = self._zmq.asyncio.Context.instance()
        socket = context.socket(self._zmq.ROUTER)
        socket.setsockopt(self._zmq.LINGER, 0)
        socket.setsockopt(self._zmq.MAXMSGSIZE, self._limits.max_bytes)
        socket.setsockopt(self._zmq.RCVHWM, 1)  # the library would read a thousand ahead
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
                self._held.release(len(frame), _ADDRESS)
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
        """Return the reply to one request of a client; an error is a reply too.

        The bytes of the frame count as held, and are released with the reply.
        """
        try:
            self._held.hold(len(frame), _ADDRESS)
            call = await self._read(frame)
            return await self._answer(call, self._identify(call.token), robot)
        except MissingKeyError:
            return pack({"error": "Unauthorized: Invalid API token"})
        except Exception as error:  # noqa: BLE001  the client waits for a reply, whatever happens
            return pack({"error": describe(error).detail})

    async def _read(self, frame: bytes) -> Call:
        """Return the call; one that cannot be read counts like others, where no key tells whose."""
        try:
            return read_call(frame, self._limits)
        except WireError:
            if not self._service.access.needs_key:
                await self._service.admit(self._identify(None))
            raise

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
        await self._service.admit(caller)
        messages = await self._service.threads.run(
            caller.owner, partial(read_observations, call.data, self._limits)
        )
        for _ in messages[1:]:
            await self._service.admit(caller)
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
        return await self._service.threads.run(caller.owner, partial(reply_actions, chunks))

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
