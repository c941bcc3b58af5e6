"""Patch features to decoder inputs."""

from torch import Tensor, nn
from torch.nn import functional

from deft_policies.openvla.config import ProjectorKind


class Projector(nn.Module):
    """An MLP: three layers for the fused towers (inner width 4 x vision), two for a single one."""

    def __init__(self, vision_width: int, width: int, kind: ProjectorKind) -> None:
        super().__init__()
        is_fused = kind is ProjectorKind.FUSED
        inner = 4 * vision_width if is_fused else width
        self.fc1 = nn.Linear(vision_width, inner)
        self.fc2 = nn.Linear(inner, width)
        self.fc3 = nn.Linear(width, width) if is_fused else None

    def forward(self, patches: Tensor) -> Tensor:
        """[row, patch, vision_width] to [row, patch, width]."""
        projected: Tensor = self.fc2(functional.gelu(self.fc1(patches)))
        if self.fc3 is None:
            return projected
        deeper: Tensor = self.fc3(functional.gelu(projected))
        return deeper
