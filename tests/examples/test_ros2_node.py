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

NODE = "import deft_node; deft_node.REMINDER_S = 0.05; deft_node.main()"


def drive(
    policy: Watching, code: int = 0, instruction: str = "lift the cup", **ros: object
) -> subprocess.CompletedProcess[str]:
    """Run the node to its end; what the made-up ROS does has names in capitals."""
    with running(create_app(policy)) as address:
        parameters = {"url": f"http://{address}", "instruction": instruction}
        paths = [ROOT / "tests/examples/made_up_ros", ROOT / "examples/ros2", ROOT / "client"]
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", NODE],
            env={
                **os.environ,
                "PYTHONPATH": ":".join(map(str, paths)),
                "MADE_UP_PARAMETERS": json.dumps(parameters),
                **{f"MADE_UP_{name}": str(value) for name, value in ros.items()},
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


def test_a_node_without_frames_says_so():
    said = drive(Watching(), EMPTY_SPINS=20).stdout
    assert "no frame on ~/image yet: does the camera run" in said
    assert "~/command [" in said


def test_frames_are_as_old_as_their_stamps_say():
    """A pipeline that repeats an old frame looks alive by the time of arrival."""
    done = drive(Watching(), AGE_S=2.0)
    assert "the arm holds: taken_s: the newest frame is 2." in done.stderr
    commands = {line for line in done.stdout.splitlines() if line.startswith("~/command")}
    assert commands == {"~/command [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]"}


def test_frames_without_a_stamp_hold_the_arm():
    assert "the arm holds: taken_s: missing" in drive(Watching(), AGE_S=-1.0).stderr


def test_another_instruction_begins_another_episode():
    policy = Watching()
    said = drive(policy, FRAMES=80, SET=json.dumps({"instruction": "drop it"})).stdout
    assert "set instruction True" in said
    assert [one.instruction for one in policy.seen][:1] == ["lift the cup"]
    assert [one.instruction for one in policy.seen][-1] == "drop it"


def test_the_node_waits_for_an_instruction():
    policy = Watching()
    said = drive(
        policy, instruction="", FRAMES=80, SET=json.dumps({"instruction": "lift it"})
    ).stdout
    assert "no instruction: set the parameter `instruction`" in said
    assert {one.instruction for one in policy.seen} == {"lift it"}


def test_an_empty_instruction_is_refused():
    policy = Watching()
    assert "set instruction False" in drive(policy, SET=json.dumps({"instruction": ""})).stdout
    assert {one.instruction for one in policy.seen} == {"lift the cup"}


def test_a_service_begins_the_episode_anew():
    assert "~/reset True" in drive(Watching(), RESET=1).stdout
