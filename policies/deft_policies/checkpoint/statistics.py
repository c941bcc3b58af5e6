"""Reads action statistics: `norm_stats` of a `config.json`, or a `dataset_statistics.json`."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.errors import CheckpointError
from deft_policies.model.statistics import ActionStatistics

STATISTICS_FILE = "dataset_statistics.json"
QUANTILES, EXTREMES = ("q01", "q99"), ("min", "max")


def find_statistics(config: JsonFields, directory: Path) -> JsonFields:
    """The statistics that belong to a `config.json`, by key and as they are written.

    A `dataset_statistics.json` of the directory replaces the config's own `norm_stats`.
    """
    path = directory / STATISTICS_FILE
    if path.exists():
        return JsonFields.load(path, f"restore {STATISTICS_FILE}")
    statistics = config.section("norm_stats")
    if not statistics.names:
        raise CheckpointError(
            f"{config.path} has no norm_stats and there is no {STATISTICS_FILE} beside it; copy "
            f"the {STATISTICS_FILE} of the fine-tuning run into {config.path.parent}"
        )
    return statistics


def parse_statistics(
    fields: JsonFields, block: str = "action", ends: tuple[str, str] = QUANTILES
) -> Mapping[str, ActionStatistics]:
    """Read statistics by key from an object in OpenVLA's layout.

    The `block` of states is `proprio`, which data sets may leave out. `ends` are the two rows of it
    that become -1 and 1.
    """
    if not fields.names:
        raise CheckpointError(f"{fields.path} holds no statistics; expected one entry per data set")
    data_sets = {key: fields.section(key) for key in fields.names}
    return {
        key: _parse_one(data_set, block, ends)
        for key, data_set in data_sets.items()
        if block == "action" or data_set.has(block)
    }


def _parse_one(data_set: JsonFields, block: str, ends: tuple[str, str]) -> ActionStatistics:
    fields = data_set.section(block)
    low, high = (np.array(fields.values(end, float), dtype=np.float64) for end in ends)
    mask = fields.values("mask", bool) if fields.has("mask") else (True,) * len(low)

    def optional(name: str) -> NDArray[np.float64] | None:
        return np.array(fields.values(name, float), dtype=np.float64) if fields.has(name) else None

    try:
        return ActionStatistics(
            low=low,
            high=high,
            mask=np.array(mask, dtype=np.bool_),
            mean=optional("mean"),
            std=optional("std"),
            minimum=optional("min"),
            maximum=optional("max"),
            num_transitions=data_set.value("num_transitions", int, 0),
            num_trajectories=data_set.value("num_trajectories", int, 0),
        )
    except ValueError as error:
        raise data_set.error(block, f"{' and '.join(ends)}: {error}") from None
