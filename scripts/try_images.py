"""Does what the Dockerfile does, without Docker: each target's installation and entry command, in a
fresh environment and from a copy of what the build would see.

    python -m scripts.try_images client server libero
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
ENTRIES = {  # what the container is asked for, once it stands
    "client": ["deft-client", "--help"],
    "libero": ["deft-client", "eval", "--help"],
    "server": ["deft", "serve", "--host=127.0.0.1", "--port=8123", "--policy=constant"],
}
READY_WITHIN_S = 120


@dataclass
class BuildStage:
    """One stage of the Dockerfile: what it copies and what it installs with pip."""

    parent: str
    copies: list[list[str]] = field(default_factory=list)
    installs: list[str] = field(default_factory=list)


def read_stages(text: str) -> dict[str, BuildStage]:
    stages: dict[str, BuildStage] = {}
    for line in re.sub(r"\\\n\s*", " ", text).splitlines():
        word, _, rest = line.partition(" ")
        if word == "FROM":
            parent, _, name = rest.partition(" AS ")
            stages[name] = BuildStage(parent)
        elif word == "COPY":
            list(stages.values())[-1].copies.append(rest.split())
        elif word == "RUN":
            commands = [one.strip() for one in rest.split("&&")]
            list(stages.values())[-1].installs += [one for one in commands if one.startswith("pip")]
    return stages


def try_target(name: str, stages: dict[str, BuildStage]) -> bool:
    with tempfile.TemporaryDirectory(prefix=f"deft-{name}-") as folder:
        home, context = Path(folder) / "venv", Path(folder) / "app"
        context.mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
        environment = {**os.environ, "PATH": f"{home / 'bin'}:{os.environ['PATH']}"}
        environment.pop("PYTHONPATH", None)
        started_s = time.monotonic()
        for stage in (stages["base"], stages[name]):
            for *sources, target in stage.copies:
                for source in sources:
                    _copy(source, context / target)
            for command in stage.installs:
                print(f"{name}: {command}", flush=True)
                subprocess.run(["bash", "-euc", command], cwd=context, env=environment, check=True)
        installed_s = time.monotonic() - started_s
        size_mb = sum(one.stat().st_size for one in home.rglob("*") if one.is_file()) / 2**20
        print(f"{name}: installed in {installed_s:.0f} s, {size_mb:.0f} MB", flush=True)
        return _runs(name, environment, Path(folder)) and _is_light(name, environment)


def _copy(source: str, target: Path) -> None:
    path = ROOT / source
    if path.is_dir():
        ignored = shutil.ignore_patterns("__pycache__", "*.egg-info", "build")
        shutil.copytree(path, target, ignore=ignored, dirs_exist_ok=True)
    else:
        target.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target / path.name)


def _runs(name: str, environment: dict[str, str], folder: Path) -> bool:
    command = ENTRIES[name]
    if name != "server":
        return subprocess.run(command, env=environment, cwd=folder, check=False).returncode == 0
    server = subprocess.Popen(command, env=environment, cwd=folder)
    try:
        return _is_healthy(environment) and _has_pages()
    finally:
        server.terminate()
        print(f"{name}: stopped with exit code {server.wait(30)}", flush=True)


def _is_healthy(environment: dict[str, str]) -> bool:
    """Run the compose file's own health check until it succeeds."""
    compose = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
    test = compose["services"]["server-cpu"]["healthcheck"]["test"][1:]
    check = [part.replace(":8000", ":8123") for part in test]
    gives_up_s = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < gives_up_s:
        if subprocess.run(check, env=environment, capture_output=True, check=False).returncode == 0:
            print(f"healthy: {shlex.join(check)}", flush=True)
            return True
        time.sleep(1)
    return False


def _has_pages() -> bool:
    """The dashboard's files are data of the package: are they installed?"""
    for path in ("/dashboard", "/dashboard/explorer", "/dashboard/static/live.js"):
        try:
            urllib.request.urlopen(f"http://127.0.0.1:8123{path}", timeout=10).close()
        except urllib.error.HTTPError as error:
            print(f"{path}: {error}", flush=True)
            return False
    return True


def _is_light(name: str, environment: dict[str, str]) -> bool:
    """Only the server's image may hold torch."""
    found = subprocess.run(["pip", "show", "--quiet", "torch"], env=environment, check=False)
    return (found.returncode == 0) == (name == "server")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("targets", nargs="*", default=list(ENTRIES), choices=list(ENTRIES))
    stages = read_stages((ROOT / "Dockerfile").read_text())
    results = {name: try_target(name, stages) for name in parser.parse_args().targets}
    print("\n".join(f"{name}: {'PASS' if good else 'FAIL'}" for name, good in results.items()))
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
