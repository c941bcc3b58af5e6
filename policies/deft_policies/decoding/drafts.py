"""Draft sources: what they are given and return, and how their guesses become one tree.

A source is one class. It `begin`s with rows that join a batch and `draft`s before every pass. Some
name the tokens to come from what is remembered or seen: `Chains`, known before the target has said
anything, so that they can ride behind the prompt. Others grow a tree from what the target computed.
Neither knows which rule will judge its guesses.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from deft_policies.decoding.batch import Batch
from deft_policies.decoding.plan import DraftKind, TreeShape, source_number
from deft_policies.decoding.retrieval import RetrievalIndex, frame_keys
from deft_policies.decoding.target import Prompts
from deft_policies.decoding.tree import DraftTree, TokenRange

MEMORY, FRAME, PREDICTIONS = "memory", "frame", "predictions"
HIDDEN, LOGITS = "hidden", "logits"


@dataclass(frozen=True)
class Chains:
    """Guessed tokens behind the roots, a chain after the other. One stops at its first unknown."""

    tokens: Tensor  # [row, chain, step] int64; step 0 comes right after the root
    is_known: Tensor  # [row, chain, step] bool


@dataclass(frozen=True)
class Room:
    """How large a tree may be."""

    roots: Tensor  # [row], the last committed tokens
    shape: TreeShape  # of what is grown
    depth: int  # steps that are of use to some row: an answer's last token needs no guess
    widest: int  # nodes, the root included


class DraftSource(ABC):
    """One source of guesses, for one batch.

    `kind` is its name. `needs` says what it reads: the session's "memory", the "frame" (what the
    prompts hold), on the host the last tree's "predictions" (`Row.drafted`, `Row.predictions`), the
    target's "hidden" states or its "logits" (also `Batch.last.predictions`). One that needs neither
    of the last two may ride behind the prompt. A `capturable` one reads nothing
    but tensors and keeps what changes in tensors that stay where they are, so that what it does
    between passes can be recorded and replayed without it. It is asked where `least_steps` past
    actions are known.
    """

    kind: str
    needs: frozenset[str]
    capturable: bool
    least_steps = 0

    def allocate(self, batch: Batch) -> None:  # noqa: B027 - some keep nothing
        """Set aside what it keeps of every row of a new batch, and forget the one before."""

    def begin(  # noqa: B027 - some keep nothing
        self, batch: Batch, prompts: Prompts, hidden: Tensor | None
    ) -> None:
        """Start with the rows of `batch`, which have just joined: from `batch.first` on.

        `hidden` [row, position, width] is what the prefill computed of the prompts; None for a
        source that needs none, which is asked before it.
        """

    @abstractmethod
    def draft(self, batch: Batch, room: Room) -> Chains | DraftTree:
        """Guess what follows the roots of every row: `batch.last.bonus`, or the prompts' ends."""


def merge(
    found: Sequence[tuple[str, Chains | DraftTree]], roots: Tensor, room: Room, trims: bool
) -> DraftTree:
    """One tree of all guesses: trees side by side, then chains, which share what starts alike.

    `trims` drops what is padding in every row, which means looking at the tensor.
    """
    trees = [one for _, one in found if isinstance(one, DraftTree)]
    chains = [(kind, one) for kind, one in found if isinstance(one, Chains)]
    if chains and room.depth > 0:
        guessed = _tree_of(chains, roots, room.depth)
        if trims:
            guessed = _trimmed(guessed)
        guessed = _cut(guessed, room.widest)
        if guessed.num_nodes > 1 or not trees:
            trees.append(guessed)
    if not trees:
        return DraftTree.root_only(roots)
    return _cut(DraftTree.side_by_side(trees), room.widest)


def _tree_of(chains: Sequence[tuple[str, Chains]], roots: Tensor, depth: int) -> DraftTree:
    parts = [_fitted(one, depth) for _, one in chains]
    tokens = torch.cat([one.tokens for one in parts], dim=1)
    known = torch.cat([one.is_known for one in parts], dim=1).cummin(dim=2).values
    num_rows, num_chains, depth = tokens.shape
    # Filled on the device: a list would have to be copied there, which makes the host wait.
    sources = torch.cat(
        [
            tokens.new_full((one.tokens.shape[1] * depth,), source_number(kind))
            for (kind, _), one in zip(chains, parts, strict=True)
        ]
    )
    if num_chains == 1:
        parents, is_real = torch.arange(depth, device=tokens.device).expand(num_rows, -1), known
    else:
        parents, is_real = _share_prefixes(tokens, known)
    return DraftTree(
        tokens=tokens.flatten(1),
        parents=parents,
        is_real=is_real.flatten(1),
        log_probs=torch.zeros_like(parents, dtype=torch.float32),
        sources=sources.expand_as(parents),
        is_chain=num_chains == 1,
    ).below(roots)


def _fitted(chains: Chains, depth: int) -> Chains:
    missing = depth - chains.tokens.shape[2]
    if missing == 0:
        return chains
    more = (0, missing)
    return Chains(functional.pad(chains.tokens, more), functional.pad(chains.is_known, more))


def _share_prefixes(tokens: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
    """Parents [row, guess] and reality [row, chain, step] of chains merged into a prefix tree.

    The first of chains that start alike keeps the node and the others' copies become padding, so
    the shape depends on nothing but the number of chains and the depth.
    """
    depth = tokens.shape[2]
    both = known.unsqueeze(2) & known.unsqueeze(1)
    alike = (tokens.unsqueeze(2) == tokens.unsqueeze(1)) & both
    alike = alike.cummin(dim=3).values  # [row, chain, other, step]: equal up to this step
    first = alike.int().argmax(dim=2)  # the first chain with this prefix, [row, chain, step]
    chains = torch.arange(tokens.shape[1], device=tokens.device)[:, None]
    steps = torch.arange(depth, device=tokens.device)
    is_real = known & (first == chains)
    above = 1 + first[:, :, :-1] * depth + steps[:-1]
    parents = torch.cat((torch.zeros_like(first[:, :, :1]), above), dim=2).flatten(1)
    return torch.where(is_real.flatten(1), parents, 0), is_real


def _trimmed(tree: DraftTree) -> DraftTree:
    kept = tree.is_real.any(dim=0)
    return tree if bool(kept.all()) else tree.select(kept.nonzero().flatten())


def _cut(tree: DraftTree, widest: int) -> DraftTree:
    """Drop what there is no room for: the last nodes, on which no earlier one hangs."""
    if tree.num_nodes <= widest:
        return tree
    return tree.select(torch.arange(widest, device=tree.tokens.device))


def from_here(batch: Batch, tokens: Tensor, known: Tensor, room: Room) -> Chains:
    """Guesses of whole actions [row, chain, place], from the next token on.

    Nothing is known where an answer is not an action, nor behind the last token that needs a guess.
    """
    depth, length = room.depth, tokens.shape[2]
    steps = torch.arange(depth, device=tokens.device)
    places = batch.count[:, None] + steps
    is_open = (places < (batch.limit - 1).clamp(max=length)[:, None])[:, None, :]
    index = places.clamp(max=length - 1)[:, None, :].expand(-1, tokens.shape[1], -1)
    return Chains(tokens.gather(2, index), known.gather(2, index) & is_open)


class PreviousAction(DraftSource):
    """The action will be the target's own last one."""

    kind = DraftKind.PREVIOUS
    needs = frozenset({MEMORY})
    capturable = True
    least_steps = 1

    def draft(self, batch: Batch, room: Room) -> Chains:
        """Repeat the newest step."""
        tokens = batch.past[:, -1:]
        return from_here(batch, tokens, _with_steps(batch, 1).expand_as(tokens), room)


def _with_steps(batch: Batch, num_steps: int) -> Tensor:
    """Rows that remember so many actions, [row, 1, 1]."""
    return (batch.num_past >= num_steps)[:, None, None]


class Extrapolation(DraftSource):
    """The action will continue the straight line through the last two: a + (a - b), in bins.

    Guesses stay inside the action tokens; a session with fewer steps gets none.
    """

    kind = DraftKind.EXTRAPOLATION
    needs = frozenset({MEMORY})
    capturable = True
    least_steps = 2

    def __init__(self, action_tokens: TokenRange) -> None:
        self._tokens = action_tokens

    def draft(self, batch: Batch, room: Room) -> Chains:
        """Evaluate the line one step ahead."""
        before, newest = batch.past[:, -2:-1], batch.past[:, -1:]
        tokens = (2 * newest - before).clamp(self._tokens.first, self._tokens.last)
        # A position that held something else than a bin is not on any line: repeat it.
        is_bin = self._tokens.contains(before) & self._tokens.contains(newest)
        tokens = torch.where(is_bin, tokens, newest)
        return from_here(batch, tokens, _with_steps(batch, 2).expand_as(tokens), room)


class NgramLookup(DraftSource):
    """The action will go on as it did when the same tokens came before (prompt-lookup decoding).

    The session's own answers are one long sequence. The last three tokens (fewer if those never
    occurred) are looked up at the same phase of an earlier action, newest first, and what followed
    them there is the guess. Tokens of different positions are never mixed.
    """

    kind = DraftKind.NGRAM
    needs = frozenset({MEMORY})
    capturable = True
    least_steps = 1
    _longest = 3
    _steps = 16  # how far it looks back

    def draft(self, batch: Batch, room: Room) -> Chains:
        """Compare the tail of the sequence with every earlier action at the same phase."""
        return from_here(batch, *self.look_up(batch, batch.tokens, batch.count), room)

    def look_up(self, batch: Batch, committed: Tensor, count: Tensor) -> tuple[Tensor, Tensor]:
        """Whole actions [row, 1, place] and what is known of them, given the first `count`."""
        own = batch.past[:, -self._steps :]
        num_rows, num_steps, length = own.shape
        lengths = batch.limit.clamp(max=length)  # rows may have shorter actions than there is room
        stream = torch.cat((own.flatten(1), committed[:, :length]), dim=1)
        end = num_steps * length + count  # where the next token goes, [row]
        steps = torch.arange(num_steps, device=end.device)
        back = torch.arange(1, self._longest + 1, device=end.device)
        # ends[row, step]: the same phase in an earlier action; places[row, step, n]: n before it.
        ends = steps * length + count[:, None]
        gap = length - lengths  # skipped where the tail reaches into the action before
        reach = (back > count[:, None]) * gap[:, None]
        places = ends[:, :, None] - back - reach[:, None, :]
        last = stream.shape[1] - 1  # a text goes on behind the places of an action
        tail = stream.gather(1, (end[:, None] - back - reach).clamp(0, last))
        flat = places.clamp(0, last).flatten(1)
        earlier = stream.gather(1, flat).view(num_rows, num_steps, self._longest)
        first_known = ((num_steps - batch.num_past).clamp(min=0) * length)[:, None]
        same = (earlier == tail[:, None]) & (places >= first_known[:, :, None])
        matched = same.long().cummin(dim=2).values.sum(dim=2)  # tokens matched, [row, step]
        # The longest match wins, then the newest.
        score = (matched * num_steps + steps + 1) * ((ends >= first_known) & (matched > 0))
        best = score.argmax(dim=1)
        tokens = own[torch.arange(num_rows, device=end.device), best][:, None]
        is_known = (score.amax(dim=1) > 0) & (count < lengths)
        return tokens, is_known[:, None, None].expand_as(tokens)


class Recycled(DraftSource):
    """After a mismatch the target has already said what it thinks comes next (Jacobi iteration).

    Its predictions along the rejected rest of the best chain were made after one wrong token; they
    are often right all the same, and they cost nothing.
    """

    kind = DraftKind.RECYCLED
    needs = frozenset({LOGITS})
    capturable = True

    def draft(self, batch: Batch, room: Room) -> Chains:
        """Read the predictions below the path along its deepest real continuation."""
        last = batch.last
        assert last is not None
        tree, rows = last.tree, torch.arange(batch.num_rows, device=batch.device)
        ancestors, depths = tree.ancestor_mask(), tree.depths()
        end = last.path.gather(1, last.num[:, None]).squeeze(1)
        below = ancestors[rows, :, end] & tree.is_real  # nodes at or below the path's end
        leaf = depths.masked_fill(~below, -1).argmax(dim=1)
        on_path = ancestors[rows, leaf] & below  # from the path's end to the leaf
        # The prediction at the path's end is the root; one at depth d below it is guess d - 1.
        steps = depths - last.num[:, None] - 1
        is_guess = on_path & (steps >= 0) & (steps < room.depth)
        is_guess &= batch.count[:, None] + steps < batch.limit[:, None] - 1
        steps = steps.masked_fill(~is_guess, room.depth)
        tokens = torch.zeros(batch.num_rows, room.depth + 1, dtype=torch.int64, device=batch.device)
        known = torch.zeros_like(tokens, dtype=torch.bool).scatter(1, steps, is_guess)
        tokens = tokens.scatter(1, steps, last.predictions)
        here = slice(room.depth)
        return Chains(tokens[:, None, here], known[:, None, here])


class Retrieval(DraftSource):
    """The action will be the one stored with the most similar frame."""

    kind = DraftKind.RETRIEVAL
    needs = frozenset({FRAME})
    capturable = True

    def __init__(self, index: RetrievalIndex) -> None:
        self._index = index
        self._actions = self._is_known = torch.zeros(0)  # [row, 1, place]

    def allocate(self, batch: Batch) -> None:
        """An action for every row."""
        shape = (batch.capacity, 1, self._index.actions.shape[1])
        with torch.inference_mode(False):
            self._actions = torch.zeros(shape, dtype=torch.int64, device=batch.device)
            self._is_known = torch.zeros(shape, dtype=torch.bool, device=batch.device)

    def begin(self, batch: Batch, prompts: Prompts, hidden: Tensor | None) -> None:
        """Look the frames up."""
        for row in batch.rows:
            if row is not None and row.form.is_action:
                self._index.check_length((row.form.max_tokens,))
        here = slice(batch.first, batch.first + batch.num_rows)
        self._is_known[here] = prompts.features is not None
        if prompts.features is not None:
            self._actions[here] = self._index.nearest(frame_keys(prompts), 1)

    def draft(self, batch: Batch, room: Room) -> Chains:
        """What was found when the rows began."""
        here = slice(batch.first, batch.first + batch.num_rows)
        return from_here(batch, self._actions[here], self._is_known[here], room)
