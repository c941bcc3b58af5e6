"""A LeRobot policy that asks a Deft server; importing this makes LeRobot know `deft`."""

from lerobot_policy_deft.configuration_deft import DeftConfig

__all__ = ["DeftConfig"]
