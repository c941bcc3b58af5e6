"""As much of rclpy as the example needs: `spin_once` brings a frame; after a few ROS shuts down.

Before the first frame the camera may be silent, and before the end as well. In the middle somebody
may set the instruction, and call the service that begins an episode anew.
"""

import json
import os
from time import sleep

from rclpy.parameter import Parameter

NUM_FRAMES = 20
num_left = num_spins = half = 0


def init() -> None:
    global num_left, num_spins, half
    num_left = int(os.environ.get("MADE_UP_FRAMES", NUM_FRAMES))
    half = num_left // 2
    num_spins = int(os.environ.get("MADE_UP_EMPTY_SPINS", "0"))


def ok() -> bool:
    return num_left > 0


def spin_once(node, timeout_sec=None) -> None:
    global num_left, num_spins
    sleep(0.02)
    if num_spins:
        num_spins -= 1
        return
    num_left -= 1
    if num_left == half:
        for name, value in json.loads(os.environ.get("MADE_UP_SET", "{}")).items():
            node.set(Parameter(name, value))
        if "MADE_UP_RESET" in os.environ:
            node.call("~/reset")
    if num_left:
        node.camera(node.next_frame())
    else:
        sleep(float(os.environ.get("MADE_UP_SILENCE_S", "0")))
