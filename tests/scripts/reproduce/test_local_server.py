"""The server that scripts start for themselves."""

import signal

import psutil
import pytest

from deft_client import PolicyClient
from deft_client.errors import TransportError
from scripts.local_server import local_server


def test_a_server_that_ends_too_early_is_quoted(capfd: pytest.CaptureFixture[str]) -> None:
    before = psutil.Process().children()  # multiprocessing keeps one for its own use
    with local_server("--policy", "constant") as url, PolicyClient(url) as client:
        assert client.info().action_dim == 7
        (server,) = set(psutil.Process().children()).difference(before)
        server.send_signal(signal.SIGTERM)
        server.wait(120)
        with pytest.raises(TransportError):
            client.ping()
    told = capfd.readouterr().err
    assert "ended with 0" in told
    assert "listening on http://" in told


def test_a_server_that_is_stopped_at_the_end_is_not(capfd: pytest.CaptureFixture[str]) -> None:
    with local_server("--policy", "constant"):
        pass
    assert capfd.readouterr().err == ""
