"""A client that was made before a fork: neither process gets an answer to the other's frames."""

import http.server
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from deft_client import PolicyClient, StreamClient
from deft_client.settings import ClientSettings, Timeouts
from deft_core.errors import DeftError
from deft_core.types import ActionChunk, Observation
from deft_core.wire import codec
from tests.core.samples import frame
from tests.standins.policy_server import streaming

SETTINGS = ClientSettings(timeouts=Timeouts(answer_s=60))
NUM_FRAMES = 40


def answer(request: bytes) -> bytes:
    """Say which frame is answered."""
    message = codec.decode_request(request)
    number = float(message.observation.instruction)
    return codec.encode_answer(ActionChunk(np.array([[number]])), message.id)


class Answering(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        content = answer(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *given):
        pass


@contextmanager
def over_http() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@contextmanager
def over_a_stream() -> Iterator[str]:
    with streaming() as stream:
        stream.otherwise = answer
        yield stream.url


def num_foreign(client: PolicyClient, first: int) -> int:
    """Return how many of some frames were not answered, or answered by what was not asked."""
    count = 0
    for number in range(first, first + NUM_FRAMES):
        try:
            chunk = client.act(Observation(frame(8, 8), str(number)))
            count += chunk.actions.tolist() != [[number]]
        except DeftError:
            count += 1
    return count


@pytest.mark.parametrize(
    ("kind", "serving"), [(PolicyClient, over_http), (StreamClient, over_a_stream)]
)
def test_after_a_fork_each_process_gets_its_own_answers(kind, serving):
    with serving() as url, kind(url, SETTINGS) as client:
        assert num_foreign(client, 0) == 0
        child = os.fork()
        if child == 0:  # which must never return into pytest
            try:
                count = num_foreign(client, 1000)
                client.close()
            except BaseException:  # noqa: BLE001
                count = 99
            os._exit(count)
        assert num_foreign(client, 2000) == 0
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert num_foreign(client, 3000) == 0  # the child's end closed nothing of ours
