"""The tensors of a checkpoint directory: one safetensors file or several behind an index.

Files are memory-mapped and tensors come out one at a time, so that loading never holds the
checkpoint a second time. Knows names and shapes, nothing of what they are for.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.errors import CheckpointError

Shape = tuple[int, ...]

MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DOWNLOAD = "download it again"
# Mapped pages count as this process's memory until the file is closed; so it is reopened whenever
# this much was read from it, or a hundredth of the checkpoint.
_LEAST_BYTES_KEPT = 8 * 1024**2
_MOST_NAMES = 8  # in an error


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is and what it looks like."""

    path: Path
    shape: Shape
    num_bytes: int


class CheckpointReader:
    """Hands out the tensors of a checkpoint by name. Used by one thread."""

    def __init__(self, stored: Mapping[str, StoredTensor]) -> None:
        self.stored = MappingProxyType(dict(stored))
        self._open_path: Path | None = None
        self._open_file: Any = None  # the library leaves it untyped
        self._bytes_read = 0
        self._bytes_kept = max(_LEAST_BYTES_KEPT, self.num_bytes // 100)

    @staticmethod
    def open(directory: Path) -> "CheckpointReader":
        """Find a directory's weight files and read their headers."""
        index = directory / INDEX_FILE
        if index.exists():
            return CheckpointReader(_read_sharded(index))
        single = directory / MODEL_FILE
        if single.exists():
            return CheckpointReader(read_header(single))
        pickled = sorted(directory.glob("pytorch_model*.bin"))
        if pickled:
            raise CheckpointError(
                f"{pickled[0]} is a pickle, which is never opened; convert the checkpoint to "
                "safetensors with save_pretrained(..., safe_serialization=True)"
            )
        raise CheckpointError(
            f"{directory} holds neither {MODEL_FILE} nor {INDEX_FILE}; {_DOWNLOAD}"
        )

    @property
    def num_bytes(self) -> int:
        """Size of all tensors as they are stored."""
        return sum(tensor.num_bytes for tensor in self.stored.values())

    def tensor(
        self, name: str, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> Tensor:
        """Read one tensor to a device and dtype.

        On a CPU and without a change of dtype it is a view of the file: copy what is to stay.
        """
        stored = self.stored[name]
        self._bytes_read += stored.num_bytes
        if self._open_path != stored.path or self._bytes_read > self._bytes_kept:
            self.close()
            self._open_path, self._open_file = stored.path, _open(stored.path)
            self._bytes_read = stored.num_bytes
        if self._open_file is None:
            raise RuntimeError(f"{stored.path} was closed while a tensor was read")
        tensor: Tensor = self._open_file.get_tensor(name)
        return tensor.to(device=device, dtype=dtype)

    def close(self) -> None:
        """Let go of the open file; the next tensor opens it again."""
        self._open_file, self._open_path = None, None


def read_header(path: Path) -> dict[str, StoredTensor]:
    """List the tensors of one safetensors file, which must be whole."""
    file = _open(path)
    stored = {}
    for name in file.keys():  # noqa: SIM118 - it is no mapping and cannot be iterated
        view = file.get_slice(name)
        shape = tuple(view.get_shape())
        num_bytes = math.prod(shape) * _itemsize(view.get_dtype(), path)
        stored[name] = StoredTensor(path, shape, num_bytes)
    return stored


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt", device="cpu")
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing; {_DOWNLOAD}") from None
    except (SafetensorError, OSError) as error:
        # The library's message may span lines; the first says what is wrong.
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(f"{path} is truncated or damaged ({reason}); {_DOWNLOAD}") from None


def _read_sharded(index: Path) -> dict[str, StoredTensor]:
    fields = JsonFields.load(index, _DOWNLOAD)
    weight_map = fields.section("weight_map")
    shard_of = {name: index.parent / weight_map.value(name, str) for name in weight_map.names}
    if not shard_of:
        raise fields.error("weight_map", f"lists no tensors; {_DOWNLOAD}")
    stored: dict[str, StoredTensor] = {}
    for path in dict.fromkeys(shard_of.values()):
        if not path.exists():
            count = sum(shard == path for shard in shard_of.values())
            raise CheckpointError(
                f"{path} is missing ({index.name} lists {count} tensors in it); download that shard"
            )
        stored.update(read_header(path))
    absent = [name for name in shard_of if name not in stored]
    if absent:
        raise CheckpointError(
            f"{index} lists tensors that are in no shard: {list_names(absent)}; {_DOWNLOAD}"
        )
    return stored


def list_names(names: Iterable[str]) -> str:
    """Names for an error of one line: the first few, and how many more there are."""
    ordered = sorted(names)
    shown, others = ordered[:_MOST_NAMES], ordered[_MOST_NAMES:]
    return ", ".join(shown) + (f" and {len(others)} more" if others else "")


_ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip


def _itemsize(dtype: str, path: Path) -> int:
    if dtype not in _ITEM_BYTES:
        raise CheckpointError(f"{path} holds tensors of type {dtype}, which are not supported")
    return _ITEM_BYTES[dtype]
