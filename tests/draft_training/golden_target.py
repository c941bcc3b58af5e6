"""The golden checkpoint as the target of training."""

from functools import lru_cache

from deft_draft_training.heads.target import FeatureTarget
from deft_policies.families.loading import load_policy
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision
from tests.golden import TINY_OPENVLA, cases


@lru_cache
def tiny_target(precision: Precision | None = None, device: str = "cpu") -> FeatureTarget:
    """The golden checkpoint as a target; loaded once, never changed."""
    key = cases()[0].statistics_key
    options = ModelOptions(
        checkpoint=str(TINY_OPENVLA), statistics_key=key, precision=precision, device=device
    )
    return FeatureTarget(load_policy(options))
