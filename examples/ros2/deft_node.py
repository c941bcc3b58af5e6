"""A ROS 2 node that drives an arm from a Deft server: a camera's topic in, a command's topic out.

    python3 deft_node.py --ros-args -p url:=http://HOST:8000 -p instruction:="pick up the butter"

It knows nothing of the arm: a controller of yours executes `~/command` (six motions and the
gripper, in robot units, once in a period), and stops where `~/command` stops coming.
"""

import os
import time

import numpy as np
import rclpy
from numpy.typing import NDArray
from rclpy.node import Node
from sensor_msgs.msg import Image
from std_msgs.msg import Float64MultiArray

from deft_client import (
    ActionRules,
    ClientSettings,
    ControlLoop,
    LoopSettings,
    Observation,
    PolicyClient,
)

# Six motions, of which zero stays, none above 1; and a gripper, which stays as it was.
RULES = ActionRules(
    is_motion=(True,) * 6 + (False,),
    is_switch=(False,) * 6 + (True,),
    max_step=(1.0,) * 6 + (float("inf"),),
)
# A camera that falls silent is a reason to hold: the policy is never asked with an old frame.
SETTINGS = LoopSettings(max_frame_age_s=0.5)
GRIPPER_AT_FIRST = 1.0  # open
CHANNELS = {"rgb8": (0, 1, 2), "bgr8": (2, 1, 0)}  # where red, green and blue are


class DeftNode(Node):
    """The arm as a control loop sees it; frames come while the node is spun."""

    def __init__(self) -> None:
        super().__init__("deft")
        parameter = self.declare_parameter
        self.url = str(parameter("url", "http://127.0.0.1:8000").value)
        self.instruction = str(parameter("instruction", "").value)
        self.frame: tuple[NDArray[np.uint8], float] | None = None  # and when it came
        self.create_subscription(Image, "~/image", self._see, 1)
        self._command = self.create_publisher(Float64MultiArray, "~/command", 1)

    def _see(self, message: Image) -> None:
        """Rows may be padded; the policy wants red first."""
        if message.encoding not in CHANNELS:
            raise ValueError(f"~/image is {message.encoding}; {' or '.join(CHANNELS)} is needed")
        rows = np.frombuffer(message.data, np.uint8).reshape(message.height, message.step)
        pixels = rows[:, : 3 * message.width].reshape(message.height, message.width, 3)
        self.frame = pixels[:, :, CHANNELS[message.encoding]].copy(), time.monotonic()

    def observe(self) -> Observation:
        """The newest frame."""
        assert self.frame is not None, "the loop starts once there is one"
        pixels, came_s = self.frame
        return Observation(pixels, self.instruction, taken_s=came_s)

    def position(self) -> NDArray[np.float64]:
        """Measured; what it says of motions is not looked at."""
        return np.array([0.0] * 6 + [GRIPPER_AT_FIRST])

    def move(self, action: NDArray[np.float64]) -> None:
        """One command."""
        self._command.publish(Float64MultiArray(data=action.tolist()))

    def stop(self) -> None:
        """Nothing is sent: the controller holds an arm that gets no commands."""
        self.get_logger().warning("no command: the arm is to stay where it is")


def main() -> None:
    """Drive from the first frame until ROS shuts down, or the loop ends: then it says why."""
    rclpy.init()
    node = DeftNode()
    while rclpy.ok() and node.frame is None:
        rclpy.spin_once(node)
    settings = ClientSettings(api_key=os.environ.get("DEFT_API_KEY"))
    try:
        with (
            PolicyClient(node.url, settings) as policy,
            ControlLoop(policy, node, RULES, SETTINGS) as loop,
        ):
            while rclpy.ok() and loop.is_running:
                rclpy.spin_once(node, timeout_sec=0.1)
    finally:
        node.destroy_node()


if __name__ == "__main__":
    main()
