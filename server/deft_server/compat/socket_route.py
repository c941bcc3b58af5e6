"""Peers' WebSockets: openpi's policy server, vla-eval's model server, vLLM-Omni's robot endpoint.

At `/`, openpi's client waits for a metadata frame before it sends anything; vla-eval's client waits
for a HELLO message. The first frame of this server is both, and what arrives next tells them apart.
vLLM-Omni has a path of its own, because its answers have another shape than openpi's.
`?statistics_key=` and `?decoding=` in the address apply to every frame of the connection.
"""

import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray
from starlette.requests import HTTPConnection
from starlette.routing import WebSocketRoute
from starlette.types import Message as Event
from starlette.types import Receive, Scope, Send

from deft_client.errors import MalformedMessageError, UnusableValueError, WireError
from deft_client.image_chain import ImageChain
from deft_client.peers.arrays import PictureFoundError, pack, read_name, unpack
from deft_client.peers.openpi import openpi_request
from deft_client.peers.vla_eval import (
    PROTOCOL_VERSION,
    Message,
    MessageType,
    looks_like_message,
    read_message,
    vla_eval_request,
)
from deft_client.types import ActionChunk, ActOptions, ServerInfo
from deft_client.wire.fields import WireLimits, brief
from deft_client.wire.messages import ActMessage
from deft_policies.errors import PolicyError
from deft_server.compat.profiles import (
    ARM_DIMENSIONS,
    OPENPI,
    REALTIME,
    VLA_EVAL,
    in_convention,
    prepare,
    staying,
)
from deft_server.errors import CallerGoneError, ServerError
from deft_server.http.cancelling import CallerWatch
from deft_server.http.connections import STOP_PINGS
from deft_server.http.gate import caller_of
from deft_server.http.problems import describe
from deft_server.serving.access import Caller
from deft_server.serving.service import Service

_POSITION = {"name": "position", "dims": 3, "format": "delta_xyz", "range": [-1, 1]}
_ROTATION = {"name": "rotation", "dims": 3, "format": "axis_angle", "range": [-3.15, 3.15]}
_GRIPPER = {"name": "gripper", "dims": 1, "format": "binary_close_positive", "range": [-1, 1]}
_LANGUAGE = {"name": "language", "dims": 0, "format": "language"}
_STATE = {"name": "state", "dims": 8, "format": "eef_pos3_axisangle3_gripper2"}
PLAN_LASTS_S = 60.0  # without an observation; a simulator may take seconds for a step


def greeting(info: ServerInfo, session_id: str, version: str) -> bytes:
    """Return metadata for openpi that is at the same time a HELLO for vla-eval."""
    payload: dict[str, object] = {
        "harness_version": f"deft {version}",
        "protocol_version": PROTOCOL_VERSION,
        "model_server": info.policy,
        "capabilities": {},
        "observation_params": _observation_params(info),
        # Pictures are named differently by every benchmark, which warns of names that it lacks.
        "observation_spec": {"language": _LANGUAGE},
    }
    if info.state_dim == _STATE["dims"]:
        payload["observation_spec"] = {"language": _LANGUAGE, "state": _STATE}
    if info.action_dim == ARM_DIMENSIONS:
        payload["action_spec"] = {
            "position": _POSITION,
            "rotation": _ROTATION,
            "gripper": _GRIPPER,
        }
    hello = Message(MessageType.HELLO, payload, seq=0, timestamp=time.time())
    metadata: Mapping[str, object] = {
        "policy": info.policy,
        "action_dim": info.action_dim,
        "action_horizon": info.chunk_length,
        "image_size": [info.image_height, info.image_width],
        "image_chain": info.image_chain,
        "gripper": OPENPI.gripper.value,
        "statistics_keys": list(info.statistics_keys),
        "decoding": info.decoding,
        "session_id": session_id,
    }
    return pack({**hello.to_map(), **metadata})


def _observation_params(info: ServerInfo) -> Mapping[str, object]:
    """Return what vla-eval's own servers of the same family ask its benchmarks for."""
    if info.chunk_length == 1 and info.num_pictures == 1 and info.state_dim is None:
        return {"seed": 0}  # OpenVLA
    # OpenVLA-OFT; its state was never normalised to w >= 0 before it became an axis and an angle.
    params: dict[str, object] = {"env_seed": 0, "quat_no_antipodal": True}
    if info.num_pictures > 1:
        params["send_wrist_image"] = True
    if info.state_dim is not None:
        params["send_state"] = True
    return params


def realtime_metadata(info: ServerInfo) -> bytes:
    """Return what vLLM-Omni's clients are told first."""
    return pack(
        {
            "policy": info.policy,
            "action_dim": info.action_dim,
            "action_horizon": info.chunk_length,
            "image_resolution": [info.image_height, info.image_width],
            "n_external_cameras": 1,
            "needs_wrist_camera": info.num_pictures > 1,
            "needs_session_id": True,
            "gripper": REALTIME.gripper.value,
            "statistics_keys": list(info.statistics_keys),
        }
    )


@dataclass
class OpenpiDialect:
    """Turns openpi's observations into requests and answers into its results."""

    limits: WireLimits
    prev_total_ms: float | None = None

    def request(self, fields: Mapping[str, object]) -> ActMessage:
        """Return the observation."""
        return openpi_request(fields, self.limits)

    def result(self, chunk: ActionChunk, infer_ms: float) -> bytes:
        """Return the frame that answers it."""
        timing = {"infer_ms": infer_ms}
        if self.prev_total_ms is not None:
            timing["prev_total_ms"] = self.prev_total_ms
        timings = chunk.timings
        policy_ms = timings.total_ms - timings.queue_ms - timings.wire_ms
        return pack(
            {
                "actions": in_convention(chunk.actions, OPENPI),
                "policy_timing": {"infer_ms": policy_ms},
                "server_timing": timing,
            }
        )


class VlaEvalDialect:
    """Turns vla-eval's observations into requests, and hands out a chunk one action at a time."""

    def __init__(self, limits: WireLimits) -> None:
        self._limits = limits
        self._planned: deque[NDArray[np.float64]] = deque()
        self._instruction: object = None  # that the plan is for
        self._used_s = 0.0

    def request(self, message: Message) -> ActMessage:
        """Return the observation."""
        return vla_eval_request(message.payload, self._limits)

    def planned_action(self, message: Message, now_s: float) -> NDArray[np.float64] | None:
        """Return the next action of the chunk in hand, if one is left and still to the point."""
        instruction = message.payload.get("task_description")
        is_same = isinstance(instruction, str) and instruction == self._instruction
        if not is_same or now_s - self._used_s > PLAN_LASTS_S:
            self._planned.clear()
        self._instruction, self._used_s = instruction, now_s
        return self._planned.popleft() if self._planned else None

    def plan(self, chunk: ActionChunk) -> NDArray[np.float64]:
        """Keep a new chunk, and return its first action."""
        self._planned = deque(in_convention(chunk.actions, VLA_EVAL))
        return self._planned.popleft()

    def start_episode(self) -> None:
        """Forget the plan of the episode before."""
        self._planned.clear()


def action_message(action: NDArray[np.float64], seq: int) -> bytes:
    """Return vla-eval's answer to the observation with that number."""
    return Message(MessageType.ACTION, {"actions": action}, seq, time.time()).encode()


def error_message(text: str, seq: int) -> bytes:
    """Return vla-eval's way of saying that an observation could not be answered."""
    return Message(MessageType.ERROR, {"error": text}, seq, time.time()).encode()


ResultT = TypeVar("ResultT")
CLOSE_REASON = "Internal server error. Details in the previous frame."
_ENDED_EPISODE = pack({"status": "reset successful"})
_KNOWN = (WireError, PolicyError, ServerError)


REALTIME_PATH = "/v1/realtime/robot/openpi"


def build_socket_routes(service: Service) -> list[WebSocketRoute]:
    """Return the routes around a service."""
    return [
        WebSocketRoute("/", _Socket(service, _Connection)),
        WebSocketRoute(REALTIME_PATH, _Socket(service, _RealtimeConnection)),
    ]


class _Socket:
    """A route, as a plain ASGI application: called once per connection."""

    def __init__(self, service: Service, connection: "type[_Connection]") -> None:
        self._service = service
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one robot until it leaves."""
        await receive()  # websocket.connect
        await send({"type": "websocket.accept"})
        connection = self._connection(self._service, scope, receive, send)
        try:
            await connection.run()
        except CallerGoneError:
            pass
        finally:
            connection.end_episode()


class _Connection:
    """One robot, from its first frame until it hangs up. Each connection is a session."""

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        self._service = service
        self._connection = HTTPConnection(scope)
        self._stop_pings = scope.get("extensions", {}).get(STOP_PINGS, lambda: None)
        self._raw_send = send
        self._watch = CallerWatch(receive)
        self._limits = service.settings.wire_limits
        self._caller: Caller = staying(caller_of(scope))
        self._session_id = f"socket-{uuid.uuid4().hex[:12]}"
        self._openpi = OpenpiDialect(self._limits)
        self._vla_eval = VlaEvalDialect(self._limits)

    async def run(self) -> None:
        """Answer frames until the client leaves or, in openpi's dialect, until one fails."""
        try:
            self._options = self._read_options()
            await self._service.scheduler.settled()
            hello = self._greeting(self._service.info)
        except _KNOWN as error:
            await self._fail(error)
            return
        await self._send_bytes(hello)
        goes_on = True
        while goes_on:
            event = await self._watch.next_message()
            if event["type"] == "websocket.disconnect":
                return
            with self._service.in_hand():
                goes_on = await self._answer(event)

    def _greeting(self, info: ServerInfo) -> bytes:
        return greeting(info, self._session_id, version("deft-vla"))

    def end_episode(self) -> None:
        """Forget what the policy remembers of this robot."""
        self._service.reset(self._session_id, self._caller)

    async def _answer(self, event: Event) -> bool:
        """Answer one frame; return whether the connection goes on."""
        arrived_s = time.monotonic()
        data = event.get("bytes")
        try:
            if data is None:
                raise MalformedMessageError("frame", "send binary frames, got text")
            value = await self._unpack(data)
            if looks_like_message(value):
                await self._answer_vla_eval(value, arrived_s)
            else:
                await self._answer_openpi(value, arrived_s)
        except CallerGoneError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, the robot is told
            await self._fail(error)
            return False
        return True

    async def _unpack(self, data: bytes) -> object:
        try:
            try:
                return unpack(data, self._limits, decodes_pictures=False)
            except PictureFoundError:
                return await self._on_a_thread(partial(unpack, data, self._limits))
        except WireError:
            await self._watch.run(self._service.admit(self._caller))  # bad frames count, too
            raise

    async def _on_a_thread(self, work: Callable[[], ResultT]) -> ResultT:
        return await self._service.threads.run(work)

    async def _answer_openpi(self, value: object, arrived_s: float) -> None:
        if not isinstance(value, dict):
            raise MalformedMessageError("frame", f"must be a map, got {brief(value)}")
        if value.get("endpoint") == "reset":
            self.end_episode()
            await self._send_bytes(_ENDED_EPISODE)
            return
        chunk = await self._act(self._openpi.request(value), arrived_s)
        infer_ms = (time.monotonic() - arrived_s) * 1000
        await self._send_bytes(self._openpi.result(chunk, infer_ms))
        self._openpi.prev_total_ms = (time.monotonic() - arrived_s) * 1000

    async def _answer_vla_eval(self, value: object, arrived_s: float) -> None:
        """Answer a message; what goes wrong with an observation does not end the connection."""
        message = read_message(value)
        self._stop_pings()  # its client answers none while it builds an environment
        if message.type in (MessageType.EPISODE_START, MessageType.EPISODE_END):
            self._vla_eval.start_episode()
            self.end_episode()
        elif message.type is MessageType.OBSERVATION:
            try:
                reply = await self._next_action(message, arrived_s)
            except CallerGoneError:
                raise
            except _KNOWN as error:
                detail = describe(error, self._connection).detail
                reply = error_message(f"observation_failed: {detail}", message.seq)
            await self._send_bytes(reply)

    async def _next_action(self, message: Message, arrived_s: float) -> bytes:
        action = self._vla_eval.planned_action(message, arrived_s)
        if action is None:
            chunk = await self._act(self._vla_eval.request(message), arrived_s)
            action = self._vla_eval.plan(chunk)
        return action_message(action, message.seq)

    async def _act(self, message: ActMessage, arrived_s: float) -> ActionChunk:
        await self._service.admit(self._caller)
        chain = self._service.settings.socket_image_chain
        if chain is not ImageChain.NONE:
            size = self._service.info.image_height
            message = await self._on_a_thread(partial(prepare, message, chain, size))
        act = self._service.act(message.observation, self._options, self._caller, arrived_s)
        return await self._watch.run(act)

    def _read_options(self) -> ActOptions:
        query = self._connection.query_params
        key = read_name(query.get("statistics_key"), "statistics_key", self._limits)
        decoding = read_name(query.get("decoding"), "decoding", self._limits)
        return replace(
            ActOptions(session_id=self._session_id), statistics_key=key, decoding=decoding
        )

    async def _fail(self, error: Exception) -> None:
        """Tell an openpi client as its own server would: a text message, then close code 1011."""
        problem = describe(error, self._connection)
        text = f"{problem.title}: {problem.detail}"
        await self._send({"type": "websocket.send", "text": text})
        await self._send({"type": "websocket.close", "code": 1011, "reason": CLOSE_REASON})

    async def _send(self, message: Event) -> None:
        try:
            await self._raw_send(message)
        except OSError as error:
            raise CallerGoneError("the caller left while we sent") from error

    async def _send_bytes(self, data: bytes) -> None:
        await self._send({"type": "websocket.send", "bytes": data})


class _RealtimeConnection(_Connection):
    """vLLM-Omni's dialect: bare arrays for answers, sessions by name, errors that end nothing."""

    _named_session: str | None = None

    def _greeting(self, info: ServerInfo) -> bytes:
        return realtime_metadata(info)

    async def _answer(self, event: Event) -> bool:
        arrived_s = time.monotonic()
        data = event.get("bytes")
        try:
            if data is None:
                raise MalformedMessageError("frame", "send binary frames, got text")
            reply = await self._reply(await self._unpack(data), arrived_s)
        except CallerGoneError:
            raise
        except Exception as error:  # noqa: BLE001  whatever it is, the robot is told
            await self._tell(error)
        else:
            await self._send_bytes(reply)
        return True

    async def _reply(self, value: object, arrived_s: float) -> bytes:
        if not isinstance(value, dict):
            raise MalformedMessageError("frame", f"must be a map, got {brief(value)}")
        endpoint = value.get("endpoint", "infer")
        if endpoint not in ("infer", "reset"):
            raise UnusableValueError("endpoint", f"must be infer or reset, got {brief(endpoint)}")
        session = read_name(value.get("session_id"), "session_id", self._limits)
        if endpoint == "reset" or session != self._named_session:
            self.end_episode()
            self._named_session = session
        if endpoint == "reset":
            return _ENDED_EPISODE
        chunk = await self._act(self._openpi.request(value), arrived_s)
        return pack(in_convention(chunk.actions, REALTIME).astype(np.float32))

    async def _fail(self, error: Exception) -> None:
        await self._tell(error)
        await self._send({"type": "websocket.close", "code": 1011, "reason": CLOSE_REASON})

    async def _tell(self, error: Exception) -> None:
        problem = describe(error, self._connection)
        text = f"{problem.title}: {problem.detail}"
        await self._send_bytes(pack({"type": "error", "message": text}))
