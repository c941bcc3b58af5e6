"""Standard speculative decoding (Leviathan et al. 2023): a cheaper model drafts."""

from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deft_policies.decoding import kinds
from deft_policies.decoding.drafts import Guesses, ModelSource, look_up
from deft_policies.decoding.drafts.growth import Level, drawing, grow, read_grown
from deft_policies.decoding.methods import Method
from deft_policies.decoding.plan import MOST_GROWN, TreeShape
from deft_policies.decoding.sequence import Sequence
from deft_policies.decoding.target import PassRow, Prompt, Target
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.sizes import TokenRange

_LONGEST_MATCH, _STEPS = 3, 16  # of n-grams of the session


@dataclass
class _Read:
    """What the model knows of one answer."""

    prompt: Prompt | None  # until it is read
    num_prompt: int
    num_cached: int = 0  # tokens of the answer whose keys and values it has
    guessed: list[int] = field(default_factory=list)  # asked along with an earlier pass
    ahead: Tensor | None = None  # log-probabilities [step, token] behind each of those


class SmallModelDrafts(ModelSource):
    """Chains or trees of a cheaper model, with a cache and perhaps a vocabulary of its own.

    An action token of the target is the model's token of the same bin. The model is asked for
    larger and larger trees and keeps none of them: what it keeps is what the target has committed.

    With `multi_level` (FLy's acceleration) the chain itself is drafted by speculation: n-grams of
    the session guess it, and where the model predicts the same, its next token needs no pass. The
    chain stays the same.
    """

    kind = kinds.SMALL_MODEL

    def __init__(self, model: Target, target: Target) -> None:
        self.model, self._target = model, target
        self._shift = model.action_tokens.first - target.action_tokens.first
        self._cache = model.new_cache()

    def drafted(self, method: Method) -> TokenRange:
        """The model's tokens that a method has drafted."""
        is_alike = self._shift == 0 and self.model.num_tokens == self._target.num_tokens
        all_tokens = TokenRange(0, self.model.num_tokens - 1)
        return all_tokens if method.whole_vocabulary and is_alike else self.model.action_tokens

    def draft_all(self, sequences: Items[Sequence]) -> list[Guesses]:
        """Draft behind the roots, one answer after the other."""
        return [self._draft(sequence) for sequence in sequences]

    def _draft(self, sequence: Sequence) -> Guesses:
        depth = sequence.draft_depth
        shape = sequence.shape.cut(depth).with_most_open(MOST_GROWN)
        if depth <= 0:
            return []
        device, read = self.model.device, self._read_of(sequence)
        tree = self._committed(sequence, read)
        log_probs = self._ask(sequence, tree, [tree.root], shape)
        read.prompt, read.num_cached = None, len(sequence.tokens) - 1
        tree = DraftTree.of_committed(sequence.tokens[-1:])
        opened = [tree.root]  # the nodes that were open last

        def extend(level: Level) -> Tensor:
            nonlocal opened
            above = level.above[0].tolist()
            parents, opened = opened, []
            for token, parent in zip(level.tokens[0].tolist(), above, strict=True):
                opened.append(tree.num_nodes)
                tree.tokens.append(token)
                tree.parents.append(parents[parent])
                tree.is_chain = tree.is_chain and parents[parent] == tree.num_nodes - 2
            found = self._looked_ahead(sequence, tree, opened)
            return self._ask(sequence, tree, opened, shape) if found is None else found

        first = self.drafted(sequence.method).first - self._shift
        keys = torch.tensor([sequence.noise_key], device=device)
        counts = torch.tensor([sequence.count], device=device)
        draw = drawing(sequence.method, keys, counts, first, self._target.num_tokens)
        shape = shape if draw is None else shape.as_template()
        deepest = torch.tensor([depth], device=device)
        grown = grow(shape, log_probs[:, 0], extend, deepest, first, draw)
        return read_grown(grown, 1)[0]

    def _read_of(self, sequence: Sequence) -> _Read:
        """What the model knows of an answer; it sees the frame when it first drafts."""
        if self.kind not in sequence.notes:
            prompt = sequence.prompt
            assert prompt is not None
            if prompt.draft_model is not None:
                prompt = prompt.draft_model()
            prompt = with_fewer_patches(prompt, sequence.method.option("patch_share", 1.0))
            sequence.notes[self.kind] = _Read(prompt, prompt.length)
        read: _Read = sequence.notes[self.kind]
        return read

    def _committed(self, sequence: Sequence, read: _Read) -> DraftTree:
        """A chain of what the model has not read of the answer; with the prompt's end before it."""
        pending = sequence.tokens[read.num_cached :]
        if read.prompt is not None:
            pending = [read.prompt.last_token, *pending]
        return DraftTree.of_committed(pending)

    def _ask(
        self, sequence: Sequence, tree: DraftTree, open_nodes: list[int], shape: TreeShape
    ) -> Tensor:
        """Log-probabilities [1, node, token] after the wanted nodes of a tree; one pass.

        What is guessed to come behind the only wanted node is asked with it and remembered.
        """
        read: _Read = sequence.notes[self.kind]
        guessed = self._guess(sequence, tree, shape)
        extended = replace(tree, tokens=[*tree.tokens], parents=[*tree.parents])
        above = open_nodes[-1]
        for token in guessed:
            extended.is_chain = extended.is_chain and above == extended.num_nodes - 1
            extended.tokens.append(token)
            extended.parents.append(above)
            above = extended.num_nodes - 1
        last = self.model.num_tokens - 1
        extended.tokens = [min(max(token + self._shift, 0), last) for token in extended.tokens]
        start = read.num_prompt + read.num_cached - (read.prompt is not None)
        row = PassRow(sequence.slot, start, extended, sequence.number, prompt=read.prompt)
        scores = self.model.forward(self._cache, [row])
        columns = self.drafted(sequence.method).columns
        odds = scores.logits[:, columns].log_softmax(dim=1)
        read.guessed, read.ahead = guessed, odds[tree.num_nodes :]
        return odds[open_nodes][None]

    def _looked_ahead(
        self, sequence: Sequence, tree: DraftTree, opened: list[int]
    ) -> Tensor | None:
        """What was asked along with an earlier pass, if the chain goes on as guessed."""
        read: _Read = sequence.notes[self.kind]
        if not read.guessed or read.ahead is None or tree.tokens[opened[0]] != read.guessed[0]:
            return None
        chain = read.ahead[:1]
        read.guessed, read.ahead = read.guessed[1:], read.ahead[1:]
        return chain[None]

    def _guess(self, sequence: Sequence, tree: DraftTree, shape: TreeShape) -> list[int]:
        """How n-grams continue the chain so far: what is still asked of it."""
        if not sequence.method.option("multi_level", False) or shape.top_k > 1:
            return []
        drafted = tree.tokens[tree.root + 1 :]
        tokens = [*sequence.tokens, *drafted]
        chain = look_up(sequence.past[-_STEPS:], tokens, _LONGEST_MATCH) or []
        return chain[: max(shape.levels - 1 - len(drafted), 0)]


def with_fewer_patches(prompt: Prompt, share: float) -> Prompt:
    """Keep an evenly spread share of the image patches, at least one; positions close up."""
    first, stop = prompt.patches.start, prompt.patches.stop
    num_kept = max(1, round((stop - first) * share))
    if num_kept == stop - first:
        return prompt
    all_positions = torch.arange(prompt.length, device=prompt.embeds.device)
    spread = torch.linspace(first, stop - 1, num_kept, device=all_positions.device).round().long()
    kept = torch.cat((all_positions[:first], spread, all_positions[stop:]))
    return replace(prompt, embeds=prompt.embeds[kept], patches=slice(first, first + num_kept))
