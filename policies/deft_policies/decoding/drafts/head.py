"""Drafting with the EAGLE head: take in what was committed, then grow a tree level by level."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor

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
from deft_policies.decoding.plan import DraftKind, KeyMask, RopeOffset, TreeShape
from deft_policies.decoding.records import BatchProgress, PassResult
from deft_policies.decoding.target import PromptFeatures, TargetModel
from deft_policies.decoding.tree import DraftTree, TokenRange
from deft_policies.model.kv_cache import Append, KVCache
from deft_policies.model.layout import EagerRunner, Reserve, StepRunner, Tensors, pad_batch
from deft_policies.model.llama import PassContext

# Beyond a prompt within the reserve: tokens of an action, and nodes that a tree is grown through.
_MOST_COMMITTED = 16
_MOST_GROWN = 64


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
        self._features: PromptFeatures | None = None
        self._room = 0  # slots of committed positions
        self._length = torch.zeros(0, dtype=torch.int64)  # [row], committed positions
        self._is_first = True

    @torch.no_grad()
    def begin(self, seen: Seen, features: PromptFeatures) -> None:
        """Remember the prompt; it is taken in together with the first pass."""
        self._features = features
        self._is_first = True

    @torch.no_grad()
    def grow(self, progress: BatchProgress, shape: TreeShape) -> DraftTree:
        """Draft behind the roots."""
        start = self.take_in(progress, shape)
        return self._grow(shape.cut(progress.depth), start)

    @torch.no_grad()
    def warm_up(self, shape: TreeShape, length: int) -> None:
        """Capture the growth of every depth and batch size."""
        reserve, weight = self._runner.reserve, self.head.fc.weight
        if reserve is None:
            return
        self._cache, self._active = self._kept, self._runner
        self._room = reserve.padded(reserve.longest) + _MOST_COMMITTED
        for rows in reserve.batches:
            numbers = torch.zeros(rows, dtype=torch.int64, device=weight.device)
            out = weight.new_zeros(rows, self.head.sizes.width)
            start = HeadStart(numbers, out, numbers + 1, numbers, numbers, numbers)
            for depth in range(1, length):
                self._grow(shape.cut(depth), start)

    def _grow(self, shape: TreeShape, start: "HeadStart") -> DraftTree:
        def step(*inputs: Tensor) -> Tensors:
            tree = self._grow_step(shape, HeadStart(*inputs))
            return tree.tokens, tree.parents, tree.is_real, tree.log_probs, tree.sources

        num_rows = len(start.out)
        inputs = tuple(getattr(start, one.name) for one in fields(start))
        if self._active.reserve is not None:
            inputs = tuple(pad_batch(one) for one in inputs)
        grown = self._active.run((self, "grow", shape, len(inputs[0])), step, inputs)
        # The next tree overwrites what a captured step put out.
        if self._runner.reserve is not None:
            grown = tuple(tensor[:num_rows].clone() for tensor in grown)
        return DraftTree(*grown)

    def take_in(self, progress: BatchProgress, shape: TreeShape) -> "HeadStart":
        """Append the pairs of the last pass, and say what the next tree grows from."""
        if progress.last is None or self._features is None:
            raise ValueError("the draft head starts after the prefill")
        out = self._append(progress.last, progress.length, shape)
        deepest = progress.length - 1 - progress.num_committed
        if shape.is_full_depth:
            deepest = torch.full_like(deepest, shape.levels)
        position, seen = self._tree_position(), self._last_seen(self._length - 1)
        start = HeadStart(progress.roots, out, self._length, position, deepest, seen)
        self._is_first = False
        return start

    def _tree_position(self) -> Tensor:
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
        path = last.accepted.path
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
        end = start + last.accepted.num_accepted  # position of the last pair
        mask = self._visible(self._last_seen(end)[:, None])
        context = PassContext(
            self.head.rotary(positions, hidden),
            mask=mask[:, None],
            rows_out=(first + last.accepted.num_accepted)[:, None],
        )
        out = self.head.run(embeds, hidden, context, self._cache.layer(0, len(path), append))
        self._length = end + 1
        return out[:, 0]

    def _make_room(self, length: int, shape: TreeShape) -> None:
        assert self._features is not None
        num_rows, num_positions = self._features.embeds.shape[:2]
        reserve = self._runner.reserve
        self._cache, self._active = self._kept, self._runner
        if reserve is not None and reserve.holds(num_rows, num_positions):
            self._room = reserve.padded(reserve.longest) + _MOST_COMMITTED
        else:
            self._room = num_positions + length
        # A pass's pairs are written with their padding, which reaches past the committed ones.
        needed = self._room + max(shape.num_grown, length)
        if not self._cache.fits(num_rows, needed):
            num_rows, needed = max(num_rows, self._kept.num_rows), max(needed, self._kept.length)
            self._cache = KVCache(self.head.sizes.cache, num_rows, needed, self.head.fc.weight)
            if reserve is None:
                self._kept = self._cache
            else:  # captured steps point to what is kept
                self._active = EagerRunner()

    def _allocate(self, reserve: Reserve | None) -> KVCache:
        if reserve is None:
            return KVCache(self.head.sizes.cache, 0, 0, self.head.fc.weight)
        length = reserve.padded(reserve.longest) + _MOST_COMMITTED + _MOST_GROWN
        return KVCache(self.head.sizes.cache, reserve.batches[0], length, self.head.fc.weight)

    def _last_seen(self, position: Tensor) -> Tensor:
        """The last committed slot that a query at a position sees, [row]."""
        if self._options.key_mask is KeyMask.CAUSAL:
            return position
        assert self._features is not None
        return self._features.lengths - 2

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
    length: Tensor  # committed positions
    position: Tensor  # rotary, of the roots' children
    deepest: Tensor  # levels that are of use
    seen: Tensor  # the last committed slot that nodes attend to


class DrawnHeadDrafts(HeadDrafts):
    """A head whose trees are drawn at the target's temperature, odds and all."""

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
        return draw_tree(template, self._growth(start), self._go_on(start), self._drawing)


def _behind(prompt: Tensor, pairs: Tensor, start: Tensor) -> Tensor:
    """Write [row, step, width] pairs behind each row's prompt, from position `start` on."""
    num_rows, steps, width = pairs.shape
    room = prompt.new_zeros(num_rows, steps, width)
    index = (start[:, None] + torch.arange(steps, device=start.device))[:, :, None]
    return torch.cat((prompt, room), dim=1).scatter_(1, index.expand(-1, -1, width), pairs)
