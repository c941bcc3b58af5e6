"""What a policy writes before it acts, taken apart: its parts, and what it points at.

Embodied chain-of-thought policies write `TAG: text` one after the other. Which tags come, and in
which order, differs from checkpoint to checkpoint, and a text may stop anywhere or make no sense:
what cannot be read is left out, never guessed.
"""

import re
from dataclasses import dataclass
from itertools import accumulate

from deft_core.types import DecodeTrace

FIRST_TAG = "TASK"  # prompts end with it, so a text begins behind it
ACTION = "ACTION"  # what stands behind it are action tokens
TAGS = (
    *(FIRST_TAG, "PLAN", "VISIBLE OBJECTS", "SUBTASK REASONING", "SUBTASK"),
    *("MOVE REASONING", "MOVE", "GRIPPER POSITION", ACTION),
)
PICTURE = 256  # what is pointed at is in a picture of this side, whatever the camera's is
# No letter before it: SUBTASK is another tag than TASK.
_TAG = re.compile(rf"(?<![A-Za-z])({'|'.join(sorted(TAGS, key=len, reverse=True))}):")
_LIST = re.compile(r"\[([^\[\]]*)\]")
_NUMBERS = re.compile(r"\s*\d{1,4}\s*(,\s*\d{1,4}\s*){1,63}")


@dataclass(frozen=True)
class Part:
    """One tag and what stands behind it."""

    tag: str
    text: str


@dataclass(frozen=True)
class Box:
    """An object where the policy sees it, in pixels of a picture of 256 x 256."""

    name: str
    corners: tuple[int, int, int, int]  # left, top, right, bottom


@dataclass(frozen=True)
class Reasoning:
    """A text taken apart; `gripper` is where the gripper is, then where it will be."""

    parts: tuple[Part, ...]  # as they were written; a tag may come twice
    boxes: tuple[Box, ...] = ()
    gripper: tuple[tuple[int, int], ...] = ()  # x, y as in `Box`


@dataclass(frozen=True)
class PartCost:
    """What it took to write one part: the passes that began in it, and their milliseconds."""

    tag: str
    tokens: int
    passes: int
    ms: float


def parse_reasoning(text: str) -> Reasoning:
    """Take a text apart."""
    parts, boxes, gripper = [], list[Box](), tuple[tuple[int, int], ...]()
    for tag, start, stop in find_parts(text):
        words = text[start:stop].strip()
        if words or tag != FIRST_TAG:
            parts.append(Part(tag, words))
        if tag == "VISIBLE OBJECTS":
            boxes += _boxes(words)
        elif tag == "GRIPPER POSITION":
            gripper = _points(words) or gripper
    return Reasoning(tuple(parts), tuple(boxes), gripper)


def find_parts(text: str) -> list[tuple[str, int, int]]:
    """Every tag, and where what is behind it starts and stops; the first one may be empty."""
    found = list(_TAG.finditer(text))
    tags = [FIRST_TAG, *(one[1] for one in found)]
    starts = [0, *(one.end() for one in found)]
    stops = [*(one.start() for one in found), len(text)]
    return list(zip(tags, starts, stops, strict=True))


def part_costs(trace: DecodeTrace, text: str) -> list[PartCost]:
    """What each part of a text took, with the action behind it, as `find_parts` finds them.

    Empty where the trace tells of no parts.
    """
    starts = accumulate((one.committed_length for one in trace.passes), initial=0)
    begun = list(zip(starts, trace.passes, strict=False))
    costs, first = [], 0
    for (tag, _, _), tokens in zip(find_parts(text), trace.parts, strict=False):
        inside = [one for start, one in begun if first <= start < first + tokens]
        ms = sum(one.draft_ms + one.pass_ms + one.judge_ms for one in inside)
        costs.append(PartCost(tag, tokens, len(inside), ms))
        first += tokens
    return costs


def _boxes(text: str) -> list[Box]:
    boxes, end = [], 0
    for one in _LIST.finditer(text):
        name = text[end : one.start()].strip(" ,")
        end = one.end()
        numbers = _numbers(one[1])
        if len(numbers) == 4:
            boxes.append(Box(name, (numbers[0], numbers[1], numbers[2], numbers[3])))
    return boxes


def _points(text: str) -> tuple[tuple[int, int], ...]:
    """The first list of pairs; a last number without a partner is left out."""
    found = _LIST.search(text)
    numbers = [] if found is None else _numbers(found[1])
    return tuple(zip(numbers[::2], numbers[1::2], strict=False))


def _numbers(text: str) -> list[int]:
    """The numbers of a list; empty where it is none."""
    return [int(one) for one in text.split(",")] if _NUMBERS.fullmatch(text) else []
