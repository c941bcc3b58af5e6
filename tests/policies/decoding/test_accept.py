"""The path that is committed, against trying every path by hand."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from deft_policies.decoding.accept import accept
from deft_policies.decoding.acceptance.rule import AcceptanceRule, ActionSpace, ExactMatch
from deft_policies.decoding.sequence import AnswerSpec, PassResult
from deft_policies.decoding.tree import Branches, DraftTree, merge
from deft_policies.methods.spec_vla import WithinIds
from deft_policies.methods.top_k import TopK
from deft_policies.methods.within_bins import WithinBins
from tests.policies.decoding.trees import Case, OnBins, random_case, steps_to
from tests.tiny_target import LENGTH, path_to

pytestmark = pytest.mark.promise


def accepted_nodes(case: Case, rule: AcceptanceRule) -> list[int]:
    """Nodes that may end the path: accepted, and leaving the last token to the target."""
    deepest = LENGTH - 1 - case.num_committed
    accepted = case.accepts(rule)
    depths = [len(path_to(case.tree, node)) - 1 for node in range(case.tree.num_nodes)]
    return [n for n in range(case.tree.num_nodes) if accepted[n] and depths[n] <= deepest]


def closest(case: Case, rule: AcceptanceRule) -> int:
    def key(node: int) -> tuple[float, ...]:
        steps = steps_to(case, node)
        distance = sum(abs(step.deviation) for step in steps)
        return (-len(steps), distance, -case.tree.log_probs[node], node)

    return min(accepted_nodes(case, rule), key=key, default=0)


def first_row(case: Case, rule: AcceptanceRule) -> int:
    """As the published code does: leaf by leaf in node order, the first longest wins."""
    tree, inner = case.tree, set(case.tree.parents)
    usable = set(accepted_nodes(case, rule))
    best, best_length = 0, 0
    for leaf in range(1, tree.num_nodes):
        if leaf in inner:
            continue
        path = path_to(tree, leaf)
        length = 0
        while length + 1 < len(path) and path[length + 1] in usable:
            length += 1
        if length > best_length:
            best, best_length = path[length], length
    return best


@pytest.mark.parametrize(
    ("rule", "slow"),
    [
        (ExactMatch(), closest),
        (WithinBins(4), closest),
        (WithinIds(4, ties="closest"), closest),
        (WithinIds(4), first_row),
        (OnBins(4), first_row),
    ],
)
def test_the_path_is_the_one_found_by_trying_every_path(
    rule: AcceptanceRule, slow: Callable[[Case, AcceptanceRule], int]
) -> None:
    num_ties = 0
    for seed in range(300):
        case = random_case(seed)
        path, bonus = case.committed(rule)
        expected = path_to(case.tree, slow(case, rule))
        usable = accepted_nodes(case, rule)
        lengths = [len(path_to(case.tree, node)) for node in usable]
        num_ties += lengths.count(len(expected)) > 1
        if rule.is_exact:  # equally long exact paths carry the same tokens
            assert tokens_at(case, path) == tokens_at(case, expected)
        else:
            assert path == expected
        assert bonus == case.predictions[path[-1]]
    assert num_ties > (2 if rule.is_exact else 10)


def tokens_at(case: Case, path: list[int]) -> list[int]:
    return [case.tree.tokens[node] for node in path]


def test_closeness_wins_before_likelihood_and_likelihood_before_order() -> None:
    tree = merge([30], [("test", Branches([33, 31, 29], [0, 0, 0], [-0.1, -3.0, -1.0]))], 64)
    logits = torch.nn.functional.one_hot(torch.tensor([30] * 4), 60).float()
    case = replace(random_case(0), tree=tree, logits=logits)
    case.answer.tokens, case.answer.target_tokens = [], []
    path, _ = case.committed(WithinBins(5))
    assert path == [0, 3]  # as close as node 2, and likelier
    path, _ = case.committed(OnBins(5))
    assert path == [0, 1]


def test_the_last_token_of_an_action_is_never_a_draft() -> None:
    for seed in range(120):
        case = random_case(seed)
        path, _ = case.committed(WithinIds(99))
        assert case.num_committed + len(path) - 1 <= LENGTH - 1


@pytest.mark.parametrize("rule", [ExactMatch(), WithinBins(4)])
def test_no_draft_of_the_stop_token_is_committed(rule: AcceptanceRule) -> None:
    num_stops, spec = 0, AnswerSpec(LENGTH, 25, ActionSpace.in_bins(LENGTH))
    for seed in range(200):
        case = random_case(seed, spec=spec)
        path, _ = case.committed(rule)
        assert 25 not in tokens_at(case, path)[1:]
        num_stops += 25 in case.tree.tokens[1:]
    assert num_stops > 20


def test_a_tree_without_guesses_yields_the_targets_own_token() -> None:
    case = random_case(5)
    found = PassResult(case.answer.number, [4], [4], is_finite=True)
    assert accept(case.answer, DraftTree.of_committed([1]), found) == ([0], 4)


def test_committed_tokens_that_a_pass_caches_stay_on_the_path() -> None:
    """Where a grammar has forced tokens, node 0 is not the root."""
    tree = merge([7, 8, 9], [("test", [[10, 11], [12]])], 64)
    assert (tree.root, tree.num_nodes, tree.is_chain) == (2, 6, False)
    case = random_case(5)
    case.answer.tokens = case.answer.target_tokens = []
    said = [1, 2, 10, 5, 6, 7]
    found = PassResult(case.answer.number, said, said, is_finite=True)
    assert accept(case.answer, tree, found) == ([0, 1, 2, 3], 5)


def test_nothing_is_relaxed_where_tokens_mean_no_distance() -> None:
    """Tokens of frequencies are no bins: without an action space every rule is exact."""
    always, num_near = TopK(k=1000), 0
    for seed in range(100):
        without = random_case(seed, spec=AnswerSpec(LENGTH, 25))
        path, _ = without.committed(always)
        exact, _ = without.committed(ExactMatch())
        assert len(path) == len(exact)
        assert tokens_at(without, path) == tokens_at(without, exact)
        relaxed = random_case(seed, spec=AnswerSpec(LENGTH, 25, ActionSpace.in_bins(LENGTH)))
        num_near += len(relaxed.committed(always)[0]) > len(path)
    assert num_near > 10
