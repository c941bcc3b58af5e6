"""DAgger: the policy plays, the expert's answers are stored, and a still policy is led on."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deft_core.datasets.demonstrations import find_demonstrations, load_demonstration
from deft_core.types import ActOptions
from deft_draft_training.errors import ConfigError
from deft_libero.simulator.conventions import CLOSE, OPEN
from deft_libero.simulator.environment import EnvironmentSettings, Frame, LiberoEnvironment
from deft_libero.simulator.scene import Pose, Scene
from deft_libero.simulator.suites import find_task
from deft_policies import tiny_libero
from deft_policies.base import PolicyAnswer, PolicyRequest
from deft_policies.constant import ConstantPolicy
from deft_policies.errors import NoActionError
from tests.demonstrations import write_demonstrations
from tests.standins import stand_ins
from tests.typed import next_command
from tiny_libero_recipe import demos
from tiny_libero_recipe.correct import Learner, TakeoverSettings, main, sign_gripper
from tiny_libero_recipe.expert.expert import Label
from tiny_libero_recipe.expert.pick import Phase
from tiny_libero_recipe.model import PolicyModelConfig, PolicyNet, initialise
from tiny_libero_recipe.play import DemoKey, DemosSettings, play
from tiny_libero_recipe.train import prepare, write_policy

TAKEOVER = TakeoverSettings(stuck_steps=4, stuck_metres=0.005, steps=3, chance=0.0)
FRAME = Frame(np.zeros((8, 8, 3), np.uint8), np.zeros(8, np.float32))
NO_PLACE = np.zeros(3)
LABEL = Label(np.array([0.5] * 6 + [OPEN]), Phase.LIFT, NO_PLACE, NO_PLACE, NO_PLACE)
STILL = np.array([0, 0, 0, 0, 0, 0, 1.0])  # its gripper opens
POLICY = ConstantPolicy(STILL[None])
SIZES = PolicyModelConfig(32, 16, 16, 2, 2, 32, 32, 2, 2, 48)


def scene_at(x: float) -> Scene:
    pose = Pose(np.array([x, 0.0, 0.0]), np.eye(3))
    return Scene(pose, 0.08, {}, {}, {})


def led(
    places: Sequence[float], takeover: TakeoverSettings = TAKEOVER, label: Label = LABEL
) -> list[bool]:
    """For each place of the gripper: did the expert lead there?"""
    learner = Learner(POLICY, "lift it", takeover, np.random.default_rng(0))
    executed = [learner.act(FRAME, scene_at(x), label) for x in places]
    assert all(np.array_equal(one, label.action) or not one[:6].any() for one in executed)
    return [np.array_equal(one, label.action) for one in executed]


def test_a_policy_that_moves_is_left_alone():
    assert led([0.01 * step for step in range(12)]) == [False] * 12


def test_rows_of_an_answer_are_executed_before_the_policy_is_asked_again():
    chunk = np.zeros((4, 7))
    chunk[:, 0] = np.arange(4)
    alone = TakeoverSettings(steps=0)
    learner = Learner(
        ConstantPolicy(chunk),
        "lift it",
        alone,
        np.random.default_rng(0),
        num_executed=3,
        convert=sign_gripper,
    )
    executed = [learner.act(FRAME, scene_at(0.01 * step), LABEL) for step in range(5)]
    assert [action[0] for action in executed] == [0, 1, 2, 0, 1]


def test_a_gripper_that_is_written_as_a_number_is_open_or_closed():
    answers = np.array([[0.25] * 6 + [value] for value in (-1.0, -0.002, 0.002, 1.0)])
    signed = [sign_gripper(one) for one in answers]
    assert [one[6] for one in signed] == [OPEN, OPEN, CLOSE, CLOSE]
    assert all((one[:6] == 0.25).all() for one in signed)


def test_a_policy_is_shown_the_robots_state():
    state = np.arange(8, dtype=np.float32)
    shown = []

    class Watched(ConstantPolicy):
        def act(self, requests: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
            shown.extend(one.observation.state for one in requests)
            return super().act(requests)

    learner = Learner(Watched(STILL[None]), "lift it", TAKEOVER, np.random.default_rng(0))
    learner.act(replace(FRAME, state=state), scene_at(0.0), LABEL)
    np.testing.assert_array_equal(shown, [state])


def test_the_expert_leads_for_some_steps_where_nothing_moves():
    assert led([0.0] * 10) == [False] * 3 + [True] * 3 + [False] * 3 + [True]


def test_the_expert_leads_where_the_gripper_does_the_opposite():
    takeover = TakeoverSettings(wrong_steps=3, steps=2, chance=0.0)
    closing = replace(LABEL, action=np.array([0.5] * 6 + [CLOSE]))
    moving = [0.01 * step for step in range(8)]
    assert led(moving, takeover, closing) == [False, False, True, True] * 2
    assert led(moving, takeover, LABEL) == [False] * 8


def test_now_and_then_it_leads_by_chance():
    places = [0.01 * step for step in range(300)]
    share = np.mean(led(places, TakeoverSettings(steps=1, chance=0.1)))
    assert 0.05 < share < 0.2


def test_a_policy_that_is_to_be_seen_alone_is_never_led():
    assert not any(led([0.0] * 40, TakeoverSettings(steps=0, chance=0.5)))


class Speechless:
    """A policy whose texts hold no action; it notes what it is asked."""

    def __init__(self) -> None:
        self.asked: list[ActOptions] = []

    def act(self, requests: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        self.asked += [one.options for one in requests]
        (answer,) = POLICY.act(requests)
        return [replace(answer, error=NoActionError("the text did not end"))]


def test_where_a_text_holds_no_action_the_expert_acts():
    policy = Speechless()
    learner = Learner(policy, "lift it", TAKEOVER, np.random.default_rng(0), is_thinking=True)
    assert np.array_equal(learner.act(FRAME, scene_at(0.0), LABEL), LABEL.action)
    assert [one.want_reasoning for one in policy.asked] == [True]


@pytest.mark.libero
class TestInLibero:
    def test_labels_are_the_experts_whoever_plays(self):
        settings = DemosSettings("libero_object", tasks=(5,), frame_size=48)
        environment = LiberoEnvironment(
            find_task("libero_object", 5),
            EnvironmentSettings(frame_size=48, assets_folder=stand_ins()),
        )
        demonstration = play(
            environment,
            settings,
            DemoKey(5, 0),
            lambda *_: Learner(
                POLICY, "x", TakeoverSettings(steps=8, chance=0.2), np.random.default_rng(0)
            ),
        )
        environment.close()
        still = np.all(demonstration.executed == STILL.astype(np.float32), axis=1)
        assert 0.1 < still.mean() < 0.9
        assert np.abs(demonstration.labels[still, :6]).max(axis=1).min() > 0, "clean labels"
        assert np.array_equal(demonstration.executed[~still], demonstration.labels[~still])

    def test_the_command_records_once_and_its_episodes_are_demonstrations(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ):
        checkpoint = write_small_policy(tmp_path)
        command = ["libero_object", f"--checkpoint={checkpoint}", f"--out={tmp_path / 'more'}"]
        command += ["--tasks=5", "--episodes=1", "--trials=3", "--size=48", "--lead=0.3"]
        command += [f"--assets={stand_ins()}"]
        assert main(command) == 0
        (path,) = find_demonstrations(tmp_path / "more")
        header = load_demonstration(path).header
        assert (header.task, header.trial, header.noise_sigma) == (5, 3, 0.0)
        shown = capsys.readouterr().out
        assert "1 new episodes" in shown
        assert next_command(shown)[2:4] == ["tiny_libero_recipe", "train"]
        written = path.stat().st_mtime_ns
        assert main(command) == 0
        assert path.stat().st_mtime_ns == written


def test_a_policy_without_these_statistics_is_refused(tmp_path: Path):
    checkpoint = write_small_policy(tmp_path)
    with pytest.raises(ConfigError, match="'libero_goal'.*libero_object"):
        main(["libero_goal", f"--checkpoint={checkpoint}", f"--out={tmp_path / 'more'}"])


def test_held_out_states_are_never_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    recording = ["libero_object", f"--out={tmp_path / 'more'}", "--trials=0-49"]
    assert demos.main(recording) == 2
    assert "states 30-39 are held out" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="states 30-39 are held out"):
        main([*recording, f"--checkpoint={tiny_libero.CHECKPOINT}"])


def write_small_policy(folder: Path) -> Path:
    episodes = [
        load_demonstration(path)
        for path in find_demonstrations(write_demonstrations(folder / "demos"))
    ]
    prepared = prepare(episodes, SIZES, "libero_object")
    net = PolicyNet(prepared.config, prepared.samples.positions.shape[1])
    initialise(net, 0)
    write_policy(net, prepared, folder / "policy", torch.float32)
    return folder / "policy"
