"""`deft bench` beside drafts that are right to order.

python -m scripts.bench decoding --scripted-drafts 0.5,0.9
"""

from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections.abc import Sequence

from deft_policies.benchmark.command import bench, build_parser, find_rivals
from deft_policies.benchmark.replay import Contender, ReplayFrame
from deft_policies.families.policy import VlaPolicy
from scripts.scripted_drafts import Script, ScriptedPolicy, find_answers


def main(arguments: list[str]) -> int:
    """Run the benchmark; return its exit code."""
    parser = build_parser()
    parser.prog = "python -m scripts.bench decoding"
    add_flags(parser)
    return bench(parser, arguments, find_others)


def add_flags(parser: ArgumentParser) -> None:
    """Add the drafts to the parser."""
    parser.add_argument(
        "--scripted-drafts",
        type=_shares,
        default=(),
        metavar="SHARE[,SHARE...]",
        help="also run drafts that know the answer and get this share of its tokens right, 0 to 1, "
        "in the prefill and in the place of a draft head's path",
    )


def _shares(given: str) -> tuple[float, ...]:
    shares = tuple(float(part) for part in given.split(","))
    if not all(0.0 <= share <= 1.0 for share in shares):
        raise ArgumentTypeError(f"shares are from 0 to 1, got {given}")
    return shares


def find_others(
    given: Namespace, policy: VlaPolicy, frames: Sequence[ReplayFrame]
) -> tuple[list[Contender], str]:
    """Whom the flags add, and the name of the baseline."""
    contenders, baseline = find_rivals(given, policy, frames)
    if given.scripted_drafts:
        contenders += scripted(policy, frames, given.scripted_drafts)
    return contenders, baseline


def scripted(
    policy: VlaPolicy, frames: Sequence[ReplayFrame], shares: Sequence[float]
) -> list[Contender]:
    """Drafts that are right to order, never guarded, acting at once; answers stay the same."""
    scripts = [
        script
        for share in shares
        for right in [f"drafts {100 * share:.0f}% right"]
        for script in (
            Script(f"prefill {right}", share, num_chains=1),
            Script.of_head(f"head {right}", share),
        )
    ]
    ours = ScriptedPolicy(policy, scripts, find_answers(policy, frames))
    ours.warm_up()
    return [Contender(one.name, ours, one.name, want_reasoning=False) for one in scripts]
