"""Grown trees: EAGLE-2's against plain lists, templates against a table of odds by path."""

import random

import pytest
import torch
from torch import Tensor

from deft_policies.decoding.drafts.growth import (
    Grown,
    Level,
    beam_tree,
    read_grown,
    template_tree,
)
from deft_policies.decoding.plan import Path, TreeShape, read_tree
from deft_policies.decoding.tree import DraftTree, merge
from tests.policies.decoding.trees import paths_of
from tests.tiny_target import path_to

SMALL = TreeShape.of_paths(((0,), (1,), (0, 0), (0, 2), (1, 0), (0, 2, 1)))


def random_template(seed: int) -> TreeShape:
    rng = random.Random(seed)
    paths: set[Path] = set()
    for _ in range(rng.randrange(1, 14)):
        above = rng.choice([(), *sorted(paths)])
        paths.add((*above, rng.randrange(4)))
    return TreeShape.of_paths(tuple(sorted(paths, key=lambda path: (len(path), path))))


def trees_below(roots: list[int], grown: Grown) -> list[DraftTree]:
    found = read_grown(grown, len(roots))
    return [merge([root], [("test", one)], 99) for root, one in zip(roots, found, strict=True)]


@pytest.mark.parametrize(
    "paths",
    [
        (),
        ((0,), (0,)),
        ((1,), (0,)),
        ((0, 0), (0,)),
        ((0,), (1, 0)),
        ((-1,),),
        ((), (0,)),
    ],
)
def test_a_template_whose_paths_do_not_make_a_tree_in_order_is_refused(
    paths: tuple[Path, ...],
) -> None:
    with pytest.raises(ValueError, match="template"):
        TreeShape.of_paths(paths)


def test_cutting_leaves_the_first_levels() -> None:
    assert SMALL.levels == 3
    assert SMALL.cut(2).paths == SMALL.paths[:-1]
    assert SMALL.cut(0).paths == ((0,), (1,))
    assert SMALL.cut(9) is SMALL
    assert SMALL.inner(1) == ((0,), (1,))
    assert SMALL.inner(2) == ((0, 2),)


def test_the_harmonic_template_is_wide_at_the_top_and_narrow_below() -> None:
    template = TreeShape.template(levels=4, reach=4)
    assert len(template.paths) == 44
    assert template.level(1) == ((0,), (1,), (2,), (3,))
    assert (0, 0, 0, 3) in template.paths  # 1 * 1 * 1 * 4
    assert (1, 1, 1) not in template.paths  # 2 * 2 * 2
    assert TreeShape.template(5, 1) == TreeShape.of_paths(
        ((0,), (0,) * 2, (0,) * 3, (0,) * 4, (0,) * 5)
    )


@pytest.mark.parametrize("seed", range(25))
def test_every_node_gets_the_token_of_its_rank_below_its_parent(seed: int) -> None:
    """Against a table of odds by whole path, looked up one node at a time."""
    template, first_token = random_template(seed), 100
    generator = torch.Generator().manual_seed(seed)
    table: dict[tuple[int, ...], torch.Tensor] = {}

    def odds(tokens: tuple[int, ...]) -> torch.Tensor:
        if tokens not in table:
            table[tokens] = torch.randn(9, generator=generator).log_softmax(dim=0)
        return table[tokens]

    # What the grower has looked behind so far, level by level: [row][node] paths of tokens.
    known = [[[()], [()]]]

    def extend(nodes: Level) -> torch.Tensor:
        rows = []
        for row, tokens in enumerate(nodes.tokens.tolist()):
            above = [known[-1][row][index] for index in nodes.above[row].tolist()]
            rows.append([(*path, token) for path, token in zip(above, tokens, strict=True)])
        for index, line in enumerate(nodes.ancestors[0].tolist()):
            assert sum(line) == nodes.depth
            assert line[-len(rows[0]) :] == [other == index for other in range(len(rows[0]))]
        known.append(rows)
        return torch.stack([torch.stack([odds((row, *p)) for p in rows[row]]) for row in (0, 1)])

    first = torch.stack([odds((0,)), odds((1,))])
    deepest = torch.tensor([2, 9])
    trees = trees_below([7, 8], template_tree(template, first, extend, deepest, first_token))
    for row, tree in enumerate(trees):
        real = [path for path in template.paths if row == 1 or len(path) <= 2]
        assert tree.num_nodes == 1 + len(real)
        for node, path in enumerate(real, start=1):
            tokens: tuple[int, ...] = ()
            score = 0.0
            for rank in path:
                best = odds((row, *tokens)).topk(rank + 1)
                tokens = (*tokens, int(best.indices[rank]) + first_token)
                score += float(best.values[rank])
            assert tuple(tree.tokens[one] for one in path_to(tree, node)[1:]) == tokens
            assert tree.log_probs[node] == pytest.approx(score, abs=1e-5)


def test_the_flag_reads_every_kind_of_tree() -> None:
    assert read_tree("dynamic:5,8,49") == TreeShape(5, 8, 49)
    assert read_tree("chain:3") == TreeShape.chain(3)
    shape = read_tree("template:4,4")
    assert shape == TreeShape.template(4, 4)
    assert (shape.levels, shape.num_guesses) == (4, 44)
    assert shape.num_open == 1 + sum(len(TreeShape.template(4, 4).inner(n)) for n in (1, 2, 3))


@pytest.mark.parametrize("text", ["", "chain", "chain:0", "chain:1,2", "dynamic:5", "bush:3"])
def test_a_tree_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"expected dynamic:LEVELS,TOP_K,GUESSES"):
        read_tree(text)


# Dynamic trees, as EAGLE-2 grows them.


def grow(tables: Tensor, shape: TreeShape, deepest: int) -> DraftTree:
    """Grow where the odds of a token depend on its level and on the token before it.

    `tables` is [level, token before, token] log-probabilities; the roots are token 0.
    """
    grown = beam_tree(
        shape,
        tables[0, 0][None],
        lambda level: tables[level.depth][level.tokens],
        torch.tensor([deepest]),
        first_token=0,
    )
    return trees_below([0], grown)[0]


def slow_growth(tables: Tensor, shape: TreeShape, deepest: int) -> dict[tuple[int, ...], float]:
    """The same tree from lists: path -> cumulative log-probability."""
    frontier: list[tuple[tuple[int, ...], float]] = [((), 0.0)]
    candidates: list[tuple[tuple[int, ...], float]] = []
    for level in range(shape.levels):
        children = []
        for path, score in frontier:
            odds = tables[level, path[-1] if path else 0]
            for token in odds.argsort(descending=True)[: shape.top_k].tolist():
                children.append(((*path, token), score + float(odds[token])))
        if level < deepest:
            candidates += children
        frontier = sorted(children, key=lambda one: -one[1])[: shape.top_k]
    best = sorted(candidates, key=lambda one: -one[1])[: shape.num_guesses]
    return dict(best)


@pytest.mark.parametrize("seed", range(12))
def test_growth_keeps_the_likeliest_nodes(seed: int) -> None:
    rng = random.Random(seed)
    shape = TreeShape(rng.randrange(1, 6), rng.randrange(1, 5), rng.randrange(1, 30))
    generator = torch.Generator().manual_seed(seed)
    tables = torch.randn(6, 12, 12, generator=generator).log_softmax(dim=2)
    deepest = rng.randrange(1, shape.levels + 1)
    tree = grow(tables, shape, deepest)
    expected = slow_growth(tables, shape, deepest)
    assert paths_of(tree) == set(expected)
    for node in range(1, tree.num_nodes):
        path = tuple(tree.tokens[one] for one in path_to(tree, node)[1:])
        assert tree.log_probs[node] == pytest.approx(expected[path], abs=1e-4)


def test_a_child_as_likely_as_its_parent_is_never_kept_without_it() -> None:
    """Certain steps have log-probability 0, so whole chains tie; parents must win the tie."""
    tables = torch.full((5, 6, 6), -9.0)
    tables[:, :, 3] = 0.0
    shape = TreeShape(levels=5, top_k=2, num_guesses=3)
    tree = grow(tables, shape, deepest=5)
    assert paths_of(tree) == {(3,), (3, 3), (3, 3, 3)}


def test_a_row_with_little_left_gets_no_guess_that_is_too_deep() -> None:
    tables = torch.randn(5, 12, 12, generator=torch.Generator().manual_seed(0)).log_softmax(dim=2)
    shape = TreeShape(levels=5, top_k=3, num_guesses=20)
    tree = grow(tables, shape, deepest=1)
    assert {len(path) for path in paths_of(tree)} == {1}
    assert tree.num_nodes == 1 + 3
