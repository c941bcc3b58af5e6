"""A policy that shares what methods compute of a frame answers as one that computes it anew."""

import pytest

from deft_client.types import ActOptions
from deft_policies.base import ActRequest
from deft_policies.benchmark.replay import generate_frames
from deft_policies.commands.parse import load_by_words
from deft_policies.memory import SessionMemory
from deft_policies.openvla.shared_frames import sharing_frames

METHODS = (
    "autoregressive",
    "lossless",
    "deft",
    "spec-vla-published",
    "within-bins:drafts=previous",
    "lvspec",
    "lossless:drafts=medusa",
    "small-model",
    "spec-vla:radius=1",
    "spec-vla:radius=2",
)


@pytest.fixture(scope="module")
def policies():
    policy = load_by_words(
        "tiny-libero", "--threads", "1", "--no-guard", "--self-draft-layers", "1"
    )
    return policy, sharing_frames(policy)


def answers(policy, batches, turns):
    """What every method says to batch after batch, the methods taking `turns`."""
    memories = {method: [SessionMemory()] * len(batches[0]) for method in turns}
    said = {method: [] for method in turns}
    for batch in batches:
        for method in turns:
            given = policy.act(
                [
                    ActRequest(frame.observation, memory, ActOptions(decoding=method))
                    for frame, memory in zip(batch, memories[method], strict=True)
                ]
            )
            memories[method] = [one.memory for one in given]
            said[method] += [
                (trace.tokens, trace.predicted, trace.accepted_lengths, trace.num_passes)
                for trace in (one.chunk.trace for one in given)
            ]
    return said


def test_every_method_decodes_the_same_tokens_in_the_same_passes(policies):
    frames = generate_frames(24, size=200)
    # Rows of a batch are ten frames apart: their instructions differ in length.
    batches = [[frames[step], frames[step + 10], frames[step + 14]] for step in range(6)]
    plainly, sharing = (answers(policy, batches, METHODS) for policy in policies)
    assert sharing == plainly
    assert any(1 in {said[3] for said in plainly[method]} for method in METHODS)


def test_what_one_method_leaves_behind_changes_nothing_for_the_next(policies):
    frames = generate_frames(4, size=200)
    batches, turns = [[frame] for frame in frames], METHODS[:4]
    _, sharing = policies
    forth = answers(sharing, batches, turns)
    assert answers(sharing, batches, turns[::-1]) == forth


def test_rows_of_a_batch_that_have_come_apart_are_decoded_as_ever(policies):
    frames = generate_frames(24, size=200)
    batches = [[frames[step], frames[step + 3]] for step in range(4)]
    plainly, sharing = (answers(policy, batches, ("lossless", "deft")) for policy in policies)
    assert sharing == plainly


def test_a_frame_that_comes_again_is_looked_at_once(policies):
    frames = generate_frames(2, size=200)
    _, sharing = policies
    sharing.act([ActRequest(frames[0].observation)])
    again = sharing.act([ActRequest(frames[0].observation)])[0].chunk
    other = sharing.act([ActRequest(frames[1].observation)])[0].chunk
    assert (again.timings.vision_ms, again.timings.prepare_ms) == (0, 0)
    assert other.timings.vision_ms > 0
