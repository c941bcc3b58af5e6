"""Where the tokens of a pass lie in the cache and what each may see. Pure index arithmetic.

A row's sequence is its prompt, then what was committed since, then the nodes of the tree in
flight. Rows have their own lengths, so the same node lies in a different slot in each.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class PrefillLayout:
    """A prompt with a tree's guesses directly behind it, whatever the padding of the prompt.

    Sequence position and cache slot are the same thing in a prefill. Padding ends up behind the
    guesses, where causality hides it.
    """

    sources: Tensor  # [row, slot] index into (prompt positions, then nodes 1...)
    positions: Tensor  # [row, slot] rotary position
    node_slots: Tensor  # [row, node]; node 0 is the last prompt token


def prefill_layout(lengths: Tensor, depths: Tensor, padded: int) -> PrefillLayout:
    """Lay out prompts [row] of `padded` positions and trees of depths [row, node]."""
    num_guesses = depths.shape[1] - 1
    slots = torch.arange(padded + num_guesses, device=lengths.device)[None, :]
    if num_guesses == 0:
        every = slots.expand(len(lengths), -1)
        return PrefillLayout(every, every, lengths[:, None] - 1)
    behind = slots - lengths[:, None]  # 0 is the first guess
    is_guess = (behind >= 0) & (behind < num_guesses)
    is_padding = behind >= num_guesses
    sources = torch.where(is_guess, padded + behind, slots - is_padding * num_guesses)
    node = (behind + 1).clamp(0, num_guesses)
    guessed = lengths[:, None] - 1 + depths.gather(1, node)
    return PrefillLayout(
        sources=sources,
        positions=torch.where(is_guess, guessed, slots),
        node_slots=tree_slots(lengths - 1, depths.shape[1]),
    )


def prefill_mask(layout: PrefillLayout, ancestors: Tensor) -> Tensor:
    """[row, 1, slot, slot]: causal, but a guess sees only its ancestors among the guesses."""
    num_rows, length = layout.sources.shape
    slots = torch.arange(length, device=ancestors.device)
    mask = (slots[:, None] >= slots).repeat(num_rows, 1, 1)
    rows = torch.arange(num_rows, device=ancestors.device)[:, None, None]
    own = layout.node_slots
    mask[rows, own[:, 1:, None], own[:, None, :]] = ancestors[:, 1:]
    return mask.unsqueeze(1)


def tree_slots(roots: Tensor, num_nodes: int) -> Tensor:
    """Slots [row, node] of a tree whose root lies at `roots` [row]."""
    return roots[:, None] + torch.arange(num_nodes, device=roots.device)


def tree_mask(roots: Tensor, ancestors: Tensor, read: int) -> Tensor:
    """[row, 1, node, slot]: a node sees every slot before the root, and its ancestors."""
    num_nodes = ancestors.shape[1]
    behind = torch.arange(read, device=roots.device) - roots[:, None]  # 0 is the root
    is_node = (behind >= 0) & (behind < num_nodes)
    column = behind.clamp(0, num_nodes - 1)[:, None, :].expand(-1, num_nodes, -1)
    seen = ancestors.gather(2, column) & is_node[:, None, :]
    return (seen | (behind < 0)[:, None, :]).unsqueeze(1)


def pad_ancestors(ancestors: Tensor, num_nodes: int) -> Tensor:
    """[row, node, node] of a tree with more nodes behind, which see the root and themselves."""
    missing = num_nodes - ancestors.shape[1]
    padded = functional.pad(ancestors, (0, missing, 0, missing))
    padded[:, -missing:, 0] = True
    padded[:, -missing:, -missing:] |= torch.eye(missing, dtype=torch.bool, device=ancestors.device)
    return padded


def is_chain(parents: Tensor) -> bool:
    """True if every node hangs on the one before it. Reads the tensor: cheap on a CPU only."""
    expected = torch.arange(-1, parents.shape[1] - 1, device=parents.device)
    return bool(torch.equal(parents, expected.expand_as(parents)))
