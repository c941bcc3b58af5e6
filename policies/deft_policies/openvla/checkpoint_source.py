"""Where a checkpoint's files are: a directory, a hub id, or an adapter that names its base."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from deft_policies.errors import CheckpointError
from deft_policies.openvla.lora import ADAPTER_CONFIG_FILE, LoraAdapter, is_adapter

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ("*.json", "*.safetensors", "tokenizer.model")


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
        if self.overlay is not None and (self.overlay / file_name).exists():
            return self.overlay
        return self.directory


def locate_checkpoint(
    name: str, adapter: str | None = None, download: Callable[[str], Path] | None = None
) -> CheckpointSource:
    """Find the files of what the user named: existing directories, else hub ids.

    A directory that is an adapter itself leads to its base, unless it is named as the adapter.
    """
    fetch = download or download_snapshot
    directory = _locate(name, fetch)
    if adapter is not None:
        return CheckpointSource(name, directory, _locate(adapter, fetch))
    if not is_adapter(directory):
        return CheckpointSource(name, directory)
    base = LoraAdapter.load(directory).base
    if not base:
        raise CheckpointError(
            f"{directory / ADAPTER_CONFIG_FILE} names no base_model_name_or_path; write the "
            "directory or hub id of the model that the adapter was trained on there"
        )
    beside = directory / base
    return CheckpointSource(
        base, _locate(str(beside) if beside.is_dir() else base, fetch), directory
    )


def download_snapshot(hub_id: str) -> Path:
    """Fetch a model's files from the hub, or find them in its cache."""
    import httpx
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(_HUB_FILES)))
    except (HfHubHTTPError, httpx.HTTPError, OSError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise CheckpointError(
            f"{hub_id} is no directory here and could not be fetched from the hub ({reason}); "
            "give the path of a local copy, or connect to the network"
        ) from None


def _locate(name: str, download: Callable[[str], Path]) -> Path:
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(f"{path} is a file; give the directory that holds {path.name}")
    if _HUB_ID.fullmatch(name):
        return download(name)
    raise CheckpointError(
        f"there is no directory {path}; give a checkpoint directory or a hub id such as "
        "openvla/openvla-7b"
    )
