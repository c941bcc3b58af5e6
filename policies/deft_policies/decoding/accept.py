"""Accept: which path of a draft tree is committed. Integers alone; tensors only for device rules.

`accept` is asked once for each answer and pass. The longest accepted path wins; of equally long
ones that with the smaller total distance, then the likelier draft, then the first. The target's
token after it is the bonus. An answer's last token is always a bonus, so no guess is committed that
is deeper than what is missing, and none that is the stop token.
"""

from __future__ import annotations

from deft_policies.decoding.acceptance.rule import (
    AcceptanceRule,
    DeviceRule,
    Guess,
    JudgedTree,
    LocalRule,
    PathRule,
    TreeRule,
)
from deft_policies.decoding.plan import Loop, TieBreak
from deft_policies.decoding.plugins import ask_rule
from deft_policies.decoding.sequence import Found, Sequence
from deft_policies.decoding.tree import DraftTree

Path = list[int]  # nodes from node 0 on


def accept(sequence: Sequence, tree: DraftTree, found: Found) -> tuple[Path, int]:
    """The path to commit, from node 0 on, and the bonus."""
    if found.chosen is not None:
        node, bonus = found.chosen
        return tree.path_to(node), bonus
    if not tree.has_guesses or sequence.error is not None:
        return list(range(tree.root + 1)), found.predictions[tree.root]
    if sequence.method.rule.is_exact:
        path = tree.path_to(_longest_equal(sequence, tree, found.predictions))
    else:
        path = _longest_accepted(judge(sequence, tree, found))
    return path, found.predictions[path[-1]]


def _longest_equal(sequence: Sequence, tree: DraftTree, predictions: list[int]) -> int:
    """The deepest node whose whole path is what the target says."""
    tokens, parents, spec = tree.tokens, tree.parents, sequence.spec
    deepest, best = sequence.num_missing, tree.root
    depths = [-1] * tree.num_nodes  # of nodes that stand, below the root
    depths[tree.root] = 0
    for node in range(tree.root + 1, tree.num_nodes):
        parent, token = parents[node], tokens[node]
        is_equal = token == predictions[parent] and not spec.ends_with(token)
        if is_equal and 0 <= depths[parent] < deepest:
            depths[node] = depths[parent] + 1
            if depths[node] > depths[best]:
                best = node
    return best


def judge(sequence: Sequence, tree: DraftTree, found: Found) -> JudgedTree:
    """The tree with the target's answers, as relaxed rules read it."""
    rule, stop, root = sequence.method.rule, sequence.spec.stop, tree.root
    expected = [-1] * (root + 1)
    is_equal, is_relaxable = [True] * (root + 1), [False] * (root + 1)
    is_word, depths = [False] * (root + 1), [-1] * root + [0]
    for node in range(root + 1, tree.num_nodes):
        token, wanted = tree.tokens[node], found.predictions[tree.parents[node]]
        both = sequence.is_bin(token), sequence.is_bin(wanted)
        near = sequence.spec.space is not None  # or no distance between tokens means anything
        word = not sequence.spec.is_action and not any(both) and stop not in (token, wanted)
        expected.append(wanted)
        is_equal.append(token == wanted)
        is_word.append(word)
        any_id = rule.any_id and sequence.spec.is_action
        is_relaxable.append((near and all(both)) or any_id or (word and rule.words))
        depths.append(depths[tree.parents[node]] + 1)
    return JudgedTree(
        tree,
        expected,
        found.predictions,
        is_equal,
        is_relaxable,
        is_word,
        depths,
        sequence.num_missing,
        found.judged,
        sequence,
    )


def _longest_accepted(judged: JudgedTree) -> Path:
    """The path of a relaxed rule, cut where the answer ends."""
    tree, sequence = judged.tree, judged.sequence
    is_published = sequence.method.loop is Loop.PUBLISHED
    rule = sequence.method.rule
    stands = ask_rule(rule, lambda: stands_by(rule, judged))
    may_end = stands if is_published else _within_answer(judged, stands)
    longest = max(judged.depths[node] for node, may in enumerate(may_end) if may)
    nodes = [node for node, may in enumerate(may_end) if may and judged.depths[node] == longest]
    if len(nodes) > 1:
        if sequence.method.tie_break is TieBreak.FIRST_ROW:
            first_leaf = _first_leaves(tree)
            nodes.sort(key=lambda node: first_leaf[node])
        else:
            nodes.sort(key=lambda node: _distance_of(judged, stands, node))
    path = tree.path_to(nodes[0])
    if is_published:  # the longest path however deep it is, then cut where the action ends
        path = path[: tree.root + 1 + max(judged.deepest, 0)]
    return path


def _within_answer(judged: JudgedTree, stands: list[bool]) -> list[bool]:
    """Those that stand and lie within what is missing, without the stop token on their path."""
    tree, spec = judged.tree, judged.sequence.spec
    fine = [depth <= judged.deepest for depth in judged.depths]
    if spec.stop is not None:
        no_stop = judged.whole_paths([not spec.ends_with(token) for token in tree.tokens])
        fine = [one and other for one, other in zip(fine, no_stop, strict=True)]
    return [node <= tree.root or (one and fine[node]) for node, one in enumerate(stands)]


def stands_by(rule: AcceptanceRule, judged: JudgedTree) -> list[bool]:
    """Which nodes a rule lets be the last of a path, [node]."""
    if isinstance(rule, TreeRule):
        return rule.accepts(judged)
    return judged.whole_paths(_judge_nodes(rule, judged))


def _judge_nodes(rule: AcceptanceRule, judged: JudgedTree) -> list[bool]:
    """Which guesses are equal or accepted; those below one that is not may be either."""
    tree, places = judged.tree, _places(judged)
    fine = [True] * (tree.root + 1)
    paths: list[list[Guess]] = [[] for _ in fine]
    for node in range(tree.root + 1, tree.num_nodes):
        above = tree.parents[node]
        guess = tree.tokens[node], judged.expected[node], places[node]
        path = [*paths[above], guess]
        paths.append(path)
        fine.append(
            judged.is_equal[node]
            or (fine[above] and judged.is_relaxable[node] and _accepts(rule, judged, node, path))
        )
    return fine


def _accepts(rule: AcceptanceRule, judged: JudgedTree, node: int, path: list[Guess]) -> bool:
    if isinstance(rule, LocalRule):
        return rule.accepts(*path[-1])
    if isinstance(rule, PathRule):
        return rule.accepts(path, judged.sequence)
    assert isinstance(rule, DeviceRule)
    return judged.measured[node] > 0


def _places(judged: JudgedTree) -> list[int]:
    """Which token of an action each node would become, [node]; clamped into it."""
    tree, sequence = judged.tree, judged.sequence
    last = sequence.spec.action_length - 1
    begun = sequence.num_action_tokens  # of the action that the root belongs to
    if sequence.spec.is_action:
        return [min(max(begun + depth - 1, 0), last) for depth in judged.depths]
    before = [begun] * (tree.root + 1)  # action tokens up to a node since the last text
    for node in range(tree.root + 1, tree.num_nodes):
        is_bin = sequence.is_bin(tree.tokens[node])
        before.append(before[tree.parents[node]] + 1 if is_bin else 0)
    above = [max(parent, 0) for parent in tree.parents]
    return [min(before[parent], last) for parent in above]


def _distance_of(judged: JudgedTree, stands: list[bool], node: int) -> tuple[int, float, int]:
    """Orders equally long paths: total distance, then how unlikely the draft was, then the node."""
    tree = judged.tree
    nodes = [one for one in tree.path_to(node)[tree.root + 1 :] if stands[one]]
    distance = sum(abs(tree.tokens[one] - judged.expected[one]) for one in nodes)
    known = tree.log_probs[node] if node < len(tree.log_probs) else 0.0
    return distance, -known, node


def _first_leaves(tree: DraftTree) -> list[int]:
    """The smallest leaf at or below each node, [node]."""
    first = [tree.num_nodes] * tree.num_nodes
    inner = set(tree.parents)
    for node in reversed(range(tree.num_nodes)):
        if node not in inner:
            first[node] = node
        parent = tree.parents[node]
        if parent >= 0:
            first[parent] = min(first[parent], first[node])
    return first
