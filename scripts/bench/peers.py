"""The least that a peer's server takes here, to compare with.

Both have the peers' architecture and none of its checks: OpenVLA's `deploy.py` is FastAPI with a
body of JSON and json_numpy's encoding, openpi's server is `websockets` with msgpack.
"""

import asyncio
import base64
import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import uvicorn
import websockets.asyncio.server
from fastapi import FastAPI
from fastapi.responses import JSONResponse

from deft_client.peers.arrays import pack

WEBSOCKETS, FASTAPI = "websockets", "fastapi"
_SIZE = 256


@contextmanager
def peer(kind: str) -> Iterator[int]:
    """Run one of the two in a process of its own; yield its port."""
    command = [sys.executable, "-m", "scripts.bench.peers", kind]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    try:
        yield int(child.stdout.readline())
    finally:
        child.kill()
        child.wait()
        child.stdout.close()


async def serve_websockets() -> None:
    reply = pack({"actions": np.zeros((1, 7)), "server_timing": {"infer_ms": 0.0}})

    async def answer(connection: websockets.asyncio.server.ServerConnection) -> None:
        async for message in connection:
            msgpack.unpackb(message, strict_map_key=False)
            await connection.send(reply)

    serving = websockets.asyncio.server.serve(answer, "127.0.0.1", 0, compression=None)
    async with serving as server:
        print(server.sockets[0].getsockname()[1], flush=True)
        await server.serve_forever()


def serve_fastapi() -> None:
    app = FastAPI()

    def act(payload: dict[str, Any]) -> JSONResponse:
        given = payload["image"]
        frame = np.frombuffer(base64.b64decode(given["__numpy__"]), given["dtype"])
        assert frame.reshape(given["shape"]).shape == (_SIZE, _SIZE, 3)
        action = base64.b64encode(np.zeros(7).tobytes()).decode()
        return JSONResponse({"__numpy__": action, "dtype": "<f8", "shape": [7]})

    app.post("/act")(act)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        print(listening.getsockname()[1], flush=True)
        uvicorn.Server(uvicorn.Config(app, log_level="error")).run([listening])


def openvla_body(image: np.ndarray, instruction: str) -> bytes:
    """Return what OpenVLA's own client sends."""
    data = base64.b64encode(image.tobytes()).decode()
    encoded = {"__numpy__": data, "dtype": "|u1", "shape": list(image.shape)}
    return json.dumps({"image": encoded, "instruction": instruction}).encode()


if __name__ == "__main__":
    if sys.argv[1] == FASTAPI:
        serve_fastapi()
    else:
        asyncio.run(serve_websockets())
