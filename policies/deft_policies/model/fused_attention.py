"""The attention of a pass of fixed shape by fused kernels: one launch, and one that rotates and
appends keys and values where the product before it has not.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from deft_policies.model.quantization import Matrix
from deft_policies.model.sizes import LlamaSizes

if TYPE_CHECKING:
    from deft_policies.model.kernels.launch import FusedKernels

# Numbers of a row of a pass, before the tokens, depths and ancestors of its nodes: the position of
# the root, whose answer it is, the positions of its prompt (0: none), its slot, and how many
# positions see each other.
ROOT, ANSWER, NUM_PROMPT, SLOT, TWO_WAY, NUM_HEADER = range(6)
MOST_DEEP = 128  # nodes above the deepest of a tree, at most
WORD = 64  # ancestors that one number names
CHUNK = 64  # positions that are added together, where all that compute a token see the same ones


@dataclass(frozen=True)
class FusedAttention:
    """What tokens see follows from the numbers of their rows."""

    sizes: LlamaSizes
    kernels: "FusedKernels"
    rotation: tuple[Tensor, Tensor]  # cos and sin, [token, head_dim]
    cache: Tensor  # [layer, slot, position, 2 * head, head_dim]
    index: Tensor  # [token], where keys and values go, counted over all positions of all slots
    numbers: Tensor  # [row, ..]: a header, then tokens, depths and words of ancestors of each node
    width: int  # nodes of a row
    is_prefill: bool  # tokens are those of a prompt with its guesses, rather than nodes
    kept: Tensor | None = None  # [kept], flat indices of the tokens whose output is wanted

    @property
    def num_out(self) -> int:
        """Tokens whose output is wanted."""
        return len(self.index if self.kept is None else self.kept)

    def project(self, layer: int, normed: Tensor, qkv: Matrix) -> Tensor:
        """Queries of tokens [token, width], whose keys and values are appended."""
        return self.kernels.project(
            normed, qkv, self.rotation, self.cache[layer], self.index, self.sizes
        )

    def attend(self, layer: int, fused: Tensor) -> Tensor:
        """Mixed values [token out, inner]."""
        kept, cache = self.keep(fused), self.cache[layer]
        return self.kernels.attend(
            kept, cache, self.numbers, self.width, self.sizes, self.is_prefill
        )

    def mix(self, layer: int, fused: Tensor) -> Tensor:
        """The same of queries, keys and values that are neither rotated nor appended."""
        kernels, cache = self.kernels, self.cache[layer]
        kernels.rotate_append(fused, self.rotation, cache, self.index, self.sizes)
        return self.attend(layer, fused)

    def keep(self, hidden: Tensor) -> Tensor:
        """Of [token, width] the tokens whose output is wanted."""
        return hidden if self.kept is None else hidden.index_select(0, self.kept)

    def of_nodes(self, nodes: Tensor) -> "FusedAttention":
        """That of a layer which computes the nodes of the only row alone, at their positions."""
        return replace(self, kept=nodes, is_prefill=False)
