"""Accept: which path of a draft tree is committed. It sees numbers that the host has read.

`accept` is called once for each answer of a pass. Each draft is judged against the target's token
after its parent. The rule says which drafts are accepted, and which of the accepted paths is
committed. The target's token after that path is the bonus.

An answer's last token is always a bonus. So no guess is committed that is deeper than the answer
has room for, and none that is the stop token: exact methods see to it in `_longest_equal`, relaxed
ones by `JudgedTree.within_answer`. A rule with `tokens_behind` (Spec-VLA's published loop) decodes
tokens behind the action and throws them away; the action's own last token may then be a guess.

Device rules ran before, in `read`. A new rule derives from one of the kinds in
`acceptance.rule`, and is named in `RULES` of a file in `methods`, or by an entry point of a package
(docs/plugins.md).
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
from deft_policies.decoding.sequence import PassResult, Sequence
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import PolicyError

Path = list[int]  # nodes from node 0 on


def accept(sequence: Sequence, tree: DraftTree, result: PassResult) -> tuple[Path, int]:
    """The path to commit, from node 0 on, and the bonus."""
    rule = sequence.method.rule
    if result.chosen is not None:  # on the device, as by the ratio test: nothing is left to judge
        node, bonus = result.chosen
        return tree.path_to(node), bonus
    if not tree.has_guesses or sequence.error is not None:
        path = tree.path_to(tree.root)
    elif rule.is_exact:
        path = tree.path_to(_longest_equal(sequence, tree, result.predictions))
    else:
        path = ask_rule(rule, lambda: _chosen_path(rule, judge(sequence, tree, result)))
    return path, result.predictions[path[-1]]


def _longest_equal(sequence: Sequence, tree: DraftTree, predictions: list[int]) -> int:
    """The deepest node whose path has the target's own tokens alone."""
    tokens, parents, spec = tree.tokens, tree.parents, sequence.spec
    room, best = sequence.room, tree.root
    equal_depths = [-1] * tree.num_nodes  # depth below the root of each equal path; -1: not equal
    equal_depths[tree.root] = 0
    for node in range(tree.root + 1, tree.num_nodes):
        parent, token = parents[node], tokens[node]
        has_room = 0 <= equal_depths[parent] < room
        if has_room and token == predictions[parent] and not spec.ends_with(token):
            equal_depths[node] = equal_depths[parent] + 1
            if equal_depths[node] > equal_depths[best]:
                best = node
    return best


def _chosen_path(rule: AcceptanceRule, judged: JudgedTree) -> Path:
    """The path that a relaxed rule chooses; `PolicyError` if too long or none of the tree's."""
    path = rule.best_path(judged, ends_allowed(rule, judged))
    tree = judged.tree
    has_room = tree.root < len(path) <= tree.root + 1 + max(judged.deepest, 0)
    if not has_room or path != tree.path_to(path[-1]):
        raise PolicyError(f"best_path must be a path for which the answer has room, got {path}")
    return path


def ends_allowed(rule: AcceptanceRule, judged: JudgedTree) -> list[bool]:
    """Whether the committed path may end at each node, [node].

    A `TreeRule` answers for whole paths itself; of other rules every node of a path is judged.
    """
    if isinstance(rule, TreeRule):
        accepted, num_nodes = rule.accepts(judged), judged.tree.num_nodes
        if not isinstance(accepted, list) or len(accepted) != num_nodes:
            raise PolicyError(
                f"accepts must answer bool [node], here [{num_nodes}], got {accepted}"
            )
        return accepted
    return judged.whole_paths(_judge_nodes(rule, judged))


def _judge_nodes(rule: AcceptanceRule, judged: JudgedTree) -> list[bool]:
    """Whether each node is the target's own token, or one that the rule accepts."""
    tree, places = judged.tree, _places(judged)
    accepted = [True] * (tree.root + 1)
    paths: list[list[Guess]] = [[] for _ in accepted]
    for node in range(tree.root + 1, tree.num_nodes):
        above = tree.parents[node]
        guess = tree.tokens[node], judged.expected[node], places[node]
        path = [*paths[above], guess]
        paths.append(path)
        is_asked = accepted[above] and judged.is_relaxable[node]
        # Below a rejected node this says nothing: `whole_paths` drops these nodes.
        accepted.append(judged.is_equal[node] or (is_asked and _relaxes(rule, judged, node, path)))
    return accepted


def _relaxes(rule: AcceptanceRule, judged: JudgedTree, node: int, path: list[Guess]) -> bool:
    """Whether the rule accepts a guess that differs from the target's token."""
    if isinstance(rule, LocalRule):
        return rule.accepts(*path[-1])
    if isinstance(rule, PathRule):
        return rule.accepts(path, judged.sequence)
    assert isinstance(rule, DeviceRule)
    return judged.measured[node] > 0


def judge(sequence: Sequence, tree: DraftTree, result: PassResult) -> JudgedTree:
    """The tree with the target's answers, as relaxed rules read it."""
    rule, root = sequence.method.rule, tree.root
    expected, depths = [-1] * (root + 1), [-1] * root + [0]
    is_equal, is_relaxable = [True] * (root + 1), [False] * (root + 1)
    for node in range(root + 1, tree.num_nodes):
        token, expected_token = tree.tokens[node], result.predictions[tree.parents[node]]
        expected.append(expected_token)
        is_equal.append(token == expected_token)
        is_relaxable.append(rule.may_relax(token, expected_token, sequence))
        depths.append(depths[tree.parents[node]] + 1)
    return JudgedTree(
        tree=tree,
        expected=expected,
        predictions=result.predictions,
        is_equal=is_equal,
        is_relaxable=is_relaxable,
        depths=depths,
        deepest=sequence.room,
        measured=result.measured,
        sequence=sequence,
    )


def _places(judged: JudgedTree) -> list[int]:
    """Which token of an action each node would become, [node], from 0; clamped into it."""
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
