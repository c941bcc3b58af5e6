import pytest
import torch
from torch import nn

from deft_draft_training.errors import ResumeError
from deft_draft_training.run_directory import RunDirectory


def build():
    module = nn.Linear(3, 2)
    return module, [torch.optim.AdamW(module.parameters(), lr=0.1)]


def learn(module, optimizers, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        module(torch.randn(4, 3, generator=generator)).square().mean().backward()
        optimizers[0].step()
        optimizers[0].zero_grad()


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    module, optimizers = build()
    learn(module, optimizers, range(5))
    with RunDirectory(tmp_path / "run", {"rate": 0.1}) as run:
        run.save(5, module, optimizers)
    learn(module, optimizers, range(5, 10))

    other, others = build()
    with RunDirectory(tmp_path / "run", {"rate": 0.1}) as run:
        step, _ = run.load(other, others)
    learn(other, others, range(step, 10))

    assert step == 5
    assert torch.equal(module.weight, other.weight)


def test_another_configuration_is_refused_by_the_keys_that_differ(tmp_path):
    RunDirectory(tmp_path, {"rate": 0.1, "steps": 3}).close()
    with pytest.raises(ResumeError, match="these differ: rate"):
        RunDirectory(tmp_path, {"rate": 0.2, "steps": 3})


def test_a_directory_has_one_training_at_a_time(tmp_path):
    config = {"rate": 0.1, "steps": 3}
    with RunDirectory(tmp_path, config):
        with pytest.raises(ResumeError, match="another training is writing"):
            RunDirectory(tmp_path, {**config, "steps": 9})
        RunDirectory(tmp_path, config, writes=False).close()  # a process of the same training
    RunDirectory(tmp_path, config).close()


def test_a_run_may_be_given_more_steps_but_not_fewer(tmp_path):
    for steps in (3, 5):
        RunDirectory(tmp_path, {"rate": 0.1, "steps": steps}).close()
    with pytest.raises(ResumeError, match="these differ: steps"):
        RunDirectory(tmp_path, {"rate": 0.1, "steps": 4})


def test_metrics_after_the_last_state_are_forgotten_on_resume(tmp_path):
    module, optimizers = build()
    with RunDirectory(tmp_path, {}) as run:
        run.log(1, {"loss": 2.0})
        run.save(1, module, optimizers)
        run.log(2, {"loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    with RunDirectory(tmp_path, {}) as run:
        run.load(module, optimizers)
    assert run.metrics() == [{"step": 1, "loss": 2.0}]


def test_a_run_without_a_state_starts_with_empty_metrics(tmp_path):
    """Its torn last line was glued to the next one, and no metrics could be read any more."""
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    with RunDirectory(tmp_path, {}) as run:
        run.load(*build())
        run.log(1, {"loss": 1.5})
    assert run.metrics() == [{"step": 1, "loss": 1.5}]


def test_how_often_a_run_saves_may_change(tmp_path):
    RunDirectory(tmp_path, {"steps": 9, "save_every": 3, "log_every": 1}).close()
    RunDirectory(tmp_path, {"steps": 9, "save_every": 1, "log_every": 2}).close()


def state_of_a_run(folder):
    module, optimizers = build()
    with RunDirectory(folder, {}) as run:
        run.log(1, {"loss": 2.0})
        run.save(1, module, optimizers)
    return (folder / "state.pt").read_bytes()


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_a_damaged_state_is_named(tmp_path, share):
    whole = state_of_a_run(tmp_path)
    (tmp_path / "state.pt").write_bytes(whole[: int(share * len(whole))])
    damaged = pytest.raises(ResumeError, match=r"state\.pt is damaged")
    with RunDirectory(tmp_path, {}) as run, damaged:
        run.load(*build())


def test_a_state_of_another_module_is_named(tmp_path):
    state_of_a_run(tmp_path)
    other = nn.Linear(5, 5)
    with RunDirectory(tmp_path, {}) as run, pytest.raises(ResumeError, match="another training"):
        run.load(other, [torch.optim.AdamW(other.parameters())])


@pytest.mark.parametrize("text", ["", "{", "[1]", "[" * 100_000])
def test_a_damaged_configuration_is_named(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ResumeError, match=r"config\.json"):
        RunDirectory(tmp_path, {"steps": 3})


def test_damaged_metrics_are_named(tmp_path):
    state_of_a_run(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("not a line}\n")
    with RunDirectory(tmp_path, {}) as run, pytest.raises(ResumeError, match=r"metrics\.jsonl"):
        run.load(*build())
