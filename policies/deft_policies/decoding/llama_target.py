"""A Llama decoder with a static cache as a `TargetModel`. Knows nothing of images or robots.

Where the host knows the rows' lengths at no cost (on a CPU), passes read exactly the slots in use
and a single token needs no mask. Elsewhere nothing is read back: lengths stay on the device, masks
do the work, and the host keeps an upper bound, rounded up so that few shapes occur.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.target import PromptFeatures, Prompts, Scores
from deft_policies.decoding.tree import DraftTree, TokenRange
from deft_policies.model.kv_cache import Append, KVCache
from deft_policies.model.layout import (
    EagerRunner,
    Reserve,
    StepRunner,
    Tensors,
    is_chain,
    pad_ancestors,
    prefill_layout,
    prefill_mask,
    tree_mask,
    tree_slots,
)
from deft_policies.model.llama import LlamaDecoder, take_rows
from deft_policies.model.passes import LlamaPasses, PassInput, Projection

# Widths of captured trees: a pass costs the same for few nodes and for some more. Fewer of them
# behind a prompt, whose own length counts.
_TREE_WIDTHS = (1, 2, 4, 8, 16, 24, 32, 50, 64)
_RIDER_WIDTHS = (1, 8, 24, 50, 64)
_ALIGNMENT = 64  # of the slots of a cache
_EAGER = EagerRunner()


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
        self._active = self._runner  # what runs this batch
        self._reads_lengths = self.device.type == "cpu" and self._runner.reserve is None
        self._kept = self._cache = self._allocate(self._runner.reserve)
        # Where it is captured what moves on lies in memory that does not, as the cache does.
        self._counters = self._allocate_counters(self._cache.num_rows)
        self._lengths, self._roots = self._counters  # [row] each: committed; root of the last pass
        self._extent = Extent(0)

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
    def runner(self) -> StepRunner:
        """What its passes run on."""
        return self._runner

    @property
    def longest_prompt(self) -> int:
        """Positions a prompt may have, patches included."""
        return self.decoder.sizes.max_positions - self._room.new_tokens

    def warm_up(self) -> None:
        """Capture every pass that a batch within the reserve can need."""
        reserve, weight = self._runner.reserve, self.decoder.embedding.weight
        if reserve is None:
            return
        width = self.decoder.sizes.width
        for rows in reserve.batches:
            tokens = torch.zeros(rows, _TREE_WIDTHS[-1], dtype=torch.int64, device=self.device)
            roots = tokens[:, 0]
            for length in reserve.lengths:
                embeds = torch.zeros(rows, length, width, device=self.device, dtype=weight.dtype)
                prompts = Prompts(embeds, torch.full_like(roots, length), roots, slice(0))
                for nodes in _RIDER_WIDTHS:
                    for keeps in (True, False):
                        tree = DraftTree.chain(tokens[:, :nodes])
                        self.prefill(replace(prompts, keep_hidden=keeps), tree)
            for nodes in _TREE_WIDTHS:
                self.score(DraftTree.chain(tokens[:, :nodes]))

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
        embeds, lengths = prompts.embeds, prompts.lengths
        num_positions = embeds.shape[1]
        reserve = self._runner.reserve
        missing = 0 if reserve is None else reserve.padded(num_positions) - num_positions
        if missing:
            embeds = functional.pad(embeds, (0, 0, 0, missing))
        self._begin(lengths, num_positions, embeds.shape[1])
        is_causal = tree.num_nodes == 1 or (self._reads_lengths and is_chain(tree.parents))
        kind = PrefillKind(is_causal, prompts.keep_hidden)
        tokens, ancestors = self._widen(tree, _RIDER_WIDTHS)

        def step(*inputs: Tensor) -> Tensors:
            return self._prefill_step(kind, *inputs)

        scored, logits, kept = self._active.run(
            (self, kind, tokens.shape[1], *embeds.shape),
            step,
            (embeds, lengths, tokens, ancestors),
        )
        kept = kept[:, :num_positions]
        features = PromptFeatures(prompts.embeds, kept, lengths, prompts.patches)
        return self._scores_of(tree, logits, scored), features

    @torch.no_grad()
    def score(self, tree: DraftTree) -> Scores:
        """Run one pass over a tree whose root is the last committed token."""
        self._roots.copy_(self._lengths)
        if self._extent.is_exact:
            return self._score_aligned(tree)
        tokens, ancestors = self._widen(tree, _TREE_WIDTHS)
        num_rows, num_nodes = tokens.shape
        # Where lengths stay on the device, masks hide what is behind them.
        read = self._extent.longest + num_nodes if self._reads_lengths else self._cache.length

        def step(*inputs: Tensor) -> Tensors:
            return self._score_step(read, *inputs)

        logits, hidden = self._active.run(
            (self, "score", num_rows, num_nodes),
            step,
            (tokens, ancestors, self._roots),
        )
        return self._scores_of(tree, logits, hidden)

    @torch.no_grad()
    def commit(self, path: Tensor, lengths: Tensor) -> None:
        """Keep the slots of a path of the last pass, in place."""
        if path.shape[1] > 1:
            nodes = path[:, 1:].clamp(0, self._room.nodes)
            places = torch.arange(1, path.shape[1], device=path.device)
            roots = self._roots[:, None]
            self._cache.move(roots + nodes, roots + places)
        torch.add(self._roots, lengths, out=self._lengths)
        if self._reads_lengths:
            self._extent = _measure(self._lengths)

    def _widen(self, tree: DraftTree, widths: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens and ancestors of a tree, padded to the next captured width where there is one."""
        tokens, ancestors = tree.tokens, tree.ancestor_mask()
        width = tree.num_nodes
        if self._runner.reserve is not None:
            width = next((one for one in widths if one >= width), width)
        if width == tree.num_nodes:
            return tokens, ancestors
        tokens = functional.pad(tokens, (0, width - tree.num_nodes))
        return tokens, pad_ancestors(ancestors, width)

    def _scores_of(self, tree: DraftTree, logits: Tensor, hidden: Tensor) -> Scores:
        """What was asked for, without the padding of captured shapes."""
        return Scores(logits[:, : tree.num_nodes], hidden[:, : tree.num_nodes])

    def _begin(self, lengths: Tensor, num_positions: int, num_padded: int) -> None:
        """Choose the memory of a batch: what is kept, or where that is too small, more."""
        num_rows, room = lengths.shape[0], self._room.new_tokens + self._room.nodes
        reserve, counters = self._runner.reserve, self._counters
        self._cache, self._active = self._kept, self._runner
        if reserve is not None and not reserve.holds(num_rows, num_positions):
            # Captured passes point to what is kept.
            self._cache, self._active = (
                self._allocate(Reserve(num_rows, longest=num_padded)),
                _EAGER,
            )
            counters = self._allocate_counters(num_rows)
        elif not self._cache.fits(num_rows, num_padded + room):
            self._kept = self._cache = self._allocate(Reserve(num_rows, longest=num_padded))
            counters = self._counters = self._allocate_counters(self._cache.num_rows)
        self._lengths, self._roots = counters[:, :num_rows]
        self._lengths.copy_(lengths)
        torch.sub(lengths, 1, out=self._roots)
        self._extent = _measure(lengths) if self._reads_lengths else Extent(num_padded)

    def _allocate_counters(self, num_rows: int) -> Tensor:
        """[counter, row], not an inference tensor: written to outside of inference mode too."""
        with torch.inference_mode(False):
            return torch.zeros(2, num_rows, dtype=torch.int64, device=self.device)

    def _allocate(self, reserve: Reserve | None) -> KVCache:
        sizes, weight = self.decoder.sizes.cache, self.decoder.embedding.weight
        if reserve is None:
            return KVCache(sizes, 0, 0, weight)
        needed = reserve.padded(reserve.longest) + self._room.new_tokens + self._room.nodes
        return KVCache(sizes, reserve.batches[0], needed + -needed % _ALIGNMENT, weight)

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
