"""`deft doctor --demonstration`: a wrong image chain or statistics key is told, a right one too."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deft_core.image_chain import ImageChain
from deft_core.recordings import EpisodeHeader, RecordedStep, encode_end, encode_header, encode_step
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_policies.base import PolicyRequest, Verdict
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.memory import SessionMemory
from deft_policies.tiny_libero import CHECKPOINT, STATISTICS_KEY
from deft_server.commands import doctor
from deft_server.commands.doctor import EVERY, judge_chain, judge_gripper, judge_statistics
from tests.core.samples import frame

FLAGS = ("--checkpoint", str(CHECKPOINT), "--statistics-key", STATISTICS_KEY, "--port", "0")
NUM_STEPS = 8 * EVERY


def demonstrate(folder: Path, chain: ImageChain, grasps: bool = False) -> Path:
    """A recording whose actions are the policy's own, behind a chain.

    With `grasps` the gripper closes and opens in turn, whatever the policy answers.
    """
    options = ModelOptions(
        checkpoint=str(CHECKPOINT), statistics_key=STATISTICS_KEY, image_chain=chain
    )
    policy = load_policy(options)
    parts = [encode_header(EpisodeHeader("arm", 1000.0, part=0))]
    picture = frame(96, 96)
    for index in range(NUM_STEPS):
        seen = Observation(np.roll(picture, 5 * index, axis=1), "pick up the butter")
        chunk = ActionChunk(np.zeros((1, 7)))
        if index % EVERY == 0:  # the others are not looked at
            (answer,) = policy.act([PolicyRequest(seen, SessionMemory(), ActOptions())])
            actions = answer.chunk.actions.copy()
            if grasps:
                actions[:, -1] = index // EVERY % 2
            chunk = ActionChunk(actions)
        parts.append(encode_step(RecordedStep(index, 0.1 * index, seen, ActOptions(), chunk)))
    folder.mkdir()
    (folder / "episode-0.deftrec").write_bytes(b"".join([*parts, encode_end("reset")]))
    return folder


def test_a_wrong_image_chain_is_told_and_the_right_one_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = demonstrate(tmp_path / "data", ImageChain.LIBERO)
    asked = [*FLAGS, "--demonstration", str(data), "--image-chain"]
    assert doctor.main([*asked, "none"]) == 1
    said = capsys.readouterr().out
    assert "--image-chain libero\n" in said
    assert doctor.main([*asked, "libero"]) == 0
    said = capsys.readouterr().out
    assert "libero 0.00%" in said
    assert "the demonstration lies in their range" in said


def test_a_demonstration_that_is_none_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert doctor.main([*FLAGS, "--demonstration", str(tmp_path)]) == 1
    assert str(tmp_path) in capsys.readouterr().out


def test_a_chain_that_is_hardly_farther_is_not_called_wrong() -> None:
    rng = np.random.default_rng(0)
    near = rng.uniform(0.0, 0.1, 24)
    errors = {ImageChain.NONE: near, ImageChain.LIBERO: near + rng.normal(0, 0.05, 24)}
    worse = max(errors, key=lambda chain: float(errors[chain].mean()))
    found = judge_chain(worse, errors, 0.3)
    assert found.verdict is Verdict.GOOD
    assert f"do not tell yours, `{worse.value}`, from" in found.text
    errors = {ImageChain.NONE: near, ImageChain.LIBERO: near + rng.uniform(0.01, 0.02, 24)}
    assert judge_chain(ImageChain.LIBERO, errors, 0.3).verdict is Verdict.BAD
    found = judge_chain(ImageChain.NONE, errors, 0.3)
    assert found.text.endswith("Yours, `none`, is the nearest; the next is `libero`")


def test_chains_that_are_no_better_than_not_looking_say_nothing() -> None:
    errors = {ImageChain.NONE: np.full(24, 0.31), ImageChain.LIBERO: np.full(24, 0.30)}
    found = judge_chain(ImageChain.NONE, errors, 0.3)
    assert found.verdict is Verdict.DOUBTFUL
    assert "No chain" in found.text


def test_actions_beyond_the_statistics_hint_at_another_key() -> None:
    assert judge_statistics(0.02).verdict is Verdict.GOOD
    assert "--statistics-key" in judge_statistics(0.4).text


def test_a_gripper_that_is_the_other_way_round_is_an_error() -> None:
    done = np.array([1.0] * 8 + [0.0] * 16)
    answered = np.where(done > 0.5, 0.9, 0.1)
    assert judge_gripper(answered, done, 2.0).verdict is Verdict.GOOD
    for turned in (-done, 1 - done, 1 - 2 * done):
        found = judge_gripper(answered, turned, 2.0)
        assert found.verdict is Verdict.BAD
        assert "the other way round in 24 of 24 frames" in found.text
    text = judge_gripper(answered, -done, 2.0).text
    assert text.split(": ")[1].startswith("where the demonstration has 0 the policy answers 0.1")
    assert "where it has -1 the policy answers 0.9" in text
    some_wrong = np.concatenate([answered[:-3], [0.9] * 3])
    assert judge_gripper(some_wrong, done, 2.0).verdict is Verdict.GOOD
    assert judge_gripper(some_wrong, -done, 2.0).verdict is Verdict.BAD


def test_a_gripper_that_cannot_be_told_is_no_error() -> None:
    done = np.array([1.0] * 22 + [0.0] * 2)
    mostly_closed = np.array([0.0] * 20 + [1.0] * 2 + [0.0] * 2)
    for answered, demonstrated in (
        (done, np.ones(24)),  # nothing is grasped
        (np.ones(24), done),
        (mostly_closed, done),  # opposite in most frames, but not where the demonstration is low
    ):
        found = judge_gripper(answered, demonstrated, 2.0)
        assert found.verdict is Verdict.DOUBTFUL
        assert "cannot be told" in found.text


def test_a_demonstration_whose_gripper_was_negated_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    data = demonstrate(tmp_path / "data", ImageChain.NONE, grasps=True)
    answer_through = doctor.answer_through
    asked = [*FLAGS, "--demonstration", str(data)]
    for grippers, code, text in (
        ((0.1, 0.9), 0, "the same way round as the demonstration's in 8 of 8 frames"),
        ((0.9, 0.1), 1, "the gripper is the other way round in 8 of 8 frames"),
    ):

        def answers(*given: Any, grippers: tuple[float, ...] = grippers) -> np.ndarray:
            found = answer_through(*given).copy()
            found[:, -1] = grippers * 4
            return found

        monkeypatch.setattr(doctor, "answer_through", answers)
        assert doctor.main(asked) == code
        assert text in capsys.readouterr().out
