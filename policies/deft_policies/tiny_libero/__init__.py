"""Where the files of tiny-libero lie, and the options that load them."""

from dataclasses import replace
from pathlib import Path

from deft_policies.errors import PolicyError
from deft_policies.families.options import ModelOptions
from deft_policies.model.formats import Precision

FOLDER = Path(__file__).parent
CHECKPOINT = FOLDER / "checkpoint"
HEADS = (FOLDER / "eagle", FOLDER / "medusa")
STATISTICS_KEY = "libero_object"


def complete(options: ModelOptions) -> ModelOptions:
    """Fill in what tiny-libero is made of; everything else stays as it was asked for.

    float32 unless asked otherwise: so small a model is faster in it, and every machine and replica
    answers alike.
    """
    if options.checkpoint is not None or options.random_weights is not None:
        raise PolicyError(
            "tiny-libero brings its own checkpoint; for another one leave --policy tiny-libero away"
        )
    return replace(
        options,
        name="tiny-libero",
        checkpoint=str(CHECKPOINT),
        statistics_key=options.statistics_key or STATISTICS_KEY,
        draft_heads=options.draft_heads or HEADS,
        usual_precision=Precision.FLOAT32,
    )
