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


def drive(policy: Watching, code: int = 0, **told: object) -> subprocess.CompletedProcess[str]:
    """Run the node to its end; what the made-up ROS is told has names in capitals."""
    with running(create_app(policy)) as address:
        said = {"url": f"http://{address}", "instruction": "lift the cup"}
        paths = [str(ROOT / "tests/examples/made_up_ros"), str(ROOT / "client")]
        done = subprocess.run(
            [sys.executable, "-W", "error", str(ROOT / "examples/ros2/deft_node.py")],
            env={
                **os.environ,
                "PYTHONPATH": ":".join(paths),
                "MADE_UP_PARAMETERS": json.dumps(said),
                **{f"MADE_UP_{name}": str(value) for name, value in told.items()},
            },
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == code, done.stderr
    return done


def test_frames_arrive_with_red_first_and_commands_go_out_until_ros_ends():
    policy = Watching()
    *commands, last = drive(policy).stdout.splitlines()
    assert last == "destroyed"
    assert any(one.startswith("~/command [") for one in commands)
    seen = policy.seen[0]
    assert seen.instruction == "lift the cup"
    assert np.array_equal(seen.image, np.broadcast_to(np.uint8([0, 0, 255]), (4, 8, 3)))


def test_an_arm_whose_camera_falls_silent_holds():
    assert "the arm holds: taken_s: the newest frame is" in drive(Watching(), SILENCE_S=0.9).stderr


def test_the_node_ends_with_the_loop_and_says_what_ended_it():
    """It once stayed up without a loop, as if it drove."""
    done = drive(Watching(), code=1, FRAMES=100_000, FAILURE="the topic is gone")
    assert done.stdout.splitlines()[-1] == "destroyed"
    assert "the topic is gone" in done.stderr.splitlines()[-1]
