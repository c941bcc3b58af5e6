"""A ROS 2 node that drives an arm from a Deft server: a camera's topic in, a command's topic out.

    python3 deft_node.py --ros-args -p url:=http://HOST:8000 -p instruction:="pick up the butter"

It knows nothing of the arm: a controller of yours executes `~/command` (six motions and the
gripper, in robot units, once in a period), and stops where `~/command` stops coming. Set the
parameter `instruction` to give the arm another task, call `~/reset` to begin it anew.
"""

import os
import time

import numpy as np
import rclpy
from numpy.typing import NDArray
from rcl_interfaces.msg import SetParametersResult
from rclpy.node import Node
from rclpy.parameter import Parameter
from rclpy.qos import qos_profile_sensor_data
from rclpy.time import Time
from sensor_msgs.msg import Image
from std_msgs.msg import Float64MultiArray
from std_srvs.srv import Trigger

from deft_client import (
    ActionRules,
    ClientSettings,
    ControlLoop,
    LoopSettings,
    Observation,
    PolicyClient,
)

# Six motions (zero stays) in the policy's units, and a gripper (its last position stays). LIBERO's
# motions are at most 1. Where yours are metres, 1.0 is a metre a period: set your arm's limit.
RULES = ActionRules(
    is_motion=(True,) * 6 + (False,),
    is_switch=(False,) * 6 + (True,),
    max_step=(1.0,) * 6 + (float("inf"),),
)
# A camera that falls silent is a reason to hold: the policy is never asked with an old frame.
SETTINGS = LoopSettings(max_frame_age_s=0.5)
GRIPPER_AT_FIRST = 1.0  # open
CHANNELS = {"rgb8": (0, 1, 2), "bgr8": (2, 1, 0)}  # where red, green and blue are
REMINDER_S = 5.0  # between two words about what is missing


class DeftNode(Node):
    """The arm as a control loop sees it; frames come while the node is spun."""

    def __init__(self) -> None:
        super().__init__("deft")
        self.url = str(self.declare_parameter("url", "http://127.0.0.1:8000").value)
        self.instruction = str(self.declare_parameter("instruction", "").value)
        self.loop: ControlLoop | None = None
        self.frame: tuple[NDArray[np.uint8], float | None] | None = None  # and when it was taken
        self.add_on_set_parameters_callback(self._set)
        # Cameras publish BEST_EFFORT; a reliable subscription would never get a frame of theirs.
        self.create_subscription(Image, "~/image", self._see, qos_profile_sensor_data)
        self.create_service(Trigger, "~/reset", self._reset)
        self._command = self.create_publisher(Float64MultiArray, "~/command", 1)

    @property
    def missing(self) -> str:
        """What the node still waits for."""
        if not self.instruction:
            return "no instruction: set the parameter `instruction`"
        if self.frame is None:
            return "no frame on ~/image yet: does the camera run, is its topic remapped?"
        return ""

    def _see(self, message: Image) -> None:
        """Rows may be padded; the policy wants red first."""
        if message.encoding not in CHANNELS:
            raise ValueError(f"~/image is {message.encoding}; {' or '.join(CHANNELS)} is needed")
        rows = np.frombuffer(message.data, np.uint8).reshape(message.height, message.step)
        pixels = rows[:, : 3 * message.width].reshape(message.height, message.width, 3)
        self.frame = pixels[:, :, CHANNELS[message.encoding]].copy(), self._taken_s(message)

    def _taken_s(self, message: Image) -> float | None:
        """When the camera took it, by time.monotonic; None, which holds, where it does not say.

        A pipeline that repeats an old frame repeats its stamp, too.
        """
        stamp = Time.from_msg(message.header.stamp)
        if not stamp.nanoseconds:
            return None
        age_s = (self.get_clock().now() - stamp).nanoseconds / 1e9
        return time.monotonic() - age_s

    def _set(self, parameters: list[Parameter]) -> SetParametersResult:
        """Another instruction begins another episode; the other parameters are of the start."""
        for one in parameters:
            if one.name == "url" or (one.name == "instruction" and not one.value):
                return SetParametersResult(successful=False, reason=f"{one.name} cannot be set so")
        for one in parameters:
            if one.name == "instruction":
                self.instruction = str(one.value)
                self._begin()
        return SetParametersResult(successful=True)

    def _reset(self, _: Trigger.Request, response: Trigger.Response) -> Trigger.Response:
        self._begin()
        response.success = True
        return response

    def _begin(self) -> None:
        if self.loop is not None:
            self.loop.reset()

    def observe(self) -> Observation:
        """The newest frame."""
        assert self.frame is not None, "the loop starts once there is one"
        pixels, taken_s = self.frame
        return Observation(pixels, self.instruction, taken_s=taken_s)

    def position(self) -> NDArray[np.float64]:
        """Measured; what it says of motions is not looked at."""
        return np.array([0.0] * 6 + [GRIPPER_AT_FIRST])

    def move(self, action: NDArray[np.float64]) -> None:
        """One command."""
        self._command.publish(Float64MultiArray(data=action.tolist()))

    def stop(self) -> None:
        """Nothing is sent: the controller holds an arm that gets no commands."""
        self.get_logger().warning("no command: the arm is to stay where it is")


def wait_for_frame(node: DeftNode) -> None:
    """Spin until there is a frame and an instruction; say now and then what is missing."""
    reminds_at = time.monotonic() + REMINDER_S
    while rclpy.ok() and node.missing:
        rclpy.spin_once(node, timeout_sec=0.1)
        if node.missing and time.monotonic() > reminds_at:
            node.get_logger().warning(node.missing)
            reminds_at = time.monotonic() + REMINDER_S


def main() -> None:
    """Drive from the first frame until ROS shuts down, or the loop ends: then it says why."""
    rclpy.init()
    node = DeftNode()
    wait_for_frame(node)
    settings = ClientSettings(api_key=os.environ.get("DEFT_API_KEY"))
    try:
        with (
            PolicyClient(node.url, settings) as policy,
            ControlLoop(policy, node, RULES, SETTINGS) as loop,
        ):
            node.loop = loop
            while rclpy.ok() and loop.is_running:
                rclpy.spin_once(node, timeout_sec=0.1)
    finally:
        node.destroy_node()


if __name__ == "__main__":
    main()
