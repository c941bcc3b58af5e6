"""Draft trees: who is above whom, merged chains, joined and cut trees."""

import random

import pytest

from deft_policies.decoding.target import ancestors_of
from deft_policies.decoding.tree import Branches, Chain, DraftTree, merge
from tests.policies.decoding.trees import paths_of, random_tree
from tests.tiny_target import path_to


def merged(*chains: Chain, root: int = 7, widest: int = 64) -> DraftTree:
    return merge([root], [("test", list(chains))], widest)


@pytest.mark.parametrize("seed", range(10))
def test_ancestors_and_depths_are_those_found_by_walking_up(seed: int) -> None:
    tree = random_tree(random.Random(seed), num_nodes=1 + 4 * seed)
    mask, depths = ancestors_of(tree), tree.depths()
    for node in range(tree.num_nodes):
        path = path_to(tree, node)
        assert mask[node].nonzero()[0].tolist() == sorted(path)
        assert depths[node] == len(path) - 1
        assert tree.path_to(node) == path


def test_one_chain_becomes_a_chain_and_names_its_source() -> None:
    tree = merge([99], [("previous", [[12, 13, 14]])], 64)
    assert (tree.tokens, tree.parents) == ([99, 12, 13, 14], [-1, 0, 1, 2])
    assert tree.sources == ["", "previous", "previous", "previous"]
    assert tree.is_chain


def test_chains_that_start_alike_share_their_nodes() -> None:
    tree = merged([1, 2, 3, 4, 5, 6], [1, 2, 9, 4, 5, 6], [1, 2, 3, 4, 5, 6])
    assert paths_of(tree) == {
        *[(1, 2, 3, 4, 5, 6)[:n] for n in range(1, 7)],
        *[(1, 2, 9, 4, 5, 6)[:n] for n in range(3, 7)],
    }
    assert tree.num_nodes == 11
    assert not tree.is_chain


@pytest.mark.parametrize("seed", range(12))
def test_merging_loses_no_guess_and_makes_none_up(seed: int) -> None:
    rng = random.Random(seed)
    chains = [
        [rng.randrange(2) for _ in range(rng.randrange(7))] for _ in range(rng.randrange(1, 4))
    ]
    tree = merged(*chains)
    expected = {tuple(chain[:n]) for chain in chains for n in range(1, len(chain) + 1)}
    assert paths_of(tree) == expected
    assert tree.num_nodes - 1 == len(expected)  # every guess once
    assert all(parent < node for node, parent in enumerate(tree.parents))


def test_trees_of_two_sources_stand_side_by_side_and_chains_behind_them() -> None:
    one, other = Branches([1, 2], [0, 1], [-1.0, -2.0]), Branches([1, 3], [0, 1])
    tree = merge([7], [("chain", [[1, 2]]), ("head", one), ("medusa", other)], 64)
    assert tree.tokens == [7, 1, 2, 1, 3, 1, 2]
    assert tree.parents == [-1, 0, 1, 0, 3, 0, 5]
    assert tree.sources == ["", "head", "head", "medusa", "medusa", "chain", "chain"]
    assert tree.log_probs == [0.0, -1.0, -2.0]
    assert not tree.is_chain


def test_a_tree_too_wide_loses_its_last_nodes() -> None:
    whole, cut = merged([1, 2, 3], [4, 5, 6]), merged([1, 2, 3], [4, 5, 6], widest=5)
    assert cut.tokens == whole.tokens[:5] == [7, 1, 2, 3, 4]
    branches = Branches([1, 2, 3], [0, 0, 2])
    assert merge([7], [("head", branches)], 3).tokens == [7, 1, 2]


def test_committed_tokens_stand_before_the_root_as_a_chain() -> None:
    tree = merge([5, 6, 7], [("test", [[1, 2]]), ("other", Branches([3], [0]))], 64)
    assert tree.root == 2
    assert tree.tokens == [5, 6, 7, 3, 1, 2]
    assert tree.parents == [-1, 0, 1, 2, 2, 4]
    assert paths_of(tree) == {(1,), (1, 2), (3,)}
