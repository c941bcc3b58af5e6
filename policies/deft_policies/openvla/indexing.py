"""From frames that were seen before to a retrieval index of their keys and actions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deft_client.libero.demonstrations.files import find_demonstrations, load_demonstration
from deft_client.recordings import find_episodes, iterate_steps
from deft_client.types import Observation
from deft_policies.decoding.autoregressive import AutoregressiveDecoder
from deft_policies.decoding.drafts.retrieval import RetrievalIndex, build_index, frame_keys
from deft_policies.decoding.records import StageClock
from deft_policies.decoding.target import Prompts
from deft_policies.errors import PolicyError
from deft_policies.openvla.action_codec import ActionCodec
from deft_policies.openvla.policy import OpenVLAPolicy


class StoredActions(Enum):
    """Which actions an index holds."""

    OWN = "own"  # what the target answers to the frame now: the best guess of what it will say
    RECORDED = "recorded"  # what was done: a demonstrator's, or what a server sent


@dataclass(frozen=True, eq=False)
class StoredFrame:
    """One frame and what was done when it was seen, in robot units."""

    observation: Observation
    action: NDArray[np.float64]  # [action_dim]
    statistics_key: str | None = None  # None: the policy's default


def recorded_frames(root: Path) -> Iterator[StoredFrame]:
    """Frames of recorded episodes; those where the server intervened are left out."""
    for path in find_episodes(root):
        for step in iterate_steps(path):
            if step.chunk.intervention is None:
                key = step.options.statistics_key
                yield StoredFrame(step.observation, step.chunk.actions[0], key)


def demonstrated_frames(root: Path) -> Iterator[StoredFrame]:
    """Frames of demonstrations that succeeded, with the expert's clean action."""
    for path in find_demonstrations(root):
        shown = load_demonstration(path)
        if shown.header.succeeded:
            for index, label in enumerate(shown.labels):
                observation = Observation(shown.frame(index), shown.header.instruction)
                yield StoredFrame(observation, label.astype(np.float64))


def index_frames(
    policy: OpenVLAPolicy,
    frames: Iterator[StoredFrame],
    actions: StoredActions,
    batch_size: int = 8,
) -> RetrievalIndex:
    """Look at every frame as the policy would, and keep its key and action."""
    entries = [
        _entries(policy, batch, actions)
        for batch in iter(lambda: list(islice(frames, batch_size)), [])
    ]
    if not entries:
        raise PolicyError("no frames were found, so there is nothing to index")
    return build_index(entries, policy.parts.target.model.fingerprint())


@torch.inference_mode()
def _entries(
    policy: OpenVLAPolicy, frames: Sequence[StoredFrame], actions: StoredActions
) -> tuple[Tensor, Tensor]:
    """Keys [frame, feature] and action tokens [frame, position]."""
    parts = policy.parts
    weight = parts.target.decoder.embedding.weight
    fitted = [parts.images.fit(frame.observation.image) for frame in frames]
    pixels = parts.images.pixel_values(fitted, weight.device, weight.dtype)
    ids = [parts.encoder.encode(frame.observation.instruction) for frame in frames]
    prompts = parts.target.read(pixels, ids)
    keys = frame_keys(prompts).cpu()
    if actions is StoredActions.RECORDED:
        return keys, _recorded(policy, frames)
    return keys, _own(policy, prompts, frames)


def _own(policy: OpenVLAPolicy, prompts: Prompts, frames: Sequence[StoredFrame]) -> Tensor:
    lengths = {
        policy.parts.statistics[policy.find_key(frame.statistics_key)].action_dim
        for frame in frames
    }
    if len(lengths) != 1:
        raise PolicyError(f"one index holds actions of one length, got {sorted(lengths)}")
    target = policy.parts.target
    clock = StageClock(target.device)
    traces = AutoregressiveDecoder(target).decode(prompts, lengths.pop(), clock)
    return torch.tensor([trace.tokens for trace in traces])


def _recorded(policy: OpenVLAPolicy, frames: Sequence[StoredFrame]) -> Tensor:
    codec = ActionCodec(policy.parts.target.model.config.vocabulary)
    tokens = []
    for frame in frames:
        statistics = policy.parts.statistics[policy.find_key(frame.statistics_key)]
        if frame.action.shape != (statistics.action_dim,):
            raise PolicyError(
                f"a recorded action has {frame.action.shape[-1]} dimensions, but the statistics "
                f"{statistics.action_dim}; give the key that belongs to it, or --actions own"
            )
        tokens.append(codec.encode(frame.action, statistics))
    return torch.from_numpy(np.stack(tokens))
