"""The wrist cameras of a robot, by their names."""

from dataclasses import replace

from deft_client.types import Image, Observation
from deft_policies.errors import RequestError

WRIST = "wrist"  # in the name of a camera that a model may look through


def find_pictures(observation: Observation, num_pictures: int) -> list[Image]:
    """The frame and the wrist cameras, as many as a model looks at."""
    num_wrists = num_pictures - 1
    if num_wrists == 0:
        return [observation.image]
    names = [name for name in observation.cameras if WRIST in name]
    if len(names) != num_wrists:
        raise RequestError(
            "cameras",
            f"the model looks at the frame and {num_wrists} further picture(s) whose names "
            f"contain {WRIST!r}; got {list(observation.cameras)}",
        )
    return [observation.image, *(observation.cameras[name] for name in names)]


def add_wrists(observation: Observation, num_pictures: int) -> Observation:
    """With the frame again in place of every wrist."""
    wrists = {f"{WRIST}_{index}": observation.image for index in range(num_pictures - 1)}
    return replace(observation, cameras=wrists)
