"""What pip installs from a wheel is what lies in the repository, and runs from there."""

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import time
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.repository import LIGHT, PACKAGES, ROOT, tracked

BUILD = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
PROJECTS = {"client": LIGHT, ".": tuple(one for one in PACKAGES if one not in LIGHT)}


def files_of(packages: Iterable[str]) -> dict[str, Path]:
    """What git knows of some packages, by the name that it has in a wheel."""
    found = [path for name in packages for path in tracked(f"{PACKAGES[name]}/{name}/**")]
    return {"/".join(path.relative_to(ROOT).parts[1:]): path for path in found}


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both wheels, built from copies without the network and unpacked into one folder."""
    folder = tmp_path_factory.mktemp("wheels")
    site = folder / "site"
    for project, packages in PROJECTS.items():
        source, out = folder / f"source-{project}", folder / f"out-{project}"
        out.mkdir()
        root = ROOT / project
        described = [root / name for name in ("pyproject.toml", "README.md")]
        legal = [root / name for name in ("LICENSE", "NOTICE") if (root / name).exists()]
        for path in [*described, *legal, *files_of(packages).values()]:
            copy = source / path.relative_to(root)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
        subprocess.run([sys.executable, "-c", BUILD, str(out)], cwd=source, check=True,
                       capture_output=True)  # fmt: skip
        (wheel,) = out.glob("*.whl")
        shutil.copy(wheel, folder)
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(site)
    return site


def test_wheels_hold_every_file_and_no_other(installed: Path) -> None:
    held = {
        path.relative_to(installed).as_posix()
        for path in installed.rglob("*")
        if path.is_file() and ".dist-info" not in path.parts[len(installed.parts)]
    }
    assert held == set(files_of(PACKAGES))


@pytest.mark.parametrize(
    ("module", "distribution"), [("deft_server", "deft-vla"), ("deft_client", "deft-client")]
)
def test_what_a_wheel_installs_answers_from_any_directory(
    installed: Path, tmp_path: Path, module: str, distribution: str
) -> None:
    told = (
        "import sys, importlib; from importlib.metadata import entry_points, version;"
        f"assert importlib.import_module('{module}').__file__.startswith(sys.argv[1]);"
        f"(found,) = [one for one in entry_points(group='console_scripts')"
        f" if one.value == '{module}.__main__:main' and"
        " str(one.dist.locate_file('')).startswith(sys.argv[1])];"
        f"sys.exit(found.load()(['--version']) or version('{distribution}') != sys.argv[2])"
    )
    version = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.M)[1]
    run = subprocess.run(
        [sys.executable, "-c", told, str(installed), version],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert version in run.stdout


def test_the_policy_in_the_wheel_answers_a_picture(installed: Path, tmp_path: Path) -> None:
    picture = installed / "deft_server/dashboard/static/example.png"
    run = subprocess.run(
        [sys.executable, "-m", "deft_server", "act", picture, "pick up the butter"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(installed)},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert '"action": [' in run.stdout


def test_installed_wheels_serve_a_picture_that_curl_sends(installed: Path, tmp_path: Path) -> None:
    """An environment with the wheels alone; what they need is that of these tests."""
    home = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(home)], check=True)
    python = home / "bin/python"
    wheels = [str(path) for path in installed.parent.glob("*.whl")]
    install = ["install", "--quiet", "--no-index", "--no-deps", *wheels]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    (site,) = home.glob("lib/python*/site-packages")
    (site / "needed.pth").write_text(sysconfig.get_path("purelib"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    picture = installed / "deft_server/dashboard/static/example.png"
    with serving(home / "bin/deft", tmp_path, environment) as url:
        asked = ["-F", f"image=@{picture}", "-F", "instruction=pick up the butter"]
        curl = ["curl", "--silent", "--fail", *asked, f"{url}/v1/act"]
        answer = subprocess.run(curl, check=True, capture_output=True, text=True).stdout
    assert len(json.loads(answer)["actions"][0]) == 7


@contextmanager
def serving(deft: Path, folder: Path, environment: Mapping[str, str]) -> Iterator[str]:
    """`deft serve` on a free port, until the block ends; it must run from the wheel."""
    log = folder / "log.txt"
    with log.open("w") as stderr:
        server = subprocess.Popen(
            [deft, "serve", "--port", "0"], cwd=folder, env=environment, stderr=stderr
        )
    try:
        until_s = time.monotonic() + 600
        while "ready" not in (logged := log.read_text()):
            assert server.poll() is None, logged
            assert time.monotonic() < until_s, logged
            time.sleep(0.2)
        yield re.findall(r"http://127\.0\.0\.1:\d+", logged)[0]
    finally:
        server.terminate()
        server.wait(120)
