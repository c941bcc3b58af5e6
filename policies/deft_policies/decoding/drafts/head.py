"""Drafting with the EAGLE head: take in what was committed, then grow a tree level by level."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.drafts.eagle import EagleHead
from deft_policies.decoding.drafts.growth import (
    Drawing,
    GoOn,
    GrowthStart,
    OpenNodes,
    draw_tree,
    grow_tree,
)
from deft_policies.decoding.drafts.sources import Seen
from deft_policies.decoding.plan import MOST_GROWN, DraftKind, KeyMask, RopeOffset, TreeShape
from deft_policies.decoding.records import BatchProgress, PassResult
from deft_policies.decoding.target import PromptFeatures, TargetModel
from deft_policies.decoding.tree import DraftTree, TokenRange
from deft_policies.model.kv_cache import Append, KVCache
from deft_policies.model.layout import EagerRunner, Reserve, StepRunner, Tensors
from deft_policies.model.leaves import leaves
from deft_policies.model.llama import PassContext

_MOST_COMMITTED = 16  # tokens of an action, behind its prompt
_EAGER = EagerRunner()


@dataclass(frozen=True)
class HeadOptions:
    """How a head is run. Published heads may have been trained for the published conventions."""

    rope_offset: RopeOffset = RopeOffset.CORRECT
    key_mask: KeyMask = KeyMask.CAUSAL
    whole_vocabulary: bool = False  # else only action tokens are drafted


@dataclass(frozen=True)
class HeadCounters:
    """What moves on from round to round, [row] each, in memory that does not: recordings read it.

    `has_grown` is 0 in the first round and 1 later.
    """

    length: Tensor  # committed positions
    prompt: Tensor  # positions of the prompt
    has_grown: Tensor

    @staticmethod
    def allocate(num_rows: int, device: torch.device) -> "HeadCounters":
        """Not inference tensors, because they are written to outside of inference mode too."""
        with torch.inference_mode(False):
            return HeadCounters(*torch.zeros(3, num_rows, dtype=torch.int64, device=device))

    def of_rows(self, num_rows: int) -> "HeadCounters":
        """Those of the first rows."""
        return HeadCounters(*(one[:num_rows] for one in (self.length, self.prompt, self.has_grown)))


class HeadDrafts:
    """A grower over an `EagleHead`. Keeps the keys of committed positions; a tree's are temporary.

    The cache holds committed positions first and the nodes of the tree in flight behind them, at
    slots that are the same in every row.
    """

    kind = DraftKind.HEAD
    needs_hidden = True
    may_be_recorded = True
    steps_needed = 0

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
        self._active = self._runner  # what runs this batch
        self._kept = self._cache = self._allocate(self._runner.reserve)
        self._kept_counters = self._counters = self._count(self._kept)
        self._num_patches = 0
        self._room = 0  # slots of committed positions

    @torch.no_grad()
    def begin(self, seen: Seen, features: PromptFeatures) -> None:
        """Take in the prompt: the pairs of all its positions but the last."""
        num_rows, num_positions = features.embeds.shape[:2]
        self._make_room(num_rows, num_positions)
        self._num_patches = features.patches.stop - features.patches.start
        torch.sub(features.lengths, 1, out=self._counters.length)
        self._counters.prompt.copy_(features.lengths)
        self._counters.has_grown.zero_()
        pairs = torch.stack((features.embeds[:, 1:], features.hidden[:, :-1]))
        if self._active.reserve is not None:
            missing = self._active.reserve.padded(num_positions) - pairs.shape[2]
            pairs = functional.pad(pairs, (0, 0, 0, missing))
        self._read(pairs)

    @torch.no_grad()
    def grow(self, progress: BatchProgress, shape: TreeShape) -> DraftTree:
        """Draft behind the roots."""
        start = self.take_in(progress, shape)
        return self._grow(shape.cut(progress.depth), start)

    @torch.no_grad()
    def warm_up(self, shape: TreeShape, length: int) -> None:
        """Capture prompts of every length, and the growth of every depth, for every batch size."""
        reserve, weight = self._runner.reserve, self.head.fc.weight
        if reserve is None:
            return
        for rows in reserve.batches:
            self._make_room(rows, reserve.longest)
            for positions in reserve.lengths:
                self._read(weight.new_zeros(2, rows, positions, self.head.sizes.width))
            numbers = torch.zeros(rows, dtype=torch.int64, device=weight.device)
            out = weight.new_zeros(rows, self.head.sizes.width)
            start = HeadStart(numbers, out, numbers, numbers, numbers)
            for depth in range(1, length):
                self._grow(shape.cut(depth), start)

    def _grow(self, shape: TreeShape, start: "HeadStart") -> DraftTree:
        self._widen(shape.num_grown)

        def step(*inputs: Tensor) -> Tensors:
            tree = self._grow_step(shape, HeadStart(*inputs))
            return tree.tokens, tree.parents, tree.is_real, tree.log_probs, tree.sources

        grown = self._active.run((self, "grow", shape, len(start.out)), step, leaves(start))
        # The next tree overwrites what a captured step put out.
        if self._runner.reserve is not None:
            grown = tuple(tensor.clone() for tensor in grown)
        return DraftTree(*grown)

    def take_in(self, progress: BatchProgress, shape: TreeShape) -> "HeadStart":
        """Append the pairs of the last pass, and say what the next tree grows from."""
        if progress.last is None:
            raise ValueError("the draft head starts after the prefill")
        out = self._append(progress.last)
        deepest = progress.length - 1 - progress.num_committed
        if shape.is_full_depth:
            deepest = torch.full_like(deepest, shape.levels)
        length = self._counters.length
        start = HeadStart(
            progress.roots, out, self._tree_position(), deepest, self._last_seen(length - 1)
        )
        self._counters.has_grown.fill_(1)
        return start

    def _tree_position(self) -> Tensor:
        """Rotary position of the children of the roots, [row]."""
        counters = self._counters
        if self._options.rope_offset is RopeOffset.CORRECT:
            return counters.length
        return (counters.length - self._num_patches) * counters.has_grown

    def _read(self, pairs: Tensor) -> None:
        """Append the pairs of prompts, [2, row, position, width]: embeddings and hidden states."""

        def step(pairs: Tensor) -> Tensors:
            _, num_rows, length, _ = pairs.shape
            positions = torch.arange(length, device=pairs.device).expand(num_rows, -1)
            cache = self._cache.layer(0, num_rows, Append(self._room, start=0))
            embeds, hidden = pairs
            self.head.read(embeds, hidden, self.head.rotary(positions, hidden), cache)
            return ()

        self._active.run((self, "read", *pairs.shape), step, (pairs,))

    def _append(self, last: PassResult) -> Tensor:
        """The head's output at the last of the pass's pairs, [row, width].

        Position t pairs the hidden state of the t-th token with the embedding of the one after it,
        so a pass adds a pair for every node of its path, the bonus being the last "one after".
        """
        hidden, kept, start = last.hidden, last.accepted.num_accepted, self._counters.length
        num_rows, num_steps, _ = hidden.shape
        rows = torch.arange(num_rows, device=hidden.device)[:, None]
        positions = start[:, None] + torch.arange(num_steps, device=hidden.device)
        slots = (positions + rows * self._cache.length).flatten()
        context = PassContext(
            self.head.rotary(positions, hidden),
            mask=self._visible(self._last_seen(start + kept)[:, None])[:, None],
            rows_out=kept[:, None],
        )
        cache = self._cache.layer(0, num_rows, Append(self._room, slots=slots))
        out = self.head.run(self._target.embed(last.next_tokens), hidden, context, cache)
        start.add_(kept + 1)
        return out[:, 0]

    def _make_room(self, num_rows: int, num_positions: int) -> None:
        """Choose the memory of a batch: what is kept, or where that is too small, more."""
        reserve = self._runner.reserve
        self._cache, self._active = self._kept, self._runner
        counters = self._kept_counters
        if reserve is not None and not reserve.holds(num_rows, num_positions):
            # Captured steps point to what is kept.
            self._cache, self._active = (
                self._allocate(Reserve(num_rows, longest=num_positions)),
                _EAGER,
            )
            counters = self._count(self._cache)
        elif not self._cache.fits(num_rows, num_positions + _MOST_COMMITTED + MOST_GROWN):
            self._kept = self._cache = self._allocate(Reserve(num_rows, longest=num_positions))
            counters = self._kept_counters = self._count(self._kept)
        self._counters = counters.of_rows(num_rows)
        self._room = self._cache.length - MOST_GROWN

    def _widen(self, num_grown: int) -> None:
        """Make room for a tree that is larger than most."""
        missing = self._room + num_grown - self._cache.length
        if missing > 0:
            self._active = _EAGER
            self._cache = self._cache.longer(missing)

    def _count(self, cache: KVCache) -> HeadCounters:
        return HeadCounters.allocate(cache.num_rows, cache.data.device)

    def _allocate(self, reserve: Reserve | None) -> KVCache:
        sizes, weight = self.head.sizes.cache, self.head.fc.weight
        if reserve is None:
            return KVCache(sizes, 0, 0, weight)
        length = reserve.padded(reserve.longest) + _MOST_COMMITTED + MOST_GROWN
        return KVCache(sizes, reserve.batches[0], length, weight)

    def _last_seen(self, position: Tensor) -> Tensor:
        """The last committed slot that a query at a position sees, [row]."""
        if self._options.key_mask is KeyMask.CAUSAL:
            return position
        return self._counters.prompt - 2

    def _visible(self, last: Tensor) -> Tensor:
        """Slots up to the `last` [row, query] of every query, [row, query, slot]."""
        return torch.arange(self._room, device=last.device) <= last[:, :, None]

    def _grow_step(self, shape: TreeShape, start: "HeadStart") -> DraftTree:
        """All levels of a tree, as a function of tensors alone."""
        return grow_tree(shape, self._growth(start), self._go_on(start))

    def _growth(self, start: "HeadStart") -> GrowthStart:
        first, drafted = self._log_probs(start.out), self._drafted
        return GrowthStart(self.kind, start.roots, first, start.deepest, drafted.first)

    def _go_on(self, start: "HeadStart") -> GoOn:
        hidden = start.out[:, None]  # of the nodes that were open last

        def go_on(nodes: OpenNodes) -> Tensor:
            nonlocal hidden
            above = nodes.above[:, :, None].expand(-1, -1, hidden.shape[2])
            hidden = self.extend(nodes, hidden.gather(1, above), start)
            return self._log_probs(hidden)

        return go_on

    def extend(self, nodes: OpenNodes, hidden: Tensor, start: "HeadStart") -> Tensor:
        """The head's output at nodes, [row, node, width]; `hidden` is that at their parents."""
        ancestors = nodes.ancestors
        num_rows, width = nodes.tokens.shape
        slot = self._room + ancestors.shape[2] - width
        committed = self._visible(start.seen[:, None]).expand(-1, width, -1)
        if self._options.key_mask is KeyMask.PREFIX_ONLY:
            ancestors = torch.zeros_like(ancestors)
        positions = (start.position + nodes.depth - 1)[:, None].expand(-1, width)
        context = PassContext(
            self.head.rotary(positions, hidden),
            mask=torch.cat((committed, ancestors), dim=2)[:, None],
        )
        cache = self._cache.layer(0, num_rows, Append(slot + width, start=slot))
        return self.head.run(self._target.embed(nodes.tokens), hidden, context, cache)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        return self._target.logits(hidden, self._drafted).log_softmax(dim=-1)


@dataclass(frozen=True)
class HeadStart:
    """What a tree grows from, [row] each."""

    roots: Tensor
    out: Tensor  # [row, width], the head's output at the last committed pair
    position: Tensor  # rotary, of the roots' children
    deepest: Tensor  # levels that are of use
    seen: Tensor  # the last committed slot that nodes attend to


class DrawnHeadDrafts(HeadDrafts):
    """A head whose trees are drawn at the target's temperature, odds and all."""

    may_be_recorded = False  # a replay would draw the same numbers again

    def __init__(
        self, head: EagleHead, target: TargetModel, options: HeadOptions, drawing: Drawing
    ) -> None:
        super().__init__(head, target, options)
        self._drawing = drawing

    @torch.no_grad()
    def grow(self, progress: BatchProgress, shape: TreeShape) -> DraftTree:
        """Draw a tree behind the roots: of the shape's template, or a chain."""
        template = shape.as_template()
        start = self.take_in(progress, TreeShape.of_template(template))
        template = template.cut(progress.depth)
        self._widen(template.num_inner)
        return draw_tree(template, self._growth(start), self._go_on(start), self._drawing)
