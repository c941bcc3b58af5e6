"""pi0-FAST's reference answers, of whole policies: LeRobot's tokens, texts, actions, errors."""

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deft_policies.commands.act import answer_cases, main, read_cases
from deft_policies.decoding.clock import StageClock
from deft_policies.families.loading import load_policy
from deft_policies.families.pi0fast.model import Pi0Fast
from deft_policies.families.pi0fast.pictures import to_pixels
from deft_policies.families.policy import VlaPolicy
from tests.golden_pi0fast import (
    GOLDEN,
    VARIANTS,
    case,
    frames,
    observation,
    options_of,
    picture,
    variant,
)
from tests.golden_vla0 import digest

METHODS = ("autoregressive", "lossless")
# Of a later frame, on average, with the grammar; plain decoding takes 26 of `quantile`, 17 of
# `meanstd`.
MOST_PASSES = {"quantile": 18.0, "meanstd": 8.0}


@cache
def policy_of(name: str, decoding: str, grammar: str) -> VlaPolicy:
    return load_policy(options_of(name, decoding=decoding, grammar=grammar, is_guarded=False))


def model_of(name: str, grammar: str = "off") -> Pi0Fast:
    model = policy_of(name, "autoregressive", grammar).model
    assert isinstance(model, Pi0Fast)
    return model


def line_of(frame: dict[str, Any], by_name: bool, session: str | None = None) -> str:
    """As a file of `deft act` has it: cameras by name, or the frame and the wrist cameras."""
    paths = {name: str(GOLDEN / path) for name, path in frame["images"].items()}
    first, *others = paths.values()
    pictures: dict[str, Any] = {"image": first, "wrist_images": others}
    line = {"instruction": frame["instruction"], "state": frame["state"], "session_id": session}
    given = {"cameras": paths} if by_name else pictures
    return json.dumps({**line, **given, "max_tokens": frame["max_new_tokens"]})


def answers(
    policy: VlaPolicy, lines: Sequence[str], folder: Path, batch: int = 1
) -> list[dict[str, Any]]:
    path = folder / "lines.jsonl"
    path.write_text("\n".join(lines))
    return [json.loads(line) for line in answer_cases(policy, read_cases(path), batch)]


def check(answered: dict[str, Any], frame: dict[str, Any]) -> None:
    assert answered["tokens"] == frame["generated_ids"]
    assert answered["text"] == frame["answer_text"]
    assert ("error" in answered) == (not frame["valid"])
    assert "intervention" not in answered
    if not frame["valid"]:
        assert answered["actions"] == []
        return
    wanted = np.float32(frame["actions"])
    found = np.float32(answered["actions"])
    assert np.abs(found - wanted).max() <= 2e-6 * np.abs(wanted).max()


@pytest.mark.promise
@pytest.mark.parametrize("decoding", METHODS)
@pytest.mark.parametrize("name", VARIANTS)
def test_single_frames_are_answered_as_published(name: str, decoding: str, tmp_path: Path) -> None:
    """Without the grammar: what is malformed is an error, with its tokens and its text."""
    cases = variant(name)["cases"]
    lines = [line_of(one, by_name=bool(index % 2)) for index, one in enumerate(cases)]
    found = answers(policy_of(name, decoding, "off"), lines, tmp_path, batch=3)
    for answered, frame in zip(found, cases, strict=True):
        check(answered, frame)


@pytest.mark.parametrize("grammar", ["on", "off"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_session_is_answered_as_its_frames_are(name: str, grammar: str, tmp_path: Path) -> None:
    (session,) = variant(name)["sessions"]
    some = [{**one, "instruction": session["instruction"]} for one in session["frames"]]
    lines = [line_of(one, by_name=True, session="one") for one in some]
    found = answers(policy_of(name, "lossless", grammar), lines, tmp_path)
    for answered, frame in zip(found, some, strict=True):
        check(answered, frame)
    later = [one["passes"] for one in found[1:]]
    if grammar == "on":
        assert sum(later) / len(later) <= MOST_PASSES[name]


@pytest.mark.parametrize("decoding", METHODS)
@pytest.mark.parametrize("name", VARIANTS)
def test_with_the_grammar_every_answer_is_an_action_and_says_where_it_was_made_one(
    name: str, decoding: str, tmp_path: Path
) -> None:
    """Well-formed answers are unchanged, and their beginning and end cost no pass."""
    cases = variant(name)["cases"]
    lines = [line_of(one, by_name=True) for one in cases]
    found = answers(policy_of(name, decoding, "on"), lines, tmp_path)
    unended = [one for one in cases if one["max_new_tokens"] < 256]  # nothing is cut off
    for answered, frame in zip(found, cases, strict=True):
        if frame["valid"]:
            check(answered, frame)
            assert answered["passes"] <= len(frame["generated_ids"]) - 4
            continue
        assert "error" not in answered
        assert np.shape(answered["actions"]) == (variant(name)["horizon"], variant(name)["dim"])
        # Behind the last coefficient the model is not asked: `meanstd` 24 would have gone on.
        is_asked = frame not in unended and frame["number"] != 24
        assert ("intervention" in answered) == is_asked, frame["number"]


@pytest.mark.parametrize("grammar", ["on", "off"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_lerobot(name: str, grammar: str) -> None:
    """Some mistakes change no token of these answers: the second `<bos>`, a draft that is seen."""
    model = model_of(name, grammar)
    columns = {token: column for column, token in enumerate(model.spec("default").ids)}
    for frame in [one for one in frames(name) if one["valid"] or grammar == "off"]:
        (prompt,) = model.see([observation(frame)], StageClock(model.device))
        assert prompt.length == prompt.two_way == frame["prefix_rows"]
        ids = frame["generated_ids"][:60]
        given = [columns[one] for one in ids] if columns else ids
        logits = model.target.logits_along(prompt, len(given), given)
        top = [float(one.max()) for one in logits]
        np.testing.assert_allclose(top, frame["top_logits"], atol=1e-3, rtol=0)
    if grammar == "off":
        for first in variant(name)["first_step"]:
            shown = observation(case(name, first["case"]))
            (prompt,) = model.see([shown], StageClock(model.device))
            (found,) = model.target.logits_along(prompt, 1)
            np.testing.assert_allclose(found[first["ids"]], first["logits"], atol=1e-3, rtol=0)


@pytest.mark.promise
@pytest.mark.parametrize("name", VARIANTS)
def test_pictures_and_prompts_are_lerobots_to_the_last_bit(name: str) -> None:
    model = model_of(name)
    for frame in frames(name):
        for camera, path in frame["images"].items():
            pixels = to_pixels(picture(path))
            assert digest(pixels.numpy()) == frame["tower_sha256"][camera]
        assert model._ids(observation(frame)) == [*frame["prompt_ids"], variant(name)["bos_id"]]


def test_a_prompt_of_lerobot_0_4_has_a_padded_state() -> None:
    model = load_policy(options_of("quantile", pads_state=True)).model
    assert isinstance(model, Pi0Fast)
    wanted = model._words.tokenizer.encode(
        variant("quantile")["prompt_lerobot_0_4"], add_special_tokens=False
    ).ids
    assert model._ids(observation(case("quantile", 0)))[1:-1] == wanted


def test_the_command_writes_a_line_for_each_frame(tmp_path: Path) -> None:
    frame = case("meanstd", 14)
    (tmp_path / "in.jsonl").write_text(line_of(frame, by_name=True))
    command = ["--family", "pi0fast", "--checkpoint", str(GOLDEN / "meanstd"), "--dtype", "float32"]
    more = ["--decoding", "lossless", "--grammar", "off", "--chunk", "16"]
    files = ["--input", str(tmp_path / "in.jsonl"), "--output", str(tmp_path / "out.jsonl")]
    assert main([*command, *more, *files]) == 0
    check(json.loads((tmp_path / "out.jsonl").read_text()), frame)
