"""`deft train evaluate`: committed length and acceptance by position, on held-out episodes."""

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from deft_draft_training.heads.evaluate import DraftScore, DraftSetup, evaluate
from deft_draft_training.heads.load import add_target_flags, load_any_head, load_target
from deft_draft_training.heads.target import FeatureTarget
from deft_policies.decoding.kinds import DraftKind
from deft_policies.decoding.medusa import MedusaHeads
from deft_policies.decoding.methods import DraftModels
from deft_policies.decoding.shapes import TreeShape


def main(arguments: list[str]) -> int:
    """Print a table, and write JSON lines where asked to."""
    parser = argparse.ArgumentParser(prog="deft train evaluate", description=__doc__)
    parser.add_argument("sources", nargs="+", type=Path, help="folders of episodes")
    parser.add_argument("--head", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument("--radii", default="0-15", help="such as 0,5,9 or 0-15 (default)")
    parser.add_argument("--episodes", help="numbers of held-out episodes (default: all given)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write JSON lines")
    add_target_flags(parser)
    given = parser.parse_args(arguments)
    target = load_target(given)
    setups = [
        *(_setup(directory, target, given.draft_tree) for directory in given.head),
        DraftSetup("previous", (DraftKind.PREVIOUS,)),
        DraftSetup("extrapolation", (DraftKind.EXTRAPOLATION,)),
    ]
    chosen = frozenset(_numbers(given.episodes)) if given.episodes else None
    scores = []
    sys.stdout.write(_row("source", "r", "length", "passes", "relaxed", "accepted at 1..7"))
    for score in evaluate(
        target.policy, tuple(given.sources), setups, _numbers(given.radii), chosen
    ):
        scores.append(score)
        sys.stdout.write(_describe(score))
        sys.stdout.flush()
    if given.json is not None:
        given.json.write_text("".join(json.dumps(asdict(one)) + "\n" for one in scores))
    return 0


def _setup(directory: Path, target: FeatureTarget, shape: TreeShape | None) -> DraftSetup:
    head = load_any_head(directory, target)
    if isinstance(head, MedusaHeads):
        return DraftSetup(str(directory), (DraftKind.MEDUSA,), DraftModels(medusa=head), shape)
    return DraftSetup(str(directory), (DraftKind.HEAD,), DraftModels(head=head), shape)


def _describe(score: DraftScore) -> str:
    shares = " ".join(f"{share:.2f}" for share in score.accepted_by_position)
    return _row(
        score.source,
        str(score.radius),
        f"{score.committed_length:.2f}",
        f"{score.passes:.2f}",
        f"{score.relaxed_share:.2f}",
        shares,
    )


def _row(*cells: str) -> str:
    name, *rest, last = cells
    return f"{name:<28}" + "".join(f"{cell:>9}" for cell in rest) + f"   {last}\n"


def _numbers(text: str) -> Sequence[int]:
    """`0,3-5` to 0, 3, 4, 5."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found.extend(range(int(low), int(high or low) + 1))
    return found
