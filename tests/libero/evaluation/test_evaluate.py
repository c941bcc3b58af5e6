"""The evaluation as a whole: real worker processes, real files, a tiny world and a tiny server."""

import shlex
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from deft_libero.commands.evaluate import main
from deft_libero.report.speed import speedup_of
from deft_libero.results.records import Outcome, TrialKey
from deft_libero.results.store import RunResults, load_run, load_runs
from scripts.local_server import local_server
from tests.standins.tiny_server import INFO, TinyServer, tiny_server

WORLD = ("--environment", "point_world")
BROKEN = "tests.standins.broken"


@pytest.fixture(autouse=True)
def _workers_can_import_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(Path(__file__).parents[3])


def _evaluate(out: Path, *arguments: str, suite: str = "point_world") -> int:
    return main([suite, "--out", str(out), *WORLD, *arguments])


def _run(out: Path, name: str = "lossless") -> RunResults:
    return load_run(out / f"point_world-{name}")


def _actions(run: RunResults) -> dict[TrialKey, NDArray[np.float64]]:
    return {record.key: record.actions for record in run.records}


def test_episodes_are_played_against_a_server_and_every_answer_is_kept(tmp_path: Path) -> None:
    with tiny_server() as server:
        code = _evaluate(tmp_path, "--url", server.url, "--trials", "40-41")
    run = _run(tmp_path)
    assert code == 0
    assert [(one.key.task, one.key.trial) for one in run.records] == [
        (0, 40), (0, 41), (1, 40), (1, 41), (2, 40), (2, 41),
    ]  # fmt: skip
    assert [one.outcome.value for one in run.records] == ["succeeded"] * 4 + ["failed"] * 2
    first = run.records[0]
    assert first.num_steps == len(first.answers) > 3
    assert {one.accepted for one in first.answers} == {(3, 2)}
    assert {one.timings.prefill_ms for one in first.answers} == {3.0}
    assert all(one.timings.round_trip_ms > 0 for one in first.answers)
    assert run.header.options["statistics_key"] == "point_world"


def test_two_workers_and_one_play_exactly_the_same_episodes(tmp_path: Path) -> None:
    played = []
    for number, workers in enumerate("112"):
        with tiny_server() as server:
            folder = tmp_path / str(number)
            _evaluate(
                folder, "--url", server.url, "--tasks", "0,1", "--episodes", "4",
                "--workers", workers,
            )  # fmt: skip
        played.append(_run(folder))
    for other in played[1:]:
        for key, actions in _actions(played[0]).items():
            assert actions.tobytes() == _actions(other)[key].tobytes()
        assert [one.outcome for one in other.records] == [one.outcome for one in played[0].records]


def test_the_same_command_plays_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_server() as server:
        _evaluate(tmp_path, "--url", server.url, "--episodes", "2")
        before = (tmp_path / "point_world-lossless" / "episodes.jsonl").read_bytes()
        num_requests = len(server.requests)
        assert _evaluate(tmp_path, "--url", server.url, "--episodes", "2") == 0
        assert len(server.requests) == num_requests
        capsys.readouterr()
        assert _evaluate(tmp_path, "--url", server.url, "--episodes", "3") == 0
    said = capsys.readouterr().err
    assert said.startswith("point_world lossless: 3 episodes (2 already there, 1 to play), lock")
    content = (tmp_path / "point_world-lossless" / "episodes.jsonl").read_bytes()
    assert content.startswith(before)
    assert len(_run(tmp_path).records) == 3


def test_every_decoding_method_gets_a_run_of_its_own_on_the_same_trials(tmp_path: Path) -> None:
    with tiny_server() as server:
        _evaluate(
            tmp_path, "--url", server.url, "--episodes", "2", "--decoding", "deft", "lossless",
            "--radius", "5",
        )  # fmt: skip
    first, second = _run(tmp_path, "deft-r5"), _run(tmp_path, "lossless-r5")
    assert list(_actions(first)) == list(_actions(second))
    asked = [(one.options.decoding, one.options.radius) for one in server.requests]
    assert set(asked) == {("deft", 5), ("lossless", 5)}


def test_runs_of_several_methods_are_played_in_turn(tmp_path: Path) -> None:
    arguments = ["--trials", "0-5", "--tasks", "0", "--decoding", "autoregressive", "lossless"]
    with tiny_server() as server:
        assert _evaluate(tmp_path, "--url", server.url, *arguments) == 0
    runs = load_runs(tmp_path)
    assert [len(run.records) for run in runs] == [6, 6]
    found = speedup_of(runs[1], runs[0])
    assert found is not None
    assert not any("in turn" in doubt for doubt in found.doubts)


def test_observations_can_go_through_the_servers_websocket(tmp_path: Path) -> None:
    with local_server("--policy", "constant") as url:
        code = _evaluate(tmp_path, "--url", url, "--stream", "--episodes", "1", "--step-limit", "5")
    (record,) = _run(tmp_path, "constant-stream").records
    assert (code, record.num_steps) == (0, 5)


def test_one_server_may_be_played_thinking_aloud_and_acting_at_once(tmp_path: Path) -> None:
    with tiny_server() as server:
        server.info = replace(INFO, max_tokens=320, thinks_when_asked=True)
        for flags in ([], ["--reasoning"]):
            assert _evaluate(tmp_path, "--url", server.url, "--episodes", "1", *flags) == 0
        at_once, aloud = _run(tmp_path), _run(tmp_path, "lossless-thinking-aloud")
    asked = [one.options.want_reasoning for one in server.requests]
    assert asked == [False] * at_once.records[0].num_steps + [True] * aloud.records[0].num_steps
    assert "reasoning" not in at_once.header.options
    assert aloud.header.options["reasoning"] == "aloud"


def test_states_that_a_policy_holds_out_are_not_played_by_the_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_server() as server:
        server.info = replace(INFO, held_out={"point_world": "30-39"})
        arguments = ("--url", server.url, "--tasks", "0", "--trials", "29-30")
        assert _evaluate(tmp_path, *arguments) == 2
        assert "holds out initial states 30-39 of point_world" in capsys.readouterr().err
        assert not server.requests
        assert _evaluate(tmp_path, *arguments[:-1], "29,40") == 0


def test_a_run_says_which_weights_answered_in_which_format(tmp_path: Path) -> None:
    told = {
        **{"weights": "runs/a", "digest of weights": "12ab", "digest of head eagle": "34cd"},
        **{"dtype": "bfloat16", "processor": "a CPU", "device": "cpu (1 threads)", "guard": "on"},
    }
    with tiny_server() as server:
        server.info = replace(INFO, details=told)
        assert _evaluate(tmp_path, "--url", server.url, "--episodes", "1") == 0
    header = _run(tmp_path, "lossless-bfloat16").header
    assert header.weights == "12ab"
    assert told.items() <= header.server.items()


def test_only_a_policy_that_thinks_is_asked_for_its_text(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_server() as server:
        assert _evaluate(tmp_path, "--url", server.url, "--reasoning", "--episodes", "1") == 2
        assert "--reasoning: the policy there writes none" in capsys.readouterr().err
        server.info = replace(INFO, max_tokens=320)
        assert _evaluate(tmp_path, "--url", server.url, "--episodes", "1") == 0
    assert all(one.options.want_reasoning for one in server.requests)


def test_real_time_is_a_run_beside_lock_step(tmp_path: Path) -> None:
    with tiny_server() as server:
        code = _evaluate(
            tmp_path, "--url", server.url, "--episodes", "1", "--real-time", "--lock-step",
            "--step-limit", "12",
        )  # fmt: skip
    assert code == 0
    patient, hasty = _run(tmp_path), _run(tmp_path, "lossless-real-time")
    assert patient.header.options["pacing"] == "lock-step"
    assert hasty.header.options["pacing"] == "real-time"
    assert hasty.records[0].answers[0].used_step > hasty.records[0].answers[0].asked_step


def test_a_server_that_fails_makes_episodes_errored_and_never_failed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_server() as server:
        server.status = 500
        code = _evaluate(tmp_path, "--url", server.url, "--episodes", "2")
        assert code == 3
        assert [one.outcome for one in _run(tmp_path).records] == [Outcome.ERRORED] * 2
        assert "try 3 of 3: 500" in capsys.readouterr().err
        server.status = 200
        assert _evaluate(tmp_path, "--url", server.url, "--episodes", "2") == 0
    assert [one.outcome for one in _run(tmp_path).records] == [Outcome.SUCCEEDED] * 2


def test_a_bug_in_a_policy_is_errored_with_its_last_words(tmp_path: Path) -> None:
    assert _evaluate(tmp_path, "--local-policy", f"{BROKEN}:crash", "--episodes", "1") == 3
    (record,) = _run(tmp_path, "crash").records
    assert "ZeroDivisionError: somebody divided by nothing" in record.error


def test_a_refused_kind_of_request_stops_the_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_server() as server:
        server.status = 422
        assert _evaluate(tmp_path, "--url", server.url, "--episodes", "5") == 3
        assert "422 Broken on purpose" in capsys.readouterr().err
    assert _run(tmp_path).records == ()


def test_an_episode_with_exploding_physics_is_errored(
    tmp_path: Path,
) -> None:
    code = main(
        ["point_world", "--out", str(tmp_path), "--environment", f"{BROKEN}:open_exploding",
         "--local-policy", f"{BROKEN}:stay", "--tasks", "0", "--trials", "0-2", "--step-limit", "5"]
    )  # fmt: skip
    records = _run(tmp_path, "stay").records
    assert code == 3
    assert [one.outcome for one in records] == [Outcome.FAILED, Outcome.ERRORED, Outcome.FAILED]
    assert "unstable" in records[1].error
    assert records[1].num_steps == 3


def test_a_run_is_not_gone_on_with_against_a_server_on_other_threads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_server() as server:
        server.info = replace(INFO, details={"device": "cpu (1 threads)"})
        assert _evaluate(tmp_path, "--url", server.url, "--episodes", "1") == 0
        server.info = replace(INFO, details={"device": "cpu (2 threads)"})
        assert _evaluate(tmp_path, "--url", server.url, "--episodes", "2") == 2
    said = capsys.readouterr().err
    assert "server's device: there 'cpu (1 threads)', now 'cpu (2 threads)'" in said
    assert _run(tmp_path).header.server["device"] == "cpu (1 threads)"


def test_an_errored_episode_keeps_what_it_had_and_its_reason(tmp_path: Path) -> None:
    code = _evaluate(tmp_path, "--local-policy", f"{BROKEN}:vanish", "--episodes", "1")
    (record,) = _run(tmp_path, "vanish").records
    assert code == 3
    assert record.outcome is Outcome.ERRORED
    assert record.error == "the cable was pulled"
    assert (record.num_steps, len(record.answers)) == (3, 3)


def _stop_when(server: TinyServer, num_requests: int) -> threading.Thread:
    def watch() -> None:
        while len(server.requests) < num_requests:
            threading.Event().wait(0.005)
        server.shutdown()
        server.server_close()

    thread = threading.Thread(target=watch)
    thread.start()
    return thread


def test_a_dead_server_ends_the_evaluation_with_what_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_server() as server:
        watcher = _stop_when(server, 40)
        code = _evaluate(tmp_path, "--url", server.url, "--trials", "0-9", "--patience", "0.1")
        watcher.join()
    counts = [one.outcome for one in _run(tmp_path).records]
    assert code == 3
    assert counts.count(Outcome.ERRORED) == 1
    assert Outcome.FAILED not in counts
    assert counts.count(Outcome.SUCCEEDED) >= 1
    assert "stayed away" in capsys.readouterr().err


def test_an_episode_that_kills_its_worker_three_times_is_errored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _evaluate(tmp_path, "--local-policy", f"{BROKEN}:die", "--episodes", "1") == 3
    (record,) = _run(tmp_path, "die").records
    assert "signal 9" in record.error
    assert "1 episodes Errored" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "code", "told"),
    [
        (["--url", "http://127.0.0.1:9"], 1, "server running"),
        (["--local-policy", "nonsense"], 2, "--local-policy takes module:function"),
        (["--local-policy", "no.such:thing"], 2, "No module named"),
        (["--local-policy", f"{BROKEN}:die", "--tasks", "3"], 2, "got '3'"),
        (["--local-policy", f"{BROKEN}:die", "--trials", "a"], 2, "--trials"),
        (["--local-policy", f"{BROKEN}:die", "--episodes", "0"], 2, "--episodes"),
        (["--local-policy", f"{BROKEN}:die", "--workers", "0"], 2, "--workers"),
        (["--local-policy", f"{BROKEN}:die", "--network-delay-ms", "-1"], 2, "0 or more"),
    ],
)
def test_what_cannot_be_evaluated_is_one_line_and_an_exit_code(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    code: int,
    told: str,
) -> None:
    assert _evaluate(tmp_path, *arguments) == code
    message = capsys.readouterr().err
    assert told in message
    assert message.count("\n") == 1


def test_a_wrong_suite_name_is_answered_with_the_right_ones(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["libero_objekt", "--local-policy", f"{BROKEN}:die", "--out", str(tmp_path)]
    assert main(arguments) == 2
    assert "did you mean libero_object?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--decoding", "magic"], "lossless, deft, autoregressive"),
        (["--statistics-key", "x"], "point_world"),
    ],
)
def test_what_the_server_lacks_is_noticed_before_any_episode(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], told: str
) -> None:
    with tiny_server() as server:
        assert _evaluate(tmp_path, "--url", server.url, *arguments) == 2
    assert told in capsys.readouterr().err


def test_results_of_other_options_are_not_mixed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with tiny_server() as server:
        _evaluate(tmp_path, "--url", server.url, "--episodes", "1")
        content = (tmp_path / "point_world-lossless" / "episodes.jsonl").read_bytes()
        limit = ("--step-limit", "9")
        assert _evaluate(tmp_path, "--url", server.url, "--episodes", "1", *limit) == 2
        assert "now '9'" in capsys.readouterr().err
        # Another seed is another run.
        assert _evaluate(tmp_path, "--url", server.url, "--episodes", "1", "--seed", "8") == 0
    assert (tmp_path / "point_world-lossless" / "episodes.jsonl").read_bytes() == content
    assert (tmp_path / "point_world-lossless-seed8").is_dir()


def test_an_unusable_assets_folder_is_an_error_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--assets", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main(["libero_object", "--local-policy", f"{BROKEN}:die", *arguments]) == 1
    assert "assets folder" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_disk_that_fills_up_ends_the_evaluation_and_room_lets_it_go_on(tmp_path: Path) -> None:
    """A limit on the size of files stands in for the full disk."""
    command = [
        sys.executable, "-m", "deft_client", "eval", "point_world", *WORLD, "--out", str(tmp_path),
        "--local-policy", "solve", "--episodes", "6",
    ]  # fmt: skip
    limited = ["bash", "-c", f"ulimit -f 2; {shlex.join(command)}"]
    full = subprocess.run(limited, capture_output=True, text=True)
    assert full.returncode == 3
    assert "same command again" in full.stderr
    num_kept = len(_run(tmp_path, "solve").records)
    assert 1 <= num_kept < 6
    assert subprocess.run(command, capture_output=True).returncode == 0
    assert len(_run(tmp_path, "solve").records) == 6


def test_a_simulator_that_does_not_open_ends_the_evaluation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "point_world", "--local-policy", f"{BROKEN}:die", "--out", str(tmp_path),
        "--environment", f"{BROKEN}:open_nothing", "--workers", "2",
    ]  # fmt: skip
    assert main(arguments) == 3
    assert "no OpenGL" in capsys.readouterr().err
