import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from deft_policies.checkpoint.config import find_statistics, parse_statistics
from deft_policies.checkpoint.fields import JsonFields
from deft_policies.errors import CheckpointError, UnknownStatisticsKeyError
from deft_policies.model.statistics import (
    ActionStatistics,
    find_statistics_key,
)
from tests import golden

ENTRY: dict[str, object] = {"action": {"q01": [0.0, -1.0], "q99": [1.0, 1.0]}}


def write_config(directory: Path, norm_stats: object = None) -> JsonFields:
    path = directory / "config.json"
    path.write_text(json.dumps({} if norm_stats is None else {"norm_stats": norm_stats}))
    return JsonFields.load(path, "")


def load_statistics(config: JsonFields) -> Mapping[str, ActionStatistics]:
    return parse_statistics(find_statistics(config, config.path.parent))


def golden_statistics() -> dict[str, ActionStatistics]:
    config = JsonFields.load(golden.TINY_OPENVLA / "config.json", "")
    return dict(load_statistics(config))


def test_statistics_are_read_as_they_are_written() -> None:
    libero = golden_statistics()["libero_spatial"]
    assert libero.low[0] == -0.7454732114076613
    assert libero.high[5] == 0.14571428298950195
    assert libero.mask.tolist() == [True] * 6 + [False]
    assert (libero.num_transitions, libero.num_trajectories) == (52970, 432)


def test_a_missing_mask_means_every_dimension() -> None:
    assert golden_statistics()["bridge_orig"].mask.all()


def test_the_statistics_file_replaces_those_of_the_config(tmp_path: Path) -> None:
    config = write_config(tmp_path, {"of_config": ENTRY})
    assert list(load_statistics(config)) == ["of_config"]
    (tmp_path / "dataset_statistics.json").write_text(json.dumps({"of_file": ENTRY}))
    assert list(load_statistics(config)) == ["of_file"]


def test_no_statistics_at_all_names_both_places(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        load_statistics(write_config(tmp_path))
    message = str(caught.value)
    assert str(tmp_path / "config.json") in message
    assert "dataset_statistics.json" in message
    assert "copy" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ({"q99": [1.0]}, "action.q01 is missing"),
        ({"q01": [0.0], "q99": [1.0, 2.0]}, "one length"),
        ({"q01": [0.0], "q99": ["x"]}, "must be a finite number"),
        ({"q01": [0.0], "q99": [1.0], "mask": [1]}, "must be true or false"),
        ({"q01": [float("nan")], "q99": [1.0]}, "finite"),
    ],
)
def test_damaged_statistics_name_file_and_field(
    tmp_path: Path, action: object, problem: str
) -> None:
    path = tmp_path / "dataset_statistics.json"
    path.write_text(json.dumps({"robot": {"action": action}}))
    with pytest.raises(CheckpointError, match=problem) as caught:
        parse_statistics(JsonFields.load(path, ""))
    assert str(caught.value).startswith(f"{path}: robot.action")


def test_a_known_key_is_itself() -> None:
    assert find_statistics_key(("a", "a_no_noops"), "a") == "a"


def test_a_suite_finds_its_filtered_data_set() -> None:
    assert find_statistics_key(("bridge_orig", "libero_goal_no_noops"), "libero_goal") == (
        "libero_goal_no_noops"
    )


def test_no_key_is_needed_when_there_is_one_data_set() -> None:
    assert find_statistics_key(("only",), None) == "only"


@pytest.mark.parametrize("key", [None, "moon"])
def test_an_unknown_key_is_answered_with_the_known_ones(key: str | None) -> None:
    with pytest.raises(UnknownStatisticsKeyError, match="a, b") as caught:
        find_statistics_key(("a", "b"), key)
    assert caught.value.field == "statistics_key"


def test_the_range_of_an_action_follows_the_mask() -> None:
    statistics = ActionStatistics(
        np.array([-2.0, 0.0]), np.array([3.0, 5.0]), np.array([True, False])
    )
    assert statistics.lowest.tolist() == [-2.0, -1.0]
    assert statistics.highest.tolist() == [3.0, 1.0]
