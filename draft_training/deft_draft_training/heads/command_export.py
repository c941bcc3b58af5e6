"""`deft train export`: a fitted head as a directory that the server loads."""

import argparse
import sys
from pathlib import Path

import torch

from deft_draft_training.heads.export import export_head
from deft_draft_training.heads.load import add_target_flags, load_fitted, load_target
from deft_policies.decoding.head_files import HeadLayout

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
