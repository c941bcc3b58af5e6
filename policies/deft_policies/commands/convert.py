"""`deft convert`: rewrite what OFT's training pickled as safetensors, tensor for tensor."""

import sys
from pathlib import Path
from shlex import quote

from deft_core.program import CommandParser
from deft_policies.checkpoint.tensor_file import read_tensors, write_tensors
from deft_policies.commands.parse import run_command
from deft_policies.errors import CheckpointError
from deft_policies.families.oft.files import PARTS, PICKLE_SUFFIX, SAFETENSORS_SUFFIX, find_file

PROG = "deft convert"


def main(arguments: list[str]) -> int:
    """Convert the files of one folder; return the exit code."""
    parser = CommandParser(
        prog=PROG,
        allow_abbrev=False,
        description="Rewrite the pickled files of an OFT fine-tune (head, state projector, towers) "
        "as safetensors in the same folder, which are then read instead.",
    )
    parser.add_argument("directory", type=Path, help="the checkpoint's folder")
    directory: Path = parser.parse_args(arguments).directory

    def run() -> int:
        found = [find_file(directory, part) for part in PARTS]
        pickles = [path for path in found if path is not None and path.suffix == PICKLE_SUFFIX]
        if not pickles:
            raise CheckpointError(
                f"{directory} holds no *checkpoint*{PICKLE_SUFFIX} of an OFT fine-tune that is not "
                "converted yet; give the folder with its action_head--..._checkpoint.pt"
            )
        for path in pickles:
            _convert(path)
        sys.stdout.write(f"next: deft serve --checkpoint {quote(str(directory))}\n")
        return 0

    return run_command(PROG, run)


def _convert(path: Path) -> None:
    # Tensors may share memory in a pickle, in safetensors they may not.
    tensors = {name: tensor.clone() for name, tensor in read_tensors(path).items()}
    partial = path.with_suffix(".partial")
    write_tensors(tensors, partial)
    converted = partial.rename(path.with_suffix(SAFETENSORS_SUFFIX))
    sys.stdout.write(f"{converted}: {len(tensors)} tensors\n")
