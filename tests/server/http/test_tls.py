"""TLS: the server's certificate, and the clients' where they are demanded."""

import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.certificates import make_certificate, needs_openssl
from tests.server.process import ServerProcess, serving
from tests.standins.policies import MSGPACK, packed

pytestmark = needs_openssl


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(pair: tuple[Path, Path]) -> Iterator[ServerProcess]:
    """Return a server that demands a certificate of its clients, too."""
    certificate, key = map(str, pair)
    settings = f"tls_certificate={certificate!r}, tls_key={key!r}, tls_client_ca={certificate!r}"
    with serving(settings=settings) as server:
        yield server


def trusting(pair: tuple[Path, Path], has_own: bool) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=pair[0])
    if has_own:
        context.load_cert_chain(*pair)
    return context


def test_frames_travel_over_tls(server: ServerProcess, pair: tuple[Path, Path]):
    with httpx.Client(base_url=server.url, verify=trusting(pair, True), timeout=120) as client:
        for _ in range(500):  # the policy may still be loading
            if client.get("/readyz").status_code == 200:
                break
        assert client.post("/v1/act", content=packed(), headers=MSGPACK).status_code == 200


def test_a_client_without_a_certificate_is_not_let_in(
    server: ServerProcess, pair: tuple[Path, Path]
):
    with (
        httpx.Client(base_url=server.url, verify=trusting(pair, False), timeout=120) as client,
        pytest.raises(httpx.TransportError),
    ):
        client.get("/healthz")


def test_plain_http_is_not_spoken(server: ServerProcess):
    with pytest.raises(httpx.TransportError):
        httpx.get(server.url.replace("https", "http") + "/healthz", timeout=120)
