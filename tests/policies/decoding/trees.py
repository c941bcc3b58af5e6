"""Random trees and scores of one answer, and plain Python that walks them one node at a time."""

import random
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deft_policies.decoding.accept import accept, ends_allowed, judge
from deft_policies.decoding.acceptance.rule import (
    AcceptanceRule,
    ActionSpace,
    DeviceRule,
    DimensionGroup,
    JudgedTree,
    TreeRule,
)
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.read import measure
from deft_policies.decoding.sequence import AnswerSpec, PassResult
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.tree import DraftTree
from deft_policies.memory import SessionMemory
from deft_policies.methods.lvspec import PATCHES
from deft_policies.methods.spec_vla import WithinIds
from deft_policies.model.sizes import TokenRange
from tests.tiny_target import LENGTH, path_to

NUM_TOKENS = 60
ACTIONS = TokenRange(20, 59)
SPACE = ActionSpace(
    groups=(DimensionGroup.MOVE,) * 3 + (DimensionGroup.TURN,) * 2 + (DimensionGroup.GRIP,) * 2,
    unit_per_bin=(0.5, 0.25, 0.0, 0.1, 0.2, 0.0, 0.0),
    class_boundary=(None, None, None, None, None, 40, None),
)


@dataclass(frozen=True)
class OnBins(WithinIds):
    """Spec-VLA's rule and order of paths, on action tokens alone."""

    def may_relax(self, drafted: int, expected: int, sequence: Answer) -> bool:
        return AcceptanceRule.may_relax(self, drafted, expected, sequence)


@dataclass(frozen=True)
class Case:
    """A draft tree of one answer, and what a random target says of it."""

    answer: Answer
    tree: DraftTree
    logits: Tensor  # [node, token]
    hidden: Tensor  # [node, width]

    @property
    def predictions(self) -> list[int]:
        """The target's token after each node."""
        found: list[int] = self.logits.argmax(dim=1).tolist()
        return found

    @property
    def num_committed(self) -> int:
        return self.answer.count

    def found(self, rule: AcceptanceRule) -> PassResult:
        """What the host reads of the pass."""
        best, numbers = self.logits.argmax(dim=1), list[float]()
        if isinstance(rule, (DeviceRule, TreeRule)) and self.tree.has_guesses:
            measured = measure(rule, self.answer, self.tree, self.logits, self.hidden, best)
            numbers = [] if measured is None else measured.double().tolist()
        said: list[int] = best.tolist()
        return PassResult(self.answer.number, said, said, is_finite=True, measured=numbers)

    def by(self, rule: AcceptanceRule) -> JudgedTree:
        """The tree as the rule sees it."""
        self.answer.method = replace(self.answer.method, rule=rule)
        return judge(self.answer, self.tree, self.found(rule))

    def accepts(self, rule: AcceptanceRule) -> list[bool]:
        """Which paths a rule accepts, whatever is missing of the answer, [node]."""
        return ends_allowed(rule, self.by(rule))

    def committed(self, rule: AcceptanceRule) -> tuple[list[int], int]:
        """The path that is committed, and the bonus."""
        self.answer.method = replace(self.answer.method, rule=rule)
        return accept(self.answer, self.tree, self.found(rule))


def random_tree(rng: random.Random, num_nodes: int) -> DraftTree:
    """Any parents, tokens close to each other."""
    parents = [-1, *(rng.randrange(n) for n in range(1, num_nodes))]
    return DraftTree(
        tokens=[rng.randrange(17, 33) for _ in range(num_nodes)],
        parents=parents,
        sources=["", *("test" for _ in parents[1:])],
        log_probs=[-5 * rng.random() for _ in parents],
        is_chain=parents == list(range(-1, num_nodes - 1)),
    )


def random_answer(
    rng: random.Random, space: ActionSpace, spec: AnswerSpec | None = None, stop: int | None = None
) -> Answer:
    """An action that has come some way, and was relaxed here and there; or text, with a stop."""
    drift = tuple(rng.uniform(-9, 9) for _ in range(LENGTH))
    memory = SessionMemory(drift=drift, num_steps=rng.randrange(200))
    spec = spec or AnswerSpec.action(space)
    answer = Answer(replace(find_method("autoregressive"), name="test"), spec, memory)
    answer.limit = LENGTH
    answer.action_tokens = ACTIONS
    own = [rng.randrange(20, 60) for _ in range(rng.randrange(LENGTH))]
    answer.target_tokens = own
    answer.tokens = [one + rng.choice([0, 0, 2, -3]) for one in own]
    return answer


def random_case(seed: int, space: ActionSpace = SPACE, spec: AnswerSpec | None = None) -> Case:
    """A random tree whose guesses are often near what the random target says."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(rng, rng.randrange(1, 16))
    logits = 2 * torch.randn(tree.num_nodes, NUM_TOKENS, generator=generator)
    # Make many guesses right or nearly so: push the logits at the parent towards the guess.
    for node in range(1, tree.num_nodes):
        near = tree.tokens[node] + rng.choice([0, 0, 0, 1, -1, 3, -7])
        logits[tree.parents[node], max(0, min(near, 59))] += rng.choice([0.0, 3.0, 9.0])
    answer = random_answer(rng, space, spec)
    answer.notes[PATCHES] = torch.randn(6, 8, generator=generator)
    return Case(answer, tree, logits, torch.randn(tree.num_nodes, 8, generator=generator))


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


def steps_to(case: Case, node: int) -> list[Step]:
    """The guesses on the way from the root to a node."""
    steps, said = [], case.predictions
    for depth, one in enumerate(path_to(case.tree, node)):
        if depth == 0:
            continue
        parent = case.tree.parents[one]
        steps.append(
            Step(
                node=one,
                drafted=case.tree.tokens[one],
                expected=said[parent],
                depth=depth,
                position=min(case.num_committed + depth - 1, LENGTH - 1),
                parent=parent,
            )
        )
    return steps


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    """Every guess as the tokens on the way to it."""
    return {
        tuple(tree.tokens[one] for one in path_to(tree, node)[tree.root + 1 :])
        for node in range(tree.root + 1, tree.num_nodes)
    }
