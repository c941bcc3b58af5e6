"""Draft sources that grow trees from what the target computed, or from a model of their own."""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.batch import Batch, Pass
from deft_policies.decoding.drafts import (
    FRAME,
    HIDDEN,
    LOGITS,
    MEMORY,
    DraftSource,
    NgramLookup,
    Room,
)
from deft_policies.decoding.growth import (
    GoOn,
    GrowthStart,
    OpenNodes,
    draw_tree,
    grow_tree,
)
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import (
    MOST_BRANCHES,
    MOST_GROWN,
    MOST_LEVELS,
    DraftKind,
    KeyMask,
    RopeOffset,
    TreeShape,
)
from deft_policies.decoding.target import Prompts, Target
from deft_policies.decoding.tree import DraftTree, TokenRange
from deft_policies.model.draft_heads import EagleHead, MedusaHeads
from deft_policies.model.kv_cache import KVCache
from deft_policies.model.llama import take_rows

_LARGEST = MOST_LEVELS * MOST_BRANCHES  # nodes that a tree is ever grown behind


def _grow(
    method: Method, batch: Batch, shape: TreeShape, start: GrowthStart, go_on: GoOn
) -> DraftTree:
    """A tree of the likeliest tokens, or a drawn one for the ratio test."""
    if not method.draws_drafts:
        return grow_tree(shape, start, go_on)
    template = shape.as_template()
    return draw_tree(template, start, go_on, method.sampling, batch.keys, batch.count)


def _deepest(batch: Batch, shape: TreeShape) -> Tensor:
    """Levels that are of use, [row]."""
    if shape.is_full_depth:
        return torch.full_like(batch.count, shape.levels)
    return batch.limit - 1 - batch.count


class HeadDrafts(DraftSource):
    """A tree from an EAGLE-style head, which keeps the keys of committed positions.

    Its cache holds committed positions first and the nodes of the tree in flight behind them, at
    slots that are the same in every row.
    """

    kind = DraftKind.HEAD
    needs = frozenset({HIDDEN})
    capturable = True

    def __init__(
        self,
        head: EagleHead,
        target: Target,
        method: Method,
        rope_offset: RopeOffset = RopeOffset.CORRECT,
        key_mask: KeyMask = KeyMask.CAUSAL,
    ) -> None:
        self.head = head
        self._target, self._method = target, method
        self._rope_offset, self._key_mask = rope_offset, key_mask
        whole = method.whole_vocabulary
        self._drafted: TokenRange = target.vocabulary if whole else target.action_tokens
        self._cache = KVCache(head.sizes, head.fc.weight)
        # [row] each: positions of the prompt, and 0 in the first round and 1 later.
        self._prompt = self._has_grown = torch.zeros(0, dtype=torch.int64)
        self._num_patches = 0
        self._room = 0  # slots of committed positions; those of a tree lie behind

    def allocate(self, batch: Batch) -> None:
        """Two counters for every row; keys have their room when rows begin."""
        with torch.inference_mode(False):
            blank = torch.zeros(2, batch.capacity, dtype=torch.int64, device=batch.device)
        self._prompt, self._has_grown = blank
        if batch.longest > 0:
            self._room = batch.longest + batch.positions
            self._cache.fix(batch.capacity, self._room + _LARGEST)

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Take in the prompts: the pairs of all their positions but the last."""
        assert hidden is not None
        num_rows, num_positions = prompts.embeds.shape[:2]
        here = slice(batch.first, batch.first + num_rows)
        reach = num_positions + max(row.limit for row in batch.rows if row is not None)
        alone = sum(one is not None for one in batch.all_rows) == num_rows
        if not self._cache.is_fixed:
            self._room = max(reach, 0 if alone else self._room)
            self._cache.reserve(batch.capacity, self._room + _LARGEST)
        self._num_patches = prompts.patches.stop - prompts.patches.start
        torch.sub(prompts.lengths, 1, out=self._cache.length[here])
        self._prompt[here] = prompts.lengths
        self._has_grown[here] = 0
        embeds, hidden = prompts.embeds[:, 1:], hidden[:, :-1]
        positions = torch.arange(num_positions - 1, device=embeds.device).expand(num_rows, -1)
        window = self._cache.open(
            num_rows, num_positions - 1, read=num_positions, first_row=batch.first
        )
        self.head.read(embeds, hidden, self.head.attend(hidden, positions, window=window))

    def draft(self, batch: Batch, room: Room) -> DraftTree:
        """Draft behind the roots."""
        assert batch.last is not None
        n, shape = batch.num_rows, room.shape
        out = self._append(batch.last, batch.is_open)
        length = self._cache.length[:n]
        seen = self._last_seen(n, length - 1)
        position = length
        if self._rope_offset is RopeOffset.PUBLISHED:
            position = (length - self._num_patches) * self._has_grown[:n]
        first = self._log_probs(out)
        if self._method.draws_drafts:
            shape = TreeShape.of_template(shape.as_template())
        shape = shape.cut(room.depth)
        deepest = _deepest(batch, shape)
        start = GrowthStart(self.kind, room.roots, first, deepest, self._drafted.first)
        go_on = self._go_on(out, position, seen)
        tree = _grow(self._method, batch, shape, start, go_on)
        self._has_grown[:n] = 1
        return tree

    def _append(self, last: Pass, is_open: Tensor) -> Tensor:
        """The head's output at the last of the pass's pairs, [row, width].

        Position t pairs the hidden state of the t-th token with the embedding of the one after it,
        so a pass adds a pair for every node of its path, the bonus being the last "one after".
        """
        hidden, kept = last.hidden, last.num
        assert hidden is not None
        num_rows, num_steps, _ = hidden.shape
        start = self._cache.length[:num_rows]
        positions = start[:, None] + torch.arange(num_steps, device=hidden.device)
        mask = self._visible(self._last_seen(num_rows, start + kept)[:, None])[:, None]
        window = self._cache.open(num_rows, num_steps, read=self._room, slots=positions)
        attention = self.head.attend(hidden, positions, mask, window).of_rows_out(kept[:, None])
        out = self.head.run(self._target.embed(last.tokens), hidden, attention)
        start.add_((kept + 1) * is_open)
        return out[:, 0]

    def _last_seen(self, num_rows: int, position: Tensor) -> Tensor:
        """The last committed slot that a query at a position sees, [row]."""
        if self._key_mask is KeyMask.CAUSAL:
            return position
        return self._prompt[:num_rows] - 2

    def _visible(self, last: Tensor) -> Tensor:
        """Slots up to the `last` [row, query] of every query, [row, query, slot]."""
        return torch.arange(self._room, device=last.device) <= last[:, :, None]

    def _go_on(self, out: Tensor, position: Tensor, seen: Tensor) -> GoOn:
        hidden = out[:, None]  # of the nodes that were open last

        def go_on(nodes: OpenNodes) -> Tensor:
            nonlocal hidden
            hidden = self._extend(nodes, take_rows(hidden, nodes.above), position, seen)
            return self._log_probs(hidden)

        return go_on

    def _extend(self, nodes: OpenNodes, hidden: Tensor, position: Tensor, seen: Tensor) -> Tensor:
        """The head's output at nodes, [row, node, width]; `hidden` is that at their parents."""
        ancestors = nodes.ancestors
        num_rows, width = nodes.tokens.shape
        slot = self._room + ancestors.shape[2] - width
        committed = self._visible(seen[:, None]).expand(-1, width, -1)
        if self._key_mask is KeyMask.PREFIX_ONLY:
            ancestors = torch.zeros_like(ancestors)
        positions = (position + nodes.depth - 1)[:, None].expand(-1, width)
        mask = torch.cat((committed, ancestors), dim=2)[:, None]
        window = self._cache.open(num_rows, width, read=slot + width, start=slot)
        attention = self.head.attend(hidden, positions, mask, window)
        return self.head.run(self._target.embed(nodes.tokens), hidden, attention)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        return self._target.logits(hidden, self._drafted).log_softmax(dim=-1)


class MedusaDrafts(DraftSource):
    """A tree from parallel heads, whose scores depend on the depth alone."""

    kind = DraftKind.MEDUSA
    needs = frozenset({HIDDEN})
    capturable = True

    def __init__(self, heads: MedusaHeads, target: Target) -> None:
        self._heads, self._target = heads, target

    def draft(self, batch: Batch, room: Room) -> DraftTree:
        """Branch as EAGLE-2 does."""
        last = batch.last
        assert last is not None
        assert last.hidden is not None
        seen = take_rows(last.hidden, last.num[:, None])[:, 0]  # it has predicted the root
        num_heads, shape = self._heads.num_heads, room.shape
        # There are no more levels than heads, even where the shape is of full depth.
        depth = num_heads if shape.is_full_depth else min(num_heads, room.depth)
        shape = replace(shape, is_full_depth=False).cut(depth)
        drafted = self._target.action_tokens
        ahead = self._target.logits(self._heads(seen)[:, : shape.levels], drafted)
        ahead = ahead.log_softmax(dim=-1)

        def go_on(nodes: OpenNodes) -> Tensor:
            return ahead[:, nodes.depth, None].expand(-1, nodes.tokens.shape[1], -1)

        deepest = batch.limit - 1 - batch.count
        start = GrowthStart(self.kind, room.roots, ahead[:, 0], deepest, drafted.first)
        return grow_tree(shape, start, go_on)


_NEVER_SEEN = -100.0


class TokenRecycling(DraftSource):
    """A tree read off a table: what the target last said after a token is how that token goes on.

    The table [row, token, next token] holds log-probabilities, of action tokens alone, candidates
    that were rejected included (Luo et al. 2025). It starts from the session's actions and ends
    with the answer, so that the same session drafts the same again on any machine. What followed a
    token in the session stands in it as if it had been said with certainty, less one for every step
    that has passed since.
    """

    kind = DraftKind.TOKEN_RECYCLING
    needs = frozenset({MEMORY, LOGITS})
    capturable = True
    _steps = 16

    def __init__(self, target: Target) -> None:
        self._tokens = target.action_tokens
        self._table = torch.zeros(0)

    def allocate(self, batch: Batch) -> None:
        """A table for every row."""
        size = len(self._tokens)
        with torch.inference_mode(False):
            self._table = torch.zeros(batch.capacity, size, size, device=batch.device)

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Fill the table from what the session's target answered."""
        here = slice(batch.first, batch.first + batch.num_rows)
        self._table[here] = self._remembered(batch)

    def draft(self, batch: Batch, room: Room) -> DraftTree:
        """Take the answers of the last pass in, and read a tree off the table."""
        assert batch.last is not None
        table = self._table[: batch.num_rows]
        table.copy_(self._with_answers(table, batch.last))
        rows = torch.arange(len(table), device=table.device)[:, None]

        def after(tokens: Tensor) -> Tensor:
            return table[rows, (tokens - self._tokens.first).clamp(0, len(self._tokens) - 1)]

        first, deepest = after(room.roots[:, None])[:, 0], _deepest(batch, room.shape)
        start = GrowthStart(self.kind, room.roots, first, deepest, self._tokens.first)
        return grow_tree(room.shape.cut(room.depth), start, lambda nodes: after(nodes.tokens))

    def _remembered(self, batch: Batch) -> Tensor:
        """The newest of what followed a token in any step counts most."""
        own = batch.past[:, -self._steps :]
        num_rows, num_steps, length = own.shape
        size = len(self._tokens)
        steps = torch.arange(num_steps, device=own.device)
        age = (num_steps - 1 - steps)[None, :, None].expand(num_rows, -1, length - 1)
        before, behind = (one - self._tokens.first for one in (own[:, :, :-1], own[:, :, 1:]))
        is_known = (age < batch.num_past[:, None, None]) & (before >= 0) & (before < size)
        is_known = is_known & (behind >= 0) & (behind < size)
        places = torch.where(is_known, before * size + behind, 0)
        scores = torch.where(is_known, -age.float(), _NEVER_SEEN)
        table = scores.new_full((num_rows, size * size), _NEVER_SEEN)
        table = table.scatter_reduce(1, places.flatten(1), scores.flatten(1), "amax")
        return table.view(num_rows, size, size)

    def _with_answers(self, table: Tensor, last: Pass) -> Tensor:
        """What a pass says after a token replaces what was known of it; the larger of two."""
        assert last.logits is not None
        said = last.logits.log_softmax(dim=2)
        tokens = last.tree.tokens - self._tokens.first
        is_told = last.tree.is_real & (tokens >= 0) & (tokens < len(self._tokens))
        # What is no action token is written to a row behind the table.
        places = torch.where(is_told, tokens, len(self._tokens))[:, :, None].expand_as(said)
        fresh = said.new_full((len(said), len(self._tokens) + 1, said.shape[2]), -torch.inf)
        fresh = fresh.scatter_reduce(1, places, said, "amax")[:, :-1]
        return torch.where(fresh > -torch.inf, fresh, table)


class SmallModelDrafts(DraftSource):
    """Chains or trees of a cheaper model, with a cache and perhaps a vocabulary of its own.

    An action token of the target is the model's token of the same bin. The model is asked for
    larger and larger trees and keeps none of them: what it keeps is what the target has committed,
    all but the root, one round later.

    With `multi_level` (FLy's acceleration) a chain is drafted by speculation too: what
    followed the same tokens earlier in the session rides behind it, and where the model says the
    same, its next answer is there without a pass. The chain stays the same; the host looks at each
    of its tokens.
    """

    kind = DraftKind.SMALL_MODEL
    needs = frozenset({MEMORY, FRAME, LOGITS})
    capturable = False

    def __init__(self, model: Target, target: Target, method: Method) -> None:
        self.model = model
        self._method = method
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
        self._waiting = [
            one for one in self._waiting if one[0] is not batch and not _has_ended(one[0])
        ]
        self._waiting.append((batch, replace(prompts, keep_hidden=False)))

    def draft(self, batch: Batch, room: Room) -> DraftTree:
        """Draft behind the roots."""
        assert batch.last is not None
        shape = room.shape.cut(room.depth).grown_through(room.widest)
        first = self._take_in(batch, batch.last, room, shape)
        deepest = _deepest(batch, room.shape)
        drafted = self._drafted.first - self._shift
        start = GrowthStart(self.kind, room.roots, first, deepest, drafted)
        return _grow(self._method, batch, shape, start, self._go_on(batch, room, shape))

    def _take_in(self, batch: Batch, last: Pass, room: Room, shape: TreeShape) -> Tensor:
        """Let the model read what the target has committed; its log-probabilities at the roots."""
        num_rows, end = batch.num_rows, last.num + 1
        chain = torch.cat((last.tree.tokens[:, :1], last.tokens), dim=1)
        kept = end * batch.is_open
        guessed = self._guess(batch, room, shape, room.roots[:, None])
        waiting, self._waiting = self._waiting, []
        is_old = torch.tensor([row is not None for row in batch.rows])
        for part, _ in waiting:
            is_old[part.first : part.first + part.num_rows] = False
        if bool(is_old.any()):
            waiting = [(batch, None), *waiting]
        is_one_pass = [(part.first, part.num_rows) for part, _ in waiting] == [(0, num_rows)]
        if not is_one_pass:  # a guess is asked of all rows in one pass, or of none
            guessed = guessed[:, :0]
        found = chain.new_zeros(num_rows, len(self._drafted), dtype=torch.float32)
        for part, prompts in waiting:
            # Rows of the part that have ended meanwhile may lie behind the batch.
            here = slice(part.first, part.first + part.num_rows)
            tokens, ends, keeps, guesses = (
                _of_rows(one, here) for one in (chain, end, kept, guessed)
            )
            tree = DraftTree.chain(tokens)
            read = self._ask(tree, ends[:, None], guesses, part.first, prompts)
            self._cache.keep(tree.depths(), keeps, in_place=True, first=part.first)
            found[here] = read[: max(num_rows - part.first, 0), 0]
        return found

    def _go_on(self, batch: Batch, room: Room, shape: TreeShape) -> GoOn:
        assert batch.last is not None
        tree = DraftTree.root_only(room.roots)
        level = 0  # where the nodes that were open last begin

        def go_on(nodes: OpenNodes) -> Tensor:
            nonlocal tree, level
            tree, level = _with_level(tree, level + nodes.above, nodes.tokens), tree.num_nodes
            foreseen = self._foresaw(nodes, ~batch.is_open)
            if foreseen is not None:
                return foreseen
            wanted = torch.arange(level, tree.num_nodes, device=nodes.tokens.device)
            guessed = self._guess(batch, room, shape, tree.tokens)
            return self._ask(tree, wanted.expand_as(nodes.tokens), guessed)

        return go_on

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

    def _foresaw(self, nodes: OpenNodes, is_done: Tensor) -> Tensor | None:
        """What was asked along with an earlier pass, if every row goes on as guessed."""
        guessed, ahead = self._guessed, self._ahead
        if guessed.shape[1] == 0:
            return None
        if not bool(((guessed[:, 0] == nodes.tokens[:, 0]) | is_done).all()):
            return None
        self._guessed, self._ahead = guessed[:, 1:], ahead[:, 1:]
        return ahead[:, :1]

    def _guess(self, batch: Batch, room: Room, shape: TreeShape, chain: Tensor) -> Tensor:
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


def _has_ended(batch: Batch) -> bool:
    """Whether no row is on its way any more."""
    return all(row is None or row.is_done for row in batch.rows)


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
