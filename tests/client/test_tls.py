"""https and wss with a certificate of our own authority, as robots in a laboratory use them."""

import http.server
import shutil
import ssl
import subprocess
import threading

import pytest

from deft_client import ClientSettings, PolicyClient, StreamClient
from deft_client.errors import ServerUnreachableError, WrongServerError
from deft_client.settings import Retries, TlsFiles
from tests.core.samples import full_message

ONCE = ClientSettings(retries=Retries(attempts=1))
OBSERVATION = full_message().observation
OPENSSL = shutil.which("openssl")


class Ready(http.server.BaseHTTPRequestHandler):
    """Says yes to everything."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *given):
        pass


class TlsServer(http.server.HTTPServer):
    """Says nothing of callers that speak no TLS."""

    def handle_error(self, *given):
        pass


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A self-signed certificate for 127.0.0.1 and its key."""
    directory = tmp_path_factory.mktemp("tls")
    files = directory / "server.pem", directory / "server.key"
    subject = ["-subj", "/CN=robot", "-addext", "subjectAltName=IP:127.0.0.1"]
    request = [OPENSSL, "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    outputs = ["-nodes", "-days", "2", "-out", files[0], "-keyout", files[1]]
    subprocess.run([*request, *outputs, *subject], check=True, capture_output=True)
    return files


@pytest.fixture
def url(certificate):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    with TlsServer(("127.0.0.1", 0), Ready) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"https://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("client", [PolicyClient, StreamClient])
def test_a_client_without_tls_reads_no_certificates(client, monkeypatch):
    def refuse(*given, **named):
        raise AssertionError("certificates were read")

    monkeypatch.setattr(ssl, "create_default_context", refuse)
    with client("http://127.0.0.1:9"):
        pass


@pytest.mark.skipif(OPENSSL is None, reason="makes its certificate with openssl")
def test_a_server_is_trusted_because_of_its_authority_and_not_otherwise(url, certificate):
    trusting = ClientSettings(tls=TlsFiles(ca_file=certificate[0]))
    with PolicyClient(url, trusting) as policy:
        assert policy.ping() > 0
    for kind in (PolicyClient, StreamClient):
        with kind(url) as policy, pytest.raises(WrongServerError) as caught:
            policy.act(OBSERVATION)
        assert "the certificate of 127.0.0.1 is self-signed: give --ca-file" in str(caught.value)


@pytest.mark.skipif(OPENSSL is None, reason="makes its certificate with openssl")
def test_a_certificate_for_another_name_is_said_to_be_one(url, certificate):
    trusting = ClientSettings(tls=TlsFiles(ca_file=certificate[0]))
    elsewhere = url.replace("127.0.0.1", "localhost")
    refused = pytest.raises(WrongServerError, match="is not for localhost")
    with PolicyClient(elsewhere, trusting) as policy, refused:
        policy.ping()


@pytest.mark.skipif(OPENSSL is None, reason="makes its certificate with openssl")
def test_plain_http_to_a_port_of_tls_is_told_to_write_https(url):
    """The other side hangs up without a word, or answers in TLS."""
    plain = url.replace("https", "http")
    for kind in (PolicyClient, StreamClient):
        with kind(plain, ONCE) as policy, pytest.raises(ServerUnreachableError) as caught:
            policy.act(OBSERVATION)
        assert str(caught.value).endswith("write https://")
        assert ".;" not in str(caught.value)


@pytest.mark.parametrize("kind", [PolicyClient, StreamClient])
def test_tls_to_a_port_of_plain_http_is_told_to_write_http(kind):
    with http.server.HTTPServer(("127.0.0.1", 0), Ready) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            secure = kind(f"https://127.0.0.1:{server.server_port}")
            with secure as policy, pytest.raises(WrongServerError) as caught:
                policy.act(OBSERVATION)
        finally:
            server.shutdown()
            thread.join()
    assert str(caught.value).endswith(f"port {server.server_port} speaks no TLS: write http://")


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(ValueError, match="missing.pem"):
        TlsFiles(ca_file=tmp_path / "missing.pem").context()
    (tmp_path / "text.pem").write_text("not a certificate")
    with pytest.raises(ValueError, match="text.pem"):
        TlsFiles(certificate_file=tmp_path / "text.pem").context()
