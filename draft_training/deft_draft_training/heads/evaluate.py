"""Judges a draft head on held-out episodes, with the production decoder.

Every held-out action is decoded in session order, once per source and radius, so that sources that
draft from the session's history see what they would see on a robot.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from tqdm import tqdm

from deft_client.commands.program import CommandParser
from deft_client.datasets.flags import add_camera_flag, read_cameras
from deft_client.measures.answers import AnswerRecord
from deft_client.measures.speculation import speculation_of
from deft_client.types import ActionChunk, DecodeTrace, Observation
from deft_draft_training.errors import DataError
from deft_draft_training.heads.export import load_any_head
from deft_draft_training.heads.samples import EpisodeSource
from deft_draft_training.heads.target import FeatureTarget, load_target, parse_target
from deft_draft_training.run_directory import SPLIT_FILE, read_config
from deft_policies.commands.parse import target_flags
from deft_policies.decoding import kinds
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.engine import DraftModels, Engine
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import TreeShape
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.model.block_head import BlockHead
from deft_policies.model.draft_heads import MedusaHeads


@dataclass(frozen=True)
class DraftSetup:
    """A draft source to judge, by a name of the caller's."""

    name: str
    drafts: tuple[str, ...]
    models: DraftModels = DraftModels()
    shape: TreeShape | None = None  # None: the tree that the decoder takes first


_NO_ACTION = np.zeros((0, 0))
_ROW = "{:<28}{:>9}{:>9}{:>9}{:>9}   {}\n"


@dataclass(frozen=True)
class DraftScore:
    """How one source fared at one radius."""

    source: str
    radius: int
    num_actions: int
    committed_length: float  # accepted + 1, mean over the passes that checked a draft
    passes: float  # per action, the prefill included
    relaxed_share: float
    accepted_by_position: tuple[float, ...]  # share of actions whose token there was drafted


def evaluate(
    policy: VlaPolicy,
    held_out: Sequence[Sequence[Observation]],
    sources: Sequence[DraftSetup],
    radii: Sequence[int],
) -> Iterator[DraftScore]:
    """Score every source at every radius on the same episodes, one at a time."""
    total = len(radii) * len(sources) * sum(map(len, held_out))
    with tqdm(total=total, unit="action", file=sys.stderr, leave=False) as bar:
        for radius, setup in product(radii, sources):
            bar.set_description(f"{setup.name} r {radius}")
            method = _method(policy, radius).with_drafts(setup.drafts)
            if setup.shape is not None:
                method = method.with_shape(setup.shape)
            engine = Engine(policy.token_model.target, setup.models)
            answers: list[AnswerRecord] = []
            for episode in held_out:
                for trace in _decode(policy, engine, method, episode):
                    answers.append(AnswerRecord.of(ActionChunk(_NO_ACTION, trace=trace), 0, 0))
                    bar.update()
            bar.clear()  # for what the caller prints
            found = speculation_of(answers)
            assert found is not None
            yield DraftScore(
                source=setup.name,
                radius=radius,
                num_actions=len(answers),
                committed_length=found.committed_length,
                passes=found.passes_per_action,
                relaxed_share=found.relaxed_share,
                accepted_by_position=found.drafted_by_token,
            )


def held_out_frames(
    source: EpisodeSource, episodes: frozenset[int] | None = None
) -> list[list[Observation]]:
    """The frames of some episodes by number, or of all; `DataError` if there are none."""
    found: dict[int, list[Observation]] = {}
    frames = tqdm(source.observations(), "read", unit="frame", file=sys.stderr, leave=False)
    for episode, observation in frames:
        if episodes is None or episode in episodes:
            found.setdefault(episode, []).append(observation)
    if not found:
        raise DataError(
            f"the data sets hold no episode {', '.join(map(str, sorted(episodes or ())))}; "
            "`deft train fit` says which ones it held out"
        )
    return list(found.values())


def _method(policy: VlaPolicy, radius: int) -> Method:
    """Drafts within a radius; exact ones where tokens have no distances."""
    form = policy.token_model.forms[policy.find_key(None)]
    if form.space is not None and not form.numbers_in_row:
        return find_method("within-bins").with_radius(radius)
    if radius:
        raise DataError("answers of this family have no distances between tokens: --radii 0")
    return find_method("block")


@torch.inference_mode()
def _decode(
    policy: VlaPolicy, engine: Engine, method: Method, frames: Sequence[Observation]
) -> Iterator[DecodeTrace]:
    """One episode in order, with the memory that a session would keep."""
    model, memory = policy.token_model, SessionMemory()
    form = model.forms[policy.find_key(None)]
    for frame in frames:
        clock, row = StageClock(model.device), Answer(method, form, memory)
        engine.decode(model.see([frame], clock), [row], clock)
        memory = row.memory
        assert row.trace is not None
        yield row.trace


def main(arguments: list[str]) -> int:
    """Print a table, and write JSON lines where asked to."""
    parser = CommandParser(prog="deft train evaluate", description=__doc__)
    parser.add_argument("sources", nargs="+", type=Path, help="data sets (docs/datasets.md)")
    add_camera_flag(parser)
    parser.add_argument("--head", type=Path, action="append", default=[], metavar="DIR")
    parser.add_argument(
        "--radii", default="0,5,9", help="such as 0,5,9 or 0-15, in this order (default 0,5,9)"
    )
    parser.add_argument("--episodes", help="numbers of held-out episodes (default: all given)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write JSON lines")
    given = parse_target(parser, arguments)
    target = load_target(given)
    setups = [
        *(_setup(directory, target, given.draft_tree) for directory in given.head),
        DraftSetup("previous", (kinds.PREVIOUS,)),
        DraftSetup("extrapolation", (kinds.EXTRAPOLATION,)),
    ]
    chosen = frozenset(_numbers(given.episodes)) if given.episodes else None
    for directory in given.head:
        sys.stderr.write(_warning(directory, chosen))
    scores = []
    sys.stdout.write(_ROW.format("source", "r", "length", "passes", "relaxed", "drafted at 1..7"))
    held_out = held_out_frames(EpisodeSource(tuple(given.sources), 1, read_cameras(given)), chosen)
    for score in evaluate(target.policy, held_out, setups, _numbers(given.radii)):
        scores.append(score)
        sys.stdout.write(_describe(score))
        sys.stdout.flush()
    if given.json is not None:
        given.json.write_text("".join(json.dumps(asdict(one)) + "\n" for one in scores))
    if given.head:
        run = quote(str(given.head[0]))
        sys.stdout.write(f"next: deft train export {run} --out my-head {target_flags(given)}\n")
    return 0


def _setup(directory: Path, target: FeatureTarget, shape: TreeShape | None) -> DraftSetup:
    """A head from its directory, run as the target's flags say."""
    head, models = load_any_head(directory, target), target.policy.drafts
    if isinstance(head, BlockHead):
        models = replace(models, block=head)
        return DraftSetup(str(directory), (kinds.BLOCK,), models, shape)
    if isinstance(head, MedusaHeads):
        models = replace(models, medusa=head)
        return DraftSetup(str(directory), (kinds.MEDUSA,), models, shape)
    return DraftSetup(str(directory), (kinds.HEAD,), replace(models, head=head), shape)


def _warning(directory: Path, chosen: frozenset[int] | None) -> str:
    """What to know where a head is judged by episodes that it was fitted to."""
    path = directory / SPLIT_FILE
    if not path.exists():
        return ""
    split = read_config(path)
    seen = sorted(set(split["trained"]) & (chosen or set(split["trained"])))
    if not seen:
        return ""
    held_out = ",".join(map(str, split["held_out"]))
    return (
        f"{directory} was fitted to episodes {', '.join(map(str, seen))} of its data: if these are "
        f"the same, its lengths are too good. Held out: --episodes {held_out}\n"
    )


def _describe(score: DraftScore) -> str:
    shares = " ".join(f"{share:.2f}" for share in score.accepted_by_position)
    numbers = (score.committed_length, score.passes, score.relaxed_share)
    return _ROW.format(score.source, score.radius, *(f"{one:.2f}" for one in numbers), shares)


def _numbers(text: str) -> Sequence[int]:
    """`0,3-5` to 0, 3, 4, 5."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found.extend(range(int(low), int(high or low) + 1))
    return found
