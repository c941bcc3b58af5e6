"""Reads LIBERO's initial states: zipped pickles of one float64 table, without torch.

A pickle can run code, so the reader admits what such a table is made of and nothing else.
"""

import io
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_client.libero.errors import InitialStatesError

_MAX_BYTES = 64 * 2**20  # the largest file of LIBERO holds 0.1 MB


def load_initial_states(path: Path) -> NDArray[np.float64]:
    """The table of a task: one row [state] per trial, as robosuite flattens it."""
    try:
        table = _ArrayUnpickler(io.BytesIO(_pickled(path))).load()
    except FileNotFoundError as error:
        raise InitialStatesError(f"no initial states at {path}; is LIBERO complete?") from error
    except (OSError, ValueError, TypeError, EOFError, pickle.UnpicklingError) as error:
        raise InitialStatesError(f"{path} cannot be read: {error}") from error
    if not (isinstance(table, np.ndarray) and table.dtype == np.float64 and table.ndim == 2):
        raise InitialStatesError(f"{path} must hold one float64 table, got {type(table).__name__}")
    if not np.isfinite(table).all():
        raise InitialStatesError(f"{path} holds NaN or infinity")
    return table


def _pickled(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise InitialStatesError(f"{path} must hold one data.pkl, got {len(names)}")
            if archive.getinfo(names[0]).file_size > _MAX_BYTES:
                raise InitialStatesError(f"{path} is larger than {_MAX_BYTES} bytes")
            return archive.read(names[0])
    except zipfile.BadZipFile as error:
        raise InitialStatesError(f"{path} is not a zip file: {error}") from error


class _ArrayUnpickler(pickle.Unpickler):
    """Rebuilds numpy float arrays; any other name in the pickle is refused."""

    def find_class(self, module: str, name: str) -> Any:
        admitted: dict[tuple[str, str], Callable[..., object]] = {
            ("numpy.core.multiarray", "_reconstruct"): _empty_array,
            ("numpy._core.multiarray", "_reconstruct"): _empty_array,
            ("numpy", "ndarray"): np.ndarray,
            ("numpy", "dtype"): _float_dtype,
            ("_codecs", "encode"): _latin1,
        }
        found = admitted.get((module, name))
        if found is None:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}; only arrays are admitted")
        return found


def _empty_array(kind: type, shape: tuple[int, ...], code: bytes) -> NDArray[np.float64]:
    if kind is not np.ndarray or shape != (0,):
        raise pickle.UnpicklingError(f"it builds {kind} of shape {shape} ({code!r})")
    return np.ndarray.__new__(np.ndarray, (0,), np.float64)


def _float_dtype(code: str, align: bool, copy: bool) -> np.dtype[Any]:
    if code != "f8" or align:
        raise pickle.UnpicklingError(f"only float64 is admitted, got {code!r}")
    return np.dtype(code, align, copy)


def _latin1(text: str, encoding: str) -> bytes:
    if encoding != "latin1":
        raise pickle.UnpicklingError(f"only latin1 bytes are admitted, got {encoding!r}")
    return text.encode(encoding)
