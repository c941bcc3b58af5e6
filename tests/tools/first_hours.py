"""Plays the first hour of three people in fresh directories, by the commands of the documents.

    python -m tests.tools.first_hours [robot|data|fleet ...] [--steps N]

robot: serve a checkpoint of one's own, send frames in a loop, replay what was recorded.
data: episodes to a LeRobot data set, to a draft head, to its committed length, to serving it.
fleet: keys and TLS as the containers are configured; `docker compose config` where there is docker.
"""

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from deft_client import ClientSettings, Observation, PolicyClient
from deft_client.settings import TlsFiles
from deft_policies.tiny_libero import CHECKPOINT, STATISTICS_KEY
from scripts.local_server import local_server

ROOT = Path(__file__).parents[2]
INSTRUCTION = "pick up the butter and place it in the basket"
EXAMPLE = ROOT / "examples/frame.png"
TARGET = ("--checkpoint", str(CHECKPOINT), "--statistics-key", STATISTICS_KEY)
EPISODES, FRAMES = 3, 4


def run(*words: str | Path, env: dict[str, str] | None = None) -> str:
    """Run `deft` or `deft-client` as typed; return what it printed."""
    module = {"deft": "deft_server", "deft-client": "deft_client"}[str(words[0])]
    typed = " ".join(map(str, words))
    print(f"$ {typed}", flush=True)
    command = [sys.executable, "-m", module, *map(str, words[1:])]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
    if done.returncode:
        raise SystemExit(f"{typed}: exit code {done.returncode}\n{done.stdout}{done.stderr}")
    print(done.stdout, end="", flush=True)
    return done.stdout


def drive(url: str, settings: ClientSettings | None = None) -> None:
    """A robot's loop: a few short episodes of a picture that moves."""
    with Image.open(EXAMPLE) as picture:
        frame = np.asarray(picture.convert("RGB"))
    with PolicyClient(url, settings) as policy:
        for episode in range(EPISODES):
            policy.reset()
            for step in range(FRAMES):
                moved = np.roll(frame, 3 * step + 7 * episode, axis=1)
                chunk = policy.act(Observation(moved, INSTRUCTION))
                assert np.isfinite(chunk.actions).all()


def robot(folder: Path, steps: int) -> None:
    """Serve, drive, replay: every action comes back identical."""
    recordings = folder / "recordings"
    run("deft", "doctor", *TARGET, "--port", "0")
    with local_server(*TARGET, "--record", str(recordings)) as url:
        run("deft-client", "act", EXAMPLE, INSTRUCTION, "--url", url)
        drive(url)
    said = run("deft", "replay", recordings, *TARGET)
    assert "100.0% answered with identical actions" in said, said


def next_command(said: str) -> list[str]:
    """The words of the command that an output proposes, as a shell would read them."""
    (line,) = re.findall(r"^next: (.*)$", said, re.M)
    return shlex.split(line)


def data(folder: Path, steps: int) -> None:
    """Recordings to LeRobot's format, a head from there, and the head served."""
    recordings, dataset = folder / "my recordings", folder / "my data set"
    with local_server(*TARGET, "--record", str(recordings)) as url:
        drive(url)
    said = run("deft-client", "datasets", "export", recordings, "--out", dataset, "--fps", "10")
    assert str(dataset) in next_command(said)
    run("deft-client", "datasets", "show", dataset)
    features, head = folder / "my features", folder / "my head"
    said = run("deft", "train", "record", dataset, *TARGET, "--out", features)
    assert str(features) in next_command(said)
    settings = [
        f"--set={one}" for one in (f"steps={steps}", "batch_size=4", "optimizer.warm_up_steps=1")
    ]
    said = run("deft", "train", "fit", "--features", features, *TARGET, "--out", head, *settings)
    assert str(head) in next_command(said)
    scores = run("deft", "train", "evaluate", dataset, *TARGET, "--head", head, "--radii", "0")
    (row,) = re.findall(rf"^{re.escape(str(head))}\s+0\s+(\S+)", scores, re.M)
    assert 1.0 <= float(row) <= 7.0, scores
    assert str(head) in next_command(scores)
    exported = folder / "my exported head"
    said = run("deft", "train", "export", head, *TARGET, "--out", exported)
    assert str(exported) in next_command(said)
    with local_server(*TARGET, "--draft-head", str(exported)) as url:
        drive(url)


def fleet(folder: Path, steps: int) -> None:
    """Keys and TLS: who has the key is answered, the configuration is one that compose takes."""
    key, keys = make_key(folder)
    certificate, private = make_certificate(folder)
    flags = ("--keys-file", keys, "--tls-certificate", certificate, "--tls-key", private)
    settings = ClientSettings(api_key=key, tls=TlsFiles(certificate))
    with local_server(*map(str, flags), settings=settings) as url:
        drive(url, settings)
        secret = {**os.environ, "DEFT_API_KEY": key}
        run("deft-client", "ping", "--url", url, "--ca-file", certificate, env=secret)
    lines = ["DEFT_CHECKPOINT=mine", "GRAFANA_PASSWORD=of-this-run", f"DEFT_CONFIG={folder}"]
    lines += ["DEFT_KEYS_FILE=/config/keys.toml", "DEFT_TLS_KEY=/config/server.key"]
    (folder / ".env").write_text("\n".join(lines) + "\n")
    compose = find_compose()
    if compose is None:
        print("no docker compose here: tests/server/test_deploy.py checks its file by a schema")
        return
    command = [*compose, "--env-file", str(folder / ".env"), "config", "--quiet"]
    subprocess.run(command, check=True, cwd=ROOT)


def make_key(folder: Path) -> tuple[str, Path]:
    """An API key and the file that admits it."""
    command = [sys.executable, "-m", "deft_server", "key", "arm-1"]
    made = subprocess.run(command, capture_output=True, text=True, check=True)
    path = folder / "keys.toml"
    path.write_text(made.stdout)
    return made.stderr.split()[-1], path


def make_certificate(folder: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1, and its key."""
    certificate, private = folder / "server.crt", folder / "server.key"
    request = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    subject = [
        "-nodes",
        "-days",
        "2",
        "-subj",
        "/CN=deft",
        "-addext",
        "subjectAltName=IP:127.0.0.1",
    ]
    files = ["-out", str(certificate), "-keyout", str(private)]
    subprocess.run([*request, *subject, *files], check=True, capture_output=True)
    return certificate, private


def find_compose() -> list[str] | None:
    """The words that start compose, where it is installed."""
    for words in (["docker", "compose"], ["docker-compose"]):
        if shutil.which(words[0]):
            version = subprocess.run([*words, "version"], capture_output=True, check=False)
            if version.returncode == 0:
                return words
    return None


HOURS = {"robot": robot, "data": data, "fleet": fleet}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("hours", nargs="*", choices=[*HOURS, []], default=[], metavar="HOUR")
    parser.add_argument("--steps", type=int, default=200, help="of training (default 200)")
    given = parser.parse_args(arguments)
    for name in given.hours or HOURS:
        with tempfile.TemporaryDirectory() as folder:
            HOURS[name](Path(folder), given.steps)
        print(f"{name}: done", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
