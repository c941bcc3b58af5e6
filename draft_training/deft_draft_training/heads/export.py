"""Writes a fitted head as the server loads it, reads it back and compares before it is there."""

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

import torch
from torch import nn

from deft_draft_training.errors import TrainingError
from deft_draft_training.heads.load import add_target_flags, load_fitted, load_target
from deft_draft_training.run_directory import explained
from deft_policies.decoding.drafts.eagle import EagleHead, HeadLayout, load_head, save_head
from deft_policies.decoding.drafts.medusa import MedusaHeads, load_medusa, save_medusa


def export_head(head: nn.Module, directory: Path, dtype: torch.dtype, layout: HeadLayout) -> None:
    """Write a head directory. Nothing is left behind, and nothing replaced, where it fails."""
    if directory.exists():
        raise TrainingError(f"{directory} exists; an export never overwrites, choose another")
    with explained(directory):
        directory.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            written = scratch / "head"
            stored = _write(head.to(dtype), written, layout)
            _compare(stored, written, layout)
            written.replace(directory)
        finally:
            shutil.rmtree(scratch)


def _write(head: nn.Module, directory: Path, layout: HeadLayout) -> nn.Module:
    if isinstance(head, EagleHead):
        save_head(head, directory, layout)
    elif isinstance(head, MedusaHeads):
        if layout is not HeadLayout.SAFETENSORS:
            raise TrainingError("there is no published layout for Medusa heads; use safetensors")
        save_medusa(head, directory)
    else:
        raise TypeError(f"not a draft head: {type(head).__name__}")
    return head


def _compare(head: nn.Module, directory: Path, layout: HeadLayout) -> None:
    """Read the files as the server would and ask for the very weights that were written."""
    if isinstance(head, EagleHead):
        width, like = head.sizes.width, head.fc.weight
        loaded: nn.Module = load_head(directory, width, like)
    elif isinstance(head, MedusaHeads):
        loaded = load_medusa(directory, head.sizes.width, head.weight)
    is_half = layout is HeadLayout.PUBLISHED  # the published layout stores float16
    for name, weight in head.state_dict().items():
        expected = weight.half().to(weight.dtype) if is_half else weight
        if not torch.equal(expected, loaded.state_dict()[name]):
            raise TrainingError(f"{directory}: {name} reads back differently; disk trouble?")


_LAYOUTS = {"safetensors": HeadLayout.SAFETENSORS, "published": HeadLayout.PUBLISHED}


def main(arguments: list[str]) -> int:
    """Write the head, read it back, compare."""
    parser = argparse.ArgumentParser(prog="deft train export", description=__doc__)
    parser.add_argument("run", type=Path, help="run directory of `deft train fit`")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new directory")
    parser.add_argument("--layout", choices=list(_LAYOUTS), default="safetensors")
    parser.add_argument("--float32", action="store_true", help="instead of bfloat16")
    add_target_flags(parser)
    given = parser.parse_args(arguments)
    head = load_fitted(given.run, load_target(given))
    dtype = torch.float32 if given.float32 else torch.bfloat16
    export_head(head, given.out, dtype, _LAYOUTS[given.layout])
    size = sum(path.stat().st_size for path in given.out.iterdir())
    sys.stdout.write(f"{given.out}: {size / 1e6:.1f} MB, read back and equal\n")
    return 0
