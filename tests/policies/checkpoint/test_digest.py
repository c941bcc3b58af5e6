"""Digests of weight files: every byte counts, wherever it lies."""

from pathlib import Path

import pytest

from deft_policies.checkpoint.tensor_file import digest_weights

MIB = 2**20


@pytest.mark.parametrize("place", [0, 64 * MIB, 65 * MIB - 1])
def test_one_changed_byte_changes_the_digest(tmp_path: Path, place: int) -> None:
    path = tmp_path / "model.safetensors"
    path.touch()
    with path.open("r+b") as file:
        file.truncate(65 * MIB)
        before = digest_weights([tmp_path])
        file.seek(place)
        file.write(b"x")
    assert digest_weights([tmp_path]) != before


def test_files_that_hold_no_weights_do_not_count(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    before = digest_weights([tmp_path])
    (tmp_path / "training.json").write_text("{}")
    (tmp_path / "optimizer.pt").write_bytes(b"moments")
    assert digest_weights([tmp_path, tmp_path, tmp_path / "absent"]) == before
