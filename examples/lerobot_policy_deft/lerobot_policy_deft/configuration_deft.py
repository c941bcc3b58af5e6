"""What LeRobot's command line may say about the server."""

from dataclasses import dataclass

from lerobot.configs.policies import PreTrainedConfig


@PreTrainedConfig.register_subclass("deft")
@dataclass
class DeftConfig(PreTrainedConfig):
    """Which server to ask, and how. None leaves the choice to the server."""

    url: str = "http://127.0.0.1:8000"
    camera: str | None = None  # the policy's view; None: the only one
    decoding: str | None = None
    statistics_key: str | None = None
    deadline_ms: float = 1000.0  # an answer later than this is an error, not a wait
    ca_file: str | None = None  # certificate (PEM) of the authority that vouches for the server

    @property
    def observation_delta_indices(self) -> None:
        """One frame at a time."""

    @property
    def action_delta_indices(self) -> None:
        """Nothing is trained."""

    @property
    def reward_delta_indices(self) -> None:
        """Nothing is trained."""

    def get_optimizer_preset(self) -> None:
        """Nothing is trained."""

    def get_scheduler_preset(self) -> None:
        """Nothing is trained."""

    def validate_features(self) -> None:
        """Raise ValueError where it is unclear what the policy looks at."""
        cameras = list(self.image_features)
        if self.camera is None and len(cameras) != 1:
            raise ValueError(f"name the policy's view with --policy.camera: one of {cameras}")
        if self.camera is not None and self.camera not in cameras:
            raise ValueError(f"--policy.camera={self.camera}: there are only {cameras}")
