"""What LeRobot's folders may say otherwise than the two that were recorded."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch as torch_files
import torch

from deft_core.types import ActOptions
from deft_policies.base import PolicyRequest
from deft_policies.families.loading import load_policy
from deft_policies.families.pi0fast.files import Pi0FastFiles, read_files
from deft_policies.families.pi0fast.normalization import Mode, Normalization, Numbers
from deft_policies.families.pi0fast.prompt import state_bins
from tests.golden_pi0fast import GOLDEN, case, observation, options_of

TRACED = ActOptions(want_trace=True)
WRAPPED = "model.paligemma_with_expert.paligemma."


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return Path(shutil.copytree(GOLDEN / "meanstd", tmp_path / "meanstd"))


def changed(folder: Path, name: str, change: Callable[[Any], object]) -> Pi0FastFiles:
    content = json.loads((folder / name).read_text())
    change(content)
    (folder / name).write_text(json.dumps(content))
    return read_files(folder)


def step(content: Any, name: str) -> Any:
    return next(one for one in content["steps"] if one["registry_name"] == name)


def tokens_of(folder: Path) -> list[int]:
    policy = load_policy(options_of(str(folder), grammar="off"))
    (answer,) = policy.act([PolicyRequest(observation(case("meanstd", 0)))])
    assert answer.chunk.actions.shape == (16, 6)
    (traced,) = policy.act([PolicyRequest(observation(case("meanstd", 0)), options=TRACED)])
    assert traced.chunk.trace is not None
    return list(traced.chunk.trace.tokens)


@pytest.mark.parametrize("rename", ["without model.", "the table alone", "both"])
def test_the_names_of_tensors(rename: str, folder: Path) -> None:
    """The one table may be saved by either name, or by both."""
    path = folder / "model.safetensors"
    weights = torch_files.load_file(path)
    if rename == "without model.":
        weights = {name.removeprefix("model."): one for name, one in weights.items()}
    else:
        table = weights[f"{WRAPPED}lm_head.weight"].clone()
        if rename == "the table alone":
            del weights[f"{WRAPPED}lm_head.weight"]
        weights[f"{WRAPPED}model.language_model.embed_tokens.weight"] = table
    torch_files.save_file(weights, path)
    assert tokens_of(folder) == case("meanstd", 0)["generated_ids"]


def test_the_numbers_of_steps_change_with_their_list(folder: Path) -> None:
    """LeRobot 0.4 has no step of relative actions; `state_file` says where statistics are."""
    old = "policy_preprocessor_step_2_normalizer_processor.safetensors"
    (folder / "policy_preprocessor_step_3_normalizer_processor.safetensors").rename(folder / old)

    def change(content: Any) -> None:
        content["steps"] = [
            one for one in content["steps"] if "relative" not in one["registry_name"]
        ]
        step(content, "normalizer_processor")["state_file"] = old

    def absolute(content: Any) -> None:
        content["steps"] = [
            one for one in content["steps"] if "absolute" not in one["registry_name"]
        ]

    changed_ = json.loads((folder / "policy_postprocessor.json").read_text())
    absolute(changed_)
    (folder / "policy_postprocessor.json").write_text(json.dumps(changed_))
    files = changed(folder, "policy_preprocessor.json", change)
    assert not files.is_relative
    assert files.state.mode is Mode.MEAN_STD


def test_which_actions_are_relative(folder: Path) -> None:
    assert read_files(folder).adds_state == (True,) * 5 + (False,)

    def set_names(names: Any, words: Any) -> Callable[[Any], object]:
        return lambda content: step(content, "relative_actions_processor")["config"].update(
            action_names=names, exclude_joints=words
        )

    name = "policy_preprocessor.json"
    assert changed(folder, name, set_names(None, ["gripper"])).adds_state == (True,) * 6
    assert changed(folder, name, set_names(["a", "GRIPPER_x"], ["Gripper", "a"])).adds_state == (
        (False, False) + (True,) * 4
    )
    assert changed(folder, name, set_names(["gripper"] * 6, [])).adds_state == (True,) * 6
    name = "policy_postprocessor.json"
    off = changed(
        folder,
        name,
        lambda c: step(c, "absolute_actions_processor")["config"].update(enabled=False),
    )
    assert not off.is_relative


def test_cameras_may_be_renamed_and_a_state_may_be_larger_than_its_statistics(
    folder: Path,
) -> None:
    names = {
        "observation.images.front": "observation.images.base_0_rgb",
        "observation.qpos": "observation.state",
    }
    files = changed(
        folder,
        "policy_preprocessor.json",
        lambda c: step(c, "rename_observations_processor")["config"].update(rename_map=names),
    )
    assert files.renames == {"front": "base_0_rgb"}
    files = changed(
        folder,
        "config.json",
        lambda c: c["input_features"]["observation.state"].update(shape=[32]),
    )
    assert files.state.dim == 6
    assert files.robot_cameras == ("base_0_rgb", "left_wrist_0_rgb")


@pytest.mark.parametrize("mode", [one.value for one in Mode])
def test_every_normalisation_is_undone_as_lerobot_does_it(mode: str, folder: Path) -> None:
    for name, feature in (("pre", "STATE"), ("post", "ACTION")):
        kind = "normalizer_processor" if name == "pre" else "unnormalizer_processor"
        files = changed(
            folder,
            f"policy_{name}processor.json",
            lambda c, kind=kind, feature=feature: step(c, kind)["config"]["norm_map"].update(
                {feature: mode}
            ),
        )
    first, second = (
        torch.from_numpy(one.copy()) for one in (files.state.first, files.state.second)
    )
    values = torch.linspace(-2, 2, 6)
    if mode == "IDENTITY":
        wanted, back = values, values
    elif mode == "MEAN_STD":
        wanted, back = (values - first) / (second + 1e-8), values * second + first
    else:
        width = second - first
        wanted, back = 2 * (values - first) / width - 1, (values + 1) * width / 2 + first
    assert np.array_equal(files.state.normalise(values.numpy()), wanted.numpy())
    assert np.array_equal(files.state.restore(values.numpy()), back.numpy())
    assert files.action.dim == 6
    assert np.isfinite(files.limits.low).all()
    assert (files.limits.low <= files.limits.high).all()


def test_a_number_that_never_changes_does_not_divide_by_zero() -> None:
    one = np.ones(1, np.float32)
    same = Normalization(Mode.QUANTILES, one, one, np.float32(1e-8))
    assert same.normalise(one).tolist() == [-1.0]
    assert same.restore(np.float32([-1.0])).tolist() == [1.0]


def test_steps_of_the_state() -> None:
    """From -1 below the range to 255; 0 is 128, and zeros pad behind the normalisation."""
    ends: tuple[Numbers, Numbers] = (np.full(5, -1, np.float32), np.ones(5, np.float32))
    plain = Normalization(Mode.QUANTILES, *ends, np.float32(1e-8))
    state = np.float32([-1.01, -1.0, 0.0, 0.99999, 3.0])
    assert state_bins(state, plain).tolist() == [-1, 0, 128, 255, 255]
    assert state_bins(state, plain, 7).tolist() == [-1, 0, 128, 255, 255, 128, 128]
    shorter = state_bins(state, plain, 3)
    assert len(shorter) == 5
