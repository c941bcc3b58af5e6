"""Run with LeRobot's package: opens a data set with its loader and says what it finds.

`python lerobot_reads.py FOLDER OUT.npz` stores pictures, actions, states and tasks in order.
"""

import re
import sys

import numpy as np
import torch
from torch import library


def without_operators() -> None:
    """torchvision's compiled operators want the CUDA build of torch; the loader calls none."""
    while True:
        try:
            import torchvision  # noqa: F401
        except RuntimeError as error:
            (name,) = re.findall(r"operator (torchvision::\w+) does not exist", str(error))
            library.define(name, "() -> ()")
            for one in [one for one in sys.modules if one.startswith("torchvision")]:
                del sys.modules[one]
        else:
            return


def main(folder: str, out: str) -> None:
    without_operators()
    from lerobot.datasets.lerobot_dataset import LeRobotDataset

    opened = LeRobotDataset("local/set", root=folder)
    items = [opened[index] for index in range(len(opened))]
    camera = "observation.images.image"
    images = [(item[camera] * 255).round().to(torch.uint8).permute(1, 2, 0) for item in items]
    stored = opened.hf_dataset.with_format(None)
    np.savez(
        out,
        images=np.stack([image.numpy() for image in images]),
        actions=np.array([stored[index]["action"] for index in range(len(opened))]),
        states=np.stack([item["observation.state"].numpy() for item in items]),
        episodes=np.array([int(item["episode_index"]) for item in items]),
        tasks=np.array([item["task"] for item in items]),
        mean=np.asarray(opened.meta.stats["action"]["mean"]),
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
