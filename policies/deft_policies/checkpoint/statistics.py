"""Reads action statistics: `norm_stats` of a `config.json`, or a `dataset_statistics.json`."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from deft_policies.checkpoint.fields import JsonFields
from deft_policies.errors import CheckpointError
from deft_policies.model.statistics import ActionStatistics

STATISTICS_FILE = "dataset_statistics.json"


def load_statistics(config: JsonFields) -> Mapping[str, ActionStatistics]:
    """Read the statistics that belong to a `config.json`."""
    return parse_statistics(find_statistics(config))


def find_statistics(config: JsonFields) -> JsonFields:
    """The statistics that belong to a `config.json`, by key and as they are written.

    A `dataset_statistics.json` beside it replaces the config's own `norm_stats`.
    """
    path = config.path.parent / STATISTICS_FILE
    if path.exists():
        return JsonFields.load(path, f"restore {STATISTICS_FILE}")
    statistics = config.section("norm_stats")
    if not statistics.keys():
        raise CheckpointError(
            f"{config.path} has no norm_stats and there is no {STATISTICS_FILE} beside it; copy "
            f"the {STATISTICS_FILE} of the fine-tuning run into {config.path.parent}"
        )
    return statistics


def parse_statistics(fields: JsonFields) -> Mapping[str, ActionStatistics]:
    """Read statistics by key from an object in OpenVLA's layout."""
    if not fields.keys():
        raise CheckpointError(f"{fields.path} holds no statistics; expected one entry per data set")
    return {key: _parse_one(fields.section(key)) for key in fields.keys()}  # noqa: SIM118


def _parse_one(fields: JsonFields) -> ActionStatistics:
    action = fields.section("action")
    q01 = np.array(action.values("q01", float), dtype=np.float64)
    mask = action.values("mask", bool) if action.has("mask") else (True,) * len(q01)

    def optional(name: str) -> NDArray[np.float64] | None:
        return np.array(action.values(name, float), dtype=np.float64) if action.has(name) else None

    try:
        return ActionStatistics(
            q01=q01,
            q99=np.array(action.values("q99", float), dtype=np.float64),
            mask=np.array(mask, dtype=np.bool_),
            mean=optional("mean"),
            std=optional("std"),
            minimum=optional("min"),
            maximum=optional("max"),
            num_transitions=fields.value("num_transitions", int, 0),
            num_trajectories=fields.value("num_trajectories", int, 0),
        )
    except ValueError as error:
        raise fields.error("action", str(error)) from None
