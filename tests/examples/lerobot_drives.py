"""Run with LeRobot's package: drives the policy `deft` over a data set.

`python lerobot_drives.py FOLDER URL OUT.npy` stores the actions in order.
"""

import sys

import numpy as np

from tests.core.datasets.lerobot_reads import without_operators


def main(folder: str, url: str, out: str) -> None:
    without_operators()
    # diffusers, which LeRobot imports for another policy, takes offence at the torchao behind ours.
    sys.modules["torchao"] = None  # type: ignore[assignment]
    import lerobot_policy_deft  # noqa: F401
    from lerobot.configs.policies import PreTrainedConfig
    from lerobot.datasets.lerobot_dataset import LeRobotDataset
    from lerobot.policies.factory import make_policy, make_pre_post_processors

    dataset = LeRobotDataset("local/set", root=folder)
    config = PreTrainedConfig.get_choice_class("deft")(url=url, device="cpu")
    policy = make_policy(config, ds_meta=dataset.meta)
    before, after = make_pre_post_processors(config)
    camera = "observation.images.image"
    policy.reset()
    actions = []
    for index in range(len(dataset)):
        item = dataset[index]
        seen = {name: item[name] for name in (camera, "observation.state", "task")}
        action = after(policy.select_action(before(seen)))
        actions.append(action[0].numpy())
    np.save(out, np.stack(actions))


if __name__ == "__main__":
    main(*sys.argv[1:])
