"""Environments of their own for other projects' packages, installed once and kept between runs."""

import fcntl
import subprocess
import sys
import sysconfig
from pathlib import Path


def peer_python(home: Path, packages: tuple[str, ...], with_torch: bool = False) -> str:
    """Return the interpreter of an environment with exactly these packages.

    `with_torch` lets it find what is installed here behind what is its own: torch comes from there.
    """
    interpreter = home / "bin" / "python"
    marker = home / "installed.txt"
    wanted = "\n".join(packages)
    with home.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another worker of this test run may be at it
        if not marker.exists() or marker.read_text() != wanted:
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(home)], check=True)
            pip = [str(interpreter), "-m", "pip", "install", "--quiet", "--no-deps"]
            subprocess.run([*pip, "--disable-pip-version-check", *packages], check=True)
            if with_torch:
                (site,) = home.glob("lib/python*/site-packages")
                (site / "zz_behind.pth").write_text(sysconfig.get_path("purelib"))
            marker.write_text(wanted)
    return str(interpreter)
