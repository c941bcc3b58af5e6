"""The soak notices what grows and what is left, and passes a server that keeps nothing."""

from dataclasses import replace

import pytest

from scripts.soak import Limits, Sample, find_growth, find_leftovers, main

STILL = [Sample(float(at), 500.0 + at % 2, 30.0, 12.0) for at in range(40)]


def test_what_goes_up_and_down_did_not_grow():
    assert find_growth(STILL, Limits()) == []


@pytest.mark.parametrize(
    ("name", "each", "told"),
    [
        ("memory_mb", 4.0, "memory_mb grew from 558"),
        ("open_files", 1.0, "open_files grew from 44 to 64"),
        ("sessions", 5.0, "sessions grew from 84"),
    ],
)
def test_what_every_answer_leaves_behind_is_found(name, each, told):
    leaking = [
        replace(one, **{name: getattr(one, name) + each * at}) for at, one in enumerate(STILL)
    ]
    (found,) = find_growth(leaking, Limits())
    assert found.startswith(told)


def test_memory_that_the_first_answers_take_is_no_leak():
    warm = [replace(one, memory_mb=one.memory_mb - 300) for one in STILL[:8]]
    assert find_growth([*warm, *STILL[8:]], Limits()) == []


def test_what_is_left_when_all_have_gone_is_found():
    first, last = STILL[0], replace(STILL[0], sessions=0.0)
    assert find_leftovers(first, last, Limits()) == []
    assert "3 sessions are left" in find_leftovers(first, replace(last, sessions=3.0), Limits())[0]
    assert "50 files" in find_leftovers(first, replace(last, open_files=50.0), Limits())[0]


def test_a_server_of_constant_answers_keeps_nothing(capsys):
    assert main(["--minutes", "0.05", "--every", "0.5", "--policy", "constant"]) == 0
    assert "nothing grew, and nothing was left" in capsys.readouterr().out
