"""`deft replay` runs a recording through a policy and says how far it is from what was done."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from deft_core.datasets.demonstrations import episode_path, load_demonstration
from deft_core.recordings import EpisodeHeader, RecordedStep, encode_end, encode_header, encode_step
from deft_core.types import ActionChunk, ActOptions, Observation
from deft_policies.base import PolicyAnswer, PolicyRequest
from deft_policies.constant import ConstantPolicy
from deft_server.commands.replay import (
    PastStep,
    ReplayError,
    compare,
    describe,
    main,
    read_steps,
    replay,
)
from tests.demonstrations import write_demonstrations
from tests.server.dashboard.talkative import TalkativePolicy

FRAME = Observation(np.full((8, 8, 3), 7, np.uint8), "lift the cup")


def record(
    directory: Path,
    action: np.ndarray[tuple[int], np.dtype[np.float64]],
    steps: int = 3,
    part: int = 0,
) -> Path:
    directory.mkdir(exist_ok=True)
    path = directory / f"episode-{part}.deftrec"
    parts = [encode_header(EpisodeHeader("arm", 1000.0, part=part))]
    for index in range(steps):
        chunk = ActionChunk(action[None] + 0.01 * index)
        options = ActOptions(session_id="arm", decoding="relaxed")
        parts.append(encode_step(RecordedStep(index, 0.1 * index, FRAME, options, chunk)))
    path.write_bytes(b"".join([*parts, encode_end("reset")]))
    return path


def past(chunk: ActionChunk) -> PastStep:
    recorded = RecordedStep(0, 0.0, FRAME, ActOptions(), chunk)
    return PastStep("one", 0, FRAME, chunk.actions, recorded=recorded)


def test_differences_are_per_dimension_and_in_robot_units(tmp_path: Path) -> None:
    action = np.zeros(7)
    action[2] = 0.5
    record(tmp_path, action)
    said = describe(list(replay(ConstantPolicy(), read_steps(tmp_path))))
    assert said.startswith("3 frames of 1 episodes; 0.0% answered with identical actions\n")
    assert "\nlargest difference:  0.02  0.02  0.52  0.02  0.02  0.02  0.02\n" in said
    assert "\nmean difference:     0.01  0.01  0.51  0.01  0.01  0.01  0.01\n" in said
    assert "same tokens" not in said


def test_a_text_without_an_action_differs_most() -> None:
    was = past(ActionChunk(np.zeros((1, 7)), reasoning="go ACTION: x"))
    same = compare(was, was.recorded.chunk, 1.0)
    other = compare(was, ActionChunk(np.zeros((1, 7)), reasoning="stop ACTION: x"), 1.0)
    none = compare(was, ActionChunk(np.empty((0, 7)), reasoning="go"), 1.0)
    assert [one.same_text for one in (same, other, none)] == [True, False, False]
    assert [one.largest for one in (same, other, none)] == [0.0, 0.0, np.inf]
    assert "same text: 50.0% of the frames" in describe([same, other])
    assert compare(past(ActionChunk(np.zeros((1, 7)))), was.recorded.chunk, 1.0).same_text is None


def test_a_policy_that_does_the_same_again_is_identical(tmp_path: Path) -> None:
    step = past(ActionChunk(np.zeros((1, 7))))
    compared = compare(step, ActionChunk(np.zeros((1, 7))), 1.0)
    assert compared.largest == 0
    assert "100.0% answered with identical actions" in describe([compared])


def test_tokens_are_compared_where_both_sides_have_them() -> None:
    policy = TalkativePolicy()
    trace = policy._decode("lossless")
    step = past(ActionChunk(np.zeros((1, 7)), trace=trace))
    other = replace(trace, tokens=trace.tokens[::-1])
    for now, same in ((trace, True), (other, False)):
        compared = compare(step, ActionChunk(np.zeros((1, 7)), trace=now), 1.0)
        assert compared.same_tokens is same
        assert compared.passes == trace.num_passes


def test_parts_of_one_episode_share_a_session(tmp_path: Path) -> None:
    class Noting(TalkativePolicy):
        steps: list[int] = []

        def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
            self.steps += [one.memory.num_steps for one in batch]
            return super().act(batch)

    for directory in (tmp_path / "a", tmp_path / "b"):
        for part in range(2):
            record(directory, np.zeros(7), part=part)
    policy = Noting()
    assert len(list(replay(policy, read_steps(tmp_path)))) == 12
    assert policy.steps == [0, 1, 2, 3, 4, 5] * 2


def test_demonstrations_are_compared_by_their_clean_actions(tmp_path: Path) -> None:
    write_demonstrations(tmp_path, episodes=2, steps=3)
    compared = list(replay(ConstantPolicy(), read_steps(tmp_path)))
    shown = load_demonstration(episode_path(tmp_path, 0, 0)).labels
    assert len(compared) == 6
    assert compared[1].differences == tuple(abs(shown[1].astype(np.float64)).tolist())
    assert "6 frames of 2 episodes" in describe(compared)
    assert "when recorded" not in describe(compared)


def test_recorded_options_are_used_on_request(tmp_path: Path) -> None:
    record(tmp_path, np.zeros(7), steps=1)

    class Listening(TalkativePolicy):
        heard: list[str | None] = []

        def check(self, observation: Observation, options: ActOptions) -> None:
            self.heard.append(options.decoding)

    list(replay(Listening(), read_steps(tmp_path)))
    list(replay(Listening(), read_steps(tmp_path), with_recorded_options=True))
    assert Listening.heard == [None, "relaxed"]


def test_the_command_prints_a_summary_and_writes_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record(tmp_path / "in", np.zeros(7))
    lines = tmp_path / "out.jsonl"
    arguments = [str(tmp_path / "in"), "--policy", "constant", "--output", str(lines)]
    assert main([*arguments, "--limit", "2", "--max-difference", "0.5"]) == 0
    assert "2 frames of 1 episodes; 50.0% answered with identical" in capsys.readouterr().out
    assert [json.loads(line)["step"] for line in lines.read_text().splitlines()] == [0, 1]
    assert main([*arguments, "--max-difference", "0.005"]) == 1


def test_a_difference_that_is_not_a_number_is_too_large(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    action = np.zeros(7)
    action[3] = np.nan
    record(tmp_path, action)
    assert main([str(tmp_path), "--policy", "constant", "--max-difference", "9"]) == 1
    assert "nan" in capsys.readouterr().out


@pytest.mark.parametrize("content", [b"", b"not a recording"])
def test_what_is_no_recording_is_one_line_of_complaint(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.deftrec").write_bytes(content)
    assert main([str(tmp_path), "--policy", "constant"]) == 1
    complaint = capsys.readouterr().err
    assert "x.deftrec" in complaint
    assert len(complaint.splitlines()) == 1
    assert main([str(tmp_path / "nowhere"), "--policy", "constant"]) == 1


def test_actions_of_another_shape_are_another_policy(tmp_path: Path) -> None:
    (step,) = read_steps(record(tmp_path, np.zeros(7), steps=1))
    with pytest.raises(ReplayError, match="another policy"):
        compare(step, ActionChunk(np.zeros((1, 8))), 1.0)
