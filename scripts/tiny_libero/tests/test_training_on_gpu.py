"""Training of the policy on a GPU: `pytest -m gpu`."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from test_policy_training import CONFIG, TOKENIZER, fit_config, made_up_samples

from tiny_libero_recipe.fit import PolicyTrainer


def _losses(run: Path) -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


pytestmark = pytest.mark.gpu


def test_a_policy_takes_the_same_steps_as_on_the_cpu(tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    losses = []
    for device in ("cpu", "cuda"):
        trainer = PolicyTrainer(
            fit_config(20), CONFIG, made_up_samples(), TOKENIZER, torch.device(device)
        )
        trainer.run(tmp_path / device)
        losses.append(_losses(tmp_path / device))
    assert np.allclose(*losses, rtol=0.02)
