"""Drafts that know the answer and err to order, so that speed can be measured without training.

With random weights no draft source would ever be right. These know the tokens that plain decoding
gives (found beforehand, outside the timing) and keep as many of them as a given distribution says.
What a real source would cost is still paid: a draft head runs before its tree is overwritten.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deft_policies.decoding.drafts.source import Grower, Guesses, Progress
from deft_policies.decoding.history import ActionHistory, HistoryTensors
from deft_policies.decoding.plan import DraftKind, TreeShape
from deft_policies.decoding.target import PromptFeatures, Prompts
from deft_policies.decoding.tree import DraftTree, TokenRange

# Spec-VLA's Table 2, LIBERO-Goal: share of passes by accepted length 0..5.
SPEC_VLA_STRICT = (0.5024, 0.3328, 0.1396, 0.0223, 0.0019, 0.0)
SPEC_VLA_RELAXED = (0.2301, 0.1898, 0.3999, 0.1541, 0.0253, 0.0008)

_NUM_DRAWS = 4096
_BINS_OFF = 64  # a wrong guess is this far away, too far for any rule


class Dice:
    """Random numbers on the device, drawn beforehand and used in turn."""

    def __init__(self, values: Tensor) -> None:
        self._values = values  # [draw, ...]
        self._next = 0

    @staticmethod
    def coins(share: float, shape: tuple[int, ...], device: torch.device) -> "Dice":
        """True with this probability, in this shape."""
        generator = torch.Generator().manual_seed(0)
        drawn = torch.rand((_NUM_DRAWS, *shape), generator=generator)
        return Dice((drawn < share).to(device))

    @staticmethod
    def lengths(shares: Sequence[float], device: torch.device) -> "Dice":
        """0, 1, ... with these probabilities."""
        generator = torch.Generator().manual_seed(0)
        weights = torch.tensor(shares)
        drawn = torch.multinomial(weights, _NUM_DRAWS, replacement=True, generator=generator)
        return Dice(drawn.to(device))

    def roll(self, num_rows: int) -> Tensor:
        """One draw per row."""
        start = self._next % (_NUM_DRAWS - num_rows)
        self._next = start + num_rows
        return self._values[start : start + num_rows]


@dataclass(frozen=True)
class ScriptedChains:
    """Whole actions in which every token is right with a given probability, several at a time.

    The newest step of the session's history is the right answer.
    """

    coins: Dice  # of [chain, position]
    action_tokens: TokenRange
    kind = DraftKind.RETRIEVAL  # a stored answer, with errors
    steps_needed = 1
    is_fixed = True

    def can_guess(self, prompts: Prompts, histories: Sequence[ActionHistory]) -> bool:
        """Always: the answer is there."""
        return True

    def guess(self, prompts: Prompts, history: HistoryTensors, progress: Progress) -> Guesses:
        """Repeat the answer, with errors."""
        answer = history.own[:, -1:]
        is_right = self.coins.roll(len(answer))
        tokens = torch.where(is_right, answer, spoil(answer, self.action_tokens))
        return Guesses(tokens, torch.ones_like(is_right))


class ScriptedHead:
    """A draft head that runs as ever; then one path of its tree is replaced by a scripted one.

    Kept tokens follow a distribution over accepted lengths, the rest of the path is wrong. `answer`
    is set before each batch, [row, position].
    """

    kind = DraftKind.HEAD
    needs_hidden = True

    def __init__(self, head: Grower, lengths: Dice, action_tokens: TokenRange) -> None:
        self._head = head
        self._lengths = lengths
        self._action_tokens = action_tokens
        self.answer: Tensor | None = None

    def begin(self, prompts: Prompts, features: PromptFeatures) -> None:
        """As the head does."""
        self._head.begin(prompts, features)

    def grow(self, progress: Progress, shape: TreeShape) -> DraftTree:
        """Grow the head's tree and put the scripted path in the place of its last nodes."""
        tree = self._head.grow(progress, shape)
        if self.answer is None:
            raise ValueError("set the answer before decoding")
        depth = min(shape.levels, progress.depth, tree.num_nodes - 1)
        num_rows, kept = len(self.answer), tree.num_nodes - depth
        steps = torch.arange(depth, device=tree.tokens.device)
        places = (progress.num_committed[:, None] + steps).clamp(max=progress.length - 1)
        answer = self.answer.gather(1, places)
        is_right = steps < self._lengths.roll(num_rows)[:, None]
        path = torch.where(is_right, answer, spoil(answer, self._action_tokens))
        above = torch.cat((steps.new_zeros(1), kept + steps[:-1])).expand(num_rows, -1)
        return DraftTree(
            tokens=torch.cat((tree.tokens[:, :kept], path), dim=1),
            parents=torch.cat((tree.parents[:, :kept], above), dim=1),
            is_real=torch.cat((tree.is_real[:, :kept], torch.ones_like(is_right)), dim=1),
            log_probs=torch.cat((tree.log_probs[:, :kept], torch.zeros_like(path).float()), dim=1),
            sources=torch.cat((tree.sources[:, :kept], torch.ones_like(path) * 0), dim=1),
        )


def spoil(tokens: Tensor, action_tokens: TokenRange) -> Tensor:
    """Tokens of the same range, far away from these."""
    shifted = tokens - action_tokens.first + _BINS_OFF
    return shifted % len(action_tokens) + action_tokens.first
