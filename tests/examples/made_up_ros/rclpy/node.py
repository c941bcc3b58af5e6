"""A node that is told its parameters by the environment and prints what it publishes."""

import json
import os
import sys
from types import SimpleNamespace

import numpy as np
from sensor_msgs.msg import Image


def say(*words):
    sys.stdout.write(" ".join(map(str, words)) + "\n")


class Node:
    def __init__(self, name):
        self.given = json.loads(os.environ["MADE_UP_PARAMETERS"])
        self.subscriptions = {}

    def declare_parameter(self, name, default):
        return SimpleNamespace(value=self.given.get(name, default))

    def create_subscription(self, kind, topic, heard, depth):
        self.subscriptions[topic] = heard

    def create_publisher(self, kind, topic, depth):
        return SimpleNamespace(publish=lambda message: self._publish(topic, message))

    def _publish(self, topic, message):
        if "MADE_UP_FAILURE" in os.environ:
            raise RuntimeError(os.environ["MADE_UP_FAILURE"])
        say(topic, message.data)

    def get_logger(self):
        return SimpleNamespace(warning=say)

    def destroy_node(self):
        say("destroyed")

    def next_frame(self):
        """Blue, 8 x 4 pixels, in rows of two bytes more than needed."""
        rows = np.zeros((4, 26), np.uint8)
        rows[:, 0:24:3] = 255
        return Image(4, 8, 26, "bgr8", rows.tobytes())
