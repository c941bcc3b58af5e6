"""What every protocol is built on: answer a frame, reset a session, say what is served.

Knows nothing of HTTP, WebSockets or bytes. A protocol turns its messages into these calls and the
exceptions they raise (see `errors`) into its own way of saying so.
"""

import asyncio
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from deft_client.types import (
    ActionChunk,
    ActOptions,
    Intervention,
    Observation,
    ServerInfo,
    altered,
)
from deft_policies.base import ActionLimits, ActRequest
from deft_policies.errors import PolicyError, RequestError
from deft_server.errors import ServerError, UnsafeAnswerError
from deft_server.serving.access import Access, Caller
from deft_server.serving.bounds import ConnectionBounds, DecodeThreads
from deft_server.serving.hosting import HostedPolicy, LoadPolicy, PolicyThread, RemotePolicy
from deft_server.serving.metrics import Metrics
from deft_server.serving.queue import QueuedFrame
from deft_server.serving.scheduler import Readiness, Scheduler, ServerPhase
from deft_server.serving.sessions import RobotSession, SessionStore, flow_of
from deft_server.settings import ActionRange, Settings

LARGE_FRAME_BYTES = 1024 * 1024  # of its pictures, decoded; what is smaller counts as its message


logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class FinishedAction:
    """One frame and what became of it: an answer, or the error its caller was told of."""

    caller: str
    session_id: str | None
    step: int  # answers of this session before this one
    observation: Observation
    options: ActOptions
    chunk: ActionChunk | None
    error: Exception | None = None


@dataclass(frozen=True)
class SessionEnded:
    """A session was reset or forgotten: the next frame under its id is another episode."""

    caller: str
    session_id: str


Event = FinishedAction | SessionEnded
Listen = Callable[[Event], None]


_MOST_WARNED = 1024  # callers that the log says something of once


class EventBus:
    """Tells whoever listens of every finished action; costs nothing when nobody does.

    Recording and the dashboard listen. A listener runs on the event loop and must be quick.
    """

    def __init__(self) -> None:
        self._listeners: tuple[Listen, ...] = ()

    @property
    def has_listeners(self) -> bool:
        """Is it worth building an event?"""
        return bool(self._listeners)

    def listen(self, listener: Listen) -> Callable[[], None]:
        """Call `listener` with every event until the returned function is called."""
        self._listeners = (*self._listeners, listener)

        def stop() -> None:
            self._listeners = tuple(one for one in self._listeners if one is not listener)

        return stop

    def publish(self, event: Event) -> None:
        """Tell every listener; one that raises does not disturb the others, nor the robot."""
        for listener in self._listeners:
            try:
                listener(event)
            except Exception:
                logger.exception("a listener failed on %s", type(event).__name__)


class Service:
    """The server without its protocols."""

    def __init__(self, load: LoadPolicy | RemotePolicy, settings: Settings) -> None:
        self.settings = settings
        self.version = version("deft-vla")
        self._versions = {"deft-vla": self.version, "deft-client": version("deft-client")}
        self.access = Access(
            settings.keys_file, settings.rate_per_s, settings.cors_origins, settings.allowed_hosts
        )
        self.metrics = Metrics()
        self.events = EventBus()
        self.threads = DecodeThreads()
        self.bounds = ConnectionBounds(settings)
        self.readiness = Readiness(settings.unready_after_failures)
        self.sessions = SessionStore(settings.session_ttl_s, settings.max_sessions, self._tell_end)
        self.scheduler = Scheduler(
            load.new_host if isinstance(load, RemotePolicy) else partial(PolicyThread, load),
            settings,
            self.readiness,
            self.metrics,
        )
        self.scheduler.on_loaded = self._prepare
        self._warned: set[tuple[str, str]] = set()  # callers and inputs that nobody looks at
        self.num_in_hand = 0  # requests that were begun and not answered: stopping waits for them
        self.last_info: ServerInfo  # of the policy that is served, or was until it was lost
        self.metrics.sessions.set_function(lambda: len(self.sessions))
        self.metrics.in_hand.set_function(lambda: self.num_in_hand)
        self.metrics.ready.set_function(lambda: self.readiness.phase is ServerPhase.READY)
        self.metrics.keys_usable.set_function(self.access.has_usable_keys)

    @property
    def policy(self) -> HostedPolicy:
        """The loaded policy, or `NotReadyError`."""
        self.readiness.require()
        policy = self.scheduler.policy
        assert policy is not None
        return policy

    @property
    def info(self) -> ServerInfo:
        """What is served, or `NotReadyError`."""
        self.readiness.require()
        return self.last_info

    async def admit(self, caller: Caller) -> None:
        """Count a frame of a caller before anything is done about it, and wait for its turn.

        Every protocol calls this before it decodes a frame, so that bad frames count, too. Raises
        `OverloadedError` or `MissingKeyError`.
        """
        try:
            turn_s = self.access.admit_frame(caller, time.monotonic())
        except ServerError as error:
            self.metrics.count_outcome(caller.name, error)
            raise
        if turn_s:
            await asyncio.sleep(turn_s)

    async def act(
        self,
        observation: Observation,
        options: ActOptions,
        caller: Caller,
        arrived_s: float | None = None,
    ) -> ActionChunk:
        """Answer one admitted frame; `arrived_s`, monotonic, is when its last byte was here.

        Raises `RequestError` for what the policy cannot do, a `ServerError` for what it will
        not do now, and `UnsafeAnswerError` or `PolicyFailedError` where it fails. Cancelling the
        call gives up the frame's place in the line.
        """
        now_s = time.monotonic()
        started_s = now_s if arrived_s is None else arrived_s
        try:
            policy = self.policy
            self._check_options(options)
            if not observation.instruction.strip():
                raise RequestError("instruction", "it is empty; say what is to be done")
            self._check_inputs(observation, caller)
            policy.check(observation, options)
        except (ServerError, PolicyError) as error:
            self.metrics.count_outcome(caller.name, error)
            raise
        session = self.sessions.open(caller.name, options.session_id, now_s)
        request = ActRequest(observation, session.memory, self._asked(options))
        frame = self._queued(request, session, caller, started_s)
        num_bytes = _large_bytes(observation)
        try:
            if num_bytes:
                self.bounds.held.hold(num_bytes, caller.address)
            chunk = await self.scheduler.answer(frame)
            # Replicas may have another policy by now, and the answer is then that one's.
            chunk = self._checked(chunk, self.scheduler.policy or policy, options.statistics_key)
        except (ServerError, PolicyError) as error:
            self.metrics.count_outcome(caller.name, error)
            self._publish(frame, error)
            raise
        finally:
            if num_bytes:
                self.bounds.held.release(num_bytes, caller.address)
        chunk = self._timed(chunk, frame, now_s)
        self._publish(frame, chunk)
        session.num_answers += 1
        self.metrics.count_outcome(caller.name)
        unwanted = {} if options.want_trace else {"trace": None}
        if not options.want_reasoning:
            unwanted["reasoning"] = None
        return altered(chunk, unwanted)

    def reset(self, session_id: str, caller: Caller) -> bool:
        """End a session; its next frame starts an episode. Returns whether there was one."""
        self.scheduler.forget(flow_of(caller.name, session_id))
        return self.sessions.reset(caller.name, session_id)

    def start(self) -> None:
        """Begin to load the policy; call on the event loop."""
        self.threads.start()
        self.scheduler.start()

    async def drain(self, timeout_s: float) -> bool:
        """Take no more frames and finish those in hand; return whether all were finished."""
        self.readiness.enter(ServerPhase.DRAINING)
        until_s = time.monotonic() + timeout_s
        while self.num_in_hand and time.monotonic() < until_s:
            await asyncio.sleep(0.005)
        return self.num_in_hand == 0

    async def close(self) -> None:
        """Refuse what is left and end the threads."""
        self.readiness.enter(ServerPhase.DRAINING)
        await self.scheduler.close()
        self.threads.stop()

    def reset_all(self) -> int:
        """End every session of every caller; returns how many there were."""
        ended = self.sessions.names()
        for caller, session_id in ended:
            self.reset(session_id, Caller(caller))
        return len(ended)

    def _prepare(self, policy: HostedPolicy) -> None:
        versions = {**self._versions, **policy.info.versions}
        self.last_info = replace(policy.info, versions=versions)

    def _check_options(self, options: ActOptions) -> None:
        if self.settings.allow_options:
            return
        for name in ("decoding", "radius"):
            if getattr(options, name) is not None:
                raise RequestError(name, f"{name} is fixed by this server; leave it out")

    def _check_inputs(self, observation: Observation, caller: Caller) -> None:
        """Refuse what the policy does not look at, or say in the log that it is not looked at."""
        for name, reason in self.last_info.unread(observation).items():
            if self.settings.strict_inputs:
                raise RequestError(name, f"{reason}; leave it out")
            known = (caller.name or caller.address, name)
            if known not in self._warned and len(self._warned) < _MOST_WARNED:
                self._warned.add(known)
                logger.warning(
                    "frames of %s have %s: %s (said once)", known[0] or "a caller", name, reason
                )

    def _asked(self, options: ActOptions) -> ActOptions:
        """Ask for trace and text when somebody watches, even if the caller wants neither.

        Not for the text where the policy would not write it otherwise.
        """
        if not self.events.has_listeners:
            return options
        wants_text = options.want_reasoning or not self.last_info.thinks_when_asked
        return altered(options, {"want_trace": True, "want_reasoning": wants_text})

    def _is_text(self, options: ActOptions) -> bool:
        """Whether an answer takes many rounds, because the policy writes before it acts."""
        info = self.last_info
        return info.max_tokens is not None and (
            options.want_reasoning or not info.thinks_when_asked
        )

    def _queued(
        self, request: ActRequest, session: RobotSession, caller: Caller, started_s: float
    ) -> QueuedFrame:
        deadline_ms = request.options.deadline_ms or self.settings.default_deadline_ms
        is_session = session.session_id is not None
        return QueuedFrame(
            number=self.scheduler.next_number(),
            flow=session.flow if is_session else f"{session.flow}@{caller.address}",
            arrived_s=started_s,
            deadline_s=math.inf if deadline_ms is None else started_s + deadline_ms / 1000,
            is_session=is_session,
            stays_until_s=started_s + caller.stays_s if caller.stays_s else None,
            owner=caller.owner,
            is_text=self._is_text(request.options),
            request=request,
            session=session,
        )

    def _checked(
        self, chunk: ActionChunk, policy: HostedPolicy, statistics_key: str | None
    ) -> ActionChunk:
        """Return an answer that is safe to execute, or raise `UnsafeAnswerError`."""
        try:
            limits = policy.limits_of(statistics_key)
            actions = checked_actions(
                chunk.actions, policy.info.action_dim, limits, self.settings.range
            )
        except UnsafeAnswerError:
            self.readiness.note("answers were unsafe", is_over=False)
            self.metrics.unsafe.inc()
            raise
        self.readiness.note("answers were unsafe", is_over=True)
        if actions is chunk.actions:
            return chunk
        self.metrics.interventions.labels(Intervention.CLAMP.value).inc()
        return replace(chunk, actions=actions, intervention=Intervention.CLAMP)

    def _timed(self, chunk: ActionChunk, frame: QueuedFrame, decoded_s: float) -> ActionChunk:
        """Return the answer with the server's own stages filled in, and count it soon."""
        total_s = time.monotonic() - frame.arrived_s
        # Counted once the answer has been sent: traces are put into words when they are looked at.
        count = partial(self.metrics.observe_answer, chunk, frame.queue_s, total_s)
        asyncio.get_running_loop().call_soon(count)
        own = {
            "wire_ms": (decoded_s - frame.arrived_s) * 1000,
            "queue_ms": frame.queue_s * 1000,
            "total_ms": total_s * 1000,
        }
        return altered(chunk, {"timings": altered(chunk.timings, own)})

    def _tell_end(self, caller: str, session_id: str) -> None:
        if self.events.has_listeners:
            self.events.publish(SessionEnded(caller, session_id))

    def _publish(self, frame: QueuedFrame, outcome: ActionChunk | Exception) -> None:
        if not self.events.has_listeners:
            return
        assert frame.session is not None
        assert frame.request is not None
        self.events.publish(
            FinishedAction(
                caller=frame.session.caller,
                session_id=frame.session.session_id,
                step=frame.session.num_answers,
                observation=frame.request.observation,
                options=frame.request.options,
                chunk=outcome if isinstance(outcome, ActionChunk) else None,
                error=outcome if isinstance(outcome, Exception) else None,
            )
        )


def _large_bytes(observation: Observation) -> int:
    """Return the bytes of a frame's pictures if they are many, else 0."""
    pictures = (observation.image, *observation.cameras.values())
    num_bytes = sum(picture.nbytes for picture in pictures)
    return num_bytes if num_bytes > LARGE_FRAME_BYTES else 0


# Actions are computed from the same statistics as the range; only rounding may set them apart.
ROUNDING = 1e-6


def checked_actions(
    actions: NDArray[np.float64],  # [step, action_dim]
    action_dim: int,
    limits: ActionLimits | None,
    beyond: ActionRange,
) -> NDArray[np.float64]:
    """Return what robots may execute of a policy's answer, the same array if nothing was clamped.

    Finite, of the right shape, in the range that the policy says; raises `UnsafeAnswerError` for
    what no robot should do. Limits on the change from one action to the next are the robot's, which
    alone knows what was executed.
    """
    if actions.shape[0] < 1 or actions.shape[1] != action_dim:
        raise UnsafeAnswerError(
            f"the policy's answer has shape {list(actions.shape)}, not [steps, {action_dim}]; it "
            "was withheld"
        )
    if not all(map(math.isfinite, actions.ravel().tolist())):  # quicker than numpy for so few
        raise UnsafeAnswerError("the policy's answer holds NaN or infinity; it was withheld")
    if limits is None:
        return actions
    slack = ROUNDING * (limits.high - limits.low)
    outside = (actions < limits.low - slack) | (actions > limits.high + slack)
    if not outside.any():
        return actions
    if not limits.may_exceed:
        step, dimension = np.argwhere(outside)[0]
        raise UnsafeAnswerError(
            f"the policy's answer has {actions[step, dimension]:.6g} in dimension {dimension} "
            f"of step {step}; the statistics allow {limits.low[dimension]:.6g} to "
            f"{limits.high[dimension]:.6g}; it was withheld"
        )
    return actions if beyond == "peer" else np.clip(actions, limits.low, limits.high)
