"""What happens to batches before and after: the server does all of it, so next to nothing."""

from typing import Any

from lerobot.processor import AddBatchDimensionProcessorStep, PolicyProcessorPipeline
from lerobot.processor.converters import policy_action_to_transition, transition_to_policy_action

from lerobot_policy_deft.configuration_deft import DeftConfig


def make_deft_pre_post_processors(
    config: DeftConfig, dataset_stats: object = None
) -> tuple[PolicyProcessorPipeline, PolicyProcessorPipeline]:
    """Pictures, state and task go as they are; actions come in robot units."""
    before = PolicyProcessorPipeline[dict[str, Any], dict[str, Any]](
        steps=[AddBatchDimensionProcessorStep()], name="policy_preprocessor"
    )
    after = PolicyProcessorPipeline(
        steps=[],
        name="policy_postprocessor",
        to_transition=policy_action_to_transition,
        to_output=transition_to_policy_action,
    )
    return before, after
