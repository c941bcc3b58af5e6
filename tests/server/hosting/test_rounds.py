"""A policy played round by round: who is in which round, who is cut, and who fails for whom."""

from collections.abc import Sequence

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deft_policies.base import ActAnswer, ActRequest
from deft_policies.errors import DeviceError, RequestError
from deft_policies.memory import SessionMemory
from deft_server.errors import PolicyFailedError
from deft_server.hosting.rounds import Rounds
from deft_server.serving.queue import ActBatch, Failure, FrameQueue, QueuedFrame, QueueRules
from tests.standins.policies import FakePolicy, SteppedFake, frame


def batch_of(instruction: str, memory: SessionMemory | None = None) -> ActBatch:
    asked = ActRequest(frame(instruction=instruction), memory or SessionMemory())
    return ActBatch((), requests=[asked])


def names(batches: Sequence[ActBatch]) -> list[str]:
    return [one.requests[0].observation.instruction for one in batches]


def test_each_leaves_when_it_is_done_and_others_join_in_between():
    policy = SteppedFake()
    rounds = Rounds(policy)
    long, short, late = batch_of("5 long"), batch_of("1 short"), batch_of("2 late")
    assert names(rounds.play([long, short])) == ["1 short"]
    assert names(rounds.play([])) == []
    assert names(rounds.play([late])) == []
    assert names(rounds.play([])) == ["2 late"]
    assert names(rounds.play([])) == ["5 long"]
    assert policy.rounds == [
        ["5 long", "1 short"], ["5 long"], ["5 long", "2 late"], ["5 long", "2 late"], ["5 long"],
    ]  # fmt: skip
    assert [one.size for one in (long, short, late)] == [2, 2, 2]
    assert rounds.num_running == 0
    assert all(isinstance(one.answers[0], ActAnswer) for one in (long, short, late))


def test_what_nobody_waits_for_is_cut_and_disturbs_no_other():
    policy = SteppedFake()
    rounds = Rounds(policy)
    kept, gone = batch_of("3 kept"), batch_of("9 gone")
    rounds.play([kept, gone])
    gone.deadline_s = 0.0
    assert rounds.play([]) == [gone]
    assert (gone.answers, gone.failures) == ([], [])
    assert rounds.play([]) == [kept]
    assert policy.rounds == [["3 kept", "9 gone"], ["3 kept"], ["3 kept"]]


def test_a_frame_that_the_policy_does_not_take_fails_alone():
    policy = SteppedFake()
    rounds = Rounds(policy)
    before, bad, good = batch_of("2 before"), batch_of("refuse"), batch_of("1 good")
    rounds.play([before])
    ended = rounds.play([bad, good])
    assert names(ended) == ["refuse", "1 good"]
    assert isinstance(bad.answers[0], RequestError)
    assert isinstance(good.answers[0], ActAnswer)
    assert rounds.play([]) == [before]
    assert isinstance(before.answers[0], ActAnswer)


@pytest.mark.parametrize(
    ("error", "failure"),
    [(DeviceError("no memory"), Failure.DEVICE), (ValueError("a bug"), Failure.RAISED)],
)
def test_where_a_round_fails_each_is_answered_once_more_alone(error, failure):
    policy = SteppedFake(error=lambda names: error if len(names) > 1 else None)
    rounds = Rounds(policy)
    both = [batch_of("2 a"), batch_of("2 b")]
    assert rounds.play(both) == both
    assert all(isinstance(one.answers[0], ActAnswer) for one in both)
    assert [one.failures for one in both] == [[failure], [failure]]
    assert policy.sizes == [1, 1]
    assert rounds.num_running == 0


def test_one_that_fails_alone_is_not_tried_again_and_what_is_over_neither():
    policy = SteppedFake(error=lambda names: ValueError("a bug"))
    rounds = Rounds(policy)
    alone = batch_of("2 alone")
    assert rounds.play([alone]) == [alone]
    assert isinstance(alone.answers[0], PolicyFailedError)
    assert policy.batches == []


def test_an_answer_that_means_nothing_fails_alone():
    class Broken(SteppedFake):
        def step(self):
            for one in self.left:
                if one.request.observation.instruction.endswith("broken"):
                    one.error = RequestError("instruction", "nothing came of it")
            return super().step()

    rounds = Rounds(Broken())
    broken, good = batch_of("3 broken"), batch_of("1 good")
    assert set(rounds.play([good, broken])) == {good, broken}
    assert broken.failures == [Failure.REQUEST]
    assert isinstance(good.answers[0], ActAnswer)


def test_a_policy_that_cannot_be_stepped_answers_in_one_round():
    policy = FakePolicy()
    rounds = Rounds(policy)
    batch = ActBatch((), requests=[ActRequest(frame()), ActRequest(frame())])
    assert rounds.play([batch]) == [batch]
    assert (policy.sizes, batch.size, rounds.num_running) == ([2], 2, 0)


PLACES = 3


class SteppedTraffic(RuleBasedStateMachine):
    """Frames of sessions join, are answered, hang up and run late, in any order.

    Whatever happens, each is answered once, for its own session and in its order, or cut because
    nobody waited for it any more; and a place is never empty while a frame could have it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy = SteppedFake()
        self.rounds = Rounds(self.policy)
        self.queue = FrameQueue(QueueRules(max_batch=PLACES, max_waiting=64))
        self.queue.is_stepped = True
        self.now_s = 100.0
        self.count = 0
        self.flying: list[ActBatch] = []
        self.joining: list[ActBatch] = []
        self.dropped: set[ActBatch] = set()
        self.memories: dict[str, SessionMemory] = {}

    @rule(flow=strategies.sampled_from("abcdef"), num_rounds=strategies.integers(1, 5))
    def send(self, flow: str, num_rounds: int) -> None:
        self.count += 1
        request = ActRequest(frame(instruction=f"{num_rounds} of {flow}"))
        self.queue.offer(QueuedFrame(self.count, flow, self.now_s, request=request), self.now_s)
        self.start()

    def start(self) -> None:
        while True:
            batch, _ = self.queue.next_batch(self.now_s)
            if batch is None:
                return
            (one,) = batch.frames
            assert one.request is not None
            memory = self.memories.get(one.flow, SessionMemory())
            batch.requests = [ActRequest(one.request.observation, memory)]
            self.flying.append(batch)
            self.joining.append(batch)

    @precondition(lambda self: self.flying)
    @rule(data=strategies.data())
    def give_up(self, data: strategies.DataObject) -> None:
        batch = data.draw(strategies.sampled_from(self.flying))
        batch.deadline_s = 0.0
        self.dropped.add(batch)

    @rule(step_s=strategies.floats(0.001, 0.05))
    def play(self, step_s: float) -> None:
        self.now_s += step_s
        joining, self.joining = self.joining, []
        for batch in self.rounds.play(joining):
            (one,) = batch.frames
            self.flying.remove(batch)
            self.queue.finish(batch, self.now_s, batch.service_s)
            assert batch.answers or batch in self.dropped
            assert not batch.failures
            for answer in batch.answers:
                assert isinstance(answer, ActAnswer)
                known = self.memories.get(one.flow, SessionMemory())
                assert answer.memory.num_steps == known.num_steps + 1
                self.memories[one.flow] = answer.memory
        self.start()

    @invariant()
    def every_place_is_taken_that_can_be(self) -> None:
        flows = {batch.frames[0].flow for batch in self.flying}
        assert len(flows) == len(self.flying) <= PLACES
        could_go = {one.flow for one in self.queue.frames} - flows
        assert not could_go or len(self.flying) == PLACES
        assert self.rounds.num_running == len(self.flying) - len(self.joining)
        assert len(self.policy.left) == self.rounds.num_running

    def teardown(self) -> None:
        for _ in range(6 * 12):
            self.play(0.01)
        assert not self.flying
        assert not len(self.queue)


TestSteppedTraffic = SteppedTraffic.TestCase
TestSteppedTraffic.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
