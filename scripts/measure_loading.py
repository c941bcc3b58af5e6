"""Peak memory of loading a made checkpoint on a CPU: `python -m scripts.measure_loading`.

Prints how much the process grew while loading, against the size of the checkpoint.
"""

import argparse
import shutil
import tempfile
import time
from pathlib import Path

import torch

from deft_policies.checkpoint.open import load_model, open_checkpoint
from tests.policies.checkpoint.checkpoint_files import write_large

MIB = 1024**2


def status_bytes(field: str) -> int:
    """`VmRSS`, memory now, or `VmHWM`, its peak since this program started."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {field}; this needs Linux")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mebibytes", type=int, default=300)
    parser.add_argument("--directory", type=Path, help="reuse the checkpoint there, or leave one")
    arguments = parser.parse_args()
    directory = arguments.directory or Path(tempfile.mkdtemp()) / "model"
    try:
        if not directory.exists():
            write_in_child(directory, arguments.mebibytes)
        report(directory)
    finally:
        if arguments.directory is None:
            shutil.rmtree(directory.parent, ignore_errors=True)


def write_in_child(directory: Path, mebibytes: int) -> None:
    """In a process of its own, so that writing does not raise the peak that is measured."""
    context = torch.multiprocessing.get_context("spawn")
    child = context.Process(target=write_large, args=(directory, mebibytes))
    child.start()
    child.join()
    if child.exitcode:
        raise SystemExit("the checkpoint could not be written")


def report(directory: Path) -> None:
    checkpoint = open_checkpoint(str(directory))
    size = checkpoint.reader.num_bytes
    before = status_bytes("VmRSS")
    start = time.perf_counter()
    model = load_model(checkpoint, torch.device("cpu"), torch.bfloat16)
    seconds = time.perf_counter() - start
    grown = status_bytes("VmHWM") - before
    held = sum(parameter.nbytes for parameter in model.parameters())
    print(
        f"checkpoint {size / MIB:.0f} MiB, model {held / MIB:.0f} MiB, peak growth "
        f"{grown / MIB:.0f} MiB, ratio {grown / size:.3f} in {seconds:.2f} s"
    )


if __name__ == "__main__":
    main()
