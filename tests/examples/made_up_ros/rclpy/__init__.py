"""As much of rclpy as the example needs: `spin_once` brings a frame; after a few ROS shuts down.

The camera may fall silent for a while before that.
"""

import os
import time

NUM_FRAMES = 20
num_left = NUM_FRAMES


def init() -> None:
    global num_left
    num_left = int(os.environ.get("MADE_UP_FRAMES", NUM_FRAMES))


def ok() -> bool:
    return num_left > 0


def spin_once(node, timeout_sec=None) -> None:
    global num_left
    num_left -= 1
    if num_left:
        node.subscriptions["~/image"](node.next_frame())
        time.sleep(0.02)
    else:
        time.sleep(float(os.environ.get("MADE_UP_SILENCE_S", "0")))
