"""Drafting with a cheaper model of the same actions: standard speculative decoding.

Another checkpoint is such a model. So are the target's own first layers, or the whole target
looking at few of the image patches (as SpecVLM drafts), which need no training.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from deft_policies.decoding.drafts.growth import (
    Drawing,
    GoOn,
    GrowthStart,
    OpenNodes,
    draw_tree,
    grow_tree,
)
from deft_policies.decoding.drafts.guessers import NgramLookup
from deft_policies.decoding.drafts.sources import Seen
from deft_policies.decoding.llama_target import LlamaTarget
from deft_policies.decoding.plan import DraftKind, TreeShape
from deft_policies.decoding.records import BatchProgress
from deft_policies.decoding.target import PromptFeatures, Prompts, Scores, TargetModel
from deft_policies.decoding.tree import DraftTree, TokenRange
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
    shallow.kernels = decoder.kernels
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


@dataclass(frozen=True)
class SmallModelOptions:
    """How a method drafts with its small model."""

    patch_share: float = 1.0  # of the image patches that the model looks at
    looks_up: bool = False  # let n-grams of the session guess what the model will say
    whole_vocabulary: bool = False  # else only action tokens are drafted
    drawing: Drawing | None = None  # draw tokens, for the ratio test; None: the likeliest


@dataclass(frozen=True)
class Foreseen:
    """What the model will say if its chain goes on as n-grams guess."""

    guessed: Tensor  # [row, step], -1 where nothing is known
    log_probs: Tensor  # [row, step, token], after each of them


class SmallModelDrafts:
    """A grower over another `TargetModel`, with a cache and perhaps a vocabulary of its own.

    An action token of the target is the model's token of the same bin. The model is asked for
    larger and larger trees and keeps none of them: what it keeps is what the target has committed,
    all but the root, one round later.

    With `looks_up` (FLy's multi-level acceleration) a chain is drafted by speculation too: what
    followed the same tokens earlier in the session rides behind it, and where the model says the
    same, its next answer is there without a pass. The chain stays the same; the host looks at each
    of its tokens.
    """

    kind = DraftKind.SMALL_MODEL
    needs_hidden = False

    def __init__(
        self, model: TargetModel, target: TargetModel, options: SmallModelOptions | None = None
    ) -> None:
        self.model = model
        self._options = options or SmallModelOptions()
        self._shift = model.action_tokens.first - target.action_tokens.first
        is_alike = self._shift == 0 and model.num_tokens == target.num_tokens
        whole = self._options.whole_vocabulary and is_alike
        self._drafted: TokenRange = model.vocabulary if whole else model.action_tokens
        self._lookup = NgramLookup()
        self._seen: Seen | None = None
        self._foreseen: Foreseen | None = None

    @property
    def steps_needed(self) -> int:
        """Those that n-grams are looked up in."""
        return self._lookup.steps_needed if self._options.looks_up else 0

    def begin(self, seen: Seen, features: PromptFeatures) -> None:
        """Remember the prompt; it is read together with the first committed tokens."""
        self._seen = seen

    def warm_up(self, shape: TreeShape, length: int) -> None:
        """Capture the model's passes."""
        if isinstance(self.model, LlamaTarget):
            self.model.warm_up()

    @torch.no_grad()
    def grow(self, progress: BatchProgress, shape: TreeShape) -> DraftTree:
        """Draft behind the roots."""
        shape = shape.cut(progress.depth).grown_through(self.model.widest_tree)
        deepest = progress.length - 1 - progress.num_committed
        if shape.is_full_depth:
            deepest = torch.full_like(deepest, shape.levels)
        first = self._take_in(progress, shape)[:, 0]
        first_token = self._drafted.first - self._shift
        start = GrowthStart(self.kind, progress.roots, first, deepest, first_token)
        drawing, go_on = self._options.drawing, self._go_on(progress, shape)
        if drawing is not None:
            return draw_tree(shape.as_template(), start, go_on, drawing)
        return grow_tree(shape, start, go_on)

    def _take_in(self, progress: BatchProgress, shape: TreeShape) -> Tensor:
        """Let the model read what the target has committed; its log-probabilities at the roots."""
        last = progress.last
        if last is None:
            raise ValueError("a draft model starts after the prefill")
        chain = DraftTree.chain(torch.cat((last.tree.tokens[:, :1], last.next_tokens), dim=1))
        end = last.accepted.num_accepted + 1
        guessed = self._guess(progress, shape, progress.roots[:, None])
        found = self._ask(chain, end[:, None], guessed, is_prefill=last.is_prefill)
        steps = torch.arange(chain.num_nodes, device=end.device)
        is_open = last.num_committed < progress.length
        self.model.commit(steps.expand_as(chain.tokens), end * is_open)
        return found

    def _go_on(self, progress: BatchProgress, shape: TreeShape) -> GoOn:
        tree = DraftTree.root_only(progress.roots)
        level = 0  # where the nodes that were open last begin

        def go_on(nodes: OpenNodes) -> Tensor:
            nonlocal tree, level
            tree, level = _with_level(tree, level + nodes.above, nodes.tokens), tree.num_nodes
            foreseen = self._foresaw(nodes, progress.num_committed >= progress.length)
            if foreseen is not None:
                return foreseen
            wanted = torch.arange(level, tree.num_nodes, device=nodes.tokens.device)
            guessed = self._guess(progress, shape, tree.tokens)
            return self._ask(tree, wanted.expand_as(nodes.tokens), guessed)

        return go_on

    def _ask(
        self, tree: DraftTree, wanted: Tensor, guessed: Tensor, is_prefill: bool = False
    ) -> Tensor:
        """Log-probabilities after the wanted nodes [row, node] of a tree; one pass.

        What is `guessed` to come behind the only wanted node is asked with it and remembered.
        """
        num_nodes, parents = tree.num_nodes, wanted
        for step in range(guessed.shape[1]):
            tree = _with_level(tree, parents, guessed[:, step, None])
            parents = torch.full_like(parents, num_nodes + step)
        tokens = (tree.tokens + self._shift).clamp(0, self.model.num_tokens - 1)
        tree = replace(tree, tokens=tokens)
        scores = self._prefill(tree) if is_prefill else self.model.score(tree)
        first = self._drafted.first - self.model.vocabulary.first
        rows = torch.arange(len(wanted), device=wanted.device)[:, None]
        odds = scores.logits[:, :, first : first + len(self._drafted)].log_softmax(dim=2)
        self._foreseen = Foreseen(guessed, odds[:, num_nodes:])
        return odds[rows, wanted]

    def _prefill(self, tree: DraftTree) -> Scores:
        assert self._seen is not None
        prompts = self._seen.prompts
        if prompts.for_draft is not None:
            prompts = prompts.for_draft()
        prompts = with_fewer_patches(prompts, self._options.patch_share)
        return self.model.prefill(replace(prompts, keep_hidden=False), tree)[0]

    def _foresaw(self, nodes: OpenNodes, is_done: Tensor) -> Tensor | None:
        """What was asked along with an earlier pass, if every row goes on as guessed."""
        ahead = self._foreseen
        if ahead is None or ahead.guessed.shape[1] == 0:
            return None
        if not bool(((ahead.guessed[:, 0] == nodes.tokens[:, 0]) | is_done).all()):
            return None
        self._foreseen = Foreseen(ahead.guessed[:, 1:], ahead.log_probs[:, 1:])
        return ahead.log_probs[:, :1]

    def _guess(self, progress: BatchProgress, shape: TreeShape, chain: Tensor) -> Tensor:
        """How n-grams continue a chain [row, node] from the roots: what is still asked of it."""
        if not self._options.looks_up or shape.top_k > 1:
            return chain[:, :0]
        assert self._seen is not None
        drafted = chain[:, 1:]
        end = progress.length
        steps = torch.arange(shape.levels - 1, device=chain.device)
        places = (progress.num_committed[:, None] + steps).clamp(max=end)
        behind = drafted.shape[1]
        tokens = progress.tokens.scatter(1, places[:, :behind], drafted)
        known = (progress.num_committed + behind).clamp(max=end - 1)
        ahead = replace(progress, tokens=tokens, num_committed=known)
        found = self._lookup.guess(self._seen.prompts, self._seen.history, ahead)
        every = torch.where(found.is_known, found.tokens, -1)[:, 0]
        return every.gather(1, places[:, behind:].clamp(max=end - 1))


def _with_level(tree: DraftTree, parents: Tensor, tokens: Tensor) -> DraftTree:
    """The tree with nodes [row, node] that hang on these."""
    longer = DraftTree.chain(torch.cat((tree.tokens, tokens), dim=1))
    every = torch.cat((tree.parents, parents), dim=1)
    return replace(longer, parents=every, is_chain=False)


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
