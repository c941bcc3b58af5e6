"""`python -m scripts.plan`: where it takes times from, what it prints, and how it ends."""

import asyncio
import re

import numpy as np
import pytest

from deft_client.types import ActOptions
from deft_policies.constant import SleepingPolicy
from deft_server.serving.service import Service
from deft_server.settings import Settings, SettingsError
from scripts.plan.__main__ import main
from scripts.plan.service_times import collect, measure, parse, read_log
from tests.standins.policies import CALLER, FakePolicy, frame

FLEET = ["--robots", "20", "--hz", "5", "--seconds", "10"]


def test_sizes_in_between_are_interpolated_and_smaller_ones_take_as_long():
    service = parse("2:20,4:40")
    assert [service.at(size, 0.5) for size in (1, 2, 3, 4)] == pytest.approx(
        [0.02, 0.02, 0.03, 0.04]
    )


def test_quantiles_are_those_of_the_samples():
    service = collect([(1, value) for value in np.linspace(0.0, 1.0, 101)])
    assert service.at(1, 0.99) == pytest.approx(0.99)


@pytest.mark.parametrize("text", ["", "x", "0:5", "1:0", "1:-3", "1:nan", "1:inf", "1:2:3"])
def test_what_is_no_service_time_is_refused(text):
    with pytest.raises(SettingsError):
        parse(text)


def test_times_are_read_from_the_log_of_a_server(tmp_path):
    log = tmp_path / "server.log"
    log.write_text(
        '{"level": "info", "message": "a batch of 2 took 30.500 ms"}\n'
        '{"level": "info", "message": "ready: policy sleeping"}\n'
        "INFO a batch of 1 took 20.000 ms\n"
    )
    service = read_log(log)
    assert service.at(1, 0.5) == pytest.approx(0.02)
    assert service.at(2, 0.5) == pytest.approx(0.0305)


async def served_batches(log_batches: bool) -> None:
    service = Service(lambda: FakePolicy(), Settings(log_batches=log_batches))
    service.start()
    await service.scheduler.settled()
    for _ in range(3):
        await service.act(frame(), ActOptions(), CALLER)
    await service.close()


def test_a_server_logs_its_batches_where_asked(tmp_path, caplog):
    log = tmp_path / "server.log"
    with caplog.at_level("INFO"):
        asyncio.run(served_batches(log_batches=False))
        assert "a batch of" not in caplog.text
        asyncio.run(served_batches(log_batches=True))
    log.write_text(caplog.text)
    assert {size: len(found) for size, found in read_log(log).seconds.items()} == {1: 3}


def test_a_log_without_batches_says_how_to_get_one(tmp_path):
    log = tmp_path / "server.log"
    log.write_text("nothing\n")
    with pytest.raises(SettingsError, match="--log-batches"):
        read_log(log)
    with pytest.raises(SettingsError, match="cannot read"):
        read_log(tmp_path / "none.log")


def test_a_policy_is_measured_in_batches_of_every_size():
    service = measure(SleepingPolicy(sleep_s=0.002), (1, 3), rounds=4)
    assert {size: len(found) for size, found in service.seconds.items()} == {1: 4, 3: 4}
    assert service.at(3, 0.0) >= 0.002


def test_the_fewest_replicas_are_found_and_said(capsys):
    asked = [*FLEET, "--p99-ms", "75", "--service-ms", "50", "--max-batch", "1"]
    assert main([*asked]) == 0
    said = capsys.readouterr().out
    found = re.search(r"^(\d+) replicas, ([\d.]+) robots each$", said, re.M)
    assert found is not None
    assert int(found[1]) * float(found[2]) == pytest.approx(20, rel=0.05)


def test_so_many_replicas_as_given_are_judged(capsys):
    asked = [*FLEET, "--p99-ms", "60", "--service-ms", "50", "--max-batch", "1"]
    assert main([*asked, "--replicas", "4"]) == 1
    assert "the goal is missed" in capsys.readouterr().out
    assert main([*asked, "--replicas", "20"]) == 0
    assert "the goal is met" in capsys.readouterr().out


def test_what_no_number_of_replicas_can_reach_is_said_with_its_reason(capsys):
    asked = [*FLEET, "--max-batch", "1", "--service-ms", "50", "--most-replicas", "32"]
    assert main([*asked, "--p99-ms", "40"]) == 1
    assert "a batch alone" in capsys.readouterr().out
    assert main([*asked, "--p99-ms", "400", "--front-ms", "20"]) == 1
    assert "2.0 times too busy" in capsys.readouterr().out


def test_the_policy_named_by_flags_is_measured(capsys):
    asked = [*FLEET, "--p99-ms", "400", "--max-batch", "2", "--rounds", "1"]
    assert main([*asked, "--policy", "sleeping", "--sleep-ms", "1"]) == 0
    assert "ms per batch, p50 (p99), by size: 1: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--service-ms", "1:50", "--max-batch", "4"], "no batch above 1"),
        (["--service-ms", "x"], "service time"),
        (["--service-ms", "50", "--max-batch", "1", "--robots", "1"], "100 frames"),
    ],
)
def test_a_question_that_cannot_be_answered_says_why(flags, said, capsys):
    assert main([*FLEET, "--p99-ms", "60", *flags]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        ["--robots", "-1"],
        ["--hz", "0"],
        ["--jitter", "2"],
        ["--service-ms", "50", "--policy", "sleeping"],
        ["--policy", "sleeping", "--sleep-ms", "-1"],
    ],
)
def test_numbers_and_flags_that_make_no_sense_are_usage_errors(flags, capsys):
    with pytest.raises(SystemExit):
        main([*FLEET, "--p99-ms", "60", *flags])
    assert "python -m scripts.plan: error:" in capsys.readouterr().err
