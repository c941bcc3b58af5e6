"""A batch through a policy that fails: nobody suffers for somebody else's frame."""

import pytest

from deft_policies.base import ActAnswer, ActRequest
from deft_policies.errors import DeviceError, RequestError
from deft_policies.memory import SessionMemory
from deft_server.errors import PolicyFailedError
from deft_server.hosting.rounds import answer_batch
from deft_server.serving.queue import Failure
from tests.standins.policies import (
    FakePolicy,
    PickyPolicy,
    RaisingPolicy,
    dislikes,
    fails_times,
    frame,
    out_of_memory_above,
)


def batch_of(*instructions: str) -> list[ActRequest]:
    return [ActRequest(frame(instruction=instruction)) for instruction in instructions]


def test_a_good_batch_is_answered_in_one_call():
    policy = FakePolicy()
    answers, failures = answer_batch(policy, batch_of("a", "b", "c"))
    assert [type(one) for one in answers] == [ActAnswer] * 3
    assert failures == []
    assert policy.sizes == [3]


def test_a_policy_that_raises_once_answers_everybody_on_the_second_try():
    policy = RaisingPolicy(error=fails_times(1, ValueError("hiccup")))
    answers, failures = answer_batch(policy, batch_of("a", "b"))
    assert [type(one) for one in answers] == [ActAnswer] * 2
    assert failures == [Failure.RAISED]


def test_one_bad_frame_fails_alone():
    policy = RaisingPolicy(error=dislikes("bad", ValueError("no")))
    answers, failures = answer_batch(policy, batch_of("a", "bad", "c"))
    kinds = [type(one) for one in answers]
    assert kinds == [ActAnswer, PolicyFailedError, ActAnswer]
    assert policy.sizes == [3, 1, 1, 1]


def test_a_frame_that_fails_alone_is_not_tried_again():
    policy = RaisingPolicy(error=dislikes("bad", ValueError("no")))
    answers, failures = answer_batch(policy, batch_of("bad"))
    assert isinstance(answers[0], PolicyFailedError)
    assert "no" not in str(answers[0]), "the text of an unexpected error stays in the log"
    assert policy.sizes == [1]


def test_when_memory_runs_out_the_batch_is_halved_once():
    policy = RaisingPolicy(error=out_of_memory_above(4))
    answers, failures = answer_batch(policy, batch_of(*"abcdefg"))
    assert [type(one) for one in answers] == [ActAnswer] * 7
    assert policy.sizes == [7, 4, 3]
    assert failures == [Failure.DEVICE]


def test_when_half_is_still_too_much_the_frames_of_that_half_fail():
    policy = RaisingPolicy(error=out_of_memory_above(3))
    answers, failures = answer_batch(policy, batch_of(*"abcdefg"))
    assert [type(one) for one in answers] == [DeviceError] * 4 + [ActAnswer] * 3
    assert policy.sizes == [7, 4, 3]


def test_a_single_frame_gets_a_second_chance_when_memory_runs_out():
    policy = RaisingPolicy(error=fails_times(1, DeviceError("CUDA out of memory")))
    answers, failures = answer_batch(policy, batch_of("a"))
    assert isinstance(answers[0], ActAnswer)


def test_a_frame_the_policy_refuses_late_is_its_callers_fault_only():
    policy = PickyPolicy()
    answers, failures = answer_batch(policy, batch_of("a", "refuse"))
    assert isinstance(answers[0], ActAnswer)
    assert isinstance(answers[1], RequestError)


class Forgetful(FakePolicy):
    def act(self, batch):
        return super().act(batch)[1:]


@pytest.mark.parametrize("size", [1, 3])
def test_too_few_answers_are_never_given_to_the_wrong_robot(size: int):
    policy = Forgetful()
    answers, failures = answer_batch(policy, batch_of(*"abc"[:size]))
    assert [type(one) for one in answers] == [PolicyFailedError] * size


def test_answers_stay_in_order():
    batch = [ActRequest(frame(), SessionMemory(num_steps=count)) for count in (1, 0)]
    answers, _ = answer_batch(FakePolicy(), batch)
    assert [one.chunk.actions[0, 0] for one in answers] == [2.0, 1.0]  # type: ignore[union-attr]


class BareChunks(FakePolicy):
    """A policy that was written for an earlier interface: actions, and no memory with them."""

    def act(self, batch):
        return [answer.chunk for answer in super().act(batch)]


def test_answers_of_another_kind_are_the_policys_fault_and_nobody_waits_for_them():
    answers, failures = answer_batch(BareChunks(), batch_of("a", "b"))
    assert [type(one) for one in answers] == [PolicyFailedError] * 2
    assert "ActionChunk" in str(answers[0])
