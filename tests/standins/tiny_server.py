"""A policy server of forty lines that solves the point world by looking at it.

It speaks the real wire format through the standard library's HTTP server, so that evaluation can be
tested without the product's server. Its answers depend on the frame and on how many frames the
session has sent, so a session that is not reset, or shared, changes the actions.
"""

import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
from numpy.typing import NDArray

from deft_core.errors import Problem
from deft_core.types import ActionChunk, Image, ServerInfo, StageTimings
from deft_core.wire import codec
from deft_core.wire.codec import decode_request, encode_answer
from deft_core.wire.formats import WireFormat
from deft_core.wire.messages import ActMessage
from tests.standins.environments import trace_of

INFO = ServerInfo(
    policy="tiny",
    action_dim=7,
    chunk_length=1,
    statistics_keys=("point_world", "libero_object_no_noops"),
    default_statistics_key=None,
    image_height=256,
    image_width=256,
    image_chain="none",
    image_chains=("none",),
    decoding="lossless",
    decoding_methods=("lossless", "deft", "autoregressive"),
    versions={"tiny": "1"},
)
_CIRCLE, _POINT = (90, 160, 110), (190, 60, 50)
_HOPELESS_TASK = "push the point to the corner"  # here the gripper never closes


class TinyServer(ThreadingHTTPServer):
    """Serves on a free port. `status` other than 200 is what every observation gets.

    So many of the next observations as `drops` says are taken in, and their callers hung up on.
    """

    daemon_threads = True

    def __init__(self, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.status = 200
        self.info = INFO
        self.drops = 0
        self.frames: Counter[str] = Counter()  # per session
        self.requests: list[ActMessage] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def answer(self, request: ActMessage) -> ActionChunk:
        session_id = request.options.session_id or ""
        self.frames[session_id] += 1
        self.requests.append(request)
        action = np.zeros(7)
        action[:2] = _push(request.observation.image)
        action[2] = 0.01 * self.frames[session_id]
        action[6] = 1.0 if request.observation.instruction == _HOPELESS_TASK else 0.0
        timings = StageTimings(prefill_ms=3.0, verify_ms=2.0, total_ms=6.0)
        return ActionChunk(action[None], timings, trace_of((3, 2), relaxed=1))


@contextmanager
def tiny_server() -> Iterator[TinyServer]:
    server = TinyServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _push(image: Image) -> NDArray[np.float64]:
    """From the middle of the point to the middle of the circle, as far as one action goes."""
    reds = image[:, :, 0]
    circle, point = (np.argwhere(reds == colour[0]) for colour in (_CIRCLE, _POINT))
    if not len(circle) or not len(point):
        return np.zeros(2)
    down, right = (circle.mean(axis=0) - point.mean(axis=0)) / len(image) / 0.02
    push: NDArray[np.float64] = np.array([right, -down]) / max(1.0, abs(right), abs(down))
    return push


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True  # or every answer waits 40 ms for an acknowledgement
    server: TinyServer

    def do_GET(self) -> None:
        if self.path == "/v1/info":
            self._reply(200, codec.encode_info(self.server.info), "application/json")
        else:
            self._reply(200, b"{}", "application/json")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        if self.path == "/v1/reset":
            self.server.frames.pop(json.loads(body)["session_id"], None)
            self._reply(200, b"{}", "application/json")
        elif self.server.status != 200:
            problem = Problem(self.server.status, "Broken on purpose", "as the test wants it")
            content = codec.encode_problem(problem)
            self._reply(self.server.status, content, "application/problem+json")
        else:
            chunk = self.server.answer(decode_request(body))
            if self.server.drops:
                self.server.drops -= 1
                self.close_connection = True
                return
            self._reply(200, encode_answer(chunk), WireFormat.MSGPACK.value)

    def _reply(self, status: int, body: bytes, content_type: str) -> None:
        self.send_response(status)
        self.send_header("content-type", content_type)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        """Stay silent."""


if __name__ == "__main__":
    TinyServer(int(sys.argv[1])).serve_forever()
