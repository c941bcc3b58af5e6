"""The recorder that stands for CUDA graphs finds what would be wrong on a GPU."""

import gc

import pytest
import torch

from tests.fake_graphs import frozen


def test_a_replay_repeats_operations_on_new_inputs_and_on_memory_outside() -> None:
    kept = torch.ones(3)
    captured = frozen(lambda values: ((values * 2 + kept).cumsum(0),), torch.zeros(3))
    captured.inputs[0].fill_(1.0)
    kept.fill_(5.0)
    captured.replay()
    assert captured.outputs[0].tolist() == [7.0, 14.0, 21.0]


def test_python_of_the_step_does_not_run_again() -> None:
    calls: list[int] = []

    def step(values: torch.Tensor) -> tuple[torch.Tensor]:
        calls.append(1)
        return (values + len(calls),)

    captured = frozen(step, torch.zeros(1))
    captured.replay()
    assert calls == [1]
    assert captured.outputs[0].item() == 1.0


def test_reading_a_tensor_that_died_is_an_error() -> None:
    holder = [torch.ones(2)]
    captured = frozen(lambda values: (values + holder[0],), torch.zeros(2))
    captured.replay()
    holder.clear()
    gc.collect()
    with pytest.raises(RuntimeError, match="outside the recording"):
        captured.replay()


def test_waiting_for_the_device_inside_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="makes the host wait"):
        frozen(lambda values: (values * values.sum().item(),), torch.zeros(2))
