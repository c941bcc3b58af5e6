"""A run's folder as VLA-0 leaves it: how pictures are made, what an answer is, its statistics.

`config.yaml` and `dataset_stats` lie in the run's folder, the model in `model_last` below it, or a
LoRA adapter that names its base. Either may be named as the checkpoint.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.lora import find_adapter
from deft_policies.checkpoint.open import locate_checkpoint
from deft_policies.errors import CheckpointError
from deft_policies.families.vla0.number_pickle import read_arrays
from deft_policies.model.qwen_vision import PATCH

MODEL_FOLDER = "model_last"
RUN_FILE = "config.yaml"
_STATISTICS, _ENDS = "out_ori_act", ("min", "max")
_CROP = re.compile(r"IMAGE\.crop_img:([0-9.]+)")
_SIZE = re.compile(r"IMAGE\.img_size:(\d+)")
# From here on transformers hands `add_vision_id` to the template; before, it dropped it.
_NAMES_PICTURES = (4, 52)


@dataclass(frozen=True, eq=False)
class RunFolder:
    """What a run says of the frames it is shown and of the numbers that it writes."""

    model: Path  # the folder of the Hugging Face model, or of the adapter
    base: Path  # whose weights are read: the model's, or those that the adapter changes
    num_cameras: int
    is_tiled: bool  # all cameras in one picture, side by side
    crop: float  # share of a side that is kept; 1: all of it
    size: int  # pixels of a side, of each camera
    num_steps: int
    action_dim: int
    num_bins: int
    names_pictures: bool  # `add_vision_id`: `Picture 1: ` comes before a picture
    lowest: NDArray[Any]  # [action_dim], float64 or float32: actions are computed in it
    highest: NDArray[Any]
    repetition_penalty: float

    @property
    def num_numbers(self) -> int:
        """Of an answer."""
        return self.num_steps * self.action_dim

    @property
    def num_pictures(self) -> int:
        """That the model is shown of a frame."""
        return 1 if self.is_tiled else self.num_cameras

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches in a picture."""
        side = self.size // PATCH
        return side, side * self.num_cameras // self.num_pictures


def find_run_folder(directory: Path) -> Path | None:
    """This folder or the one above it, whichever is a run of VLA-0."""
    for folder in (directory, directory.parent):
        if (folder / RUN_FILE).is_file() and any(folder.glob("dataset_stats.*")):
            return folder
    return None


def read_run(directory: Path, base: Path | None = None) -> RunFolder:
    """Read a run's folder, or the one of its model; `CheckpointError` for what is not served.

    An adapter's `base` is looked for where the adapter says, unless it is given.
    """
    run = find_run_folder(directory)
    if run is None:
        raise CheckpointError(
            f"neither {directory} nor the folder above it has {RUN_FILE} and dataset_stats; give "
            "a run's folder, or the model in it"
        )
    model = run / MODEL_FOLDER if directory == run else directory
    if base is None:
        base = locate_checkpoint(str(model)).directory if find_adapter(model) else model
    qwen, image = _read_config(run / RUN_FILE)
    if qwen.value("history", int, 1) != 1:
        raise qwen.error("history", "is not 1; only policies that see one frame are served")
    if qwen.value("action_type", str, "original") != "original":
        raise qwen.error("action_type", "is not 'original'; only absolute answers are served")
    if base != model and qwen.value("use_qlora", bool, False):
        raise qwen.error(
            "use_qlora", "is true: the adapter belongs to a base in 4 bits, which is not served"
        )
    crop, size = _CROP.search(image), _SIZE.search(image)
    action_dim = qwen.count("original_action_dim", 64)
    num_cameras = qwen.count("num_cam", 8)
    lowest, highest = _read_statistics(run, action_dim)
    return RunFolder(
        model=model,
        base=base,
        num_cameras=num_cameras,
        is_tiled=num_cameras > 1 and qwen.value("tiled_rgb_imgs", bool, False),
        crop=float(crop[1]) if crop else 1.0,
        size=int(size[1]) if size else 224,
        num_steps=qwen.count("horizon", 256),
        action_dim=action_dim,
        num_bins=qwen.count("num_bins_actions", 100_000),
        names_pictures=qwen.value("add_vision_id", bool, False)
        and (base != model or _names_pictures(model)),
        lowest=lowest,
        highest=highest,
        repetition_penalty=_read_penalty(base),
    )


def _read_config(path: Path) -> tuple[JsonFields, str]:
    """The section of the model, and how pictures are made, as a line of options."""
    fields = JsonFields.load_yaml(path, "restore it")
    qwen = fields.section("MODEL").section("QWEN")
    loader = fields.section("DATALOADER").section("ROBOVERSE")
    return qwen, loader.value("cfg_opts", str, "")


def _read_penalty(model: Path) -> float:
    path = model / "generation_config.json"
    if not path.exists():
        return 1.0
    fields = JsonFields.load(path, "restore it")
    penalty = fields.value("repetition_penalty", float, 1.0)
    if penalty <= 0:
        raise fields.error("repetition_penalty", f"is {penalty:g}, expected more than 0")
    return penalty


def _names_pictures(model: Path) -> bool:
    """Whether the version that saved the model handed `add_vision_id` to the template."""
    fields = JsonFields.load(model / "config.json", "restore it")
    version = re.match(r"(\d+)\.(\d+)", fields.value("transformers_version", str, ""))
    return version is None or (int(version[1]), int(version[2])) >= _NAMES_PICTURES


def _read_statistics(run: Path, action_dim: int) -> tuple[NDArray[Any], NDArray[Any]]:
    """The smallest and the largest action of the data set, in the format they were stored in."""
    path = run / "dataset_stats.json"
    if path.exists():
        fields = JsonFields.load(path, "restore it")
        found, dtypes = fields.section(_STATISTICS), fields.section("dtype")
        arrays = {
            name: np.array(found.values(name, float), dtypes.value(name, str, "float64"))
            for name in _ENDS
        }
    else:
        path = run / "dataset_stats.pkl"
        arrays = read_arrays(path, _STATISTICS)
    ends = [arrays.get(name, np.empty(0)) for name in _ENDS]
    for name, values in zip(_ENDS, ends, strict=True):
        is_fine = values.shape == (action_dim,) and values.dtype in (np.float32, np.float64)
        if not is_fine or not np.isfinite(values).all():
            raise CheckpointError(
                f"{path}: {_STATISTICS}.{name} must be {action_dim} finite numbers, got "
                f"{values.dtype} {list(values.shape)}"
            )
    lowest, highest = ends
    if not (lowest <= highest).all():
        raise CheckpointError(f"{path}: {_STATISTICS}.min is above max")
    return lowest, highest
