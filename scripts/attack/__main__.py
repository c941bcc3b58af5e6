"""Attacks servers of this machine over real sockets, and tells what held.

python -m scripts.attack [--seconds 5] [--only pings] [--seed 0] [--json]

Floods come from another address, each from a process of its own: for every one of them how much the
server's memory grew, the worst answer of /healthz, and the worst answer to a robot that sends a
picture ten times a second. Then come the attacks that are no floods: names, keys, disks, answers
that are no numbers, and servers that hold up our clients. Ends with 1 if one was not borne.
"""

import argparse
import logging
import ssl
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from deft_client import ClientSettings
from deft_client.settings import TlsFiles
from deft_server.reproduce.local_server import local_server
from scripts.attack.bystanders import Noticed, Target, measure
from scripts.attack.floods import FLOODS, TLS_FLOODS
from scripts.attack.outcomes import AttackOutcome
from scripts.attack.scenes import SCENES
from tests.server.certificates import make_certificate

WARM_S, CALM_S = 2.0, 3.0


def main() -> int:
    """Attack; return 0 if everything was borne."""
    parser = argparse.ArgumentParser(prog="scripts.attack", description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0, help="of every flood [5]")
    parser.add_argument("--only", default="", help="attacks whose name holds this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--policy", default="constant", help="constant: only the server is tried")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    options = parser.parse_args()
    logging.disable(logging.WARNING)  # of our clients, which are held up on purpose
    verdicts = []
    for outcome in _outcomes(options):
        sys.stdout.write((outcome.as_json() if options.json else outcome.as_text()) + "\n")
        sys.stdout.flush()
        verdicts.append(outcome.verdict)
    return 1 if "FAIL" in verdicts else 0


def _outcomes(options: argparse.Namespace) -> Iterator[AttackOutcome]:
    flags = ("--policy", options.policy)
    if any(options.only in name for name in FLOODS):
        with local_server(*flags) as url:
            yield from _floods(Target(url), tuple(FLOODS), options)
    if any(options.only in name for name in TLS_FLOODS):
        with _tls_server(*flags) as target:
            yield from _floods(target, tuple(TLS_FLOODS), options)
    for scene in SCENES:
        name = scene.__name__.replace("_", " ")
        if options.only in name:
            yield replace(scene(), name=name)


@contextmanager
def _tls_server(*flags: str) -> Iterator[Target]:
    with tempfile.TemporaryDirectory() as folder:
        certificate, key = make_certificate(Path(folder))
        files = ("--tls-certificate", str(certificate), "--tls-key", str(key))
        settings = ClientSettings(tls=TlsFiles(ca_file=certificate))
        with local_server(*flags, *files, settings=settings) as url:
            yield Target(url, ssl.create_default_context(cafile=certificate))


def _floods(
    target: Target, names: tuple[str, ...], options: argparse.Namespace
) -> Iterator[AttackOutcome]:
    def flood(name: str | None, seconds: float) -> Noticed:
        return measure(target, name, seconds, options.seed)

    flood(None, WARM_S)
    calm = flood(None, CALM_S)
    before_mb = max(calm.resident_mb)
    yield replace(calm.judged(before_mb), name="no attack")
    for name in names:
        if options.only in name:
            yield replace(flood(name, options.seconds).judged(before_mb), name=name)


if __name__ == "__main__":
    raise SystemExit(main())
