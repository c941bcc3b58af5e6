"""A target small enough for thousands of passes, and its slow twin that is obviously right.

Both share the weights of one random decoder. The fast one is the product's: cache, masks, slots.
`TinyTarget` has none of these: it keeps each row's tokens as a list and recomputes the whole
sequence, path by path, for every node it is asked about.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deft_policies.decoding.target import PassRow, Prompt, Scores, Target, numbers_for_host
from deft_policies.decoding.tree import DraftTree
from deft_policies.model.graphs import StepRunner
from deft_policies.model.llama import LlamaDecoder
from deft_policies.model.sizes import LlamaSizes, TokenRange

LENGTH = 7
WIDTH = 32
VOCABULARY = 72
ACTIONS = TokenRange(24, 71)
NUM_PATCHES = 4
CPU = torch.device("cpu")


def tiny_decoder(seed: int = 0, num_layers: int = 2) -> LlamaDecoder:
    """Random weights, large enough that a wrong mask or position changes the answer."""
    sizes = LlamaSizes(
        vocabulary=VOCABULARY,
        width=WIDTH,
        mlp_width=48,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=2,
        head_dim=16,
        max_positions=64,
    )
    decoder = LlamaDecoder(sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(std=0.35, generator=generator)
        # Most answers are action tokens, as a trained policy's are, but not all of them.
        decoder.head.weight[: ACTIONS.first] *= 0.6
    return decoder.requires_grad_(False).eval()


def fast_target(decoder: LlamaDecoder) -> Target:
    return Target(decoder, ACTIONS)


def random_prompts(decoder: LlamaDecoder, text_lengths: list[int], seed: int = 0) -> list[Prompt]:
    """Prompts of random embeddings with these many tokens beside the patches."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(text_lengths) + NUM_PATCHES
    shape = (len(text_lengths), longest, decoder.sizes.width)
    embeds = torch.randn(shape, generator=generator)
    last = torch.randint(0, ACTIONS.first, (len(text_lengths),), generator=generator).tolist()
    patches = slice(1, 1 + NUM_PATCHES)
    return [
        Prompt(embeds[row, : length + NUM_PATCHES], last[row], patches)
        for row, length in enumerate(text_lengths)
    ]


def greedy(
    decoder: LlamaDecoder, prompts: Sequence[Prompt], length: int = LENGTH
) -> list[tuple[int, ...]]:
    """What plain decoding answers for every row, by recomputing everything for every token."""
    return [tuple(_greedy_row(decoder, prompt, length)) for prompt in prompts]


def next_token(decoder: LlamaDecoder, prompt: Tensor, tokens: list[int]) -> int:
    """The greedy token after a prompt [position, width] and these tokens."""
    embeds = torch.cat((prompt, decoder.embedding(torch.tensor(tokens, dtype=torch.int64))))
    return int(decoder.head(decoder(embeds[None])[0, -1]).argmax())


def _greedy_row(decoder: LlamaDecoder, prompt: Prompt, length: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.append(next_token(decoder, prompt.embeds, tokens))
    return tokens


class TinyCache:
    """Each slot's inputs, position by position; nothing is computed before it is asked for."""

    def __init__(self) -> None:
        self.inputs: dict[int, list[Tensor]] = {}  # [position] of [width]

    def keep(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Reads come before writes."""
        found = [self.inputs[slot][source] for slot, source, _ in moves]
        for (slot, _, target), one in zip(moves, found, strict=True):
            self.inputs[slot][target] = one

    def clear(self, slot: int) -> None:
        self.inputs.pop(slot, None)


@dataclass(eq=False)
class TinyTarget:
    """The slow twin of `Target`: every node of every row is a sequence of its own."""

    decoder: LlamaDecoder
    action_tokens: TokenRange = ACTIONS
    num_tokens: int = VOCABULARY
    device: torch.device = CPU
    captured: None = None
    runner: StepRunner = field(default_factory=StepRunner)

    def new_cache(self) -> TinyCache:
        return TinyCache()

    def set_aside(self, cache: TinyCache, widest: int, num_tokens: int) -> None:
        """Nothing is captured."""

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.decoder.embedding(tokens)
        return embedded

    def logits(self, hidden: Tensor, tokens: TokenRange | None = None) -> Tensor:
        every: Tensor = self.decoder.head(hidden).float()
        return every if tokens is None else every[..., tokens.columns]

    def forward(self, cache: TinyCache, rows: Sequence[PassRow]) -> Scores:
        sequences, first, prompts = list[Tensor](), list[int](), {}
        for index, row in enumerate(rows):
            if row.prompt is not None:
                cache.inputs[row.slot] = list(row.prompt.embeds)
                prompts[index] = self.decoder(row.prompt.embeds[None])[0]
            words = list(self.decoder.embedding(torch.tensor(row.tree.tokens)))
            if row.prompt is not None:
                words[0] = row.prompt.embeds[-1]
            inputs = cache.inputs[row.slot] = [*cache.inputs[row.slot][: row.start], *words]
            first.append(len(sequences))
            for node in range(row.tree.num_nodes):
                path = [row.start + one for one in path_to(row.tree, node)]
                sequences.append(
                    torch.stack([*inputs[: row.start], *(inputs[one] for one in path)])
                )
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        ends = torch.tensor([len(one) - 1 for one in sequences])
        hidden = self.decoder(padded)[torch.arange(len(ends)), ends]
        return scores_of(rows, hidden, self.logits(hidden), prompts)


def scores_of(
    rows: Sequence[PassRow],
    hidden: Tensor,
    logits: Tensor,
    prompts: dict[int, Tensor] | None = None,
) -> Scores:
    """Scores of nodes that lie row behind row."""
    sizes = [row.tree.num_nodes for row in rows]
    first = [sum(sizes[:index]) for index in range(len(rows))]
    answers = torch.tensor([row.number for row in rows for _ in row.tree.tokens])
    best = logits.argmax(dim=1)
    for_host = numbers_for_host(best, logits.sum(dim=1), answers)
    return Scores(logits, hidden, best, for_host, first, prompts or {})


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Nodes from node 0 to `node`, both included, by walking up."""
    path = [node]
    while path[-1] != 0:
        path.append(tree.parents[path[-1]])
    return path[::-1]
