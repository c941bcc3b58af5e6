"""A node that is told its parameters by the environment and prints what it publishes."""

import json
import os
import sys
import time
from types import SimpleNamespace

import numpy as np
from sensor_msgs.msg import Header, Image

from rclpy.time import Time


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")


class Node:
    def __init__(self, name):
        self.given = json.loads(os.environ["MADE_UP_PARAMETERS"])
        self.services = {}

    def declare_parameter(self, name, default):
        return SimpleNamespace(value=self.given.get(name, default))

    def add_on_set_parameters_callback(self, callback):
        self.setting = callback

    def set(self, parameter):
        result = self.setting([parameter])
        say("set", parameter.name, result.successful)

    def create_service(self, kind, name, callback):
        self.services[name] = kind, callback

    def call(self, name):
        kind, callback = self.services[name]
        say(name, callback(kind.Request(), kind.Response()).success)

    def create_subscription(self, kind, topic, heard, quality):
        assert (topic, quality) == ("~/image", "best effort"), "cameras do not publish otherwise"
        self.camera = heard

    def create_publisher(self, kind, topic, depth):
        return SimpleNamespace(publish=lambda message: self._publish(topic, message))

    def _publish(self, topic, message):
        if "MADE_UP_FAILURE" in os.environ:
            raise RuntimeError(os.environ["MADE_UP_FAILURE"])
        say(topic, message.data)

    def get_logger(self):
        return SimpleNamespace(warning=say)

    def get_clock(self):
        return SimpleNamespace(now=lambda: Time(time.time_ns()))

    def destroy_node(self):
        say("destroyed")

    def next_frame(self):
        """Blue, 8 x 4 pixels, in rows of two bytes more than needed."""
        rows = np.zeros((4, 26), np.uint8)
        rows[:, 0:24:3] = 255
        age_s = float(os.environ.get("MADE_UP_AGE_S", "0"))
        stamp = 0 if age_s < 0 else time.time_ns() - int(age_s * 1e9)
        return Image(Header(stamp), 4, 8, 26, "bgr8", rows.tobytes())
