"""What the two processes tell each other arrives as it was sent."""

import numpy as np
import pytest

from deft_policies.base import ActionLimits
from deft_policies.constant import ConstantPolicy
from deft_server.hosting.messages import PolicyFacts, decode_message, encode_message


@pytest.mark.parametrize("may_exceed", [False, True])
def test_limits_cross_to_the_server_whole(may_exceed: bool) -> None:
    limits = ActionLimits(np.full(3, -0.5), np.arange(3) / 3, np.arange(3) < 2, may_exceed)
    facts = PolicyFacts(ConstantPolicy().info, {"lab": limits})
    found = decode_message(encode_message(facts))
    assert isinstance(found, PolicyFacts)
    (told,) = found.limits.values()
    assert told.may_exceed is may_exceed
    for name in ("low", "high", "is_motion"):
        np.testing.assert_array_equal(getattr(told, name), getattr(limits, name))
