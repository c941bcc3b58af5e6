"""Makes certificates for tests of TLS."""

import shutil
import subprocess
from pathlib import Path

import pytest

needs_openssl = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="openssl is not installed"
)


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """Return a self-signed certificate for 127.0.0.1 and its key; it is its own authority."""
    certificate, key = folder / "certificate.pem", folder / "key.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
        "-subj /CN=deft -addext subjectAltName=IP:127.0.0.1"
    )
    files = ["-out", str(certificate), "-keyout", str(key)]
    subprocess.run([*command.split(), *files], check=True, capture_output=True)
    return certificate, key
