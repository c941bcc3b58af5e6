"""The target model: passes of a Llama decoder over slots of a cache.

Knows tokens, positions and masks; nothing of drafts, rules, images or robots. A pass takes rows:
each names its slot, where it begins, and its tree; a prefill brings a prompt, too. How rows are
laid out is decided here, because it depends on the machine: a CPU packs tokens, a GPU replays
passes of fixed shapes (`captured`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deft_policies.decoding.captured import CapturedPasses
from deft_policies.decoding.sampling import first_maximum
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import PolicyError
from deft_policies.model.graphs import StepRunner
from deft_policies.model.kv_cache import STRIP, CacheWindow, KVCache
from deft_policies.model.llama import LlamaDecoder, added_mask, first_layers
from deft_policies.model.packed import PackedAttention, PackedRow, attend_packed
from deft_policies.model.passes import LlamaPasses
from deft_policies.model.sizes import TokenRange
from deft_policies.model.staging import keep_freed_memory, to_device

if TYPE_CHECKING:
    from deft_policies.decoding.sequence import Sequence as Answer


class Grammar(Protocol):
    """What the tokens of an answer must obey. One object for each answer, which keeps no state.

    Where `forced` names a token, `adjust` must leave no other: drafts are judged by it.
    """

    def adjust(self, logits: Tensor, answer: "Answer", tree: DraftTree) -> Tensor:
        """Logits [node, token], changed by what each node may be followed by.

        The answer up to node 0 is `answer.tokens[: answer.num_cached + 1]`; in a prefill that is
        nothing, and node 0 is the prompt's last token. Runs on the device, before the one read of a
        round, in every round: it must read nothing back. Minus infinity forbids a token.
        """

    def forced(self, tokens: Sequence[int]) -> Sequence[int]:
        """Tokens that alone can follow `tokens`, in order: committed without a pass. May be none.

        Asked before the prefill, of the empty answer, and after each pass.
        """


@dataclass(frozen=True)
class Prompt:
    """What one answer starts from, ready for the decoder."""

    embeds: Tensor  # [position, width]
    last_token: int  # the id at the last position
    # Positions of the image patches.
    patches: slice = field(default_factory=lambda: slice(0, 0))
    two_way: int = 0  # positions from the first on that see each other; no guess is seen by any
    grammar: Grammar | None = None
    # The same frame as another checkpoint, which drafts, sees it.
    draft_model: "Callable[[], Prompt] | None" = None

    @property
    def length(self) -> int:
        """Positions, patches included."""
        return int(self.embeds.shape[0])


@dataclass(frozen=True)
class PassRow:
    """What one answer brings to a pass.

    `start` is the position of node 0. In a prefill that is the prompt's last token, and the prompt
    is read from position 0 on.
    """

    slot: int
    start: int
    tree: DraftTree
    number: int  # whose it is: `Sequence.number`
    is_action: bool = True  # rather than text
    prompt: Prompt | None = None
    keeps_hidden: bool = False  # of the prompt


@dataclass
class Scores:
    """What the target computed for the nodes of a pass. The next pass may overwrite it."""

    logits: Tensor  # [node, token] float32
    hidden: Tensor  # [node, width], after the final norm
    best: Tensor  # [node], the likeliest token
    # [node, 3] float64, what the host reads in every round: the likeliest token, the sum of logits
    # (not finite where one of them is not), and whose answer it is.
    for_host: Tensor
    first: list[int]  # [row], the row's node 0
    prompts: dict[int, Tensor] = field(default_factory=dict)  # row: hidden [position, width]
    # The same with the hidden states behind the layers that are read, in front of the last ones:
    # [node, (layers + 1) * width], and of prompts. None, and empty, where no layers are read.
    states: Tensor | None = None
    prompt_states: dict[int, Tensor] = field(default_factory=dict)

    @staticmethod
    def joined(
        parts: "Sequence[Scores]", prompts: dict[int, Tensor], prompt_states: dict[int, Tensor]
    ) -> "Scores":
        """Scores of rows that were computed one after the other."""
        if len(parts) == 1:
            return replace(parts[0], prompts=prompts, prompt_states=prompt_states)
        states = [part.states for part in parts if part.states is not None]
        first = [0, *accumulate(len(part.best) for part in parts)]
        return Scores(
            torch.cat([part.logits for part in parts]),
            torch.cat([part.hidden for part in parts]),
            torch.cat([part.best for part in parts]),
            torch.cat([part.for_host for part in parts]),
            first[:-1],
            prompts,
            torch.cat(states) if states else None,
            prompt_states,
        )

    def clone(self) -> "Scores":
        """The same in memory of its own."""
        return Scores(
            self.logits.clone(),
            self.hidden.clone(),
            self.best.clone(),
            self.for_host.clone(),
            self.first,
            self.prompts,
            None if self.states is None else self.states.clone(),
            self.prompt_states,
        )

    def change(self, nodes: slice, logits: Tensor) -> None:
        """Have other logits for some nodes."""
        self.logits[nodes], self.best[nodes] = logits, first_maximum(logits)
        self.for_host[nodes, 0] = self.best[nodes].double()

    def nodes(self, row: int, tree: DraftTree) -> slice:
        """Where the nodes of a row lie."""
        return slice(self.first[row], self.first[row] + tree.num_nodes)


class Target:
    """Scores draft trees with a decoder. Keeps nothing of any row: that is in a `KVCache`."""

    def __init__(
        self,
        decoder: LlamaDecoder,
        action_tokens: TokenRange,
        *,
        runner: StepRunner | None = None,
    ) -> None:
        self.decoder = decoder
        self.action_tokens = action_tokens  # ids of bins
        self.num_tokens = decoder.sizes.vocabulary
        self.runner = runner or StepRunner()
        self.is_captured = self.runner.reserve is not None
        packs = self.device.type == "cpu" and not self.is_captured
        if packs:
            keep_freed_memory()
        self.passes = LlamaPasses(decoder, packs=packs)

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
        return self.passes.rows is not None and not self.passes.rows.problem

    def describe_equality(self) -> str:
        """How far plain decoding computes the same numbers for a token as passes over drafts."""
        if self.passes.rows is None:
            return "as plain decoding's but for near ties"
        if self.passes.rows.problem:
            return f"as plain decoding's but for near ties: {self.passes.rows.problem} here"
        where = f", with {torch.get_num_threads()} thread(s)" if self.device.type == "cpu" else ""
        return f"bit-equal to plain decoding's: this machine was asked{where}"

    def read_layers(self, layers: Sequence[int]) -> None:
        """Have every pass keep the hidden states behind some layers, counted from 1, as well."""
        most = self.decoder.sizes.num_layers - 1
        if list(layers) != sorted({*layers}) or not all(1 <= layer <= most for layer in layers):
            raise PolicyError(
                f"layers that are read must be from 1 to {most}, each once and in order (behind "
                f"the last one the final states are read anyway), got {list(layers)}"
            )
        self.passes.read_layers = tuple(layers)

    def new_cache(self) -> KVCache:
        """Memory for slots of its own."""
        return KVCache(self.decoder.sizes, self.decoder.embedding.weight)

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of token ids, [..., width]."""
        embedded: Tensor = self.decoder.embedding(tokens)
        return embedded

    def logits(self, hidden: Tensor, tokens: TokenRange | None = None) -> Tensor:
        """The head over `tokens` or the vocabulary, in float32; column 0 is `tokens.first`."""
        columns = None
        if tokens is not None and len(tokens) < self.num_tokens:
            columns = tokens.columns
        found = self.passes.score(hidden.flatten(0, -2), columns)
        return found.float().view(*hidden.shape[:-1], -1)

    def forward(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
        """Run one pass over rows, in order of their slots, and score every node of their trees.

        Keys and values of all nodes are in the cache afterwards, each at `start` plus its number.
        """
        if isinstance(cache.captured, CapturedPasses):
            return self._replayed(cache.captured, rows)
        return self._packed(cache, rows)

    def set_aside(self, cache: KVCache, widest: int, num_tokens: int) -> CapturedPasses | None:
        """Where passes are captured: fix their memory, for answers of up to `num_tokens`."""
        if not self.is_captured:
            return None
        return CapturedPasses(self.decoder, self.passes, self.runner, cache, widest, num_tokens)

    def _replayed(self, passes: CapturedPasses, rows: Sequence[PassRow]) -> Scores:
        """A GPU's pass, or its prefills, which follow one another."""
        if rows[0].prompt is None:
            first = passes.run_passes(rows)
            last = max(at + row.tree.num_nodes for at, row in zip(first, rows, strict=True))
            return _scores_of(passes, first, last)
        parts, prompts, prompt_states = [], {}, {}
        for index, row in enumerate(rows):
            hidden = passes.run_prefill(row)
            scores = _scores_of(passes, [0], row.tree.num_nodes)
            is_last = index == len(rows) - 1
            parts.append(scores if is_last else scores.clone())
            if hidden is not None and row.keeps_hidden:
                prompts[index] = hidden if is_last else hidden.clone()
                if passes.prompt_states is not None:
                    states = passes.prompt_states[: len(hidden)]
                    prompt_states[index] = states if is_last else states.clone()
        return Scores.joined(parts, prompts, prompt_states)

    def _packed(self, cache: KVCache, rows: Sequence[PassRow]) -> Scores:
        """A CPU's pass."""
        packed, tokens, positions = [], list[int](), list[int]()
        for row in rows:
            before = 0 if row.prompt is None else row.start  # tokens of the prompt but the last
            num_tokens = before + row.tree.num_nodes
            packed.append(
                PackedRow(
                    row.slot,
                    row.start - before,
                    num_tokens,
                    _mask_of(row, before),
                    None if before == 0 or row.keeps_hidden else tuple(range(before, num_tokens)),
                )
            )
            tokens += row.tree.tokens
            positions += range(before)
            if row.tree.is_chain:
                positions += range(row.start, row.start + row.tree.num_nodes)
            else:
                positions += [row.start + depth for depth in row.tree.depths()]
        longest = max(row.start + row.num_tokens for row in packed)
        cache.reserve(1 + max(row.slot for row in rows), longest)
        embeds = self._embeds_of(rows, tokens)
        if len(rows) == 1 and rows[0].tree.is_chain:
            rotation = self.decoder.rotary(packed[0].start, embeds[None])
        else:
            rotation = self.decoder.rotary(to_device(positions, self.device)[None], embeds)
        attention, last = attend_packed(
            cache, packed, rotation, self.decoder.sizes, self.passes.rows, embeds.dtype
        )
        # In bfloat16 what a row adds up must not depend on the length of its neighbours.
        if embeds.dtype == torch.float32 and _are_adjacent(packed):
            attention = _together(cache, packed, attention)
        states: list[Tensor] = []
        hidden = self.passes.run(embeds, attention, last, states)
        all_states = torch.cat([*states, hidden], dim=1) if states else None
        return self._scores_of(rows, packed, hidden, all_states)

    def _embeds_of(self, rows: Sequence[PassRow], tokens: list[int]) -> Tensor:
        """Decoder inputs of all tokens of a pass, [token, width]."""
        words: Tensor = self.decoder.embedding(to_device(tokens, self.device))
        if all(row.prompt is None for row in rows):
            return words
        parts, first = [], 0
        for row in rows:
            num_nodes = row.tree.num_nodes
            if row.prompt is None:
                parts.append(words[first : first + num_nodes])
            else:
                parts += [row.prompt.embeds, words[first + 1 : first + num_nodes]]
            first += num_nodes
        return torch.cat(parts)

    def _scores_of(
        self,
        rows: Sequence[PassRow],
        packed: Sequence[PackedRow],
        hidden: Tensor,
        states: Tensor | None,
    ) -> Scores:
        first, prompts, nodes, at = [], {}, list[slice](), 0
        prompt_states: dict[int, Tensor] = {}
        num_nodes = 0
        for index, (row, one) in enumerate(zip(rows, packed, strict=True)):
            size = one.num_tokens if one.wanted is None else len(one.wanted)
            if row.keeps_hidden:
                of_prompt = slice(at, at + row.start + 1)
                prompts[index] = hidden[of_prompt]
                if states is not None:
                    prompt_states[index] = states[of_prompt]
            nodes.append(slice(at + size - row.tree.num_nodes, at + size))
            first.append(num_nodes)
            num_nodes += row.tree.num_nodes
            at += size
        if num_nodes < len(hidden):
            hidden = _of_nodes(hidden, nodes)
            states = None if states is None else _of_nodes(states, nodes)
        logits = self.logits(hidden)
        best = first_maximum(logits)
        answers = [row.number for row in rows for _ in row.tree.tokens]
        for_host = numbers_for_host(best, logits.sum(dim=1), to_device(answers, self.device))
        return Scores(logits, hidden, best, for_host, first, prompts, states, prompt_states)

    def logits_along(
        self,
        prompt: Prompt,
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
        cache.reserve(1, prompt.length + num_tokens + STRIP)
        token, start, found = prompt.last_token, prompt.length - 1, list[Tensor]()
        for index in range(num_tokens):
            tree = DraftTree.of_committed([token])
            row = PassRow(0, start + index, tree, 0, prompt=prompt if index == 0 else None)
            found.append(self.forward(cache, [row]).logits[0].clone())
            token = int(first_maximum(found[-1])) if given is None else given[index]
            if given is None and stop is not None and token == stop:
                break
        return found


def numbers_for_host(best: Tensor, sums: Tensor, answers: Tensor) -> Tensor:
    """`Scores.for_host`."""
    return torch.stack((best.double(), sums.double(), answers.double()), dim=1)


def _of_nodes(values: Tensor, nodes: Sequence[slice]) -> Tensor:
    """Some rows of [token, width], as few copies as it takes."""
    return values[nodes[0]] if len(nodes) == 1 else torch.cat([values[node] for node in nodes])


def _are_adjacent(rows: Sequence[PackedRow]) -> bool:
    """Whether rows of a later pass fill slots side by side, with as many tokens each."""
    first = rows[0]
    return len(rows) > 1 and all(
        (row.slot, row.num_tokens) == (first.slot + index, first.num_tokens)
        and row.wanted is None
        and row.mask is None
        for index, row in enumerate(rows)
    )


def _together(
    cache: KVCache, rows: Sequence[PackedRow], attention: PackedAttention
) -> PackedAttention:
    """One call of the attention for rows of different lengths, over the longest of them.

    What lies behind a shorter row is masked. A call for each row costs more where passes are small.
    """
    first, width = rows[0], rows[0].num_tokens
    slots = slice(first.slot, first.slot + len(rows))
    starts = np.array([row.start for row in rows])
    read = int(starts.max()) + width
    last = starts[:, None] + np.arange(width)  # that a token sees, [row, token]
    index = (np.arange(slots.start, slots.stop)[:, None] * cache.num_positions + last).ravel()
    seen = np.arange(read) <= last[:, None, :, None]
    strips = cache.data[:, slots, :read].transpose(2, 3)
    num_heads = attention.sizes.num_kv_heads
    window = CacheWindow(
        targets=cache.flat.unbind(0),
        keys=strips[:, :, :num_heads].unbind(0),
        values=strips[:, :, num_heads:].unbind(0),
        index=to_device(index.tolist(), cache.data.device),
    )
    group = replace(
        attention.groups[0],
        tokens=slice(0, width * len(rows)),
        num_rows=len(rows),
        window=window,
        mask=added_mask(to_device(seen, cache.data.device), attention.sums_in),
        is_causal=False,
    )
    return replace(attention, groups=[group])


def _scores_of(passes: CapturedPasses, first: list[int], num_nodes: int) -> Scores:
    """Views of what captured passes have written."""
    span = slice(0, num_nodes)
    logits, hidden = passes.logits[span], passes.hidden[span]
    states = None if passes.states is None else passes.states[span]
    best, for_host = passes.best[span], passes.for_host[span]
    return Scores(logits, hidden, best, for_host, first, states=states)


def self_draft_target(target: Target, num_layers: int) -> Target:
    """The target's first layers as a model of their own."""
    decoder = first_layers(target.decoder, num_layers)
    return Target(decoder, target.action_tokens, runner=target.runner)


def _mask_of(row: PassRow, before: int) -> NDArray[np.bool_] | None:
    """What each token of a row sees, [token, position]; None: everything up to itself."""
    tree, two_way = row.tree, 0 if row.prompt is None else row.prompt.two_way
    if tree.is_chain and two_way <= 1:
        return None
    num_tokens, start = before + tree.num_nodes, row.start - before
    mask = np.tri(num_tokens, start + num_tokens, start, dtype=np.bool_)
    mask[:two_way, :two_way] = True
    if not tree.is_chain:
        mask[before:, start + before :] = ancestors_of(tree)
    return mask


def ancestors_of(tree: DraftTree) -> NDArray[np.bool_]:
    """True where the column node lies on the row node's path, itself included, [node, node]."""
    is_ancestor = np.eye(tree.num_nodes, dtype=np.bool_)
    for node in range(1, tree.num_nodes):
        is_ancestor[node] |= is_ancestor[tree.parents[node]]
    return is_ancestor
