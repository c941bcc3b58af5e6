"""Files that hold a flat dictionary of tensors: safetensors, and pickles of weights alone."""

import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from deft_policies.errors import CheckpointError

SAFETENSORS_SUFFIX = ".safetensors"
# Whatever torch's reader of weights raises at a file that is damaged or holds anything else.
_UNREADABLE = (
    *(OSError, RuntimeError, EOFError, UnpicklingError, SafetensorError),
    *(ValueError, TypeError, LookupError, AttributeError),
)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of weights to the CPU; a pickle may hold nothing but tensors.

    Pickles are programs. Torch's own interpreter of them knows the few functions that rebuild
    tensors and refuses all others before anything is called.
    """
    try:
        if path.suffix == SAFETENSORS_SUFFIX:
            return _finite(load_file(path), path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what it says about odd pickles; they are refused
            loaded = torch.load(path, map_location="cpu", weights_only=True)
    except _UNREADABLE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path} cannot be read as weights (damaged, or it holds code, which is never run): "
            f"{reason}"
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(one, Tensor) for name, one in loaded.items()
    ):
        raise CheckpointError(f"{path} must hold a flat dictionary of tensors")
    return _finite(loaded, path)


def require_finite(name: str, tensor: Tensor, path: Path) -> None:
    """Raise `CheckpointError` where a tensor holds NaN or infinity; one reduction."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # A sum would overflow in float16, or be taken from a copy.
    if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
        raise CheckpointError(
            f"{path}: {name} holds NaN or infinity; the file is damaged, or training had diverged"
        )


def _finite(tensors: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    for name, tensor in tensors.items():
        require_finite(name, tensor, path)
    return dict(tensors)


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
