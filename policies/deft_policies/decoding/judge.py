"""Judge a pass: which drafts stand, and which path of them is committed. No state.

Begin at `judge_on_host`, for exact methods on a CPU. `judge` is for all others, and for a GPU.
"""

import torch
from torch import Tensor

from deft_policies.decoding.acceptance.rule import ScoredTree
from deft_policies.decoding.batch import Pass
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import Loop, TieBreak
from deft_policies.decoding.plugins import ask_rule
from deft_policies.decoding.sampling import (
    ANSWER,
    COIN,
    MOST_TRIES,
    exponential,
    first_maximum,
    target_odds,
    uniform,
)
from deft_policies.decoding.tree import DraftTree

Accepted = tuple[Tensor, Tensor, Tensor, Tensor]  # of a `Pass`: path, num, bonus, target_tokens


def judge_on_host(
    tree: DraftTree,
    predictions: Tensor,
    answers: Tensor,
    room: Tensor,
    stop: Tensor | None,
    steps: int,
) -> Pass:
    """Accept drafts of an exact method: a draft stands if it is the target's own token.

    A draft must equal the target's prediction after its parent, and the parent must stand, too. The
    longest path is committed: at most `steps` nodes, the root among them. The prediction after it
    is the bonus. An answer's last token is always a bonus, so no draft stands that lies deeper than
    `room` [row] or is the `stop` token [row].

    `judge` does the same with tensors; integers are quicker where the host has them.
    """
    rows = []
    columns = (tree.tokens, tree.parents, tree.is_real, predictions, room)
    stops = [None] * len(room) if stop is None else stop.tolist()
    lists = zip(*(column.tolist() for column in columns), stops, strict=True)
    for tokens, parents, is_real, expected, deepest, end in lists:
        depths = [0]  # of each node, or -1 where it is not accepted
        for node in range(1, tree.num_nodes):
            parent, token = parents[node], tokens[node]
            is_equal = is_real[node] and token == expected[parent] and token != end
            stands = is_equal and 0 <= depths[parent] < deepest
            depths.append(depths[parent] + 1 if stands else -1)
        num = max(depths)
        node = depths.index(num)
        bonus = expected[node]
        path = [0] * steps
        for step in range(num, 0, -1):
            path[step] = node
            node = parents[node]
        rows.append((*path, num, bonus))
    numbers = torch.tensor(rows)
    paths, nums, bonuses = numbers[:, :steps], numbers[:, steps], numbers[:, steps + 1]
    own = predictions.gather(1, paths)
    return Pass(tree, predictions, paths, nums, bonuses, own, own, answers)


def judge(method: Method, scored: ScoredTree, keys: Tensor, steps: int) -> Pass:
    """Accept drafts of any method, with tensors. What a step holds beyond `num` is anything."""
    tree = scored.tree
    path, num, bonus, target_tokens = _find_path(method, scored, keys, steps)
    tokens = target_tokens
    if path.shape[1] > 1 and not method.rule.is_exact:  # the next draft on the path, or the bonus
        drafted = tree.tokens.gather(1, path[:, 1:])
        tokens = torch.cat((drafted, bonus[:, None]), dim=1)
        tokens.scatter_(1, num[:, None], bonus[:, None])
    answers = scored.scores.answers
    assert answers is not None
    return Pass(tree, scored.predictions, path, num, bonus, tokens, target_tokens, answers)


def _find_path(method: Method, scored: ScoredTree, keys: Tensor, steps: int) -> Accepted:
    """The path to commit: by the ratio test, in Spec-VLA's own loop, by equality or by the rule."""
    tree, rule = scored.tree, method.rule
    if method.temperature > 0.0 and tree.odds is not None:
        return _ratio_test(scored, tree.odds, keys, method.temperature, steps)
    if method.loop is Loop.PUBLISHED:
        return _longest_then_cut(scored, method, steps)
    if tree.is_chain and rule.is_exact:
        return _exact_chain(scored, steps)
    counts = tree.depths() <= scored.deepest.unsqueeze(1)
    if scored.stop is not None:
        counts = counts & scored.whole_paths(tree.tokens != scored.stop[:, None])
    accepted = ask_rule(rule, scored) & counts
    return _longest(scored, accepted, rule.is_exact, method.tie_break, steps)


def _exact_chain(scored: ScoredTree, steps: int) -> Accepted:
    """The walk along a chain until its first miss, without looking for a path."""
    nodes = scored.tree.depths()
    fine = scored.is_equal & scored.tree.is_real & (nodes <= scored.deepest.unsqueeze(1))
    if scored.stop is not None:
        fine = fine & (scored.tree.tokens != scored.stop[:, None])
    kept = fine[:, 1:].cummin(dim=1).values.sum(dim=1)
    bonus = scored.predictions.gather(1, kept.unsqueeze(1)).squeeze(1)
    return nodes[:, :steps], kept, bonus, scored.predictions[:, :steps]


def _longest_then_cut(scored: ScoredTree, method: Method, steps: int) -> Accepted:
    """Take the longest path however deep it is, then cut it where the action ends (Spec-VLA).

    So a long path may win by guesses beyond the end, before another that is better up to there.
    """
    accepted = ask_rule(method.rule, scored)
    path, num, _, target_tokens = _longest(scored, accepted, False, method.tie_break, steps)
    kept = torch.minimum(num, scored.deepest.clamp(min=0))
    return path, kept, target_tokens.gather(1, kept[:, None]).squeeze(1), target_tokens


def _longest(
    scored: ScoredTree, accepted: Tensor, is_exact: bool, tie_break: TieBreak, steps: int
) -> Accepted:
    length = scored.tree.depths().masked_fill(~accepted, -1)
    if not is_exact:  # equally long exact paths carry the same tokens
        length = length + 0.5 * _preference(scored, accepted, tie_break)
    return _walk(scored, length.argmax(dim=1), steps)


def _walk(scored: ScoredTree, last: Tensor, steps: int) -> Accepted:
    """Collect the path that ends at node `last` of each row."""
    tree = scored.tree
    rows = torch.arange(last.shape[0], device=last.device)
    on_path = tree.ancestor_mask()[rows, last]  # [row, node]
    # Parents come before their children, so a path in node order is a path in depth order.
    nodes = torch.arange(tree.num_nodes, device=last.device)
    path = torch.where(on_path, nodes, tree.num_nodes).sort(dim=1).values[:, :steps]
    path = path.masked_fill(path == tree.num_nodes, 0)
    num, bonus = on_path.sum(dim=1) - 1, scored.predictions[rows, last]
    return path, num, bonus, scored.predictions.gather(1, path)


def _preference(scored: ScoredTree, accepted: Tensor, tie_break: TieBreak) -> Tensor:
    """Rank nodes of equal depth: larger is better, always in [0, 1). float64 [row, node]."""
    if tie_break is TieBreak.FIRST_ROW:
        return 1.0 - _first_leaf(scored).double() / (scored.tree.num_nodes + 1)
    far = scored.deviations.abs().masked_fill(~accepted, 0)
    distance = scored.sum_along_paths(far).double()
    unlikely = torch.sigmoid(-scored.tree.log_probs.double())
    return 1.0 / (1.0 + distance + 0.5 * unlikely)


def _first_leaf(scored: ScoredTree) -> Tensor:
    """The smallest leaf index at or below each node, [row, node]."""
    tree = scored.tree
    nodes = torch.arange(tree.num_nodes, device=tree.tokens.device)
    inner = scored.parents.masked_fill(~tree.is_real, 0)  # padding makes nobody a parent
    is_leaf = torch.ones_like(tree.is_real).scatter(1, inner, False) & tree.is_real
    below = tree.ancestor_mask().transpose(1, 2) & is_leaf.unsqueeze(1)
    return torch.where(below, nodes, tree.num_nodes).amin(dim=2)


def predict(
    method: Method, tree: DraftTree, logits: Tensor, first: int, keys: Tensor, count: Tensor
) -> Tensor:
    """The target's token after each node, [row, node]; column 0 of the logits is token `first`.

    Above temperature 0 it is the maximum of p / E over the vocabulary, an exact draw from p. The
    exponential noise E is a hash of `keys` [row] and of the token's position, `count` [row] being
    the root's. So the draw is the same whatever was drafted.
    """
    if method.temperature == 0.0:
        best = first_maximum(logits)
        return best + first if first else best
    odds = target_odds(logits, method.temperature)
    places = count[:, None] + tree.depths()
    drawn = exponential(keys, ANSWER, places, odds.shape[2])
    return (odds / drawn).argmax(dim=2) + first


def _ratio_test(
    scored: ScoredTree, q: Tensor, keys: Tensor, temperature: float, steps: int
) -> Accepted:
    """Leviathan's ratio test, for drafts that were drawn from known odds q.

    Walk down from the root. A draft stands with probability min(1, odds / q); `odds` begin as the
    target's p. One that falls leaves max(0, odds - q) / Z to judge its next sibling by, or to draw
    the bonus from. So the tokens have exactly the target's distribution, in trees as in chains.

    A stop token that stands is the bonus.
    """
    tree, first = scored.tree, scored.vocabulary.first
    rows = torch.arange(len(scored.num_committed), device=tree.tokens.device)
    p = target_odds(scored.scores.logits, temperature)
    is_judged = (tree.depths() <= scored.deepest[:, None]) & tree.is_real
    at, depth, tries = (torch.zeros_like(scored.num_committed) for _ in range(3))
    ended = torch.zeros_like(at, dtype=torch.bool)
    odds = p[:, 0]
    for node in range(1, tree.num_nodes):
        token = tree.tokens[:, node] - first
        places = (scored.num_committed + depth)[:, None]
        coins = uniform(keys, COIN, places, MOST_TRIES).float()
        coin = coins[rows, 0, tries.clamp(max=MOST_TRIES - 1)]
        asked = (tree.parents[:, node] == at) & is_judged[:, node] & (tries < MOST_TRIES) & ~ended
        stands = asked & (coin * q[rows, node, token] < odds[rows, token])
        if scored.stop is not None:
            is_end = stands & (tree.tokens[:, node] == scored.stop)
            only = torch.zeros_like(odds).scatter(1, token[:, None], 1.0)
            odds = torch.where(is_end[:, None], only, odds)
            stands = stands & ~is_end
            ended = ended | is_end
        left = _without_draft(odds, q[:, node])
        odds = torch.where((asked & ~stands & ~ended)[:, None], left, odds)
        odds = torch.where(stands[:, None], p[:, node], odds)
        at = torch.where(stands, node, at)
        depth = depth + stands
        tries = torch.where(stands, 0, tries + asked)
    places = (scored.num_committed + depth)[:, None]
    noise = exponential(keys, ANSWER, places, p.shape[2])[:, 0]
    bonus = (odds / noise).argmax(dim=1) + first
    path, num, _, _ = _walk(scored, at, steps)
    drafted = tree.tokens.gather(1, path).roll(-1, dims=1)
    return path, num, bonus, drafted.scatter(1, depth[:, None], bonus[:, None])


def _without_draft(odds: Tensor, q: Tensor) -> Tensor:
    """What is left of the target's odds when a draft drawn by q has fallen, [row, token]."""
    residual = (odds - q).clamp(min=0)
    mass = residual.sum(dim=1, keepdim=True)
    # Rounding can leave nothing of a residual whose mass is next to nothing; the odds are as good.
    return torch.where(mass > 0, residual / mass, odds)
