"""Known frames before the first robot's: what cannot be trusted is not served."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from deft_core.types import ActionChunk
from deft_policies.base import ActionLimits, PolicyAnswer, PolicyRequest
from deft_policies.constant import ConstantPolicy
from deft_policies.errors import PolicyError
from deft_policies.self_test import self_test

LIMITS = ActionLimits(np.full(7, -1.0), np.full(7, 1.0))


@dataclass(eq=False)
class Saying(ConstantPolicy):
    """Answers with one value after the other, the last one for ever."""

    values: Iterator[float] = field(default_factory=lambda: iter(()))
    last: float = 0.5

    def act(self, batch: Sequence[PolicyRequest]) -> list[PolicyAnswer]:
        return [
            PolicyAnswer(ActionChunk(np.full((1, 7), next(self.values, self.last)))) for _ in batch
        ]


def test_a_sound_policy_passes() -> None:
    self_test(Saying(), LIMITS)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([float("nan")] * 3, "finite"),
        ([0.5, 0.5, float("inf")], "finite"),
        ([0.5] * 3 + [float("nan")] * 3, "noisy"),
        ([1.1] * 3, "statistics allow"),
        ([0.5, 0.5, -8.96], "statistics allow"),
        ([0.5, 0.5000001], "reliably"),
    ],
)
def test_what_is_not_finite_not_in_range_or_not_the_same_twice_fails(
    values: list[float], message: str
) -> None:
    with pytest.raises(PolicyError, match=message):
        self_test(Saying(values=iter(values)), LIMITS)
