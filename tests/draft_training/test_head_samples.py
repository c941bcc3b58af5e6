"""Recorded features are what the target computed, aligned with the tokens they lead to."""

import argparse
import errno
import os

import pytest
import torch

from deft_draft_training.commands.target import parse_target
from deft_draft_training.errors import ConfigError, DataError, StorageError
from deft_draft_training.heads.evaluate import _setup
from deft_draft_training.heads.loss import HeadLossConfig, head_losses
from deft_draft_training.heads.record import (
    INDEX,
    RecordConfig,
    estimate,
    iterate_shards,
    read_index,
    record,
)
from deft_draft_training.heads.samples import EpisodeSource, collate
from deft_draft_training.heads.target import load_target
from deft_policies.decoding.plan import KeyMask, RopeOffset
from deft_policies.model.draft_heads import EagleHead, head_sizes
from tests.demonstrations import write_demonstrations
from tests.draft_training.golden_target import tiny_target
from tests.golden import TINY_OPENVLA, cases, write_draft_head


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_demonstrations(tmp_path_factory.mktemp("demos"))


@pytest.fixture(scope="module")
def samples(folder):
    found = list(EpisodeSource((folder,)).observations())[:5]
    return tiny_target().sample([one for _, one in found], [one for one, _ in found], torch.float32)


def test_the_targets_own_head_reads_its_answer_off_the_recorded_states(samples):
    head = tiny_target().policy.model.network.decoder.head.weight
    for sample in samples:
        answers = (sample.hidden[sample.num_prompt - 1 :] @ head.T).argmax(dim=-1)
        assert answers.tolist() == sample.tokens.tolist()


def test_the_prompt_ends_where_the_answer_begins(samples):
    """Spec-VLA's released data script left the answer in the prompt, for the head to copy."""
    encode = tiny_target().policy.model.encode
    prompts = {tuple(encode(text)) for text in ("pick up the butter", "open the top drawer")}
    assert {tuple(one.prompt_ids.tolist()) for one in samples} <= prompts


def test_guesses_that_count_are_those_that_lead_to_the_later_tokens(samples):
    target = tiny_target()
    batch = collate(samples, target.table)
    said = target.logits(batch.at_guesses(batch.targets)).argmax(dim=-1) + target.actions.first
    inside = target.actions.contains(batch.tokens[:, 1:])
    assert inside.any()
    assert torch.equal(said[inside], batch.tokens[:, 1:][inside])


def test_each_embedding_stands_one_position_ahead_of_its_hidden_state(samples):
    target = tiny_target()
    batch = collate(samples, target.table)
    for row, sample in enumerate(samples):
        first = int(batch.first[row])
        torch.testing.assert_close(batch.hidden[row, first], sample.hidden[first])
        torch.testing.assert_close(batch.embeds[row, first], target.table[sample.tokens[0]])


def test_a_head_goes_on_from_its_own_guesses_as_it_does_in_a_tree(samples):
    """Beside whole sequences, one for every chain: true states, then the head's own outputs."""
    target = tiny_target()
    batch = collate(samples, target.table)
    torch.manual_seed(3)
    head = EagleHead(head_sizes(target.width, 48, 2, 2)).requires_grad_(False)
    guesses = [batch.at_guesses(head(batch.embeds, batch.hidden))]
    for step in (1, 2, 3):
        told = head(*batch.going_on(guesses))
        guesses.append(told[:, -batch.num_guesses :])
        for row in range(len(samples)):
            for place in range(step, batch.num_guesses):
                end = int(batch.first[row]) + place
                hidden = batch.hidden[row].clone()
                for index in range(end - step, end):  # guess by guess behind what was committed
                    seen = head(batch.embeds[row : row + 1, : index + 1], hidden[None, : index + 1])
                    hidden[index + 1] = seen[0, -1]
                slow = head(batch.embeds[row : row + 1, : end + 1], hidden[None, : end + 1])
                torch.testing.assert_close(
                    guesses[step][row, place], slow[0, -1], atol=1e-4, rtol=1e-4
                )


def test_recording_goes_on_where_it_stopped(tmp_path, folder):
    target = tiny_target()
    config = RecordConfig(EpisodeSource((folder,)), batch_size=2, samples_per_shard=4)
    whole = record(target, config, tmp_path / "whole")
    record(target, config, tmp_path / "cut")
    cut = read_index(tmp_path / "cut")
    (tmp_path / "cut" / cut.shards[-1].name).unlink()
    text = (tmp_path / "cut" / INDEX).read_text()
    last = text[text.rindex(",\n  {") : text.rindex("\n ]")]
    (tmp_path / "cut" / INDEX).write_text(text.replace(last, ""))
    assert record(target, config, tmp_path / "cut") == whole
    assert whole.num_samples == estimate(target, config)[0] == 12


def test_damaged_missing_and_foreign_features_are_refused_by_name(tmp_path, folder):
    target = tiny_target()
    config = RecordConfig(EpisodeSource((folder,)), samples_per_shard=6)
    index = record(target, config, tmp_path)
    with pytest.raises(DataError, match="another checkpoint"):
        list(iterate_shards(tmp_path, "0" * 64))
    path = tmp_path / index.shards[1].name
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(DataError, match=rf"{path.name} is damaged"):
        list(iterate_shards(tmp_path, index.fingerprint))
    path.unlink()
    with pytest.raises(DataError, match=rf"{path.name}"):
        list(iterate_shards(tmp_path, index.fingerprint))
    with pytest.raises(DataError, match=r"index.json is missing"):
        read_index(tmp_path / "elsewhere")


def test_a_full_disk_leaves_what_was_recorded_and_recording_goes_on(
    tmp_path, folder, monkeypatch: pytest.MonkeyPatch
):
    target = tiny_target()
    config = RecordConfig(EpisodeSource((folder,)), batch_size=2, samples_per_shard=4)
    with monkeypatch.context() as patch:
        synced = iter(
            range(6)
        )  # a shard, the index, a shard that it never names; file and folder each

        def sync(number: int) -> None:
            if next(synced, None) is None:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        patch.setattr(os, "fsync", sync)
        with pytest.raises(StorageError, match=r"index\.json.*No space"):
            record(target, config, tmp_path / "cut")
    assert read_index(tmp_path / "cut").num_samples == 4
    whole = record(target, config, tmp_path / "whole")
    assert record(target, config, tmp_path / "cut") == whole


def test_shards_end_before_they_outgrow_memory(tmp_path, folder, monkeypatch: pytest.MonkeyPatch):
    target = tiny_target()
    _, bytes_per_sample = estimate(target, RecordConfig(EpisodeSource((folder,))))
    monkeypatch.setattr("deft_draft_training.heads.record._SHARD_BYTES", 3 * bytes_per_sample)
    index = record(target, RecordConfig(EpisodeSource((folder,)), batch_size=2), tmp_path)
    assert [one.num_samples for one in index.shards] == [4, 4, 4]


def test_evaluation_runs_a_head_by_the_conventions_of_the_flags(tmp_path):
    parser = argparse.ArgumentParser()
    key = cases()[0].statistics_key
    given = parse_target(
        parser,
        [
            f"--checkpoint={TINY_OPENVLA}",
            f"--statistics-key={key}",
            "--draft-rope=published",
            "--draft-key-mask=prefix-only",
        ],
    )
    setup = _setup(write_draft_head(tmp_path / "head"), load_target(given), None)
    assert setup.models.head is not None
    assert setup.models.rope_offset is RopeOffset.PUBLISHED
    assert setup.models.key_mask is KeyMask.PREFIX_ONLY


def test_a_head_may_learn_to_leave_the_other_tokens_alone(samples):
    """`spec-vla` drafts over all 32,064 rows; of most, a head that learnt 256 says nothing."""
    target = tiny_target()
    batch = collate(samples, target.table)
    losses = {}
    for is_whole in (False, True):
        torch.manual_seed(1)
        head = EagleHead(head_sizes(target.width, 48, 2, 2))
        config = HeadLossConfig(
            regression=0.0, distillation=1.0, whole_vocabulary=is_whole, noise=0.0
        )
        logits = target.every_logit if is_whole else target.logits
        optimizer = torch.optim.Adam(head.parameters(), lr=3e-3)
        for _ in range(40):
            optimizer.zero_grad()
            head_losses(head, logits, batch, config)["loss"].backward()
            optimizer.step()
        with torch.no_grad():
            judged = head_losses(head, target.every_logit, batch, config)
        losses[is_whole] = float(judged["distillation"])
    assert losses[True] < losses[False] - 0.5


@pytest.mark.parametrize("counts", [{"batch_size": 0}, {"samples_per_shard": -1}])
def test_counts_below_one_are_refused_before_anything_is_read(tmp_path, counts):
    with pytest.raises(ConfigError, match="at least 1"):
        RecordConfig(EpisodeSource((tmp_path,)), **counts)
