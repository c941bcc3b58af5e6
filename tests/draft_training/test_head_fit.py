"""Heads learn, resume to the bit, share batches between processes, and come back from disk."""

import errno
import json
import os
import random
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from deft_draft_training.errors import DataError, ResumeError, StorageError, TrainingError
from deft_draft_training.heads.evaluate import DraftSetup, _warning, evaluate, held_out_frames
from deft_draft_training.heads.export import export_head, load_any_head, load_fitted
from deft_draft_training.heads.fit import (
    HeadFitConfig,
    HeadKind,
    HeadTrainer,
    RecordedSamples,
    choose_steps,
    split_by_episode,
)
from deft_draft_training.heads.loss import HeadLossConfig, earth_movers
from deft_draft_training.heads.record import RecordConfig, record
from deft_draft_training.heads.samples import EpisodeSource
from deft_draft_training.optimizer import OptimizerConfig, TrainingPrecision
from deft_draft_training.run_directory import SPLIT_FILE, STATE_FILE, RunDirectory
from deft_draft_training.trainer import FitConfig
from deft_policies.checkpoint.drafts import HeadLayout
from deft_policies.decoding import kinds
from deft_policies.decoding.planner import DraftModels
from deft_policies.model.formats import Precision
from tests.demonstrations import write_demonstrations
from tests.draft_training.golden_target import tiny_target

CONFIG = HeadFitConfig(
    optimizer=OptimizerConfig(rate=2e-3, clip=1.0, warm_up_steps=5),
    loss=HeadLossConfig(distance=1.0, test_steps=2),
    steps=30,
    batch_size=4,
    held_out_share=0.3,
    save_every=10,
    log_every=10,
)
KILLED = replace(CONFIG, steps=24, save_every=5, log_every=5)
NEVER = -1
ENVIRONMENT = {
    **os.environ,
    "PYTHONPATH": os.pathsep.join(sys.path),
    "OMP_NUM_THREADS": "1",
    "PYTHONFAULTHANDLER": "1",  # a process that aborts says where
}


@pytest.fixture(scope="module")
def demos(tmp_path_factory):
    return write_demonstrations(tmp_path_factory.mktemp("demos"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory, demos):
    folder = tmp_path_factory.mktemp("shards")
    record(tiny_target(), RecordConfig(EpisodeSource((demos,)), samples_per_shard=5), folder)
    return folder


def trainer(shards: Path, config: HeadFitConfig) -> HeadTrainer:
    target = tiny_target()
    return HeadTrainer(config, target, RecordedSamples(shards, target.fingerprint()))


def losses(directory: Path) -> list[str]:
    return (directory / "metrics.jsonl").read_text().splitlines()


def values(name: str, directory: Path) -> list[float]:
    return [json.loads(line)[name] for line in losses(directory)]


@pytest.mark.parametrize("kind", [HeadKind.EAGLE, HeadKind.MEDUSA])
def test_fitting_lowers_the_loss(tmp_path, shards, kind):
    config = replace(CONFIG, kind=kind)
    trainer(shards, config).run(tmp_path / "run")
    first, *_, last = values("loss", tmp_path / "run")
    assert last < 0.9 * first


@pytest.mark.parametrize("kind", [HeadKind.EAGLE, HeadKind.MEDUSA])
def test_a_head_of_a_bfloat16_target_is_fitted_in_either_precision(tmp_path, demos, kind):
    target = tiny_target(Precision.BFLOAT16)
    record(target, RecordConfig(EpisodeSource((demos,))), tmp_path / "shards")
    for precision in TrainingPrecision:
        config = replace(CONFIG, kind=kind, precision=precision)
        store = RecordedSamples(tmp_path / "shards", target.fingerprint())
        run = tmp_path / precision.value
        head = HeadTrainer(config, target, store).run(run)
        assert {one.dtype for one in head.parameters()} == {torch.float32}
        first, *_, last = values("loss", run)
        assert last < 0.9 * first
        loaded = load_any_head(run, target)
        assert {one.dtype for one in loaded.parameters()} == {torch.bfloat16}


def test_a_fit_that_is_killed_twice_ends_with_the_same_weights(tmp_path, shards):
    """All in processes of their own: to the bit means with as many threads, too."""
    killed_at = sorted(random.Random(6).sample(range(KILLED.steps), 2))
    endings = [fit_and_die(shards, tmp_path / "cut", step) for step in [*killed_at, NEVER]]
    assert endings == [-signal.SIGKILL] * 2 + [0]
    assert fit_and_die(shards, tmp_path / "whole", NEVER) == 0
    whole, cut = (torch.load(tmp_path / name / STATE_FILE) for name in ("whole", "cut"))
    assert (whole["step"], cut["step"]) == (KILLED.steps, KILLED.steps)
    for name, weight in whole["module"].items():
        assert torch.equal(weight, cut["module"][name]), name
    assert losses(tmp_path / "whole") == losses(tmp_path / "cut")


def fit_and_die(shards: Path, run: Path, killed_at: int) -> int:
    """Fit in a process that kills itself before a step; return how it ended."""
    script = str(Path(__file__).with_name("killed_fit.py"))
    command = [sys.executable, script, str(shards), str(run), str(killed_at)]
    return subprocess.run(command, env=ENVIRONMENT, check=False, timeout=120).returncode


def test_a_full_disk_is_named_and_the_run_goes_on_when_there_is_room(
    tmp_path, shards, monkeypatch: pytest.MonkeyPatch
):
    whole = trainer(shards, KILLED).run(tmp_path / "whole")
    with monkeypatch.context() as patch:
        synced = iter(range(6))  # the small files and the first state still fit, with their names

        def sync(number: int) -> None:
            if next(synced, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "fsync", sync)
        with pytest.raises(StorageError, match=r"state\.pt.*No space"):
            trainer(shards, KILLED).run(tmp_path / "cut")
    left = sorted(one.name for one in (tmp_path / "cut").iterdir())
    assert left == ["config.json", "metrics.jsonl", "split.json", "state.pt"]
    resumed = trainer(shards, KILLED).run(tmp_path / "cut")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_another_configuration_does_not_resume(tmp_path, shards):
    trainer(shards, replace(CONFIG, steps=1)).run(tmp_path)
    with pytest.raises(ResumeError, match="batch_size"):
        trainer(shards, replace(CONFIG, steps=1, batch_size=2)).run(tmp_path)


@pytest.mark.parametrize(
    ("num_samples", "steps", "warm_up_steps"), [(96, 600, 60), (65_000, 20_000, 2_000)]
)
def test_steps_follow_from_the_number_of_samples(num_samples, steps, warm_up_steps):
    chosen = choose_steps(HeadFitConfig(), num_samples)
    assert (chosen.steps, chosen.optimizer.warm_up_steps) == (steps, warm_up_steps)
    assert choose_steps(CONFIG, num_samples) == CONFIG
    with pytest.raises(ValueError, match="at least 1"):
        HeadFitConfig(steps=-1)
    with pytest.raises(ValueError, match="at least 1"):
        FitConfig(steps=0)


def test_judging_says_how_many_actions_are_left(demos, capsys, monkeypatch):
    monkeypatch.setattr("deft_policies.progress._LINE_EVERY_S", 0.0)
    frames = held_out_frames(EpisodeSource((demos,)))
    setups = [DraftSetup(kind, (kind,)) for kind in (kinds.PREVIOUS, kinds.EXTRAPOLATION)]
    assert len(list(evaluate(tiny_target().policy, frames, setups, [0, 9]))) == 4
    total = sum(map(len, frames))
    told = capsys.readouterr().err
    assert f"previous r=0: {total} of {total} actions, about 0 s left" in told
    assert f"extrapolation r=9: 1 of {total} actions, about " in told


def test_two_processes_take_the_steps_that_one_takes(tmp_path, shards):
    config = replace(CONFIG, steps=6, log_every=1)
    trainer(shards, config).run(tmp_path / "one")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    script = Path(__file__).with_name("two_processes.py")
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    started = [
        subprocess.Popen(
            [sys.executable, str(script), str(shards), str(tmp_path / "two")],
            env={**ENVIRONMENT, **address, "RANK": str(rank)},
        )
        for rank in range(2)
    ]
    assert [one.wait(timeout=120) for one in started] == [0, 0]
    ones, twos = values("loss", tmp_path / "one"), values("loss", tmp_path / "two")
    for alone, shared in zip(ones, twos, strict=True):
        assert abs(alone - shared) < 1e-4


def test_a_head_that_has_learnt_the_target_drafts_longer_paths(tmp_path, demos, shards):
    """Memorising a dozen actions is enough: what is judged is the way from loss to decoder."""
    config = replace(CONFIG, steps=100, held_out_share=0.1, loss=HeadLossConfig(noise=0.0))
    fresh, fitted = trainer(shards, config), trainer(shards, config)
    fitted.run(tmp_path / "run")
    setups = [
        DraftSetup(name, (kinds.HEAD,), DraftModels(head=one.net.eval()))
        for name, one in (("fresh", fresh), ("fitted", fitted))
    ]
    frames = held_out_frames(EpisodeSource((demos,)))
    scores = list(evaluate(tiny_target().policy, frames, setups, [0]))
    assert scores[1].committed_length > scores[0].committed_length + 0.5
    assert scores[1].passes < scores[0].passes
    assert all(one.relaxed_share == 0.0 for one in scores)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        (HeadKind.EAGLE, HeadLayout.SAFETENSORS),
        (HeadKind.EAGLE, HeadLayout.PUBLISHED),
        (HeadKind.MEDUSA, HeadLayout.SAFETENSORS),
    ],
)
def test_an_exported_head_reads_back_and_is_never_overwritten(tmp_path, shards, kind, layout):
    head = trainer(shards, replace(CONFIG, kind=kind)).net
    export_head(head, tmp_path / "head", torch.bfloat16, layout)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["head"]
    with pytest.raises(TrainingError, match="never overwrites"):
        export_head(head, tmp_path / "head", torch.bfloat16, layout)


def test_no_episode_is_in_both_parts_of_a_split():
    episodes = np.repeat(np.arange(7), 3)
    train, held_out = split_by_episode(episodes, 0.3, seed=0)
    assert set(episodes[train]).isdisjoint(episodes[held_out])
    assert len(train) + len(held_out) == 21
    with pytest.raises(DataError, match="two episodes"):
        split_by_episode(np.zeros(4), 0.5, seed=0)


def test_earth_movers_distance_counts_how_far_the_mass_is():
    one, near, far = torch.eye(8)[[2, 3, 7]]
    assert earth_movers(near, one) == pytest.approx(1 / 8)
    assert earth_movers(far, one) == pytest.approx(5 / 8)
    assert earth_movers(one, one) == 0


def test_an_interrupted_fit_saves_and_goes_on_to_the_same_weights(tmp_path, shards):
    whole = trainer(shards, KILLED).run(tmp_path / "whole")
    cut = trainer(shards, KILLED)
    take = cut._step

    def interrupted_at_8(step: int) -> dict[str, float]:
        if step == 7:
            os.kill(os.getpid(), signal.SIGINT)
        return take(step)

    cut._step = interrupted_at_8
    with pytest.raises(KeyboardInterrupt, match="stopped and saved at step 8 of 24"):
        cut.run(tmp_path / "cut")
    assert torch.load(tmp_path / "cut" / STATE_FILE)["step"] == 8
    resumed = trainer(shards, KILLED).run(tmp_path / "cut")
    for name, weight in whole.state_dict().items():
        assert torch.equal(weight, resumed.state_dict()[name]), name


def test_a_fit_saves_at_least_ten_times(tmp_path, shards, monkeypatch: pytest.MonkeyPatch):
    saved: list[int] = []
    monkeypatch.setattr(RunDirectory, "save", lambda run, step, *_: saved.append(step))
    trainer(shards, replace(CONFIG, steps=20, save_every=500)).run(tmp_path)
    assert saved == list(range(2, 21, 2))


def test_a_head_judged_by_what_it_was_fitted_to_is_named(tmp_path, shards):
    trainer(shards, replace(CONFIG, steps=1)).run(tmp_path)
    split = json.loads((tmp_path / SPLIT_FILE).read_text())
    trained, held_out = frozenset(split["trained"]), frozenset(split["held_out"])
    assert trained | held_out == {0, 1, 2}
    assert not trained & held_out
    assert _warning(tmp_path, held_out) == ""
    one = next(iter(trained))
    assert f"was fitted to episodes {one} of its data" in _warning(tmp_path, frozenset({one}))
    assert "was fitted to episodes" in _warning(tmp_path, None)


def test_a_run_that_has_saved_nothing_is_no_head_yet(tmp_path, shards):
    target = tiny_target()
    (tmp_path / "run").mkdir()
    with pytest.raises(DataError, match="not a run of"):
        load_fitted(tmp_path / "run", target)
    (tmp_path / "run/config.json").write_text("{}")
    with pytest.raises(DataError, match="has saved nothing yet"):
        load_fitted(tmp_path / "run", target)
