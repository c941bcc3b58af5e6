"""Reads numpy arrays of numbers from a pickle, and calls nothing that the file names.

A pickle is a program that may call anything. This reader knows five names of numpy's and builds
stand-ins for them; whatever else a file names ends the reading before it is called.
"""

import pickle
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_policies.errors import CheckpointError

_MOST_BYTES = 1 << 20  # statistics take some hundred
_NUMBERS = ("f4", "f8", "i4", "i8")


class _Dtype:
    """Replaces a type of numbers."""

    def __init__(self, code: object, *_: object) -> None:
        if code not in _NUMBERS:
            raise pickle.UnpicklingError(f"arrays of {code!r} are not read")
        self.dtype = np.dtype(f"<{code}")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        if state[1] not in ("<", "|", "="):
            raise pickle.UnpicklingError("only little-endian numbers are read")


class _Array:
    """Replaces an array whose content follows, and a single number, which is not read."""

    values: NDArray[Any] = np.empty(0)

    def __init__(self, *_: object) -> None:
        return

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, _, content = state
        self.values = np.frombuffer(content, dtype.dtype).reshape(shape).copy()


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        match module, name:
            case "numpy", "dtype":
                return _Dtype
            case "numpy", "ndarray":  # only ever handed to what makes arrays
                return _Array
            # By numpy 1 and by numpy 2.
            case "numpy.core.multiarray" | "numpy._core.multiarray", "_reconstruct" | "scalar":
                return _Array
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is never called")


def read_arrays(path: Path, key: str) -> dict[str, NDArray[Any]]:
    """The arrays of the dictionary under a key; `CheckpointError` where a file names other code."""
    try:
        with path.open("rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise pickle.UnpicklingError(f"it is larger than {_MOST_BYTES} bytes")
        arrays = _Reader(BytesIO(content)).load().get(key, {})
        return {name: array.values for name, array in arrays.items() if isinstance(array, _Array)}
    except Exception as error:
        raise CheckpointError(f"{path} cannot be read as numbers: {error}") from error
