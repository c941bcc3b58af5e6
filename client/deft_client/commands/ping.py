"""`deft-client ping`: is the server ready, what does it serve, how long does a round trip take?"""

import argparse
import statistics
import sys

from deft_client.client import PolicyClient
from deft_client.commands.connection import add_connection_options, connection_settings, reported
from deft_client.commands.program import CommandParser
from deft_client.types import ServerInfo


def main(arguments: list[str]) -> int:
    """Print what answers at the URL; 1 where nothing does."""
    parser = CommandParser("deft-client ping", description=__doc__)
    add_connection_options(parser)
    parser.add_argument(
        "--count", type=int, default=5, help="round trips to measure (default: %(default)s)"
    )
    options = parser.parse_args(arguments)
    return reported(lambda: _ping(options), "ping")


def _ping(options: argparse.Namespace) -> int:
    with PolicyClient(options.url, connection_settings(options)) as policy:
        policy.ping()  # makes the connection, which is not part of a round trip
        round_trips_ms = [policy.ping() for _ in range(max(options.count, 1))]
        info = policy.info()
    sys.stdout.write(_summary(options.url, info))
    sys.stdout.write(
        f"round trip   {statistics.median(round_trips_ms):.2f} ms median, "
        f"{max(round_trips_ms):.2f} ms worst of {len(round_trips_ms)}\n"
    )
    return 0


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
