"""What every protocol is built on: answer a frame, reset a session, say what is served.

Knows nothing of HTTP, WebSockets or bytes. A protocol turns its messages into these calls and the
exceptions they raise (see `errors`) into its own way of saying so.
"""

import asyncio
import logging
import math
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray

from deft_core.methods import by_own_name
from deft_core.types import (
    ActionChunk,
    ActOptions,
    Intervention,
    Observation,
    ServerInfo,
    StageTimings,
)
from deft_policies.base import ActionLimits, OnActions
from deft_policies.errors import PolicyError, RequestError
from deft_server.errors import NotReadyError, ServerError, UnsafeAnswerError
from deft_server.serving.access import Access, Caller
from deft_server.serving.bounds import ConnectionBounds, DecodeThreads
from deft_server.serving.events import EventBus, FinishedAction, SessionEnded
from deft_server.serving.frame import QueuedFrame
from deft_server.serving.hosting import HostedPolicy, LoadPolicy, PolicyThread, RemotePolicy
from deft_server.serving.lifecycle import Readiness, ServerPhase
from deft_server.serving.metrics import Metrics
from deft_server.serving.scheduler import Scheduler
from deft_server.serving.sessions import SessionStore, flow_of
from deft_server.settings import OutOfRange, Settings

EXPIRE_EVERY_S = 1.0
MAX_WARNINGS = 1024  # callers and inputs that the log names once
# Actions are computed from the same statistics as the range; only rounding may set them apart.
ROUNDING = 1e-6

logger = logging.getLogger(__name__)


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
        self.sessions = SessionStore(
            settings.session_ttl_s, settings.max_sessions, self._publish_session_ended
        )
        self.scheduler = Scheduler(
            load.new_host if isinstance(load, RemotePolicy) else partial(PolicyThread, load),
            settings,
            self.readiness,
            self.metrics,
        )
        self.scheduler.on_loaded = self._prepare
        self._warned: set[tuple[str, str]] = set()  # callers and inputs that nobody looks at
        self._expiring: asyncio.TimerHandle | None = None
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
        if policy is None:
            raise NotReadyError(self.readiness.sentence)
        return policy

    @property
    def info(self) -> ServerInfo:
        """What is served, or `NotReadyError`."""
        self.readiness.require()
        return self.last_info

    async def admit(self, caller: Caller) -> None:
        """Count a frame against the rate of its caller's key, and wait until the rate allows it.

        The gate has checked who calls; this checks how often. Every protocol calls it before it
        decodes a frame, so that bad frames count, too. Raises `OverloadedError` where the wait
        would be too long, `MissingKeyError` where the key was removed meanwhile.
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
        on_actions: OnActions | None = None,
        is_peers: bool = False,
    ) -> ActionChunk:
        """Answer one admitted frame; `arrived_s`, monotonic, is when its last byte was here.

        `is_peers` says that it is of another project's client, which sends what it always sends.

        `on_actions` is called on the event loop with those that are final so far, where the policy
        tells of them; whatever it has not told is in the answer.

        Raises `RequestError` for what the policy cannot do, a `ServerError` for what it will
        not do now, and `UnsafeAnswerError` or `PolicyFailedError` where it fails. Cancelling the
        call gives up the frame's place in the line.
        """
        now_s = time.monotonic()
        if options.decoding is not None:
            own_name = by_own_name(options.decoding)
            options = replace(options, decoding=own_name)
        try:
            policy = self.policy
            self._check(observation, options, caller, is_peers)
            policy.check(observation, options)
        except (ServerError, PolicyError) as error:
            self.metrics.count_outcome(caller.name, error)
            raise
        frame = self._new_frame(observation, options, caller, now_s, arrived_s or now_s)
        if on_actions is not None:
            frame.on_actions = self._forward_checked(on_actions, policy, options)
        try:
            answer = await self.scheduler.submit(frame)
            safe = self._clamp_or_refuse(answer, frame.answered_by or policy, options)
        except (ServerError, PolicyError) as error:
            self.metrics.count_outcome(caller.name, error)
            self._publish(frame, error=error)
            raise
        note = self._note_on(observation.instruction, caller)
        chunk = replace(
            safe,
            timings=self._timings(answer, frame, now_s),
            notes=(note,) if note else answer.notes,
        )
        self._publish(frame, chunk)
        frame.session.num_answers += 1
        self.metrics.count_outcome(caller.name)
        return _without_unrequested(chunk, options)

    def reset(self, session_id: str, caller: Caller) -> bool:
        """End a session; its next frame starts an episode. Returns whether there was one."""
        self.scheduler.forget(flow_of(caller.name, session_id))
        return self.sessions.reset(caller.name, session_id)

    def start(self) -> None:
        """Begin to load the policy; call on the event loop."""
        self.threads.start()
        self.scheduler.start()
        self._expire_sessions()

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
        if self._expiring is not None:
            self._expiring.cancel()
        await self.scheduler.close()
        self.threads.stop()

    def reset_all(self) -> int:
        """End every session of every caller; returns how many there were."""
        ended = self.sessions.names()
        for caller, session_id in ended:
            self.reset(session_id, Caller(caller))
        return len(ended)

    def _expire_sessions(self) -> None:
        """End sessions by a clock, so that their memory and files wait for nobody's next frame."""
        self.sessions.expire(time.monotonic())
        loop = asyncio.get_running_loop()
        self._expiring = loop.call_later(EXPIRE_EVERY_S, self._expire_sessions)

    def _prepare(self, policy: HostedPolicy) -> None:
        versions = {**self._versions, **policy.info.versions}
        self.last_info = replace(policy.info, versions=versions)

    def _check(
        self, observation: Observation, options: ActOptions, caller: Caller, is_peers: bool
    ) -> None:
        """Refuse options that the settings fix, empty instructions, and ignored inputs."""
        for name in ("decoding", "radius"):
            if getattr(options, name) is not None and not self.settings.allow_options:
                raise RequestError(name, f"{name} is fixed by this server; leave it out")
        if not observation.instruction.strip():
            raise RequestError("instruction", "it is empty; say what is to be done")
        self._check_inputs(observation, caller, is_peers)

    def _check_inputs(self, observation: Observation, caller: Caller, is_peers: bool) -> None:
        """Refuse inputs that the policy ignores, or log once that it ignores them."""
        settings, known = self.settings, self.last_info.cameras
        for name, reason in self.last_info.ignored_inputs(observation).items():
            if settings.strict_inputs:
                raise RequestError(name, f"{reason}; leave it out")
            if name == "cameras" and known and not (is_peers or settings.ignore_cameras):
                raise RequestError(
                    name,
                    f"{reason}; it knows {', '.join(known)}. Leave the others out, or start the "
                    "server with --ignore-cameras",
                )
            self._warn_once(caller, name, reason)

    def _note_on(self, instruction: str, caller: Caller) -> str:
        """Return the note on an unknown instruction, or nothing; the log has it once per caller."""
        note = self.last_info.untrained(instruction)
        if note:
            self._warn_once(caller, "an unknown instruction", note)
        return note

    def _warn_once(self, caller: Caller, what: str, reason: str) -> None:
        key = (caller.owner, what)
        if key not in self._warned and len(self._warned) < MAX_WARNINGS:
            self._warned.add(key)
            logger.warning("frames of %s have %s: %s (said once)", *key, reason)

    def _policy_options(self, options: ActOptions) -> ActOptions:
        """Return the options for the policy: with trace and text if a listener wants them.

        Without the text where the policy would write it only for the listener.
        """
        if not self.events.wants_traces:
            return options
        wants_text = options.want_reasoning or not self.last_info.thinks_when_asked
        return replace(options, want_trace=True, want_reasoning=wants_text)

    def _new_frame(
        self,
        observation: Observation,
        options: ActOptions,
        caller: Caller,
        now_s: float,
        arrived_s: float,
    ) -> QueuedFrame:
        """Return the frame with its session, deadline, owner and kind."""
        session = self.sessions.open(caller.name, options.session_id, now_s)
        is_named = session.session_id is not None
        deadline_ms = options.deadline_ms or self.settings.default_deadline_ms
        policy_options = self._policy_options(options)
        info = self.last_info
        is_thinking = policy_options.want_reasoning or not info.thinks_when_asked
        return QueuedFrame(
            observation,
            policy_options,
            session,
            arrived_s,
            deadline_s=math.inf if deadline_ms is None else arrived_s + deadline_ms / 1000,
            flow=session.flow if is_named else f"{session.flow}@{caller.address}",
            owner=caller.owner,
            overfills_until_s=arrived_s + caller.overfills_s if caller.overfills_s else None,
            is_text=info.max_tokens is not None and is_thinking,
        )

    def _clamp_or_refuse(
        self, answer: ActionChunk, policy: HostedPolicy, options: ActOptions
    ) -> ActionChunk:
        """Return an answer that robots may execute, or raise `UnsafeAnswerError`."""
        try:
            actions = self._checked(answer.actions, policy, options)
        except UnsafeAnswerError:
            self.readiness.note("answers were unsafe", is_over=False)
            self.metrics.unsafe.inc()
            raise
        self.readiness.note("answers were unsafe", is_over=True)
        if answer.intervention is not None:  # the policy says so itself
            self.metrics.interventions.labels(answer.intervention.value).inc()
        if actions is answer.actions:
            return answer
        self.metrics.interventions.labels(Intervention.CLAMP.value).inc()
        return replace(
            answer, actions=actions, intervention=answer.intervention or Intervention.CLAMP
        )

    def _checked(
        self, actions: NDArray[np.float64], policy: HostedPolicy, options: ActOptions
    ) -> NDArray[np.float64]:
        limits = policy.limits_of(options.statistics_key)
        return checked_actions(actions, policy.info.action_dim, limits, self.settings.out_of_range)

    def _forward_checked(
        self, on_actions: OnActions, policy: HostedPolicy, options: ActOptions
    ) -> OnActions:
        """Wrap `on_actions` for the policy's thread: safe actions go to the event loop."""
        loop = asyncio.get_running_loop()

        def hand_on(actions: NDArray[np.float64]) -> None:
            # Of what is unsafe the whole answer tells; a loop that has ended has nobody to tell.
            with suppress(UnsafeAnswerError, RuntimeError):
                loop.call_soon_threadsafe(on_actions, self._checked(actions, policy, options))

        return hand_on

    def _timings(self, answer: ActionChunk, frame: QueuedFrame, decoded_s: float) -> StageTimings:
        """Return the timings with the server's stages, and count them once the answer is sent."""
        total_s = time.monotonic() - frame.arrived_s
        count = partial(self.metrics.observe_answer, answer, frame.queue_s, total_s)
        asyncio.get_running_loop().call_soon(count)
        stages = {
            "wire_ms": (decoded_s - frame.arrived_s) * 1000,
            "queue_ms": frame.queue_s * 1000,
            "total_ms": total_s * 1000,
        }
        return replace(answer.timings, **stages)

    def _publish_session_ended(self, caller: str, session_id: str) -> None:
        self.events.publish(SessionEnded(caller, session_id))

    def _publish(
        self, frame: QueuedFrame, chunk: ActionChunk | None = None, error: Exception | None = None
    ) -> None:
        if not self.events.has_listeners:
            return
        session = frame.session
        self.events.publish(
            FinishedAction(
                caller=session.caller,
                session_id=session.session_id,
                step=session.num_answers,
                observation=frame.observation,
                options=frame.options,
                chunk=chunk,
                error=error,
            )
        )


def _without_unrequested(chunk: ActionChunk, options: ActOptions) -> ActionChunk:
    """Clear trace, reasoning and notes that only a listener, such as the recorder, asked for."""
    return replace(
        chunk,
        trace=chunk.trace if options.want_trace else None,
        reasoning=chunk.reasoning if options.want_reasoning else None,
        notes=chunk.notes if options.want_notes else (),
    )


def checked_actions(
    actions: NDArray[np.float64],  # [step, action_dim]
    action_dim: int,
    limits: ActionLimits | None,
    out_of_range: OutOfRange,
) -> NDArray[np.float64]:
    """Return the actions that robots may execute; the same array if nothing was clamped.

    Raises `UnsafeAnswerError` if the shape is wrong, a value is not finite, or out of the policy's
    range. Limits on the change from one action to the next are the robot's, which
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
    if out_of_range == "passthrough":
        return actions
    return np.clip(actions, limits.low, limits.high)
