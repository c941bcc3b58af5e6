"""What every protocol is built on: answer a frame, reset a session, say what is served.

Knows nothing of HTTP, WebSockets or bytes. A protocol turns its messages into these calls and the
exceptions they raise (see `errors`) into its own way of saying so.
"""

import asyncio
import math
import time
from dataclasses import replace
from functools import partial
from importlib.metadata import version

from deft_client.types import (
    ActionChunk,
    ActOptions,
    Intervention,
    Observation,
    ServerInfo,
    altered,
)
from deft_policies.base import ActRequest
from deft_policies.errors import PolicyError, RequestError, UnusableObservationError
from deft_server.errors import DeadlineError, ServerError, UnsafeAnswerError
from deft_server.hosting.host import Elsewhere, HostedPolicy, LoadPolicy, NewHost, PolicyRecipe
from deft_server.hosting.process import PolicyProcess
from deft_server.hosting.thread import PolicyThread
from deft_server.serving.access import Access, Caller, current_request_id
from deft_server.serving.events import EventBus, FinishedAction, SessionEnded
from deft_server.serving.fair_threads import FairThreads
from deft_server.serving.held_bytes import HeldBytes
from deft_server.serving.metrics import Metrics
from deft_server.serving.pending import Answered
from deft_server.serving.readiness import Readiness, ServerPhase, Trouble
from deft_server.serving.safety import SafetyGuard
from deft_server.serving.scheduler import Scheduler
from deft_server.serving.sessions import RobotSession, SessionStore, flow_of
from deft_server.serving.waiting_frames import Ticket
from deft_server.settings import Fallback, Settings, SettingsError

LARGE_FRAME_BYTES = 1024 * 1024  # of its pictures, decoded; what is smaller counts as its message


class _InHand:
    """Counts what is between `with` and its end. One for all: it knows only how many."""

    def __init__(self) -> None:
        self.count = 0

    def __enter__(self) -> None:
        self.count += 1

    def __exit__(self, *_: object) -> None:
        self.count -= 1


class Service:
    """The server without its protocols."""

    def __init__(self, load: LoadPolicy | Elsewhere, settings: Settings) -> None:
        self.settings = settings
        self.version = version("deft-vla")
        self._versions = {"deft-vla": self.version, "deft-client": version("deft-client")}
        self.access = Access(
            settings.keys_file, settings.rate_per_s, settings.cors_origins, settings.allowed_hosts
        )
        self.metrics = Metrics()
        self.events = EventBus()
        self.threads = FairThreads()
        self.held = HeldBytes(settings.max_total_bytes)
        self.readiness = Readiness(settings.unready_after_failures)
        self.sessions = SessionStore(settings.session_ttl_s, settings.max_sessions)
        self.scheduler = Scheduler(
            _host_for(load, settings), settings, self.readiness, self.metrics
        )
        self.scheduler.on_loaded = self._prepare
        self._in_hand = _InHand()
        self._guard: SafetyGuard
        self.last_info: ServerInfo  # of the policy that is served, or was until it was lost
        self.metrics.sessions.set_function(lambda: len(self.sessions))
        self.metrics.in_hand.set_function(lambda: self.num_in_hand)
        self.metrics.ready.set_function(lambda: self.readiness.phase is ServerPhase.READY)

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

    @property
    def answers_at_once(self) -> bool:
        """Would a frame that is here now wait for nothing, neither policy nor decoding?"""
        return self.scheduler.answers_at_once and not self.threads.are_busy

    def in_hand(self) -> "_InHand":
        """Mark a request as in hand, from its first byte to its answer's last: stopping waits."""
        return self._in_hand

    @property
    def num_in_hand(self) -> int:
        """How many requests were begun and not answered."""
        return self._in_hand.count

    async def admit(self, caller: Caller) -> None:
        """Count a frame of a caller before anything is done about it, and wait for its turn.

        Every protocol calls this before it decodes a frame, so that bad frames count, too. Raises
        `OverloadedError` or `MissingKeyError`.
        """
        turn_s = self.access.admit_frame(caller, time.monotonic())
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

        Raises `RequestError` for what the policy cannot do, `RefusedFrameError` for what it will
        not do now, and `UnsafeAnswerError` or `PolicyFailedError` where it fails. Cancelling the
        call gives up the frame's place in the line.
        """
        now_s = time.monotonic()
        started_s = now_s if arrived_s is None else arrived_s
        policy = self.policy
        self._check_options(options)
        if not observation.instruction.strip():
            raise UnusableObservationError("instruction", "it is empty; say what is to be done")
        policy.check(observation, options)
        session = self.sessions.open(caller.name, options.session_id, now_s)
        self._guard.require_memory(session)
        request = ActRequest(observation, session.memory, self._asked(options))
        ticket = self._ticket(session, caller, options, started_s)
        num_bytes = _large_bytes(observation)
        try:
            if num_bytes:
                self.held.hold(num_bytes, caller.address)
            answered = await self._answer(request, session, ticket)
        except (ServerError, PolicyError) as error:
            self.metrics.unanswered.labels(type(error).__name__).inc()
            self._publish(session, request, error)
            raise
        finally:
            if num_bytes:
                self.held.release(num_bytes, caller.address)
        chunk = self._timed(answered, started_s, now_s)
        self._publish(session, request, chunk, answered.batch_size)
        session.sent(chunk.actions[-1])
        is_as_asked = options.want_trace or chunk.trace is None
        return chunk if is_as_asked else replace(chunk, trace=None)

    def reset(self, session_id: str, caller: Caller) -> bool:
        """End a session; its next frame starts an episode. Returns whether there was one."""
        self.scheduler.forget(flow_of(caller.name, session_id))
        existed = self.sessions.reset(caller.name, session_id)
        if self.events.has_listeners:
            self.events.publish(SessionEnded(caller.name, session_id))
        return existed

    def start(self) -> None:
        """Begin to load the policy; call on the event loop."""
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

    def reset_all(self) -> int:
        """End every session of every caller; returns how many there were."""
        ended = self.sessions.names()
        for caller, session_id in ended:
            self.reset(session_id, Caller(caller))
        return len(ended)

    def _prepare(self, policy: HostedPolicy) -> None:
        self._guard = SafetyGuard(policy, self.settings)
        versions = {**self._versions, **policy.info.versions}
        self.last_info = replace(policy.info, versions=versions)

    def _check_options(self, options: ActOptions) -> None:
        if self.settings.allow_options:
            return
        for name in ("decoding", "radius"):
            if getattr(options, name) is not None:
                raise RequestError(name, f"{name} is fixed by this server; leave it out")

    def _asked(self, options: ActOptions) -> ActOptions:
        """Ask for a trace when somebody watches, even if the caller does not want one."""
        if self.events.has_listeners and not options.want_trace:
            return replace(options, want_trace=True)
        return options

    def _ticket(
        self, session: RobotSession, caller: Caller, options: ActOptions, started_s: float
    ) -> Ticket:
        deadline_ms = options.deadline_ms or self.settings.default_deadline_ms
        is_session = session.session_id is not None
        return Ticket(
            number=self.scheduler.next_number(),
            flow=session.flow if is_session else f"{session.flow}@{caller.address}",
            arrived_s=started_s,
            deadline_s=math.inf if deadline_ms is None else started_s + deadline_ms / 1000,
            is_session=is_session,
            is_running=session.num_answers > 0,
            stays_until_s=started_s + caller.stays_s if caller.stays_s else None,
            owner=caller.owner,
        )

    async def _answer(self, request: ActRequest, session: RobotSession, ticket: Ticket) -> Answered:
        """Return an answer that is safe to execute, if need be the one that holds the robot."""
        settings, key = self.settings, request.options.statistics_key
        try:
            answered = await self.scheduler.answer(request, ticket, session)
            checked = self._guard.check(answered.chunk.actions, session, key)
        except DeadlineError as error:
            return self._hold(session, key, settings.on_deadline_miss, error)
        except UnsafeAnswerError as error:
            self.readiness.note(Trouble.ANSWERS, is_over=False)
            self.metrics.unsafe.inc()
            return self._hold(session, key, settings.on_unsafe_answer, error)
        self.readiness.note(Trouble.ANSWERS, is_over=True)
        if not checked.is_clamped:
            return answered
        self.metrics.interventions.labels(Intervention.CLAMP.value).inc()
        clamped = replace(answered.chunk, actions=checked.actions, intervention=Intervention.CLAMP)
        return answered._replace(chunk=clamped)

    def _hold(
        self, session: RobotSession, key: str | None, fallback: Fallback, error: ServerError
    ) -> Answered:
        actions = self._guard.hold(session, key) if fallback is Fallback.HOLD else None
        if actions is None:
            raise error
        self.metrics.interventions.labels(Intervention.HOLD.value).inc()
        return Answered(ActionChunk(actions, intervention=Intervention.HOLD), 0.0, 0)

    def _timed(self, answered: Answered, started_s: float, decoded_s: float) -> ActionChunk:
        """Return the answer with the server's own stages filled in, and count it soon."""
        total_s = time.monotonic() - started_s
        chunk = answered.chunk
        # Counted once the answer has been sent: traces are put into words when they are looked at.
        count = partial(self.metrics.observe_answer, chunk, answered.queue_s, total_s)
        asyncio.get_running_loop().call_soon(count)
        own = {
            "wire_ms": (decoded_s - started_s) * 1000,
            "queue_ms": answered.queue_s * 1000,
            "total_ms": total_s * 1000,
        }
        return altered(chunk, {"timings": altered(chunk.timings, own)})

    def _publish(
        self,
        session: RobotSession,
        request: ActRequest,
        outcome: ActionChunk | Exception,
        batch_size: int = 0,
    ) -> None:
        if not self.events.has_listeners:
            return
        self.events.publish(
            FinishedAction(
                caller=session.caller,
                session_id=session.session_id,
                step=session.num_answers,
                request_id=current_request_id.get(),
                observation=request.observation,
                options=request.options,
                chunk=outcome if isinstance(outcome, ActionChunk) else None,
                error=outcome if isinstance(outcome, Exception) else None,
                batch_size=batch_size,
            )
        )


def _host_for(load: LoadPolicy | Elsewhere, settings: Settings) -> NewHost:
    """Return what makes the place where the policy is to live."""
    if isinstance(load, Elsewhere):
        return load.new_host
    if not settings.policy_process:
        return partial(PolicyThread, load)
    if not isinstance(load, PolicyRecipe):
        raise SettingsError("policy_process needs a policy that is loaded by a PolicyRecipe")
    return partial(PolicyProcess, load, settings)


def _large_bytes(observation: Observation) -> int:
    """Return the bytes of a frame's pictures if they are many, else 0."""
    pictures = (observation.image, *observation.cameras.values())
    num_bytes = sum(picture.nbytes for picture in pictures)
    return num_bytes if num_bytes > LARGE_FRAME_BYTES else 0
