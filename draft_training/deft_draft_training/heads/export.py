"""Writes a fitted head as the server loads it, reads it back and compares before it is there."""

import sys
from argparse import Namespace
from pathlib import Path
from shlex import quote

import torch
from torch import Tensor

from deft_core.files import creating
from deft_draft_training.config import build_config
from deft_draft_training.errors import DataError, TrainingError
from deft_draft_training.heads.fit import DraftHead, HeadFitConfig, build_head
from deft_draft_training.heads.target import FeatureTarget, load_target
from deft_draft_training.run_directory import (
    CONFIG_FILE,
    STATE_FILE,
    explained,
    read_config,
    read_state,
)
from deft_policies.checkpoint.drafts import (
    HeadLayout,
    is_block,
    is_medusa,
    load_block,
    load_head,
    load_medusa,
    save_block,
    save_head,
    save_medusa,
)
from deft_policies.commands.parse import target_flags
from deft_policies.errors import PolicyError
from deft_policies.model.block_head import BlockHead
from deft_policies.model.draft_heads import EagleHead, MedusaHeads
from deft_policies.model.sizes import LlamaSizes
from deft_policies.progress import shown


def load_fitted(run: Path, target: FeatureTarget) -> DraftHead:
    """The head of a run directory: its average where one was kept, else its last weights."""
    if not (run / CONFIG_FILE).exists():
        raise DataError(f"{run} is not a run of `deft train fit`: it has no {CONFIG_FILE}")
    if not (run / STATE_FILE).exists():
        raise DataError(f"the training in {run} has saved nothing yet; go on with it first")
    stored, state = read_config(run / CONFIG_FILE), read_state(run / STATE_FILE)
    if stored.pop("target", None) != target.fingerprint():
        raise DataError(f"{run} was fitted to another checkpoint than the one given")
    layers = stored.pop("layers", ())
    head = build_head(build_config(HeadFitConfig, stored), target, layers)
    head.load_state_dict(state["module"])
    average = {name: tensor for name, tensor in state["extra"].items() if name != "num_steps"}
    head.load_state_dict(average, strict=False)
    return head.requires_grad_(False).eval()


def load_any_head(directory: Path, target: FeatureTarget) -> DraftHead:
    """A head from a run directory or from an exported one, as the target's decoder runs it."""
    if (directory / STATE_FILE).exists():
        like = target.weight
        return load_fitted(directory, target).to(like.device, like.dtype)
    try:
        sizes = target.policy.model.target.decoder.sizes
        return _exported(directory, sizes, target.weight)
    except PolicyError as error:
        raise DataError(str(error)) from error


def _exported(directory: Path, target: LlamaSizes, like: Tensor) -> DraftHead:
    """A head as the server loads it."""
    if is_block(directory):
        return load_block(directory, target, like)
    return (load_medusa if is_medusa(directory) else load_head)(directory, target.width, like)


def export_head(
    head: DraftHead,
    directory: Path,
    dtype: torch.dtype,
    layout: HeadLayout,
    target: LlamaSizes | None = None,
) -> None:
    """Write a head directory. Nothing is left behind, and nothing replaced, where it fails.

    A block head needs the sizes of its target.
    """
    if directory.exists():
        raise TrainingError(f"{directory} exists; an export never overwrites, choose another")
    with explained(directory), creating(directory) as beside:
        head = head.to(dtype)
        if isinstance(head, EagleHead):
            save_head(head, beside, layout)
        elif layout is not HeadLayout.SAFETENSORS:
            raise TrainingError("there is no published layout for such heads; use safetensors")
        elif isinstance(head, MedusaHeads):
            save_medusa(head, beside)
        else:
            save_block(head, beside)
        _compare(head, beside, layout, target)


def _compare(
    head: DraftHead, directory: Path, layout: HeadLayout, target: LlamaSizes | None
) -> None:
    """Read the files as the server would and ask for the very weights that were written."""
    like = next(head.parameters())
    loaded: DraftHead
    if isinstance(head, BlockHead):
        assert target is not None
        loaded = load_block(directory, target, like)
    else:
        load = load_medusa if isinstance(head, MedusaHeads) else load_head
        loaded = load(directory, head.width, like)
    is_half = layout is HeadLayout.PUBLISHED  # the published layout stores float16
    for name, weight in head.state_dict().items():
        expected = weight.half().to(weight.dtype) if is_half else weight
        if not torch.equal(expected, loaded.state_dict()[name]):
            raise TrainingError(f"{directory}: {name} reads back differently; disk trouble?")


def run(flags: Namespace) -> int:
    """Write the head, read it back, compare."""
    with shown():
        target = load_target(flags)
    head = load_fitted(flags.run, target)
    dtype = torch.float32 if flags.float32 else torch.bfloat16
    sizes = target.policy.model.target.decoder.sizes
    export_head(head, flags.out, dtype, HeadLayout[flags.layout.upper()], sizes)
    size = sum(path.stat().st_size for path in flags.out.iterdir())
    sys.stdout.write(
        f"{flags.out}: {size / 1e6:.1f} MB, read back and equal\n"
        f"next: deft serve --draft-head {quote(str(flags.out))} {target_flags(flags)}\n"
    )
    return 0
