"""The longest accepted path, against trying every path by hand."""

from dataclasses import replace

import pytest
import torch

from deft_policies.decoding.acceptance.distance import WithinBins, WithinIds
from deft_policies.decoding.acceptance.rule import AcceptanceRule, ExactMatch, ScoredTree
from deft_policies.decoding.batch import Pass
from deft_policies.decoding.judge import judge_on_host
from deft_policies.decoding.plan import TieBreak
from deft_policies.decoding.tree import DraftTree
from tests.policies.decoding.trees import judged, random_scored, steps_to
from tests.tiny_target import LENGTH, path_to


def accepted_nodes(scored: ScoredTree, rule: AcceptanceRule, row: int) -> list[int]:
    """Nodes that may end the path: accepted, and leaving the last token to the target."""
    deepest = LENGTH - 1 - int(scored.num_committed[row])
    accepted = rule.accepts(scored)[row].tolist()
    depths = [len(path_to(scored.tree, row, node)) - 1 for node in range(scored.tree.num_nodes)]
    return [n for n in range(scored.tree.num_nodes) if accepted[n] and depths[n] <= deepest]


def closest(scored: ScoredTree, rule: AcceptanceRule, row: int) -> int:
    def key(node: int) -> tuple[float, ...]:
        steps = steps_to(scored, row, node)
        distance = sum(abs(step.deviation) for step in steps)
        return (-len(steps), distance, -float(scored.tree.log_probs[row, node]), node)

    return min(accepted_nodes(scored, rule, row), key=key, default=0)


def first_row(scored: ScoredTree, rule: AcceptanceRule, row: int) -> int:
    """As the published code does: leaf by leaf in node order, the first longest wins."""
    tree = scored.tree
    real = [node for node in range(tree.num_nodes) if bool(tree.is_real[row, node])]
    inner = {int(tree.parents[row, node]) for node in real}
    usable = set(accepted_nodes(scored, rule, row))
    best, best_length = 0, 0
    for leaf in real[1:]:
        if leaf in inner:
            continue
        path = path_to(tree, row, leaf)
        length = 0
        while length + 1 < len(path) and path[length + 1] in usable:
            length += 1
        if length > best_length:
            best, best_length = path[length], length
    return best


@pytest.mark.parametrize("rule", [ExactMatch(), WithinBins(4), WithinIds(4)])
@pytest.mark.parametrize("tie_break", list(TieBreak))
def test_the_winner_is_the_one_found_by_trying_every_path(
    rule: AcceptanceRule, tie_break: TieBreak
) -> None:
    slow = closest if tie_break is TieBreak.CLOSEST else first_row
    num_ties = 0
    for seed in range(120):
        scored = random_scored(seed)
        verdict = judged(scored, rule, tie_break)
        for row in range(3):
            end = slow(scored, rule, row)
            expected = path_to(scored.tree, row, end)
            usable = accepted_nodes(scored, rule, row)
            lengths = [len(path_to(scored.tree, row, node)) for node in usable]
            num_ties += lengths.count(len(expected)) > 1
            if rule.is_exact:  # equally long exact paths carry the same tokens
                assert tokens_on(scored, row, verdict) == tokens_at(scored, row, expected)
            else:
                found = verdict.path[row, : int(verdict.num[row]) + 1].tolist()
                assert found == expected
            assert int(verdict.bonus[row]) == int(scored.predictions[row, found_end(verdict, row)])
    assert num_ties > 5


def found_end(verdict: Pass, row: int) -> int:
    return int(verdict.path[row, int(verdict.num[row])])


def tokens_on(scored: ScoredTree, row: int, verdict: Pass) -> list[int]:
    path = verdict.path[row, : int(verdict.num[row]) + 1].tolist()
    return tokens_at(scored, row, path)


def tokens_at(scored: ScoredTree, row: int, path: list[int]) -> list[int]:
    tokens: list[int] = scored.tree.tokens[row, path].tolist()
    return tokens


def test_closeness_wins_before_likelihood_and_likelihood_before_order() -> None:
    base = random_scored(0)
    tree = DraftTree(
        tokens=torch.tensor([[30, 33, 31, 29]]).expand(3, -1),
        parents=torch.tensor([[-1, 0, 0, 0]]).expand(3, -1),
        is_real=torch.ones(3, 4, dtype=torch.bool),
        log_probs=torch.tensor([[0.0, -0.1, -3.0, -1.0]]).expand(3, -1),
        sources=torch.zeros(3, 4, dtype=torch.int64),
    )
    scored = replace(
        base,
        tree=tree,
        predictions=torch.full((3, 4), 30),
        num_committed=torch.zeros(3, dtype=torch.int64),
    )
    verdict = judged(scored, WithinBins(5), TieBreak.CLOSEST)
    assert verdict.path[0, 1] == 3  # as close as node 2, and likelier
    verdict = judged(scored, WithinBins(5), TieBreak.FIRST_ROW)
    assert verdict.path[0, 1] == 1


def test_the_last_token_of_an_action_is_never_a_draft() -> None:
    for seed in range(40):
        scored = random_scored(seed)
        verdict = judged(scored, WithinIds(99), TieBreak.CLOSEST)
        assert bool((scored.num_committed + verdict.num <= LENGTH - 1).all())


def test_a_chain_known_to_be_one_ends_where_the_search_for_a_path_ends() -> None:
    generator = torch.Generator().manual_seed(0)
    num_accepted = set()
    for seed in range(60):
        scored = random_scored(seed)
        nodes = torch.arange(-1, scored.tree.num_nodes - 1).expand_as(scored.tree.parents)
        is_real = scored.tree.is_real.cummin(dim=1).values
        unknown = replace(scored.tree, parents=nodes, is_real=is_real)
        tokens = unknown.tokens.clone()
        right = scored.predictions[:, :-1]  # most guesses are what the target says
        is_right = torch.rand(right.shape, generator=generator) < 0.7
        tokens[:, 1:] = torch.where(is_right, right, tokens[:, 1:])
        unknown = replace(unknown, tokens=tokens)
        found = [
            judged(replace(scored, tree=tree), ExactMatch(), TieBreak.CLOSEST)
            for tree in (unknown, replace(unknown, is_chain=True))
        ]
        for row in range(3):
            kept = int(found[0].num[row])
            assert int(found[1].num[row]) == kept
            assert torch.equal(found[0].path[row, : kept + 1], found[1].path[row, : kept + 1])
            assert torch.equal(
                found[0].target_tokens[row, : kept + 1], found[1].target_tokens[row, : kept + 1]
            )
            assert found[0].bonus[row] == found[1].bonus[row]
            num_accepted.add(kept)
    assert len(num_accepted) > 4


@pytest.mark.parametrize("stop", [None, 25])
def test_walking_the_nodes_on_the_host_finds_the_same_path(stop: int | None) -> None:
    kept = set()
    for seed in range(200):
        scored = random_scored(seed)
        stops = None if stop is None else torch.full_like(scored.num_committed, stop)
        scored = replace(scored, stop=stops)
        asked = judged(scored, ExactMatch(), TieBreak.CLOSEST)
        answers, steps = torch.arange(3), asked.path.shape[1]
        found = judge_on_host(
            scored.tree, scored.predictions, answers, scored.deepest, stops, steps
        )
        for one, other in zip(found.columns, asked.columns, strict=True):
            assert torch.equal(one, other)
        kept |= set(found.num.tolist())
    assert len(kept) > 3


def test_a_tree_without_guesses_yields_the_targets_own_token() -> None:
    scored = random_scored(5)
    root = DraftTree.root_only(torch.tensor([1, 2, 3]))
    alone = replace(scored, tree=root, predictions=torch.tensor([[4], [5], [6]]))
    verdict = judged(alone, ExactMatch(), TieBreak.CLOSEST)
    assert verdict.bonus.tolist() == [4, 5, 6]
    assert verdict.num.tolist() == [0, 0, 0]
    assert verdict.path.tolist() == [[0], [0], [0]]
