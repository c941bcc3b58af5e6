"""The family `ecot` against ECoT's own code: tokens, texts and actions, however it decodes."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from deft_core.reasoning import part_costs
from deft_core.types import ActOptions, Observation
from deft_policies.base import PolicyAnswer, PolicyRequest
from deft_policies.benchmark.audit import audit, describe
from deft_policies.benchmark.replay import ReplayFrame
from deft_policies.errors import CheckpointError, RequestError
from deft_policies.families.loading import load_policy, open_model
from deft_policies.families.options import ModelOptions
from deft_policies.families.policy import VlaPolicy
from deft_policies.memory import SessionMemory
from deft_policies.model.formats import Precision
from deft_server.__main__ import main as deft
from tests import golden, golden_ecot

Case = Mapping[str, Any]
WHOLE = golden_ecot.expected()
# Two of the pictures are not ours to publish.
CASES: list[Case] = [one for one in WHOLE["cases"] if (golden.GOLDEN / one["image"]).exists()]
SESSIONS: list[Case] = WHOLE["sessions"]
TOWER: list[Case] = golden_ecot.expected(golden_ecot.ONE_TOWER)["cases"]
METHODS = ("autoregressive", "lossless")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return golden_ecot.write(tmp_path_factory.mktemp("base") / "thinker")


@pytest.fixture(scope="module")
def tower(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("tower") / "thinker"
    return golden_ecot.write(where, golden_ecot.ONE_TOWER)


@lru_cache(maxsize=2)
def policy_of(folder: Path, is_guarded: bool = False) -> VlaPolicy:
    return load_policy(options_of(folder, is_guarded=is_guarded))


def options_of(folder: Path, **changes: Any) -> ModelOptions:
    plain = ModelOptions(
        checkpoint=str(folder), family="ecot", device="cpu", precision=Precision.FLOAT32
    )
    return replace(plain, **changes)


def request(case: Case, method: str, memory: SessionMemory | None = None) -> PolicyRequest:
    options = ActOptions(
        statistics_key=case.get("unnorm_key"),
        decoding=method,
        want_trace=True,
        want_reasoning=True,
        max_tokens=case["max_new_tokens"],
    )
    observation = Observation(golden_ecot.picture(case["image"]), case["instruction"])
    return PolicyRequest(observation, memory or SessionMemory(), options)


def check(answer: PolicyAnswer, case: Case) -> None:
    """All that ECoT's code says of a frame."""
    chunk = answer.chunk
    assert chunk.trace is not None
    assert list(chunk.trace.tokens) == case["generated_ids"]
    assert chunk.reasoning == case["text"]
    assert sum(chunk.trace.parts) == case["tokens"]
    if case["seven_action_tokens"]:
        assert answer.error is None
        assert chunk.actions.tolist() == [case["action_native"]]
    else:
        assert answer.error is not None
        assert answer.error.reasoning == case["text"]
        assert chunk.actions.shape == (0, 7)


@pytest.mark.parametrize(("method", "size"), [("autoregressive", 1), ("lossless", 4)])
def test_every_frame_is_answered_as_by_ecots_own_code(folder: Path, method: str, size: int) -> None:
    policy = policy_of(folder)
    for start in range(0, len(CASES), size):
        batch = CASES[start : start + size]
        answers = policy.act([request(case, method) for case in batch])
        for case, answer in zip(batch, answers, strict=True):
            check(answer, case)


@pytest.mark.parametrize(("method", "size"), [("autoregressive", 4), ("lossless", 1)])
def test_every_frame_of_a_checkpoint_of_one_tower_is_answered_as_by_ecots_own_code(
    tower: Path, method: str, size: int
) -> None:
    policy = policy_of(tower)
    for start in range(0, len(TOWER), size):
        batch = TOWER[start : start + size]
        for case, answer in zip(
            batch, policy.act([request(case, method) for case in batch]), strict=True
        ):
            check(answer, case)


@pytest.mark.parametrize("is_guarded", [False, True])
def test_frames_of_sessions_are_answered_as_if_each_was_the_first(
    folder: Path, is_guarded: bool
) -> None:
    """All sessions together, one of which derails; the unguarded ones with the widest drafts."""
    policy = policy_of(folder, is_guarded)
    policy.engine.planner.text_width = 32  # of guarded answers
    sessions = SESSIONS if is_guarded else SESSIONS[:1]
    memories, passes = [SessionMemory() for _ in sessions], list[int]()
    for number in range(8):
        frames = [session_frame(one, number) for one in sessions]
        asked = [
            request(one, "lossless", memory) for one, memory in zip(frames, memories, strict=True)
        ]
        answers = policy.act(asked)
        for frame, answer in zip(frames, answers, strict=True):
            check(answer, frame)
            assert answer.memory.answer == tuple(frame["generated_ids"])
            if number and answer.chunk.trace is not None:
                passes.append(answer.chunk.trace.num_passes)
        memories = [one.memory for one in answers]
    if not is_guarded:
        assert sum(passes) / len(passes) <= 17


def session_frame(session: Case, number: int) -> Case:
    """What is said of a session and of one of its frames."""
    return {**session, **session["frames"][number]}


@pytest.mark.promise
@pytest.mark.parametrize("method", METHODS)
def test_short_answers_of_different_lengths_are_decoded_together(folder: Path, method: str) -> None:
    batch = [one for one in CASES if one["tokens"] < 90][:4]
    answers = policy_of(folder).act([request(case, method) for case in batch])
    for case, answer in zip(batch, answers, strict=True):
        check(answer, case)


def test_texts_are_told_only_where_they_are_asked_for(folder: Path) -> None:
    case = next(one for one in CASES if one["tokens"] == 19)
    asked = request(case, "lossless")
    plain = replace(asked, options=replace(asked.options, want_trace=False, want_reasoning=False))
    (answer,) = policy_of(folder).act([plain])
    assert answer.chunk.reasoning is None
    assert answer.chunk.actions.tolist() == [case["action_native"]]


def test_the_tokens_of_a_text_are_counted_part_by_part(folder: Path) -> None:
    case = next(one for one in CASES if one["tokens"] == 70)
    (answer,) = policy_of(folder).act([request(case, "autoregressive")])
    trace, text = answer.chunk.trace, answer.chunk.reasoning
    assert trace is not None
    assert text is not None
    costs = part_costs(trace, text)
    assert [one.tag for one in costs] == ["TASK", "VISIBLE OBJECTS", "MOVE", "ACTION"]
    assert [one.passes for one in costs] == [one.tokens for one in costs]  # one by one
    assert sum(one.tokens for one in costs) == case["tokens"]
    assert costs[-1].tokens > 9  # the tag, a blank, seven action tokens and the stop token


@pytest.mark.parametrize("method", ["within-bins:guard=off", "near-top:guard=off"])
def test_relaxed_rules_leave_the_text_alone(folder: Path, method: str) -> None:
    policy, memory = policy_of(folder), SessionMemory()
    for number in range(2):
        frame = session_frame(SESSIONS[0], number)
        (answer,) = policy.act([request(frame, method, memory)])
        memory = answer.memory
        trace = answer.chunk.trace
        assert trace is not None
        relaxed = [
            token for token, own in zip(trace.tokens, trace.predicted, strict=True) if token != own
        ]
        assert all(one in policy.model.target.action_tokens for one in relaxed)
        words = frame["generated_ids"][:-8]
        assert list(trace.tokens[: len(words)]) == words


@pytest.mark.parametrize("wanted", [0, 1025])
def test_longer_answers_than_the_server_allows_are_refused(folder: Path, wanted: int) -> None:
    options = ActOptions(statistics_key="bridge_orig", max_tokens=wanted)
    observation = request(CASES[0], "lossless").observation
    with pytest.raises(RequestError, match=f"must be 1 to 1024 .*got {wanted}"):
        policy_of(folder).check(observation, options)


def test_what_does_not_fit_is_said_before_the_first_frame(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="2048 positions.*not 1800; give a smaller"):
        open_model(options_of(folder, max_tokens=1800))
    assert "up to 1024 tokens" in open_model(options_of(folder)).summary
    with pytest.raises(CheckpointError, match="--prompt, --max-tokens: openvla writes nothing"):
        open_model(options_of(folder, family="openvla", prompt="vicuna", max_tokens=9))
    with pytest.raises(CheckpointError, match="random weights have no words"):
        open_model(ModelOptions(random_weights="small", family="ecot"))
    copy = golden_ecot.write(tmp_path / "copy")
    tokenizer = copy / "tokenizer.json"
    tokenizer.write_text(tokenizer.read_text().replace('"</s>"', '"<end>"'))
    with pytest.raises(CheckpointError, match="has no piece '</s>'"):
        open_model(options_of(copy))


def test_a_prompt_that_leaves_no_room_is_refused(folder: Path) -> None:
    case = request(CASES[0], "lossless")
    long = replace(case.observation, instruction="lift the cup " * 400)
    with pytest.raises(RequestError, match="shorten the instruction"):
        policy_of(folder).check(long, case.options)


def test_names_tell_the_family_where_nobody_does(folder: Path, tmp_path: Path) -> None:
    for name, told in (("ecot-openvla-7b-bridge", "ecot"), ("secotine", "openvla")):
        (tmp_path / name).symlink_to(folder)
        summary = open_model(options_of(tmp_path / name, family=None)).summary
        assert summary.startswith(f"{told}: ")


def test_a_lora_fine_tune_thinks_aloud_with_its_own_weights(folder: Path, tmp_path: Path) -> None:
    """It is told by its own name, whatever the base is called."""
    tuned = tmp_path / "ecot-libero-r32"
    shutil.copytree(golden.GOLDEN / "lora" / "plain", tuned)
    merged = load_file(tuned / "merged.safetensors")
    (tuned / "merged.safetensors").unlink()
    settings = json.loads((tuned / "adapter_config.json").read_text())
    settings["base_model_name_or_path"] = str(folder)
    (tuned / "adapter_config.json").write_text(json.dumps(settings))
    assert open_model(options_of(tuned, family=None)).summary.startswith("ecot: ")
    policy = load_policy(options_of(tuned, family=None))
    base, plain = (load_file(one / "model.safetensors") for one in (folder, golden.TINY_OPENVLA))
    loaded = policy.model.network.named_tensors()
    for name, tensor in merged.items():
        torch.testing.assert_close(loaded[name], base[name] + tensor - plain[name])
    case = {**CASES[0], "max_new_tokens": 24}
    texts = [policy.act([request(case, method)])[0].chunk.reasoning for method in METHODS]
    assert texts[0] == texts[1]


def test_the_other_published_prompt_can_be_asked_for(folder: Path) -> None:
    policy = load_policy(options_of(folder, prompt="in-out", statistics_key="bridge_orig"))
    assert policy.info.details["prompt"] == "ecot-in-out"
    assert len(policy.model.encode("lift it")) < len(policy_of(folder).model.encode("lift it"))


def test_deft_act_answers_every_line_and_says_which_hold_no_action(
    folder: Path, tmp_path: Path
) -> None:
    chosen = [one for one in CASES if one["tokens"] in (19, 51, 67, 70)]
    lines = [
        {
            "image": str(golden.GOLDEN / case["image"]),
            "instruction": case["instruction"],
            "statistics_key": case["unnorm_key"],
            "max_tokens": case["max_new_tokens"],
            "session_id": "arm",
        }
        for case in chosen
    ]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--checkpoint", str(folder), "--dtype", "float32", "--family", "ecot"]
    files = ["--input", str(source), "--output", str(target)]
    assert deft(["act", *flags, "--decoding", "lossless", *files]) == 0
    told = [json.loads(line) for line in target.read_text().splitlines()]
    for line, case in zip(told, chosen, strict=True):
        assert line["tokens"] == case["generated_ids"]
        assert line["text"] == case["text"]
        if case["seven_action_tokens"]:
            assert line["action"] == case["action_native"]
            assert "error" not in line
        else:
            assert "action" not in line
            assert line["error"]
    assert sum("error" in line for line in told) == 2


def test_the_audit_lists_what_differs_in_a_text_to_its_end(folder: Path) -> None:
    case = next(one for one in CASES if one["tokens"] == 19)
    asked = request(case, "autoregressive")
    frame = ReplayFrame(asked.observation, "arm", case["unnorm_key"])
    policy = load_policy(options_of(folder))
    same = audit(policy_of(folder), policy, [frame], asked.options)
    assert (same.num_tokens, same.flips) == (19, ())
    with torch.no_grad():
        policy.model.network.decoder.head.weight[case["generated_ids"][0]] = 0.0
    report = audit(policy_of(folder), policy, [frame], asked.options)
    assert report.num_tokens == 19
    flip = report.flips[0]
    assert (flip.position, flip.reference) == (0, case["generated_ids"][0])
    told = describe(report)
    assert f"{flip.reference} -> {flip.audited}, {flip.words}, margin" in told
    assert "action range" not in told  # words lie outside the action range by nature
    said, other = flip.words.split(" -> ")
    assert said != other
