"""A server on a free port of this machine, in a thread, as uvicorn really runs it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from fastapi import FastAPI
from fastapi.testclient import TestClient


@contextmanager
def running(
    app: FastAPI, ping_s: float = 20.0, websockets: Any = "websockets-sansio"
) -> Iterator[str]:
    """Serve an app; yields `127.0.0.1:PORT`."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        config = uvicorn.Config(
            app,
            ws=websockets,
            log_level="error",
            ws_ping_interval=ping_s,
            ws_ping_timeout=ping_s,
            timeout_graceful_shutdown=2,
        )
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run, args=([listening],), daemon=True)
        thread.start()
        while not server.started:
            assert thread.is_alive(), "the server did not start"
            thread.join(0.005)
        try:
            yield f"127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join(10)


def client_of(app: FastAPI, client: tuple[str, int] = ("testclient", 50000)) -> TestClient:
    """Return a client in this process, which calls the server by an address as robots do.

    `client` is the address that the server sees.
    """
    # Its WebSockets would not take the address from the base URL.
    headers = {"host": "127.0.0.1"}
    return TestClient(app, base_url="http://127.0.0.1", headers=headers, client=client)
