"""Judges a draft head on held-out episodes, with the production decoder.

Every held-out action is decoded in session order, once per source and radius, so that sources that
draft from the session's history see what they would see on a robot.
"""

import hashlib
import json
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from tqdm import tqdm

from deft_core.datasets.flags import read_cameras
from deft_core.errors import WireError
from deft_core.measures.answers import AnswerRecord
from deft_core.measures.speculation import speculation_of
from deft_core.types import ActionChunk, DecodeTrace, Observation
from deft_core.wire.formats import convert
from deft_draft_training.errors import DataError
from deft_draft_training.heads.export import load_any_head
from deft_draft_training.heads.samples import EpisodeSource
from deft_draft_training.heads.target import FeatureTarget, load_target
from deft_draft_training.run_directory import SPLIT_FILE, explained, read_config
from deft_policies.commands.parse import target_flags
from deft_policies.decoding import kinds
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.engine import Engine
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import TreeShape, read_tree
from deft_policies.decoding.planner import DraftModels
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.model.block_head import BlockHead
from deft_policies.model.draft_heads import MedusaHeads
from deft_policies.progress import counted, shown


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
    about: str = "",
) -> Iterator[DraftScore]:
    """Score every source at every radius on the same episodes, one at a time.

    `about` names the row where progress is shown.
    """
    total = sum(map(len, held_out))
    for radius, setup in product(radii, sources):
        method = _method(policy, radius).with_drafts(setup.drafts)
        if setup.shape is not None:
            method = method.with_shape(setup.shape)
        engine = Engine(policy.model.target, setup.models)
        traces = (
            trace for episode in held_out for trace in _decode(policy, engine, method, episode)
        )
        name = about or f"{setup.name} r={radius}"
        answers = [
            AnswerRecord.of(ActionChunk(_NO_ACTION, trace=trace), 0, 0)
            for trace in counted(traces, total, name, "action")
        ]
        speculation = speculation_of(answers)
        assert speculation is not None
        yield DraftScore(
            source=setup.name,
            radius=radius,
            num_actions=len(answers),
            committed_length=speculation.committed_length,
            passes=speculation.passes_per_action,
            relaxed_share=speculation.relaxed_share,
            accepted_by_position=speculation.drafted_by_token,
        )


def held_out_frames(
    source: EpisodeSource, episodes: frozenset[int] | None = None
) -> list[list[Observation]]:
    """The frames of some episodes by number, or of all; `DataError` if there are none."""
    by_episode: dict[int, list[Observation]] = {}
    frames = tqdm(source.observations(), "read", unit="frame", file=sys.stderr, leave=False)
    for episode, observation in frames:
        if episodes is None or episode in episodes:
            by_episode.setdefault(episode, []).append(observation)
    if not by_episode:
        raise DataError(
            f"the data sets hold no episode {', '.join(map(str, sorted(episodes or ())))}; "
            "`deft train fit` says which ones it held out"
        )
    return list(by_episode.values())


def _method(policy: VlaPolicy, radius: int) -> Method:
    """Drafts within a radius; exact ones where tokens have no distances."""
    spec = policy.model.specs[policy.find_key(None)]
    if spec.space is not None and not spec.numbers_in_row:
        return find_method("within-bins").with_radius(radius)
    if radius:
        raise DataError("answers of this family have no distances between tokens: --radii 0")
    return find_method("block")


@torch.inference_mode()
def _decode(
    policy: VlaPolicy, engine: Engine, method: Method, frames: Sequence[Observation]
) -> Iterator[DecodeTrace]:
    """One episode in order, with the memory that a session would keep."""
    model, memory = policy.model, SessionMemory()
    spec = model.specs[policy.find_key(None)]
    for frame in frames:
        clock, row = StageClock(model.device), Answer(method, spec, memory)
        engine.decode(model.see([frame], clock), [row], clock)
        memory = row.memory
        assert row.trace is not None
        yield row.trace


def run(flags: Namespace) -> int:
    """Print a table row by row, and add each to the JSON lines where asked to."""
    with shown():
        target = load_target(flags)
    shape = None if flags.draft_tree is None else read_tree(flags.draft_tree)
    setups = [
        *(_setup(directory, target, shape) for directory in flags.head),
        DraftSetup("previous", (kinds.PREVIOUS,)),
        DraftSetup("extrapolation", (kinds.EXTRAPOLATION,)),
    ]
    chosen = frozenset(flags.episodes) if flags.episodes else None
    for directory in flags.head:
        sys.stderr.write(_warning(directory, chosen))
    source = EpisodeSource(tuple(flags.sources), 1, read_cameras(flags))
    held_out: Sequence[Sequence[Observation]] = held_out_frames(source, chosen)
    if flags.frames is not None:
        held_out = _first_of_each(held_out, flags.frames)
    digest = _digest(flags, target, held_out)
    scores = {} if flags.json is None else read_scores(flags.json, digest)
    sys.stdout.write(_ROW.format("source", "r", "length", "passes", "relaxed", "drafted at 1..7"))
    rows = [(radius, setup) for radius in flags.radii for setup in setups]
    for number, (radius, setup) in enumerate(rows, 1):
        score = scores.get((setup.name, radius))
        if score is None:
            about = f"row {number} of {len(rows)}, {setup.name} r={radius}"
            (score,) = evaluate(target.policy, held_out, [setup], [radius], about)
            if flags.json is not None:
                append_score(flags.json, digest, score)
        sys.stdout.write(_describe(score))
        sys.stdout.flush()
    if flags.head:
        first = quote(str(flags.head[0]))
        sys.stdout.write(f"next: deft train export {first} --out my-head {target_flags(flags)}\n")
    return 0


def read_scores(path: Path, digest: str) -> dict[tuple[str, int], DraftScore]:
    """Rows that an earlier sitting wrote, by source and radius; of something else, `DataError`."""
    if not path.exists():
        return {}
    try:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        made_of = {line.pop("of") for line in lines}
        scores = [convert(line, DraftScore, name="row") for line in lines]
    except (ValueError, KeyError, AttributeError, TypeError, WireError) as error:
        raise DataError(f"{path} holds no rows of `deft train evaluate`: {error}") from error
    if made_of - {digest}:
        raise DataError(
            f"{path} has rows of other frames, heads or weights; choose another file, or remove it"
        )
    return {(score.source, score.radius): score for score in scores}


def append_score(path: Path, digest: str, score: DraftScore) -> None:
    """Add a row as soon as it is there."""
    with explained(path), path.open("a") as file:
        file.write(json.dumps({"of": digest, **asdict(score)}) + "\n")


def _first_of_each(
    episodes: Sequence[Sequence[Observation]], limit: int
) -> list[Sequence[Observation]]:
    """The first frames of every episode, as many of each as there is room for."""
    per_episode = max(1, limit // len(episodes))
    return [episode[:per_episode] for episode in episodes[:limit]]


def _digest(
    flags: Namespace, target: FeatureTarget, held_out: Sequence[Sequence[Observation]]
) -> str:
    """Of all that a row depends on but its source and radius."""
    digest = hashlib.sha256(target.fingerprint().encode())
    digest.update(repr((flags.draft_tree, flags.rope_offset, flags.key_mask)).encode())
    for directory in flags.head:
        for path in sorted(file for file in directory.iterdir() if file.is_file()):
            digest.update(f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}".encode())
    for episode in held_out:
        for seen in episode:
            digest.update(seen.instruction.encode())
            digest.update(np.ascontiguousarray(seen.image).tobytes())
    return digest.hexdigest()[:16]


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
    return _ROW.format(score.source, score.radius, *(f"{number:.2f}" for number in numbers), shares)
