"""Accept: which path of a draft tree is committed. Integers alone; tensors only for device rules.

`accept` is asked once for each answer and pass. Each draft is judged against the target's token
after its parent; the rule says which drafts stand, and which of the paths to them is committed. The
target's token after that path is the bonus. An answer's last token is always a bonus, so no guess
is committed that is deeper than what is missing, and none that is the stop token.

A new rule derives from one of the kinds in `acceptance.rule`, and is named in a file of `methods`.
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
from deft_policies.decoding.plugins import ask_rule
from deft_policies.decoding.sequence import Found, Sequence
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import PolicyError

Path = list[int]  # nodes from node 0 on


def accept(sequence: Sequence, tree: DraftTree, found: Found) -> tuple[Path, int]:
    """The path to commit, from node 0 on, and the bonus."""
    rule = sequence.method.rule
    if found.chosen is not None:  # by the rule, on the device
        node, bonus = found.chosen
        return tree.path_to(node), bonus
    if not tree.has_guesses or sequence.error is not None:
        path = list(range(tree.root + 1))
    elif rule.is_exact:
        path = tree.path_to(_longest_equal(sequence, tree, found.predictions))
    else:
        path = ask_rule(rule, lambda: _best_accepted(rule, judge(sequence, tree, found)))
    return path, found.predictions[path[-1]]


def _longest_equal(sequence: Sequence, tree: DraftTree, predictions: list[int]) -> int:
    """The deepest node whose whole path is what the target says."""
    tokens, parents, spec = tree.tokens, tree.parents, sequence.spec
    deepest, best = sequence.num_missing, tree.root
    depths = [-1] * tree.num_nodes  # of nodes that stand, below the root
    depths[tree.root] = 0
    for node in range(tree.root + 1, tree.num_nodes):
        parent, token = parents[node], tokens[node]
        has_room = 0 <= depths[parent] < deepest
        if has_room and token == predictions[parent] and not spec.ends_with(token):
            depths[node] = depths[parent] + 1
            if depths[node] > depths[best]:
                best = node
    return best


def _best_accepted(rule: AcceptanceRule, judged: JudgedTree) -> Path:
    """The path that a relaxed rule has committed."""
    path = rule.best_path(judged, stands_by(rule, judged))
    tree = judged.tree
    has_room = tree.root < len(path) <= tree.root + 1 + max(judged.deepest, 0)
    if not has_room or path != tree.path_to(path[-1]):
        raise PolicyError(f"best_path must be a path for which the answer has room, got {path}")
    return path


def stands_by(rule: AcceptanceRule, judged: JudgedTree) -> list[bool]:
    """Which nodes a rule lets be the last of a path, [node]."""
    if isinstance(rule, TreeRule):
        stands, num_nodes = rule.accepts(judged), judged.tree.num_nodes
        if not isinstance(stands, list) or len(stands) != num_nodes:
            raise PolicyError(f"accepts must answer bool [node], here [{num_nodes}], got {stands}")
        return stands
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


def judge(sequence: Sequence, tree: DraftTree, found: Found) -> JudgedTree:
    """The tree with the target's answers, as relaxed rules read it."""
    rule, root = sequence.method.rule, tree.root
    expected, depths = [-1] * (root + 1), [-1] * root + [0]
    is_equal, is_relaxable = [True] * (root + 1), [False] * (root + 1)
    for node in range(root + 1, tree.num_nodes):
        token, wanted = tree.tokens[node], found.predictions[tree.parents[node]]
        expected.append(wanted)
        is_equal.append(token == wanted)
        is_relaxable.append(rule.may_relax(token, wanted, sequence))
        depths.append(depths[tree.parents[node]] + 1)
    return JudgedTree(
        tree,
        expected,
        found.predictions,
        is_equal,
        is_relaxable,
        depths,
        sequence.num_missing,
        found.judged,
        sequence,
    )


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
