"""Reads a pickle of numbers: dictionaries, lists, text and numpy arrays of numbers, nothing else.

A pickle is a program that may call anything. This reader knows five names of numpy's and builds
stand-ins for them; whatever else a file names ends the reading before it is called.
"""

import pickle
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_policies.errors import CheckpointError

MOST_BYTES = 1 << 20  # statistics take some hundred
_ARRAYS = ("numpy.core.multiarray", "numpy._core.multiarray")  # by numpy 1 and by numpy 2
_NUMBERS = ("f4", "f8", "i4", "i8")


class _Dtype:
    """Stands for a type of numbers."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in _NUMBERS:
            raise pickle.UnpicklingError(f"arrays of {code!r} are not read")
        self.dtype = np.dtype(f"<{code}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", "|", "="):
            raise pickle.UnpicklingError("only little-endian numbers are read")


class _Array:
    """Stands for an array whose content follows."""

    values: NDArray[Any]

    def __init__(self, *_: object) -> None:
        return

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, _, content = state
        self.values = np.frombuffer(content, dtype.dtype).reshape(shape).copy()


def _scalar(dtype: _Dtype, content: bytes) -> object:
    return np.frombuffer(content, dtype.dtype)[0].item()


_KNOWN: dict[tuple[str, str], Callable[..., object]] = {
    ("numpy", "dtype"): _Dtype,
    ("numpy", "ndarray"): _Array,  # only ever handed to what makes arrays
    **{(module, "_reconstruct"): _Array for module in _ARRAYS},
    **{(module, "scalar"): _scalar for module in _ARRAYS},
}


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which is never called")
        return _KNOWN[module, name]


def read_numbers(path: Path) -> object:
    """The content of a file, arrays among it; `CheckpointError` where it holds anything else."""
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        if len(content) > MOST_BYTES:
            raise pickle.UnpicklingError(f"it is larger than {MOST_BYTES} bytes")
        return _unwrapped(_Reader(BytesIO(content)).load(), 0)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as numbers: {error}") from error


def _unwrapped(found: object, depth: int) -> object:
    """With arrays in place of their stand-ins."""
    if depth > 4:
        raise pickle.UnpicklingError("it is nested too deeply")
    if isinstance(found, _Array):
        return found.values
    if isinstance(found, dict):
        return {key: _unwrapped(value, depth + 1) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_unwrapped(value, depth + 1) for value in found]
    if found is None or isinstance(found, str | int | float):
        return found
    raise pickle.UnpicklingError(f"it holds {type(found).__name__}")
