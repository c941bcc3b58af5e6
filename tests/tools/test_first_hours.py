"""What a newcomer types in the first hour works in fresh directories, in a quick form."""

import shutil

import pytest

from tests.tools import first_hours

pytestmark = pytest.mark.timeout(2700)  # many commands, each a process that imports torch
STEPS = 3


def test_a_robot_is_served_from_its_own_checkpoint_and_replayed(tmp_path):
    first_hours.robot(tmp_path, STEPS)


def test_a_lerobot_data_set_becomes_a_served_head(tmp_path):
    pytest.importorskip("pyarrow", reason="pip install 'deft-client[datasets]'")
    first_hours.data(tmp_path, STEPS)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_keys_and_certificates_admit_who_has_them(tmp_path):
    first_hours.fleet(tmp_path, STEPS)
