"""What `deft serve` and `deft doctor` are asked by flags, by the environment and by a file."""

import argparse
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from deft_policies import catalog
from deft_policies.base import Policy
from deft_server import settings_sources
from deft_server.settings import Settings
from deft_server.settings_sources import Source


@dataclass(frozen=True)
class ServeCommand:
    """A policy by name, its own flags, and the settings of the server."""

    policy_name: str
    entry: catalog.CatalogEntry
    options: Namespace
    settings: Settings

    def load(self) -> Policy:
        """Load the policy; takes as long as its weights are large."""
        return self.entry.load(self.options)


def read_command(
    parser: ArgumentParser, arguments: list[str], environment: Mapping[str, str]
) -> ServeCommand:
    """Add all flags to a parser and merge the three sources; raise `SettingsError` on nonsense.

    Flags beat the environment, which beats the file. Unknown flags end the program, as usual.
    """
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    _add_own_flags(first)
    known = first.parse_known_args(arguments)[0]
    said = settings_sources.read_environment(environment)
    file = Source() if known.config is None else settings_sources.read_file(known.config)
    flags = [*file.policy_flags, *said.policy_flags, *arguments]
    name = known.policy or said.policy or file.policy or catalog.default_for(flags)
    entry = catalog.find(name)
    parser.epilog = (
        "Every server setting may also be a line of the file, or DEFT_SERVER_NAME in the "
        f"environment. Policies: {', '.join(catalog.CATALOG)}."
    )
    _add_own_flags(parser)
    entry.add_flags(parser.add_argument_group(f"policy {name}", entry.summary))
    settings_sources.add_flags(parser)
    options = parser.parse_args(flags)
    settings = settings_sources.build_settings(vars(options), said.settings, file.settings)
    return ServeCommand(name, entry, options, settings)


def _add_own_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--policy",
        metavar="NAME",
        help="which policy [openvla with a --checkpoint, else tiny-libero]",
    )
    parser.add_argument("--config", type=Path, metavar="FILE", help="settings in TOML")
