"""What the commands of this package share: picking a policy by flags, and reporting errors."""

import shlex
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass

from deft_core.errors import DeftError
from deft_policies import catalog
from deft_policies.base import Policy
from deft_policies.errors import PolicyError


@dataclass(frozen=True)
class PolicyCommand:
    """A parsed command line: its own flags, and the policy that the rest of them describes."""

    namespace: Namespace
    entry: catalog.CatalogEntry
    words: tuple[str, ...] = ()  # what `load_by_words` takes to load the same policy elsewhere

    def load(self) -> Policy:
        """Load the policy; takes as long as its weights are large."""
        return self.entry.load(self.namespace)


def parse_command(
    parser: ArgumentParser, arguments: list[str], default: str | None = None
) -> PolicyCommand:
    """Add `--policy` and that policy's flags to a parser, and parse."""
    default = default or catalog.default_for(arguments)
    parser.add_argument("--policy", default=default, metavar="NAME", help=f"default: {default}")
    first = ArgumentParser(add_help=False, allow_abbrev=False)
    first.add_argument("--policy", default=default)
    name = first.parse_known_args(arguments)[0].policy
    entry = catalog.find(name)
    entry.add_flags(parser.add_argument_group(f"policy {name}", entry.summary))
    return PolicyCommand(parser.parse_args(arguments), entry, (name, *arguments))


def load_by_words(name: str, *arguments: str) -> Policy:
    """Load a policy by its name and flags; flags that are not its own are passed over."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    entry = catalog.find(name)
    entry.add_flags(parser.add_argument_group(f"policy {name}", entry.summary))
    return entry.load(parser.parse_known_args(arguments)[0])


def target_flags(flags: Namespace, *leave_out: str) -> str:
    """The flags of a parsed command line that name the same policy in the next command."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("--policy", default=catalog.MODEL)
    catalog.find(getattr(flags, "policy", catalog.MODEL)).add_flags(parser.add_argument_group())
    words: list[str] = []
    for action in parser._actions:
        flag, value = action.option_strings[0], getattr(flags, action.dest, action.default)
        if value == action.default or flag in leave_out:
            continue
        for word in value if isinstance(value, list) else [value]:
            words += [flag] if action.nargs == 0 else [flag, str(word)]
    return shlex.join(words)


def run_command(prog: str, command: Callable[[], int]) -> int:
    """Run a command; what was raised on purpose becomes one line and exit code 1."""
    try:
        return command()
    except (PolicyError, DeftError, OSError) as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return 1
