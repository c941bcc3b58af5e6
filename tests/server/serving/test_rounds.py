"""A policy played round by round: who is in which round, who is cut, and who fails for whom."""

import time
from collections.abc import Sequence

import pytest
from hypothesis import settings, strategies
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from deft_core.types import ActOptions
from deft_policies.base import Policy, PolicyAnswer
from deft_policies.errors import DeviceError, RequestError
from deft_policies.memory import SessionMemory
from deft_server.errors import PolicyFailedError
from deft_server.serving.frame import FailedCall, Failure, QueuedFrame
from deft_server.serving.queue import FrameQueue
from deft_server.serving.rounds import Rounds
from deft_server.serving.sessions import RobotSession
from tests.standins.policies import (
    FakePolicy,
    PickyPolicy,
    RaisingPolicy,
    SteppedFake,
    dislikes,
    fails_times,
    frame,
    out_of_memory_above,
)

pytestmark = pytest.mark.promise


def asked(instruction: str, session: RobotSession | None = None) -> QueuedFrame:
    session = session or new_session()
    return QueuedFrame(
        frame(instruction=instruction), ActOptions(), session, 0.0, flow=session.flow
    )


def new_session(name: str = "a", num_steps: int = 0) -> RobotSession:
    return RobotSession("caller", name, 0.0, SessionMemory(num_steps=num_steps))


def played(rounds: Rounds, *joining: QueuedFrame) -> list[QueuedFrame]:
    ended, failures = rounds.play(joining)
    assert not failures
    return ended


def played_out(rounds: Rounds, *joining: QueuedFrame) -> tuple[list[QueuedFrame], list[Failure]]:
    """Let frames join and play until nothing is left: who has ended, and what failed."""
    ended, calls = rounds.play(joining)
    while rounds.num_running:
        more, failed = rounds.play(())
        ended, calls = ended + more, calls + failed
    return ended, [one.kind for one in calls]


def names(frames: Sequence[QueuedFrame]) -> list[str]:
    return [one.observation.instruction for one in frames]


def test_each_leaves_when_it_is_done_and_others_join_in_between():
    policy = SteppedFake()
    rounds = Rounds(policy)
    long, short, late = asked("5 long"), asked("1 short"), asked("2 late")
    assert names(played(rounds, long, short)) == ["1 short"]
    assert names(played(rounds)) == []
    assert names(played(rounds, late)) == []
    assert names(played(rounds)) == ["2 late"]
    assert names(played(rounds)) == ["5 long"]
    assert policy.rounds == [
        ["5 long", "1 short"], ["5 long"], ["5 long", "2 late"], ["5 long", "2 late"], ["5 long"],
    ]  # fmt: skip
    assert [one.batch_size for one in (long, short, late)] == [2, 2, 2]
    assert rounds.num_running == 0
    assert all(isinstance(one.outcome, PolicyAnswer) for one in (long, short, late))


def test_what_nobody_waits_for_is_cut_and_disturbs_no_other():
    policy = SteppedFake()
    rounds = Rounds(policy)
    kept, gone = asked("3 kept"), asked("9 gone")
    played(rounds, kept, gone)
    gone.is_cancelled = True
    assert played(rounds) == [gone]
    assert gone.outcome is None
    assert played(rounds) == [kept]
    assert policy.rounds == [["3 kept", "9 gone"], ["3 kept"], ["3 kept"]]


def test_a_frame_that_the_policy_does_not_take_fails_alone():
    policy = SteppedFake()
    rounds = Rounds(policy)
    before, bad, good = asked("2 before"), asked("refuse"), asked("1 good")
    played(rounds, before)
    ended, failures = played_out(rounds, bad, good)
    assert set(failures) == {"request"}
    assert names(ended) == ["refuse", "2 before", "1 good"]
    assert isinstance(bad.outcome, RequestError)
    assert isinstance(good.outcome, PolicyAnswer)
    assert isinstance(before.outcome, PolicyAnswer)


@pytest.mark.parametrize(
    ("error", "failure"),
    [(DeviceError("no memory"), "device"), (ValueError("a bug"), "raised")],
)
def test_where_a_round_fails_each_is_answered_once_more_alone(error, failure):
    policy = SteppedFake(error=lambda names: error if len(names) > 1 else None)
    rounds = Rounds(policy)
    both = [asked("2 a"), asked("2 b")]
    assert played_out(rounds, *both) == (both, [failure])
    assert all(isinstance(one.outcome, PolicyAnswer) for one in both)
    assert policy.rounds == [["2 a", "2 b"], ["2 a"], ["2 a"], ["2 b"], ["2 b"]]
    assert rounds.num_running == 0


def test_frames_that_failed_or_ended_are_not_decoded_again():
    policy = SteppedFake(error=lambda names: ValueError("a bug"))
    rounds = Rounds(policy)
    alone = asked("2 alone")
    assert played_out(rounds, alone) == ([alone], ["raised"])
    assert isinstance(alone.outcome, PolicyFailedError)
    assert policy.rounds == [["2 alone"]]


def test_frames_lost_during_a_retry_are_answered_alone():
    """Once it waited for ever: a call that fails lets go of all that is on its way."""

    class Small(SteppedFake):
        def start(self, batch):
            if any(one.observation.instruction == "1 heavy" for one in batch):
                if self.has_failed:
                    self.left.clear()
                self.has_failed = True
                raise DeviceError("no memory")
            return super().start(batch)

        has_failed = False

    rounds = Rounds(Small())
    before, heavy = asked("3 before"), asked("1 heavy")
    played(rounds, before)
    ended, failures = played_out(rounds, heavy)
    assert ended == [heavy, before]
    assert failures == ["device", "device"]
    assert isinstance(heavy.outcome, DeviceError)
    assert isinstance(before.outcome, PolicyAnswer)
    assert rounds.num_running == 0


def failing_once(*instructions: str) -> tuple[SteppedFake, Rounds, list[QueuedFrame]]:
    """Frames whose first round has failed."""
    policy = SteppedFake()
    policy.error = lambda names: ValueError("once") if len(policy.rounds) == 1 else None
    rounds, frames = Rounds(policy), batch_of(*instructions)
    ended, failures = rounds.play(frames)
    assert not ended
    assert failures == [FailedCall("raised", len(frames))]
    return policy, rounds, frames


def test_what_failed_is_tried_again_in_rounds_of_one_step_like_any_other():
    """Once it was played to its end in a round: that took so long that it looked like a hang."""
    policy, rounds, frames = failing_once("30 a", "30 b", "30 c")
    for num_rounds in range(2, 92):
        assert rounds.num_running
        rounds.play(())
        assert len(policy.rounds) == num_rounds
        assert len(policy.left) <= 1
    assert rounds.num_running == 0
    assert all(isinstance(one.outcome, PolicyAnswer) for one in frames)


def test_callers_who_leave_are_not_answered_once_more():
    policy, rounds, (playing, waiting, kept) = failing_once("30 playing", "30 waiting", "2 kept")
    played(rounds)
    playing.is_cancelled = waiting.is_cancelled = True
    ended, _ = played_out(rounds)
    assert set(ended) == {playing, waiting, kept}
    assert policy.rounds[1:] == [["30 playing"], ["2 kept"], ["2 kept"]]
    assert playing.outcome is waiting.outcome is None


def test_what_is_due_first_is_tried_again_first_and_texts_come_last():
    policy = SteppedFake(error=lambda names: ValueError("together") if len(names) > 1 else None)
    rounds, frames = Rounds(policy), batch_of("9 text", "9 whenever", "1 later", "1 soon")
    frames[0].is_text = True
    frames[2].deadline_s, frames[3].deadline_s = (time.monotonic() + s for s in (600, 60))
    ended, _ = played_out(rounds, *frames)
    assert names(ended) == ["1 soon", "1 later", "9 whenever", "9 text"]


def test_who_joins_after_a_failure_does_not_wait_for_what_is_tried_again():
    _, rounds, _ = failing_once("30 a", "30 b")
    played(rounds)
    new = asked("2 new")
    ended = played(rounds, new)
    for _ in range(3):  # every other round is a retry's
        ended += played(rounds)
    assert ended == [new]
    assert rounds.num_running == 2


@pytest.mark.parametrize("honours_first", [True, False])
def test_the_culprit_is_found_among_frames_that_joined_meanwhile(honours_first: bool):
    """A policy may have others go on in the round of one that is tried again."""

    class Picky(SteppedFake):
        def step(self, first=()):
            return super().step(first if honours_first else ())

    policy = Picky(error=lambda names: ValueError("no") if "3 bad" in names else None)
    rounds = Rounds(policy)
    bad, good = asked("3 bad"), batch_of(*(f"{number} good" for number in (3, 5, 7, 9)))
    rounds.play([good[0], bad])
    for one in good[1:]:
        rounds.play([one])
    played_out(rounds)
    assert isinstance(bad.outcome, PolicyFailedError)
    assert [type(one.outcome) for one in good] == [PolicyAnswer] * 4


def test_a_policy_that_cannot_let_go_of_an_answer_goes_on_with_the_others(
    caplog: pytest.LogCaptureFixture,
):
    """Once that ended the policy's thread without a word."""

    class Clinging(SteppedFake):
        def cancel(self, running):
            raise ValueError("not now")

    policy = Clinging(error=lambda names: ValueError("a bug") if "bad" in str(names) else None)
    rounds = Rounds(policy)
    gone, kept, bad = asked("9 gone"), asked("3 kept"), asked("1 bad")
    played(rounds, gone, kept)
    gone.is_cancelled = True
    assert played(rounds) == [gone]
    ended, _ = played_out(rounds, bad)
    assert set(ended) == {kept, bad}
    assert isinstance(kept.outcome, PolicyAnswer)
    assert isinstance(bad.outcome, PolicyFailedError)
    assert "could not let go" in caplog.text


def test_an_answer_that_means_nothing_fails_alone():
    class Broken(SteppedFake):
        def step(self, first=()):
            for one in self.left:
                if one.request.observation.instruction.endswith("broken"):
                    one.error = RequestError("instruction", "nothing came of it")
            return super().step(first)

    rounds = Rounds(Broken())
    broken, good = asked("3 broken"), asked("1 good")
    ended, failures = played_out(rounds, good, broken)
    assert set(ended) == {good, broken}
    assert failures == ["request"]
    assert isinstance(broken.outcome, RequestError)
    assert isinstance(good.outcome, PolicyAnswer)


def test_a_policy_that_cannot_be_stepped_answers_in_one_round():
    policy = FakePolicy()
    rounds = Rounds(policy)
    both = [asked("a"), asked("b")]
    assert played(rounds, *both) == both
    assert (policy.sizes, both[0].batch_size, rounds.num_running) == ([2], 2, 0)


def batch_of(*instructions: str) -> list[QueuedFrame]:
    return [asked(instruction) for instruction in instructions]


def attempted(
    policy: Policy, frames: Sequence[QueuedFrame]
) -> tuple[list[PolicyAnswer | Exception | None], list[Failure]]:
    """Play frames to their end; return what became of each, and what failed."""
    ended, failures = played_out(Rounds(policy), *frames)
    assert set(ended) == set(frames)
    assert len(ended) == len(frames)
    return [one.outcome for one in frames], failures


def test_a_good_batch_is_answered_in_one_call():
    policy = FakePolicy()
    answers, failures = attempted(policy, batch_of("a", "b", "c"))
    assert [type(one) for one in answers] == [PolicyAnswer] * 3
    assert failures == []
    assert policy.sizes == [3]


def test_a_policy_that_raises_once_answers_everybody_on_the_second_try():
    policy = RaisingPolicy(error=fails_times(1, ValueError("hiccup")))
    answers, failures = attempted(policy, batch_of("a", "b"))
    assert [type(one) for one in answers] == [PolicyAnswer] * 2
    assert failures == ["raised"]


def test_one_bad_frame_fails_alone():
    policy = RaisingPolicy(error=dislikes("bad", ValueError("no")))
    answers, failures = attempted(policy, batch_of("a", "bad", "c"))
    kinds = [type(one) for one in answers]
    assert kinds == [PolicyAnswer, PolicyFailedError, PolicyAnswer]
    assert policy.sizes == [3, 1, 1, 1]


def test_a_frame_that_fails_alone_is_not_tried_again():
    policy = RaisingPolicy(error=dislikes("bad", ValueError("no")))
    answers, failures = attempted(policy, batch_of("bad"))
    assert isinstance(answers[0], PolicyFailedError)
    assert "no" not in str(answers[0]), "the text of an unexpected error stays in the log"
    assert policy.sizes == [1]


def test_when_memory_runs_out_each_is_tried_once_more_alone():
    policy = RaisingPolicy(error=out_of_memory_above(4))
    answers, failures = attempted(policy, batch_of(*"abcdefg"))
    assert [type(one) for one in answers] == [PolicyAnswer] * 7
    assert policy.sizes == [7] + [1] * 7
    assert failures == ["device"]


def test_when_there_is_no_memory_for_one_either_it_fails():
    policy = RaisingPolicy(error=out_of_memory_above(0))
    answers, failures = attempted(policy, batch_of("a", "b"))
    assert [type(one) for one in answers] == [DeviceError] * 2
    assert policy.sizes == [2, 1, 1]


def test_a_single_frame_gets_a_second_chance_when_memory_runs_out():
    policy = RaisingPolicy(error=fails_times(1, DeviceError("CUDA out of memory")))
    answers, failures = attempted(policy, batch_of("a"))
    assert isinstance(answers[0], PolicyAnswer)


def test_a_frame_the_policy_refuses_late_is_its_callers_fault_only():
    policy = PickyPolicy()
    answers, failures = attempted(policy, batch_of("a", "refuse"))
    assert isinstance(answers[0], PolicyAnswer)
    assert isinstance(answers[1], RequestError)


class Forgetful(FakePolicy):
    def act(self, batch):
        return super().act(batch)[1:]


@pytest.mark.parametrize("size", [1, 3])
def test_too_few_answers_are_never_given_to_the_wrong_robot(size: int):
    policy = Forgetful()
    answers, failures = attempted(policy, batch_of(*"abc"[:size]))
    assert [type(one) for one in answers] == [PolicyFailedError] * size


def test_answers_stay_in_order():
    batch = [asked("lift it", new_session(num_steps=count)) for count in (1, 0)]
    answers, _ = attempted(FakePolicy(), batch)
    assert [one.chunk.actions[0, 0] for one in answers] == [2.0, 1.0]  # type: ignore[union-attr]


class BareChunks(FakePolicy):
    """A policy that was written for an earlier interface: actions, and no memory with them."""

    def act(self, batch):
        return [answer.chunk for answer in super().act(batch)]


def test_answers_of_a_wrong_type_fail_at_once():
    answers, failures = attempted(BareChunks(), batch_of("a", "b"))
    assert [type(one) for one in answers] == [PolicyFailedError] * 2
    assert "ActionChunk" in str(answers[0])


PLACES = 3


class SteppedTraffic(RuleBasedStateMachine):
    """Frames of sessions join, are answered, hang up and spoil a round, in any order.

    Whatever happens, each is answered once, for its own session and in its order, or cut because
    nobody waited for it any more, or refused because it was at fault; and a place is never empty
    while a frame could have it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.policy = SteppedFake(error=self.fault)
        self.will_fail = False
        self.num_faults = 0
        self.unlucky: set[str] = set()  # who was in a round that was to fail
        self.rounds = Rounds(self.policy)
        self.queue = FrameQueue(max_batch=PLACES, max_waiting=64)
        self.queue.admission.joins_midway = True
        self.now_s = 100.0
        self.flying: list[QueuedFrame] = []
        self.joining: list[QueuedFrame] = []
        self.dropped: set[QueuedFrame] = set()
        self.sessions = {name: new_session(name) for name in "abcdef"}

    @rule(flow=strategies.sampled_from("abcdef"), num_rounds=strategies.integers(1, 5))
    def send(self, flow: str, num_rounds: int) -> None:
        self.queue.enqueue(asked(f"{num_rounds} of {flow}", self.sessions[flow]), self.now_s)
        self.start()

    def start(self) -> None:
        chosen, _ = self.queue.next_batch(self.now_s)
        self.flying += chosen
        self.joining += chosen

    @precondition(lambda self: self.flying)
    @rule(data=strategies.data())
    def give_up(self, data: strategies.DataObject) -> None:
        dropped = data.draw(strategies.sampled_from(self.flying))
        dropped.is_cancelled = True
        self.dropped.add(dropped)

    def fault(self, names: list[str]) -> Exception | None:
        """A round fails when it was to, and always where a frame is poison."""
        will_fail, self.will_fail = self.will_fail, False
        if will_fail:
            self.unlucky.update(names)
        is_poisoned = any("poison" in one for one in names)
        return ValueError("a bug") if will_fail or is_poisoned else None

    @rule(flow=strategies.sampled_from("abcdef"))
    def send_poison(self, flow: str) -> None:
        self.queue.enqueue(asked(f"3 poison of {flow}", self.sessions[flow]), self.now_s)
        self.start()

    @precondition(lambda self: self.num_faults < 2)  # more could hit one frame again and again
    @rule()
    def fail_once(self) -> None:
        self.will_fail = True
        self.num_faults += 1

    @rule(step_s=strategies.floats(0.001, 0.05))
    def play(self, step_s: float) -> None:
        self.now_s += step_s
        joining, self.joining = self.joining, []
        num_rounds = len(self.policy.rounds)
        ended, _ = self.rounds.play(joining)
        assert len(self.policy.rounds) <= num_rounds + 1
        for one in ended:
            self.flying.remove(one)
            self.queue.admission.finish(one, self.now_s, one.service_s)
            if one.outcome is None:
                assert one in self.dropped
                continue
            name = one.observation.instruction
            if "poison" in name or (name in self.unlucky and isinstance(one.outcome, Exception)):
                assert isinstance(one.outcome, PolicyFailedError)
                continue
            assert isinstance(one.outcome, PolicyAnswer)
            assert one.outcome.memory.num_steps == one.session.memory.num_steps + 1
            one.session.memory = one.outcome.memory
        self.start()

    @invariant()
    def every_place_is_taken_that_can_be(self) -> None:
        flows = {one.flow for one in self.flying}
        assert len(flows) == len(self.flying) <= PLACES
        could_go = {one.flow for one in self.queue.waiting} - flows
        assert not could_go or len(self.flying) == PLACES
        assert self.rounds.num_running == len(self.flying) - len(self.joining)
        assert len(self.policy.left) <= self.rounds.num_running

    def teardown(self) -> None:
        for _ in range(6 * 12):
            self.play(0.01)
        assert not self.flying
        assert not len(self.queue)


TestSteppedTraffic = SteppedTraffic.TestCase
TestSteppedTraffic.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)
