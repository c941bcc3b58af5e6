"""As much of rclpy as the example needs: `spin` brings a few frames, and then ROS shuts down."""

import time

NUM_FRAMES = 20
num_left = NUM_FRAMES


def init() -> None:
    global num_left
    num_left = NUM_FRAMES


def ok() -> bool:
    return num_left > 0


def spin_once(node) -> None:
    global num_left
    num_left -= 1
    node.subscriptions["~/image"](node.next_frame())
    time.sleep(0.02)


def spin(node) -> None:
    while ok():
        spin_once(node)
