"""Safetensors files are readable by whom any new file is."""

import os

import pytest
import torch
from safetensors.torch import load_file

from deft_policies.checkpoint.tensor_file import write_tensors


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_a_tensor_file_gets_the_permissions_of_a_new_file(tmp_path, mask):
    before = os.umask(mask)
    turned = torch.arange(6.0).reshape(2, 3).T
    try:
        write_tensors({"a": turned}, tmp_path / "a.safetensors")
        (tmp_path / "plain").touch()
    finally:
        os.umask(before)
    mode = (tmp_path / "plain").stat().st_mode
    assert (tmp_path / "a.safetensors").stat().st_mode == mode
    assert torch.equal(load_file(tmp_path / "a.safetensors")["a"], turned)
