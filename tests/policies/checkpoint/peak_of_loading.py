"""Prints how much a process grows at most while it loads a checkpoint, by the checkpoint's size."""

import re
import sys
from pathlib import Path

import torch

from deft_policies.checkpoint.open import load_model, locate_checkpoint, open_source


def status_bytes(field: str) -> int:
    """`VmRSS`, memory now, or `VmHWM`, its peak since this process started."""
    found = re.search(rf"^{field}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.M)
    assert found is not None, "this needs Linux"
    return 1024 * int(found[1])


if __name__ == "__main__":
    checkpoint = open_source(locate_checkpoint(sys.argv[1]))
    before = status_bytes("VmRSS")
    load_model(checkpoint, torch.device("cpu"), torch.bfloat16)
    size = sum(path.stat().st_size for path in Path(sys.argv[1]).glob("*.safetensors"))
    sys.stdout.write(str((status_bytes("VmHWM") - before) / size))
