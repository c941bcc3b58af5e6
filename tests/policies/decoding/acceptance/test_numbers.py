"""`within-numbers` against all numbers that the target could write, and played to the end."""

import random
from dataclasses import replace
from functools import cache

import pytest

from deft_core.types import ActOptions
from deft_policies.decoding.accept import accept, judge
from deft_policies.decoding.acceptance.numbers import (
    END,
    SPACE,
    WrittenNumbers,
    drift_of_steps,
)
from deft_policies.decoding.acceptance.rule import ActionSpace, DimensionGroup
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.sequence import AnswerSpec, PassResult
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.tree import Branches, merge
from deft_policies.memory import SessionMemory
from deft_policies.methods.numbers import WithinNumbers
from deft_policies.model.sizes import TokenRange
from tests.tiny_target import path_to

LARGEST = 1000
GROUPS = (DimensionGroup.MOVE, DimensionGroup.TURN, DimensionGroup.GRIP)
SPACE_OF_ROW = ActionSpace(GROUPS, (0.5, 0.25, 1.0), (None,) * 3, LARGEST)
RULE = WithinNumbers(move=4.0, turn=3.0, move_drift=9.0, turn_drift=4.0)  # 8 and 12 numbers
LIMITS = {DimensionGroup.MOVE: (4.0, 9.0), DimensionGroup.TURN: (3.0, 4.0)}
NUM_NUMBERS = 12


def tokens_of(text: str) -> list[int]:
    return [SPACE if one == " " else END if one == "." else int(one) for one in text]


def text_of(tokens: list[int]) -> str:
    return "".join("0123456789 ."[one] for one in tokens)


def answer_of(written: WrittenNumbers, rule: WithinNumbers = RULE) -> Answer:
    """An answer of numbers that has come so far."""
    method = replace(find_method("numbers"), rule=rule)
    spec = AnswerSpec(400, END, SPACE_OF_ROW)
    answer = Answer(method, spec, SessionMemory(drift=written.drift))
    answer.limit, answer.action_tokens = 400, TokenRange(0, END)
    answer.tokens, answer.target_tokens = list(written.tokens), list(written.target_tokens)
    return answer


def found_in(answer: Answer, predictions: list[int]) -> PassResult:
    return PassResult(answer.number, predictions, predictions, is_finite=True)


class Writer:
    """Writes numbers that depend on all that stands before them, as any deterministic model."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.next = cache(self._next)

    def number(self, before: str) -> str:
        """The number behind a text that ends between two numbers."""
        rng = random.Random(f"{self.seed} {before}")
        usual = random.Random(f"{self.seed} {before.count(' ')}").randrange(LARGEST + 1)
        return str(max(0, min(LARGEST, usual + rng.choice([-9, -2, -1, 0, 0, 1, 3]))))

    def _next(self, text: str) -> int:
        before, _, begun = text.rpartition(" ")
        before = f"{before} " if before else ""
        wanted = self.number(before)
        if wanted.startswith(begun) and wanted != begun:
            return int(wanted[len(begun)])
        if wanted != begun and random.Random(f"{self.seed} {text}").random() < 0.2:
            return random.Random(text).randrange(10)
        return SPACE if text.count(" ") < NUM_NUMBERS - 1 else END


EVERY = [f"{one:0{width}d}" for width in range(1, 5) for one in range(min(10**width, 1001))]


@cache
def farthest(begun: str, value: int) -> int:
    """How far a number is from any that begins so."""
    return max(abs(int(one) - value) for one in EVERY if one.startswith(begun))


def allows(path: list[int], written: WrittenNumbers, writer: Writer) -> bool:
    """The rule for one path, number by number, by looking at every number there is."""
    text = text_of(list(written.tokens))
    whole = text + text_of(path)
    starts = [0, *(place + 1 for place, one in enumerate(whole) if one == " ")]
    drift = list(written.drift)
    for index, start in enumerate(starts):
        number = whole[start:].split(" ")[0].rstrip(".")
        dimension, end = index % len(drift), start + len(number)
        group, unit = GROUPS[dimension], SPACE_OF_ROW.unit_per_bin[dimension]
        own = [writer.next(whole[:place]) for place in range(start, end)]
        differ = [place for place, one in enumerate(own) if str(one) != number[place]]
        if any(one >= SPACE for one in own):
            return False
        following = writer.next(whole[:end])
        if end < len(whole) and "0123456789 ."[following] != whole[end]:
            return False
        if not differ:
            continue
        if following < SPACE or group is DimensionGroup.GRIP or int(number) > LARGEST:
            return False
        begun = number[: differ[0]] + str(own[differ[0]])
        far = farthest(begun, int(number))
        limit, budget = LIMITS[group]
        if far * unit > limit + 1e-9:
            return False
        drift[dimension] += int(number) - int(begun)
        if abs(drift[dimension]) * unit > budget + 1e-9:
            return False
    return True


def drafted(writer: Writer, text: str, rng: random.Random) -> list[int]:
    """How the text may go on: as the writer would, with digits and now and then more changed."""
    tokens: list[int] = []
    for _ in range(rng.randrange(1, 14)):
        right = writer.next(text + text_of(tokens))
        if right == END:
            break
        odds = rng.random()
        if right < SPACE and odds < 0.2:
            right = max(0, min(9, right + rng.choice([-2, -1, 1, 2])))
        elif odds > 0.97:
            right = rng.randrange(11)
        tokens.append(right)
    return tokens or [0]


def play(seed: int) -> tuple[str, Writer, tuple[float, ...], int]:
    """An answer written with drafts; every pass is judged by the slow twin, too."""
    rng, writer = random.Random(seed), Writer(seed)
    tokens: list[int] = []
    own: list[int] = []
    drift = (rng.choice([0.0, 3.0, -7.0]), rng.choice([0.0, 5.0, -9.0]), 0.0)
    num_relaxed = 0
    while tokens[-1:] != [END]:
        text = text_of(tokens)
        nodes, parents = list[int](), list[int]()
        for _ in range(2):
            above = 0
            for token in drafted(writer, text, rng):
                nodes.append(token)
                parents.append(above)
                above = len(nodes)
        tree = merge([SPACE], [("test", Branches(nodes, parents))], 99)
        paths = [
            [tree.tokens[one] for one in path_to(tree, node)[1:]] for node in range(len(nodes) + 1)
        ]
        predictions = [writer.next(text + text_of(path)) for path in paths]
        answer = answer_of(WrittenNumbers(tokens, own, SPACE_OF_ROW, drift))
        found = found_in(answer, predictions)
        expected = [
            allows(path, WrittenNumbers(tokens, own, SPACE_OF_ROW, drift), writer) for path in paths
        ]
        assert RULE.accepts(judge(answer, tree, found)) == expected
        path, bonus = accept(answer, tree, found)
        tokens = [*tokens, *(tree.tokens[node] for node in path[1:]), bonus]
        own = [*own, *(predictions[node] for node in path)]
        num_relaxed += sum(one != other for one, other in zip(tokens, own, strict=True))
    assert len(tokens) == len(own)
    last = WrittenNumbers(tokens, own, SPACE_OF_ROW, drift)
    after = drift_of_steps(last, NUM_NUMBERS // 3)
    text, sums = text_of(tokens[:-1]), list(drift)
    numbers = text.split(" ")
    assert len(numbers) == NUM_NUMBERS
    for index, number in enumerate(numbers):
        before = "".join(f"{one} " for one in numbers[:index])
        apart, group = int(number) - int(writer.number(before)), GROUPS[index % 3]
        if not apart:
            continue
        unit, (limit, budget) = SPACE_OF_ROW.unit_per_bin[index % 3], LIMITS[group]
        sums[index % 3] += apart
        assert abs(apart) * unit <= limit
        assert abs(sums[index % 3]) * unit <= budget
    assert after == pytest.approx(sums)
    return text, writer, after, num_relaxed


def test_no_number_is_further_from_the_targets_than_its_limit() -> None:
    assert sum(play(seed)[3] > 0 for seed in range(80)) > 30


@pytest.mark.parametrize(
    ("drafted_number", "wanted", "stands"),
    [
        ("512", "515 ", True),
        ("512", "521 ", False),  # 9 numbers are more than 8
        ("512", "52", False),  # 52 or 529
        ("105", "100", False),  # 1000 begins so, too
        ("51", "53", False),  # so does 530
        ("1000", "101", False),
    ],
)
def test_every_number_counts_that_begins_with_the_targets_digits(
    drafted_number: str, wanted: str, stands: bool
) -> None:
    tree = merge([SPACE], [("test", [tokens_of(drafted_number)])], 99)
    predictions = [*tokens_of(wanted)[: len(drafted_number)], *[SPACE] * tree.num_nodes]
    predictions[len(drafted_number) :] = [SPACE]
    predictions = [*predictions, *[SPACE] * tree.num_nodes][: tree.num_nodes]
    answer = answer_of(WrittenNumbers([], [], SPACE_OF_ROW, (0.0, 0.0, 0.0)))
    assert RULE.accepts(judge(answer, tree, found_in(answer, predictions)))[-1] is stands


def test_the_drift_counts_steps_that_were_executed() -> None:
    row = AnswerSpec(64, END, SPACE_OF_ROW)
    written, own = tokens_of("512 300 0 612 300 0"), tokens_of("510 300 0 615 300 0")
    memory = SessionMemory(answer=tuple(written), target_answer=tuple(own), drift=(1.0, 0.0, 0.0))
    method = find_method("numbers")
    assert Answer(method, row, memory).drift == (3.0, 0.0, 0.0)  # one step, where nobody says
    assert Answer(method, row, memory, executed_steps=0).drift == (1.0, 0.0, 0.0)
    assert Answer(method, row, memory, executed_steps=2).drift == (0.0, 0.0, 0.0)
    assert Answer(method, row, replace(memory, executed_steps=2)).num_executed == 2
    assert ActOptions().executed_steps is None


def test_an_answer_that_nothing_relaxes_keeps_the_drift_of_the_one_before() -> None:
    """Plain plans never ask for the drift while the answer is written."""
    written, own = tokens_of("512 300 0 612 300 0"), tokens_of("510 300 0 615 300 0")
    memory = SessionMemory(answer=tuple(written), target_answer=tuple(own))
    row = Answer(find_method("numbers"), AnswerSpec(64, END, SPACE_OF_ROW), memory)
    row.tokens = row.target_tokens = tokens_of("7 300 0")
    row.finish()
    assert row.memory.drift == (2.0, 0.0, 0.0)
