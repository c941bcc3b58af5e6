"""The policies that can be asked for by name, each imported only when it is.

A policy brings its own command-line flags, so that whoever starts one (`deft serve`, `deft act`,
`deft bench`) accepts exactly the flags it understands and refuses the rest.
"""

import math
from argparse import ArgumentTypeError, Namespace, _ArgumentGroup
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches

from deft_policies import tiny_libero as bundle
from deft_policies.base import Finding, Policy
from deft_policies.constant import ConstantPolicy, SleepingPolicy
from deft_policies.errors import PolicyError
from deft_policies.oft import options as oft_options
from deft_policies.oft.recognition import has_head
from deft_policies.openvla import options as openvla_options


@dataclass(frozen=True)
class CatalogEntry:
    """One policy: what it is, the flags it takes, and how to build it from them.

    `add_flags` must be quick and import nothing heavy: it also runs for `--help`. `load` may take
    minutes; the server calls it on the policy thread. `examine` says whether `load` could work.
    """

    summary: str
    add_flags: Callable[[_ArgumentGroup], None]
    load: Callable[[Namespace], Policy]
    examine: Callable[[Namespace], Sequence[Finding]] = lambda _: ()


class UnknownPolicyError(PolicyError):
    """There is no policy of that name; the message lists those there are."""

    def __init__(self, name: str) -> None:
        close = get_close_matches(name, CATALOG, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        super().__init__(f"unknown policy {name!r}; known: {', '.join(CATALOG)}.{hint}")


def find(name: str) -> CatalogEntry:
    """Return the entry of that name, or raise `UnknownPolicyError`."""
    if name not in CATALOG:
        raise UnknownPolicyError(name)
    return CATALOG[name]


def default_for(flags: Sequence[str]) -> str:
    """The policy of a command line that names none, by the weights that it says.

    Where it says none, the small policy that ships with Deft.
    """
    checkpoint = _value_of("--checkpoint", flags)
    if checkpoint is None and _value_of("--random-weights", flags) is None:
        return "tiny-libero"
    asks_for_chunks = _value_of("--chunk", flags) not in (None, "1")
    if asks_for_chunks or _value_of("--pictures", flags) is not None:
        return "oft"
    return "oft" if checkpoint is not None and has_head(checkpoint) else "openvla"


def _value_of(name: str, flags: Sequence[str]) -> str | None:
    """What stands behind a flag; the last one counts, as in argparse."""
    found = None
    for index, flag in enumerate(flags):
        if flag == name and index + 1 < len(flags):
            found = flags[index + 1]
        elif flag.startswith(f"{name}="):
            found = flag.removeprefix(f"{name}=")
    return found


def _no_flags(_: _ArgumentGroup) -> None:
    """Take no flags."""


def _load_constant(_: Namespace) -> Policy:
    return ConstantPolicy()


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


def _load_sleeping(namespace: Namespace) -> Policy:
    return SleepingPolicy(sleep_s=namespace.sleep_ms / 1000)


def _load_openvla(namespace: Namespace) -> Policy:
    # Imported here: it brings torch along.
    from deft_policies.openvla.load import load_policy

    return load_policy(openvla_options.read_flags(namespace))


def _examine_openvla(namespace: Namespace) -> Sequence[Finding]:
    from deft_policies.openvla.examine import examine

    return examine(openvla_options.read_flags(namespace))


def _load_oft(namespace: Namespace) -> Policy:
    from deft_policies.oft.load import load_policy

    return load_policy(oft_options.read_flags(namespace))


def _examine_oft(namespace: Namespace) -> Sequence[Finding]:
    from deft_policies.oft.load import examine

    return examine(oft_options.read_flags(namespace))


def _load_tiny(namespace: Namespace) -> Policy:
    from deft_policies.openvla.load import load_policy

    return load_policy(bundle.complete(openvla_options.read_flags(namespace)))


def _examine_tiny(namespace: Namespace) -> Sequence[Finding]:
    from deft_policies.openvla.examine import examine

    return examine(bundle.complete(openvla_options.read_flags(namespace)))


CATALOG: dict[str, CatalogEntry] = {
    "constant": CatalogEntry(
        "answers every frame with the same action; no model", _no_flags, _load_constant
    ),
    "sleeping": CatalogEntry(
        "answers like constant, but takes a given time over every batch; no model",
        _add_sleeping_flags,
        _load_sleeping,
    ),
    "openvla": CatalogEntry(
        "OpenVLA with speculative decoding",
        openvla_options.add_flags,
        _load_openvla,
        _examine_openvla,
    ),
    "oft": CatalogEntry(
        "OpenVLA-OFT: chunks of actions in one pass",
        oft_options.add_flags,
        _load_oft,
        _examine_oft,
    ),
    "tiny-libero": CatalogEntry(
        "a small OpenVLA for LIBERO's objects, with draft heads; ships with Deft",
        openvla_options.add_flags,
        _load_tiny,
        _examine_tiny,
    ),
}
