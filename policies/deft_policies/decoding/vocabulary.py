"""Ranges of token ids. Knows that tokens are integers in order, nothing of what they mean."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class TokenRange:
    """The ids first..last, both included; adjacent ids in an action range are adjacent bins."""

    first: int
    last: int

    def __len__(self) -> int:
        return self.last - self.first + 1

    def contains(self, tokens: Tensor) -> Tensor:
        """True, elementwise, for the ids inside the range."""
        return (self.first <= tokens) & (tokens <= self.last)
