"""Is exact match lossless in bfloat16? Sessions over the golden checkpoint, every flip explained.

    python -m tests.near_ties [SESSIONS [SOURCE...]]

For every draft source as many sessions as asked for (500), each of two frames, with a tree, a batch
and further sources drawn by its number. A pass over many nodes rounds unlike a pass over one, so a
token may differ from plain decoding in the same format. It is explained where float32, led along
the same tokens, has the two as near to each other as the format has erred anywhere in plain
decoding, once for each of them. Exit code 1 where a flip is not.
"""

import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from deft_client.types import Observation
from deft_policies.checkpoint.drafts import load_head
from deft_policies.decoding.acceptance.rule import ActionSpace
from deft_policies.decoding.batch import AnswerSpec, Row
from deft_policies.decoding.drafts.retrieval import RetrievalIndex, frame_keys
from deft_policies.decoding.engine import DraftModels, Engine
from deft_policies.decoding.kinds import OUR_KINDS
from deft_policies.decoding.methods import Method, find_method
from deft_policies.decoding.plan import Plan, TreeShape
from deft_policies.decoding.sampling import first_maximum
from deft_policies.decoding.target import Prompts, self_draft_target
from deft_policies.families.loading import load_policy
from deft_policies.families.model import TokenModel
from deft_policies.families.openvla import VlaTarget
from deft_policies.families.options import ModelOptions
from deft_policies.memory import SessionMemory
from deft_policies.model.draft_heads import MedusaHeads
from deft_policies.model.formats import Precision
from tests import golden
from tests.policies.decoding.scripts import clock

LENGTH, MOST_ROWS, NUM_VARIANTS = 7, 4, 3
SPACE = ActionSpace.in_bins(LENGTH)
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Flip:
    """A token that plain decoding in the same format would not have said there."""

    source: str
    session: int
    position: int
    plain: int
    drafted: int
    margin: float  # of plain's token over the drafted one in float32
    limit: float  # twice the format's largest error

    @property
    def is_near_tie(self) -> bool:
        return self.margin <= self.limit


def lead(target: VlaTarget, prompts: Prompts, given: Tokens | None = None) -> list[Tensor]:
    """Plain decoding's logits, position by position, along given tokens or its own."""
    return target.logits_along(prompts, LENGTH, given)


class Bench:
    """The golden checkpoint in both formats, its frames, and a draft model of every kind."""

    def __init__(self, folder: Path, kind: type[VlaTarget] = VlaTarget) -> None:
        self.exact, rounded = (model_in(one) for one in (Precision.FLOAT32, Precision.BFLOAT16))
        self.target = kind(rounded.network)
        self.frames = [rounded.see([seen], clock()) for seen in observations()]
        self.exact_frames = [self.exact.see([seen], clock()) for seen in observations()]
        self.models = models_of(self.target, self.frames, self.plain, folder)

    @cached_property
    def logits(self) -> list[list[Tensor]]:
        """Of plain decoding of every frame."""
        return [lead(self.target, frame) for frame in self.frames]

    @property
    def plain(self) -> list[Tokens]:
        """What plain decoding in the format answers to every frame."""
        return [tuple(int(first_maximum(one)) for one in frame) for frame in self.logits]

    @cached_property
    def largest_error(self) -> float:
        """Of any logit of plain decoding, against float32 along the same tokens."""
        errors = []
        for frame, exact, tokens in zip(self.logits, self.exact_frames, self.plain, strict=True):
            wanted = lead(self.exact.target, exact, tokens)
            errors += [
                float((one - two).abs().max()) for one, two in zip(frame, wanted, strict=True)
            ]
        return max(errors)

    def flips(self, kind: str, session: int) -> Iterator[Flip]:
        """Play one session with this source and look at every token of it."""
        rng = random.Random(f"{kind} {session}")
        rows = rng.randint(1, MOST_ROWS)
        engine, method = Engine(self.target, self.models), method_of(kind, rng)
        memories = [SessionMemory()] * rows
        for _ in range(2):
            seen = [rng.randrange(len(self.frames)) for _ in range(rows)]
            prompts = batch_of([self.frames[one] for one in seen])
            answers = [Row(method, AnswerSpec.action(SPACE), memory) for memory in memories]
            engine.decode(prompts, answers, clock())
            memories = [answer.memory for answer in answers]
            for frame, answer in zip(seen, answers, strict=True):
                if tuple(answer.tokens) != self.plain[frame]:
                    yield from self._explained(frame, tuple(answer.tokens), kind, session)

    def _explained(self, frame: int, tokens: Tokens, kind: str, session: int) -> Iterator[Flip]:
        own = lead(self.target, self.frames[frame], tokens)
        exact = lead(self.exact.target, self.exact_frames[frame], tokens)
        for position, token in enumerate(tokens):
            plain = int(first_maximum(own[position]))
            if plain != token:
                margin = float((exact[position][plain] - exact[position][token]).abs())
                limit = 2 * self.largest_error
                yield Flip(kind, session, position, plain, token, margin, limit)


def method_of(kind: str, rng: random.Random) -> Method:
    """Exact match with this source, and perhaps others."""
    others = [one for one in OUR_KINDS if one != kind]
    kinds = (kind, *rng.sample(others, rng.randint(0, 2)))
    plan = Plan("case", kinds, kinds, shape_of(rng))
    share = rng.choice([0.1, 1.0])
    return replace(find_method("lossless"), plans=(plan,), is_guarded=False, patch_share=share)


def shape_of(rng: random.Random) -> TreeShape:
    template = rng.choice([TreeShape.eagle(), TreeShape.branches(2, 5), TreeShape.template(5, 3)])
    shapes = [TreeShape.chain(6), TreeShape(), TreeShape(3, 2, 8), template]
    return replace(rng.choice(shapes), is_full_depth=rng.random() < 0.2)


def model_in(precision: Precision) -> TokenModel:
    options = ModelOptions(
        checkpoint=str(golden.TINY_OPENVLA),
        statistics_key="libero_spatial",
        device="cpu",
        precision=precision,
        self_draft_layers=1,
    )
    return load_policy(options).token_model


def observations() -> list[Observation]:
    """The golden pictures, each also under noise."""
    generator, found = np.random.default_rng(0), []
    for case in golden.cases_with_image():
        image = case.image().astype(np.int16)
        for strength in range(NUM_VARIANTS):
            noise = generator.integers(-40 * strength, 40 * strength + 1, image.shape)
            seen = (image + noise).clip(0, 255).astype(np.uint8)
            found.append(Observation(seen, case.instruction))
    return found


def models_of(
    target: VlaTarget, frames: Sequence[Prompts], plain: Sequence[Tokens], folder: Path
) -> DraftModels:
    """The golden head; other models of random weights, and stored answers that err."""
    like, width = target.decoder.embedding.weight, target.decoder.sizes.width
    torch.manual_seed(0)
    medusa = MedusaHeads(width, 6).requires_grad_(False)
    medusa.weight.normal_(std=0.02)
    keys = torch.cat([frame_keys(frame) for frame in frames])
    actions = torch.tensor(plain)
    actions = torch.where(torch.rand(actions.shape) < 0.2, actions.roll(1, dims=0), actions)
    return DraftModels(
        head=load_head(golden.write_draft_head(folder / "head"), width, like),
        medusa=medusa.to(like.dtype),
        index=RetrievalIndex(keys, actions, "golden"),
        small_model=self_draft_target(target, 1),
    )


def batch_of(frames: Sequence[Prompts]) -> Prompts:
    """Frames side by side, padded on the right."""
    longest = max(one.embeds.shape[1] for one in frames)
    embeds = [
        torch.nn.functional.pad(one.embeds, (0, 0, 0, longest - one.embeds.shape[1]))
        for one in frames
    ]
    features = [one.features for one in frames if one.features is not None]
    return replace(
        frames[0],
        embeds=torch.cat(embeds),
        lengths=torch.cat([one.lengths for one in frames]),
        last_tokens=torch.cat([one.last_tokens for one in frames]),
        features=torch.cat(features),
    )


def main(arguments: list[str]) -> int:
    """Play all sessions and list what flipped."""
    num_sessions = int(arguments[0]) if arguments else 500
    kinds = [one for one in OUR_KINDS if one in (arguments[1:] or [one])]
    num_flips = num_faults = 0
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        bench = Bench(Path(folder))
        for kind in kinds:
            for session in range(num_sessions):
                for flip in bench.flips(kind, session):
                    num_flips, num_faults = num_flips + 1, num_faults + (not flip.is_near_tie)
                    verdict = "near tie" if flip.is_near_tie else "FAULT"
                    sys.stdout.write(
                        f"{flip.source} session {flip.session} token {flip.position}: "
                        f"{flip.plain} -> {flip.drafted}, float32 margin {flip.margin:.4f}, "
                        f"limit {flip.limit:.4f}: {verdict}\n"
                    )
            sys.stdout.write(f"{kind}: {num_sessions} sessions\n")
            sys.stdout.flush()
    sys.stdout.write(f"{num_flips} flips, {num_faults} of them no near ties\n")
    return int(num_faults > 0)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
