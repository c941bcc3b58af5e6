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
from functools import partial

import numpy as np
from numpy.typing import NDArray
from starlette.routing import WebSocketRoute
from starlette.types import Receive, Scope, Send

from deft_core.errors import MalformedMessageError, Problem, UnusableValueError, WireError
from deft_core.peers.arrays import has_pictures, pack, read_name, unpack
from deft_core.peers.conventions import ARM_DIMENSIONS, OPENPI, REALTIME, VLA_EVAL
from deft_core.peers.openpi import openpi_request
from deft_core.types import ActionChunk, ActOptions, ServerInfo
from deft_core.wire.limits import ReadContext
from deft_core.wire.messages import ActMessage
from deft_core.wire.refusals import brief
from deft_policies.errors import PolicyError
from deft_server.compat.profiles import in_convention, prepared, staying
from deft_server.compat.vla_eval import (
    PROTOCOL_VERSION,
    Message,
    MessageType,
    looks_like_message,
    read_message,
    vla_eval_request,
)
from deft_server.errors import ServerError
from deft_server.http.connections import STOP_PINGS
from deft_server.http.problems import describe
from deft_server.http.routes import RobotSocket
from deft_server.serving.service import Service

_POSITION = {"name": "position", "dims": 3, "format": "delta_xyz", "range": [-1, 1]}
_ROTATION = {"name": "rotation", "dims": 3, "format": "axis_angle", "range": [-3.15, 3.15]}
_GRIPPER = {"name": "gripper", "dims": 1, "format": "binary_close_positive", "range": [-1, 1]}
_LANGUAGE = {"name": "language", "dims": 0, "format": "language"}
_STATE = {"name": "state", "dims": 8, "format": "eef_pos3_axisangle3_gripper2"}
ReadFrame = Callable[[Mapping[str, object], ReadContext], ActMessage]
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
        "gripper": OPENPI.gripper.meaning,
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
    """Return the first message to vLLM-Omni's clients."""
    return pack(
        {
            "policy": info.policy,
            "action_dim": info.action_dim,
            "action_horizon": info.chunk_length,
            "image_resolution": [info.image_height, info.image_width],
            "n_external_cameras": 1,
            "needs_wrist_camera": info.num_pictures > 1,
            "needs_session_id": True,
            "gripper": REALTIME.gripper.meaning,
            "statistics_keys": list(info.statistics_keys),
        }
    )


class ActionPlan:
    """The rest of a chunk, for vla-eval's clients, who take one action at a time."""

    def __init__(self) -> None:
        self._actions: deque[NDArray[np.float64]] = deque()
        self._instruction: object = None  # that the plan is for
        self._used_s = 0.0

    def next_action(self, message: Message, now_s: float) -> NDArray[np.float64] | None:
        """Return the next action of the chunk in hand, if one is left and still to the point."""
        instruction = message.payload.get("task_description")
        is_same = isinstance(instruction, str) and instruction == self._instruction
        if not is_same or now_s - self._used_s > PLAN_LASTS_S:
            self._actions.clear()
        self._instruction, self._used_s = instruction, now_s
        return self._actions.popleft() if self._actions else None

    def follow(self, actions: NDArray[np.float64]) -> NDArray[np.float64]:
        """Keep a new chunk, and return its first action."""
        self._actions = deque(actions)
        return self._actions.popleft()

    def forget(self) -> None:
        """Have no action left, because another episode begins."""
        self._actions.clear()


REALTIME_PATH = "/v1/realtime/robot/openpi"
_ENDED_EPISODE = pack({"status": "reset successful"})


def build_socket_routes(service: Service) -> list[WebSocketRoute]:
    """Return the routes around a service."""
    return [
        WebSocketRoute("/", partial(_PeerSocket, service)),
        WebSocketRoute(REALTIME_PATH, partial(_RealtimeSocket, service)),
    ]


class _PeerSocket(RobotSocket):
    """openpi's and vla-eval's clients. Each connection is a session; openpi's ends at an error."""

    survives_errors = False

    def __init__(self, service: Service, scope: Scope, receive: Receive, send: Send) -> None:
        super().__init__(service, scope, receive, send)
        self.caller = staying(self.caller)
        self.session_id = f"socket-{uuid.uuid4().hex[:12]}"
        self._stop_pings = scope.get("extensions", {}).get(STOP_PINGS, lambda: None)
        self._plan = ActionPlan()
        self._previous_timing: dict[str, float] = {}  # of openpi's last answer

    async def greeting(self) -> bytes:
        query = self.connection.query_params
        self._options = ActOptions(
            session_id=self.session_id,
            statistics_key=read_name(query.get("statistics_key"), "statistics_key", self.limits),
            decoding=read_name(query.get("decoding"), "decoding", self.limits),
        )
        await self.service.scheduler.settled()
        return self.hello(self.service.info)

    def hello(self, info: ServerInfo) -> bytes:
        """Return the first message to the clients."""
        return greeting(info, self.session_id, self.service.version)

    async def answer(self, data: bytes, arrived_s: float) -> bytes | None:
        value = await self.unpacked(data)
        del data
        if looks_like_message(value):
            return await self._answer_vla_eval(read_message(value), arrived_s)
        return await self._answer_openpi(_fields(value), arrived_s)

    async def send_error(self, problem: Problem) -> None:
        """Tell an openpi client as its own server would: a text message, then close code 1011."""
        text = f"{problem.title}: {problem.detail}"
        await self.send({"type": "websocket.send", "text": text})

    def end_episode(self) -> None:
        """Forget what the policy remembers of this robot."""
        self.service.reset(self.session_id, self.caller)

    async def unpacked(self, data: bytes) -> object:
        """Return a message as values; bad ones count for the caller's rate, too."""
        try:
            return unpack(data, self.limits)
        except WireError:
            await self.service.admit(self.caller)
            raise

    async def act(
        self, read: ReadFrame, fields: Mapping[str, object], arrived_s: float
    ) -> ActionChunk:
        """Answer the observation that `read` finds in the fields of a message."""
        await self.service.admit(self.caller)
        work = partial(read, fields, self.read_context())
        message = await self.service.threads.run(work) if has_pictures(fields) else work()
        chain = self.service.settings.socket_image_chain
        message = await prepared(message, chain, self.service)
        return await self.service.act(
            message.observation, self._options, self.caller, arrived_s, is_peers=True
        )

    async def _answer_openpi(self, fields: Mapping[str, object], arrived_s: float) -> bytes:
        if _endpoint(fields) == "reset":
            self.end_episode()
            return _ENDED_EPISODE
        chunk = await self.act(openpi_request, fields, arrived_s)
        spent_ms = (time.monotonic() - arrived_s) * 1000
        timings = chunk.timings
        policy_ms = timings.total_ms - timings.queue_ms - timings.wire_ms
        result = {
            "actions": in_convention(chunk.actions, OPENPI, self.service.info),
            "policy_timing": {"infer_ms": policy_ms},
            "server_timing": {"infer_ms": spent_ms, **self._previous_timing},
        }
        self._previous_timing = {"prev_total_ms": (time.monotonic() - arrived_s) * 1000}
        return pack(result)

    async def _answer_vla_eval(self, message: Message, arrived_s: float) -> bytes | None:
        """Answer a message; what goes wrong with an observation does not end the connection."""
        self._stop_pings()  # its client answers none while it builds an environment
        if message.type in (MessageType.EPISODE_START, MessageType.EPISODE_END):
            self._plan.forget()
            self.end_episode()
        if message.type is not MessageType.OBSERVATION:
            return None
        payload: dict[str, object]
        try:
            action = self._plan.next_action(message, arrived_s)
            if action is None:
                chunk = await self.act(vla_eval_request, message.payload, arrived_s)
                actions = in_convention(chunk.actions, VLA_EVAL, self.service.info)
                action = self._plan.follow(actions)
            kind, payload = MessageType.ACTION, {"actions": action}
        except (WireError, PolicyError, ServerError) as error:
            detail = describe(error, self.connection).detail
            kind, payload = MessageType.ERROR, {"error": f"observation_failed: {detail}"}
        return Message(kind, payload, message.seq, time.time()).encode()


class _RealtimeSocket(_PeerSocket):
    """vLLM-Omni's clients: bare arrays for answers, sessions by name, errors that end nothing."""

    survives_errors = True
    _named_session: str | None = None

    def hello(self, info: ServerInfo) -> bytes:
        return realtime_metadata(info)

    async def answer(self, data: bytes, arrived_s: float) -> bytes:
        fields = _fields(await self.unpacked(data))
        del data
        endpoint = _endpoint(fields)
        session = read_name(fields.get("session_id"), "session_id", self.limits)
        if endpoint == "reset" or session != self._named_session:
            self.end_episode()
            self._named_session = session
        if endpoint == "reset":
            return _ENDED_EPISODE
        chunk = await self.act(openpi_request, fields, arrived_s)
        actions = in_convention(chunk.actions, REALTIME, self.service.info)
        return pack(actions.astype(np.float32))

    async def send_error(self, problem: Problem) -> None:
        text = f"{problem.title}: {problem.detail}"
        message = pack({"type": "error", "message": text})
        await self.send({"type": "websocket.send", "bytes": message})


def _endpoint(fields: Mapping[str, object]) -> str:
    """Return what a frame asks for; without a word about it, an action."""
    endpoint = fields.get("endpoint", "infer")
    if not isinstance(endpoint, str) or endpoint not in ("infer", "reset"):
        raise UnusableValueError("endpoint", f"must be infer or reset, got {brief(endpoint)}")
    return endpoint


def _fields(value: object) -> Mapping[str, object]:
    if not isinstance(value, dict):
        raise MalformedMessageError("frame", f"must be a map, got {brief(value)}")
    return value
