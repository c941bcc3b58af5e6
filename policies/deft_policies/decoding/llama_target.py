"""A Llama decoder with a static cache as a `TargetModel`. Knows nothing of images or robots.

Where the host knows the rows' lengths at no cost (on a CPU), passes read exactly the slots in use
and a single token needs no mask. Elsewhere nothing is read back: lengths stay on the device, masks
do the work, and the host keeps an upper bound, rounded up so that few shapes occur.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.target import PromptFeatures, Prompts, Scores
from deft_policies.decoding.tree import DraftTree, TokenRange
from deft_policies.model.kv_cache import Append, KVCache
from deft_policies.model.layout import (
    EagerRunner,
    StepRunner,
    Tensors,
    is_chain,
    pad_ancestors,
    pad_batch,
    prefill_layout,
    prefill_mask,
    tree_mask,
    tree_slots,
)
from deft_policies.model.llama import LlamaDecoder, take_rows
from deft_policies.model.passes import LlamaPasses, PassInput, Projection

_PROMPT_BUCKET = 16
_READ_BUCKET = 64
# Widths of captured trees: a pass costs the same for few nodes and for some more, capturing one
# takes a second.
_TREE_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 50)


@dataclass(frozen=True)
class Room:
    """How much a cache holds beyond the prompt."""

    new_tokens: int = 16  # ever committed behind a prompt
    nodes: int = 64  # of the widest tree


@dataclass(frozen=True)
class Extent:
    """What the host knows of the rows' lengths: a bound, and whether every row has exactly it."""

    longest: int
    is_exact: bool = False


@dataclass(frozen=True)
class PrefillKind:
    """What tells the prefill's step functions apart, beside shapes."""

    is_causal: bool
    keeps_hidden: bool


class LlamaTarget:
    """Scores draft trees with a decoder, one batch at a time, on one thread."""

    def __init__(
        self,
        decoder: LlamaDecoder,
        action_tokens: TokenRange,
        *,
        action_rows_only: bool = False,
        room: Room | None = None,
        runner: StepRunner | None = None,
    ) -> None:
        """`action_rows_only` leaves the other rows of the head out: see `vocabulary`."""
        self.decoder = decoder
        self._passes = LlamaPasses(decoder)
        self._head = Projection(decoder.head)
        self._action_tokens = action_tokens
        every_token = TokenRange(0, decoder.sizes.vocabulary - 1)
        self._vocabulary = action_tokens if action_rows_only else every_token
        self._room = room or Room()
        self._runner: StepRunner = runner or EagerRunner()
        self._reads_lengths = self.device.type == "cpu" and not self._runner.has_fixed_shapes
        self._cache = KVCache(decoder.sizes.cache, 0, 0, decoder.embedding.weight)
        self._lengths = torch.zeros(0, dtype=torch.int64, device=self.device)  # [row], committed
        self._roots = self._lengths  # [row], slot of the root of the last pass
        self._num_rows = 0
        self._extent = Extent(0)
        self._limit = 0  # no row ever grows beyond this

    @property
    def vocabulary(self) -> TokenRange:
        """Token ids that logits speak of."""
        return self._vocabulary

    @property
    def num_tokens(self) -> int:
        """Size of the whole vocabulary."""
        return self.decoder.sizes.vocabulary

    @property
    def action_tokens(self) -> TokenRange:
        """Token ids that stand for bins."""
        return self._action_tokens

    @property
    def widest_tree(self) -> int:
        """Nodes of the largest tree the cache has room for."""
        return self._room.nodes

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.decoder.embedding.weight.device

    @property
    def has_fixed_shapes(self) -> bool:
        """Whether passes are captured, one by one for each shape."""
        return self._runner.has_fixed_shapes

    @property
    def longest_prompt(self) -> int:
        """Positions a prompt may have, patches included."""
        return self.decoder.sizes.max_positions - self._room.new_tokens

    def pad_rows(self, values: Tensor) -> Tensor:
        """The batch with copies of its first row behind, up to the next captured batch size."""
        return pad_batch(values) if self._runner.has_fixed_shapes else values

    @torch.no_grad()
    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings."""
        embedded: Tensor = self.decoder.embedding(tokens)
        return embedded

    @torch.no_grad()
    def logits(self, hidden: Tensor, tokens: TokenRange | None = None) -> Tensor:
        """The head over `tokens`, or over `vocabulary`, in float32."""
        wanted = tokens or self._vocabulary
        if len(wanted) == self.decoder.sizes.vocabulary:
            every = self._head.apply(hidden.flatten(0, -2))
            return every.float().view(*hidden.shape[:-1], -1)
        rows = slice(wanted.first, wanted.last + 1)
        return functional.linear(hidden, self.decoder.head.weight[rows]).float()

    @torch.no_grad()
    def prefill(self, prompts: Prompts, tree: DraftTree) -> tuple[Scores, PromptFeatures]:
        """Run the prompts and the guesses behind them in one pass."""
        self._num_rows, num_positions, _ = prompts.embeds.shape
        embeds, lengths = self.pad_rows(prompts.embeds), self.pad_rows(prompts.lengths)
        if self._runner.has_fixed_shapes:
            embeds = functional.pad(embeds, (0, 0, 0, -num_positions % _PROMPT_BUCKET))
        self._begin(lengths, embeds.shape[1])
        is_causal = tree.num_nodes == 1 or (self._reads_lengths and is_chain(tree.parents))
        kind = PrefillKind(is_causal, prompts.keep_hidden)
        tokens, ancestors = self._widen(tree)

        def step(*inputs: Tensor) -> Tensors:
            return self._prefill_step(kind, *inputs)

        scored, logits, kept = self._runner.run(
            (kind, tokens.shape[1], *embeds.shape),
            step,
            (embeds, lengths, tokens, ancestors),
        )
        kept = kept[: self._num_rows, :num_positions]
        features = PromptFeatures(prompts.embeds, kept, prompts.lengths, prompts.patches)
        return self._scores_of(tree, logits, scored), features

    @torch.no_grad()
    def score(self, tree: DraftTree) -> Scores:
        """Run one pass over a tree whose root is the last committed token."""
        self._roots = self._lengths
        if self._extent.is_exact:
            return self._score_aligned(tree)
        tokens, ancestors = self._widen(tree)
        num_rows, num_nodes = tokens.shape
        read = self._extent.longest + num_nodes
        if not self._reads_lengths:
            read = min(read + -read % _READ_BUCKET, self._cache.length)

        def step(*inputs: Tensor) -> Tensors:
            return self._score_step(read, *inputs)

        logits, hidden = self._runner.run(
            ("score", num_rows, num_nodes, read),
            step,
            (tokens, ancestors, self._roots),
        )
        return self._scores_of(tree, logits, hidden)

    @torch.no_grad()
    def commit(self, path: Tensor, lengths: Tensor) -> None:
        """Keep the slots of a path of the last pass, in place."""
        path, lengths = self.pad_rows(path), self.pad_rows(lengths)
        if path.shape[1] > 1:
            nodes = path[:, 1:].clamp(0, self._room.nodes)
            places = torch.arange(1, path.shape[1], device=path.device)
            roots = self._roots[:, None]
            self._cache.move(roots + nodes, roots + places)
        self._lengths = self._roots + lengths
        if self._reads_lengths:
            self._extent = _measure(self._lengths)
        else:
            longest = self._extent.longest + path.shape[1]
            self._extent = Extent(min(longest, self._limit))

    def _widen(self, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """Tokens and ancestors of a tree, padded to the next captured width where there is one."""
        tokens, ancestors = self.pad_rows(tree.tokens), self.pad_rows(tree.ancestor_mask())
        width = tree.num_nodes
        if self._runner.has_fixed_shapes:
            width = next((one for one in _TREE_WIDTHS if one >= width), width)
        if width == tree.num_nodes:
            return tokens, ancestors
        tokens = functional.pad(tokens, (0, width - tree.num_nodes))
        return tokens, pad_ancestors(ancestors, width)

    def _scores_of(self, tree: DraftTree, logits: Tensor, hidden: Tensor) -> Scores:
        """What was asked for, without the padding of captured shapes."""
        rows, nodes = slice(self._num_rows), slice(tree.num_nodes)
        return Scores(logits[rows, nodes], hidden[rows, nodes])

    def _begin(self, lengths: Tensor, num_positions: int) -> None:
        num_rows = lengths.shape[0]
        needed = num_positions + self._room.new_tokens + self._room.nodes
        if not self._cache.fits(num_rows, needed):
            self._runner.forget()
            num_slots = max(needed + -needed % _READ_BUCKET, self._cache.length)
            num_rows = max(num_rows, self._cache.num_rows)
            weight = self.decoder.embedding.weight
            self._cache = KVCache(self.decoder.sizes.cache, num_rows, num_slots, weight)
        self._lengths = lengths
        self._roots = lengths - 1
        self._limit = num_positions + self._room.new_tokens
        self._extent = _measure(lengths) if self._reads_lengths else Extent(num_positions)

    def _prefill_step(
        self, kind: PrefillKind, embeds: Tensor, lengths: Tensor, tokens: Tensor, ancestors: Tensor
    ) -> Tensors:
        depths = ancestors.sum(dim=2) - 1
        plan = prefill_layout(lengths, depths, embeds.shape[1])
        if tokens.shape[1] > 1:
            embeds = torch.cat((embeds, self.decoder.embedding(tokens[:, 1:])), dim=1)
            embeds = take_rows(embeds, plan.sources)
        hidden = self._passes.run(
            PassInput(
                embeds,
                plan.positions,
                Append(embeds.shape[1], start=0),
                mask=None if kind.is_causal else prefill_mask(plan, ancestors),
                is_causal=kind.is_causal,
                rows_out=None if kind.keeps_hidden else plan.node_slots,
            ),
            self._cache,
        )
        scored = take_rows(hidden, plan.node_slots) if kind.keeps_hidden else hidden
        kept = hidden if kind.keeps_hidden else hidden[:, :0]
        return scored, self.logits(scored), kept

    def _score_aligned(self, tree: DraftTree) -> Scores:
        """The pass when every row has the same known length: plain slices, no mask for a root."""
        start, num_nodes = self._extent.longest, tree.num_nodes
        append = Append(start + num_nodes, start=start)
        embeds = self.decoder.embedding(tree.tokens)
        if num_nodes == 1:
            inputs = PassInput(embeds, self._roots[:, None], append)
        else:
            ancestors = tree.ancestor_mask()
            before = ancestors.new_ones((*ancestors.shape[:2], start))
            mask = torch.cat((before, ancestors), dim=2).unsqueeze(1)
            inputs = PassInput(embeds, start + tree.depths(), append, mask)
        hidden = self._passes.run(inputs, self._cache)
        return Scores(self.logits(hidden), hidden)

    def _score_step(self, read: int, tokens: Tensor, ancestors: Tensor, roots: Tensor) -> Tensors:
        num_rows, num_nodes = tokens.shape
        slots = tree_slots(roots, num_nodes)
        rows = torch.arange(num_rows, device=slots.device)[:, None] * self._cache.length
        hidden = self._passes.run(
            PassInput(
                self.decoder.embedding(tokens),
                roots[:, None] + ancestors.sum(dim=2) - 1,
                Append(read, slots=(slots + rows).flatten()),
                mask=tree_mask(roots, ancestors, read),
            ),
            self._cache,
        )
        return self.logits(hidden), hidden


def _measure(lengths: Tensor) -> Extent:
    """Read the lengths, which costs nothing where they already are on the host."""
    on_host = lengths.tolist()
    return Extent(max(on_host), is_exact=min(on_host) == max(on_host))
