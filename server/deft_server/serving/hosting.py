"""Where a policy lives: the seam behind the scheduler, a policy's thread, and its rounds.

A thread of this process and replicas elsewhere are the same from here: frames go in, and come back
with their answers on the event loop. A policy keeps nothing of any robot, so it can be lost and
loaded again at any time. It is played round by round, so that a long answer blocks nobody; a bad
frame, or too little memory, does not spoil a round for the others.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Protocol

from deft_client.types import ActOptions, Observation, ServerInfo
from deft_policies.base import (
    ActAnswer,
    ActionLimits,
    ActRequest,
    LimitedPolicy,
    Policy,
    Running,
    SteppedPolicy,
)
from deft_policies.errors import DeviceError, PolicyError, RequestError
from deft_policies.model.statistics import find_statistics_key
from deft_server.errors import PolicyFailedError
from deft_server.serving.queue import Answer, Failure, QueuedFrame
from deft_server.settings import SettingsError

HURRIED_ROUNDS = 3  # in a row at most: answers without a deadline go on, too

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class HostedPolicy:
    """What a server knows of a policy, wherever it lives. Everything here is quick."""

    info: ServerInfo
    limits: dict[str, ActionLimits]  # by statistics key; empty where the policy tells none
    is_stepped: bool  # whether frames may join and leave it between rounds
    here: Policy | None = None  # the policy itself, where it lives in this process

    @staticmethod
    def of(policy: Policy) -> "HostedPolicy":
        """A policy of this process."""
        limits = {}
        if isinstance(policy, LimitedPolicy):
            limits = {key: policy.action_limits(key) for key in policy.info.statistics_keys}
        return HostedPolicy(policy.info, limits, isinstance(policy, SteppedPolicy), policy)

    def check(self, observation: Observation, options: ActOptions) -> None:
        """Raise `RequestError` for what is known beforehand to have no answer.

        Of a policy that lives elsewhere little is known; its replica checks the rest.
        """
        if self.here is None:
            self._key_of(options.statistics_key)
        else:
            self.here.check(observation, options)

    def limits_of(self, statistics_key: str | None) -> ActionLimits | None:
        """Return the range of actions under a key that `check` let pass, if the policy tells it."""
        return self.limits[self._key_of(statistics_key)] if self.limits else None

    def _key_of(self, statistics_key: str | None) -> str:
        wanted = self.info.default_statistics_key if statistics_key is None else statistics_key
        return find_statistics_key(self.info.statistics_keys, wanted)


class Listener(Protocol):
    """Who is told, on the event loop, what becomes of a policy and its frames."""

    @property
    def num_batches_waiting(self) -> float:
        """How many batches could be made of the frames that wait."""

    def policy_loaded(
        self, host: "PolicyHost", policy: HostedPolicy, num_replicas: int = 1
    ) -> None:
        """The policy is loaded and warm, and is there so many times; may come again."""

    def policy_broken(self, host: "PolicyHost", error: BaseException) -> None:
        """The policy could not be loaded or warmed up; trying again would not help."""

    def round_played(
        self, host: "PolicyHost", ended: Sequence[QueuedFrame], failures: Sequence[Failure]
    ) -> None:
        """These frames came back from the policy, and its calls that failed meanwhile."""


class PolicyHost(Protocol):
    """Where a policy lives. Called on the event loop, but for `stop`."""

    @property
    def last_round_s(self) -> float | None:
        """When the last round ended, monotonic; None where hangs are ended elsewhere."""

    def start(self) -> None:
        """Begin to load the policy and warm it; must not wait."""

    def submit(self, frames: Sequence[QueuedFrame]) -> None:
        """Have frames answered; no more are given at a time than the queue has places."""

    def stop(self, timeout_s: float) -> bool:
        """Finish what is in hand, for so long, and end; return whether the policy ended.

        Blocks. Nothing is told to the listener any more.
        """


NewHost = Callable[[Listener], PolicyHost]


@dataclass(frozen=True)
class RemotePolicy:
    """Stands for a policy that this process does not load: `new_host` knows where it lives."""

    new_host: NewHost


LoadPolicy = Callable[[], Policy]


def load_and_warm(load: LoadPolicy) -> Policy:
    """Load a policy and make it ready to answer."""
    policy = load()
    policy.warm_up()
    return policy


class PolicyThread:
    """Owns a policy. One that hangs can only be left behind."""

    def __init__(self, load: LoadPolicy, listener: Listener) -> None:
        self._load = load
        self._listener = listener
        self._loop = asyncio.get_running_loop()
        self.last_round_s = 0.0
        self._joining: SimpleQueue[Sequence[QueuedFrame] | None] = SimpleQueue()
        # A daemon, because a policy that hangs can only be left behind, never stopped.
        self._thread = Thread(target=self._run, name="policy", daemon=True)

    def start(self) -> None:
        """Begin to load."""
        self._thread.start()

    def submit(self, frames: Sequence[QueuedFrame]) -> None:
        """Have frames join before the next round; the listener hears of their answers."""
        self._joining.put(frames)

    def stop(self, timeout_s: float) -> bool:
        """End after the round in hand; a thread that does not is left behind."""
        self._joining.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            policy = load_and_warm(self._load)
        except (PolicyError, SettingsError) as error:
            self._report(partial(self._listener.policy_broken, self, error))
            return
        except (Exception, SystemExit) as error:
            logger.exception("the policy could not be loaded")
            self._report(partial(self._listener.policy_broken, self, error))
            return
        self._report(partial(self._listener.policy_loaded, self, HostedPolicy.of(policy)))
        self._serve(policy)

    def _serve(self, policy: Policy) -> None:
        rounds = Rounds(policy)
        while True:
            joining = [] if rounds.num_running else [self._joining.get()]
            while not self._joining.empty():
                joining.append(self._joining.get())
            if None in joining:
                return
            ended, failures = rounds.play([one for frames in joining for one in frames or ()])
            self.last_round_s = time.monotonic()
            if ended:
                self._report(partial(self._listener.round_played, self, ended, failures))

    def _report(self, tell: Callable[[], None]) -> None:
        try:
            self._loop.call_soon_threadsafe(tell)
        except RuntimeError:
            logger.debug("the event loop has ended; nobody is left to tell")


class Rounds:
    """Frames join and leave a policy between its rounds."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._stepped = policy if isinstance(policy, SteppedPolicy) else _OneCall(policy)
        self._running: dict[Running, QueuedFrame] = {}
        self._num_hurried = 0  # rounds in a row in which only the hurried ones went on

    @property
    def num_running(self) -> int:
        """How many answers are on their way."""
        return len(self._running)

    def play(self, joining: Sequence[QueuedFrame]) -> tuple[list[QueuedFrame], list[Failure]]:
        """Let frames join, play a round, and return what has ended: answered, or cut.

        Also returns why calls of the policy failed, if any did.
        """
        now_s = time.perf_counter()
        for frame in joining:
            frame.joined_s = now_s
        ended, failures = self._step(joining)
        now_s = time.perf_counter()
        for frame in ended:
            frame.service_s = now_s - frame.joined_s
        return ended, failures

    def _step(self, joining: Sequence[QueuedFrame]) -> tuple[list[QueuedFrame], list[Failure]]:
        touched, running, failures = list(joining), self._running, []
        try:
            if joining:
                started = self._stepped.start([_asked(frame) for frame in joining])
                running.update(zip(started, joining, strict=True))
            touched = list(running.values())
            ended = self._cut()
            for frame in running.values():
                frame.size = max(frame.size, len(running))
            if running:
                self._stepped.step(self._first())
        except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it is, callers are told
            for one in [one for one, frame in running.items() if frame in touched]:
                del running[one]
            told, failure = failure_of(error, len(touched))
            is_tried_again = len(touched) > 1 or failure is Failure.DEVICE
            again = self._answer_alone(touched, told) if is_tried_again else []
            lost: list[QueuedFrame] = []
            if set(again) - {Failure.REQUEST}:  # then nothing is on its way any more
                lost = list(running.values())
                for one in running:
                    self._stepped.cancel(one)
                running.clear()
                again += self._answer_alone(lost, told)
            for frame in touched:
                frame.outcome = frame.outcome or told
            return [*touched, *lost], [failure, *again]
        for one in [one for one in running if one.has_ended]:
            frame = running.pop(one)
            frame.outcome = one.answer
            if one.error is not None:
                frame.outcome, failure = failure_of(one.error, 1)
                failures.append(failure)
            ended.append(frame)
        return ended, failures

    def _first(self) -> list[Running]:
        """Actions with a deadline go on alone, but for every fourth round."""
        hurried = [one for one, frame in self._running.items()
                   if frame.has_deadline and not frame.is_text]  # fmt: skip
        if len(hurried) == len(self._running) or self._num_hurried == HURRIED_ROUNDS:
            hurried = []
        self._num_hurried = self._num_hurried + 1 if hurried else 0
        return hurried

    def _cut(self) -> list[QueuedFrame]:
        """Let go of what nobody waits for any more; it has no outcome."""
        now_s = time.monotonic()
        over = [one for one, frame in self._running.items() if frame.is_over(now_s)]
        for one in over:
            self._stepped.cancel(one)
        return [self._running.pop(one) for one in over]

    def _answer_alone(self, frames: Sequence[QueuedFrame], told: Exception) -> list[Failure]:
        """Answer each once more without the others, so that only the culprit fails."""
        failures = []
        for frame in frames:
            frame.outcome = told
            if not frame.is_over(time.monotonic()):
                frame.outcome, again = answer_one(self._policy, _asked(frame))
                failures += again
        return failures


class _OneCall:
    """Has a policy that answers a batch in one call answer all that has joined in one round."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._joined: list[Running] = []

    def start(self, batch: Sequence[ActRequest]) -> Sequence[Running]:
        started = [Running(one) for one in batch]
        self._joined += started
        return started

    def step(self, first: Collection[Running] = ()) -> Sequence[Running]:
        joined, self._joined = self._joined, []
        answers = _act(self._policy, [one.request for one in joined])
        for one, answer in zip(joined, answers, strict=True):
            one.answer = answer
        return joined

    def cancel(self, running: Running) -> None:
        self._joined = [one for one in self._joined if one is not running]


def _asked(frame: QueuedFrame) -> ActRequest:
    assert frame.request is not None
    return frame.request


def answer_one(policy: Policy, request: ActRequest) -> tuple[Answer, list[Failure]]:
    """Return the answer to a frame that is alone, or why there is none."""
    try:
        return _act(policy, [request])[0], []
    except (Exception, SystemExit) as error:  # noqa: BLE001  whatever it is, callers are told
        told, failure = failure_of(error, 1)
        return told, [failure]


def _act(policy: Policy, batch: Sequence[ActRequest]) -> Sequence[ActAnswer]:
    """Return the policy's answers; raises `PolicyFailedError` where they are not what was asked."""
    answers = policy.act(batch)
    strange = [type(one).__name__ for one in answers if not isinstance(one, ActAnswer)]
    if strange:
        raise PolicyFailedError(f"the policy answered with {strange[0]}; ActAnswer was expected")
    if len(answers) != len(batch):
        raise PolicyFailedError(f"{len(answers)} answers to {len(batch)} frames")
    return answers


def failure_of(error: BaseException, size: int) -> tuple[Exception, Failure]:
    """Return what callers are told where the policy raised on so many frames, and of what kind."""
    if isinstance(error, RequestError):
        return error, Failure.REQUEST
    if isinstance(error, DeviceError):
        logger.warning("the device gave up on a batch of %d: %s", size, error)
        return error, Failure.DEVICE
    logger.error("the policy raised on a batch of %d", size, exc_info=error)
    if isinstance(error, PolicyFailedError):
        return error, Failure.RAISED
    told = PolicyFailedError(f"the policy raised {type(error).__name__}")
    told.__cause__ = error
    return told, Failure.RAISED
