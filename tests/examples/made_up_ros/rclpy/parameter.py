"""A parameter that somebody sets."""

from dataclasses import dataclass


@dataclass
class Parameter:
    name: str
    value: object
