"""A picture as ROS sends it."""

from dataclasses import dataclass


@dataclass
class Image:
    height: int
    width: int
    step: int
    encoding: str
    data: bytes
