from pathlib import Path

import pytest

from deft_core.peers.conventions import ClientChain, Gripper
from deft_libero.commands.evaluate import read_options
from deft_libero.errors import SelectionError
from deft_libero.evaluation.runs import RunConfig, choose_statistics_key, plan_runs
from deft_libero.evaluation.selection import parse_numbers, select_episodes
from deft_libero.simulator.suites import find_suite
from tests.standins.tiny_server import INFO

OBJECT = find_suite("libero_object")


@pytest.mark.parametrize(
    ("text", "numbers"),
    [("3", (3,)), ("0,3", (0, 3)), ("5-7", (5, 6, 7)), ("7,0-2,1", (0, 1, 2, 7)), (" 4 ", (4,))],
)
def test_numbers_are_lists_and_ranges(text: str, numbers: tuple[int, ...]) -> None:
    assert parse_numbers(text, 10, "--tasks") == numbers


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "1,,2", "10", "3-12", "5-3", "1.5", "²"])
def test_numbers_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(SelectionError, match="--tasks"):
        parse_numbers(text, 10, "--tasks")


def test_a_few_episodes_are_spread_evenly_over_the_tasks() -> None:
    keys = select_episodes(OBJECT, None, "40-49", 12)
    assert [key.task for key in keys] == [*range(10), 0, 1]
    assert [key.trial for key in keys] == [40] * 10 + [41] * 2


def test_without_a_choice_a_suite_is_five_hundred_episodes() -> None:
    assert len(set(select_episodes(OBJECT, None, None, None))) == 500


def _plan(*arguments: str) -> list[RunConfig]:
    asked = read_options([*arguments, "--environment", "point_world"])
    return plan_runs(asked, INFO)


def test_a_run_for_every_decoding_method_and_pacing() -> None:
    runs = _plan("point_world", "--decoding", "deft", "lossless", "--real-time", "--lock-step")
    assert [run.name for run in runs] == [
        "point_world deft",
        "point_world deft real-time",
        "point_world lossless",
        "point_world lossless real-time",
    ]
    assert len({run.folder for run in runs}) == 4
    assert runs[0].folder == Path("results/point_world-deft")


def test_the_servers_own_decoding_names_the_run() -> None:
    (run,) = _plan("point_world")
    assert run.name == "point_world lossless"
    assert run.server["decoding"] == "lossless"
    assert run.source.options.decoding is None


def test_profiles_settle_conventions_and_options_override_them() -> None:
    (run,) = _plan("point_world", "--profile", "openpi")
    assert run.executed_steps == 5
    assert run.environment.wrist_camera
    assert run.header().options["gripper"] == "robosuite"
    (run,) = _plan(
        "point_world", "--profile", "openvla", "--image-chain", "libero-uncropped",
        "--gripper", "robosuite", "--executed-steps", "2",
    )  # fmt: skip
    profile = run.source.profile
    assert profile.client_chain is ClientChain.LIBERO_UNCROPPED
    assert profile.gripper is Gripper.ROBOSUITE
    assert run.executed_steps == 2


def test_an_openpi_server_may_be_named_as_its_own_clients_do() -> None:
    (run,) = _plan("point_world", "--profile", "openpi", "--url", "ws://robot:8000")
    assert run.source.url == "http://robot:8000"


def test_the_suites_step_limit_holds_unless_another_is_asked_for() -> None:
    (run,) = _plan("point_world")
    assert run.step_limit == 80
    (run,) = _plan("point_world", "--step-limit", "7")
    assert run.step_limit == 7


def test_the_statistics_key_is_the_suites_as_far_as_the_server_has_it() -> None:
    goal = find_suite("libero_goal")
    assert choose_statistics_key(None, OBJECT, INFO) == "libero_object_no_noops"
    assert choose_statistics_key(None, goal, INFO) is None
    assert choose_statistics_key(None, goal, None) == "libero_goal"
    assert choose_statistics_key("point_world", goal, INFO) == "point_world"
    with pytest.raises(SelectionError, match="point_world, libero_object_no_noops"):
        choose_statistics_key("libero_goal", goal, INFO)


@pytest.mark.parametrize("flag", ["--episode", "--patient"])
def test_flags_are_not_guessed(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_options(["point_world", flag, "1"])
    assert "unrecognized arguments" in capsys.readouterr().err


def test_plain_is_a_name_for_plain_decoding() -> None:
    names = [run.name for run in _plan("point_world", "--decoding", "plain", "autoregressive")]
    assert names == ["point_world autoregressive"]


@pytest.mark.parametrize(
    "words",
    [
        ["http://robot:8000", "point_world"],
        ["point_world", "http://robot:8000", "--tasks", "0"],
        ["point_world", "--tasks", "0", "http://robot:8000"],
        ["point_world", "--decoding", "deft", "http://robot:8000"],
        ["point_world", "--url", "http://robot:8000"],
    ],
)
def test_the_servers_url_may_stand_anywhere(words: list[str]) -> None:
    asked = read_options(words)
    assert asked.suites == ("point_world",)
    assert asked.source.url == "http://robot:8000"
    assert asked.decoding in ((None,), ("deft",))


@pytest.mark.parametrize(
    ("words", "missing"),
    [
        (["http://robot:8000"], "SUITE"),
        (["point_world", "--decoding", "http://robot:8000"], "--decoding"),
    ],
)
def test_a_url_alone_is_neither_a_suite_nor_a_method(
    words: list[str], missing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_options(words)
    assert ended.value.code == 2
    assert missing in capsys.readouterr().err
