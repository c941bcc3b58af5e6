"""Standard speculative decoding (Leviathan et al. 2023): a cheaper model drafts."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding import kinds
from deft_policies.decoding.batch import Batch, Pass
from deft_policies.decoding.drafts import FRAME, LOGITS, MEMORY, DraftSource, drawing
from deft_policies.decoding.drafts.session import NgramLookup
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import MOST_GROWN, TreeShape
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import DraftLimits, DraftTree, Level
from deft_policies.model.llama import take_rows
from deft_policies.model.sizes import TokenRange


class SmallModelDrafts(DraftSource):
    """Chains or trees of a cheaper model, with a cache and perhaps a vocabulary of its own.

    An action token of the target is the model's token of the same bin. The model is asked for
    larger and larger trees and keeps none of them: what it keeps is what the target has committed,
    all but the root, one round later.

    With `multi_level` (FLy's acceleration) the chain itself is drafted by speculation: n-grams of
    the session guess it, and where the model predicts the same, its next token needs no pass. The
    chain stays the same. The host looks at each of its tokens.
    """

    kind = kinds.SMALL_MODEL
    needs = frozenset({MEMORY, FRAME, LOGITS})
    capturable = False

    def __init__(self, model: Target, target: Target, method: Method) -> None:
        self.model = model
        self._target, self._method = target, method
        self._shift = model.action_tokens.first - target.action_tokens.first
        is_alike = self._shift == 0 and model.num_tokens == target.num_tokens
        whole = method.whole_vocabulary and is_alike
        self._drafted: TokenRange = model.vocabulary if whole else model.action_tokens
        self._lookup = NgramLookup()
        self._cache = model.new_cache()
        # What has begun and is not yet read.
        self._waiting: list[tuple[Batch, Prompts | None]] = []
        # Asked along with an earlier pass: [row, step], and log-probabilities [row, step, token].
        self._guessed, self._ahead = torch.zeros(0, 0), torch.zeros(0, 0, 0)

    def allocate(self, batch: Batch) -> None:
        """Nothing is left to be read."""
        self._waiting = []
        if batch.longest > 0:
            self._cache.fix(batch.capacity, batch.longest + batch.positions + 2 * MOST_GROWN)
            self.model.record(self._cache, MOST_GROWN)

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Remember the prompts; they are read together with the first committed tokens."""
        if prompts.for_draft is not None:
            prompts = prompts.for_draft()
        prompts = with_fewer_patches(prompts, self._method.patch_share)
        kept = [
            (part, others)
            for part, others in self._waiting
            if part is not batch and not all(row is None or row.is_done for row in part.rows)
        ]
        self._waiting = [*kept, (batch, replace(prompts, keep_hidden=False))]

    def draft(self, batch: Batch, limits: DraftLimits) -> DraftTree:
        """Draft behind the roots."""
        assert batch.last is not None
        shape = limits.shape.cut(limits.depth).with_most_open(limits.widest)
        log_probs = self._read_committed(batch, batch.last, limits.roots, shape)
        tree = DraftTree.root_only(limits.roots)
        first = 0  # where the nodes that were open last begin

        def extend(level: Level) -> Tensor:
            nonlocal tree, first
            tree, first = _with_level(tree, first + level.above, level.tokens), tree.num_nodes
            found = self._lookahead(level, ~batch.is_open)
            if found is not None:
                return found
            wanted = torch.arange(first, tree.num_nodes, device=level.tokens.device)
            guessed = self._guess(batch, shape, tree.tokens)
            return self._ask(tree, wanted.expand_as(level.tokens), guessed)

        token, vocabulary = self._drafted.first - self._shift, self._target.vocabulary
        start = token - vocabulary.first
        drafted = slice(start, start + len(self._drafted))
        draw = drawing(self._method, batch, drafted, len(vocabulary))
        return self.grow(batch, limits.roots, shape, log_probs, extend, token, draw)

    def _read_committed(self, batch: Batch, last: Pass, roots: Tensor, shape: TreeShape) -> Tensor:
        """Let the model read what the target has committed; its log-probabilities at the roots."""
        num_rows, end = batch.num_rows, last.num + 1
        chain = torch.cat((last.tree.tokens[:, :1], last.tokens), dim=1)
        kept = end * batch.is_open
        guessed = self._guess(batch, shape, roots[:, None])
        waiting, self._waiting = self._waiting, []
        new = {slot for part, _ in waiting for slot in range(part.slots.start, part.slots.stop)}
        if any(row is not None and slot not in new for slot, row in enumerate(batch.rows)):
            waiting = [(batch, None), *waiting]
        if [part.slots for part, _ in waiting] != [slice(0, num_rows)]:
            guessed = guessed[:, :0]  # a guess is asked of all rows in one pass, or of none
        found = chain.new_zeros(num_rows, len(self._drafted), dtype=torch.float32)
        for part, prompts in waiting:
            # Rows of the part that have ended meanwhile may lie behind the batch.
            columns = (chain, end, kept, guessed)
            tokens, ends, keeps, guesses = (_of_rows(one, part.slots) for one in columns)
            tree = DraftTree.chain(tokens)
            read = self._ask(tree, ends[:, None], guesses, part.first, prompts)
            self._cache.keep(tree.depths(), keeps, in_place=True, first=part.first)
            found[part.slots] = read[: max(num_rows - part.first, 0), 0]
        return found

    def _ask(
        self,
        tree: DraftTree,
        wanted: Tensor,
        guessed: Tensor,
        first_row: int = 0,
        prompts: Prompts | None = None,
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
        if prompts is None:
            scores = self.model.score(self._cache, tree)
        else:
            longest = prompts.embeds.shape[1] + tree.num_nodes + MOST_GROWN
            self._cache.reserve(first_row + len(wanted), longest)
            scores = self.model.prefill(self._cache, first_row, prompts, tree)[0]
        columns = self._drafted.within(self.model.vocabulary)
        odds = scores.logits[:, :, columns].log_softmax(dim=2)
        self._guessed, self._ahead = guessed, odds[:, num_nodes:]
        return take_rows(odds, wanted)

    def _lookahead(self, level: Level, is_done: Tensor) -> Tensor | None:
        """What was asked along with an earlier pass, if every row goes on as guessed."""
        guessed, ahead = self._guessed, self._ahead
        if guessed.shape[1] == 0:
            return None
        if not bool(((guessed[:, 0] == level.tokens[:, 0]) | is_done).all()):
            return None
        self._guessed, self._ahead = guessed[:, 1:], ahead[:, 1:]
        return ahead[:, :1]

    def _guess(self, batch: Batch, shape: TreeShape, chain: Tensor) -> Tensor:
        """How n-grams continue a chain [row, node] from the roots: what is still asked of it."""
        if not self._method.multi_level or shape.top_k > 1:
            return chain[:, :0]
        drafted = chain[:, 1:]
        end = batch.places
        steps = torch.arange(shape.levels - 1, device=chain.device)
        places = (batch.count[:, None] + steps).clamp(max=end)
        behind = drafted.shape[1]
        tokens = batch.tokens[:, : end + 1].scatter(1, places[:, :behind], drafted)
        known = (batch.count + behind).clamp(max=end - 1)
        guessed, is_known = self._lookup.look_up(batch, tokens, known)
        every = torch.where(is_known, guessed, -1)[:, 0]
        return every.gather(1, places[:, behind:].clamp(max=end - 1))


def _of_rows(values: Tensor, here: slice) -> Tensor:
    """Those rows of [row, ...], blank ones where there are none."""
    missing = here.stop - len(values)
    if missing > 0:
        values = functional.pad(values, (*(0, 0) * (values.dim() - 1), 0, missing))
    return values[here]


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
