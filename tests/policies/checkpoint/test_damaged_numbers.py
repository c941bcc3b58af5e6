"""Files of weights beside the model's own: NaN and infinity are refused by name."""

from pathlib import Path

import pytest
import torch

from deft_policies.checkpoint.tensor_file import read_tensors, write_tensors
from deft_policies.errors import CheckpointError


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("suffix", [".safetensors", ".bin"])
def test_weights_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, bad: float, suffix: str
) -> None:
    tensors = {"fine": torch.zeros(4), "count": torch.tensor([3]), "sick": torch.zeros(2, 3)}
    path = tmp_path / f"head{suffix}"
    for value in (0.0, bad):
        tensors["sick"][1, 2] = value
        if suffix == ".bin":
            torch.save(tensors, path)
        else:
            write_tensors(tensors, path)
        if value == 0.0:
            assert set(read_tensors(path)) == set(tensors)
    with pytest.raises(CheckpointError, match="sick.*NaN"):
        read_tensors(path)
