"""The ROS 2 node of the examples, over as much of rclpy as it needs: frames in, commands out."""

import json
import os
import subprocess
import sys

import numpy as np

from deft_server.app import create_app
from tests.examples.test_lerobot_policy import Watching
from tests.repository import ROOT
from tests.server.running import running


def test_frames_arrive_with_red_first_and_commands_go_out_until_ros_ends():
    policy = Watching()
    with running(create_app(policy)) as address:
        said = {"url": f"http://{address}", "instruction": "lift the cup"}
        paths = [str(ROOT / "tests/examples/made_up_ros"), str(ROOT / "client")]
        done = subprocess.run(
            [sys.executable, "-W", "error", str(ROOT / "examples/ros2/deft_node.py")],
            env={
                **os.environ,
                "PYTHONPATH": ":".join(paths),
                "MADE_UP_PARAMETERS": json.dumps(said),
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    *commands, last = done.stdout.splitlines()
    assert last == "destroyed"
    assert any(one.startswith("~/command [") for one in commands)
    seen = policy.seen[0]
    assert seen.instruction == "lift the cup"
    assert np.array_equal(seen.image, np.broadcast_to(np.uint8([0, 0, 255]), (4, 8, 3)))
