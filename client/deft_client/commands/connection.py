"""The options every command that talks to a server has, and how failures reach the terminal."""

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path

from deft_client.errors import DeftError, UsageError
from deft_client.files import read_file
from deft_client.settings import DEFAULT_URL, ClientSettings, Timeouts, TlsFiles, check_url
from deft_client.wire.images import ImageEncoding

API_KEY_VARIABLE = "DEFT_API_KEY"


def add_connection_options(parser: argparse.ArgumentParser) -> None:
    """Add `--url`, `--timeout`, `--api-key-file` and `--ca-file`."""
    parser.add_argument("--url", default=DEFAULT_URL, help="the server (default: %(default)s)")
    parser.add_argument(
        "--timeout", type=float, default=Timeouts.answer_s, metavar="SECONDS",
        help="longest wait for an answer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help=f"file with the API key (default: the variable {API_KEY_VARIABLE}, if set)",
    )  # fmt: skip
    parser.add_argument(
        "--ca-file", type=Path, metavar="FILE",
        help="certificate (PEM) of the authority that vouches for an https server",
    )  # fmt: skip


def connection_settings(
    options: argparse.Namespace, encoding: ImageEncoding = ImageEncoding.RAW
) -> ClientSettings:
    """Return the settings that the options ask for."""
    try:
        check_url(options.url)
        timeouts = Timeouts(answer_s=options.timeout)
        tls = None if options.ca_file is None else TlsFiles(options.ca_file)
        if tls is not None:
            tls.context()
        key = _api_key(options)
        return ClientSettings(timeouts, image_encoding=encoding, api_key=key, tls=tls)
    except ValueError as error:
        raise UsageError(str(error)) from error


def reported(job: Callable[[], int], command: str) -> int:
    """Run a job; turn what it raises on purpose into one line and an exit code."""
    try:
        return job()
    except DeftError as error:
        sys.stderr.write(f"deft-client {command}: {error}\n")
        return 2 if isinstance(error, UsageError) else 1


def _api_key(options: argparse.Namespace) -> str | None:
    if options.api_key_file is None:
        return os.environ.get(API_KEY_VARIABLE) or None
    try:
        key = read_file(options.api_key_file).decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the API key: {error}") from error
    if not key:
        raise UsageError(f"{options.api_key_file} holds no API key")
    return str(key)
