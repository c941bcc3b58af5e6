"""Environments of their own for other projects' packages, installed once and kept between runs."""

import fcntl
import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.draws import some

LEROBOT_VERSIONS = {
    "0.4.4": (
        "lerobot==0.4.4", "datasets==4.4.1", "huggingface-hub==0.35.3", "transformers==4.57.6",
        "diffusers==0.35.2", "draccus==0.10.0", "accelerate==1.12.0", "importlib-metadata",
        "pyserial", "regex", "zipp",
    ),
    "0.6.1": (
        "lerobot==0.6.1", "datasets==4.8.0", "huggingface-hub==1.9.0", "transformers==5.5.4",
        "draccus==0.11.6", "gymnasium==1.1.1", "cloudpickle", "farama-notifications", "hf-xet",
        "shellingham", "typer-slim", "click",
    ),
}  # fmt: skip
LEROBOT_NEEDS = (
    "torchvision==0.28.0", "tokenizers==0.22.2",
    "aiohttp", "anyio", "attrs", "av==15.1.0", "certifi",
    "charset-normalizer", "deepdiff==8.6.1", "dill==0.4.0", "einops",
    "filelock", "fsspec==2025.10.0", "h11", "httpcore", "httpx", "idna", "jsonlines", "mergedeep",
    "multiprocess==0.70.18", "mypy-extensions", "numpy==2.2.6", "orderly-set", "packaging<26",
    "pandas==2.3.3", "pillow", "psutil", "pyarrow==22.0.0", "python-dateutil", "pytz", "PyYAML",
    "pyyaml-include<2", "requests", "safetensors", "six", "termcolor", "toml", "tqdm",
    "typing-extensions", "typing-inspect", "tzdata", "urllib3", "xxhash",
)  # fmt: skip
# Names the Python of an environment made as LeRobot's users make theirs, on Python 3.12 or later:
# pip install "lerobot[dataset]==0.6.1" ./client ./examples/lerobot_policy_deft
INSTALLED_LEROBOT = "DEFT_TEST_LEROBOT"
LEROBOT_MARKS = [
    pytest.mark.peers,
    pytest.mark.skipif(find_spec("torch") is None, reason="lerobot needs torch: make install"),
]
UP_TO_3_12 = pytest.mark.skipif(
    sys.version_info >= (3, 13), reason="lerobot 0.4 is for Python up to 3.12"
)
# Each is installed into an environment of its own: the older one every night.
LEROBOT_PARAMETERS = some(["0.6.1", pytest.param("0.4.4", marks=UP_TO_3_12)], 1)


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
            pip = [str(interpreter), "-m", "pip", "--disable-pip-version-check", "install"]
            flags = ["--quiet", "--no-deps", "--no-compile", "--ignore-requires-python"]
            subprocess.run([*pip, *flags, *packages], check=True)
            (site,) = home.glob("lib/python*/site-packages")
            if with_torch:
                # An environment here may stand on another one, so there can be several.
                behind = [one for one in sys.path if one.endswith("site-packages")]
                (site / "zz_behind.pth").write_text("\n".join(behind))
            if sys.version_info < (3, 12):
                for module in site.glob("lerobot/**/*.py"):
                    write_for_python_3_11(module)
            marker.write_text(wanted)
    return str(interpreter)


def write_for_python_3_11(module: Path) -> None:
    """Write type parameters and `type` statements as before Python 3.12; all else stays."""
    text = module.read_text()
    parameters: dict[str, None] = {}

    def without_parameters(found: re.Match[str]) -> str:
        kind, name, bracketed, bases = found.groups(default="")
        names = [one.split(":")[0].strip() for one in bracketed.split(",")]
        parameters.update(dict.fromkeys(names))
        if kind == "def":
            return f"def {name}({bases}"
        return f"class {name}({bases}{', ' if bases else ''}_Generic[{', '.join(names)}]):"

    changed = re.sub(r"^type (\w+) = ", r"\1 = ", text, flags=re.MULTILINE)
    heads = (
        r"^(class) (\w+)\[([^\]]*)\](?:\(([^)]*)\))?:",
        r"^(def) (\w+)\[([^\]]*)\]\((.*)",
    )
    for head in heads:
        changed = re.sub(head, without_parameters, changed, flags=re.MULTILINE)
    if changed == text:
        return
    made = "".join(f"{one} = _TypeVar({one!r})\n" for one in parameters)
    imports = f"from typing import Generic as _Generic, TypeVar as _TypeVar\n{made}"
    first = re.search(r"^(import|from) (?!__future__)", changed, flags=re.MULTILINE)
    assert first is not None
    module.write_text(changed[: first.start()] + imports + changed[first.start() :])


def lerobot_python(cache: pytest.Cache, version: str) -> str:
    """Return the interpreter of LeRobot's environment; DEFT_TEST_LEROBOT may name one for 0.6.1."""
    installed = os.environ.get(INSTALLED_LEROBOT)
    if installed is not None and version == "0.6.1":
        return installed
    home = cache.mkdir(f"lerobot-{version}-{sys.version_info[0]}.{sys.version_info[1]}")
    return peer_python(home, (*LEROBOT_VERSIONS[version], *LEROBOT_NEEDS), with_torch=True)
