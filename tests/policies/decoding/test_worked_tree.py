"""The tree in docs/decoding.md, read from the page and verified by the code it explains."""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from deft_policies.decoding.acceptance.distance import WithinBins
from deft_policies.decoding.acceptance.rule import (
    AcceptanceRule,
    ActionContext,
    ActionSpace,
    ExactMatch,
    ScoredTree,
    space_tensors,
)
from deft_policies.decoding.batch import Pass
from deft_policies.decoding.plan import TieBreak
from deft_policies.decoding.sampling import first_maximum
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.sizes import TokenRange
from tests.policies.decoding.trees import judged
from tests.tiny_target import CPU, LENGTH

PAGE = Path(__file__).parents[3] / "docs" / "decoding.md"
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


def scored() -> ScoredTree:
    given = rows()
    tokens = torch.tensor([[row.token for row in given]])
    parents = torch.tensor([[-1 if row.parent is None else row.parent for row in given]])
    tree = DraftTree(
        tokens=tokens,
        parents=parents,
        is_real=torch.ones_like(tokens, dtype=torch.bool),
        log_probs=torch.zeros_like(tokens, dtype=torch.float32),
        sources=torch.zeros_like(tokens),
    )
    logits = torch.zeros(1, len(given), len(TOKENS))
    for row in given:
        logits[0, row.node, row.prediction - TOKENS.first] = 1.0
    scores = Scores(logits, torch.zeros(1, len(given), 1), torch.tensor([0]))
    committed = torch.tensor([NUM_COMMITTED])
    nothing = torch.zeros(1, LENGTH, dtype=torch.int64)
    space = space_tensors((ActionSpace.in_bins(LENGTH),), CPU)
    return ScoredTree(
        tree=tree,
        scores=scores,
        predictions=first_maximum(logits) + TOKENS.first,
        num_committed=committed,
        spent=nothing,
        vocabulary=TOKENS,
        action_tokens=TOKENS,
        context=ActionContext(*space, nothing.float(), torch.zeros(1, dtype=torch.int64)),
    )


def judge(rule: AcceptanceRule, tie_break: TieBreak) -> Pass:
    return judged(scored(), rule, tie_break)


def kept(verdict: Pass) -> list[int]:
    return verdict.path[0, : int(verdict.num[0]) + 1].tolist()  # type: ignore[no-any-return]


def test_the_table_describes_the_tree() -> None:
    given, tree = rows(), scored()
    assert [row.node for row in given] == [0, 1, 2, 3, 4]
    assert tree.tree.depths()[0].tolist() == [row.depth for row in given]
    for row in given[1:]:
        assert int(tree.positions[0, row.node]) == row.position
        assert int(tree.expected[0, row.node]) == row.judged_against
    assert given[0].position == NUM_COMMITTED - 1
    assert [row.prediction for row in given] == tree.predictions[0].tolist()


def test_the_verdicts_in_the_table_are_those_of_the_rules() -> None:
    tree = scored()
    for rule, column in ((ExactMatch(), "exact"), (WithinBins(2), "within")):
        accepted = rule.accepts(tree)[0].tolist()
        for row in rows()[1:]:
            assert accepted[row.node] == getattr(row, column).startswith("yes")


def test_exact_match_keeps_one_guess_and_commits_two_tokens() -> None:
    verdict = judge(ExactMatch(), TieBreak.CLOSEST)
    assert kept(verdict) == [0, 2]
    assert int(verdict.bonus) == 141


def test_ties_go_to_the_closer_path_or_to_the_first_as_published() -> None:
    closest, first = (judge(WithinBins(2), one) for one in TieBreak)
    assert kept(closest) == [0, 2, 4]
    assert int(closest.bonus) == 150
    assert kept(first) == [0, 1, 3]
    assert int(first.bonus) == 155
    text = PAGE.read_text(encoding="utf-8")
    assert "0-2-4" in text
    assert "0-1-3" in text
