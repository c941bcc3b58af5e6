"""Trees: who is above whom, merged chains, joined and cut trees."""

import random
from dataclasses import replace

import pytest
import torch

from deft_policies.decoding import kinds
from deft_policies.decoding.drafts import Chains, remaining_tokens
from deft_policies.decoding.kinds import source_number
from deft_policies.decoding.plan import TreeShape
from deft_policies.decoding.tree import DraftLimits, DraftTree, merge
from deft_policies.memory import SessionMemory
from tests.policies.decoding.scripts import batch_of, limits_of
from tests.policies.decoding.trees import num_real, paths_of, random_tree
from tests.tiny_target import LENGTH, path_to


def merged(guesses: Chains, kind: str, counts: list[int], roots: list[int]) -> DraftTree:
    """The tree of whole actions [row, chain, position], of which so much is committed."""
    batch = batch_of([SessionMemory()] * len(counts), [[0] * count for count in counts])
    limits = limits_of(batch, roots=torch.tensor(roots))
    chains = remaining_tokens(batch, guesses.tokens, guesses.is_known, limits)
    return merge([(kind, chains)], limits, trims=False)


@pytest.mark.parametrize("seed", range(10))
def test_ancestors_and_depths_are_those_found_by_walking_up(seed: int) -> None:
    tree = random_tree(random.Random(seed), num_rows=3, num_nodes=1 + 4 * seed)
    mask, depths = tree.ancestor_mask(), tree.depths()
    for row in range(3):
        for node in range(tree.num_nodes):
            path = path_to(tree, row, node)
            assert mask[row, node].nonzero().flatten().tolist() == sorted(path)
            assert int(depths[row, node]) == len(path) - 1


def test_a_long_chain_reaches_from_its_root_to_its_end() -> None:
    nodes = torch.arange(-1, 63)[None]
    tree = DraftTree(nodes, nodes, nodes > -5, nodes.float(), nodes)
    assert tree.depths().tolist() == [list(range(64))]
    known = replace(tree, is_chain=True)
    assert torch.equal(known.depths(), tree.depths())
    assert torch.equal(known.ancestor_mask(), tree.ancestor_mask())


def chains(tokens: list[list[list[int]]], known: list[list[list[bool]]] | None = None) -> Chains:
    every = torch.tensor(tokens)
    return Chains(every, torch.ones_like(every).bool() if known is None else torch.tensor(known))


def test_one_chain_becomes_a_chain_of_what_is_still_open() -> None:
    guesses = chains([[[10, 11, 12, 13, 14, 15, 16]]])
    tree = merged(guesses, kinds.PREVIOUS, [2], [99])
    assert tree.tokens.tolist() == [[99, 12, 13, 14, 15]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3]]
    assert tree.sources[0].tolist() == [-1] + [source_number(kinds.PREVIOUS)] * 4


def test_chains_that_start_alike_share_their_nodes() -> None:
    guesses = chains([[[1, 2, 3, 4, 5, 6, 0], [1, 2, 9, 4, 5, 6, 0], [1, 2, 3, 4, 5, 6, 0]]])
    tree = merged(guesses, kinds.RETRIEVAL, [0], [7])
    assert paths_of(tree, 0) == {
        *[(1, 2, 3, 4, 5, 6)[:n] for n in range(1, 7)],
        *[(1, 2, 9, 4, 5, 6)[:n] for n in range(3, 7)],
    }
    assert num_real(tree, 0) == 10


def test_a_chain_ends_where_it_stops_knowing() -> None:
    guesses = chains(
        [[[1, 2, 3, 4, 5, 6, 0], [1, 2, 3, 4, 5, 6, 0]]],
        [[[True, True, False, True, True, True, True], [True] * 4 + [False] * 3]],
    )
    tree = merged(guesses, kinds.RETRIEVAL, [0], [7])
    assert paths_of(tree, 0) == {(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)}


@pytest.mark.parametrize("seed", range(12))
def test_merging_loses_no_guess_and_makes_none_up(seed: int) -> None:
    rng = random.Random(seed)
    shape = (3, rng.randrange(1, 4), LENGTH)
    guesses = Chains(
        torch.randint(0, 2, shape, generator=torch.Generator().manual_seed(seed)),
        torch.rand(shape, generator=torch.Generator().manual_seed(seed + 99)) < 0.9,
    )
    committed = [rng.randrange(0, 5) for _ in range(3)]
    tree = merged(guesses, kinds.NGRAM, committed, [7, 7, 7])
    for row, start in enumerate(committed):
        expected = set()
        for chain in range(shape[1]):
            path: tuple[int, ...] = ()
            for position in range(start, LENGTH - 1):
                if not bool(guesses.is_known[row, chain, position]):
                    break
                path += (int(guesses.tokens[row, chain, position]),)
                expected.add(path)
        assert paths_of(tree, row) == expected
        assert num_real(tree, row) == len(expected)  # every guess once
        assert bool((tree.parents[row, 1:] < torch.arange(1, tree.num_nodes)).all())


def test_joined_trees_keep_their_shapes_side_by_side() -> None:
    rng = random.Random(1)
    trees = [random_tree(rng, 2, size) for size in (5, 1, 4)]
    trees = [
        DraftTree(t.tokens.clone(), t.parents, t.is_real, t.log_probs, t.sources) for t in trees
    ]
    for tree in trees:
        tree.tokens[:, 0] = 7
    joined = DraftTree.side_by_side(trees)
    assert joined.num_nodes == 8
    for row in range(2):
        assert paths_of(joined, row) == set().union(*(paths_of(tree, row) for tree in trees))


@pytest.mark.parametrize("seed", range(6))
def test_trimming_drops_padding_and_nothing_else(seed: int) -> None:
    tree = random_tree(random.Random(seed), 2, 14)
    smaller = tree.without_padding()
    assert bool(smaller.is_real.any(dim=0).all())
    for row in range(2):
        assert paths_of(smaller, row) == paths_of(tree, row)


def test_a_tree_too_wide_loses_its_last_nodes() -> None:
    tree = random_tree(random.Random(0), 2, 14)
    assert tree.first_nodes(20) is tree
    smaller = tree.first_nodes(6)
    assert smaller.tokens.tolist() == tree.tokens[:, :6].tolist()
    assert paths_of(smaller, 0) <= paths_of(tree, 0)


@pytest.mark.parametrize("num_known", [0, 2, 5])
def test_only_chain_of_one_row_makes_the_same_tree_as_any_chains_do(num_known: int) -> None:
    tokens = torch.tensor([[[7, 8, 9, 10, 11]]])
    chains = Chains(tokens, torch.arange(5)[None, None] < num_known)
    for depth, widest in ((1, 64), (5, 64), (5, 3), (4, 64)):
        limits = DraftLimits(torch.tensor([3]), TreeShape(), depth, widest)
        few = merge([(kinds.PREVIOUS, chains)], limits, trims=True)
        usual = merge([(kinds.PREVIOUS, chains)], limits, trims=False)
        usual = usual.without_padding()
        assert few.is_chain
        for one, other in zip(few.columns, usual.columns, strict=True):
            assert one.tolist() == other.tolist()
