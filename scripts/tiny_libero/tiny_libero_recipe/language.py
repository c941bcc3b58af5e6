"""What people say to the policy, and what it says when it thinks aloud.

A sentence asks for a thing to be put somewhere, in one of some patterns. A reasoning has the tags
of ECoT in their published order and is written from what the simulator knows of a step. Both are
made of few words, numbers on coarse grids among them, so that a word is one token.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from numpy.typing import NDArray

from deft_policies.model.prompt import PromptTemplate

THINGS = (
    *("alphabet soup", "cream cheese", "salad dressing", "bbq sauce", "ketchup", "tomato sauce"),
    *("butter", "milk", "chocolate pudding", "orange juice"),
)
PLACES = ("basket",)

# The first is LIBERO's own. Those of benchmarks that test for understanding are left to them.
PATTERNS = (
    "pick up the {thing} and place it in the {place}",
    "put the {thing} into the {place}",
    "move the {thing} to the {place}",
    "take the {thing} and put it in the {place}",
    "place the {thing} inside the {place}",
    "drop the {thing} in the {place}",
    "the {thing} goes into the {place}",
    "i want the {thing} in the {place}",
    "please bring the {thing} to the {place}",
    "could you put the {thing} inside the {place} for me",
    "get {thing} and drop it into the {place}",
    "lift the {thing} and set it down in the {place}",
    "find the {thing} then move it into the {place}",
    "carry the {thing} over to the {place}",
    "the {place} should hold the {thing}",
    "fill the {place} with {thing}",
    "grab the {thing} for the {place}",
    "store the {thing} in the {place}",
    "pack {thing} in {place}",
    "{thing} to {place} please",
    "add {thing} to the {place}",
    "transfer the {thing} from the floor to the {place}",
    "only the {thing} belongs in the {place}",
    "reach for the {thing} and leave it in the {place}",
)


def spoken(name: str) -> str:
    """`alphabet_soup_1` is an alphabet soup, `basket_1_contain_region` a basket."""
    return re.sub(r"_\d+(_.*)?$", "", name).replace("_", " ")


def sentence(
    thing: str, place: str, generator: np.random.Generator, plain: float = 0.4, noise: float = 0.0
) -> str:
    """Ask for something: with chance `plain` as LIBERO does.

    With chance `noise` one of the words that name nothing is garbled, so that words which were
    never heard are no surprise.
    """
    number = 0 if generator.random() < plain else int(generator.integers(1, len(PATTERNS)))
    words = PATTERNS[number].split()
    if generator.random() < noise:
        fillers = [i for i, word in enumerate(words) if "{" not in word]
        letters = generator.integers(ord("a"), ord("z") + 1, generator.integers(2, 5))
        words[generator.choice(fillers)] = "".join(map(chr, letters))
    return " ".join(words).format(thing=thing, place=place)


@dataclass(frozen=True)
class Subtask:
    """What a phase of the expert is called, and why it is done."""

    why: str
    what: str


_REACH = Subtask("The hand is not over the {thing} yet.", "reach the {thing}")
SUBTASKS = {
    "approach": _REACH,
    "descend": Subtask("The open hand is over the {thing}.", "lower the hand"),
    "close": Subtask("The {thing} is between the fingers.", "grasp the {thing}"),
    "lift": Subtask("The {thing} is held but low.", "lift the {thing}"),
    "carry": Subtask("The {thing} is held away from the {place}.", "carry the {thing}"),
    "lower": Subtask("The {thing} is held over the {place}.", "lower the {thing}"),
    "release": Subtask("The {thing} is in the {place}.", "release the {thing}"),
    "retreat": Subtask("Something is in the way of the hand.", "back away"),
}
SEEKING = ("approach", "descend", "retreat")  # phases on the way to the thing
CARRYING = ("lift", "carry", "lower", "release")  # phases with the thing in hand
PLAN = "reach, grasp, lift, carry, release."
TAGS = (
    *("PLAN:", "VISIBLE OBJECTS:", "SUBTASK REASONING:", "SUBTASK:", "MOVE REASONING:", "MOVE:"),
    *("GRIPPER POSITION:", "ACTION:"),
)
PICTURE = 256  # boxes and gripper positions are pixels of a picture of this side
GRID = 8  # pixels
DISTANCES_CM = (0, 1, 2, 3, 4, 6, 8, 10, 13, 16, 20, 25, 30, 40)
# What a positive and a negative value of a dimension is called, robot's frame.
_WAYS = (("ahead", "behind"), ("left", "right"), ("above", "below"))
_MOVES = (("forward", "backward"), ("left", "right"), ("up", "down"))
_TURNS = (("tilt up", "tilt down"), ("rotate counterclockwise", "rotate clockwise"))
_MOVES_FROM = 0.15  # of the largest command, from which a movement is worth a word
_TURNS_FROM = 0.08


@dataclass(frozen=True, eq=False)
class Facts:
    """What a reasoning is about: one step, as the simulator and the expert know it."""

    thing: str
    place: str
    phase: str
    label: NDArray[np.float32]  # [7] what is commanded; gripper 1 open, 0 close
    way: NDArray[np.float32]  # [3] metres to the thing from the hand, or from it to the place
    opening: float  # metres between the fingers
    thing_box: NDArray[np.float32]  # [4] x0, y0, x1, y1 in shares of the picture
    place_box: NDArray[np.float32]
    gripper: NDArray[np.float32]  # [2] x, y in shares of the picture


def reasoning(facts: Facts) -> str:
    """What follows the prompt's `TASK:`, up to and with `ACTION:`."""
    thing, place = facts.thing, facts.place
    subtask = SUBTASKS.get(facts.phase, _REACH)
    over = place if facts.phase in CARRYING else thing
    parts = (
        f"Put the {thing} in the {place}.",
        PLAN,
        f"{thing} {_pixels(facts.thing_box)}, {place} {_pixels(facts.place_box)}",
        subtask.why.format(thing=thing, place=place),
        subtask.what.format(thing=thing, place=place),
        f"The {over} is {_way(facts.way)}",
        _move(facts.label, facts.opening),
        _pixels(facts.gripper),
    )
    tagged = (f"{text} {tag}" for text, tag in zip(parts, TAGS, strict=True))
    return " ".join(tagged)


def _pixels(shares: NDArray[np.float32]) -> str:
    steps = np.clip(np.round(shares * PICTURE / GRID), 0, PICTURE // GRID - 1)
    return f"[{', '.join(str(int(step) * GRID) for step in steps)}]"


def _way(metres: NDArray[np.float32]) -> str:
    parts = []
    for value, (positive, negative) in zip(metres, _WAYS, strict=True):
        nearest = min(DISTANCES_CM, key=lambda cm: abs(cm - abs(100 * value)))
        parts.append(f"{nearest}cm {positive if value > 0 else negative}")
    return ", ".join(parts) + "."


def _move(label: NDArray[np.float32], opening: float) -> str:
    moves = [
        names[int(value < 0)]
        for value, names in zip(label[:3], _MOVES, strict=True)
        if abs(value) > _MOVES_FROM
    ]
    words = [f"move {' '.join(moves)}"] if moves else []
    words += [
        names[int(value < 0)]
        for value, names in zip(label[4:6], _TURNS, strict=True)
        if abs(value) > _TURNS_FROM
    ]
    if label[6] < 0.5 and opening > 0.07:
        words.append("close gripper")
    if label[6] > 0.5 and opening < 0.06:
        words.append("open gripper")
    return ", ".join(words) or "stop"


def vocabulary() -> Iterator[str]:
    """Every word that sentences and reasonings are made of, blanks and tags left out."""
    for pattern, thing, place in product(PATTERNS, THINGS, PLACES):
        yield from pattern.format(thing=thing, place=place).split()
    texts = [PLAN, "Put the in the move stop"]
    texts += [text for one in SUBTASKS.values() for text in (one.why, one.what)]
    for text, thing, place in product(texts, THINGS, PLACES):
        yield from text.format(thing=thing, place=place).split()
    for name in (*THINGS, *PLACES):
        yield from (f"{name.split()[-1]}{end}" for end in (".", ","))
    for pixel in range(0, PICTURE, GRID):
        yield from (f"[{pixel},", f"{pixel},", f"{pixel}]", f"{pixel}],")
    yield from (f"{cm}cm" for cm in DISTANCES_CM)
    for names in _WAYS:
        yield from (f"{name}{end}" for name in names for end in (",", "."))
    for names in (*_MOVES, *_TURNS, ("close gripper", "open gripper")):
        yield from (f"{word}{end}" for name in names for word in name.split() for end in ("", ","))


def prompt_ends() -> Iterator[tuple[str, str]]:
    """What stands before and behind the instruction when it acts at once, and thinks aloud."""
    for template in (PromptTemplate.OPENVLA, PromptTemplate.ECOT):
        before, after = template.fill("\0").split("\0")
        yield before.rstrip(), after
