"""A checkpoint of NORA: one folder in Hugging Face layout, and what only its code says.

How many actions an answer has is in no file. The statistics of LIBERO's fine-tunes are in the code
of its evaluation, those of Open X in `norm_stats.json`.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from PIL.Image import Resampling

from deft_policies.checkpoint.config import QUANTILES, parse_statistics
from deft_policies.checkpoint.fields import JsonFields
from deft_policies.checkpoint.tensor_file import find_tensors
from deft_policies.errors import CheckpointError
from deft_policies.families.qwenfast.policy_files import (
    INSTRUCTION,
    MOST_STATISTICS_BYTES,
    PolicyFiles,
    check_statistics,
    doubts_of,
    find_fast,
    open_base,
)
from deft_policies.model.statistics import ActionStatistics

STATISTICS_FILE = "norm_stats.json"
_ACTION_DIM = 7
_MOST_TOKENIZER_BYTES = 2**26
# Of LIBERO's suites: the quantiles by which its fine-tunes are unnormalised, all but the gripper's.
_LIBERO = {
    "libero_object": (
        (-0.5383928418, -0.8758928776, -0.9375, -0.0696428567, -0.1167857125, -0.1596428603),
        (0.8464285731, 0.84375, 0.9375, 0.0814285725, 0.1489285678, 0.0867857113),
    ),
    "libero_10": (
        (
            *(-0.6348214149, -0.7741071582, -0.7633928657, -0.0974999964),
            *(-0.14819999992847435, -0.2742857039),
        ),
        (0.7714285851, 0.8464285731, 0.9375, 0.1392857134, 0.1596428603, 0.3246428668),
    ),
    "libero_goal": (
        (
            *(-0.8785714507, -0.7553571463, -0.9375, -0.1510714293, -0.1639285684),
            -0.13777500048279764,
        ),
        (0.9375, 0.9107142687, 0.9375, 0.2035714239, 0.2635714412, 0.375),
    ),
    "libero_spatial": (
        (
            *(-0.7454732114076613, -0.6616071463, -0.9375, -0.1071428582, -0.2067857087),
            -0.1842857152,
        ),
        (0.9375, 0.8758928776, 0.9321428537, 0.1039285735, 0.1767857075, 0.1457142830),
    ),
}
_LIBERO["libero_90"] = _LIBERO["libero_10"]
_DIGITS = 11  # numbers with fewer are float32's, rounded


def is_nora(folder: Path) -> bool:
    """Whether it is Qwen2.5-VL whose tokenizer has action tokens."""
    try:
        config = JsonFields.load(folder / "config.json", "restore it")
        kind = config.value("model_type", str, "")
        tokenizer = folder / "tokenizer.json"
        is_small = tokenizer.is_file() and tokenizer.stat().st_size <= _MOST_TOKENIZER_BYTES
        is_usual = kind == "qwen2_5_vl" and is_small
        return is_usual and b"<robot_action_0>" in tokenizer.read_bytes()
    except (CheckpointError, OSError):
        return False


def read_folder(folder: Path, num_steps: int | None) -> PolicyFiles:
    """Read a checkpoint; `CheckpointError` for what is not served."""
    fast, codec = find_fast([folder / "fast"])
    chunk = num_steps or codec.num_steps or 1
    tokenizer, settings = open_base(folder)
    stored = find_tensors(folder)
    doubts = [*doubts_of(fast, codec, chunk, _ACTION_DIM)]
    if num_steps is None and codec.num_steps is None:
        doubts.append(
            "one action per answer is served: how many there are is in no file. NORA-long and its "
            "fine-tunes need --chunk 5, or no action is right"
        )
    if settings.max_new_tokens is None:
        doubts.append(
            "generation_config.json bounds no answer; NORA's own code then stops after 20 tokens. "
            "Here an answer may be as long as its action"
        )
    statistics, doubt = _read_statistics(folder)
    return PolicyFiles(
        base=folder,
        stored=stored,
        weight_files=sorted({place.path for place in stored.values()}),
        codec=codec,
        fast=fast,
        num_steps=chunk,
        action_dim=_ACTION_DIM,
        num_cameras=1,
        template=INSTRUCTION,
        resample=Resampling.BICUBIC,
        statistics=statistics,
        unnormalise=_unnormalise,
        gripper="0.5 closes and 1.0 opens, as NORA's code leaves it; its LIBERO evaluation sends "
        "-sign(2 g - 1), and +1 for 0",
        settings=settings,
        tokenizer=tokenizer,
        doubts=(*doubts, *doubt),
    )


def _read_statistics(folder: Path) -> tuple[Mapping[str, ActionStatistics], tuple[str, ...]]:
    """Those of the folder, or else LIBERO's; and what is to be said of them.

    NORA does not use their mask: the gripper is unnormalised, too.
    """
    path = folder / STATISTICS_FILE
    everything = np.ones(_ACTION_DIM, np.bool_)
    if not path.exists():
        doubt = f"{path} is missing: LIBERO's statistics are served, as its evaluation has them"
        known = {
            key: ActionStatistics(
                np.array([*map(_number, low), 0.0]),
                np.array([*map(_number, high), 1.0]),
                everything,
            )
            for key, (low, high) in _LIBERO.items()
        }
        return known, (doubt,)
    fields = JsonFields.load(path, "restore it", MOST_STATISTICS_BYTES)
    by_key = parse_statistics(fields, ends=QUANTILES)
    check_statistics(path, by_key, _ACTION_DIM)
    return {
        key: ActionStatistics(statistics.low, statistics.high, everything)
        for key, statistics in by_key.items()
    }, ()


def _number(value: float) -> float:
    """A number as the evaluation has it: those of ten digits are float32's."""
    return value if len(repr(abs(value))) > _DIGITS + 2 else float(np.float32(value))


def _unnormalise(
    normalised: NDArray[np.float64], statistics: ActionStatistics
) -> NDArray[np.float64]:
    """In float64, as NORA does, the gripper included."""
    low, high = statistics.low, statistics.high
    actions: NDArray[np.float64] = 0.5 * (normalised + 1) * (high - low) + low
    return actions
