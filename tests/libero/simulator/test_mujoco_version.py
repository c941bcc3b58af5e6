"""Published success rates belong to one MuJoCo; what another one changes is said, and refused."""

from pathlib import Path

import pytest

from deft_libero.errors import SelectionError
from deft_libero.evaluation.selection import LIBERO, check_physics
from deft_libero.simulator.assets import REQUIRED_FOLDERS
from deft_libero.simulator.environment import EnvironmentSettings
from deft_libero.simulator.mujoco_version import PUBLISHED, differences, refused_suites, warning
from tests.standins import stand_ins

SUITES = ("libero_object", "libero_spatial", "libero_goal")


@pytest.mark.parametrize("version", ["3.2.3", PUBLISHED])
def test_the_published_version_and_older_ones_are_as_published(version: str):
    assert differences(version) == []
    assert warning(version) is None
    assert refused_suites(SUITES, version) == []


def test_another_rendering_is_named_and_nothing_refused():
    text = warning("3.3.3")
    assert text is not None
    assert "MuJoCo 3.3.3" in text
    assert "task 5" not in text
    assert text.endswith("Install mujoco==3.3.2")
    assert refused_suites(SUITES, "3.3.7") == []


@pytest.mark.parametrize("version", ["3.4.0", "3.10.1", "4.0.0rc1"])
def test_other_contacts_are_named_and_their_suite_refused(version: str):
    assert "task 5 of libero_spatial" in (warning(version) or "")
    assert refused_suites(SUITES, version) == ["libero_spatial"]


def test_a_suite_upset_by_mujoco_is_refused_on_real_assets(tmp_path: Path):
    for name in REQUIRED_FOLDERS:
        (tmp_path / name).mkdir()
    real = EnvironmentSettings(assets_folder=tmp_path)
    with pytest.raises(SelectionError, match="libero_spatial.*--any-mujoco"):
        check_physics(LIBERO, real, SUITES, "3.8.1")
    check_physics(LIBERO, real, SUITES, PUBLISHED)
    check_physics(LIBERO, real, ("libero_object",), "3.8.1")
    check_physics(LIBERO, EnvironmentSettings(assets_folder=stand_ins()), SUITES, "3.8.1")
