"""`deft index`: make a retrieval index of a data set's frames, to draft from."""

import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from shlex import quote

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from deft_client.commands.program import CommandParser
from deft_client.datasets.episodes import StoredStep
from deft_client.datasets.flags import add_camera_flag, read_cameras
from deft_client.datasets.formats import read_dataset
from deft_policies.checkpoint.drafts import save_index
from deft_policies.commands.parse import parse_command, run_command, target_flags
from deft_policies.decoding.batch import Row
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.drafts.retrieval import build_index, frame_keys
from deft_policies.decoding.methods import AUTOREGRESSIVE, find_method
from deft_policies.decoding.target import Prompts
from deft_policies.errors import PolicyError
from deft_policies.families.openvla import OpenVLA
from deft_policies.families.policy import VlaPolicy

PROG = "deft index"


OWN, RECORDED = "own", "recorded"  # which actions an index holds


@torch.inference_mode()
def _entries(
    policy: VlaPolicy, frames: Sequence[StoredStep], actions: str
) -> tuple[Tensor, Tensor]:
    """Keys [frame, feature] of frames as the policy sees them, and action tokens [frame, position].

    `actions` are its own, what the target answers to the frame now: the best guess of what it will
    say; or recorded: what a demonstrator did, or a server sent.
    """
    clock = StageClock(policy.model.device)
    prompts = policy.token_model.see([frame.observation for frame in frames], clock)
    keys = frame_keys(prompts).cpu()
    if actions == RECORDED:
        return keys, _recorded(policy, frames)
    return keys, _own(policy, prompts, frames)


def _own(policy: VlaPolicy, prompts: Prompts, frames: Sequence[StoredStep]) -> Tensor:
    forms = [policy.model.forms[policy.find_key(one.statistics_key)] for one in frames]
    lengths = {form.max_tokens for form in forms}
    if len(lengths) != 1:
        raise PolicyError(f"one index holds actions of one length, got {sorted(lengths)}")
    plain = find_method(AUTOREGRESSIVE)
    rows = [Row(plain, form) for form in forms]
    policy.engine.decode(prompts, rows, StageClock(policy.model.device))
    return torch.tensor([row.tokens for row in rows])


def _recorded(policy: VlaPolicy, frames: Sequence[StoredStep]) -> Tensor:
    model = policy.model
    assert isinstance(model, OpenVLA)
    tokens = []
    for frame in frames:
        statistics = model.statistics[policy.find_key(frame.statistics_key)]
        if frame.action.shape != (statistics.action_dim,):
            raise PolicyError(
                f"a recorded action has {frame.action.shape[-1]} dimensions, but the statistics "
                f"{statistics.action_dim}; give the key that belongs to it, or --actions own"
            )
        tokens.append(model.codec.encode(frame.action, statistics))
    return torch.from_numpy(np.stack(tokens))


def main(arguments: list[str]) -> int:
    """Build the index and write it; return the exit code."""
    parser = _build_parser()

    def run() -> int:
        command = parse_command(parser, arguments)
        given = command.namespace
        if min(given.every, given.batch, given.limit or 1) < 1:
            parser.error("--every, --batch and --limit must be 1 or more")
        policy = command.load()
        if not isinstance(policy, VlaPolicy) or not isinstance(policy.model, OpenVLA):
            raise PolicyError(f"only openvla drafts from an index, got {policy.info.policy!r}")
        episodes = list(read_dataset(given.data, read_cameras(given)))
        shown = tqdm(episodes, unit="episode", disable=None)  # on a terminal alone
        frames = (step for episode in shown for step in episode.steps() if step.is_example)
        chosen = islice(islice(frames, 0, None, given.every), given.limit)
        batches = iter(lambda: list(islice(chosen, given.batch)), [])
        entries = [_entries(policy, batch, given.actions) for batch in batches]
        if not entries:
            raise PolicyError("no frames were found, so there is nothing to index")
        index = build_index(entries, policy.model.network.fingerprint())
        save_index(index, given.out)
        kilobytes = given.out.stat().st_size / 1e3
        sys.stdout.write(
            f"{given.out}: {len(index.keys)} frames, {kilobytes:.0f} kB\n"
            f"next: deft serve {target_flags(given)} --retrieval-index {quote(str(given.out))}\n"
        )
        return 0

    return run_command(PROG, run)


def _build_parser() -> ArgumentParser:
    parser = CommandParser(
        prog=PROG,
        allow_abbrev=False,
        description="Store frames by what they look like, with the actions that belong to them; "
        "serve with --retrieval-index FILE to draft from them.",
    )
    parser.add_argument("data", type=Path, help="a data set: recordings, demonstrations, LeRobot's")
    add_camera_flag(parser)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="the index")
    parser.add_argument(
        "--actions",
        choices=[OWN, RECORDED],
        default=OWN,
        help="own: let the policy answer every frame (default); recorded: what was done",
    )
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each N-th frame")
    parser.add_argument("--limit", type=int, metavar="N", help="at most so many frames")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="frames per pass")
    return parser
