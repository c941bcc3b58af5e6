"""Drafting with a cheaper model of the same tokens, one token after the other.

Self-speculation counts: the target's own first layers, or the whole target looking at few of the
image patches (as SpecVLM drafts), are such models and need no training.
"""

from dataclasses import replace

import torch
from torch import Tensor

from deft_policies.decoding.llama_target import LlamaTarget
from deft_policies.decoding.plan import DraftKind, TreeShape
from deft_policies.decoding.records import BatchProgress, PassResult
from deft_policies.decoding.sampling import first_maximum
from deft_policies.decoding.target import (
    PromptFeatures,
    Prompts,
    Scores,
    TargetModel,
)
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import CheckpointError
from deft_policies.model.layout import StepRunner
from deft_policies.model.llama import LlamaDecoder


def first_layers(decoder: LlamaDecoder, num_layers: int) -> LlamaDecoder:
    """A decoder of the first layers, sharing every weight with the whole one."""
    if not 1 <= num_layers <= len(decoder.layers):
        raise CheckpointError(
            f"the decoder has {len(decoder.layers)} layers, cannot draft with its first "
            f"{num_layers}; use fewer"
        )
    with torch.device("meta"):
        shallow = LlamaDecoder(replace(decoder.sizes, num_layers=num_layers))
    shallow.embedding, shallow.norm, shallow.head = decoder.embedding, decoder.norm, decoder.head
    shallow.layers, shallow.rotary = decoder.layers[:num_layers], decoder.rotary
    return shallow


def self_draft_target(
    target: LlamaTarget, num_layers: int, runner: StepRunner | None = None
) -> LlamaTarget:
    """The target's first layers as a model of their own, with a cache of their own."""
    return LlamaTarget(
        first_layers(target.decoder, num_layers),
        target.action_tokens,
        action_rows_only=len(target.vocabulary) == len(target.action_tokens),
        runner=runner,
    )


class SmallModelDrafts:
    """A grower that decodes a chain with another `TargetModel`.

    The model is asked for longer and longer chains and keeps none of them: what it keeps is what
    the target has committed, one round later.
    """

    kind = DraftKind.SMALL_MODEL
    needs_hidden = False

    def __init__(self, model: TargetModel, patch_share: float = 1.0) -> None:
        self.model = model
        self._patch_share = patch_share
        self._prompts: Prompts | None = None

    def begin(self, prompts: Prompts, features: PromptFeatures) -> None:
        """Remember the prompt; it is read together with the first committed tokens."""
        self._prompts = replace(with_fewer_patches(prompts, self._patch_share), keep_hidden=False)

    @torch.no_grad()
    def grow(self, progress: BatchProgress, shape: TreeShape) -> DraftTree:
        """Decode up to `shape.levels` tokens behind the roots."""
        if progress.last is None:
            raise ValueError("a draft model starts after the prefill")
        scores = self._take_in(progress.last, progress.length)
        rows = torch.arange(len(progress.roots), device=progress.roots.device)
        end = progress.last.accepted.num_accepted + progress.last.is_prefill
        guesses: list[Tensor] = []
        log_probs: list[Tensor] = []
        logits = scores.logits[rows, end]
        for level in range(min(shape.levels, max(progress.depth, 1))):
            if level > 0:
                chain = torch.stack(guesses, dim=1)
                logits = self.model.score(DraftTree.chain(chain)).logits[:, -1]
            best = first_maximum(logits)
            guesses.append(best + self.model.vocabulary.first)
            log_probs.append(logits.log_softmax(dim=1).gather(1, best[:, None]).squeeze(1))
        return self._tree(progress, torch.stack(guesses, dim=1), torch.stack(log_probs, dim=1))

    def _take_in(self, last: PassResult, length: int) -> Scores:
        """Let the model read what the target has committed, the new root included."""
        read = last.accepted.num_accepted + 1
        if not last.is_prefill:
            scores = self.model.score(DraftTree.chain(last.next_tokens))
            is_open = last.num_committed < length
            self._keep(last.next_tokens, read * is_open)
            return scores
        assert self._prompts is not None
        behind = torch.cat((self._prompts.last_tokens[:, None], last.next_tokens), dim=1)
        scores, _ = self.model.prefill(self._prompts, DraftTree.chain(behind))
        self._keep(behind, read + 1)
        return scores

    def _keep(self, chain: Tensor, lengths: Tensor) -> None:
        steps = torch.arange(chain.shape[1], device=chain.device)
        self.model.commit(steps.expand_as(chain), lengths)

    def _tree(self, progress: BatchProgress, guesses: Tensor, log_probs: Tensor) -> DraftTree:
        every = torch.cat((progress.roots[:, None], guesses), dim=1)
        chain = DraftTree.chain(every, self.kind.number)
        deepest = progress.length - 1 - progress.num_committed
        totals = torch.cat((torch.zeros_like(log_probs[:, :1]), log_probs.cumsum(1)), dim=1)
        is_real = chain.depths() <= deepest.clamp(min=0)[:, None]
        return replace(chain, is_real=is_real, log_probs=totals)


def with_fewer_patches(prompts: Prompts, share: float) -> Prompts:
    """Keep an evenly spread share of the image patches, at least one; positions close up."""
    first, stop = prompts.patches.start, prompts.patches.stop
    num_kept = max(1, round((stop - first) * share))
    if num_kept == stop - first:
        return prompts
    every = torch.arange(prompts.embeds.shape[1], device=prompts.embeds.device)
    spread = torch.linspace(first, stop - 1, num_kept, device=every.device).round().long()
    kept = torch.cat((every[:first], spread, every[stop:]))
    return replace(
        prompts,
        embeds=prompts.embeds[:, kept],
        lengths=prompts.lengths - (stop - first) + num_kept,
        patches=slice(first, first + num_kept),
    )
