"""`deft index`: frames that were seen before become drafts for frames that look the same."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from deft_client.datasets.formats import read_dataset
from deft_client.datasets.lerobot_export import write_lerobot
from deft_client.recordings import EpisodeHeader, RecordedStep, encode_header, encode_step
from deft_client.types import ActionChunk, ActOptions, Intervention, Observation
from deft_policies.base import ActRequest
from deft_policies.decoding import kinds
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_server.__main__ import main as deft
from tests import golden
from tests.draft_training.made_up import write_demonstrations

CASES = [case for case in golden.cases_with_image() if case.statistics_key == "libero_spatial"][:3]
FLAGS = ["--checkpoint", str(golden.TINY_OPENVLA), "--statistics-key", "libero_spatial"]
CPU = ["--device", "cpu", "--dtype", "float32", "--threads", "1"]


def write_recording(
    path: Path, intervention: Intervention | None = None, cases: Sequence[golden.GoldenCase] = CASES
) -> None:
    steps = [
        RecordedStep(
            index,
            0.1 * index,
            Observation(case.image(), case.instruction),
            ActOptions(statistics_key=case.statistics_key),
            ActionChunk(case.action[None], intervention=intervention if index == 1 else None),
        )
        for index, case in enumerate(cases)
    ]
    path.write_bytes(encode_header(EpisodeHeader("arm", 0.0)) + b"".join(map(encode_step, steps)))


@pytest.mark.parametrize("actions", ["own", "recorded"])
def test_a_frame_that_was_stored_takes_one_pass_and_gets_the_same_answer(
    actions: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recording(tmp_path / "one.deftrec")
    out = tmp_path / "index.safetensors"
    stored = [str(tmp_path), "--out", str(out), "--actions", actions]
    assert deft(["index", *stored, "--batch", "2", *FLAGS, *CPU]) == 0
    assert f"{out}: 3 frames" in capsys.readouterr().out
    policy = load_policy(
        ModelOptions(
            checkpoint=str(golden.TINY_OPENVLA),
            retrieval_index=out,
            drafts=(kinds.RETRIEVAL,),
            device="cpu",
        )
    )
    for case in CASES:
        options = ActOptions(statistics_key=case.statistics_key)
        observation = Observation(case.image(), case.instruction)
        trace = policy.act([ActRequest(observation, options=options)])[0].chunk.trace
        assert trace is not None
        assert trace.tokens == case.tokens
        # A recorded action cannot tell tokens apart that mean the same to the robot.
        assert trace.num_passes == 1 or actions == "recorded"
        assert set(trace.passes[0].sources[1:]) == {"retrieval"}


def test_frames_where_the_server_intervened_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recording(tmp_path / "one.deftrec", Intervention.HOLD)
    assert deft(["index", str(tmp_path), "--out", str(tmp_path / "index"), *FLAGS, *CPU]) == 0
    assert ": 2 frames" in capsys.readouterr().out


def test_demonstrations_that_failed_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_demonstrations(tmp_path, episodes=3, steps=4)  # the last one fails
    assert deft(["index", str(tmp_path), "--out", str(tmp_path / "index"), *FLAGS, *CPU]) == 0
    assert ": 8 frames" in capsys.readouterr().out


def test_a_lerobot_data_set_is_indexed_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recording(tmp_path / "one.deftrec", cases=CASES[:1] * 3)
    write_lerobot(read_dataset(tmp_path / "one.deftrec"), tmp_path / "set", fps=10)
    command = ["index", str(tmp_path / "set"), "--out", str(tmp_path / "index")]
    assert deft([*command, "--actions", "recorded", *FLAGS, *CPU]) == 0
    assert ": 3 frames" in capsys.readouterr().out


def test_every_nth_frame_up_to_a_limit_is_stored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_recording(tmp_path / "one.deftrec")
    stored = [str(tmp_path), "--out", str(tmp_path / "index")]
    assert deft(["index", *stored, "--every", "2", *FLAGS, *CPU]) == 0
    assert ": 2 frames" in capsys.readouterr().out
    assert deft(["index", *stored, "--limit", "1", *FLAGS, *CPU]) == 0
    assert ": 1 frames" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "required: data"),
        (["a", "--every", "0"], "1 or more"),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        deft(["index", "--out", "x", *flags, *FLAGS])
    assert message in capsys.readouterr().err


def test_nothing_to_index_is_an_error_and_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "index"
    write_recording(tmp_path / "empty.deftrec", cases=())
    stored = [str(tmp_path), "--out", str(out)]
    assert deft(["index", *stored, *FLAGS, *CPU]) == 1
    assert "nothing to index" in capsys.readouterr().err
    assert not out.exists()
    assert deft(["index", *stored, "--policy", "constant"]) == 1
    assert "got 'constant'" in capsys.readouterr().err
