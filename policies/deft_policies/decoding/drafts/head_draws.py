"""Drawing a chain from the draft head's own odds, for the ratio test."""

import torch
from torch import Tensor

from deft_policies.decoding.drafts.head import HeadDrafts, HeadOptions
from deft_policies.decoding.drafts.source import Progress
from deft_policies.decoding.eagle import EagleHead
from deft_policies.decoding.sampled import SampledChain, target_odds
from deft_policies.decoding.sampling import Sampling
from deft_policies.decoding.shapes import TreeShape
from deft_policies.decoding.target import TargetModel


class DrawnHeadDrafts(HeadDrafts):
    """A head whose chains are drawn at the target's temperature, odds and all."""

    def __init__(
        self, head: EagleHead, target: TargetModel, options: HeadOptions, sampling: Sampling
    ) -> None:
        super().__init__(head, target, options)
        self._temperature = sampling.temperature
        self._generator = torch.Generator(head.fc.weight.device)
        self._generator.manual_seed(sampling.seed)

    @torch.no_grad()
    def grow(self, progress: Progress, shape: TreeShape) -> SampledChain:
        """Draw a chain behind the roots."""
        soil = self.take_in(progress, TreeShape.chain(shape.levels))
        levels = min(shape.levels, progress.depth)
        tokens: list[Tensor] = []
        odds: list[Tensor] = []
        hidden = soil.out[:, None]
        for level in range(1, levels + 1):
            logits = self._target.logits(hidden[:, 0], self._drafted)
            odds.append(target_odds(logits, self._temperature))
            # The largest of p / noise is an exact draw; multinomial() would make the host wait.
            noise = torch.empty_like(odds[-1]).exponential_(generator=self._generator)
            drawn = (odds[-1] / noise).argmax(dim=1, keepdim=True)
            tokens.append(drawn + self._drafted.first)
            if level < levels:
                everything = drawn.new_ones(len(drawn), 1, level, dtype=torch.bool)
                hidden = self.extend(tokens[-1], everything, hidden, soil, level)
        every = torch.cat((soil.roots[:, None], *tokens), dim=1)
        places = torch.arange(every.shape[1], device=every.device).expand_as(every)
        return SampledChain(
            tokens=every,
            parents=places - 1,
            is_real=(places <= soil.deepest[:, None]) | (places == 0),
            log_probs=torch.zeros_like(every, dtype=torch.float32),
            sources=torch.where(places == 0, -1, self.kind.number),
            odds=torch.stack((torch.zeros_like(odds[0]), *odds), dim=1),
            first_token=self._drafted.first,
        )
