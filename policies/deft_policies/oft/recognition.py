"""Tells OFT's fine-tunes from OpenVLA's by their files. Imports nothing heavy."""

import re
from collections.abc import Callable, Iterable
from enum import Enum
from pathlib import Path

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.errors import CheckpointError

PICKLE_SUFFIX, SAFETENSORS_SUFFIX = ".pt", ".safetensors"
_SUFFIXES = (SAFETENSORS_SUFFIX, PICKLE_SUFFIX)  # a converted file before what it was made from
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


class OftFile(Enum):
    """A file that training writes beside the model; its name contains this and `checkpoint`."""

    HEAD = "action_head"
    STATE = "proprio_projector"
    VISION = "vision_backbone"
    NOISE = "noisy_action_projector"

    def matches(self, name: str) -> bool:
        """Whether a file's name is one of this kind."""
        return self.value in name and "checkpoint" in name and name.endswith(_SUFFIXES)


def find_file(directory: Path, kind: OftFile) -> Path | None:
    """The one file of a kind, the converted one where there are both; None if there is none."""
    found = sorted(path for path in directory.iterdir() if kind.matches(path.name))
    if len({path.stem for path in found}) > 1:
        names = ", ".join(path.name for path in found)
        raise CheckpointError(
            f"{directory} holds several files of the {kind.value}: {names}; keep those of one step"
        )
    return min(found, key=lambda path: _SUFFIXES.index(path.suffix), default=None)


def has_head(name: str, list_files: Callable[[str], Iterable[str]] | None = None) -> bool:
    """True if a checkpoint (directory or hub id) has a head of OFT's; False if it cannot be told.

    Asks no network: of a hub id that was never fetched nothing is known.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        names: Iterable[str] = [one.name for one in path.iterdir()]
    elif _HUB_ID.fullmatch(name) and not path.exists():
        names = (list_files or list_cached_files)(name)
    else:
        names = ()
    return any(OftFile.HEAD.matches(one) for one in names)


def list_cached_files(hub_id: str) -> list[str]:
    """Names of a model's files in the hub's cache; none if it is not there."""
    from huggingface_hub import snapshot_download

    try:
        local = Path(snapshot_download(hub_id, local_files_only=True))
    except (OSError, ValueError):
        return []
    return [path.name for path in local.iterdir()]


def check_is_openvla(directory: Path, statistics: JsonFields, num_steps: int | None) -> None:
    """Raise `CheckpointError` if a checkpoint is OFT's, or could be and nobody says it is not.

    One whose answers are tokens has no file of its own.
    """
    if num_steps not in (None, 1):
        raise CheckpointError(
            f"openvla answers one action at a time, not {num_steps}; leave --policy away, or say "
            "--policy oft"
        )
    head = find_file(directory, OftFile.HEAD)
    if head is not None:
        raise CheckpointError(
            f"{head} is the head of an OFT fine-tune; leave --policy away or say --policy oft, and "
            "say --pictures and --chunk"
        )
    if num_steps is None and (reason := _find_sign(directory, statistics)):
        raise CheckpointError(
            f"{directory} has no *{OftFile.HEAD.value}*checkpoint*, but {reason}, as OFT's "
            "fine-tunes have: say --chunk 1 if it is OpenVLA's, or --chunk 8 --pictures 1 (LIBERO; "
            "--chunk 5 for Bridge) if it is OFT's and answers with tokens"
        )


def _find_sign(directory: Path, statistics: JsonFields) -> str:
    """What makes a folder look like OFT's; empty if nothing does."""
    from deft_policies.checkpoint.lora import ADAPTER_FOLDER

    if (directory / ADAPTER_FOLDER).is_dir():
        return f"a folder {ADAPTER_FOLDER}"
    for key in statistics.keys():  # noqa: SIM118 - JsonFields is no mapping
        state = statistics.section(key).section("proprio")
        if any(
            any(state.values(row, float))
            for row in state.keys()  # noqa: SIM118
            if row != "mask" and state.is_list(row)
        ):
            return f"the proprio statistics of {key} in {statistics.path} are filled"
    return ""
