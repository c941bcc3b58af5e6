"""Numbers as ROS sends them."""

from dataclasses import dataclass


@dataclass
class Float64MultiArray:
    data: list
