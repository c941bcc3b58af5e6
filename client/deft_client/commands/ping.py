"""`deft-client ping [URL]`: is the server ready, what does it serve, how quick are its answers?"""

import argparse
import statistics
import sys
import time
import uuid
from dataclasses import replace

from deft_client.client import PolicyClient
from deft_client.commands.connection import (
    add_connection_options,
    add_url_word,
    connection_settings,
    parse_connected,
    reported,
)
from deft_client.commands.frames import noise_frames, usual_options
from deft_client.control_loop import SEND_SHARE, settings_for
from deft_client.settings import LOADING_S
from deft_core.measures.statistics import percentiles
from deft_core.program import CommandParser
from deft_core.recordings import UNRECORDED
from deft_core.types import ServerInfo

ROUND_TRIPS = 5  # without a frame
FRAMES_KEPT = 8  # sent in turn
LONGEST_S = 10.0  # of sending frames


def main(arguments: list[str]) -> int:
    """Print what answers at the URL; 1 where nothing does."""
    parser = CommandParser("deft-client ping", description=__doc__)
    add_url_word(parser)
    add_connection_options(parser)
    parser.add_argument(
        "--count", type=int, default=20,
        help=f"frames to send, for {LONGEST_S:g} s at most (default: %(default)s); 0 sends none",
    )  # fmt: skip
    parser.add_argument(
        "--wait", nargs="?", type=float, const=LOADING_S, metavar="SECONDS",
        help="wait until the server is there and has loaded its policy "
        f"(for {LOADING_S:g} s where SECONDS is not given)",
    )  # fmt: skip
    options = parse_connected(parser, arguments)
    return reported(lambda: _ping(options), "ping")


def _ping(options: argparse.Namespace) -> int:
    with PolicyClient(options.url, connection_settings(options)) as policy:
        if options.wait is not None:
            policy.wait_ready(options.wait)
        policy.ping()  # makes the connection, which is not part of a round trip
        round_trips_ms = [policy.ping() for _ in range(ROUND_TRIPS)]
        info = policy.info()
        answers_ms = _answers_ms(policy, info, options.count)
    sys.stdout.write(_summary(options.url, info))
    sys.stdout.write(
        f"round trip   {statistics.median(round_trips_ms):.2f} ms median of {ROUND_TRIPS}, "
        "without a frame\n"
    )
    if answers_ms:
        sys.stdout.write(_answers_text(answers_ms, info))
    return 0


def _answers_ms(policy: PolicyClient, info: ServerInfo, count: int) -> list[float]:
    """Send frames one after the other, and return how long each answer took.

    The first one is not counted: a policy that was idle may take longer.
    """
    frames = noise_frames(info, 0, FRAMES_KEPT)
    session_id = UNRECORDED + uuid.uuid4().hex[:8]  # short: the dashboard shows it
    asked = replace(usual_options(info), session_id=session_id)
    answers_ms: list[float] = []
    ends_at = time.monotonic() + LONGEST_S
    for number in range(count + 1 if count > 0 else 0):
        chunk = policy.act(frames[number % FRAMES_KEPT], asked)
        if number:
            answers_ms.append(chunk.timings.round_trip_ms)
        if answers_ms and time.monotonic() > ends_at:
            break
    return answers_ms


def _answers_text(answers_ms: list[float], info: ServerInfo) -> str:
    """How long answers take, at which rate a control loop can execute them, and its settings."""
    times = percentiles(answers_ms)
    fits = settings_for(times.p95 / 1000)
    lines = [
        f"answer       {times.p50:.1f} ms p50, {times.p95:.1f} ms p95 of {times.count} frames",
        f"control      up to {1 / fits.period_s:.1f} Hz",
    ]
    if info.chunk_length > 1:
        # An answer is there in time if it takes as long as the other actions of a chunk.
        most_hz = 1000 * (1 - SEND_SHARE) * (info.chunk_length - 1) / times.p95
        lines[1] += (
            f"; up to {most_hz:.1f} Hz with chunks of {info.chunk_length} and ChunkBlending.SWITCH"
        )
    lines.append(
        f"settings     LoopSettings(period_s={fits.period_s:g}, watchdog_s={fits.watchdog_s:g}, "
        f"options=ActOptions(deadline_ms={fits.options.deadline_ms}))"
    )
    return "".join(f"{line}\n" for line in lines)


def _summary(url: str, info: ServerInfo) -> str:
    keys = ", ".join(
        f"{key} (default)" if key == info.default_statistics_key else key
        for key in info.statistics_keys
    )
    rows = {
        "server": f"{url} is ready",
        "policy": info.policy,
        "actions": f"{info.chunk_length} x {info.action_dim}",
        "image": f"{info.image_height}x{info.image_width}, chain {info.image_chain}",
        "statistics": keys or "none",
        "decoding": f"{info.decoding} (of {', '.join(info.decoding_methods)})",
        "versions": ", ".join(f"{name} {value}" for name, value in info.versions.items()) or "-",
    }
    return "".join(f"{name:<12} {value}\n" for name, value in rows.items())
