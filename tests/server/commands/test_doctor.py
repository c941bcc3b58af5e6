"""`deft doctor` finds what would stop `deft serve`."""

import os
import socket
import stat
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.util import find_spec
from pathlib import Path
from threading import Thread

import pytest

from deft_policies.base import Verdict
from deft_server.commands import doctor
from deft_server.commands import doctor as machine
from deft_server.settings import Settings

needs_torch = pytest.mark.skipif(find_spec("torch") is None, reason="needs torch: make install")
KEYS = '[arm]\nkey = "arm-secret-0123456789"\n'


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DEFT_CACHE_DIR", str(tmp_path / "cache"))
    for name in [one for one in os.environ if one.startswith("DEFT_SERVER_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


def driver(tmp_path: Path, script: str) -> tuple[str]:
    """Return a stand-in for nvidia-smi."""
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return (str(path),)


def test_a_machine_that_can_serve_is_told_so(capsys: pytest.CaptureFixture[str]):
    assert doctor.main(["--policy", "constant", "--port", "0"]) == 0
    said = capsys.readouterr().out
    assert "0 errors" in said
    assert "constant needs nothing" in said


def test_a_port_that_is_taken_is_an_error(taken_port: int, capsys: pytest.CaptureFixture[str]):
    assert doctor.main(["--policy", "constant", "--port", str(taken_port)]) == 1
    said = capsys.readouterr().out
    assert f"127.0.0.1:{taken_port}" in said
    assert "\n1 error, " in said


def test_a_deft_that_runs_on_the_port_is_no_error(capsys: pytest.CaptureFixture[str]):
    class Healthy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"OK\n" if self.path == "/healthz" else b"")

        def log_message(self, *_: object) -> None:
            return None

    with HTTPServer(("127.0.0.1", 0), Healthy) as server:
        answering = Thread(target=server.handle_request, daemon=True)
        answering.start()
        assert doctor.main(["--policy", "constant", "--port", str(server.server_port)]) == 0
        answering.join()
    said = capsys.readouterr().out
    assert f"a Deft server answers at 127.0.0.1:{server.server_port}" in said
    assert "\n0 errors, " in said


def test_settings_that_cannot_be_used_are_an_error(capsys: pytest.CaptureFixture[str]):
    assert doctor.main(["--max-batch", "0"]) == 1
    assert "max_batch" in capsys.readouterr().out


@needs_torch
def test_a_missing_checkpoint_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    empty = tmp_path / "empty"
    empty.mkdir()
    flags = ["--policy", "openvla", "--device", "cpu", "--port", "0"]
    assert doctor.main([*flags, "--checkpoint", str(empty)]) == 1
    assert str(empty) in capsys.readouterr().out
    assert doctor.main(flags) == 1
    assert "give --checkpoint" in capsys.readouterr().out


@needs_torch
def test_a_path_that_is_not_there_is_no_hub_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """It was to be 'fetched from the hub' without an error, and the server then ended."""
    flags = ["--device", "cpu", "--port", "0", "--checkpoint", str(tmp_path / "nothing")]
    assert doctor.main(flags) == 1
    assert f"there is no directory {tmp_path / 'nothing'}" in capsys.readouterr().out


@needs_torch
def test_a_model_of_the_hub_is_an_error_where_the_hub_is_not_reached(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    flags = ["--device", "cpu", "--port", "0", "--checkpoint", "openvla/openvla-7b"]
    assert doctor.main(flags) == 1
    assert "openvla/openvla-7b is no directory here, and the hub" in capsys.readouterr().out


@needs_torch
def test_a_good_checkpoint_is_found_good(capsys: pytest.CaptureFixture[str]):
    tiny = Path(__file__).parents[2] / "golden" / "tiny_openvla"
    flags = ["--policy", "openvla", "--device", "cpu", "--port", "0", "--checkpoint", str(tiny)]
    assert doctor.main([*flags, "--statistics-key", "bridge_orig"]) == 0
    said = capsys.readouterr().out
    assert "all tensors, tokenizer and statistics" in said
    assert "bridge_orig of" in said
    assert doctor.main([*flags, "--statistics-key", "nope"]) == 1
    assert "bridge_orig" in capsys.readouterr().out


def test_a_gpu_is_named_and_a_broken_driver_too(tmp_path: Path):
    good = machine.examine_gpu(driver(tmp_path, "echo 'NVIDIA H200, 143771 MiB, 1 MiB, 570'"))
    assert (good.verdict, good.text) == (Verdict.GOOD, "NVIDIA H200, 143771 MiB, 1 MiB, 570")
    broken = machine.examine_gpu(driver(tmp_path, "echo 'driver mismatch' >&2; exit 9"))
    assert broken.verdict is Verdict.BAD
    assert "driver mismatch" in broken.text
    assert machine.examine_gpu(("no-such-program",)).verdict is Verdict.DOUBTFUL


def test_a_server_open_to_the_network_without_keys_is_doubtful(tmp_path: Path):
    bare = machine.examine_exposure(Settings(host="0.0.0.0", allow_anyone=True))
    assert bare.verdict is Verdict.DOUBTFUL
    assert "API keys" in bare.text
    assert "TLS" in bare.text
    kept = Settings(host="0.0.0.0", keys_file=tmp_path, tls_key=tmp_path, tls_certificate=tmp_path)
    assert machine.examine_exposure(kept).verdict is Verdict.GOOD
    for host in ("127.0.0.1", "localhost", "::1"):
        assert machine.examine_exposure(Settings(host=host)).verdict is Verdict.GOOD


def test_keys_that_others_may_read_are_doubtful(tmp_path: Path):
    path = tmp_path / "keys.toml"
    assert machine.examine_keys(path).verdict is Verdict.BAD
    path.write_text(KEYS)
    path.chmod(0o644)
    assert "chmod 600" in machine.examine_keys(path).text
    path.chmod(0o600)
    assert machine.examine_keys(path).verdict is Verdict.GOOD


def test_tls_files_that_cannot_be_used_are_an_error(tmp_path: Path):
    files = Settings(tls_certificate=tmp_path / "a.pem", tls_key=tmp_path / "b.pem")
    assert machine.examine_tls(files).verdict is Verdict.BAD


def test_too_few_open_files_and_too_little_disk_are_doubtful(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    assert machine.examine_open_files(10**9).verdict is Verdict.DOUBTFUL
    assert machine.examine_open_files(1).verdict is Verdict.GOOD
    monkeypatch.setattr(machine, "MIN_FREE_DISK_BYTES", 2**62)
    assert machine.examine_disk(tmp_path / "to" / "be" / "made").verdict is Verdict.DOUBTFUL
