"""`deft-client load`: what it says of a server, and whom it does not ask."""

import json
import os
from pathlib import Path

import pytest

from deft_client.__main__ import main
from deft_client.commands.load import Robot, summary
from deft_client.types import ActOptions, Observation
from deft_policies.errors import RequestError
from deft_server.app import create_app
from deft_server.settings import Settings
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


def test_robots_take_the_keys_in_turn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("key-number-one-1234", "key-number-two-1234")
    rows = "\n".join(f'[robot-{n}]\nkey = "{key}"' for n, key in enumerate(keys))
    (tmp_path / "server.toml").write_text(rows)
    (tmp_path / "keys").write_text("\n".join(keys) + "\n\n")
    app = create_app(FakePolicy(), Settings(keys_file=tmp_path / "server.toml"))
    given = ["--robots", "2", "--rate", "50", "--seconds", "0.2"]
    with running(app) as address:
        url = f"http://{address}"
        assert main(["load", url, *given, "--keys", str(tmp_path / "keys")]) == 0
        assert len({owner for owner, _ in app.service.sessions.names()}) == 2
        assert main(["load", url, *given]) == 1
    assert "API key" in capsys.readouterr().err


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
    assert main(["load", "http://127.0.0.1:1", "--keys", str(tmp_path / "keys")]) == 2
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
