"""The target model: passes of a Llama decoder over the cached rows of a batch.

Knows tokens, slots and masks; nothing of drafts, rules, images or robots. Where the host knows the
rows' lengths at no cost (on a CPU), passes read exactly the slots in use and a single token needs
no mask. Elsewhere lengths stay on the device and masks do the work.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.sampling import first_maximum
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.graphs import Step, StepRunner, Tensors
from deft_policies.model.kv_cache import (
    STRIP,
    KVCache,
    is_chain,
    pad_ancestors,
    prefill_layout,
    prefill_mask,
    tree_mask,
    tree_slots,
)
from deft_policies.model.llama import LlamaDecoder, first_layers, take_rows
from deft_policies.model.passes import LlamaPasses
from deft_policies.model.sizes import TokenRange
from deft_policies.model.staging import keep_freed_memory, to_device

WIDTHS = (1, 8, 16, 32, 64, 128, 256, 512)  # nodes of a pass: what is recorded; others are padded
_TIMED_RUNS = 5


def bucket(width: int) -> int:
    """The width of the pass that a tree of so many nodes is recorded in."""
    return next((one for one in WIDTHS if one >= width), width)


@dataclass(frozen=True)
class Prompts:
    """What a batch of actions starts from, ready for the decoder. Right-padded.

    `features`, if any, are the nearest-neighbour key of the frame (pooled visual features).
    """

    embeds: Tensor  # [row, position, width]
    lengths: Tensor  # [row] int64, multimodal: patches count
    last_tokens: Tensor  # [row] int64, the id at the last position
    patches: slice  # positions of the image patches, the same in every row
    features: Tensor | None = None  # [row, feature]
    # [row, token] bool, which tokens the prompt holds; where repetitions are penalised.
    seen: Tensor | None = None
    keep_hidden: bool = True  # whether a draft source will read the prompt's hidden states
    for_draft: Callable[[], "Prompts"] | None = None  # the same frames as another checkpoint sees

    def take(self, rows: list[int]) -> "Prompts":
        """Some rows, or all as they are."""
        if rows == list(range(len(self.lengths))):
            return self
        index = to_device(rows, self.embeds.device)
        features, seen, for_draft = self.features, self.seen, self.for_draft
        return replace(
            self,
            embeds=self.embeds[index],
            lengths=self.lengths[index],
            last_tokens=self.last_tokens[index],
            features=None if features is None else features[index],
            seen=None if seen is None else seen[index],
            for_draft=None if for_draft is None else lambda: for_draft().take(rows),
        )


@dataclass(frozen=True)
class Scores:
    """The target's opinion at every node of a draft tree."""

    logits: Tensor  # [row, node, vocabulary] float32; column i is token `vocabulary.first + i`
    hidden: Tensor  # [row, node, width], after the final norm
    answers: Tensor | None = None  # [row], of the tree: whose they are


class Target:
    """Scores draft trees with a decoder. Keeps nothing of any row: that is in a `KVCache`."""

    def __init__(
        self,
        decoder: LlamaDecoder,
        action_tokens: TokenRange,
        *,
        action_rows_only: bool = False,
        runner: StepRunner | None = None,
    ) -> None:
        """`action_rows_only` leaves the other rows of the head out: see `vocabulary`."""
        self.decoder = decoder
        self.action_tokens = action_tokens  # ids that stand for bins
        every = TokenRange(0, decoder.sizes.vocabulary - 1)
        self.vocabulary = action_tokens if action_rows_only else every  # what logits speak of
        self.num_tokens = decoder.sizes.vocabulary
        self.repetition_penalty = 1.0  # of every token that came before, once: see `penalise`
        self.runner = runner or StepRunner()
        self.text_width = WIDTHS[-1]  # nodes of old text that a guarded pass carries
        self.reads_lengths = self.device.type == "cpu" and self.runner.reserve is None
        if self.reads_lengths:
            keep_freed_memory()
        self._passes = LlamaPasses(decoder, packs=self.reads_lengths)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.decoder.embedding.weight.device

    @property
    def max_positions(self) -> int:
        """Positions a row may have, prompt and patches included."""
        return self.decoder.sizes.max_positions

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a token is computed to the same bits alone, among drafts and among rows."""
        return self._passes.rows is not None and not self._passes.rows.problem

    def describe_equality(self) -> str:
        """How far plain decoding computes the same numbers for a token as passes over drafts."""
        if self._passes.rows is None:
            return "as plain decoding's but for near ties"
        if self._passes.rows.problem:
            return f"as plain decoding's but for near ties: {self._passes.rows.problem} here"
        where = f", with {torch.get_num_threads()} thread(s)" if self.device.type == "cpu" else ""
        return f"bit-equal to plain decoding's: this machine was asked{where}"

    def new_cache(self) -> KVCache:
        """Memory for rows of its own."""
        decoder = self.decoder
        return KVCache(decoder.sizes, decoder.embedding.weight, decoder.kernels is not None)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of token ids, [..., width]."""
        embedded: Tensor = self.decoder.embedding(tokens)
        return embedded

    def logits(self, hidden: Tensor, tokens: TokenRange | None = None) -> Tensor:
        """The head over `tokens`, or over `vocabulary`, in float32; column 0 is `tokens.first`."""
        wanted = tokens or self.vocabulary
        flat = hidden.flatten(0, -2)
        num_rows = len(flat)
        flat = self._passes.padded(flat)
        head = self._passes.head
        if len(wanted) == self.num_tokens:
            found = head.apply(flat)
        else:
            found = head.apply_some(flat, slice(wanted.first, wanted.last + 1))
        return found[:num_rows].float().view(*hidden.shape[:-1], -1)

    def record(self, cache: KVCache, widest: int) -> None:
        """Record every pass over trees of up to so many nodes, and every prefill."""
        reserve, weight = self.runner.reserve, self.decoder.embedding.weight
        assert reserve is not None
        widths = WIDTHS[: WIDTHS.index(bucket(widest)) + 1]
        for num_rows in reserve.batches:
            roots = torch.zeros(num_rows, dtype=torch.int64, device=self.device)
            trees = [DraftTree.root_only(roots).padded(width) for width in widths]
            for length in reserve.lengths:
                embeds = weight.new_zeros(num_rows, length, weight.shape[1])
                prompts = Prompts(embeds, torch.full_like(roots, length), roots, slice(0))
                for tree in trees:
                    self.prefill(cache, 0, prompts, tree)
                    self.prefill(cache, 0, replace(prompts, keep_hidden=False), tree)
            for tree in trees:
                self.score(cache, tree)

    def prefill(
        self, cache: KVCache, first: int, prompts: Prompts, tree: DraftTree
    ) -> tuple[Scores, Tensor]:
        """Run prompts with the tree's guesses riding behind them in one pass.

        They become the rows from `first` on. Node 0 is the last prompt token: its scores are the
        prompt's own next-token scores. The prompt's slots are committed, the other nodes wait for
        `KVCache.keep`. Also returns the prompts' hidden states after the final norm, [row,
        position, width]: no positions if they are not kept.
        """
        embeds, lengths = prompts.embeds, prompts.lengths
        num_rows, num_positions = embeds.shape[:2]
        reserve, keeps_hidden = self.runner.reserve, prompts.keep_hidden
        if cache.is_fixed and reserve is not None:
            missing = reserve.padded(num_positions) - num_positions
            embeds = functional.pad(embeds, (0, 0, 0, missing))
        torch.sub(lengths, 1, out=cache.lengths(first, first + num_rows))
        causal = tree.num_nodes == 1 or (tree.is_chain and not cache.is_fixed)
        causal = causal or (self.reads_lengths and is_chain(tree.parents))
        tokens, ancestors = self._widened(cache, tree)

        def step(embeds: Tensor, lengths: Tensor, tokens: Tensor, ancestors: Tensor) -> Tensors:
            depths = ancestors.sum(dim=2) - 1
            sources, positions, node_slots = prefill_layout(lengths, depths, embeds.shape[1])
            if tokens.shape[1] > 1:
                embeds = torch.cat((embeds, self.decoder.embedding(tokens[:, 1:])), dim=1)
                embeds = take_rows(embeds, sources)
            num_slots = embeds.shape[1]
            window = cache.open(num_rows, num_slots, read=num_slots, first_row=first)
            mask = None if causal else prefill_mask(node_slots, ancestors, num_slots)
            rows_out = None if keeps_hidden else node_slots
            hidden = self._passes.run(embeds, positions, window, mask, causal, rows_out)
            scored = take_rows(hidden, node_slots) if keeps_hidden else hidden
            return scored, self.logits(scored), hidden if keeps_hidden else hidden[:, :0]

        inputs = (embeds, lengths, tokens, ancestors)
        key = (causal, keeps_hidden, tokens.shape[1], *embeds.shape)
        # Rows that join others run step by step: they come at any place.
        found = self._run(cache, key, step, inputs) if first == 0 else step(*inputs)
        scored, logits, kept = found
        return _without_padding(tree, logits, scored), kept[:, :num_positions]

    def measure_width(self, prompts: Prompts, widest: int, edits_apart: int) -> None:
        """Find out how much of an old text a pass should carry here.

        A pass writes one token and those of the old text up to the next edit. With edits so many
        tokens apart, the best width is the one that writes most in a millisecond.
        """
        num_rows, length = len(prompts.lengths), prompts.embeds.shape[1]
        cache, root = self.new_cache(), DraftTree.root_only(prompts.last_tokens)
        cache.reserve(num_rows, length + 2 * widest)
        self.prefill(cache, 0, prompts, root)
        fastest_s = dict.fromkeys((one for one in WIDTHS if one <= widest), math.inf)
        for _ in range(_TIMED_RUNS):  # in turn, so that other work slows all widths down alike
            for width in fastest_s:
                tree = DraftTree.chain(root.tokens.repeat(1, width))
                started = time.perf_counter()
                self.score(cache, replace(tree, is_chain=False)).logits.sum().item()
                fastest_s[width] = min(fastest_s[width], time.perf_counter() - started)

        def written_in_a_second(width: int) -> float:
            written = 1 + edits_apart * (1 - math.exp((1 - width) / edits_apart))
            return written / fastest_s[width]

        self.text_width = max(fastest_s, key=written_in_a_second)

    def score(self, cache: KVCache, tree: DraftTree) -> Scores:
        """Run one pass over a tree whose roots are the last committed tokens, not yet cached."""
        num_rows = tree.tokens.shape[0]
        longest, roots = 0, cache.lengths(0, num_rows)
        if self.reads_lengths:
            known: list[int] = roots.tolist()
            longest = max(known)
            cache.reserve(num_rows, longest + tree.num_nodes)
            if min(known) == longest:
                return self._score_aligned(cache, tree, longest)
            roots = cache.lengths(0, num_rows)  # the room may have grown
        tokens, ancestors = self._widened(cache, tree)
        read = longest + tokens.shape[1] if self.reads_lengths else cache.num_slots
        step = partial(self._score_step, cache, read)
        logits, hidden = self._run(cache, tokens.shape, step, (tokens, ancestors, roots))
        return _without_padding(tree, logits, hidden)

    def _score_step(
        self, cache: KVCache, read: int, tokens: Tensor, ancestors: Tensor, roots: Tensor
    ) -> Tensors:
        num_rows, num_nodes = tokens.shape
        positions = roots[:, None] + ancestors.sum(dim=2) - 1
        window = cache.open(num_rows, num_nodes, read, slots=tree_slots(roots, num_nodes))
        embeds, mask = self.decoder.embedding(tokens), tree_mask(roots, ancestors, read)
        hidden = self._passes.run(embeds, positions, window, mask)
        return self.logits(hidden), hidden

    def penalise(self, logits: Tensor, seen: Tensor, tree: DraftTree) -> Tensor:
        """Logits [row, node, token], smaller where a token came before.

        It did if the row has `seen` [row, token] it or if it is on the node's own path: what is
        drafted elsewhere in the tree counts for nobody.
        """
        drafted = functional.one_hot(tree.tokens, self.num_tokens).float()
        on_path = tree.ancestor_mask().float() @ drafted > 0
        penalty = self.repetition_penalty
        smaller = torch.where(logits > 0, logits / penalty, logits * penalty)
        return torch.where(seen[:, None] | on_path, smaller, logits)

    def logits_along(
        self,
        prompts: Prompts,
        num_tokens: int,
        given: Sequence[int] | None = None,
        stop: int | None = None,
    ) -> list[Tensor]:
        """Plain decoding's logits [token] of one prompt, a pass each.

        Along given tokens, so that formats can be compared in the same context, or along its own
        up to a stop token.
        """
        num_tokens = num_tokens if given is None else len(given)
        cache = self.new_cache()
        cache.reserve(1, prompts.embeds.shape[1] + num_tokens + STRIP)
        root = torch.zeros(1, 1, dtype=torch.int64, device=self.device)
        scores, _ = self.prefill(cache, 0, prompts, DraftTree.root_only(prompts.last_tokens))
        found = [scores.logits[0, 0].clone()]
        for place in range(num_tokens - 1):
            own = first_maximum(found[-1]) + self.vocabulary.first
            token = own if given is None else own.new_tensor(given[place])
            if given is None and stop is not None and int(token) == stop:
                break
            cache.keep(root, 1, in_place=True)
            scores = self.score(cache, DraftTree.root_only(token.view(1)))
            found.append(scores.logits[0, 0].clone())
        return found

    def _run(self, cache: KVCache, key: Sequence[object], step: Step, inputs: Tensors) -> Tensors:
        if not cache.is_fixed:
            return step(*inputs)
        return self.runner.run((self, cache, *key), step, inputs)

    def _widened(self, cache: KVCache, tree: DraftTree) -> tuple[Tensor, Tensor]:
        """Tokens and ancestors of a tree, padded to a recorded width where steps are recorded."""
        tokens, ancestors = tree.tokens, tree.ancestor_mask()
        width = bucket(tree.num_nodes) if cache.is_fixed else tree.num_nodes
        if width == tree.num_nodes:
            return tokens, ancestors
        padded = functional.pad(tokens, (0, width - tree.num_nodes))
        return padded, pad_ancestors(ancestors, width)

    def _score_aligned(self, cache: KVCache, tree: DraftTree, start: int) -> Scores:
        """The pass when every row has the same known length: plain slices, no mask for a root."""
        num_rows, num_nodes = tree.tokens.shape
        embeds = self.decoder.embedding(tree.tokens)
        window = cache.open(num_rows, num_nodes, read=start + num_nodes, start=start)
        positions: Tensor | int = start
        mask = None
        if num_nodes > 1:
            ancestors = tree.ancestor_mask()
            before = ancestors.new_ones((*ancestors.shape[:2], start))
            mask = torch.cat((before, ancestors), dim=2).unsqueeze(1)
            positions = start if tree.is_chain else start + tree.depths()
        hidden = self._passes.run(embeds, positions, window, mask)
        return Scores(self.logits(hidden), hidden, tree.answers)


def self_draft_target(target: Target, num_layers: int) -> Target:
    """The target's first layers as a model of their own."""
    return Target(
        first_layers(target.decoder, num_layers),
        target.action_tokens,
        action_rows_only=len(target.vocabulary) == len(target.action_tokens),
        runner=target.runner,
    )


def _without_padding(tree: DraftTree, logits: Tensor, hidden: Tensor) -> Scores:
    """What was asked for, without the padding of recorded widths."""
    return Scores(logits[:, : tree.num_nodes], hidden[:, : tree.num_nodes], tree.answers)
