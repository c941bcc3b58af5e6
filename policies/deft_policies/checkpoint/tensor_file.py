"""Files of tensors: safetensors, one or several behind an index, and pickles of weights alone.

A checkpoint's files are memory-mapped and their tensors come out one at a time, so that loading
never holds it a second time. Knows names and shapes, nothing of what they are for.
"""

import hashlib
import warnings
import zipfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from threading import Event
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.errors import CheckpointError

Shape = tuple[int, ...]
ModuleT = TypeVar("ModuleT", bound=nn.Module)

MODEL_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
_DOWNLOAD = "download it again"
SAFETENSORS_SUFFIX = ".safetensors"
_MOST_NAMES = 8  # in an error
_WEIGHTS = ("*.safetensors", "*checkpoint*.pt", "pytorch_model*.bin")  # that a digest counts
_BLOCK_BYTES = 64 * 2**20  # hashed by a thread of its own
_READ_BYTES = 2**20
_MOST_PROGRAM = 2**26  # bytes of a pickle without the numbers of its tensors
_DTYPES = {
    *("F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2"),
    *("I64", "I32", "I16", "I8", "U8", "BOOL"),
}
# Whatever torch's reader of weights raises at a file that is damaged or holds anything else.
_UNREADABLE = (
    *(OSError, RuntimeError, EOFError, UnpicklingError, SafetensorError),
    *(ValueError, TypeError, LookupError, AttributeError),
)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is and what it looks like."""

    path: Path
    name: str
    shape: Shape

    def read(self, device: torch.device | None = None) -> Tensor:
        """On a CPU it is a view of the file: copy what is to stay.

        The file is opened each time, because mapped pages count as this process's memory until it
        is closed.
        """
        with _open(self.path) as file:
            tensor: Tensor = file.get_tensor(self.name)
        return tensor.to(device)


@dataclass(frozen=True)
class MappedTensor(StoredTensor):
    """A tensor of a pickle of weights, whose pages are read when it is."""

    tensor: Tensor

    def read(self, device: torch.device | None = None) -> Tensor:
        """On a CPU it is a view of the file: copy what is to stay."""
        return self.tensor.to(device)


def find_tensors(directory: Path) -> Mapping[str, StoredTensor]:
    """Find a directory's weight files and read their headers."""
    index = directory / INDEX_FILE
    if index.exists():
        return _read_sharded(index)
    single = directory / MODEL_FILE
    if single.exists():
        return read_header(single)
    pickled = sorted(directory.glob("pytorch_model*.bin"))
    if pickled:
        raise CheckpointError(
            f"{pickled[0]} is a pickle, which is never opened; convert the checkpoint to "
            "safetensors with save_pretrained(..., safe_serialization=True)"
        )
    raise CheckpointError(f"{directory} holds neither {MODEL_FILE} nor {INDEX_FILE}; {_DOWNLOAD}")


def read_header(path: Path) -> Mapping[str, StoredTensor]:
    """List the tensors of one file, which must be whole: safetensors, or a pickle of weights."""
    if path.suffix != SAFETENSORS_SUFFIX:
        return _map_pickle(path)
    stored = {}
    with _open(path) as file:
        for name in file.keys():  # noqa: SIM118 - it is no mapping and cannot be iterated
            view = file.get_slice(name)
            if (dtype := view.get_dtype()) not in _DTYPES:
                raise CheckpointError(
                    f"{path} holds tensors of type {dtype}, which are not supported"
                )
            stored[name] = StoredTensor(path, name, tuple(view.get_shape()))
    return stored


def _map_pickle(path: Path) -> dict[str, MappedTensor]:
    """A file of `torch.save`, without reading its numbers; see `read_tensors`."""
    try:
        with zipfile.ZipFile(path) as file:
            entries = file.infolist()
    except (OSError, zipfile.BadZipFile, NotImplementedError) as error:
        raise CheckpointError(
            f"{path} is no file of torch.save as it has been since torch 1.6 ({error}); {_DOWNLOAD}"
        ) from None
    program = sum(entry.file_size for entry in entries if entry.filename.endswith(".pkl"))
    if program > _MOST_PROGRAM or any(
        entry.compress_type != zipfile.ZIP_STORED for entry in entries
    ):
        raise CheckpointError(
            f"{path} is packed, or says of {program} bytes that they only name tensors, which "
            "torch.save never writes"
        )
    tensors = _load_file(path, is_mapped=True)
    for name, tensor in tensors.items():
        if (
            not tensor.is_floating_point()
            or tensor.device.type != "cpu"
            or tensor.layout != torch.strided
        ):
            raise CheckpointError(
                f"{path}: {name} is {tensor.dtype}, {tensor.layout} on {tensor.device}, expected "
                "numbers"
            )
    return {
        name: MappedTensor(path, name, tuple(tensor.shape), tensor)
        for name, tensor in tensors.items()
    }


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
    shown, hidden = ordered[:_MOST_NAMES], ordered[_MOST_NAMES:]
    return ", ".join(shown) + (f" and {len(hidden)} more" if hidden else "")


def shapes_of(tensors: Mapping[str, Tensor]) -> dict[str, Shape]:
    """Shapes by name."""
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def describe_misfits(expected: Mapping[str, Shape], found: Mapping[str, Shape]) -> str:
    """How tensors differ from those that are wanted, in words; empty where they do not."""
    shared = [name for name in expected if name in found]
    misfits = {
        "missing": expected.keys() - found.keys(),
        "unexpected": found.keys() - expected.keys(),
        "of the wrong shape": [
            f"{name} {_say(found[name])} instead of {_say(expected[name])}"
            for name in shared
            if found[name] != expected[name]
        ],
    }
    sentences = [
        f"{len(names)} {kind}: {list_names(names)}" for kind, names in misfits.items() if names
    ]
    return "; ".join(sentences)


def _say(shape: Shape) -> str:
    return "x".join(str(size) for size in shape)


def fill_module(module: ModuleT, tensors: Mapping[str, Tensor], path: Path, remedy: str) -> ModuleT:
    """Give a module, which may be on the meta device, the tensors of a file, which must fit."""
    if misfits := describe_misfits(shapes_of(module.state_dict()), shapes_of(tensors)):
        raise CheckpointError(f"{path} does not fit the model; {misfits}; {remedy}")
    module.load_state_dict(dict(tensors), assign=True)
    return module.eval().requires_grad_(False)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Read a file of weights to the CPU; a pickle may hold nothing but tensors.

    Pickles are programs. Torch's own interpreter of them knows the few functions that rebuild
    tensors and refuses all others before anything is called.
    """
    loaded = _load_file(path)
    for name, tensor in loaded.items():
        require_finite(name, tensor, path)
    return loaded


def _load_file(path: Path, is_mapped: bool = False) -> dict[str, Tensor]:
    """The tensors of a file, whatever their numbers are."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch says about odd pickles; they are refused
            loaded = (
                load_file(path)
                if path.suffix == SAFETENSORS_SUFFIX
                else torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
            )
    except _UNREADABLE as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{path} cannot be read as weights (damaged, or it holds code, which is never run): "
            f"{reason}"
        ) from error
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, Tensor) for name, tensor in loaded.items()
    ):
        raise CheckpointError(f"{path} must hold a flat dictionary of tensors")
    return loaded


def require_finite(name: str, tensor: Tensor, path: Path) -> None:
    """Raise `CheckpointError` where a tensor holds NaN or infinity; one reduction."""
    if not tensor.is_floating_point() or not tensor.numel():
        return
    # A sum would overflow in float16, or be taken from a copy.
    if not bool(torch.stack(tensor.aminmax()).isfinite().all()):
        raise CheckpointError(
            f"{path}: {name} holds NaN or infinity; the file is damaged, or training had diverged"
        )


def write_tensors(
    tensors: Mapping[str, Tensor], path: Path, metadata: dict[str, str] | None = None
) -> None:
    """Write tensors from wherever they lie.

    The library leaves files that only their owner can read, which a server in a container, run by
    another user, cannot load. Here they get the permissions of any new file.
    """
    contiguous = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    path.touch()
    permissions = path.stat().st_mode
    save_file(contiguous, path, metadata=metadata)
    path.chmod(permissions)


def digest_weights(places: Sequence[Path], unwanted: Event | None = None) -> str:
    """A digest of every byte of these weight files, and of those that lie in these folders.

    Equal for equal files, in whatever number format they are served. SHA-256 of the blocks'
    SHA-256, so that large files are hashed on all cores. Raises `CancelledError` soon after
    `unwanted` is set: the threads keep a process alive as long as they work.
    """
    unwanted = unwanted or Event()
    folders = [place for place in places if place.is_dir()]
    paths = {place for place in places if place.is_file()}
    paths |= {path for folder in folders for kind in _WEIGHTS for path in folder.glob(kind)}
    files = sorted(paths, key=lambda path: (path.name, path))
    starts = [
        (path, start) for path in files for start in range(0, path.stat().st_size, _BLOCK_BYTES)
    ]
    with ThreadPoolExecutor() as threads:
        blocks = list(threads.map(partial(_digest_block, unwanted), *zip(*starts, strict=True)))
    return hashlib.sha256(b"".join(blocks)).hexdigest()


def _digest_block(unwanted: Event, path: Path, start: int) -> bytes:
    digest, num_left = hashlib.sha256(), _BLOCK_BYTES
    with path.open("rb") as file:
        file.seek(start)
        while num_left and (read := file.read(min(num_left, _READ_BYTES))):
            if unwanted.is_set():
                raise CancelledError
            digest.update(read)
            num_left -= len(read)
    return digest.digest()
