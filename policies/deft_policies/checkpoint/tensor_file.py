"""Writes safetensors files that others may read, as every other file of ours."""

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors from wherever they lie.

    The library leaves files that only their owner can read, which a server in a container, run by
    another user, cannot load. Here they get the permissions of any new file.
    """
    own = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.touch()
    permissions = path.stat().st_mode
    save_file(own, path, metadata=metadata)
    path.chmod(permissions)
