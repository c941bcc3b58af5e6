"""Texts of policies that think aloud, taken apart: those of the golden set, and nonsense."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deft_core.reasoning import TAGS, Box, find_parts, parse_reasoning, part_costs
from deft_core.types import DecodeTrace, PassTrace
from tests import golden_ecot

WHOLE = golden_ecot.expected()
TEXTS = [
    *(case["text"] for case in WHOLE["cases"]),
    *(frame["text"] for one in WHOLE["sessions"] for frame in one["frames"]),
    *(case["text"] for case in golden_ecot.expected(golden_ecot.ONE_TOWER)["cases"]),
]


def case(number: int) -> dict[str, Any]:
    found: dict[str, Any] = WHOLE["cases"][number]
    return found


def test_a_whole_reasoning_has_its_parts_boxes_and_gripper_positions() -> None:
    found = parse_reasoning(case(0)["text"])
    assert [one.tag for one in found.parts] == list(TAGS)
    assert found.parts[0].text == "put the black bowl on the plate"
    assert found.parts[4].text == "pick up the black bowl"
    assert found.boxes == (
        Box("black bowl", (77, 91, 239, 229)),
        Box("plate", (79, 77, 195, 239)),
    )
    assert found.gripper == ((87, 111), (89, 177), (86, 172), (88, 172), (85, 167))


def test_tags_may_be_missing_and_come_in_any_order() -> None:
    found = parse_reasoning(
        " Lift it. MOVE: move up GRIPPER POSITION: [64, 64] PLAN:  up VISIBLE OBJECTS: "
        "a can a can [0, 1, 2, 3], tray[4,5,6,7] ACTION: x"
    )
    assert [one.tag for one in found.parts] == [
        *("TASK", "MOVE", "GRIPPER POSITION", "PLAN", "VISIBLE OBJECTS", "ACTION")
    ]
    assert [one.name for one in found.boxes] == ["a can a can", "tray"]
    assert found.gripper == ((64, 64),)
    assert [one.tag for one in parse_reasoning("ACTION: x").parts] == ["ACTION"]
    assert [one.text for one in parse_reasoning(case(14)["text"]).parts] == ["go"]
    assert parse_reasoning("").parts == ()


@pytest.mark.parametrize(
    "said",
    [
        "cup [1, 2, 3]",
        "cup [1, 2, 3, 4",
        "cup [1, 2, 3, 40000]",
        "cup [1, -2, 3, 4]",
        "cup []",
        "][",
    ],
)
def test_what_is_no_box_is_left_out(said: str) -> None:
    assert parse_reasoning(f"VISIBLE OBJECTS: {said} MOVE: stop").boxes == ()


def test_words_that_end_like_a_tag_are_none() -> None:
    found = parse_reasoning("go BRAINSUBTASK: no, TASKS: no, MOVEMENT: no SUBTASK: yes")
    assert [one.tag for one in found.parts] == ["TASK", "SUBTASK"]


@pytest.mark.parametrize("text", TEXTS)
def test_nothing_of_a_text_is_lost_between_its_parts(text: str) -> None:
    """Whatever a derailed model writes."""
    parts = find_parts(text)
    told = "".join(f"{tag}:{text[start:stop]}" for tag, start, stop in parts)
    assert told == f"TASK:{text}"
    parse_reasoning(text)


@given(st.text(alphabet="ab:[], 0123456789TASKPLN\n\x1b<é") | st.text())
def test_any_text_can_be_taken_apart(text: str) -> None:
    found = parse_reasoning(f"VISIBLE OBJECTS: {text} GRIPPER POSITION: {text}")
    assert all(0 <= one <= 9999 for box in found.boxes for one in box.corners)


def test_a_pass_counts_for_the_part_in_which_it_begins() -> None:
    def passed(kept: int, ms: float) -> PassTrace:
        nodes = tuple(range(kept + 1))
        return PassTrace(False, nodes, (-1, *nodes[:-1]), ("",) * len(nodes), nodes, nodes[1:], 0,
                         draft_ms=0.5, pass_ms=ms, judge_ms=0.25)  # fmt: skip

    trace = DecodeTrace(
        method="lossless",
        tokens=tuple(range(12)),
        predicted=tuple(range(12)),
        margins=(),
        passes=(passed(4, 9.0), passed(0, 1.0), passed(2, 1.0), passed(2, 1.0)),
        parts=(3, 3, 0, 6),
    )
    costs = part_costs(trace, "a PLAN: b MOVE: ACTION: c")
    assert [(one.tag, one.tokens, one.passes) for one in costs] == [
        *(("TASK", 3, 1), ("PLAN", 3, 1), ("MOVE", 0, 0), ("ACTION", 6, 2))
    ]
    assert [one.ms for one in costs] == [9.75, 1.75, 0.0, 3.5]
    assert part_costs(DecodeTrace("m", (1,), (1,), (), ()), "a") == []
