"""QwenFAST's and NORA's reference answers, of whole policies."""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyRequest, Verdict
from deft_policies.commands import act
from deft_policies.commands.act import Case, answer_cases
from deft_policies.decoding.clock import StageClock
from deft_policies.decoding.methods import find_method
from deft_policies.decoding.sequence import Sequence as Answer
from deft_policies.decoding.tree import DraftTree
from deft_policies.errors import CheckpointError, RequestError
from deft_policies.families.loading import examine, load_policy, open_model
from deft_policies.families.nora.family import NoraFamily
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.families.qwenfast.model import QwenFast, make_pictures, prompt_text
from deft_policies.families.vla0.model import RepetitionPenalty
from deft_policies.families.vla0.pictures import to_patches
from deft_policies.memory import SessionMemory
from deft_policies.model.formats import Precision, Quantization
from deft_policies.model.graphs import StepRunner
from tests.golden_qwenfast import GOLDEN, VARIANTS, cameras, frames, options_of, variant
from tests.golden_vla0 import digest

GRAMMARS = ("on", "off")
# Of a later frame, on average; plain decoding takes 18 to 21 of `libero`, 35 to 43 of `bridge`.
MOST_PASSES = {"libero": 16.0, "bridge": 31.0, "nora": 5.6, "nora_long": 14.0}


@cache
def policy_of(name: str, decoding: str, grammar: str) -> VlaPolicy:
    options = options_of(
        name, precision=Precision.FLOAT32, decoding=decoding, grammar=grammar, is_guarded=False
    )
    return load_policy(options)


def model_of(name: str) -> QwenFast:
    model = policy_of(name, "autoregressive", "off").model
    assert isinstance(model, QwenFast)
    return model


def answers(
    policy: VlaPolicy,
    some: Sequence[dict[str, Any]],
    instruction: str | None = None,
    batch: int = 1,
) -> list[dict[str, Any]]:
    """As `deft act` writes them; frames with an instruction in common are a session."""
    cases = [
        Case(
            one["instruction"] if instruction is None else instruction,
            str(GOLDEN / one["images"][0]),
            tuple(str(GOLDEN / name) for name in one["images"][1:]),
            statistics_key=one["statistics_key"],
            session_id=None if instruction is None else "session",
            max_tokens=one["max_new_tokens"],
        )
        for one in some
    ]
    return [json.loads(line) for line in answer_cases(policy, cases, batch)]


def check_actions(answered: dict[str, Any], actions: list[list[float]], name: str) -> None:
    exactness = 1e-6 if variant(name)["family"] == "qwenfast" else 1e-12
    assert np.shape(answered["actions"]) == np.shape(actions)
    np.testing.assert_allclose(answered["actions"], actions, rtol=0, atol=exactness)


def check(answered: dict[str, Any], frame: dict[str, Any], name: str, grammar: str) -> None:
    if grammar == "off":
        assert answered["tokens"] == frame["generated_ids"]
        assert answered["text"] == frame["text"]
        assert ("error" in answered) == (not frame["valid"])
        check_actions(answered, frame["actions"] if frame["valid"] else [], name)
        assert "intervention" not in answered
        assert answered["passes"] <= len(frame["generated_ids"])
        return
    wanted = frame if frame["valid"] else frame["masked"]
    assert answered["tokens"] == [*wanted["generated_ids"][:-1], variant(name)["end_ids"][0]]
    check_actions(answered, wanted["actions"], name)
    assert "error" not in answered
    assert answered["passes"] < len(answered["tokens"])  # the end costs none
    own = frame["generated_ids"][: len(answered["tokens"]) - 1]
    if answered["tokens"][: len(own)] != own:
        assert answered["intervention"] == "grammar"
    elif len(own) == len(answered["tokens"]) - 1:
        assert "intervention" not in answered


@pytest.mark.parametrize(
    ("name", "grammar"),
    [
        pytest.param("libero", "on", marks=pytest.mark.promise),
        pytest.param("nora", "on", marks=pytest.mark.promise),
        *product(VARIANTS, ["off"]),
        *product(["bridge", "nora_long"], ["on"]),
    ],
)
def test_single_frames_together_are_answered_as_the_original_does(name: str, grammar: str) -> None:
    cases = variant(name)["cases"]
    found = answers(policy_of(name, "lossless", grammar), cases, batch=4)
    for answered, frame in zip(found, cases, strict=True):
        check(answered, frame, name, grammar)


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("name", VARIANTS)
def test_sessions_are_answered_in_fewer_passes(name: str, grammar: str) -> None:
    passes = []
    for session in variant(name)["sessions"]:
        some = session["frames"]
        found = answers(policy_of(name, "lossless", grammar), some, session["instruction"])
        for answered, frame in zip(found, some, strict=True):
            check(answered, frame, name, grammar)
        passes += [one["passes"] for one in found[1:]]
    assert np.mean(passes) <= MOST_PASSES[name]


@pytest.mark.parametrize("grammar", GRAMMARS)
@pytest.mark.parametrize("name", ["libero", "nora"])
def test_plain_decoding_takes_a_pass_for_every_token_but_the_forced(
    name: str, grammar: str
) -> None:
    cases = variant(name)["cases"]
    found = answers(policy_of(name, "autoregressive", grammar), cases)
    for answered, frame in zip(found, cases, strict=True):
        check(answered, frame, name, grammar)
        assert answered["passes"] == len(answered["tokens"]) - (grammar == "on")


@pytest.mark.promise
@pytest.mark.parametrize("name", VARIANTS)
def test_prompts_and_pictures_are_the_originals(name: str) -> None:
    model = model_of(name)
    assert (
        prompt_text(model.files, variant(name)["cases"][0]["instruction"])
        == (variant(name)["prompt"])
    )
    for frame in frames(name):
        ids = np.array(model.encode(frame["instruction"]), np.int64)
        assert (len(ids), digest(ids)) == (frame["prompt_length"], frame["prompt_ids_sha256"])
        pictures = make_pictures(cameras(frame), model.files)
        assert [digest(one) for one in pictures] == frame["pictures_sha256"]
        patches = to_patches(torch.from_numpy(np.stack(pictures)))
        assert digest(patches.numpy()) == frame["pixel_values_sha256"]


def observe(frame: dict[str, Any]) -> Observation:
    image, *wrists = cameras(frame)
    return Observation(image, frame["instruction"], {f"wrist_{i}": w for i, w in enumerate(wrists)})


@pytest.mark.parametrize("name", VARIANTS)
def test_first_logits_features_and_what_the_penalty_makes_of_them(name: str) -> None:
    model, about = model_of(name), variant(name)
    for expected in about["first_step"]:
        frame = about["cases"][expected["case"]]
        with torch.inference_mode():
            (prompt,) = model.see([observe(frame)], StageClock(torch.device("cpu")))
            (logits,) = model.target.logits_along(prompt, 1)
            found = [logits]
            if prompt.grammar is not None:
                answer = Answer(find_method("autoregressive"), model.spec("any"))
                root = DraftTree.of_committed([prompt.last_token])
                found.append(prompt.grammar.adjust(logits[None], answer, root)[0])
        for one, key in zip((found[0], found[-1]), ("logits", "after_penalty"), strict=True):
            ours = one[expected["ids"]]
            torch.testing.assert_close(ours, torch.tensor(expected[key]), rtol=0, atol=1e-4)
    details = about["details"]
    with torch.inference_mode():
        (prompt,) = model.see([observe(about["cases"][0])], StageClock(torch.device("cpu")))
    pad = model.files.tokenizer.token_to_id("<|image_pad|>")
    slots = [slot for slot, one in enumerate(details["prompt_ids"]) if one == pad]
    for place, features in details["image_features"].items():
        ours = prompt.embeds[slots[int(place)]]
        torch.testing.assert_close(ours, torch.tensor(features), rtol=0, atol=1e-4)
    positions = np.array(details["position_ids"]).reshape(3, -1)
    table = model.network.decoder.rotary
    assert table._positions[:, : positions.shape[1]].tolist() == positions.tolist()  # type: ignore[union-attr]
    assert int(positions.max()) + 1 - positions.shape[1] == details["rope_delta"]


@pytest.mark.parametrize("name", VARIANTS)
def test_no_drafts_change_an_answer(name: str) -> None:
    random, about = np.random.default_rng(0), variant(name)
    size = model_of(name).network.config.llm.vocabulary
    for number in range(20):
        frame, grammar = about["cases"][number % 10], GRAMMARS[number % 2]
        wanted = frame if grammar == "off" or frame["valid"] else frame["masked"]
        right = wanted["generated_ids"]
        drawn = random.integers(0, size, len(right))
        is_drawn = random.random(len(right)) < random.random()
        memory = SessionMemory(answer=tuple(np.where(is_drawn, drawn, right).tolist()))
        options = ActOptions(statistics_key=frame["statistics_key"], want_trace=True)
        if grammar == "off":
            options = replace(options, max_tokens=frame["max_new_tokens"])
        request = PolicyRequest(observe(frame), memory, options)
        trace = policy_of(name, "lossless", grammar).act([request])[0].chunk.trace
        assert trace is not None
        end = [] if grammar == "off" else [about["end_ids"][0]]
        assert list(trace.tokens) == right[: len(right) - len(end)] + end


@pytest.mark.parametrize("grammar", GRAMMARS)
def test_passes_of_fixed_shapes_give_the_same_answers(grammar: str) -> None:
    options = options_of("nora_long", grammar=grammar, is_guarded=False, largest_batch=2)
    family = open_model(options)
    assert isinstance(family, NoraFamily)
    runner = StepRunner(reserve=family.reserve)
    policy = VlaPolicy(family.load(torch.device("cpu"), torch.float32, runner), options)
    assert policy.engine.captured is not None
    cases, session = variant("nora_long")["cases"][:6], variant("nora_long")["sessions"][0]
    found = answers(policy, cases, batch=2)
    found += answers(policy, session["frames"][:2], session["instruction"])
    for answered, frame in zip(found, [*cases, *session["frames"][:2]], strict=True):
        check(answered, frame, "nora_long", grammar)


def test_a_changed_answer_says_what_the_model_would_have_written() -> None:
    frame = next(one for one in variant("libero")["cases"] if "no action" in one["why"])
    options = ActOptions(want_trace=True)
    chunk = (
        policy_of("libero", "lossless", "on")
        .act([PolicyRequest(observe(frame), options=options)])[0]
        .chunk
    )
    trace, own = chunk.trace, frame["generated_ids"]
    assert chunk.intervention is not None
    assert chunk.intervention.value == "grammar"
    assert trace is not None
    place = next(i for i, token in enumerate(trace.tokens) if token != own[i])
    assert trace.predicted[: place + 1] == tuple(own[: place + 1])
    assert trace.relaxed_share > 0


def test_the_command_answers_lines(tmp_path: Path) -> None:
    session = variant("nora_long")["sessions"][0]
    some = session["frames"][:2]
    lines = [
        {
            "image": str(GOLDEN / one["images"][0]),
            "instruction": session["instruction"],
            "session_id": "robot",
            "statistics_key": one["statistics_key"],
        }
        for one in some
    ]
    asked, answered = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked.write_text("\n".join(map(json.dumps, lines)))
    arguments = ["--family", "nora", "--checkpoint", str(GOLDEN / "nora_long"), "--chunk", "5"]
    arguments += ["--dtype", "float32", "--decoding", "lossless", "--grammar", "off"]
    assert act.main([*arguments, "--input", str(asked), "--output", str(answered)]) == 0
    for line, frame in zip(answered.read_text().splitlines(), some, strict=True):
        check(json.loads(line), frame, "nora_long", "off")


@pytest.mark.parametrize("name", VARIANTS)
def test_files_say_what_they_are_to_info_and_doctor(name: str) -> None:
    about = variant(name)
    info = policy_of(name, "lossless", "on").info
    assert (info.policy, info.action_dim) == (about["family"], 7)
    assert (info.chunk_length, info.num_pictures) == (about["horizon"], about["cameras"])
    assert info.image_height == 224
    assert "deft" not in info.decoding_methods  # nothing of a frequency is near
    found = examine(options_of(name))
    assert all(one.verdict is not Verdict.BAD for one in found)
    texts = [one.text for one in found]
    assert any(f"{about['horizon']} actions of 7, as FAST codes" in one for one in texts)
    assert any(f"{about['horizon']} x 7 = {7 * about['horizon']} coef" in one for one in texts)
    policy_of(name, "lossless", "on").warm_up()


def test_doctor_names_the_traps_of_nora_checkpoints() -> None:
    def doubts(options: ModelOptions) -> str:
        return " ".join(one.text for one in examine(options) if one.verdict is Verdict.DOUBTFUL)

    assert "NORA-long and its fine-tunes need --chunk 5" in doubts(options_of("nora"))
    assert "--chunk 5" not in doubts(options_of("nora", num_steps=1))
    assert "stops after 20 tokens" in doubts(options_of("nora"))
    assert "names no repetition_penalty" in doubts(options_of("nora_long"))
    assert "repetition_penalty" not in doubts(options_of("bridge"))


def test_a_run_is_found_from_the_folders_around_it() -> None:
    run = GOLDEN / variant("libero")["checkpoint"]
    for folder in (run, run / "checkpoints", GOLDEN / "qwenfast_libero"):
        family = open_model(ModelOptions(checkpoint=str(folder)))
        assert family.name == "qwenfast"
        assert [one.name for one in family.weight_folders] == ["steps_30000_pytorch_model.pt"]


def test_flags_that_mean_nothing_to_qwenfast_and_nora_are_refused() -> None:
    for options, flag in (
        (options_of("libero", prompt="vicuna"), "--prompt"),
        (options_of("nora", num_pictures=2), "--pictures"),
        (options_of("libero", num_steps=5), "--chunk 5"),
        (options_of("nora", quantization=Quantization.FP8), "fp8"),
        (
            replace(options_of("nora"), checkpoint=str(GOLDEN / "nora_long"), family="vla0"),
            "dataset",
        ),
        (ModelOptions(checkpoint=str(GOLDEN.parent / "vla0/tied"), grammar="off"), "--grammar"),
        (ModelOptions(checkpoint=str(GOLDEN.parent / "vla0/tied"), family="nora"), "FAST|action"),
    ):
        with pytest.raises(CheckpointError, match=flag):
            open_model(options)
    for family in ("nora", "qwenfast"):
        with pytest.raises(CheckpointError, match="random weights"):
            open_model(ModelOptions(random_weights="small", family=family))


def test_instructions_that_write_pictures_or_actions_are_refused() -> None:
    policy, frame = policy_of("nora", "lossless", "on"), variant("nora")["cases"][0]
    options = ActOptions(statistics_key=frame["statistics_key"])
    for text in ("put <|image_pad|> there", "do <robot_action_5>"):
        with pytest.raises(RequestError, match="is a part of an action|marks a picture"):
            policy.check(replace(observe(frame), instruction=text), options)


def test_a_limit_cuts_no_answer_that_has_a_grammar() -> None:
    frame = variant("nora")["cases"][0]
    options = ActOptions(statistics_key=frame["statistics_key"], max_tokens=2)
    for grammar in GRAMMARS:
        request = PolicyRequest(observe(frame), options=options)
        answer = policy_of("nora", "lossless", grammar).act([request])[0]
        assert (answer.error is None) == (grammar == "on")
        family = open_model(options_of("nora", grammar=grammar, max_tokens=2))
        assert isinstance(family, NoraFamily)
        assert family.longest_answer == (15 if grammar == "on" else 2)


def test_nora_in_int8_answers() -> None:
    options = options_of("nora", precision=Precision.FLOAT32, quantization=Quantization.INT8)
    frame = variant("nora")["cases"][0]
    options_of_frame = ActOptions(statistics_key=frame["statistics_key"])
    request = PolicyRequest(observe(frame), options=options_of_frame)
    assert load_policy(options).act([request])[0].chunk.actions.shape == (1, 7)


def test_a_penalty_is_that_of_the_prompt_and_of_each_nodes_own_path() -> None:
    tree = DraftTree([1, 3, 4, 5], [-1, 0, 1, 0], [""] * 4, is_chain=False)
    answer = Answer(find_method("autoregressive"), model_of("nora").spec("any"))
    logits = torch.randn(4, 12, generator=torch.Generator().manual_seed(0))
    found = RepetitionPenalty(1.05, frozenset({1, 7})).adjust(logits, answer, tree)
    for node, came in enumerate(({1, 7}, {1, 7, 3}, {1, 7, 3, 4}, {1, 7, 5})):
        for token in range(12):
            one = float(logits[node, token])
            wanted = one if token not in came else one / 1.05 if one > 0 else one * 1.05
            assert float(found[node, token]) == pytest.approx(wanted, rel=1e-6)
