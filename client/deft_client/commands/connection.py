"""The options every command that talks to a server has, and how failures reach the terminal."""

import argparse
import os
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

from deft_client.settings import (
    API_KEY_VARIABLE,
    DEFAULT_URL,
    ClientSettings,
    Timeouts,
    TlsFiles,
    check_url,
)
from deft_core.errors import DeftError, UsageError
from deft_core.files import read_file
from deft_core.wire.images import ImageEncoding

URL_BEGINNINGS = ("http://", "https://", "ws://", "wss://")


def add_url_word(parser: argparse.ArgumentParser) -> None:
    """Add the server's URL as a word, behind all other words."""
    parser.add_argument("url_word", nargs="?", metavar="URL", help="the server, as --url")


def add_connection_options(parser: argparse.ArgumentParser, keys: str = "") -> None:
    """Add `--url`, `--timeout`, `--api-key-file` and `--ca-file`; `keys`: more about the third."""
    parser.add_argument("--url", help=f"the server (default: {DEFAULT_URL})")
    parser.add_argument(
        "--timeout", type=float, default=Timeouts.answer_s, metavar="SECONDS",
        help="longest wait for an answer (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument(
        "--api-key-file", type=Path, metavar="FILE",
        help=f"file with the API key (default: the variable {API_KEY_VARIABLE}, if set){keys}",
    )  # fmt: skip
    parser.add_argument(
        "--ca-file", type=Path, metavar="FILE",
        help="certificate (PEM) of the authority that vouches for an https server",
    )  # fmt: skip


def parse_connected(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """Parse a command line whose URL is a word or a flag, at any place."""
    options = parser.parse_intermixed_args(_urls_are_no_values(parser, arguments))
    words = take_urls(options)
    given = {one for one in (options.url, *words) if one}
    if len(given) > 1:
        parser.error(f"one URL is asked at a time, got {' and '.join(sorted(given))}")
    options.url = next(iter(given), DEFAULT_URL)
    return options


def _urls_are_no_values(parser: argparse.ArgumentParser, arguments: list[str]) -> list[str]:
    """Move a URL to the front that follows a flag whose value may be left out, as `--wait`."""
    flags = {flag for one in parser._actions if one.nargs == "?" for flag in one.option_strings}
    moved = [
        number
        for number, (flag, word) in enumerate(pairwise(arguments), 1)
        if flag in flags and word.startswith(URL_BEGINNINGS)
    ]
    others = [word for number, word in enumerate(arguments) if number not in moved]
    return [arguments[number] for number in moved] + others


def take_urls(options: argparse.Namespace) -> list[str]:
    """Return the URLs among the words, which leave the lists that took them."""
    urls = [word] if (word := getattr(options, "url_word", None)) else []
    for name, values in vars(options).items():
        if isinstance(values, list):
            found = [one for one in values if str(one).startswith(URL_BEGINNINGS)]
            setattr(options, name, [one for one in values if one not in found])
            urls += found
    return urls


def connection_settings(
    options: argparse.Namespace,
    encoding: ImageEncoding = ImageEncoding.RAW,
    api_key: str | None = None,
) -> ClientSettings:
    """Return the settings that the options ask for; `api_key` is one of several in the file."""
    try:
        check_url(options.url)
        timeouts = Timeouts(answer_s=options.timeout)
        tls = None if options.ca_file is None else TlsFiles(options.ca_file)
        if tls is not None:
            tls.context()
        key = api_key or _api_key(options)
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
    keys = read_api_keys(options)
    if len(keys) > 1:
        raise UsageError(f"{options.api_key_file} holds {len(keys)} API keys, and one is needed")
    return keys[0]


def read_api_keys(options: argparse.Namespace) -> list[str | None]:
    """Return the keys of the file, one a line; without a file that of the environment, or None."""
    if options.api_key_file is None:
        return [os.environ.get(API_KEY_VARIABLE) or None]
    try:
        lines = read_file(options.api_key_file).decode("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read the API key: {error}") from error
    keys = [line.strip() for line in lines if line.strip()]
    if not keys:
        raise UsageError(f"{options.api_key_file} holds no API key")
    return [*keys]
