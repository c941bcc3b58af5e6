"""https and wss with a certificate of our own authority, as robots in a laboratory use them."""

import http.server
import shutil
import ssl
import subprocess
import threading

import pytest

from deft_client import ClientSettings, PolicyClient, StreamClient
from deft_client.errors import WrongServerError
from deft_client.settings import Retries, TlsFiles

OPENSSL = shutil.which("openssl")


class Ready(http.server.BaseHTTPRequestHandler):
    """Says yes to everything."""

    def do_GET(self):
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *given):
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
    with http.server.HTTPServer(("127.0.0.1", 0), Ready) as server:
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
    wary = ClientSettings(retries=Retries(attempts=1))
    with PolicyClient(url, wary) as policy, pytest.raises(WrongServerError, match="certif"):
        policy.ping()


def test_files_that_cannot_be_used_are_named(tmp_path):
    with pytest.raises(ValueError, match="missing.pem"):
        TlsFiles(ca_file=tmp_path / "missing.pem").context()
    (tmp_path / "text.pem").write_text("not a certificate")
    with pytest.raises(ValueError, match="text.pem"):
        TlsFiles(certificate_file=tmp_path / "text.pem").context()
