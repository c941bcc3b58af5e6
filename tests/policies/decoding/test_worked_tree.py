"""The tree in docs/round.md, read from the page and verified by the code it explains."""

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deft_policies.decoding.acceptance.rule import ActionSpace, ExactMatch
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.sequence import AnswerSpec
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.tree import Branches, merge
from deft_policies.methods.spec_vla import WithinIds
from deft_policies.methods.within_bins import WithinBins
from deft_policies.model.sizes import TokenRange
from tests.policies.decoding.trees import Case
from tests.tiny_target import LENGTH

PAGE = Path(__file__).parents[3] / "docs" / "round.md"
TOKENS = TokenRange(100, 199)
NUM_COMMITTED = 3


@dataclass(frozen=True)
class Row:
    """One line of the table; None where it has a dash."""

    node: int
    token: int
    parent: int | None
    depth: int
    position: int
    prediction: int
    judged_against: int | None
    exact: str
    within: str


def rows() -> list[Row]:
    text = PAGE.read_text(encoding="utf-8").split("## One worked tree")[1].split("\n## ")[0]
    lines = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    table = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    numbers = [[None if cell == "-" else int(cell) for cell in line[:7]] for line in table]
    return [Row(*line, *words[7:]) for line, words in zip(numbers, table, strict=True)]  # type: ignore[arg-type]


def case() -> Case:
    given = rows()
    guesses = given[1:]
    parents = [0 if row.parent is None else row.parent for row in guesses]
    branches = Branches([row.token for row in guesses], parents)
    tree = merge([given[0].token], [("test", branches)], 64)
    method = replace(find_method("autoregressive"), name="test")
    answer = Answer(method, AnswerSpec.action(ActionSpace.in_bins(LENGTH)))
    answer.limit, answer.action_tokens = LENGTH, TOKENS
    answer.tokens = answer.target_tokens = [TOKENS.first] * NUM_COMMITTED
    said = torch.tensor([row.prediction for row in given])
    logits = torch.nn.functional.one_hot(said, TOKENS.last + 1).float()
    return Case(answer, tree, logits, torch.zeros(len(given), 1))


def test_the_table_describes_the_tree() -> None:
    given, found = rows(), case()
    judged = found.by(WithinBins(2))
    assert [row.node for row in given] == [0, 1, 2, 3, 4]
    assert judged.depths == [row.depth for row in given]
    for row in given[1:]:
        assert NUM_COMMITTED + row.depth - 1 == row.position
        assert judged.expected[row.node] == row.judged_against
    assert given[0].position == NUM_COMMITTED - 1
    assert [row.prediction for row in given] == found.predictions


def test_the_verdicts_in_the_table_are_those_of_the_rules() -> None:
    for rule, column in ((ExactMatch(), "exact"), (WithinBins(2), "within")):
        accepted = case().accepts(rule)
        for row in rows()[1:]:
            assert accepted[row.node] == getattr(row, column).startswith("yes")


def test_exact_match_keeps_one_guess_and_commits_two_tokens() -> None:
    assert case().committed(ExactMatch()) == ([0, 2], 141)


def test_ties_go_to_the_closer_path_or_to_the_first_as_published() -> None:
    closest, first = (case().committed(one) for one in (WithinBins(2), WithinIds(2)))
    assert closest == ([0, 2, 4], 150)
    assert first == ([0, 1, 3], 155)
    text = PAGE.read_text(encoding="utf-8")
    assert "0-2-4" in text
    assert "0-1-3" in text
