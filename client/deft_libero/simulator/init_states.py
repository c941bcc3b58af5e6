"""Initial states: LIBERO's recorded ones, and others with objects moved by a few centimetres.

Recorded states are zipped pickles of one float64 table, read without torch. A pickle can run code,
so the reader admits what such a table is made of and nothing else.

The recorded states of a task differ by millimetres, so a policy can pass them by heart. Where they
are widened, everything that stands on the floor or table by itself moves; what lies on or in
something moves with it, and what rests on a fixture stays: a pure function of positions and a
generator.
"""

import io
import pickle
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_libero.errors import AssetsError
from deft_libero.simulator.scene import Box

_MAX_BYTES = 64 * 2**20  # the largest file of LIBERO holds 0.1 MB


def load_initial_states(path: Path) -> NDArray[np.float64]:
    """The table of a task: one row [state] per trial, as robosuite flattens it."""
    try:
        table = _read_npz(path) if path.suffix == ".npz" else _unpickled(path)
    except FileNotFoundError as error:
        raise AssetsError(f"no initial states at {path}; is LIBERO complete?") from error
    except (
        OSError,
        ValueError,
        TypeError,
        EOFError,
        KeyError,
        pickle.UnpicklingError,
        zipfile.BadZipFile,
    ) as error:
        raise AssetsError(f"{path} cannot be read: {error}") from error
    if not (isinstance(table, np.ndarray) and table.dtype == np.float64 and table.ndim == 2):
        raise AssetsError(f"{path} must hold one float64 table, got {type(table).__name__}")
    if not np.isfinite(table).all():
        raise AssetsError(f"{path} holds NaN or infinity")
    return table


def _read_npz(path: Path) -> object:
    with np.load(path, allow_pickle=False, max_header_size=1000) as archive:
        if archive.zip.getinfo("states.npy").file_size > _MAX_BYTES:
            raise AssetsError(f"{path} is larger than {_MAX_BYTES} bytes")
        return archive["states"]


def _unpickled(path: Path) -> object:
    return _ArrayUnpickler(io.BytesIO(_pickled(path))).load()


def _pickled(path: Path) -> bytes:
    try:
        with zipfile.ZipFile(path) as archive:
            names = [name for name in archive.namelist() if name.endswith("/data.pkl")]
            if len(names) != 1:
                raise AssetsError(f"{path} must hold one data.pkl, got {len(names)}")
            if archive.getinfo(names[0]).file_size > _MAX_BYTES:
                raise AssetsError(f"{path} is larger than {_MAX_BYTES} bytes")
            return archive.read(names[0])
    except zipfile.BadZipFile as error:
        raise AssetsError(f"{path} is not a zip file: {error}") from error


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


_TRIES = 200
_GAP = 0.012  # metres kept free between things
_STACKED = 0.055  # nearer than this in the plane means one is on the other


@dataclass(frozen=True, eq=False)
class Footprint:
    """What an object or fixture covers of the plane: a rectangle with sides along x and y."""

    low: NDArray[np.float64]  # [2]
    high: NDArray[np.float64]  # [2]
    movable: bool

    @property
    def middle(self) -> NDArray[np.float64]:
        """The centre of the rectangle."""
        return np.asarray((self.low + self.high) / 2)

    def shifted(self, by: NDArray[np.float64]) -> "Footprint":
        """The rectangle elsewhere."""
        return Footprint(self.low + by, self.high + by, self.movable)

    def touches(self, other: "Footprint", gap: float) -> bool:
        """Whether less than `gap` is free between the two."""
        return bool((self.low < other.high + gap).all() and (other.low < self.high + gap).all())


def footprint(boxes: Sequence[Box], movable: bool) -> Footprint:
    """What boxes cover of the plane; nothing at all where there are none."""
    if not boxes:
        return Footprint(np.full(2, np.inf), np.full(2, np.inf), movable)
    reach = [np.abs(box.pose.rotation[:2]) @ box.half_size for box in boxes]
    middles = np.stack([box.pose.position[:2] for box in boxes])
    return Footprint((middles - reach).min(axis=0), (middles + reach).max(axis=0), movable)


def draw_shifts(
    footprints: Mapping[str, Footprint], most: float, generator: np.random.Generator
) -> dict[str, NDArray[np.float64]]:
    """How far each movable thing moves in the plane, at most `most` metres along x and y."""
    groups = _groups(footprints)
    shifts = {name: np.zeros(2) for name, one in footprints.items() if one.movable}
    placed = dict(footprints)
    for group in groups:
        others = {name: one for name, one in placed.items() if name not in group}
        for _ in range(_TRIES):
            by = generator.uniform(-most, most, 2)
            moved = {name: footprints[name].shifted(by) for name in group}
            if not _crowds(moved, others):
                placed.update(moved)
                shifts.update(dict.fromkeys(group, by))
                break
    return shifts


def _crowds(moved: Mapping[str, Footprint], others: Mapping[str, Footprint]) -> bool:
    """Whether a move brings things too near to others."""
    return any(one.touches(other, _GAP) for name, one in moved.items() for other in others.values())


def _groups(footprints: Mapping[str, Footprint]) -> list[list[str]]:
    """Movable things that stand on each other; none of those that rest on or in a fixture."""
    fixed = [one for one in footprints.values() if not one.movable]
    groups: list[list[str]] = []
    for name, one in footprints.items():
        if not one.movable:
            continue
        joined = [
            group
            for group in groups
            if any(
                np.linalg.norm(footprints[other].middle - one.middle) < _STACKED for other in group
            )
        ]
        groups = [group for group in groups if group not in joined]
        groups.append([*(member for group in joined for member in group), name])
    return [
        group
        for group in groups
        if not any(footprints[name].touches(fixture, 0.0) for name in group for fixture in fixed)
    ]
