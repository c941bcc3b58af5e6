"""What OFT adds to OpenVLA: the regression head, the state's projector, FiLM.

Attributes are named as the tensors in the published files are.
"""

from torch import Tensor, nn
from torch.nn import functional


class RegressionHead(nn.Module):
    """Hidden states to normalised actions, step by step, each from its own `action_dim` states."""

    def __init__(self, width: int, action_dim: int, num_blocks: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.layer_norm1 = nn.LayerNorm(action_dim * width)
        self.fc1 = nn.Linear(action_dim * width, width)
        # Normalised linear layers, whose rectified output is added to their input.
        self.mlp_resnet_blocks = nn.ModuleList(
            nn.ModuleDict({"ffn": nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width))})
            for _ in range(num_blocks)
        )
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, action_dim)

    def forward(self, hidden: Tensor) -> Tensor:
        """[row, step * action_dim, width] to [row, step, action_dim], not bounded."""
        steps = hidden.reshape(len(hidden), -1, self.action_dim * hidden.shape[2])
        steps = functional.relu(self.fc1(self.layer_norm1(steps)))
        for block in self.mlp_resnet_blocks:
            steps = steps + functional.relu(block.get_submodule("ffn")(steps))
        actions: Tensor = self.fc2(self.layer_norm2(steps))
        return actions


class StateProjector(nn.Module):
    """A robot's normalised state to one token of the decoder."""

    def __init__(self, state_dim: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, state: Tensor) -> Tensor:
        """[row, state_dim] to [row, width]."""
        token: Tensor = self.fc2(functional.gelu(self.fc1(state)))
        return token


class Film(nn.Module):
    """What an instruction does to the blocks of one tower, all of them in one matrix."""

    def __init__(self, width: int, tower_width: int, num_blocks: int) -> None:
        super().__init__()
        self.tower_width = tower_width
        self.modulate = nn.Linear(width, num_blocks * 2 * tower_width)

    def forward(self, language: Tensor) -> Tensor:
        """[row, width] to scales and shifts [block, 2, row, tower_width]."""
        flat: Tensor = self.modulate(language)
        return flat.view(len(flat), -1, 2, self.tower_width).permute(1, 2, 0, 3)
