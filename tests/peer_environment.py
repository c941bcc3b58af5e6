"""Environments of their own for other projects' packages, installed once and kept between runs."""

import fcntl
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

LEROBOT = (
    "lerobot==0.4.4", "datasets==4.4.1", "huggingface-hub==0.35.3", "torchvision==0.28.0",
    "transformers==4.57.6", "tokenizers==0.22.2", "diffusers==0.35.2",
    "importlib-metadata", "pyserial", "regex", "zipp",
    "accelerate==1.12.0", "aiohttp", "anyio", "attrs", "av==15.1.0", "certifi",
    "charset-normalizer", "deepdiff==8.6.1", "dill==0.4.0", "draccus==0.10.0", "einops",
    "filelock", "fsspec==2025.10.0", "h11", "httpcore", "httpx", "idna", "jsonlines", "mergedeep",
    "multiprocess==0.70.18", "mypy-extensions", "numpy==2.2.6", "orderly-set", "packaging",
    "pandas==2.3.3", "pillow", "psutil", "pyarrow==22.0.0", "python-dateutil", "pytz", "PyYAML",
    "pyyaml-include<2", "requests", "safetensors", "six", "termcolor", "toml", "tqdm",
    "typing-extensions", "typing-inspect", "tzdata", "urllib3", "xxhash",
)  # fmt: skip
LEROBOT_MARKS = [
    pytest.mark.peers,
    pytest.mark.skipif(sys.version_info >= (3, 13), reason="lerobot 0.4 is for Python up to 3.12"),
    pytest.mark.skipif(find_spec("torch") is None, reason="lerobot needs torch: make install"),
]


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


def lerobot_python(cache: pytest.Cache) -> str:
    """Return the interpreter of LeRobot's environment."""
    home = cache.mkdir(f"lerobot-{sys.version_info[0]}.{sys.version_info[1]}")
    return peer_python(home, LEROBOT, with_torch=True)
