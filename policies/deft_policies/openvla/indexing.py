"""From frames that were seen before to a retrieval index of their keys and actions."""

from collections.abc import Iterator, Sequence
from enum import Enum
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from deft_client.datasets.episodes import StoredStep
from deft_policies.decoding.autoregressive import AutoregressiveDecoder
from deft_policies.decoding.drafts.guessers import RetrievalIndex, build_index, frame_keys
from deft_policies.decoding.records import StageClock
from deft_policies.decoding.target import Prompts
from deft_policies.errors import PolicyError
from deft_policies.openvla.action_codec import ActionCodec
from deft_policies.openvla.policy import OpenVLAPolicy


class StoredActions(Enum):
    """Which actions an index holds."""

    OWN = "own"  # what the target answers to the frame now: the best guess of what it will say
    RECORDED = "recorded"  # what was done: a demonstrator's, or what a server sent


def index_frames(
    policy: OpenVLAPolicy,
    frames: Iterator[StoredStep],
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
    policy: OpenVLAPolicy, frames: Sequence[StoredStep], actions: StoredActions
) -> tuple[Tensor, Tensor]:
    """Keys [frame, feature] and action tokens [frame, position]."""
    clock = StageClock(policy.parts.target.device)
    prompts = policy.parts.read([frame.observation for frame in frames], clock)
    keys = frame_keys(prompts).cpu()
    if actions is StoredActions.RECORDED:
        return keys, _recorded(policy, frames)
    return keys, _own(policy, prompts, frames)


def _own(policy: OpenVLAPolicy, prompts: Prompts, frames: Sequence[StoredStep]) -> Tensor:
    lengths = {
        policy.parts.statistics[policy.find_key(frame.statistics_key)].action_dim
        for frame in frames
    }
    if len(lengths) != 1:
        raise PolicyError(f"one index holds actions of one length, got {sorted(lengths)}")
    clock = StageClock(policy.parts.target.device)
    traces = AutoregressiveDecoder(policy.parts.target).decode(prompts, lengths.pop(), clock)
    return torch.tensor([trace.tokens for trace in traces])


def _recorded(policy: OpenVLAPolicy, frames: Sequence[StoredStep]) -> Tensor:
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
