"""Looks at the machine a server would run on: libraries, ports, files, exposure.

By a demonstration it tells, too, whether frames reach the policy as those of its training did: they
are answered one by one through every image chain, with nothing remembered, and the chain of the
training comes nearest to what was done then. Of the nearest chain's answers it compares which way
round the gripper is.

With another environment's interpreter it has the model's own code answer the same frames.
"""

import os
import resource
import shutil
import ssl
import stat
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import httpx
import numpy as np
from numpy.typing import NDArray

from deft_core.datasets.flags import add_camera_flag, read_cameras
from deft_core.errors import DeftError
from deft_core.image_chain import ImageChain
from deft_core.program import CommandParser
from deft_core.types import ActOptions
from deft_policies.base import Finding, Policy, PolicyRequest, Verdict
from deft_policies.commands.parse import PolicyCommand
from deft_policies.conformance.report import check_report
from deft_policies.errors import PolicyError
from deft_policies.families.options import ModelOptions
from deft_policies.memory import SessionMemory
from deft_server.commands.replay import PastStep, read_steps
from deft_server.commands.serve import listen
from deft_server.commands.settings_sources import read_command
from deft_server.serving.access import KeyFileError, read_keys
from deft_server.settings import Settings, SettingsError, is_loopback

MIN_FREE_DISK_BYTES = 2 * 1024**3
_GIB = 1024**3
_FAST = ("uvloop", "httptools")
NUM_FRAMES = 24
EVERY = 7  # steps, so that the frames differ
_CLEAR = 2.0  # standard errors between two chains before one is called nearer
_BEYOND = 1e-3  # of the range; less is rounding
_TOO_FAR = 0.9  # of the error of never looking
_ONE_CLASS = 0.2  # of the range: a gripper that moves less neither opens nor closes
_MOST = 2 / 3  # of the frames of a class: more is no chance

Errors = NDArray[np.float64]  # [frame], in shares of the statistics' range
Numbers = NDArray[np.float64]  # [frame]


def examine(command: PolicyCommand, settings: Settings) -> list[Finding]:
    """Look at the machine and the policy."""
    given = command.namespace
    nothing = [Finding("policy", Verdict.GOOD, f"{given.policy} needs nothing")]
    return [
        examine_python(),
        examine_gpu(),
        examine_port(settings),
        examine_exposure(settings),
        examine_open_files(settings.max_connections),
        *([] if settings.keys_file is None else [examine_keys(settings.keys_file)]),
        *([] if settings.tls_key is None else [examine_tls(settings)]),
        *([] if settings.record is None else [examine_disk(settings.record)]),
        *(command.entry.examine(given) or nothing),
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
    """Can the server listen address it is to?"""
    address = f"{settings.host}:{settings.port}"
    try:
        listen(settings).close()
    except SettingsError as error:
        if _is_deft(address):
            text = f"a Deft server answers at {address}; stop it before another starts there"
            return Finding("port", Verdict.GOOD, text)
        return Finding("port", Verdict.BAD, str(error))
    return Finding("port", Verdict.GOOD, f"{address} is free")


def _is_deft(address: str) -> bool:
    try:
        return httpx.get(f"http://{address}/healthz", timeout=2).text == "OK\n"
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
    num_admins = sum(caller.is_admin for _, caller in entries)
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


def examine_chains(command: PolicyCommand, data: Path, cameras: Sequence[str]) -> list[Finding]:
    """Load the policy, answer some of a demonstration's frames and judge chain and statistics."""
    given = command.namespace
    if not isinstance(command.entry.make(given), ModelOptions):
        return [Finding("image chain", Verdict.DOUBTFUL, f"{given.policy} has none to choose")]
    policy = command.load()
    chosen = ImageChain(policy.info.image_chain)
    if chosen is not ImageChain.NONE:
        raw = Namespace(**{**vars(given), "image_chain": ImageChain.NONE.value})
        policy = replace(command, namespace=raw).load()
    limits = policy.action_limits(given.statistics_key)
    if limits is None:
        raise PolicyError(f"{given.policy} does not say which actions it can answer")
    steps = list(islice(read_steps(data, cameras), 0, NUM_FRAMES * EVERY, EVERY))
    if len(steps) < 2:
        raise PolicyError(f"{data}: a demonstration of 8 steps or more is needed")
    done = np.stack([step.actions[0] for step in steps])
    if done.shape[1] != len(limits.low):
        raise PolicyError(f"{data}: actions have {done.shape[1]} numbers, not {len(limits.low)}")
    width = np.maximum(limits.high - limits.low, 1e-9)
    answers = {chain: answer_through(policy, steps, chain) for chain in ImageChain}
    errors = {chain: (np.abs(one - done) / width).mean(axis=1) for chain, one in answers.items()}
    mean_action = (np.abs(done.mean(axis=0) - done) / width).mean(axis=1)
    beyond = np.maximum(limits.low - done, done - limits.high) / width
    return [
        judge_statistics(float((beyond > _BEYOND).mean())),
        judge_chain(chosen, errors, float(mean_action.mean())),
        judge_gripper(answers[_nearest(errors)][:, -1], done[:, -1], float(width[-1])),
    ]


def answer_through(
    policy: Policy, steps: Iterable[PastStep], chain: ImageChain
) -> NDArray[np.float64]:
    """The first action of every answer [frame, action_dim]; the policy's own chain is `none`."""
    size = policy.info.image_height
    actions = []
    for step in steps:
        seen = step.observation
        cameras = {name: chain.apply(image, size) for name, image in seen.cameras.items()}
        shown = replace(seen, image=chain.apply(seen.image, size), cameras=cameras)
        options = ActOptions(statistics_key=step.statistics_key)
        (answer,) = policy.act([PolicyRequest(shown, SessionMemory(), options)])
        actions.append(answer.chunk.actions[0])
    return np.stack(actions)


def judge_statistics(share_beyond: float) -> Finding:
    """Are the demonstrated actions in the range that the statistics allow?"""
    if share_beyond > 0.05:  # the statistics are the 1st and the 99th percentile
        text = (
            f"{share_beyond:.0%} of the demonstrated numbers lie beyond the statistics' range; "
            "of the right key it is usually 2%, because the range is from the 1st to the 99th "
            "percentile"
        )
        return Finding("statistics", Verdict.DOUBTFUL, f"{text}: another --statistics-key?")
    return Finding("statistics", Verdict.GOOD, "the demonstration lies in their range")


def judge_chain(
    chosen: ImageChain, errors: Mapping[ImageChain, Errors], never_looking: float
) -> Finding:
    """Is the chosen chain the nearest, and is the nearest any good?"""
    nearest = _nearest(errors)
    distances = ", ".join(f"{chain.value} {errors[chain].mean():.2%}" for chain in errors)
    text = f"distance to the demonstration, in shares of the range: {distances}"
    if errors[nearest].mean() > _TOO_FAR * never_looking:
        text += f"; always answering its mean action: {never_looking:.2%}. "
        text += "No chain does better: are these episodes of the training, and their units?"
        return Finding("image chain", Verdict.DOUBTFUL, text)
    if _is_clear(errors[chosen] - errors[nearest]):
        text += f". Yours, `{chosen.value}`, is not the nearest: --image-chain {nearest.value}"
        return Finding("image chain", Verdict.BAD, text)
    others = {chain: error for chain, error in errors.items() if chain is not chosen}
    second = min(others, key=lambda chain: float(others[chain].mean()))
    if nearest is chosen and _is_clear(errors[second] - errors[chosen]):
        text += f". Yours, `{chosen.value}`, is the nearest; the next is `{second.value}`"
    else:
        text += f". These frames do not tell yours, `{chosen.value}`, from the nearest other chain"
    return Finding("image chain", Verdict.GOOD, text)


def _nearest(errors: Mapping[ImageChain, Errors]) -> ImageChain:
    return min(errors, key=lambda chain: float(errors[chain].mean()))


def judge_gripper(answered: Numbers, done: Numbers, width: float) -> Finding:
    """Does the policy's last number rise where the demonstration's does? Both are [frame].

    Each is split about the middle of its own values, because a data set may count from -1 to 1 and
    a policy from 0 to 1. Frames in which the demonstration is high and those in which it is low
    count apart: a policy that mostly opens agrees with most frames of a demonstration that does.
    """
    for name, values in (("the demonstration", done), ("the policy", answered)):
        if np.ptp(values) < _ONE_CLASS * width:
            text = f"cannot be told: {name} has it at about {np.median(values):.2g} in all frames"
            return Finding("gripper", Verdict.DOUBTFUL, f"{text}; give episodes that grasp")
    is_high, is_answered_high = (values > _middle(values) for values in (done, answered))
    is_equal = is_high == is_answered_high
    equal = [float(is_equal[side].mean()) for side in (is_high, ~is_high)]
    num, count = len(done), int(is_equal.sum())
    if min(equal) > _MOST:
        text = f"the same way round as the demonstration's in {count} of {num} frames"
        return Finding("gripper", Verdict.GOOD, text)
    if max(equal) < 1 - _MOST:
        high, low = (np.median(done[side]) + 0.0 for side in (is_high, ~is_high))  # no -0
        own_low, own_high = (np.median(answered[side]) for side in (is_high, ~is_high))
        text = (
            f"the gripper is the other way round in {num - count} of {num} frames: where the "
            f"demonstration has {high:.2g} the policy answers {own_low:.2g}, and where it has "
            f"{low:.2g} the policy answers {own_high:.2g}. Turn the last number of every action "
            "round, in the data or on the way to the robot, whichever is wrong"
        )
        return Finding("gripper", Verdict.BAD, text)
    text = f"cannot be told: as the demonstration's in {count} of {num} frames"
    return Finding("gripper", Verdict.DOUBTFUL, text)


def _middle(values: Numbers) -> float:
    return float(values.min() + values.max()) / 2


def _is_clear(gap: Errors) -> bool:
    """Whether the second of two chains is farther away, frame by frame, than by chance."""
    return bool(gap.mean() > _CLEAR * gap.std(ddof=1) / np.sqrt(len(gap)))


_COLOURS = {Verdict.GOOD: "32", Verdict.DOUBTFUL: "33", Verdict.BAD: "31"}


def main(arguments: list[str]) -> int:
    """Examine, print, and return the exit code."""
    parser = CommandParser(
        prog="deft doctor",
        usage="%(prog)s [-h] [--demonstration DATA] [--against PYTHON [--recording DATA] "
        "[--report FILE]] [--check-report FILE] [--config FILE] [--policy NAME] [SETTINGS] "
        "[FLAGS OF THE POLICY]",
        allow_abbrev=False,
        description="Say whether `deft serve` with the same flags would work on this machine.",
    )
    parser.add_argument(
        "--demonstration", type=Path, metavar="DATA",
        help="episodes of the policy's training: load the weights and see whether image chain and "
        "statistics fit them",
    )  # fmt: skip
    parser.add_argument(
        "--against", metavar="PYTHON",
        help="the python of an environment that has the model's own code: have it answer 20 frames "
        "beside Deft (docs/conformance.md)",
    )  # fmt: skip
    parser.add_argument(
        "--recording", type=Path, metavar="DATA",
        help="with --against: frames of your own; default: frames that ship with Deft",
    )  # fmt: skip
    parser.add_argument(
        "--report", type=Path, metavar="FILE", default=Path("conformance.json"),
        help="with --against: where everything is written [%(default)s]",
    )  # fmt: skip
    parser.add_argument(
        "--check-report", type=Path, metavar="FILE",
        help="say whether a report of --against is as it was written, and what it found",
    )  # fmt: skip
    add_camera_flag(parser)
    try:
        command, settings = read_command(parser, arguments, os.environ)
    except (SettingsError, PolicyError) as error:
        sys.stdout.write(_lines([Finding("settings", Verdict.BAD, str(error))]))
        return 1
    given = command.namespace
    if given.check_report is not None:
        return _told([check_report(given.check_report)])
    findings = examine(command, settings)
    if given.demonstration is not None and not _num(findings, Verdict.BAD):
        try:
            findings += examine_chains(command, given.demonstration, read_cameras(given))
        except (PolicyError, DeftError, OSError) as error:
            findings.append(Finding("demonstration", Verdict.BAD, str(error)))
    if given.against is None or _num(findings, Verdict.BAD):
        return _told(findings)
    sys.stdout.write(f"{_lines(findings)}\n")
    return _told([compare_with_own_code(command)], findings)


def compare_with_own_code(command: PolicyCommand) -> Finding:
    """Have the model's own code answer frames beside Deft, and print and write what was found."""
    from deft_policies.conformance import command as conformance  # brings torch along

    given = command.namespace
    try:
        return conformance.compare_with_own_code(
            command, given.against, given.recording, read_cameras(given), given.report
        )
    except (PolicyError, DeftError, OSError) as error:
        return Finding(conformance.SUBJECT, Verdict.BAD, str(error))


def _told(findings: Sequence[Finding], printed: Sequence[Finding] = ()) -> int:
    """Print what was found behind what is printed; returns the exit code."""
    sys.stdout.write(_lines(findings))
    findings = [*printed, *findings]
    counts = {one: _num(findings, one) for one in (Verdict.BAD, Verdict.DOUBTFUL)}
    said = [f"{count} {one.value}{'s' * (count != 1)}" for one, count in counts.items()]
    sys.stdout.write(f"{', '.join(said)}\n")
    return 1 if counts[Verdict.BAD] else 0


def _num(findings: Sequence[Finding], verdict: Verdict) -> int:
    return sum(one.verdict is verdict for one in findings)


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
