"""Heads and policies train on the GPU as they do on the CPU."""

from dataclasses import replace
from pathlib import Path

import pytest

from deft_draft_training.heads.export import load_any_head
from deft_draft_training.heads.fit import HeadKind, HeadTrainer, RecordedSamples
from deft_draft_training.heads.record import RecordConfig, record
from deft_draft_training.heads.samples import EpisodeSource
from deft_draft_training.optimizer import TrainingPrecision
from deft_policies.model.formats import Precision
from tests.demonstrations import write_demonstrations
from tests.draft_training.golden_target import tiny_target
from tests.draft_training.test_head_fit import CONFIG as HEAD_CONFIG
from tests.draft_training.test_head_fit import values

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("precision", list(TrainingPrecision))
@pytest.mark.parametrize("kind", list(HeadKind))
def test_a_head_is_fitted_and_resumes(
    tmp_path: Path, kind: HeadKind, precision: TrainingPrecision
) -> None:
    demos = write_demonstrations(tmp_path / "demos")
    target = tiny_target(Precision.BFLOAT16, "cuda")
    record(target, RecordConfig(EpisodeSource((demos,))), tmp_path / "shards")
    config = replace(HEAD_CONFIG, kind=kind, precision=precision, average_decay=0.9)
    store = RecordedSamples(tmp_path / "shards", target.fingerprint())
    HeadTrainer(config, target, store).run(tmp_path / "run")
    HeadTrainer(config, target, store).run(tmp_path / "run")  # nothing is left to do
    first, *_, last = values("loss", tmp_path / "run")
    assert last < 0.9 * first
    loaded = load_any_head(tmp_path / "run", target)
    assert {one.device.type for one in loaded.parameters()} == {"cuda"}
