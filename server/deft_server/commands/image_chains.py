"""Tells by a demonstration whether frames reach a policy as those of its training did.

Frames are answered through every image chain and compared with what was done then: the chain of
the training comes nearest. The frames are answered one by one, with nothing remembered.
"""

from argparse import Namespace
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deft_client.image_chain import ImageChain
from deft_client.types import ActOptions
from deft_policies.base import ActRequest, Finding, LimitedPolicy, Policy, Verdict
from deft_policies.commands.parse import PolicyCommand
from deft_policies.errors import PolicyError
from deft_policies.memory import SessionMemory
from deft_server.commands.replay import PastStep, read_steps

NUM_FRAMES = 24
EVERY = 7  # steps, so that the frames differ
_CLEAR = 2.0  # standard errors between two chains before one is called nearer
_BEYOND = 1e-3  # of the range; less is rounding
_TOO_FAR = 0.9  # of the error of never looking

Errors = NDArray[np.float64]  # [frame], in shares of the statistics' range


def examine_chains(command: PolicyCommand, data: Path, cameras: Sequence[str]) -> list[Finding]:
    """Load the policy, answer some of a demonstration's frames and judge chain and statistics."""
    given = command.namespace
    if command.entry.read is None:
        return [Finding("image chain", Verdict.DOUBTFUL, f"{given.policy} has none to choose")]
    policy = command.load()
    chosen = ImageChain(policy.info.image_chain)
    if chosen is not ImageChain.NONE:
        raw = Namespace(**{**vars(given), "image_chain": ImageChain.NONE.value})
        policy = replace(command, namespace=raw).load()
    if not isinstance(policy, LimitedPolicy):
        raise PolicyError(f"{given.policy} does not say which actions it can answer")
    steps = list(islice(read_steps(data, cameras), 0, NUM_FRAMES * EVERY, EVERY))
    if len(steps) < 2:
        raise PolicyError(f"{data}: a demonstration of 8 steps or more is needed")
    done = np.stack([step.actions[0] for step in steps])
    limits = policy.action_limits(given.statistics_key)
    if done.shape[1] != len(limits.low):
        raise PolicyError(f"{data}: actions have {done.shape[1]} numbers, not {len(limits.low)}")
    width = np.maximum(limits.high - limits.low, 1e-9)
    errors = {
        chain: (np.abs(answer_through(policy, steps, chain) - done) / width).mean(axis=1)
        for chain in ImageChain
    }
    mean_action = (np.abs(done.mean(axis=0) - done) / width).mean(axis=1)
    beyond = np.maximum(limits.low - done, done - limits.high) / width
    return [
        judge_statistics(float((beyond > _BEYOND).mean())),
        judge_chain(chosen, errors, float(mean_action.mean())),
    ]


def answer_through(
    policy: Policy, steps: Iterable[PastStep], chain: ImageChain
) -> NDArray[np.float64]:
    """The first action of every answer [frame, action_dim]; the policy's own chain is `none`."""
    size = policy.info.image_height
    actions = []
    for step in steps:
        seen = step.observation
        cameras = {name: chain.apply(image, size) for name, image in seen.cameras.items()}
        shown = replace(seen, image=chain.apply(seen.image, size), cameras=cameras)
        options = ActOptions(statistics_key=step.statistics_key)
        (answer,) = policy.act([ActRequest(shown, SessionMemory(), options)])
        actions.append(answer.chunk.actions[0])
    return np.stack(actions)


def judge_statistics(share_beyond: float) -> Finding:
    """Are the demonstrated actions in the range that the statistics allow?"""
    if share_beyond > 0.05:  # the statistics are the 1st and the 99th percentile
        text = f"{share_beyond:.0%} of the demonstrated numbers lie beyond the statistics' range"
        return Finding("statistics", Verdict.DOUBTFUL, f"{text}: another --statistics-key?")
    return Finding("statistics", Verdict.GOOD, "the demonstration lies in their range")


def judge_chain(
    chosen: ImageChain, errors: Mapping[ImageChain, Errors], never_looking: float
) -> Finding:
    """Is the chosen chain the nearest, and is the nearest any good?"""
    nearest = min(errors, key=lambda chain: float(errors[chain].mean()))
    told = ", ".join(f"{chain.value} {errors[chain].mean():.2%}" for chain in errors)
    text = f"distance to the demonstration, in shares of the range: {told}"
    if errors[nearest].mean() > _TOO_FAR * never_looking:
        text += f"; always answering its mean action: {never_looking:.2%}. "
        text += "No chain does better: are these episodes of the training, and their units?"
        return Finding("image chain", Verdict.DOUBTFUL, text)
    gap = errors[chosen] - errors[nearest]
    if gap.mean() > _CLEAR * gap.std(ddof=1) / np.sqrt(len(gap)):
        text += f". {chosen.value} is not the nearest: --image-chain {nearest.value}"
        return Finding("image chain", Verdict.BAD, text)
    return Finding("image chain", Verdict.GOOD, f"{text}. None is clearly nearer")
