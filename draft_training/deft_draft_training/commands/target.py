"""What the commands of training share: the target's flags, and what is checked before it is loaded.

Imports no torch, as no module of this folder does: a typing error costs nothing.
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence
from itertools import chain, islice
from pathlib import Path

from deft_core.datasets.formats import find_format, read_dataset
from deft_draft_training.errors import ConfigError, DataError
from deft_policies.commands.parse import parse_command
from deft_policies.errors import PolicyError

LEAST_EPISODES = 2  # one to train on, one held out


def parse_target(parser: ArgumentParser, arguments: list[str]) -> Namespace:
    """Parse a command line whose target is named by the same flags as the server's policy."""
    try:
        return parse_command(parser, arguments).namespace
    except PolicyError as error:
        raise ConfigError(str(error)) from error


def at_least_one(text: str) -> int:
    """Read a flag that counts something."""
    if not text.isdigit() or int(text) < 1:
        raise ArgumentTypeError(f"expected a whole number of at least 1, got {text!r}")
    return int(text)


def check_datasets(paths: Sequence[Path]) -> None:
    """Raise `DatasetError` for what is no data set."""
    for path in paths:
        find_format(path)


def check_episodes(paths: Sequence[Path], cameras: Sequence[str]) -> None:
    """Raise `DataError` unless there are episodes to train on and to hold out."""
    episodes = chain.from_iterable(read_dataset(path, cameras) for path in paths)
    refuse_few(sum(1 for _ in islice(episodes, LEAST_EPISODES)))


def refuse_few(num_episodes: int) -> None:
    """Raise `DataError` for fewer episodes than a split needs."""
    if num_episodes < LEAST_EPISODES:
        raise DataError(
            f"a fit needs at least {LEAST_EPISODES} episodes, one of them to be held out; got "
            f"{num_episodes}"
        )
