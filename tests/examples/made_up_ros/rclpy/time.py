"""Moments, in nanoseconds."""

from dataclasses import dataclass


@dataclass
class Time:
    nanoseconds: int

    @staticmethod
    def from_msg(stamp: int) -> "Time":
        return Time(stamp)

    def __sub__(self, other: "Time") -> "Time":
        return Time(self.nanoseconds - other.nanoseconds)
