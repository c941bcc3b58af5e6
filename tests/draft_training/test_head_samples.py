"""Recorded features are what the target computed, aligned with the tokens they lead to."""

import errno
import os

import pytest
import torch

from deft_draft_training.errors import DataError, StorageError
from deft_draft_training.heads.record import (
    INDEX,
    RecordConfig,
    estimate,
    iterate_shards,
    read_index,
    record,
)
from deft_draft_training.heads.samples import EpisodeSource, collate
from tests.draft_training.made_up import tiny_target, write_demonstrations


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_demonstrations(tmp_path_factory.mktemp("demos"))


@pytest.fixture(scope="module")
def samples(folder):
    found = list(EpisodeSource((folder,)).observations())[:5]
    return tiny_target().sample(
        [one.observation for one in found], [one.episode for one in found], torch.float32
    )


def test_the_targets_own_head_reads_its_answer_off_the_recorded_states(samples):
    head = tiny_target().policy.parts.target.decoder.head.weight
    for sample in samples:
        answers = (sample.hidden[sample.num_prompt - 1 :] @ head.T).argmax(dim=-1)
        assert answers.tolist() == sample.tokens.tolist()


def test_the_prompt_ends_where_the_answer_begins(samples):
    """Spec-VLA's released data script left the answer in the prompt, for the head to copy."""
    encode = tiny_target().policy.parts.encoder.encode
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


def test_own_guesses_replace_every_action_state_but_the_first(samples):
    batch = collate(samples, tiny_target().table)
    marked = batch.with_guesses(torch.full_like(batch.hidden, 7.0))
    for row in range(len(samples)):
        first = int(batch.first[row])
        changed = (marked[row] == 7.0).all(dim=1).nonzero().flatten().tolist()
        assert changed == list(range(first + 1, first + batch.num_guesses))


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
    with pytest.raises(DataError, match=rf"{path.name} cannot be read"):
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
        with pytest.raises(StorageError, match=r"index\.json cannot be written: No space left"):
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
