"""Numbers: near numbers are accepted where an action is written as text.

VLA-0 writes its actions as whole numbers. A digit means nothing without the others of its number,
so numbers are judged whole, in robot units. Behind a digit that differs the target is not asked
again: every number counts that begins with its digits, and the farthest of them must be within the
limit. Spaces, the end and the gripper are exact. A budget bounds the sum of deviations over the
steps that were executed.

Drafts: the session's last answer, moved by the rows that were executed, and as it was.

Left out: limits of single dimensions (there is one for translations and one for rotations), and
FAST tokens, which encode frequencies: they are never relaxed.

Numbers: docs/vla0.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from deft_policies.decoding.acceptance.numbers import SPACE, NumberState, WrittenNumbers, read
from deft_policies.decoding.acceptance.rule import (
    ActionSpace,
    DimensionGroup,
    JudgedTree,
    TreeRule,
)

if TYPE_CHECKING:
    from deft_policies.decoding.sequence import AnswerSpec


@dataclass(frozen=True)
class WithinNumbers(TreeRule):
    """A drafted number is accepted if the farthest that the target could write is near (ours).

    Behind a digit that differs the target is not asked again: every number counts that begins with
    its digits and is allowed in an answer, whatever its length. `move` and `turn` are limits in
    robot units. Spaces, ends and the gripper are exact. `move_drift` and `turn_drift` bound the sum
    of deviations over executed steps.
    """

    move: float = 0.07
    turn: float = 0.0175
    move_drift: float = 0.18
    turn_drift: float = 0.0525

    needs_space = False  # it measures numbers, not tokens

    def problem(self, spec: AnswerSpec) -> str:
        """It needs numbers that are written as text."""
        if spec.numbers_in_row:
            return ""
        return (
            "judges numbers that are written as text, and this model writes none; 'deft' is for "
            "action tokens"
        )

    def accepts(self, judged: JudgedTree) -> list[bool]:
        """Near numbers all the way, none of them cut."""
        tree, sequence = judged.tree, judged.sequence
        space = sequence.action_space
        written = WrittenNumbers(sequence.tokens, sequence.target_tokens, space, sequence.drift)
        states: list[NumberState | None] = [None] * tree.root + [read(written)]
        accepted = [True] * (tree.root + 1)
        for node in range(tree.root + 1, tree.num_nodes):
            above, token = tree.parents[node], tree.tokens[node]
            above_state, state = states[above], None
            # A number ends where it may: behind one that is too far no space is of use.
            if above_state is not None and (token < SPACE or accepted[above]):
                state = above_state.after(token, judged.expected[node], space.largest_number)
            states.append(state)
            following = judged.predictions[node]
            accepted.append(state is not None and self._may_end(state, following, space))
        return accepted

    def _may_end(self, state: NumberState, following: int, space: ActionSpace) -> bool:
        """Whether a text may end here, the target's own token following."""
        if state.reach is None:
            return True
        group, unit = space.groups[state.dimension], space.unit_per_bin[state.dimension]
        if following < SPACE or state.value > space.largest_number or group is DimensionGroup.GRIP:
            return False
        is_turn = group is DimensionGroup.TURN
        limit = self.turn if is_turn else self.move
        budget = self.turn_drift if is_turn else self.move_drift
        drift = state.drift[state.dimension] + state.deviation
        # A hair more, so that a limit of exactly k numbers admits k numbers.
        is_near = abs(state.deviation) * unit <= limit * (1 + 1e-6)
        return is_near and abs(drift) * unit <= budget * (1 + 1e-6)


METHODS = {"numbers": "autoregressive:rule=within-numbers,plans=steady"}
RULES = {"within-numbers": WithinNumbers}
