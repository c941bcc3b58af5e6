"""One task of every suite: it loads, takes an initial state and stands still. All of them are
checked by `deft-client assets check`."""

import pytest
from PIL import Image

from deft_client.libero.assets_check import check_task
from deft_client.libero.assets_command import main
from deft_client.libero.suites import find_task
from tests.libero.simulator import PHYSICS, needs_simulator

pytestmark = needs_simulator
ON_STAND_INS = ("--assets", "stand-in")


@pytest.mark.parametrize(
    ("suite", "number", "trial"),
    [
        ("libero_spatial", 4, 13),
        ("libero_object", 3, 44),
        ("libero_goal", 9, 5),
        ("libero_10", 9, 30),
    ],
)
def test_a_task_stands_still(suite, number, trial):
    problems = check_task(find_task(suite, number), [trial], PHYSICS)
    assert not problems, "\n".join(map(str, problems))


def test_show_renders_a_scene(tmp_path, capsys):
    out = tmp_path / "scene.png"
    assert main(["show", "libero_object/5", "--out", str(out), "--size", "96", *ON_STAND_INS]) == 0
    assert "pick up the tomato sauce" in capsys.readouterr().out
    with Image.open(out) as picture:
        assert picture.size == (96, 96)


def test_build_writes_assets_that_can_be_used(tmp_path, capsys):
    assert main(["build", str(tmp_path / "assets")]) == 0
    assert "wrote stand-in" in capsys.readouterr().out
    out = str(tmp_path / "scene.png")
    assert main(["show", "libero_object/5", "--out", out, "--assets", str(tmp_path)]) == 1
    assert "no readable scenes/" in capsys.readouterr().err


def test_questions_that_make_no_sense_are_answered_with_two(capsys):
    assert main(["show", "libero_object/99"]) == 2
    assert "0 to 9" in capsys.readouterr().err
