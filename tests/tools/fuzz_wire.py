"""Sends damaged messages of every protocol to a running server: no 5xx, no hang, no growth.

python -m tests.tools.fuzz_wire --count 10000 [--seed 7]
"""

import argparse
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import msgpack
import numpy as np
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

from deft_core.types import ActOptions, Observation
from deft_core.wire import codec
from deft_core.wire.formats import WireFormat
from deft_core.wire.images import ImageEncoding, encode_image
from deft_core.wire.messages import ActMessage
from scripts.local_server import local_server, resident_mb
from tests.core.peers.captures import act_captures, frames
from tests.core.peers.mutations import mutate

PATIENCE_S = 10.0
MOST_GROWTH_MB = 16.0  # pools and caches may still fill; each message may not leave anything
RESET = msgpack.packb({"endpoint": "reset"})
FORM = "multipart/form-data; boundary=xyz"
DONE = msgpack.packb({"status": "reset successful"})
OFT = "POST /act, OFT"
FLAGS = {OFT: ("--profile", "oft")}
Send = Callable[[bytes], str]


def _own_message() -> ActMessage:
    image = np.arange(16 * 16 * 3, dtype=np.uint8).reshape(16, 16, 3)
    state = np.arange(8, dtype=np.float32)
    options = ActOptions(session_id="arm", want_trace=True, radius=3)
    return ActMessage(Observation(image, "lift", {"wrist": image}, state), options)


def _own_form() -> bytes:
    image = encode_image(_own_message().observation.image, ImageEncoding.PNG)
    parts = [b'name="instruction"\r\n\r\nlift', b'name="state"\r\n\r\n[1, 2]']
    parts.append(b'name="image"; filename="x.png"\r\n\r\n' + image)
    start = b"--xyz\r\ncontent-disposition: form-data; "
    return b"\r\n".join(start + part for part in parts) + b"\r\n--xyz--\r\n"


def _camera_frame() -> bytes:
    """Return a message of a real frame's size, which the server reads in a shorter way."""
    image = np.arange(256 * 256 * 3, dtype=np.uint32).astype(np.uint8).reshape(256, 256, 3)
    return codec.encode_request(ActMessage(Observation(image, "lift"), ActOptions()))


@contextmanager
def _http(url: str, path: str, content_type: str) -> Iterator[Send]:
    headers = {"content-type": content_type, "x-deft-errors": "problem"}
    with httpx.Client(base_url=url, timeout=PATIENCE_S, headers=headers) as client:
        yield lambda body: str(client.post(path, content=body).status_code)


class _Socket:
    """Sends frames over one connection for as long as the server keeps it, then over a new one."""

    def __init__(self, address: str, has_greeting: bool) -> None:
        self._address = address
        self._has_greeting = has_greeting
        self._held: ClientConnection | None = None

    def send(self, frame: bytes) -> str:
        try:
            return self._exchange(self._connection(), frame)
        except TimeoutError:
            return "silence"
        except ConnectionClosed as closed:
            self._held = None
            return f"closed {closed.rcvd.code if closed.rcvd else '-'}"

    def close(self) -> None:
        if self._held is not None:
            self._held.close()
            self._held = None

    def _connection(self) -> ClientConnection:
        if self._held is None:
            self._held = connect(self._address, max_size=None).__enter__()
            if self._has_greeting:
                self._held.recv(PATIENCE_S)
        return self._held

    def _exchange(self, held: ClientConnection, frame: bytes) -> str:
        held.send(frame)
        if not self._has_greeting:
            return "text" if isinstance(held.recv(PATIENCE_S), str) else "answer"
        held.send(RESET)  # some of vla-eval's messages have no answer, but a reset always has
        answer = held.recv(PATIENCE_S)
        if isinstance(answer, str):  # an error ends these connections
            self.close()
            return "text"
        if answer != DONE:
            held.recv(PATIENCE_S)
        return "answer"


@contextmanager
def _websocket(url: str, path: str, has_greeting: bool) -> Iterator[Send]:
    held = _Socket(url.replace("http", "ws") + path, has_greeting)
    yield held.send
    held.close()


def _originals() -> dict[str, tuple[list[bytes], Callable[[str], Iterator[Send]]]]:
    act = [one.request for one in act_captures() if one.request]
    oft = [body.replace(b'"image"', b'"full_image"') for body in act]
    own, own_json = (codec.encode_request(_own_message(), wire_format=one) for one in WireFormat)
    sockets = lambda path, greets: lambda url: _websocket(url, path, greets)  # noqa: E731
    return {
        "POST /v1/act, msgpack": (
            [own],
            lambda url: _http(url, "/v1/act", WireFormat.MSGPACK.value),
        ),
        "POST /v1/act, JSON": ([own_json], lambda url: _http(url, "/v1/act", "application/json")),
        "POST /v1/act, form": ([_own_form()], lambda url: _http(url, "/v1/act", FORM)),
        "WebSocket /v1/stream": ([own, _camera_frame()], sockets("/v1/stream", False)),
        "POST /act": (act, lambda url: _http(url, "/act", "application/json")),
        OFT: (oft, lambda url: _http(url, "/act", "application/json")),
        "WebSocket /, openpi": (list(frames("openpi").values()), sockets("/", True)),
        "WebSocket /, vla-eval": (list(frames("vlaeval").values()), sockets("/", True)),
    }


def _fuzz(name: str, count: int, url: str, seed: int) -> bool:
    originals, opened = _originals()[name]
    rng = random.Random(f"{seed} {name}")
    outcomes: Counter[str] = Counter()
    worst_s = 0.0
    with opened(url) as send:  # type: ignore[attr-defined]
        for _ in range(200):  # fills caches and pools, so that growth afterwards is growth
            send(mutate(rng.choice(originals), rng))
        before_mb, started_s = resident_mb(url), time.perf_counter()
        for _ in range(count):
            sent_s = time.perf_counter()
            outcomes[send(mutate(rng.choice(originals), rng))] += 1
            worst_s = max(worst_s, time.perf_counter() - sent_s)
    grown_mb = resident_mb(url) - before_mb
    failed = sum(times for outcome, times in outcomes.items() if outcome.startswith("5"))
    told = ", ".join(f"{outcome}: {times}" for outcome, times in outcomes.most_common())
    print(f"{name}: {count} in {time.perf_counter() - started_s:.0f} s; {told}", flush=True)
    print(f"    slowest {worst_s * 1000:.0f} ms, memory {grown_mb:+.1f} MB, 5xx: {failed}")
    return failed == 0 and worst_s < PATIENCE_S and grown_mb < MOST_GROWTH_MB


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=10_000, help="messages per protocol")
    parser.add_argument("--protocol", action="append", choices=list(_originals()))
    parser.add_argument("--seed", type=int, default=random.randrange(10**6), help="[a new one]")
    options = parser.parse_args()
    print(f"seed {options.seed}")
    passed = []
    for protocol in options.protocol or _originals():
        with local_server("--policy", "constant", *FLAGS.get(protocol, ())) as url:
            passed.append(_fuzz(protocol, options.count, url, options.seed))
            passed.append(httpx.get(f"{url}/healthz").status_code == 200)
    print("PASS" if all(passed) else "FAIL")
    return 0 if all(passed) else 1


if __name__ == "__main__":
    raise SystemExit(main())
