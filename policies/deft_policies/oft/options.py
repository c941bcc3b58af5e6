"""The flags of the `oft` policy. Imports nothing heavy: it also runs for `--help`."""

from argparse import Namespace, _ArgumentGroup
from dataclasses import dataclass

from deft_client.image_chain import ImageChain
from deft_policies.openvla.options import (
    WeightOptions,
    add_weight_flags,
    at_least_one,
    read_weight_flags,
)


@dataclass(frozen=True)
class OftOptions(WeightOptions):
    """How to load and run an OFT policy. None leaves the choice to the checkpoint, if it tells."""

    num_pictures: int | None = None


def add_flags(group: _ArgumentGroup) -> None:
    """Declare the flags."""
    add_weight_flags(group, ImageChain.OFT)
    group.add_argument(
        "--pictures",
        type=at_least_one,
        metavar="N",
        help="how many the model looks at: the frame, then the wrist cameras in their order",
    )


def read_flags(namespace: Namespace) -> OftOptions:
    """Collect the flags that `add_flags` declared."""
    return OftOptions(
        **vars(read_weight_flags(namespace)),
        num_pictures=namespace.pictures,
    )
