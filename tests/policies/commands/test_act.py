"""`deft act` as its user calls it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from deft_policies.commands import act
from deft_policies.errors import PolicyError
from deft_server.__main__ import main as deft
from tests import golden

CHECKPOINT = ["--checkpoint", str(golden.TINY_OPENVLA), "--dtype", "float32", "--threads", "1"]


def write_cases(path: Path, cases: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(case) + "\n" for case in cases))
    return path


def read_lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_file_of_pictures_becomes_a_file_of_exact_answers(tmp_path: Path) -> None:
    cases = golden.cases_with_image()[:4]
    source = write_cases(
        tmp_path / "cases.jsonl",
        [
            {
                "image": str(case.image_path),
                "instruction": case.instruction,
                "statistics_key": case.statistics_key,
            }
            for case in cases
        ],
    )
    target = tmp_path / "out.jsonl"
    files = ["--input", str(source), "--output", str(target), "--batch", "3"]
    assert deft(["act", *CHECKPOINT, "--decoding", "autoregressive", *files]) == 0
    lines = read_lines(target)
    assert len(lines) == 4
    for case, line in zip(cases, lines, strict=True):
        assert line["tokens"] == list(case.tokens)
        assert line["action"] == case.action.tolist()
        assert line["passes"] == 7
        assert line["accepted"] == [0] * 7
        np.testing.assert_allclose(line["margins"], case.margins, atol=1e-3)
        milliseconds = line["ms"]
        assert isinstance(milliseconds, dict)
        assert milliseconds["total"] > 0.0


def test_one_picture_is_answered_on_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    case = golden.cases_with_image()[0]
    arguments = [*CHECKPOINT, "--statistics-key", case.statistics_key]
    assert act.main([*arguments, str(case.image_path), case.instruction]) == 0
    line = json.loads(capsys.readouterr().out)
    assert line["tokens"] == list(case.tokens)


def test_frames_of_one_session_are_drafted_from_each_other(tmp_path: Path) -> None:
    case = golden.cases_with_image()[0]
    shutil.copy(case.image_path, tmp_path / "frame.png")
    frame = {"image": "frame.png", "instruction": case.instruction, "session_id": "arm"}
    source = write_cases(tmp_path / "cases.jsonl", [frame, frame])
    target = tmp_path / "out.jsonl"
    exact = ["--decoding", "within-bins", "--radius", "0"]
    arguments = [*CHECKPOINT, "--statistics-key", case.statistics_key, "--batch", "2", *exact]
    files = ["--input", str(source), "--output", str(target)]
    assert act.main([*arguments, *files]) == 0
    first, second = read_lines(target)
    assert (first["passes"], second["passes"]) == (7, 1)
    assert second["accepted"] == [6]
    assert first["tokens"] == second["tokens"] == list(case.tokens)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("{", "cases.jsonl:1"),
        ("[]", "object with image and instruction"),
        ('{"image": "a.png"}', "instruction: missing"),
        ('{"image": "a.png", "instruction": "lift"}', "a.png does not exist"),
        (
            '{"image": "a.png", "instruction": "lift", "statistic_key": "x"}',
            "statistic_key: unknown field; did you mean statistics_key?",
        ),
        (
            '{"image": "a.png", "instruction": "lift", "statistics_key": 3}',
            "statistics_key: must be text",
        ),
    ],
)
def test_a_line_that_cannot_be_used_is_named_before_the_model_is_loaded(
    line: str, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "cases.jsonl"
    source.write_text(line + "\n")
    arguments = ["--checkpoint", "/nowhere", "--input", str(source)]
    assert act.main(arguments) == 1
    message = capsys.readouterr().err
    assert message.startswith("deft act: ")
    assert problem in message
    assert message.count("\n") == 1


def test_a_file_that_is_no_picture_is_one_line_of_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = tmp_path / "fake.png"
    fake.write_text("not a picture")
    assert act.main(["--random-weights", str(golden.TINY_OPENVLA), str(fake), "lift"]) == 1
    assert f"{fake} cannot be read" in capsys.readouterr().err


def test_a_missing_statistics_key_lists_those_there_are(
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = golden.cases_with_image()[0]
    assert act.main([*CHECKPOINT, str(case.image_path), "lift"]) == 1
    message = capsys.readouterr().err
    assert "known keys: libero_spatial, bridge_orig, lab_arm_no_noops" in message


def test_neither_or_both_kinds_of_input_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["a.png"], ["a.png", "lift", "--input", "b.jsonl"]):
        with pytest.raises(SystemExit) as ended:
            act.main([*CHECKPOINT, *arguments])
        assert ended.value.code == 2
    assert "IMAGE and INSTRUCTION" in capsys.readouterr().err


def test_no_checkpoint_and_no_random_weights_say_what_to_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    case = golden.cases_with_image()[0]
    assert act.main([str(case.image_path), "lift", "--policy", "openvla"]) == 1
    assert "give one of --checkpoint" in capsys.readouterr().err


def test_without_any_policy_the_one_that_ships_answers(capsys: pytest.CaptureFixture[str]) -> None:
    case = golden.cases_with_image()[0]
    assert act.main([str(case.image_path), "lift"]) == 0
    assert len(json.loads(capsys.readouterr().out)["tokens"]) == 7


def test_a_line_may_name_its_cameras(tmp_path: Path) -> None:
    """Without an image the first of them is the frame: the very same array, not one more."""
    for name in ("a.png", "b.png"):
        shutil.copy(golden.cases_with_image()[0].image_path, tmp_path / name)
    cameras = {"base": "a.png", "left": str(tmp_path / "b.png")}
    lines: list[dict[str, object]] = [
        {"instruction": "go", "cameras": cameras},
        {"instruction": "go", "image": "b.png", "cameras": {"base": "a.png"}},
        {"instruction": "go", "image": "a.png", "wrist_images": ["b.png"]},
    ]
    found = act.read_cases(write_cases(tmp_path / "cases.jsonl", lines))
    alone, beside, wrist = (act.observe(one) for one in found)
    assert list(alone.cameras) == ["base", "left"]
    assert alone.image is alone.cameras["base"]
    assert list(beside.cameras) == ["base"]
    assert beside.image is not beside.cameras["base"]
    assert list(wrist.cameras) == ["wrist_0"]
    with pytest.raises(PolicyError, match="neither image nor cameras"):
        act.read_cases(write_cases(tmp_path / "cases.jsonl", [{"instruction": "go"}]))
