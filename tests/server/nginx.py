"""nginx on this machine with the files of deploy/nginx, before a server."""

import os
import re
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.server.certificates import make_certificate

FOLDER = Path(__file__).parents[2] / "deploy" / "nginx"
NEEDS_NGINX = pytest.mark.skipif(
    shutil.which("nginx") is None and os.environ.get("DEFT_TEST_NGINX") != "required",
    reason="needs nginx",
)
WEBSOCKETS_ALONE = '"~*^websocket$" websocket;'


@dataclass(frozen=True)
class Proxy:
    port: int
    tls_port: int
    certificate: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def tls_url(self) -> str:
        return f"https://127.0.0.1:{self.tls_port}"


@contextmanager
def nginx_before(
    server_port: int,
    folder: Path,
    timeout_s: int = 10,
    streams: int = 64,
    closes_plain: bool = False,
    upstream: str = "upstream.conf",
    hands_on_upgrades: bool = False,
) -> Iterator[Proxy]:
    """Our files as they are, but for addresses and, where told, times, connections, plain HTTP.

    With `hands_on_upgrades` a client's `Upgrade` is handed on whatever it offers, as many do.
    """
    certificate, key = make_certificate(folder)
    proxy = Proxy(_free_port(), _free_port(), certificate)
    servers = (FOLDER / upstream).read_text()
    servers = re.sub(r"(front-[12]|127\.0\.0\.1):8000", f"127.0.0.1:{server_port}", servers)
    deft = (FOLDER / "deft.conf").read_text()
    deft = deft.replace("listen 80;", f"listen 127.0.0.1:{proxy.port};")
    deft = deft.replace("/etc/nginx/deft", str(folder))
    deft = re.sub(r"client_(header|body)_timeout 10s", rf"client_\1_timeout {timeout_s}s", deft)
    deft = deft.replace("deft_streams 64", f"deft_streams {streams}")
    if hands_on_upgrades:
        assert WEBSOCKETS_ALONE in deft
        deft = deft.replace(WEBSOCKETS_ALONE, '"~." $http_upgrade;')
    tls = (FOLDER / "tls.conf.example").read_text()
    tls = tls.replace("listen 443 ssl;", f"listen 127.0.0.1:{proxy.tls_port} ssl;")
    if not closes_plain:
        tls = re.sub(r"if \(.*?\n}\n", "", tls, flags=re.DOTALL)
    tls = tls.replace("/etc/nginx/deft/server.crt", str(certificate))
    (folder / "tls.conf").write_text(tls.replace("/etc/nginx/deft/server.key", str(key)))
    paths = "".join(
        f"{kind}_temp_path {folder}/{kind};"
        for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (folder / "nginx.conf").write_text(
        f"daemon off; pid {folder}/pid; events {{ worker_connections 4096; }}\n"
        f"http {{\naccess_log off; {paths}\n{servers}\n{deft}\n}}\n"
    )
    command = ["nginx", "-p", str(folder), "-c", "nginx.conf", "-e", str(folder / "errors")]
    running = subprocess.Popen(command)
    try:
        _wait_for(proxy.port, running)
        yield proxy
    finally:
        running.terminate()
        running.wait()


def _free_port() -> int:
    with closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _wait_for(port: int, running: "subprocess.Popen[bytes]") -> None:
    pause = threading.Event()
    for _ in range(500):
        assert running.poll() is None, "nginx ended"
        try:
            socket.create_connection(("127.0.0.1", port), 5).close()
        except ConnectionRefusedError:
            pause.wait(0.02)
        else:
            return
    raise AssertionError("nginx never listened")
