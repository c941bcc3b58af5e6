"""LeRobot's batches to observations, and the server's answers back."""

import os
import uuid
from collections import deque
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lerobot.policies.pretrained import PreTrainedPolicy
from torch import Tensor

from deft_client import ActOptions, ClientSettings, Observation, PolicyClient, TlsFiles
from lerobot_policy_deft.configuration_deft import DeftConfig

STATE = "observation.state"


class DeftPolicy(PreTrainedPolicy):
    """Asks the server for the actions of every robot in a batch, each in its own session."""

    config_class = DeftConfig
    name = "deft"

    def __init__(
        self, config: DeftConfig, dataset_stats: object = None, dataset_meta: object = None
    ) -> None:
        super().__init__(config)
        config.validate_features()
        self.camera = config.camera or next(iter(config.image_features))
        tls = TlsFiles(Path(config.ca_file)) if config.ca_file else None
        settings = ClientSettings(api_key=os.environ.get("DEFT_API_KEY"), tls=tls)
        self.client = PolicyClient(config.url, settings)
        self.reset()

    def reset(self) -> None:
        """Begin a new episode for every robot: the server forgets what it did before."""
        self._episode = uuid.uuid4().hex
        self._waiting: deque[Tensor] = deque()

    def select_action(self, batch: dict[str, Any], **_: object) -> Tensor:
        """The next action of every robot, [robot, action_dim]."""
        if not self._waiting:
            self._waiting.extend(self.predict_action_chunk(batch).unbind(dim=1))
        return self._waiting.popleft()

    @torch.no_grad()
    def predict_action_chunk(self, batch: dict[str, Any], **_: object) -> Tensor:
        """Ask for every robot, one after the other: [robot, step, action_dim]."""
        asked = self.config
        chunks = [
            self.client.act(
                self._observation(batch, row),
                ActOptions(
                    session_id=f"{self._episode}-{row}",
                    decoding=asked.decoding,
                    statistics_key=asked.statistics_key,
                    deadline_ms=asked.deadline_ms,
                ),
            )
            for row in range(len(batch[self.camera]))
        ]
        return torch.from_numpy(np.stack([chunk.actions for chunk in chunks])).float()

    def _observation(self, batch: dict[str, Any], row: int) -> Observation:
        further = {
            name: _pixels(batch[name][row]) for name in self.config.image_features
            if name != self.camera
        }  # fmt: skip
        task = batch["task"] if isinstance(batch["task"], str) else batch["task"][row]
        state = batch[STATE][row].cpu().numpy().astype(np.float32) if STATE in batch else None
        return Observation(_pixels(batch[self.camera][row]), task, further, state)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict | None]:
        """Refuse to train."""
        raise TypeError("a server's policy is not trained by LeRobot: see deft train")

    def get_optim_params(self) -> dict:
        """There is nothing to train."""
        return {}


def _pixels(image: Tensor) -> np.ndarray:
    """From [channel, row, column] in 0 to 1 to uint8 [row, column, channel], exactly."""
    return (image * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().contiguous().numpy()
