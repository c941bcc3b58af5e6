"""Loads a server: raw requests over kept connections, to cost the client little."""

import asyncio
import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import websockets.asyncio.client

from deft_client.types import ActOptions, Observation
from deft_client.wire.json_codec import decode
from deft_client.wire.messages import PROBLEM, ActMessage
from deft_client.wire.msgpack_codec import encode_request

Load = defaultdict[int, list[float]]  # by status: milliseconds from a request to its answer


def count_all(load: Load) -> int:
    """Answers of any status."""
    return sum(map(len, load.values()))


def frame(size: int) -> Observation:
    rng = np.random.default_rng(0)
    return Observation(rng.integers(0, 256, (size, size, 3), dtype=np.uint8), "lift the cup")


def message(size: int, session_id: str | None = None) -> bytes:
    return encode_request(ActMessage(frame(size), ActOptions(session_id=session_id)))


def http_request(body: bytes) -> bytes:
    head = (
        "POST /v1/act HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/msgpack\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


class Connection:
    """One kept HTTP connection."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, request: bytes) -> int:
        """Send a request and return the status of its answer."""
        if self._streams is None:
            self._streams = await asyncio.open_connection("127.0.0.1", self._port)
        reader, writer = self._streams
        writer.write(request)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        length = head.partition(b"content-length: ")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        return int(head.split(b" ", 2)[1])

    def close(self) -> None:
        if self._streams is not None:
            self._streams[1].close()


async def open_loop(
    port: int, requests: Sequence[bytes], rate_per_s: float, seconds: float
) -> Load:
    """Send at a fixed rate whatever the answers do: callers in turn that know nothing of others."""
    load, idle, tasks = Load(list), list[Connection](), set[asyncio.Task[None]]()
    start_s = time.perf_counter()

    async def one(sent_s: float, request: bytes) -> None:
        connection = idle.pop() if idle else Connection(port)
        status = await connection.ask(request)
        idle.append(connection)
        load[status].append((time.perf_counter() - sent_s) * 1000)

    for number in range(int(rate_per_s * seconds)):
        due_s = start_s + number / rate_per_s
        while (wait_s := due_s - time.perf_counter()) > 0:
            await asyncio.sleep(wait_s)
        task = asyncio.create_task(one(time.perf_counter(), requests[number % len(requests)]))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
    await asyncio.gather(*tasks)
    for connection in idle:
        connection.close()
    return load


async def sequential(port: int, request: bytes, count: int) -> Load:
    """Send one request after the other."""
    load, connection = Load(list), Connection(port)
    for _ in range(count):
        sent_s = time.perf_counter()
        status = await connection.ask(request)
        load[status].append((time.perf_counter() - sent_s) * 1000)
    connection.close()
    return load


async def sessions(port: int, bodies: Sequence[bytes], seconds: float) -> list[Load]:
    """Stream from one robot per body, each sending again as soon as it is answered.

    One that is refused waits as it is told to: else refusals alone would keep the server busy.
    """
    start_s = time.perf_counter()

    async def robot(body: bytes) -> Load:
        load = Load(list)
        async with websockets.asyncio.client.connect(
            f"ws://127.0.0.1:{port}/v1/stream", compression=None
        ) as socket:
            while (sent_s := time.perf_counter()) < start_s + seconds:
                await socket.send(body)
                reply = await socket.recv()
                took_ms, status = (time.perf_counter() - sent_s) * 1000, 200
                if isinstance(reply, str):
                    problem = decode(PROBLEM, reply.encode())
                    status = problem.status
                    await asyncio.sleep(problem.retry_after_s or 0.0)
                load[status].append(took_ms)
        return load

    return await asyncio.gather(*(robot(body) for body in bodies))
