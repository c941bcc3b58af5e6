"""Looks at the machine a server would run on: libraries, ports, files, exposure."""

import os
import resource
import shutil
import ssl
import stat
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import httpx

from deft_client.commands.program import CommandParser
from deft_client.datasets.flags import add_camera_flag, read_cameras
from deft_client.errors import DeftError
from deft_policies.base import Finding, Verdict
from deft_policies.errors import PolicyError
from deft_server.commands.image_chains import examine_chains
from deft_server.commands.serve import listen
from deft_server.commands.settings_sources import ServeCommand, read_command
from deft_server.serving.access import KeyFileError, read_keys
from deft_server.settings import Settings, SettingsError, is_loopback

MIN_FREE_DISK_BYTES = 2 * 1024**3
_GIB = 1024**3
_FAST = ("uvloop", "httptools")


def examine_machine(settings: Settings) -> list[Finding]:
    """Look at everything that does not depend on the policy."""
    return [
        examine_python(),
        examine_gpu(),
        examine_port(settings),
        examine_exposure(settings),
        examine_open_files(settings.max_connections),
        *([] if settings.keys_file is None else [examine_keys(settings.keys_file)]),
        *([] if settings.tls_key is None else [examine_tls(settings)]),
        *([] if settings.record is None else [examine_disk(settings.record)]),
    ]


def examine_python() -> Finding:
    """Are the libraries there that make the server fast?"""
    version = ".".join(map(str, sys.version_info[:3]))
    missing = [name for name in _FAST if find_spec(name) is None]
    if missing:
        text = f"{version}; without {' and '.join(missing)} every request takes longer: pip install"
        return Finding("python", Verdict.DOUBTFUL, f"{text} {' '.join(missing)}")
    return Finding("python", Verdict.GOOD, f"{version}, {os.cpu_count()} cores")


def examine_gpu(command: Sequence[str] = ("nvidia-smi",)) -> Finding:
    """Ask the driver for GPUs; whether torch can use them is the policy's examination."""
    query = ["--query-gpu=name,memory.total,memory.free,driver_version", "--format=csv,noheader"]
    if shutil.which(command[0]) is None:
        return Finding("gpu", Verdict.DOUBTFUL, "no NVIDIA driver here (nvidia-smi is not found)")
    try:
        said = subprocess.run([*command, *query], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("gpu", Verdict.BAD, f"the driver does not answer: {error}")
    lines = [line.strip() for line in said.stdout.splitlines() if line.strip()]
    if said.returncode != 0 or not lines:
        reason = (said.stderr or said.stdout).strip().splitlines() or ["no reason given"]
        return Finding("gpu", Verdict.BAD, f"the driver finds no GPU: {reason[0]}")
    return Finding("gpu", Verdict.GOOD, "; ".join(lines))


def examine_port(settings: Settings) -> Finding:
    """Can the server listen where it is to?"""
    where = f"{settings.host}:{settings.port}"
    try:
        listen(settings).close()
    except SettingsError as error:
        if _is_deft(where):
            text = f"a Deft server answers at {where}; stop it before another starts there"
            return Finding("port", Verdict.GOOD, text)
        return Finding("port", Verdict.BAD, str(error))
    return Finding("port", Verdict.GOOD, f"{where} is free")


def _is_deft(where: str) -> bool:
    try:
        return httpx.get(f"http://{where}/healthz", timeout=2).text == "OK\n"
    except (httpx.HTTPError, httpx.InvalidURL):
        return False


def examine_exposure(settings: Settings) -> Finding:
    """Who could reach the robots through this server?"""
    if is_loopback(settings.host):
        return Finding("exposure", Verdict.GOOD, "this machine only; --host 0.0.0.0 for others")
    lacks = []
    if settings.keys_file is None:
        lacks.append("no API keys (--keys-file), so anybody who can reach it may drive the robots")
    if settings.tls_key is None:
        lacks.append("no TLS (--tls-key), so frames and keys can be read on the way")
    if lacks:
        return Finding(
            "exposure", Verdict.DOUBTFUL, f"open to the network, with {'; '.join(lacks)}"
        )
    return Finding("exposure", Verdict.GOOD, "open to the network, with API keys and TLS")


def examine_open_files(max_connections: int) -> Finding:
    """Does the system let us keep so many connections?"""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < max_connections:
        text = f"{hard} at most, fewer than max_connections {max_connections}; raise ulimit -Hn"
        return Finding("open files", Verdict.DOUBTFUL, text)
    return Finding("open files", Verdict.GOOD, f"room for {max_connections} connections")


def examine_keys(path: Path) -> Finding:
    """Can the key file be used, and by nobody else?"""
    try:
        entries = read_keys(path)
        mode = path.stat().st_mode
    except (KeyFileError, OSError) as error:
        return Finding("keys", Verdict.BAD, str(error))
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        text = f"others on this machine may read {path}: chmod 600 {path}"
        return Finding("keys", Verdict.DOUBTFUL, text)
    num_admins = sum(entry.caller.is_admin for entry in entries)
    return Finding("keys", Verdict.GOOD, f"{len(entries)} callers, {num_admins} of them admins")


def examine_tls(settings: Settings) -> Finding:
    """Do certificate and key belong together?"""
    assert settings.tls_certificate is not None
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(settings.tls_certificate, settings.tls_key)
        if settings.tls_client_ca is not None:
            context.load_verify_locations(settings.tls_client_ca)
    except (OSError, ssl.SSLError) as error:
        return Finding("tls", Verdict.BAD, f"cannot use the TLS files: {error}")
    return Finding("tls", Verdict.GOOD, f"{settings.tls_certificate}")


def examine_disk(directory: Path) -> Finding:
    """Is there room to record?"""
    existing = next((one for one in (directory, *directory.parents) if one.exists()), Path("/"))
    free = shutil.disk_usage(existing).free
    text = f"{free / _GIB:.1f} GiB free for recordings in {directory}"
    if not os.access(existing, os.W_OK):
        return Finding("disk", Verdict.BAD, f"{existing} cannot be written to")
    return Finding("disk", Verdict.GOOD if free > MIN_FREE_DISK_BYTES else Verdict.DOUBTFUL, text)


_COLOURS = {Verdict.GOOD: "32", Verdict.DOUBTFUL: "33", Verdict.BAD: "31"}


def main(arguments: list[str]) -> int:
    """Examine, print, and return the exit code."""
    parser = CommandParser(
        prog="deft doctor",
        allow_abbrev=False,
        description="Say whether `deft serve` with the same flags would work on this machine.",
    )
    parser.add_argument(
        "--demonstration", type=Path, metavar="DATA",
        help="episodes of the policy's training: load the weights and see whether image chain and "
        "statistics fit them",
    )  # fmt: skip
    add_camera_flag(parser)
    try:
        command = read_command(parser, arguments, os.environ)
    except (SettingsError, PolicyError) as error:
        sys.stdout.write(_lines([Finding("settings", Verdict.BAD, str(error))]))
        return 1
    findings = examine(command)
    given = command.policy.namespace
    if given.demonstration is not None and not _num(findings, Verdict.BAD):
        try:
            findings += examine_chains(command.policy, given.demonstration, read_cameras(given))
        except (PolicyError, DeftError, OSError) as error:
            findings.append(Finding("demonstration", Verdict.BAD, str(error)))
    sys.stdout.write(_lines(findings))
    counts = {one: _num(findings, one) for one in (Verdict.BAD, Verdict.DOUBTFUL)}
    said = [f"{count} {one.value}{'s' * (count != 1)}" for one, count in counts.items()]
    sys.stdout.write(f"{', '.join(said)}\n")
    return 1 if counts[Verdict.BAD] else 0


def _num(findings: Sequence[Finding], verdict: Verdict) -> int:
    return sum(one.verdict is verdict for one in findings)


def examine(command: ServeCommand) -> list[Finding]:
    """Look at the machine and the policy."""
    given = command.policy.namespace
    policy = command.policy.entry.examine(given)
    if not policy:
        policy = [Finding("policy", Verdict.GOOD, f"{given.policy} needs nothing")]
    return [*examine_machine(command.settings), *policy]


def _lines(findings: Sequence[Finding]) -> str:
    width = max(len(one.subject) for one in findings)
    return "".join(
        f"{_painted(one.verdict)}  {one.subject:<{width}}  {one.text}\n" for one in findings
    )


def _painted(verdict: Verdict) -> str:
    word = f"{verdict.value:<7}"
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return word
    return f"\x1b[{_COLOURS[verdict]}m{word}\x1b[0m"
