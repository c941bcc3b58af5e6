"""What was recorded or trained for some weights is known by their fingerprint."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from deft_policies.checkpoint.open import load_model
from tests import golden
from tests.policies.checkpoint.checkpoint_files import (
    INSTRUCTIONS,
    open_checkpoint,
    random_tensors,
)
from tests.tiny_openvla import CPU, tiny_config
from tiny_libero_recipe.checkpoint_writer import write_checkpoint
from tiny_libero_recipe.tokenizer import build_tokenizer

LORA = golden.GOLDEN / "lora" / "plain"


def write_random(directory: Path, dtype: torch.dtype, **changes: float) -> Path:
    """A checkpoint stored in a format; `changes` are added to the first number of a tensor."""
    tensors = random_tensors(tiny_config(), dtype)
    for ending, change in changes.items():
        (name,) = (one for one in tensors if one.endswith(f"{ending}.weight"))
        tensors[name].view(-1)[0] += change
    write_checkpoint(directory, tiny_config(), tensors, build_tokenizer(INSTRUCTIONS))
    return directory


def fingerprint(directory: Path, dtype: torch.dtype = torch.float32) -> str:
    return load_model(open_checkpoint(str(directory)), CPU, dtype).fingerprint()


@pytest.mark.parametrize("stored", [torch.float32, torch.float16, torch.bfloat16])
def test_weights_have_one_fingerprint_in_whatever_format_they_are_served(
    tmp_path: Path, stored: torch.dtype
) -> None:
    """Features of a float32 file were refused by the same weights in bfloat16."""
    directory = write_random(tmp_path / "model", stored)
    assert fingerprint(directory) == fingerprint(directory, torch.bfloat16)


def test_weights_with_a_float32_adapter_have_one_fingerprint_in_both_formats() -> None:
    factors = load_file(LORA / "adapter_model.safetensors")
    assert {one.dtype for one in factors.values()} == {torch.float32}
    assert fingerprint(LORA) == fingerprint(LORA, torch.bfloat16)
    assert fingerprint(LORA) != fingerprint(golden.TINY_OPENVLA)


def test_other_weights_have_another_fingerprint(tmp_path: Path) -> None:
    plain = write_random(tmp_path / "plain", torch.float32)
    other = write_random(tmp_path / "other", torch.float32, lm_head=0.5)
    assert fingerprint(plain) != fingerprint(other)


def test_indexes_and_features_of_a_checkpoint_in_bfloat16_stay_valid() -> None:
    known = "439adff62e8a44eb562906feab2aa231cf36087e4c055c1be468f4b220c3f728"
    assert fingerprint(golden.TINY_OPENVLA, torch.bfloat16) == known
