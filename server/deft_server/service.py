"""What every protocol is built on: answer a frame, reset a session, say what is served.

Knows nothing of HTTP, WebSockets or bytes. A protocol turns its messages into these calls and the
exceptions they raise (see `errors`) into its own way of saying so.
"""

import math
import time
from dataclasses import replace

from deft_client.types import ActionChunk, ActOptions, Observation, ServerInfo
from deft_policies.base import ActRequest, Policy
from deft_server import request_ids
from deft_server.access import Caller
from deft_server.errors import RefusedFrameError
from deft_server.events import EventBus, FinishedAction, SessionEnded
from deft_server.metrics import Metrics
from deft_server.policy_thread import LoadPolicy
from deft_server.readiness import Phase, Readiness
from deft_server.scheduler import Answered, Place, Scheduler
from deft_server.sessions import RobotSession, SessionStore, flow_of
from deft_server.settings import Settings


class Service:
    """The server without its protocols."""

    def __init__(self, load: LoadPolicy, settings: Settings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.events = EventBus()
        self.readiness = Readiness()
        self.sessions = SessionStore(settings.session_ttl_s, settings.max_sessions)
        self.scheduler = Scheduler(load, settings, self.readiness, self.metrics)
        self.metrics.sessions.set_function(lambda: len(self.sessions))
        self.metrics.ready.set_function(lambda: self.readiness.phase is Phase.READY)

    @property
    def policy(self) -> Policy:
        """The loaded policy, or `NotReadyError`."""
        self.readiness.require()
        policy = self.scheduler.policy
        assert policy is not None
        return policy

    @property
    def info(self) -> ServerInfo:
        """What is served, or `NotReadyError`."""
        return self.policy.info

    async def act(
        self,
        observation: Observation,
        options: ActOptions,
        caller: Caller,
        arrived_s: float | None = None,
    ) -> ActionChunk:
        """Answer one frame; `arrived_s` is when its last byte was here, on the monotonic clock.

        Raises `RequestError` for what the policy cannot do, `RefusedFrameError` for what it will
        not do now, and `UnsafeAnswerError` or `PolicyFailedError` where it fails. Cancelling the
        call gives up the frame's place in the line.
        """
        now_s = time.monotonic()
        started_s = now_s if arrived_s is None else arrived_s
        policy = self.policy
        policy.check(observation, options)
        session = self.sessions.open(caller.name, options.session_id, now_s, policy.open_session)
        request = ActRequest(observation, session.memory, self._policy_options(options))
        place = self._place(session, options, started_s)
        try:
            answered = await self.scheduler.answer(request, place)
        except RefusedFrameError as error:
            self.metrics.refused.labels(type(error).__name__).inc()
            self._publish(session, request, None, error)
            raise
        chunk = self._finish(answered, options, started_s, now_s)
        session.num_answers += 1
        session.last_action = chunk.actions[-1]
        self._publish(session, request, chunk, None, answered.batch_size)
        return chunk

    def reset(self, session_id: str, caller: Caller) -> bool:
        """End a session; its next frame starts an episode. Returns whether there was one."""
        self.scheduler.forget(flow_of(caller.name, session_id))
        existed = self.sessions.reset(caller.name, session_id)
        if self.events.has_listeners:
            self.events.publish(SessionEnded(caller.name, session_id))
        return existed

    def _policy_options(self, options: ActOptions) -> ActOptions:
        """Ask for a trace when somebody watches, even if the caller does not want one."""
        if self.events.has_listeners and not options.want_trace:
            return replace(options, want_trace=True)
        return options

    def _place(self, session: RobotSession, options: ActOptions, started_s: float) -> Place:
        deadline_ms = options.deadline_ms or self.settings.default_deadline_ms
        return Place(
            flow=session.flow,
            arrived_s=started_s,
            deadline_s=math.inf if deadline_ms is None else started_s + deadline_ms / 1000,
            is_session=session.session_id is not None,
            is_running=session.num_answers > 0,
        )

    def _finish(
        self, answered: Answered, options: ActOptions, started_s: float, decoded_s: float
    ) -> ActionChunk:
        chunk = answered.chunk
        total_s = time.monotonic() - started_s
        self.metrics.act_seconds.observe(total_s)
        self.metrics.queue_seconds.observe(answered.queue_s)
        timings = replace(
            chunk.timings,
            wire_ms=(decoded_s - started_s) * 1000,
            queue_ms=answered.queue_s * 1000,
            total_ms=total_s * 1000,
        )
        return ActionChunk(chunk.actions, timings, chunk.trace if options.want_trace else None)

    def _publish(
        self,
        session: RobotSession,
        request: ActRequest,
        chunk: ActionChunk | None,
        error: Exception | None,
        batch_size: int = 0,
    ) -> None:
        if not self.events.has_listeners:
            return
        self.events.publish(
            FinishedAction(
                caller=session.caller,
                session_id=session.session_id,
                step=session.num_answers,
                request_id=request_ids.current.get(),
                observation=request.observation,
                options=request.options,
                chunk=chunk,
                error=error,
                batch_size=batch_size,
            )
        )
