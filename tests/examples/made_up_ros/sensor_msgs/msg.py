"""A picture as ROS sends it."""

from dataclasses import dataclass


@dataclass
class Header:
    stamp: int  # nanoseconds


@dataclass
class Image:
    header: Header
    height: int
    width: int
    step: int
    encoding: str
    data: bytes
