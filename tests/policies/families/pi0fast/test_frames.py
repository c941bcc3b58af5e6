"""What a frame must hold, and which picture is which camera's."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray

from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest
from deft_policies.decoding.clock import StageClock
from deft_policies.errors import RequestError
from deft_policies.families.loading import load_policy
from deft_policies.families.pi0fast.model import Pi0Fast
from deft_policies.families.policy import VlaPolicy
from tests.golden_pi0fast import case, observation, options_of


@cache
def policy_of(name: str) -> VlaPolicy:
    return load_policy(options_of(name))


def model_of(name: str) -> Pi0Fast:
    model = policy_of(name).model
    assert isinstance(model, Pi0Fast)
    return model


def flat(value: int) -> NDArray[np.uint8]:
    return np.full((8, 8, 3), value, np.uint8)


def seen(observation: Observation, name: str = "meanstd") -> list[int]:
    """The pictures in the order of the prompt, by their grey."""
    return [int(one[0, 0, 0]) for one in model_of(name).pictures(observation)]


def test_a_frame_is_the_first_camera_and_wrists_take_what_is_left() -> None:
    assert seen(Observation(flat(1), "")) == [1]
    assert seen(Observation(flat(1), "", {"wrist": flat(2)})) == [1, 2]
    assert seen(Observation(flat(1), "", {"wrist_0": flat(2)}), "quantile") == [1, 2]


def test_cameras_go_by_lerobots_names_in_the_order_of_its_configuration() -> None:
    wrist, base = "observation.images.left_wrist_0_rgb", "base_0_rgb"
    assert seen(Observation(flat(9), "", {wrist: flat(2), base: flat(1)})) == [1, 2]
    alone = flat(2)
    assert seen(Observation(alone, "", {wrist: alone})) == [2]  # the base is missing
    empty = {"empty_camera_0": flat(3)}
    assert seen(Observation(flat(1), "", empty)) == [1, 3]


def test_only_what_a_frame_lacks_is_added_to_it() -> None:
    """A draft head that was trained with a state of zeros had never seen the robot's."""
    model, state = model_of("meanstd"), np.arange(6, dtype=np.float32)
    whole = Observation(flat(1), "", {"wrist": flat(2)}, state=state)
    assert model.complete(whole) is whole
    added = model.complete(Observation(flat(1), ""))
    assert added.state is not None
    assert not added.state.any()
    assert seen(added) == [1, 1]


def test_renamed_cameras_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    model = model_of("meanstd")
    renamed = replace(model.files, renames={"front": "base_0_rgb"})
    monkeypatch.setattr(model, "files", renamed)
    assert seen(Observation(flat(9), "", {"front": flat(1)})) == [1]


def test_cameras_that_the_model_has_not_are_refused() -> None:
    with pytest.raises(RequestError, match="base_0_rgb, left_wrist_0_rgb"):
        model_of("meanstd").check(Observation(flat(1), "", {"side": flat(2)}, np.zeros(6)))
    wrists = {"wrist_0": flat(2), "wrist_1": flat(3)}
    with pytest.raises(RequestError, match="3 pictures"):
        model_of("meanstd").check(Observation(flat(1), "", wrists, np.zeros(6)))


def test_a_state_is_needed() -> None:
    for state in (None, np.zeros(7)):
        with pytest.raises(RequestError, match="6 numbers"):
            model_of("meanstd").check(Observation(flat(1), "", {}, state))


def test_a_word_without_a_row_is_refused() -> None:
    """Its id lies behind the table, as that of PaliGemma's picture does."""
    model = model_of("quantile")
    beyond = model._words.tokenizer.id_to_token(model.network.config.num_rows)
    with pytest.raises(RequestError, match=beyond):
        model.check(Observation(flat(1), f"see {beyond}", {}, np.zeros(8)))


def test_the_prompt_sees_itself_and_no_draft() -> None:
    """Two-way to the second `<bos>`: each row of it is the same whatever is written behind it."""
    (prompt,) = model_of("meanstd").see(
        [observation(case("meanstd", 0))], StageClock(model_of("meanstd").device)
    )
    assert prompt.two_way == prompt.length == case("meanstd", 0)["prefix_rows"]


def test_an_answer_is_the_same_beside_others() -> None:
    policy, numbers = policy_of("meanstd"), (0, 14, 7)
    frames = [observation(case("meanstd", number)) for number in numbers]
    together = policy.act([PolicyRequest(one, options=ActOptions()) for one in frames])
    for frame, answer in zip(frames, together, strict=True):
        (alone,) = policy.act([PolicyRequest(frame)])
        assert np.array_equal(alone.chunk.actions, answer.chunk.actions)


def test_relative_actions_move_with_the_state_but_for_the_gripper() -> None:
    model, frame = model_of("meanstd"), observation(case("meanstd", 0))
    actions = np.zeros((16, 6))
    placed = model.for_robot(actions, frame)
    assert frame.state is not None
    assert np.array_equal(placed[3], [*np.float64(frame.state[:5]), 0.0])
    limits, statistics = model.limits("default"), model.statistics["default"]
    assert (limits.low[:5] < statistics.low[:5]).all()
    assert limits.low[5] == statistics.low[5]


def test_what_is_made_up_can_be_answered() -> None:
    """As a server does before it serves."""
    policy_of("quantile").warm_up()
