"""Random trees and scores, and plain Python that walks them one node at a time."""

import random
from dataclasses import dataclass

import torch

from deft_policies.decoding.acceptance.rule import (
    AcceptanceRule,
    ActionContext,
    ActionSpace,
    DimensionGroup,
    ScoredTree,
    space_tensors,
)
from deft_policies.decoding.batch import Pass
from deft_policies.decoding.judge import judge
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import Loop, TieBreak
from deft_policies.decoding.target import Scores
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.sizes import TokenRange
from tests.tiny_target import CPU, LENGTH, path_to

VOCABULARY = TokenRange(0, 59)
ACTIONS = TokenRange(20, 59)
SPACE = ActionSpace(
    groups=(DimensionGroup.MOVE,) * 3 + (DimensionGroup.TURN,) * 2 + (DimensionGroup.GRIP,) * 2,
    unit_per_bin=(0.5, 0.25, 0.0, 0.1, 0.2, 0.0, 0.0),
    class_boundary=(None, None, None, None, None, 40, None),
)


def random_tree(rng: random.Random, num_rows: int, num_nodes: int) -> DraftTree:
    """Any parents, tokens close to each other, a few padded leaves."""
    parents = [[-1, *(rng.randrange(n) for n in range(1, num_nodes))] for _ in range(num_rows)]
    tokens = [[rng.randrange(17, 33) for _ in range(num_nodes)] for _ in range(num_rows)]
    real = [
        [node == 0 or node in row or rng.random() < 0.8 for node in range(num_nodes)]
        for row in parents
    ]
    return DraftTree(
        tokens=torch.tensor(tokens),
        parents=torch.tensor(parents),
        is_real=torch.tensor(real),
        log_probs=-torch.tensor([[rng.random() * 5 for _ in range(num_nodes)] for _ in parents]),
        sources=torch.zeros(num_rows, num_nodes, dtype=torch.int64),
    )


def random_scored(seed: int, space: ActionSpace = SPACE, num_rows: int = 3) -> ScoredTree:
    """A random tree whose guesses are often near what the random target says."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(rng, num_rows, rng.randrange(1, 16))
    logits = 2 * torch.randn(*tree.tokens.shape, len(VOCABULARY), generator=generator)
    # Make many guesses right or nearly so: push the logits at the parent towards the guess.
    for row in range(num_rows):
        for node in range(1, tree.num_nodes):
            near = int(tree.tokens[row, node]) + rng.choice([0, 0, 0, 1, -1, 3, -7])
            parent = int(tree.parents[row, node])
            logits[row, parent, max(0, min(near, 59))] += rng.choice([0.0, 3.0, 9.0])
    num_committed = torch.tensor([rng.randrange(LENGTH) for _ in range(num_rows)])
    spent = torch.zeros(num_rows, LENGTH, dtype=torch.int64)
    for row in range(num_rows):
        for position in range(int(num_committed[row])):
            spent[row, position] = rng.choice([0, 0, 2, -3])
    context = ActionContext(
        *space_tensors((space,) * num_rows, CPU),
        drift=torch.tensor([[rng.uniform(-9, 9) for _ in range(LENGTH)] for _ in range(num_rows)]),
        num_steps=torch.tensor([rng.randrange(200) for _ in range(num_rows)]),
        patches=torch.randn(num_rows, 6, 8, generator=generator),
    )
    return ScoredTree(
        tree=tree,
        scores=Scores(
            logits,
            torch.randn(*tree.tokens.shape, 8, generator=generator),
            torch.arange(num_rows),
        ),
        predictions=logits.argmax(dim=2),
        num_committed=num_committed,
        spent=spent,
        vocabulary=VOCABULARY,
        action_tokens=ACTIONS,
        context=context,
    )


def judged(
    scored: ScoredTree, rule: AcceptanceRule, tie_break: TieBreak, loop: Loop = Loop.LEAN
) -> Pass:
    """The path that is committed greedily; none is longer than an action."""
    method = Method("test", rule, (), tie_break, loop=loop)
    keys = torch.zeros_like(scored.num_committed)
    steps = max(1, min(scored.tree.num_nodes, LENGTH))
    return judge(method, scored, keys, steps)


@dataclass(frozen=True)
class Step:
    """One node on a path, as a person would describe it."""

    node: int
    drafted: int
    expected: int
    depth: int
    position: int
    parent: int

    @property
    def is_equal(self) -> bool:
        return self.drafted == self.expected

    @property
    def deviation(self) -> int:
        return self.drafted - self.expected

    @property
    def is_action(self) -> bool:
        return 20 <= self.drafted <= 59 and 20 <= self.expected <= 59


def steps_to(scored: ScoredTree, row: int, node: int) -> list[Step]:
    """The guesses on the way from the root to a node."""
    steps = []
    for depth, one in enumerate(path_to(scored.tree, row, node)):
        if depth == 0:
            continue
        parent = int(scored.tree.parents[row, one])
        steps.append(
            Step(
                node=one,
                drafted=int(scored.tree.tokens[row, one]),
                expected=int(scored.predictions[row, parent]),
                depth=depth,
                position=min(int(scored.num_committed[row]) + depth - 1, LENGTH - 1),
                parent=parent,
            )
        )
    return steps


def is_real_path(scored: ScoredTree, row: int, node: int) -> bool:
    return all(bool(scored.tree.is_real[row, step.node]) for step in steps_to(scored, row, node))


def paths_of(tree: DraftTree, row: int) -> set[tuple[int, ...]]:
    """Every real guess as the tokens on the way to it."""
    found = set()
    for node in range(1, tree.num_nodes):
        if bool(tree.is_real[row, node]):
            found.add(tuple(tree.tokens[row, path_to(tree, row, node)[1:]].tolist()))
    return found


def num_real(tree: DraftTree, row: int) -> int:
    return int(tree.is_real[row].sum()) - 1
