"""Drafting with Medusa heads: every level is read off one hidden state, at once."""

import torch
from torch import Tensor

from deft_policies.decoding.drafts.growth import Growth, finish_tree, first_level
from deft_policies.decoding.drafts.source import Progress
from deft_policies.decoding.drafts.template import InnerNodes, fill_template, finish_template
from deft_policies.decoding.kinds import DraftKind
from deft_policies.decoding.medusa import MedusaHeads
from deft_policies.decoding.shapes import TreeShape
from deft_policies.decoding.target import PromptFeatures, Prompts, TargetModel
from deft_policies.decoding.tree import DraftTree


class MedusaDrafts:
    """A grower over `MedusaHeads`; remembers nothing between passes."""

    kind = DraftKind.MEDUSA
    needs_hidden = False

    def __init__(self, heads: MedusaHeads, target: TargetModel) -> None:
        self.heads = heads
        self._target = target

    def begin(self, prompts: Prompts, features: PromptFeatures) -> None:
        """Nothing of the prompt is needed."""

    @torch.no_grad()
    def grow(self, progress: Progress, shape: TreeShape) -> DraftTree:
        """Branch as EAGLE-2 does, with scores that depend on the depth alone."""
        if progress.last is None:
            raise ValueError("Medusa heads start after the prefill")
        verdict = progress.last.verdict
        rows = torch.arange(len(progress.roots), device=progress.roots.device)
        end = verdict.path[rows, verdict.num_accepted]
        seen = progress.last.scores.hidden[rows, end]  # it has predicted the root
        levels = min(shape.levels, self.heads.sizes.num_heads)
        levels = levels if shape.is_fixed else min(levels, progress.depth)
        drafted = self._target.action_tokens
        ahead = self._target.logits(self.heads(seen)[:, :levels], drafted).log_softmax(dim=-1)
        deepest = progress.length - 1 - progress.num_committed
        growth = Growth.of(self.kind, shape, levels)
        if growth.template is not None:

            def go_on(inner: InnerNodes) -> Tensor:
                return ahead[:, inner.depth, None].expand(-1, inner.tokens.shape[1], -1)

            roots, first = progress.roots, ahead[:, 0]
            tree = fill_template(growth.template, roots, first, go_on, drafted.first)
            return finish_template(tree, self.kind, deepest)
        frontier = first_level(ahead[:, 0], growth, drafted.first)
        candidates = [frontier.candidates]
        for level in range(1, levels):
            every = ahead[:, level, None].expand(-1, shape.top_k, -1)
            frontier, _ = frontier.next_level(every, growth)
            candidates.append(frontier.candidates)
        return finish_tree(progress.roots, candidates, growth, deepest)
