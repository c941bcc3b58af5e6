"""Replicas without Ray: what travels, what returns, and what happens when one is lost."""

import asyncio
import pickle
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from deft_core.types import ActOptions
from deft_policies.base import Policy, PolicyAnswer, PolicyRequest
from deft_policies.constant import ConstantPolicy
from deft_policies.errors import DeviceError, RequestError, UnknownStatisticsKeyError
from deft_policies.memory import SessionMemory
from deft_server.errors import (
    DeadlineError,
    NotReadyError,
    PolicyFailedError,
    UnsafeAnswerError,
)
from deft_server.replicas.front import (
    BACK_AFTER_ANSWERS,
    MAX_VERSIONS,
    ReplicaHangsError,
    ReplicaHost,
    ReplicaLostError,
)
from deft_server.replicas.ray_serve import replicas_wanted
from deft_server.replicas.replica import (
    BACKLOG_FRESH_S,
    Backlogs,
    FrontState,
    Replica,
    ReplicaAnswer,
)
from deft_server.serving.hosting import HostedPolicy, RemotePolicy
from deft_server.serving.lifecycle import ServerPhase
from deft_server.serving.service import Service
from deft_server.settings import Settings, SettingsError
from tests.standins.policies import (
    CALLER,
    FakePolicy,
    GatedPolicy,
    LimitedFake,
    RaisingPolicy,
    RowByRowPolicy,
    SteppedFake,
    dislikes,
    frame,
)


def replica_of(policy: Policy, version: str = "1", name: str = "0") -> Replica:
    return Replica(lambda: policy, version, name)


def request(memory: SessionMemory, instruction: str = "lift the cup") -> PolicyRequest:
    return PolicyRequest(frame(instruction=instruction), memory)


def travelled(replica: Replica, *requests: PolicyRequest) -> list[PolicyAnswer | Exception]:
    """Answer frames as a replica far away would: everything crosses as bytes."""
    state = FrontState("front", ("1",), 0)

    async def answers() -> list[ReplicaAnswer]:
        asked = pickle.loads(pickle.dumps(requests))
        return await asyncio.gather(*(replica.answer(one, state) for one in asked))

    returned = pickle.loads(pickle.dumps(asyncio.run(answers())))
    return [one.unpacked() for one in returned]


def number_of(answer: PolicyAnswer | Exception) -> float:
    assert isinstance(answer, PolicyAnswer)
    return float(answer.chunk.actions[0, 0])


def test_any_host_goes_on_where_another_stopped():
    replicas = [replica_of(FakePolicy(), name=str(number)) for number in range(3)]
    memory, counted = SessionMemory(), []
    for step in range(6):
        (answer,) = travelled(replicas[step % 3], request(memory))
        counted.append(number_of(answer))
        memory = answer.memory
    assert counted == [1, 2, 3, 4, 5, 6]
    both = travelled(replicas[0], request(SessionMemory()), request(memory))
    assert list(map(number_of, both)) == [1, 7]


@pytest.mark.parametrize(
    ("error", "known"),
    [
        (RequestError("instruction", "too odd"), RequestError),
        (DeviceError("no memory"), DeviceError),
        (ValueError("a bug"), PolicyFailedError),
    ],
)
def test_only_the_culprit_of_a_batch_fails(error, known):
    replica = replica_of(RaisingPolicy(error=dislikes("bad", error)))
    first, second = travelled(
        replica, request(SessionMemory()), request(SessionMemory(), instruction="bad")
    )
    assert number_of(first) == 1
    assert isinstance(second, known)


def test_a_refused_frame_names_its_field_and_leaves_others_alone():
    odd = PolicyRequest(frame(), options=ActOptions(decoding="nonsense"))
    first, second = travelled(replica_of(FakePolicy()), odd, request(SessionMemory()))
    assert isinstance(first, RequestError)
    assert first.field == "decoding"
    assert number_of(second) == 1


def test_the_server_knows_info_and_limits_without_the_policy():
    policy: HostedPolicy = pickle.loads(pickle.dumps(replica_of(LimitedFake()).facts))
    assert policy.here is None
    assert policy.info == ConstantPolicy().info
    limits = policy.limits_of(None)
    assert limits is not None
    assert limits.high.tolist() == [1.0] * 7
    assert replica_of(FakePolicy()).facts.limits_of(None) is None
    with pytest.raises(UnknownStatisticsKeyError):
        policy.check(frame(), ActOptions(statistics_key="elsewhere"))


@dataclass(eq=False)
class FakeCluster:
    """Hosts in this process; `events` makes calls of `answer` fail, one after the other."""

    replicas: list[Replica] = field(default_factory=lambda: [replica_of(FakePolicy())])
    events: list[Exception] = field(default_factory=list)
    on_connect: Callable[[], None] = lambda: None
    num_running: int = 1
    count_fails: int = 0
    num_answers: int = 0
    most_at_once: int = 0
    states: list[FrontState] = field(default_factory=list)
    gate: asyncio.Event | None = None
    looked_at: Replica | None = None  # the first, unless a test says otherwise
    _at_once: int = 0

    def connect(self) -> None:
        self.on_connect()

    async def look(self) -> tuple[str, HostedPolicy]:
        looked_at = self.looked_at or self.replicas[0]
        return looked_at.version, looked_at.facts

    async def answer(self, request: PolicyRequest, state: FrontState) -> ReplicaAnswer:
        request = pickle.loads(pickle.dumps(request))
        self.num_answers += 1
        self.states.append(state)
        self._at_once += 1
        self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            if self.gate is not None:
                await self.gate.wait()
            if self.events:
                raise self.events.pop(0)
            return await self.replicas[self.num_answers % len(self.replicas)].answer(request, state)
        finally:
            self._at_once -= 1

    def count(self) -> int:
        if self.count_fails:
            self.count_fails -= 1
            raise ConnectionError("no status just now")
        return self.num_running

    def close(self) -> None:
        """Nothing to let go of."""


async def serving(cluster: FakeCluster, max_batch: int = 1) -> Service:
    settings = Settings(max_batch=max_batch)
    service = Service(RemotePolicy(partial(ReplicaHost, cluster)), settings)
    service.start()
    await service.scheduler.settled()
    return service


async def ask(service: Service, session_id: str = "a") -> float:
    chunk = await service.act(frame(), ActOptions(session_id=session_id), CALLER)
    return float(chunk.actions[0, 0])


async def until(holds: Callable[[], bool]) -> None:
    for _ in range(2000):
        if holds():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never came to hold")


def test_frames_share_rounds_and_are_cut_at_their_deadlines():
    policy = SteppedFake()

    async def story() -> list[ReplicaAnswer]:
        replica = replica_of(policy)
        asked = [("4 long", 60.0), ("1 short", 60.0), ("900000 late", 0.5)]
        calls = [
            replica.answer(request(SessionMemory(), name), FrontState("front", ("1",), 0, left_s))
            for name, left_s in asked
        ]
        return await asyncio.gather(*calls)

    long, short, late = asyncio.run(story())
    assert policy.rounds[:2] == [["4 long", "1 short", "900000 late"], ["4 long", "900000 late"]]
    assert len(policy.rounds) < 900_000
    assert [number_of(one.unpacked()) for one in (long, short)] == [1, 1]
    assert isinstance(late.unpacked(), DeadlineError)
    assert (long.batch_size, short.batch_size) == (3, 3)


def test_a_stepped_replica_has_a_place_for_each_frame_of_a_batch():
    policy = SteppedFake(turnstile=threading.Semaphore(0))

    async def story() -> list[float]:
        service = await serving(FakeCluster([replica_of(policy)]), max_batch=2)
        options = [ActOptions(session_id=name) for name in "abc"]
        asked = [
            asyncio.create_task(service.act(frame(instruction=f"{rounds} rounds"), one, CALLER))
            for rounds, one in zip((200, 1, 1), options, strict=True)
        ]
        await until(lambda: len(service.scheduler.queue.admission.in_flight) == 2)
        assert policy.turnstile is not None
        while not (asked[1].done() and asked[2].done()):
            policy.turnstile.release()
            await asyncio.sleep(0.005)
        assert not asked[0].done()
        policy.turnstile.release(200)
        await asked[0]
        await service.close()
        return [float(one.result().actions[0, 0]) for one in asked]

    assert asyncio.run(story()) == [1, 1, 1]
    assert policy.rounds.count(["200 rounds", "1 rounds"]) == 2
    assert max(map(len, policy.rounds)) == 2


def test_a_replica_outlives_a_frame_that_is_given_up_as_it_ends():
    """Its caller goes in the very turn of the loop in which the round has ended."""
    policy = SteppedFake(turnstile=threading.Semaphore(0))

    async def story() -> float:
        replica, state = replica_of(policy), FrontState("front", ("1",), 0)
        given_up = asyncio.create_task(replica.answer(request(SessionMemory(), "1 rounds"), state))
        await until(lambda: replica.busy_since_s is not None)
        assert policy.turnstile is not None
        policy.turnstile.release(9)
        replica._thread.submit(lambda: None).result()  # the round has been played
        await asyncio.sleep(0)
        given_up.cancel()
        later = replica.answer(request(SessionMemory(), "1 rounds"), state)
        answer = (await asyncio.wait_for(later, 60.0)).unpacked()
        await until(lambda: replica.busy_since_s is None)
        return number_of(answer)

    assert asyncio.run(story()) == 1


def test_actions_of_a_replica_come_together():
    async def story() -> tuple[int, list[object]]:
        service, told = await serving(FakeCluster([replica_of(RowByRowPolicy())])), []
        shown = frame(instruction="8 rows")
        chunk = await service.act(shown, ActOptions(), CALLER, on_actions=told.append)
        await service.close()
        return len(chunk.actions), told

    assert asyncio.run(story()) == (8, [])


def test_a_session_goes_from_replica_to_replica():
    async def story() -> list[float]:
        service = await serving(FakeCluster([replica_of(FakePolicy()), replica_of(FakePolicy())]))
        counted = [await ask(service) for _ in range(4)]
        await service.close()
        return counted

    assert asyncio.run(story()) == [1, 2, 3, 4]


def test_a_batch_whose_replica_dies_is_answered_by_another():
    async def story() -> tuple[list[float], int]:
        cluster = FakeCluster()
        service = await serving(cluster)
        counted = [await ask(service)]
        cluster.events.append(ReplicaLostError("killed"))
        counted += [await ask(service), await ask(service)]
        await service.close()
        return counted, cluster.num_answers

    assert asyncio.run(story()) == ([1, 2, 3], 4)


def test_a_batch_lost_twice_leaves_the_session_as_before():
    async def story() -> float:
        cluster = FakeCluster()
        service = await serving(cluster)
        await ask(service)
        cluster.events += [ReplicaLostError("killed"), ReplicaLostError("killed")]
        with pytest.raises(NotReadyError, match="lost"):
            await ask(service)
        assert service.readiness.phase is ServerPhase.READY
        failures = service.metrics.policy_failures.labels("lost")
        assert failures._value.get() == 1
        counted = await ask(service)
        await service.close()
        return counted

    assert asyncio.run(story()) == 2


def test_no_frame_waits_for_ever_whatever_goes_wrong_on_its_way():
    """Once an error that the cluster did not foresee left the frame, and its session, waiting."""

    async def story() -> list[float]:
        cluster = FakeCluster(events=[ValueError("an odd reply"), ValueError("an odd reply")])
        service = await serving(cluster)
        with pytest.raises(NotReadyError, match="an odd reply"):
            await asyncio.wait_for(ask(service), 60.0)
        cluster.events.append(ValueError("an odd reply"))
        counted = [await asyncio.wait_for(ask(service), 60.0)]
        await service.close()
        return counted

    assert asyncio.run(story()) == [1]


def test_a_batch_that_hangs_is_not_sent_again():
    async def story() -> int:
        cluster = FakeCluster(events=[ReplicaHangsError("no answer")])
        service = await serving(cluster)
        with pytest.raises(NotReadyError):
            await ask(service)
        await service.close()
        return cluster.num_answers

    assert asyncio.run(story()) == 1


def test_each_replica_has_a_batch_and_a_session_is_in_one():
    async def story() -> int:
        cluster = FakeCluster(num_running=2)
        service = await serving(cluster)
        cluster.gate = asyncio.Event()
        asked = [asyncio.create_task(ask(service, name)) for name in ("a", "b", "c", "d")]
        await until(lambda: cluster.most_at_once == 2)
        cluster.gate.set()
        await asyncio.gather(*asked)
        await service.close()
        return cluster.most_at_once

    assert asyncio.run(story()) == 2


def test_a_replica_is_told_how_many_batches_wait():
    async def story() -> list[FrontState]:
        cluster = FakeCluster()
        service = await serving(cluster)
        cluster.gate = asyncio.Event()
        first = asyncio.create_task(ask(service, "a"))
        await until(lambda: cluster.most_at_once == 1)
        asked = [asyncio.create_task(ask(service, name)) for name in ("b", "c")]
        await until(lambda: service.scheduler.num_waiting == 2)
        cluster.gate.set()
        await asyncio.gather(first, *asked)
        await service.close()
        return cluster.states

    told = asyncio.run(story())
    assert [one.num_batches for one in told] == [0, 1, 0]
    assert len({one.front for one in told}) == 1


def test_waiting_batches_of_fronts_add_up():
    backlogs = Backlogs()
    backlogs.note(FrontState("a", ("1",), 4.0), now_s=0.0)
    backlogs.note(FrontState("a", ("1",), 2.0), now_s=1.0)
    backlogs.note(FrontState("b", ("1",), 3.0), now_s=1.0 + BACKLOG_FRESH_S - 0.1)
    assert backlogs.total(now_s=1.0 + BACKLOG_FRESH_S - 0.1) == 5.0
    assert backlogs.total(now_s=1.0 + BACKLOG_FRESH_S) == 3.0


@dataclass(frozen=True)
class Seen:
    """What Ray shows a scaling policy."""

    aggregated_metrics: dict[str, dict[str, float]]


@pytest.mark.parametrize(
    ("busy", "waiting", "wanted"),
    [([], {}, 0), ([1.0, 0.5], {"0": 0.0}, 2), ([1, 1], {"0": 6, "1": 6}, 10), ([1] * 4, {}, 5)],
)
def test_replicas_are_wanted_for_what_is_computed_and_what_waits(busy, waiting, wanted):
    told = {"busy": {str(place): share for place, share in enumerate(busy)}, "waiting": waiting}
    assert replicas_wanted(Seen(told)) == (wanted, {})


def test_without_a_replica_frames_are_refused_until_one_is_back():
    async def story() -> float:
        cluster = FakeCluster()
        service = await serving(cluster)
        cluster.num_running = 0
        await until(lambda: service.readiness.phase is ServerPhase.LOADING)
        with pytest.raises(NotReadyError, match="no replica"):
            await ask(service)
        cluster.num_running = 3
        await until(lambda: service.readiness.phase is ServerPhase.READY)
        counted = await ask(service)
        await service.close()
        return counted

    assert asyncio.run(story()) == 1


def test_a_count_that_fails_once_does_not_end_the_watching(caplog):
    async def story() -> float:
        flags = ", ".join(f"('flag_{number}', 'value')" for number in range(60))
        cluster = FakeCluster([replica_of(FakePolicy(), f"1 [{flags}]")])
        service = await serving(cluster)
        cluster.count_fails, cluster.num_running = 1, 0
        await until(lambda: service.readiness.phase is ServerPhase.LOADING)
        cluster.num_running = 1
        await until(lambda: service.readiness.phase is ServerPhase.READY)
        counted = await ask(service)
        await service.close()
        return counted

    caplog.set_level("INFO")
    assert asyncio.run(story()) == 1
    assert "could not be counted" in caplog.text
    assert "Traceback" not in caplog.text
    assert max(map(len, caplog.messages)) < 200


def test_a_new_version_is_guarded_by_its_own_limits():
    async def story() -> HostedPolicy:
        cluster = FakeCluster([replica_of(FakePolicy())])
        service = await serving(cluster)
        await ask(service)
        cluster.replicas = [replica_of(LimitedFake(next_actions=np.full((1, 7), 0.5)), "2")]
        await ask(service)
        policy = service.policy
        await service.close()
        return policy

    assert asyncio.run(story()).limits


def test_replicas_that_do_not_start_end_the_server_with_the_reason():
    def refuse() -> None:
        raise SettingsError("no cluster there")

    async def story() -> str:
        service = await serving(FakeCluster(on_connect=refuse))
        sentence = service.readiness.sentence
        await service.close()
        return sentence

    assert asyncio.run(story()).endswith("no cluster there")


@dataclass(eq=False)
class GatedLimited(GatedPolicy, LimitedFake):
    """Stays inside `act` until the test opens the gate, and has limits."""


def test_an_answer_is_judged_by_the_limits_of_the_version_that_gave_it():
    """An old replica's answer that came after the front knew the new one was 'unsafe'."""

    async def story() -> list[float]:
        old = GatedLimited(next_actions=np.full((1, 7), 0.5))
        new = LimitedFake(next_actions=np.full((1, 7), 0.05), limit=0.1)
        cluster = FakeCluster([replica_of(new, "2"), replica_of(old)], num_running=2)
        cluster.looked_at = cluster.replicas[1]
        service = await serving(cluster)
        before = asyncio.create_task(ask(service, "a"))
        await asyncio.to_thread(old.entered.wait)
        after = await ask(service, "b")
        limits = service.policy.limits_of(None)
        assert limits is not None
        assert limits.high[0] == new.limit
        old.gate.set()
        both = [await before, after]
        await service.close()
        return both

    assert asyncio.run(story()) == [0.5, 0.05]


def test_an_answer_beyond_the_limits_of_its_own_version_is_withheld():
    async def story() -> None:
        bad = LimitedFake(next_actions=np.full((1, 7), 0.5), limit=0.1)
        cluster = FakeCluster([replica_of(LimitedFake()), replica_of(bad, "2")])
        service = await serving(cluster)
        with pytest.raises(UnsafeAnswerError):
            await ask(service)
        assert await ask(service) == 0
        with pytest.raises(UnsafeAnswerError):
            await ask(service)
        await service.close()

    asyncio.run(story())


def test_two_versions_that_take_turns_are_loaded_once_each(caplog):
    async def story() -> list[bool]:
        limited = replica_of(LimitedFake(next_actions=np.full((1, 7), 0.5)), "2")
        cluster = FakeCluster([replica_of(FakePolicy()), limited])
        service = await serving(cluster)
        seen = []
        for _ in range(8):
            await ask(service)
            seen.append(bool(service.policy.limits))
        await service.close()
        return seen

    caplog.set_level("INFO")
    assert asyncio.run(story()) == [True] * 8
    assert sum("ready: policy" in one for one in caplog.messages) == 2


def test_a_version_that_is_deployed_again_is_what_the_server_says_it_has():
    async def story() -> list[bool]:
        old, new = replica_of(FakePolicy()), replica_of(LimitedFake(), "2")
        cluster = FakeCluster([old])
        service = await serving(cluster)
        cluster.replicas = [new]
        await ask(service)
        cluster.replicas = [old]
        seen = []
        for _ in range(BACK_AFTER_ANSWERS):
            await ask(service)
            seen.append(bool(service.policy.limits))
        await service.close()
        return seen

    assert asyncio.run(story()) == [True] * (BACK_AFTER_ANSWERS - 1) + [False]


def test_many_versions_are_not_all_remembered():
    async def story() -> int:
        cluster = FakeCluster()
        service = await serving(cluster)
        for version in range(3 * MAX_VERSIONS):
            cluster.replicas = [replica_of(FakePolicy(), f"v{version}")]
            await ask(service)
        host = service.scheduler._host
        await service.close()
        assert isinstance(host, ReplicaHost)
        return len(host._policies)

    assert asyncio.run(story()) == MAX_VERSIONS


def test_a_callers_hang_up_reaches_the_replica_and_frees_its_place():
    """Once a text was written to its end for nobody, and kept its place."""
    policy = SteppedFake(turnstile=threading.Semaphore(0))

    async def story() -> float:
        replica = replica_of(policy)
        service = await serving(FakeCluster([replica]), max_batch=1)
        options = ActOptions(session_id="gone")
        shown = frame(instruction="900000 rounds")
        gone = asyncio.create_task(service.act(shown, options, CALLER))
        await until(lambda: replica.num_frames == 1)
        gone.cancel()
        await until(lambda: not service.scheduler.queue.admission.in_flight)
        await until(lambda: replica.num_frames == 0)
        assert policy.turnstile is not None
        policy.turnstile.release(5)
        shown, options = frame(instruction="1 rounds"), ActOptions(session_id="stays")
        chunk = await asyncio.wait_for(service.act(shown, options, CALLER), 60.0)
        await service.close()
        return float(chunk.actions[0, 0])

    assert asyncio.run(story()) == 1
    assert len(policy.rounds) < 900_000


def test_a_hang_up_before_the_frame_was_sent_frees_its_place_too():
    async def story() -> int:
        cluster = FakeCluster()
        service = await serving(cluster)
        calls = [asyncio.create_task(ask(service, name)) for name in "abc"]
        await asyncio.sleep(0)  # the frames are in the queue
        await asyncio.sleep(0)  # one has its place and is about to be sent
        for call in calls:
            call.cancel()
        await until(lambda: not service.scheduler.queue.admission.in_flight)
        await ask(service, "d")
        await service.close()
        return len(service.scheduler.queue.admission.in_flight)

    assert asyncio.run(story()) == 0
