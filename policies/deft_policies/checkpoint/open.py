"""An OpenVLA checkpoint, opened and checked, and the way from it to a model in memory.

Everything that can be wrong with the files is found before the first weight is read, and whether
the model fits into the memory that is free.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

import torch
from torch import Tensor, nn

from deft_policies.checkpoint.config import (
    CONFIG_FILE,
    STATISTICS_FILE,
    TOKENIZER_FILE,
    find_statistics,
    load_config,
    load_encoder,
)
from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.lora import (
    ADAPTER_CONFIG_FILE,
    ADAPTER_FOLDER,
    LoraAdapter,
    find_adapter,
)
from deft_policies.checkpoint.tensor_file import (
    Shape,
    StoredTensor,
    describe_misfits,
    find_tensors,
    require_finite,
)
from deft_policies.errors import CheckpointError, DeviceError
from deft_policies.model.formats import Quantization
from deft_policies.model.prompt import PromptEncoder
from deft_policies.model.quantization import check_quantization
from deft_policies.model.sizes import OpenVLAConfig
from deft_policies.model.tensor_names import TensorPlace, tensor_places
from deft_policies.model.vla import OpenVLAModel, VlaNetwork, allocate
from deft_policies.progress import doing

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_TIMEOUT_S = 10.0  # for a question, not for files
_HUB_FILES = ("*.json", "*.yaml", "*.safetensors", "*.pt", "tokenizer.model")
_GIB = 1024**3
# Activations, key/value cache and workspaces of libraries, besides the weights.
_WORKING_SHARE = 0.05
_WORKING_BYTES = 256 * 1024**2
# Of a number, with its share of a scale.
_MATRIX_BITS = {Quantization.INT8: 8, Quantization.INT4: 4.25, Quantization.FP8: 8}
_MATRIX_BITS_CPU = {**_MATRIX_BITS, Quantization.INT4: 9}  # there int4 is kept in bytes


@dataclass(frozen=True, eq=False)
class CheckpointSource:
    """`directory` holds the weights; `overlay` is the adapter's own directory, if there is one.

    What an adapter's directory also holds (statistics, tokenizer) comes before the base's.
    """

    name: str
    directory: Path
    overlay: Path | None = None

    def find(self, file_name: str) -> Path:
        """The directory whose file counts."""
        for directory in (self.overlay, self.tuned):
            if directory is not None and (directory / file_name).exists():
                return directory
        return self.directory

    @property
    def tuned(self) -> Path:
        """Where fine-tuning put its own files: the adapter's directory, or the one it lies in."""
        if self.overlay is None:
            return self.directory
        return self.overlay.parent if self.overlay.name == ADAPTER_FOLDER else self.overlay

    def read_statistics(self) -> JsonFields:
        """The action statistics as they are written, by key."""
        config = JsonFields.load(self.directory / CONFIG_FILE, "restore it")
        return find_statistics(config, self.find(STATISTICS_FILE))


def locate_checkpoint(name: str, adapter: str | None = None) -> CheckpointSource:
    """Find the files of what the user named: existing directories, else hub ids.

    A directory that has an adapter and no model leads to its base, unless it is named as adapter.
    """
    directory = _locate(name)
    if adapter is not None:
        named = _locate(adapter)
        return CheckpointSource(name, directory, find_adapter(named) or named)
    overlay = find_adapter(directory)
    if overlay is None:
        return CheckpointSource(name, directory)
    base = LoraAdapter(overlay).base
    if not base:
        raise CheckpointError(
            f"{overlay / ADAPTER_CONFIG_FILE} names no base_model_name_or_path; write the "
            "directory or hub id of the model that the adapter was trained on there"
        )
    beside = directory / base
    try:
        path = _locate(str(beside) if beside.is_dir() else base)
    except CheckpointError as error:
        raise CheckpointError(
            f"{overlay} is to be merged into {base}, which its {ADAPTER_CONFIG_FILE} names, but "
            f"{error}; or name both: --checkpoint BASE --adapter {directory}"
        ) from None
    return CheckpointSource(base, path, overlay)


def download_snapshot(hub_id: str, patterns: Sequence[str] = _HUB_FILES) -> Path:
    """Fetch a model's files from the hub, or find them in its cache."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{hub_id} is no directory here and could not be fetched from the hub ({reason}); "
            "give the path of a local copy, or connect to the network"
        ) from None


def is_hub_id(name: str) -> bool:
    """Whether a checkpoint's name is no path, neither by its form nor because there is one."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def hub_bytes(hub_id: str) -> int:
    """Return the bytes that the hub would send of a model; 0 where all are in the cache here.

    Raises `CheckpointError` where the hub does not know it, or does not answer.
    """
    import httpx
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    with contextlib.suppress(HfHubHTTPError, httpx.HTTPError, OSError, ValueError):
        snapshot_download(hub_id, allow_patterns=list(_HUB_FILES), local_files_only=True)
        return 0
    try:
        info = HfApi().model_info(hub_id, files_metadata=True, timeout=HUB_TIMEOUT_S)
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{hub_id} is no directory here, and the hub does not have it or does not answer "
            f"({reason})"
        ) from None
    files = info.siblings or []
    downloads = [
        file for file in files if any(fnmatch(file.rfilename, form) for form in _HUB_FILES)
    ]
    return sum(entry.size or 0 for entry in downloads)


def _locate(name: str) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the directory that holds {path.name}")
    if _HUB_ID.fullmatch(name):
        return download_snapshot(name)
    raise CheckpointError(
        f"there is no directory {path}; give a checkpoint directory or a hub id such as "
        "openvla/openvla-7b"
    )


# Buffers that older versions saved with the weights; they follow from the configuration.
_DERIVED = ".rotary_emb.inv_freq"


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A checkpoint whose files fit together.

    `merge` takes a published name and its weight to what a fine-tune that is not merged makes of
    that weight.
    """

    source: CheckpointSource
    config: OpenVLAConfig
    encoder: PromptEncoder
    stored: Mapping[str, StoredTensor]
    merge: Callable[[str, Tensor], Tensor] | None = None


def open_source(source: CheckpointSource) -> Checkpoint:
    """Check all of the files that were located; the weights stay where they are."""
    config = load_config(source.directory, source.name, source.find(STATISTICS_FILE))
    tokenizer = source.find(TOKENIZER_FILE)
    encoder = load_encoder(tokenizer, config.prompt_template, config.action_tokens.last + 1)
    stored = find_tensors(source.directory)
    shapes = {name: tensor.shape for name, tensor in stored.items()}
    check_tensors(source.directory, shapes, tensor_places(config))
    checkpoint = Checkpoint(source, config, encoder, stored)
    if source.overlay is None:
        return checkpoint
    adapter = LoraAdapter(source.overlay)
    adapter.check(shapes)
    return replace(checkpoint, merge=adapter.merge)


def check_tensors(
    directory: Path, found: Mapping[str, Shape], places: Sequence[TensorPlace]
) -> None:
    """Raise `CheckpointError` unless the tensors are those that the configuration asks for.

    Tensors that inference never uses may be missing.
    """
    expected = {
        place.name: place.shape
        for place in places
        if place.parameter is not None or place.name in found
    }
    read = {name: shape for name, shape in found.items() if not name.endswith(_DERIVED)}
    misfits = describe_misfits(expected, read)
    if misfits:
        raise CheckpointError(
            f"the tensors in {directory} do not fit its {CONFIG_FILE}: {misfits}; "
            f"restore the {CONFIG_FILE} and weight files of one and the same model"
        )


@torch.no_grad()
def load_model(
    checkpoint: Checkpoint,
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization = Quantization.NONE,
) -> OpenVLAModel:
    """Build the model on a device, part by part, so that little more than the model is in memory.

    Raises `DeviceError` beforehand if the device cannot hold or compute it.
    """
    check_quantization(quantization, device, dtype)
    check_memory(tensor_places(checkpoint.config), device, dtype, quantization)
    with torch.device("meta"):
        model = OpenVLAModel(checkpoint.config).to(dtype)
    places = tensor_places(checkpoint.config)
    fill_network(model, places, checkpoint.stored, checkpoint.merge, device, quantization)
    return model


@torch.no_grad()
def fill_network(
    network: VlaNetwork,
    places: Sequence[TensorPlace],
    stored: Mapping[str, StoredTensor],
    merge: Callable[[str, Tensor], Tensor] | None,
    device: torch.device,
    quantization: Quantization,
) -> None:
    """Read the weights of a network that is laid out on the meta device, part by part."""
    parts = list(_parts(network))
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for _, part in parts]
    for number, (prefix, part) in enumerate(parts):
        doing("reading the weights", sum(sizes[:number]) / sum(sizes))
        allocate(part, device)
        parameters = dict(part.named_parameters())
        for place in places:
            name = place.parameter
            if name is not None and name.startswith(prefix):
                rows = parameters[name.removeprefix(prefix)][place.rows]
                weight = stored[place.name].read(device)
                weight = weight if merge is None else merge(place.name, weight)
                rows.copy_(weight)
                require_finite(place.name, rows, stored[place.name].path)
        if prefix.startswith("decoder.layers."):
            network.quantize_layer(int(prefix.split(".")[2]), quantization, device)
    network.eval().requires_grad_(False)


def _parts(model: VlaNetwork) -> Iterator[tuple[str, nn.Module]]:
    """Submodules that together hold every weight, each decoder layer by itself."""
    for name, part in model.named_children():
        if name != "decoder":
            yield f"{name}.", part
    for name, part in model.decoder.named_children():
        if name != "layers":
            yield f"decoder.{name}.", part
    for index, layer in enumerate(model.decoder.layers):
        yield f"decoder.layers.{index}.", layer


def weight_bytes(
    places: Sequence[TensorPlace],
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization = Quantization.NONE,
) -> int:
    """What the weights of a model with these tensors take on its device."""
    quantized_bits = _MATRIX_BITS_CPU if device.type == "cpu" else _MATRIX_BITS
    total_bits = 0.0
    for place in places:
        if place.parameter is None:
            continue
        is_matrix = ".layers." in place.parameter and len(place.shape) == 2
        bits = quantized_bits.get(quantization, 0) if is_matrix else 0
        total_bits += math.prod(place.shape) * (bits or 8 * dtype.itemsize)
    return int(total_bits / 8)


def check_memory(
    places: Sequence[TensorPlace],
    device: torch.device,
    dtype: torch.dtype,
    quantization: Quantization,
    planned: Mapping[str, int] | None = None,
) -> dict[str, int]:
    """Bytes that such a model needs, by what for: `planned` says what passes set aside.

    Raises `DeviceError` if the device has less; where it cannot say, nothing is refused.
    """
    weights = weight_bytes(places, device, dtype, quantization)
    used = [place for place in places if place.parameter is not None]
    largest = max(math.prod(place.shape) for place in used) * dtype.itemsize
    room = largest + max(_WORKING_BYTES, int(_WORKING_SHARE * weights))
    if planned:  # the largest tensor is copied before they are set aside
        need = {"weights": weights, **planned, "room to work": max(largest, _WORKING_BYTES)}
    else:
        need = {"weights": weights, "room to work": room}
    free, total = find_free_bytes(device), sum(need.values())
    if free is not None and total > free:
        parts = ", ".join(f"{size / _GIB:.1f} of {name}" for name, size in need.items())
        smaller = "a smaller --largest-batch, " if planned else ""
        raise DeviceError(
            f"the model needs about {total / _GIB:.1f} GiB on {device} ({parts}), "
            f"{free / _GIB:.1f} GiB are free; use bfloat16 or a quantization, {smaller}or a "
            "larger device"
        )
    return need


def find_free_bytes(device: torch.device) -> int | None:
    """Memory that can still be taken, or None where it cannot be known."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    if device.type != "cpu":
        return None
    known = [bytes_ for bytes_ in (_free_of_machine(), _free_of_container()) if bytes_ is not None]
    return min(known, default=None)


def _free_of_machine() -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _free_of_container() -> int | None:
    """What the control group may still take; pages of files it has read can be given up."""
    directory = Path("/sys/fs/cgroup")
    with contextlib.suppress(OSError, ValueError, KeyError):
        limit = int((directory / "memory.max").read_text())
        used = int((directory / "memory.current").read_text())
        lines = (directory / "memory.stat").read_text().splitlines()
        statistics = dict(line.split()[:2] for line in lines)
        return limit - used + int(statistics["inactive_file"])
    return None
