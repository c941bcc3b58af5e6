"""Standard speculative decoding: another checkpoint drafts, with pictures and words of its own."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest

from deft_core.types import ActOptions, DecodeTrace, Observation
from deft_policies.base import PolicyRequest
from deft_policies.checkpoint.config import load_config
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.target import Prompt
from deft_policies.errors import CheckpointError, RequestError
from deft_policies.families.loading import load_policy
from deft_policies.families.openvla import OpenVLA
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.model.sizes import OpenVLAConfig, find_action_tokens
from deft_policies.model.statistics import ActionStatistics
from tests import golden
from tests.policies.checkpoint.checkpoint_files import random_tensors
from tests.tiny_openvla import tiny_config
from tiny_libero_recipe.checkpoint_writer import write_checkpoint
from tiny_libero_recipe.tokenizer import build_tokenizer

KEY = "libero_spatial"
GOLDEN = ModelOptions(
    checkpoint=str(golden.TINY_OPENVLA), statistics_key=KEY, device="cpu", num_threads=1
)


@lru_cache(maxsize=1)
def golden_statistics() -> Mapping[str, ActionStatistics]:
    return load_config(golden.TINY_OPENVLA).statistics


def written(directory: Path, config: OpenVLAConfig) -> Path:
    """A checkpoint of random weights: smaller pictures, another width, another tokenizer."""
    tokenizer = build_tokenizer(["pick up the red mug"])
    directory.parent.mkdir(exist_ok=True)
    write_checkpoint(directory, config, random_tensors(config), tokenizer)
    return directory


def tiny(directory: Path, **changes: object) -> Path:
    config = replace(tiny_config(), statistics={KEY: golden_statistics()[KEY]})
    return written(directory / "draft", replace(config, **changes))  # type: ignore[arg-type]


def act(policy: VlaPolicy, decoding: str, batch: int = 1) -> list[DecodeTrace]:
    """Two steps of robots that look at different pictures."""
    cases = golden.cases_with_image()[:batch]
    memories, traces = [SessionMemory()] * batch, []
    for _ in range(2):
        answers = policy.act(
            [
                PolicyRequest(
                    Observation(case.image(), case.instruction),
                    memory,
                    ActOptions(statistics_key=KEY, decoding=decoding),
                )
                for case, memory in zip(cases, memories, strict=True)
            ]
        )
        memories = [answer.memory for answer in answers]
        traces += [answer.chunk.trace for answer in answers if answer.chunk.trace]
    return traces


def test_the_same_checkpoint_drafts_what_the_target_says() -> None:
    policy = load_policy(replace(GOLDEN, draft_model=str(golden.TINY_OPENVLA)))
    traces = act(policy, "small-model:tree=chain+6,whole_vocabulary=on", batch=2)
    assert [trace.accepted_lengths for trace in traces] == [(0, 5)] * 4
    assert policy.info.details["draft model"] == str(golden.TINY_OPENVLA)


@pytest.mark.parametrize("method", ["small-model", "specvlm", "fly:theta=10", "pld"])
def test_another_model_changes_no_answer_that_is_judged_exactly(
    method: str, tmp_path: Path
) -> None:
    policy = load_policy(replace(GOLDEN, draft_model=str(tiny(tmp_path))))
    plain = act(policy, "autoregressive", batch=3)
    drafted = act(policy, method, batch=3)
    assert [one.tokens for one in drafted] == [one.tokens for one in plain]
    named = {name for trace in drafted for one in trace.passes for name in one.sources if name}
    assert named == {"ngram" if method == "pld" else "small-model"}


def test_the_draft_model_looks_at_no_frame_that_it_does_not_draft_for(tmp_path: Path) -> None:
    policy = load_policy(replace(GOLDEN, draft_model=str(tiny(tmp_path))))
    counted: list[str] = []

    class Counting(OpenVLA):
        def see(self, observations: Sequence[Observation], clock: StageClock) -> list[Prompt]:
            counted.extend(one.instruction for one in observations)
            return super().see(observations, clock)

    assert isinstance(policy.model, OpenVLA)
    assert policy.model.draft is not None
    own = policy.model.draft
    policy.model.draft = Counting(own.target, own.encode, own.images, own.statistics)
    watched = VlaPolicy(policy.model, drafts=policy.drafts)
    act(watched, "autoregressive")
    act(watched, "pld")
    assert counted == []
    act(watched, "small-model")
    assert len(counted) == 2


def test_rows_that_decode_differently_see_their_own_pictures(tmp_path: Path) -> None:
    """Several methods share a pass; the draft model's prompts go to the rows that draft."""
    policy = load_policy(replace(GOLDEN, draft_model=str(golden.TINY_OPENVLA)))
    cases = golden.cases_with_image()[:3]
    methods = ["autoregressive", "small-model:whole_vocabulary=on", "autoregressive"]
    answers = policy.act(
        [
            PolicyRequest(
                Observation(case.image(), case.instruction),
                options=ActOptions(statistics_key=KEY, decoding=method),
            )
            for case, method in zip(cases, methods, strict=True)
        ]
    )
    trace = answers[1].chunk.trace
    assert trace is not None
    assert trace.accepted_lengths == (0, 5)


def test_a_draft_model_whose_actions_mean_something_else_is_refused(tmp_path: Path) -> None:
    wide = find_action_tokens(text_vocab_size=320, num_bins=128)
    with pytest.raises(CheckpointError, match="128 bins.*256"):
        load_policy(replace(GOLDEN, draft_model=str(tiny(tmp_path / "a", action_tokens=wide))))
    ours = golden_statistics()[KEY]
    other = {KEY: replace(ours, high=ours.high * 2 + 1)}
    with pytest.raises(CheckpointError, match="'libero_spatial'"):
        load_policy(replace(GOLDEN, draft_model=str(tiny(tmp_path / "b", statistics=other))))
    elsewhere = {"elsewhere": ours}
    with pytest.raises(CheckpointError, match="elsewhere"):
        load_policy(replace(GOLDEN, draft_model=str(tiny(tmp_path / "c", statistics=elsewhere))))
    with pytest.raises(CheckpointError, match="one small model"):
        load_policy(replace(GOLDEN, draft_model=str(tmp_path), self_draft_layers=1))


def test_an_instruction_too_long_for_the_draft_model_is_refused(tmp_path: Path) -> None:
    config = tiny_config()
    short = replace(config.llm, max_positions=64)
    policy = load_policy(replace(GOLDEN, draft_model=str(tiny(tmp_path, llm=short))))
    observation = Observation(np.zeros((8, 8, 3), dtype=np.uint8), "x" * 60)
    with pytest.raises(RequestError, match="fit with"):
        policy.check(observation, ActOptions(statistics_key=KEY))
