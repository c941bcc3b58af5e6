"""VLA-0's reference answers, of whole policies: tokens, texts, actions and errors are equal."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest
from deft_policies.commands import act
from deft_policies.commands.act import Case, answer_cases
from deft_policies.decoding.acceptance.numbers import SPACE
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.trace import PassRecord
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import CheckpointError, RequestError
from deft_policies.families.loading import examine, load_policy, open_model
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.families.vla0.model import RepetitionPenalty, Vla0
from deft_policies.memory import SessionMemory
from deft_policies.model.formats import Precision, Quantization
from tests.draws import draws, some
from tests.golden_vla0 import GOLDEN, VARIANTS, cameras, variant

MOST_PASSES = {"tied": 40, "untied": 28}  # of a later frame, on average


@cache
def policy_of(name: str, decoding: str) -> VlaPolicy:
    options = ModelOptions(
        checkpoint=str(GOLDEN / name), precision=Precision.FLOAT32, decoding=decoding
    )
    return load_policy(replace(options, is_guarded=False))


def model_of(name: str) -> Vla0:
    model = policy_of(name, "autoregressive").model
    assert isinstance(model, Vla0)
    return model


def answers(
    policy: VlaPolicy,
    frames: Sequence[dict[str, Any]],
    instruction: str | None = None,
    batch: int = 1,
) -> list[dict[str, Any]]:
    """As `deft act` writes them; frames with an instruction in common are a session."""
    cases = [
        Case(
            one["instruction"] if instruction is None else instruction,
            str(GOLDEN / one["images"][0]),
            tuple(str(GOLDEN / name) for name in one["images"][1:]),
            session_id=None if instruction is None else "session",
            max_tokens=one["max_new_tokens"],
        )
        for one in frames
    ]
    return [json.loads(line) for line in answer_cases(policy, cases, batch)]


def check(answered: dict[str, Any], frame: dict[str, Any]) -> None:
    assert answered["tokens"] == frame["generated_ids"]
    assert answered["text"] == frame["text"]
    assert ("error" in answered) == (not frame["valid"])
    assert answered["actions"] == (frame["actions"] if frame["valid"] else [])
    assert answered["passes"] <= len(frame["generated_ids"])


@pytest.mark.parametrize("name", [pytest.param("untied", marks=pytest.mark.promise), "tied"])
def test_lossless_answers_single_frames_together_as_the_original_does(name: str) -> None:
    cases = variant(name)["cases"]
    for answered, frame in zip(
        answers(policy_of(name, "lossless"), cases, batch=4), cases, strict=True
    ):
        check(answered, frame)


@pytest.mark.parametrize("name", VARIANTS)
def test_lossless_writes_sessions_in_few_passes(name: str) -> None:
    passes = []
    for session in variant(name)["sessions"]:
        frames = session["frames"]
        found = answers(policy_of(name, "lossless"), frames, session["instruction"])
        for answered, frame in zip(found, frames, strict=True):
            check(answered, frame)
        passes += [one["passes"] for one in found[1:]]
    assert np.mean(passes) <= MOST_PASSES[name]


@pytest.mark.parametrize("name", VARIANTS)
def test_a_guarded_answer_takes_few_passes_where_narrow_ones_pay(name: str) -> None:
    """Passes are narrow, in the prefill, too, until old numbers stand one after the other."""
    policy = load_policy(ModelOptions(checkpoint=str(GOLDEN / name), decoding="lossless"))
    policy.engine.planner.text_width = 8  # as a warm-up would find
    num_passes, widths = [], []
    for session in variant(name)["sessions"]:
        memory = SessionMemory()
        for frame in session["frames"]:
            shown = observe({**frame, "instruction": session["instruction"]})
            request = PolicyRequest(shown, memory, ActOptions(want_trace=True))
            answer = policy.act([request])[0]
            trace, memory = answer.chunk.trace, answer.memory
            assert trace is not None
            assert trace.tokens == tuple(frame["generated_ids"])
            if frame is not session["frames"][0]:
                num_passes.append(trace.num_passes)
                widths += [(len(one.tokens), one.is_prefill) for one in trace.passes]
    assert np.mean(num_passes) <= MOST_PASSES[name]
    assert max(width for width, is_prefill in widths if is_prefill) == 8
    assert max(width for width, _ in widths) > 64


@pytest.mark.parametrize("decoding", ["autoregressive", "lossless", "numbers"])
def test_rows_are_told_once_their_numbers_are_committed(decoding: str) -> None:
    policy, session = policy_of("untied", decoding), variant("untied")["sessions"][0]
    memory = SessionMemory()
    for frame in session["frames"][:2]:
        told: list[NDArray[np.float64]] = []
        shown = observe({**frame, "instruction": session["instruction"]})
        request = PolicyRequest(shown, memory, on_actions=told.append)
        answer = policy.act([request])[0]
        actions, memory = answer.chunk.actions.tolist(), answer.memory
        assert [one.tolist() for one in told] == [actions[: len(one)] for one in told]
        lengths = list(map(len, told))
        assert lengths == sorted(set(lengths))
        assert lengths == [*range(1, 8)] or decoding != "autoregressive"
        assert lengths


def check_plain(name: str) -> None:
    policy, cases = policy_of(name, "autoregressive"), variant(name)["cases"]
    for answered, frame in zip(answers(policy, cases), cases, strict=True):
        check(answered, frame)
        assert answered["passes"] == len(frame["generated_ids"])
    for session in some(variant(name)["sessions"], 1):  # a pass for every token takes long
        frames = session["frames"]
        for answered, frame in zip(
            answers(policy, frames, session["instruction"]), frames, strict=True
        ):
            check(answered, frame)


def test_plain_answers_are_the_originals() -> None:
    check_plain("untied")


def test_plain_answers_with_a_penalty_are_the_originals() -> None:
    check_plain("tied")


def observe(frame: dict[str, Any]) -> Observation:
    image, *wrists = cameras(frame)
    return Observation(image, frame["instruction"], {"wrist": wrists[0]})


@pytest.mark.parametrize("name", VARIANTS)
def test_first_logits_and_what_the_penalty_makes_of_them(name: str) -> None:
    model = model_of(name)
    columns = [model.network.config.answer_ids.index(one) for one in variant(name)["allowed_ids"]]
    for expected in variant(name)["first_step"]:
        frame = variant(name)["cases"][expected["case"]]
        with torch.inference_mode():
            (prompt,) = model.see([observe(frame)], StageClock(torch.device("cpu")))
            (logits,) = model.target.logits_along(prompt, 1)
            assert torch.allclose(
                logits[columns], torch.tensor(expected["logits"]), rtol=0, atol=1e-4
            )
            if prompt.grammar is not None:
                root = DraftTree.of_committed([prompt.last_token])
                logits = prompt.grammar.adjust(logits[None], answer_of(model), root)[0]
            assert torch.allclose(
                logits[columns], torch.tensor(expected["after_penalty"]), rtol=0, atol=1e-4
            )


def answer_of(model: Vla0, tokens: Sequence[int] = (), num_cached: int = 0) -> Answer:
    """An answer that has come so far; its prefill is over where it has tokens."""
    found = Answer(find_method("autoregressive"), model.specs["default"])
    found.tokens, found.num_cached = list(tokens), num_cached
    if tokens:
        root = DraftTree.of_committed([SPACE])
        found.records = [PassRecord(True, root, [tokens[0]], [0], tokens[0], [])]
    return found


def check_penalty(answer: Answer, tree: DraftTree, came: Sequence[set[int]]) -> None:
    """Of every node the tokens that came before are less likely, once each, and no others."""
    torch.manual_seed(0)
    logits = torch.randn(tree.num_nodes, 12)
    found = RepetitionPenalty(1.05, frozenset({7})).adjust(logits, answer, tree)
    for node, path in enumerate(came):
        for token in range(12):
            expected = float(logits[node, token])
            if token in path | {7}:
                expected = expected / 1.05 if expected > 0 else expected * 1.05
            assert float(found[node, token]) == pytest.approx(expected, rel=1e-6)


PARENTS = [-1, 0, 1, 0, 3]  # 3 4 and 5 3


def test_a_node_is_penalised_for_its_own_path_alone() -> None:
    tree = DraftTree([10, 3, 4, 5, 3], PARENTS, [""] * 5, is_chain=False)
    paths: list[set[int]] = [{10}, {10, 3}, {10, 3, 4}, {10, 5}, {10, 5, 3}]
    answer = answer_of(model_of("tied"), [1, 10], num_cached=1)
    check_penalty(answer, tree, [path | {1} for path in paths])


def test_what_rides_in_the_prefill_is_not_penalised_for_the_prompts_last_token() -> None:
    """That stands for a word which the decoder does not know."""
    tree = DraftTree([SPACE, 3, 4, 5, 3], PARENTS, [""] * 5, is_chain=False)
    check_penalty(answer_of(model_of("tied")), tree, [set(), {3}, {3, 4}, {5}, {5, 3}])


def test_drafts_change_no_answer_in_drawn_sessions() -> None:
    """Pictures, old answers and the rows that were executed are drawn; the first tokens count."""
    plain, lossless = policy_of("tied", "autoregressive"), policy_of("tied", "lossless")
    frame = observe(variant("tied")["cases"][0])
    for session in range(draws(20)):
        random = np.random.default_rng(session)
        image = random.integers(0, 256, frame.image.shape, np.uint8)
        memory = SessionMemory()
        for _ in range(2):
            shown = replace(frame, image=image)
            options = ActOptions(want_trace=True, max_tokens=int(random.integers(8, 25)))
            wanted = plain.act([PolicyRequest(shown, memory, options)])[0]
            moved = replace(options, executed_steps=int(random.integers(0, 9)))
            found = lossless.act([PolicyRequest(shown, memory, moved)])[0]
            assert wanted.chunk.trace is not None
            assert found.chunk.trace is not None
            assert found.chunk.trace.tokens == wanted.chunk.trace.tokens
            assert found.chunk.trace.num_passes <= wanted.chunk.trace.num_passes
            answer = np.array(found.memory.answer)
            drawn = random.integers(0, 11, len(answer))
            kept = np.where(random.random(len(answer)) < 0.2, drawn, answer)
            memory = replace(found.memory, answer=tuple(kept.tolist()))
            image = np.roll(image, 1, axis=1)


@pytest.mark.parametrize("name", VARIANTS)
def test_no_drafts_change_an_answer(name: str) -> None:
    policy, random = policy_of(name, "lossless"), np.random.default_rng(0)
    for number in range(30):
        frame = variant(name)["cases"][number % 3]
        wanted = 8 * int(random.integers(1, 8))
        right = [policy.model.specs["default"].ids.index(one) for one in frame["generated_ids"]]
        drawn = random.integers(0, 12, len(right))
        is_drawn = random.random(len(right)) < random.random()
        drafts = np.where(is_drawn, drawn, right).tolist()
        memory = SessionMemory(answer=tuple(drafts))
        options = ActOptions(want_trace=True, max_tokens=wanted)
        trace = policy.act([PolicyRequest(observe(frame), memory, options)])[0].chunk.trace
        assert trace is not None
        assert list(trace.tokens) == frame["generated_ids"][:wanted]
        assert trace.num_passes <= wanted
        assert {token for one in trace.passes for token in one.predictions} <= set(
            variant(name)["allowed_ids"]
        )


def test_the_command_answers_lines(tmp_path: Path) -> None:
    session = variant("untied")["sessions"][0]
    frames = session["frames"][:2]
    lines = [
        {
            "image": str(GOLDEN / one["images"][0]),
            "wrist_images": [str(GOLDEN / one["images"][1])],
            "instruction": session["instruction"],
            "session_id": "robot",
            "max_tokens": one["max_new_tokens"],
        }
        for one in frames
    ]
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--checkpoint", str(GOLDEN / "untied"), "--family", "vla0", "--dtype", "float32"]
    arguments += ["--decoding", "lossless", "--input", str(asked), "--output", str(answered)]
    assert act.main(arguments) == 0
    for line, frame in zip(answered.read_text().splitlines(), frames, strict=True):
        check(json.loads(line), frame)


def test_info_and_doctor_know_the_family() -> None:
    policy = policy_of("tied", "lossless")
    info = policy.info
    assert (info.policy, info.action_dim, info.chunk_length) == ("vla0", 7, 8)
    assert (info.num_pictures, info.max_tokens) == (2, 1024)
    assert (info.statistics_keys, info.image_chains) == (("default",), ("none",))
    policy.warm_up()
    found = examine(ModelOptions(checkpoint=str(GOLDEN / "tied")))
    assert any("vla0: 8 actions of 7" in one.text for one in found)


def test_the_folder_of_the_model_is_as_good_as_the_runs() -> None:
    family = open_model(ModelOptions(checkpoint=str(GOLDEN / "untied/model_last")))
    assert family.name == "vla0"


def test_flags_that_mean_nothing_to_vla0_are_refused() -> None:
    run = ModelOptions(checkpoint=str(GOLDEN / "tied"))
    for options, flag in (
        (replace(run, prompt="vicuna"), "--prompt"),
        (replace(run, num_pictures=2), "--pictures"),
        (replace(run, num_steps=8, family="vla0"), "--chunk"),
        (replace(run, quantization=Quantization.FP8), "fp8"),
    ):
        with pytest.raises(CheckpointError, match=flag):
            open_model(options)
    with pytest.raises(CheckpointError, match="random weights"):
        open_model(ModelOptions(random_weights="small", family="vla0"))


def test_near_numbers_stand_by_name_alone() -> None:
    policy = policy_of("tied", "lossless")
    assert policy.method.rule.is_exact
    assert "numbers" in policy.info.decoding_methods
    assert "deft" not in policy.info.decoding_methods  # it would relax digits
    session = variant("tied")["sessions"][0]
    found = answers(policy_of("tied", "numbers"), session["frames"], session["instruction"])
    for answered, frame in zip(found, session["frames"], strict=True):
        assert answered["passes"] * 2 < len(frame["generated_ids"]) or answered is found[0]


def test_a_request_says_how_many_rows_were_executed() -> None:
    """Where the last answer is moved by as many, what is drafted lines up."""
    policy = policy_of("untied", "lossless")
    frame = variant("untied")["cases"][0]
    first = policy.act([PolicyRequest(observe(frame))])[0]
    tokens = first.memory.answer
    rows = [" ".join(split) for split in _rows_of(policy, tokens)]
    passes = {}
    for moved in (1, 3):
        text = " ".join(rows[:1] * moved + rows[: 8 - moved])  # the world moved by so many rows
        ids = policy.model.specs["default"].ids
        named = ["0123456789 ".index(one) for one in text]
        memory = SessionMemory(answer=(*named, 11))
        assert len(ids) == 12
        for said in (None, 1, 3):
            options = ActOptions(want_trace=True, executed_steps=said)
            answer = policy.act([PolicyRequest(observe(frame), memory, options)])[0]
            assert answer.memory.answer == tokens
            assert answer.chunk.trace is not None
            passes[moved, said] = answer.chunk.trace.num_passes
    assert passes[1, None] == passes[1, 1] <= passes[1, 3]
    assert passes[3, 3] <= passes[3, 1]


def _rows_of(policy: VlaPolicy, tokens: Sequence[int]) -> list[list[str]]:
    words = "".join("0123456789 "[one] for one in tokens[:-1]).split(" ")
    return [words[first : first + 7] for first in range(0, 56, 7)]


def test_frames_that_it_cannot_look_at_are_refused() -> None:
    policy, frame = policy_of("tied", "lossless"), variant("tied")["cases"][0]
    image, wrist = cameras(frame)
    with pytest.raises(RequestError, match="wrist"):
        policy.check(Observation(image, "left"), ActOptions())
    with pytest.raises(RequestError, match="marks a picture"):
        policy.check(Observation(image, "<|image_pad|>", {"wrist": wrist}), ActOptions())


def test_bfloat16_and_int8_answer() -> None:
    for options in (
        ModelOptions(checkpoint=str(GOLDEN / "tied"), precision=Precision.BFLOAT16),
        ModelOptions(
            checkpoint=str(GOLDEN / "tied"),
            precision=Precision.FLOAT32,
            quantization=Quantization.INT8,
        ),
    ):
        policy = load_policy(options)
        request = PolicyRequest(
            observe(variant("tied")["cases"][0]), options=ActOptions(want_trace=True, max_tokens=8)
        )
        trace = policy.act([request])[0].chunk.trace
        assert trace is not None
        assert len(trace.tokens) == 8
