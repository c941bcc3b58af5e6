"""The policies that can be asked for by name, each imported only when it is.

A policy brings its own command-line flags, so that every command that starts one (`deft serve`,
`deft act`, `deft bench`) accepts exactly the flags it understands and refuses the rest.
"""

import math
from argparse import ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import partial

from deft_policies import tiny_libero as bundle
from deft_policies.base import Finding, Policy
from deft_policies.constant import ConstantPolicy
from deft_policies.errors import PolicyError
from deft_policies.families.options import FAMILY_NAMES, ModelOptions, add_flags, read_flags

MODEL = "model"


@dataclass(frozen=True)
class CatalogEntry:
    """One policy: what it is, the flags it takes, and what they make.

    `add_flags` must be quick and import nothing heavy: it also runs for `--help`. What is made is a
    policy, or the options of a model, which takes minutes to load: the server does so on the policy
    thread.
    """

    summary: str
    add_flags: Callable[[_ArgumentGroup], None]
    make: Callable[[Namespace], Policy | ModelOptions]

    def load(self, namespace: Namespace) -> Policy:
        """The policy, ready to answer."""
        policy = self.make(namespace)
        if not isinstance(policy, ModelOptions):
            return policy
        from deft_policies.families.loading import load_policy  # brings torch along

        return load_policy(policy)

    def examine(self, namespace: Namespace) -> Sequence[Finding]:
        """Whether `load` could work."""
        made = self.make(namespace)
        if not isinstance(made, ModelOptions):
            return ()
        from deft_policies.families.loading import examine

        return examine(made)


def find(name: str) -> CatalogEntry:
    """Return the entry of that name, or raise `PolicyError`."""
    if name not in CATALOG:
        close = get_close_matches(name, CATALOG, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        raise PolicyError(f"unknown policy {name!r}; known: {', '.join(CATALOG)}.{hint}")
    return CATALOG[name]


def default_for(flags: Sequence[str]) -> str:
    """The policy of a command line that names none: tiny-libero, unless it says weights."""
    names = {flag.partition("=")[0] for flag in flags}
    return MODEL if names & {"--checkpoint", "--random-weights"} else "tiny-libero"


def _add_sleeping_flags(group: _ArgumentGroup) -> None:
    group.add_argument(
        "--sleep-ms",
        type=_milliseconds,
        default=50.0,
        metavar="MS",
        help="time of every batch [%(default)s]",
    )


def _milliseconds(text: str) -> float:
    """Read a flag that is a time; raises `ArgumentTypeError`."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < math.inf:
        raise ArgumentTypeError(f"{text!r} is no time in milliseconds: give 0 or more")
    return value


CATALOG: dict[str, CatalogEntry] = {
    "tiny-libero": CatalogEntry(
        "a small OpenVLA for LIBERO's objects, with draft heads; ships with Deft",
        add_flags,
        lambda given: bundle.complete(read_flags(given)),
    ),
    MODEL: CatalogEntry("the model of --checkpoint or --random-weights", add_flags, read_flags),
    **{
        name: CatalogEntry(
            f"the same, of the family {name}", partial(add_flags, family=name), read_flags
        )
        for name in FAMILY_NAMES
    },
    "constant": CatalogEntry(
        "answers every frame with the same action; no model",
        lambda group: None,
        lambda given: ConstantPolicy(),
    ),
    "sleeping": CatalogEntry(
        "answers like constant, but takes a given time over every batch; no model",
        _add_sleeping_flags,
        lambda given: ConstantPolicy(name="sleeping", sleep_s=given.sleep_ms / 1000),
    ),
}
