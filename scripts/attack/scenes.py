"""Attacks that are no floods: other names, keys taken away, full disks, answers that are not
numbers, and servers that hold up their callers. Each returns what came of it.
"""

import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
import numpy as np
import websockets.sync.client
from websockets.exceptions import ConnectionClosed

from deft_client import ClientSettings
from deft_client.recordings import find_episodes, read_episode
from deft_client.types import ActOptions, Observation
from deft_client.wire import msgpack_codec
from deft_client.wire.messages import ActMessage
from deft_server.reproduce.local_server import local_server
from scripts.attack.outcomes import AttackOutcome
from scripts.check_deadlines import ARM_MAY_WAIT_S, CALL_MAY_TAKE_S, endurance
from tests.server.process import serving

CONSTANT = ("--policy", "constant")
MSGPACK = {"content-type": msgpack_codec.CONTENT_TYPE}
STREAMS = ("/v1/stream", "/dashboard/feed", "/")
KEY_GONE_WITHIN_S = 3.0
ARM, BOSS, OTHER = ("arm-secret-0123456789", "boss-secret-0123456789", "other-secret-0123456789")
NUM_FRAMES = 300


def frame(side: int = 64) -> bytes:
    """Return a request with a picture of noise, which does not shrink on a disk."""
    image = np.random.default_rng(0).integers(0, 256, (side, side, 3), np.uint8)
    message = ActMessage(Observation(image, "lift"), ActOptions(session_id="arm"))
    return msgpack_codec.encode_request(message)


def rebinding() -> AttackOutcome:
    """Call the server by names that lead to it, as a web page can make a browser do."""
    names = ("evil.example", "127.0.0.1.evil.example", "localhost.evil.example:80", "")
    faults, tried = [], 0
    with local_server(*CONSTANT) as url, httpx.Client(base_url=url) as client:
        port = url.rsplit(":", 1)[1]
        for name in names:
            calls = [("GET", path) for path in ("/", "/v1/info", "/dashboard", "/openapi.json")]
            calls += [("POST", path) for path in ("/v1/act", "/act", "/v1/reset")]
            for method, path in calls:
                status = client.request(method, path, headers={"host": name}).status_code
                faults += [f"{method} {path} as {name!r}: {status}"] * (status != 421)
            for path in STREAMS:
                status = _handshake(port, path, name)
                faults += [f"WebSocket {path} as {name!r}: {status}"] * (status != 421)
            tried += len(calls) + len(STREAMS)
    return AttackOutcome({"calls": tried}, tuple(faults))


def _handshake(port: str, path: str, host: str) -> int:
    """Return the status that a WebSocket handshake gets under another name."""
    request = (
        f"GET {path} HTTP/1.1\r\nhost: {host}\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
        "sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", int(port)), 10) as opened:
        opened.sendall(request.encode())
        return int(opened.recv(4096).split(b" ", 2)[1])


def revoked_keys() -> AttackOutcome:
    """Take two keys out of the file while their owners stream, watch, and call."""
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys.toml"
        other = f'[other]\nkey = "{OTHER}"\n'
        keys.write_text(f'[arm]\nkey = "{ARM}"\n[boss]\nkey = "{BOSS}"\nadmin = true\n{other}')
        settings = ClientSettings(api_key=OTHER)
        with (
            local_server(*CONSTANT, "--keys-file", str(keys), settings=settings) as url,
            _opened(url, "/v1/stream", ARM) as stream,
            _opened(url, "/dashboard/feed") as feed,
        ):
            stream.send(frame())
            stream.recv(10)
            feed.send(f'{{"key": "{BOSS}"}}')
            feed.recv(10)
            keys.write_text(other)
            revoked_s = time.monotonic()
            faults = [f"{name} stays open" for name, one in (("stream", stream), ("feed", feed))
                      if not _ends(one, revoked_s + KEY_GONE_WITHIN_S)]  # fmt: skip
            ended_s = time.monotonic() - revoked_s
            for key, wanted in ((ARM, 401), (BOSS, 401), (OTHER, 200)):
                headers = {**MSGPACK, "authorization": f"Bearer {key}"}
                status = httpx.post(f"{url}/v1/act", content=frame(), headers=headers).status_code
                faults += [f"a call afterwards: {status}, not {wanted}"] * (status != wanted)
    return AttackOutcome({"ended_s": round(ended_s, 2)}, tuple(faults))


def _opened(url: str, path: str, key: str = "") -> websockets.sync.client.ClientConnection:
    headers = {"authorization": f"Bearer {key}"} if key else None
    address = url.replace("http", "ws") + path
    return websockets.sync.client.connect(address, additional_headers=headers, max_size=None)


def _ends(stream: websockets.sync.client.ClientConnection, until_s: float) -> bool:
    """Tell whether the server ends a stream in time, whatever it says before."""
    with suppress(TimeoutError):
        while (left_s := until_s - time.monotonic()) > 0:
            try:
                stream.recv(left_s)
            except ConnectionClosed:
                return True
    return False


def full_disk() -> AttackOutcome:
    """Record on a disk of a megabyte until it is full, and beyond."""
    with tempfile.TemporaryDirectory() as folder, _small_disk(Path(folder)) as is_small:
        if not is_small:
            return AttackOutcome({}, skipped="this machine does not allow mounting a file system")
        flags = (*CONSTANT, "--record", folder, "--record-min-free-bytes", "0")
        with local_server(*flags) as url, httpx.Client(base_url=url) as client:
            codes = [
                client.post("/v1/act", content=frame(), headers=MSGPACK).status_code
                for _ in range(NUM_FRAMES)
            ]
        faults = [f"{code} while the disk was full" for code in set(codes) if code != 200]
        steps = [
            step.index for one in find_episodes(Path(folder)) for step in read_episode(one).steps
        ]
        if steps != list(range(len(steps))) or not 10 < len(steps) < NUM_FRAMES:
            faults.append(f"steps {steps[:3]} to {steps[-3:]} can be read")
    return AttackOutcome({"frames": len(codes), "steps_kept": len(steps)}, tuple(faults))


@contextmanager
def _small_disk(folder: Path) -> Iterator[bool]:
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    can_mount = shutil.which("mount") is not None
    is_mounted = can_mount and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield is_mounted
    finally:
        if is_mounted:
            subprocess.run(["umount", str(folder)], check=True)


def answers_that_are_no_numbers() -> AttackOutcome:
    """Serve a policy that answers with NaN, infinity, and what is far out of its range."""
    faults, answered = [], 0
    for value in ("np.nan", "np.inf", "1e300"):
        policy = f"LimitedFake(next_actions=np.full((1, 7), {value}))"
        with serving(policy) as server:
            server.wait_until_ready()
            for _ in range(20):
                response = server.http.post("/v1/act", content=frame(), headers=MSGPACK)
                answered += 1
                if response.status_code != 500 or b"actions" in response.content:
                    faults.append(f"{value} was served with {response.status_code}")
            ready, alive = (server.http.get(path).status_code for path in ("/readyz", "/healthz"))
            if (ready, alive) != (503, 200):
                faults.append(f"/readyz {ready} and /healthz {alive} while {value} is answered")
    return AttackOutcome({"frames": answered}, tuple(faults))


def servers_that_hold_up() -> AttackOutcome:
    """Call servers that are frozen, drip, flood or refuse; see scripts/hostile_servers.py."""
    faults, call_s, gap_s = [], 0.0, 0.0
    for manner, calls_s, loop_gap_s in endurance(num_periods=10):
        call_s, gap_s = max(call_s, *calls_s.values()), max(gap_s, loop_gap_s)
        if max(calls_s.values()) >= CALL_MAY_TAKE_S or loop_gap_s >= ARM_MAY_WAIT_S:
            faults.append(f"{manner}: {max(calls_s.values()):.3f} s, arm {loop_gap_s:.3f} s")
    figures = {"call_s": round(call_s, 3), "arm_gap_s": round(gap_s, 3)}
    return AttackOutcome(figures, tuple(faults))


SCENES: tuple[Callable[[], AttackOutcome], ...] = (
    *(rebinding, revoked_keys, full_disk, answers_that_are_no_numbers, servers_that_hold_up),
)
