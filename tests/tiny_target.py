"""A target small enough for thousands of passes, and its slow twin that is obviously right.

Both share the weights of one random decoder. The fast one is the product's: cache, masks, slots.
`TinyTarget` has none of these: it keeps each row's tokens as a list and recomputes the whole
sequence, path by path, for every node it is asked about.
"""

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from deft_policies.decoding.target import Prompts, Scores, Target
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


def random_prompts(decoder: LlamaDecoder, text_lengths: list[int], seed: int = 0) -> Prompts:
    """Prompts of random embeddings with these many tokens beside the patches, right-padded."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.tensor(text_lengths) + NUM_PATCHES
    shape = (len(text_lengths), int(lengths.max()), decoder.sizes.width)
    return Prompts(
        embeds=torch.randn(shape, generator=generator),
        lengths=lengths,
        last_tokens=torch.randint(0, ACTIONS.first, (len(text_lengths),), generator=generator),
        patches=slice(1, 1 + NUM_PATCHES),
        features=torch.randn(len(text_lengths), 6, generator=generator),
    )


def one_row(prompts: Prompts, row: int) -> Prompts:
    """A row of a batch as a batch of its own, without padding."""
    length = int(prompts.lengths[row])
    features = prompts.features
    return replace(
        prompts,
        embeds=prompts.embeds[row : row + 1, :length],
        lengths=prompts.lengths[row : row + 1],
        last_tokens=prompts.last_tokens[row : row + 1],
        features=None if features is None else features[row : row + 1],
    )


def greedy(decoder: LlamaDecoder, prompts: Prompts, length: int = LENGTH) -> list[tuple[int, ...]]:
    """What plain decoding answers for every row, by recomputing everything for every token."""
    return [tuple(_greedy_row(decoder, one_row(prompts, row), length)) for row in _rows(prompts)]


def next_token(decoder: LlamaDecoder, prompt: Tensor, tokens: list[int]) -> int:
    """The greedy token after a prompt [position, width] and these tokens."""
    embeds = torch.cat((prompt, decoder.embedding(torch.tensor(tokens, dtype=torch.int64))))
    return int(decoder.head(decoder(embeds[None])[0, -1]).argmax())


def _greedy_row(decoder: LlamaDecoder, prompts: Prompts, length: int) -> list[int]:
    tokens: list[int] = []
    while len(tokens) < length:
        tokens.append(next_token(decoder, prompts.embeds[0], tokens))
    return tokens


def _rows(prompts: Prompts) -> range:
    return range(prompts.embeds.shape[0])


class TinyCache:
    """Each row's committed inputs, and the tree that it was asked about last."""

    def __init__(self, decoder: LlamaDecoder) -> None:
        self.decoder = decoder
        self.inputs: dict[int, Tensor] = {}  # [position, width]
        self.trees: dict[int, tuple[list[int], bool]] = {}  # tokens, and whether it rode
        self.length = torch.zeros(64, dtype=torch.int64)  # set where a row has gone

    def reserve(self, rows: int, length: int) -> None:
        """It grows by itself."""

    def keep(self, path: Tensor, kept: Tensor | int, in_place: bool, first: int = 0) -> None:
        counts = torch.as_tensor(kept).expand(len(path)).tolist()
        for row, count in enumerate(counts, start=first):
            tokens, rode = self.trees[row]
            nodes = path[row - first, :count].tolist()[1 if rode else 0 :]
            words = self.decoder.embedding(torch.tensor([tokens[node] for node in nodes]).long())
            self.inputs[row] = torch.cat((self.inputs[row], words))


@dataclass(eq=False)
class TinyTarget:
    """The slow twin of `Target`."""

    decoder: LlamaDecoder
    action_tokens: TokenRange = ACTIONS
    vocabulary: TokenRange = TokenRange(0, VOCABULARY - 1)
    num_tokens: int = VOCABULARY
    device: torch.device = CPU
    reads_lengths: bool = True
    runner: StepRunner = field(default_factory=StepRunner)

    def new_cache(self) -> TinyCache:
        return TinyCache(self.decoder)

    def embed(self, tokens: Tensor) -> Tensor:
        embedded: Tensor = self.decoder.embedding(tokens)
        return embedded

    def logits(self, hidden: Tensor, tokens: TokenRange | None = None) -> Tensor:
        wanted = tokens or self.vocabulary
        every: Tensor = self.decoder.head(hidden).float()
        return every[..., wanted.first : wanted.last + 1]

    def prefill(
        self, rows: TinyCache, first: int, prompts: Prompts, tree: DraftTree
    ) -> tuple[Scores, Tensor]:
        hidden = torch.zeros_like(prompts.embeds)
        for row in _rows(prompts):
            sequence = one_row(prompts, row).embeds[0]
            rows.inputs[first + row] = sequence
            hidden[row, : len(sequence)] = self.decoder(sequence[None])[0]
        return self._score(rows, first, tree, num_skipped=1), hidden

    def score(self, rows: TinyCache, tree: DraftTree) -> Scores:
        return self._score(rows, 0, tree, num_skipped=0)

    def _score(self, rows: TinyCache, first: int, tree: DraftTree, num_skipped: int) -> Scores:
        """Every node of every row as a sequence of its own; padding behind it sees nothing."""
        sequences = []
        for row in _rows_of(tree):
            rows.trees[first + row] = (tree.tokens[row].tolist(), num_skipped == 1)
            for node in range(tree.num_nodes):
                path = path_to(tree, row, node)[num_skipped:]
                guessed = self.decoder.embedding(tree.tokens[row, path])
                sequences.append(torch.cat((rows.inputs[first + row], guessed)))
        padded = torch.nn.utils.rnn.pad_sequence(sequences, batch_first=True)
        ends = torch.tensor([len(one) - 1 for one in sequences])
        hidden = self.decoder(padded)[torch.arange(len(ends)), ends]
        hidden = hidden.view(*tree.tokens.shape, -1)
        return Scores(self.logits(hidden), hidden, tree.answers)


def _rows_of(tree: DraftTree) -> range:
    return range(tree.tokens.shape[0])


def path_to(tree: DraftTree, row: int, node: int) -> list[int]:
    """Nodes from the root to `node`, both included, by walking up."""
    path = [node]
    while path[-1] != 0:
        path.append(int(tree.parents[row, path[-1]]))
    return path[::-1]
