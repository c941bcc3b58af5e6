"""What decoding needs from the model whose answer we want, and nothing more."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deft_policies.decoding.tree import DraftTree, TokenRange


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
    keep_hidden: bool = True  # whether a draft source will read the prompt's hidden states
    for_draft: Callable[[], "Prompts"] | None = None  # the same frames as another checkpoint sees


@dataclass(frozen=True)
class Scores:
    """The target's opinion at every node of a draft tree."""

    logits: Tensor  # [row, node, vocabulary] float32; column i is token `vocabulary.first + i`
    hidden: Tensor  # [row, node, width], after the final norm


@dataclass(frozen=True)
class PromptFeatures:
    """What draft heads read of the prompt."""

    embeds: Tensor  # [row, position, width], the decoder's input
    hidden: Tensor  # [row, position, width], after the final norm; no positions if not kept
    lengths: Tensor  # [row]
    patches: slice


class TargetModel(Protocol):
    """A decoder with a static key/value cache that scores draft trees.

    The cache belongs to the target and holds one batch at a time: `prefill` starts it, `score`
    appends the nodes of a tree behind the committed rows, `commit` keeps some of them in place and
    forgets the rest. Used by one thread.
    """

    @property
    def vocabulary(self) -> TokenRange:
        """Token ids that logits speak of: the whole vocabulary, or the action rows alone."""

    @property
    def num_tokens(self) -> int:
        """Size of the whole vocabulary, also where logits speak of the action rows alone."""

    @property
    def action_tokens(self) -> TokenRange:
        """Token ids that stand for bins. `action_tokens.last` is the lowest value for OpenVLA."""

    @property
    def widest_tree(self) -> int:
        """Nodes of the largest tree it has room for, the root included."""

    def embed(self, tokens: Tensor) -> Tensor:
        """Input embeddings of token ids, [..., width]."""

    def logits(self, hidden: Tensor, tokens: TokenRange | None = None) -> Tensor:
        """The language-model head, float32, [..., vocabulary].

        Over `vocabulary`, or over `tokens` alone (a part of it: what a draft head asks for, so that
        it does not read rows it will not use); column i is then token `tokens.first + i`.
        """

    def prefill(self, prompts: Prompts, tree: DraftTree) -> tuple[Scores, PromptFeatures]:
        """Run the prompts with the tree's guesses riding behind them, in one pass.

        Node 0 is the last prompt token: its scores are the prompt's own next-token scores. The
        prompt's rows are committed, the other nodes wait for `commit`.
        """

    def score(self, tree: DraftTree) -> Scores:
        """Run one pass over a tree whose root is the last committed token, not yet in the cache."""

    def commit(self, path: Tensor, lengths: Tensor) -> None:
        """Keep the cache rows of a path of the last pass, in place, and forget its other nodes.

        `path` is [row, step]: node indices from the root (node 0) downwards, padded with anything;
        `lengths` [row] says how many of them count. After a prefill the root's row is already
        committed and is counted all the same.
        """
