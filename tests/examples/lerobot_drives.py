"""Run with LeRobot's package: drives the policy `deft` over a data set, as its record command does.

`python lerobot_drives.py FOLDER URL OUT.npy` stores the actions in order.
"""

import sys

import numpy as np
import torch

from tests.client.datasets.lerobot_reads import without_operators


def main(folder: str, url: str, out: str) -> None:
    without_operators()
    # diffusers, which LeRobot imports for another policy, takes offence at the torchao behind ours.
    sys.modules["torchao"] = None  # type: ignore[assignment]
    import lerobot_policy_deft  # noqa: F401
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.policies.factory import make_policy, make_pre_post_processors
    from lerobot.utils.control_utils import predict_action

    dataset = LeRobotDataset("local/set", root=folder)
    config = PreTrainedConfig.get_choice_class("deft")(url=url, device="cpu")
    policy = make_policy(config, ds_meta=dataset.meta)
    before, after = make_pre_post_processors(config)
    camera = "observation.images.image"
    policy.reset()
    actions = []
    for index in range(len(dataset)):
        item = dataset[index]
        image = (item[camera] * 255).round().to(torch.uint8).permute(1, 2, 0).numpy()
        seen = {camera: image, "observation.state": item["observation.state"].numpy()}
        action = predict_action(
            seen, policy, torch.device("cpu"), before, after, use_amp=False, task=item["task"]
        )
        actions.append(action.numpy())
    np.save(out, np.stack(actions))


if __name__ == "__main__":
    main(*sys.argv[1:])
