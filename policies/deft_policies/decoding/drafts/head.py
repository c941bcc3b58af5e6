"""Drafting with the EAGLE head: take in what was committed, then grow a tree level by level."""

from dataclasses import dataclass

import torch
from torch import Tensor

from deft_policies.decoding.acceptance.sampled import SampledChain, Sampling, target_odds
from deft_policies.decoding.drafts.eagle import EagleHead
from deft_policies.decoding.drafts.growth import Growth, finish_tree, first_level
from deft_policies.decoding.drafts.source import PassResult, Progress
from deft_policies.decoding.drafts.template import InnerNodes, fill_template, finish_template
from deft_policies.decoding.plan import DraftKind, KeyMask, RopeOffset, TreeShape, TreeTemplate
from deft_policies.decoding.target import PromptFeatures, Prompts, TargetModel
from deft_policies.decoding.tree import DraftTree, TokenRange
from deft_policies.model.kv_cache import Append, KVCache
from deft_policies.model.layout import EagerRunner, StepRunner, Tensors
from deft_policies.model.llama import PassContext


@dataclass(frozen=True)
class HeadOptions:
    """How a head is run. Published heads may have been trained for the published conventions."""

    rope_offset: RopeOffset = RopeOffset.CORRECT
    key_mask: KeyMask = KeyMask.CAUSAL
    whole_vocabulary: bool = False  # else only action tokens are drafted


class HeadDrafts:
    """A grower over an `EagleHead`. Keeps the keys of committed positions; a tree's are temporary.

    The cache holds committed positions first and the nodes of the tree in flight behind them, at
    slots that are the same in every row.
    """

    kind = DraftKind.HEAD
    needs_hidden = True

    def __init__(
        self,
        head: EagleHead,
        target: TargetModel,
        options: HeadOptions | None = None,
        runner: StepRunner | None = None,
    ) -> None:
        self.head = head
        self._target = target
        self._options = options or HeadOptions()
        self._runner: StepRunner = runner or EagerRunner()
        whole = self._options.whole_vocabulary
        self._drafted: TokenRange = target.vocabulary if whole else target.action_tokens
        self._cache = KVCache(head.sizes.cache, 0, 0, head.fc.weight)
        self._features: PromptFeatures | None = None
        self._room = 0  # slots of committed positions
        self._length = torch.zeros(0, dtype=torch.int64)  # [row], committed positions
        self._is_first = True

    @torch.no_grad()
    def begin(self, prompts: Prompts, features: PromptFeatures) -> None:
        """Remember the prompt; it is taken in together with the first pass."""
        self._features = features
        self._is_first = True

    @torch.no_grad()
    def grow(self, progress: Progress, shape: TreeShape) -> DraftTree:
        """Draft behind the roots."""
        levels = shape.levels if shape.is_fixed else min(shape.levels, progress.depth)
        growth = Growth.of(self.kind, shape, levels)
        soil = self.take_in(progress, shape)

        def step(*inputs: Tensor) -> Tensors:
            tree = self._grow_step(growth, Soil(*inputs))
            return tree.tokens, tree.parents, tree.is_real, tree.log_probs, tree.sources

        grown = self._runner.run(
            ("grow", growth, len(soil.out), self._room),
            step,
            (soil.roots, soil.out, soil.length, soil.start, soil.deepest),
        )
        if self._runner.has_fixed_shapes:  # the next tree overwrites what a recording put out
            grown = tuple(tensor.clone() for tensor in grown)
        return DraftTree(*grown)

    def take_in(self, progress: Progress, shape: TreeShape) -> "Soil":
        """Append the pairs of the last pass, and say what the next tree grows from."""
        if progress.last is None or self._features is None:
            raise ValueError("the draft head starts after the prefill")
        out = self._append(progress.last, progress.length, shape)
        deepest = progress.length - 1 - progress.num_committed
        if shape.is_fixed:
            deepest = torch.full_like(deepest, shape.levels)
        soil = Soil(progress.roots, out, self._length, self._tree_start(), deepest)
        self._is_first = False
        return soil

    def _tree_start(self) -> Tensor:
        """Rotary position of the children of the roots, [row]."""
        if self._options.rope_offset is RopeOffset.CORRECT:
            return self._length
        assert self._features is not None
        if self._is_first:
            return torch.zeros_like(self._length)
        patches = self._features.patches
        num_patches: int = patches.stop - patches.start
        return self._length - num_patches

    def _append(self, last: PassResult, length: int, shape: TreeShape) -> Tensor:
        """The head's output at the last of the pass's pairs, [row, width].

        Position t pairs the hidden state of the t-th token with the embedding of the one after it,
        so a pass adds a pair for every node of its path, the bonus being the last "one after".
        """
        assert self._features is not None
        path = last.verdict.path
        rows = torch.arange(path.shape[0], device=path.device)[:, None]
        hidden = last.scores.hidden[rows, path]
        embeds = self._target.embed(last.next_tokens)
        steps = torch.arange(path.shape[1], device=path.device)
        if self._is_first:
            self._make_room(length, shape)
            start = self._features.lengths - 1
            hidden = _behind(self._features.hidden[:, :-1], hidden, start)
            embeds = _behind(self._features.embeds[:, 1:], embeds, start)
            positions = torch.arange(hidden.shape[1], device=path.device).expand(len(path), -1)
            append, first = Append(self._room, start=0), start
        else:
            positions = self._length[:, None] + steps
            append = Append(self._room, slots=(positions + rows * self._cache.length).flatten())
            first = torch.zeros_like(self._length)
            start = self._length
        end = start + last.verdict.num_accepted  # position of the last pair
        mask = self._visible(end[:, None])
        context = PassContext(
            self.head.rotary(positions, hidden),
            mask=mask[:, None],
            rows_out=(first + last.verdict.num_accepted)[:, None],
        )
        out = self.head.run(embeds, hidden, context, self._cache.layer(0, len(path), append))
        self._length = end + 1
        return out[:, 0]

    def _make_room(self, length: int, shape: TreeShape) -> None:
        assert self._features is not None
        num_rows, num_positions = self._features.embeds.shape[:2]
        self._room = num_positions + length
        # A pass's pairs are written with their padding, which reaches past the committed ones.
        needed = self._room + max(shape.num_grown, length)
        if not self._cache.fits(num_rows, needed):
            self._runner.forget()
            self._cache = KVCache(
                self.head.sizes.cache,
                max(num_rows, self._cache.num_rows),
                max(needed, self._cache.length),
                self.head.fc.weight,
            )

    def _visible(self, last: Tensor) -> Tensor:
        """Committed slots that queries at positions `last` [row, query] see, [row, query, slot]."""
        assert self._features is not None
        if self._options.key_mask is KeyMask.PREFIX_ONLY:
            last = (self._features.lengths - 2)[:, None].expand_as(last)
        return torch.arange(self._room, device=last.device) <= last[:, :, None]

    def _grow_step(self, growth: Growth, soil: "Soil") -> DraftTree:
        """All levels of a tree, as a function of tensors alone."""
        if growth.template is not None:
            return self._fill(growth.template, soil)
        frontier = first_level(self._log_probs(soil.out), growth, self._drafted.first)
        hidden = soil.out[:, None].expand(-1, growth.top_k, -1)
        levels = [frontier.candidates]
        for level in range(1, growth.levels):
            out = self.extend(frontier.tokens, frontier.ancestors, hidden, soil, level)
            frontier, parents = frontier.next_level(self._log_probs(out), growth)
            levels.append(frontier.candidates)
            hidden = out.gather(1, parents[:, :, None].expand(-1, -1, out.shape[2]))
        return finish_tree(soil.roots, levels, growth, soil.deepest)

    def _fill(self, template: TreeTemplate, soil: "Soil") -> DraftTree:
        """The tokens of a tree whose shape is given."""
        hidden = soil.out[:, None]

        def go_on(inner: InnerNodes) -> Tensor:
            nonlocal hidden
            ancestors = inner.ancestors.expand(len(soil.out), -1, -1)
            above = hidden[:, inner.above]
            hidden = self.extend(inner.tokens, ancestors, above, soil, inner.depth)
            return self._log_probs(hidden)

        first = self._log_probs(soil.out)
        tree = fill_template(template, soil.roots, first, go_on, self._drafted.first)
        return finish_template(tree, self.kind, soil.deepest)

    def extend(
        self, tokens: Tensor, ancestors: Tensor, hidden: Tensor, soil: "Soil", level: int
    ) -> Tensor:
        """The head's output at nodes of a level (1 is the first), [row, node, width].

        `ancestors` is [row, node, node so far], over all that were extended, these included;
        `hidden` is the head's output at the nodes' parents.
        """
        num_rows, width = tokens.shape
        slot = self._room + ancestors.shape[2] - width
        committed = self._visible((soil.length - 1)[:, None]).expand(-1, width, -1)
        if self._options.key_mask is KeyMask.PREFIX_ONLY:
            ancestors = torch.zeros_like(ancestors)
        context = PassContext(
            self.head.rotary((soil.start + level - 1)[:, None].expand(-1, width), hidden),
            mask=torch.cat((committed, ancestors), dim=2)[:, None],
        )
        cache = self._cache.layer(0, num_rows, Append(slot + width, start=slot))
        return self.head.run(self._target.embed(tokens), hidden, context, cache)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        return self._target.logits(hidden, self._drafted).log_softmax(dim=-1)


@dataclass(frozen=True)
class Soil:
    """What a tree grows from, [row] each."""

    roots: Tensor
    out: Tensor  # [row, width], the head's output at the last committed pair
    length: Tensor  # committed positions
    start: Tensor  # rotary position of the roots' children
    deepest: Tensor  # levels that are of use


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


def _behind(prompt: Tensor, pairs: Tensor, start: Tensor) -> Tensor:
    """Write [row, step, width] pairs behind each row's prompt, from position `start` on."""
    num_rows, steps, width = pairs.shape
    room = prompt.new_zeros(num_rows, steps, width)
    index = (start[:, None] + torch.arange(steps, device=start.device))[:, :, None]
    return torch.cat((prompt, room), dim=1).scatter_(1, index.expand(-1, -1, width), pairs)
