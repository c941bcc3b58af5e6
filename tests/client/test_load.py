"""`deft-client load`: what it says of a server, and whom it does not ask."""

import json
import os
from pathlib import Path

import pytest

from deft_client.__main__ import main
from deft_client.commands import frames
from deft_client.commands.load import Robot, found_text, largest, summary
from deft_core.types import ActOptions, Observation
from deft_policies.errors import RequestError
from deft_server.app import create_app
from deft_server.settings import Settings
from tests.demonstrations import write_demonstrations
from tests.server.running import running
from tests.standins.policies import FakePolicy


class PickyPolicy(FakePolicy):
    """Refuses who asks for reasoning."""

    def check(self, observation: Observation, options: ActOptions) -> None:
        if options.want_reasoning:
            raise RequestError("want_reasoning", "not here")


def test_every_frame_of_every_robot_is_accounted_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "load.json"
    app = create_app(PickyPolicy())
    with running(app) as address:
        url = f"http://{address}"
        code = main(
            ["load", url, "--robots", "4", "--rate", "20", "--seconds", "0.5", "--json", str(out)]
            + ["--deadline-ms", "5000", "--reasoning-share", "0.5"]
        )
    assert code == 0
    told = json.loads(out.read_text())
    assert [one["robot"] for one in told["robots"]] == ["0 (reasoning)", "1 (reasoning)", "2", "3"]
    for one in told["robots"]:
        assert one["wanted"] == 10
        assert one["sent"] == one["answered"] + one["late"] + sum(one["refused"].values()) <= 10
    thinking, acting = told["robots"][0], told["robots"][2]
    assert thinking["answered"] == 0
    assert thinking["refused"] == {"Unusable value": thinking["sent"]}
    assert thinking["p50_ms"] is None
    assert 0 < acting["answered"] == acting["sent"]
    assert acting["p50_ms"] <= acting["p95_ms"] <= acting["p99_ms"]
    shown = capsys.readouterr()
    assert "of a robot   0 at least" in shown.out
    assert "Unusable value" in shown.out
    assert "answered" in shown.err


def test_a_robot_has_one_frame_on_its_way(capsys: pytest.CaptureFixture[str]) -> None:
    policy = FakePolicy()
    with running(create_app(policy)) as address:
        main(["load", f"http://{address}", "--robots", "3", "--rate", "1000", "--seconds", "0.3"])
    assert max(policy.sizes) <= 3
    assert "Superseded" not in capsys.readouterr().out


def test_robots_take_the_keys_in_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = ("key-number-one-1234", "key-number-two-1234")
    rows = "\n".join(f'[robot-{n}]\nkey = "{key}"' for n, key in enumerate(keys))
    (tmp_path / "server.toml").write_text(rows)
    (tmp_path / "keys").write_text("\n".join(keys) + "\n\n")
    app = create_app(FakePolicy(), Settings(keys_file=tmp_path / "server.toml"))
    given = ["--robots", "2", "--rate", "50", "--seconds", "0.2"]
    with running(app) as address:
        url = f"http://{address}"
        assert main(["load", url, *given, "--api-key-file", str(tmp_path / "keys")]) == 0
        assert len({owner for owner, _ in app.service.sessions.names()}) == 2
        assert main(["load", url, *given]) == 1
        assert "API key" in capsys.readouterr().err
        assert main(["ping", url, "--api-key-file", str(tmp_path / "keys")]) == 2
        assert "holds 2 API keys, and one is needed" in capsys.readouterr().err
        monkeypatch.setenv("DEFT_API_KEY", keys[0])
        assert main(["load", "--url", url, *given]) == 0


@pytest.mark.parametrize(
    ("url", "complaint"),
    [
        ("http://8.8.8.8:8000", "--yes-i-own-it"),
        ("http://[2001:4860:4860::8888]", "--yes-i-own-it"),
        ("ftp://127.0.0.1", "http://"),
    ],
)
def test_a_server_that_may_be_somebody_elses_is_not_loaded(
    url: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["load", url, "--seconds", "0.1"]) == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(
    "given", [["--robots", "100000"], ["--rate", "nan"], ["--seconds", "0"], ["--robots", "x"]]
)
def test_numbers_out_of_range_are_refused(
    given: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["load", "http://127.0.0.1:1", *given])
    assert ended.value.code == 2
    assert given[0] in capsys.readouterr().err


def test_a_pipe_in_place_of_the_keys_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "keys")
    assert main(["load", "http://127.0.0.1:1", "--api-key-file", str(tmp_path / "keys")]) == 2
    assert "is not a regular file" in capsys.readouterr().err


def test_the_summary_names_the_fewest_and_the_most() -> None:
    lucky, unlucky = Robot("0", 10), Robot("1", 10)
    lucky.outcomes.update({"answered": 9, "late": 1})
    lucky.latencies_ms += [10.0, 20.0]
    unlucky.outcomes.update({"Too many requests": 4})
    told = summary([lucky, unlucky], 2.0)
    assert "of a robot   0 at least, 9 at most" in told
    assert "4.5 a second" in told
    assert "4 x Too many requests" in told


@pytest.mark.parametrize("most", [1, 2, 3, 10, 64, 256])
def test_the_largest_number_of_robots_is_found_with_few_questions(most: int) -> None:
    for answer in range(most + 1):
        asked: list[int] = []

        def holds(number: int, answer: int = answer, asked: list[int] = asked) -> bool:
            asked.append(number)
            return number <= answer

        assert largest(holds, most) == answer
        assert len(asked) == len(set(asked)) <= 2 * most.bit_length() + 1
        assert max(asked) <= most


def test_find_says_how_many_robots_are_carried(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    # One frame for each robot: where a machine is slow, a second one would fall due meanwhile.
    given = ["--find", "--robots", "3", "--rate", "1", "--seconds", "1.9"]
    given += ["--deadline-ms", "20000", "--json", str(out)]
    with running(create_app(FakePolicy())) as address:
        assert main(["load", f"http://{address}", *given]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith(
        "carries      3 robots at 1 Hz with 99% in 20000 ms; 3 are the most"
    )
    assert shown.err.count("robots: 100.0% in 20000 ms") == 3
    found = json.loads(out.read_text())
    assert found["carries"] == 3
    assert found["shares_in_time"] == {"1": 1.0, "2": 1.0, "3": 1.0}


def test_a_server_that_carries_no_robot_is_said_to(capsys: pytest.CaptureFixture[str]) -> None:
    class Refusing(FakePolicy):
        def check(self, observation: Observation, options: ActOptions) -> None:
            raise RequestError("state", "not here")

    given = ["--find", "--rate", "10", "--seconds", "0.3"]
    with running(create_app(Refusing())) as address:
        assert main(["load", f"http://{address}", *given]) == 1
    shown = capsys.readouterr()
    assert shown.out == (
        "carries      not one robot at 10 Hz with 99% in 100 ms: 0.0% were in time\n"
    )
    assert shown.err.count("1 robots: 0.0%") == 2  # a hiccup is given a second chance


def test_the_next_number_of_robots_is_named_with_its_share() -> None:
    said = found_text(9, {8: 1.0, 9: 0.995, 10: 0.96}, 256, 5.0, 200.0)
    assert said == (
        "carries      9 robots at 5 Hz with 99% in 200 ms; of 10 robots 96.0% were in time\n"
    )


def test_an_answer_after_the_deadline_is_not_in_time() -> None:
    robot = Robot("0", 4, latencies_ms=[10.0, 200.0, 200.5])
    assert robot.answered_within(200.0) == 2


def test_reasoning_robots_cannot_be_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "http://127.0.0.1:1", "--find", "--reasoning-share", "0.5"]) == 2
    assert "--find" in capsys.readouterr().err


def test_recorded_frames_are_sent_in_their_order_an_episode_to_each_robot(tmp_path: Path) -> None:
    write_demonstrations(tmp_path / "data", episodes=2, steps=3)
    policy = FakePolicy()
    given = ["--robots", "3", "--rate", "20", "--seconds", "0.4"]
    with running(create_app(policy)) as address:
        url = f"http://{address}"
        assert main(["load", url, *given, "--recording", str(tmp_path / "data")]) == 0
    sent: dict[str, list[int]] = {}
    stored = frames.recorded_frames(tmp_path / "data", ())
    known = [one.image.tobytes() for episode in stored for one in episode]
    for batch in policy.batches:
        for request in batch:
            session = str(request.options.session_id)
            sent.setdefault(session, []).append(known.index(request.observation.image.tobytes()))
    assert len(sent) == 3
    assert sorted(one[0] for one in sent.values()) == [0, 0, 3]
    assert all(len({index // 3 for index in one}) == 1 for one in sent.values())


def test_no_more_recorded_frames_are_kept_than_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_demonstrations(tmp_path / "data", episodes=3, steps=4)
    ((first, *_), *_) = frames.recorded_frames(tmp_path / "data", ())
    monkeypatch.setattr(frames, "MOST_BYTES", 6 * first.image.nbytes)
    assert [len(one) for one in frames.recorded_frames(tmp_path / "data", ())] == [4, 2]
    monkeypatch.setattr(frames, "MOST_BYTES", 1)
    assert [len(one) for one in frames.recorded_frames(tmp_path / "data", ())] == [1]


def test_a_recording_that_is_none_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running(create_app(FakePolicy())) as address:
        url = f"http://{address}"
        assert main(["load", url, "--recording", str(tmp_path / "nothing")]) == 1
    assert "no such file" in capsys.readouterr().err
